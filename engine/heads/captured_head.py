"""The steps of a head that a GPU repeats without being told each operation again.

A head guesses level by level, and each level is a few dozen small operations, which take longer to
start than to compute. Like the forwards of its target (engine/backends/captured.py), they are
recorded for some numbers of rows. All sequences of a model share the recordings, and so the memory
of the keys and values: if another sequence guesses next, the rows of the previous one are copied
out, and its own are copied in.

Invariant: keys and values are those of the `owner`; each other head has its rows `aside`.
"""

from dataclasses import replace

import torch
from torch.nn import functional

from engine.backends.captured import (
    SHARES,
    CapturedModel,
    Recorded,
    Recorder,
    copied_into,
    reaches_to,
)
from engine.backends.transformers import TransformersBackend
from engine.heads.eagle3_head import (
    Block,
    Eagle3Head,
    Eagle3Weights,
    gap,
    linear,
    rows_of,
    trial,
)

ROWS = (1, 4, 16)
"""Rows of recorded steps; more are computed as usual."""
COLUMNS = 128
"""The most tokens after the decided ones that a row sees."""


class HeadForward(Recorded):
    """The step over `rows` rows. What it found are `hidden`, shape (rows, width), and `logits`,
    shape (rows, tokens)."""

    def __init__(
        self, rows: int, head: "CapturedHead", like: torch.Tensor, recorder: Recorder
    ) -> None:
        super().__init__(2 + rows * (2 + COLUMNS), recorder, head.reaches)
        self.rows, self.head = rows, head
        self.given = self.host.numpy()
        self.before = like.new_zeros((rows, like.shape[1]))
        self.hidden = self.logits = torch.empty(0)

    def record(self) -> None:
        self.given[2 + 2 * self.rows :: COLUMNS] = 1
        self.record_all(self.compute)

    def run(self, block: Block, done: int) -> None:
        """Compute a block, of whose columns the first `done` are seen by all rows."""
        used, rows, given = len(block.tokens), self.rows, self.given
        given[:2] = done, block.start
        given[2 : 2 + used] = block.tokens
        given[2 + rows : 2 + rows + used] = block.rows
        visible = given[2 + 2 * rows :].reshape(rows, COLUMNS)
        visible[:] = 0
        visible[:used, : block.sees.shape[1] - done] = block.sees[:, done:]
        # A row of padding sees something: otherwise it would not be a number.
        visible[used:, 0] = 1
        self.before[:used] = block.before
        self.repeat(block.start + rows)

    def compute(self, reach: int) -> None:
        rows, shared, weights = self.rows, self.head, self.head.weights
        done, start = self.buffer[0], self.buffer[1]
        tokens, positions = self.buffer[2 : 2 + 2 * rows].reshape(2, rows)
        visible = self.buffer[2 + 2 * rows :].reshape(rows, COLUMNS)
        after = torch.arange(reach, device=self.buffer.device) - done
        shown = visible.index_select(1, after.clamp(0, COLUMNS - 1)) != 0
        seen = (after < 0) | ((after < COLUMNS) & shown)
        mask = torch.zeros((1, 1, rows, reach), dtype=self.before.dtype, device=seen.device)
        mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)
        where = start + torch.arange(rows, device=seen.device)

        def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            held_keys, held_values = (
                each[:, :, :reach] for each in shared.write(where, keys, values)
            )
            # The heads of a group as further rows: otherwise keys and values would be copied.
            group = queries.shape[1] // keys.shape[1]
            folded = queries.reshape(1, keys.shape[1], group * rows, -1)
            found = functional.scaled_dot_product_attention(
                folded, held_keys, held_values, attn_mask=mask.repeat(1, 1, group, 1)
            )
            return found.reshape(queries.shape)

        embedded = rows_of(tokens, weights.embedding).to(self.before.dtype)
        hidden = weights.head(embedded, self.before, positions, attend)
        logits = linear(weights.head.norm(hidden), weights.output).float()
        self.hidden, self.logits = (
            copied_into(self.hidden, hidden),
            copied_into(self.logits, logits),
        )


class CapturedHead:
    """All recorded steps of a head, for texts with room for so many rows."""

    def __init__(
        self, weights: Eagle3Weights, room: int, like: torch.Tensor, recorder: Recorder
    ) -> None:
        self.weights, self.room = weights, room
        self.reaches = reaches_to(room)
        self.states: torch.Tensor | None = None
        self.owner: Eagle3Head | None = None
        self.forwards = {rows: HeadForward(rows, self, like, recorder) for rows in ROWS}
        for rows in reversed(ROWS):
            self.forwards[rows].record()
        recorder.close()

    def write(
        self, where: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put new keys and values, shape (1, heads, rows, size), at some rows; returns all."""
        if self.states is None:
            shape = 2, 1, keys.shape[1], self.room, keys.shape[3]
            # Zeros, because a row that is not seen is still multiplied by 0.
            self.states = keys.new_zeros(shape)
        held_keys, held_values = self.states.unbind(0)
        held_keys.index_copy_(2, where, keys)
        held_values.index_copy_(2, where, values)
        return held_keys, held_values

    def enter(self, head: Eagle3Head) -> None:
        if self.owner is head:
            return
        owner = self.owner
        if owner is not None and self.states is not None:
            owner.aside = self.states[:, :, :, : owner.done].clone()
        self.owner = head
        if head.aside is not None and self.states is not None:
            self.states[:, :, :, : head.aside.shape[3]] = head.aside
            head.aside = None

    def step(self, head: Eagle3Head, block: Block) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The hidden states and the logits of a block; None if it is too large."""
        self.enter(head)
        used = len(block.tokens)
        rows = next((size for size in self.forwards if size >= used), None)
        if rows is None or block.start + rows > self.room:
            return None
        if block.sees.shape[1] - head.done > COLUMNS:
            return None
        forward = self.forwards[rows]
        forward.run(block, head.done)
        return forward.hidden[:used], forward.logits[:used]


@torch.inference_mode()
def capture_head(backend: TransformersBackend) -> None:
    """Record the steps of a model's head, if the model's forwards are, and the steps then give what
    they give otherwise."""
    head, captured = backend.head, backend.captured
    if type(head) is not Eagle3Head or not isinstance(captured, CapturedModel):
        return
    embedding = head.weights.embedding
    assert isinstance(embedding, torch.Tensor), "a GPU looks tokens up itself"
    like = embedding[:1].to(backend.model.dtype)
    try:
        room = backend.info.context_length + COLUMNS
        recorded = CapturedHead(head.weights, room, like, captured.recorder)
        weights = replace(head.weights, captured=recorded)
        off = gap(*(trial(Eagle3Head(each)) for each in (head.weights, weights)))
    except Exception:
        # Not all heads can be recorded, and the libraries raise many types then.
        return
    if off <= SHARES[backend.model.dtype]:
        backend.head = Eagle3Head(weights)
