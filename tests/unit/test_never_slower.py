"""What drafting may cost where it gains nothing: whole answers on a simulated clock.

The model, the look-ups and the learning take exactly the seconds that the tests state, so the
bounds are exact. `python -m bench speed` measures the real ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random
from typing import NamedTuple

import pytest

from engine.decode import decode
from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.drafting.controller import FULL, PLAIN, RARELY
from engine.drafting.costs import COUNTED, STEADY, CostCurve, Gain
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree, graft
from engine.types import CONTEXT, DATABASES, STACK, Learned, Prefill, Step, Work
from tests.support.clocked import Clock, ClockedToy, clock_of, endless
from tests.support.toy import END

FORWARD = 3e-4
PROMPT = list(b"once upon a time there was a fast model")
TOKENS = 3000
PLAINLY = TOKENS * FORWARD
"""The seconds of plain decoding, where nothing interferes."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return clock_of(monkeypatch, "engine.decode")


@cache
def text() -> list[int]:
    """The prompt, and the answer that plain decoding gives to it."""
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + TOKENS:
        tokens.append(int(endless(tuple(tokens[-2:])).argmax()))
    return tokens


def coming(ahead: int) -> Callable[[Sequence[int]], Sequence[int]]:
    """Knows the next tokens of the answer."""
    return lambda tokens: text()[len(tokens) : len(tokens) + ahead]


class Costly(Drafter):
    """Takes time to look up and to learn, and drafts what `knows` says.

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
        self.learned, self.reading = 0, 0.0

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        if self.name == STACK and len(tree) and budget.due != STACK:
            return {}
        self.clock.now += self.looking
        graft(tree, self.knows(tokens)[: budget.depth], self.source, 1, budget.nodes)
        return {self.source: Work(self.looking)}

    def observe(self, tokens: Sequence[int], new: int) -> None:
        if new == len(tokens):
            self.reading = self.learning * new
        if self.name == DATABASES or new == len(tokens):
            self.clock.now += self.learning * new
            self.learned += new


class Sure(Costly):
    """Drafts some tokens, which are right once in `every` times, and says that they are so with
    that probability times `sureness`, as far as they then pay."""

    def __init__(self, clock: Clock, every: int, sureness: float = 1.0, ahead: int = 4) -> None:
        super().__init__(clock, 0.0, 0.0, coming(ahead))
        self.every, self.probability = every, min(1.0, sureness / every)
        self.draw = Random(1)

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        path = self.knows(tokens)[: budget.depth]
        right = self.draw.random() < 1 / self.every
        for number, token in enumerate(path if right else [END] * len(path)):
            if not budget.pays(number, self.probability):
                break
            tree.add(number, token, self.source)
            budget.added(number + 1, self.probability)
        tree.cut(budget.best)
        return {self.source: Work(0.0)}


def curve(rise: float = 0.0, nodes: int = 64) -> CostCurve:
    """Forwards to which each node adds that share."""
    return CostCurve({n: FORWARD * (1 + rise * n) for n in range(nodes + 1)[:: 1 if rise else 64]})


class Answer(NamedTuple):
    """The seconds of a whole answer, what it says that plain decoding takes, and its steps."""

    seconds: float
    shown: float
    steps: list[Step]


def answer(
    clock: Clock,
    drafters: Sequence[Costly] = (),
    costs: CostCurve | None = None,
    model: ClockedToy | None = None,
    tokens: int = TOKENS,
    drafting: Drafting = Drafting(),  # noqa: B008
) -> Answer:
    """An answer, whose text is that of plain decoding."""
    start, generation = clock.now, Generation(Sampling(temperature=0.0), max_tokens=tokens)
    model = model or ClockedToy(clock, lambda nodes: FORWARD)
    read, *steps, learned = decode(model, PROMPT, drafters, generation, drafting, costs=costs)
    assert isinstance(read, Prefill) and isinstance(learned, Learned)
    found = [step for step in steps if isinstance(step, Step)]
    said = [token.id for step in found for token in step.tokens]
    assert said == text()[len(PROMPT) :][:tokens]
    assert read.plain_seconds is not None
    shown = read.plain_seconds + sum(step.plain_seconds or 0.0 for step in found)
    spent = read.seconds + learned.seconds + sum(step.seconds for step in found)
    assert spent == pytest.approx(clock.now - start), "all of the time is shown"
    return Answer(clock.now - start, shown, found)


def test_an_answer_without_drafters_is_plain_and_says_so(clock: Clock) -> None:
    found = answer(clock)
    assert found.seconds == found.shown == pytest.approx(PLAINLY)
    assert all(step.plain_seconds == step.seconds for step in found.steps)


USELESS = [
    *((DATABASES, *each) for each in product((1e-5, 1e-4), (0.0, 3e-6, 1e-5, 4e-5), ((), (END,)))),
    *((STACK, *each) for each in product((3e-5, 1.5e-4, 6e-4), (0.0, 1e-4), ((END,),))),
]
"""Drafters that gain nothing: what they look up and learn with takes up to two forwards."""


@pytest.mark.soak(stay=2)
@pytest.mark.parametrize(("name", "looking", "learning", "wrong"), USELESS)
def test_what_gains_nothing_costs_little(
    clock: Clock, name: str, looking: float, learning: float, wrong: tuple[int, ...]
) -> None:
    """The prompt aside, an answer takes three hundredths longer at most, and the first one four."""
    costs, later = curve(), 0.025 if name == DATABASES else 0.03
    for number in range(10):
        drafter = Costly(clock, looking, learning, lambda tokens: wrong, name)
        lost = (answer(clock, [drafter], costs).seconds - drafter.reading) / PLAINLY - 1
        assert lost < (later if number else 0.04), f"answer {number} took {lost:.1%} longer"
    assert (drafter.learned > 0) == (name == DATABASES), "models that back off read no prompt"


@pytest.mark.parametrize("good", [DATABASES, STACK])
def test_who_gains_nothing_leaves_the_other_its_gain(clock: Clock, good: str) -> None:
    alone = answer(clock, [Costly(clock, 3e-5, 1e-6, coming(4), good)], curve()).seconds
    both = [
        Costly(clock, 3e-5, 1e-6, coming(4 if name == good else 0), name)
        for name in (DATABASES, STACK)
    ]
    assert alone < 0.3 * PLAINLY and answer(clock, both, curve()).seconds < 1.05 * alone


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("ahead", [1, 3, 15])
def test_plain_steps_that_are_only_taken_to_measure_cost_a_hundredth(
    clock: Clock, ahead: int
) -> None:
    """Apart from those of the first answer, which come sooner."""
    costs, spent, plain_steps = curve(), list[float](), 0
    for _ in range(17):
        found = answer(clock, [Costly(clock, 0.0, 0.0, coming(ahead))], costs)
        spent.append(found.seconds)
        plain_steps += sum(not step.proposed for step in found.steps)
    least = PLAINLY / (ahead + 1) + FORWARD
    assert spent[0] < 1.1 * least
    assert sum(spent[1:]) < 1.013 * 16 * least
    assert plain_steps >= sum(spent) / FORWARD / (PLAIN + STEADY + COUNTED)


@pytest.mark.grid
@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("load", [1.0, 3.0])
@pytest.mark.parametrize("name", [DATABASES, STACK])
@pytest.mark.parametrize("ahead", [0, 1, 7])
def test_the_live_speedup_is_the_measured_one(
    clock: Clock, ahead: int, name: str, load: float, measured: bool
) -> None:
    """At any load. Where the costs were not measured at that load, what is shown as gained is too
    little until steps have corrected them, and never too much."""
    costs, knows = curve(), coming(ahead) if ahead else lambda tokens: (END,)
    if measured:
        costs = CostCurve(dict.fromkeys((0, 64), load * FORWARD))
    model, plain = ClockedToy(clock, lambda nodes: load * FORWARD), load * PLAINLY
    for _ in range(2):
        drafter = Costly(clock, load * 3e-5, load * 1e-5, knows, name)
        found = answer(clock, [drafter], costs, model)
        assert (0.999 if measured or load == 1 else 0.8) < found.shown / plain < 1.001
        assert all(step.plain_seconds for step in found.steps)
        assert ahead or 0.95 < found.shown / found.seconds < 1.0, "nothing was saved"
        model.close()


def test_without_costs_the_plain_steps_of_the_answer_must_do(clock: Clock) -> None:
    """Before the first one nothing is known."""

    def knows(tokens: Sequence[int]) -> Sequence[int]:
        return () if len(tokens) % 101 == 0 else coming(1)(tokens)

    for costs in (None, curve()):
        drafter = Costly(clock, 3e-5, 1e-5, knows)
        steps = answer(clock, [drafter], costs, drafting=Drafting(budget="fixed")).steps
        first = next(at for at, step in enumerate(steps) if not step.proposed)
        assert first > 9 and {step.plain_seconds for step in steps[:first]} == {None}
        known = [step.plain_seconds for step in steps[first:]]
        emitted = sum(len(step.tokens) for step in steps[first:])
        assert sum(seconds or 0.0 for seconds in known) == pytest.approx(emitted * FORWARD)


# learning


def test_learning_that_costs_next_to_nothing_leaves_nothing_out(clock: Clock) -> None:
    costs, drafters = curve(), [Costly(clock, 1e-4, 1e-6) for _ in range(3)]
    for drafter in drafters:
        answer(clock, [drafter], costs)
        assert drafter.learned == TOKENS + len(PROMPT)
    assert costs.gate.gains[DATABASES].length


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("learning", [3e-6, 4e-5])
def test_drafts_that_come_true_after_a_long_back_off_end_it(clock: Clock, learning: float) -> None:
    """As where a text is repeated that was there before: learning need not be cheap for that."""
    costs = curve()
    for _ in range(3):
        answer(clock, [Costly(clock, 1e-4, learning)], costs)
    assert costs.gate.gains[DATABASES].backoff

    def knows(tokens: Sequence[int]) -> Sequence[int]:
        return coming(8)(tokens) if len(tokens) > 1500 else ()

    seconds = answer(clock, [Costly(clock, 3e-5, learning, knows)], costs).seconds
    assert seconds < 0.75 * PLAINLY and costs.gate.gains[DATABASES].balance == FULL


def test_learning_is_paid_by_what_drafts_save(clock: Clock) -> None:
    """Two tokens a step save a forward, and take 1.6 forwards to learn: drafting stops."""
    costs = curve()
    for number in range(3):
        drafter = Costly(clock, 1e-5, 0.8 * FORWARD, coming(1))
        seconds = answer(clock, [drafter], costs).seconds - drafter.reading
        assert seconds < (1.025 if number else 1.04) * PLAINLY
    assert costs.gate.gains[DATABASES].balance <= Gain().balance


# models whose forwards depend on what came before


def test_drafts_that_are_forced_become_rare_where_none_pays(clock: Clock) -> None:
    """One token is drafted, which is right every other time, and triples the time of a forward."""
    costs, drafted = CostCurve({0: FORWARD, 1: 3 * FORWARD, 64: 130 * FORWARD}), list[int]()
    for _ in range(6):
        model = ClockedToy(clock, lambda nodes: FORWARD * (3 if nodes else 1))
        steps = answer(clock, [Sure(clock, 2, ahead=1)], costs, model).steps
        drafted.append(sum(bool(step.proposed) for step in steps))
    assert 0 < drafted[0] <= 6, "128, 256, 512, ... steps apart"
    assert sum(drafted[1:]) <= 5 * TOKENS / RARELY + 2


ROW = 0.2
"""What a further row adds to a forward, as a share of it."""


class Rereading(ClockedToy):
    """Reads what was accepted once more with the next forward, where something was rejected; its
    states are put back for that, which takes so many forwards."""

    unread = 0

    def __init__(self, clock: Clock, copying: float) -> None:
        super().__init__(clock, self.rows)
        self.copying = copying

    def rows(self, nodes: int) -> float:
        self.drafted = nodes
        return FORWARD * (1 + ROW * (self.unread + nodes))

    def accept(self, rows: Sequence[int]) -> None:
        if self.drafted > len(rows):
            self.clock.now += FORWARD * self.copying
            self.unread += len(rows) + 1
        else:
            self.unread = 0
        super().accept(rows)


@pytest.mark.soak(stay=2)
@pytest.mark.parametrize("copying", [0.1, 2.0])
@pytest.mark.parametrize("sureness", [1.0, 100.0])
@pytest.mark.parametrize("every", [1, 2, 3, 5, 50])
def test_what_is_read_again_is_charged_to_who_drafted(
    clock: Clock, every: int, sureness: float, copying: float
) -> None:
    """However sure a drafter is: where it gains nothing after all that is undone, it stops."""
    costs = curve(ROW, 40)
    for _ in range(3):
        drafter = Sure(clock, every, sureness)
        spent = answer(clock, [drafter], costs, Rereading(clock, copying)).seconds / PLAINLY
        assert spent < (1.02 if sureness <= 1 else 1.06)
    assert every > 1 or (spent < 0.5 and costs.undoing == 0)


SLICE = 0.004
"""For how long another program uses the processor at a time: for as long as we do, in all."""


def on_one_thread(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, computing: Callable[[int], float]
) -> ClockedToy:
    """A model that takes this time of one thread, whose own clock is known."""
    processor = Clock()
    monkeypatch.setattr("engine.decode.thread_time", processor)

    def forward(nodes: int) -> float:
        seconds = computing(nodes)
        processor.now += seconds
        return seconds

    model = ClockedToy(clock, forward)
    model.info = replace(model.info, threads=1)
    return model


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("every", [2, 3])
def test_a_busy_machine_makes_no_gain(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """What is shown as gained is what was gained, although single forwards take many times what
    they should, and costs are learned from each."""
    costs, draw = curve(ROW, 40), Random(2)

    def computing(nodes: int) -> float:
        seconds = FORWARD * (1 + ROW * nodes)
        clock.now += SLICE if draw.random() < seconds / SLICE else 0.0
        return seconds

    for _ in range(4):
        model = on_one_thread(clock, monkeypatch, computing)
        shown = answer(clock, [Sure(clock, every)], costs, model).shown
        assert shown == pytest.approx(2 * PLAINLY, rel=0.1)


def test_plain_decoding_is_known_by_its_own_steps(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards measured on their own, without a chat's work between them, said that plain decoding
    takes half as long again as it does. After the first plain steps that is not shown as a gain."""
    costs = CostCurve({0: 1.5 * FORWARD, **{n: FORWARD * (1 + ROW * n) for n in range(3, 41)}})
    model = on_one_thread(clock, monkeypatch, lambda nodes: FORWARD * (1 + ROW * nodes))
    found = answer(clock, [Sure(clock, 2)], costs, model)
    begun = sum(len(step.tokens) for step in found.steps[:20])
    shown = sum(step.plain_seconds or 0.0 for step in found.steps[20:])
    assert shown == pytest.approx((TOKENS - begun) * FORWARD, rel=0.05)
    assert found.seconds < PLAINLY


def test_a_slow_start_is_not_multiplied_by_the_tokens_of_a_step(clock: Clock) -> None:
    """The first forward after a prompt takes four times as long as it was measured, and emits eight
    tokens. Plain decoding would lose that time once, not eight times."""
    begun = False

    def forward(nodes: int) -> float:
        nonlocal begun
        slow, begun = 1.0 if begun else 4.0, True
        return slow * FORWARD * (1 + 0.05 * nodes)

    costs = CostCurve({n: FORWARD * (1 + 0.05 * n) for n in range(41)})
    drafter = Costly(clock, 3e-5, 1e-5, coming(7))
    found = answer(clock, [drafter], costs, ClockedToy(clock, forward), tokens=40)
    assert len(found.steps) == 5 and found.steps[0].proposed
    late = 3 * FORWARD * (1 + 0.05 * 7)
    assert 0.95 * 40 * FORWARD < found.shown < 1.02 * (40 * FORWARD + late)


def test_cold_caches_make_no_gain(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards over drafts take half as long again as was measured, because drafting displaced what
    the caches held, and plain forwards reach their pace again step by step. In answers of 100
    tokens, as in a chat, what is shown as gained is from the second one on within 8 % of what was
    gained, in the mean of twelve new conversations."""
    draw, off = Random(7), list[float]()
    for _ in range(12):
        costs = curve(ROW, 40)
        for number in range(5):
            since = 99

            def computing(nodes: int) -> float:
                nonlocal since
                since = 0 if nodes else since + 1
                factor = 1.5 * (1 + ROW * nodes) if nodes else 1 + 0.15 * 0.8**since
                return FORWARD * factor * draw.gauss(1.0, 0.05)

            model = on_one_thread(clock, monkeypatch, computing)
            found = answer(clock, [Sure(clock, 1)], costs, model, tokens=100)
            if number:
                off.append(found.shown / (100 * FORWARD) - 1)
            assert found.seconds < 0.8 * 100 * FORWARD
    assert abs(sum(off) / len(off)) < 0.08


@pytest.mark.soak(stay=3)
@pytest.mark.parametrize("every", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("known", [False, True])
def test_a_plain_step_after_drafts_does_not_pass_for_plain_decoding(
    clock: Clock, every: int, known: bool
) -> None:
    """A forward of another size than the last one takes longer. Drafting is neither slower for
    that, nor said to gain more than it does: whether the curve was measured as drafting goes, or
    every size again and again."""
    last = 0

    def forward(nodes: int) -> float:
        nonlocal last
        longer, last = 0.3 * (nodes != last), nodes
        return FORWARD * (1 + 0.05 * nodes + longer)

    surcharge = 0.3 if known else 0.0
    costs = CostCurve({n: FORWARD * (1 + 0.05 * n + surcharge * (n > 0)) for n in range(5)})
    for _ in range(3):
        found = answer(clock, [Sure(clock, every)], costs, ClockedToy(clock, forward))
        assert found.seconds < 1.02 * PLAINLY and found.shown < 1.01 * PLAINLY
    assert found.shown > 0.97 * PLAINLY, "nor to gain less, once some answers corrected the curve"
    assert every > 3 or found.seconds < 0.6 * PLAINLY
