"""Keys and values at fixed addresses, which captured forwards read and write.

A captured forward repeats the same instructions with the same addresses. All sequences of a model
therefore compute in one pool of rows, in which each has a part of its own. One forward may compute
rows of several sequences, and between the steps of those whose parts lie in the pool nothing is
copied. A part grows with its sequence. If there is no room, the rows of others are copied out, and
back in when these compute again. Accepting a path moves its rows in all layers at once.

Invariant: a sequence with rows has them in its part of the pool, or `aside`.
"""

from collections.abc import Mapping, Sequence
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
    """The rows: shape (2 x layers, heads, rows, head size), the keys of a layer before its values.

    They are allocated by the first forward. The part of a sequence begins at a multiple of `unit`.
    `table` is that of the captured forward that computes, None in any other forward.
    """

    def __init__(self, layers: int, rows: int, unit: int = 1) -> None:
        self.layers, self.rows, self.unit = layers, rows, unit
        self.states: torch.Tensor | None = None
        self.inside: list[PoolCache] = []
        """The sequences whose rows lie in the pool, the most recently used last."""
        self.table: Table | None = None

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether several parts of so many rows have room beside each other."""
        return sum(map(self.whole, counts)) <= self.rows

    def whole(self, rows: int) -> int:
        """So many rows or some more, behind which another part may begin."""
        return -rows // self.unit * -self.unit

    def hold(self, rows: Mapping["PoolCache", int]) -> None:
        """Let one sequence have a part of so many rows, or several sequences parts that have room
        beside each other."""
        if all(self.placed(cache, count, rows) for cache, count in rows.items()):
            return
        # What is free lies between them: let the largest one begin the pool, and the others come
        # back behind it.
        first, *others = sorted(self.inside, key=lambda cache: -cache.room)
        for cache in others:
            cache.leave()
        first.slide()
        for cache in sorted(rows, key=lambda cache: cache is not first):
            placed = self.placed(cache, rows[cache], rows)
            assert placed, "there is room for all"

    def placed(self, cache: "PoolCache", rows: int, staying: Mapping["PoolCache", int]) -> bool:
        """Let a sequence have a part of so many rows; others leave if they need not stay. Returns
        False if this does not suffice."""
        while cache.start is None or cache.start + rows > self.end(cache):
            start = self.gap(rows)
            leaving = next((each for each in self.inside if each not in staying), None)
            if start is not None:
                cache.move(start, rows)
            elif leaving is not None:
                leaving.leave()
            else:
                return False
        if cache in self.inside:
            self.inside.remove(cache)
        self.inside.append(cache)
        cache.room = rows
        return True

    def end(self, cache: "PoolCache") -> int:
        """Where the next part begins after that of a sequence."""
        begins = (start for start, _ in self.parts() if start > (cache.start or 0))
        return next(begins, self.rows)

    def gap(self, rows: int) -> int | None:
        """The first place for a part of so many rows."""
        free = 0
        for start, room in self.parts():
            if free + rows <= start:
                return free
            free = start + self.whole(room)
        return free if free + rows <= self.rows else None

    def parts(self) -> list[tuple[int, int]]:
        """The first rows of all parts and their numbers of rows, in their order."""
        return sorted((each.start or 0, each.room) for each in self.inside)

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
            return keys[:, :, :end], values[:, :, :end]
        first = self.cache.hold(key_states.shape[2])
        start, end = first + self.cache.length, first + self.cache.room
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        return keys[:, :, first:end], values[:, :, first:end]


class PoolCache(TreeCache):
    """The cache of a sequence that computes in a pool. Its part are `room` rows from `start` on;
    these are its decided rows, and those of a forward that has not been settled."""

    def __init__(self, kinds: Sequence[tuple[str, int]], pool: Pool) -> None:
        self.pool = pool
        self.start: int | None = None
        self.room = 0
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
        """Have room for so many further rows; returns where the part begins."""
        self.pool.hold({self: self.length + rows})
        assert self.start is not None
        return self.start

    def move(self, start: int, most: int) -> None:
        """Put the rows, but no more than so many, to a free place of the pool."""
        if count := min(self.room, most):
            states, own = self.rows()
            assert self.pool.states is not None
            self.pool.states[:, :, start : start + count] = states[:, :, own : own + count]
        self.start, self.aside = start, None

    def slide(self) -> None:
        """Move the part to the beginning of the pool, of which nothing else is taken."""
        states, start = self.rows()
        for at in range(0, self.room if start else 0, start or 1):
            # No row is written that is still to be read.
            count = min(start, self.room - at)
            states[:, :, at : at + count] = states[:, :, start + at : start + at + count]
        self.start = 0

    def rows(self) -> tuple[torch.Tensor, int]:
        """Where the rows are: a tensor, and the first of its rows that is one of them."""
        states = self.pool.states if self.aside is None else self.aside
        assert states is not None
        return states, 0 if self.start is None else self.start

    def leave(self) -> None:
        """Put the rows aside, so that others have room."""
        states, start = self.rows()
        self.aside = states[:, :, start : start + self.room].clone()
        self.start = None
        self.pool.inside.remove(self)

    def drop(self) -> None:
        if self.start is not None:
            self.pool.inside.remove(self)
        self.length, self.room, self.start, self.aside = 0, 0, None, None

    def shorten(self, length: int, dirty: bool = False) -> None:
        super().shorten(length, dirty)
        self.room = length
        if not length:
            self.drop()

    def keep(self, kept: Sequence[int], rows: int) -> None:
        states, start = self.rows()
        first = start + self.length
        if any(row != i for i, row in enumerate(kept)):
            source = (torch.tensor(kept) + first).to(states.device)
            states[:, :, first : first + len(kept)] = states.index_select(2, source)
        self.length += len(kept)
        self.room = self.length

    def copy(self, other: TreeCache, length: int) -> None:
        assert isinstance(other, PoolCache)
        start = self.hold(length)
        states, first = other.rows()
        assert self.pool.states is not None
        self.pool.states[:, :, start : start + length] = states[:, :, first : first + length]
        self.length = length

    def stretch(self, length: int) -> None:
        self.drop()
        if length:
            start = self.hold(length)
            assert self.pool.states is not None
            self.pool.states[:, :, start : start + length] = 0
            self.length = length


def running_table() -> Table:
    """The table of the captured forward that computes in this thread."""
    cache = RUNNING.cache
    assert isinstance(cache, PoolCache) and cache.pool.table is not None
    return cache.pool.table
