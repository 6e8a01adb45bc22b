"""What drafting keeps in memory: within one limit, the oldest use goes first, nothing is lost."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from app.loaded import Loaded
from app.rooms import Room, Rooms

from app.memory import LIMIT, Latest, Memory
from app.past import Pasts
from app.preferences import Preferences
from app.session import Session
from engine.backends.toy import ToyBackend
from engine.drafters.context import SLACK, ContextTier
from engine.drafters.model import ModelTier
from engine.local import Local
from engine.methods import Databases
from engine.settings import Generation, Sampling
from engine.types import Gram
from storage.contexts import ContextStore
from storage.database import Database
from storage.ngrams import ModelNgrams

ROOT = Path(__file__).parent.parent
MB = 1 << 20


@pytest.fixture
def session(db: Database) -> Session:
    return Session(Local(backend=ToyBackend()), db)


def ask(session: Session, owner: str, seed: int = 3, conversation: str | None = None) -> str:
    """An answer in a new conversation, or in one that is there."""
    conversation = session.say(owner, conversation, "hello there")
    generation = Generation(Sampling(temperature=0.8, seed=seed), max_tokens=60)
    chosen = Preferences(generation, fresh_seed=False)
    for _ in session.answer(owner, conversation, chosen):
        pass
    return conversation


def taken(session: Session) -> int:
    return session.memory.taken(session.loaded, session.rooms)


def test_owners_come_and_go_within_the_limit(session: Session) -> None:
    session.memory.limit = MB
    for number in range(100):
        ask(session, f"owner {number % 50}", seed=number)
        assert taken(session) <= MB
    assert 0 < len(session.rooms.open) < 20 and 0 < len(session.pasts.known) < 20
    assert {who for who, _ in session.rooms.open} <= set(session.pasts.known)
    session.memory.limit = LIMIT
    for number in range(50):
        ask(session, f"owner {number}")
    assert len(session.pasts.known) == 50, "with room for all, all stay"


def test_what_was_dropped_is_as_it_was_when_it_is_needed_again(
    session: Session, db: Database
) -> None:
    conversation = ask(session, "ann")
    room, past = session.room("ann", conversation), session.pasts.of("ann")
    log, size, trusts = list(room.databases.context.log), past.tier.size, past.calibration.rows()
    session.memory.limit = 1
    ask(session, "bob")
    assert list(session.pasts.known) == ["bob"]
    assert [who for who, _ in session.rooms.open] == ["bob"]
    again = session.pasts.of("ann")
    assert again is not past and again.tier.size == size
    assert sorted(again.calibration.rows()) == sorted(trusts)
    assert session.room("ann", conversation).databases.context.log == log


def test_the_answer_under_way_keeps_its_past_and_its_room_however_little_fits(
    session: Session, db: Database
) -> None:
    session.memory.limit = 1
    conversation = ask(session, "ann")
    assert list(session.rooms.open) == [("ann", conversation)]
    before = ModelNgrams(db, "ann", "toy").rows()
    store = ContextStore(db, "ann")
    logged = store.size(conversation, "bytes")
    ask(session, "ann", seed=9, conversation=conversation)
    assert list(session.rooms.open) == [("ann", conversation)]
    assert ModelNgrams(db, "ann", "toy").rows() > before > 0
    assert store.size(conversation, "bytes") > logged > 0


def test_an_owner_who_only_compares_takes_room_of_others(session: Session) -> None:
    ask(session, "ann")
    session.memory.limit = 1
    chosen = Preferences(Generation(Sampling(seed=1), max_tokens=4), fresh_seed=False)
    for _ in session.compare("bob", "hello there", "", chosen, 1):
        pass
    assert list(session.pasts.known) == ["bob"]


class Clock:
    """Every look is a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def loaded(db: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loaded]:
    clock = Clock()
    for module in ("app.rooms.monotonic", "app.past.monotonic"):
        monkeypatch.setattr(module, clock)
    yield Session(Local(backend=ToyBackend()), db).loaded


def enter(rooms: Rooms, pasts: Pasts, owner: str, name: str) -> Room:
    """Use a conversation as the session does: the past first."""
    past = pasts.of(owner)
    return rooms.get(owner, name, lambda: Room(Databases(ContextTier(range(300)), past.tier)))


@pytest.mark.parametrize(
    ("entered", "stay", "owners"),
    [
        (["a1", "b1", "c1"], ["c1"], "c"),
        (["a1", "b1", "a2"], ["a2"], "a"),
        (["b1", "a1", "a2", "a1"], ["a1"], "a"),
    ],
)
def test_the_last_conversation_stays_when_nothing_else_may(
    loaded: Loaded, entered: list[str], stay: list[str], owners: str
) -> None:
    rooms = Rooms()
    for owner, name in map(tuple, entered):
        enter(rooms, loaded.pasts, owner, name)
    Memory(1).fit(loaded, rooms, entered[-1][0])
    assert [f"{owner}{name}" for owner, name in rooms.open] == stay
    assert list(loaded.pasts.known) == list(owners)


def test_the_one_used_longest_ago_goes_first(loaded: Loaded) -> None:
    rooms, pasts = Rooms(), loaded.pasts
    for owner, name in map(tuple, ("a1", "a2", "b1", "c1", "a1")):
        enter(rooms, pasts, owner, name)
    memory = Memory()
    room, past = rooms.open["c", "1"].bytes, pasts.bytes // 3
    for dropped, left in (
        (room, ["b1", "c1", "a1"]),
        (room, ["c1", "a1"]),
        (1, ["a1"]),
        (1, ["a1"]),
    ):
        memory.limit = memory.taken(loaded, rooms) - dropped
        memory.fit(loaded, rooms, "a")
        assert [f"{owner}{name}" for owner, name in rooms.open] == left
    assert set(pasts.known) == {"a"} and past > 0
    memory.limit = LIMIT
    memory.fit(loaded, rooms, "a")
    assert memory.taken(loaded, rooms) == rooms.bytes + pasts.bytes


def test_an_open_conversation_forgets_as_its_store_does(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContextStore, "CAP", 200)
    conversation = ask(session, "ann")
    for seed in range(12):
        ask(session, "ann", seed, conversation)
        assert len(session.room("ann", conversation).databases.context.log) <= 200 * SLACK
    log = session.room("ann", conversation).databases.context.log
    assert log[-200:] == ContextStore(session.database, "ann").load(conversation, "bytes")


def test_everything_that_grows_is_counted(session: Session) -> None:
    """Context and harvest, the past, what the published method makes of it, and the answer."""
    draw = random.Random(1)
    tokens = [draw.randrange(5000) for _ in range(4000)]
    room = Room(Databases(ContextTier(tokens), ModelTier()))
    bytes_ = [room.bytes, (room.databases.bytes)]
    assert bytes_[0] == bytes_[1] > 300 * len(tokens)
    for at in range(2, 2000):
        room.databases.harvest.observe(tokens[:at][-4:], 1, lambda _: [(7, 0.5)])
    harvested = room.bytes
    assert harvested > bytes_[0] + 2000 * 300
    room.databases.past.finish(tokens, 2000)
    assert room.bytes == harvested, "the past is counted once, not per room"
    assert room.databases.past.bytes > 300 * 1990
    context, model = room.databases.as_published()[:2]
    context.observe(tokens, len(tokens), None)
    assert room.bytes > harvested + 200 * (2000 + 4000)
    conversation = ask(session, "ann")
    answered = session.room("ann", conversation)
    assert answered.answered is not None
    whole, answered.answered = answered.bytes, None
    assert whole > answered.bytes + 500 * 10
    assert taken(session) == session.pasts.bytes + session.rooms.bytes > 0


def test_a_past_that_was_read_takes_little_more_than_its_counts(db: Database) -> None:
    """Numbers that are read from a store are new ones: the same ones are kept once."""
    draw = random.Random(1)
    grams = [Gram(tuple(300 + draw.randrange(50) for _ in range(5)), 1, 1) for _ in range(500)]
    tier = ModelTier(Gram(tuple(int(str(t)) for t in g.tokens), 1, 1) for g in grams)
    numbers = {id(token) for gram, _ in tier.grams() for token in gram[:-1]}
    assert len(numbers) <= 50


def test_of_many_browsers_the_latest_are_remembered() -> None:
    latest: Latest[str, int] = Latest()
    for number in range(3 * Latest.LIMIT):
        latest[str(number)] = number
        latest["kept"] = number
    assert len(latest) == Latest.LIMIT and latest["kept"] == 3 * Latest.LIMIT - 1
    assert str(3 * Latest.LIMIT - 1) in latest and "0" not in latest
    assert latest.setdefault("new", 7) == 7 and len(latest) == Latest.LIMIT


def test_notices_of_owners_who_never_come_back_are_forgotten(session: Session) -> None:
    for number in range(2 * Latest.LIMIT):
        session.report(f"owner {number}", "The disk is full.")
    assert len(session.notices) == Latest.LIMIT
    session.report(f"owner {2 * Latest.LIMIT - 1}", "The disk is full.")
    assert session.take_notices(f"owner {2 * Latest.LIMIT - 1}") == ["The disk is full."]


def test_resident_memory_is_flat_over_200_conversations_and_50_owners() -> None:
    """After a tenth of them memory grows by less than 4 MB: without a limit it does by 10 MB."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.soak", "200", "50", str(4 * MB)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = [[int(word) for word in line.split()] for line in run.stdout.splitlines()]
    assert len(lines) == 10 and all(told <= 4 * MB for _, told in lines)
    resident = [size for size, _ in lines]
    assert resident[-1] - resident[0] < 4 * MB, resident
