"""The scores of a forward whose logits can be read row by row, whatever computed them."""

from collections.abc import Callable, Sequence

from engine.sampling import Floats, choose, distribution, probabilities
from engine.settings import Sampling


class LogitScores:
    """Scores over `read(row)`, the logits of one tree row: float32, shape (vocabulary,).

    `positions` are those of the tokens that follow each row. A row is read and its softmax computed
    once, and only when asked for.
    """

    def __init__(
        self, read: Callable[[int], Floats], positions: Sequence[int], sampling: Sampling
    ) -> None:
        self.read, self.positions, self.sampling = read, positions, sampling
        self.rows: dict[int, Floats] = {}
        self.shares: dict[int, Floats] = {}

    def row(self, row: int) -> Floats:
        """The logits of one row."""
        if row not in self.rows:
            self.rows[row] = self.read(row)
        return self.rows[row]

    def choose(self, row: int) -> int:
        return choose(self.row(row), self.sampling, self.positions[row])

    def distribution(self, row: int) -> Floats:
        return distribution(self.row(row), self.sampling)

    def softmax(self, row: int) -> Floats:
        """One row's probabilities."""
        if row not in self.shares:
            self.shares[row] = probabilities(self.row(row))
        return self.shares[row]

    def probability(self, row: int, token: int) -> float:
        return float(self.softmax(row)[token])
