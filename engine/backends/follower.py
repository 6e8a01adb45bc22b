"""The process of a rank that is not the first, and who looks after it under torchrun.

    python -m engine.backends.follower HOST PORT NUMBER RANK

It loads its part of the model and follows rank 0 (engine/backends/parallel.py) until that ends. It
tells what goes wrong before it ends itself. It never outlives the process that has started it.
"""

import os
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from threading import Thread

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from engine.backends.rank_processes import awaited, client, lost, start_rank, whole_store
from engine.errors import first_line
from engine.ranks import Place, launched


def main(host: str, port: int, number: int, rank: int) -> None:
    """Be a rank of a model, to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Rank 0 decides what Ctrl-C means.
    Thread(target=end_with_input, daemon=True).start()
    store = PrefixStore(str(number), whole_store(host, port))
    try:
        from engine.models.load_split import follow

        follow(store, rank)
    except Exception as error:
        traceback.print_exc()
        with suppress(Exception):
            store.set(f"words/{rank}", first_line(error))
        os._exit(1)
    os._exit(0)


def end_with_input() -> None:
    """Who started this process holds the other end of its input."""
    sys.stdin.buffer.read()
    os._exit(0)


def look_after() -> None:
    """What a program does that torchrun has started as a rank other than the first: have a rank of
    each model that rank 0 loads, until rank 0's program has ended."""
    place = launched()
    assert place is not None
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # What waits for the store looks for no signals.
    store, number = client(place), 0
    running: subprocess.Popen[bytes] | None = None
    while True:
        number += 1
        job = awaited(store, f"{number}/job")
        if running is not None:
            running.kill()
        if not job:
            return
        running = start_rank(place, place.rank, place.local_rank, number)
        Thread(target=watch, args=(running, place, number), daemon=True).start()


def watch(running: subprocess.Popen[bytes], place: Place, number: int) -> None:
    """Tell rank 0 of a rank that ended unasked."""
    status = running.wait()
    if status:
        with suppress(Exception):
            store = PrefixStore(str(number), client(place))
            store.set("lost", lost(place.rank, place.size, status, store))


def leave() -> None:
    """What the program of rank 0 does at its end: let the others go."""
    place = launched()
    if place is not None:
        store = client(place)
        store.set(f"{store.add('number', 1)}/job", "")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
