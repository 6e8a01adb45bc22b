"""Values that cross module borders. They hold data only; identity and storage belong elsewhere.

A *step* is one target forward: the drafters propose a tree, the target verifies it, and the
accepted path plus one bonus token are emitted. A run is a sequence of steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

CONTEXT, MODEL, STATISTICS, TARGET = "context", "model", "statistics", "target"
TIERS = (CONTEXT, MODEL, STATISTICS)
"""The databases from highest to lowest temporal locality (arXiv 2502.05609, section 3)."""

Finish = Literal["eos", "stop", "length", "context", "cancelled"]
"""Why a run ended: end token, stop string, max tokens, context limit, or the user."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


class Candidate(NamedTuple):
    """One node a drafter proposes.

    `path` holds the tokens from just after the root to this node, so a node of depth d has d
    tokens; `probability` is the drafter's estimate that the target emits the whole path;
    `match_length` is the number of context tokens that led to it.
    """

    path: tuple[int, ...]
    probability: float
    match_length: int


class Gram(NamedTuple):
    """An n-gram of a model's past answers: `documents` answers held it, the last one at `seen`."""

    tokens: tuple[int, ...]
    documents: int
    seen: int


class Continuation(NamedTuple):
    """A path that followed a key in some text, with `share` = count(key + path) / count(key)."""

    path: tuple[int, ...]
    share: float


class Followers(NamedTuple):
    """What followed a key that occurred `total` times: paths, likeliest first.

    Every prefix of a path is listed before it.
    """

    total: float
    paths: tuple[Continuation, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token.

    `source` is the tier that drafted it, "draft:<model>", or "target" (bonus, corrected or plain).
    `text` is the text that it completes: "" while a UTF-8 sequence or a stop string is pending.
    `probability` is the target's own, from the logits before any sampler setting.
    """

    id: int
    position: int
    source: str
    match_length: int = 0
    text: str = ""
    probability: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prompt is in the cache: `reused` of its `tokens` were there already."""

    tokens: int
    reused: int
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Step:
    """One target forward and what came of it.

    `proposed` and `accepted` count tree nodes per source, `by_depth` holds (proposed, accepted)
    for depth 1, 2, ...; timings are seconds and do not take part in comparisons. `look_ups`
    is the time each tier spent proposing.
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
    finish: Finish | None = None

    @property
    def seconds(self) -> float:
        """Wall time of the step, without the time its consumer took."""
        return self.draft_seconds + self.verify_seconds + self.sample_seconds + self.other_seconds
