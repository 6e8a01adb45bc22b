"""DFlash heads: a few layers that guess the tokens of a whole block in one forward.

The input of a block is the last decided token, followed by mask tokens. Every layer attends to the
target's hidden states of all tokens before the block, joined and normalised, and to the block
itself in both directions. The target's output matrix turns the state of place i into the
distribution of the i-th token after the last decided one. A guess therefore does not depend on the
tokens that are guessed before it (arXiv 2602.06036).

DFlash2 adds two parts. A convolution around attention and MLP lets a place read those before it. A
selector keeps the likeliest tokens of a place, and adds to the logit of token c after token p a
product of learned vectors of p, of c and of the place's state: the guess then depends on the token
before it, still without another forward.

The format was read from z-lab/dflash (dflash/model.py and the files of its tests, commits 1012959
and 0698f53). A folder has config.json and *.safetensors, with the architecture `DFlashDraftModel`
or `DFlash2DraftModel`. `dflash_config` there holds `target_layer_ids` (layer i has the hidden state
i + 1 as its output), `mask_token_id` and `block_size`, and what DFlash2 adds. A head that does not
fit its target is refused.

Invariant of a sequence: the first `done` of its rows have keys and values in every layer. They
depend only on decided tokens; those of the block are behind them, and are overwritten.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from engine.errors import ModelError, first_line
from engine.heads.base import BlockGuess, LogitGuess
from engine.heads.eagle3 import LAYER_FIELDS, TARGET_KEY, Attend, Target, Turn, fit
from engine.heads.eagle3_head import Eagle3Head, Eagle3Weights, Projection, linear, rows_of
from engine.sampling import Floats
from engine.settings import Sampling

PLAIN, SELECTING = "DFlashDraftModel", "DFlash2DraftModel"
SLIDING = "sliding_attention"
Join = Callable[[list[nn.Linear]], Callable[[torch.Tensor], torch.Tensor]]
"""Makes one projection of several, with their outputs side by side."""


@dataclass(frozen=True, slots=True)
class DflashShape:
    """The shape of a head. `layer` is the config of its layers.

    `layers` are the target's hidden states that it reads: 0 is the embedding, i the output of layer
    i - 1. A block has `places`, the last decided token included. `windows` has the reach of each
    layer's attention, 0 if it is not limited; in layers that are `causal` a place does not see
    later ones. Logits are scaled, and capped unless `cap` is 0. The convolutions read `taps` places
    with one kernel for each `group` of numbers; none if `taps` is 0. The selector keeps
    `candidates`, and compares vectors of length `rank`; there is none if that is 0.
    """

    layer: LlamaConfig
    layers: tuple[int, ...]
    places: int
    mask: int
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    input_scale: float = 1.0
    output_scale: float = 1.0
    cap: float = 0.0
    taps: int = 0
    group: int = 1
    candidates: int = 0
    rank: int = 0


def side_by_side(parts: list[nn.Linear]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda rows: torch.cat([part(rows) for part in parts], dim=-1)


class Convolution(nn.Module):
    """The kernels of a place: fixed ones, plus some that are predicted from its state, before and
    after what they surround."""

    def __init__(self, shape: DflashShape) -> None:
        super().__init__()
        size = shape.layer.hidden_size
        self.taps, self.group = shape.taps, shape.group
        self.base_kernel = nn.Parameter(torch.zeros(2, shape.taps, size))
        self.kernel_projection = nn.Linear(size, 2 * shape.taps * (size // shape.group), bias=False)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.kernel_projection(rows).view(*rows.shape[:-1], 2, self.taps, -1)
        kernels = self.base_kernel + found.repeat_interleave(self.group, dim=-1)
        return kernels[..., 0, :, :], kernels[..., 1, :, :]


def convolved(rows: torch.Tensor, kernels: torch.Tensor, places: int) -> torch.Tensor:
    """The places of each block, mixed with those before them."""
    blocks = rows.reshape(len(rows), -1, places, rows.shape[-1])
    shifted = [
        functional.pad(blocks, (0, 0, tap, 0))[..., :places, :].flatten(-3, -2)
        for tap in range(kernels.shape[-2])
    ]
    return (torch.stack(shifted, dim=-2) * kernels).sum(-2)


class RmsNorm(nn.RMSNorm):
    """Also for states of few bits, as training in bfloat16 has them."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(states.dtype)
        return functional.rms_norm(states, weight.shape, weight, self.eps)


class DflashLayer(nn.Module):
    """A layer. Its tensors are named as in the files."""

    def __init__(self, shape: DflashShape) -> None:
        super().__init__()
        config, width = shape.layer, shape.layer.hidden_size
        bias, heads = config.attention_bias, config.num_attention_heads
        self.size = int(config.head_dim or width // heads)
        self.heads = [heads, *2 * [int(config.num_key_value_heads or heads)]]
        """Those of queries, keys and values."""
        inner, shared = heads * self.size, self.heads[1] * self.size
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(width, inner, bias=bias),
                "k_proj": nn.Linear(width, shared, bias=bias),
                "v_proj": nn.Linear(width, shared, bias=bias),
                "o_proj": nn.Linear(inner, width, bias=bias),
                "q_norm": RmsNorm(self.size, config.rms_norm_eps),
                "k_norm": RmsNorm(self.size, config.rms_norm_eps),
            }
        )
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]
        self.input_layernorm = RmsNorm(width, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(width, config.rms_norm_eps)
        self.places = shape.places
        if shape.taps:
            self.attention_conv, self.mlp_conv = Convolution(shape), Convolution(shape)
        self.join(side_by_side)

    def join(self, join: Join) -> None:
        """Compute with joined projections."""
        own: Any = self.self_attn
        self.reads = join([own.q_proj, own.k_proj, own.v_proj])
        self.writes = join([own.o_proj])
        self.rises = join([self.mlp.gate_proj, self.mlp.up_proj])
        self.falls = join([self.mlp.down_proj])

    def forward(
        self, hidden: torch.Tensor, context: torch.Tensor, turn: Turn, attend: Attend
    ) -> torch.Tensor:
        """From states of blocks to the next ones, shape (1, rows, width). `turn` is for the rows of
        the context and of the blocks; so are the keys and values that `attend` gets."""
        conv = hasattr(self, "attention_conv")
        rows = self.input_layernorm(hidden)
        if conv:
            before, after = self.attention_conv(rows)
            rows = convolved(rows, before, self.places)
        rows = self.attention(rows, context, turn, attend)
        hidden = hidden + (convolved(rows, after, self.places) if conv else rows)
        rows = self.post_attention_layernorm(hidden)
        if conv:
            before, after = self.mlp_conv(rows)
            rows = convolved(rows, before, self.places)
        gate, up = self.rises(rows).chunk(2, dim=-1)
        rows = self.falls(self.mlp.act_fn(gate) * up)
        return hidden + (convolved(rows, after, self.places) if conv else rows)

    def attention(
        self, rows: torch.Tensor, context: torch.Tensor, turn: Turn, attend: Attend
    ) -> torch.Tensor:
        own: Any = self.self_attn
        parts = self.reads(torch.cat((context, rows), dim=1))
        parts = parts.view(*parts.shape[:2], -1, self.size).transpose(1, 2)
        queries, keys, values = torch.split(parts, self.heads, dim=1)
        queries, keys = apply_rotary_pos_emb(own.q_norm(queries), own.k_norm(keys), *turn)
        read = attend(queries[:, :, context.shape[1] :], keys, values)
        return self.writes(read.transpose(1, 2).flatten(2))


class Selector(nn.Module):
    def __init__(self, shape: DflashShape) -> None:
        super().__init__()
        size = shape.layer.vocab_size, shape.rank
        self.predecessor_codebook = nn.Parameter(torch.zeros(size))
        self.successor_codebook = nn.Parameter(torch.zeros(size))
        self.hidden_projection = nn.Linear(shape.layer.hidden_size, shape.rank, bias=False)


class Dflash(nn.Module):
    """The whole head, without embedding and output matrix, which are the target's."""

    def __init__(self, shape: DflashShape) -> None:
        super().__init__()
        self.shape = shape
        config, width = shape.layer, shape.layer.hidden_size
        self.fc = nn.Linear(len(shape.layers) * width, width, bias=False)
        self.hidden_norm = RmsNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(DflashLayer(shape) for _ in range(config.num_hidden_layers))
        self.norm = RmsNorm(width, config.rms_norm_eps)
        if shape.rank:
            self.candidate_selector = Selector(shape)
        self.rotary = LlamaRotaryEmbedding(config)
        self.combine = side_by_side([self.fc])

    def fuse(self) -> int:
        """Join matrices that read the same rows, as `FusedHead` does; returns the bytes of the
        head."""
        made: list[Projection] = []

        def join(parts: list[nn.Linear]) -> Projection:
            made.append(Projection(parts))
            for part in parts:
                part.to("meta")
            return made[-1]

        self.combine = join([self.fc])
        for layer in self.layers:
            layer.join(join)  # type: ignore[operator]
        rest = sum(int(each.nbytes) for each in self.state_dict().values() if not each.is_meta)
        return rest + sum(each.bytes for each in made)

    def join(self, states: torch.Tensor) -> torch.Tensor:
        """The context of the layers, from the target's hidden states side by side."""
        found: torch.Tensor = self.hidden_norm(self.combine(states))
        return found

    def forward(
        self,
        embedded: torch.Tensor,
        context: torch.Tensor,
        positions: torch.Tensor,
        attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The last states of some blocks, shape (1, rows, width), like `embedded`. `positions` are
        those of the context's rows and of the blocks', shape (1, rows). `attend` is given the
        number of a layer first."""
        hidden = embedded * self.shape.input_scale
        turn = self.rotary(hidden, positions)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, context, turn, lambda *parts, at=number: attend(at, *parts))
        found: torch.Tensor = self.norm(hidden)
        return found

    def logits(self, raw: torch.Tensor) -> torch.Tensor:
        """The logits, from the products of states and output matrix."""
        raw, cap = raw.float() * self.shape.output_scale, self.shape.cap
        return torch.tanh(raw / cap) * cap if cap else raw


def mask_of(
    shape: DflashShape, number: int, rows: Sequence[int], block: Sequence[int]
) -> torch.Tensor | None:
    """The keys that the places of a block see in a layer, shape (places, keys); None if they see
    all. `rows` are the positions of the keys before the block."""
    window, causal = shape.windows[number], shape.causal[number]
    if not window and not causal:
        return None
    ahead = torch.tensor([*rows, *block])[None] - torch.tensor(block)[:, None]
    sees = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    return sees & (ahead > -window) if window else sees


# files


def read_dflash(folder: Path, target: Target) -> Dflash:
    """The head in a folder, in the dtype of its files. Raises ModelError."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = {
            name.removeprefix("model."): each
            for file in sorted(folder.glob("*.safetensors"))
            for name, each in load_file(file).items()
        }
        return dflash_of(config, weights, target)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ModelError(unusable(folder, error)) from error


def dflash_of(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], target: Target
) -> Dflash:
    """The head that a config describes, with these tensors. Raises ValueError, KeyError, TypeError
    or AttributeError."""
    shape = shape_of(config, target)
    with torch.device("meta"):
        head = Dflash(shape)
    fit(head, tensors)
    head.rotary = type(head.rotary)(shape.layer)
    return head.eval().requires_grad_(False)


def unusable(folder: Path, error: Exception) -> str:
    return (
        f"The DFlash head in {str(folder)!r} cannot be used: {first_line(error)}. Choose a head "
        "that was trained for this model, or load the model without one."
    )


def shape_of(config: Mapping[str, Any], target: Target) -> DflashShape:
    """The shape that a config describes. Raises ValueError if it does not fit the target."""
    own = config.get("dflash_config") or {}

    def value(name: str, default: Any = None) -> Any:
        found = own.get(name, config.get(name))
        return default if found is None else found

    known = {name: config[name] for name in LAYER_FIELDS if config.get(name) is not None}
    layer = LlamaConfig(num_hidden_layers=int(config["num_hidden_layers"]), **known)
    for what, found, expected in (
        ("states of {} numbers", layer.hidden_size, target.hidden),
        ("a vocabulary of {} tokens", layer.vocab_size, target.vocabulary),
    ):
        if found != expected:
            described = what.format(f"{found:,}")
            raise ValueError(f"it was made for {described}, and the model has {expected:,}")
    for_weights = config.get(TARGET_KEY)
    if for_weights and target.weights and for_weights != target.weights:
        raise ValueError("it was trained for other weights of this model")
    layers = tuple(int(each) + 1 for each in value("target_layer_ids", ()))
    # What its trainers read after the last layer, before or after its norm, is not established.
    if not layers or not all(0 < each < target.layers for each in layers):
        names = [each - 1 for each in layers]
        raise ValueError(
            f"its target_layer_ids are {names}, and the model has those of 0 to {target.layers - 2}"
        )
    mask, places = value("mask_token_id"), int(value("block_size", 16))
    if mask is None or not 0 <= int(mask) < target.vocabulary:
        raise ValueError(f"its mask_token_id is {mask}, which the model does not have")
    if places < 2:
        raise ValueError(f"its block_size is {places}, and 2 is the smallest")
    kinds = config.get("layer_types") or ["full_attention"] * layer.num_hidden_layers
    slides, causal = [each == SLIDING for each in kinds], config.get("is_causal")
    window = int(config.get("sliding_window") or 0)
    if len(kinds) != layer.num_hidden_layers or (any(slides) and not window):
        raise ValueError(f"its layers are {kinds} with a window of {window}")
    numbers = {
        name: int(value(name, 0)) if config["architectures"] == [SELECTING] else 0
        for name in ("conv_kernel_size", "conv_group_size", "selector_top_k", "selector_rank")
    }
    taps, group, candidates, rank = numbers.values()
    if (taps > 0) != (group > 0) or (rank > 0) != (candidates > 0) or min(numbers.values()) < 0:
        raise ValueError(f"its config has {numbers}")
    if group and layer.hidden_size % group:
        raise ValueError(f"its conv_group_size of {group} does not divide {layer.hidden_size:,}")
    return DflashShape(
        layer,
        layers,
        places,
        int(mask),
        tuple(window * each for each in slides),
        tuple(slides if causal is None else [bool(causal)] * len(slides)),
        float(value("input_embedding_scale", 1.0)),
        float(value("output_multiplier", 1.0)),
        float(value("final_logit_softcapping", 0.0)),
        taps,
        group or 1,
        min(candidates, target.vocabulary),
        rank,
    )


# guesses


def block_guess(
    root: int,
    logits: Floats,
    tokens: NDArray[np.int64] | None = None,
    edges: Floats | None = None,
    vector_of: Callable[[int], Floats] | None = None,
) -> BlockGuess:
    """The guess of a block, from logits of shape (places, candidates).

    `tokens` are the candidates, of the same shape and in rising order, None for the whole
    vocabulary. With `edges`, shape (places, candidates, rank), the token before a place adds the
    products of its vector, `vector_of(token)`, with them.
    """

    def at(depth: int, token: int) -> LogitGuess:
        found = logits[depth]
        if edges is not None and vector_of is not None:
            found = found + edges[depth] @ vector_of(token)
        return LogitGuess(found, None if tokens is None else tokens[depth])

    return BlockGuess(root, len(logits), at, edges is not None)


class DflashHead(Eagle3Head):
    """The head of one sequence. The layers of the context are its levels."""

    def __init__(self, weights: Eagle3Weights) -> None:
        self.depths = len(weights.head.layers)
        self.block: BlockGuess | None = None
        super().__init__(weights)

    @torch.inference_mode()
    def start(
        self, tokens: Sequence[int], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> LogitGuess | None:
        self.forget()
        if not self.rows or self.rows[-1] != len(tokens) - 2 or cancelled():
            return None
        self.join()
        states = self.states_after(tokens[-1])
        self.block = self.guess(tokens[-1], states[1:])
        return self.block

    def states_after(self, token: int) -> torch.Tensor:
        """Run the block after all decided rows; returns the states of its places, shape (places,
        width)."""
        network, embedding = self.weights.head, self.weights.embedding
        shape, device = network.shape, self.weights.device
        start, end = min(level.done for level in self.levels), len(self.rows)
        context = self.levels[0].states.values
        assert context is not None
        block = range(self.rows[-1] + 1, self.rows[-1] + 1 + shape.places)

        def attend(
            number: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            level = self.levels[number]
            held = level.keys.write(start, keys), level.values.write(start, values)
            level.done = end
            mask = mask_of(shape, number, self.rows, block)
            mask = None if mask is None else mask.to(device)
            grouped = queries.shape[1] != keys.shape[1]
            return functional.scaled_dot_product_attention(
                queries, *held, attn_mask=mask, enable_gqa=grouped
            )

        ids = torch.tensor([token] + [shape.mask] * (shape.places - 1), device=device)
        embedded = rows_of(ids, embedding).to(context.dtype)
        where = torch.tensor([[*self.rows[start:], *block]], device=device)
        out: torch.Tensor = network(embedded[None], context[None, start:end], where, attend)
        return out[0]

    def guess(self, token: int, states: torch.Tensor) -> BlockGuess:
        network, shape = self.weights.head, self.weights.head.shape
        logits = network.logits(linear(states, self.weights.output))
        if not shape.rank:
            return block_guess(token, logits.cpu().numpy())
        selector = network.candidate_selector
        tokens = logits.topk(shape.candidates, sorted=False).indices.sort().values
        vectors = selector.hidden_projection(states)[:, None].float()
        edges = functional.embedding(tokens, selector.successor_codebook) * vectors
        found = logits.gather(1, tokens)
        return block_guess(
            token,
            found.cpu().numpy(),
            tokens.cpu().numpy(),
            edges.cpu().numpy(),
            lambda token: selector.predecessor_codebook[token].float().cpu().numpy(),
        )

    @torch.inference_mode()
    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[LogitGuess]:
        assert self.block is not None, "extend follows start"
        self.drafted += 1
        guesses = [self.block.after(self.drafted, token) for token in tokens]
        return [guess for guess in guesses if guess is not None]

    def forget(self) -> None:
        super().forget()
        self.block = None
