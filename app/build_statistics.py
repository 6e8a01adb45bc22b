"""`strata-statistics FILES`: the statistics tier's file for a model's tokenizer.

In a checkout: `python -m app.build_statistics FILES`.

Reads text (.txt, .md), JSON and JSON lines (.json, .jsonl: "text" or chat "messages" per record)
and tables (.csv: the column "text", or all of a row), also packed (.zip, .xz, .gz). Interrupted, it
leaves everything as it was.

With `--memory` the texts may be larger than that: they are counted in shards, in a work folder. The
file is the same. Interrupted, the same command goes on where it was.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from platformdirs import user_data_path
from tqdm import tqdm

from engine.backends.base import Backend
from engine.decode import never
from engine.errors import StrataError
from engine.local import document_text
from engine.models.loaders import DEFAULT_RUNTIME, MODEL_LOADERS
from engine.types import Document
from storage import statistics_build, statistics_shards
from storage.documents import Meter, documents
from storage.statistics import SUFFIX
from storage.statistics_build import FEWEST, build
from storage.statistics_shards import Plan, count, reduce, shard_size

MEGABYTE, GIGABYTE = 1 << 20, 1 << 30
SMALLEST_MEMORY = 0.5
MOST_TOKENS = 50_000_000


def tokenized(
    files: Sequence[Path], backend: Backend, most_tokens: int
) -> list[NDArray[np.uint32]]:
    """The documents of all files as token arrays, with a progress bar, up to `most_tokens`."""
    arrays: list[NDArray[np.uint32]] = []
    total = 0
    with tqdm(unit=" tokens", unit_scale=True, desc="Tokenize") as bar:
        for path in files:
            for found in documents(path):
                document = tokens_of(backend, found)
                arrays.append(document)
                bar.update(len(document))
                total += len(document)
                if total >= most_tokens:
                    bar.write(f"Stopped after {total:,} tokens, the limit (--max-tokens).")
                    return arrays
    return arrays


def shards(files: Sequence[Path], characters: int, bar: tqdm) -> Iterator[list[Document]]:
    """The documents of all files, so many characters together; always cut at the same places."""
    meter, shard, size = Meter(), list[Document](), 0
    for path in files:
        for found in documents(path, meter):
            bar.update(meter.done - bar.n)
            shard.append(found)
            size += len(found) if isinstance(found, str) else sum(len(m.content) for m in found)
            if size >= characters:
                yield shard
                shard, size = [], 0
    if shard:
        yield shard


def texts_of(files: Sequence[Path]) -> tuple[str, ...]:
    """What tells other texts, or texts that were changed, from these."""
    states = [(path.resolve(), path.stat()) for path in files]
    return tuple(f"{path} {state.st_size} {state.st_mtime_ns}" for path, state in states)


def built_in_shards(options: argparse.Namespace, backend: Backend, out: Path) -> dict[str, str]:
    """Count the texts in shards, and write the file. Raises StrataError."""
    info, memory = backend.info, int(options.memory * GIGABYTE)
    folder = options.work_dir or out.with_name(f"{out.name}.work")
    plan = Plan(
        texts_of(options.files), info.tokenizer_fingerprint, info.vocabulary_size, options.fewest
    )
    size = plan.claim(folder, shard_size(memory, options.shards))
    with (
        tqdm(
            total=sum(path.stat().st_size for path in options.files),
            unit="B",
            unit_scale=True,
            desc="Count",
        ) as bar,
        ThreadPoolExecutor(options.shards) as threads,
    ):

        def tokenized(texts: Sequence[Document]) -> list[NDArray[np.uint32]]:
            return list(threads.map(partial(tokens_of, backend), texts))

        count(
            folder,
            shards(options.files, size, bar),
            tokenized,
            info.vocabulary_size,
            options.shards,
        )
    return counting(
        statistics_shards.STAGES,
        lambda progress: reduce(
            folder,
            plan,
            out,
            title_of(options),
            int(options.size * MEGABYTE),
            memory,
            progress,
        ),
    )


def tokens_of(backend: Backend, document: Document) -> NDArray[np.uint32]:
    """The tokens of a document."""
    return np.array(backend.tokenize(document_text(document, backend)), dtype=np.uint32)


def title_of(options: argparse.Namespace) -> str:
    """What the texts are."""
    return options.title or ", ".join(path.name for path in options.files)


def counting(
    stages: Sequence[str], work: Callable[[Callable[[str, float], None]], dict[str, str]]
) -> dict[str, str]:
    """Do it with a progress bar over its stages."""
    with tqdm(total=100, desc="Count", bar_format="{l_bar}{bar}| {postfix}") as bar:

        def progress(stage: str, done: float) -> None:
            bar.set_postfix_str(stage)
            bar.n = int(100 * (stages.index(stage) + done) / len(stages))
            bar.refresh()

        return work(progress)


def loaded(source: str) -> Backend:
    """The model whose tokenizer is used, downloaded if need be, with a progress bar."""
    with tqdm(unit="B", unit_scale=True, desc="Download", leave=False, delay=0.2) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        if not MODEL_LOADERS.present(source):
            MODEL_LOADERS.download(source, progress, never)
    return MODEL_LOADERS.load(source, DEFAULT_RUNTIME)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, build, report. Returns the exit status."""
    options = parsed(arguments)
    try:
        backend = loaded(options.model)
        fingerprint = backend.info.tokenizer_fingerprint
        out = options.out or options.data_dir / "statistics" / f"{fingerprint}{SUFFIX}"
        if options.memory is not None:
            meta = built_in_shards(options, backend, out)
        else:
            arrays = tokenized(options.files, backend, options.max_tokens)
            meta = counting(
                statistics_build.STAGES,
                lambda progress: build(
                    arrays,
                    out,
                    fingerprint,
                    backend.info.vocabulary_size,
                    title_of(options),
                    int(options.size * MEGABYTE),
                    progress,
                    options.fewest,
                ),
            )
    except (StrataError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        goes_on = " The same command goes on from here." if options.memory is not None else ""
        print(f"Cancelled; nothing was changed.{goes_on}", file=sys.stderr)
        return 130
    counts = [f"{int(meta[name]):,} {name}" for name in ("keys", "entries", "tokens")]
    print(f"{counts[0]} and {counts[1]} from {counts[2]}: {out}")
    return 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="strata-statistics", description=__doc__.splitlines()[0])
    parser.add_argument(
        "files", nargs="+", type=Path, help=".txt, .md, .json, .jsonl, .csv; .zip, .xz, .gz"
    )
    parser.add_argument(
        "--model",
        required=True,
        help="the model whose tokenizer to use: a folder, a GGUF file or a hub id",
    )
    parser.add_argument("--out", type=Path, help="the file (default: in the data directory)")
    parser.add_argument("--data-dir", type=Path, default=user_data_path("strata", appauthor=False))
    parser.add_argument("--title", help="what the texts are (default: the names of the files)")
    parser.add_argument("--size", type=float, default=64.0, help="megabytes of the file, about")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=MOST_TOKENS,
        help="without --memory: read no more (needs 80 bytes each)",
    )
    parser.add_argument(
        "--fewest",
        type=int,
        default=FEWEST,
        help="keep what followed so often; 1 suits a few megabytes of text",
    )
    large = parser.add_argument_group("texts larger than memory (needs DuckDB)")
    large.add_argument("--memory", type=float, help="gigabytes of memory that counting may take")
    large.add_argument(
        "--work-dir", type=Path, help="where shards are kept meanwhile (default: beside the file)"
    )
    large.add_argument(
        "--shards",
        type=int,
        default=os.cpu_count() or 1,
        help="how many shards are counted at the same time (default: one per core)",
    )
    options = parser.parse_args(arguments)
    if options.fewest < 1:
        parser.error(f"--fewest cannot be {options.fewest}. Give 1 or more.")
    if options.memory is not None and not options.memory >= SMALLEST_MEMORY:
        parser.error(f"--memory cannot be {options.memory}. Give {SMALLEST_MEMORY} or more.")
    if options.shards < 1:
        parser.error(f"--shards cannot be {options.shards}. Give 1 or more.")
    return options


if __name__ == "__main__":
    sys.exit(main())
