"""Hierarchy drafting: the likeliest nodes first, every one credited, lower tiers asked last."""

from collections.abc import Mapping, Sequence
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafting.base import Tier
from engine.drafting.budget import Budget
from engine.drafting.calibration import PRIORS, Calibration
from engine.drafting.costs import CostCurve
from engine.drafting.hierarchy import FAVOURED, Hierarchy
from engine.drafting.ngrams import NgramCounts
from engine.drafting.tiers import STATISTICS_KEY, ContextTier, ModelTier, StatisticsTier
from engine.sampling import gumbel
from engine.settings import Drafting, Sampling
from engine.tree import Tree, graft
from engine.types import CONTEXT, MODEL, STATISTICS, Followers
from tests.support.clocked import clock_of
from tests.support.tiers import Noting, Said, Table, followers, markov, sure
from tests.unit.test_ngram_counts import every
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
    budget = Noting(nodes, depth, threshold)
    hierarchy.grow(tree, tokens, budget)
    assert_valid(tree)
    return tree, budget


def counted(texts: Sequence[Sequence[int]]) -> Table:
    """A statistics table of some texts."""
    counts = NgramCounts(STATISTICS_KEY)
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


def test_tokens_that_the_model_does_not_have_are_never_drafted() -> None:
    said = Followers(99, 5, {1000: 60, 2**32: 30, 999: 5, 7: 4})
    hierarchy = Hierarchy([Said(name, said, said) for name in PRIORS], Calibration())
    tree, _ = grow(hierarchy, [1], depth=3)
    assert set(tree.tokens) == {1, 999, 7} and len(tree) > 4


def test_a_node_is_credited_to_the_longest_match_and_of_equal_ones_to_the_first_tier() -> None:
    tiers = [
        Said(CONTEXT, sure(7, 9), followers({7: 5, 9: 4})),
        Said(MODEL, sure(7, 9), sure(8, 9), followers({8: 5, 6: 4})),
    ]
    tree, _ = grow(Hierarchy(tiers, Calibration()), [1], depth=1, threshold=0.0)
    found = zip(tree.tokens[1:], tree.sources[1:], tree.match_lengths[1:], strict=True)
    assert set(found) == {(8, MODEL, 3), (6, MODEL, 3), (7, CONTEXT, 2), (9, CONTEXT, 2)}
    for names in ([CONTEXT, MODEL, STATISTICS], [STATISTICS, CONTEXT], [MODEL, STATISTICS]):
        equal = [Said(name, sure(7), sure(7)) for name in names]
        tree, _ = grow(Hierarchy(equal, Calibration()), [1], depth=1)
        assert (tree.sources[1:], tree.match_lengths[1:]) == ([names[0]], [2])


def test_the_time_of_looking_up_is_told_per_source(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_of(monkeypatch, "engine.drafting.hierarchy")

    class Slow(Said):
        def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
            clock.now += 0.25
            return self.said

    tiers = [Slow(CONTEXT, sure(7)), Slow(MODEL, sure(8)), Said(STATISTICS, sure(9))]
    tiers[1].source = CONTEXT
    hierarchy = Hierarchy(tiers, Calibration())
    for _ in range(2):
        spent = hierarchy.grow(Tree(1), [1], Noting(2, 1))
        assert {source: work.seconds for source, work in spent.items()} == {
            CONTEXT: 0.5, STATISTICS: 0.0,
        }  # fmt: skip
        hierarchy.observe([1, 7], 1)  # learning takes its time too, which is not a look-up


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
        learned.append(set(calibration.rows()))
    assert learned[0] == learned[1] != set()


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


@pytest.mark.parametrize("sampling", [Sampling(0.0, seed=4), Sampling(5e-5, seed=4)])
def test_where_nothing_is_drawn_the_trees_are_those_by_probability(sampling: Sampling) -> None:
    texts = [markov(600, seed=3), markov(400, seed=4)]
    blind, cold = (Hierarchy(filled(texts), Calibration(), s) for s in (None, sampling))
    tokens = texts[0][:5]
    for token in markov(120, seed=5):
        trees = [grow(hierarchy, tokens)[0] for hierarchy in (blind, cold)]
        assert paths_of(trees[0]) == paths_of(trees[1]) and trees[0].tokens == trees[1].tokens
        tokens = [*tokens, token]
        for hierarchy in (blind, cold):
            hierarchy.observe(tokens, 1)
    assert blind.calibration.rows() == cold.calibration.rows()


def test_who_knows_the_noise_drafts_more_and_expects_what_comes() -> None:
    """Noise that is not the target's is soon not believed."""
    blind, _ = accepted(None, 800, nodes=4, told=400)
    known, expected = accepted(DRAWN, 1000, nodes=4, told=400)
    misled, _ = accepted(Sampling(1.0, seed=5), 800, nodes=4, told=400)
    assert known > 1.3 * blind and misled > 0.93 * blind
    assert expected == pytest.approx(known, rel=0.05)


def test_tokens_with_large_noise_are_named_though_nothing_leads_to_them() -> None:
    often = Followers(900, 300, dict.fromkeys(range(100, 400), 3))
    tiers = [Said(STATISTICS, Followers(9, 2, {7: 3}), often=often), Said(CONTEXT)]
    lucky = sorted(often.counts, key=lambda token: -gumbel(4, 1, [token])[0])
    tree, _ = grow(Hierarchy(tiers, Calibration(), DRAWN), [1], depth=1, threshold=0.0)
    assert set(tree.tokens[1:]) == {7, *lucky[:FAVOURED]}
    at = tree.tokens.index(lucky[0])
    assert (tree.sources[at], tree.match_lengths[at]) == (STATISTICS, 0)
    blind, _ = grow(Hierarchy(tiers, Calibration()), [1], depth=1, threshold=0.0)
    assert blind.tokens == [1, 7]
    for nothing in (None, often):
        tier = Said(CONTEXT, often=nothing)
        none, _ = grow(Hierarchy([tier], Calibration(), DRAWN), [1], threshold=0.0)
        assert len(none) == 0, "luck alone is no draft: draft models may know more"


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
