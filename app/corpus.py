"""Text files as input for counting statistics in shards.

Consecutive files form a volume until they have `VOLUME` bytes in total. The same files are always
split in the same way. Every process that tokenizes loads the tokenizer once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.backends.base import Tokenizer
from engine.errors import StorageError
from engine.local import document_text
from engine.models.loaders import tokenizer
from engine.types import Document
from storage.documents import Meter, Reading, batches, documents

VOLUME = 256 << 20
"""The approximate bytes of files that one process reads, and that an interruption repeats."""
CHARACTERS = 3
"""Characters of a shard for each token that is counted at a time. Most texts have 3 to 5 characters
per token; with fewer, a shard is counted in pieces."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """See the module's docstring. `model` has the tokenizer with this `fingerprint`."""

    files: tuple[tuple[Path, ...], ...]
    reading: Reading
    model: str
    fingerprint: str
    characters: int

    @property
    def volumes(self) -> int:
        return len(self.files)

    def shards(self, volume: int, report: Callable[[float], None]) -> Iterator[list[Document]]:
        """The documents of a volume, in shards of about `characters` characters."""
        meter, whole = Meter(), size_of(self.files[volume])
        read = (documents(path, meter, self.reading) for path in self.files[volume])
        for shard in batches(chain.from_iterable(read), self.characters):
            report(meter.done / whole)
            yield shard

    def tokenized(self, shard: Sequence[Document]) -> list[NDArray[np.uint32]]:
        found = tokenizer_of(self.model)
        if found.info.tokenizer_fingerprint != self.fingerprint:
            raise StorageError(
                f"The tokenizer of {self.model!r} has changed since counting began. Put the old "
                "one back, or delete the work folder and start again."
            )
        return [tokens_of(found, document) for document in shard]


@lru_cache(maxsize=1)
def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer of a model. Raises ModelError."""
    return tokenizer(model)


def tokens_of(reader: Tokenizer, document: Document) -> NDArray[np.uint32]:
    return np.array(reader.tokenize(document_text(document, reader)), dtype=np.uint32)


def size_of(files: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in files) or 1


def in_volumes(files: Sequence[Path]) -> tuple[tuple[Path, ...], ...]:
    """The files in their order, as volumes of about VOLUME bytes."""
    found, volume = list[tuple[Path, ...]](), list[Path]()
    for path in files:
        volume.append(path)
        if size_of(volume) >= VOLUME:
            found.append(tuple(volume))
            volume = []
    return (*found, tuple(volume)) if volume else tuple(found)


def check(files: Sequence[Path], reading: Reading) -> None:
    """Read the first document of each file, so that an unreadable file is found before hours of
    counting. Raises StorageError."""
    for path in files:
        next(documents(path, reading=reading))
