"""The scores of a forward whose logits can be read row by row, whatever computed them."""

from collections.abc import Callable, Sequence

import numpy as np

from engine.sampling import Choice, Floats, distribution, select
from engine.settings import Sampling


class LogitScores:
    """Scores over `read(row)`, the logits of one tree row: float32, shape (vocabulary,).

    `positions` are those of the tokens that follow each row. A row is read once, and only when
    asked for; its choice and what makes its logits probabilities come together.
    """

    def __init__(
        self, read: Callable[[int], Floats], positions: Sequence[int], sampling: Sampling
    ) -> None:
        self.read, self.positions, self.sampling = read, positions, sampling
        self.rows: dict[int, Floats] = {}
        self.choices: dict[int, Choice] = {}

    def row(self, row: int) -> Floats:
        """The logits of one row."""
        if row not in self.rows:
            self.rows[row] = self.read(row)
        return self.rows[row]

    def selected(self, row: int) -> Choice:
        """What comes of one row."""
        if row not in self.choices:
            self.choices[row] = select(self.row(row), self.sampling, self.positions[row])
        return self.choices[row]

    def choose(self, row: int) -> int:
        return self.selected(row).token

    def distribution(self, row: int) -> Floats:
        return distribution(self.row(row), self.sampling)

    def probability(self, row: int, token: int) -> float:
        return self.selected(row).probability(float(self.row(row)[token]))

    def known(self, row: int, token: int) -> float:
        return self.probability(row, token) if row in self.rows else 0.0

    def likeliest(self, row: int, count: int) -> list[tuple[int, float]]:
        if count < 1:
            return []
        logits, choice = self.row(row), self.selected(row)
        best = np.argpartition(logits, -count)[-count:] if count < logits.size else logits.argsort()
        ranked = sorted(best.tolist(), key=lambda token: (-logits[token], token))
        return [(token, choice.probability(float(logits[token]))) for token in ranked]
