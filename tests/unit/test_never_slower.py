"""What drafting may cost where it gains nothing: whole answers by a made-up clock.

The model, the look-ups and the learning take exactly the seconds that the tests give them, so the
bound can be asserted to the step. What the real databases take is told by `python -m bench speed`.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from engine.backends.scores import LogitScores
from engine.backends.toy import END, ToyBackend, toy_logits
from engine.decode import decode
from engine.drafting.budget import Budget
from engine.drafting.controller import FULL, PLAIN
from engine.drafting.costs import CostCurve, Gain
from engine.sampling import Floats
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree, graft
from engine.types import CONTEXT, DATABASES, STACK, Learned, Prefill, Step, Work

FORWARD = 3e-4
PROMPT = list(b"once upon a time there was a fast model")
TOKENS = 3000
GENERATION = Generation(Sampling(temperature=0.0), max_tokens=TOKENS)


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


@cache
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
    """Takes time to look and to learn. Drafts what `knows` says follows.

    As a stack of draft models it learns nothing but the prompt, which it reads, and it leaves the
    drafts of databases alone.
    """

    def __init__(
        self,
        clock: Clock,
        looking: float,
        learning: float,
        knows: Callable[[Sequence[int]], Sequence[int]] = lambda tokens: (),
        name: str = DATABASES,
    ) -> None:
        self.clock, self.looking, self.learning, self.knows = clock, looking, learning, knows
        self.name, self.source = name, CONTEXT if name == DATABASES else "draft:small"
        self.learned = 0

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        if self.name == STACK and len(tree) and budget.due != STACK:
            return {}
        self.clock.now += self.looking
        graft(tree, self.knows(tokens)[: budget.depth], self.source, 1, budget.nodes)
        return {self.source: Work(self.looking)}

    def observe(self, tokens: Sequence[int], new: int) -> None:
        if self.name == DATABASES or new == len(tokens):
            self.clock.now += self.learning * new
            self.learned += new

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Nothing is kept."""


def flat() -> CostCurve:
    """Forwards as they are here: a node more is free."""
    return CostCurve({0: FORWARD, 64: FORWARD})


def answer(
    clock: Clock,
    drafters: Sequence[Costly] = (),
    costs: CostCurve | None = None,
) -> tuple[float, list[Step]]:
    """The seconds of a whole answer, prompt and all, and its steps."""
    start = clock.now
    events = decode(Timed(clock), PROMPT, drafters, GENERATION, Drafting(), costs=costs)
    steps = [event for event in events if isinstance(event, Step)]
    return clock.now - start, steps


@pytest.mark.grid(1)
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


@pytest.mark.grid(1)
@pytest.mark.parametrize("drafting", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("reading", [0.0, 1e-4])
def test_draft_models_that_gain_nothing_cost_little_too(
    clock: Clock, drafting: float, reading: float
) -> None:
    """Drafts of a tenth of a forward to two; reading the prompt aside."""
    plain, _ = answer(clock)
    costs = flat()
    for number in range(10):
        small = Costly(clock, drafting * FORWARD, reading, lambda tokens: (END,), STACK)
        seconds, steps = answer(clock, [small], costs)
        assert sum(len(step.tokens) for step in steps) == TOKENS
        lost = (seconds - small.learned * reading) / plain - 1
        allowed = 0.03 if number else 0.04
        assert lost < allowed, f"answer {number} took {lost:.1%} longer"
    assert not small.learned, "who backs off leaves the prompt unread"


def test_draft_models_that_gain_nothing_leave_the_databases_their_gain(clock: Clock) -> None:
    """And databases that gain nothing the draft models theirs: either is weighed for itself."""
    plain, wanted = answer(clock)
    text = [*PROMPT, *(token.id for step in wanted for token in step.tokens)]

    def knows(tokens: Sequence[int]) -> Sequence[int]:
        return text[len(tokens) : len(tokens) + 4]

    for good in (DATABASES, STACK):
        alone, _ = answer(clock, [Costly(clock, 3e-5, 1e-6, knows, good)], flat())
        both = [
            Costly(clock, 3e-5, 1e-6, knows if name == good else lambda tokens: (), name)
            for name in (DATABASES, STACK)
        ]
        seconds, _ = answer(clock, both, flat())
        assert alone < 0.3 * plain and seconds < 1.05 * alone, good


def test_plain_steps_that_are_only_taken_to_see_what_they_take_cost_a_hundredth(
    clock: Clock,
) -> None:
    plain, wanted = answer(clock)
    text = [*PROMPT, *(token.id for step in wanted for token in step.tokens)]
    for ahead in (1, 3, 15):
        drafter = Costly(clock, 0.0, 0.0, lambda tokens, n=ahead: text[len(tokens) :][:n])
        seconds, steps = answer(clock, [drafter], flat())
        assert sum(not step.proposed for step in steps) >= len(steps) // (PLAIN + 1)
        assert seconds < 1.011 * plain / (ahead + 1) + FORWARD


# What an answer says of itself: the live speedup.


def live(
    clock: Clock, drafters: Sequence[Costly], costs: CostCurve | None, drafting: Drafting
) -> tuple[float, list[Step]]:
    """Plain seconds over the seconds that an answer took, and its steps."""
    events = list(decode(Timed(clock), PROMPT, drafters, GENERATION, drafting, costs=costs))
    read, *steps, learned = events
    assert isinstance(read, Prefill) and isinstance(learned, Learned)
    assert read.plain_seconds is not None
    told = [step for step in steps if isinstance(step, Step)]
    plain = read.plain_seconds + sum(step.plain_seconds or 0.0 for step in told)
    return plain / (read.seconds + sum(step.seconds for step in told) + learned.seconds), told


@pytest.mark.grid
@pytest.mark.parametrize("load", [1.0, 3.0])
@pytest.mark.parametrize("name", [DATABASES, STACK])
@pytest.mark.parametrize("ahead", [0, 1, 7])
def test_the_live_speedup_is_the_measured_one(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, ahead: int, name: str, load: float
) -> None:
    """At any load: the costs were measured on a machine that had nothing else to do."""
    monkeypatch.setattr("tests.unit.test_never_slower.FORWARD", load * FORWARD)
    plain, wanted = answer(clock)
    text = [*PROMPT, *(token.id for step in wanted for token in step.tokens)]

    def knows(tokens: Sequence[int]) -> Sequence[int]:
        return text[len(tokens) : len(tokens) + ahead] if ahead else (END,)

    costs = flat()
    for _ in range(2):
        start = clock.now
        drafter = Costly(clock, load * 3e-5, load * 1e-5, knows, name)
        told, steps = live(clock, [drafter], costs, Drafting())
        assert told == pytest.approx(plain / (clock.now - start), rel=1e-3)
        assert all(step.plain_seconds for step in steps)
        assert ahead or 0.95 < told < 1.0, "nothing was saved"


def test_without_drafters_an_answer_is_plain_and_says_so(clock: Clock) -> None:
    told, steps = live(clock, [], None, Drafting())
    assert told == 1.0 and all(step.plain_seconds == step.seconds for step in steps)


def test_without_costs_the_plain_steps_of_the_answer_must_do(clock: Clock) -> None:
    """Before the first one nothing is known."""
    plain, wanted = answer(clock)
    text = [*PROMPT, *(token.id for step in wanted for token in step.tokens)]

    def knows(tokens: Sequence[int]) -> Sequence[int]:
        return () if len(tokens) % 101 == 0 else text[len(tokens) :][:1]

    costs, drafting = [None, flat()], Drafting(budget="fixed")
    for curve in costs:
        _, steps = live(clock, [Costly(clock, 3e-5, 1e-5, knows)], curve, drafting)
        first = next(at for at, step in enumerate(steps) if not step.proposed)
        assert first > 9 and {step.plain_seconds for step in steps[:first]} == {None}
        known = [step.plain_seconds for step in steps[first:]]
        emitted = sum(len(step.tokens) for step in steps[first:])
        assert sum(seconds or 0.0 for seconds in known) == pytest.approx(emitted * FORWARD)


def test_learning_that_costs_next_to_nothing_leaves_nothing_out(clock: Clock) -> None:
    costs, learned = flat(), 0
    for _ in range(3):
        drafter = Costly(clock, 1e-4, 1e-6)
        answer(clock, [drafter], costs)
        learned += drafter.learned
    assert costs.gate.gains[DATABASES].length and learned == 3 * (TOKENS + len(PROMPT))


@pytest.mark.parametrize("learning", [3e-6, 4e-5])
def test_drafts_that_come_true_after_a_long_rest_end_it(clock: Clock, learning: float) -> None:
    """As where a text is repeated that was there before: learning need not be cheap for that."""
    plain, wanted = answer(clock)
    text = [*PROMPT, *(token.id for step in wanted for token in step.tokens)]
    costs = flat()
    for _ in range(3):
        answer(clock, [Costly(clock, 1e-4, learning)], costs)
    assert costs.gate.gains[DATABASES].backoff

    def knows(tokens: Sequence[int]) -> Sequence[int]:
        return text[len(tokens) : len(tokens) + 8] if len(tokens) > 1500 else ()

    seconds, steps = answer(clock, [Costly(clock, 3e-5, learning, knows)], costs)
    assert [token.id for step in steps for token in step.tokens] == text[len(PROMPT) :]
    assert seconds < 0.75 * plain and costs.gate.gains[DATABASES].balance == FULL


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
    assert costs.gate.gains[DATABASES].balance <= Gain().balance


ROW = 0.2
"""What a further row adds to a forward, as a share of it."""


class Rereading(Timed):
    """Reads what was accepted once more with the next forward, where something was rejected; its
    states are put back for that, which takes so many forwards."""

    unread = 0

    def __init__(self, clock: Clock, copying: float) -> None:
        super().__init__(clock)
        self.copying = copying

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        self.clock.now += FORWARD * ROW * (self.unread + len(tree))
        self.drafted = len(tree)
        return super().score(tree, sampling)

    def accept(self, rows: Sequence[int]) -> None:
        if self.drafted > len(rows):
            self.clock.now += FORWARD * self.copying
            self.unread += len(rows) + 1
        else:
            self.unread = 0
        super().accept(rows)


def rising() -> CostCurve:
    """Forwards of such a model."""
    return CostCurve({rows: FORWARD * (1 + ROW * rows) for rows in range(41)})


class Sure(Costly):
    """Drafts four tokens, which are right once in `every` times, and says that they are so with
    that probability times `sureness`, as far as they then pay."""

    def __init__(self, clock: Clock, truth: Sequence[int], every: int, sureness: float) -> None:
        super().__init__(clock, 0.0, 0.0)
        self.truth, self.every, self.probability = truth, every, min(1.0, sureness / every)
        self.draw = random.Random(1)

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        path = self.truth[len(tokens) : len(tokens) + 4][: budget.depth]
        right = self.draw.random() < 1 / self.every
        for number, token in enumerate(path if right else [END] * len(path)):
            if not budget.pays(number, self.probability):
                break
            tree.add(number, token, self.source)
            budget.added(number + 1, self.probability)
        tree.cut(budget.best)
        return {self.source: Work(0.0)}


@pytest.mark.parametrize("copying", [0.1, 2.0])
@pytest.mark.parametrize("sureness", [1.0, 100.0])
@pytest.mark.parametrize("every", [1, 2, 3, 5, 50])
def test_what_is_read_again_is_charged_to_who_drafted(
    clock: Clock, every: int, sureness: float, copying: float
) -> None:
    """However sure a drafter is: where it gains nothing after all that is undone, it stops."""
    start = clock.now
    said = [t.id for e in decode(Timed(clock), PROMPT, [], GENERATION, Drafting()) for t in of(e)]
    truth, plain = [*PROMPT, *said], TOKENS * FORWARD
    assert clock.now - start == pytest.approx(plain)
    costs, spent = rising(), list[float]()
    for _ in range(3):
        start, drafter = clock.now, Sure(clock, truth, every, sureness)
        model = Rereading(clock, copying)
        events = decode(model, PROMPT, [drafter], GENERATION, Drafting(), costs=costs)
        assert [token.id for event in events for token in of(event)] == said
        spent.append((clock.now - start) / plain)
    assert max(spent) < (1.02 if sureness <= 1 else 1.06), spent
    if every == 1:
        assert spent[-1] < 0.5 and costs.undoing == 0


class Unprepared(Timed):
    """A forward of another size than the last one takes longer, and each row a little."""

    LONGER = 0.3

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.size = 0

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        size = len(tree)
        self.clock.now += FORWARD * (0.05 * size + self.LONGER * (size != self.size))
        self.size = size
        return super().score(tree, sampling)


@pytest.mark.parametrize("every", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("known", [False, True])
def test_a_plain_step_behind_drafts_does_not_pass_for_plain_decoding(
    clock: Clock, every: int, known: bool
) -> None:
    """Drafting is neither slower for that, nor said to gain more than it does: whether the curve
    was measured as drafting goes, or every size again and again."""
    start = clock.now
    said = [
        t.id for e in decode(Unprepared(clock), PROMPT, [], GENERATION, Drafting()) for t in of(e)
    ]
    plain = clock.now - start
    assert plain == pytest.approx(TOKENS * FORWARD)
    longer = Unprepared.LONGER if known else 0.0
    costs = CostCurve({n: FORWARD * (1 + 0.05 * n + longer * (n > 0)) for n in (0, 1, 2, 3, 4)})
    for _ in range(3):
        start, model = clock.now, Unprepared(clock)
        drafter = Sure(clock, [*PROMPT, *said], every, 1.0)
        events = decode(model, PROMPT, [drafter], GENERATION, Drafting(), costs=costs)
        steps = [event for event in events if isinstance(event, Step)]
        spent, told = clock.now - start, sum(step.plain_seconds or 0.0 for step in steps)
        assert spent < 1.02 * plain and told < 1.01 * plain
    assert told > 0.97 * plain, "nor to gain less, once some answers have corrected the curve"
    assert every > 3 or spent < 0.6 * plain


def of(event: object) -> Sequence[Any]:
    return event.tokens if isinstance(event, Step) else ()
