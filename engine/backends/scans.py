"""Recurrences row by row, so that the state after each row of a chain is there to go back to.

A recurrent layer of the library reads several tokens in one piece and tells the last state alone.
Behind a text it also has a function for a single token, with which it decodes. A chain is read with
that one, row after row: the same states and sums as plain decoding has, and a state after each row.
All else of a layer, and all of attention, still takes the whole chain at once.

The library's functions are replaced, once, by ones that ask whether a cache of ours is computing
(`RUNNING`). Everywhere else they are the library's. Mamba's function knows no state to begin with;
it is told ours, so that prompts go on from it as well.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from threading import local
from typing import Any, Protocol

import torch
from torch.nn.functional import silu, softplus

Given = Mapping[str, Any]
"""The arguments of a call by name."""
Output = tuple[torch.Tensor, torch.Tensor]
"""What a recurrence gives for each row, and its last state."""


class Remembering(Protocol):
    """A layer of a cache: its states by number, and those after each row of the last chain."""

    recurrent_states: dict[int, torch.Tensor | None]
    chain: list[torch.Tensor]


class Following(Protocol):
    """A cache: the layer that is computed, and whether the state after each row is wanted."""

    @property
    def at(self) -> Remembering | None: ...

    verifying: bool


class Running(local):
    """The cache that a forward of this thread fills, where it is one of ours."""

    cache: Following | None = None


RUNNING = Running()


def by_delta_rule(one: Callable[..., Output], layer: Remembering, given: Given) -> Output:
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


def by_mamba2(one: Callable[..., torch.Tensor], layer: Remembering, given: Given) -> Output:
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


def by_mamba(one: Callable[..., torch.Tensor], layer: Remembering, given: Given) -> Output:
    """Mamba: all has the rows last: inputs, steps and gates (batch, channels, rows), B and C
    (batch, states, rows)."""
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


def mamba_behind(scan: Callable[..., Output], state: torch.Tensor, given: Given) -> Output:
    """Mamba's scan going on from a state: it is linear in that, so what the state adds is added to
    the scan that begins with zeros."""
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
    """How to read rows one by one: `one` is the library's name of its function for a single token.

    `behind` reads several at once from a state, where the library's own can only begin with zeros.
    """

    one: str
    by_rows: Callable[[Callable[..., Any], Remembering, Given], Output]
    behind: Callable[[Callable[..., Output], torch.Tensor, Given], Output] | None = None


SCANS = {
    "torch_chunk_gated_delta_rule": Scan("torch_recurrent_gated_delta_rule", by_delta_rule),
    "chunk_kimi_delta_attention": Scan("recurrent_kimi_delta_attention", by_delta_rule),
    "mamba2_chunk_scan": Scan("mamba2_selective_state_update", by_mamba2),
    "mamba_selective_scan": Scan("mamba_selective_state_update", by_mamba, mamba_behind),
}
"""The library's functions for several tokens, by the names that its models call."""


def follow_rows(model: Any) -> None:
    """Have the recurrences of a model keep the state after each row while a chain is verified."""
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules[name]
        for called, scan in SCANS.items():
            library, one = getattr(module, called, None), getattr(module, scan.one, None)
            if library is not None and one is not None and not hasattr(library, "followed"):
                setattr(module, called, followed(library, one, scan))


def followed(
    library: Callable[..., Output], one: Callable[..., Any], scan: Scan
) -> Callable[..., Output]:
    """A recurrence of the library that goes row by row while a chain is verified."""
    named = signature(library)

    @wraps(library)
    def read(*args: Any, **kwargs: Any) -> Output:
        cache = RUNNING.cache
        layer = cache.at if cache is not None else None
        if cache is None or layer is None:
            return library(*args, **kwargs)
        state = layer.recurrent_states[0]
        if not cache.verifying and (scan.behind is None or state is None):
            return library(*args, **kwargs)
        bound = named.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        given |= given.pop("kwargs", {})
        if cache.verifying:
            return scan.by_rows(one, layer, given)
        assert scan.behind is not None and state is not None
        return scan.behind(library, state, given)

    read.followed = True  # type: ignore[attr-defined]
    return read
