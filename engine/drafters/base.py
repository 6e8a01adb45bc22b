"""The seam between the decode loop and the databases that draft."""

from collections.abc import Sequence
from typing import Protocol

from engine.types import Candidate, Followers


class Drafter(Protocol):
    """A source of candidates. It sees decided tokens only and can cost speed, never correctness."""

    name: str

    def propose(self, tokens: Sequence[int], room: int, threshold: float) -> list[Candidate]:
        """At most about `room` candidates for what follows `tokens`, likeliest first.

        Every prefix of a candidate's path is a candidate too, and comes earlier. Candidates less
        likely than `threshold` are left out. May be empty.
        """

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """The last `new` of `tokens` were decided: the prompt at first, then each step's tokens."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """The answer is over: its tokens are the last `new` of `tokens`."""


class NgramTable(Protocol):
    """What a tier needs of a store of n-grams. Memory and SQLite both implement it."""

    def look_up(self, key: Sequence[int]) -> Followers | None:
        """What followed the tokens of `key`; None when the key is unknown."""


class Frozen:
    """A drafter that proposes but does not keep what it sees: for measuring without a trace.

    Without it, the second of two runs on one prompt would draft the first one's answer.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name = drafter.name

    def propose(self, tokens: Sequence[int], room: int, threshold: float) -> list[Candidate]:
        """The wrapped drafter's candidates."""
        return self.drafter.propose(tokens, room, threshold)

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Nothing is kept."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Nothing is kept."""
