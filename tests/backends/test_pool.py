"""Sequences in one pool hold what they would hold in caches of their own."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.backends.pool import Pool, PoolCache, Table

pytestmark = pytest.mark.model
LAYERS, ROOM, PLACES, SEQUENCES = 2, 16, 2, 4
WHICH = st.integers(0, SEQUENCES - 1)


class Pooled(RuleBasedStateMachine):
    """Rows are numbers that never repeat, so that a row in another's place is seen."""

    def __init__(self) -> None:
        super().__init__()

        self.pool = Pool(LAYERS, ROOM, PLACES)
        self.caches = [self.opened() for _ in range(SEQUENCES)]
        self.texts: list[list[int]] = [[] for _ in range(SEQUENCES)]
        self.pending: dict[int, list[int]] = {}
        """The rows of the last forward of a sequence, until they are accepted in part."""
        self.number = 0

    def opened(self):
        return PoolCache([("full_attention", 1)] * LAYERS, self.pool)

    def drawn(self, which: int, count: int) -> list[int]:
        """Rows of a new forward."""
        if self.pending.pop(which, None):
            self.caches[which].shorten(len(self.texts[which]), dirty=True)
        self.number += count
        self.pending[which] = list(range(self.number - count, self.number))
        return self.pending[which]

    @rule(which=WHICH, count=st.integers(1, 6))
    def forward_outside(self, which: int, count: int) -> None:
        cache, text = self.caches[which], self.texts[which]
        if len(text) + count > ROOM:
            return
        rows = self.drawn(which, count)
        states = torch.tensor(rows, dtype=torch.float32)[None, None, :, None]
        with cache.computing(verifying=True):
            for number, layer in enumerate(cache.layers):
                keys, values = layer.update(states + number, -states)
                assert keys[0, 0, :, 0].tolist() == [row + number for row in (*text, *rows)]
                assert values[0, 0, cache.length :, 0].tolist() == [-row for row in rows]

    @rule(counts=st.dictionaries(WHICH, st.integers(1, 6), min_size=1, max_size=PLACES))
    def captured_forward(self, counts: dict[int, int]) -> None:
        """Over rows of several sequences."""
        if any(len(self.texts[which]) + count > ROOM for which, count in counts.items()):
            return
        new = [row for which, count in counts.items() for row in self.drawn(which, count)]
        caches = [self.caches[which] for which in counts]
        self.pool.hold(caches)
        table = list[tuple[int, int, int]]()
        for cache, count in zip(caches, counts.values(), strict=True):
            table += [(cache.start, cache.length, place) for place in range(count)]
            cache.written = cache.length + count
        self.pool.table = Table(*torch.tensor(table).T, None, PLACES * ROOM)
        states = torch.tensor(new, dtype=torch.float32)[None, None, :, None]
        with caches[0].computing(verifying=True):
            for number, layer in enumerate(caches[0].layers):
                keys, _ = layer.update(states + number, -states)
                for which, cache in zip(counts, caches, strict=True):
                    rows = [row + number for row in (*self.texts[which], *self.pending[which])]
                    assert keys[0, 0, cache.start :, 0].tolist()[: len(rows)] == rows
        self.pool.table = None

    @precondition(lambda self: self.pending)
    @rule(draw=st.data())
    def accept(self, draw: st.DataObject) -> None:
        """Also if others have computed since, and the rows were put aside."""
        which = draw.draw(st.sampled_from(sorted(self.pending)))
        rows = self.pending.pop(which)
        some = (
            st.lists(st.sampled_from(range(1, len(rows))), unique=True) if rows[1:] else st.just([])
        )
        kept = [0, *sorted(draw.draw(some))]
        self.caches[which].keep(kept, len(rows))
        self.texts[which] += [rows[at] for at in kept]

    @precondition(lambda self: self.pending)
    @rule()
    def accept_all(self) -> None:
        for which, rows in self.pending.items():
            self.caches[which].keep(range(len(rows)), len(rows))
            self.texts[which] += rows
        self.pending.clear()

    @rule(which=WHICH, share=st.floats(0, 1))
    def shorten(self, which: int, share: float) -> None:
        length = int(share * len(self.texts[which]))
        self.caches[which].shorten(length, dirty=True)
        del self.texts[which][length:]
        self.pending.pop(which, None)

    @rule(which=WHICH, other=WHICH, less=st.integers(0, 3))
    def copy(self, which: int, other: int, less: int) -> None:
        length = len(self.texts[other]) - less
        if length > 0 and which != other:
            self.close(which)
            self.caches[which].copy(self.caches[other], length)
            self.texts[which] = self.texts[other][:length]

    @rule(which=WHICH)
    def close(self, which: int) -> None:
        self.caches[which].drop()
        self.caches[which], self.texts[which] = self.opened(), []
        self.pending.pop(which, None)

    @invariant()
    def each_has_its_rows(self) -> None:
        for which, (cache, text) in enumerate(zip(self.caches, self.texts, strict=True)):
            assert cache.length == len(text) == cache.get_seq_length()
            assert cache.bytes == 0 if not text else cache.bytes == 2 * LAYERS * 4 * len(text)
            assert (cache.start is not None) == (cache in self.pool.inside)
            rows = [*text, *self.pending.get(which, [])]
            if rows:
                states, start = cache.rows()
                assert states[0, 0, start:, 0].tolist()[: len(rows)] == rows
                assert states[-1, 0, start:, 0].tolist()[: len(rows)] == [-row for row in rows]

    @invariant()
    def each_has_a_place_of_its_own(self) -> None:
        starts = [cache.start for cache in self.pool.inside]
        assert len({*starts}) == len(starts) and {*starts} <= {*range(0, PLACES * ROOM, ROOM)}


Pooled.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True
)
TestPooled = Pooled.TestCase


def test_the_mask_shows_a_row_its_text_and_its_ancestors() -> None:
    """Of its own sequence, wherever that begins in the pool."""
    starts, lengths, places = torch.tensor([[0, 0, 5], [2, 2, 1], [0, 1, 0]])
    visible = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]])
    for shown in (visible, None):
        table = Table(starts, lengths, places, shown, 8)
        for kind, wanted in (
            ("full_attention", [[0, 1, 2], [0, 1, 2, 3], [5, 6]]),
            ("sliding_attention", [[1, 2], [2, 3], [5, 6]]),
            ("chunked_attention", [[2], [2, 3], [5, 6]]),
        ):
            seen = (table.mask(torch.float32, lengths + places, kind, 2)[0, 0] == 0).tolist()
            assert [[at for at, sees in enumerate(row) if sees] for row in seen] == wanted
        assert table.where.tolist() == [2, 3, 6]
