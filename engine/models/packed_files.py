"""Models and heads in GGUF files, as torch reads them: their descriptions, and their weights."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers import AutoConfig

from engine.models.gguf_files import IN_CORE, Tensor, header, parts_of

MIXTURES = {"llama": "mixtral", "qwen3moe": "qwen3_moe"}
"""The library's names of architectures that have experts."""
UNKNOWN = (
    "expert_shared_count", "expert_gating_func", "expert_group_count", "expert_weights_scale",
    "attention.sliding_window", "attention.scale", "attention.clamp_kqv",
)  # fmt: skip
"""Values of a header that change what a layer computes, and that are not known here."""


class Foreign(Exception):
    """A file that the core cannot compute; the text is the reason."""


class File:
    """A model in a GGUF file, or in several."""

    def __init__(self, path: Path) -> None:
        headers = [header(part) for part in parts_of(path)]
        self.path, self.values = path, headers[0].values
        self.tensors = [flat(tensor) for each in headers for tensor in each.tensors]
        self.family = str(self.values.get("general.architecture"))

    def own(self, name: str, other: Any = None) -> Any:
        """A value of the family. Raises Foreign for a list, which has one for each layer."""
        found = self.values.get(f"{self.family}.{name}", other)
        if found is None:
            raise Foreign(f"its {self.family}.{name} is missing, or differs between layers")
        return found

    def attention(self, unknown: Sequence[str]) -> tuple[int, int, int]:
        """The width of a layer, its heads and their size. Raises Foreign if it has any of the
        `unknown` values, or attends in another way than is known."""
        if strange := next((name for name in unknown if self.own(name, 0)), ""):
            raise Foreign(f"it has {self.family}.{strange}, which is not known")
        if (scaling := self.own("rope.scaling.type", "none")) != "none":
            raise Foreign(f"its positions are scaled ({scaling}), which is not known")
        width, heads = self.own("embedding_length"), self.own("attention.head_count")
        size = self.own("attention.key_length", width // heads)
        turned = self.own("rope.dimension_count", size)
        if self.own("attention.value_length", size) != size or turned != size:
            raise Foreign("its heads turn in part, or have keys and values of different sizes")
        return width, heads, size

    def config(self, length: int) -> Any:
        """The library's description of the model, for contexts of so many tokens. Raises
        Foreign."""
        if self.family not in IN_CORE:
            raise Foreign(f"it is a {self.family} model, and only {', '.join(IN_CORE)} are known")
        width, heads, size = self.attention(UNKNOWN)
        names = {tensor.name for tensor in self.tensors}
        experts, inner = self.own("expert_count", 0), self.own("feed_forward_length")
        kind = MIXTURES.get(self.family) if experts else self.family
        if kind is None:
            raise Foreign(f"{self.family} models with experts are not known")
        return AutoConfig.for_model(
            kind,
            hidden_size=width,
            intermediate_size=inner,
            num_experts=experts,
            num_local_experts=experts,
            num_experts_per_tok=self.own("expert_used_count", 0),
            moe_intermediate_size=self.own("expert_feed_forward_length", inner),
            norm_topk_prob=True,
            num_hidden_layers=self.own("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=self.own("attention.head_count_kv", heads),
            head_dim=size,
            rms_norm_eps=self.own("attention.layer_norm_rms_epsilon"),
            rope_parameters={"rope_type": "default", "rope_theta": self.own("rope.freq_base", 1e4)},
            max_position_embeddings=min(length, self.own("context_length", length)),
            vocab_size=self.tensor("token_embd.weight").shape[0],
            tie_word_embeddings="output.weight" not in names,
            attention_bias="blk.0.attn_output.bias" in names,
            mlp_bias="blk.0.ffn_down.bias" in names,
        )

    def tensor(self, name: str) -> Tensor:
        found = next((each for each in self.tensors if each.name == name), None)
        if found is None:
            raise Foreign(f"it has no tensor {name}")
        return found


def flat(tensor: Tensor) -> Tensor:
    *above, columns = tensor.shape
    return replace(tensor, shape=(math.prod(above), columns)) if above else tensor


def rows_in(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a tensor, row by row, which stay in the file until they are read."""
    shape = gguf.quant_shape_to_byte_shape(tensor.shape, Kind(tensor.kind))
    return np.memmap(tensor.path, np.uint8, "r", tensor.offset, shape)


def weights_of(tensor: Tensor, rows: NDArray[np.uint8] | None = None) -> torch.Tensor:
    """What rows of a tensor stand for, or all of them."""
    found = np.array(rows_in(tensor) if rows is None else rows)
    return torch.from_numpy(gguf.dequantize(found, Kind(tensor.kind)).astype(np.float32))


def rows_of(count: int, heads: int) -> NDArray[np.int64]:
    """Where the library's rows are in the file."""
    rows = np.arange(count)
    return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1) if heads else rows
