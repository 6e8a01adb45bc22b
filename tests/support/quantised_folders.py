"""Folders whose matrices have few bits, as GPTQ, AWQ and compressed-tensors write them.

Written after the published layouts, number by number, and without the code that reads them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.backends import save_model

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 32, "num_attention_heads": 8}
"""The sizes of a model in which groups of 128 are several."""


@dataclass(frozen=True)
class Way:
    """How a folder is quantised: a format, the bits of a number, the inputs of a group (-1: all),
    and what else is special."""

    format: str = "gptq"
    bits: int = 4
    group: int = 64
    symmetric: bool = True
    order: bool = False
    """Whether the groups of inputs are mixed, as GPTQ's desc_act mixes them."""
    scales: torch.dtype = torch.float16
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further values of the quantization_config."""


@dataclass(frozen=True)
class Rounded:
    """Numbers from 0 on, shape (outputs, inputs); scales and zeros, shape (outputs, groups), and
    the group of each input."""

    numbers: Any
    scales: torch.Tensor
    zeros: Any
    groups: Any

    @property
    def weight(self) -> torch.Tensor:
        apart = torch.from_numpy(self.numbers - self.zeros[:, self.groups])
        return apart * self.scales.float()[:, self.groups]


def rounded(weight: torch.Tensor, way: Way, seed: int) -> Rounded:
    outputs, inputs = weight.shape
    size, most = inputs if way.group < 0 else way.group, (1 << way.bits) - 1
    groups = np.arange(inputs) // size
    if way.order:
        groups = np.random.default_rng(seed).permutation(groups)
    zeros = np.full((outputs, inputs // size), (most + 1) // 2)
    if not way.symmetric:
        zeros = np.random.default_rng(seed).integers(1, most + 1, zeros.shape)
    values = weight.double().numpy()
    peaks = np.stack([np.abs(values[:, groups == each]).max(1) for each in range(max(groups) + 1)])
    scales = torch.from_numpy(peaks.T / (most / 2)).to(way.scales)
    steps = values / scales.double().numpy()[:, groups]
    numbers = np.clip(np.round(steps) + zeros[:, groups], 0, most).astype(np.int64)
    return Rounded(numbers, scales, zeros, groups)


def words(numbers: Any, bits: int) -> torch.Tensor:
    """Numbers packed along the last axis, the first one in the lowest bits."""
    count = 32 // bits
    lacking = -numbers.shape[-1] % count
    whole = np.pad(numbers, ((0, 0), (0, lacking))).reshape(len(numbers), -1, count)
    places = bits * np.arange(count)
    packed = ((whole % (1 << bits)) << places).sum(-1)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def gptq(found: Rounded, way: Way) -> dict[str, torch.Tensor]:
    less = 0 if way.more.get("checkpoint_format") == "gptq_v2" else 1
    return {
        "qweight": words(found.numbers, way.bits).T,
        "qzeros": words(found.zeros.T - less, way.bits),
        "scales": found.scales.T,
        "g_idx": torch.from_numpy(found.groups.astype(np.int32)),
    }


def awq(found: Rounded, way: Way) -> dict[str, torch.Tensor]:
    def mixed(numbers: Any) -> Any:
        return numbers.reshape(len(numbers), -1, 8)[..., AWQ_ORDER].reshape(len(numbers), -1)

    return {
        "qweight": words(mixed(found.numbers.T), 4),
        "qzeros": words(mixed(found.zeros.T), 4),
        "scales": found.scales.T,
    }


def pack_quantized(found: Rounded, way: Way) -> dict[str, torch.Tensor]:
    tensors = {
        "weight_packed": words(found.numbers, way.bits),
        "weight_scale": found.scales,
        "weight_shape": torch.tensor(found.numbers.shape),
    }
    if not way.symmetric:
        tensors["weight_zero_point"] = words(found.zeros.T, way.bits).T
    if way.order:
        tensors["weight_g_idx"] = torch.from_numpy(found.groups.astype(np.int32))
    return tensors


def int_quantized(found: Rounded, way: Way) -> dict[str, torch.Tensor]:
    tensors = {
        "weight": torch.from_numpy((found.numbers - 128).astype(np.int8)),
        "weight_scale": found.scales,
    }
    if not way.symmetric:
        tensors["weight_zero_point"] = torch.from_numpy((found.zeros - 128).astype(np.int8))
    return tensors


WRITERS: Mapping[str, Callable[[Rounded, Way], dict[str, torch.Tensor]]] = {
    "gptq": gptq,
    "awq": awq,
    "pack-quantized": pack_quantized,
    "int-quantized": int_quantized,
}


def described(way: Way) -> dict[str, Any]:
    if way.format == "gptq":
        return {
            "quant_method": "gptq", "bits": way.bits, "group_size": way.group,
            "sym": way.symmetric, "desc_act": way.order, **way.more,
        }  # fmt: skip
    if way.format == "awq":
        return {
            "quant_method": "awq", "bits": way.bits, "group_size": way.group, "version": "gemm",
            "zero_point": True, **way.more,
        }  # fmt: skip
    weights = {
        "num_bits": way.bits, "type": "int", "symmetric": way.symmetric,
        "strategy": "channel" if way.group < 0 else "group", "group_size": way.group,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": way.format, "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, **way.more,
    }  # fmt: skip


def quantised(
    kind: str, folder: Path, way: Way, endings: tuple[str, ...] = ("_proj.weight",), **changes: Any
) -> tuple[Path, Path]:
    """A random model whose matrices with these endings of their names are quantised, and the same
    in float32, as two folders."""
    exact = save_model(kind, folder / "exact", **changes)
    few = save_model(kind, folder / "few", **changes)
    whole = load_file(exact / "model.safetensors")
    stored = dict(whole)
    for seed, name in enumerate(sorted(whole)):
        if name.endswith(endings):
            found = rounded(stored.pop(name), way, seed)
            whole[name] = found.weight
            place = name.removesuffix("weight")
            made = WRITERS[way.format](found, way)
            stored |= {place + part: each.contiguous() for part, each in made.items()}
    save_file(whole, exact / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, few / "model.safetensors", metadata={"format": "pt"})
    configure(few, quantization_config=described(way))
    return few, exact


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors in the weight file of a folder."""
    stored = load_file(folder / "model.safetensors")
    change(stored)
    tensors = {name: each.contiguous() for name, each in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
