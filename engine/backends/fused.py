"""Fewer and larger operations in the layers of a model, while a forward of it is captured.

The products of one input with several matrices become one product: query, key and value, and the
gate with what it multiplies. The matrices are put behind each other once; the model's own weights
become views of them, so nothing is held twice. On a GPU with Triton attention reads the pool, and
with weights of 16 bits a row has the same bits in products of all sizes (kernels.py). Norms, rotary
embeddings and gates are one kernel each where they compute what those of Llama do, which is tried
with random numbers; others stay as they are.

`fused` replaces the forwards of a model only while it is entered. A recording keeps what was
computed then, so forwards outside remain the library's.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from engine.backends.pool import running_pool
from engine.backends.rounded import FewBits, RoundedLinear, give_back, multiply, problem, settle

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""The names of projections with the same input."""
HEAD_SIZES = (16, 32, 64, 128, 256)
"""The sizes of heads that the attention of kernels.py knows."""
IGNORED = ("position_ids", "cache_position")
"""Tensors that layers pass to attention, but that mean nothing to it."""
KINDS = (torch.bfloat16, torch.float16)
"""The types of products by kernels."""
NEAR = 0.01
"""How far what a kernel computes may be from what a module does, as a share of its norm."""
SEGMENT = 10 << 20
"""The bytes of a tensor from which on torch gives it a segment of its own in a GPU's memory."""
TREE = "strata_tree"
"""The name of this attention in the library."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""The matrices of a gate."""
ROTATION, ROTATED = "apply_rotary_pos_emb", ["q", "k", "cos", "sin"]
"""The name of the library's rotary embedding in the file of an architecture, and its parameters."""


def kernels_for(model: Any) -> ModuleType | None:
    """The module with the kernels, None if they do not suit the model or the machine. What else is
    special about its attention shows when they are tried."""
    sizes = {getattr(each, "head_dim", 0) for each in model.modules() if is_attention(each)}
    suits = all(size in HEAD_SIZES for size in sizes) and sizes
    if not suits or problem(model.device):
        return None
    return import_module("engine.backends.kernels")


def is_attention(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a captured forward, in the form of the library's attention functions. Raises
    ValueError if the layer asks for more than that."""
    for name, other in {"a mask": attention_mask, **others}.items():
        special = name == "softcap" or (torch.is_tensor(other) and name not in IGNORED)
        if special and other is not None:
            raise ValueError(f"its attention has {name}")
    kernels = import_module("engine.backends.kernels")
    pool, scale = running_pool(), scaling or query.shape[-1] ** -0.5
    table = pool.table
    assert table is not None
    seen = table.starts, table.lengths, table.places, table.lows[module.layer_idx], table.paths
    return kernels.tree_attention(query, key, value, *seen, pool.rows, scale), None


AttentionInterface.register(TREE, attend)


class Products:
    """Computes the products of a model in a captured forward: those of many rows by the library if
    it sums up as the kernels do, which is tried once for each shape."""

    def __init__(self, kernels: ModuleType | None, dtype: torch.dtype) -> None:
        self.kernels = kernels if dtype in KINDS else None
        self.by_library: dict[tuple[torch.Size, int, bool], bool] = {}

    def __call__(
        self, states: torch.Tensor, matrix: torch.Tensor | FewBits, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if isinstance(matrix, FewBits):
            return multiply(states, matrix, bias)
        found: torch.Tensor
        rows = states.numel() // states.shape[-1]
        known = states.dtype == matrix.dtype and matrix.dtype in KINDS
        if self.kernels is None or not known:
            return nn.functional.linear(states, matrix, bias)
        if rows > self.kernels.FEW_ROWS and self.same(rows, matrix, bias):
            return nn.functional.linear(states, matrix, bias)
        found = self.kernels.linear(states, matrix, bias)
        return found

    def same(self, rows: int, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether the library gives the same bits. Before a recording, each product is computed at
        least once, and then this is known."""
        assert self.kernels is not None
        key = weight.shape, rows, bias is None
        if key not in self.by_library:
            draw = torch.Generator(weight.device).manual_seed(0)
            shape = (1, rows, weight.shape[1])
            states = torch.randn(shape, generator=draw, dtype=weight.dtype, device=weight.device)
            own = self.kernels.linear(states, weight, bias)
            self.by_library[key] = torch.equal(nn.functional.linear(states, weight, bias), own)
        return self.by_library[key]


class Joined:
    """Projections of one input whose weights, and biases, are rows of one matrix.

    The first that is asked for a new input computes all; the others take their rows of the result.
    After the last one it is forgotten: kept to the end of a forward, the results of all layers
    would take over a gigabyte.
    """

    def __init__(self, parts: Sequence[nn.Linear | RoundedLinear]) -> None:
        self.parts = parts
        self.matrix = joined_matrix(parts)
        self.bias = joined_some(part.bias for part in parts)
        self.forget()

    def forget(self) -> None:
        self.input = self.output = torch.empty(0)
        self.left = len(self.parts)

    def forwards(
        self, products: Callable[..., torch.Tensor]
    ) -> Iterator[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]]:
        start = 0
        for part in self.parts:
            rows = slice(start, start + part.out_features)
            start = rows.stop

            def forward(states: torch.Tensor, rows: slice = rows) -> torch.Tensor:
                if states is not self.input:
                    self.forget()
                    self.input = states
                    self.output = products(states, self.matrix, self.bias)
                found = self.output[..., rows]
                self.left -= 1
                if not self.left:
                    self.forget()
                return found

            yield part, forward


def joined_matrix(parts: Sequence[nn.Linear | RoundedLinear]) -> torch.Tensor | FewBits:
    few = [part.matrix for part in parts if isinstance(part, RoundedLinear)]
    if not few:
        return joined([part.weight for part in parts if isinstance(part, nn.Linear)])
    return few[0]._replace(
        numbers=joined([each.numbers for each in few]),
        scales=joined([each.scales for each in few]),
        zeros=joined_some(each.zeros for each in few),
    )


def joined_some(parts: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    found = [part for part in parts if part is not None]
    return joined(found) if found else None


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of the rows of all parts, which become views of it."""
    whole = torch.cat([part.data for part in parts])
    start = 0
    for part in parts:
        part.data = whole[start : start + len(part)]
        start += len(part)
    return whole


def join(model: Any, device: torch.device) -> list[Joined]:
    found = []
    for module in model.modules():
        for names in JOINED:
            parts: list[Any] = [getattr(module, name, None) for name in names]
            kinds = [kind_of(part) for part in parts]
            if kinds[0] and kinds.count(kinds[0]) == len(kinds):
                found.append(Joined(parts))
                give_back(device)
    if found:
        close_gaps(model, device)
    return found


def kind_of(part: nn.Module | None) -> Sequence[object]:
    """What projections must have in common to become rows of one matrix; empty for one that cannot,
    such as one with its inputs in an order of its own."""
    if type(part) is nn.Linear:
        return nn.Linear, part.bias is None
    if isinstance(part, RoundedLinear) and part.matrix.places is None:
        matrix = part.matrix
        return part.bias is None, matrix.bits, matrix.group, matrix.zeros is None
    return ()


def close_gaps(model: Any, device: torch.device) -> None:
    """Give back the memory of the parts between other small tensors: torch puts these together in
    segments, which it keeps while one of them is there."""
    few = [each.matrix for each in model.modules() if isinstance(each, RoundedLinear)]
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *(each for one in few for each in one.tensors),
    ]
    settle(
        [each for each in tensors if SEGMENT > each.nbytes == each.untyped_storage().nbytes()],
        device,
    )


@contextmanager
def fused(
    model: Any, joined: list[Joined], products: Products, own: "OwnForwards | None"
) -> Iterator[None]:
    """Compute forwards of a model in this block with fewer operations, and with kernels if there
    are `own` forwards."""
    with ExitStack() as undo:
        if products.kernels is not None:
            for module in model.modules():
                if type(module) is nn.Linear:
                    replace(undo, module, multiplied(module, products))
        for group in joined:
            undo.callback(group.forget)
            for part, forward in group.forwards(products):
                replace(undo, part, forward)
        if own is not None:
            attention = model.config._attn_implementation
            model.set_attn_implementation(TREE)
            undo.callback(model.set_attn_implementation, attention)
            for module, forward in own.modules:
                replace(undo, module, forward)
            for library, rotate in own.rotations:
                undo.callback(setattr, library, ROTATION, getattr(library, ROTATION))
                setattr(library, ROTATION, rotate)
        yield


def multiplied(module: nn.Linear, products: Products) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda states: products(states, module.weight, module.bias)


def replace(undo: ExitStack, module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module another forward until `undo` ends."""
    if "forward" not in vars(module):
        undo.callback(delattr, module, "forward")
    module.forward = forward


class OwnForwards:
    """The forwards by kernels of the `modules` of a model, and the functions that take the place of
    the `rotations` in the library's files."""

    def __init__(self, model: Any, kernels: ModuleType) -> None:
        self.kernels, self.like = kernels, next(model.parameters())
        self.modules: list[tuple[nn.Module, Callable[..., Any]]] = []
        self.rotations: list[tuple[ModuleType, Callable[..., Any]]] = []
        layers = [each for each in model.modules() if is_attention(each)]
        libraries = {each.__module__: sys.modules[each.__module__] for each in map(type, layers)}
        with torch.inference_mode():
            for module in model.modules():
                if way := self.way(module):
                    self.modules.append((module, way(module)))
            for library in libraries.values():
                if self.rotates(library, getattr(layers[0], "head_dim", 0)):
                    self.rotations.append((library, self.rotation(library)))

    def way(self, module: nn.Module) -> Callable[..., Any] | None:
        """How the forward of a module is computed by kernels, None if it is not."""
        name = type(module).__name__
        try:
            if name.endswith("RMSNorm") and self.is_norm(module):
                return self.norm
            if name.endswith("MLP") and self.is_gate(module):
                return self.gate
        except (AttributeError, TypeError, RuntimeError):
            pass  # It has other parts, or other inputs.
        return None

    def norm(self, module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        eps = getattr(module, "variance_epsilon", None) or module.eps
        return lambda states: self.kernels.rms_norm(states, module.weight, eps)

    def gate(self, module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        multiply = self.kernels.silu_times
        return lambda x: module.down_proj(multiply(module.gate_proj(x), module.up_proj(x)))

    def rotation(self, library: Any) -> Callable[..., Any]:
        inner = getattr(library, ROTATION)

        def rotate(queries: Any, keys: Any, cos: Any, sin: Any, *rest: Any, **named: Any) -> Any:
            rows, size = queries.shape[-2:]
            fits = queries.ndim == 4 and cos.shape == (1, rows, size) and cos.is_contiguous()
            if rest or named or not fits or size not in HEAD_SIZES:
                return inner(queries, keys, cos, sin, *rest, **named)
            return self.kernels.rotate(queries, keys, cos, sin)

        return rotate

    def is_norm(self, module: Any) -> bool:
        """Tried with other weights: those of Gemma are one less, which is little beside large
        ones."""
        other = deepcopy(module)
        other.weight.data = random_like(module.weight, *module.weight.shape)
        states = random_like(self.like, 1, 4, len(module.weight))
        return near(self.norm(other)(states), other(states))

    def is_gate(self, module: Any) -> bool:
        """Tried without its matrices, which may be large, and with numbers that some limit."""
        gates, ups = random_like(self.like, 2, 1, 4, 64)
        other = copy(module)
        other._modules = {**module._modules}
        for name in PROJECTIONS:
            other._modules[name] = nn.Identity()
        for size in (1.0, 20.0):
            other._modules["gate_proj"] = Constant(gates * size)
            other._modules["up_proj"] = Constant(ups * size)
            if not near(self.gate(other)(gates), other(gates)):
                return False
        return True

    def rotates(self, library: ModuleType, size: int) -> bool:
        inner: Any = getattr(library, ROTATION, None)
        angles = [random_like(self.like, 1, 3, size // 2).repeat(1, 1, 2) for _ in range(2)]
        states = [random_like(self.like, 1, heads, 3, size) for heads in (4, 2)]
        if not size or inner is None or [*signature(inner).parameters][:4] != ROTATED:
            return False
        return all(map(near, self.kernels.rotate(*states, *angles), inner(*states, *angles)))


class Constant(nn.Module):
    """In the place of a projection."""

    def __init__(self, found: torch.Tensor) -> None:
        super().__init__()
        self.found = found

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.found


def random_like(like: torch.Tensor, *shape: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=draw).to(like.device, like.dtype)


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    return bool((found - wanted).float().norm() <= NEAR * wanted.float().norm())
