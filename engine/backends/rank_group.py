"""The ranks of one model, as they find each other and talk.

Two groups of torch: one for the sums of forwards, which no rank may hold up for long, and one for
what rank 0 tells the others, who wait for that as long as nobody asks anything. What is told is
JSON, so that nothing a rank hears can run code.

All ranks make the same calls in the same order. Where an error breaks that off, they find out
together whether it was the same one for all (`in_step`). Then they go on, else the group is over.
"""

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

Message = Mapping[str, Any]
LIBRARIES = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""What computes sums across ranks, by the kind of their device."""
FORWARD = timedelta(minutes=5)
"""A sum that takes longer has lost a rank."""
IDLE = timedelta(days=365)
SETTLE = timedelta(seconds=5)
"""Within so much time all ranks notice an error that they have in common."""
FRAME = 4096
"""Bytes that are sent at once. Most of what is told fits."""
SIZE = 4


class Group:
    """See the head of this file. To be made by all ranks at once; one at a time in a process."""

    def __init__(self, store: Store, rank: int, size: int, device: str) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.errors = 0
        own = PrefixStore("group", store)
        dist.init_process_group(
            LIBRARIES[device], store=own, rank=rank, world_size=size, timeout=FORWARD
        )
        self.words = dist.new_group(backend="gloo", timeout=IDLE)

    def tell(self, message: Message) -> None:
        """Say something to all others; rank 0 alone does."""
        data = json.dumps(message).encode()
        framed = len(data).to_bytes(SIZE, "big") + data
        for start, size in ((0, FRAME), (FRAME, len(framed) - FRAME)):
            if size > 0:
                part = framed[start : start + size].ljust(size, b"\0")
                self.send(torch.frombuffer(bytearray(part), dtype=torch.uint8))

    def hear(self) -> Message:
        """What rank 0 says next."""
        frame = self.send(torch.empty(FRAME, dtype=torch.uint8)).numpy().tobytes()
        size = int.from_bytes(frame[:SIZE], "big")
        rest = size + SIZE - FRAME
        if rest > 0:
            frame += self.send(torch.empty(rest, dtype=torch.uint8)).numpy().tobytes()
        message: Message = json.loads(frame[SIZE : SIZE + size])
        return message

    def agree(self, stop: bool = False) -> bool:
        """Whether rank 0 wants to stop here, told to all."""
        return bool(self.send(torch.tensor([stop], dtype=torch.uint8)).item())

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """The values of rank 0, in the place of those of the others."""
        dist.broadcast(values, 0, group=self.words)
        return values

    def in_step(self, words: str) -> bool:
        """Whether all ranks had an error in the same call, as this one had: `words` say which."""
        self.errors += 1
        self.store.set(f"error/{self.errors}/{self.rank}", words)
        try:
            everyone = [f"error/{self.errors}/{rank}" for rank in range(self.size)]
            self.store.wait(everyone, SETTLE)
        except Exception:
            # Out of time, or nobody keeps what they tell each other any more.
            return False
        return True

    def close(self) -> None:
        """Leave; whoever waits for this rank has an error then."""
        dist.destroy_process_group()
