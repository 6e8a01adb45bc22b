"""An EAGLE-3 head of one sequence: it guesses along a tree from the hidden states of the target.

Row r of a text is its token r. For every decided row the head keeps the target's combined hidden
states; for every row whose next token is decided too, it keeps the keys and values of its own
layer. Guesses are rows after these, and are dropped. Rows without recorded hidden states are a gap:
only their keys and values are missing.

For a small model, the overhead of a guess takes as long as its arithmetic. `FusedHead` therefore
joins matrices that read the same rows into one, and calls the operations directly. It computes the
same as `Eagle3`, apart from rounding. A guess multiplies a few rows by all weights of a head, which
the compiled core does in a fraction of the time if they have eight bits (engine/backends/
quantised.py). Rounding changes guesses a little, but no answer, because guesses decide nothing.

Recording costs a copy; everything else waits until the head is called. Only the `latest` of the
waiting rows are kept. Earlier ones become a gap, because reading them would cost more than it
gains.

Invariant: `rows` are the kept decided rows, in rising order; the first `done` of them have keys and
values. The hidden states of the last ones are `waiting` to be combined.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from engine.backends.quantised import PackedLinear, can_pack
from engine.heads.base import HeadInfo, LogitGuess
from engine.heads.eagle3 import Attend, Eagle3, tapped
from engine.native import verifies_cheaply
from engine.settings import Sampling

DEPTH = 8
"""The most tokens that a head guesses ahead: later ones are hardly ever right."""
CHUNK = 512
"""The most rows that are caught up with at a time."""
SPARE = 64
"""The room for further rows when a cache grows."""
LATEST, LATEST_AT_ONCE = 64, 512
"""The most rows that wait to be caught up with: on a processor, where each takes time, and on
accelerators, which read many at once. Earlier rows would improve a twentieth of the guesses
(docs/log.md)."""


CHANGING = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies depend on the length of the text."""
COPIED = 64 << 20
"""The most bytes of a copy of a matrix that has to stay for other uses."""
BITS, LARGE = 8, 1 << 18
"""The bits of a head's large matrices on a processor, and the numbers in the smallest of them:
smaller ones stay in its cache."""


Matrix = torch.Tensor | nn.Module
"""A matrix of shape (outputs, inputs); a module has its weights in few bits."""
Embedding = torch.Tensor | nn.Module
"""An embedding of shape (vocabulary, width); a module looks tokens up on the processor."""


def linear(states: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As torch's `linear`, for rows of shape (..., inputs) and a matrix of any kind."""
    if isinstance(matrix, nn.Module):
        found: torch.Tensor = matrix(states).to(states.dtype)
        return found if bias is None else found + bias
    return functional.linear(states, matrix, bias)


def rows_of(tokens: torch.Tensor, embedding: Embedding) -> torch.Tensor:
    """The rows of some tokens, shape (..., width)."""
    if isinstance(embedding, nn.Module):
        found: torch.Tensor = embedding(tokens)
        return found
    return functional.embedding(tokens, embedding)


def bytes_of(matrix: Matrix) -> int:
    if isinstance(matrix, PackedLinear):
        return matrix.nbytes
    return 0 if isinstance(matrix, nn.Module) else matrix.nbytes


def rounding_is_fast(device: torch.device) -> bool:
    """Whether the compiled core multiplies a few rows faster by matrices of eight bits."""
    return device.type == "cpu" and verifies_cheaply()


def packed(matrix: torch.Tensor) -> Matrix:
    """A matrix, rounded to eight bits if it is large and then multiplied faster."""
    large = matrix.numel() >= LARGE and can_pack(*matrix.shape)
    fast = large and rounding_is_fast(matrix.device)
    return PackedLinear(matrix, None, BITS) if fast else matrix


class Network:
    """What a head has however its layer is computed: the joint of the target's states, and the norm
    before the logits."""

    def __init__(self, head: Eagle3) -> None:
        self.before_joining = Norm(head.input_norm) if head.shape.norm_before_fc else None
        self.joins, self.norm = Projection([head.fc]), Norm(head.norm)

    @property
    def bytes(self) -> int:
        before = 0 if self.before_joining is None else bytes_of(self.before_joining.weight)
        return self.joins.bytes + before + bytes_of(self.norm.weight)

    def join(self, states: torch.Tensor) -> torch.Tensor:
        return self.joins(self.before_joining(states) if self.before_joining else states)


class FusedHead(Network):
    """A head with joined matrices."""

    def __init__(self, head: Eagle3) -> None:
        super().__init__(head)
        layer, attention = head.midlayer, head.midlayer.self_attn
        self.size = attention.size
        self.inner, self.shared = (
            project.out_features // self.size for project in (attention.q_proj, attention.k_proj)
        )
        self.norm_before_residual = layer.norm_before_residual
        self.of_tokens, self.of_states = Norm(layer.input_layernorm), Norm(layer.hidden_norm)
        self.of_sums = Norm(layer.post_attention_layernorm)
        self.reads = Projection([attention.q_proj, attention.k_proj, attention.v_proj])
        self.writes = Projection([attention.o_proj])
        self.rises = Projection([layer.mlp.gate_proj, layer.mlp.up_proj])
        self.falls = Projection([layer.mlp.down_proj])
        self.activation, self.rotary = layer.mlp.act_fn, head.rotary

    @property
    def bytes(self) -> int:
        parts = self.reads, self.writes, self.rises, self.falls
        norms = self.of_tokens, self.of_states, self.of_sums
        kept = super().bytes + sum(each.bytes for each in parts)
        return kept + sum(bytes_of(each.weight) for each in norms)

    def __call__(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """One step: see `Eagle3.forward`. All but the positions have shape (rows, width)."""
        inner, normed = self.inner, self.of_states(hidden)
        parts = self.reads(torch.cat((self.of_tokens(embedded), normed), dim=-1))
        parts = parts.view(len(hidden), -1, self.size)
        turned = self.turned(parts[:, : inner + self.shared], positions).transpose(0, 1)[None]
        values = parts[:, inner + self.shared :].transpose(0, 1)[None]
        read = attend(turned[:, :inner], turned[:, inner:], values)[0].transpose(0, 1)
        residual = normed if self.norm_before_residual else hidden
        sums = residual + self.writes(read.reshape(len(hidden), -1))
        gate, up = self.rises(self.of_sums(sums)).chunk(2, dim=-1)
        return sums + self.falls(self.activation(gate) * up)

    def turned(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries and keys of some rows, shape (rows, heads, size), at their rotary positions."""
        if self.rotary.rope_type in CHANGING:
            cosine, sine = (each[0] for each in self.rotary(states, positions[None]))
        else:
            angles = positions[:, None] * self.rotary.inv_freq
            angles, scale = torch.cat((angles, angles), dim=-1), self.rotary.attention_scaling
            cosine, sine = (
                (each if scale == 1 else each * scale).to(states.dtype)
                for each in (angles.cos(), angles.sin())
            )
        first, second = states.chunk(2, dim=-1)
        other = torch.cat((-second, first), dim=-1)
        out: torch.Tensor = states * cosine[:, None] + other * sine[:, None]
        return out


class Norm:
    def __init__(self, norm: nn.Module) -> None:
        self.weight: torch.Tensor = norm.weight.data  # type: ignore[assignment]
        self.epsilon: float = norm.variance_epsilon  # type: ignore[assignment]

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(states, self.weight.shape, self.weight, self.epsilon)


class Projection:
    """Several projections of the same rows, with their outputs side by side."""

    def __init__(self, parts: list[nn.Linear]) -> None:
        weights = [each.weight.data for each in parts]
        self.matrix = packed(weights[0] if len(weights) == 1 else torch.cat(weights))
        biases = [each.bias.data for each in parts if each.bias is not None]
        self.bias = torch.cat(biases) if biases else None

    @property
    def bytes(self) -> int:
        return bytes_of(self.matrix) + (0 if self.bias is None else bytes_of(self.bias))

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return linear(states, self.matrix, self.bias)


class DirectNetwork(nn.Module):
    """A network that reads the states of the target unchanged, and normalises its own output."""

    def join(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


@dataclass(frozen=True, slots=True)
class Eagle3Weights:
    """What all sequences share: the head, and the embedding and output matrix that it uses, its own
    or its target's. `tokens` are the target's tokens to which its logits belong, None for all.
    `taps` are the target's modules whose outputs it reads. `head` may also be a network of
    engine/heads/mtp.py or assistant.py: all have `join` and `norm`. `captured` are its recorded
    steps, a CapturedHead (captured_head.py), if a GPU has them."""

    head: Any
    embedding: Embedding
    output: Matrix
    tokens: NDArray[np.int64] | None
    taps: Sequence[nn.Module]
    info: HeadInfo
    captured: Any = None

    @property
    def device(self) -> torch.device:
        found = self.embedding
        return torch.device("cpu") if isinstance(found, nn.Module) else found.device

    @property
    def width(self) -> int:
        shape: Any = self.embedding.shape
        return int(shape[1])


class Block(NamedTuple):
    """Tokens that a layer computes at once, the hidden states `before` them, and their `rows`. Keys
    and values are written from `start` on. `sees` is the mask, shape (tokens, start + tokens)."""

    start: int
    tokens: Sequence[int]
    before: torch.Tensor
    rows: Sequence[int]
    sees: NDArray[np.bool_]


class Rows:
    """Tensors that grow along one dimension, written in place."""

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self.values: torch.Tensor | None = None

    def write(self, start: int, new: torch.Tensor) -> torch.Tensor:
        """Put `new` after the first `start` rows; returns all of them."""
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


class Level:
    """A layer of a head: the input `states` of its rows, and keys and values of the first `done`
    ones."""

    def __init__(self) -> None:
        self.states, self.keys, self.values = Rows(0), Rows(2), Rows(2)
        self.done = 0

    @property
    def bytes(self) -> int:
        return self.states.bytes + self.keys.bytes + self.values.bytes


class Eagle3Head:
    """The head of one sequence. Its backend reports the decided rows with `record` and `keep`.
    `found` are hidden states of the last forward, each of shape (1, rows, width)."""

    depths = 1
    """The number of layers; a single one guesses at all depths."""

    def __init__(self, weights: Eagle3Weights) -> None:
        self.weights, self.info = weights, weights.info
        at_once = weights.device.type != "cpu"
        self.latest = LATEST_AT_ONCE if at_once else LATEST
        self.on = False
        self.reset()

    def open(self, owner: object) -> Self:
        return type(self)(self.weights)

    def reset(self) -> None:
        self.rows: list[int] = []
        self.waiting: list[torch.Tensor] = []
        self.levels = [Level() for _ in range(self.depths)]
        self.aside: torch.Tensor | None = None
        self.logits: torch.Tensor | None = None
        self.found: list[torch.Tensor] = []
        self.drafted = 0
        self.seen: list[list[int]] = []

    @property
    def bytes(self) -> int:
        waiting = sum(each.untyped_storage().nbytes() for each in self.waiting)
        aside = 0 if self.aside is None else self.aside.nbytes
        return sum(level.bytes for level in self.levels) + waiting + aside

    @property
    def done(self) -> int:
        return self.levels[0].done

    def listen(self, on: bool) -> None:
        self.on = on

    def tapped(self) -> AbstractContextManager[None]:
        """Record the hidden states of a forward of the target in this block, if the head
        listens."""
        self.found.clear()
        return tapped(self.weights.taps, self.found) if self.on else nullcontext()

    def record(self, start: int, rows: Sequence[int]) -> None:
        """Record that these rows of the last forward are the decided tokens from place `start`
        on."""
        if not self.found:
            return
        device = self.weights.device
        older = max(0, len(rows) - self.latest)
        last = rows[older:]
        chain = last[-1] - last[0] == len(last) - 1
        which = slice(last[0], last[-1] + 1) if chain else torch.tensor(last)
        self.waiting.append(torch.cat([each[0, which].to(device) for each in self.found], dim=-1))
        self.rows += range(start + older, start + len(rows))
        self.found.clear()
        while self.waiting_rows - len(self.waiting[0]) >= self.latest:
            first = len(self.rows) - self.waiting_rows
            del self.rows[first : first + len(self.waiting.pop(0))]

    @property
    def waiting_rows(self) -> int:
        return sum(map(len, self.waiting))

    def join(self) -> None:
        if self.waiting:
            start = len(self.rows) - self.waiting_rows
            waiting = self.waiting[0] if len(self.waiting) == 1 else torch.cat(self.waiting)
            self.levels[0].states.write(start, self.weights.head.join(waiting))
            self.waiting.clear()

    def keep(self, length: int) -> None:
        """Cut the text to so many tokens. Another token may follow the last row then, so its keys
        are dropped."""
        self.forget()
        while self.rows and self.rows[-1] >= length:
            self.rows.pop()
            if self.waiting:
                self.waiting[-1] = self.waiting[-1][:-1]
                if not len(self.waiting[-1]):
                    self.waiting.pop()
        for number, level in enumerate(self.levels):
            level.done = min(level.done, len(self.rows))
            while level.done and self.rows[level.done - 1] >= length - 1 - number:
                level.done -= 1

    @torch.inference_mode()
    def start(
        self, tokens: Sequence[int], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> LogitGuess | None:
        self.forget()
        last = len(tokens) - 2
        if not self.rows or self.rows[-1] != last:
            return None
        self.join()
        hidden = self.catch_up(0, len(self.rows), tokens, cancelled)
        if self.done < len(self.rows):
            return None
        if hidden is not None:
            # A copy, as the next step may be computed in the same place.
            self.root = hidden[-1:].clone()
        self.level, self.row = self.root, last
        self.seen = [[]]
        self.logits = None if hidden is None or self.logits is None else self.logits[-1:]
        return self.guesses(self.root)[0]

    def catch_up(
        self, number: int, end: int, tokens: Sequence[int], cancelled: Callable[[], bool]
    ) -> torch.Tensor | None:
        """Compute the rows of a layer before row `end`, unless cancelled; returns the last states
        that were computed."""
        level, out = self.levels[number], None
        while level.done < end and not cancelled():
            start, stop = level.done, min(end, level.done + CHUNK)
            rows = self.rows[start:stop]
            assert level.states.values is not None
            before = level.states.values[start:stop]
            sees = np.tri(len(rows), stop, start, dtype=bool)
            following = [tokens[row + number + 1] for row in rows]
            out = self.step(Block(start, following, before, rows, sees), number)
            level.done = stop
        return out

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
        block = Block(first, tokens, before, [self.row] * len(tokens), sees)
        self.level = self.step(block)
        self.drafted, self.seen = self.drafted + len(tokens), seen
        return self.guesses(self.level)

    def forget(self) -> None:
        self.drafted, self.seen = 0, []

    def step(self, block: Block, number: int = 0) -> torch.Tensor:
        """Run a layer over a block; returns the next hidden states."""
        start, tokens, before, rows, sees = block
        head, device = self.weights.head, before.device
        captured, level = self.weights.captured, self.levels[number]
        self.logits = None
        if captured is not None and (found := captured.step(self, block)):
            hidden: torch.Tensor
            hidden, self.logits = found
            return hidden
        mask = None if sees.all() else torch.from_numpy(sees).to(device)

        def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            if captured is None:
                held = level.keys.write(start, keys), level.values.write(start, values)
            else:
                end = start + len(tokens)
                both = captured.write(torch.arange(start, end, device=device), keys, values)
                held = both[0][:, :, :end], both[1][:, :, :end]
            grouped = queries.shape[1] != keys.shape[1]
            return functional.scaled_dot_product_attention(
                queries, *held, attn_mask=mask, enable_gqa=grouped
            )

        ids, positions = torch.tensor([tokens, rows], device=device)
        embedded = rows_of(ids, self.weights.embedding).to(before.dtype)
        out: torch.Tensor = head(embedded, before, positions, attend)
        return out

    def guesses(self, hidden: torch.Tensor) -> list[LogitGuess]:
        """The guesses after hidden states; after those of the last step, if it was recorded."""
        logits = self.logits
        if logits is None:
            logits = linear(self.weights.head.norm(hidden), self.weights.output)
        return [LogitGuess(row, self.weights.tokens) for row in logits.float().cpu().numpy()]


@torch.inference_mode()
def trial(head: Eagle3Head) -> list[torch.Tensor]:
    """The hidden states of some steps of a head, to compare two ways to compute it: a text, three
    guesses, and two guesses after the last of those."""
    weights, found = head.weights, list[torch.Tensor]()
    draw = torch.Generator(weights.device).manual_seed(0)
    size, kind = weights.width, weights.head.norm.weight.dtype
    text, guessed = np.tri(9, dtype=bool), np.ones((3, 12), bool)
    guessed[:, 9:] = np.eye(3)
    after = np.concatenate([guessed[[2, 2]], np.eye(2, dtype=bool)], axis=1)
    for depth, sees in enumerate((text, guessed, after)):
        used, end = sees.shape
        before = torch.randn((used, size), generator=draw, device=weights.device, dtype=kind)
        rows = [8 + depth] * used if depth else [*range(used)]
        block = Block(end - used, range(1, 1 + used), before, rows, sees)
        found.append(head.step(block).float().clone())
        if depth:
            head.drafted += used
        else:
            head.levels[0].done = used
    return found


def gap(wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    """How far the states of two trials are from each other, as a share of their norm."""
    pairs = zip(wanted, found, strict=True)
    return max(float((one - two).norm() / one.norm()) for one, two in pairs)
