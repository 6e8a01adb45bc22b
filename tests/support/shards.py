"""Texts to count in shards, and a crew that does at once what it is given."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from storage.statistics_shards import Documents, Job, Plan


def texts(seed: int, documents: int, length: int, vocabulary: int) -> list[Any]:
    """Documents in which few tokens are frequent, some of them empty."""
    dice = np.random.default_rng(seed)
    lengths = dice.integers(0, 2 * length, documents)
    return [(vocabulary * dice.random(size) ** 4).astype(np.uint32) for size in lengths]


def plan(vocabulary: int, fewest: int = 2, text: str = "a text") -> Plan:
    return Plan((text,), "tok", vocabulary, fewest)


@dataclass(frozen=True)
class Made:
    """Volumes of shards of texts that are made here, the same in every process; who reads or
    counts one notes it in a folder."""

    notes: Path
    bad: int = 0
    """A token at the end of the last shard, if any."""

    @property
    def volumes(self) -> int:
        return 3

    def shards(self, volume: int, told: Callable[[float], None]) -> Iterator[tuple[int, int]]:
        (self.notes / f"read {volume}").touch()
        for number in range(volume + 1):
            told(number / (volume + 1))
            yield volume, number

    def tokenized(self, shard: tuple[int, int]) -> Documents:
        (self.notes / f"counted {shard}").touch()
        documents = texts(10 * shard[0] + shard[1], 10, 100, 50)
        return [*documents, np.array([self.bad], np.uint32)] if shard == (2, 2) else documents

    def all(self) -> Documents:
        shards = [(volume, number) for volume in range(3) for number in range(volume + 1)]
        return [document for shard in shards for document in self.tokenized(shard)]

    def noted(self) -> list[str]:
        """What was noted since this was asked last."""
        found = sorted(self.notes.iterdir())
        for path in found:
            path.unlink()
        return [path.name for path in found]


def job(folder: Path, made: Made) -> Job:
    plan(50).claim(folder / "work", 1)
    return Job(folder / "work", made, 50, 600)


class Inline(Executor):
    def submit(self, work: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(work(*arguments, **options))
        return done


def count_inline(wanted: Job) -> None:
    if not wanted.counted:
        for volume in range(wanted.texts.volumes):
            wanted.count_volume(volume, Inline(), 2, lambda share: None)
        wanted.finish()
