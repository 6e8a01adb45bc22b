"""Finds the head of a GGUF model, and opens it together with the model.

A head is in the model's file or in a separate one: the file that is named explicitly, or a file in
the same folder whose name begins like that of a head. A head that is found but cannot be used is
reported.
"""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp

from engine.backends.base import digest
from engine.backends.check import gives_numbers
from engine.backends.llamacpp import LlamaCppBackend
from engine.errors import ModelError, first_line
from engine.heads.base import HeadInfo
from engine.heads.llamacpp import (
    DEPTH,
    ROWS,
    WIDTH,
    Block,
    HeadContext,
    Kind,
    LlamaHead,
    NoHead,
    bound,
)
from engine.heads.llamacpp_block import LlamaBlockHead, prepare
from engine.models.format import found_at
from engine.models.gguf import complaint, context_parameters, log, metadata, model_parameters
from engine.models.gguf_files import (
    ANCHORED,
    DSPARK,
    HEADS,
    MAGIC,
    file_fingerprint,
    heads_near,
    kind_of_head,
)
from engine.settings import Runtime

NEXTN = "nextn_predict_layers"
GUESSING = frozenset(
    {
        "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe",
        "hy_v3", "mimo2", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "step35",
    }
)  # fmt: skip
"""Architectures whose MTP layers llama.cpp 0.3.36 computes. With others it ends the process."""
CROPPED = frozenset({"deepseek4", "gemma4-assistant", "mimo2", "qwen3next", "step35"})
"""Architectures of which llama.cpp returns only the states of rows with logits."""
SHOWING = frozenset(
    {
        "bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan_vl", "lfm2", "llama", "mimo2",
        "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe",
        "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen4exp",
    }
)  # fmt: skip
"""Architectures of which llama.cpp returns the inputs of a layer; with others it ends the
process."""
STATES = frozenset({"gemma4", "gpt-oss"}) | GUESSING
"""Architectures of which llama.cpp returns the state after the last layer."""
HEADS_ONLY = frozenset({"dflash", "eagle3", "gemma4-assistant"})
"""Architectures of files that hold only a head."""
SAMPLES = 512
"""The number of tokens by which two vocabularies are compared."""
NAMES = ", ".join(f"{start}*.gguf" for start in HEADS)
LEVELS = 2
"""The levels that are guessed when a head is tried."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A head's context, with its model and `path` if it has its own file."""

    kind: Kind
    context: Any
    model: Any = None
    path: Path | None = None

    @property
    def weights(self) -> int:
        return int(llama_cpp.llama_model_size(self.model)) if self.model else 0

    @property
    def parameters(self) -> int:
        return int(llama_cpp.llama_model_n_params(self.model)) if self.model else 0

    def states(self, target: Any) -> int:
        """The bytes of the hidden states of a part of a prompt, in the library and copied."""
        width = llama_cpp.llama_model_n_embd_out(llama_cpp.llama_get_model(target))
        numbers = int(llama_cpp.llama_n_batch(target) * width) * max(1, len(self.kind.layers))
        return 2 * numbers * ctypes.sizeof(ctypes.c_float)


def opened_head(
    model: Any, context: Any, path: Path, runtime: Runtime, fast: bool, weights: bool = True
) -> Opened | None:
    """The head of an opened model, None without one or if heads are off. Raises NoHead. `fast` and
    `weights` are as for the model; see engine/models/gguf.py."""
    if runtime.head == "off":
        return None
    if runtime.head != "auto":
        return head_of_file(model, context, named_file(runtime.head), runtime, fast, weights)
    if names_layers(model):
        return head_of_model(model, context, runtime)
    problem: NoHead | None = None
    for near in heads_near(path):
        try:
            return head_of_file(model, context, Path(near), runtime, fast, weights)
        except NoHead as found:
            problem = problem or found
    if problem:
        raise problem
    return None


def names_layers(model: Any) -> bool:
    """Whether a file says that it holds prediction layers of its own."""
    return int(metadata(model, f"{architecture(model)}.{NEXTN}") or 0) > 0


def architecture(model: Any) -> str:
    return metadata(model, "general.architecture")


def named_file(text: str) -> Path:
    path = Path(os.path.expanduser(text))
    if not path.is_file():
        raise NoHead(f"a GGUF file is needed there ({NAMES}), and {found_at(path)}")
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise NoHead(f"it is no GGUF file, which is needed there ({NAMES})")
    return path


def head_of_model(model: Any, context: Any, runtime: Runtime) -> Opened:
    bound()
    kind = architecture(model)
    if kind not in GUESSING:
        raise NoHead(f"llama.cpp does not compute the prediction layers of {kind} models")
    if not llama_cpp.llama_model_n_layer_nextn(model):
        raise NoHead("its file names prediction layers and does not hold them")
    found = Kind("MTP", cropped=kind in CROPPED)
    return Opened(found, head_context(model, context, found, runtime))


def head_of_file(
    model: Any, context: Any, path: Path, runtime: Runtime, fast: bool, weights: bool
) -> Opened:
    bound()
    parameters = model_parameters(runtime, fast, weights)
    parameters.load_mtp = True
    start = len(log)
    own = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)
    if not own:
        raise NoHead(f"{path.name} cannot be read ({complaint(start) or 'no reason is given'})")
    try:
        kind = fitting(model, own)
        return Opened(kind, head_context(own, context, kind, runtime), own, path)
    except NoHead as problem:
        llama_cpp.llama_model_free(own)
        raise NoHead(f"{path.name} does not fit: {problem}") from problem


def fitting(model: Any, own: Any) -> Kind:
    """The kind of a head in its own file. Raises NoHead if it does not fit the model."""
    target, kind = architecture(model), architecture(own)
    ahead = llama_cpp.llama_model_n_layer_nextn(own) > 0
    if not same_vocabulary(model, own):
        raise NoHead("it has another vocabulary")
    width = llama_cpp.llama_model_n_embd_out(model)
    if kind == "eagle3":
        expected = metadata(own, "eagle3.target_hidden_size")
        found = Kind("EAGLE-3", layers=layers_read(model, own))
    elif kind == "dflash":
        expected = str(llama_cpp.llama_model_n_embd(own))
        found = Kind("DFlash", layers=layers_read(model, own), block=block_of(own))
    elif kind == "gemma4-assistant" and target == "gemma4":
        expected = str(llama_cpp.llama_model_n_embd_out(own))
        found = Kind("MTP", shared=True, cropped=True)
    elif kind == target and kind in GUESSING and ahead:
        expected = str(llama_cpp.llama_model_n_embd_out(own))
        found = Kind("MTP", cropped=kind in CROPPED)
    else:
        what = "a head" if kind in HEADS_ONLY or ahead else "a model without prediction layers"
        raise NoHead(f"it is {what} of the kind {kind}, and the model is a {target}")
    if expected != str(width):
        raise NoHead(f"it reads states of {expected} numbers, and the model's have {width}")
    return found


def layers_read(model: Any, own: Any) -> tuple[int, ...]:
    """The layers of the model whose inputs a head reads. Raises NoHead."""
    target, count = architecture(model), bound().llama_model_target_layer_ids_n(own)
    read = tuple(bound().llama_model_target_layer_ids(own)[:count])
    layers = llama_cpp.llama_model_n_layer(model)
    if target not in SHOWING or (layers in read and target not in STATES):
        raise NoHead(f"llama.cpp does not hand out the hidden states of {target} models")
    if not read or not 0 <= min(read) <= max(read) <= layers:
        raise NoHead(f"it reads the layers {list(read)}, and the model has {layers}")
    return read


def block_of(own: Any) -> Block:
    """The block of a DFlash head. Raises NoHead."""

    def value(name: str, default: str) -> str:
        return metadata(own, f"dflash.{name}") or default

    if value(ANCHORED, ""):
        raise NoHead(DSPARK)
    mask = llama_cpp.llama_vocab_mask(llama_cpp.llama_model_get_vocab(own))
    places = int(value("block_size", "16"))
    if mask < 0:
        raise NoHead("its file names no mask token")
    if not 2 <= places <= ROWS:
        raise NoHead(f"it guesses blocks of {places}, and 2 to {ROWS} are possible")
    return Block(
        places,
        mask,
        int(value("selector_top_k", "0")),
        value("attention.causal", "") == "true",
        float(value("logit_scale", "1")),
        float(value("final_logit_softcapping", "0")),
    )


def same_vocabulary(model: Any, own: Any) -> bool:
    """Whether two models have the same vocabulary, judged by a sample."""
    raw = [llama_cpp.llama_model_get_vocab(each) for each in (model, own)]
    sizes = {llama_cpp.llama_vocab_n_tokens(each) for each in raw}
    kinds = {llama_cpp.llama_vocab_type(each) for each in raw}
    size = min(sizes)
    text = llama_cpp.llama_vocab_get_text
    return len(sizes) == len(kinds) == 1 and all(
        text(raw[0], token) == text(raw[1], token)
        for token in range(0, size, max(1, size // SAMPLES))
    )


def head_context(model: Any, target: Any, kind: Kind, runtime: Runtime) -> Any:
    """The library's context for a head of the model in `target`. Raises NoHead."""
    parameters = context_parameters(llama_cpp.llama_get_model(target), runtime)
    parameters.n_ctx = llama_cpp.llama_n_ctx(target)
    parameters.n_batch = parameters.n_ubatch = ROWS
    # The head guesses branches only if the model verifies them.
    branches = 1 if llama_cpp.llama_n_seq_max(target) == 1 else WIDTH + 1
    parameters.n_seq_max = 1 if kind.shared or kind.block else branches
    parameters.n_outputs_max = ROWS if kind.whole else branches
    parameters.n_rs_seq = 0
    if not kind.layers:
        parameters.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
    parameters.ctx_other = target
    start = len(log)
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise NoHead(f"llama.cpp cannot open it ({complaint(start) or 'it gives no reason'})")
    return context


def with_head(
    backend: LlamaCppBackend, path: Path, runtime: Runtime, fast: bool, problem: str = ""
) -> HeadInfo | None:
    """Give a checked backend the head of its model, and return its description, None without one;
    its note says why it cannot be used. `problem` is the reason if that is already known. A head
    that was named explicitly raises ModelError instead."""
    try:
        if problem:
            raise NoHead(problem)
        found = opened_head(backend.model, backend.context, path, runtime, fast)
        if found is None:
            return None
        shared = HeadContext(
            found.kind, backend.context, found.context, found.model, backend.shared
        )
        if found.kind.block:
            prepare(shared, found.kind.block)
        if not backend.info.can_tree:
            raise NoHead("the model decodes plainly")
        if found.kind.shared and not backend.shared.single:
            several = "which holds several conversations. With --parallel 1 it is used"
            raise NoHead(f"it reads the model's cache, {several}")
        named = file_fingerprint(found.path) if found.path else backend.info.fingerprint
        block = found.kind.block
        depth = block.places - 1 if block else DEPTH
        info = HeadInfo(
            found.kind.name,
            depth,
            branches=backend.info.leaves != 1,
            at_once=depth if block else 1,
            parameters=found.parameters,
            memory_bytes=found.weights,
            fingerprint=digest([named, found.kind.name]),
        )
        backend.head = head = (LlamaBlockHead if block else LlamaHead)(shared, info, backend)
        if fault := fault_of(backend, head):
            backend.head = None
            raise NoHead(fault)
        return info
    except NoHead as reason:
        if runtime.head not in ("auto", "off"):
            raise ModelError(
                f"The head {runtime.head!r} cannot be used with {backend.info.name}: {reason}. "
                "Give the file of a head that was made for this model, or auto."
            ) from reason
        note = str(reason)
        kind = kind_of_head([] if names_layers(backend.model) else heads_near(path))
        return HeadInfo(kind, 0, branches=False, note=f"{note[:1].upper()}{note[1:]}.")


def fault_of(backend: LlamaCppBackend, head: LlamaHead) -> str:
    try:
        return "" if gives_numbers(backend, head, LEVELS) else "it gives no numbers"
    except Exception as error:
        # The library may raise any exception for a file whose content is wrong.
        return f"its first guess fails ({first_line(error)})"
