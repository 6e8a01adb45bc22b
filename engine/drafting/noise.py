"""Estimates which token the target will choose, given the noise that it will choose with.

At a temperature above 0 the target chooses the token with the largest log P + g. P is its
distribution, which drafting does not know, and g is the noise of seed, position and token, which
drafting does know (engine/sampling.py). The databases estimate P by p, with an error. If the error
of log p follows a Gumbel distribution as well, of scale 1 / l, then a candidate wins with the
probability

    q = d * p ** A * exp(l * g) / (the sum of this over all candidates + c * r ** A)

where r is the probability of all tokens that are not candidates, and A = a * sqrt(1 + l * l),
because noise and error together are wider than either alone, and q has to equal p on average. With
l = 0 the noise has no effect, and q is p. With a large l, p is trusted fully, and the largest log p
+ g wins. Errors of logits weigh more at a low temperature, so l = trust * temperature. d is 1,
except for candidates that were named for their noise alone. Tokens that the sampler cuts off
(top-k, top-p, min-p) are mostly among these and the tokens that are not candidates. `trust`, a
(`sharpness`), log c and log d are learned online.

Invariant: drafts decide nothing. Wrong noise costs drafts, never a token of the answer.
"""

from array import array
from collections.abc import Sequence
from math import exp, log, sqrt

FIRST = (0.83, 0.92, -0.4, -1.0)
"""First values of trust, sharpness, log c and log d, fitted to answers of the embedded model."""
RANGES = ((0.0, 3.0), (0.3, 3.0), (-5.0, 5.0), (-5.0, 5.0))
"""The ranges that they stay within, whatever is observed."""
PRIOR = 60.0
"""The precision of the initial values, in units of about one token."""
MEMORY = 3000.0
"""The largest precision, so that the values can follow a change of subject or of settings."""
LEAST = 1e-4
"""The smallest probability of all tokens that are not candidates."""


class ErrorModel:
    """The error model: how far estimates are trusted against the noise.

    Each value moves by online Newton steps that increase the likelihood of the target's choices: by
    the gradient divided by the precision, which is the sum of the second derivatives so far.
    """

    __slots__ = ("precisions", "values")

    def __init__(self) -> None:
        self.values = array("d", FIRST)
        self.precisions = array("d", [PRIOR] * len(FIRST))

    def learned(self) -> list[tuple[float, float]]:
        """What was learned for each value: the precision beyond the initial one, and the value
        minus its lower limit, as `load` expects them."""
        return [
            (precision - PRIOR, value - low)
            for precision, value, (low, _) in zip(self.precisions, self.values, RANGES, strict=True)
        ]

    def load(self, which: int, precision: float, value: float) -> None:
        if 0 <= which < len(RANGES) and precision > 0:
            low, high = RANGES[which]
            self.precisions[which] = min(PRIOR + precision, MEMORY)
            self.values[which] = min(low + value, high)

    def estimates(
        self, shares: Sequence[float], noise: Sequence[float], named: int, temperature: float
    ) -> tuple[list[float], float]:
        """The probability of each candidate with estimates `shares` and noise `noise` to be chosen,
        and of all other tokens together. Candidates from `named` on were named for their noise
        alone."""
        trust, sharpness, unnamed, favoured = self.values
        slope = trust * temperature
        power = sharpness * sqrt(1.0 + slope * slope)
        total = others = exp(power * log(unnamed_mass(shares)) + unnamed)
        weights = []
        for number, (share, own) in enumerate(zip(shares, noise, strict=True)):
            score = power * log(share) + slope * own
            weight = exp(score if number < named else score + favoured)
            weights.append(weight)
            total += weight
        return [weight / total for weight in weights], others / total

    def learn(
        self,
        shares: Sequence[float],
        noise: Sequence[float],
        named: int,
        temperature: float,
        chosen: int | None,
    ) -> None:
        """Learn that the target chose candidate number `chosen`, or (None) another token."""
        chances, others = self.estimates(shares, noise, named, temperature)
        trust, sharpness = self.values[:2]
        slope = trust * temperature
        width = sqrt(1.0 + slope * slope)
        bend = temperature * sharpness * slope / width
        # How the score of the choice grows with trust and sharpness, then the mean of that over
        # all possible choices, and the mean of its square. First all others: their noise
        # is not known.
        mass = log(unnamed_mass(shares))
        trusted, sharpened = bend * mass, width * mass
        came = trusted, sharpened
        means = [others * trusted, others * sharpened]
        squares = [others * trusted * trusted, others * sharpened * sharpened]
        favoured = 0.0
        for number, (share, own, chance) in enumerate(zip(shares, noise, chances, strict=True)):
            mass = log(share)
            trusted, sharpened = temperature * own + bend * mass, width * mass
            if number == chosen:
                came = trusted, sharpened
            means[0] += chance * trusted
            means[1] += chance * sharpened
            squares[0] += chance * trusted * trusted
            squares[1] += chance * sharpened * sharpened
            if number >= named:
                favoured += chance
        self.move(0, came[0] - means[0], squares[0] - means[0] * means[0])
        self.move(1, came[1] - means[1], squares[1] - means[1] * means[1])
        self.move(2, float(chosen is None) - others, others - others * others)
        came_favoured = float(chosen is not None and chosen >= named)
        self.move(3, came_favoured - favoured, favoured - favoured * favoured)

    def move(self, which: int, gradient: float, curvature: float) -> None:
        low, high = RANGES[which]
        precision = min(self.precisions[which] + max(curvature, 0.0), MEMORY)
        self.precisions[which] = precision
        self.values[which] = min(max(self.values[which] + gradient / precision, low), high)


def unnamed_mass(shares: Sequence[float]) -> float:
    """The probability that is left for tokens that are not candidates."""
    left = 1.0
    for share in shares:  # one by one, as the compiled core does: `sum` rounds in another way
        left -= share
    return max(left, LEAST)
