"""The promise: whatever drafts, in whatever order, the answer is the plain one, token by token."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
import pytest

from engine.backends.base import Backend, LogitScores
from engine.backends.toy import VOCABULARY, ToyBackend, deviating
from engine.decode import never
from engine.drafting.calibration import Calibration
from engine.drafting.controller import DRAFTED
from engine.drafting.costs import CostCurve, measure_costs
from engine.drafting.databases import Databases
from engine.drafting.hierarchy import Hierarchy
from engine.methods import METHODS, method_named
from engine.prompt import Chat
from engine.sampling import Floats, choose
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import TIERS, Followers, Message, Prefill, Step
from tests.conftest import ROOT
from tests.support.lossless import (
    CUTS,
    ORDERS,
    PROMPT,
    QUESTIONS,
    TEMPERATURES,
    Adversary,
    Paths,
    Stated,
    assert_lossless,
    cold,
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

SEEDS = (0, 1, 7)


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_subset_and_order_at_every_temperature(order: tuple[str, ...]) -> None:
    databases, accepted = warm_toy(), 0
    for temperature in TEMPERATURES:
        for seed in SEEDS:
            wanted = generation(temperature, seed)
            method = method_named("hd", Drafting(tiers=order, nodes=12))
            drafters = method.drafters(databases, None, wanted.sampling)
            fast = events_of(ToyBackend(), PROMPT, wanted, drafters, method.drafting)
            assert_lossless(plain_toy(wanted), fast)
            accepted += sum(sum(step.accepted.values()) for step in fast)
    assert accepted > 100, "a run that accepts nothing proves nothing"


@pytest.mark.parametrize("costs", curves())
def test_every_cost_of_a_forward(costs: str) -> None:
    databases, curve, accepted, drafted = warm_toy(), curves()[costs], 0, set[bool]()
    drafting = Drafting(nodes=24)
    for temperature in TEMPERATURES:
        for seed in SEEDS:
            wanted = generation(temperature, seed)
            drafters = method_named("hd", drafting).drafters(databases, None, wanted.sampling)
            fast = events_of(ToyBackend(), PROMPT, wanted, drafters, drafting, costs=curve)
            assert_lossless(plain_toy(wanted), fast)
            accepted += sum(sum(step.accepted.values()) for step in fast)
            drafted |= {bool(step.proposed) for step in fast}
    # Against a curve that follows the clock, drafts for this fast a model soon back off.
    assert accepted > {"never": -1, "learning": 0}.get(costs, 100)
    if costs == "usual":
        assert drafted == {True, False}, "some steps paid, some did not"


@pytest.mark.parametrize("tiers", ORDERS, ids="-".join)
def test_every_subset_and_order_where_drafting_costs(tiers: tuple[str, ...]) -> None:
    databases, curve = warm_toy(), curves()["usual"]
    method = method_named("hd", Drafting(tiers=tiers))
    for number, temperature in enumerate(TEMPERATURES):
        wanted = generation(temperature, number)
        drafters = method.drafters(databases, None, wanted.sampling)
        fast = events_of(ToyBackend(), PROMPT, wanted, drafters, method.drafting, costs=curve)
        assert_lossless(plain_toy(wanted), fast)


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
            fast = events_of(toy, PROMPT, wanted, drafters, method.drafting)
            assert_lossless(plain_toy(wanted), fast)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_published_method(temperature: float) -> None:
    databases, lengths = warm_toy(), []
    for seed in range(6):
        wanted = generation(temperature, seed)
        drafters = METHODS["hd-published"].drafters(databases, None, wanted.sampling)
        drafting = METHODS["hd-published"].drafting
        fast = events_of(ToyBackend(), PROMPT, wanted, drafters, drafting)
        assert_lossless(plain_toy(wanted), fast)
        lengths += [len(step.tokens) for step in fast]
    assert max(lengths) == 5, "four drafted tokens and the bonus"


@pytest.mark.parametrize("name", ["hd", "hd-published"])
def test_stop_strings_length_and_context_end_it_at_the_same_token(name: str) -> None:
    databases, method, ends = warm_toy(), METHODS[name], Counter[str | None]()
    for temperature in TEMPERATURES:
        for seed in range(6):
            text = "".join(t.text for t in tokens_of(plain_toy(generation(temperature, seed))))
            sampling = Sampling(temperature, seed=seed)
            for most, context, stop in [
                (1, 4096, ()),
                (2, 4096, ()),
                (17, 4096, ()),
                (250, 4096, ()),
                (80, len(PROMPT) + 1, ()),
                (80, len(PROMPT) + 13, ()),
                (80, 4096, (text[10:13] or "x",)),
                (80, 4096, (text[5:6] or "x", text[8:14] or "y")),
                (80, 4096, ("nowhere", "e")),
            ]:
                wanted = Generation(sampling, max_tokens=most, stop=stop)
                drafters = method.drafters(databases, None, wanted.sampling)
                fast = events_of(ToyBackend(context), PROMPT, wanted, drafters, method.drafting)
                assert_lossless(plain_toy(wanted, PROMPT, context), fast)
                ends[fast[-1].finish] += 1
    assert min(ends[end] for end in ("length", "context", "stop", "eos")) > 3


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
            fast = events_of(ToyBackend(), PROMPT, wanted, drafters, drafting)
            assert_lossless(plain_toy(wanted), fast)


class Liar:
    """A tier that answers with what a function makes of a draw of random numbers."""

    def __init__(self, name: str, say: Callable[[random.Random], Followers]) -> None:
        self.name = self.source = name
        self.say = say

    def matches(self, suffix: tuple[int, ...]) -> list[Followers]:
        draw = random.Random(sum(suffix))
        return [self.say(draw) for _ in range(draw.randrange(len(suffix) + 1))]

    def unigrams(self) -> Followers:
        return self.say(random.Random(self.name))

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Nothing to learn."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Nothing to learn."""


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
            fast = events_of(ToyBackend(), PROMPT, wanted, [hierarchy], drafting, costs=costs)
            assert_lossless(plain_toy(wanted), fast)
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
    databases, accepted = warm_toy(), 0
    for temperature in TEMPERATURES:
        for seed in SEEDS:
            wanted, drafting = generation(temperature, seed), Drafting(nodes=12)
            drafters = METHODS["hd"].drafters(databases, None, wrong)
            fast = events_of(ToyBackend(), PROMPT, wanted, drafters, drafting)
            assert_lossless(plain_toy(wanted), fast)
            accepted += sum(sum(step.accepted.values()) for step in fast)
    assert accepted > 100


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
    databases = warm_toy()
    for temperature in TEMPERATURES:
        wanted, drafting = generation(temperature, 3), Drafting(nodes=12)
        drafters = METHODS["hd"].drafters(databases, None, wanted.sampling)
        fast = events_of(ToyBackend(), PROMPT, wanted, drafters, drafting)
        assert_lossless(plain_toy(wanted), fast)


def test_drafting_the_known_answer_accepts_everything() -> None:
    for temperature in TEMPERATURES:
        for seed in range(4):
            wanted = generation(temperature, seed)
            truth = [*PROMPT, *(t.id for t in tokens_of(plain_toy(wanted)))]
            fast = events_of(ToyBackend(), PROMPT, wanted, [knowing(truth)], Drafting(nodes=7))
            assert_lossless(plain_toy(wanted), fast)
            assert all(step.accepted == step.proposed for step in fast)
            assert len(fast) == -(-(len(truth) - len(PROMPT)) // 8)


def test_where_drafting_never_pays_every_step_is_plain_but_the_probes() -> None:
    """The gate is not one-way: drafting is tried again, in case it has become worth it. Each time
    it is not, the wait for the next try doubles."""
    databases, drafting, curve = warm_toy(), Drafting(), curves()["never"]
    kinds: list[bool] = []
    for seed in range(24):
        wanted = generation(0.7, seed)
        drafters = METHODS["hd"].drafters(databases, None, wanted.sampling)
        fast = events_of(ToyBackend(), PROMPT, wanted, drafters, drafting, costs=curve)
        assert_lossless(plain_toy(wanted), fast)
        kinds += [bool(step.proposed) for step in fast]
    probes = [at for at, drafted in enumerate(kinds) if drafted]
    gaps = [after - before for before, after in zip([-1, *probes], probes, strict=False)]
    assert gaps == [1 + DRAFTED * 2**number for number in range(len(gaps))] and len(gaps) == 3


def test_where_drafting_always_pays_plain_steps_are_still_tried() -> None:
    databases, curve, kinds = warm_toy(), curves()["free"], list[bool]()
    for seed in range(12):
        wanted = generation(0.7, seed)
        drafters = METHODS["hd"].drafters(databases, None, wanted.sampling)
        fast = events_of(ToyBackend(), PROMPT, wanted, drafters, Drafting(), costs=curve)
        assert_lossless(plain_toy(wanted), fast)
        # The last token of an answer leaves no room for a draft.
        kinds += [bool(step.proposed) for step in fast]
    plain = kinds.count(False)
    assert plain >= 1 and plain < len(kinds) / 4


def test_cancelling_at_every_step_leaves_a_prefix_and_a_usable_cache() -> None:
    wanted = generation(0.7, 3)
    plain = plain_toy(wanted)
    ids = [token.id for token in tokens_of(plain)]
    for at in range(1, 40):
        backend, databases = ToyBackend(), warm_toy()
        left: Iterator[bool] = iter([False] * at + [True] * 999)
        drafters = METHODS["hd"].drafters(databases, None, wanted.sampling)
        drafting = Drafting(nodes=9)
        cut = events_of(backend, PROMPT, wanted, drafters, drafting, lambda left=left: next(left))
        kept = [token.id for token in tokens_of(cut)]
        assert kept == ids[: len(kept)]
        if kept == ids:
            assert_lossless(plain, cut)
            break
        assert cut[-1].finish == "cancelled"
        assert backend.cache == [*PROMPT, *kept][: len(backend.cache)]
        again = events_of(
            backend,
            PROMPT,
            wanted,
            METHODS["hd"].drafters(databases, None, wanted.sampling),
            drafting,
        )
        assert_lossless(plain, again)
    else:
        pytest.fail("the answer never came to its end")


def conversation(
    backend: Backend,
    method: str,
    turns: int,
    wanted: Generation,
    costs: CostCurve | None = None,
) -> list[list[Step]]:
    """Several turns on one backend with warm tiers; each must equal a cold plain run."""
    chat, databases = Chat(backend), Databases(statistics=toy_table())
    messages: list[Message] = []
    runs = []
    for turn in range(turns):
        messages.append(Message("user", f"and the tale of {turn} then"))
        prompt = chat.prompt(messages)
        drafters = METHODS[method].drafters(databases, None, wanted.sampling)
        drafting = METHODS[method].drafting
        events = list(reply(chat, prompt, drafters, wanted, drafting, never, costs))
        prefill = events[0]
        assert isinstance(prefill, Prefill)
        assert (prefill.reused > 0) == (turn > 0)
        steps = [event for event in events if isinstance(event, Step)]
        assert_lossless(cold(backend, prompt, wanted), steps)
        messages.append(Message("assistant", "".join(t.text for t in tokens_of(steps)) or "-"))
        runs.append(steps)
    return runs


@pytest.mark.parametrize("method", ["hd", "hd-published"])
def test_a_warm_conversation_says_what_a_cold_one_does(method: str) -> None:
    for temperature in TEMPERATURES:
        for costs in (None, curves()["usual"]):
            conversation(ToyBackend(), method, 4, generation(temperature, 11, most=40), costs)


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


# The same with a real model: the embedded target in float32, the shipped statistics.

STEPS = 40


@pytest.fixture(scope="module")
def warm(embedded):  # type: ignore[no-untyped-def]
    """The prompts, their plain answers (computed once), and databases that hold past answers."""
    from storage.statistics import find_table

    table = find_table(embedded.info.tokenizer_fingerprint, ROOT / "assets" / "statistics")
    assert table is not None, "the shipped statistics are for the embedded model's tokenizer"
    chat = Chat(embedded)
    prompts = [tuple(chat.prompt([Message("user", q)], known=())) for q in QUESTIONS]

    @cache
    def plain(wanted: Generation, number: int) -> list[Step]:
        embedded.reset()
        return events_of(embedded, prompts[number], wanted)

    def databases() -> Databases:
        filled = Databases(statistics=table)
        for number, prompt in enumerate(prompts):
            for temperature in (0.0, 0.7):
                wanted = generation(temperature, 0, STEPS)
                answer = [t.id for t in tokens_of(plain(wanted, number))]
                filled.learned.finish([*prompt, *answer], len(answer))
        return filled

    yield prompts, plain, databases
    table.close()
    embedded.reset()


@pytest.fixture(scope="module")
def measured(embedded) -> CostCurve:  # type: ignore[no-untyped-def]
    """The embedded model's own cost curve. Tests take copies: else what one draft was worth
    would keep the next from drafting."""
    curve = measure_costs(embedded, seconds=0.3)
    embedded.reset()
    return curve


@pytest.mark.soak(stay=2)
@pytest.mark.model
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_embedded_every_subset_and_order(embedded, warm, measured, order) -> None:  # type: ignore[no-untyped-def]
    prompts, plain, databases = warm
    filled, accepted = databases(), 0
    number = ORDERS.index(order)
    drafting = Drafting(tiers=order)
    method, costs = method_named("hd", drafting), [None, measured.copy()][number // 2 % 2]
    for number, temperature in enumerate(TEMPERATURES):
        wanted = generation(temperature, number, STEPS)
        prompt, drafters = prompts[number % 2], method.drafters(filled, None, wanted.sampling)
        fast = events_of(embedded, prompt, wanted, drafters, drafting, costs=costs)
        assert_lossless(plain(wanted, number % 2), fast)
        accepted += sum(sum(step.accepted.values()) for step in fast)
    assert accepted > 0 or costs is not None, "by measured costs, drafts need not pay"


@pytest.mark.soak(stay=2)
@pytest.mark.model
@pytest.mark.parametrize("name", ["hd", "hd-published"])
@pytest.mark.parametrize("cuts", [{"top_k": 20}, {"top_p": 0.8, "min_p": 0.05}, {}], ids=str)
def test_embedded_methods_with_cuts(embedded, warm, name, cuts) -> None:  # type: ignore[no-untyped-def]
    prompts, plain, databases = warm
    filled = databases()
    for seed, temperature in ((2, 0.7), (3, 1.0)):
        wanted = generation(temperature, seed, STEPS, **cuts)
        drafters = METHODS[name].drafters(filled, None, wanted.sampling)
        fast = events_of(embedded, prompts[0], wanted, drafters, METHODS[name].drafting)
        assert_lossless(plain(wanted, 0), fast)


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_embedded_knowing_the_answer_accepts_everything(embedded, warm, temperature) -> None:  # type: ignore[no-untyped-def]
    prompts, plain, _ = warm
    wanted = generation(temperature, 0, STEPS)
    truth = [*prompts[0], *(t.id for t in tokens_of(plain(wanted, 0)))]
    fast = events_of(embedded, prompts[0], wanted, [knowing(truth)])
    assert_lossless(plain(wanted, 0), fast)
    assert all(step.accepted == step.proposed for step in fast)


@pytest.mark.model
def test_embedded_a_warm_conversation_says_what_a_cold_one_does(embedded, measured) -> None:  # type: ignore[no-untyped-def]
    embedded.reset()
    for temperature in (0.0, 1.0):
        embedded.reset()
        conversation(embedded, "hd", 3, generation(temperature, 5, 24), measured.copy())
