"""The databases of hierarchy drafting: those of one conversation, and all that are kept in memory.

`DraftingMemory` holds copies of what a `Store` holds; what the current answer has taught is stored
when that answer ends. The least recently used entries can therefore be dropped whenever all of them
together exceed one limit. This happens only on the model's thread, before and after an answer, so
nothing that a run uses is dropped. Other threads can only mark entries to be forgotten; these are
dropped before anything is drafted from them again.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Protocol

from engine.drafting.base import Drafter, Frozen, Learner, NgramTable, Tier
from engine.drafting.baselines import Flat, PublishedContext, PublishedModel, PublishedStatistics
from engine.drafting.calibration import SIZE, Calibration
from engine.drafting.compiled import hierarchy
from engine.drafting.hierarchy import Hierarchy
from engine.drafting.tiers import (
    ContextTier,
    LimitedView,
    ModelTier,
    PredictionTier,
    StatisticsTier,
)
from engine.settings import Sampling
from engine.types import CONTEXT, MODEL, STATISTICS, TIERS, Costs, Past, Taught

LIMIT = 512 << 20
"""Bytes for open conversations, past answers and remembered look-ups in the statistics together.
The answer in progress keeps what it uses, even if that alone is more."""
READING = 2.0
"""The most seconds that loading a model waits until its statistics are in memory."""
MOST_OPEN = 16
"""The most conversations that are open at once; the others are rebuilt from the store when needed.
"""
TOKEN = 40
"""Bytes per token of the text in the cache, as measured."""
USES = count()
"""A counter that orders uses."""


class Databases:
    """The databases of one conversation. `learned` holds the past answers and learns from each new
    one; `model` is the tier that drafters query, which may be a copy that forgets. `published` is
    created when it is first needed."""

    def __init__(
        self,
        context: ContextTier | None = None,
        model: ModelTier | None = None,
        statistics: NgramTable | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.learned = model or ModelTier()
        self.context = context or ContextTier(
            save=partial(self.learned.texts.read, f"conversation {next(USES)}")
        )
        self.model: Tier = self.learned
        self.statistics = statistics
        self.calibration = calibration or Calibration()
        self.published: dict[str, Flat] = {}
        self.prediction: PredictionTier | None = None
        """What the present request predicts of its answer."""
        self.format: Tier | None = None
        """What the format of the present answer demands."""

    @property
    def bytes(self) -> int:
        """The approximate size in memory, without the past answers that conversations share."""
        return self.context.bytes + sum(tier.bytes for tier in self.published.values())

    def hierarchy(self, tiers: Sequence[str], sampling: Sampling | None = None) -> list[Drafter]:
        """The drafter of hierarchy drafting from these tiers, in this order, which learns from its
        runs; no drafter if none of the tiers exists. `sampling` is that of a run whose noise is
        known."""
        chosen = self.tiers(tiers)
        return [hierarchy(chosen, self.calibration, sampling)] if chosen else []

    def with_head(
        self, tiers: Sequence[str], head: Tier, sampling: Sampling | None = None
    ) -> Hierarchy:
        """Hierarchy drafting with a head's guesses as one more tier, the first. The weights of
        evidence in runs with a head are learned separately."""
        return hierarchy([head, *self.tiers(tiers)], self.calibration.with_head(), sampling)

    def as_published(
        self, tiers: Sequence[str] = TIERS, sampling: Sampling | None = None
    ) -> list[Drafter]:
        """The paper's own three tiers with its constants (engine/drafting/baselines.py), filled
        from the model tier when they are first needed. They draft the same for any `sampling`."""
        if not self.published:
            self.published = {
                CONTEXT: PublishedContext(),
                MODEL: PublishedModel(self.learned.grams()),
            }
            if self.statistics is not None:
                self.published[STATISTICS] = PublishedStatistics(self.statistics)
        return [self.published[name] for name in tiers if name in self.published]

    def tiers(self, names: Sequence[str]) -> list[Tier]:
        """The tiers of these names, after those of the present request: the format and the
        prediction, if there are any. Without a table of statistics, theirs is left out."""
        known: dict[str, Tier] = {CONTEXT: self.context, MODEL: self.model}
        if self.statistics is not None:
            known[STATISTICS] = StatisticsTier(self.statistics)
        own = [tier for tier in (self.format, self.prediction) if tier is not None and names]
        return [*own, *(known[name] for name in names if name in known)]

    def below(self, sampling: Sampling | None = None) -> Drafter:
        """A drafter for a draft model. It queries the tiers and leaves their learning to another
        drafter.

        The weights of evidence are learned separately for the draft model, starting from the
        current ones. `sampling` is that of the draft model, if its noise is known.
        """
        tiers = [Frozen(tier) for tier in self.tiers(TIERS)]
        return hierarchy(tiers, Calibration(self.calibration.rows()), sampling)

    def learner(self) -> Drafter:
        return Learner(self.tiers(TIERS))

    def next_conversation(self) -> "Databases":
        """Databases of another conversation with the same model: only the context is fresh."""
        copy = Databases(None, self.learned, self.statistics, self.calibration)
        if self.published:
            copy.published = {**self.published, CONTEXT: PublishedContext()}
        return copy

    def for_measuring(self, log: Iterable[int] = ()) -> "Databases":
        """A copy whose runs have no side effects: its own context and calibration, and a model tier
        that forgets.

        Without it, the second of two runs of one prompt would draft the answer of the first. Runs
        still include the cost of learning in memory, except that of the published model tier, whose
        complete re-sorting is not part of the paper. They do not include the cost of storing.
        """
        calibration = Calibration(self.calibration.rows())
        copy = Databases(ContextTier(tuple(log)), self.learned, self.statistics, calibration)
        copy.model = LimitedView(self.learned)
        if self.published:
            copy.published = {**self.published, CONTEXT: PublishedContext()}
            past = self.published[MODEL]
            if isinstance(past, PublishedModel):
                copy.published[MODEL] = past.frozen()
        return copy


class Store(Protocol):
    """Keeps what drafting has learned for longer than this process lives. An answer never fails
    because of it or waits for other programs: a failure to read or store becomes a notice."""

    report: Callable[[str, str], None]
    """Called with an owner and a notice, from any thread. The user of the store sets it."""

    @property
    def locked(self) -> str:
        """Why it cannot store anything at present, "" if it can. `report` is called whenever this
        changes."""

    @property
    def cap(self) -> int:
        """The most tokens that a conversation's log keeps."""

    def past(self, owner: str, fingerprint: str) -> Past:
        """What is stored of the past answers of the model `fingerprint` to an owner."""
        return Past()

    def texts(self, owner: str, tokenizer: str) -> Iterable[tuple[str, Sequence[int]]]:
        """The newest of an owner's texts since the past answers were last wiped, as conversations
        with tokens of their logs, oldest first."""
        return ()

    def log(self, owner: str, conversation: str, tokenizer: str) -> Sequence[int]:
        """The newest tokens of a conversation, oldest first; none of an unknown conversation."""
        return ()

    def costs(self, key: tuple[str, str, str, str, int]) -> Costs | None:
        """The costs of a model's forwards, by `BackendInfo.costs_key`. Raises StorageError."""
        return None

    def learn(self, taught: Taught) -> bool:
        """Store what an answer taught, unless the past answers of its owner were wiped since they
        were read. Returns whether the copy in memory is out of date, because they were wiped or
        old n-grams were dropped."""
        return False


class NoStore(Store):
    """A store that keeps nothing."""

    cap, locked = 1 << 18, ""

    def __init__(self) -> None:
        self.report = lambda owner, notice: None


@dataclass(slots=True)
class PastAnswers:
    """The model's past answers to one owner, and the evidence weights learned on them. `fresh` are
    the n-grams that are not stored yet; `wipes` is as in `Past`. With `trusted` the weights began
    as the stored ones, so they may replace these."""

    tier: ModelTier
    calibration: Calibration
    fresh: list[tuple[int, ...]] = field(default_factory=list)
    wipes: int = 0
    trusted: bool = True
    used: int = field(default_factory=lambda: next(USES))

    @property
    def bytes(self) -> int:
        return self.tier.bytes + SIZE


@dataclass(slots=True)
class OpenConversation:
    """One open conversation: its databases, and the `tokens` of its last turn. `fresh` are the
    tokens of its log that are not stored yet."""

    databases: Databases
    fresh: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    used: int = field(default_factory=lambda: next(USES))

    @property
    def bytes(self) -> int:
        """Its approximate size in memory, in bytes, without the owner's past answers."""
        return self.databases.bytes + TOKEN * len(self.tokens)


def read_ahead(statistics: NgramTable) -> None:
    """Read what look-ups need into memory, in about READING seconds at most. Read later, it would
    slow the forwards that measure a model, and the first answer."""
    getattr(statistics, "in_memory", lambda wait: None)(READING)
    statistics.unigrams()


class DraftingMemory:
    """The open conversations and past answers of all owners with one model, in `limit` bytes."""

    def __init__(self, statistics: NgramTable | None = None, limit: int = LIMIT) -> None:
        self.statistics, self.limit = statistics, limit
        if statistics is not None:
            read_ahead(statistics)
        self.conversations: OrderedDict[tuple[str, str], OpenConversation] = OrderedDict()
        self.past_answers: dict[str, PastAnswers] = {}
        self.to_forget: deque[tuple[str, str | None, bool]] = deque()
        """Requests of other threads to forget: the owner, the conversation (None: all), and whether
        past answers are included."""

    def answers_of(self, owner: str, recall: Callable[[], PastAnswers]) -> PastAnswers:
        if owner not in self.past_answers:
            self.past_answers[owner] = recall()
        self.past_answers[owner].used = next(USES)
        return self.past_answers[owner]

    def conversation(
        self, owner: str, conversation: str, recall: Callable[[], OpenConversation]
    ) -> OpenConversation:
        key = owner, conversation
        if key not in self.conversations:
            self.conversations[key] = recall()
            while len(self.conversations) > MOST_OPEN:
                self.conversations.popitem(last=False)
        self.conversations.move_to_end(key)
        self.conversations[key].used = next(USES)
        return self.conversations[key]

    def close(self, owner: str, conversation: str | None = None) -> None:
        for key in list(self.conversations):
            if key[0] == owner and conversation in (None, key[1]):
                del self.conversations[key]

    def forget(self, owner: str) -> None:
        self.close(owner)
        self.past_answers.pop(owner, None)

    def sweep(self) -> None:
        """Carry out the requests of other threads to forget."""
        while self.to_forget:
            owner, conversation, past = self.to_forget.popleft()
            if past:
                self.forget(owner)
                continue
            self.close(owner, conversation)
            if conversation is not None and owner in self.past_answers:
                self.past_answers[owner].tier.texts.forget(conversation)

    @property
    def bytes(self) -> int:
        conversations = sum(entry.bytes for entry in self.conversations.values())
        answers = sum(past.bytes for past in self.past_answers.values())
        return conversations + answers + int(getattr(self.statistics, "cached_bytes", 0))

    def fit(self, owner: str) -> None:
        """Drop the least recently used entries until the rest fits.

        The past answers of `owner` and the conversation that was entered last stay. Past answers
        are dropped together with all conversations that draft from them.
        """
        entered = sorted((entry.used, *key) for key, entry in self.conversations.items())
        pasts = ((past.used, other, None) for other, past in self.past_answers.items())
        ages = [*entered[:-1], *pasts]
        for _, other, conversation in sorted(ages, key=lambda age: age[0]):
            if self.bytes <= self.limit:
                return
            if conversation is not None:
                self.close(other, conversation)
            elif other != owner:
                self.forget(other)
