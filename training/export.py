"""From trained weights to the files that the project ships: a folder for transformers and a GGUF.

Weights are stored in float16. The recommended sampler goes into generation_config.json, and from
there into the header of the GGUF file.
"""

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from bench import to_gguf
from engine.errors import ModelError
from training.prepare import copy_tokenizer
from training.train import loaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `training export`."""
    add = parser.add_argument
    add("weights", type=Path, help="a folder that `training train` wrote")
    add("output", type=Path, help="the folder to write; the GGUF file goes beside it")
    add("--type", default=to_gguf.FLOAT16, help="of the GGUF weights: F16, Q8_0, ...")
    add("--temperature", type=float, default=0.8, help="recommended to whoever uses it")
    add("--min-p", type=float, default=0.05)
    add("--threads", type=int, default=2)


def run(options: argparse.Namespace) -> None:
    """Write the folder and the GGUF file; say how large they are."""
    folder, file = options.output, options.output.with_suffix(".gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Whatever goes wrong, the files that were there before are still there.
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        written = Path(place) / folder.name
        store(options, written)
        to_gguf.convert(written, written.with_suffix(".gguf"), options.type, options.threads)
        shutil.rmtree(folder, ignore_errors=True)
        written.replace(folder)
        written.with_suffix(".gguf").replace(file)
    for path in (folder / "model.safetensors", file):
        print(f"{path}: {path.stat().st_size:,} bytes")


def store(options: argparse.Namespace, folder: Path) -> None:
    """Write weights, tokenizer and recommended sampler. Raises ModelError."""
    model = loaded(options.weights)
    largest = max(float(values.detach().abs().max()) for values in model.parameters())
    if not largest <= torch.finfo(torch.float16).max:
        raise ModelError(
            f"The largest weight in {str(options.weights)!r} is {largest:g}, which float16 cannot "
            "hold. The training went wrong; begin again with a lower --rate."
        )
    config: dict[str, Any] = {
        name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id")
    }
    config |= {"pad_token_id": model.config.pad_token_id, "do_sample": True}
    config |= {"temperature": options.temperature, "min_p": options.min_p}
    model.generation_config = GenerationConfig.from_dict(config)
    model.half().save_pretrained(folder)
    copy_tokenizer(options.weights, folder)
