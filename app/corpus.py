"""Files of texts as statistics are counted of them in shards, on this host or on many.

Files that follow each other make a volume until they have `VOLUME` bytes together. The same files
are always cut at the same places. Every process that tokenizes loads the tokenizer once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.backends.base import Tokenizer
from engine.errors import StorageError
from engine.local import document_text
from engine.models.loaders import tokenizer
from engine.types import Document
from storage.documents import Meter, Reading, documents

VOLUME = 256 << 20
"""Bytes of files, about, that one process reads. Of what is interrupted, so much is read again."""
CHARACTERS = 3
"""Characters of a shard for each token that is counted at a time. Texts have 3 to 5 a token; of
those that have fewer a shard is counted in pieces."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """See the module's docstring. `model` is what has the tokenizer of that fingerprint."""

    files: tuple[tuple[Path, ...], ...]
    reading: Reading
    model: str
    fingerprint: str
    characters: int

    @property
    def volumes(self) -> int:
        return len(self.files)

    def shards(self, volume: int, told: Callable[[float], None]) -> Iterator[list[Document]]:
        """The documents of a volume, so many characters together."""
        meter, shard, size = Meter(), list[Document](), 0
        whole = size_of(self.files[volume])
        for path in self.files[volume]:
            for found in documents(path, meter, self.reading):
                shard.append(found)
                size += length(found)
                if size >= self.characters:
                    told(meter.done / whole)
                    yield shard
                    shard, size = [], 0
        if shard:
            yield shard

    def tokenized(self, shard: Sequence[Document]) -> list[NDArray[np.uint32]]:
        found = tokenizer_of(self.model)
        if found.info.tokenizer_fingerprint != self.fingerprint:
            raise StorageError(
                f"Another host has another tokenizer for {self.model!r}. Give all of them the same "
                "model."
            )
        return [tokens_of(found, document) for document in shard]


@lru_cache(maxsize=1)
def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer of a model. Raises ModelError."""
    return tokenizer(model)


def tokens_of(reader: Tokenizer, document: Document) -> NDArray[np.uint32]:
    """The tokens of a document."""
    return np.array(reader.tokenize(document_text(document, reader)), dtype=np.uint32)


def length(document: Document) -> int:
    """The characters of a document."""
    if isinstance(document, str):
        return len(document)
    return sum(len(message.content) for message in document)


def size_of(files: Sequence[Path]) -> int:
    """The bytes of files, at least one."""
    return sum(path.stat().st_size for path in files) or 1


def in_volumes(files: Sequence[Path]) -> tuple[tuple[Path, ...], ...]:
    """The files in their order, about as many bytes together."""
    found, volume = list[tuple[Path, ...]](), list[Path]()
    for path in files:
        volume.append(path)
        if size_of(volume) >= VOLUME:
            found.append(tuple(volume))
            volume = []
    return (*found, tuple(volume)) if volume else tuple(found)


def check(files: Sequence[Path], reading: Reading) -> None:
    """Read the first document of each file. What cannot be read at all is known before hours of
    counting then. Raises StorageError."""
    for path in files:
        next(documents(path, reading=reading))
