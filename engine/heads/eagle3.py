"""An EAGLE-3 head: one decoder layer that continues from the hidden states of its target.

The input is the hidden states of three layers of the target, joined to one, and the token that
followed them; the output is the distribution of the token after that. For each further token, the
layer's own output replaces the joined states, which the target has not computed yet. Embedding and
output matrix are the target's unless the head has its own (arXiv 2503.01840).

Attention is passed to the layer as a function, so that training, which guesses from all positions
of a text at once, and drafting, which guesses along a tree, run the same weights.

Its files are a folder with config.json and *.safetensors, in one of three formats.
`LlamaForCausalLMEagle3` and `Eagle3LlamaForCausalLM` describe the layer and the head in one config;
that of the speculators library has a separate config for the layer. The formats differ in two
respects. The first two number the layers, so that layer i has the hidden state i + 1 as its output;
speculators numbers the hidden states. Only speculators can normalise before the residual or before
the joined states. A head may know only a part of the target's vocabulary: its token i is token i +
`d2t[i]` of the target. A head that does not fit its target is refused.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from engine.errors import ModelError, first_line

FLAT = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
SPECULATORS = "eagle3"
LAYER_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "vocab_size",
    "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip
"""The settings of a layer's config that are used."""
IGNORED = {"t2d", "verifier_norm.weight", "verifier_lm_head.weight"}
"""Tensors that drafting does not need: the inverse of `d2t`, and parts of the target that some
trainers store."""
TARGET_KEY = "strata_target"
"""The key in our configs for the fingerprint of the weights that a head was trained for."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention: maps queries, keys and values of some rows to the outputs of these rows, all of shape
(batch, heads, rows, head size); keys and values have the number of heads in the config."""


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    """The shape of a head. `layer` is the config of its decoder layer.

    `layers` are the hidden states that it reads: 0 is the embedding, i the output of layer i - 1;
    `target_hidden` is their width. `output` is the number of tokens of its own output matrix, 0 if
    it uses the target's. With `embedding` it has its own embedding.
    """

    layer: LlamaConfig
    layers: tuple[int, ...]
    target_hidden: int
    output: int = 0
    embedding: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False


def usual_layers(count: int) -> tuple[int, int, int]:
    """The hidden states that a head reads if its config names none, for a target of `count` layers:
    a low one, a middle one and a high one."""
    return 2, count // 2, count - 3


def taps_of(target: Any, layers: Sequence[int]) -> list[nn.Module]:
    """The modules of a transformers model whose outputs are those hidden states."""
    modules = [target.get_input_embeddings(), *target.get_decoder().layers]
    return [modules[each] for each in layers]


@contextmanager
def tapped(modules: Sequence[nn.Module], found: list[torch.Tensor]) -> Iterator[None]:
    """Append the outputs of these modules to `found` during a forward in this block, each of shape
    (batch, rows, width), in the order in which they run."""

    def tap(_: nn.Module, __: Any, output: Any) -> None:
        found.append(output if isinstance(output, torch.Tensor) else output[0])

    with ExitStack() as hooks:
        for each in modules:
            hooks.enter_context(each.register_forward_hook(tap))
        yield


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
        """The target's hidden states side by side, projected to the head's width."""
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
        """One step: from tokens and the hidden states before them to the next hidden states, all of
        shape (batch, rows, width); `positions` has shape (batch or 1, rows)."""
        turn = self.rotary(hidden, positions)
        out: torch.Tensor = self.midlayer(embedded, hidden, turn, attend)
        return out


@dataclass(frozen=True, slots=True)
class Target:
    """The target that a head has to fit: `hidden` is the width of its hidden states, `weights`
    identifies its weight files, "" if there are none on this machine."""

    hidden: int
    layers: int
    vocabulary: int
    weights: str = ""


def read_head(folder: Path, target: Target) -> tuple[Eagle3, NDArray[np.int64] | None]:
    """The head in a folder, in the dtype of its files, and the target's tokens to which its logits
    belong, in rising order, None for all. Raises ModelError."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError("it has no *.safetensors file")
        tensors = {name: each for file in files for name, each in load_file(file).items()}
        return head_of(config, tensors, target)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ModelError(
            f"The EAGLE-3 head in {str(folder)!r} cannot be used: {first_line(error)}. Choose a "
            "head that was trained for this model, or load the model without one."
        ) from error


def head_of(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], target: Target
) -> tuple[Eagle3, NDArray[np.int64] | None]:
    """The head that a config describes, with these tensors, and the tokens of its logits as for
    `read_head`. Raises ValueError, KeyError, TypeError or AttributeError."""
    weights = {renamed(name): each for name, each in tensors.items() if name not in IGNORED}
    offsets = weights.pop("d2t", None)
    shape = shape_of(config, weights, target)
    tokens = None
    if offsets is not None or shape.output not in (0, target.vocabulary):
        tokens, order = known_tokens(offsets, shape, target)
        weights["lm_head.weight"] = weights["lm_head.weight"][order]
    with torch.device("meta"):
        head = Eagle3(shape)
    fit(head, weights)
    head.rotary = type(head.rotary)(shape.layer)
    return head.eval().requires_grad_(False), tokens


def write_head(head: Eagle3, folder: Path, verifier: str, weights: str, ahead: int) -> None:
    """Write a head that uses its target's embedding and output matrix into a folder, as float16,
    in the format of the speculators library. `verifier` is the name of its target, `weights` is
    their fingerprint, and it was trained to guess so many tokens `ahead`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name.replace("midlayer.", "layers.0."): each.half().contiguous()
        for name, each in head.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors")
    shape, layer = head.shape, head.shape.layer
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": SPECULATORS,
        "speculators_config": {
            "algorithm": SPECULATORS,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": ahead}],
            "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            name: value
            for name, value in layer.to_dict().items()
            if name in {*LAYER_FIELDS, "model_type", "num_hidden_layers"}
        },
        "draft_vocab_size": layer.vocab_size,
        "target_hidden_size": shape.target_hidden,
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.norm_before_fc,
        "eagle_aux_hidden_state_layer_ids": list(shape.layers),
        "torch_dtype": "float16",
        TARGET_KEY: weights,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def renamed(name: str) -> str:
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def shape_of(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], target: Target
) -> Eagle3Shape:
    """The shape that a config describes. Raises ValueError if it does not fit the target."""
    layer, states, before_residual, before_fc = described(config)
    known = {name: layer[name] for name in LAYER_FIELDS if layer.get(name) is not None}
    own = LlamaConfig(num_hidden_layers=1, **known)
    width = int(config.get("target_hidden_size") or own.hidden_size)
    if layer.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"it has {layer['num_hidden_layers']} layers, and one is supported")
    if width != target.hidden:
        raise ValueError(
            f"it reads hidden states of {width:,} numbers, and those of the model have "
            f"{target.hidden:,}"
        )
    if own.vocab_size != target.vocabulary:
        raise ValueError(
            f"it was made for a vocabulary of {own.vocab_size:,} tokens, and the model has "
            f"{target.vocabulary:,}"
        )
    for_weights = config.get(TARGET_KEY)
    if for_weights and target.weights and for_weights != target.weights:
        raise ValueError("it was trained for other weights of this model")
    states = states or usual_layers(target.layers)
    if len(states) != 3 or not all(0 <= each <= target.layers for each in states):
        raise ValueError(
            f"it reads the hidden states {states}, and the model has three of 0 to {target.layers}"
        )
    output, embedding = weights.get("lm_head.weight"), "embed_tokens.weight" in weights
    if own.hidden_size != target.hidden and (output is None or not embedding):
        raise ValueError("it is of another width than the model and has no embedding of its own")
    return Eagle3Shape(
        own,
        tuple(states),
        width,
        0 if output is None else len(output),
        embedding,
        before_residual,
        before_fc,
    )


def described(
    config: Mapping[str, Any],
) -> tuple[Mapping[str, Any], tuple[int, ...], bool, bool]:
    """The layer's config, the hidden states to read (none: the usual ones), and whether they are
    normalised before the residual and before they are joined."""
    if config.get("speculators_model_type") == SPECULATORS:
        if "norm_before_residual" not in config:
            # The library's own default and those of the programs that run such heads disagree.
            raise ValueError("its config has no norm_before_residual")
        states = config.get("eagle_aux_hidden_state_layer_ids") or ()
        layer = config["transformer_layer_config"]
    else:
        names = config.get("architectures") or ["none"]
        if names[0] not in FLAT:
            raise ValueError(
                f"its architecture is {names[0]}, and {', '.join(FLAT)} and those of the "
                "speculators library are supported"
            )
        own = config.get("eagle_config") or {}
        if not own.get("use_aux_hidden_state", True):
            raise ValueError("it reads one hidden state, and three are supported")
        states = [each + 1 for each in own.get("eagle_aux_hidden_state_layer_ids") or ()]
        layer = config
    before = (bool(config.get(name)) for name in ("norm_before_residual", "norm_before_fc"))
    return layer, tuple(states), *before


def known_tokens(
    offsets: torch.Tensor | None, shape: Eagle3Shape, target: Target
) -> tuple[NDArray[np.int64], torch.Tensor]:
    """The target's tokens that a head knows, in rising order, and the rows of its output matrix in
    that order. Raises ValueError."""
    if offsets is None or len(offsets) != shape.output:
        mapping = "no d2t" if offsets is None else f"a d2t of {len(offsets):,}"
        raise ValueError(f"it knows {shape.output:,} tokens and has {mapping} to say which")
    tokens, order = (torch.arange(shape.output) + offsets.long()).sort()
    if int(tokens[0]) < 0 or int(tokens[-1]) >= target.vocabulary:
        raise ValueError("its d2t names tokens that the model does not have")
    if bool((tokens.diff() == 0).any()):
        raise ValueError("its d2t names a token twice")
    return tokens.numpy(), order


def fit(head: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Put weights into an empty head. Raises ValueError if they do not belong to it."""
    expected = {name: tuple(each.shape) for name, each in head.state_dict().items()}
    found = {name: tuple(each.shape) for name, each in weights.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"its tensor {name} has the shape {found.get(name, 'of none')}, expected "
                f"{expected.get(name, 'was none')}"
            )
    head.load_state_dict(weights, assign=True)
