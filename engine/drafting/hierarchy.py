"""Hierarchy drafting: one draft tree from all databases, grown best first while it pays.

To expand a node, every tier is queried for what followed the last tokens on the path to it. The
results are interpolated, the longest match first and, among equal lengths, the tier of the highest
locality (engine/drafting/calibration.py). This puts the candidates of all tiers on one scale.

If the noise of the run is known, each estimate is the probability that the token will be chosen
with this noise (engine/drafting/noise.py). Rare tokens are then candidates as well if the noise
favours them.

For a target that verifies only chains, one path of the tree is verified: the one with the most
expected tokens per time, which need not begin with the likeliest token.

This is the reference. engine/drafting/compiled.py does the same at native speed where possible.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest
from math import log
from operator import itemgetter
from time import perf_counter

import numpy as np

from engine.drafting.base import Drafter, Tier
from engine.drafting.budget import Budget
from engine.drafting.calibration import (
    RANKS,
    WINDOW,
    Calibration,
    Evidence,
    EvidenceWeights,
    Rate,
    least_length,
)
from engine.sampling import COLDEST, gumbel
from engine.settings import Drafting, Sampling
from engine.tree import Tree
from engine.types import HEAD, SCHEMA, Followers, Work

NEGLIGIBLE = 0.02
"""If less probability than this is left, shorter matches are ignored."""
SLIGHT = 0.3
"""Contributions below this part of the smallest useful probability are ignored."""
FAVOURED = 2
"""How many of a tier's frequent tokens become candidates because of their noise."""
UNMATCHED = (HEAD, SCHEMA)
"""Sources whose match length is only a rank among matches, so it is not reported."""
EXAMINED = 24
"""The most nodes that are examined to find the best path."""

Candidate = tuple[float, int, float, EvidenceWeights, Rate]
"""Estimated probability after the rate is applied, token, probability before, evidence, rate."""


@dataclass(frozen=True, slots=True)
class Options:
    """The candidates at one position: tokens with their probabilities, the noise of each, and the
    evidence that named it first. The tokens from `named` on were named for their noise alone."""

    tokens: list[int]
    shares: list[float]
    noise: list[float]
    origin: list[EvidenceWeights]
    named: int


class Hierarchy(Drafter):
    """Drafts from tiers in their order, highest locality first.

    `sampling` holds the settings of the run if drafts are verified with its noise; it is None if
    the noise is unknown or does not decide.
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
        self.on_path: list[float] | None = None
        self.first = 1
        self.grown: int | None = None
        """The number of decided tokens when the tree was grown; None if it is not learned from."""
        self.chains: dict[tuple[int, tuple[int, ...]], list[Evidence]] = {}
        """The look-ups of this step: drafting makes them, and learning needs them again."""
        self.options: dict[tuple[int, tuple[int, ...], int], Options | None] = {}
        self.favoured: dict[tuple[int, int], list[Evidence]] = {}
        """Cached candidates: at a position, and those named for their noise."""
        self.near = tiers[:-1] or tiers
        """All tiers but the last, whose look-ups take the longest."""

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Grow the tree, or only its best path if chains are verified. Returns the time that each
        tier spent on look-ups."""
        if budget.leaves == 1 and budget.nodes and not len(tree):
            expected, work = self.grow_path(tree, tokens, budget)
            budget.expected, budget.best = expected, len(tree)
            if budget.costs is not None:
                budget.worth = max(budget.worth, expected / budget.costs.table[len(tree)])
        else:
            work = self.grow_tree(tree, tokens, budget)
        if not self.sources.keys().isdisjoint(UNMATCHED):
            lengths = zip(tree.sources, tree.match_lengths, strict=True)
            tree.match_lengths = [0 if source in UNMATCHED else n for source, n in lengths]
        return work

    def grow_tree(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        self.spent = dict.fromkeys(self.sources.values(), 0.0)
        self.on_path = None
        suffix = tuple(tokens[-WINDOW:])
        before = len(tree)
        self.tree, self.candidates, self.first = tree, [], before + 1
        # Nothing is learned from a probe, because that would need the look-ups that it spares.
        self.grown = None if budget.near else len(tokens)
        if budget.nodes:
            tiers = self.near if budget.near else self.tiers
            self.grow_from(tiers, tree, suffix, len(tokens), budget)
        tree.cut(max(before, budget.best))
        del self.candidates[len(tree) - before :]
        return {source: Work(seconds) for source, seconds in self.spent.items()}

    def grow_path(
        self, tree: Tree, tokens: Sequence[int], budget: Budget
    ) -> tuple[float, Mapping[str, Work]]:
        """Put the best path into the empty tree. Returns the number of tokens that it is expected
        to emit, and the work."""
        drafting = Drafting(nodes=EXAMINED, budget="fixed")
        room = Budget(drafting, budget.depth, budget.vocabulary, near=budget.near)
        room.floor = budget.floor
        grown = Tree(tokens[-1])
        work = self.grow_tree(grown, tokens, room)
        chances = self.chances()
        end, expected = best_row(grown, chances, budget)
        rows, row = path_to(grown, end), 0
        for at in rows:
            row = tree.add(row, grown.tokens[at], grown.sources[at], grown.match_lengths[at])
        self.on_path = [chances[at] for at in (0, *rows)]
        return expected, work

    def grow_from(
        self,
        tiers: Sequence[Tier],
        tree: Tree,
        suffix: tuple[int, ...],
        position: int,
        budget: Budget,
    ) -> None:
        """Add the likeliest nodes that `tiers` know of until no further one pays.

        The tokens after the root are at `position`.
        """
        # (-probability, number, parent row, candidate, suffix and depth of the parent)
        heap: list[tuple[float, int, int, Candidate, tuple[int, ...], int]] = []
        number, row, probability, depth = 0, 0, 1.0, 0
        # No node is likelier than the last added one, so if that no longer pays, none does.
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
            known, length = len(tree), least_length(weights.match_length)
            row = tree.add(parent, token, self.sources[weights.tier], length)
            if len(tree) > known:
                budget.added(len(tree), probability)
                self.candidates.append(candidate)
            suffix = (*suffix[1 - WINDOW :], token)
            depth += 1

    def expand(
        self, tiers: Sequence[Tier], suffix: tuple[int, ...], position: int, floor: float
    ) -> list[Candidate]:
        """Estimated probabilities of next tokens that reach `floor`, each with its first evidence.

        Without noise, contributions far below `floor` are ignored, because they cannot lift a token
        to it. With noise they can, so none is ignored.
        """
        if self.sampling is None:
            found, origin, _ = self.interpolated(self.chain(tiers, suffix), floor * SLIGHT)
            shares = ((share, token, origin[token]) for token, share in found.items())
            return ranked(shares, floor, noisy=False)
        options = self.options_at(tiers, suffix, position)
        if options is None:
            return []
        temperature = self.sampling.temperature
        errors = self.calibration.errors
        chances, _ = errors.estimates(options.shares, options.noise, options.named, temperature)
        return ranked(zip(chances, options.tokens, options.origin, strict=True), floor, noisy=True)

    def interpolated(
        self, chain: Sequence[Evidence], least: float
    ) -> tuple[dict[int, float], dict[int, EvidenceWeights], float]:
        """The probabilities of tokens by a chain, the first evidence of each token, and the
        remaining probability. Contributions below `least` are left out."""
        found: dict[int, float] = {}
        origin: dict[int, EvidenceWeights] = {}
        left = 1.0
        for weights, followers in chain:
            mass = left * weights.values[followers.strength]
            scale = mass / followers.total
            for token, count in followers.order or followers.ranked():
                share = scale * count
                if share < least:
                    break
                if token in found:
                    found[token] += share
                else:
                    found[token] = share
                    origin[token] = weights
            left -= mass
            if left < least or left < NEGLIGIBLE:
                break
        return found, origin, left

    def options_at(
        self, tiers: Sequence[Tier], suffix: tuple[int, ...], position: int
    ) -> Options | None:
        """The candidates after `suffix` at `position`; None if there is no evidence."""
        key = id(tiers), suffix, position
        if key in self.options:
            return self.options[key]
        chain = self.chain(tiers, suffix)
        found, origin, left = self.interpolated(chain, 0.0)
        named = len(found)
        # Without any evidence, other drafters are better than the noise alone.
        favoured = self.noise_favoured(tiers, position) if found and left >= NEGLIGIBLE else ()
        for weights, followers in favoured:
            mass = left * weights.values[followers.strength]
            scale = mass / followers.total
            for token, count in followers.counts.items():
                if token in found:
                    found[token] += scale * count
                else:
                    found[token] = scale * count
                    origin[token] = weights
            left -= mass
        options = None
        if found:
            assert self.sampling is not None
            tokens = list(found)
            noise = gumbel(self.sampling.seed, position, tokens).tolist()
            options = Options(tokens, list(found.values()), noise, list(origin.values()), named)
        self.options[key] = options
        return options

    def noise_favoured(self, tiers: Sequence[Tier], position: int) -> list[Evidence]:
        """The frequent tokens of each tier that the noise of a position favours most."""
        key = id(tiers), position
        if key not in self.favoured:
            assert self.sampling is not None
            found = self.favoured[key] = []
            for weights, often in self.unigrams(tiers):
                tokens = noise_favoured(often.counts, self.sampling.seed, position)
                counts = {token: often.counts[token] for token in tokens}
                found.append((weights, Followers(often.total, often.distinct, counts)))
        return self.favoured[key]

    def unigrams(self, tiers: Sequence[Tier]) -> list[Evidence]:
        return [
            (self.calibration.unigrams[tier.name], often)
            for tier in tiers
            if (often := tier.unigrams()) is not None
        ]

    def chain(self, tiers: Sequence[Tier], suffix: tuple[int, ...]) -> list[Evidence]:
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
            # A shorter match at the same places adds no evidence to the longer one.
            and (at + 1 == length or matches[at].total > matches[at + 1].total)
        ]
        return chain

    def chances(self) -> list[float]:
        """The path probability of each row of the last grown tree, or of its best path if that was
        all of it, the root first. It must have been grown from an empty one."""
        return self.of_rows() if self.on_path is None else self.on_path

    def of_rows(self) -> list[float]:
        chances = [1.0]
        for row, candidate in enumerate(self.candidates, 1):
            chances.append(candidate[0] * chances[self.tree.parents[row]])
        return chances

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Update the calibration with the decided tokens, then let the tiers learn them."""
        start = len(tokens) - new
        if self.grown == start:
            self.settle(tokens[start:])
            for at in range(start, len(tokens)):
                self.learn(tuple(tokens[max(0, at - WINDOW) : at]), at, tokens[at])
        self.grown = None
        self.forget()  # the tiers answer differently after they have learned
        for tier in self.tiers:
            tier.observe(tokens, new)

    def forget(self, suffixes: Collection[tuple[int, ...]] | None = None) -> None:
        """Drop the cached look-ups, because the tiers may answer differently now: all of them, or
        those of these suffixes."""
        if suffixes is None:
            self.options.clear()
            self.favoured.clear()
            self.chains.clear()
            return
        self.options = {key: kept for key, kept in self.options.items() if key[1] not in suffixes}
        self.chains = {key: kept for key, kept in self.chains.items() if key[1] not in suffixes}

    def learn(self, suffix: tuple[int, ...], position: int, token: int) -> None:
        chain = self.chain(self.tiers, suffix)
        if self.sampling is not None:
            options = self.options_at(self.tiers, suffix, position)
            if options is not None:
                chosen = options.tokens.index(token) if token in options.tokens else None
                self.calibration.errors.learn(
                    options.shares, options.noise, options.named, self.sampling.temperature, chosen
                )
            chain = [*chain, *self.unigrams(self.tiers)]
        self.calibration.learn(chain, token)

    def settle(self, emitted: Sequence[int]) -> None:
        """Count the drafted nodes whose parents were visited, and whether they were accepted."""
        row: int | None = 0
        for token in emitted:
            if row is None:
                return
            for drafted, child in self.tree.children[row].items():
                at = child - self.first
                if not 0 <= at < len(self.candidates):
                    continue
                _, candidate, share, weights, rate = self.candidates[at]
                # A later drafter may have replaced this draft by its own.
                own = self.tree.sources[child] == self.sources[weights.tier]
                if own and candidate == drafted:
                    rate.learn(share, float(drafted == token))
            row = self.tree.children[row].get(token)

    def finish(self, tokens: Sequence[int], new: int) -> None:
        for tier in self.tiers:
            tier.finish(tokens, new)


def best_row(tree: Tree, chances: Sequence[float], budget: Budget) -> tuple[int, float]:
    """The end of the most valuable path, and the number of tokens that it is expected to emit."""
    table = None if budget.costs is None else budget.costs.table
    alone = 1.0 + budget.others
    best, most = (0, alone), 0.0 if table is None or budget.owed else alone / table[0]
    expected = [alone]
    for row in range(1, len(tree.tokens)):
        expected.append(expected[tree.parents[row]] + chances[row])
        depth = tree.depths[row]
        worth = expected[row] if table is None else expected[row] / table[depth]
        if depth <= budget.nodes and worth > most:
            best, most = (row, expected[row]), worth
    return best


def path_to(tree: Tree, row: int) -> list[int]:
    rows: list[int] = []
    while row:
        rows.append(row)
        row = tree.parents[row]
    return rows[::-1]


def noise_favoured(counts: Mapping[int, float], seed: int, position: int) -> list[int]:
    """The tokens with the largest log count + noise, best first; ties go to the smaller id."""
    tokens = np.fromiter(counts, np.int64, len(counts))
    noise = gumbel(seed, position, tokens)
    rough = np.log(np.fromiter(counts.values(), np.float64, len(counts))) + noise
    # Logarithms of other libraries round differently, so the best few are compared by one.
    few = min(2 * FAVOURED, len(rough))
    best = np.argpartition(rough, -few)[-few:]
    pairs = zip(tokens[best].tolist(), noise[best].tolist(), strict=True)
    return [token for _, token in nsmallest(FAVOURED, ((-log(counts[t]) - g, t) for t, g in pairs))]


def ranked(
    found: Iterable[tuple[float, int, EvidenceWeights]], floor: float, noisy: bool
) -> list[Candidate]:
    """The candidates that reach `floor` once their rates are applied, the likeliest first."""
    candidates: list[Candidate] = []
    for share, token, weights in sorted(found, key=itemgetter(0), reverse=True):
        rates = weights.noisy_rates if noisy else weights.rates
        rate = rates[min(len(candidates), RANKS - 1)]
        # Scaling at most halves the distance to certainty.
        scaled = min(share * rate.factor, (1.0 + share) / 2)
        if scaled < floor:
            break
        candidates.append((scaled, token, share, weights, rate))
    return candidates
