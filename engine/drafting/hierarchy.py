"""Hierarchy drafting: one draft tree from all databases, grown best first while it pays.

To expand a node, every tier is asked what followed the last tokens on the way to it. The answers
are interpolated, the longest match first and, among equal lengths, the tier of the highest
locality (engine/drafting/calibration.py). So the candidates of all tiers are on one scale, and the
likeliest node of the whole tree is always the next to be added.
"""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from operator import itemgetter
from time import perf_counter

from engine.drafting.base import Tier
from engine.drafting.budget import Budget
from engine.drafting.calibration import LONGEST, RANKS, Calibration, Evidence, EvidenceWeights, Rate
from engine.tree import Tree
from engine.types import Work

NEGLIGIBLE = 0.02
"""Once so little probability is left, shorter matches are not asked."""
SLIGHT = 0.3
"""The part of the smallest useful probability below which a contribution is not added up."""


Candidate = tuple[float, int, float, EvidenceWeights, Rate]
"""Estimated probability after the rate is applied, token, probability before, evidence, rate."""


class Hierarchy:
    """Drafts from tiers in their order, highest locality first."""

    name = "databases"

    def __init__(self, tiers: Sequence[Tier], calibration: Calibration) -> None:
        self.tiers, self.calibration = tiers, calibration
        self.sources = {tier.name: tier.source for tier in tiers}
        self.spent = dict.fromkeys(self.sources.values(), 0.0)
        self.tree = Tree(0)
        self.candidates: list[Candidate] = []
        self.first = 1
        self.grown: int | None = None
        """How many tokens were decided when the tree was grown that is to be learned from."""
        self.chains: dict[tuple[int, tuple[int, ...]], list[Evidence]] = {}
        """What was found in this step: drafting asks first, learning asks again."""
        self.near = tiers[:-1] or tiers
        """All but the farthest, whose look-ups take the longest."""

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Grow the tree; returns the time that each tier spent on look-ups."""
        self.spent = dict.fromkeys(self.sources.values(), 0.0)
        suffix = tuple(tokens[-LONGEST:])
        before = len(tree)
        self.tree, self.candidates, self.first = tree, [], before + 1
        # A probe teaches nothing: what it would learn from takes the look-ups that it spares.
        self.grown = None if budget.near else len(tokens)
        if budget.nodes:
            self.grow_from(self.near if budget.near else self.tiers, tree, suffix, budget)
        tree.cut(max(before, budget.best))
        del self.candidates[len(tree) - before :]
        return {source: Work(seconds) for source, seconds in self.spent.items()}

    def grow_from(
        self, tiers: Sequence[Tier], tree: Tree, suffix: tuple[int, ...], budget: Budget
    ) -> None:
        """Add the likeliest nodes that `tiers` know of until no further one pays."""
        # (-probability, number, parent row, candidate, suffix and depth of the parent)
        heap: list[tuple[float, int, int, Candidate, tuple[int, ...], int]] = []
        number, row, probability, depth = 0, 0, 1.0, 0
        # No node is likelier than the one added last: once that would not pay again, none does.
        while budget.pays(len(tree), probability):
            if depth < budget.depth:
                for candidate in self.expand(tiers, suffix, budget.floor / probability):
                    if candidate[1] < budget.vocabulary:
                        number += 1
                        heappush(
                            heap,
                            (-candidate[0] * probability, number, row, candidate, suffix, depth),
                        )
            if not heap or not budget.pays(len(tree), -heap[0][0]):
                return
            negative, _, parent, candidate, suffix, depth = heappop(heap)
            probability, token, weights = -negative, candidate[1], candidate[3]
            known = len(tree)
            row = tree.add(parent, token, self.sources[weights.tier], weights.match_length)
            if len(tree) > known:
                budget.added(len(tree), probability)
                self.candidates.append(candidate)
            suffix = (*suffix[1 - LONGEST :], token)
            depth += 1

    def expand(
        self, tiers: Sequence[Tier], suffix: tuple[int, ...], floor: float
    ) -> list[Candidate]:
        """Estimated probabilities of next tokens that reach `floor`, each with its first evidence.

        Contributions of less than a part of `floor` are left out: they cannot lift a token to it.
        """
        found: dict[int, float] = {}
        origin: dict[int, EvidenceWeights] = {}
        left, least = 1.0, floor * SLIGHT
        for weights, followers in self.chain(tiers, suffix):
            said = left * weights.values[followers.strength]
            scale = said / followers.total
            for token, count in followers.order or followers.ranked():
                share = scale * count
                if share < least:
                    break
                if token in found:
                    found[token] += share
                else:
                    found[token] = share
                    origin[token] = weights
            left -= said
            if left < least or left < NEGLIGIBLE:
                break
        candidates: list[Candidate] = []
        for token, share in sorted(found.items(), key=itemgetter(1), reverse=True):
            weights = origin[token]
            rate = weights.rates[min(len(candidates), RANKS - 1)]
            # Scaling halves what is left to certainty at most.
            scaled = min(share * rate.factor, (1.0 + share) / 2)
            if scaled < floor:
                break
            candidates.append((scaled, token, share, weights, rate))
        return candidates

    def chain(self, tiers: Sequence[Tier], suffix: tuple[int, ...]) -> list[Evidence]:
        """All evidence on what follows `suffix`, in the order of interpolation."""
        known = self.chains.get((id(tiers), suffix))
        if known is not None:
            return known
        found = []
        for tier in tiers:
            clock = perf_counter()
            matches = tier.matches(suffix)
            self.spent[tier.source] += perf_counter() - clock
            if matches:
                found.append((len(matches), self.calibration.weights[tier.name], matches))
        longest = max((length for length, _, _ in found), default=0)
        chain = self.chains[id(tiers), suffix] = [
            (weights[at], matches[at])
            for at in range(longest - 1, -1, -1)
            for length, weights, matches in found
            if at < length
            # A shorter match at the same places says nothing that the longer one did not.
            and (at + 1 == length or matches[at].total > matches[at + 1].total)
        ]
        return chain

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Learn what the evidence for decided tokens was worth, then let the tiers learn them."""
        start = len(tokens) - new
        if self.grown == start:
            self.settle(tokens[start:])
            self.candidates = []  # the next step may go by without a draft from here
            for at in range(start, len(tokens)):
                suffix = tuple(tokens[max(0, at - LONGEST) : at])
                self.calibration.learn(self.chain(self.tiers, suffix), tokens[at])
        self.grown = None
        self.chains.clear()  # what the tiers learn now changes their answers
        for tier in self.tiers:
            tier.observe(tokens, new)

    def settle(self, emitted: Sequence[int]) -> None:
        """Count the drafted nodes whose parents were visited, and whether they were accepted."""
        row: int | None = 0
        for token in emitted:
            if row is None:
                return
            children = self.tree.children[row]
            for drafted, child in children.items():
                at = child - self.first
                if 0 <= at < len(self.candidates):
                    _, candidate, share, weights, rate = self.candidates[at]
                    # A drafter behind this one may have put its own draft in the place of ours.
                    if (
                        candidate == drafted
                        and self.tree.sources[child] == self.sources[weights.tier]
                    ):
                        rate.learn(share, float(drafted == token))
            row = children.get(token)

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Let the tiers keep the answer."""
        for tier in self.tiers:
            tier.finish(tokens, new)
