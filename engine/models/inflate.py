"""A large model with the output of a small one, so that forwards have the cost of a real large
model.

    python -m engine.models.inflate SOURCE SIZE OUTPUT

The speedup of drafting depends on the cost of forwards, and so on the size of a model. Here a
Llama-like model is written into a larger one of the same function: wider (zeros in the residual
stream), with more heads, MLP rows and layers whose outputs are never used.

The invariant: weights that write into the residual stream (embedding, o_proj, down_proj) are zero
except for the original's entries, so the added part of the stream stays exactly zero and no idle
part affects it. Every other idle weight is random, so that no kernel can skip work.
RMSNorm divides by a width that is 4^k times larger: with an rms smaller by exactly 2^k, weights
scaled by 2^-k and eps by 4^-k undo it without a rounding error. Only the order in which a kernel
adds may differ, and with it the last bits, as between two machines.

An EAGLE-3 head beside the model is inflated in the same way, so that its guesses cost what those of
a head of the larger model do.

As a program it writes the model in bfloat16. Each line that it prints is the share that is done. If
it fails, it ends with status 1 and a last line that gives the reason.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from engine.errors import ModelError, SettingError, StrataError
from engine.heads.eagle3 import Eagle3, Target, read_head, write_head
from engine.models.format import HEAD
from engine.models.shape import SHAPES, Config, Model, Shape, check_fits
from engine.models.torch_heads import weights_digest

AXES = {
    "embed_tokens": ("vocabulary", "hidden"),
    "q_proj": ("heads", "hidden"),
    "k_proj": ("kv_heads", "hidden"),
    "v_proj": ("kv_heads", "hidden"),
    "o_proj": ("hidden", "heads"),
    "gate_proj": ("intermediate", "hidden"),
    "up_proj": ("intermediate", "hidden"),
    "down_proj": ("hidden", "intermediate"),
    "input_layernorm": ("hidden",),
    "post_attention_layernorm": ("hidden",),
    "norm": ("hidden",),
    "lm_head": ("vocabulary", "hidden"),
}
"""The meaning of the rows and columns of each weight."""
HEAD_AXES = AXES | {
    "fc": ("hidden", "three"),
    "q_proj": ("heads", "two"),
    "k_proj": ("kv_heads", "two"),
    "v_proj": ("kv_heads", "two"),
    "hidden_norm": ("hidden",),
}
"""The same for an EAGLE-3 head, which reads two or three streams side by side."""
WRITERS = {"embed_tokens", "o_proj", "down_proj", "fc"}
"""The weights that write into the residual stream."""
KEPT = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "generation_config.json",
)  # fmt: skip
AHEAD = 5
"""The tokens that a head's config says it was trained to guess."""
SPREAD = 0.02
"""The standard deviation of idle weights."""
SHARD = 2_000_000_000
"""Bytes per weight file. One file at a time is held in memory, in addition to the original."""


def inflated_config(config: Config, shape: Shape) -> Config:
    """The config of the inflated model; eps shrinks with the mean square of the padded stream."""
    check_fits(config, shape)
    new = deepcopy(config)
    new.head_dim = head_size(config)
    new.hidden_size, new.intermediate_size = shape.hidden, shape.intermediate
    new.num_attention_heads, new.num_key_value_heads = shape.heads, shape.kv_heads
    new.num_hidden_layers = shape.layers
    new.rms_norm_eps = config.rms_norm_eps / (shape.hidden // config.hidden_size)
    return new


def head_size(config: Config) -> int:
    size: int = getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
    return size


def skeleton(config: Config, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every weight of a model of this config, without data; tied weights are listed once."""
    with torch.device("meta"):
        model: Model = LlamaForCausalLM(config)
    state = model.to(dtype).state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return dict(state)


def places(config: Config, shape: Shape) -> dict[str, torch.Tensor]:
    """The places of the original's entries, per kind of axis. All come first, except that an
    attention head is placed in the group of the kv head that it reads, because the groups of the
    new model may be larger."""
    old, size = Shape.of(config), head_size(config)
    group, wide = old.heads // old.kv_heads, shape.heads // shape.kv_heads
    head = torch.arange(old.heads)
    first = (head // group * wide + head % group) * size
    return {
        "vocabulary": torch.arange(config.vocab_size),
        "hidden": torch.arange(old.hidden),
        "intermediate": torch.arange(old.intermediate),
        "heads": (first[:, None] + torch.arange(size)).flatten(),
        "kv_heads": torch.arange(old.kv_heads * size),
    } | {
        name: (torch.arange(count)[:, None] * shape.hidden + torch.arange(old.hidden)).flatten()
        for name, count in (("two", 2), ("three", 3))
    }


def inflated_weights(
    model: Model, shape: Shape, names: Sequence[str], seed: int, device: str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """The named weights of the inflated model in the original's dtype, created one at a time on a
    device. The random part depends on the seed, the order of the names, and the device."""
    inflated = skeleton(inflated_config(model.config, shape))
    padding = Padding(model.config, shape, seed, model.dtype, device)
    source = model.state_dict()
    for name in names:
        yield name, padding.padded(name, inflated[name].shape, source.get(name), AXES)


class Padding:
    """Places the entries of weights in larger ones of `dtype`, whose others are idle."""

    def __init__(
        self, config: Config, shape: Shape, seed: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self.where, self.dtype, self.device = places(config, shape), dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.scale = (config.hidden_size / shape.hidden) ** 0.5

    def padded(
        self,
        name: str,
        shape: torch.Size,
        original: torch.Tensor | None,
        axes: Mapping[str, tuple[str, ...]],
    ) -> torch.Tensor:
        """The larger weight of a name; `original` is None if the model has none of this name."""
        kind = name.split(".")[-2]
        if kind in WRITERS:
            weight = torch.zeros(shape, dtype=self.dtype, device=self.device)
        else:
            noise = torch.empty(shape, device=self.device)
            noise.normal_(0, SPREAD, generator=self.generator)
            weight = (self.scale * (1 + noise) if noise.dim() == 1 else noise).to(self.dtype)
        if original is not None:
            rows, *columns = (self.where[axis] for axis in axes[kind])
            original = original.to(self.device, self.dtype)
            if columns:
                weight[rows[:, None], columns[0]] = original
            else:
                weight[rows] = original * self.scale
        return weight


def inflated_head(head: Eagle3, shape: Shape, seed: int) -> Eagle3:
    """A head of a model that was inflated to a shape, with the function of `head`. Raises
    SettingError if it does not fit."""
    config = inflated_config(head.shape.layer, replace(shape, layers=1))
    with torch.device("meta"):
        larger = Eagle3(replace(head.shape, layer=config, target_hidden=shape.hidden))
    padding = Padding(head.shape.layer, shape, seed, torch.float32)
    source, weights = head.state_dict(), {}
    for name, each in larger.state_dict().items():
        weights[name] = padding.padded(f"head.{name}", each.shape, source[name], HEAD_AXES)
    larger.load_state_dict(weights, assign=True)
    larger.rotary = type(head.rotary)(config)
    return larger


def write_head_of(model: Model, shape: Shape, source: Path, folder: Path, seed: int) -> None:
    """Inflate the head beside a model if it is an EAGLE-3 head that uses the model's embedding and
    output matrix, and so has its width. Others are left out."""
    config = model.config
    target = Target(config.hidden_size, config.num_hidden_layers, config.vocab_size)
    try:
        head, _ = read_head(source / HEAD, target)
    except ModelError:
        return
    if not (head.shape.output or head.shape.embedding or head.shape.norm_before_fc):
        larger = inflated_head(head.float(), shape, seed)
        write_head(larger, folder / HEAD, folder.name, weights_digest(str(folder)), AHEAD)


def inflate(model: Model, shape: Shape, seed: int = 0) -> tuple[Model, dict[str, torch.Tensor]]:
    """The config and the weights of a larger model with the function of `model`. Raises
    SettingError if the model does not fit into the shape."""
    config = inflated_config(model.config, shape)
    return config, dict(inflated_weights(model, shape, list(skeleton(config)), seed))


def write(
    model: Model,
    shape: Shape,
    source: Path,
    output: Path,
    seed: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the inflated model to the folder `output`, which appears only when it is complete.

    `report` is called with the number of finished parameters and that of the whole model. One shard
    is held at a time, and the config is written last, so even a killed run leaves no folder that
    loads. Raises SettingError if the disk is full or the folder cannot be written.
    """
    config = inflated_config(model.config, shape)
    config.dtype = model.dtype
    weights = skeleton(config, model.dtype)
    plan = split_torch_state_dict_into_shards(weights, max_shard_size=SHARD)
    names = [name for shard in plan.filename_to_tensors.values() for name in shard]
    stream = inflated_weights(model, shape, names, seed)
    size = sum(weight.numel() for weight in weights.values())
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        check_space(output.parent, size * model.dtype.itemsize)
        with TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
            folder = Path(scratch) / output.name
            folder.mkdir()
            done = 0
            for file, shard in plan.filename_to_tensors.items():
                tensors = {}
                for name, weight in (next(stream) for _ in shard):
                    tensors[name] = weight
                    done += weight.numel()
                    report(done, size)
                save_file(tensors, folder / file, metadata={"format": "pt"})
            if plan.is_sharded:
                index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
                (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
            for path in sorted(source.iterdir()):
                if any(fnmatch(path.name, pattern) for pattern in KEPT):
                    shutil.copyfile(path, folder / path.name)
            config.save_pretrained(folder)
            write_head_of(model, shape, source, folder, seed)
            if output.exists():
                output.rmdir()
            folder.rename(output)
    except (OSError, SafetensorError) as error:
        raise SettingError(f"The folder {str(output)!r} cannot be written ({error}).") from error


def check_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size + 100_000_000:
        raise SettingError(
            f"The model takes {size / 1e9:.2f} GB, and {str(folder)!r} has {free / 1e9:.2f} GB "
            "free. Choose a smaller size or another folder."
        )


def main(source: str, size: str, output: str) -> int:
    shown = -1

    def report(done: int, total: int) -> None:
        nonlocal shown
        if (share := 100 * done // total) > shown:
            shown = share
            print(share / 100, flush=True)

    try:
        model: Model = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        check_fits(model.config, SHAPES[size])
        write(model, SHAPES[size], Path(source), Path(output), 0, report)
    except (OSError, ValueError, StrataError) as error:
        print(" ".join(str(error).split()), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
