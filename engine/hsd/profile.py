"""The profile of a family of models, on which a plan is based: a value, measured or synthetic.

Models are ordered by size, the target last. A pair (below, above) of their indices describes how
well the lower model drafts for the upper one: `acceptance` is 1 - E[TV], the probability that
rejection sampling accepts a single draft; `survival[k - 1]` is what the k-th draft adds to the
tokens of a round, per verification rule: the probability that the first k drafts are all accepted,
averaged over the places where rounds of k drafts begin. Survival is measured separately because
contexts differ, so that the mean acceptance predicts sequences of tokens poorly.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter

from engine.drafting.costs import cost_at
from engine.types import RULES, Rule

LATEST = 12
"""The number of answers that are kept for each stack."""
ENOUGH = 128
"""The fewest observed tokens that correct a prediction."""
OFF = 1.1
"""The factor between planned and observed time beyond which a stack is planned again."""
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1 + 1e-9)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Rounds:
    """Decoding of one model with the databases, or its head, drafting for it.

    A round emits k tokens with probability `law[k - 1]` and takes `seconds` on average. `order` is
    the number of tokens of each round in the observed order, which matters if a batch is gathered
    from several rounds: databases draft much where a text repeats itself and nothing elsewhere, so
    a round resembles the round before.
    """

    law: tuple[Share, ...]
    seconds: Seconds
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One model's costs. `costs` maps numbers of drafted tokens, from 0, to the seconds in which it
    verifies them: the forward, the choice of one token, roll-back. `choice` is the seconds of every
    further choice.

    `databases`, `head` and `merged` are its rounds with drafts from the databases, from its own
    head, and from both in one tree; None for those that were not measured.
    """

    name: str
    fingerprint: str
    parameters: int
    memory_bytes: int
    costs: Mapping[int, Seconds]
    choice: Amount = 0.0
    databases: Rounds | None = None
    head: Rounds | None = None
    merged: Rounds | None = None

    def rounds(self, databases: bool, head: bool) -> Rounds | None:
        if databases:
            return self.merged if head else self.databases
        return self.head if head else None

    def seconds(self, drafted: int) -> float:
        """c(n): the seconds of a round over `drafted` tokens, before further choices."""
        sizes = sorted(self.costs)
        return cost_at(sizes, [self.costs[size] for size in sizes], drafted)


@dataclass(frozen=True, slots=True)
class Pair:
    """How well one model drafts for another."""

    acceptance: Share
    survival: Mapping[Rule, tuple[Share, ...]]

    def survives(self, rule: Rule, depth: int) -> float:
        """The probability that the first `depth` drafted tokens are accepted.

        Beyond the measured depths it falls at the last measured rate.
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
    """The observed time of the tokens of an answer. `expected` are the seconds by the profile, and
    `plain_seconds` those of plain decoding, both at the load of that moment."""

    tokens: Annotated[int, Field(ge=1)]
    seconds: Seconds
    expected: Seconds
    plain_seconds: Seconds


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
    length: Amount = 0.0
    outcomes: Mapping[str, tuple[Outcome, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        expected = {(i, j) for j in range(len(names)) for i in range(j)}
        if len(names) < 1 or len(set(names)) < len(names) or set(self.pairs) != expected:
            raise ValueError("a profile needs models of different names and all of their pairs")
        for model in self.models:
            check_costs(model)
        for pair in self.pairs.values():
            check_pair(pair)

    @property
    def target(self) -> ModelProfile:
        return self.models[-1]

    def index(self, name: str) -> int:
        for index, model in enumerate(self.models):
            if model.name == name:
                return index
        raise KeyError(name)

    def factor(self, stack: str) -> float:
        """The recent time of a stack divided by its predicted time; 1 until enough is known."""
        found = self.outcomes.get(stack, ())
        if sum(outcome.tokens for outcome in found) < ENOUGH:
            return 1.0
        return sum(o.seconds for o in found) / sum(o.expected for o in found)

    def learned(self, stack: str, outcome: Outcome) -> Self:
        latest = (*self.outcomes.get(stack, ()), outcome)[-LATEST:]
        others = {name: found for name, found in self.outcomes.items() if name != stack}
        return replace(self, outcomes=others | {stack: latest})

    def off(self, planned: "Profile") -> bool:
        """Whether answers took much more or less time than the plan assumed."""
        changes = [self.factor(stack) / planned.factor(stack) for stack in self.outcomes]
        return any(not 1 / OFF <= change <= OFF for change in changes)

    def mapping(self) -> dict[str, Any]:
        pairs = [{"below": i, "above": j, **asdict(pair)} for (i, j), pair in self.pairs.items()]
        return asdict(self) | {"pairs": pairs}

    @staticmethod
    def from_mapping(values: Any) -> "Profile":
        """From JSON values; raises ValueError for what cannot be a profile."""
        try:
            pairs = {(pair["below"], pair["above"]): pair for pair in values["pairs"]}
            required = {name: values[name] for name in ("positions", "measured")}
            return STORED.validate_python({**values, **required, "pairs": pairs})
        except (ArithmeticError, KeyError, TypeError) as error:
            raise ValueError(f"not a profile: {error!r}") from error


STORED = TypeAdapter(Profile)


def check_costs(model: ModelProfile) -> None:
    """Raise ValueError unless costs begin at 0 tokens and distributions sum to 1."""
    for rounds in (model.databases, model.head, model.merged):
        if rounds is not None:
            if not rounds.law or not abs(sum(rounds.law) - 1) < 1e-6:
                raise ValueError(f"not a distribution of the tokens per round: {rounds.law}")
            if not all(1 <= tokens <= len(rounds.law) for tokens in rounds.order):
                raise ValueError(f"not the tokens of rounds: {rounds.order}")
    if 0 not in model.costs or min(model.costs) < 0:
        raise ValueError(f"the costs of {model.name!r} do not begin at 0 drafted tokens")


def check_pair(pair: Pair) -> None:
    if set(pair.survival) != set(RULES):
        raise ValueError(f"not an acceptance: {pair}")
    for survival in pair.survival.values():
        if not all(left >= right - 1e-9 for left, right in pairwise((1.0, *survival))):
            raise ValueError(f"not a survival: {survival}")
