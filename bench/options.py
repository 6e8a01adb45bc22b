"""What the measurements share beside their prompts: options, the model, and the report's last line.

A report says under which conditions it was measured, and ends in one JSON line, so that
`tail -n 1` has everything that the tables say.
"""

import argparse
import gc
import json
import platform
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from assets import ASSETS
from engine.backends.base import Backend
from engine.drafting.databases import Databases
from engine.errors import SettingError
from engine.methods import Method
from engine.models.formats import format_of
from engine.models.loaders import load
from engine.settings import CACHE_TYPES, FLASH_ATTENTION, Generation, Runtime, Sampling
from engine.types import STATISTICS
from storage.statistics import StatisticsTable, find_table

Record = dict[str, Any]
"""A report or a part of one, as JSON values by their names: what its last line holds."""
EMBEDDED = ASSETS / "models" / "tiny-chat" / "target"
SHORT = {"embedded": EMBEDDED, "embedded-gguf": EMBEDDED.with_suffix(".gguf")}
"""Models that come along, by their short names."""
TRANSFORMERS, LLAMA_CPP = "transformers", "llama.cpp"
PROMPTS = Path(__file__).with_name("prompts.jsonl")
RANDOM = "random"
"""In the place of a file of prompts: tokens drawn at random."""
LIBRARIES = {TRANSFORMERS: ("torch", "transformers"), LLAMA_CPP: ("llama-cpp-python",)}
"""What computes the forwards of each kind of model."""
WORDS = {
    "device": "of transformers models: auto, cpu, cuda, mps",
    "dtype": "of transformers models: auto, float32, bfloat16, float16",
    "flash_attention": f"of GGUF models: {', '.join(FLASH_ATTENTION)}",
    "cache_type": f"of GGUF models: {', '.join(CACHE_TYPES)}",
}
"""What the settings of a Runtime mean that do not say it themselves."""
REPORTED = (
    *("skip", "limit", "max_new_tokens", "temperature", "min_p", "seed", "repeats"),
    *("nodes", "budget", "hot"),
)
"""The options that a report repeats, those of them that its command has."""
REPORTED_OF = {LLAMA_CPP: ("gpu_layers", "batch_size", "flash_attention", "cache_type")}
"""The same of one kind of model."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model, and where and how it runs: every setting of a Runtime."""
    add = parser.add_argument
    add("--model", default="embedded", help=f"{', '.join(SHORT)}, a folder, *.gguf or a hub id")
    for item in fields(Runtime):
        words = WORDS.get(item.name) or item.metadata["help"]
        name = f"--{item.name.replace('_', '-')}"
        default: Any = item.default
        add(name, type=type(default), default=default, help=words)


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which prompts are measured, and how long an answer may be."""
    add = parser.add_argument
    add("--prompts", default=str(PROMPTS), help="JSON lines with 'turns', or 'random' tokens")
    add("--skip", type=int, default=0, help="leave out the first N of every category")
    add("--limit", type=int, default=0, help="prompts in all, 0 for every one (random: 8)")
    add("--max-new-tokens", type=int, default=128)


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


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare all of these: what every command has that compares methods on prompts."""
    add_model_arguments(parser)
    add_prompt_arguments(parser)
    add_sampling_arguments(parser)
    add_method_arguments(parser)
    add_save_argument(parser)


def check_run(options: argparse.Namespace) -> None:
    """Raise SettingError where one of these cannot be, before anything is measured."""
    check_counts(options)
    check_save(options.save)


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


def source_of(name: str) -> str:
    """The source that a name stands for: the short ones are of models that come along."""
    return str(SHORT.get(name, name))


def kind_of(name: str) -> str:
    """What kind of model a name stands for, before it is loaded: one of LIBRARIES."""
    return format_of(source_of(name)).kind


def runtime_of(options: argparse.Namespace) -> Runtime:
    """Where and how models run. Raises SettingError for settings out of range."""
    return Runtime(**{item.name: getattr(options, item.name) for item in fields(Runtime)})


def load_model(name: str, options: argparse.Namespace) -> Backend:
    """The model called `name` (a short name or a source), as the options say it runs."""
    backend = load(source_of(name), runtime_of(options))
    # Looking for garbage in all that was imported takes longer than many an answer's step.
    gc.collect()
    gc.freeze()
    return backend


def open_databases(
    backend: Backend,
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


def conditions(backend: Backend, options: argparse.Namespace) -> Record:
    """What was measured, where and when. Paths are left out, file names stay.

    `dtype` is how the weights are stored, "float32" or "Q4_K_M".
    """
    info = backend.info
    reported = (*REPORTED, *REPORTED_OF.get(info.kind, ()))
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": info.name,
        "kind": info.kind,
        "parameters": info.parameters,
        "dtype": info.dtype,
        "device": info.device,
        "machine": machine_of(info.device),
        "threads": info.threads,
        "context_length": info.context_length,
        **{name: version(name) for name in LIBRARIES.get(info.kind, ())},
        "prompt_file": Path(options.prompts).name,
        **{name: getattr(options, name) for name in reported if hasattr(options, name)},
    }


def machine_of(device: str) -> str:
    """The name of what computes on a device: a GPU's, or the kind of processor."""
    if device != "cpu":
        import torch  # late, as it takes seconds

        if torch.cuda.is_available():
            return str(torch.cuda.get_device_name())
    return platform.machine()


def headline(record: Mapping[str, Any]) -> str:
    """The model of a report and where it ran, in one line."""
    libraries = [f"{name} {record[name]}" for name in LIBRARIES.get(record["kind"], ())]
    threads = f"{record['threads']} threads, " if record["threads"] else ""
    return (
        f"{record['model']} ({record['parameters'] / 1e6:.1f} M parameters, {record['dtype']}, "
        f"{record['device']}), {threads}{', '.join([record['machine'], *libraries])}, "
        f"{record['date'][:10]}"
    )


def print_record(record: Record, save: Path | None = None) -> None:
    """End a report: the JSON line last, and in a file as well where one is named."""
    line = json.dumps(record)
    print(f"\n{line}")
    if save:
        save.write_text(f"{line}\n", encoding="utf-8")
