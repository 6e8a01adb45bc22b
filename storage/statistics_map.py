"""Counts texts in shards, by many processes: the first half of storage/statistics_shards.py.

One process reads a volume of the texts, and hands its shards to a crew of others, which tokenize
and count them. The crew is an executor: processes of this machine, or of many
(storage/statistics_ray.py). A shard that is counted is never counted again, nor is a volume read
again of which all shards are.
"""

import json
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from engine.errors import StorageError
from storage.statistics_shards import COUNTED, PLAN, Documents, count_shard, moved, shard_file


class Texts(Protocol):
    """What is counted. Every process is told it, maybe on another host.

    The texts lie in volumes, each of which one process reads, in shards, each of which one process
    counts; always cut at the same places.
    """

    @property
    def volumes(self) -> int:
        """How many there are."""

    def shards(self, volume: int, told: Callable[[float], None]) -> Iterator[Any]:
        """Those of a volume; `told` is called with the share that is read. Raises StorageError."""

    def tokenized(self, shard: Any) -> Documents:
        """The tokens of its documents. Raises StrataError."""


@dataclass(frozen=True, slots=True)
class Job:
    """Counting some texts into a work folder, in pieces of at most so many tokens."""

    folder: Path
    texts: Texts
    vocabulary: int
    most: int

    def count_shard(self, name: str, shard: Any) -> None:
        """Tokenize and count. Raises StrataError."""
        if not (self.folder / PLAN).exists():
            raise StorageError(
                f"The host {platform.node()!r} does not see the work folder {str(self.folder)!r}. "
                "Give a --work-dir that all hosts share."
            )
        count_shard(self.folder, name, self.texts.tokenized(shard), self.vocabulary, self.most)

    def count_volume(
        self, volume: int, crew: Executor, at_once: int, told: Callable[[float], None]
    ) -> None:
        """Read a volume, and have its shards counted by a crew, so many at a time. What is counted
        already is passed over. Raises StrataError."""
        path = self.folder / f"volume-{volume:05}.json"
        if path.exists():
            return
        number, running = 0, set[Future[None]]()

        def settle(most: int) -> None:
            nonlocal running
            while len(running) > most:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()

        try:
            for number, shard in enumerate(self.texts.shards(volume, told), 1):
                name = f"{volume:05}-{number:05}"
                if not shard_file(self.folder, name).exists():
                    settle(at_once - 1)
                    running.add(crew.submit(self.count_shard, name, shard))
            settle(0)
        finally:
            for future in running:
                future.cancel()
        with moved(path) as made:
            made.write_text(json.dumps({"shards": number}), encoding="utf-8")

    @property
    def counted(self) -> bool:
        """Whether nothing is left to count."""
        return (self.folder / COUNTED).exists()

    def finish(self) -> None:
        """Say that all volumes are counted. Raises StorageError."""
        found = sorted(self.folder.glob("volume-*.json"))
        assert len(found) == self.texts.volumes
        total = sum(json.loads(path.read_text("utf-8"))["shards"] for path in found)
        with moved(self.folder / COUNTED) as made:
            made.write_text(json.dumps({"shards": total}), encoding="utf-8")


def count(
    job: Job, processes: int, told: Callable[[int, float], None] = lambda volume, share: None
) -> None:
    """Count everything, in so many processes. `told` is called with a volume and the share of it
    that is read. Raises StrataError."""
    if job.counted:
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        try:
            for volume in range(job.texts.volumes):
                job.count_volume(volume, pool, processes, partial(told, volume))
                told(volume, 1.0)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    job.finish()
