"""Hierarchy drafting: the likeliest nodes first, every one credited, lower tiers asked last."""

import random
from array import array
from collections.abc import Mapping, Sequence
from math import log
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafting.base import Tier
from engine.drafting.budget import Budget
from engine.drafting.calibration import PRIORS, Calibration
from engine.drafting.context import ContextTier
from engine.drafting.costs import CostCurve
from engine.drafting.hierarchy import LUCKIEST, Hierarchy, luckiest
from engine.drafting.model import ModelTier
from engine.drafting.ngrams import NgramCounts
from engine.drafting.statistics import KEY, StatisticsTier
from engine.sampling import gumbel
from engine.settings import Drafting, Sampling
from engine.tree import Tree, graft
from engine.types import CONTEXT, MODEL, STATISTICS, STRENGTHS, Followers
from tests.unit.test_calibration import Noting, Said, markov, sure
from tests.unit.test_drafters_ngrams import every
from tests.unit.test_drafters_statistics import Table
from tests.unit.test_tree import assert_valid, paths_of

TEXTS = st.lists(st.integers(0, 4), min_size=1, max_size=60)


def grow(
    hierarchy: Hierarchy,
    tokens: Sequence[int],
    nodes: int = 40,
    depth: int = 9,
    threshold: float = 0.001,
    before: Tree | None = None,
) -> tuple[Tree, Noting]:
    """A tree, and the budget that noted the probability of every node."""
    tree = before or Tree(tokens[-1])
    budget = Noting(Drafting(nodes=nodes, threshold=threshold, budget="fixed"), depth)
    hierarchy.grow(tree, tokens, budget)
    assert_valid(tree)
    return tree, budget


def counted(texts: Sequence[Sequence[int]]) -> Table:
    """A statistics table of some texts."""
    counts = NgramCounts(KEY)
    counts.read([token for text in texts for token in text], 0)
    return Table(every(counts))


def filled(texts: Sequence[Sequence[int]]) -> list[Tier]:
    """All tiers, each with what it makes of the texts."""
    context, model = ContextTier(texts[0]), ModelTier()
    for text in texts:
        model.finish(text, len(text) - 1)
    return [context, model, StatisticsTier(counted(texts))]


@settings(deadline=None, derandomize=True)
@given(st.lists(TEXTS, min_size=1, max_size=3), TEXTS, st.integers(0, 30), st.integers(1, 9))
def test_merged_nodes_come_best_first_within_the_budget(
    texts: list[list[int]], tokens: list[int], nodes: int, depth: int
) -> None:
    hierarchy = Hierarchy(filled(texts), Calibration())
    tree, budget = grow(hierarchy, tokens, nodes, depth, threshold=0.01)
    assert len(tree) == len(budget.noted) <= nodes and max(tree.depths) <= depth
    assert budget.noted == sorted(budget.noted, reverse=True)
    assert all(0.01 <= probability <= 1.0 for probability in budget.noted)
    for row in range(1, len(tree) + 1):
        parent = tree.parents[row]
        assert not parent or budget.noted[row - 1] <= budget.noted[parent - 1]


@settings(deadline=None, derandomize=True)
@given(st.lists(TEXTS, min_size=1, max_size=2), TEXTS, st.integers(0, 30))
def test_a_smaller_tree_is_the_beginning_of_a_larger_one(
    texts: list[list[int]], tokens: list[int], nodes: int
) -> None:
    hierarchy = Hierarchy(filled(texts), Calibration())
    large, _ = grow(hierarchy, tokens, nodes=40)
    small, _ = grow(hierarchy, tokens, nodes=nodes)
    large.cut(nodes)
    assert paths_of(small) == paths_of(large)
    assert (small.sources, small.match_lengths) == (large.sources, large.match_lengths)


def test_tokens_that_the_model_does_not_have_are_never_drafted() -> None:
    said = Followers(99, 5, {1000: 60, 2**32: 30, 999: 5, 7: 4})
    hierarchy = Hierarchy([Said(name, said, said) for name in PRIORS], Calibration())
    tree, _ = grow(hierarchy, [1], depth=3)
    assert set(tree.tokens) == {1, 999, 7} and len(tree) > 4


def test_a_node_is_credited_to_the_longest_match_that_knows_it() -> None:
    weak, strong = sure(7, 9), sure(8, 9)
    tiers = [
        Said(CONTEXT, weak, Followers(9, 2, {7: 5, 9: 4})),
        Said(MODEL, weak, strong, Followers(9, 2, {8: 5, 6: 4})),
    ]
    tree, _ = grow(Hierarchy(tiers, Calibration()), [1], depth=1, threshold=0.0)
    credit = {
        tree.tokens[row]: (tree.sources[row], tree.match_lengths[row]) for row in (1, 2, 3, 4)
    }
    assert credit == {8: (MODEL, 3), 6: (MODEL, 3), 7: (CONTEXT, 2), 9: (CONTEXT, 2)}


def test_of_equal_matches_the_first_tier_has_the_credit() -> None:
    for names in ([CONTEXT, MODEL, STATISTICS], [STATISTICS, CONTEXT], [MODEL, STATISTICS]):
        tiers = [Said(name, sure(7), sure(7)) for name in names]
        tree, _ = grow(Hierarchy(tiers, Calibration()), [1], depth=1)
        assert (tree.sources[1:], tree.match_lengths[1:]) == ([names[0]], [2])


class Asked(Said):
    """A tier that counts how often it is asked, and takes its time."""

    def __init__(self, name: str, *matches: Followers, source: str = "", seconds: float = 0.0):
        super().__init__(name, *matches)
        self.source, self.asked, self.seconds = source or name, 0, seconds

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        self.asked += 1
        end = perf_counter() + self.seconds
        while perf_counter() < end:
            pass
        return self.said


def test_all_tiers_are_asked_and_the_likeliest_node_comes_first() -> None:
    tiers = [Asked(CONTEXT, Followers(1, 1, {3: 1})), Asked(MODEL, *[sure(7, 300)] * 3)]
    tree, _ = grow(Hierarchy(tiers, Calibration()), [1], nodes=1)
    assert (tree.tokens[1], tree.sources[1]) == (7, MODEL) and tiers[0].asked > 0


def test_the_time_of_looking_up_is_told_per_source() -> None:
    tiers = [
        Asked(CONTEXT, sure(7), seconds=0.002),
        Asked(MODEL, sure(8), source=CONTEXT, seconds=0.003),
        Asked(STATISTICS, sure(9)),
    ]
    hierarchy = Hierarchy(tiers, Calibration())
    for _ in range(2):
        asked = [tier.asked for tier in tiers]
        spent = hierarchy.grow(Tree(1), [1], Budget(Drafting(nodes=2, budget="fixed"), 1, 100))
        asked = [tier.asked - before for tier, before in zip(tiers, asked, strict=True)]
        assert set(spent) == {CONTEXT, STATISTICS}
        assert spent[CONTEXT].seconds >= 0.002 * asked[0] + 0.003 * asked[1] > 0
        assert spent[STATISTICS].seconds >= 0
        hierarchy.observe([1, 7], 1)  # learning takes its time too, which is not a look-up


def copied(times: int, borne_out: bool = True) -> Hierarchy:
    """The context tier in the middle of a text that it has seen so many times before."""
    hierarchy = Hierarchy([ContextTier()], Calibration())
    text = list(range(100)) * times
    hierarchy.observe(text, len(text))
    tokens = text[:]
    for token in range(30):
        tokens.append(token if borne_out else 500 + token)
        hierarchy.grow(Tree(tokens[-2]), tokens[:-1], Budget(Drafting(), 9, 1000))
        hierarchy.observe(tokens, 1)
    return hierarchy


def test_a_long_match_drafts_a_long_copy_and_a_weak_one_a_short_one() -> None:
    tree, _ = grow(copied(2), list(range(22, 30)), nodes=64, depth=60, threshold=0.003)
    assert tree.path(max(range(len(tree) + 1), key=tree.depths.__getitem__))[:16] == tuple(
        range(30, 46)
    )
    weak, _ = grow(copied(1, False), [999, 998, 29], nodes=64, depth=60, threshold=0.003)
    assert 0 < len(weak) < 16


def test_a_copy_is_as_long_as_forwards_are_cheap() -> None:
    sizes = []
    for points in ({0: 1.0, 63: 1.05}, {0: 1.0, 8: 2.0, 63: 300.0}, {0: 1.0, 63: 300.0}):
        tree, budget = Tree(29), Budget(Drafting(), 60, 1000, CostCurve(points))
        copied(2).grow(tree, list(range(22, 30)), budget)
        sizes.append(len(tree))
    cheap, middling, dear = sizes
    assert cheap >= 16 > middling > 0 == dear


def test_what_an_earlier_drafter_drafted_stays() -> None:
    """The drafter that knows nothing cuts nothing, and the room is shared."""
    empty, full = (Hierarchy([ContextTier(log)], Calibration()) for log in ([], [5, 6, 7] * 9))
    for hierarchy, nodes, grown in ((empty, 9, 3), (full, 9, 9), (full, 2, 3), (full, 3, 3)):
        for costs in (None, CostCurve({0: 1.0, 63: 99.0})):
            tree = Tree(5)
            graft(tree, (1, 2, 3), "other", 1, 99)
            drafting = Drafting(nodes=nodes, threshold=0.0)
            hierarchy.grow(tree, [5], Budget(drafting, 20, 100, costs))
            assert_valid(tree)
            assert tree.path(3) == (1, 2, 3) and tree.sources[1:4] == ["other"] * 3
            assert len(tree) == (3 if costs else grown)


def test_a_known_node_keeps_its_first_source_and_is_grown_from() -> None:
    tree = Tree(5)
    graft(tree, (6,), "other", 1, 99)
    grow(Hierarchy([ContextTier([5, 6, 7, 8] * 9)], Calibration()), [5], depth=3, before=tree)
    assert tree.sources[1] == "other" and (6, 7, 8) in paths_of(tree)
    assert len(tree.children[0]) == 1


def figures(calibration: Calibration) -> set[object]:
    return set(calibration.rows())


def test_the_calibration_learns_before_the_tiers_do() -> None:
    """Else a token would always have been expected: by what it has just taught."""
    calibration = Calibration()
    hierarchy = Hierarchy([ContextTier()], calibration)
    tokens = list(range(50))
    hierarchy.observe(tokens[:10], 10)
    for at in range(10, 50):
        grow(hierarchy, tokens[:at])
        hierarchy.observe(tokens[: at + 1], 1)
    assert figures(calibration) == set(), "nothing was ever seen before, so nothing was predicted"


def test_a_prompt_calibrates_nothing() -> None:
    calibration = Calibration()
    hierarchy = Hierarchy([ContextTier(), ModelTier()], calibration)
    for _ in range(2):
        hierarchy.observe([1, 2, 3] * 9, 27)
        hierarchy.finish([1, 2, 3] * 9, 0)
    assert figures(calibration) == set()


def test_a_tree_is_judged_once_and_by_the_step_that_it_was_drafted_for() -> None:
    """A step that drafted nothing must not be counted against the draft of the one before."""
    tiers: list[Tier] = [Said(CONTEXT, sure(7))]
    once, twice = Calibration(), Calibration()
    for calibration, steps in ((once, 1), (twice, 3)):
        hierarchy, tokens = Hierarchy(tiers, calibration), [0]
        grow(hierarchy, tokens)
        for _ in range(steps):
            tokens.append(9)
            hierarchy.observe(tokens, 1)
    ranks = [{row for row in c.rows() if row.tier not in PRIORS} for c in (once, twice)]
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize("costs", [None, CostCurve({0: 1.0, 1: 1.9, 2: 1.9, 63: 1.9})])
def test_nodes_of_another_drafter_are_not_judged(costs: CostCurve | None) -> None:
    """Neither behind ours nor in the place of those that we cut, as they would not pay."""
    learned = []
    for path in ((), (8, 8, 8)):
        calibration, tree = Calibration(), Tree(0)
        hierarchy = Hierarchy([Said(CONTEXT, Followers(9, 2, {7: 3}))], calibration)
        hierarchy.grow(tree, [0], Budget(Drafting(nodes=2), 5, 100, costs))
        assert (len(tree) == 0) == (costs is not None)
        graft(tree, path, "other", 1, 99)
        hierarchy.observe([0, 8], 1)
        learned.append(figures(calibration))
    assert learned[0] == learned[1] != set()


def test_every_tier_hears_everything() -> None:
    heard: list[tuple[str, str, int]] = []

    class Hearing(Said):
        def observe(self, tokens: Sequence[int], new: int) -> None:
            heard.append((self.name, "observe", new))

        def finish(self, tokens: Sequence[int], new: int) -> None:
            heard.append((self.name, "finish", new))

    hierarchy = Hierarchy([Hearing(CONTEXT), Hearing(MODEL)], Calibration())
    hierarchy.observe([1, 2], 2)
    hierarchy.observe([1, 2, 3], 1)
    hierarchy.finish([1, 2, 3], 1)
    calls = [("observe", 2), ("observe", 1), ("finish", 1)]
    assert heard == [(name, *call) for call in calls for name in (CONTEXT, MODEL)]


def test_no_tiers_and_empty_tiers_draft_nothing() -> None:
    tiers: Mapping[int, list[Tier]] = {
        0: [],
        1: [ContextTier()],
        3: [ContextTier(), ModelTier(), StatisticsTier(Table({}))],
    }
    for found in tiers.values():
        hierarchy = Hierarchy(found, Calibration())
        for tokens in ([1], [1, 2], list(range(20))):
            tree, budget = grow(hierarchy, tokens)
            assert len(tree) == 0 and budget.expected == 1.0
            hierarchy.observe([*tokens, 3], 1)


def test_the_same_state_drafts_the_same_tree() -> None:
    draw = random.Random(5)
    texts = [[draw.randrange(5) for _ in range(80)] for _ in range(3)]
    first, second = (
        paths_of(grow(Hierarchy(filled(texts), Calibration()), [1, 2])[0]) for _ in "12"
    )
    assert first == second and len(first) > 9


@pytest.mark.parametrize(("new", "learns"), [(5, True), (3, False)])
def test_only_what_the_tree_was_grown_for_teaches_the_evidence_weights(
    new: int, learns: bool
) -> None:
    """In a back-off the first of the decided tokens may have been left out."""
    calibration = Calibration()
    hierarchy = Hierarchy([ContextTier([1, 2, 3, 4, 5, 6, 7] * 3)], calibration)
    tokens = [1, 2, 3]
    tree, _ = grow(hierarchy, tokens)
    assert len(tree)
    hierarchy.observe([*tokens, 4, 5, 6, 7, 1], new)
    assert bool(calibration.rows()) == learns
    hierarchy.observe([*tokens, 4, 5, 6, 7, 1, 2], 1)
    assert bool(calibration.rows()) == learns, "the tree is gone either way"


# Drafts that know the noise.

LAW = dict(zip(range(10, 22), (30, 20, 12, 9, 7, 5, 4, 4, 3, 2, 2, 2), strict=True))
"""Counts of a hundred: about what the target follows in the tests below, whatever came before."""
DRAWN = Sampling(1.0, seed=4)


def chosen(position: int, law: Mapping[int, float] = LAW, error: float = 0.0) -> int:
    """What the target says at a position; its own law differs by an error from what is known."""
    noise = gumbel(DRAWN.seed, position, list(law))
    noise = noise + error * gumbel(DRAWN.seed + 9, position, list(law))
    scores = {t: log(law[t]) + luck for t, luck in zip(law, noise.tolist(), strict=True)}
    return max(scores, key=scores.__getitem__)


def accepted(known: Sampling | None, steps: int, nodes: int, told: int = 0) -> tuple[float, float]:
    """Tokens per step of a run that follows the law, really and as expected, after `told` steps."""
    followers = Followers(100, len(LAW), dict(LAW))
    hierarchy = Hierarchy([Said(STATISTICS, followers, followers)], Calibration(), known)
    tokens, came, expected = [1, 2], 0, 0.0
    for step in range(steps):
        tree, budget = grow(hierarchy, tokens, nodes, depth=4, threshold=0.0)
        at = len(tokens)
        _, emitted = tree.walk(
            lambda row, at=at, tree=tree: chosen(at + tree.depths[row], error=0.7)
        )
        tokens += emitted
        hierarchy.observe(tokens, len(emitted))
        if step >= told:
            came, expected = came + len(emitted), expected + budget.expected
    return came / (steps - told), expected / (steps - told)


def test_who_knows_the_noise_drafts_more_of_what_will_be_said() -> None:
    blind, _ = accepted(None, 400, nodes=4)
    known, _ = accepted(DRAWN, 400, nodes=4)
    assert known > 1.3 * blind


def test_noise_that_is_not_the_targets_is_soon_not_believed() -> None:
    blind, _ = accepted(None, 800, nodes=4, told=400)
    misled, _ = accepted(Sampling(1.0, seed=5), 800, nodes=4, told=400)
    assert misled > 0.93 * blind


def test_what_is_expected_with_noise_comes() -> None:
    came, expected = accepted(DRAWN, 1500, nodes=6, told=500)
    assert expected == pytest.approx(came, rel=0.05)


@pytest.mark.parametrize("sampling", [Sampling(0.0, seed=4), Sampling(5e-5, seed=4)])
def test_where_nothing_is_drawn_the_trees_are_those_by_probability(sampling: Sampling) -> None:
    texts = [markov(600, seed=3), markov(400, seed=4)]
    blind, cold = (Hierarchy(filled(texts), Calibration(), s) for s in (None, sampling))
    tokens = texts[0][:5]
    for token in markov(300, seed=5):
        trees = [grow(hierarchy, tokens)[0] for hierarchy in (blind, cold)]
        assert paths_of(trees[0]) == paths_of(trees[1]) and trees[0].tokens == trees[1].tokens
        tokens = [*tokens, token]
        for hierarchy in (blind, cold):
            hierarchy.observe(tokens, 1)
    assert blind.calibration.rows() == cold.calibration.rows()


def test_with_noise_trees_differ_from_position_to_position_and_from_seed_to_seed() -> None:
    followers = Followers(100, len(LAW), dict(LAW))

    def drafted(tokens: Sequence[int], sampling: Sampling | None) -> list[int]:
        hierarchy = Hierarchy([Said(STATISTICS, followers)], Calibration(), sampling)
        return grow(hierarchy, tokens, nodes=3, depth=1)[0].tokens[1:]

    assert drafted([1], None) == drafted([2, 1], None) == [10, 11, 12]
    assert drafted([1], DRAWN) == drafted([1], DRAWN)
    assert len({tuple(drafted([1] * size, DRAWN)) for size in range(1, 9)}) > 4
    assert len({tuple(drafted([1], Sampling(1.0, seed=seed))) for seed in range(9)}) > 4


def test_a_node_is_weighed_by_the_noise_of_its_own_position() -> None:
    """A node of depth d stands behind the d - 1 nodes above it."""
    sure_law = dict.fromkeys(range(10, 40), 1.0)
    followers = Followers(30, 30, dict(sure_law))
    calibration = Calibration()
    calibration.errors.values[:] = array("d", (3.0, 1.0, -5.0, 0.0))
    for weights in calibration.weights[STATISTICS]:
        weights.values[:] = array("d", [0.999] * STRENGTHS)
    hierarchy = Hierarchy([Said(STATISTICS, followers)], calibration, DRAWN)
    tree, _ = grow(hierarchy, [1, 2, 3], nodes=4, depth=4, threshold=0.0)
    row, path = 0, []
    while tree.children[row]:
        row = min(tree.children[row].values())
        path.append(tree.tokens[row])
    assert path == [chosen(3 + depth, sure_law) for depth in range(len(path))]
    assert len(path) > 1


class Often(Said):
    """A tier that also says what it has often seen."""

    def __init__(self, name: str, often: Followers | None, *matches: Followers) -> None:
        super().__init__(name, *matches)
        self.often = often

    def unigrams(self) -> Followers | None:
        return self.often


def test_tokens_with_large_noise_are_named_though_nothing_leads_to_them() -> None:
    often = Followers(900, 300, dict.fromkeys(range(100, 400), 3))
    tiers = [Often(STATISTICS, often, Followers(9, 2, {7: 3})), Often(CONTEXT, None)]
    lucky = sorted(often.counts, key=lambda token: -gumbel(4, 1, [token])[0])
    tree, _ = grow(Hierarchy(tiers, Calibration(), DRAWN), [1], depth=1, threshold=0.0)
    assert set(tree.tokens[1:]) == {7, *lucky[:LUCKIEST]}
    at = tree.tokens.index(lucky[0])
    assert (tree.sources[at], tree.match_lengths[at]) == (STATISTICS, 0)
    blind, _ = grow(Hierarchy(tiers, Calibration()), [1], depth=1, threshold=0.0)
    assert blind.tokens == [1, 7]
    for nothing in (None, often):
        tier = Often(CONTEXT, nothing)
        none, _ = grow(Hierarchy([tier], Calibration(), DRAWN), [1], threshold=0.0)
        assert len(none) == 0, "luck alone is no draft: draft models may know more"


def test_of_equally_lucky_tokens_the_smaller_number_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "engine.drafting.hierarchy.gumbel",
        lambda seed, position, tokens: np.zeros(len(tokens), np.float32),
    )
    assert luckiest({9: 2, 5: 2, 7: 2, 3: 1}, 0, 0) == [5, 7]
    assert luckiest({9: 2}, 0, 0) == [9]
    assert luckiest({8: 1, 9: 2}, 0, 0) == [9, 8]


def test_rates_with_noise_and_without_are_learned_apart() -> None:
    text = markov(500, seed=2)
    for sampling, kind, other in ((DRAWN, ":noisy rank", ":rank"), (None, ":rank", ":noisy rank")):
        calibration = Calibration()
        hierarchy, tokens = Hierarchy([ContextTier(text)], calibration, sampling), [0]
        for token in text[:60]:
            grow(hierarchy, tokens, threshold=0.01)
            tokens = [*tokens, token]
            hierarchy.observe(tokens, 1)
        kinds = {row.tier for row in calibration.rows()}
        assert any(name.endswith(kind) for name in kinds)
        assert not any(name.endswith(other) for name in kinds)
        assert ("noise" in kinds) == (sampling is not None)
