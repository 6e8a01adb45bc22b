"""An EAGLE-3 head at work: it guesses along a tree from the hidden states of one sequence.

Row r of a text is its token r. For every decided row the head keeps the target's hidden states,
joined; of every row whose next token is decided too, the keys and values of its own layer. What it
guesses lies behind these and is forgotten. Rows that were read while nobody listened are a gap:
their keys are missing, nothing else.

To listen costs a copy, all else waits until the head is asked. Of what waits, only the `latest`
rows are kept: the ones before them become a gap. They would take longer than they bring.

Invariant: `rows` are the decided rows that are kept, in rising order; the first `done` of them have
keys and values, of the tokens in `cached` and the one after them. The hidden states of the last
ones are `waiting` to be joined.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from engine.heads.base import HeadInfo, LogitGuess
from engine.heads.eagle3 import tapped
from engine.heads.eight_bits import Matrix, linear
from engine.settings import Sampling

DEPTH = 8
"""Tokens that a head guesses ahead at most: the later ones are hardly ever right."""
CHUNK = 512
"""Rows that it catches up with at a time."""
SPARE = 64
"""Rows for which its caches have room beyond what they hold, when they grow."""
LATEST, LATEST_AT_ONCE = 64, 512
"""Rows that wait to be caught up with, at most: on a processor each takes its time. What comes
before them was worth a twentieth of the guesses (docs/log.md). Accelerators read many at once."""


@dataclass(frozen=True, slots=True)
class Eagle3Weights:
    """What all sequences share: the head, and the embedding and output matrix that it uses, its own
    or its target's. `tokens` are the target's tokens that its logits are of, None for all. `taps`
    are the target's modules whose outputs it reads. `head` may be another network that reads them
    (engine/heads/mtp.py, assistant.py): all have `join` and `norm`."""

    head: Any
    embedding: torch.Tensor
    output: Matrix
    tokens: NDArray[np.int64] | None
    taps: Sequence[torch.nn.Module]
    info: HeadInfo


class Rows:
    """Tensors that grow along one dimension, written in place."""

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self.values: torch.Tensor | None = None

    def write(self, start: int, new: torch.Tensor) -> torch.Tensor:
        """Put `new` behind the first `start` rows; returns all of them."""
        count = new.shape[self.dimension]
        room = 0 if self.values is None else self.values.shape[self.dimension]
        if start + count > room:
            shape = list(new.shape)
            shape[self.dimension] = max(2 * room, start + count + SPARE)
            larger = new.new_empty(shape)
            if self.values is not None:
                kept = self.values.narrow(self.dimension, 0, start)
                larger.narrow(self.dimension, 0, start).copy_(kept)
            self.values = larger
        assert self.values is not None
        self.values.narrow(self.dimension, start, count).copy_(new)
        return self.values.narrow(self.dimension, 0, start + count)

    @property
    def bytes(self) -> int:
        return 0 if self.values is None else self.values.untyped_storage().nbytes()


class Eagle3Head:
    """The head of one sequence. Its backend tells it what is decided, by `saw` and `keep`.

    `found` are hidden states of the last forward, each of shape (1, rows, width).
    """

    def __init__(self, weights: Eagle3Weights) -> None:
        self.weights, self.info = weights, weights.info
        at_once = weights.embedding.device.type != "cpu"
        self.latest = LATEST_AT_ONCE if at_once else LATEST
        self.on = False
        self.reset()

    def open(self, owner: object) -> Self:
        """The head of another sequence, that of this backend."""
        return type(self)(self.weights)

    def reset(self) -> None:
        """Know nothing."""
        self.rows: list[int] = []
        self.waiting: list[torch.Tensor] = []
        self.done = 0
        self.states, self.keys, self.values = Rows(0), Rows(2), Rows(2)
        self.found: list[torch.Tensor] = []
        self.drafted = 0
        self.seen: list[list[int]] = []

    @property
    def bytes(self) -> int:
        """What its caches take."""
        waiting = sum(each.untyped_storage().nbytes() for each in self.waiting)
        return self.states.bytes + self.keys.bytes + self.values.bytes + waiting

    def listen(self, on: bool) -> None:
        self.on = on

    def tapped(self) -> AbstractContextManager[None]:
        """While it is entered, a forward of the target leaves its hidden states here. Nothing is
        done while nobody listens."""
        self.found.clear()
        return tapped(self.weights.taps, self.found) if self.on else nullcontext()

    def saw(self, start: int, rows: Sequence[int]) -> None:
        """Of the rows of the last forward, these were decided: the tokens from place `start` on."""
        if not self.found:
            return
        device = self.weights.embedding.device
        older = max(0, len(rows) - self.latest)
        last = rows[older:]
        chain = last[-1] - last[0] == len(last) - 1
        which = slice(last[0], last[-1] + 1) if chain else torch.tensor(last)
        self.waiting.append(torch.cat([each[0, which].to(device) for each in self.found], dim=-1))
        self.rows += range(start + older, start + len(rows))
        self.found.clear()
        while self.behind - len(self.waiting[0]) >= self.latest:
            first = len(self.rows) - self.behind
            del self.rows[first : first + len(self.waiting.pop(0))]

    @property
    def behind(self) -> int:
        """How many rows are waiting."""
        return sum(map(len, self.waiting))

    def join(self) -> None:
        """Join the hidden states that are waiting."""
        if self.waiting:
            start = len(self.rows) - self.behind
            waiting = self.waiting[0] if len(self.waiting) == 1 else torch.cat(self.waiting)
            self.states.write(start, self.weights.head.join(waiting))
            self.waiting.clear()

    def keep(self, length: int) -> None:
        """The text was cut to so many tokens. The last of its rows may have another token behind it
        from now on, so its keys are forgotten."""
        self.forget()
        while self.rows and self.rows[-1] >= length:
            self.rows.pop()
            if self.waiting:
                self.waiting[-1] = self.waiting[-1][:-1]
                if not len(self.waiting[-1]):
                    self.waiting.pop()
        while self.done and (self.done > len(self.rows) or self.rows[self.done - 1] >= length - 1):
            self.done -= 1

    @torch.inference_mode()
    def start(
        self, tokens: Sequence[int], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> LogitGuess | None:
        self.forget()
        last = len(tokens) - 2
        if not self.rows or self.rows[-1] != last:
            return None
        self.join()
        hidden: torch.Tensor | None = None
        while self.done < len(self.rows):
            if cancelled():
                return None
            rows = self.rows[self.done : self.done + CHUNK]
            assert self.states.values is not None
            before = self.states.values[self.done : self.done + len(rows)]
            sees = np.tri(len(rows), self.done + len(rows), self.done, dtype=bool)
            following = [tokens[row + 1] for row in rows]
            hidden = self.step(self.done, following, before, rows, sees)
            self.done += len(rows)
        if hidden is not None:
            self.root = hidden[-1:]
        self.level, self.row = self.root, last
        self.seen = [[]]
        return self.guesses(self.root)[0]

    @torch.inference_mode()
    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[LogitGuess]:
        before = self.level[torch.tensor(parents, device=self.level.device)]
        first = self.done + self.drafted
        seen = [[*self.seen[parent], first + at] for at, parent in enumerate(parents)]
        sees = np.zeros((len(tokens), first + len(tokens)), dtype=bool)
        sees[:, : self.done] = True
        for at, columns in enumerate(seen):
            sees[at, columns] = True
        self.row += 1
        self.level = self.step(first, tokens, before, [self.row] * len(tokens), sees)
        self.drafted, self.seen = self.drafted + len(tokens), seen
        return self.guesses(self.level)

    def forget(self) -> None:
        self.drafted, self.seen = 0, []

    def step(
        self,
        start: int,
        tokens: Sequence[int],
        before: torch.Tensor,
        rows: Sequence[int],
        sees: NDArray[np.bool_],
    ) -> torch.Tensor:
        """Run the layer over some tokens and the hidden states before them; returns the next ones.

        Keys and values are written from `start` on; `sees` has shape (tokens, start + tokens).
        """
        head, device = self.weights.head, before.device
        mask = None if sees.all() else torch.from_numpy(sees).to(device)

        def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(
                queries,
                self.keys.write(start, keys),
                self.values.write(start, values),
                attn_mask=mask,
                enable_gqa=queries.shape[1] != keys.shape[1],
            )

        ids, positions = torch.tensor([tokens, rows], device=device)
        embedded = functional.embedding(ids, self.weights.embedding).to(before.dtype)
        out: torch.Tensor = head(embedded, before, positions, attend)
        return out

    def guesses(self, hidden: torch.Tensor) -> list[LogitGuess]:
        """The laws of what follows some nodes."""
        logits = linear(self.weights.head.norm(hidden), self.weights.output)
        return [LogitGuess(row, self.weights.tokens) for row in logits.float().cpu().numpy()]
