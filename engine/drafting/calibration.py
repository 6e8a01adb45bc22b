"""How far each kind of evidence can be credited, learned from what the target really said.

A prediction asks one piece of evidence after the other, the longest match first. Each takes its
*trust*, a share of the probability that the ones before it left, and hands the rest on. Trust is
kept per tier, match length and strength of the evidence (how often its key was seen, and how far
the next tokens agreed). After every emitted token, the responsibility of each piece for it is
computed, as when interpolation weights of language models are estimated (Jelinek and Mercer, 1980),
online: trust = tokens it was responsible for / tokens that got as far as asking it.

What is drafted is chosen for its high estimate, so overestimates are more common among drafted
nodes than among all. The second part corrects that: per tier, match length and rank among its
siblings, drafted nodes whose parent was visited are counted with their estimates, and estimates of
that kind are scaled by accepted / expected.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from engine.types import (
    CONTEXT,
    DIVERSITIES,
    MODEL,
    STATISTICS,
    STRENGTHS,
    CalibrationRow,
    Followers,
)

PRIORS: Mapping[str, Sequence[tuple[float, float]]] = {
    CONTEXT: ((2.6, 0.0), (1.9, 0.0), (1.6, 0.0), (1.0, 0.0), (1.4, 0.0), (1.2, 0.2), (0.5, 0.2)),
    MODEL: ((26.0, 9.0), (38.0, 8.0), (23.0, 14.0), (10.0, 0.8)),
    STATISTICS: ((2.6, 6.3), (6.9, 0.2), (6.4, 0.2)),
}
"""Per match length (longer ones share the last entry): a key with n occurrences and d distinct next
tokens is credited n / (n + a d + b) before anything is observed. Fitted by maximum likelihood to
recorded answers of Vicuna-7B (docs/log.md)."""
DOUBT = 30.0
"""The observations that a prior is worth."""
MEMORY = 2000.0
"""Beyond so many observations old ones fade, so that trust follows a change of subject."""
RANKS = 4
"""Siblings from this rank on are counted together."""
RANK_SUFFIX = ":rank"
SIZE = 130_000
"""About the bytes of a calibration, as measured: 85,000 when it is new, 170,000 at most."""
UNSEEN = 1e-4
"""The probability of a token under no evidence at all."""


class Rate:
    """How often drafted nodes of one kind were accepted, against what was expected of them."""

    __slots__ = ("accepted", "expected", "factor")

    def __init__(self) -> None:
        self.expected = self.accepted = 0.0
        self.factor = 1.0

    def learn(self, expected: float, accepted: float) -> None:
        """Count nodes whose parent was visited."""
        self.expected += expected
        self.accepted += accepted
        if self.expected > MEMORY:
            self.expected /= 2
            self.accepted /= 2
        self.factor = (DOUBT + self.accepted) / (DOUBT + self.expected)


class EvidenceWeights:
    """What was learned about one tier and match length.

    `values` holds the trust per strength of evidence, `rates` the acceptance per rank.
    """

    __slots__ = ("match_length", "priors", "rates", "reached", "tier", "credited", "values")

    def __init__(self, tier: str, match_length: int, a: float, b: float) -> None:
        self.tier, self.match_length = tier, match_length
        self.priors = [prior(strength, a, b) for strength in range(STRENGTHS)]
        self.values = list(self.priors)
        self.reached = [0.0] * STRENGTHS
        self.credited = [0.0] * STRENGTHS
        self.rates = [Rate() for _ in range(RANKS)]

    def learn(self, strength: int, reached: float, credited: float) -> None:
        """Count an observation: the shares of a token that came this far, and that stayed."""
        self.reached[strength] += reached
        self.credited[strength] += credited
        if self.reached[strength] > MEMORY:
            self.reached[strength] /= 2
            self.credited[strength] /= 2
        self.values[strength] = (DOUBT * self.priors[strength] + self.credited[strength]) / (
            DOUBT + self.reached[strength]
        )


Evidence = tuple[EvidenceWeights, Followers]
"""One piece of evidence of a chain: what it says, and how far it can be credited."""


class Calibration:
    """The weights of every tier. One per model and owner; rows outlive the program."""

    def __init__(self, rows: Iterable[CalibrationRow] = ()) -> None:
        self.weights = {
            tier: [
                EvidenceWeights(tier, length, *pairs[min(length, len(pairs)) - 1])
                for length in range(1, LONGEST + 1)
            ]
            for tier, pairs in PRIORS.items()
        }
        for row in rows:
            self.load(row)

    def load(self, row: CalibrationRow) -> None:
        """Take over what was learned before; a damaged row says nothing."""
        name = row.tier.removesuffix(RANK_SUFFIX)
        counted = 0 <= row.reached < inf and 0 <= row.credited < inf
        if name not in self.weights or not 1 <= row.match_length <= LONGEST or not counted:
            return
        weights = self.weights[name][row.match_length - 1]
        if name != row.tier and 0 <= row.strength < RANKS:
            weights.rates[row.strength].learn(row.reached, row.credited)
        if name == row.tier and 0 <= row.strength < STRENGTHS and row.credited <= row.reached:
            weights.learn(row.strength, row.reached, row.credited)

    def rows(self) -> list[CalibrationRow]:
        """What was learned."""
        rows = []
        for weights in (weights for lengths in self.weights.values() for weights in lengths):
            tier, length = weights.tier, weights.match_length
            for strength in range(STRENGTHS):
                reached, credited = weights.reached[strength], weights.credited[strength]
                rows.append(CalibrationRow(tier, length, strength, reached, credited))
            for rank, rate in enumerate(weights.rates):
                name = tier + RANK_SUFFIX
                rows.append(CalibrationRow(name, length, rank, rate.expected, rate.accepted))
        return [row for row in rows if row.reached]

    def learn(self, chain: Sequence[Evidence], token: int) -> None:
        """The target said `token` where `chain` was the evidence, the longest match first."""
        left, said = 1.0, []
        for weights, followers in chain:
            trust = weights.values[followers.strength]
            said.append(left * trust * followers.counts.get(token, 0.0) / followers.total)
            left *= 1.0 - trust
        total = sum(said) + left * UNSEEN
        reached = 1.0
        for (weights, followers), share in zip(chain, said, strict=True):
            credited = share / total
            weights.learn(followers.strength, reached, credited)
            reached -= credited
            if reached < 1e-3:
                break


LONGEST = 8
"""The longest key of any tier."""


def prior(strength: int, a: float, b: float) -> float:
    """n / (n + a d + b) for a typical n and d of a strength."""
    row, column = divmod(strength, len(DIVERSITIES) + 1)
    n = (1, 2, 3, 7, 17, 55, 300)[row]
    d = max(1.0, n * (0.05, 0.2, 0.45, 0.8, 1.0)[column])
    return n / (n + a * d + b)
