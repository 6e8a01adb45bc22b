"""The embedded model over two processes: the text of one, Stop, errors, and ranks that end."""

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.service.preferences import Preferences
from app.service.session import Session
from engine.engine import Request, Started
from engine.errors import ModelError
from engine.hsd.profile import Profile
from engine.local import Local
from engine.methods import METHODS
from engine.remote import Remote
from engine.settings import Drafting, Generation, Runtime, Sampling
from engine.types import Message, Prefill, Step
from storage.database import Database
from tests.conftest import EMBEDDED
from tests.support.inside import OWNER, soon
from tests.support.lossless import knowing, made_up
from tests.support.tiny_hybrids import save_hybrid

pytestmark = pytest.mark.model
SMALL = EMBEDDED.with_name("small")
TWO = Runtime(dtype="float32", threads=1, tensor_parallel=2)
CHOSEN = Preferences(Generation(Sampling(0.7, seed=3), max_tokens=24), fresh_seed=False)
QUESTIONS = "Why is the sky blue?", "And at night?"


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Database() as db:
        engine = Remote(partial(Local))
        found = Session(engine, db)
        list(found.models.start(str(EMBEDDED), TWO))
        assert engine.state.info.ranks == 2 and engine.state.info.can_tree
        yield found
        engine.close()


@pytest.fixture(scope="module")
def profile(session: Session) -> Profile:
    """Of both draft models, which rank 0 has to itself."""
    drafts = [(name, str(EMBEDDED.with_name(name))) for name in ("small", "mid")]
    list(session.engine.load_drafts(drafts))
    return made_up(["small", "mid", "target"])


def ranks(session: Session) -> list[psutil.Process]:
    """The processes beside the engine's that compute its model."""
    assert isinstance(session.engine, Remote)
    children = psutil.Process(session.engine.process.pid).children(recursive=True)
    return [child for child in children if "engine.backends.follower" in child.cmdline()]


def ready(session: Session) -> bool:
    return session.engine.state.is_loaded and session.models.loading is None


def run(session: Session, request: Request) -> list[Any]:
    return list(session.engine.generate(request))


def said(events: list[Any]) -> list[int]:
    steps = [event for event in events if isinstance(event, Step)]
    return [token.id for step in steps for token in step.tokens]


@pytest.fixture(scope="module")
def plain(embedded: Any) -> Callable[[tuple[int, ...], Generation], list[int]]:
    """What one process says by plain decoding."""
    from engine.decode import decode

    @cache
    def found(prompt: tuple[int, ...], generation: Generation) -> list[int]:
        return said(list(decode(embedded, prompt, (), generation, Drafting())))

    return found


@pytest.mark.soak
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_method_says_in_two_turns_what_one_process_says(
    session: Session, profile: Profile, plain: Any, temperature: float
) -> None:
    generation = Generation(Sampling(temperature, seed=5), max_tokens=12)
    kept = reused = 0
    for method in METHODS.values():
        messages: list[Message] = []
        for question in QUESTIONS:
            messages.append(Message("user", question))
            request = Request(
                tuple(messages), (), generation, method, profile, conversation=method.name
            )
            events = run(session, request)
            (started,) = [event for event in events if isinstance(event, Started)]
            assert said(events) == plain(started.prompt, generation) != [], method.name
            (text,) = session.engine.texts([said(events)])
            messages.append(Message("assistant", text))
            kept += sum(len(event.tokens) > 1 for event in events if isinstance(event, Step))
            reused = max(reused, *(e.reused for e in events if isinstance(e, Prefill)))
    assert kept > 10 and reused > 10, "drafts were kept, and second turns found their cache"


def test_ranks_of_one_machine_listen_to_it_alone(
    session: Session,
) -> None:
    assert isinstance(session.engine, Remote)
    every = [psutil.Process(session.engine.process.pid), *ranks(session)]
    listening = [
        {c.laddr.ip for c in each.net_connections() if c.status == psutil.CONN_LISTEN}
        for each in every
    ]
    assert listening == [{"127.0.0.1"}] * 2


def test_an_answer_that_is_stopped_leaves_the_ranks_in_step(session: Session, plain: Any) -> None:
    generation = Generation(Sampling(0.7, seed=1), max_tokens=60)
    for question, stopped in (("Tell a story.", True), (QUESTIONS[0], False)):
        asked = Message("user", question)
        request = Request((asked,), (), generation, METHODS["auto"], conversation="stopped")
        stream, events = session.engine.generate(request), list[Any]()
        for event in stream:
            events.append(event)
            if stopped and isinstance(event, Step):
                stream.stop()
        (started,) = [event for event in events if isinstance(event, Started)]
        truth = plain(started.prompt, generation)
        assert said(events) == (truth[: len(said(events))] if stopped else truth)
    assert len(truth) > 5


@pytest.mark.soak
def test_a_rank_that_ends_is_told_and_its_model_comes_back(
    session: Session,
) -> None:
    conversation = session.chat.say(OWNER, None, QUESTIONS[0])
    first = session.generations.start(OWNER, conversation, CHOSEN)
    assert soon(lambda: first.over) and not first.error
    assert first.update is not None
    (follower,) = ranks(session)
    assert isinstance(session.engine, Remote)
    before = session.engine.process.pid
    answer = session.generations.start(
        OWNER, session.chat.say(OWNER, conversation, "Tell a story."), CHOSEN
    )
    assert soon(lambda: answer.tokens >= 2 or answer.over)
    follower.send_signal(signal.SIGKILL)
    assert soon(lambda: answer.over)
    assert any(soon(lambda: ready(session)) for _ in range(15)), "a model is back"
    assert session.engine.process.pid != before
    told = " ".join([answer.error, *session.notices.take(OWNER)])
    assert "Rank 1 of the 2 that compute the model ended (SIGKILL)." in told
    (fresh,) = ranks(session)
    assert fresh.pid != follower.pid and not follower.is_running()
    again = session.generations.start(OWNER, session.chat.say(OWNER, None, QUESTIONS[0]), CHOSEN)
    assert soon(lambda: again.over) and not again.error
    assert again.update is not None and again.update.text == first.update.text


def test_the_engines_end_is_that_of_its_ranks(session: Session) -> None:
    (follower,) = ranks(session)
    session.engine.close()
    assert soon(lambda: not follower.is_running())


# in this process


@pytest.fixture
def hybrid(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """A random model whose layers have attention or a state, in one process and over two."""
    from engine.models.loaders import load

    folder = str(save_hybrid("qwen3.5", tmp_path))
    one, two = load(folder, TWO.unsplit), load(folder, TWO)
    yield one, two
    two.ranks.close()  # type: ignore[attr-defined]


@pytest.mark.soak
def test_errors_and_stops_within_the_forwards_of_a_hybrid(hybrid: tuple[Any, Any]) -> None:
    import torch

    from engine.backends.parallel import splits
    from engine.decode import decode

    def answer(backend: Any, drafts: bool = False) -> list[int]:
        """Drafted for with the truth and errors beside it."""
        drafters = [knowing([*prompt, *truth[:6], 0, *truth[7:]])] if drafts else []
        events = list(decode(backend.open(), prompt, drafters, generation, Drafting()))
        assert any(len(e.tokens) > 3 for e in events if isinstance(e, Step)) is drafts
        return said(events)

    one, two = hybrid
    assert two.info.ranks == 2 and two.info.leaves == 1 and splits(two.model)
    assert not splits(one.model) and two.info.memory_bytes < 0.6 * one.info.memory_bytes
    generation = Generation(Sampling(0.7, seed=2), max_tokens=24)
    prompt, truth = [7 * i % 1000 + 20 for i in range(1, 300)], list[int]()
    truth = answer(one)
    assert answer(two) == answer(two, drafts=True) == truth
    with pytest.raises(ModelError, match="split over 2 processes, and this needs it in one"):
        two.model.generate(torch.tensor([prompt]), max_new_tokens=2)
    # Stopped between two layers of the forward that reads the prompt.
    asked = count()
    found = two.prefill(prompt, lambda: next(asked) == 1)
    assert not found.complete and next(asked) == 2
    assert answer(two) == truth
    # An error of all ranks: more rows than the cache may have.
    many = [1] * (two.info.context_length + 200)
    two.prefill(many[:10], lambda: False)
    with pytest.raises(RuntimeError, match="expanded size"):
        two.forward(many, range(len(many)))
    assert answer(two) == truth
    # An error of rank 0 alone: nothing is left to go on with.
    (follower,) = two.ranks.processes.values()

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory is left")

    two.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ModelError, match="Rank 0 of 2 failed: no memory is left"):
        answer(two)
    with pytest.raises(ModelError, match="Rank 0 of 2 failed: no memory is left"):
        answer(two)
    assert follower.wait(20) != 0


@pytest.mark.parametrize(("config", "size", "why"), [
    ({}, 3, "its 4 attention heads cannot be shared out evenly"),
    ({"num_key_value_heads": 1}, 2, "its 1 key heads cannot be shared out evenly"),
    ({"model_type": "gpt2"}, 2, "transformers does not say how to split gpt2 models"),
])  # fmt: skip
def test_what_cannot_be_split_is_refused_before_a_process_is_started(
    config: dict[str, Any], size: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.models import load_split

    values = json.loads((EMBEDDED / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | config))
    monkeypatch.setattr(load_split, "Ranks", None)
    with pytest.raises(ModelError, match=why):
        load_split.load_split(str(tmp_path), replace(TWO, tensor_parallel=size))


def test_without_the_library_that_splits_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.models import load_split

    monkeypatch.setattr(load_split, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="accelerate, which is not installed"):
        load_split.load_split(str(SMALL), TWO)
