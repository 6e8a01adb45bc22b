"""A large model that says what a small one says, so that a forward costs what it would in earnest.

How fast drafting makes a model depends on what its forwards cost, and that is a matter of its size.
Here a Llama-like model is written into a larger one of the same function: wider (zeros in the
residual stream), with more heads, MLP rows and layers whose outputs nothing takes up.

The invariant: weights that write into the residual stream (embedding, o_proj, down_proj) are zero
except where the original's are, so the added part of the stream stays exactly zero and nothing idle
reaches it. Every other idle weight is random, so that no kernel finds less work than it seems.
RMSNorm divides by a width that is 4^k times larger: with an rms smaller by exactly 2^k, weights
scaled by 2^-k and eps by 4^-k undo it without a rounding error. What may differ is the order in
which a kernel adds up: the last bits, as between two machines.
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, astuple, fields
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import LlamaForCausalLM

from bench.equivalence import verify
from bench.options import (
    EMBEDDED,
    Record,
)
from bench.shape import SHAPES, Config, Model, Shape, check_fits
from engine.errors import ModelError, SettingError
from engine.models.load_transformers import DTYPES, load_transformers

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
"""What the rows and columns of a weight stand for."""
WRITERS = {"embed_tokens", "o_proj", "down_proj"}
"""The weights that write into the residual stream."""
KEPT = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "generation_config.json",
)  # fmt: skip
SPREAD = 0.02
"""The standard deviation of idle weights."""
GROUP = 64
"""Weights that share a scale when they are rounded."""
BITS = range(2, 9)
SHARD = 2_000_000_000
"""Bytes per weight file, which is also what is held in memory beside the original."""


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
    """The size of one head, which rotary positions depend on."""
    size: int = getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
    return size


def skeleton(config: Config, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every weight of a model of this config, without its data; tied ones once."""
    with torch.device("meta"):
        model: Model = LlamaForCausalLM(config)
    state = model.to(dtype).state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return dict(state)


def places(config: Config, shape: Shape) -> dict[str, torch.Tensor]:
    """Where the original's entries go, per kind of axis.

    All go to the front, except that an attention head goes to the kv head it reads: the groups of
    the new model may be larger.
    """
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
    }


def inflated_weights(
    model: Model, shape: Shape, names: Sequence[str], seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The named weights of the inflated model in the original's dtype, made one at a time.

    The random part depends on the seed and the order of the names.
    """
    source = model.state_dict()
    wanted = skeleton(inflated_config(model.config, shape))
    where = places(model.config, shape)
    generator = torch.Generator().manual_seed(seed)
    scale = (model.config.hidden_size / shape.hidden) ** 0.5
    for name in names:
        kind = name.split(".")[-2]
        if kind in WRITERS:
            weight = torch.zeros(wanted[name].shape, dtype=model.dtype)
        else:
            noise = torch.empty(wanted[name].shape).normal_(0, SPREAD, generator=generator)
            weight = (scale * (1 + noise) if noise.dim() == 1 else noise).to(model.dtype)
        if name in source:
            rows, *columns = (where[axis] for axis in AXES[kind])
            original = source[name].cpu()
            if columns:
                weight[rows[:, None], columns[0]] = original
            else:
                weight[rows] = original * scale
        yield name, weight


def inflate(model: Model, shape: Shape, seed: int = 0) -> tuple[Model, dict[str, torch.Tensor]]:
    """The config and the weights of a larger model with the function of `model`.

    Raises SettingError when the model does not fit into the shape.
    """
    config = inflated_config(model.config, shape)
    return config, dict(inflated_weights(model, shape, list(skeleton(config)), seed))


def rounded(model: Model, bits: int) -> None:
    """Round every matrix of a model to `bits` bits, in groups of GROUP with a common scale.

    What a quantised copy says, which is nearly the same: a draft model of high acceptance. Written
    into a shape of a fraction of the original's size, it stands for that copy, which reads as many
    bytes.
    """
    steps = 2 ** (bits - 1)
    for weight in model.parameters():
        if weight.dim() == 2:
            groups = weight.data.float().reshape(-1, GROUP)
            scale = groups.abs().amax(1, keepdim=True).clamp(min=1e-9) / (steps - 0.5)
            # An even number of levels around zero: the middle of each step.
            levels = (groups / scale - 0.5).round().clamp(-steps, steps - 1) + 0.5
            weight.data = (levels * scale).reshape(weight.shape).to(weight.dtype)


def write(model: Model, shape: Shape, source: Path, output: Path, seed: int) -> None:
    """Write the inflated model to the folder `output`, which appears only when it is complete.

    One shard is held at a time, and the config comes last: not even a killed run leaves a folder
    that loads. Raises SettingError when the disk is full or the folder cannot be written.
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
            with tqdm(total=size, unit="parameter", unit_scale=True, leave=False) as progress:
                for file, shard in plan.filename_to_tensors.items():
                    tensors = {}
                    for name, weight in (next(stream) for _ in shard):
                        tensors[name] = weight
                        progress.update(weight.numel())
                    save_file(tensors, folder / file, metadata={"format": "pt"})
            write_index(plan, folder)
            for path in sorted(source.iterdir()):
                if any(fnmatch(path.name, pattern) for pattern in KEPT):
                    shutil.copyfile(path, folder / path.name)
            config.save_pretrained(folder)
            if output.exists():
                output.rmdir()
            folder.rename(output)
    except (OSError, SafetensorError) as error:
        raise SettingError(f"The folder {str(output)!r} cannot be written ({error}).") from error


def write_index(plan: StateDictSplit, folder: Path) -> None:
    """Say which weight is in which file, when there are several."""
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def check_space(folder: Path, size: int) -> None:
    """Raise SettingError unless the disk of `folder` has room for `size` bytes and some more."""
    free = shutil.disk_usage(folder).free
    if free < size + 100_000_000:
        raise SettingError(
            f"The model takes {size / 1e9:.2f} GB, and {str(folder)!r} has {free / 1e9:.2f} GB "
            "free. Choose a smaller size or another folder."
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench inflate`."""
    numbers = ",".join(item.name.upper() for item in fields(Shape))
    shapes = parser.add_mutually_exclusive_group(required=True)
    shapes.add_argument("--size", help=f"{', '.join(SHAPES)} (for the embedded model)")
    shapes.add_argument("--shape", metavar=numbers, help="for a model of any size")
    parser.add_argument("--output", type=Path, required=True, help="a new or empty folder")
    parser.add_argument("--model", default="embedded", help="'embedded' or a folder")
    parser.add_argument("--bits", type=int, help="round the original's weights first: 2 to 8")
    parser.add_argument("--dtype", default="bfloat16", help=", ".join(DTYPES))
    parser.add_argument("--seed", type=int, default=0, help="of the idle weights")
    parser.add_argument("--device", default="auto", help="where the two models are compared")
    parser.add_argument("--no-verify", action="store_true", help="write only, do not compare")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="compare in float32 as well, which shows smaller mistakes and takes twice the memory",
    )
    parser.add_argument("--limit", type=int, default=0, help="prompts compared, 0 for every one")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens compared of each")


def wanted_shape(options: argparse.Namespace) -> Shape:
    """The shape that the options name or spell out. Raises SettingError for one that is none."""
    if options.shape is not None:
        return Shape.read(options.shape)
    if options.size not in SHAPES:
        raise SettingError(f"There is no size {options.size!r}. Choose from: {', '.join(SHAPES)}.")
    return SHAPES[options.size]


def check_options(options: argparse.Namespace) -> None:
    """Raise SettingError for what can be seen to be impossible before a model is loaded."""
    if options.dtype not in DTYPES:
        raise SettingError(
            f"The dtype {options.dtype!r} is unknown. Choose from: {', '.join(DTYPES)}."
        )
    if options.bits is not None and options.bits not in BITS:
        raise SettingError(f"Weights cannot be rounded to {options.bits} bits. Give 2 to 8.")
    if options.limit < 0 or options.max_new_tokens < 1:
        raise SettingError("Compare at least one token, and give no negative limit.")
    if options.model != "embedded" and not Path(options.model).is_dir():
        raise SettingError(
            f"The model {options.model!r} is not a folder. Only transformers models can be "
            "inflated: give the folder of one, or 'embedded'."
        )
    output = options.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise SettingError(
            f"The output {str(output)!r} exists and is not an empty folder. Give another."
        )


def run(options: argparse.Namespace) -> None:
    """Write the model, compare it with its original, and print."""
    shape = wanted_shape(options)
    check_options(options)
    output = options.output.absolute()
    source = EMBEDDED if options.model == "embedded" else Path(options.model)
    original = load_transformers(str(source), device=options.device, dtype=options.dtype)
    check_fits(original.model.config, shape)
    if options.bits is not None:
        rounded(original.model, options.bits)
    write(original.model, shape, source, output, options.seed)
    figures = {"model": output.name, "original": original.info.name, "dtype": options.dtype}
    figures["bits"] = options.bits
    figures |= sizes(original.model.config, shape, original.model.dtype)
    if not options.no_verify:
        inflated = load_transformers(str(output), device=options.device, dtype=options.dtype)
        figures |= verify(original, inflated, options)
    report(figures, Shape.of(original.model.config), shape)
    if not figures.get("verified", True):
        raise ModelError(
            f"The model in {str(output)!r} is not what {original.info.name!r} is: see above. Do "
            "not measure with it."
        )


def sizes(config: Config, shape: Shape, dtype: torch.dtype) -> Record:
    """The figures that follow from the shape; `zeros` is the part of the weights that are zero."""
    new = inflated_config(config, shape)
    weights, original = skeleton(new), skeleton(config)
    parameters = sum(weight.numel() for weight in weights.values())
    zeros = sum(
        weight.numel() - (original[name].numel() if name in original else 0)
        for name, weight in weights.items()
        if name.split(".")[-2] in WRITERS
    )
    return {
        "shape": asdict(shape),
        "parameters": parameters,
        "bytes": parameters * dtype.itemsize,
        "zeros": round(zeros / parameters, 3),
    }


def report(figures: Record, old: Shape, new: Shape) -> None:
    """Print the table and the JSON line."""
    print(
        f"{figures['model']}: {figures['parameters'] / 1e6:,.1f} M parameters "
        f"({figures['zeros']:.0%} of them zero), {figures['bytes'] / 1e9:.2f} GB, "
        f"{figures['dtype']}"
        + (f", rounded to {figures['bits']} bits\n" if figures["bits"] else "\n")
    )
    print(f"{'':20}" + "".join(f"{name.replace('_', ' '):>14}" for name in asdict(old)))
    for name, shape in ((figures["original"], old), (figures["model"], new)):
        print(f"{name:20}" + "".join(f"{size:14,}" for size in astuple(shape)))
    print()
    compared = [f for f in (figures, figures.get("exact")) if f and "verified" in f]
    for kind, found in zip((figures["dtype"], "float32"), compared, strict=False):
        first = found["first_divergence"]
        print(
            f"{kind}: {found['tokens']} tokens on {figures['prompts']} prompts, "
            + (f"{found['divergences']} differ" if first else "identical")
            + f", logits by at most {found['max_logit_difference']:.3g}"
        )
        if first:
            print(
                f"  the first on prompt {first['prompt']}, token {first['position']}, where the "
                f"original's gap is {first['gap']:.3g} (the largest: {found['largest_gap']:.3g})"
            )
    if compared:
        print("verified" if figures["verified"] else "WRONG: this is another model")
    else:
        print("not compared with the original")
    print()
    print(json.dumps(figures))
