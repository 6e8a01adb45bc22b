"""What the target will choose, given the noise that it will choose with.

At a temperature above 0 the target says the token with the largest log P + g. P is its law, which
drafting does not know, and g the noise of seed, position and token, which drafting does know
(engine/sampling.py). The databases estimate P by p, with an error. If the error of log p follows
the Gumbel law as well, of scale 1 / l, then a candidate wins with the probability

    q = p ** A * exp(l * g) / (sum of the same over all candidates + c * r ** A)

where r is the mass of all that is not named, and A = a * sqrt(1 + l * l): the two noises together
are wider than one, and q has to be p on average. With l = 0 the noise says nothing, and q is p. A
large l trusts p fully, and the largest log p + g wins. Errors of logits weigh more at a low
temperature, so l = trust * temperature. `trust`, a (`sharpness`) and c (`unnamed`) are learned
online for each class of evidence. That is the tier and the length of the longest match.

Invariant: drafts decide nothing. Noise that is wrong costs drafts, never a token of the answer.
"""

from collections.abc import Sequence
from math import exp, log, sqrt

TRUST, SHARPNESS, UNNAMED = 0.83, 0.92, -0.4
"""First values, `UNNAMED` of log c: fitted to recorded answers of the embedded model."""
PRIOR = 60.0
"""The precision of the first values: about that of so many tokens."""
MEMORY = 1000.0
"""No precision grows beyond it, so that the values follow a change of subject or of settings."""
RANGES = ((0.0, 3.0), (0.3, 3.0), (-5.0, 5.0))
"""Where trust, sharpness and log c stay, whatever is observed."""
LEAST = 1e-4
"""The least mass of what is not named."""


class ErrorModel:
    """How far the estimates of one class of evidence are to be trusted against the noise.

    Each value moves by online Newton steps up the likelihood of what the target said: by the
    gradient over the precision, which is the sum of the second derivatives met so far.
    """

    __slots__ = ("precisions", "values")

    def __init__(self) -> None:
        self.values = [TRUST, SHARPNESS, UNNAMED]
        self.precisions = [PRIOR, PRIOR, PRIOR]

    def learned(self) -> list[tuple[float, float]]:
        """What was learned of each value: the precision beyond the first one, and the value above
        its least. `load` takes it over."""
        return [
            (precision - PRIOR, value - low)
            for precision, value, (low, _) in zip(self.precisions, self.values, RANGES, strict=True)
        ]

    def load(self, which: int, precision: float, value: float) -> None:
        """Take over what was learned before of one value; what cannot be says nothing."""
        if 0 <= which < len(RANGES) and precision > 0:
            low, high = RANGES[which]
            self.precisions[which] = min(PRIOR + precision, MEMORY)
            self.values[which] = min(low + value, high)

    def estimates(
        self, shares: Sequence[float], noise: Sequence[float], temperature: float
    ) -> tuple[list[float], float]:
        """The chance of each candidate of probability `shares` and noise `noise` to be chosen, and
        that of all others together."""
        trust, sharpness, unnamed = self.values
        slope = trust * temperature
        power = sharpness * sqrt(1.0 + slope * slope)
        total = exp(power * log(unnamed_mass(shares)) + unnamed)
        others, weights = total, []
        for share, luck in zip(shares, noise, strict=True):
            weight = exp(power * log(share) + slope * luck)
            weights.append(weight)
            total += weight
        return [weight / total for weight in weights], others / total

    def learn(
        self, shares: Sequence[float], noise: Sequence[float], temperature: float, said: int | None
    ) -> None:
        """The target said candidate number `said`, or a token that is none of the candidates."""
        chances, others = self.estimates(shares, noise, temperature)
        trust, sharpness, _ = self.values
        slope = trust * temperature
        width = sqrt(1.0 + slope * slope)
        # How the logarithm of each weight grows with trust and sharpness: a candidate's, and then,
        # at first, that of all others, whose noise is not known.
        bend = temperature * sharpness * slope / width
        mass = log(unnamed_mass(shares))
        at_trust, at_sharpness = bend * mass, width * mass
        came = (at_trust, at_sharpness, 1.0)
        sums = [others * at_trust, others * at_sharpness]
        squares = [sums[0] * at_trust, sums[1] * at_sharpness]
        for number, (share, luck, chance) in enumerate(zip(shares, noise, chances, strict=True)):
            mass = log(share)
            at_trust, at_sharpness = temperature * luck + bend * mass, width * mass
            if number == said:
                came = (at_trust, at_sharpness, 0.0)
            sums[0] += chance * at_trust
            sums[1] += chance * at_sharpness
            squares[0] += chance * at_trust * at_trust
            squares[1] += chance * at_sharpness * at_sharpness
        self.move(0, came[0] - sums[0], squares[0] - sums[0] * sums[0])
        self.move(1, came[1] - sums[1], squares[1] - sums[1] * sums[1])
        self.move(2, came[2] - others, others - others * others)

    def move(self, which: int, gradient: float, curvature: float) -> None:
        """One step of one value."""
        low, high = RANGES[which]
        precision = min(self.precisions[which] + max(curvature, 0.0), MEMORY)
        self.precisions[which] = precision
        self.values[which] = min(max(self.values[which] + gradient / precision, low), high)


def unnamed_mass(shares: Sequence[float]) -> float:
    """The probability that is left for what is not among the candidates."""
    left = 1.0
    for share in shares:  # one by one, as the compiled core does: `sum` rounds in another way
        left -= share
    return max(left, LEAST)
