"""Interpolation weights for each kind of evidence, learned from the tokens that the target chose.

The probability of a next token is interpolated from all evidence (Jelinek and Mercer, 1980). The
longest match comes first and takes a share of the probability: its *evidence weight*. The next one
takes its share of the remainder, and so on. There is a weight per tier, match length and strength.
Strength summarises how often a key was seen and how far its next tokens agreed.

After every emitted token each piece of evidence gets its share of the credit for it: weight =
tokens credited to it / tokens for which it was reached. The learned values are stored in arrays,
which the compiled core (engine/drafting/compiled.py) updates in place.

Nodes are drafted because their estimates are high, so the estimates of drafted nodes are too high
on average. A second table corrects that. It counts drafted nodes whose parent was visited, per
tier, match length and rank among siblings, and scales estimates of that kind by accepted /
expected. Estimates that use the noise (engine/drafting/noise.py) have separate counts.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import inf
from typing import Any

from engine.drafting.noise import ErrorModel
from engine.types import (
    CONTEXT,
    DIVERSITIES,
    HEAD,
    MODEL,
    PREDICTION,
    SCHEMA,
    STATISTICS,
    STRENGTHS,
    CalibrationRow,
    Followers,
)

PRIORS: Mapping[str, Sequence[tuple[float, float]]] = {
    CONTEXT: ((2.6, 0.0), (1.9, 0.0), (1.6, 0.0), (1.0, 0.0), (1.4, 0.0), (1.2, 0.2))
    + 2 * ((0.5, 0.2),),
    PREDICTION: ((60.0, 9.0), (20.0, 4.0), (8.0, 0.0), (3.0, 0.0), (1.4, 0.0), (1.2, 0.0))
    + 2 * ((0.5, 0.0),),
    SCHEMA: (),
    MODEL: ((26.0, 9.0), (38.0, 8.0), (23.0, 14.0), (10.0, 0.8)),
    STATISTICS: ((2.6, 6.3), (6.9, 0.2), (6.4, 0.2)),
}
"""Per match length: a key with n occurrences and d distinct next tokens has the weight n / (n + a d
+ b) before anything is observed. Fitted by maximum likelihood to recorded answers of Vicuna-7B
(docs/log.md)."""
COPIED = ((0.07, 0.0), (0.012, 0.0), (0.006, 0.0), (0.002, 0.0))
"""The same for matches of 8, 16, 32 and 64 tokens or more in texts that are kept, from edits of
files (docs/log.md)."""
HEAD_DEPTHS, HEAD_CLASSES = 5, 7
"""A head's evidence is classified by depth (deeper levels count as the last one) and by the
probability of its likeliest token. Together these are as many classes as there are strengths."""
HEAD_PRIORS = (0.5, 0.62, 0.72, 0.78, 0.82, 0.85, 0.9)
"""The weight of a head's evidence by probability class before anything is observed."""
DEEPER = 0.93
"""The factor by which this weight falls at each further depth."""
WITH_HEAD = "with head:"
"""Prefix of the rows for the weights of evidence in runs with a head."""
UNIGRAM_PRIORS: Mapping[str, tuple[float, float]] = {
    CONTEXT: (7.0, 0.0),
    PREDICTION: (60.0, 0.0),
    SCHEMA: (60.0, 0.0),
    MODEL: (10.0, 0.0),
    STATISTICS: (10.0, 0.0),
}
"""The same for tokens that are frequent in any context."""
PRIOR_OBSERVATIONS = 30.0
"""The weight of a prior, in observations."""
MEMORY = 2000.0
"""The number of observations beyond which old ones decay, so that weights follow a change of
subject."""
RANKS = 4
"""Siblings from this rank on are counted together."""
RANK_SUFFIX, NOISY_RANK_SUFFIX, NOISE = ":rank", ":noisy rank", "noise"
SIZE = 180_000
"""The approximate size of a calibration in bytes, as measured with tracemalloc. A calibration that
was learned with a head contains a second one."""
UNSEEN = 1e-4
"""The probability of a token under no evidence at all."""
LONGEST = 8
"""The longest key of any tier."""
LONG = (16, 32, 64)
"""Longer matches are classes of evidence by their length, from these numbers of tokens on. Their
match lengths are the ones after LONGEST."""
CLASSES = LONGEST + len(LONG)
"""The match lengths of evidence, as it is learned and stored."""
WINDOW = LONG[-1]
"""How many of the last tokens tiers are asked with."""


def least_length(match_length: int) -> int:
    """The fewest tokens that match in evidence of a match length."""
    return match_length if match_length <= LONGEST else LONG[match_length - LONGEST - 1]


def prior_pair(counted: Sequence[tuple[float, float]], length: int) -> tuple[float, float]:
    if length <= len(counted):
        return counted[length - 1]
    return COPIED[max(0, length - LONGEST)]


@cache
def priors_of(a: float, b: float) -> tuple[float, ...]:
    """The initial weights of all strengths: n / (n + a d + b) for a typical n and d of each."""
    priors = []
    for strength in range(STRENGTHS):
        row, column = divmod(strength, len(DIVERSITIES) + 1)
        n = (1, 2, 3, 7, 17, 55, 300)[row]
        d = max(1.0, n * (0.05, 0.2, 0.45, 0.8, 1.0)[column])
        priors.append(n / (n + a * d + b))
    return tuple(priors)


def head_priors() -> list[float]:
    return [chance * DEEPER**depth for depth in range(HEAD_DEPTHS) for chance in HEAD_PRIORS]


class Rate:
    """How often drafted nodes of one kind were accepted, compared with the expectation."""

    __slots__ = ("figures",)

    def __init__(self) -> None:
        self.figures = array("d", (0.0, 0.0, 1.0))
        """How many of the counted nodes were expected to be accepted, how many of them were, and
        the resulting factor for an estimate."""

    @property
    def factor(self) -> float:
        return self.figures[2]

    def learn(self, expected: float, accepted: float) -> None:
        expected += self.figures[0]
        accepted += self.figures[1]
        if expected > MEMORY:
            expected /= 2
            accepted /= 2
        factor = (PRIOR_OBSERVATIONS + accepted) / (PRIOR_OBSERVATIONS + expected)
        self.figures[:] = array("d", (expected, accepted, factor))


class EvidenceWeights:
    """The evidence weights of one tier and match length.

    `values` holds the weight per strength, `rates` the acceptance per rank among siblings;
    `noisy_rates` replaces it if the noise is known. A match of length 0 stands for tokens that are
    frequent in any context.
    """

    def __init__(self, tier: str, match_length: int, priors: Iterable[float]) -> None:
        self.tier, self.match_length = tier, match_length
        self.priors = array("d", priors)
        self.values = array("d", self.priors)
        self.reached = array("d", (0.0,) * STRENGTHS)
        self.credited = array("d", (0.0,) * STRENGTHS)
        self.rates = [Rate() for _ in range(RANKS)]
        self.noisy_rates = [Rate() for _ in range(RANKS)]

    def learn(self, strength: int, reached: float, credited: float) -> None:
        """Count an observation: the share of a token for which this was reached, and its credit."""
        self.reached[strength] += reached
        self.credited[strength] += credited
        if self.reached[strength] > MEMORY:
            self.reached[strength] /= 2
            self.credited[strength] /= 2
        self.values[strength] = (
            PRIOR_OBSERVATIONS * self.priors[strength] + self.credited[strength]
        ) / (PRIOR_OBSERVATIONS + self.reached[strength])


Evidence = tuple[EvidenceWeights, Followers]
"""One piece of evidence of a chain: its weights, and its counts."""


class Calibration:
    """The evidence weights of every tier, per model and owner, and the error model of the noise.
    Its rows are stored."""

    def __init__(self, rows: Iterable[CalibrationRow] = ()) -> None:
        self.weights = {
            tier: [
                EvidenceWeights(tier, length, priors_of(*prior_pair(pairs, length)))
                for length in range(1, CLASSES + 1)
            ]
            for tier, pairs in PRIORS.items()
        }
        self.weights[HEAD] = [
            EvidenceWeights(HEAD, length, head_priors()) for length in range(1, CLASSES + 1)
        ]
        self.errors = ErrorModel()
        self.unigrams = {
            tier: EvidenceWeights(tier, 0, priors_of(*pair))
            for tier, pair in {**UNIGRAM_PRIORS, HEAD: (0.0, 1.0)}.items()
        }
        self.headed: Calibration | None = None
        """The calibration of runs with a head; see `with_head`."""
        self.compiled: Any = None
        """The compiled core's view of these numbers, once it has been requested."""
        for row in rows:
            self.load(row)

    def load(self, row: CalibrationRow) -> None:
        """Load stored values; a damaged row is ignored."""
        if row.tier.startswith(WITH_HEAD):
            if self.headed is None:
                self.headed = Calibration()
            self.headed.load(row._replace(tier=row.tier.removeprefix(WITH_HEAD)))
            return
        name, _, kind = row.tier.partition(":")
        counted = 0 <= row.reached < inf and 0 <= row.credited < inf
        if row.tier == NOISE and counted:
            self.errors.load(row.strength, row.reached, row.credited)
        if name not in self.weights or not 0 <= row.match_length <= CLASSES or not counted:
            return
        weights = self.of(name, row.match_length)
        rates = {RANK_SUFFIX: weights.rates, NOISY_RANK_SUFFIX: weights.noisy_rates}.get(":" + kind)
        if rates is not None and 0 <= row.strength < RANKS:
            rates[row.strength].learn(row.reached, row.credited)
        if name == row.tier and 0 <= row.strength < STRENGTHS and row.credited <= row.reached:
            weights.learn(row.strength, row.reached, row.credited)

    def of(self, tier: str, match_length: int) -> EvidenceWeights:
        """The weights of a tier and match length; length 0 stands for frequent tokens in any
        context."""
        return self.weights[tier][match_length - 1] if match_length else self.unigrams[tier]

    def rows(self) -> list[CalibrationRow]:
        """The learned values, as they are stored. An answer begins with this, so values that were
        never learned, which are most, take next to no time."""
        rows = [
            CalibrationRow(NOISE, 0, which, reached, credited)
            for which, (reached, credited) in enumerate(self.errors.learned())
            if reached
        ]
        for weights in (self.of(tier, n) for tier in self.weights for n in range(CLASSES + 1)):
            tier, length, credited = weights.tier, weights.match_length, weights.credited
            rows += [
                CalibrationRow(tier, length, strength, reached, credited[strength])
                for strength, reached in enumerate(weights.reached)
                if reached
            ]
            for suffix, rates in (
                (RANK_SUFFIX, weights.rates),
                (NOISY_RANK_SUFFIX, weights.noisy_rates),
            ):
                rows += [
                    CalibrationRow(tier + suffix, length, rank, *rate.figures[:2])
                    for rank, rate in enumerate(rates)
                    if rate.figures[0]
                ]
        if self.headed is not None:
            found = self.headed.rows()
            rows += [row._replace(tier=WITH_HEAD + row.tier) for row in found]
        return rows

    def with_head(self) -> "Calibration":
        """The calibration for runs with a head. It is learned separately, because a head often
        predicts the same tokens as short matches, and starts from the weights without a head."""
        if self.headed is None:
            self.headed = Calibration(self.rows())
        return self.headed

    def learn(self, chain: Sequence[Evidence], token: int) -> None:
        left, total, shares = 1.0, 0.0, []
        for weights, followers in chain:
            weight = weights.values[followers.strength]
            share = left * weight * followers.counts.get(token, 0.0) / followers.total
            shares.append(share)
            total += share  # one by one: what `sum` does depends on the version of Python
            left *= 1.0 - weight
        total += left * UNSEEN
        reached = 1.0
        for (weights, followers), share in zip(chain, shares, strict=True):
            credited = share / total
            weights.learn(followers.strength, reached, credited)
            reached -= credited
            if reached < 1e-3:
                break
