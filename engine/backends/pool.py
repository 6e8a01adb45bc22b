"""Keys and values at fixed addresses, which captured forwards read and write.

A captured forward repeats the same instructions with the same addresses. All sequences of a model
therefore compute in one pool of rows, one at a time. If another sequence computes next, the rows of
the previous one are copied out, and its own are copied in; between two steps of one sequence
nothing is copied. Accepting a path moves its rows in all layers at once.

Invariant: the pool holds the rows of its `owner`; each other sequence has its rows `aside`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from engine.backends.caches import RUNNING, TreeCache, TreeLayer


class Table(NamedTuple):
    """What the rows of a captured forward see, on the device; shapes (rows,) and (rows, rows).

    The sequence of a row has `lengths` cached tokens from the row `starts` of the pool on. The row
    itself is written at its place after them. It sees the rows where `visible` is not 0; without
    `visible`, those of its sequence up to its own place. `paths` are the same rows, as the kernels
    read them: for each row those that it sees, in the order of the text, and their number. `reach`
    is the end of the pool that is read.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    places: torch.Tensor
    visible: torch.Tensor | None
    reach: int
    paths: tuple[torch.Tensor, torch.Tensor] | None = None

    def with_paths(self) -> "Table":
        if self.visible is None:
            return self
        order = self.visible.sort(dim=1, descending=True, stable=True).indices
        return self._replace(paths=(order, self.visible.sum(dim=1)))

    @property
    def where(self) -> torch.Tensor:
        return self.starts + self.lengths + self.places

    def mask(
        self, dtype: torch.dtype, positions: torch.Tensor, kind: str, span: int
    ) -> torch.Tensor:
        """The additive mask of the library's attention, shape (1, 1, rows, reach), for rows at some
        positions. A layer of sliding attention sees the last `span` positions, and one of chunked
        attention those of the same part of `span` positions."""
        rows = len(self.places)
        found = torch.arange(self.reach, device=self.places.device) - self.starts[:, None]
        after = found - self.lengths[:, None]
        seen = found >= 0
        if self.visible is None:
            seen &= after <= self.places[:, None]
        else:
            other = torch.arange(rows, device=after.device)[:, None] - self.places[:, None] + after
            drafted = (after >= 0) & (other < rows)
            other = other.clamp(0, rows - 1)
            seen &= (after < 0) | (drafted & (self.visible.gather(1, other) != 0))
            found = torch.where(drafted, positions[other], found)
        if kind == "sliding_attention":
            seen &= found > positions[:, None] - span
        elif kind == "chunked_attention":
            seen &= found // span == positions[:, None] // span
        mask = torch.zeros((1, 1, rows, self.reach), dtype=dtype, device=after.device)
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)


class Pool:
    """The rows: shape (2 x layers, heads, rows, head size), the keys of a layer before its values.

    They are allocated by the first forward. `table` is that of the captured forward that computes,
    None in any other forward.
    """

    def __init__(self, layers: int, rows: int) -> None:
        self.layers, self.rows = layers, rows
        self.states: torch.Tensor | None = None
        self.owner: PoolCache | None = None
        self.table: Table | None = None

    def of_layer(self, number: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and the values of a layer, shape (1, heads, rows, size), for keys `like`
        these."""
        if self.states is None:
            # Zeros, because a row that is not seen is still multiplied by 0.
            self.states = like.new_zeros((2 * self.layers, like.shape[1], self.rows, like.shape[3]))
        keys, values = self.states[2 * number : 2 * number + 2, None].unbind(0)
        return keys, values


class PoolLayer(TreeLayer):  # type: ignore[no-untyped-call]
    cache: "PoolCache"

    def __init__(self, cache: "PoolCache", number: int) -> None:
        super().__init__(cache)
        self.number = number
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.cache.pool
        keys, values = pool.of_layer(self.number, key_states)
        if pool.table is not None:
            where, end = pool.table.where, pool.table.reach
            keys.index_copy_(2, where, key_states)
            values.index_copy_(2, where, value_states)
        else:
            start, end = self.cache.length, self.cache.length + key_states.shape[2]
            keys[:, :, start:end] = key_states
            values[:, :, start:end] = value_states
        return keys[:, :, :end], values[:, :, :end]


class PoolCache(TreeCache):
    """The cache of a sequence that computes in a pool."""

    def __init__(self, kinds: Sequence[tuple[str, int]], pool: Pool) -> None:
        self.pool = pool
        self.aside: torch.Tensor | None = None
        self.numbers = iter(range(len(kinds)))
        super().__init__(kinds, pool.rows)

    def layer_of(self, kind: str, states: int) -> PoolLayer:
        return PoolLayer(self, next(self.numbers))

    @property
    def bytes(self) -> int:
        states = self.pool.states
        return 0 if states is None else states[:, :, : self.length].numel() * states.itemsize

    @contextmanager
    def computing(self, verifying: bool) -> Iterator[None]:
        self.enter()
        with super().computing(verifying):
            yield

    def enter(self) -> None:
        pool = self.pool
        if pool.owner is self:
            return
        if pool.owner is not None:
            pool.owner.leave()
        pool.owner = self
        if self.aside is not None:
            assert pool.states is not None
            pool.states[:, :, : self.length] = self.aside[:, :, : self.length]
            self.aside = None

    def leave(self) -> None:
        """Put the rows aside, for another owner."""
        self.pool.owner = None
        if self.length:
            assert self.pool.states is not None
            self.aside = self.pool.states[:, :, : self.length].clone()

    def drop(self) -> None:
        self.length, self.aside = 0, None
        if self.pool.owner is self:
            self.pool.owner = None

    def keep(self, kept: Sequence[int], rows: int) -> None:
        states = self.pool.states
        assert states is not None
        if any(row != i for i, row in enumerate(kept)):
            source = (torch.tensor(kept) + self.length).to(states.device)
            end = self.length + len(kept)
            states[:, :, self.length : end] = states.index_select(2, source)
        self.length += len(kept)

    def stretch(self, length: int) -> None:
        self.enter()
        assert self.pool.states is not None
        self.pool.states[:, :, :length] = 0
        self.length = length


def running_table() -> Table:
    """The table of the captured forward that computes in this thread."""
    cache = RUNNING.cache
    assert isinstance(cache, PoolCache) and cache.pool.table is not None
    return cache.pool.table
