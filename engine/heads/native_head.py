"""EAGLE-3 heads on a processor, whose steps are one call of the compiled core.

The layer of such a head is one of a Llama-like model that reads two rows side by side, so the core
computes it as it computes those (native/src/forward.hpp), with matrices of eight bits. For a small
model this takes a fraction of the time of torch's separate operations. Rounding changes guesses a
little, but no answer, because guesses decide nothing.
"""

from dataclasses import replace

import numpy as np
import torch

from engine.backends.native_forward import HEAD_SIZES, MATRICES, rotary_factors
from engine.backends.quantised import PackedLinear, can_pack
from engine.heads.base import LogitGuess
from engine.heads.eagle3 import Attend, Eagle3
from engine.heads.eagle3_head import (
    BITS,
    CHANGING,
    DEPTH,
    Block,
    Eagle3Head,
    Eagle3Weights,
    Matrix,
    Network,
    gap,
    rounding_is_fast,
    rows_of,
    trial,
)
from engine.native import core

FEW_ROWS = 8
"""The most rows of a step for which all logits are computed: of more, only the last are needed."""
SHARE = 0.15
"""How far its states may be from torch's, as a share of their norm."""


class NativeNetwork(Network):
    """What all sequences share. `output` is the matrix of the logits, and `room` is the number of
    positions. Raises ValueError for a head that the core does not know."""

    def __init__(self, head: Eagle3, output: Matrix, room: int) -> None:
        shape, layer, attention = head.shape.layer, head.midlayer, head.midlayer.self_attn
        linears = [getattr(attention, name, None) or getattr(layer.mlp, name) for name in MATRICES]
        known = shape.hidden_act == "silu" and attention.size in HEAD_SIZES
        packable = all(can_pack(each.out_features, each.in_features) for each in linears)
        if not (known and packable and head.rotary.rope_type not in CHANGING):
            raise ValueError("its layer has a form that is not known")
        super().__init__(head)
        self.packed = [PackedLinear(each.weight.data.float(), each.bias, BITS) for each in linears]
        self.output = output if isinstance(output, PackedLinear) else None
        self.heads, self.size = linears[1].out_features // attention.size, attention.size
        norms = layer.input_layernorm, layer.post_attention_layernorm, layer.hidden_norm, head.norm
        self.norms = [each.weight.data.float().contiguous() for each in norms]
        self.factors = rotary_factors(head.rotary, room, self.size)
        vocabulary = 0 if self.output is None else self.output.out_features
        inner, own = linears[4].out_features, linears[0].out_features // self.size
        before, between, beside, last = self.norms
        self.decoder = core.Decoder(
            [shape.hidden_size, inner, own, self.heads, self.size, vocabulary, 0, 0, 0],
            False,
            head.shape.norm_before_residual,
            shape.rms_norm_eps,
            self.size**-0.5,
            [[before, between, None, None, beside, None, *(each.matrix for each in self.packed)]],
            last,
            None if self.output is None else self.output.matrix,
            *self.factors,
            # What it points to stays as long as it does.
            (self.packed, self.output, self.norms),
        )

    @property
    def bytes(self) -> int:
        plain = sum(each.nbytes for each in (*self.norms, *self.factors))
        return super().bytes + plain + sum(each.nbytes for each in self.packed)


class Reference(Network):
    """A head that torch computes as it is, for comparison."""

    def __init__(self, head: Eagle3) -> None:
        super().__init__(head)
        self.module = head

    def __call__(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        found: torch.Tensor = self.module(embedded[None], hidden[None], positions[None], attend)
        return found[0]


class NativeHead(Eagle3Head):
    """The head of one sequence. Its keys and values are in `parts`, as the core reads them, first
    those of the decided rows, then those of the drafted ones, whose `parents` are known."""

    def reset(self) -> None:
        super().reset()
        self.parts: list[torch.Tensor] = []
        self.parents: list[int] = []

    @property
    def bytes(self) -> int:
        return super().bytes + sum(part.nbytes for part in self.parts)

    def step(self, block: Block, number: int = 0) -> torch.Tensor:
        start, tokens, before, rows, sees = block
        network, done, count = self.weights.head, self.done, len(tokens)
        while len(self.parts) * core.PART < start + count:
            self.parts.append(torch.zeros(2 * network.heads * core.PART * network.size))
        # The row that a row sees just before itself is its parent.
        ends = (np.flatnonzero(row[: start + at]) for at, row in enumerate(sees))
        parents = [max(int(seen[-1]) - done, -1) if len(seen) else -1 for seen in ends]
        self.parents[start - done :] = parents
        hidden = before.float().clone()
        embedded = rows_of(torch.tensor(tokens), self.weights.embedding).float()
        self.logits = None
        if network.output is not None and count <= FEW_ROWS:
            self.logits = torch.empty(count, network.output.width)
        network.decoder.compute(
            hidden,
            [(count, done, start - done, self.parts)],
            np.array(rows, dtype=np.int64),
            np.array(self.parents, dtype=np.int64),
            self.logits,
            [],
            embedded,
            torch.get_num_threads(),
        )
        if self.logits is not None:
            self.logits = self.logits[:, : network.output.out_features]
        return hidden

    def guesses(self, hidden: torch.Tensor) -> list[LogitGuess]:
        return super().guesses(hidden.to(self.weights.head.norm.weight.dtype))


def native_network(head: Eagle3, output: Matrix, room: int) -> NativeNetwork | None:
    """The network that the core computes, None if torch computes this head faster, or the core
    does not know it."""
    if not rounding_is_fast(head.fc.weight.device):
        return None
    try:
        return NativeNetwork(head, output, room + DEPTH + 1)
    except ValueError:
        return None


def suits(weights: Eagle3Weights, head: Eagle3) -> bool:
    """Whether the core computes a head as torch does."""
    exact = Eagle3Head(replace(weights, head=Reference(head)))
    return gap(trial(exact), trial(NativeHead(weights))) <= SHARE
