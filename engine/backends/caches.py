"""The cache of a sequence: keys and values per row, and the states of layers that keep one.

Attention keeps a row for every token, so a rejected draft is dropped by setting a length. A
recurrent or convolutional layer keeps one state for the whole text, and adding a token destroys the
previous state. While a chain is verified, such layers therefore keep the state after each of its
rows, and accepting some rows means continuing from the state after the last of them. Nothing is
recomputed.

A recurrent layer of the library reads several tokens in one piece and returns only the last state.
For decoding it also has a function for a single token. A chain is read with that function, row
after row: this has the same states and sums as plain decoding, and gives a state after each row.
Everything else in a layer, and all of attention, still processes the whole chain at once. The
library's functions are replaced, once, by functions that check whether one of our caches is
computing (`RUNNING`). In all other cases they call the library's. Mamba's function cannot start
from a given state; ours adds that, so that prompts can continue from one, too.

Apart from the last chain, a text can be shortened only to a mark: a copy of all states, made where
a later prompt may want to continue.

Invariant: the first `length` rows are decided, and the states are those after them. Between a
forward and `keep`, there are also rows and states beyond them.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from threading import local
from typing import Any, Literal
from weakref import proxy

import torch
from torch.nn.functional import pad, silu, softplus
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

from engine.drafting.costs import LARGEST

TREE_ROWS = LARGEST + 1
"""Rows of the largest tree and its root, for which a cache has room after its text."""
Name = Literal["begin", "tail", "end"]
"""Marks of a text: where reading its last prompt began, shortly before the prompt's end, and at
it."""
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
STATE_KINDS = {"linear_attention", "conv"}
BOTH = "hybrid"
"""The library's name of layers that have attention and a state."""
CACHE_ARGUMENTS = ("cache_params", "cache", "past_key_values")


class Running(local):
    """The cache of ours that a forward of this thread is filling, if any."""

    cache: "TreeCache | None" = None


RUNNING = Running()


class TreeLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, shape (1, heads, rows, head size), written in place.

    The room for rows at least doubles when it is full, up to the cache's capacity. Each row is
    therefore copied about once while a text grows, and most forwards allocate nothing.
    """

    def __init__(self, cache: "TreeCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache: TreeCache = proxy(cache)  # A cycle would keep closed sequences for long.
        self.rows = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = enlarged(key_states, 0, 0), enlarged(value_states, 0, 0)
        self.is_initialized = True

    def grow(self, rows: int) -> None:
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

    def copy(self, other: "TreeLayer", length: int) -> None:
        if other.keys is None or other.values is None:
            return  # It shares those of another layer.
        self.rows = min(length + TREE_ROWS, self.cache.capacity)
        self.keys, self.values = (
            enlarged(states, self.rows, length) for states in (other.keys, other.values)
        )
        self.is_initialized = True

    def move(self, source: torch.Tensor, start: int) -> None:
        """Copy the rows `source` to the places from `start` on."""
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
    larger = states.new_empty((*states.shape[:2], rows, states.shape[3]))
    larger[:, :, :length] = states[:, :, :length]
    return larger


States = dict[int, torch.Tensor]
"""States of one layer by their number; most layers have only number 0."""


class StateLayer(LinearAttentionCacheLayerMixin):
    """The states of one layer: the last inputs of its convolution, and the state of its recurrence.

    A forward over one row changes them in place; that row is the root, which is always accepted.
    While a chain is verified, `inputs` holds the inputs of the convolutions, ending with those of
    the rows, and `chain` the recurrent state after each row.
    """

    def __init__(self, cache: "TreeCache", number_of_states: int = 1) -> None:
        super().__init__(number_of_states)
        self.cache: TreeCache = proxy(cache)
        self.inputs: States = {}
        self.chain: list[torch.Tensor] = []
        self.marks: dict[Name, tuple[States, States]] = {}

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a state begins with the first update."""

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The inputs of a convolution, shape (1, channels, tokens): the kept ones (zeros at the
        beginning of a text), followed by the new ones."""
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
        """Continue after the first `kept` of the last `rows` rows."""
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
        """Drop what is needed to shorten the last chain."""
        self.inputs.clear()
        self.chain.clear()

    def mark(self, name: Name) -> None:
        self.marks[name] = copied(self.conv_states), copied(self.recurrent_states)

    def restore(self, name: Name | None) -> None:
        """Go back to a mark, or to no states if no name is given."""
        convolutions, recurrences = self.marks[name] if name is not None else ({}, {})
        numbers = range(self.number_of_states)
        self.conv_states = dict.fromkeys(numbers) | copied(convolutions)
        self.recurrent_states = dict.fromkeys(numbers) | copied(recurrences)
        self.has_previous_state = {number: number in convolutions for number in numbers}
        self.forget()


def copied(states: Mapping[int, torch.Tensor | None]) -> States:
    return {number: state.clone() for number, state in states.items() if state is not None}


class BothLayer(StateLayer, TreeLayer):  # type: ignore[no-untyped-call, override]
    def __init__(self, cache: "TreeCache", number_of_states: int = 1) -> None:
        TreeLayer.__init__(self, cache)
        StateLayer.__init__(self, cache, number_of_states)

    def get_max_length(self) -> int:
        return TreeLayer.get_max_length(self)


class TreeCache(Cache):
    """The cache of one sequence; see the module's docstring. `kinds` lists the kind of each layer,
    as the library names it, and its number of states."""

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

    @property
    def bytes(self) -> int:
        return bytes_of(self)

    def layer_of(self, kind: str, states: int) -> TreeLayer | StateLayer | DummyLayer:
        if kind in STATE_KINDS:
            return StateLayer(self, states)
        if kind == BOTH:
            return BothLayer(self, states)
        return TreeLayer(self) if kind in ATTENTION_KINDS else DummyLayer()  # type: ignore[no-untyped-call]

    @contextmanager
    def computing(self, verifying: bool) -> Iterator[None]:
        """Run a forward of this sequence in this block. If it is `verifying`, the states after each
        of its rows are kept."""
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
        """Move the `kept` ones of the `rows` rows of the last tree, in order, to the end of the
        decided rows. If there are states, the kept rows must be the first ones of a chain."""
        if any(row != i for i, row in enumerate(kept)):
            source = torch.tensor(kept) + self.length
            for layer in self.tree_layers:
                layer.move(source, self.length)
        for states in self.state_layers:
            states.settle(len(kept), rows)
        self.length += len(kept)

    def copy(self, other: "TreeCache", length: int) -> None:
        """Begin with the first rows of another cache of this model, which has no states."""
        for own, layer in zip(self.tree_layers, other.tree_layers, strict=True):
            own.copy(layer, length)
        self.length = length

    def mark(self, name: Name) -> None:
        """Copy the present states, so that a later text can continue from here."""
        if self.state_layers and self.length and self.marks.get(name) != self.length:
            self.marks[name] = self.length
            for layer in self.state_layers:
                layer.mark(name)

    def shorten(self, length: int, dirty: bool = False) -> None:
        """Go back to a decided length, or to the longest before it that can be restored. With
        `dirty` a forward was not settled, so the states are not those after `length`."""
        if self.state_layers and (dirty or length < self.length):
            self.forget_marks(length)
            name = max(self.marks, key=self.marks.__getitem__, default=None)
            length = self.marks[name] if name is not None else 0
            for layer in self.state_layers:
                layer.restore(name)
        self.length = length

    def forget_marks(self, length: int = 0) -> None:
        for name in [name for name, marked in self.marks.items() if marked > length]:
            del self.marks[name]
            for layer in self.state_layers:
                del layer.marks[name]

    def stretch(self, length: int) -> None:
        """Claim to hold so many rows, whose content and states are zeros, for measurements. The
        cache must have held some rows before."""
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
    """The kinds of a model's layers and how many states each has; None if a kind is unknown. Layers
    that share keys and values get a cache of their own all the same, which stays empty."""
    if not is_recurrent(config):
        return [("full_attention", 1)] * config.num_hidden_layers
    kinds, settings = get_layer_types_and_kwargs(config)
    if not set(kinds) <= ATTENTION_KINDS | STATE_KINDS | {BOTH, "dummy"}:
        return None
    states = [each.get("number_of_states", 1) for each in settings]
    return list(zip(kinds, states, strict=True))


def cache_argument(function: Callable[..., Any]) -> str:
    """The name of the argument that passes the cache to a model, or to a part of it. It depends on
    the version of transformers (`cache` since 5.24) and on the architecture."""
    takes = signature(function).parameters
    return next((name for name in CACHE_ARGUMENTS if name in takes), CACHE_ARGUMENTS[-1])


def is_recurrent(config: Any) -> bool:
    """Whether some layer keeps a state instead of keys and values, which cannot be rolled back."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return not kinds <= ATTENTION_KINDS or not hasattr(config, "num_attention_heads")


def bytes_of(cache: Cache) -> int:
    tensors = {id(each): each for layer in cache.layers for each in tensors_in(vars(layer))}
    return sum(each.untyped_storage().nbytes() for each in tensors.values() if each.ndim)


def tensors_in(kept: Any) -> Iterator[torch.Tensor]:
    if isinstance(kept, torch.Tensor):
        yield kept
    elif isinstance(kept, dict | list | tuple):
        for each in kept.values() if isinstance(kept, dict) else kept:
            yield from tensors_in(each)


# Recurrences row by row.

Given = Mapping[str, Any]
"""The arguments of a call by name."""
Output = tuple[torch.Tensor, torch.Tensor]
"""The outputs of a recurrence for each row, and its last state."""


def by_delta_rule(one: Callable[..., Output], layer: StateLayer, given: Given) -> Output:
    """The gated delta rule: queries, keys, values and gates have the rows in dimension 1."""
    rows = {name: given[name] for name in ("query", "key", "value", "g", "beta")}
    state, outputs = given["initial_state"], []
    for row in range(rows["query"].shape[1]):
        part = {name: value[:, row : row + 1] for name, value in rows.items()}
        settings = {**given, **part, "initial_state": state, "output_final_state": True}
        output, state = one(**settings)
        outputs.append(output)
        layer.chain.append(state)
    return torch.cat(outputs, dim=1), state


def by_mamba2(one: Callable[..., torch.Tensor], layer: StateLayer, given: Given) -> Output:
    """Mamba-2: inputs (batch, rows, heads, size), steps (batch, rows, heads), B and C (batch, rows,
    groups, states)."""
    inputs, steps, b, c = (given[name] for name in ("hidden_states", "dt", "B", "C"))
    heads, size = inputs.shape[2:]
    state = given["initial_states"]
    if state is None:
        state = inputs.new_zeros((len(inputs), heads, size, b.shape[-1]), dtype=torch.float32)
    decay = given["A"].float()[:, None, None].expand(heads, size, b.shape[-1])
    skip, bias = (given[name][:, None].expand(heads, size) for name in ("D", "dt_bias"))
    outputs = []
    for row in range(inputs.shape[1]):
        state = state.clone()  # it is changed in place
        step = steps[:, row, :, None].expand(-1, -1, size)
        here = inputs[:, row], step, decay, b[:, row], c[:, row], skip
        outputs.append(one(state, *here, z=None, dt_bias=bias, dt_softplus=given["dt_softplus"]))
        layer.chain.append(state)
    return torch.stack(outputs, dim=1), state


def by_mamba(one: Callable[..., torch.Tensor], layer: StateLayer, given: Given) -> Output:
    """Mamba, with rows in the last dimension: inputs, steps and gates (batch, channels, rows), B
    and C (batch, states, rows)."""
    inputs, steps, gates, b, c = (given[name] for name in ("hidden_states", "dt", "z", "B", "C"))
    state = layer.recurrent_states[0]
    if state is None:
        state = inputs.new_zeros((*inputs.shape[:2], b.shape[1]))
    outputs = []
    for row in range(inputs.shape[2]):
        state = state.clone()
        here = inputs[..., row], steps[..., row], given["A"], b[..., row], c[..., row], given["D"]
        settings = {"dt_bias": given["delta_bias"], "dt_softplus": given["delta_softplus"]}
        outputs.append(one(state, *here, z=gates[..., row], **settings))
        layer.chain.append(state)
    return torch.stack(outputs, dim=-1), state


def mamba_resumed(scan: Callable[..., Output], state: torch.Tensor, given: Given) -> Output:
    """Mamba's scan continued from a state. The scan is linear in the state, so the contribution of
    the state is added to a scan that begins with zeros."""
    outputs, last = scan(**{**given, "z": None})
    steps = given["dt"].float()
    if given["delta_bias"] is not None:
        steps = steps + given["delta_bias"].float()[..., None]
    if given["delta_softplus"]:
        steps = softplus(steps)
    left = torch.exp(given["A"][None, :, None, :] * steps.cumsum(dim=-1)[..., None])
    left = left * state[:, :, None, :]
    added = torch.einsum("bdrn,bnr->bdr", left, given["C"].float())
    outputs = (outputs + added).to(outputs.dtype) * silu(given["z"])
    return outputs, (last + left[:, :, -1]).to(last.dtype)


@dataclass(frozen=True, slots=True)
class Scan:
    """A way to read rows one by one: `one` is the name of the library's function for a single
    token. `resumed` reads several rows at once from a state, if the library's own function can only
    begin with zeros."""

    one: str
    by_rows: Callable[[Callable[..., Any], StateLayer, Given], Output]
    resumed: Callable[[Callable[..., Output], torch.Tensor, Given], Output] | None = None


SCANS = {
    "torch_chunk_gated_delta_rule": Scan("torch_recurrent_gated_delta_rule", by_delta_rule),
    "chunk_kimi_delta_attention": Scan("recurrent_kimi_delta_attention", by_delta_rule),
    "mamba2_chunk_scan": Scan("mamba2_selective_state_update", by_mamba2),
    "mamba_selective_scan": Scan("mamba_selective_state_update", by_mamba, mamba_resumed),
}
"""The library's functions for several tokens, by the names that its models call."""


def follow_rows(model: Any) -> None:
    """Make the recurrences of a model keep the state after each row while a chain is verified."""
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules[name]
        for called, scan in SCANS.items():
            library, one = getattr(module, called, None), getattr(module, scan.one, None)
            if library is not None and one is not None and not hasattr(library, "followed"):
                setattr(module, called, followed(library, one, scan))


def followed(
    library: Callable[..., Output], one: Callable[..., Any], scan: Scan
) -> Callable[..., Output]:
    """Wrap a recurrence of the library so that it goes row by row while a chain is verified."""
    named = signature(library)

    @wraps(library)
    def read(*args: Any, **kwargs: Any) -> Output:
        cache = RUNNING.cache
        layer = cache.at if cache is not None else None
        if cache is None or layer is None:
            return library(*args, **kwargs)
        state = layer.recurrent_states[0]
        if not cache.verifying and (scan.resumed is None or state is None):
            return library(*args, **kwargs)
        bound = named.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        given |= given.pop("kwargs", {})
        if cache.verifying:
            return scan.by_rows(one, layer, given)
        assert scan.resumed is not None and state is not None
        return scan.resumed(library, state, given)

    read.followed = True  # type: ignore[attr-defined]
    return read
