"""The other ranks of a model as rank 0 sees them: started, watched, told what to compute, ended.

What they tell each other goes over sockets: of this machine alone, where rank 0 has started them,
or of torchrun's network. Each rank that ends unasked ends the model: none can compute without it.
Rank 0 then says which one it was and why, and nobody waits for it. Where rank 0 is the engine's own
process, it ends as well. The app tells the reason, starts the engine anew and loads the model
again.
"""

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)

from engine import process
from engine.backends.rank_group import Group
from engine.errors import ModelError, first_line
from engine.ranks import Place, launched

FOLLOWER = "engine.backends.follower"
"""The module that a rank's process runs."""
HERE = "127.0.0.1"
LOOK = 0.1
"""Seconds between looks at who is there already."""
LITTLE = 0.5
"""Seconds within which the end of a process is usually known."""
MOMENT, LONG = 3.0, 60.0
"""Seconds within which it is known why a rank is not there any more, and within which rank 0
notices it while it loads its part."""
PATIENCE = timedelta(days=20)
"""How long a question to the store waits before it is asked again: the longest that it can."""


class Ranks:
    """The ranks of one model. `job` says what each is to load, in JSON. Made by rank 0, which then
    loads its own part and calls `begin`."""

    def __init__(self, size: int, device: str, job: Mapping[str, Any]) -> None:
        self.size = size
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.over = self.begun = self.together = False
        self.failed, self.reason = Event(), ""
        self.noticed = Event()
        """Whoever asked for the model has been told why there is none."""
        take_turns(self)
        job = {**job, "size": size, "kind": device}
        place = launched()
        self.store = self.among(place, job) if place else self.here(job)
        try:
            self.await_all("here")
            self.group = Group(self.store, 0, size, device)
        except Exception as error:
            raised = self.broken(error)
            self.close()
            raise raised from error

    # finding each other

    def here(self, job: Mapping[str, Any]) -> Store:
        """Start the other ranks on this machine. Others on the network find no open port."""
        listening = socket.create_server((HERE, 0))
        place = Place(0, self.size, 0, self.size, HERE, listening.getsockname()[1])
        whole = TCPStore(
            HERE, place.port, is_master=True, wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )  # fmt: skip
        names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
        store = PrefixStore("strata/1", whole)
        store.set("job", json.dumps(job))
        for rank in range(1, self.size):
            self.processes[rank] = start_rank(place, rank, rank, 1)
            Thread(target=self.watch, args=(rank,), daemon=True).start()
        return store

    def among(self, place: Place, job: Mapping[str, Any]) -> Store:
        """Tell the other programs that torchrun has started what is to be loaded."""
        if place.size != self.size:
            raise ModelError(
                f"torchrun has started {place.size} processes, and the model was to be split over "
                f"{self.size}. Set Tensor parallel to {place.size}, or to 1."
            )
        whole = client(place)
        number = whole.add("number", 1)
        whole.set(f"{number}/job", json.dumps(job))
        Thread(target=self.listen, args=(place, number), daemon=True).start()
        return PrefixStore(str(number), whole)

    def begin(self) -> None:
        """Wait until all have loaded their parts. Raises ModelError."""
        self.await_all("loaded")
        self.begun = True

    def await_all(self, what: str) -> None:
        """Wait until all others have said so. Raises ModelError once one of them is lost."""
        wanted = [f"{what}/{rank}" for rank in range(1, self.size)]
        while not self.store.check(wanted):
            if self.failed.wait(LOOK):
                raise ModelError(self.reason)

    # ends that nobody asked for

    def watch(self, rank: int) -> None:
        """Wait for the end of a process that was started here."""
        with self.processes[rank] as running:
            status = running.wait()
        self.fail(lost(rank, self.size, status, self.store))

    def listen(self, place: Place, number: int) -> None:
        """Wait until another program tells that its rank has ended."""
        reason = awaited(PrefixStore(str(number), client(place)), "lost")
        if reason:
            self.fail(reason)

    def fail(self, reason: str) -> None:
        """A rank is lost, and with it the model."""
        if self.over or self.failed.is_set():
            return
        self.reason = reason
        self.failed.set()
        for each in self.processes.values():
            each.kill()
        if self.begun or not self.noticed.wait(LONG):
            process.end(reason)

    def broken(self, error: Exception) -> ModelError:
        """What to raise where a call to all ranks has failed: the reason, if one is known soon."""
        self.noticed.set()
        if not self.failed.wait(MOMENT):
            self.fail(f"Rank 0 of {self.size} failed: {first_line(error)}.")
        return ModelError(self.reason)

    # work

    @contextmanager
    def computing(self, told: Mapping[str, Any], harmless: type[Exception]) -> Iterator[None]:
        """While it is entered, all ranks compute what the others are told. An error of all ranks is
        raised as it is, as is a `harmless` one; any other is a ModelError, and the end of all."""
        if self.over or self.failed.is_set():
            raise ModelError(self.reason or "The model is not loaded any more. Load it again.")
        try:
            self.group.tell(told)
            self.together = True
            yield
        except harmless:
            raise
        except Exception as error:
            if self.failed.wait(LITTLE) or not self.group.in_step(first_line(error)):
                raise self.broken(error) from error
            raise
        finally:
            self.together = False

    def check(self, *_: object) -> None:
        """Raise ModelError where rank 0 would compute alone: it would wait for the others."""
        if not self.together:
            raise ModelError(
                f"The model is split over {self.size} processes, and this needs it in one. Set "
                "Tensor parallel to 1."
            )

    def close(self) -> None:
        """End the other ranks."""
        if self.over:
            return
        self.over = True
        with suppress(Exception):
            if not self.failed.is_set():
                self.group.tell({"do": "end"})
        for each in self.processes.values():
            each.kill()
        with suppress(Exception):
            self.group.close()


def take_turns(ranks: Ranks) -> None:
    """One model at a time is split: the groups of torch are those of a whole process."""
    if CURRENT:
        CURRENT.pop().close()
    CURRENT.append(ranks)


CURRENT: list[Ranks] = []


def awaited(store: Store, key: str) -> str:
    """What is said under a key, once it is; nothing where nobody keeps what is said any more."""
    while True:
        try:
            store.wait([key], PATIENCE)
            return str(store.get(key).decode())
        except DistStoreError:  # out of time
            continue
        except Exception:
            return ""


def client(place: Place) -> Store:
    """What the ranks tell each other, kept by torchrun."""
    return whole_store(place.host, place.port)


def whole_store(host: str, port: int) -> Store:
    """The same, by where it is."""
    return PrefixStore("strata", TCPStore(host, port, is_master=False))


def start_rank(place: Place, rank: int, local: int, number: int) -> subprocess.Popen[bytes]:
    """The process of one rank. It ends with the one that starts it: its input ends then."""
    given = (place.host, place.port, number, rank)
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(place.size),
    }
    return subprocess.Popen(
        process.command(FOLLOWER, *map(str, given)),
        env={**process.environment(), **own},
        stdin=subprocess.PIPE,
    )


def lost(rank: int, size: int, status: int, store: Store) -> str:
    """Which rank has ended and why: as it said itself, else how the system says it ended."""
    words = ""
    with suppress(Exception):
        if store.check([f"words/{rank}"]):
            words = store.get(f"words/{rank}").decode()
    if words:
        return f"Rank {rank} of the {size} that compute the model failed: {words}"
    return process.death(status, f"Rank {rank} of the {size} that compute the model")
