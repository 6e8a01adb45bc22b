"""What is known of a family of models before they are stacked: a value, measured or made up.

Models are in their order of size, the target last. A pair (below, above) of their indices says how
well the lower one drafts for the upper one: `acceptance` is 1 - E[TV], the probability that a
single draft is accepted by rejection sampling; `survival[k - 1]` is the probability that the first
k drafted tokens are all accepted, per verification rule, as contexts differ and the mean of single
acceptances predicts runs of them poorly.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from math import isfinite
from typing import Any, Self

from engine.types import RULES, Rule

LATEST = 12
"""So many answers of a stack are kept."""
ENOUGH = 128
"""The fewest tokens that correct a prediction."""
OFF = 1.1
"""A stack that takes so many times as long as planned with, or as little, is planned again."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Decoding of one model with the databases, or its head, drafting for it.

    A round emits k tokens with probability `law[k - 1]` and takes `seconds` on average. `order` are
    the tokens of rounds as they came, where a batch is gathered from several: databases draft long
    where a text repeats itself and nothing elsewhere, so a round is much like the one before.
    """

    law: tuple[float, ...]
    seconds: float
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One model's costs. `costs` maps numbers of drafted tokens, from 0, to the seconds in which it
    verifies them: the forward, the choice of one token, roll-back. `choice` is the seconds of every
    further choice.

    `databases`, `head` and `merged` are its rounds with the databases drafting for it, its own
    head, and both in one tree. None where that was not measured.
    """

    name: str
    fingerprint: str
    parameters: int
    memory_bytes: int
    costs: Mapping[int, float]
    choice: float = 0.0
    databases: Rounds | None = None
    head: Rounds | None = None
    merged: Rounds | None = None

    def rounds(self, databases: bool, head: bool) -> Rounds | None:
        """The rounds with these drafting for it; None where they were not measured."""
        if databases:
            return self.merged if head else self.databases
        return self.head if head else None

    def seconds(self, drafted: int) -> float:
        """c(n): the seconds of a round over `drafted` tokens, before further choices.

        Between two measured sizes the larger one counts; beyond the last the curve rises on.
        """
        sizes = sorted(self.costs)
        at = bisect_left(sizes, drafted)
        if at < len(sizes):
            return self.costs[sizes[at]]
        if len(sizes) == 1:
            return self.costs[sizes[0]]
        last, before = sizes[-1], sizes[-2]
        rise = max(0.0, (self.costs[last] - self.costs[before]) / (last - before))
        return self.costs[last] + rise * (drafted - last)


@dataclass(frozen=True, slots=True)
class Pair:
    """How well one model drafts for another."""

    acceptance: float
    survival: Mapping[Rule, tuple[float, ...]]

    def survives(self, rule: Rule, depth: int) -> float:
        """The probability that the first `depth` drafted tokens are accepted.

        Beyond what was measured it falls as it did at the end.
        """
        known = self.survival[rule]
        if depth <= 0:
            return 1.0
        if depth <= len(known):
            return known[depth - 1]
        if not known or not known[-1]:
            return 0.0
        half = len(known) // 2
        ratio = (known[-1] / known[half - 1]) ** (1 / (len(known) - half)) if half else known[-1]
        return float(known[-1] * min(ratio, 1.0) ** (depth - len(known)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tokens of an answer took. `expected` are the seconds by the profile, and
    `plain_seconds` those of plain decoding, both at the load of that moment."""

    tokens: int
    seconds: float
    expected: float
    plain_seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """A family of models, the target last. `pairs` holds every (below, above) with below < above.

    `sampling` is the sampler that acceptance was measured with (temperature, top_k, top_p, min_p),
    `positions` the number of positions that the target's row of the acceptance matrix rests on.
    `length` is how many tokens its answers had on average; 0 counts as endless. `outcomes` are the
    latest of every stack, by its name (engine/hsd/planner.py).
    """

    models: tuple[ModelProfile, ...]
    pairs: Mapping[tuple[int, int], Pair]
    sampling: Mapping[str, float]
    positions: int = 0
    measured: float = 0.0
    length: float = 0.0
    outcomes: Mapping[str, tuple[Outcome, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        wanted = {(i, j) for j in range(len(names)) for i in range(j)}
        if len(names) < 1 or len(set(names)) < len(names) or set(self.pairs) != wanted:
            raise ValueError("a profile needs models of different names and all of their pairs")
        for model in self.models:
            check_costs(model)
        for pair in self.pairs.values():
            check_pair(pair)
        if not (isfinite(self.length) and self.length >= 0):
            raise ValueError(f"answers cannot have {self.length} tokens")
        for outcomes in self.outcomes.values():
            check_outcomes(outcomes)

    @property
    def target(self) -> ModelProfile:
        """The model whose text is wanted."""
        return self.models[-1]

    def index(self, name: str) -> int:
        """Where the model of that name stands. Raises KeyError for a model that is missing."""
        for index, model in enumerate(self.models):
            if model.name == name:
                return index
        raise KeyError(name)

    def factor(self, stack: str) -> float:
        """How many times as long as predicted a stack took of late; 1 until enough is known."""
        found = self.outcomes.get(stack, ())
        if sum(outcome.tokens for outcome in found) < ENOUGH:
            return 1.0
        return sum(o.seconds for o in found) / sum(o.expected for o in found)

    def learned(self, stack: str, outcome: Outcome) -> Self:
        """The profile after one more answer by a stack, which is the last of the outcomes then."""
        latest = (*self.outcomes.get(stack, ()), outcome)[-LATEST:]
        others = {name: found for name, found in self.outcomes.items() if name != stack}
        return replace(self, outcomes=others | {stack: latest})

    def off(self, planned: "Profile") -> bool:
        """Whether what answers took is too far from what was planned with."""
        changes = [self.factor(stack) / planned.factor(stack) for stack in self.outcomes]
        return any(not 1 / OFF <= change <= OFF for change in changes)

    def mapping(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "models": [
                asdict(model) | {"costs": {str(n): s for n, s in model.costs.items()}}
                for model in self.models
            ],
            "pairs": [
                {"below": i, "above": j, "acceptance": p.acceptance, "survival": dict(p.survival)}
                for (i, j), p in self.pairs.items()
            ],
            "sampling": dict(self.sampling),
            "positions": self.positions,
            "measured": self.measured,
            "length": self.length,
            "outcomes": {
                stack: [asdict(outcome) for outcome in found]
                for stack, found in self.outcomes.items()
            },
        }

    @classmethod
    def from_mapping(cls, values: Any) -> Self:
        """From JSON values; raises ValueError for what cannot be a profile."""
        try:
            return cls(
                tuple(model_from(item) for item in values["models"]),
                {
                    (int(item["below"]), int(item["above"])): pair_from(item)
                    for item in values["pairs"]
                },
                {str(name): float(value) for name, value in values["sampling"].items()},
                int(values["positions"]),
                float(values["measured"]),
                float(values.get("length", 0.0)),
                {
                    str(stack): tuple(outcome_from(item) for item in found)
                    for stack, found in values.get("outcomes", {}).items()
                },
            )
        except (ArithmeticError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a profile: {error!r}") from error


def model_from(values: Mapping[str, Any]) -> ModelProfile:
    """One model of a stored profile."""
    return ModelProfile(
        str(values["name"]),
        str(values["fingerprint"]),
        int(values["parameters"]),
        int(values["memory_bytes"]),
        {int(n): float(seconds) for n, seconds in values["costs"].items()},
        float(values["choice"]),
        rounds_from(values["databases"]),
        rounds_from(values.get("head")),
        rounds_from(values.get("merged")),
    )


def rounds_from(values: Any) -> Rounds | None:
    """What drafts for one model of a stored profile, if anything does."""
    return values and Rounds(
        tuple(map(float, values["law"])),
        float(values["seconds"]),
        tuple(map(int, values.get("order", ()))),
    )


def outcome_from(values: Mapping[str, Any]) -> Outcome:
    """One answer of a stored profile."""
    times = (float(values[name]) for name in ("seconds", "expected", "plain_seconds"))
    return Outcome(int(values["tokens"]), *times)


def pair_from(values: Mapping[str, Any]) -> Pair:
    """One pair of a stored profile."""
    found = values["survival"]
    survival: dict[Rule, tuple[float, ...]] = {r: tuple(map(float, found[r])) for r in RULES}
    return Pair(float(values["acceptance"]), survival)


def check_costs(model: ModelProfile) -> None:
    """Raise ValueError unless times are positive and finite, and laws are laws."""
    times: list[float] = [*model.costs.values()]
    for rounds in (model.databases, model.head, model.merged):
        if rounds is not None:
            times.append(rounds.seconds)
            check_law(rounds.law)
            if not all(1 <= tokens <= len(rounds.law) for tokens in rounds.order):
                raise ValueError(f"not the tokens of rounds: {rounds.order}")
    if 0 not in model.costs or min(model.costs) < 0:
        raise ValueError(f"the costs of {model.name!r} do not begin at 0 drafted tokens")
    if not (isfinite(model.choice) and model.choice >= 0):
        raise ValueError(f"the time of a choice of {model.name!r} is not one: {model.choice}")
    if not all(isfinite(seconds) and seconds > 0 for seconds in times):
        raise ValueError(f"a time of {model.name!r} is not positive: {times}")


def check_law(law: Sequence[float]) -> None:
    """Raise ValueError unless these are the probabilities of 1, 2, ... tokens."""
    if not law or min(law) < 0 or not abs(sum(law) - 1) < 1e-6:
        raise ValueError(f"not a law of the tokens per round: {law}")


def check_pair(pair: Pair) -> None:
    """Raise ValueError unless probabilities are probabilities and survival never rises."""
    if set(pair.survival) != set(RULES) or not 0 <= pair.acceptance <= 1 + 1e-9:
        raise ValueError(f"not an acceptance: {pair}")
    for survival in pair.survival.values():
        falls = all(left >= right - 1e-9 for left, right in pairwise((1.0, *survival)))
        if not falls or not all(0 <= share <= 1 + 1e-9 for share in survival):
            raise ValueError(f"not a survival: {survival}")


def check_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Raise ValueError unless tokens were emitted, in times that are positive and finite."""
    for found in outcomes:
        times = found.seconds, found.expected, found.plain_seconds
        if found.tokens < 1 or not all(isfinite(spent) and spent > 0 for spent in times):
            raise ValueError(f"not an outcome: {found}")
