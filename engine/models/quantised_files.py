"""Folders of safetensors files whose matrices have few bits already: GPTQ, AWQ, compressed-tensors.

Such a folder has, in the place of a matrix, its numbers, their scales and often their zeros: a
weight is a number less the zero of its group, times the scale. Everything here follows from
config.json and the headers of the weight files, so the memory that a model will need is known
before its numbers are read (engine/models/load_quantised.py).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.native import core

if TYPE_CHECKING:
    from huggingface_hub.utils import TensorInfo  # type: ignore[attr-defined]

KEEPS = 8
"""The most bits of a number in these files."""
COARSE, FINE = 128, 32
"""The inputs that share a scale in the compiled core: it has both for 8 bits, and FINE for 4."""
ROUNDED = 64
"""The same in the kernels of a GPU, which have FINE as well."""
WORD = 32
"""The bits of the whole numbers into which several are packed."""


class Parts(NamedTuple):
    """The names of a matrix's tensors; "" for one that a format does not have."""

    numbers: str
    scales: str
    zeros: str
    groups: str = ""


GPTQ = Parts("qweight", "scales", "qzeros", "g_idx")
AWQ = Parts("qweight", "scales", "qzeros")
PACKED = Parts("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
WHOLE = Parts("weight", "weight_scale", "weight_zero_point")
"""The last two are those of compressed-tensors, with packed numbers and with bytes."""
COMPRESSED = {"pack-quantized": PACKED, "int-quantized": WHOLE, "naive-quantized": WHOLE}


@dataclass(frozen=True, slots=True)
class Form:
    """How the matrices of a folder were quantised, by its config.json. `problem` says why their
    numbers cannot be kept, "" if they can."""

    title: str
    parts: Parts = WHOLE
    bits: int = 0
    symmetric: bool = False
    """Whether all zeros are in the middle of the numbers, if the config decides that."""
    less: int = 0
    """What the zeros of the files lack."""
    problem: str = ""


def form_of(config: Mapping[str, Any]) -> Form | None:
    """The form of the matrices in a folder with this config.json; None if it is not quantised."""
    values = config.get("quantization_config")
    if not values:
        return None
    method, bits = str(values.get("quant_method")), int(values.get("bits") or 0)
    layout = str(values.get("checkpoint_format") or values.get("format") or method).lower()
    if method == "compressed-tensors":
        return compressed(values)
    if method == "gptq" and layout in ("gptq", "gptq_v2") and bits in (4, 8):
        return Form("GPTQ", GPTQ, bits, bool(values.get("sym", True)), int(layout == "gptq"))
    if method == "awq":
        layout = str(values.get("version") or layout).lower()
        if layout in ("awq", "gemm") and bits == 4:
            return Form("AWQ", AWQ, bits)
    size = f" with {bits} bits" if bits else ""
    return Form(method, problem=f"{method} in the format {layout}{size} is not known")


def kept_form(config: Mapping[str, Any], device: str, bits: str) -> Form | None:
    """The form of the matrices in a folder if their numbers are kept, on this device ("cpu",
    "cuda:0", ...) and with this setting; otherwise None."""
    form = form_of(config)
    if form is None or form.problem or bits == "off":
        return None
    if device.startswith("cpu"):
        return form if hasattr(core, "Matrix") else None
    import torch

    from engine.backends.rounded import problem

    return None if problem(torch.device(device)) else form


def compressed(values: Mapping[str, Any]) -> Form:
    """A form of compressed-tensors, whose files have zeros only if these are not in the middle."""
    title, layout = "compressed-tensors", str(values.get("format"))
    groups = (values.get("config_groups") or {}).values()
    weights = [group.get("weights") or {} for group in groups]
    kinds = sorted({(str(each.get("type")), int(each.get("num_bits") or 0)) for each in weights})
    few = (4, 8) if layout == "pack-quantized" else (8,)
    bits = kinds[0][1] if kinds else 0
    if kinds != [("int", bits)] or layout not in COMPRESSED or bits not in few:
        found = " and ".join(f"{kind} of {bits} bits" for kind, bits in kinds) or "no weights"
        return Form(title, problem=f"{title} in the format {layout} with {found} is not known")
    return Form(title, COMPRESSED[layout], bits)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix in the files: `span` inputs of an output share a scale, all of which have a zero of
    their own if there are `lows`. `tensors` are the names of its tensors by their part."""

    outputs: int
    inputs: int
    bits: int
    span: int
    lows: bool
    tensors: Mapping[str, str]

    @property
    def fine(self) -> bool:
        """Whether it has scales for every FINE inputs in the core, instead of every COARSE."""
        return self.bits == 4 or self.lows or not self.shares(COARSE)

    @property
    def rounded(self) -> int:
        """The inputs that share a scale in the kernels of a GPU."""
        return ROUNDED if self.shares(ROUNDED) else FINE

    def shares(self, count: int) -> bool:
        return self.span % count == 0 or self.span == self.inputs


def matrices(
    form: Form, listed: Mapping[str, "TensorInfo"], left: Collection[str] = ()
) -> dict[str, Matrix]:
    """The matrices of few bits among the tensors of a folder, but for those `left`, by their places
    in the model. Raises ValueError for one whose numbers cannot be kept."""
    found: dict[str, dict[str, str]] = {}
    for name in listed.keys() - left:
        place, _, part = name.rpartition(".")
        if part != "bias":
            found.setdefault(place, {})[part] = name
    known = {
        place: matrix_of(place, form, {part: listed[name] for part, name in own.items()}, own)
        for place, own in sorted(found.items())
        if form.parts.scales in own
    }
    if not known:
        raise ValueError(f"config.json says {form.title}, and the files have no such matrices")
    return known


def matrix_of(
    place: str, form: Form, given: Mapping[str, "TensorInfo"], tensors: Mapping[str, str]
) -> Matrix:
    numbers, scales, zeros, _ = form.parts
    needed = {numbers, scales, *([zeros] if form.parts in (GPTQ, AWQ) else [])}
    if missing := needed - given.keys():
        raise unknown(place, f"has no tensor {min(missing)}")
    if given[numbers].dtype != ("I8" if form.parts == WHOLE else "I32"):
        raise unknown(place, f"has numbers of the type {given[numbers].dtype}")
    if len(given[scales].shape) != 2:
        raise unknown(place, f"has scales of the shape {given[scales].shape}")
    bits, lows = form.bits, zeros in given
    if form.parts in (GPTQ, AWQ):
        inputs, width = given[numbers].shape
        groups, outputs = given[scales].shape
        bits, lows = given[zeros].shape[1] * WORD // outputs, not form.symmetric
        inputs = inputs * WORD // bits if form.parts == GPTQ else inputs
        fits = width == outputs * (1 if form.parts == GPTQ else bits / WORD)
    else:
        outputs, groups = given[scales].shape
        width, inputs = given[numbers].shape
        inputs = inputs * WORD // bits if form.parts == PACKED else inputs
        fits = width == outputs
    if not fits or bits not in (4, 8):
        shape = given[numbers].shape
        raise unknown(place, f"has numbers of the shape {shape} for {outputs} outputs")
    span, rest = divmod(inputs, groups)
    if rest or inputs % FINE or (groups > 1 and span % FINE):
        raise unknown(place, f"has {inputs} inputs in {groups} groups, but not in multiples of 32")
    return Matrix(outputs, inputs, bits, span, lows, tensors)


def unknown(place: str, problem: str) -> ValueError:
    return ValueError(
        f"its matrix {place} {problem}; with the bits set to off transformers loads it, if it has "
        "what that needs"
    )
