"""Prediction layers (MTP): each goes on from what its model thought of a text, by one token more.

The state behind the model's last norm and the embedding of the token that followed go in, each
normalised, and are projected to one. A layer of the model's own kind computes with that, its output
is normalised, and the model's output matrix makes the law of the token after next of it. Behind it
stands the next layer, or the same one again where there is one alone.

The layers are those of a small model of the target's own class, so rotary positions, gates and
experts are the library's, and so is how their weights are stored. What they attend to is given to
them as a cache that lasts for a call.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

Tensors = Mapping[str, torch.Tensor]
Write = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Keeps the keys and values of some rows, shape (1, heads, rows, size); returns all there are."""
EXPERTS = re.compile(r"^mlp\.(?:experts|gate)\.")
"""In the names of a layer's tensors, where it has experts."""
FULL = "full_attention"


class Written(Cache):
    """What a layer takes for its cache: keys and values go where `write` keeps them."""

    def __init__(self, write: Write) -> None:
        super().__init__(layers=[])
        self.write = write

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.write(key_states, value_states)


class Joint(nn.Module):
    """What stands around a layer. `parts` are its tensors by their name here."""

    def __init__(self, parts: Tensors, norm: nn.Module) -> None:
        super().__init__()
        outer, inner = parts["fc"].shape
        self.fc = nn.Linear(inner, outer, bias=False)
        self.embedding, self.hidden, self.norm = (deepcopy(norm) for _ in range(3))
        self.load_state_dict({f"{part}.weight": each for part, each in parts.items()})


class Mtp(nn.Module):
    """Prediction layers beside their target. `decoder` holds them, and the rotary embedding;
    `joints` has one for each of them, or one alone that all share."""

    def __init__(self, decoder: Any, joints: Sequence[Joint]) -> None:
        super().__init__()
        self.rotary, self.layers = decoder.rotary_emb, decoder.layers
        self.joints = nn.ModuleList(joints)

    def join(self, states: torch.Tensor) -> torch.Tensor:
        """The target's state goes in as it is."""
        return states

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """What leaves a layer was normalised."""
        return hidden

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        write: Write,
        level: int = 0,
    ) -> torch.Tensor:
        """One step of a layer: of tokens and of the hidden states before them to the next ones, all
        of shape (1, rows, width). `mask` is added to the scores, shape (1, 1, rows, columns)."""
        joint: Any = self.joints[min(level, len(self.joints) - 1)]
        both = torch.cat((joint.embedding(embedded), joint.hidden(hidden)), dim=-1)
        joined = joint.fc(both)
        out = self.layers[level](
            joined,
            position_embeddings=self.rotary(joined, positions),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=Written(write),
        )
        normed: torch.Tensor = joint.norm(out if isinstance(out, torch.Tensor) else out[0])
        return normed


def build(target: Any, joints: Sequence[Tensors], layers: Sequence[Tensors]) -> Mtp:
    """The module of some weights, on the target's device and in its dtype.

    Raises ValueError for weights that do not fit; what the library raises may be anything.
    """
    kind, hidden = type(target.get_decoder()), target.config.get_text_config().hidden_size
    config = config_of(target, len(layers), any(EXPERTS.match(name) for name in layers[0]))
    norm = torch.ones(hidden)
    weights = {"embed_tokens.weight": torch.zeros(1, hidden), "norm.weight": norm} | {
        f"layers.{number}.{name}": each
        for number, layer in enumerate(layers)
        for name, each in layer.items()
    }
    decoder, report = kind.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=target.dtype,
        attn_implementation=target.config._attn_implementation,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    check(report, {name: tuple(each.shape) for name, each in weights.items()})
    shapes = {"fc": (hidden, 2 * hidden), "embedding": (hidden,), "hidden": (hidden,)}
    for parts in joints:
        for part, shape in (shapes | {"norm": (hidden,)}).items():
            if parts[part].shape != shape:
                raise ValueError(
                    f"its tensor {part} has the shape {tuple(parts[part].shape)}, expected {shape}"
                )
    module = Mtp(decoder, [Joint(parts, decoder.norm) for parts in joints])
    return module.to(target.device, target.dtype).eval().requires_grad_(False)


def check(report: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError where loading left something out, by the library's report."""
    for name, found, wanted in sorted(report["mismatched_keys"]):
        raise ValueError(f"its tensor {name} has the shape {tuple(found)}, expected {wanted}")
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"its tensor {missing[0]} is missing")
    if unknown := sorted(report["unexpected_keys"]):
        shape = shapes.get(unknown[0], "unknown")
        raise ValueError(f"its tensor {unknown[0]}, of the shape {shape}, is none of the layer's")


def config_of(target: Any, count: int, experts: bool) -> Any:
    """The target's config for so many layers of attention, all with experts or none."""
    config = deepcopy(target.config.get_text_config())
    own = getattr(config, "mtp_layer_types", None) or [FULL] * count
    if set(own) != {FULL}:
        raise ValueError(f"its layers are of the kinds {own}, and {FULL} is supported")
    config.num_hidden_layers = count
    kind = "sparse" if experts else "dense"
    for name, value in {
        "layer_types": [FULL] * count,
        "mlp_layer_types": [kind] * count,
        "first_k_dense_replace": 0 if experts else count,
        "mlp_only_layers": [] if experts else list(range(count)),
        "decoder_sparse_step": 1,
    }.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    config.vocab_size, config.pad_token_id = 1, None  # its embedding is not used
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the target; what is quantised here is refused
    return config
