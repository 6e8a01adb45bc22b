"""`strata-statistics FILES`: builds the file of the statistics tier for a model's tokenizer.

In a checkout: `python -m app.build_statistics FILES`.

Reads text (.txt, .md), JSON and JSON lines (.json, .jsonl: chat "messages", "text" or "content" per
record) and tables (.csv, .parquet: a column of these), also packed (.zip, .xz, .gz, .zst).
Only the tokenizer of the model is loaded. If the command is interrupted, nothing changes.

With `--memory` the texts may exceed the memory: they are counted in shards, in a work folder, and
the resulting file is the same. After an interruption, the same command continues where it stopped.
With `--part`, each of several hosts counts a part; the command without `--part` then adds up the
counts.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from app.arguments import folder_name, folder_of, show_any_character
from app.corpus import CHARACTERS, Corpus, check, in_volumes, size_of, tokens_of
from engine.backends.base import Tokenizer
from engine.errors import StrataError
from engine.models.loaders import MODEL_LOADERS, resolve_source
from storage import statistics_build, statistics_shards
from storage.documents import USUAL, Reading, documents
from storage.statistics import SUFFIX
from storage.statistics_build import FEWEST, Progress, build
from storage.statistics_shards import Job, Plan, count, reduce, shard_size

MEGABYTE, GIGABYTE = 1 << 20, 1 << 30
SMALLEST_MEMORY = 0.5
MOST_TOKENS = 50_000_000


def tokenized(
    files: Sequence[Path], tokenizer: Tokenizer, most_tokens: int, reading: Reading = USUAL
) -> list[NDArray[np.uint32]]:
    """The documents of all files as token arrays, with a progress bar, up to `most_tokens`."""
    arrays: list[NDArray[np.uint32]] = []
    total = 0
    with tqdm(unit=" tokens", unit_scale=True, desc="Tokenize") as bar:
        for path in files:
            for found in documents(path, reading=reading):
                document = tokens_of(tokenizer, found)
                arrays.append(document)
                bar.update(len(document))
                total += len(document)
                if total >= most_tokens:
                    bar.write(f"Stopped after {total:,} tokens, the limit (--max-tokens).")
                    return arrays
    return arrays


def built_in_shards(options: argparse.Namespace, tokenizer: Tokenizer, out: Path) -> dict[str, str]:
    """Count the texts in shards, and write the file. Returns its meta data, which is empty if only
    a part was counted. Raises StrataError."""
    info, memory = tokenizer.info, int(options.memory * GIGABYTE)
    folder = (options.work_dir or out.with_name(f"{out.name}.work")).resolve()
    reading = Reading(options.field, most_bytes=None)
    files = [path.resolve() for path in options.files]
    check(files, reading)
    states = [(path, path.stat()) for path in files]
    plan = Plan(
        (options.field, *(f"{path} {s.st_size} {s.st_mtime_ns}" for path, s in states)),
        info.tokenizer_fingerprint,
        info.vocabulary_size,
        options.fewest,
    )
    most = plan.claim(folder, shard_size(memory, options.shards))
    model = resolve_source(options.model)
    corpus = Corpus(
        in_volumes(files), reading, model, info.tokenizer_fingerprint, CHARACTERS * most
    )
    job = Job(folder, corpus, info.vocabulary_size, most)
    sizes = [size_of(volume) for volume in corpus.files]
    shares = [0.0] * len(sizes)
    with tqdm(total=sum(sizes), unit="B", unit_scale=True, desc="Count") as bar:

        def report(volume: int, share: float) -> None:
            shares[volume] = share
            done = sum(size * part for size, part in zip(sizes, shares, strict=True))
            bar.update(int(done) - bar.n)

        count(job, options.shards, report, options.part)
    if options.part:
        return {}
    budget = int(options.size * MEGABYTE)
    with stage_bar(statistics_shards.STAGES) as progress:
        return reduce(folder, plan, out, options.title, budget, memory, progress)


@contextmanager
def stage_bar(stages: Sequence[str]) -> Iterator[Progress]:
    """A progress bar over these stages: a function to be called with a stage and the share of it
    that is done."""
    with tqdm(total=100, desc="Count", bar_format="{l_bar}{bar}| {postfix}") as bar:

        def progress(stage: str, done: float) -> None:
            bar.set_postfix_str(stage)
            bar.n = int(100 * (stages.index(stage) + done) / len(stages))
            bar.refresh()

        yield progress


def loaded(source: str) -> Tokenizer:
    """The tokenizer of a model. It is downloaded if necessary, with a progress bar if it is
    large."""
    with tqdm(unit="B", unit_scale=True, desc="Download", leave=False, delay=0.2) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return MODEL_LOADERS.tokenizer(resolve_source(source), progress)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, build the file and report the result. Returns the exit status."""
    show_any_character()
    options = parsed(arguments)
    try:
        tokenizer = loaded(options.model)
        fingerprint = tokenizer.info.tokenizer_fingerprint
        out = options.out or folder_of(options.data_dir) / "statistics" / f"{fingerprint}{SUFFIX}"
        if options.memory is not None:
            meta = built_in_shards(options, tokenizer, out)
        else:
            reading = Reading(options.field)
            arrays = tokenized(options.files, tokenizer, options.max_tokens, reading)
            vocabulary, budget = tokenizer.info.vocabulary_size, int(options.size * MEGABYTE)
            with stage_bar(statistics_build.STAGES) as progress:
                meta = build(
                    arrays,
                    out,
                    fingerprint,
                    vocabulary,
                    options.title,
                    budget,
                    progress,
                    options.fewest,
                )
    except (StrataError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        continues = " The same command continues from here." if options.memory is not None else ""
        print(f"Cancelled; nothing was changed.{continues}", file=sys.stderr)
        return 130
    if not meta:
        print("This part is counted. Once all parts are, run the command without --part.")
        return 0
    counts = [f"{int(meta[name]):,} {name}" for name in ("keys", "entries", "tokens")]
    print(f"{counts[0]} and {counts[1]} from {counts[2]}: {out}")
    return 0


def part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part. Give one such as 2/4.")
    return int(number), int(parts)


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="strata-statistics", description=__doc__.splitlines()[0])
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        help=".txt, .md, .json, .jsonl, .csv, .parquet; .zip, .xz, .gz, .zst",
    )
    parser.add_argument(
        "--model",
        required=True,
        help="the model whose tokenizer to use: a folder, a GGUF file or a hub id",
    )
    parser.add_argument("--out", type=Path, help="the file (default: in the data directory)")
    parser.add_argument("--data-dir", type=folder_name)
    parser.add_argument(
        "--field",
        default="",
        help="the field or column of the texts (default: messages, text or content)",
    )
    parser.add_argument("--title", help="what the texts are (default: the names of the files)")
    parser.add_argument(
        "--size", type=float, default=64.0, help="the approximate size of the file in megabytes"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=MOST_TOKENS,
        help="without --memory: the most to read (each takes 80 bytes of memory)",
    )
    parser.add_argument(
        "--fewest",
        type=int,
        default=FEWEST,
        help="how often a token must follow a key to be kept; 1 suits a few megabytes of text",
    )
    large = parser.add_argument_group(
        "texts larger than memory", 'This needs: pip install "strata-chat[cluster]"'
    )
    large.add_argument("--memory", type=float, help="gigabytes of memory that counting may take")
    large.add_argument(
        "--work-dir", type=Path, help="where shards are kept meanwhile (default: next to the file)"
    )
    large.add_argument(
        "--shards",
        type=int,
        help="how many shards are counted at the same time (default: one per core)",
    )
    large.add_argument(
        "--part",
        type=part,
        metavar="K/N",
        help="count only part K of N, to share the work with other hosts; nothing is added up",
    )
    return parser


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line()
    options = parser.parse_args(arguments)
    options.title = options.title or ", ".join(path.name for path in options.files)
    if options.fewest < 1:
        parser.error(f"--fewest cannot be {options.fewest}. Give 1 or more.")
    if options.memory is not None and not options.memory >= SMALLEST_MEMORY:
        parser.error(f"--memory cannot be {options.memory}. Give {SMALLEST_MEMORY} or more.")
    if options.part and None in (options.memory, options.shards):
        # Otherwise two hosts that start at once could cut the texts in different ways.
        parser.error("--part needs --memory and --shards, with the same values for all parts.")
    if options.shards is None:
        options.shards = os.cpu_count() or 1
    if options.shards < 1:
        parser.error(f"--shards cannot be {options.shards}. Give 1 or more.")
    return options


if __name__ == "__main__":
    sys.exit(main())
