"""An EAGLE-3 head: one decoder layer that goes on from what its target thought of a text.

Hidden states of three layers of the target, joined to one, and the token that followed them go in;
the law of the token after that comes out. For one token more the layer's own output stands for the
joined states, which the target has not computed yet. Embedding and output matrix are the target's
unless the head brings its own (arXiv 2503.01840).

What the layer attends to is given to it as a function, so that training, which guesses from all
positions of a text at once, and drafting, which guesses along a tree, run the same weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From queries, keys and values of some rows to what these read: all of shape (batch, heads, rows,
head size); keys and values have as many heads as the config says."""


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    """What a head is made of. `layer` is the config of its decoder layer.

    `layers` says which hidden states it reads: 0 is the embedding, i the output of layer i - 1.
    `target_hidden` is the width of these. `output` is how many tokens its own output matrix knows,
    0 where it takes the target's; `embedding` says whether it has an embedding of its own.
    """

    layer: LlamaConfig
    layers: tuple[int, ...]
    target_hidden: int
    output: int = 0
    embedding: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False


def usual_layers(count: int) -> tuple[int, int, int]:
    """The hidden states that a head reads which says nothing of it, of a target of so many layers:
    a low one, a middle one and a high one."""
    return 2, count // 2, count - 3


def taps_of(target: Any, layers: Sequence[int]) -> list[nn.Module]:
    """The modules of a transformers model whose outputs are those hidden states."""
    modules = [target.get_input_embeddings(), *target.get_decoder().layers]
    return [modules[each] for each in layers]


@contextmanager
def tapped(modules: Sequence[nn.Module], found: list[torch.Tensor]) -> Iterator[None]:
    """While it is entered, a forward appends what these modules compute to `found`, each of shape
    (batch, rows, width), in the order in which they run."""

    def tap(_: nn.Module, __: Any, output: Any) -> None:
        found.append(output if isinstance(output, torch.Tensor) else output[0])

    hooks = [each.register_forward_hook(tap) for each in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Eagle3Layer(nn.Module):
    """The decoder layer. Its attention reads embedding and hidden state side by side."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        config, size = shape.layer, shape.layer.hidden_size
        self.norm_before_residual = shape.norm_before_residual
        self.input_layernorm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.self_attn = Eagle3Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, turn: "Turn", attend: Attend
    ) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        residual = residual + self.self_attn(both, turn, attend)
        out: torch.Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


Turn = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of the rotary positions of some rows."""


class Eagle3Attention(nn.Module):
    """The projections of the layer's attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, bias = config.hidden_size, config.attention_bias
        self.size = config.head_dim or width // config.num_attention_heads
        inner = config.num_attention_heads * self.size
        shared = (config.num_key_value_heads or config.num_attention_heads) * self.size
        self.q_proj = nn.Linear(2 * width, inner, bias=bias)
        self.k_proj = nn.Linear(2 * width, shared, bias=bias)
        self.v_proj = nn.Linear(2 * width, shared, bias=bias)
        self.o_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, both: torch.Tensor, turn: Turn, attend: Attend) -> torch.Tensor:
        rows = both.shape[:2]
        parts = [
            project(both).view(*rows, -1, self.size).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        ]
        queries, keys = apply_rotary_pos_emb(parts[0], parts[1], *turn)
        read = attend(queries, keys, parts[2])
        out: torch.Tensor = self.o_proj(read.transpose(1, 2).reshape(*rows, -1))
        return out


class Eagle3(nn.Module):
    """The whole head. Its weights are named as in the files of most trainers."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.shape = shape
        config, size = shape.layer, shape.layer.hidden_size
        states = len(shape.layers) * shape.target_hidden
        if shape.norm_before_fc:
            self.input_norm = LlamaRMSNorm(states, config.rms_norm_eps)
        self.fc = nn.Linear(states, size, bias=False)
        self.midlayer = Eagle3Layer(shape)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        if shape.embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if shape.output:
            self.lm_head = nn.Linear(size, shape.output, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def join(self, states: torch.Tensor) -> torch.Tensor:
        """The target's hidden states side by side, made to one of the head's width."""
        if self.shape.norm_before_fc:
            states = self.input_norm(states)
        out: torch.Tensor = self.fc(states)
        return out

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """One step: of tokens and of the hidden states before them to the next hidden states, all
        of shape (batch, rows, width); `positions` has shape (batch or 1, rows)."""
        turn = self.rotary(hidden, positions)
        out: torch.Tensor = self.midlayer(embedded, hidden, turn, attend)
        return out
