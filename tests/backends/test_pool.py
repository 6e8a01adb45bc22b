"""Sequences in one pool hold what they would hold in caches of their own."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.backends.pool import Pool, PoolCache, Table

pytestmark = pytest.mark.model
LAYERS, ROOM, SEQUENCES = 2, 24, 3
WHICH = st.integers(0, SEQUENCES - 1)


class Pooled(RuleBasedStateMachine):
    """Rows are numbers that never repeat, so that a row in another's place is seen."""

    def __init__(self) -> None:
        super().__init__()

        self.pool = Pool(LAYERS, ROOM)
        self.caches = [self.opened() for _ in range(SEQUENCES)]
        self.texts: list[list[int]] = [[] for _ in range(SEQUENCES)]
        self.pending: tuple[int, list[int]] | None = None
        self.number = 0

    def opened(self):
        return PoolCache([("full_attention", 1)] * LAYERS, self.pool)

    def written(self, which: int, count: int, captured: bool) -> list[int]:
        """A forward over new rows, each of which is a number; returns them."""
        cache = self.caches[which]
        rows = list(range(self.number, self.number + count))
        self.number += count
        states = torch.tensor(rows, dtype=torch.float32)[None, None, :, None]
        with cache.computing(verifying=True):
            if captured:
                lengths = torch.full((count,), cache.length)
                starts, places = torch.zeros(count, dtype=torch.int64), torch.arange(count)
                self.pool.table = Table(starts, lengths, places, None, ROOM)
            for number, layer in enumerate(cache.layers):
                keys, values = layer.update(states + number, -states)
                end = cache.length + count
                assert keys[0, 0, :end, 0].tolist() == [
                    row + number for row in (*self.texts[which], *rows)
                ]
                assert values[0, 0, cache.length : end, 0].tolist() == [-row for row in rows]
            self.pool.table = None
        return rows

    @rule(which=WHICH, count=st.integers(1, 6), captured=st.booleans())
    def forward(self, which: int, count: int, captured: bool) -> None:
        if len(self.texts[which]) + count <= ROOM:
            self.pending = which, self.written(which, count, captured)

    @precondition(lambda self: self.pending)
    @rule(draw=st.data())
    def accept(self, draw: st.DataObject) -> None:
        assert self.pending is not None
        which, rows = self.pending
        some = (
            st.lists(st.sampled_from(range(1, len(rows))), unique=True) if rows[1:] else st.just([])
        )
        kept = [0, *sorted(draw.draw(some))]
        self.caches[which].keep(kept, len(rows))
        self.texts[which] += [rows[at] for at in kept]
        self.pending = None

    @rule(which=WHICH, share=st.floats(0, 1))
    def shorten(self, which: int, share: float) -> None:
        length = int(share * len(self.texts[which]))
        self.caches[which].shorten(length, dirty=True)
        del self.texts[which][length:]
        self.pending = None

    @rule(which=WHICH)
    def close(self, which: int) -> None:
        self.caches[which].drop()
        self.caches[which], self.texts[which] = self.opened(), []
        self.pending = None

    @invariant()
    def each_has_its_rows(self) -> None:
        for cache, text in zip(self.caches, self.texts, strict=True):
            assert cache.length == len(text) == cache.get_seq_length()
            assert cache.bytes == 0 if not text else cache.bytes == 2 * LAYERS * 4 * len(text)
            if text:
                states = self.pool.states if self.pool.owner is cache else cache.aside
                assert states is not None
                assert states[0, 0, : len(text), 0].tolist() == text
                assert states[-1, 0, : len(text), 0].tolist() == [-row for row in text]


Pooled.TestCase.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, derandomize=True
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
