"""Packed tokens on disk: all documents of a training set one after the other, two bytes a token.

A window is cut from a stream of shuffled documents, so it may hold several of them and end within
one; each document begins with the token that begins a text. The order depends on the seed and the
epoch alone, so training that was interrupted goes on with the windows it would have had.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from engine.errors import SettingError

TOKENS, ENDS, SOURCES, NAMES = "tokens.bin", "ends.npy", "sources.npy", "sources.json"


@dataclass(frozen=True)
class Corpus:
    """`tokens` of all documents; document i ends before `ends[i]` and is of `names[sources[i]]`."""

    tokens: NDArray[np.uint16]
    ends: NDArray[np.int64]
    sources: NDArray[np.uint16]
    names: list[str]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """What `write` wrote. Raises SettingError."""
        try:
            return cls(
                np.memmap(folder / TOKENS, np.uint16, "r"),
                np.load(folder / ENDS),
                np.load(folder / SOURCES),
                json.loads((folder / NAMES).read_text(encoding="utf-8")),
            )
        except (OSError, ValueError) as error:
            raise SettingError(
                f"There are no packed tokens in {str(folder)!r} ({error}). Make them with "
                "`python -m training prepare`."
            ) from error

    def order(self, passes: Mapping[str, float], random: np.random.Generator) -> NDArray[np.int64]:
        """The documents of one epoch, shuffled: those of a source as often as `passes` says (once
        where it says nothing); of a fraction, a part of them at random."""
        unknown = sorted(set(passes) - set(self.names))
        if unknown:
            raise SettingError(
                f"There is no source {unknown[0]!r}. Choose from: {', '.join(self.names)}."
            )
        wanted = np.array([passes.get(name, 1.0) for name in self.names])[self.sources]
        times = np.floor(wanted + random.random(len(wanted))).astype(np.int64)
        order = np.repeat(np.arange(len(wanted)), times)
        random.shuffle(order)
        return order

    def windows(
        self, length: int, passes: Mapping[str, float], seed: int
    ) -> Iterator[NDArray[np.uint16]]:
        """Pieces of `length` tokens and the one after them, epoch after epoch without end."""
        starts = np.concatenate(([0], self.ends[:-1]))
        for epoch in count():
            order = self.order(passes, np.random.default_rng((seed, epoch)))
            pieces = [self.tokens[starts[at] : self.ends[at]] for at in order]
            stream = np.concatenate(pieces) if pieces else self.tokens[:0]
            if len(stream) <= length:
                raise SettingError(
                    f"An epoch has {len(stream):,} tokens, fewer than a window of {length:,}. "
                    "Prepare more text or choose shorter windows."
                )
            for at in range(0, len(stream) - length, length):
                yield stream[at : at + length + 1]


def write(folder: Path, documents: Iterable[tuple[str, list[int]]]) -> Corpus:
    """Pack documents, each a source and its tokens. Raises SettingError where there are none."""
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, int] = {}
    ends: list[int] = []
    sources: list[int] = []
    end = 0
    with (folder / TOKENS).open("wb") as file:
        for source, tokens in documents:
            file.write(np.array(tokens, np.uint16).tobytes())
            end += len(tokens)
            ends.append(end)
            sources.append(names.setdefault(source, len(names)))
    if not end:
        raise SettingError(
            "There is no text to pack: the files or the sample of them are empty, or all of it is "
            "held out. Take more text."
        )
    np.save(folder / ENDS, np.array(ends, np.int64))
    np.save(folder / SOURCES, np.array(sources, np.uint16))
    (folder / NAMES).write_text(json.dumps(list(names)) + "\n", encoding="utf-8")
    return Corpus.open(folder)
