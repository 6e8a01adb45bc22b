"""The engine process killed at any moment: the app lives, what was shown is kept, the next message
is answered."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from app.service.answering import Answer, Update
from app.service.preferences import Preferences
from app.service.session import Session
from engine.backends.base import Backend, Filled, LogitScores
from engine.engine import Load
from engine.errors import EngineDied, StrataError
from engine.local import Local
from engine.models.loaders import ModelLoaders
from engine.models.memory import Need
from engine.remote import Remote
from engine.settings import Generation, Runtime, Sampling
from engine.streams import Stream
from engine.tree import Tree
from storage.database import Database
from tests.support.crowd import Answer as Told
from tests.support.crowd import Wish, alone, wishes
from tests.support.inside import OWNER, soon, updates_of
from tests.support.mortal import mortals
from tests.support.toy import ToyBackend

MOMENTS = {"loading": 12, "prompt": 12, "answer": 14, "learning": 12}
CHOSEN = Preferences(Generation(Sampling(0.8, seed=3), max_tokens=60), fresh_seed=False)


class Slow(ToyBackend):
    """A toy that takes its time over a prompt and over each forward."""

    def prefill(self, tokens: list[int], cancelled: Callable[[], bool]) -> Filled:  # type: ignore[override]
        time.sleep(0.02)
        return super().prefill(tokens, cancelled)

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        time.sleep(0.002)
        return super().score(tree, sampling)


def toy(source: str, runtime: Runtime) -> Backend:
    time.sleep(0.02)
    return Slow(name=Path(source).name)


def anywhere(source: str, runtime: Runtime) -> str:
    return "cpu"


def little(source: str, runtime: Runtime) -> Need:
    return Need(1, 1, 1)


def plenty(device: str) -> int:
    return 1 << 30


def here(source: str) -> bool:
    return True


MODEL_LOADERS = ModelLoaders(load=toy, need=little, device=anywhere, free=plenty, present=here)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patched, Database() as db:
        # That it gives up after three ends in a row is tested in tests/service/test_revival.py.
        patched.setattr("app.service.revival.WINDOW", 0.0)
        patched.setattr("engine.drafting.costs.SECONDS", 0.0)
        engine = Remote(partial(Local, loaders=MODEL_LOADERS))
        found = Session(engine, db, loaders=MODEL_LOADERS)
        list(found.models.start("/toys/one"))
        yield found
        engine.close()


def kill(session: Session) -> None:
    """Kill the process, and wait until another one has taken its place."""
    assert isinstance(session.engine, Remote)
    killed = session.engine.process.pid
    os.kill(killed, signal.SIGKILL)
    assert soon(lambda: session.engine.process.pid != killed)  # type: ignore[attr-defined]


def ready(session: Session) -> bool:
    """Whether a model is there and nobody loads another one."""
    return session.engine.state.is_loaded and session.models.loading is None


def ask(session: Session) -> Answer:
    conversation = session.chat.say(OWNER, None, "hello there " * 20)
    return session.generations.start(OWNER, conversation, CHOSEN)


def stored(session: Session, answer: Answer) -> str:
    messages = session.chat.conversations(OWNER).messages(answer.conversation)
    return messages[1].content if len(messages) > 1 else ""


def shown_when_killed(session: Session, answer: Answer, tokens: int) -> str:
    """What a page has been told by the time that the process is killed."""
    assert soon(lambda: answer.tokens >= tokens or answer.over)
    shown = answer.update.text if answer.update else ""
    kill(session)
    return shown


def load(session: Session, name: str) -> None:
    """Load another model; that it may fail is the point."""
    with suppress(StrataError):
        list(session.models.load(f"/toys/{name}"))


@pytest.mark.soak(stay=1)
@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("what", "number"), [(what, n) for what, most in MOMENTS.items() for n in range(most)]
)
def test_killed_at_any_moment(session: Session, what: str, number: int) -> None:
    assert soon(lambda: ready(session))
    random = Random(f"{what} {number}")
    if what == "loading":
        loading = Thread(target=load, args=(session, f"other {number}"))
        loading.start()
        time.sleep(random.uniform(0.0, 0.15))
        kill(session)
        loading.join(60)
        assert not loading.is_alive()
    else:
        answer = ask(session)
        if what == "prompt":
            time.sleep(random.uniform(0.0, 0.03))
        wanted = {"prompt": 0, "answer": random.randrange(1, 50), "learning": 60}[what]
        shown = shown_when_killed(session, answer, wanted)
        assert soon(lambda: answer.over), "it ends"
        assert stored(session, answer).startswith(shown.removesuffix("\ufffd"))
    assert soon(lambda: ready(session)), "a model is back"
    again = ask(session)
    assert soon(lambda: again.over) and not again.error
    assert again.tokens == 60 and stored(session, again) == again.update.text  # type: ignore[union-attr]


@pytest.mark.soak
def test_an_answer_that_a_kill_cut_goes_on_to_the_token(session: Session) -> None:
    assert soon(lambda: ready(session))
    session.notices.take(OWNER)
    plain = replace(CHOSEN, method="plain")
    conversation = session.chat.say(OWNER, None, "hello there")
    answer = updates_of(session, OWNER, conversation, plain)
    next(answer)
    kill(session)
    with pytest.raises(EngineDied, match="SIGKILL"):
        list(answer)
    cut = session.chat.conversations(OWNER).messages(conversation)[1]
    assert soon(lambda: ready(session))
    assert "one is being loaded again" in session.notices.take(OWNER)[0]
    left = replace(plain.generation, max_tokens=60 - len(cut.pieces or ()))
    session.chat.continue_answer(OWNER, conversation)
    *_, whole = updates_of(session, OWNER, conversation, replace(plain, generation=left))
    session.chat.again(OWNER, conversation)
    *_, last = updates_of(session, OWNER, conversation, plain)
    assert isinstance(whole, Update) and isinstance(last, Update)
    assert whole.text == last.text and whole.tokens == last.tokens == 60


# several answers at once


@pytest.fixture(scope="module")
def engine() -> Iterator[Remote]:
    found = Remote(mortals)
    yield found
    found.close()


def read_all(engine: Remote, answers: Sequence[Told], stops: bool = False) -> list[Told]:
    """The answers that the end of the process has cut. The first is stopped once the last ended."""
    streams: list[Stream[Any]] = []
    cut: list[Told] = []
    for answer in answers:
        try:
            streams.append(engine.generate(answer.left()))
        except EngineDied as error:
            streams.append(Stream())
            streams[-1].end(error)
    for answer, stream in reversed([*zip(answers, streams, strict=True)]):
        if (error := answer.read(stream)) is not None:
            assert isinstance(error, EngineDied) and "SIGKILL" in str(error)
            cut.append(answer)
        if stops and answer is answers[-1]:
            answers[0].stopped = True
            streams[0].stop()
    return cut


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("runs", [pytest.param(4, id="few"), pytest.param(100, id="many")])
def test_answers_at_once_that_a_kill_cut_go_on_to_the_token(engine: Remote, runs: int) -> None:
    # Each run starts a process, so a failure is not made smaller.
    @settings(max_examples=runs, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(
        st.sampled_from((40, 90, 20, 60, 5, 130)),
        st.sampled_from((4, 3, 2)),
        st.lists(wishes(), min_size=2, max_size=6),
        st.booleans(),
    )
    def killed(calls: int, places: int, asked: list[Wish], stops: bool) -> None:
        requests = [wish._replace(apart="").request for wish in asked]
        list(engine.load(Load(str(calls), Runtime(parallel=places))))
        answers = [Told(request, alone(request)) for request in requests]
        cut = read_all(engine, answers, stops)
        assert bool(cut) != engine.process.alive
        if cut:
            engine.restart()
        list(engine.load(Load("-1", Runtime(parallel=places))))
        later = [Told(request, alone(request)) for request in requests]
        again = [replace(answer, stopped=False) for answer in cut if not answer.complete]
        assert not read_all(engine, [*later, *again])

    killed()
