"""The engine's process ends: the model comes back as it was, or is given up and the app says so."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from app.service import revival
from app.service.session import Session
from engine.backends import fast_path
from engine.backends.base import Backend
from engine.engine import Load, Request
from engine.errors import EngineDied, ModelError
from engine.loaded import no_model
from engine.local import Local
from engine.models.loaders import ModelLoaders
from engine.settings import Drafting, Runtime, Sampling
from engine.streams import Stream
from storage.database import Database
from tests.support.inside import OWNER, answer, preferences
from tests.support.shop import Shop, ask, load_model

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

    def load(self, requested: Load) -> Stream[Any]:
        self.loads.append(requested)
        return self.die() if self.ends(requested) else super().load(requested)

    def load_drafts(self, requested: Sequence[tuple[str, str]]) -> Stream[Any]:
        return self.die() if self.ends(requested) else super().load_drafts(requested)

    def settle(self) -> None:
        """Wait until all that follows from the ends so far has been done."""
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def engine(shop: Shop) -> Fragile:
    return Fragile(shop.loaders())


Later = list[tuple[float, Callable[[], None]]]
"""What is to be done after so many seconds."""


def opened(engine: Fragile, db: Database, shop: Shop, page: bool = True) -> tuple[Session, Later]:
    """A session, and what it puts off."""
    session, later = Session(engine, db, loaders=shop.loaders(), page=page), Later()
    session.revival.later = lambda seconds, work: later.append((seconds, work))
    return session, later


@pytest.fixture
def session(db: Database, shop: Shop, engine: Fragile) -> Session:
    session, _ = opened(engine, db, shop)
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
    assert reached.wait(10) and session.models.loading is not None
    with pytest.raises(ModelError, match="two cannot be loaded now"):
        load_model(session, shop.source("two"))
    goes_on.set()
    engine.settle()
    assert session.current.info.name == "one" and session.models.loading is None


def test_what_ends_the_engine_again_while_it_is_loaded_is_given_up(
    session: Session, engine: Fragile, shop: Shop
) -> None:
    end(session, engine, lambda wanted: isinstance(wanted, Load))
    assert len(engine.loads) == 2 and engine.restarts == 2 and not engine.state.is_loaded
    first, last = session.notices.take(OWNER)
    assert "being loaded again" in first
    assert "ended again while one was being loaded" in last and "(SIGSEGV)" in last
    assert "one is tried again in 30 seconds." in last
    assert "choose another model or other settings in the Models tab." in last
    with pytest.raises(ModelError, match="No model is loaded"):
        ask(session)
    load_model(session, shop.source("two"))
    assert ask(session).text
    end(session, engine)
    assert session.current.info.name == "two", "what another model did is forgotten"


def test_draft_models_that_end_the_engine_are_given_up_too(
    session: Session, engine: Fragile, shop: Shop
) -> None:
    session.stacks.load([shop.source("draft")])
    end(session, engine, lambda wanted: not isinstance(wanted, Load))
    assert len(engine.loads) == 3 and not engine.state.is_loaded
    assert "within five minutes, for the third time" in session.notices.take(OWNER)[-1]


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
    assert engine.state.is_loaded != often and engine.restarts == 3
    last = session.notices.take(OWNER)[-1]
    assert ("ended again within five minutes, for the third time" in last) == often


def test_what_was_given_up_is_tried_again_after_growing_waits(
    db: Database, engine: Fragile, shop: Shop
) -> None:
    """Without a page nobody else would; what happens is printed, and other programs are told."""
    session, later = opened(engine, db, shop, page=False)
    printed = list[str]()
    session.notices.say = printed.append
    list(session.models.start(shop.source("one"), RUNTIME))
    end(session, engine, lambda wanted: isinstance(wanted, Load))
    waits = list[float]()
    engine.ends = lambda wanted: isinstance(wanted, Load)
    for _ in range(7):
        assert len(later) == 1 and not engine.state.is_loaded
        reason = session.revival.not_loaded_reason
        assert "one is not loaded" in reason and "tried again in" in reason
        assert "Models tab" not in reason + "".join(printed)
        with pytest.raises(ModelError, match="It is tried again"):
            session.programs.check_loaded()
        seconds, work = later.pop()
        waits.append(seconds)
        work()
        engine.settle()
    assert waits == [30, 60, 120, 240, 480, 900, 900]
    assert sum("ended again while one was being loaded" in text for text in printed) == 8
    engine.ends = lambda wanted: False
    later.pop()[1]()
    assert session.models.source == shop.source("one") and session.models.runtime == RUNTIME
    assert printed[-2:] == ["one is being loaded again.", "one is loaded again."]
    assert session.programs.check_loaded() is None and not later


def test_a_model_that_stayed_begins_with_the_first_wait(
    session: Session, engine: Fragile, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, later = [1000.0], Later()
    monkeypatch.setattr(revival, "monotonic", lambda: now[0])
    session.revival.later = lambda seconds, work: later.append((seconds, work))
    for lived, wait in ((10.0, 30.0), (10.0, 60.0), (revival.WINDOW, 30.0)):
        now[0] += lived
        end(session, engine, lambda wanted: isinstance(wanted, Load))
        seconds, work = later.pop()
        assert seconds == wait
        work()
        assert engine.state.is_loaded


def test_a_kill_right_after_ready_is_none_while_loading(session: Session, engine: Fragile) -> None:
    """What is still to be done of a load by then changes nothing: the model was there."""
    session.notices.take(OWNER)
    restore, killed = session.stacks.restore, list[bool]()

    def die_once(*arguments: Any) -> list[str]:
        if not killed:
            killed.append(engine.state.is_loaded)
            engine.die()
            raise EngineDied(REASON)
        return restore(*arguments)

    session.stacks.restore = die_once  # type: ignore[method-assign]
    end(session, engine)
    assert killed == [True] and engine.state.is_loaded and len(engine.loads) == 3
    assert session.notices.take(OWNER) == [f"{REASON} one is being loaded again."]


def test_a_process_that_cannot_be_started_is_tried_again(
    session: Session, engine: Fragile, monkeypatch: pytest.MonkeyPatch
) -> None:
    later, restart = Later(), engine.restart
    session.revival.later = lambda seconds, work: later.append((seconds, work))

    def refuse() -> None:
        raise EngineDied("The engine process could not be started: no memory.")

    monkeypatch.setattr(engine, "restart", refuse)
    end(session, engine)
    assert "could not be started" in session.notices.take(OWNER)[-1] and not engine.state.is_loaded
    later.pop()[1]()
    assert [seconds for seconds, _ in later] == [60] and not engine.state.is_loaded
    monkeypatch.setattr(engine, "restart", restart)
    later.pop()[1]()
    assert engine.state.is_loaded and session.models.source


def test_a_model_that_ends_the_engine_leaves_the_old_one(
    session: Session, engine: Fragile, shop: Shop
) -> None:
    session.stacks.load([shop.source("draft")])
    for room in (200, 110):
        shop.room = room
        engine.ends = lambda wanted: isinstance(wanted, Load) and "two" in wanted.source
        with pytest.raises(EngineDied):
            load_model(session, shop.source("two"))
        engine.settle()
        assert session.models.source == shop.source("one") and ask(session).text
        assert list(session.stacks.drafts) == ["draft"]


def test_a_first_model_that_ends_the_engine_leaves_none(
    db: Database, engine: Fragile, shop: Shop
) -> None:
    session, later = opened(engine, db, shop)
    engine.ends = lambda wanted: True
    with pytest.raises(EngineDied):
        list(session.models.start(shop.source("one")))
    engine.settle()
    assert session.notices.take(OWNER) == [
        f"{REASON} one is tried again in 30 seconds. Or choose another model or other settings in "
        "the Models tab."
    ]
    engine.ends = lambda wanted: False
    load_model(session, shop.source("two"))
    assert ask(session).text
    for _, work in later:
        work()
    assert session.current.info.name == "two", "another one came meanwhile"


def test_a_model_that_cannot_be_read_again_is_reported(
    session: Session, engine: Fragile, shop: Shop
) -> None:
    shop.broken.add(shop.source("one"))
    end(session, engine)
    last = session.notices.take(OWNER)[-1]
    assert "one was not loaded again." in last and "the file is damaged" in last
    assert not engine.state.is_loaded and session.models.loading is None


def test_everyone_who_has_asked_something_is_notified(db: Database, shop: Shop) -> None:
    engine = Fragile(shop.loaders())
    session = Session(engine, db, guests=True, loaders=shop.loaders())
    list(session.models.start(shop.source("one")))
    conversation = session.chat.say("guest:a", None, "hello")
    answer(session, conversation, preferences(), "guest:a")
    end(session, engine)
    assert "being loaded again" in session.notices.take("guest:a")[0] and ask(session).text


def test_the_fast_path_is_tried_again(session: Session, engine: Fragile) -> None:
    here = fast_path.machine()
    fast_path.remember(here, {"Q8_0": ""})
    assert fast_path.remembered(here)
    end(session, engine)
    assert fast_path.remembered(here) == {}
