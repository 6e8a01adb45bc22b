"""Counts texts in shards on many hosts, which Ray makes one crew.

Some tasks read volumes, and hand their shards to others, wherever there is room. Each host writes
what it counted to the work folder, so all of them have to share it. A task whose host is lost is
done again by another: what it had finished stays.
"""

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

from engine.errors import StorageError, StrataError, first_line
from storage.statistics_map import Job
from storage.statistics_shards import WINDOW_BYTES

FEEDS = 16
"""Cores that one process can read for."""
TASK_BYTES = 1 << 29
"""What a process takes before it counts anything: its libraries, above all."""


class Hosts(Executor):
    """The cluster as an executor. Each call takes a core, and so much memory."""

    def __init__(self, memory: int) -> None:
        import ray

        self.call = ray.remote(num_cpus=1, memory=memory)(call)

    def submit(self, work: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        found: Future[Any] = self.call.remote(work, *arguments, **options).future()
        return found


def call(work: Any, *arguments: Any, **options: Any) -> Any:
    """What a task does."""
    return work(*arguments, **options)


def read(job: Job, volume: int, at_once: int, memory: int) -> None:
    """Read a volume, on whatever host; its shards are counted on any."""
    job.count_volume(volume, Hosts(memory), at_once, lambda share: None)


def count_on_hosts(
    job: Job, address: str, told: Callable[[int, float], None] = lambda volume, share: None
) -> None:
    """Count everything on the cluster at an address, "" for that of this machine, which is begun if
    there is none. `told` as for `count`. Raises StrataError."""
    if job.counted:
        return
    memory = TASK_BYTES + job.most * WINDOW_BYTES
    with cluster(address) as ray:
        cores = int(ray.cluster_resources().get("CPU", 1))
        readers = max(1, min(job.texts.volumes, cores // FEEDS))
        # A reader takes no core of its own, so that it never waits for those that it feeds.
        task = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(read)
        running: dict[Any, int] = {}
        for volume in range(job.texts.volumes):
            settle(ray, running, readers - 1, told)
            running[task.remote(job, volume, -(-cores // readers) + 1, memory)] = volume
        settle(ray, running, 0, told)
    job.finish()


def settle(
    ray: Any, running: dict[Any, int], most: int, told: Callable[[int, float], None]
) -> None:
    """Wait until no more than so many run. Raises what one of them raised."""
    while len(running) > most:
        for done in ray.wait([*running])[0]:
            ray.get(done)
            told(running.pop(done), 1.0)


@contextmanager
def cluster(address: str) -> Iterator[Any]:
    """Ray, connected. Raises StorageError where it is not installed, and for what goes wrong."""
    # Ray sends figures about its use to its makers unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise StorageError(
            "Counting on many hosts needs Ray, which is not installed. Install it with: "
            "pip install ray. Or leave out --ray."
        ) from error
    begun = not ray.is_initialized()
    try:
        if begun:
            ray.init(address or None, log_to_driver=False, logging_level=logging.ERROR)
        yield ray
    except (ray.exceptions.RayError, ConnectionError, ValueError) as error:
        cause: Any = error
        while isinstance(cause, ray.exceptions.RayTaskError):
            cause = cause.cause
        if isinstance(cause, StrataError):
            raise cause from None
        raise StorageError(
            f"Counting by Ray stopped: {first_line(cause)} The same command goes on from here."
        ) from error
    finally:
        if begun:
            ray.shutdown()
