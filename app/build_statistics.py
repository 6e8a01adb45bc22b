"""`strata-statistics FILES`: the statistics tier's file for a model's tokenizer.

In a checkout: `python -m app.build_statistics FILES`.

Reads text (.txt, .md), JSON and JSON lines (.json, .jsonl: "text" or chat "messages" per record)
and tables (.csv: the column "text", or all of a row), also packed (.zip, .xz, .gz). Interrupted, it
leaves everything as it was.
"""

import argparse
import sys
from collections.abc import Sequence
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
from storage.documents import documents
from storage.statistics import SUFFIX
from storage.statistics_build import FEWEST, STAGES, build

MEGABYTE = 1 << 20


def tokenized(
    files: Sequence[Path], backend: Backend, most_tokens: int
) -> list[NDArray[np.uint32]]:
    """The documents of all files as token arrays, with a progress bar, up to `most_tokens`."""
    arrays: list[NDArray[np.uint32]] = []
    total = 0
    with tqdm(unit=" tokens", unit_scale=True, desc="Tokenize") as bar:
        for path in files:
            for found in documents(path):
                text = document_text(found, backend)
                document = np.array(backend.tokenize(text), dtype=np.uint32)
                arrays.append(document)
                bar.update(len(document))
                total += len(document)
                if total >= most_tokens:
                    bar.write(f"Stopped after {total:,} tokens, the limit (--max-tokens).")
                    return arrays
    return arrays


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
        "--max-tokens", type=int, default=50_000_000, help="read no more (needs 80 bytes each)"
    )
    parser.add_argument(
        "--fewest",
        type=int,
        default=FEWEST,
        help="keep what followed so often; 1 suits a few megabytes of text",
    )
    options = parser.parse_args(arguments)
    if options.fewest < 1:
        parser.error(f"--fewest cannot be {options.fewest}. Give 1 or more.")
    try:
        backend = loaded(options.model)
        fingerprint = backend.info.tokenizer_fingerprint
        out = options.out or options.data_dir / "statistics" / f"{fingerprint}{SUFFIX}"
        arrays = tokenized(options.files, backend, options.max_tokens)
        with tqdm(total=100, desc="Count", bar_format="{l_bar}{bar}| {postfix}") as bar:

            def progress(stage: str, done: float) -> None:
                bar.set_postfix_str(stage)
                bar.n = int(100 * (STAGES.index(stage) + done) / len(STAGES))
                bar.refresh()

            meta = build(
                arrays,
                out,
                fingerprint,
                backend.info.vocabulary_size,
                options.title or ", ".join(path.name for path in options.files),
                int(options.size * MEGABYTE),
                progress,
                options.fewest,
            )
    except StrataError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Cancelled; nothing was changed.", file=sys.stderr)
        return 130
    counts = [f"{int(meta[name]):,} {name}" for name in ("keys", "entries", "tokens")]
    print(f"{counts[0]} and {counts[1]} from {counts[2]}: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
