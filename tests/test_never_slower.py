"""What drafting may cost where it gains nothing: whole answers by a made-up clock.

The model, the look-ups and the learning take exactly the seconds that the tests give them, so the
bound can be asserted to the step. What the real databases take is told by `python -m bench speed`.
"""

from collections.abc import Callable, Mapping, Sequence

import pytest

from engine.backends.scores import LogitScores
from engine.backends.toy import END, ToyBackend, toy_logits
from engine.budget import CREDIT, Budget
from engine.costs import CostCurve, Trial
from engine.decode import decode
from engine.drafters.base import Likely
from engine.sampling import Floats
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree, graft
from engine.types import CONTEXT, Step, Work

FORWARD = 3e-4
PROMPT = list(b"once upon a time there was a fast model")
TOKENS = 3000
GENERATION = Generation(Sampling(temperature=1.0, seed=1), max_tokens=TOKENS)


class Clock:
    """Stands still unless it is told that time went by."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("engine.decode.perf_counter", clock)
    return clock


def endless(suffix: tuple[int, ...]) -> Floats:
    """The toy's logits without an end."""
    logits = toy_logits(suffix).copy()
    logits[END] = -20.0
    return logits


class Timed(ToyBackend):
    """Every forward takes as long, however many rows it has."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(context_length=8192, logits=endless)
        self.clock = clock

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        self.clock.now += FORWARD
        return super().score(tree, sampling)


class Costly:
    """Takes time to look and to learn. Drafts what `knows` says follows."""

    name = "databases"

    def __init__(
        self,
        clock: Clock,
        looking: float,
        learning: float,
        knows: Callable[[Sequence[int]], Sequence[int]] = lambda tokens: (),
    ) -> None:
        self.clock, self.looking, self.learning, self.knows = clock, looking, learning, knows
        self.learned = 0

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        self.clock.now += self.looking
        graft(tree, self.knows(tokens)[: budget.depth], CONTEXT, 1, budget.nodes)
        return {CONTEXT: Work(self.looking)}

    def observe(self, tokens: Sequence[int], new: int, likely: Likely | None) -> None:
        self.clock.now += self.learning * new
        self.learned += new

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Nothing is kept."""


def flat() -> CostCurve:
    """Forwards as they are here: a node more is free."""
    return CostCurve({0: FORWARD, 64: FORWARD})


def answer(
    clock: Clock, drafters: Sequence[Costly] = (), costs: CostCurve | None = None
) -> tuple[float, list[Step]]:
    """The seconds of a whole answer, prompt and all, and its steps."""
    start = clock.now
    events = decode(Timed(clock), PROMPT, drafters, GENERATION, Drafting(), costs=costs)
    steps = [event for event in events if isinstance(event, Step)]
    return clock.now - start, steps


@pytest.mark.parametrize("learning", [0.0, 3e-6, 1e-5, 4e-5])
@pytest.mark.parametrize("looking", [1e-5, 1e-4])
@pytest.mark.parametrize("wrong", [(), (END,)], ids=["no drafts", "wrong drafts"])
def test_what_gains_nothing_costs_little_however_long_learning_takes(
    clock: Clock, looking: float, learning: float, wrong: tuple[int, ...]
) -> None:
    """Over ten answers of 3,000 tokens, beside the prompts; learning up to a whole forward."""
    plain, _ = answer(clock)
    assert plain == pytest.approx(TOKENS * FORWARD)
    costs = flat()
    for number in range(10):
        drafter = Costly(clock, looking, learning, lambda tokens: wrong)
        seconds, steps = answer(clock, [drafter], costs)
        assert sum(len(step.tokens) for step in steps) == TOKENS
        prompt = learning * len(PROMPT)
        lost = (seconds - prompt) / plain - 1
        allowed = 0.025 if number else 0.04
        assert lost < allowed, f"answer {number} took {lost:.1%} longer"
    assert drafter.learned >= len(PROMPT)


def test_learning_that_costs_next_to_nothing_leaves_nothing_out(clock: Clock) -> None:
    costs, learned = flat(), 0
    for _ in range(3):
        drafter = Costly(clock, 1e-4, 1e-6)
        answer(clock, [drafter], costs)
        learned += drafter.learned
    assert costs.trial.pause and learned == 3 * (TOKENS + len(PROMPT))


@pytest.mark.parametrize("learning", [3e-6, 4e-5])
def test_drafts_that_come_true_after_a_long_rest_end_it(clock: Clock, learning: float) -> None:
    """As where a text is repeated that was there before: learning need not be cheap for that."""
    plain, wanted = answer(clock)
    text = [*PROMPT, *(token.id for step in wanted for token in step.tokens)]
    costs = flat()
    for _ in range(3):
        answer(clock, [Costly(clock, 1e-4, learning)], costs)
    assert costs.trial.rest

    def knows(tokens: Sequence[int]) -> Sequence[int]:
        return text[len(tokens) : len(tokens) + 8] if len(tokens) > 1500 else ()

    seconds, steps = answer(clock, [Costly(clock, 3e-5, learning, knows)], costs)
    assert [token.id for step in steps for token in step.tokens] == text[len(PROMPT) :]
    assert seconds < 0.75 * plain and costs.trial.credit == CREDIT


def test_learning_is_paid_by_what_drafts_save(clock: Clock) -> None:
    """Two tokens a step save a forward, and take 1.6 forwards to learn: drafting rests."""
    plain, wanted = answer(clock)
    text = [*PROMPT, *(token.id for step in wanted for token in step.tokens)]
    costs, learning = flat(), 0.8 * FORWARD

    def knows(tokens: Sequence[int]) -> Sequence[int]:
        return text[len(tokens) : len(tokens) + 1]

    for number in range(3):
        seconds, steps = answer(clock, [Costly(clock, 1e-5, learning, knows)], costs)
        prompt = learning * len(PROMPT)
        assert seconds - prompt < (1.04 if number == 0 else 1.025) * plain
    assert costs.trial.credit <= Trial().credit
