"""Keys and values at fixed addresses, which captured forwards read and write.

A captured forward repeats the same instructions with the same addresses. All sequences of a model
therefore compute in one pool of rows, with a place for each answer that is decoded at once. One
forward may compute rows of several sequences, and between the steps of those that have a place
nothing is copied. If all places are taken, the rows of the sequence that was used longest ago are
copied out, and back in when it computes again. Accepting a path moves its rows in all layers at
once.

Invariant: a sequence with rows has them in its place of the pool, or `aside`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from engine.backends.caches import RUNNING, TreeCache, TreeLayer


class Table(NamedTuple):
    """What the rows of a captured forward see, on the device; shapes (rows,) and (rows, rows).

    The sequence of a row has `lengths` cached tokens from the row `starts` of the pool on. The row
    itself is written at its place after them. It sees the rows where `visible` is not 0; without
    `visible`, those of its sequence up to its own place. `reach` is the end of the pool that is
    read. The kernels read the same in other forms: `paths` are for each row those that it sees, in
    the order of the text, and their number; `lows` are for each layer the first positions of the
    text that the rows see.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    places: torch.Tensor
    visible: torch.Tensor | None
    reach: int
    paths: tuple[torch.Tensor, torch.Tensor] | None = None
    lows: Sequence[torch.Tensor] = ()

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
        positions and a kind of layer, see `first_seen`."""
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
        seen &= found >= first_seen(positions, kind, span)[:, None]
        mask = torch.zeros((1, 1, rows, self.reach), dtype=dtype, device=after.device)
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)


def first_seen(positions: torch.Tensor, kind: str, span: int) -> torch.Tensor:
    """The first positions that rows at some positions see: of the last `span` in a layer of sliding
    attention, and of the same part of `span` in one of chunked attention."""
    if kind == "sliding_attention":
        return (positions - span + 1).clamp_min(0)
    return positions // span * span if kind == "chunked_attention" else torch.zeros_like(positions)


class Pool:
    """The rows: shape (2 x layers, heads, places x rows, head size), the keys of a layer before its
    values.

    They are allocated by the first forward. `table` is that of the captured forward that computes,
    None in any other forward.
    """

    def __init__(self, layers: int, rows: int, places: int = 1) -> None:
        self.layers, self.rows, self.places = layers, rows, places
        self.states: torch.Tensor | None = None
        self.inside: list[PoolCache] = []
        """The sequences that have a place, the most recently used last."""
        self.table: Table | None = None

    def hold(self, caches: Sequence["PoolCache"]) -> None:
        """Let some sequences, no more than there are places, have one each."""
        for cache in caches:
            if cache.start is None:
                if len(self.inside) == self.places:
                    next(each for each in self.inside if each not in caches).leave()
                taken = [each.start for each in self.inside]
                starts = range(0, self.places * self.rows, self.rows)
                cache.enter(next(start for start in starts if start not in taken))
            else:
                self.inside.remove(cache)
            self.inside.append(cache)

    def of_layer(self, number: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and the values of a layer, shape (1, heads, rows, size), for keys `like`
        these."""
        if self.states is None:
            # Zeros, because a row that is not seen is still multiplied by 0.
            rows = self.places * self.rows
            self.states = like.new_zeros((2 * self.layers, like.shape[1], rows, like.shape[3]))
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
            return keys[:, :, :end], values[:, :, :end]
        first = self.cache.hold(key_states.shape[2])
        start, end = first + self.cache.length, first + self.cache.written
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        return keys[:, :, first:end], values[:, :, first:end]


class PoolCache(TreeCache):
    """The cache of a sequence that computes in a pool. Its place begins at the row `start`. The
    first `written` rows are its decided ones, and those of a forward that was not settled."""

    def __init__(self, kinds: Sequence[tuple[str, int]], pool: Pool) -> None:
        self.pool = pool
        self.start: int | None = None
        self.written = 0
        self.aside: torch.Tensor | None = None
        self.numbers = iter(range(len(kinds)))
        super().__init__(kinds, pool.rows)

    def layer_of(self, kind: str, states: int) -> PoolLayer:
        return PoolLayer(self, next(self.numbers))

    @property
    def bytes(self) -> int:
        states = self.pool.states
        return 0 if states is None else states[:, :, : self.length].numel() * states.itemsize

    def hold(self, rows: int) -> int:
        """Have a place for a forward over so many further rows; returns where it begins."""
        self.pool.hold([self])
        self.written = self.length + rows
        assert self.start is not None
        return self.start

    def enter(self, start: int) -> None:
        self.start = start
        if self.aside is not None:
            assert self.pool.states is not None
            count = self.aside.shape[2]
            self.pool.states[:, :, start : start + count] = self.aside
            self.aside = None

    def leave(self) -> None:
        """Put the rows aside, so that another sequence has the place."""
        states, start = self.rows()
        self.aside = states[:, :, start : start + self.written].clone()
        self.start = None
        self.pool.inside.remove(self)

    def rows(self) -> tuple[torch.Tensor, int]:
        """Where the rows are: a tensor, and the first of its rows that is one of them."""
        states = self.pool.states if self.aside is None else self.aside
        assert states is not None
        return states, self.start or 0

    def drop(self) -> None:
        if self.start is not None:
            self.pool.inside.remove(self)
        self.length, self.written, self.start, self.aside = 0, 0, None, None

    def shorten(self, length: int, dirty: bool = False) -> None:
        super().shorten(length, dirty)
        self.written = length
        if not length:
            self.drop()

    def keep(self, kept: Sequence[int], rows: int) -> None:
        states, start = self.rows()
        first = start + self.length
        if any(row != i for i, row in enumerate(kept)):
            source = (torch.tensor(kept) + first).to(states.device)
            states[:, :, first : first + len(kept)] = states.index_select(2, source)
        self.length += len(kept)
        self.written = self.length

    def copy(self, other: TreeCache, length: int) -> None:
        assert isinstance(other, PoolCache)
        start = self.hold(length)
        states, first = other.rows()
        assert self.pool.states is not None
        self.pool.states[:, :, start : start + length] = states[:, :, first : first + length]
        self.length = length

    def stretch(self, length: int) -> None:
        start = self.hold(0)
        assert self.pool.states is not None
        self.pool.states[:, :, start : start + length] = 0
        self.length = self.written = length


def running_pool() -> Pool:
    """The pool in which a captured forward of this thread computes."""
    cache = RUNNING.cache
    assert isinstance(cache, PoolCache)
    return cache.pool
