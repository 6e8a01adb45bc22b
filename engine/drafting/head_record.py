"""Whether the guesses of a head hold as often as the head itself claims.

A head can be broken without failing: its file belongs to another model, it is fed from the wrong
layers, or too few bits are left of its weights. Its guesses then hold about as often as chance,
while it stays as sure of them as ever. A good head on a hard text is unsure instead: few of its
guesses hold, but it claims few. A head is therefore judged by its own probabilities, and generously
(`TRUST`), because good heads too are surer than they should be on texts unlike those that they
learned from.
"""

from dataclasses import dataclass
from math import exp, log

CHANCE = 0.05
"""The largest share of guesses that may hold by chance. No head that drafts holds less."""
TRUST = 0.5
"""The share of what a head claims that has to hold."""
SURE = 1e-6
"""The largest probability of a false judgement."""
SUSPECT, ENOUGH = 2.0, 200
"""A head of whose guesses none held although it claimed so many is suspect, until it has guessed
ENOUGH times."""


@dataclass(slots=True)
class HeadRecord:
    """The guesses of a head for the next token: how many there were, how many `held`, and how many
    it claimed would hold, the sum of the probabilities of its likeliest tokens."""

    guesses: int = 0
    held: int = 0
    claimed: float = 0.0

    def add(self, chance: float, held: bool) -> None:
        self.guesses += 1
        self.held += held
        self.claimed += chance

    @property
    def suspect(self) -> bool:
        """Whether the head should be asked more often than pays, to find out if it is broken."""
        chance = self.held <= CHANCE * self.guesses
        return chance and self.claimed > SUSPECT and self.guesses < ENOUGH and not self.broken

    @property
    def broken(self) -> bool:
        """Whether so few guesses cannot be bad luck: Chernoff's bound for a sum of independent
        events of which TRUST times the claims are expected."""
        expected = TRUST * self.claimed
        if self.held > CHANCE * self.guesses or self.held >= expected:
            return False
        return unlikely(self.held, expected) < SURE


def unlikely(seen: int, expected: float) -> float:
    """A bound on the probability of at most so many events if more are expected."""
    return exp(seen - expected + (seen * log(expected / seen) if seen else 0.0))


def broken_head(record: HeadRecord) -> str:
    """Why a head is not used, as the end of a sentence; "" if its guesses do not show it."""
    if not record.broken:
        return ""
    return (
        f"not used: {record.held} of its {record.guesses} guesses held, where it expected "
        f"{record.claimed:.0f}. It may belong to another model or another version of it, or be "
        "damaged or rounded too far. Load the model with another head, or without one (--head off)"
    )
