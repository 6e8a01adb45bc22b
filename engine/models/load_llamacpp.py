"""From a GGUF file to a checked backend.

The file is opened by a process of its own first, as llama.cpp ends the process over some damaged
ones. Its chat template runs in a sandbox, in a process that ends when the template does not. Before
a model is handed out, one small tree forward is compared with plain forwards; a model that
disagrees or cannot roll back decodes plainly, and says why.
"""

import weakref
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from engine.backends import fast_path
from engine.backends.base import BackendInfo, fingerprint
from engine.backends.chat_template import (
    FILLER,
    Fill,
    TemplateError,
    TemplateStopped,
    can_think,
)
from engine.errors import ModelError, SettingError, first_line
from engine.models import llama_cpp_python
from engine.models.gguf_files import MAGIC, file_fingerprint
from engine.models.memory import Need
from engine.models.probe import Probe, probe
from engine.settings import Runtime, Sampling

KINDS = {1: "BPE", 2: "BPE", 3: "WordPiece", 4: "Unigram"}
"""Vocabulary types of the library by the names that transformers has for the same ones. The first
is SentencePiece with scores in place of merges; converted tokenizers of that kind are BPE there."""
SAMPLER = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
"""Our settings, and what a file's header calls them where it recommends some."""
TOLERANCE, EXACT = 0.5, 1e-3
"""Largest logit difference the check allows, the second one where all is float32; a wrong mask or
position is off by whole units."""
QUANTIZED = ("q8_0", "q4_0")
"""Numbers of the cache that only flash attention reads."""


def load_gguf(source: str, runtime: Runtime) -> Any:
    """A LlamaCppBackend for a GGUF file. Raises ModelError; what else is loaded stays as it is."""
    found = probed(source, runtime)
    FILLER.prepare("llama_cpp")
    slow = fast_path.problem(found.types)
    import llama_cpp

    from engine.backends.check import check
    from engine.backends.llamacpp import LlamaCppBackend, Vocabulary, alone
    from engine.backends.llamacpp_states import StatesBackend
    from engine.models.gguf import Unusable, exact, keeps_state, opened
    from engine.models.gguf_heads import with_head

    path = Path(source).expanduser()
    lean = replace(runtime, head="off") if found.head else runtime
    try:
        model, context = opened(path, lean, fast=not slow, snapshots=found.snapshots)
    except Unusable as problem:
        raise refusal(source, str(problem)) from problem
    vocabulary = Vocabulary(model)
    template, note, thinks = chat_template(model, vocabulary)
    info = replace(describe(path, model, context, vocabulary, runtime), can_think=thinks)
    kind = StatesBackend if keeps_state(model) else LlamaCppBackend
    backend = kind(model, context, vocabulary, template, info, runtime.batch_size)
    allowed = EXACT if info.dtype == "F32" and exact(runtime) else TOLERANCE
    reach = llama_cpp.llama_model_n_swa(model)
    backend.info = check(backend, partial(alone, backend), allowed, reach)
    if slow:
        slow = (
            f"llama.cpp's fast path {slow} on this machine: {info.name} runs without it and reads "
            "prompts more slowly."
        )
    notes = (backend.info.note, slow, note)
    head = with_head(backend, path, runtime, not slow, found.head)
    backend.info = replace(backend.info, note=" ".join(filter(None, notes)), head=head)
    return backend


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a GGUF file, of which its header is read alone. Raises ModelError."""
    runtime = Runtime(head="off")
    probed(source, runtime)
    FILLER.prepare("llama_cpp")

    from engine.backends import base
    from engine.backends.llamacpp import LlamaCppTokenizer, Vocabulary, free
    from engine.models.gguf import Unusable, opened

    path = Path(source).expanduser()
    try:
        model, context = opened(path, runtime, fast=False, weights=False)
    except Unusable as problem:
        raise refusal(source, str(problem)) from problem
    vocabulary = Vocabulary(model)
    info = base.Vocabulary(
        path.stem,
        fingerprint(tokenizer_type(vocabulary), vocabulary.texts),
        vocabulary.size,
        vocabulary.ends,
    )
    made = LlamaCppTokenizer(vocabulary, chat_template(model, vocabulary)[0], info)
    weakref.finalize(made, free, context, model)
    return made


def tokenizer_type(vocabulary: Any) -> str:
    """How the tokenizer of a file splits text."""
    import llama_cpp

    return KINDS.get(llama_cpp.llama_vocab_type(vocabulary.raw), "other")


def need(source: str, runtime: Runtime) -> Need:
    """What the model in a GGUF file will take. Raises ModelError for a file that cannot be used."""
    found = probed(source, runtime)
    return Need(found.parameters, found.weights, found.cache)


def probed(source: str, runtime: Runtime) -> Probe:
    """What the probe says of a file. Raises ModelError for one that cannot be used."""
    llama_cpp_python.check(source)
    if runtime.flash_attention == "off" and runtime.cache_type in QUANTIZED:
        raise ModelError(
            f"A cache of {runtime.cache_type} numbers needs flash attention, which is off. Turn it "
            "on, or choose another cache type."
        )
    try:
        path = Path(source).expanduser()
        if not path.is_file():  # a pipe would be waited for
            raise refusal(source, "there is no such file")
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except (OSError, RuntimeError) as error:
        raise refusal(source, f"the file cannot be read ({first_line(error)})") from error
    if magic != MAGIC:
        problem = f"it begins with {magic!r}, not {MAGIC!r}" if magic else "the file is empty"
        raise refusal(source, problem)
    state = path.stat()
    return probe_of(source, path, runtime, (state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=64)
def probe_of(source: str, path: Path, runtime: Runtime, state: tuple[int, int]) -> Probe:
    """What the probe says of a file, asked once, as each answer takes a process of its own. A file
    of another `state`, size and time, is another file."""
    found = probe(path, runtime)
    if found.problem:
        raise refusal(source, found.problem)
    return found


def device(runtime: Runtime) -> str:
    """Where the layers of GGUF models go, as far as its free memory can be told."""
    import torch

    if not torch.cuda.is_available() or not llama_cpp_python.installed():
        return "cpu"
    from engine.models.gguf import offloads

    return "cuda:0" if offloads(runtime) else "cpu"


def refusal(source: str, problem: str) -> ModelError:
    """The error for a file that cannot be used."""
    return ModelError(
        f"The model {source!r} cannot be used: {problem}. Give a complete GGUF file of a language "
        "model; download it again if it is damaged."
    )


def describe(
    path: Path, model: Any, context: Any, vocabulary: Any, runtime: Runtime
) -> BackendInfo:
    """What the program needs to know of an opened model; whether trees work is a guess."""
    import llama_cpp

    from engine.models.gguf import (
        context_length,
        offloads,
        threads_of,
        weights_type,
    )

    name = path.name.removesuffix(path.suffix)
    kind = tokenizer_type(vocabulary)
    return BackendInfo(
        name=name,
        kind="llama.cpp",
        fingerprint=file_fingerprint(path),
        tokenizer_fingerprint=fingerprint(kind, vocabulary.texts),
        vocabulary_size=vocabulary.size,
        eos_ids=vocabulary.ends,
        context_length=context_length(model, runtime),
        can_tree=True,
        leaves=llama_cpp.llama_n_seq_max(context),
        depth=llama_cpp.llama_n_rs_seq(context) or None,
        device="gpu" if offloads(runtime) else "cpu",
        dtype=weights_type(model),
        threads=threads_of(runtime),
        tokenizer_type=kind,
        parameters=llama_cpp.llama_model_n_params(model),
        memory_bytes=llama_cpp.llama_model_size(model),
        sampling=recommended(model),
        begin=vocabulary.begin,
    )


def chat_template(model: Any, vocabulary: Any) -> tuple[Fill | None, str, bool]:
    """What fills the file's chat template, None where there is none; what is wrong with it; and
    whether it can switch thinking."""
    import llama_cpp

    found = llama_cpp.llama_model_chat_template(model, None)
    if not found:
        problem = "The file brings no chat template: the conversation is sent as plain lines."
        return None, problem, False
    text, raw = found.decode("utf-8", "replace"), vocabulary.raw
    tokens = {
        "bos_token": vocabulary.special(llama_cpp.llama_vocab_bos(raw)),
        "eos_token": vocabulary.special(llama_cpp.llama_vocab_eos(raw)),
    }
    try:
        FILLER.fill("llama_cpp", text, tokens, None)
    except (TemplateError, TemplateStopped) as error:
        problem = (
            f"Its chat template cannot be read ({first_line(error)}): the conversation is sent as "
            "plain lines."
        )
        return None, problem, False
    fill = partial(FILLER.fill, "llama_cpp", text, tokens)
    return fill, "", can_think(text, fill)


def recommended(model: Any) -> Sampling:
    """The sampler settings in the file's header; others, or unusable ones, are ours."""
    from engine.models.gguf import metadata

    values: dict[str, Any] = {}
    for name, key in SAMPLER.items():
        with suppress(ValueError):
            value = float(metadata(model, f"general.sampling.{key}"))
            values[name] = int(value) if name == "top_k" and value.is_integer() else value
    try:
        return Sampling(**values)
    except SettingError:
        return Sampling()
