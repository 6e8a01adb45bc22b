"""Where a process stands among those that compute a model together: its ranks.

A model may be split: each rank holds a part of every layer. Rank 0 is the engine, with drafting,
sampling and everything else; the others run its forwards with it (engine/backends/parallel.py). The
engine starts them by itself on this machine. Or torchrun started this program once per rank, on one
machine or several: rank 0 is the app then, and the others look after a rank each.
"""

import os
from dataclasses import dataclass

AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""torchrun sets it: its own process keeps what the ranks tell each other."""


@dataclass(frozen=True, slots=True)
class Place:
    """One of `size` ranks, of which `local_size` are on this machine; `local_rank` counts those
    there. At `host` and `port` they find each other."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int


def launched() -> Place | None:
    """The place that torchrun has given this process; None where it started none, or one alone."""
    known = os.environ
    if known.get(AGENT) != "True" or int(known["WORLD_SIZE"]) == 1:
        return None
    return Place(
        int(known["RANK"]),
        int(known["WORLD_SIZE"]),
        int(known["LOCAL_RANK"]),
        int(known["LOCAL_WORLD_SIZE"]),
        known["MASTER_ADDR"],
        int(known["MASTER_PORT"]),
    )


def usual_size() -> int:
    """How many ranks a model has unless something else is said."""
    place = launched()
    return place.size if place else 1


def beside(size: int) -> int:
    """How many of a model's ranks are on this machine."""
    place = launched()
    return place.local_size if place and place.size == size else size
