"""What the measurements share beside their prompts: options, the model, and the report's last line.

A report says under which conditions it was measured, and ends in one JSON line, so that
`tail -n 1` has everything that the tables say.
"""

import argparse
import json
import platform
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.backends.load import load_transformers
from engine.backends.transformers import TransformersBackend
from engine.errors import SettingError
from engine.methods import Databases, Method
from engine.settings import Generation, Sampling
from engine.types import STATISTICS
from storage.statistics import StatisticsTable, find_table

ASSETS = Path(__file__).resolve().parent.parent / "assets"
EMBEDDED = ASSETS / "models" / "tiny-chat" / "target"
REPORTED = (
    *("skip", "limit", "max_new_tokens", "temperature", "min_p", "seed", "repeats"),
    *("policy", "nodes", "budget", "harvest"),
)
"""The options that a report repeats, those of them that its command has."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model and where it runs."""
    add = parser.add_argument
    add("--model", default="embedded", help="'embedded', a folder or a hub id")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--threads", type=int, default=0, help="threads of torch, 0 leaves them as they are")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how tokens are drawn."""
    add = parser.add_argument
    add("--temperature", type=float, default=0.0)
    add("--min-p", type=float, default=0.0)
    add("--seed", type=int, default=0)


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what every method of a run is given: its repeats and its statistics."""
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--statistics", type=Path, help="a statistics file (default: the shipped)")


def add_save_argument(parser: argparse.ArgumentParser) -> None:
    """Declare where the JSON line is kept."""
    add = parser.add_argument
    add("--save", type=Path, metavar="FILE", help="write the JSON line to a file as well")


def check_counts(options: argparse.Namespace) -> None:
    """Raise SettingError for numbers of repeats, prompts or threads that cannot be."""
    if options.repeats < 1 or min(options.limit, options.skip, options.threads) < 0:
        raise SettingError("Give at least one repeat, and no negative limit, skip or threads.")


def check_save(file: Path | None) -> None:
    """Raise SettingError where nothing can be saved: better now than after an hour of measuring."""
    if file is None:
        return
    try:
        file.touch()
    except OSError as error:
        raise SettingError(
            f"The file {str(file)!r} cannot be written ({error.strerror}). Choose another place."
        ) from error


def load_model(name: str, options: argparse.Namespace) -> TransformersBackend:
    """The model called `name` ('embedded', a folder or a hub id), where the options say it runs."""
    if options.threads:
        torch.set_num_threads(options.threads)
    source = str(EMBEDDED) if name == "embedded" else name
    return load_transformers(source, options.device, options.dtype)


def open_databases(
    backend: TransformersBackend,
    methods: Mapping[str, object],
    file: Path | None,
    stack: ExitStack,
) -> dict[str, Databases]:
    """Empty databases per method, with the statistics where it asks them; `stack` closes those."""
    databases = {name: Databases() for name in methods}
    tokenizer = backend.info.tokenizer_fingerprint
    for name, method in methods.items():
        if isinstance(method, Method) and (
            STATISTICS in method.drafting.tiers or has_drafts(method)
        ):
            table = StatisticsTable(file) if file else find_table(tokenizer, ASSETS / "statistics")
            if table is not None:
                stack.callback(table.close)
            databases[name] = Databases(statistics=table)
    return databases


def has_drafts(method: object) -> bool:
    """Whether a method is one of ours that has draft models."""
    return isinstance(method, Method) and method.stack is not None


def generation_of(options: argparse.Namespace) -> Generation:
    """How every answer of a run is drawn. Raises SettingError for settings out of range."""
    sampling = Sampling(temperature=options.temperature, min_p=options.min_p, seed=options.seed)
    return Generation(sampling, max_tokens=options.max_new_tokens)


def conditions(backend: TransformersBackend, options: argparse.Namespace) -> dict[str, Any]:
    """What was measured, where and when. Paths are left out, file names stay."""
    info = backend.info
    on_cuda = backend.model.device.type == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": info.name,
        "parameters": info.parameters,
        "dtype": info.dtype,
        "device": info.device,
        "machine": torch.cuda.get_device_name() if on_cuda else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "prompt_file": Path(options.prompts).name,
        **{name: getattr(options, name) for name in REPORTED if hasattr(options, name)},
    }


def print_record(record: dict[str, Any], save: Path | None = None) -> None:
    """End a report: the JSON line last, and in a file as well where one is named."""
    line = json.dumps(record)
    print(f"\n{line}")
    if save:
        save.write_text(f"{line}\n", encoding="utf-8")
