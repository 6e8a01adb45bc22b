"""The engine's process ends: the model comes back as it was, or is given up and the app says so."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.service import revival
from app.service.preferences import Preferences
from app.service.session import Session
from engine.backends import fast_path
from engine.backends.base import Backend
from engine.backends.scores import LogitScores
from engine.backends.toy import ToyBackend
from engine.engine import Load, Request
from engine.errors import EngineDied, ModelError
from engine.loaded import no_model
from engine.local import Local
from engine.models.loaders import ModelLoaders
from engine.models.memory import Need
from engine.remote import Remote
from engine.settings import Drafting, Generation, Runtime, Sampling
from engine.streams import Stream
from engine.tree import Tree
from storage.database import Database
from tests.service.test_models import OWNER, Shop, ask, preferences, quick, told  # noqa: F401

REASON = "The process that runs the model ended (SIGSEGV). A native library failed."
RUNTIME = Runtime(context_length=1024)
Wanted = Load | Request | Sequence[tuple[str, str]]


class Fragile(Local):
    """An engine that behaves as if its process ended with whatever it is asked for and `ends`
    is true of."""

    def __init__(self, loaders: ModelLoaders) -> None:
        super().__init__(loaders=loaders)
        self.on_death: Callable[[str], None] = lambda reason: None
        self.ends: Callable[[Wanted], bool] = lambda wanted: False
        self.threads: list[threading.Thread] = []
        self.restarts = 0
        self.loads: list[Load] = []

    def die(self) -> Stream[Any]:
        """First nothing is loaded, then what was under way ends, then everybody is told."""
        self.use(no_model(self.loaded.backend.info))
        stream: Stream[Any] = Stream()
        stream.end(EngineDied(REASON))
        self.threads.append(threading.Thread(target=self.on_death, args=[REASON]))
        self.threads[-1].start()
        return stream

    def kill(self, reason: str) -> None:
        self.on_death(reason)

    def restart(self) -> None:
        self.restarts += 1

    def generate(self, request: Request) -> Stream[Any]:
        return self.die() if self.ends(request) else super().generate(request)

    def load(self, wanted: Load) -> Stream[Any]:
        self.loads.append(wanted)
        return self.die() if self.ends(wanted) else super().load(wanted)

    def load_drafts(self, wanted: Sequence[tuple[str, str]]) -> Stream[Any]:
        return self.die() if self.ends(wanted) else super().load_drafts(wanted)

    def settle(self) -> None:
        """Wait until all that follows from the ends so far has been done."""
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.fixture
def engine(shop: Shop) -> Fragile:
    return Fragile(shop.loaders())


@pytest.fixture
def session(db: Database, shop: Shop, engine: Fragile) -> Session:
    session = Session(engine, db, loaders=shop.loaders())
    list(session.models.start(shop.source("one"), RUNTIME))
    return session


def end(session: Session, engine: Fragile, also: Callable[[Wanted], bool] | None = None) -> None:
    """The process ends with an answer, and with what `also` is true of."""
    engine.ends = lambda wanted: isinstance(wanted, Request) or bool(also and also(wanted))
    with pytest.raises(EngineDied, match="SIGSEGV"):
        list(engine.generate(Request(prompt=(1, 2))))
    engine.settle()
    engine.ends = lambda wanted: False


def test_the_model_is_back_with_its_drafts_and_its_plan(
    session: Session, engine: Fragile, shop: Shop
) -> None:
    stacks = session.stacks
    stacks.load([shop.source("draft")])
    list(stacks.profile(Sampling(0.8), ("hello there",), 8))
    stacks.choose("", Sampling(0.8), Drafting(), False)
    stacks.spec = "draft@2"
    text = ask(session, method="hsd:draft@2").text
    session.notices.take(OWNER)
    end(session, engine)
    assert engine.restarts == 1 and session.notices.take(OWNER) == [
        f"{REASON} one is being loaded again."
    ]
    assert session.models.source == shop.source("one") and session.models.runtime == RUNTIME
    assert list(stacks.drafts) == ["draft"] and stacks.spec == "draft@2"
    assert ask(session, method="hsd:draft@2").text == text


def test_while_it_comes_back_no_other_model_is_loaded(
    session: Session, engine: Fragile, shop: Shop
) -> None:
    reached, goes_on = threading.Event(), threading.Event()

    def load(source: str, runtime: Runtime) -> Backend:
        reached.set()
        assert goes_on.wait(10)
        return shop.load(source, runtime)

    engine.loaders = replace(shop.loaders(), load=load)
    engine.ends = lambda wanted: isinstance(wanted, Request)
    with pytest.raises(EngineDied):
        list(engine.generate(Request(prompt=(1, 2))))
    assert reached.wait(10) and session.models.busy.locked()
    with pytest.raises(ModelError, match="two cannot be loaded now"):
        told(session, shop.source("two"))
    goes_on.set()
    engine.settle()
    assert session.current.info.name == "one" and not session.models.busy.locked()


def test_what_ends_the_engine_again_while_it_is_loaded_is_given_up(
    session: Session, engine: Fragile, shop: Shop
) -> None:
    end(session, engine, lambda wanted: isinstance(wanted, Load))
    assert len(engine.loads) == 2 and engine.restarts == 2 and not engine.state.there
    first, last = session.notices.take(OWNER)
    assert "being loaded again" in first
    assert "ended again while one was being loaded" in last and "(SIGSEGV)" in last
    assert "Choose another model or other settings in the Models tab." in last
    with pytest.raises(ModelError, match="No model is loaded"):
        ask(session)
    told(session, shop.source("two"))
    assert ask(session).text
    end(session, engine)
    assert session.current.info.name == "two", "what another model did is forgotten"


def test_draft_models_that_end_the_engine_are_given_up_too(
    session: Session, engine: Fragile, shop: Shop
) -> None:
    session.stacks.load([shop.source("draft")])
    end(session, engine, lambda wanted: not isinstance(wanted, Load))
    assert len(engine.loads) == 2 and not engine.state.there
    assert "ended again while one was being loaded" in session.notices.take(OWNER)[-1]


@pytest.mark.parametrize("apart", [140.0, 160.0])
def test_three_ends_within_five_minutes_are_too_many(
    session: Session, engine: Fragile, monkeypatch: pytest.MonkeyPatch, apart: float
) -> None:
    now = [0.0]
    monkeypatch.setattr(revival, "monotonic", lambda: now[0])
    for _ in range(3):
        end(session, engine)
        now[0] += apart
    often = apart < 150
    assert engine.state.there != often and engine.restarts == 3
    last = session.notices.take(OWNER)[-1]
    assert ("ended again within five minutes, for the third time" in last) == often


def test_a_model_that_ends_the_engine_leaves_the_old_one(
    session: Session, engine: Fragile, shop: Shop
) -> None:
    session.stacks.load([shop.source("draft")])
    for room in (200, 110):
        shop.room = room
        engine.ends = lambda wanted: isinstance(wanted, Load) and "two" in wanted.source
        with pytest.raises(EngineDied):
            told(session, shop.source("two"))
        engine.settle()
        assert session.models.source == shop.source("one") and ask(session).text
        assert list(session.stacks.drafts) == ["draft"]


def test_a_first_model_that_ends_the_engine_leaves_none(
    db: Database, engine: Fragile, shop: Shop
) -> None:
    session = Session(engine, db, loaders=shop.loaders())
    engine.ends = lambda wanted: True
    with pytest.raises(EngineDied):
        list(session.models.start(shop.source("one")))
    engine.settle()
    assert session.notices.take(OWNER) == [
        f"{REASON} No model is loaded now. Load one in the Models tab."
    ]
    engine.ends = lambda wanted: False
    told(session, shop.source("two"))
    assert ask(session).text


def test_a_model_that_cannot_be_read_again_is_told(
    session: Session, engine: Fragile, shop: Shop
) -> None:
    shop.broken.add(shop.source("one"))
    end(session, engine)
    last = session.notices.take(OWNER)[-1]
    assert "one was not loaded again." in last and "the file is damaged" in last
    assert not engine.state.there and not session.models.busy.locked()


def test_everyone_who_has_asked_something_is_told(db: Database, shop: Shop) -> None:
    engine = Fragile(shop.loaders())
    session = Session(engine, db, guests=True, loaders=shop.loaders())
    list(session.models.start(shop.source("one")))
    conversation = session.chat.say("guest:a", None, "hello")
    list(session.answering.answer("guest:a", conversation, preferences()))
    end(session, engine)
    assert "being loaded again" in session.notices.take("guest:a")[0] and ask(session).text


def test_the_fast_path_is_tried_again(session: Session, engine: Fragile) -> None:
    here = fast_path.machine()
    fast_path.remember(here, {"Q8_0": ""})
    assert fast_path.remembered(here)
    end(session, engine)
    assert fast_path.remembered(here) == {}


# in a process of its own


class Slow(ToyBackend):
    """A model that takes its time."""

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        time.sleep(0.005)
        return super().score(tree, sampling)


def toy(source: str, runtime: Runtime) -> Backend:
    return Slow(name=Path(source).name)


def anywhere(source: str, runtime: Runtime) -> str:
    return "cpu"


def little(source: str, runtime: Runtime) -> Need:
    return Need(1, 1, 1)


def plenty(device: str) -> int:
    return 1 << 30


MODEL_LOADERS = ModelLoaders(
    load=toy,
    need=little,
    device=anywhere,
    free=plenty,
    present=os.path.isabs,  # type: ignore[arg-type]
)


@pytest.fixture
def remote() -> Iterator[Remote]:
    engine = Remote(partial(Local, loaders=MODEL_LOADERS))
    yield engine
    engine.close()


def test_a_process_that_is_killed_costs_the_rest_of_an_answer(db: Database, remote: Remote) -> None:
    session, back = Session(remote, db, loaders=MODEL_LOADERS), threading.Event()
    list(session.models.start("/toys/one"))
    revive = remote.on_death
    assert revive == session.revival.revive
    remote.on_death = lambda reason: (revive(reason), back.set())[0]
    conversation = session.chat.say(OWNER, None, "hello there")
    chosen = Preferences(
        Generation(Sampling(0.8, seed=3), max_tokens=200), "plain", Drafting(), fresh_seed=False
    )
    answer = session.answering.answer(OWNER, conversation, chosen)
    first = next(answer)
    os.kill(remote.process.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="SIGKILL"):
        list(answer)
    cut = session.chat.conversations(OWNER).messages(conversation)[1]
    said, left = cut.content, 200 - len(cut.pieces or ())
    shown = first.text.removesuffix("\ufffd")  # type: ignore[union-attr]
    assert shown and said.startswith(shown), "what was shown is kept"
    assert back.wait(60) and session.current.info.name == "one" and remote.state.there
    assert "one is being loaded again" in session.notices.take(OWNER)[0]
    session.chat.go_on(OWNER, conversation)
    rest = replace(chosen, generation=replace(chosen.generation, max_tokens=left))
    *_, whole = session.answering.answer(OWNER, conversation, rest)
    session.chat.again(OWNER, conversation)
    *_, last = session.answering.answer(OWNER, conversation, chosen)
    assert last.text.startswith(said.removesuffix("\ufffd"))  # type: ignore[union-attr]
    assert whole.text == last.text and whole.tokens == last.tokens  # type: ignore[union-attr]
