"""Hierarchy drafting: one draft tree from all databases, grown best first while it pays.

To expand a node, every tier is asked what followed the last tokens on the way to it. The answers
are interpolated, the longest match first and, among equal lengths, the tier of the highest
locality (engine/drafting/calibration.py). So the candidates of all tiers are on one scale, and the
likeliest node of the whole tree is always the next to be added.

Where the noise of the run is known, each estimate is that of a token to be chosen with this noise
(engine/drafting/noise.py). Then even tokens are named that are seldom said, where their noise is
large: the luckiest of those that a tier has often seen, whatever came before.

This is the reference. engine/drafting/compiled.py does the same at native speed, where it can.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest
from math import log
from operator import itemgetter
from time import perf_counter

import numpy as np

from engine.drafting.base import Tier
from engine.drafting.budget import Budget
from engine.drafting.calibration import LONGEST, RANKS, Calibration, Evidence, EvidenceWeights, Rate
from engine.drafting.paths import grow_path
from engine.sampling import COLDEST, gumbel
from engine.settings import Sampling
from engine.tree import Tree
from engine.types import HEAD, Followers, Work

NEGLIGIBLE = 0.02
"""Once so little probability is left, shorter matches are not asked."""
SLIGHT = 0.3
"""The part of the smallest useful probability below which a contribution is not added up."""


LUCKIEST = 2
"""Of the tokens that a tier has often seen, so many are named for their noise."""

Candidate = tuple[float, int, float, EvidenceWeights, Rate]
"""Estimated probability after the rate is applied, token, probability before, evidence, rate."""


@dataclass(frozen=True, slots=True)
class Law:
    """What may follow at one position: tokens with their probabilities, the noise of each, and the
    evidence that named it first. Those from `named` on were named for their noise alone."""

    tokens: list[int]
    shares: list[float]
    noise: list[float]
    origin: list[EvidenceWeights]
    named: int


class Hierarchy:
    """Drafts from tiers in their order, highest locality first.

    `sampling` is that of the run, where drafts are verified by its noise: None where the noise is
    not known, or is not what decides.
    """

    name = "databases"

    def __init__(
        self, tiers: Sequence[Tier], calibration: Calibration, sampling: Sampling | None = None
    ) -> None:
        self.tiers, self.calibration = tiers, calibration
        drawn = sampling is not None and sampling.temperature >= COLDEST
        self.sampling = sampling if drawn else None
        self.sources = {tier.name: tier.source for tier in tiers}
        self.spent = dict.fromkeys(self.sources.values(), 0.0)
        self.tree = Tree(0)
        self.candidates: list[Candidate] = []
        self.first = 1
        self.grown: int | None = None
        """How many tokens were decided when the tree was grown that is to be learned from."""
        self.chains: dict[tuple[int, tuple[int, ...]], list[Evidence]] = {}
        """What was found in this step: drafting asks first, learning asks again."""
        self.laws: dict[tuple[int, tuple[int, ...], int], Law | None] = {}
        self.lucky: dict[tuple[int, int], list[tuple[EvidenceWeights, Followers]]] = {}
        """The same, of what may follow at a position."""
        self.near = tiers[:-1] or tiers
        """All but the farthest, whose look-ups take the longest."""

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Grow the tree, or the best path where only that is verified; returns the time that each
        tier spent on look-ups."""
        if budget.leaves == 1 and budget.nodes and not len(tree):
            work = grow_path(self, tree, tokens, budget)
        else:
            work = self.grow_tree(tree, tokens, budget)
        if HEAD in self.sources:
            lengths = zip(tree.sources, tree.match_lengths, strict=True)
            # Where a guess stands among matches is no number of tokens that were matched.
            tree.match_lengths = [0 if source == HEAD else length for source, length in lengths]
        return work

    def grow_tree(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Grow the tree best first."""
        self.spent = dict.fromkeys(self.sources.values(), 0.0)
        suffix = tuple(tokens[-LONGEST:])
        before = len(tree)
        self.tree, self.candidates, self.first = tree, [], before + 1
        # A probe teaches nothing: what it would learn from takes the look-ups that it spares.
        self.grown = None if budget.near else len(tokens)
        if budget.nodes:
            tiers = self.near if budget.near else self.tiers
            self.grow_from(tiers, tree, suffix, len(tokens), budget)
        tree.cut(max(before, budget.best))
        del self.candidates[len(tree) - before :]
        return {source: Work(seconds) for source, seconds in self.spent.items()}

    def grow_from(
        self,
        tiers: Sequence[Tier],
        tree: Tree,
        suffix: tuple[int, ...],
        position: int,
        budget: Budget,
    ) -> None:
        """Add the likeliest nodes that `tiers` know of until no further one pays.

        What follows the root stands at `position`.
        """
        # (-probability, number, parent row, candidate, suffix and depth of the parent)
        heap: list[tuple[float, int, int, Candidate, tuple[int, ...], int]] = []
        number, row, probability, depth = 0, 0, 1.0, 0
        # No node is likelier than the one added last: once that would not pay again, none does.
        while budget.pays(len(tree), probability):
            if depth < budget.depth:
                floor = budget.floor / probability
                for candidate in self.expand(tiers, suffix, position + depth, floor):
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
        self, tiers: Sequence[Tier], suffix: tuple[int, ...], position: int, floor: float
    ) -> list[Candidate]:
        """Estimated probabilities of next tokens that reach `floor`, each with its first evidence.

        Contributions of less than a part of `floor` are left out: they cannot lift a token to it.
        With noise they can.
        """
        if self.sampling is None:
            found, origin, _ = self.interpolated(self.chain(tiers, suffix), floor * SLIGHT)
            shares = ((share, token, origin[token]) for token, share in found.items())
            return ranked(shares, floor, noisy=False)
        law = self.law(tiers, suffix, position)
        if law is None:
            return []
        temperature = self.sampling.temperature
        errors = self.calibration.errors
        chances, _ = errors.estimates(law.shares, law.noise, law.named, temperature)
        return ranked(zip(chances, law.tokens, law.origin, strict=True), floor, noisy=True)

    def interpolated(
        self, chain: Sequence[Evidence], least: float
    ) -> tuple[dict[int, float], dict[int, EvidenceWeights], float]:
        """The probabilities that a chain gives to tokens, the first evidence of each, and what is
        left. Contributions below `least` are left out."""
        found: dict[int, float] = {}
        origin: dict[int, EvidenceWeights] = {}
        left = 1.0
        for weights, followers in chain:
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
        return found, origin, left

    def law(self, tiers: Sequence[Tier], suffix: tuple[int, ...], position: int) -> Law | None:
        """What may follow `suffix` at `position`; None where nothing is known."""
        key = id(tiers), suffix, position
        if key in self.laws:
            return self.laws[key]
        chain = self.chain(tiers, suffix)
        found, origin, left = self.interpolated(chain, 0.0)
        named = len(found)
        # Where nothing is known, others may know more than luck does.
        lucky = self.luckiest(tiers, position) if found and left >= NEGLIGIBLE else ()
        for weights, followers in lucky:
            said = left * weights.values[followers.strength]
            scale = said / followers.total
            for token, count in followers.counts.items():
                if token in found:
                    found[token] += scale * count
                else:
                    found[token] = scale * count
                    origin[token] = weights
            left -= said
        law = None
        if found:
            assert self.sampling is not None
            tokens = list(found)
            noise = gumbel(self.sampling.seed, position, tokens).tolist()
            law = Law(tokens, list(found.values()), noise, list(origin.values()), named)
        self.laws[key] = law
        return law

    def luckiest(
        self, tiers: Sequence[Tier], position: int
    ) -> list[tuple[EvidenceWeights, Followers]]:
        """Of what each tier has often seen, the tokens that the noise of a position favours most.

        Equals go by their number, the smaller first.
        """
        key = id(tiers), position
        if key in self.lucky:
            return self.lucky[key]
        assert self.sampling is not None
        found = self.lucky[key] = []
        for weights, often in self.unigrams(tiers):
            lucky = luckiest(often.counts, self.sampling.seed, position)
            counts = {token: often.counts[token] for token in lucky}
            found.append((weights, Followers(often.total, often.distinct, counts)))
        return found

    def unigrams(self, tiers: Sequence[Tier]) -> list[Evidence]:
        """What each tier has often seen, whatever came before."""
        return [
            (self.calibration.unigrams[tier.name], often)
            for tier in tiers
            if (often := tier.unigrams()) is not None
        ]

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

    def chances(self) -> list[float]:
        """The probability of the path to each row of the tree that was grown last, the root first.
        It was empty before."""
        chances = [1.0]
        for row, candidate in enumerate(self.candidates, 1):
            chances.append(candidate[0] * chances[self.tree.parents[row]])
        return chances

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Learn what the evidence for decided tokens was worth, then let the tiers learn them."""
        start = len(tokens) - new
        if self.grown == start:
            self.settle(tokens[start:])
            self.candidates = []  # the next step may go by without a draft from here
            for at in range(start, len(tokens)):
                self.learn(tuple(tokens[max(0, at - LONGEST) : at]), at, tokens[at])
        self.grown = None
        self.forget()  # what the tiers learn now changes their answers
        for tier in self.tiers:
            tier.observe(tokens, new)

    def forget(self) -> None:
        """Ask the tiers anew: they may answer otherwise now."""
        self.laws.clear()
        self.lucky.clear()
        self.chains.clear()

    def learn(self, suffix: tuple[int, ...], position: int, token: int) -> None:
        """Learn what the evidence was worth, and what the noise told: the target said `token`."""
        chain = self.chain(self.tiers, suffix)
        if self.sampling is not None:
            law = self.law(self.tiers, suffix, position)
            if law is not None:
                said = law.tokens.index(token) if token in law.tokens else None
                self.calibration.errors.learn(
                    law.shares, law.noise, law.named, self.sampling.temperature, said
                )
            chain = [*chain, *self.unigrams(self.tiers)]
        self.calibration.learn(chain, token)

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


def luckiest(counts: Mapping[int, float], seed: int, position: int) -> list[int]:
    """The tokens with the largest log count + noise, best first; of equals the smaller number."""
    tokens = np.fromiter(counts, np.int64, len(counts))
    noise = gumbel(seed, position, tokens)
    rough = np.log(np.fromiter(counts.values(), np.float64, len(counts))) + noise
    # Another logarithm may round in another way, so the best few are compared by one.
    few = min(2 * LUCKIEST, len(rough))
    best = np.argpartition(rough, -few)[-few:]
    pairs = zip(tokens[best].tolist(), noise[best].tolist(), strict=True)
    return [token for _, token in nsmallest(LUCKIEST, ((-log(counts[t]) - g, t) for t, g in pairs))]


def ranked(
    found: Iterable[tuple[float, int, EvidenceWeights]], floor: float, noisy: bool
) -> list[Candidate]:
    """The candidates that reach `floor` once their rates are applied, the likeliest first."""
    candidates: list[Candidate] = []
    for share, token, weights in sorted(found, key=itemgetter(0), reverse=True):
        rates = weights.noisy_rates if noisy else weights.rates
        rate = rates[min(len(candidates), RANKS - 1)]
        # Scaling halves what is left to certainty at most.
        scaled = min(share * rate.factor, (1.0 + share) / 2)
        if scaled < floor:
            break
        candidates.append((scaled, token, share, weights, rate))
    return candidates
