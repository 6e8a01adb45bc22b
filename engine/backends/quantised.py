"""Weights of 4 or 8 bits on a processor: the linear layers of a model in transformers; and how
models are loaded with such weights, also on a GPU (rounded.py).

A step of decoding takes the time in which the weights come from memory, so weights of a quarter of
the size are read in a quarter of the time. The compiled core multiplies a few rows by such weights
in the time of one (native/src/rows.hpp), which is what verifying a draft needs. The layers are
converted while a model is read, one after the other, so at no time does the whole model lie in
memory in its original size.

The experts of a mixture are converted as well, into matrices that have the outputs of all experts
behind each other. A row is multiplied by those that are chosen for it (native/src/experts.hpp).

Files may have numbers of few bits already, whose matrices are taken as they are, one after the
other, when the library has loaded the rest (StoredMatrix).

Embeddings keep the type of the files, because a step reads a few rows of them. What remains, such
as norms, is float32, and so are the states between the layers.

Invariant: a row has the same bits whatever other rows a forward has.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.activations import SiLUActivation
from transformers.core_model_loading import ConversionOps
from transformers.integrations import moe
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from engine.backends.rounded import FewBits, RoundedLinear, converted, rounded, settle
from engine.models.quantised_files import unknown
from engine.native import core, missing
from engine.process import give_back_freed

HEAD_BITS = 8
"""Those of the output matrix, whose rounding changes a text most."""
METHOD = "strata"
"""The name of this way to load a model, in the library."""
SLICE = 1 << 24
"""Weights that are converted at a time; each takes four bytes meanwhile."""


def problem() -> str:
    """Why weights cannot have few bits here; "" if they can."""
    if core is None:
        return f"the compiled core is missing ({missing})"
    return "" if hasattr(core, "Matrix") else "the compiled core of this system cannot do it"


def share_threads() -> None:
    """Let the core compute in the threads of torch's OpenMP, if torch has one."""
    library = Path(torch.__path__[0]) / "lib" / "libtorch_cpu.so"
    with suppress(AttributeError, OSError):
        start = ctypes.CDLL(str(library)).GOMP_parallel
        core.use_openmp(ctypes.cast(start, ctypes.c_void_p).value)


if not problem():
    share_threads()


def can_pack(outputs: int, inputs: int) -> bool:
    """Whether a matrix can be converted: its inputs must be whole groups of the finer kind."""
    return outputs >= int(core.CHANNELS) and inputs % int(core.FINE) == 0


LINE = 64
"""Bytes of a line of a processor's cache."""
ROOM = 1 << 25
"""Bytes that are asked of the system together, for many matrices."""


class Room:
    """Memory for the matrices of a model, in large pages where the system has them.

    A step reads all weights, and a processor reads ahead only to the end of a page. numpy asks
    Linux for large pages (2 MB) where an array has at least 4 MB, and torch does not. So matrices
    are placed one behind the other in arrays of numpy, which live as long as one of them.
    """

    def __init__(self, least: int = ROOM) -> None:
        self.least = least
        self.free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """So many bytes, from the beginning of a line of the cache on."""
        padding = -self.free.data_ptr() % LINE
        if len(self.free) < padding + size:
            self.free = torch.from_numpy(np.empty(max(self.least, size + LINE), np.uint8))
            padding = -self.free.data_ptr() % LINE
        found, self.free = self.free[padding:].tensor_split((size,))
        return found


class Weights(Protocol):
    """Weights in floating point, shape (outputs, inputs), of which a few rows are read at a
    time."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> torch.Tensor: ...


class Layout(NamedTuple):
    """Where the numbers of a row are in a file: in blocks of `size` bytes, in `length` bytes from
    `at` on. In 4 bits the lower halves of `half` bytes come before their upper halves."""

    size: int
    at: int
    length: int
    half: int = 0


class Numbers(NamedTuple):
    """Weights that were rounded elsewhere, in groups of core.FINE inputs, or of core.GROUP if they
    have 8 bits and are not `fine`.

    The numbers of output i are in row `order[i]` of `rows`, which are those of a file, shape (rows,
    bytes), from 0 on; in 8 bits they have a sign. `scales` and `lows` have the shape (outputs,
    groups). A weight is its number times the scale of its group, less the low of the group; in 4
    bits without `lows`, half of all numbers is subtracted first. Only fine groups have lows. Number
    k of a row belongs to input `places[k]`, or to input k if `places` is None.
    """

    bits: int
    layout: Layout
    rows: NDArray[np.uint8]
    order: NDArray[np.int64]
    scales: torch.Tensor
    lows: torch.Tensor | None = None
    fine: bool = True
    places: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        blocks = self.rows.shape[1] // self.layout.size
        return len(self.order), blocks * self.layout.length * 8 // self.bits

    @property
    def weight(self) -> torch.Tensor:
        """The weights that the numbers stand for, shape (outputs, inputs), in float32."""
        return PackedLinear(self, None, self.bits).weight


class PackedLinear(nn.Module):
    """A linear layer of few bits: maps (..., inputs) to (..., outputs), in float32. Of `weights` in
    floating point, `bits` is the number that they are rounded to."""

    numbers: torch.Tensor
    scales: torch.Tensor
    places: torch.Tensor | None
    """The inputs in the order of the numbers, if that is another one."""

    def __init__(
        self,
        weights: Weights | Numbers,
        bias: nn.Parameter | None,
        bits: int,
        room: Room | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weights.shape
        self.bits, self.fine, self.lows, self.places = bits, bits == 4, False, None
        if isinstance(weights, Numbers):
            self.bits, self.fine, self.lows = weights.bits, weights.fine, weights.lows is not None
            self.places = weights.places
        self.counted = True
        """Whether its weights are no copy of others."""
        self.width = -(-self.out_features // core.CHANNELS) * core.CHANNELS
        self.depth = -(-self.in_features // core.GROUP) * core.GROUP
        """The padded numbers of outputs and inputs."""
        self.group = core.FINE if self.fine else core.GROUP
        count, kind = self.width * self.depth, torch.float16 if self.fine else torch.float32
        room = room or Room(0)
        self.register_buffer("numbers", room.take(count * self.bits // 8))
        scales = room.take(count // self.group * kind.itemsize * (1 + self.lows))
        self.register_buffer("scales", scales.view(kind))
        self.bias = bias
        self.finish(None)
        if isinstance(weights, Numbers):
            self.place(weights)
        else:
            self.round(weights)

    def finish(self, bias: torch.Tensor | None) -> None:
        """Make the core's matrix of these weights and a bias."""
        scales = self.scales.view(torch.uint8)
        self.matrix = core.Matrix(
            *(self.out_features, self.in_features, self.bits, self.fine, self.lows),
            *(self.numbers, scales, bias),
        )

    def round(self, weights: Weights) -> None:
        rows = max(1, SLICE // self.in_features // core.CHANNELS) * core.CHANNELS
        for start in range(0, self.out_features, rows):
            part = weights[start : start + rows].float().contiguous()
            self.matrix.pack(part, start, torch.get_num_threads())

    def place(self, given: Numbers) -> None:
        """Put numbers and scales where the core reads them."""
        self.matrix.place(given.rows, given.order, *given.layout, torch.get_num_threads())
        kinds = [given.scales, *([] if given.lows is None else [given.lows / 8])]
        groups = self.depth // self.group
        scales = torch.stack([self.blocks(each, groups).transpose(1, 2) for each in kinds], 2)
        self.scales.copy_(converted(scales, self.scales.dtype).flatten())

    def blocks(self, values: torch.Tensor, columns: int) -> torch.Tensor:
        """Rows for all outputs as blocks, padded to the shape (blocks, CHANNELS, columns)."""
        rows, given = values.shape
        padded = nn.functional.pad(values, (0, columns - given, 0, self.width - rows))
        return padded.view(-1, core.CHANNELS, columns)

    def settle(self) -> None:
        """Take the bias as it is now, after loading."""
        if self.bias is not None:
            padded = torch.zeros(self.width)
            padded[: self.out_features] = self.bias.data
            self.finish(padded)

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        rows = states.reshape(-1, self.in_features).float()
        rows = rows.contiguous() if self.places is None else rows[:, self.places]
        out = torch.empty(len(rows), self.width)
        self.matrix.multiply(rows, out, torch.get_num_threads())
        return out[:, : self.out_features].reshape(*states.shape[:-1], self.out_features)

    @property
    def weight(self) -> torch.Tensor:
        """The weights that the numbers stand for, shape (outputs, inputs), in float32."""
        blocks, channels = self.width // core.CHANNELS, core.CHANNELS
        whole = self.numbers
        if self.bits == 4:
            whole = whole.view(blocks, -1, 1, channels, 4)
            whole = torch.cat([whole & 15, whole >> 4], dim=2)
        whole = whole.view(blocks, -1, channels, 4).transpose(1, 2)
        values = whole.reshape(blocks, channels, -1, self.group).float()
        scales = self.scales.float().view(blocks, -1, 1 + self.lows, channels).permute(2, 0, 3, 1)
        if self.bits == 8 or not self.lows:
            values = values - 2 ** (self.bits - 1)
        values = values * scales[0][..., None]
        if self.lows:
            values = values - 8 * scales[1][..., None]
        whole = values.view(self.width, self.depth)[: self.out_features, : self.in_features]
        return whole if self.places is None else whole[:, self.places.argsort()]


class StoredEmbedding(nn.Module):
    """An embedding in the type of its files, whose rows become float32."""

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight).float()


class PackedExperts(nn.Module):
    """The experts of a mixture in few bits: maps (rows, width) to (rows, width), in float32, with
    the indices of the chosen experts and their weights, both of shape (rows, chosen).

    Its matrices have the outputs of all experts behind each other, and are empty until their
    weights are read.
    """

    gate_proj: PackedLinear
    up_proj: PackedLinear
    down_proj: PackedLinear

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.count, width, inner = experts.down_proj.shape
        outer, inside = (width, self.count * inner), (inner, self.count * width)
        shapes = {"gate_proj": outer, "up_proj": outer, "down_proj": inside}
        for name, shape in shapes.items():
            setattr(self, name, nn.Linear(*shape, bias=False, device="meta"))

    def take(self, name: str, weights: torch.Tensor, bits: int, room: Room) -> None:
        """Round one of the library's parameters, shape (experts, outputs, inputs)."""
        names = STACKS[name]
        for own, part in zip(names, weights.chunk(len(names), dim=1), strict=True):
            setattr(self, own, PackedLinear(part.flatten(0, 1), None, bits, room))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        rows = hidden_states.float().contiguous()
        out = torch.empty_like(rows)
        for first in range(0, len(rows), SORTED):
            part = slice(first, first + SORTED)
            core.mix(
                *(self.gate_proj.matrix, self.up_proj.matrix, self.down_proj.matrix, self.count),
                *(rows[part], top_k_index[part].contiguous()),
                *(top_k_weights[part].float().contiguous(), out[part], torch.get_num_threads()),
            )
        return out


STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The library's parameters of all experts, and the matrices that they become."""
USUAL = ("has_gate", "is_concatenated")
UNUSUAL = ("has_bias", "is_transposed", "has_post_expert_norm")
"""What the library notes of modules with experts that compute in its general way."""
SORTED = 128
"""Rows that are sorted by their experts at a time, which bounds the memory for what these give."""


def can_pack_experts(module: nn.Module) -> bool:
    """Whether a module has the experts that the core computes: SiLU gates, and nothing else beside
    two products."""
    usual = all(getattr(module, name, False) for name in USUAL)
    if not usual or any(getattr(module, name) for name in UNUSUAL):
        return False
    own: Any = module
    activation, default = own.act_fn, type(own)._apply_gate.__module__ == moe.__name__
    silu = isinstance(activation, SiLUActivation) or activation is nn.functional.silu
    _, width, inner = own.down_proj.shape
    return silu and default and can_pack(width, inner) and can_pack(inner, width)


# Loading, by the interface that the library has for this.


class StoredMatrix(NamedTuple):
    """A matrix of few bits in a file, shape (outputs, inputs), with or without a bias. `parts` are
    the last parts of the names of its tensors. It is read when it is needed, for the kernels of
    the device that is given, or for the compiled core."""

    shape: tuple[int, int]
    biased: bool
    parts: Sequence[str]
    read: Callable[[str | None], Numbers | FewBits]


Find = Callable[[Sequence[str]], Mapping[str, StoredMatrix]]
"""The matrices in weight files that have few bits there, by their places in the model."""


@register_quantization_config(METHOD)
class PackedConfig(QuantizationConfigMixin):
    """Weights of at most `bits` bits, and what they are called. The matrices that `find` finds keep
    their numbers in the files if these have no more bits."""

    def __init__(
        self,
        bits: int,
        device: str = "cpu",
        title: str = "",
        find: Find | None = None,
        **others: Any,
    ) -> None:
        self.quant_method: Any = METHOD
        self.bits, self.device, self.find = bits, device, find
        self.title = title or f"{bits} bits"


class Pack(ConversionOps):
    """Converts one weight that was read, and puts it into the model."""

    def __init__(self, packer: "Packer") -> None:
        self.packer = packer

    def convert(self, input_dict: dict[str, Any], *places: Any, **given: Any) -> dict[str, Any]:
        model, name = given["model"], given["full_layer_name"]
        weight = next(iter(input_dict.values()))
        if isinstance(weight, list):
            (weight,) = weight
        path, _, own = name.rpartition(".")
        if own in STACKS:
            self.packer.pack_experts(model, path, own, weight)
        else:
            self.packer.pack(model, path, weight)
        del weight, input_dict
        give_back_freed()  # otherwise the original weights of all layers add up
        if given.get("missing_keys"):
            given["missing_keys"].discard(name)
        return {}


@register_quantizer(METHOD)
class Packer(HfQuantizer):
    quantization_config: PackedConfig
    is_trainable = False

    def __init__(self, quantization_config: PackedConfig, **others: Any) -> None:
        super().__init__(quantization_config, **others)
        self.room = Room()
        self.on_cpu = torch.device(quantization_config.device).type == "cpu"
        self.stored: Mapping[str, StoredMatrix] = {}

    def param_needs_quantization(self, model: Any, param_name: str, **others: Any) -> bool:
        path, _, name = param_name.rpartition(".")
        if param_name in model.all_tied_weights_keys:
            return False  # it becomes the embedding, and is converted after loading
        module = model.get_submodule(path)
        if name in STACKS:
            return self.on_cpu and can_pack_experts(module)
        return name == "weight" and self.fits(module)

    def fits(self, module: nn.Module) -> bool:
        if type(module) is not nn.Linear:
            return False
        return not self.on_cpu or can_pack(module.out_features, module.in_features)

    def get_quantize_ops(self) -> Pack:
        return Pack(self)

    def pack(self, model: Any, path: str, weight: torch.Tensor | Numbers | FewBits) -> None:
        above, _, name = path.rpartition(".")
        linear, bits = model.get_submodule(path), self.quantization_config.bits
        if linear is model.get_output_embeddings():
            bits = HEAD_BITS
        if not isinstance(weight, torch.Tensor) and weight.bits > bits:
            weight = weight.weight
        device = self.quantization_config.device
        if isinstance(weight, torch.Tensor) and not self.on_cpu:
            weight = rounded(weight, bits, device)
        if isinstance(weight, FewBits):
            settle(weight.tensors, torch.device(device))
        packed = (
            RoundedLinear(weight, linear.bias)
            if isinstance(weight, FewBits)
            else PackedLinear(weight, linear.bias, bits, self.room)
        )
        setattr(model.get_submodule(above), name, packed)

    def pack_experts(self, model: Any, path: str, name: str, weights: torch.Tensor) -> None:
        """Take one parameter of some experts, and put others of few bits in their place."""
        experts = model.get_submodule(path)
        if not isinstance(experts, PackedExperts):
            experts = PackedExperts(experts)
            model.set_submodule(path, experts)
        experts.take(name, weights, self.quantization_config.bits, self.room)

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] = (), **others: Any
    ) -> None:
        """Have the library leave the matrices alone whose numbers are kept."""
        if self.quantization_config.find is not None:
            self.stored = self.quantization_config.find(checkpoint_files)
        modules = dict(model.named_modules())
        for path, matrix in self.stored.items():
            linear = modules.get(path)
            tied = f"{path}.weight" in model.all_tied_weights_keys
            if type(linear) is not nn.Linear or linear.weight.shape != matrix.shape or tied:
                raise unknown(path, f"of the shape {matrix.shape} has no place")
            linear.register_parameter("weight", None)
            if matrix.biased and linear.bias is None:
                linear.bias = nn.Parameter(torch.empty(matrix.shape[0]))
        parts = {part for matrix in self.stored.values() for part in matrix.parts}
        model._keys_to_ignore_on_load_unexpected |= {rf"\.{part}$" for part in parts}

    def _process_model_after_weight_loading(self, model: Any, **others: Any) -> Any:
        """Convert an output matrix that is the embedding, and store what remains: for a processor
        as float32."""
        device = None if self.on_cpu else self.quantization_config.device
        for path, matrix in self.stored.items():
            self.pack(model, path, matrix.read(device))
            give_back_freed()
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        for path, module in list(model.named_modules()):
            if module is head and self.fits(head):
                tied = head.weight is embedding.weight
                self.pack(model, path, head.weight.data)
                model.get_submodule(path).counted = not tied
        if self.on_cpu and type(embedding) is nn.Embedding:
            model.set_input_embeddings(StoredEmbedding(embedding.weight.data))
        for parameter in model.parameters() if self.on_cpu else ():
            parameter.data = parameter.data.float()
        for module in model.modules():
            if isinstance(module, PackedLinear):
                module.settle()
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        return model


def sizes(model: Any) -> tuple[int, int]:
    kept = {id(each): each for each in model.parameters()}
    count = sum(each.numel() for each in kept.values())
    total = sum(each.numel() * each.element_size() for each in kept.values())
    for module in model.modules():
        if isinstance(module, PackedLinear | RoundedLinear):
            count += module.counted * module.out_features * module.in_features
            total += module.nbytes
        elif isinstance(module, StoredEmbedding):
            count += module.weight.numel()
            total += module.weight.nbytes
    return count, total
