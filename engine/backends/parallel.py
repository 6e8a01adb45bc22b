"""A model that is split over several processes: all compute every forward, each its part of it.

Rank 0 has a backend like any other (`ParallelBackend`); drafting, verification and sampling do not
know about the other ranks. Before each forward it sends them a command with the rows, what these
see, and the changes of the cache since the last forward. The other ranks (`Follower`) do the same
with their own caches and drop the logits. All sums are the same on all ranks, and so are the
decisions based on them.

Invariant: when a forward begins, a cache and its counterparts hold the same rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor
from transformers.cache_utils import Cache

from engine.backends.base import BackendInfo
from engine.backends.caches import TREE_ROWS, Name, TreeCache
from engine.backends.rank_processes import Group, Message, Ranks
from engine.backends.transformers import PARALLEL, Stopped, TransformersBackend, layers_of
from engine.sampling import Floats


class JournaledCache(TreeCache):
    """A cache that logs its changes since the last forward, so that other ranks can repeat them."""

    journal: list[tuple[str, list[Any]]]

    def __init__(self, kinds: Sequence[tuple[str, int]], capacity: int) -> None:
        self.journal = []
        super().__init__(kinds, capacity)

    def keep(self, kept: Sequence[int], rows: int) -> None:
        self.journal.append(("keep", [list(kept), rows]))
        super().keep(kept, rows)

    def mark(self, name: Name) -> None:
        self.journal.append(("mark", [name]))
        super().mark(name)

    def shorten(self, length: int, dirty: bool = False) -> None:
        self.journal.append(("shorten", [length, dirty]))
        super().shorten(length, dirty)

    def stretch(self, length: int) -> None:
        self.journal.append(("stretch", [length]))
        super().stretch(length)


class ParallelBackend(TransformersBackend):
    """Rank 0's backend of a model that is split over `ranks`; see the module's docstring."""

    def __init__(self, model: Any, tokenizer: Any, info: BackendInfo, ranks: Ranks) -> None:
        self.ranks = ranks
        self.numbers: WeakKeyDictionary[Cache, int] = WeakKeyDictionary()
        """The number of each cache among ranks. All sequences share this and the next two
        values."""
        self.made = iter(range(1 << 62))
        self.gone: list[int] = []
        self.prompt: int | None = None
        """The length of the prompt that is being read."""
        model.register_forward_pre_hook(ranks.check)
        super().__init__(model, tokenizer, info)

    def fresh_cache(self) -> TreeCache:
        assert self.kinds is not None
        return JournaledCache(self.kinds, self.info.context_length + TREE_ROWS)

    @contextmanager
    def reading(self, length: int, cancelled: Callable[[], bool]) -> Iterator[None]:
        """As in the base class, except that between two layers either all ranks stop or none."""

        def agreed() -> bool:
            return self.stoppable and self.ranks.group.agree(cancelled())

        self.prompt, self.stoppable = length, False
        try:
            with super().reading(length, agreed):
                yield
        finally:
            self.prompt = None

    def forward(
        self,
        tokens: Sequence[int],
        depths: Sequence[int],
        visible: NDArray[np.bool_] | None = None,
        logits: int = 0,
        verifying: bool = False,
    ) -> torch.Tensor:
        # Agreeing at each layer takes time that matters in short forwards only.
        self.stoppable = self.prompt is not None and len(tokens) > PARALLEL
        command = {
            "do": "forward",
            "cache": self.number(),
            "tree": self.info.can_tree,
            "journal": getattr(self.cache, "journal", []),
            "start": len(self.cached),
            "offset": self.offset,
            "prompt": self.prompt,
            "stoppable": self.stoppable,
            "tokens": list(tokens),
            "depths": list(depths),
            "visible": None if visible is None else np.packbits(visible).tobytes().hex(),
            "logits": logits,
            "verifying": verifying,
        }
        with self.together(command):
            if self.info.can_tree:
                self.cache.journal = []
            return super().forward(tokens, depths, visible, logits, verifying)

    def alone(self, tokens: Sequence[int]) -> Floats:
        with self.together({"do": "alone", "tokens": list(tokens), "offset": self.offset}):
            return super().alone(tokens)

    def embeddings(self) -> tuple[torch.Tensor, torch.Tensor]:
        with self.together({"do": "embeddings"}):
            return whole_embeddings(self.model)

    def number(self) -> int:
        """The number of this sequence's cache among ranks."""
        number = self.numbers.get(self.cache)
        if number is None:
            number = self.numbers[self.cache] = next(self.made)
            finalize(self.cache, self.gone.append, number)
        return number

    @contextmanager
    def together(self, command: dict[str, Any]) -> Iterator[None]:
        """Let all ranks compute this command in this block."""
        gone = [self.gone.pop() for _ in range(len(self.gone))]
        attention = self.model.config._attn_implementation
        with self.ranks.computing({**command, "gone": gone, "attention": attention}, Stopped):
            yield


class Follower:
    """A rank other than the first: it executes the commands of rank 0 until rank 0 ends."""

    def __init__(self, group: Group, backend: TransformersBackend) -> None:
        self.group, self.backend = group, backend
        self.sequences: dict[int, TransformersBackend] = {}

    @torch.inference_mode()
    def run(self) -> None:
        """Follow rank 0 to the end. Raises errors that only this rank has."""
        while (command := self.group.receive())["do"] != "end":
            for number in command["gone"]:
                self.sequences.pop(number, None)
            if command["attention"] != self.backend.model.config._attn_implementation:
                self.backend.model.set_attn_implementation(command["attention"])
            try:
                self.do(command)
            except Exception as error:
                if not self.group.in_step(str(error)):
                    raise

    def do(self, command: Message) -> None:
        if command["do"] == "alone":
            self.backend.offset = command["offset"]
            self.backend.alone(command["tokens"])
        elif command["do"] == "embeddings":
            whole_embeddings(self.backend.model)
        else:
            with suppress(Stopped), self.reading(command):
                self.forward(self.sequence(command), command)

    def reading(self, command: Message) -> Any:
        """The context in which rank 0 reads a prompt."""
        if command["prompt"] is None:
            return nullcontext()

        def agreed() -> bool:
            return bool(command["stoppable"]) and self.group.agree()

        return self.backend.reading(command["prompt"], agreed)

    def sequence(self, command: Message) -> TransformersBackend:
        """The counterpart of a sequence of rank 0, brought to the same state."""
        number = command["cache"]
        if number not in self.sequences:
            fresh = copy(self.backend)
            fresh.info = replace(fresh.info, can_tree=command["tree"])
            fresh.cache = None
            fresh.reset()
            self.sequences[number] = fresh
        sequence = self.sequences[number]
        for name, args in command["journal"]:
            getattr(sequence.cache, name)(*args)
        sequence.cached, sequence.offset = [0] * command["start"], command["offset"]
        return sequence

    def forward(self, sequence: TransformersBackend, command: Message) -> None:
        tokens, packed = command["tokens"], command["visible"]
        visible = None
        if packed is not None:
            count = len(tokens)
            bits = np.unpackbits(np.frombuffer(bytes.fromhex(packed), np.uint8), count=count**2)
            visible = bits.astype(bool).reshape(count, count)
        sequence.forward(
            tokens, command["depths"], visible, command["logits"], command["verifying"]
        )


def splits(model: Any) -> bool:
    """Whether any layer is split: the library's plan may name layers that a model does not have."""
    return any(isinstance(p, DTensor) for layer in layers_of(model) for p in layer.parameters())


def whole_embeddings(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The embedding and the output matrix, gathered from all ranks."""
    found = []
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = module.weight
        found.append(weight.full_tensor() if isinstance(weight, DTensor) else weight)
    return found[0], found[1]


def held(model: Any) -> int:
    """The bytes of its weights that this rank holds."""
    parts = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(part.numel() * part.element_size() for part in parts)
