"""From a GGUF file to a model whose forwards the compiled core computes, with the file's weights.

In llama.cpp a forward over two rows takes almost twice the time of one, so drafts gain little. The
core computes a few rows in the time of one (engine/backends/quantised.py). Numbers of 4 bits (Q4_0,
Q4_1, Q4_K) and of 8 (Q8_0) stay as they are in the file; only the scales of Q4_K, which are
products there, become float16. Other types are rounded to 8 bits, or to 4 if those are asked for.

The tokenizer and the chat template remain those of llama.cpp, so a text has the same tokens in
both. When a file is loaded, the logits after a text are compared with those of llama.cpp.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM

from engine.backends.base import BackendInfo, digest
from engine.backends.llamacpp import LlamaCppBackend, LlamaCppTokenizer, alone
from engine.backends.native_forward import SHARE, mixtures_of
from engine.backends.quantised import (
    HEAD_BITS,
    Layout,
    Numbers,
    PackedExperts,
    PackedLinear,
    Room,
    can_pack,
    can_pack_experts,
    sizes,
)
from engine.backends.special_tokens import imitable
from engine.backends.transformers import TransformersBackend
from engine.errors import ModelError, first_line
from engine.heads.eagle3_head import Embedding, Matrix
from engine.models.file_heads import give_head, head_need, unknown
from engine.models.gguf import opened
from engine.models.gguf_files import Tensor, file_fingerprint, heads_near
from engine.models.load_llamacpp import load_tokenizer
from engine.models.load_transformers import (
    PACKED_TOLERANCE,
    USUAL_THREADS,
    examine,
    pick_bits,
    with_native,
)
from engine.models.memory import (
    FLOAT32,
    PACKED_SCALES,
    DraftingForecast,
    Need,
    cache_numbers,
    packed_size,
)
from engine.models.packed_files import File, Foreign, rows_in, rows_of, weights_of
from engine.models.torch_heads import with_head
from engine.process import give_back_freed
from engine.settings import Runtime

TURNED = {"llama": {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}}
"""Matrices of which llama.cpp puts the two rows of a rotary pair next to each other, with the
number of their heads."""
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
"""The names of tensors in the file and in the library, outside of layers and in them."""
ROUTER = ".ffn_gate_inp."
"""Part of the names of matrices that choose experts, which remain in float32."""
FACTORS = "rope_freqs"
"""A tensor by which the rotary frequencies are divided."""
TRIED = (
    "The sea was calm that morning, and nobody in the village saw the three boats that came back."
)
"""The text after which logits are compared."""
PARTS = 5
"""The texts of a mixture after which they are compared, each a token shorter."""
ROUNDED = 0.5
"""How far logits may be from those of llama.cpp, as a share of their norm, where weights are
rounded to 4 bits; otherwise SHARE."""
KEEPS = "8"
"""The bits with which all types of the file are kept that the core knows."""
FULL = (Kind.F32, Kind.F16, Kind.BF16)
"""Types that would be rounded noticeably."""
LARGER = 1.25
"""How much more memory the weights may take than in llama.cpp, if nothing was chosen."""


def in_file(head: str) -> bool:
    return head == "auto" or head != "off" and not os.path.isdir(os.path.expanduser(head))


def suits(path: Path, runtime: Runtime) -> bool:
    """Whether a GGUF file is better computed by the core than by llama.cpp: it is of a known
    family, its matrices have few bits and nearly keep their size, and no head is named that would
    not draft here. Such a head in its folder gained less in llama.cpp than the core does
    (docs/log.md). False for a file that cannot be read."""
    try:
        file = File(path)
        config = file.config(runtime.context_length)
        tensors = [each for each in file.tensors if not each.name.startswith(FACTORS)]
        full = any(
            len(each.shape) == 2 and Kind(each.kind) in FULL and ROUTER not in each.name
            for each in tensors
        )
        theirs = sum(rows_in(each).nbytes for each in tensors)
    except Exception:  # whatever it is, llama.cpp says what it thinks of the file
        return False
    ours = weights_in(file, tensors, config, int(KEEPS))
    drafts = runtime.head in ("auto", "off") or not unknown(Path(runtime.head))
    return drafts and not full and ours <= LARGER * theirs


def weights_in(file: File, tensors: Sequence[Tensor], config: Any, bits: int) -> int:
    weights = sum(room_of(each, each.name, bits) for each in tensors)
    if config.tie_word_embeddings:
        weights += room_of(file.tensor("token_embd.weight"), "output.weight", bits)
    return weights


def load_packed(source: str, runtime: Runtime) -> TransformersBackend:
    """The backend of a probed GGUF file, with at most `runtime.bits` bits for a weight. Raises
    ModelError."""
    bits = pick_bits(runtime.bits, torch.device("cpu"))
    torch.set_num_threads(runtime.threads or USUAL_THREADS)
    path = Path(os.path.expanduser(source))
    # Not all settings: those of llama.cpp's cache and attention could be refused.
    tokenizer = load_tokenizer(source, Runtime(runtime.context_length, gpu_layers=0, head="off"))
    with readable(source):
        file = File(path)
        model = built(file, tokenizer.info.context_length, bits)
    counted, weights = sizes(model)
    embedding = model.get_input_embeddings().shape
    info = replace(
        tokenizer.info,
        kind="transformers",
        fingerprint=digest([file_fingerprint(path), f"{bits} bits"]),
        leaves=None,
        depth=None,
        device="cpu",
        dtype=tokenizer.info.dtype + (" in 4 bits" if bits == 4 else ""),
        threads=torch.get_num_threads(),
        parameters=counted + math.prod(embedding),
        memory_bytes=weights,
    )
    backend = PackedBackend(model, tokenizer, info)
    examine(backend, PACKED_TOLERANCE, runtime.parallel)
    with_native(backend)
    with readable(source):
        compare(backend, path, runtime.threads, SHARE if bits == 8 else ROUNDED)
    if in_file(runtime.head):
        give_head(backend, file, runtime.head)
    elif runtime.head != "off":
        with_head(backend, source, runtime.head)
    backend.info = replace(backend.info, imitable=imitable(backend.render, backend.special))
    return backend


def compare(backend: "PackedBackend", path: Path, threads: int, allowed: float) -> None:
    """Raise Foreign if the logits after a text are further from those of llama.cpp than `allowed`,
    as a share of their norm. In a mixture, where a row may have other experts if its router nearly
    hesitates, it is the median of a few texts."""
    runtime = Runtime(64, threads, gpu_layers=0, head="off")
    model, context = opened(path, runtime, fast=False)
    library = LlamaCppBackend(model, context, backend.tokens, None, backend.info, 64)
    tokens = backend.tokenize(TRIED)[:60]
    gaps = []
    for part in range(PARTS if mixtures_of(backend.model) else 1):
        text = tokens[: len(tokens) - part]
        expected = alone(library, text)
        gaps.append(np.linalg.norm(backend.alone(text) - expected) / np.linalg.norm(expected))
    gap = float(np.median(gaps))
    if not gap <= allowed:
        raise Foreign(f"its logits differ from those of llama.cpp by {gap:.2g} of their norm")


def packed_need(source: str, runtime: Runtime) -> Need:
    """The memory that a probed GGUF file will take for the core. Raises ModelError."""
    bits = pick_bits(runtime.bits, torch.device("cpu"))
    with readable(source):
        file = File(Path(os.path.expanduser(source)))
        config = file.config(runtime.context_length)
        tensors = [each for each in file.tensors if not each.name.startswith(FACTORS)]
        parameters = sum(math.prod(each.shape) for each in tensors)
        weights = weights_in(file, tensors, config, bits)
    length = config.max_position_embeddings
    cache = cache_numbers(config.to_dict(), length) * FLOAT32
    beside = heads_near(file.path) if runtime.head == "auto" else [runtime.head]
    heads = [Path(each).expanduser() for each in beside if in_file(each)]
    known = next((each for each in heads if not unknown(each)), None)
    if known is None:
        problem = f"{heads[0].name} does not fit: {unknown(heads[0])}" if heads else ""
        return Need(parameters, weights, cache, DraftingForecast(problem=problem))
    of_head, kept = head_need(known, length)
    forecast = DraftingForecast(head=f"in the file {known.name}")
    return Need(parameters, weights + of_head, cache + kept, forecast)


@contextmanager
def readable(source: str) -> Iterator[None]:
    """Turn what the libraries raise for a file that they do not expect into a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as problem:
        raise ModelError(
            f"The weights of {source!r} cannot be computed by the core: "
            f"{first_line(problem).rstrip('.')}. Set the bits to off, and llama.cpp computes them."
        ) from problem


class PackedBackend(LlamaCppTokenizer, TransformersBackend):
    """A model in torch with the tokenizer of a GGUF file."""

    info: BackendInfo

    def __init__(self, model: Any, tokenizer: LlamaCppTokenizer, info: BackendInfo) -> None:
        LlamaCppTokenizer.__init__(self, tokenizer.tokens, tokenizer.template, info)
        self.tokenizer = tokenizer
        self.prepare(model)

    def embeddings(self) -> tuple[Embedding, Matrix]:
        """As those of any model, but the embedding stays in its file."""
        return self.model.get_input_embeddings(), self.model.get_output_embeddings()


def built(file: File, length: int, bits: int) -> Any:
    """The library's model with the weights of a file. Raises Foreign."""
    config = file.config(length)
    with torch.device("meta"):
        make: Any = AutoModelForCausalLM.from_config
        model = make(config, dtype=torch.float32)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    for path, module in list(model.named_modules()):
        if hasattr(module, "gate_up_proj"):
            if not can_pack_experts(module):
                raise Foreign("its experts have other sizes than whole groups of 32")
            model.set_submodule(path, PackedExperts(module))
    room = Room()
    for tensor in file.tensors:
        stem, _, ending = tensor.name.rpartition(".")
        if stem == FACTORS:
            model.model.rotary_emb.inv_freq /= weights_of(tensor)
            continue
        place(model, path_of(stem), ending, tensor, bits, room, turned(file, stem))
    if config.tie_word_embeddings:
        place(model, "lm_head", "weight", file.tensor("token_embd.weight"), bits, room, 0)
        model.get_output_embeddings().counted = False
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise Foreign(f"it has no tensor for {name}")
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.settle()
    return model.eval().requires_grad_(False)


def path_of(stem: str) -> str:
    """The place in the library's model of a tensor's module. Raises Foreign."""
    if stem in OUTSIDE:
        return OUTSIDE[stem]
    block, number, name = [*stem.split(".", 2), "", ""][:3]
    if block != "blk" or name not in INSIDE:
        raise Foreign(f"the tensor {stem} is not known")
    return f"model.layers.{number}.{INSIDE[name]}"


def turned(file: File, stem: str) -> int:
    """The heads of a matrix whose rotary pairs are neighbours; 0 for any other."""
    own = TURNED.get(file.family, {}).get(stem.rpartition(".")[2])
    return int(file.own(own, file.own("attention.head_count"))) if own else 0


def place(
    model: Any, path: str, ending: str, tensor: Tensor, bits: int, room: Room, heads: int
) -> None:
    """Put a tensor where it belongs in a model, its rows in the library's order."""
    above, _, name = path.rpartition(".")
    try:
        owner, module = model.get_submodule(above), model.get_submodule(path)
    except AttributeError as error:
        raise Foreign(f"the tensor {tensor.name} has no place") from error
    shape = tensor.shape
    own = getattr(module, ending, None)
    if own is None:
        raise Foreign(f"the tensor {tensor.name} has no place")
    if tuple(own.shape) != shape:
        raise Foreign(f"the tensor {tensor.name} has the shape {shape}, which does not fit")
    order = rows_of(shape[0], heads)
    if isinstance(module, nn.Embedding):
        setattr(owner, name, FileEmbedding(tensor))
    elif ending == "weight" and isinstance(module, nn.Linear) and can_pack(shape[0], shape[1]):
        most = max(bits, HEAD_BITS) if name == "lm_head" else bits
        setattr(owner, name, packed_of(tensor, order, module.bias, most, room))
        give_back_freed()  # otherwise what each matrix took on the way adds up
    else:
        values = weights_of(tensor)[order]
        setattr(module, ending, nn.Parameter(values, requires_grad=False))


def packed_of(
    tensor: Tensor, order: NDArray[np.int64], bias: Any, bits: int, room: Room
) -> PackedLinear:
    """A matrix of the core with the numbers of a tensor, or with its weights rounded."""
    kept = KEPT.get(Kind(tensor.kind))
    if kept and kept.bits <= bits:
        return PackedLinear(kept.read(rows_in(tensor), order), bias, bits, room)
    return PackedLinear(Rows(tensor, order), bias, bits, room)


def room_of(tensor: Tensor, name: str, bits: int) -> int:
    """The bytes that a tensor will take where one of this name belongs; an embedding stays in the
    file."""
    shape, count = tensor.shape, math.prod(tensor.shape)
    if name == "token_embd.weight":
        return 0
    if len(shape) != 2 or ROUTER in name or not can_pack(*shape):
        return count * FLOAT32
    bits = max(bits, HEAD_BITS) if name == "output.weight" else bits
    kept = KEPT.get(Kind(tensor.kind))
    if kept and kept.bits <= bits:
        return packed_size(shape, kept.bits, 32, kept.scales)
    return packed_size(shape, bits, *PACKED_SCALES[bits])


class FileEmbedding(nn.Module):
    """An embedding that stays in its file, as a step reads a few rows of it."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor, self.rows, self.shape = tensor, rows_in(tensor), tensor.shape

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = weights_of(self.tensor, self.rows[tokens.reshape(-1).numpy()])
        return rows.view(*tokens.shape, -1)

    @property
    def weight(self) -> torch.Tensor:
        """All of it, shape (vocabulary, width), in float32."""
        return weights_of(self.tensor)


class Rows:
    """The weights of a tensor, of which a part is computed when it is asked for."""

    def __init__(self, tensor: Tensor, order: NDArray[np.int64]) -> None:
        self.tensor, self.shape = tensor, tensor.shape
        self.rows, self.order = rows_in(tensor), order

    def __getitem__(self, part: slice) -> torch.Tensor:
        return weights_of(self.tensor, self.rows[self.order[part]])


# What llama.cpp writes, row by row: blocks of 32 weights, in Q4_K of 8 times 32.


class Blocks:
    """The blocks of some rows of a file, of which output i is row `order[i]`."""

    def __init__(self, rows: NDArray[np.uint8], order: NDArray[np.int64], layout: Layout) -> None:
        self.rows, self.order, self.layout = rows, order, layout
        self.values = rows.reshape(len(rows), -1, layout.size)

    def part(self, at: int, size: int = 2) -> NDArray[np.uint8]:
        """Some bytes of each block, shape (outputs, blocks, size)."""
        return np.ascontiguousarray(self.values[:, :, at : at + size])[self.order]

    def halves(self, at: int) -> NDArray[np.float32]:
        """A float16 of each block."""
        return self.part(at).view(np.float16)[..., 0].astype(np.float32)

    def numbers(
        self, bits: int, scales: NDArray[np.float32], lows: NDArray[np.float32] | None = None
    ) -> Numbers:
        less = None if lows is None else torch.from_numpy(lows)
        return Numbers(bits, self.layout, self.rows, self.order, torch.from_numpy(scales), less)


Reader = Callable[[NDArray[np.uint8], NDArray[np.int64]], Numbers]


def of_4_0(rows: NDArray[np.uint8], order: NDArray[np.int64]) -> Numbers:
    blocks = Blocks(rows, order, Layout(18, 2, 16, 16))
    return blocks.numbers(4, blocks.halves(0))


def of_4_1(rows: NDArray[np.uint8], order: NDArray[np.int64]) -> Numbers:
    blocks = Blocks(rows, order, Layout(20, 4, 16, 16))
    return blocks.numbers(4, blocks.halves(0), -blocks.halves(2))


def of_4_k(rows: NDArray[np.uint8], order: NDArray[np.int64]) -> Numbers:
    blocks = Blocks(rows, order, Layout(144, 16, 128, 32))
    packed = blocks.part(4, 12)
    found = gguf.quants.Q4_K.get_scale_min(packed.reshape(-1, 12))
    scales, lows = (
        (each.reshape(*packed.shape[:2], 8) * blocks.halves(at)[..., None]).reshape(len(order), -1)
        for at, each in zip((0, 2), found, strict=True)
    )
    return blocks.numbers(4, scales, lows)


def of_8_0(rows: NDArray[np.uint8], order: NDArray[np.int64]) -> Numbers:
    blocks = Blocks(rows, order, Layout(34, 2, 32))
    return blocks.numbers(8, blocks.halves(0))


class Kept(NamedTuple):
    """A type whose numbers the core takes as they are: the bits of one, the bytes of the scales of
    32, and what reads rows of them in an order."""

    bits: int
    scales: int
    read: Reader


KEPT = {
    Kind.Q4_0: Kept(4, 2, of_4_0),
    Kind.Q4_1: Kept(4, 4, of_4_1),
    Kind.Q4_K: Kept(4, 4, of_4_k),
    Kind.Q8_0: Kept(8, 2, of_8_0),
}
