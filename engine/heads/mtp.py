"""Prediction layers (MTP): each predicts one token further, from its model's hidden states.

The input is the state after the model's last norm, and the embedding of the token that followed.
Both are normalised and projected to one vector. A layer of the model's own kind processes it, its
output is normalised, and the model's output matrix turns it into the distribution of the token
after next. The next layer follows, or the same one again if there is only one.

The layers belong to a small model of the target's own class, so rotary positions, gates, experts
and the storage of their weights are the library's. The keys and values that they attend to are
passed as a cache that lasts for one call.

A single layer guesses all depths, each from its own last state (`MtpHead`). With several layers,
layer k guesses at depth k (`DeepMtpHead`). Row r of layer k takes the state that layer k - 1 left
at row r, with token r + k + 1 of the text; layer 0 takes the state of the model. The last rows of a
deeper layer thus depend on guessed tokens: these are recomputed for each path, and the rows before
them once.

Invariant of the deep one: the first `done` rows of layer k have keys and values, and the next layer
has the states that they left. They depend only on decided tokens.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import Cache

from engine.backends.caches import cache_argument
from engine.heads.base import LogitGuess
from engine.heads.eagle3_head import Block, DirectNetwork, Eagle3Head, Eagle3Weights, rows_of
from engine.settings import Sampling

Tensors = Mapping[str, torch.Tensor]
Write = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Stores the keys and values of some rows, shape (1, heads, rows, size); returns those of all
rows."""
EXPERTS = re.compile(r"^mlp\.(?:experts|gate)\.")
"""Matches the names of a layer's tensors that belong to experts."""
FULL = "full_attention"


class Written(Cache):
    """The cache of a layer for one call, whose keys and values `write` stores."""

    def __init__(self, write: Write) -> None:
        super().__init__(layers=[])
        self.write = write

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.write(key_states, value_states)


class Joint(nn.Module):
    """The modules around a layer. `parts` are their tensors by the names here."""

    def __init__(self, parts: Tensors, norm: nn.Module) -> None:
        super().__init__()
        outer, inner = parts["fc"].shape
        self.fc = nn.Linear(inner, outer, bias=False)
        self.embedding, self.hidden, self.norm = (deepcopy(norm) for _ in range(3))
        self.load_state_dict({f"{part}.weight": each for part, each in parts.items()})


class Mtp(DirectNetwork):
    """Prediction layers. `decoder` holds them and the rotary embedding; `joints` has one entry for
    each layer, or a single one that all layers share."""

    def __init__(self, decoder: Any, joints: Sequence[Joint]) -> None:
        super().__init__()
        self.rotary, self.layers = decoder.rotary_emb, decoder.layers
        self.joints = nn.ModuleList(joints)

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        write: Write,
        level: int,
    ) -> torch.Tensor:
        """One step of a layer: from tokens and the hidden states before them to the next hidden
        states, all of shape (1, rows, width). `mask` is added to the scores, shape (1, 1, rows,
        columns)."""
        joint: Any = self.joints[min(level, len(self.joints) - 1)]
        both = torch.cat((joint.embedding(embedded), joint.hidden(hidden)), dim=-1)
        joined = joint.fc(both)
        layer = self.layers[level]
        out = layer(
            joined,
            position_embeddings=self.rotary(joined, positions),
            attention_mask=mask,
            position_ids=positions,
            **{cache_argument(layer.forward): Written(write)},
        )
        normed: torch.Tensor = joint.norm(out if isinstance(out, torch.Tensor) else out[0])
        return normed


def build(target: Any, joints: Sequence[Tensors], layers: Sequence[Tensors]) -> Mtp:
    """The module of some weights, on the target's device and in its dtype. Raises ValueError for
    weights that do not fit, and any exception of the library."""
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
    """Raise ValueError if the library's report shows that loading left something out."""
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise ValueError(f"its tensor {name} has the shape {tuple(found)}, expected {expected}")
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"its tensor {missing[0]} is missing")
    if unknown := sorted(report["unexpected_keys"]):
        shape = shapes.get(unknown[0], "unknown")
        raise ValueError(f"its tensor {unknown[0]}, of the shape {shape}, is none of the layer's")


def config_of(target: Any, count: int, experts: bool) -> Any:
    """The target's config for `count` layers of attention, all with experts or all without."""
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
        del config.quantization_config  # that of the target; quantised layers are refused
    return config


class MtpHead(Eagle3Head):
    """Like an EAGLE-3 head, except that its layers take a mask and a cache."""

    def step(self, block: Block, number: int = 0) -> torch.Tensor:
        start, tokens, before, rows, sees = block
        level = self.levels[number]

        def write(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return level.keys.write(start, keys), level.values.write(start, values)

        head, device, dtype = self.weights.head, before.device, before.dtype
        mask = torch.zeros((1, 1, *sees.shape), dtype=dtype)
        mask.masked_fill_(torch.from_numpy(~sees), torch.finfo(dtype).min)
        ids, positions = torch.tensor([tokens, rows], device=device)
        embedded = rows_of(ids, self.weights.embedding).to(dtype)
        out: torch.Tensor = head(
            embedded[None], before[None], positions[None], mask.to(device), write, number
        )[0]
        return out


class DeepMtpHead(MtpHead):
    """A head of several layers: layer k guesses at depth k. For each node of the last level,
    `paths` holds the guessed tokens before it, and `left` the states of the rows that depend on
    them."""

    def __init__(self, weights: Eagle3Weights) -> None:
        self.depths = weights.info.depth
        super().__init__(weights)

    def reset(self) -> None:
        super().reset()
        self.paths: list[list[int]] = []
        self.left: list[torch.Tensor] = []

    def step(self, block: Block, number: int = 0) -> torch.Tensor:
        out = super().step(block, number)
        if number + 1 < self.depths:
            self.levels[number + 1].states.write(block.start, out)
        return out

    @torch.inference_mode()
    def start(
        self, tokens: Sequence[int], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> LogitGuess | None:
        guess = super().start(tokens, sampling, cancelled)
        if guess is None:
            return None
        for number in range(1, self.depths):
            end = len(self.rows) - self.hanging(number)
            self.catch_up(number, end, tokens, cancelled)
            if self.levels[number].done < end:
                return None
        self.paths, self.left = [[]], [self.root[:0]]
        return guess

    def hanging(self, number: int) -> int:
        """How many rows of a layer depend on guesses."""
        last = self.rows[-1]
        return sum(1 for _ in takewhile(lambda row: row > last - number, reversed(self.rows)))

    @torch.inference_mode()
    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[LogitGuess]:
        number = len(self.paths[0]) + 1
        states, count = self.levels[number].states.values, self.hanging(number)
        first = len(self.rows) - count
        rows = self.rows[first:]
        paths = [[*self.paths[at], token] for at, token in zip(parents, tokens, strict=True)]
        known = count - len(self.left[0])
        assert states is not None
        decided = states[first : first + known]
        before = torch.cat([part for at in parents for part in (decided, self.left[at])])
        # The token after row r of this layer is guess number r - last + number.
        following = [path[row - rows[-1] - 1] for path in paths for row in rows]
        sees = np.zeros((len(paths) * count, first + len(paths) * count), dtype=bool)
        sees[:, :first] = True
        sees[:, first:] = np.kron(np.eye(len(paths)), np.tri(count)) > 0
        out = super().step(Block(first, following, before, rows * len(paths), sees), number)
        self.paths, self.left = paths, [*torch.split(out, count)]
        return self.guesses(torch.stack([each[-1] for each in self.left]))
