"""How a tier turns what it found into estimated path probabilities.

Longer matches speak first. A match of length m is trusted with CONFIDENCE[m] of the probability
that longer matches have left, shared among the continuations found there; the rest backs off to
shorter matches. Copying on, the match grows with every token, so each further token is trusted
with the confidence of the longer match. Equal prefixes add up, so frequent continuations win.
"""

from collections.abc import Sequence

from engine.types import Candidate


def confidence(table: Sequence[float], match_length: int) -> float:
    """The entry for a match length of 1, 2, ...; longer matches share the last entry."""
    return table[min(match_length, len(table)) - 1]


class Votes:
    """Accumulates path probabilities of one tier for one step.

    Votes below `least` are not worth casting: it takes more than two of them for a candidate.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.least = threshold / 2
        self.paths: dict[tuple[int, ...], float] = {}
        self.matched: dict[tuple[int, ...], int] = {}

    def add(self, path: tuple[int, ...], probability: float, match_length: int) -> None:
        """Give one path more probability; the first, longest match names it."""
        if path in self.paths:
            self.paths[path] += probability
        else:
            self.paths[path] = probability
            self.matched[path] = match_length

    def ranked(self, room: int) -> list[Candidate]:
        """The likeliest `room` candidates above the threshold, every prefix before its path.

        Stable sorting keeps parents first, as they enter first and are never less likely.
        """
        kept = [pair for pair in self.paths.items() if pair[1] >= self.threshold]
        kept.sort(key=lambda pair: -pair[1])
        matched = self.matched
        return [Candidate(path, value, matched[path]) for path, value in kept[:room]]
