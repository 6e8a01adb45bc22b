"""Values that cross module borders. They hold data only; identity and storage belong elsewhere.

A *step* is one target forward: the drafters propose a tree, the target verifies it, and the
accepted path plus one bonus token are emitted. A run is a sequence of steps.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

CONTEXT, MODEL, STATISTICS, TARGET = "context", "model", "statistics", "target"
UNKNOWN = "unknown"
"""The source of tokens whose source is unknown: those of a server (engine/servers)."""
HEAD = "head"
"""The source of tokens that the model's own head drafts (engine/heads/base.py), and the name of
this way to draft."""
PREDICTION = "prediction"
"""The source of tokens that a request predicted, as in the API of OpenAI."""
SCHEMA = "schema"
"""The source of tokens that the format of an answer demands (engine/constraint.py)."""
TIERS = (CONTEXT, MODEL, STATISTICS)
"""The databases from highest to lowest temporal locality (arXiv 2502.05609, section 3)."""

Finish = Literal["eos", "stop", "length", "context", "cancelled"]
"""Why a run ended: end token, stop string, max tokens, context limit, or the user."""


Rule = Literal["match", "rejection"]
"""How drafts are verified: engine/verify.py."""
RULES: tuple[Rule, ...] = ("match", "rejection")
DATABASES, STACK = "databases", "draft models"
WAYS = (DATABASES, STACK, HEAD)
"""The ways to draft, by the names of their drafters. The gain of each is judged separately."""
DRAFT = "draft:"
"""The prefix of the source of a draft model, before its name."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a model may call. `parameters` is the JSON Schema of its arguments, as text."""

    name: str
    description: str = ""
    parameters: str = "{}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments` are a JSON object, as text. Its result names its `id`."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; `role` is "system", "user", "assistant" or "tool".

    A message of the assistant may end with `calls`, and one of a tool is the result of a `call`.
    """

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    call: ToolCall | None = None


Document = str | tuple[Message, ...]
"""A document for statistics: a text, or a chat, which is counted in the form that the model
sees."""


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt of a benchmark. `id` is its name in its set."""

    id: str
    category: str
    text: str


class Gram(NamedTuple):
    """An n-gram of a model's past answers: `documents` answers contained it, the last one at
    `seen`."""

    tokens: tuple[int, ...]
    documents: int
    seen: int


class Work(NamedTuple):
    """The work of a source for one draft tree: the seconds that it took and, for a model or head,
    its forwards.

    `drafted` tokens were proposed by the level below it, and it kept `accepted` of them.
    """

    seconds: float
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0

    def plus(self, other: "Work") -> "Work":
        return Work(
            self.seconds + other.seconds,
            self.forwards + other.forwards,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )


class CalibrationRow(NamedTuple):
    """The record of one kind of evidence: it predicted `credited` of the `reached` tokens."""

    tier: str
    match_length: int
    strength: int
    reached: float
    credited: float


class Costs(NamedTuple):
    """The costs of a model's forwards.

    `points` maps drafted nodes to seconds of a forward; `node` and `other` are seconds outside of
    it, per node and per step. `measured` is the time of the measurement, in seconds since 1970;
    later corrections do not change it. Each token in the cache adds `token` seconds to a forward,
    and `row` more for every node; zero means unknown.
    """

    points: dict[int, float]
    node: float
    other: float
    measured: float
    token: float = 0.0
    row: float = 0.0


class Past(NamedTuple):
    """What is stored of all answers of a model to an owner: their n-grams, and the evidence weights
    learned on them, None if these cannot be read. `wipes` counts how often it had been wiped when
    it was read."""

    grams: Sequence[Gram] = ()
    rows: Sequence[CalibrationRow] | None = ()
    wipes: int = 0


@dataclass(frozen=True, slots=True)
class Taught:
    """What an answer taught, to be stored.

    `grams` are its distinct n-grams, which belong to the `owner` and the model `fingerprint`. The
    owner's past answers of that model then hold `size` n-grams, and `rows` are the evidence weights
    learned on them; None if they did not change. The past had been wiped `wipes` times when it was
    read. `tokens` are to be appended to the log of the `conversation` in the tokens of `tokenizer`.
    """

    owner: str
    fingerprint: str
    wipes: int
    grams: Sequence[tuple[int, ...]] = ()
    size: int = 0
    rows: Sequence[CalibrationRow] | None = None
    conversation: str = ""
    tokenizer: str = ""
    tokens: Sequence[int] = ()

    def __bool__(self) -> bool:
        return bool(self.grams or self.tokens or self.rows is not None)


def holds(packed: bytes, wanted: bytes) -> bool:
    """Whether some tokens, four bytes each, hold others one after the other."""
    at = packed.find(wanted)
    while at > 0 and at % 4:
        at = packed.find(wanted, at + 1)
    return at >= 0


WIDEST = 32
"""The most next tokens kept for a key; further ones are too unlikely to be drafted."""


class Followers:
    """What followed a key: how often the key was seen, and the counts of the next tokens.

    `total` occurrences had `distinct` different next tokens, of which `counts` holds the frequent
    ones. `strength` summarises the reliability of such evidence in one small number: it grows with
    the occurrences and is finer if the next tokens agree (engine/drafting/calibration.py learns the
    weight of each strength).
    """

    __slots__ = ("counts", "distinct", "order", "strength", "total")

    def __init__(self, total: float, distinct: float, counts: dict[int, float]) -> None:
        self.total, self.distinct, self.counts = total, distinct, counts
        self.strength = strength(total, distinct)
        self.order: list[tuple[int, float]] | None = None

    def ranked(self) -> list[tuple[int, float]]:
        if self.order is None:
            self.order = sorted(self.counts.items(), key=lambda pair: -pair[1])
        return self.order

    @classmethod
    @lru_cache(maxsize=1 << 16)
    def once(cls, token: int) -> "Followers":
        """The followers of a key seen once. Shared, as most keys are seen once: never changed."""
        return cls(1, 1, {token: 1})

    def plus(self, token: int, count: float = 1, widest: int = WIDEST) -> "Followers":
        """These followers after another occurrence: a new value the first time, then in place.

        Of more than `widest` next tokens the rarer half is forgotten.
        """
        if self.total == 1:
            counts = {**self.counts, token: self.counts.get(token, 0) + count}
            return Followers(1 + count, len(counts), counts)
        known = self.counts.get(token)
        if known is None:
            self.distinct += 1
            if len(self.counts) >= widest:
                self.narrow(widest // 2)
        self.counts[token] = (known or 0) + count
        self.order = None
        self.total += count
        self.strength = strength(self.total, self.distinct)
        return self

    def less(self, other: "Followers") -> "Followers | None":
        """These followers without the occurrences in `other`; None when none are left."""
        taken = {token: min(n, self.counts.get(token, 0)) for token, n in other.counts.items()}
        total = self.total - sum(taken.values())
        if total <= 0:
            return None
        counts = {t: n - taken.get(t, 0) for t, n in self.counts.items() if n > taken.get(t, 0)}
        return Followers(total, self.distinct - len(self.counts) + len(counts), counts)

    def narrow(self, size: int) -> None:
        """Keep the most frequent next tokens; the others stay counted in the totals."""
        best = sorted(self.counts.items(), key=lambda pair: -pair[1])
        self.counts = dict(best[:size])


TOTALS = (1, 2, 4, 9, 30, 100)
DIVERSITIES = (0.1, 0.3, 0.6, 0.95)
STRENGTHS = (len(TOTALS) + 1) * (len(DIVERSITIES) + 1)


def strength(total: float, distinct: float) -> int:
    """A class of evidence, below STRENGTHS: by occurrences, then by distinct per occurrence."""
    row = bisect_left(TOTALS, total)
    return row * (len(DIVERSITIES) + 1) + bisect_left(DIVERSITIES, distinct / total)


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token.

    `source` is the tier that drafted it, "draft:<model>", "target" (bonus, corrected or plain), or
    "unknown".
    `text` is the text that it completes: "" while a UTF-8 sequence or a stop string is pending.
    `probability` is the target's own, from the logits before any sampler setting; `likeliest` are
    the likeliest tokens at the same position with their probabilities, if they were requested.
    `start` is the number of characters of the answer before it, in its own text and that of the
    tokens before; a token within a character starts where that does.
    """

    id: int
    position: int
    source: str
    match_length: int = 0
    text: str = ""
    probability: float = field(default=0.0, compare=False)
    likeliest: tuple[tuple[int, float], ...] = field(default=(), compare=False)
    start: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prompt is in the cache, which already held `reused` of its `tokens`.

    `plain_seconds` is the time that plain decoding takes for it, without the reading and learning
    of the drafters.
    """

    tokens: int
    reused: int
    seconds: float = field(default=0.0, compare=False)
    plain_seconds: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Learned:
    """The drafters have learned the answer: the last event of a run that was not interrupted."""

    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Step:
    """One target forward and its result.

    `proposed` and `accepted` count tree nodes per source, `by_depth` holds (proposed, accepted) for
    depth 1, 2, ...; timings are seconds and do not take part in comparisons. `look_ups` is the time
    each source spent proposing; `levels` gives for each draft model of a stack the number of its
    forwards, and how many tokens were drafted for it and accepted by it.

    `plain_seconds` is the time that plain decoding would have taken for these tokens at the load of
    this moment; None if unknown. A step that proposed nothing is a plain step.

    `tree` holds the guesses (engine/recorded.py): None if they were not recorded. `beside` is the
    number of other answers that the forward was shared with; its time is that of all of it, and
    `plain_seconds` is for plain decoding of as many answers at once.
    """

    index: int
    tokens: tuple[Token, ...]
    proposed: Mapping[str, int] = field(default_factory=dict)
    accepted: Mapping[str, int] = field(default_factory=dict)
    by_depth: tuple[tuple[int, int], ...] = ()
    draft_seconds: float = field(default=0.0, compare=False)
    verify_seconds: float = field(default=0.0, compare=False)
    sample_seconds: float = field(default=0.0, compare=False)
    other_seconds: float = field(default=0.0, compare=False)
    look_ups: Mapping[str, float] = field(default_factory=dict, compare=False)
    levels: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    finish: Finish | None = None
    plain_seconds: float | None = field(default=None, compare=False)
    tree: bytes | None = field(default=None, compare=False)
    beside: int = field(default=0, compare=False)

    @property
    def seconds(self) -> float:
        """Wall time of the step, without the time its consumer took."""
        return self.draft_seconds + self.verify_seconds + self.sample_seconds + self.other_seconds


Event = Prefill | Step | Learned
"""The events of a run: one Prefill, its Steps, then Learned."""


@dataclass(frozen=True, slots=True)
class Part:
    """A continuation of an answer: its first step, how it was made, and the prefill before it."""

    step: int
    method: str
    model: str
    fingerprint: str
    settings: Mapping[str, Any]
    prefill: Prefill


@dataclass(frozen=True, slots=True)
class Run:
    """One answer as it was decoded, finished or in progress: how it was made, and its events.

    An answer that ended early and was continued has further `parts`.

    It was made by the method called `method`, on the model called `model` with this `fingerprint`;
    `settings` are those of generation and drafting, as JSON values, without unknown ones. All other
    figures follow from these (engine/metrics.py).
    """

    method: str = "plain"
    model: str = ""
    fingerprint: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    prefill: Prefill | None = None
    steps: tuple[Step, ...] = ()
    learned: Learned | None = None
    parts: tuple[Part, ...] = ()

    @property
    def tokens(self) -> list[Token]:
        return [token for step in self.steps for token in step.tokens]

    @property
    def finish(self) -> Finish | None:
        return self.steps[-1].finish if self.steps else None

    @property
    def broken_off(self) -> bool:
        """Whether it ended before it was complete, because the user stopped it or left."""
        return self.finish in (None, "cancelled")


NO_RUN = Run()
"""An empty run."""
