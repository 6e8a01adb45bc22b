"""The cache of a sequence: keys and values per row, and the states of layers that keep one.

Attention keeps a row for every token, so a rejected draft is dropped by setting a length. A
recurrent or convolutional layer keeps one state for the whole text, and its past is gone once a
token was added. So while a chain is verified, such layers keep the state after each of its rows
(engine/backends/scans.py), and accepting some rows means going on from the state behind the last of
them. Nothing is computed again.

Beyond the last chain, a text can be shortened to a mark only: a copy of all states, made where a
later prompt may want to go on.

Invariant: the first `length` rows are decided, and the states are those after them. Between a
forward and `keep`, rows and states behind them exist as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.nn.functional import pad
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

from engine.backends.scans import RUNNING
from engine.drafting.costs import LARGEST

TREE_ROWS = LARGEST + 1
"""Rows of the largest tree and its root, for which a cache has room behind its text."""
Name = Literal["begin", "tail", "end"]
"""Marks of a text: where its last prompt began to be read, shortly before its end, and there."""
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
STATE_KINDS = {"linear_attention", "conv"}
BOTH = "hybrid"
"""The library's name of layers that have attention and a state."""


class TreeLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, shape (1, heads, rows, head size), written in place.

    The rows at least double when they are full, up to the cache's capacity. So each is copied about
    once while a text grows, and most forwards allocate nothing.
    """

    def __init__(self, cache: "TreeCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache
        self.rows = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = enlarged(key_states, 0, 0), enlarged(value_states, 0, 0)
        self.is_initialized = True

    def grow(self, rows: int) -> None:
        """Make room for so many rows at least."""
        assert self.keys is not None and self.values is not None
        self.rows = min(max(rows + TREE_ROWS, 2 * self.rows), self.cache.capacity)
        length = self.cache.length
        self.keys, self.values = (
            enlarged(states, self.rows, length) for states in (self.keys, self.values)
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            TreeLayer.lazy_initialization(self, key_states, value_states)
        assert self.keys is not None and self.values is not None
        start, end = self.cache.length, self.cache.length + key_states.shape[2]
        if end > self.rows:
            self.grow(end)
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def move(self, source: torch.Tensor, start: int) -> None:
        """Copy the rows `source` to where `start` begins."""
        if self.keys is not None and self.values is not None:
            source = source.to(self.keys.device)
            self.keys[:, :, start : start + len(source)] = self.keys[:, :, source]
            self.values[:, :, start : start + len(source)] = self.values[:, :, source]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return self.cache.capacity


def enlarged(states: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """The first `length` rows, with room for `rows`."""
    larger = states.new_empty((*states.shape[:2], rows, states.shape[3]))
    larger[:, :, :length] = states[:, :, :length]
    return larger


States = dict[int, torch.Tensor]
"""States of one layer by their number; most layers have number 0 alone."""


class StateLayer(LinearAttentionCacheLayerMixin):
    """The states of one layer: the last inputs of its convolution, and what its recurrence keeps.

    A forward over one row changes them in place; that row is the root, which is always accepted.
    Of a forward over several `inputs` are what the convolutions saw, the rows last, and `chain` the
    recurrent state after each row. Both are kept while a chain is verified.
    """

    def __init__(self, cache: "TreeCache", number_of_states: int = 1) -> None:
        super().__init__(number_of_states)
        self.cache = cache
        self.inputs: States = {}
        self.chain: list[torch.Tensor] = []
        self.marks: dict[Name, tuple[States, States]] = {}

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: a state begins with the first update."""

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The inputs of a convolution, shape (1, channels, tokens): those that it kept, zeros at
        the beginning of a text, and behind them the new ones."""
        before, size = self.conv_states[state_idx], conv_kernel_size or conv_states.shape[-1]
        if before is None:
            whole = pad(conv_states, (size, 0))
        else:
            size = before.shape[-1]
            whole = torch.cat([before, conv_states], dim=-1)
        if self.cache.verifying:
            self.inputs[state_idx] = whole
        self.conv_states[state_idx] = whole[..., -size:].clone()
        self.has_previous_state[state_idx] = True
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    def settle(self, kept: int, rows: int) -> None:
        """Go on behind the first `kept` of the last `rows` rows."""
        if kept < rows:
            for number, whole in self.inputs.items():
                state = self.conv_states[number]
                assert state is not None
                end = whole.shape[-1] - (rows - kept)
                self.conv_states[number] = whole[..., end - state.shape[-1] : end].clone()
            if self.chain:
                self.recurrent_states[0] = self.chain[kept - 1]
        self.forget()

    def forget(self) -> None:
        """The last chain cannot be shortened any more."""
        self.inputs.clear()
        self.chain.clear()

    def mark(self, name: Name) -> None:
        """Keep a copy of the states."""
        self.marks[name] = copied(self.conv_states), copied(self.recurrent_states)

    def restore(self, name: Name | None) -> None:
        """Put the states back to a mark, to none without a name."""
        convolutions, recurrences = self.marks[name] if name is not None else ({}, {})
        numbers = range(self.number_of_states)
        self.conv_states = dict.fromkeys(numbers) | copied(convolutions)
        self.recurrent_states = dict.fromkeys(numbers) | copied(recurrences)
        self.has_previous_state = {number: number in convolutions for number in numbers}
        self.forget()


def copied(states: Mapping[int, torch.Tensor | None]) -> States:
    """Copies of those states that there are."""
    return {number: state.clone() for number, state in states.items() if state is not None}


class BothLayer(StateLayer, TreeLayer):  # type: ignore[no-untyped-call, override]
    """A layer that has attention and a state."""

    def __init__(self, cache: "TreeCache", number_of_states: int = 1) -> None:
        TreeLayer.__init__(self, cache)
        StateLayer.__init__(self, cache, number_of_states)

    def get_max_length(self) -> int:
        return TreeLayer.get_max_length(self)


class TreeCache(Cache):
    """See the head of this file. `kinds` are those of the layers, as the library names them, and
    how many states each has."""

    def __init__(self, kinds: Sequence[tuple[str, int]], capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.verifying = False
        self.at: StateLayer | None = None
        """The layer whose recurrence is computed next."""
        layers: list[Any] = [self.layer_of(kind, states) for kind, states in kinds]
        self.tree_layers = [layer for layer in layers if isinstance(layer, TreeLayer)]
        self.state_layers = [layer for layer in layers if isinstance(layer, StateLayer)]
        self.marks: dict[Name, int] = {}
        super().__init__(layers=layers)

    def layer_of(self, kind: str, states: int) -> TreeLayer | StateLayer | DummyLayer:
        """An empty layer of some kind."""
        if kind in STATE_KINDS:
            return StateLayer(self, states)
        if kind == BOTH:
            return BothLayer(self, states)
        return TreeLayer(self) if kind in ATTENTION_KINDS else DummyLayer()  # type: ignore[no-untyped-call]

    @contextmanager
    def computing(self, verifying: bool) -> Iterator[None]:
        """While it is entered, a forward of this sequence runs. Where it is `verifying`, the states
        after each of its rows are kept."""
        self.verifying = verifying
        RUNNING.cache = self
        try:
            yield
        finally:
            RUNNING.cache = self.at = None
            self.verifying = False

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        layer = self.layers[layer_idx]
        if isinstance(layer, StateLayer):
            self.at = layer
        state: torch.Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
        return state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def keep(self, kept: Sequence[int], rows: int) -> None:
        """Of the `rows` rows of the last tree, move those `kept`, in order, to the end of the
        decided ones. Where there are states, they are the first ones of a chain."""
        if any(row != i for i, row in enumerate(kept)):
            source = torch.tensor(kept) + self.length
            for layer in self.tree_layers:
                layer.move(source, self.length)
        for states in self.state_layers:
            states.settle(len(kept), rows)
        self.length += len(kept)

    def mark(self, name: Name) -> None:
        """Keep the states as they are now, so that a later text can go on from here."""
        if self.state_layers and self.length and self.marks.get(name) != self.length:
            self.marks[name] = self.length
            for layer in self.state_layers:
                layer.mark(name)

    def shorten(self, length: int, dirty: bool = False) -> None:
        """Go back to a decided length, or to the longest before it that can be restored.

        `dirty` says that a forward was not settled: then the states are not those after `length`.
        """
        if self.state_layers and (dirty or length < self.length):
            self.forget_marks(length)
            name = max(self.marks, key=self.marks.__getitem__, default=None)
            length = self.marks[name] if name is not None else 0
            for layer in self.state_layers:
                layer.restore(name)
        self.length = length

    def forget_marks(self, length: int = 0) -> None:
        """Forget the marks behind more than so many tokens."""
        for name in [name for name, marked in self.marks.items() if marked > length]:
            del self.marks[name]
            for layer in self.state_layers:
                del layer.marks[name]

    def stretch(self, length: int) -> None:
        """Say that it holds so many rows, which are zeros, as its states are. It has to have held
        some."""
        self.forget_marks()
        for layer in self.tree_layers:
            layer.grow(length + TREE_ROWS)
            assert layer.keys is not None and layer.values is not None
            layer.keys.zero_()
            layer.values.zero_()
        for states in self.state_layers:
            states.forget()
            for kept in (*states.conv_states.values(), *states.recurrent_states.values()):
                if kept is not None:
                    kept.zero_()
        self.length = length


def kinds_of(config: Any) -> list[tuple[str, int]] | None:
    """The kinds of a model's layers and how many states each has; None where one is unknown here.

    A model that has attention alone may share keys and values between its layers: each is given
    room of its own, of which some never take any.
    """
    if not is_recurrent(config):
        return [("full_attention", 1)] * config.num_hidden_layers
    kinds, settings = get_layer_types_and_kwargs(config)
    if not set(kinds) <= ATTENTION_KINDS | STATE_KINDS | {BOTH, "dummy"}:
        return None
    states = [each.get("number_of_states", 1) for each in settings]
    return list(zip(kinds, states, strict=True))


def is_recurrent(config: Any) -> bool:
    """Whether some layer keeps a state instead of keys and values, which cannot be rolled back."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return not kinds <= ATTENTION_KINDS or not hasattr(config, "num_attention_heads")


def bytes_of(cache: Cache) -> int:
    """What a cache takes, whatever its layers keep."""
    tensors = {id(each): each for layer in cache.layers for each in tensors_in(vars(layer))}
    return sum(each.untyped_storage().nbytes() for each in tensors.values() if each.ndim)


def tensors_in(kept: Any) -> Iterator[torch.Tensor]:
    """The tensors in dictionaries, lists and tuples, at any depth."""
    if isinstance(kept, torch.Tensor):
        yield kept
    elif isinstance(kept, dict | list | tuple):
        for each in kept.values() if isinstance(kept, dict) else kept:
            yield from tensors_in(each)
