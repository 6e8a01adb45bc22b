"""An EAGLE-3 head in few operations, for drafting.

Beside a small model a guess takes as long as what surrounds its arithmetic. So matrices that read
the same rows are one here, and nothing is called but the operations themselves.

Invariant: it computes what `Eagle3` does, but for rounding.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from engine.heads.eagle3 import Attend, Eagle3
from engine.heads.eight_bits import Matrix, bytes_of, linear

CHANGING = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies depend on how long the text is."""


class FusedHead:
    """A head whose weights stay where they are. `pack` says how its matrices are kept."""

    def __init__(self, head: Eagle3, pack: Callable[[torch.Tensor], Matrix]) -> None:
        layer, attention = head.midlayer, head.midlayer.self_attn
        self.size = attention.size
        self.inner, self.shared = (
            project.out_features // self.size for project in (attention.q_proj, attention.k_proj)
        )
        self.norm_before_residual = layer.norm_before_residual
        self.before_joining = Norm(head.input_norm) if head.shape.norm_before_fc else None
        self.of_tokens, self.of_states = Norm(layer.input_layernorm), Norm(layer.hidden_norm)
        self.of_sums, self.norm = Norm(layer.post_attention_layernorm), Norm(head.norm)
        self.joins = Projection([head.fc], pack)
        self.reads = Projection([attention.q_proj, attention.k_proj, attention.v_proj], pack)
        self.writes = Projection([attention.o_proj], pack)
        self.rises = Projection([layer.mlp.gate_proj, layer.mlp.up_proj], pack)
        self.falls = Projection([layer.mlp.down_proj], pack)
        self.activation, self.rotary = layer.mlp.act_fn, head.rotary

    @property
    def bytes(self) -> int:
        """What its weights take in memory."""
        parts = self.joins, self.reads, self.writes, self.rises, self.falls
        norms = self.before_joining, self.of_tokens, self.of_states, self.of_sums, self.norm
        kept = [bytes_of(each.matrix) for each in parts]
        kept += [bytes_of(each.bias) for each in parts if each.bias is not None]
        return sum(kept) + sum(bytes_of(each.weight) for each in norms if each is not None)

    def join(self, states: torch.Tensor) -> torch.Tensor:
        """The target's hidden states side by side, made to one of the head's width."""
        return self.joins(self.before_joining(states) if self.before_joining else states)

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
    """A norm of the library, by its weights."""

    def __init__(self, norm: nn.Module) -> None:
        self.weight: torch.Tensor = norm.weight.data  # type: ignore[assignment]
        self.epsilon: float = norm.variance_epsilon  # type: ignore[assignment]

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(states, self.weight.shape, self.weight, self.epsilon)


class Projection:
    """Some projections of the same rows, their outputs side by side."""

    def __init__(self, parts: list[nn.Linear], pack: Callable[[torch.Tensor], Matrix]) -> None:
        weights = [each.weight.data for each in parts]
        self.matrix = pack(weights[0] if len(weights) == 1 else torch.cat(weights))
        biases = [each.bias.data for each in parts if each.bias is not None]
        self.bias = torch.cat(biases) if biases else None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return linear(states, self.matrix, self.bias)
