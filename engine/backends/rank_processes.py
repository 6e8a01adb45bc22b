"""The other ranks of a model as rank 0 sees them: it starts, watches, commands and ends them.

They communicate over sockets: of this machine alone if rank 0 has started them, or of torchrun's
network. If any rank ends unexpectedly, the model ends too, because it cannot compute without it.
Rank 0 then reports which rank it was and why, and nobody waits for it. If rank 0 is the engine's
own process, that ends as well; the app reports the reason, starts the engine again and loads the
model again.

There are two torch groups: one for the sums of forwards, which no rank may delay for long, and one
for the commands of rank 0, for which the others wait as long as there is no work. Commands are
JSON, so that nothing that a rank receives can run code.

All ranks make the same calls in the same order. If an error interrupts this, they determine
together whether it was the same error on all ranks (`in_step`). If so they continue, otherwise the
group ends.
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

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)

from engine import process
from engine.errors import ModelError, first_line
from engine.machine import Place, launched

Message = Mapping[str, Any]
LIBRARIES = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""What computes sums across ranks, by the kind of their device."""
FORWARD = timedelta(minutes=5)
"""A sum that takes longer has lost a rank."""
IDLE = timedelta(days=365)
SETTLE = timedelta(seconds=5)
"""The time within which all ranks notice an error that they have in common."""
FRAME = 4096
"""Bytes that are sent at once. Most commands fit."""
SIZE = 4
FOLLOWER = "engine.backends.follower"
"""The module that a rank's process runs."""
HERE = "127.0.0.1"
LOOK = 0.1
"""Seconds between checks of which ranks are ready."""
LITTLE = 0.5
"""Seconds within which the end of a process is usually known."""
MOMENT, LONG = 3.0, 60.0
"""Seconds within which the reason for the loss of a rank is known, and within which rank 0 notices
the loss while it loads its part."""
PATIENCE = timedelta(days=20)
"""How long a query to the store waits before it is repeated: the longest time that is possible."""


class Group:
    """The torch groups. All ranks create it at the same time; a process has one at a time."""

    def __init__(self, store: Store, rank: int, size: int, device: str) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.errors = 0
        own = PrefixStore("group", store)
        dist.init_process_group(
            LIBRARIES[device], store=own, rank=rank, world_size=size, timeout=FORWARD
        )
        self.words = dist.new_group(backend="gloo", timeout=IDLE)

    def broadcast(self, message: Message) -> None:
        """Send a message to all others; only rank 0 does."""
        data = json.dumps(message).encode()
        framed = len(data).to_bytes(SIZE, "big") + data
        for start, size in ((0, FRAME), (FRAME, len(framed) - FRAME)):
            if size > 0:
                part = framed[start : start + size].ljust(size, b"\0")
                self.send(torch.frombuffer(bytearray(part), dtype=torch.uint8))

    def receive(self) -> Message:
        """The next message of rank 0."""
        frame = self.send(torch.empty(FRAME, dtype=torch.uint8)).numpy().tobytes()
        size = int.from_bytes(frame[:SIZE], "big")
        rest = size + SIZE - FRAME
        if rest > 0:
            frame += self.send(torch.empty(rest, dtype=torch.uint8)).numpy().tobytes()
        message: Message = json.loads(frame[SIZE : SIZE + size])
        return message

    def agree(self, stop: bool = False) -> bool:
        """Whether rank 0 wants to stop here; all ranks learn its answer."""
        return bool(self.send(torch.tensor([stop], dtype=torch.uint8)).item())

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Replace the values of the other ranks by those of rank 0."""
        dist.broadcast(values, 0, group=self.words)
        return values

    def in_step(self, words: str) -> bool:
        """Whether all ranks had an error in the same call as this rank; `words` describe it."""
        self.errors += 1
        self.store.set(f"error/{self.errors}/{self.rank}", words)
        try:
            everyone = [f"error/{self.errors}/{rank}" for rank in range(self.size)]
            self.store.wait(everyone, SETTLE)
        except Exception:
            # Out of time, or the store that the ranks share is gone.
            return False
        return True

    def close(self) -> None:
        """Leave; ranks that wait for this one get an error."""
        dist.destroy_process_group()


class Ranks:
    """The ranks of one model. `job` describes in JSON what each rank loads. Rank 0 creates this
    object, then loads its own part and calls `begin`."""

    def __init__(self, size: int, device: str, job: Mapping[str, Any]) -> None:
        self.size = size
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.over = self.begun = self.together = False
        self.failed, self.reason = Event(), ""
        self.noticed = Event()
        """Set when loading the model has failed with an error that gives the reason."""
        # A process has one set of torch groups, so only one model at a time is split.
        if CURRENT:
            CURRENT.pop().close()
        CURRENT.append(self)
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
        """Start the other ranks on this machine. No port is open to the network."""
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
        """Send the job to the programs that torchrun has started."""
        if place.size != self.size:
            raise ModelError(
                f"torchrun has started {place.size} processes, and the model was to be split over "
                f"{self.size}. Set Tensor parallel to {place.size}, or to 1."
            )
        whole = client(place.host, place.port)
        number = whole.add("number", 1)
        whole.set(f"{number}/job", json.dumps(job))
        Thread(target=self.listen, args=(place, number), daemon=True).start()
        return PrefixStore(str(number), whole)

    def begin(self) -> None:
        """Wait until all have loaded their parts. Raises ModelError."""
        self.await_all("loaded")
        self.begun = True

    def await_all(self, milestone: str) -> None:
        """Wait until all other ranks have reported a milestone. Raises ModelError once one of them
        is lost."""
        keys = [f"{milestone}/{rank}" for rank in range(1, self.size)]
        while not self.store.check(keys):
            if self.failed.wait(LOOK):
                raise ModelError(self.reason)

    # unexpected ends

    def watch(self, rank: int) -> None:
        with self.processes[rank] as running:
            status = running.wait()
        self.fail(lost(rank, self.size, status, self.store))

    def listen(self, place: Place, number: int) -> None:
        """Wait until another program reports that its rank has ended."""
        reason = awaited(PrefixStore(str(number), client(place.host, place.port)), "lost")
        if reason:
            self.fail(reason)

    def fail(self, reason: str) -> None:
        """Give up the model, because a rank is lost."""
        if self.over or self.failed.is_set():
            return
        self.reason = reason
        self.failed.set()
        for each in self.processes.values():
            each.kill()
        if self.begun or not self.noticed.wait(LONG):
            process.end(reason)

    def broken(self, error: Exception) -> ModelError:
        """The error for a call to all ranks that failed: the reason, if one is known soon."""
        self.noticed.set()
        if not self.failed.wait(MOMENT):
            self.fail(f"Rank 0 of {self.size} failed: {first_line(error)}.")
        return ModelError(self.reason)

    # work

    @contextmanager
    def computing(self, command: Mapping[str, Any], harmless: type[Exception]) -> Iterator[None]:
        """Let all ranks compute a command in this block. An error that all ranks have in common is
        raised as it is, and so is a `harmless` one. Any other error ends all ranks and is raised as
        a ModelError."""
        if self.over or self.failed.is_set():
            raise ModelError(self.reason or "The model is not loaded any more. Load it again.")
        try:
            self.group.broadcast(command)
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
        """Raise ModelError outside of `computing`, where rank 0 would wait for the others
        forever."""
        if not self.together:
            raise ModelError(
                f"The model is split over {self.size} processes, and this needs it in one. Set "
                "Tensor parallel to 1."
            )

    def close(self) -> None:
        if self.over:
            return
        self.over = True
        with suppress(Exception):
            if not self.failed.is_set():
                self.group.broadcast({"do": "end"})
        for each in self.processes.values():
            each.kill()
        with suppress(Exception):
            self.group.close()


CURRENT: list[Ranks] = []
"""The model that is split, if one is."""


def awaited(store: Store, key: str) -> str:
    """Wait for the value of a key and return it; "" if the store is gone."""
    while True:
        try:
            store.wait([key], PATIENCE)
            return str(store.get(key).decode())
        except DistStoreError:  # out of time
            continue
        except Exception:
            return ""


def client(host: str, port: int) -> Store:
    """The store that the ranks share, at that address."""
    return PrefixStore("strata", TCPStore(host, port, is_master=False))


def start_rank(place: Place, rank: int, local: int, number: int) -> subprocess.Popen[bytes]:
    """Start the process of one rank. It ends with the process that starts it, because its standard
    input is closed then."""
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
    """Which rank has ended and why: its own last report, or else its exit status."""
    words = ""
    with suppress(Exception):
        if store.check([f"words/{rank}"]):
            words = store.get(f"words/{rank}").decode()
    if words:
        return f"Rank {rank} of the {size} that compute the model failed: {words}"
    return process.death(status, f"Rank {rank} of the {size} that compute the model")
