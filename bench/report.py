"""The report of a command: the conditions of a measurement, and its tables in Markdown."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.backends.base import Backend
from engine.machine import processor

Record = dict[str, Any]
"""A report or a part of one, as JSON values by their names."""
TRANSFORMERS, LLAMA_CPP = "transformers", "llama.cpp"
LIBRARIES = {TRANSFORMERS: ("torch", "transformers"), LLAMA_CPP: ("llama-cpp-python",)}
"""The packages that compute the forwards of each kind of model."""
REPORTED = ("skip", "limit", "max_new_tokens", "temperature", "min_p", "seed", "repeats")
"""The options that a report repeats, if its command has them."""
REPORTED_OF = {LLAMA_CPP: ("gpu_layers", "batch_size", "flash_attention", "cache_type")}
"""More such options, for one kind of model."""


def conditions(backend: Backend, options: argparse.Namespace) -> Record:
    """What was measured, where and when. Files are given by name, without their paths."""
    info = backend.info
    reported = (*REPORTED, *REPORTED_OF.get(info.kind, ()))
    return {
        "date": now(),
        "model": info.name,
        "kind": info.kind,
        "parameters": info.parameters,
        "dtype": info.dtype,
        "device": info.device,
        "machine": machine_of(info.device),
        "threads": info.threads,
        "context_length": info.context_length,
        **{name: version(name) for name in LIBRARIES.get(info.kind, ())},
        "prompt_file": Path(getattr(options, "prompts", "")).name,
        **{name: getattr(options, name) for name in reported if hasattr(options, name)},
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine_of(device: str) -> str:
    """The name of the GPU, or of the processor, that a device stands for."""
    if device != "cpu":
        import torch  # late, as it takes seconds

        if torch.cuda.is_available():
            return str(torch.cuda.get_device_name())
    return processor()


def headline(record: Mapping[str, Any]) -> str:
    libraries = [f"{name} {record[name]}" for name in LIBRARIES.get(record["kind"], ())]
    threads = f"{record['threads']} threads, " if record["threads"] else ""
    return (
        f"{record['model']} ({record['parameters'] / 1e6:.1f} M parameters, {record['dtype']}, "
        f"{record['device']}), {threads}{', '.join([record['machine'], *libraries])}, "
        f"{record['date'][:10]}"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in Markdown. Columns of numbers are aligned right."""
    columns = [list(column) for column in zip(heads, *rows, strict=True)]
    for column in columns:
        right = all(cell[:1] in "+-0123456789" for cell in column[1:])
        width = max(3, *map(len, column))
        column[:] = [cell.rjust(width) if right else cell.ljust(width) for cell in column]
        column.insert(1, "-" * (width - 1) + (":" if right else "-"))
    for line in zip(*columns, strict=True):
        print(f"| {' | '.join(line)} |")


def show_rows(rows: Iterable[Record], columns: Mapping[str, str]) -> None:
    """Print records as a table. `columns` maps each heading to the format of its cells.

    A figure that a record does not have is shown as a dash, and one that none has is left out.
    """
    given = list(rows)
    cells = {head: [cell(form, row) for row in given] for head, form in columns.items()}
    shown = {head: column for head, column in cells.items() if {*column} != {"-"}}
    table([*shown], zip(*shown.values(), strict=True))


def cell(form: str, row: Mapping[str, Any]) -> str:
    try:
        return form.format_map(row)
    except (KeyError, TypeError):  # absent, or None
        return "-"


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
