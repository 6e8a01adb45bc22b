"""The process of a rank other than the first, and its supervision under torchrun.

    python -m engine.backends.follower HOST PORT NUMBER RANK

It loads its part of the model and follows rank 0 (engine/backends/parallel.py) until rank 0 ends.
It reports an error before it ends. It never outlives the process that started it.
"""

import os
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from threading import Thread

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from engine.backends.rank_processes import awaited, client, lost, start_rank
from engine.errors import first_line
from engine.machine import Place, launched


def main(host: str, port: int, number: int, rank: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Rank 0 decides what Ctrl-C means.
    Thread(target=end_with_input, daemon=True).start()
    store = PrefixStore(str(number), client(host, port))
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
    """End this process when its input is closed, whose other end its parent holds."""
    sys.stdin.buffer.read()
    os._exit(0)


def look_after() -> None:
    """Run a rank of each model that rank 0 loads, until the program of rank 0 has ended. For a
    program that torchrun has started as a rank other than the first."""
    place = launched()
    assert place is not None
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Waiting for the store would not notice signals.
    store, number = client(place.host, place.port), 0
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
    """Report to rank 0 that a rank ended unexpectedly."""
    status = running.wait()
    if status:
        with suppress(Exception):
            store = PrefixStore(str(number), client(place.host, place.port))
            store.set("lost", lost(place.rank, place.size, status, store))


def leave() -> None:
    """Let the programs of the other ranks end. For the end of rank 0's program."""
    place = launched()
    if place is not None:
        store = client(place.host, place.port)
        store.set(f"{store.add('number', 1)}/job", "")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
