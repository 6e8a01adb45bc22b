"""What drafting keeps in memory: within one limit, the oldest use goes first, nothing is lost."""

import random

import pytest

from app.service.history import PROVABLE
from app.service.pages import LimitedDict
from app.service.preferences import Preferences
from app.service.session import Session
from engine import native
from engine.drafting.calibration import Calibration
from engine.drafting.databases import (
    LIMIT,
    MOST_OPEN,
    Databases,
    DraftingMemory,
    OpenConversation,
    PastAnswers,
)
from engine.drafting.tiers import SLACK, ContextTier, ModelTier
from engine.settings import Generation, Sampling
from engine.types import Gram
from storage.database import Database
from storage.drafting import ContextStore
from storage.ngrams import ModelNgrams
from tests.support.inside import answer, compare, memory, open_conversation, past_answers

MB = 1 << 20


def ask(session: Session, owner: str, seed: int = 3, conversation: str | None = None) -> str:
    """An answer in a new conversation, or in one that is there."""
    conversation = session.chat.say(owner, conversation, "hello there")
    generation = Generation(Sampling(temperature=0.8, seed=seed), max_tokens=60)
    chosen = Preferences(generation, fresh_seed=False)
    answer(session, conversation, chosen, owner)
    return conversation


def test_owners_come_and_go_within_the_limit(session: Session) -> None:
    known = memory(session)
    known.limit = MB
    for number in range(48):
        ask(session, f"owner {number % 24}", seed=number)
        assert memory(session).bytes <= MB
    assert 0 < len(known.conversations) < 20 and 0 < len(known.past_answers) < 20
    assert {who for who, _ in known.conversations} <= set(known.past_answers)
    known.limit = LIMIT
    for number in range(24):
        ask(session, f"owner {number}")
    assert len(memory(session).past_answers) == 24, "with room for all, all stay"
    assert len(known.conversations) == MOST_OPEN


def test_what_was_dropped_is_as_it_was_when_it_is_needed_again(
    session: Session, db: Database
) -> None:
    conversation = ask(session, "ann")
    before = past_answers(session, "ann")
    log = list(open_conversation(session, conversation, "ann").databases.context.log)
    grams, trusts = dict(before.tier.grams()), before.calibration.rows()
    known = memory(session)
    known.limit = 1
    ask(session, "bob")
    assert list(memory(session).past_answers) == ["bob"]
    assert [who for who, _ in known.conversations] == ["bob"]
    # Plain decoding has no drafters, so nothing is learned on top.
    drafted = session.chat.say("ann", conversation, "hello there")
    plain = Preferences(Generation(Sampling(seed=1), max_tokens=1), "plain", fresh_seed=False)
    answer(session, drafted, plain, "ann")
    again = past_answers(session, "ann")
    assert again is not before and dict(again.tier.grams()) == grams
    assert sorted(again.calibration.rows()) == sorted(trusts)
    assert open_conversation(session, conversation, "ann").databases.context.log == log


def test_the_answer_under_way_keeps_its_past_and_its_room_however_little_fits(
    session: Session, db: Database
) -> None:
    known = memory(session)
    known.limit = 1
    conversation = ask(session, "ann")
    assert list(memory(session).conversations) == [("ann", conversation)]
    before = ModelNgrams(db, "ann", "toy").rows()
    store = ContextStore(db, "ann")
    logged = store.size(conversation, "bytes")
    ask(session, "ann", seed=9, conversation=conversation)
    assert list(memory(session).conversations) == [("ann", conversation)]
    assert ModelNgrams(db, "ann", "toy").rows() > before > 0
    assert store.size(conversation, "bytes") > logged > 0


def test_an_owner_who_only_compares_takes_room_of_others(session: Session) -> None:
    ask(session, "ann")
    memory(session).limit = 1
    chosen = Preferences(Generation(Sampling(seed=1), max_tokens=4), fresh_seed=False)
    for _ in compare(session, "bob", "hello there", chosen, 1):
        pass
    assert list(memory(session).past_answers) == ["bob"]


def enter(known: DraftingMemory, owner: str, name: str) -> OpenConversation:
    """Use a conversation as the engine does: the past first."""
    used = known.answers_of(owner, lambda: PastAnswers(ModelTier(), Calibration()))

    def recall() -> OpenConversation:
        return OpenConversation(Databases(ContextTier(range(300)), used.tier))

    return known.conversation(owner, name, recall)


@pytest.mark.parametrize(
    ("entered", "stay", "owners"),
    [
        (["a1", "b1", "c1"], ["c1"], "c"),
        (["a1", "b1", "a2"], ["a2"], "a"),
        (["b1", "a1", "a2", "a1"], ["a1"], "a"),
    ],
)
def test_the_last_conversation_stays_when_nothing_else_may(
    entered: list[str], stay: list[str], owners: str
) -> None:
    known = DraftingMemory(limit=1)
    for owner, name in map(tuple, entered):
        enter(known, owner, name)
    known.fit(entered[-1][0])
    assert [f"{owner}{name}" for owner, name in known.conversations] == stay
    assert list(known.past_answers) == list(owners)


def test_the_one_used_longest_ago_goes_first() -> None:
    known = DraftingMemory()
    for owner, name in map(tuple, ("a1", "a2", "b1", "c1", "a1")):
        enter(known, owner, name)
    one = known.conversations["c", "1"].bytes
    for dropped, left in (
        (one, ["b1", "c1", "a1"]),
        (one, ["c1", "a1"]),
        (1, ["a1"]),
        (1, ["a1"]),
    ):
        known.limit = known.bytes - dropped
        known.fit("a")
        assert [f"{owner}{name}" for owner, name in known.conversations] == left
    assert set(known.past_answers) == {"a"}
    known.limit = LIMIT
    known.fit("a")
    assert known.bytes == known.conversations["a", "1"].bytes + known.past_answers["a"].bytes > 0


@pytest.mark.parametrize(
    ("wish", "rooms", "pasts"),
    [
        (("a", "1", False), ["a2", "b1"], "ab"),
        (("a", None, False), ["b1"], "ab"),
        (("a", None, True), ["b1"], "b"),
        (("c", None, True), ["a1", "a2", "b1"], "ab"),
    ],
)
def test_what_is_to_be_forgotten_goes_when_it_is_swept(
    wish: tuple[str, str | None, bool], rooms: list[str], pasts: str
) -> None:
    known = DraftingMemory()
    for owner, name in map(tuple, ("a1", "a2", "b1")):
        enter(known, owner, name)
    known.to_forget.append(wish)
    assert len(known.conversations) == 3
    known.sweep()
    assert [f"{owner}{name}" for owner, name in known.conversations] == rooms
    assert "".join(known.past_answers) == pasts and not known.to_forget


def test_an_open_conversation_forgets_as_its_store_does(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContextStore, "CAP", 200)
    conversation = ask(session, "ann")
    for seed in range(12):
        ask(session, "ann", seed, conversation)
        log = open_conversation(session, conversation, "ann").databases.context.log
        assert len(log) <= 200 * SLACK
    assert log[-200:] == ContextStore(session.database, "ann").load(conversation, "bytes")


def test_everything_that_grows_is_counted(session: Session) -> None:
    """The context, the past answers, what the published method makes of them, and the tokens."""
    draw = random.Random(1)
    tokens = [draw.randrange(5000) for _ in range(4000)]
    entered = OpenConversation(Databases(ContextTier(tokens), ModelTier()))
    bytes_ = [entered.bytes, (entered.databases.bytes)]
    assert bytes_[0] == bytes_[1] > 150 * len(tokens)
    entered.databases.learned.finish(tokens, 2000)
    assert entered.bytes == bytes_[0], "past answers are counted once, not per conversation"
    assert entered.databases.learned.bytes > 80 * 1990
    context, model = entered.databases.as_published()[:2]
    context.observe(tokens, len(tokens))
    assert entered.bytes > bytes_[0] + 200 * (2000 + 4000)
    used = open_conversation(session, ask(session, "ann"), "ann")
    whole, count = used.bytes, len(used.tokens)
    used.tokens = []
    assert whole >= used.bytes + 8 * count > used.bytes
    assert memory(session).bytes == past_answers(session, "ann").bytes + used.bytes > 0


def test_answers_that_can_be_proved_are_few(session: Session) -> None:
    """Each is held with all its steps."""
    answers = [("ann", ask(session, "ann")) for _ in range(PROVABLE + 3)]
    assert list(session.history.last) == answers[3:]


def test_a_past_that_was_read_takes_little_more_than_its_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numbers that are read from a store are new ones: the same ones are kept once."""
    monkeypatch.setattr(native, "core", None)
    draw = random.Random(1)
    grams = [Gram(tuple(300 + draw.randrange(50) for _ in range(5)), 1, 1) for _ in range(500)]
    tier = ModelTier(Gram(tuple(int(str(t)) for t in g.tokens), 1, 1) for g in grams)
    numbers = {id(token) for gram, _ in tier.grams() for token in gram[:-1]}
    assert len(numbers) <= 50


def test_of_many_browsers_the_latest_are_remembered() -> None:
    latest: LimitedDict[str, int] = LimitedDict()
    for number in range(3 * LimitedDict.LIMIT):
        latest[str(number)] = number
        latest["kept"] = number
    assert len(latest) == LimitedDict.LIMIT and latest["kept"] == 3 * LimitedDict.LIMIT - 1
    assert str(3 * LimitedDict.LIMIT - 1) in latest and "0" not in latest
    assert latest.setdefault("new", 7) == 7 and len(latest) == LimitedDict.LIMIT


def test_notices_of_owners_who_never_come_back_are_forgotten(session: Session) -> None:
    for number in range(2 * LimitedDict.LIMIT):
        session.notices.report(f"owner {number}", "The disk is full.")
    assert len(session.notices.waiting) == LimitedDict.LIMIT
    session.notices.report(f"owner {2 * LimitedDict.LIMIT - 1}", "The disk is full.")
    assert session.notices.take(f"owner {2 * LimitedDict.LIMIT - 1}") == ["The disk is full."]
