"""The warm sequences: one per conversation and model, together within a limit of memory.

Whoever goes on with a conversation finds its tokens in the caches of the target and of the draft
models, and so prefills only the new words. What was used longest ago goes first.

Invariant: after `fit` all of them are within the limit, or none but those of the conversation that
was used last are left. Only the thread that runs the models may call this.
"""

from engine.backends.base import Backend

LIMIT = 512 << 20
"""Bytes of all warm sequences: 32,768 tokens of the embedded model (16 KiB each), 4,096 of a usual
one of eight billion parameters (128 KiB each). That is a few conversations of any model, and less
than the weights of a large one."""

Key = tuple[str, str]
"""An owner, and one of the owner's conversations."""
Place = tuple[Key, Backend]
"""A conversation in a loaded model."""


class Sequences:
    """At most `limit` bytes of sequences, each of one conversation and one loaded model."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.warm: dict[Place, Backend] = {}
        """In the order of their use, the last one at the end."""

    def get(self, key: Key, model: Backend) -> Backend:
        """The sequence of a conversation in a loaded model, a new one where there is none."""
        sequence = self.warm.pop((key, model), None) or model.open()
        self.warm[key, model] = sequence
        return sequence

    @property
    def bytes(self) -> int:
        """About what all of them take in memory."""
        return sum(sequence.bytes for sequence in self.warm.values())

    def fit(self) -> None:
        """Close what was used longest ago until the limit is kept, but nothing of the conversation
        that was used last."""
        excess, places = self.bytes - self.limit, list(self.warm)
        for place in places:
            if excess > 0 and place[0] != places[-1][0]:
                excess -= self.warm[place].bytes
                self.close(place)

    def drop(self, key: Key) -> None:
        """Free the sequences of a conversation, in all models."""
        self.close(*(place for place in self.warm if place[0] == key))

    def drop_model(self, model: Backend) -> None:
        """Free the sequences of a model that goes: they hold on to its weights."""
        self.close(*(place for place in self.warm if place[1] is model))

    def clear(self) -> None:
        """Free all of them."""
        self.close(*self.warm)

    def close(self, *places: Place) -> None:
        """Free some of them."""
        for place in places:
            self.warm.pop(place).close()
