"""MTP heads at work: what they keep for a sequence, with one layer and with several.

One layer guesses all depths, each from its own last state (`MtpHead`). Of several, layer k guesses
at depth k (`DeepMtpHead`). Row r of layer k is the state that layer k - 1 left at row r, with token
r + k + 1 of the text; layer 0 takes the state of the model. So the last rows of a deeper layer hang
on tokens that are only guessed: these are computed anew for each path, the rows before them once.

Invariant of the deep one: of layer k the first `done` rows have keys and values, and the next layer
the states that they left. They hang on decided tokens alone.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from engine.heads.base import LogitGuess
from engine.heads.eagle3_head import CHUNK, Eagle3Head, Rows
from engine.settings import Sampling


class MtpHead(Eagle3Head):
    """A head of one layer. It works as an EAGLE-3 head does; its layer takes a mask and a cache."""

    def step(
        self,
        start: int,
        tokens: Sequence[int],
        before: torch.Tensor,
        rows: Sequence[int],
        sees: NDArray[np.bool_],
    ) -> torch.Tensor:
        return self.computed(0, (self.keys, self.values), start, tokens, before, rows, sees)

    def computed(
        self,
        level: int,
        kept: tuple[Rows, Rows],
        start: int,
        tokens: Sequence[int],
        before: torch.Tensor,
        rows: Sequence[int],
        sees: NDArray[np.bool_],
    ) -> torch.Tensor:
        """As `step`, of a layer whose keys and values are `kept`."""

        def write(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return kept[0].write(start, keys), kept[1].write(start, values)

        head, device, dtype = self.weights.head, before.device, before.dtype
        mask = torch.zeros((1, 1, *sees.shape), dtype=dtype)
        mask.masked_fill_(torch.from_numpy(~sees), torch.finfo(dtype).min)
        ids, positions = torch.tensor([tokens, rows], device=device)
        embedded = functional.embedding(ids, self.weights.embedding).to(dtype)
        out: torch.Tensor = head(
            embedded[None], before[None], positions[None], mask.to(device), write, level
        )[0]
        return out


class Level:
    """What a deeper layer keeps: the `states` that go into its rows, and keys and values of the
    first `done` ones."""

    def __init__(self) -> None:
        self.states, self.keys, self.values = Rows(0), Rows(2), Rows(2)
        self.done = 0

    @property
    def bytes(self) -> int:
        return self.states.bytes + self.keys.bytes + self.values.bytes


class DeepMtpHead(MtpHead):
    """A head of several layers: layer k guesses at depth k. `paths` and `left` are, of each node of
    the last level, the guessed tokens before it and the states at those rows that hang on them."""

    def reset(self) -> None:
        super().reset()
        self.deeper = [Level() for _ in range(self.info.depth - 1)]
        self.paths: list[list[int]] = []
        self.left: list[torch.Tensor] = []

    @property
    def bytes(self) -> int:
        return super().bytes + sum(each.bytes for each in self.deeper)

    def keep(self, length: int) -> None:
        super().keep(length)
        for number, level in enumerate(self.deeper, 1):
            level.done = min(level.done, len(self.rows))
            while level.done and self.rows[level.done - 1] >= length - 1 - number:
                level.done -= 1

    def step(
        self,
        start: int,
        tokens: Sequence[int],
        before: torch.Tensor,
        rows: Sequence[int],
        sees: NDArray[np.bool_],
    ) -> torch.Tensor:
        out = super().step(start, tokens, before, rows, sees)
        self.deeper[0].states.write(start, out)
        return out

    @torch.inference_mode()
    def start(
        self, tokens: Sequence[int], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> LogitGuess | None:
        guess = super().start(tokens, sampling, cancelled)
        if guess is None:
            return None
        for number, level in enumerate(self.deeper, 1):
            end = len(self.rows) - self.hanging(number)
            while level.done < end:
                if cancelled():
                    return None
                self.catch_up(number, min(end, level.done + CHUNK), tokens)
        self.paths, self.left = [[]], [self.root[:0]]
        return guess

    def hanging(self, number: int) -> int:
        """How many rows of a layer hang on guesses, before any is made."""
        last = self.rows[-1]
        return sum(1 for _ in takewhile(lambda row: row > last - number, reversed(self.rows)))

    def catch_up(self, number: int, end: int, tokens: Sequence[int]) -> None:
        """Compute the rows of a layer up to number `end`, all of which are decided."""
        level = self.deeper[number - 1]
        start, rows = level.done, self.rows[level.done : end]
        assert level.states.values is not None
        before = level.states.values[start:end]
        following = [tokens[row + number + 1] for row in rows]
        sees = np.tri(len(rows), end, start, dtype=bool)
        kept = level.keys, level.values
        out = self.computed(number, kept, start, following, before, rows, sees)
        if number < len(self.deeper):
            self.deeper[number].states.write(start, out)
        level.done = end

    @torch.inference_mode()
    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[LogitGuess]:
        number = len(self.paths[0]) + 1
        level, count = self.deeper[number - 1], self.hanging(number)
        first = len(self.rows) - count
        rows = self.rows[first:]
        paths = [[*self.paths[at], token] for at, token in zip(parents, tokens, strict=True)]
        known = count - len(self.left[0])
        assert level.states.values is not None
        decided = level.states.values[first : first + known]
        before = torch.cat([part for at in parents for part in (decided, self.left[at])])
        # The token behind row r of this layer is guess number r - last + number.
        following = [path[row - rows[-1] - 1] for path in paths for row in rows]
        sees = np.zeros((len(paths) * count, first + len(paths) * count), dtype=bool)
        sees[:, :first] = True
        sees[:, first:] = np.kron(np.eye(len(paths)), np.tri(count)) > 0
        kept = level.keys, level.values
        out = self.computed(number, kept, first, following, before, rows * len(paths), sees)
        self.paths, self.left = paths, [*torch.split(out, count)]
        return self.guesses(torch.stack([each[-1] for each in self.left]))
