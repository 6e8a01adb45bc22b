"""`python -m storage.statistics_worker SPEC < TOKENS`: builds a statistics file in a process of its
own, so that counting slows nobody's answers and can be ended at any moment.

TOKENS are the documents' tokens as 32-bit integers, `END` behind each document. SPEC is the JSON of
a `Spec`. What is done is told line by line, as "stage share". The last line is "made" and the meta
data as JSON, or "failed" and why.
"""

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.errors import StrataError
from storage.statistics_build import FEWEST, build

END = (1 << 32) - 1
"""No vocabulary has this token."""
POLITE = 10
"""How much the work gives way to others, as `nice` counts it."""
MADE, FAILED = "made", "failed"


@dataclass(frozen=True, slots=True)
class Spec:
    """What to build, and where: see `build`."""

    path: str
    tokenizer: str
    vocabulary: int
    title: str
    budget: int
    fewest: int = FEWEST

    def command(self) -> str:
        """The spec as an argument."""
        return json.dumps(asdict(self))


def split(tokens: NDArray[np.uint32]) -> list[NDArray[np.uint32]]:
    """The documents."""
    ends = np.flatnonzero(tokens == END)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    pairs = zip(starts.tolist(), ends.tolist(), strict=True)
    return [tokens[start:end] for start, end in pairs]


def tell(*words: object) -> None:
    """Say something on the pipe."""
    print(*words, flush=True)


def main() -> None:
    """Build, and tell how far it is."""
    with suppress(AttributeError, OSError):  # Windows counts otherwise.
        os.nice(POLITE)
    spec = Spec(**json.loads(sys.argv[1]))
    documents = split(np.fromfile(sys.stdin.buffer, dtype=np.uint32))
    try:
        meta = build(
            documents,
            Path(spec.path),
            spec.tokenizer,
            spec.vocabulary,
            spec.title,
            spec.budget,
            tell,
            spec.fewest,
        )
    except (StrataError, MemoryError) as error:
        tell(FAILED, str(error) or "There is not enough memory. Choose fewer files.")
    else:
        tell(MADE, json.dumps(meta))


if __name__ == "__main__":
    main()
