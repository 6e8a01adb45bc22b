"""What all code for llama.cpp shares: opening a file, its errors, rows, and saved sequences."""

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import llama_cpp

from engine.drafting.costs import LARGEST
from engine.machine import usual_threads
from engine.settings import Runtime

TREE_ROWS = 2 * LARGEST
"""The most rows of one forward: the largest tree, its root, and unread tokens of a draft model."""
LEAVES = LARGEST
"""The most branches of a tree, each a sequence of the cache."""
SEQUENCES = 256
"""The most sequences of the library's cache."""
WARNING, ERROR = 3, 4
NUMBERS = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}
ATTENTION = {
    "auto": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
LISTS = ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))
EXACT = ("f32", "f16")
"""Types of cache numbers that can be read without flash attention."""
EPSILONS = ("layer_norm_rms_epsilon", "layer_norm_epsilon", "group_norm_epsilon")

log: list[tuple[int, str]] = []
"""The lines of the library's log since `log` was last cleared: level and text."""


def listen(level: int, text: bytes, _: Any) -> None:
    log.append((level, text.decode("utf-8", "replace")))


LISTENER = llama_cpp.llama_log_callback(listen)
"""Must stay referenced: the process crashes otherwise."""
llama_cpp.llama_log_set(LISTENER, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()


class Unusable(Exception):
    """The library refuses a file; the text is the reason."""


def opened(
    path: Path,
    runtime: Runtime,
    fast: bool,
    weights: bool = True,
    snapshots: int = 0,
    places: int = 1,
) -> tuple[Any, Any]:
    """The library's model and context for a file. Raises Unusable.

    `fast` lets the library rearrange weights for this processor; engine/backends/fast_path.py knows
    whether that is safe. Without `weights` nothing is read but the header, and nothing is
    allocated; the log shows the sizes. `snapshots` and `places` are as for `new_context`.
    """
    log.clear()
    parameters = model_parameters(runtime, fast, weights)
    # The layers of a head in the same file; engine/models/gguf_heads.py opens it.
    parameters.load_mtp = runtime.head == "auto"
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)
    if not model:
        raise Unusable(complaint() or "llama.cpp does not say why")
    if problem := unfit(model):
        llama_cpp.llama_model_free(model)
        raise Unusable(problem)
    try:
        return model, new_context(model, runtime, snapshots, places)
    except Unusable:
        llama_cpp.llama_model_free(model)
        raise


def new_context(model: Any, runtime: Runtime, snapshots: int, places: int = 1) -> Any:
    """The library's context for a model, whose trees may have branches in so many `places`. If
    layers keep a state and the architecture supports snapshots, it keeps `snapshots` of them, to
    forget the last rows of a forward. Raises Unusable."""
    parameters = context_parameters(model, runtime, places)
    parameters.n_rs_seq = snapshots if keeps_state(model) else 0
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise Unusable(complaint() or "llama.cpp does not say why")
    if not llama_cpp.llama_get_memory(context):
        llama_cpp.llama_free(context)
        raise Unusable("it keeps no cache, so it cannot chat")
    return context


def model_parameters(runtime: Runtime, fast: bool, weights: bool) -> Any:
    """The parameters for loading a file; see `opened`."""
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = runtime.gpu_layers
    parameters.use_extra_bufts = fast
    if not weights:
        parameters.no_alloc = True
        parameters.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
    return parameters


def unfit(model: Any) -> str:
    """Why an opened model cannot chat; "" if it can."""
    own = f"{metadata(model, 'general.architecture')}.attention."
    ahead = metadata(model, f"{own}causal") == "false"
    encodes = llama_cpp.llama_model_has_encoder(model)
    if ahead or encodes or not llama_cpp.llama_model_has_decoder(model):
        return "it is no model that writes text from left to right"
    kind = llama_cpp.llama_vocab_type(llama_cpp.llama_model_get_vocab(model))
    if kind == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
        return "it has no vocabulary"
    for name in EPSILONS:
        value = metadata(model, own + name)
        # Other values make the library end the process at the first forward.
        with suppress(ValueError):
            if not float(value) >= 0:
                return f"{own}{name} is {value}, not a number from 0"
    return ""


def numbers_of(runtime: Runtime) -> tuple[str, str]:
    """The type of the cache's numbers and the use of flash attention. "auto" is resolved unless the
    library decides."""
    kind, attention = runtime.cache_type, runtime.flash_attention
    if offloads(runtime):
        return "f16" if kind == "auto" else kind, attention
    # On the processor flash attention rounds to float16, differently for a single token and for the
    # same token in a tree; it is also slower over a tree (docs/log.md).
    kind = "f32" if kind == "auto" else kind
    return kind, "off" if attention == "auto" and kind in EXACT else attention


def exact(runtime: Runtime) -> bool:
    return not offloads(runtime) and numbers_of(runtime) == ("f32", "off")


def context_parameters(model: Any, runtime: Runtime, places: int = 1) -> Any:
    """The parameters of a context for trees: one cache for all sequences. A row may then belong to
    several of them, which the library allows in no other way. So many conversations with `places`
    in it share the cells that one of them may need, and the numbers of sequences."""
    length = context_length(model, runtime)
    kind, attention = numbers_of(runtime)
    parameters = llama_cpp.llama_context_default_params()
    # The cache also has room for the largest tree.
    parameters.n_ctx = length + TREE_ROWS
    parameters.n_batch = parameters.n_ubatch = max(runtime.batch_size, TREE_ROWS)
    parameters.n_seq_max = places * min(LEAVES, SEQUENCES // places) if branches(model) else 1
    parameters.n_outputs_max = TREE_ROWS
    parameters.kv_unified = True
    parameters.swa_full = True
    parameters.n_threads = parameters.n_threads_batch = threads_of(runtime)
    parameters.flash_attn_type = ATTENTION[attention]
    parameters.type_k = parameters.type_v = NUMBERS[kind]
    return parameters


def keeps_state(model: Any) -> bool:
    """Whether some layers represent a text by one state, which cannot be shortened."""
    recurrent = llama_cpp.llama_model_is_recurrent(model)
    return bool(recurrent or llama_cpp.llama_model_is_hybrid(model))


def branches(model: Any) -> bool:
    """Whether one forward can verify branches. A state represents a single text, and positions with
    several parts must rise from row to row."""
    turning = {
        llama_cpp.LLAMA_ROPE_TYPE_MROPE,
        llama_cpp.LLAMA_ROPE_TYPE_IMROPE,
        llama_cpp.LLAMA_ROPE_TYPE_VISION,
    }
    return not keeps_state(model) and llama_cpp.llama_model_rope_type(model) not in turning


def offloads(runtime: Runtime) -> bool:
    return runtime.gpu_layers != 0 and bool(llama_cpp.llama_supports_gpu_offload())


def context_length(model: Any, runtime: Runtime) -> int:
    """The tokens of a conversation: those that the model was trained for, at most those of the
    settings."""
    trained = llama_cpp.llama_model_n_ctx_train(model)
    return min(trained, runtime.context_length) if trained > 0 else runtime.context_length


def threads_of(runtime: Runtime) -> int:
    return runtime.threads or usual_threads()


def weights_type(model: Any) -> str:
    """The type of most of the weights: "F32", "Q4_K_M", ..."""
    # The library marks types that it guessed, because the file names none.
    ftype = llama_cpp.llama_model_ftype(model) & ~llama_cpp.LLAMA_FTYPE_GUESSED
    for name, value in vars(llama_cpp).items():
        if name.startswith("LLAMA_FTYPE_") and value == ftype:
            return name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_")
    return "mixed"


def complaint(start: int = 0) -> str:
    """The library's first error after line number `start` of the log, which is the cause of later
    ones."""
    for severity in (ERROR, WARNING):
        for level, text in log[start:]:
            if level == severity and text.strip():
                return text.partition(": ")[2].strip().rstrip(".") or text.strip()
    return ""


def metadata(model: Any, key: str) -> str:
    """A value of the file's header as text; "" if it is missing."""
    size = 256
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = llama_cpp.llama_model_meta_val_str(model, key.encode(), buffer, size)
        if length < size:
            return buffer.value.decode("utf-8", "replace") if length > 0 else ""
        size = length + 1


class Batch:
    """The rows of one forward, in arrays that the library reads in place.

    `order` lists all sequences, the one that holds everything first. A tree's leaves take them in
    the order of a walk from branch to branch, so the sequences of a row are neighbours in it.
    """

    def __init__(self, rows: int, sequences: int) -> None:
        self.rows = rows
        self.order: Any = (ctypes.c_int32 * sequences)(*range(sequences))
        self.tokens: Any = (ctypes.c_int32 * rows)()
        self.positions: Any = (ctypes.c_int32 * rows)()
        self.counts: Any = (ctypes.c_int32 * rows)()
        self.sequences: Any = (ctypes.c_size_t * rows)()
        self.with_logits: Any = (ctypes.c_int8 * rows)()
        self.first = ctypes.addressof(self.order)
        self.step = ctypes.sizeof(ctypes.c_int32)
        self.raw: Any = llama_cpp.llama_batch(
            n_tokens=0,
            token=self.tokens,
            embd=None,
            pos=self.positions,
            n_seq_id=self.counts,
            seq_id=ctypes.cast(self.sequences, LISTS),
            logits=self.with_logits,
        )

    def fill(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        leaves: Sequence[int],
        counts: Sequence[int],
        outputs: int,
    ) -> None:
        """Set the rows: `leaves` is the first leaf below each, `counts` the number of its leaves.
        Logits are computed for the last `outputs` rows."""
        rows = len(tokens)
        self.tokens[:rows] = tokens
        self.positions[:rows] = positions
        self.counts[:rows] = counts
        self.sequences[:rows] = [self.first + self.step * leaf for leaf in leaves]
        self.with_logits[:rows] = [*[0] * (rows - outputs), *[1] * outputs]
        self.raw.n_tokens = rows


def saved(context: Any, place: int) -> Any:
    """The content of a sequence in a context, as bytes; None if memory does not suffice."""
    size = llama_cpp.llama_state_seq_get_size(context, place)
    with suppress(MemoryError):
        data = (ctypes.c_uint8 * size)()
        if llama_cpp.llama_state_seq_get_data(context, data, size, place) == size:
            return data
    return None


def restored(context: Any, place: int, data: Any) -> bool:
    """Put saved bytes, if any, into a context; returns whether the context accepted them."""
    size = len(data or ())
    return bool(size and llama_cpp.llama_state_seq_set_data(context, data, size, place) == size)


def free(context: Any, model: Any) -> None:
    """Free the library's memory: the context, then its own model, if any."""
    llama_cpp.llama_free(context)
    if model:
        llama_cpp.llama_model_free(model)
