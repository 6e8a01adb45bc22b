"""The compiled drafting: equal to the reference in every answer, tree and learned number."""

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import native
from engine.drafting.base import Frozen, NgramTable, Tier
from engine.drafting.budget import Budget
from engine.drafting.calibration import PRIORS, Calibration
from engine.drafting.compiled import CompiledHierarchy, grow_all, hierarchy
from engine.drafting.costs import CostCurve
from engine.drafting.hierarchy import Hierarchy
from engine.drafting.ngrams import CompiledCounts, NgramCounts, counting
from engine.drafting.tiers import ContextTier, LimitedView, ModelTier, StatisticsTier
from engine.settings import Drafting, Sampling
from engine.tree import Tree, graft
from engine.types import CONTEXT, DATABASES, MODEL, STATISTICS, Followers
from tests.support.tiers import Said, Table, sure, using

SYMBOLS = 6


def test_the_core_is_there() -> None:
    """Else the tests below would compare the reference with itself."""
    assert native.core is not None, native.missing
    assert isinstance(counting(3), CompiledCounts)
    assert type(hierarchy([], Calibration())) is CompiledHierarchy
    with using(None):
        assert isinstance(counting(3), NgramCounts)
        assert type(hierarchy([], Calibration())) is Hierarchy


# counts


def told(followers: Followers) -> tuple[object, ...]:
    """All that drafting sees of followers, the orders included."""
    counts = list(followers.counts.items())
    return followers.total, followers.distinct, followers.strength, counts, followers.ranked()


ADDED = st.tuples(
    st.lists(st.integers(0, 2), max_size=9), st.integers(0, 60), st.sampled_from((1, 1, 1, 2, 7))
)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.lists(ADDED, max_size=150), st.integers(1, 8))
def test_counts_are_those_of_the_reference(
    added: list[tuple[list[int], int, int]], longest: int
) -> None:
    reference, compiled = NgramCounts(longest), CompiledCounts(longest)
    for key, token, count in added:
        fresh = reference.add(tuple(key), token, count)
        assert compiled.add(tuple(key), token, count) == fresh
    for key, _, _ in [*added, ([], 0, 1), ([1, 1, 1, 0, 0, 0, 2, 2], 0, 1)]:
        left, right = reference.matches(tuple(key)), compiled.matches(tuple(key))
        assert [told(each) for each in left] == [told(each) for each in right]
    items = [[(key, told(each)) for key, each in c.items()] for c in (reference, compiled)]
    assert items[0] == items[1]
    often = [counts.unigrams and told(counts.unigrams) for counts in (reference, compiled)]
    assert often[0] == often[1] and bool(often[0]) == bool(added)
    compiled.clear()
    assert compiled.unigrams is None
    assert list(compiled.items()) == [] == list(compiled.matches((1,)))


@pytest.mark.parametrize("longest", [1, 4, 8])
def test_a_text_is_counted_as_the_reference_does(longest: int) -> None:
    draw = random.Random(longest)
    text = [draw.choice((draw.randrange(4), draw.randrange(500))) for _ in range(6000)]
    reference, compiled = NgramCounts(longest), CompiledCounts(longest)
    for counts in (reference, compiled):
        counts.read(text[:1000], 0)
        counts.read(text[1000 - longest :], longest)
    for at in range(0, 6000, 7):
        suffix = tuple(text[max(0, at - 8) : at])
        left, right = reference.matches(suffix), compiled.matches(suffix)
        assert [told(each) for each in left] == [told(each) for each in right]
    assert [key for key, _ in reference.items()] == [key for key, _ in compiled.items()]
    assert len(text) * 16 < compiled.bytes < reference.bytes


def test_what_cannot_be_counted_is_refused() -> None:
    for count in (0, -1):
        with pytest.raises(ValueError, match="count"):
            CompiledCounts(3).add((1,), 2, count)
    for token in (-1, 1 << 32):
        with pytest.raises((TypeError, OverflowError)):
            CompiledCounts(3).add((1,), token)
        with pytest.raises((TypeError, OverflowError)):
            CompiledCounts(3).add((token,), 1)


# trees and learning


@dataclass(slots=True)
class Twin:
    """Tiers with their hierarchy, made in Python or compiled."""

    tiers: list[Tier]
    calibration: Calibration
    hierarchy: Hierarchy


def table_of(texts: Sequence[Sequence[int]]) -> Table:
    counts = NgramCounts(3)
    for text in texts:
        counts.read(text, 0)
    keys = {key[-size:] for key, _ in counts.items() for size in range(1, len(key) + 1)}
    table = Table({key: counts.matches(key)[-1] for key in keys})
    table.often = counts.unigrams
    return table


def twin(
    texts: Sequence[Sequence[int]], kinds: str, table: NgramTable, sampling: Sampling | None
) -> Twin:
    """A hierarchy of tiers by their letters, filled with the texts."""
    context, model = ContextTier(texts[0][:20]), ModelTier()
    for text in texts:
        model.finish(text, len(text))
    known: dict[str, Tier] = {
        "c": context,
        "m": model,
        "s": StatisticsTier(table),
        "f": LimitedView(model),
        "u": model.without(texts[-1], len(texts[-1])),
        "z": Frozen(model),
        "x": Said(MODEL, sure(1, 3), sure(2, 1)),
    }
    tiers, calibration = [known[kind] for kind in kinds], Calibration()
    return Twin(tiers, calibration, hierarchy(tiers, calibration, sampling))


def twins(
    texts: Sequence[Sequence[int]], kinds: str, sampling: Sampling | None = None
) -> tuple[Twin, Twin]:
    table = table_of(texts)
    with using(None):
        reference = twin(texts, kinds, table, sampling)
    compiled = twin(texts, kinds, table, sampling)
    assert type(reference.hierarchy) is Hierarchy
    assert type(compiled.hierarchy) is CompiledHierarchy
    return reference, compiled


def shape(tree: Tree) -> tuple[object, ...]:
    children = [list(each.items()) for each in tree.children]
    return (
        tree.tokens, tree.parents, tree.depths, tree.sources, tree.match_lengths, children,
    )  # fmt: skip


def budget_of(draw: random.Random) -> Budget:
    """Any budget: fixed or by a cost curve, near or not, owed or not."""
    nodes, kind = draw.choice((0, 1, 7, 8, 31, 32, 60)), draw.choice(("fixed", "adaptive"))
    drafting = Drafting(nodes=nodes, budget=kind, threshold=draw.choice((0.0, 0.01, 0.1)))
    slope = draw.choice((0.001, 0.02, 0.3))
    curve = CostCurve({0: 1.0, 3: 1 + draw.random() * slope, 63: 1.2 + 63 * slope})
    due = draw.choice(("", "", DATABASES))
    vocabulary = draw.choice((SYMBOLS, SYMBOLS - 1, 600))
    return Budget(drafting, draw.choice((0, 1, 5, 20)), vocabulary, curve, due, draw.random() < 0.2)


def bits(values: Sequence[float]) -> bytes:
    return struct.pack(f"{len(values)}d", *values)


def learned(calibration: Calibration) -> list[bytes]:
    """Every learned number, bit for bit."""
    return [
        bits(
            [
                *each.values,
                *each.reached,
                *each.credited,
                *(f for r in each.rates for f in r.figures),
            ]
        )
        for lengths in calibration.weights.values()
        for each in lengths
    ]


def choices(tree: Tree, draw: random.Random) -> Callable[[int], int]:
    """What the target says after each row: mostly what was drafted there first."""
    said = [
        min(children, default=0) if draw.random() < 0.6 else draw.randrange(SYMBOLS)
        for children in tree.children
    ]
    return said.__getitem__


def answered(twins: Sequence[Twin], text: Sequence[int], draw: random.Random, steps: int) -> int:
    """Both draft and learn an answer in which the target goes on as the text does, mostly; the
    nodes that were drafted."""
    tokens, drafted = list(text[:12]), 0
    for each in twins:
        each.hierarchy.observe(tokens, len(tokens))
    for _ in range(steps):
        grown, seed, before = [], draw.random(), draw.choice((None, (1,), (2, 3), (1, 1, 4)))
        emitted: list[int] = []
        for each in twins:
            own = random.Random(seed)
            tree, budget = Tree(tokens[-1]), budget_of(own)
            graft(tree, before or (), "other", 1, 99)
            spent = each.hierarchy.grow(tree, tokens, budget)
            state = (budget.floor, budget.expected, budget.worth, float(budget.best))
            grown.append((shape(tree), bits(state), set(spent)))
            if own.random() < 0.1 and len(tree) > 1:  # a later drafter puts its own in place
                tree.cut(len(tree) - 1)
                graft(tree, (0, 5), "later", 1, 99)
            _, emitted = tree.walk(choices(tree, own))
            drafted += len(tree)
        assert grown[0] == grown[1]
        tokens += emitted
        new = draw.choice((len(emitted), len(emitted), 1))
        for each in twins:
            each.hierarchy.observe(tokens, new)
        assert learned(twins[0].calibration) == learned(twins[1].calibration)
    for each in twins:
        each.hierarchy.finish(tokens, len(tokens) - 12)
    return drafted


@pytest.mark.grid(1)
@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
@pytest.mark.parametrize("temperature", [None, 0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "kinds", ["c", "m", "s", "cm", "cms", "smc", "cfs", "cus", "zx", "cxs", "ucm"]
)
def test_trees_and_learning_are_those_of_the_reference(
    kinds: str, temperature: float | None, seed: int
) -> None:
    draw = random.Random(f"{kinds} {seed}")
    texts = [[draw.randrange(SYMBOLS) for _ in range(80)] for _ in range(3)]
    both = twins(texts, kinds, None if temperature is None else Sampling(temperature, seed=seed))
    assert sum(answered(both, text, draw, 25) for text in texts) > 200


@pytest.mark.parametrize("widest", [300, 3000])
def test_the_luckiest_of_many_are_found(widest: int) -> None:
    """Of hundreds of tokens, some equally often said; most are passed over without a logarithm."""
    draw = random.Random(widest)
    text = [int(widest * draw.random() ** 3) for _ in range(5000)]
    found = []
    for core in (None, native.core):
        with using(core):
            tier, own = ContextTier(text), Sampling(1.0, seed=9)
            drafter = hierarchy([tier], Calibration(), own)
        for at in range(200):
            tree = Tree(1)
            tokens = [9999] * (at + 1)
            drafter.grow(tree, tokens, Budget(Drafting(nodes=2, threshold=0.0), 1, 9999))
            found.append((core is None, at, shape(tree)))
            drafter.observe([*tokens, 7], 1)
    half = len(found) // 2
    assert [each[1:] for each in found[:half]] == [each[1:] for each in found[half:]]
    assert len({str(each) for _, _, each in found}) > 40


def test_what_one_learned_the_other_goes_on_with() -> None:
    """A calibration belongs to neither: its numbers are in one place."""
    draw = random.Random(3)
    texts = [[draw.randrange(SYMBOLS) for _ in range(80)] for _ in range(3)]
    reference, compiled = twins(texts, "cms")
    answered((reference, compiled), texts[0], draw, 30)
    with using(None):
        mixed = Hierarchy(compiled.tiers, compiled.calibration)
    reference.hierarchy = Hierarchy(reference.tiers, reference.calibration)
    compiled.hierarchy = mixed
    answered((reference, compiled), texts[1], draw, 10)
    assert compiled.calibration.rows() == reference.calibration.rows() != []


def test_evidence_that_fades_fades_alike() -> None:
    """Beyond the memory of observations, counts are halved."""
    said = [Said(name, sure(7), sure(7), Followers(9, 3, {7: 4, 8: 2})) for name in PRIORS]
    found = []
    for kind in (Hierarchy, CompiledHierarchy):
        calibration, draw = Calibration(), random.Random(1)
        hierarchy = kind(said, calibration)
        for _ in range(5000):
            hierarchy.grow(Tree(0), [0], Budget(Drafting(nodes=1, budget="fixed"), 1, 1000))
            hierarchy.observe([0, draw.choice((7, 7, 7, 8, 9))], 1)
        found.append(learned(calibration))
    assert found[0] == found[1]


# many sequences


def test_many_sequences_in_one_call_are_grown_as_one_by_one() -> None:
    draw = random.Random(9)
    texts = [[draw.randrange(SYMBOLS) for _ in range(80)] for _ in range(8)]
    trees: list[list[object]] = []
    for together in (False, True):
        own = random.Random(1)
        sequences = []
        table, model, calibration = table_of(texts), ModelTier(), Calibration()
        for text in texts:
            model.finish(text, len(text))
        for text in texts * 4:
            tiers: list[Tier] = [ContextTier(text), model, StatisticsTier(table)]
            tree = Tree(text[5])
            drafter = hierarchy(tiers, calibration)
            sequences.append((drafter, tree, text[: own.randrange(3, 9)], budget_of(own)))
        if together:
            works = grow_all(sequences)
        else:
            works = [each.grow(tree, tokens, budget) for each, tree, tokens, budget in sequences]
        assert all(set(work) == {CONTEXT, MODEL, STATISTICS} for work in works)
        assert all(each.seconds >= 0 for work in works for each in work.values())
        trees.append([(shape(tree), budget.expected) for _, tree, _, budget in sequences])
        for drafter, _, tokens, _ in sequences:
            drafter.observe([*tokens, 1, 2], 2)
        trees[-1].append(learned(calibration))
    assert trees[0] == trees[1] and sum(len(tree) for _, tree, _, _ in sequences) > 100


# faults


class Faulty(Said):
    """A tier that says what cannot be, or fails."""

    def __init__(self, said: object) -> None:
        super().__init__(CONTEXT)
        self.answer = said

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


WIDE: Mapping[int, float] = dict.fromkeys(range(2000), 1.0)


@pytest.mark.parametrize(
    "answer",
    [
        ValueError("damaged"),
        None,
        [None],
        [sure(1)] * 12,
        [Followers(9, 1, {-1: 1})],
        [Followers(9, 1, {1 << 40: 1})],
        [Followers(2000, 2000, dict(WIDE))],
    ],
    ids=lambda answer: str(answer)[:20],
)
def test_a_tier_that_fails_raises_and_harms_nothing(answer: object) -> None:
    faulty = Faulty(answer)
    drafter = hierarchy([faulty], Calibration())
    for _ in range(3):
        with pytest.raises((ValueError, TypeError, AttributeError, OverflowError, RuntimeError)):
            drafter.grow(Tree(0), [0], Budget(Drafting(), 5, 10))
    faulty.answer = [sure(1)]
    tree = Tree(0)
    drafter.grow(tree, [0], Budget(Drafting(), 5, 10))
    assert len(tree) > 0


def test_a_tier_derived_from_a_known_one_is_asked_itself() -> None:
    class Other(ContextTier):
        def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
            return [sure(4)]

    tree = Tree(0)
    hierarchy([Other([0, 1] * 9)], Calibration()).grow(tree, [0], Budget(Drafting(), 1, 10))
    assert set(tree.tokens[1:]) == {4}
