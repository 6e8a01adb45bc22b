"""The promise: whatever drafts, in whatever order, the answer is the plain one, token by token."""

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import product

import numpy as np
import pytest

from engine.backends.base import LogitScores
from engine.decode import never
from engine.drafting.base import Tier
from engine.drafting.calibration import Calibration
from engine.drafting.controller import DRAFTED
from engine.drafting.costs import CostCurve
from engine.drafting.databases import Databases
from engine.drafting.hierarchy import Hierarchy
from engine.methods import METHODS, Method, method_named
from engine.prompt import Chat
from engine.sampling import Floats, choose
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import TIERS, Followers, Message, Prefill, Step
from tests.support.lossless import (
    CUTS,
    ORDERS,
    PROMPT,
    TEMPERATURES,
    Adversary,
    Paths,
    Stated,
    accepted,
    as_plain,
    assert_lossless,
    curves,
    deep,
    duplicates,
    events_of,
    everything,
    garbage,
    generation,
    knowing,
    plain_toy,
    tokens_of,
    toy_family,
    toy_table,
    warm_toy,
)
from tests.support.replies import reply
from tests.support.toy import VOCABULARY, ToyBackend, deviating

SEEDS = (0, 1, 7)


def accelerated(
    method: Method,
    temperatures: Sequence[float] = TEMPERATURES,
    seeds: Iterable[int] = SEEDS,
    costs: CostCurve | None = None,
) -> list[Step]:
    """The steps of answers from warm databases, each of which is the plain one."""
    databases, steps = warm_toy(), list[Step]()
    for temperature, seed in product(temperatures, seeds):
        wanted = generation(temperature, seed)
        drafters = method.drafters(databases, None, wanted.sampling)
        steps += as_plain(wanted, drafters, method.drafting, costs=costs)
    return steps


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_subset_and_order_at_every_temperature(order: tuple[str, ...]) -> None:
    steps = accelerated(method_named("hd", Drafting(tiers=order, nodes=12)))
    assert accepted(steps) > 100, "a run that accepts nothing proves nothing"


@pytest.mark.parametrize("costs", curves())
def test_every_cost_of_a_forward(costs: str) -> None:
    steps = accelerated(method_named("hd", Drafting(nodes=24)), costs=curves()[costs])
    # Against a curve that follows the clock, drafts for this fast a model soon back off.
    assert accepted(steps) > {"never": -1, "learning": 0}.get(costs, 100)
    if costs == "usual":
        drafted = {bool(step.proposed) for step in steps}
        assert drafted == {True, False}, "some steps paid, some did not"


@pytest.mark.parametrize("tiers", ORDERS, ids="-".join)
def test_every_subset_and_order_where_drafting_costs(tiers: tuple[str, ...]) -> None:
    accelerated(method_named("hd", Drafting(tiers=tiers)), seeds=[2], costs=curves()["usual"])


@pytest.mark.soak(stay=28)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_every_method_with_every_cut(name: str, cuts: dict[str, float]) -> None:
    databases, family = warm_toy(), toy_family()
    for temperature in (0.7, 1.5):
        for seed in SEEDS:
            wanted = generation(temperature, seed, **cuts)
            toy = ToyBackend(guesses=deviating(1.0))
            method = METHODS[name]
            drafters = method.drafters(databases, family, wanted.sampling, target=toy)
            as_plain(wanted, drafters, method.drafting, backend=toy)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_published_method(temperature: float) -> None:
    steps = accelerated(METHODS["hd-published"], [temperature], range(6))
    lengths = [len(step.tokens) for step in steps]
    assert max(lengths) == 5, "four drafted tokens and the bonus"


@pytest.mark.parametrize("obedient", [True, False])
@pytest.mark.parametrize("adversary", [garbage, duplicates, deep, everything])
def test_adversarial_drafters_change_nothing(
    adversary: Callable[[Sequence[int]], Paths], obedient: bool
) -> None:
    for temperature in TEMPERATURES:
        for seed in (0, 1):
            wanted = generation(temperature, seed, most=30)
            drafting = Drafting(nodes=30)
            own = method_named("hd", drafting).drafters(warm_toy(), None, wanted.sampling)
            drafters = [Adversary(adversary, obedient=obedient), *own]
            as_plain(wanted, drafters, drafting)


class Liar(Tier):
    """A tier that answers with what a function makes of a draw of random numbers."""

    def __init__(self, name: str, say: Callable[[random.Random], Followers]) -> None:
        self.name = self.source = name
        self.say = say

    def matches(self, suffix: tuple[int, ...]) -> list[Followers]:
        draw = random.Random(sum(suffix))
        return [self.say(draw) for _ in range(draw.randrange(min(len(suffix), 11) + 1))]

    def unigrams(self) -> Followers:
        return self.say(random.Random(self.name))


def letters(draw: random.Random) -> Followers:
    found = {draw.randrange(97, 123): float(draw.randrange(1, 50)) for _ in range(6)}
    return Followers(sum(found.values()), len(found), found)


def foreign(draw: random.Random) -> Followers:
    """Tokens that the model does not have."""
    return Followers(9, 2, {VOCABULARY: 3, VOCABULARY + draw.randrange(2**32): 3, 97: 3})


def excessive(draw: random.Random) -> Followers:
    """More next tokens than occurrences."""
    return Followers(1, 1, {draw.randrange(97, 123): 1e9 for _ in range(9)})


def silent(draw: random.Random) -> Followers:
    return Followers(draw.randrange(1, 99), 1, {})


@pytest.mark.parametrize("say", [letters, foreign, excessive, silent])
def test_tiers_that_lie_change_nothing(say: Callable[[random.Random], Followers]) -> None:
    calibration = Calibration()
    for temperature in TEMPERATURES:
        for seed, costs in enumerate((None, Stated({0: 1.0, 63: 2.0}))):
            wanted = generation(temperature, seed)
            hierarchy = Hierarchy([Liar(name, say) for name in TIERS], calibration, wanted.sampling)
            drafting = Drafting(nodes=16)
            fast = as_plain(wanted, [hierarchy], drafting, costs=costs)
            assert all(sum(step.proposed.values()) <= 16 for step in fast)


@pytest.mark.parametrize(
    "wrong",
    [
        Sampling(0.7, seed=99),
        Sampling(2.0, seed=1),
        Sampling(0.01, seed=3),
        Sampling(0.0),
        None,
    ],
    ids=str,
)
def test_noise_that_lies_changes_nothing(wrong: Sampling | None) -> None:
    """Drafts that are weighed by another noise than that which decides."""
    databases, steps = warm_toy(), list[Step]()
    for temperature, seed in product(TEMPERATURES, SEEDS):
        drafters = METHODS["hd"].drafters(databases, None, wrong)
        steps += as_plain(generation(temperature, seed), drafters, Drafting(nodes=12))
    assert accepted(steps) > 100


@pytest.mark.parametrize(
    "lie",
    [lambda size: [17.3] * size, lambda size: [-17.3] * size, lambda size: [0.0] * size],
    ids=["luck", "no luck", "none"],
)
def test_noise_that_is_poisoned_changes_nothing(
    lie: Callable[[int], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(seed: int, position: int, tokens: Sequence[int]) -> Floats:
        return np.array(lie(len(tokens)), dtype=np.float32)

    monkeypatch.setattr("engine.drafting.hierarchy.gumbel", poisoned)
    accelerated(method_named("hd", Drafting(nodes=12)), seeds=[3])


def test_where_drafting_never_pays_every_step_is_plain_but_the_probes() -> None:
    """The gate is not one-way: drafting is tried again, in case it has become worth it. Each time
    it is not, the wait for the next try doubles."""
    steps = accelerated(method_named("hd", Drafting()), [0.7], range(24), curves()["never"])
    probes = [at for at, step in enumerate(steps) if step.proposed]
    gaps = [after - before for before, after in zip([-1, *probes], probes, strict=False)]
    assert gaps == [1 + DRAFTED * 2**number for number in range(len(gaps))] and len(gaps) == 3


def test_where_drafting_always_pays_plain_steps_are_still_tried() -> None:
    steps = accelerated(method_named("hd", Drafting()), [0.7], range(12), curves()["free"])
    # The last token of an answer leaves no room for a draft.
    plain = sum(not step.proposed for step in steps)
    assert 1 <= plain < len(steps) / 4


@pytest.mark.parametrize("method", ["hd", "hd-published"])
def test_a_warm_conversation_says_what_a_cold_one_does(method: str) -> None:
    for temperature, costs in product(TEMPERATURES, (None, curves()["usual"])):
        wanted, chat = generation(temperature, 11, most=40), Chat(ToyBackend())
        databases, messages = Databases(statistics=toy_table()), list[Message]()
        for turn in range(4):
            messages.append(Message("user", f"and the tale of {turn} then"))
            prompt, drafting = chat.prompt(messages), METHODS[method].drafting
            drafters = METHODS[method].drafters(databases, None, wanted.sampling)
            prefill, *rest = reply(chat, prompt, drafters, wanted, drafting, never, costs)
            assert isinstance(prefill, Prefill) and (prefill.reused > 0) == (turn > 0)
            steps = [event for event in rest if isinstance(event, Step)]
            assert_lossless(events_of(ToyBackend(), prompt, wanted), steps)
            messages.append(Message("assistant", "".join(t.text for t in tokens_of(steps)) or "-"))


def run_hd(wanted: Generation) -> list[Step]:
    truth = [*PROMPT, *(t.id for t in tokens_of(plain_toy(wanted)))]
    wrong = truth[: len(PROMPT) + 9] + [98] * 60
    drafters = [knowing(wrong), *METHODS["hd"].drafters(warm_toy(), None, wanted.sampling)]
    return events_of(ToyBackend(), PROMPT, wanted, drafters, Drafting(nodes=20))


def lenient_walk(
    tree: Tree, choose: Callable[[int], int], row: int = 0
) -> tuple[list[int], list[int]]:
    """Broken on purpose: takes the first child of a node, whatever the target says."""
    rows: list[int] = []
    emitted = [choose(row)]
    here = row
    while child := next((r for r in range(len(tree) + 1) if tree.parents[r] == here), None):
        rows.append(child)
        emitted[-1] = tree.tokens[child]
        emitted.append(choose(child))
        here = child
    return rows, emitted


def shifted_choice(scores: LogitScores, row: int) -> int:
    """Broken on purpose: noise that depends on the row of the tree."""
    return choose(scores.row(row), scores.sampling, scores.positions[row] + row)


def forgetful_accept(backend: ToyBackend, rows: Sequence[int]) -> None:
    """Broken on purpose: the last accepted row is lost."""
    assert backend.tree is not None
    backend.cache += [backend.tree.tokens[row] for row in (0, *rows[:-1])]


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Tree, "walk", lenient_walk),
        (LogitScores, "choose", shifted_choice),
        (ToyBackend, "accept", forgetful_accept),
    ],
)
def test_a_broken_engine_fails_this_test(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Callable[..., object]
) -> None:
    wanted = generation(1.0, 0)
    plain = plain_toy(wanted)
    assert_lossless(plain, run_hd(wanted))
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError):
        assert_lossless(plain, run_hd(wanted))
