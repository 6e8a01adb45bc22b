"""From a GGUF file to a checked backend.

The file is first opened by a separate process, because llama.cpp crashes on some damaged files. Its
chat template runs in a sandbox, in a process that is ended if the template does not end. Before a
model is returned, one small tree forward is compared with plain forwards. A model that disagrees or
cannot roll back decodes plainly, and its note gives the reason.
"""

import os
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import llama_cpp

from engine.backends import fast_path
from engine.backends.base import BackendInfo, fingerprint
from engine.backends.chat_template import (
    FILLER,
    Fill,
    TemplateError,
    TemplateStopped,
    call_form,
    can_choose,
)
from engine.backends.check import check, joins
from engine.backends.llamacpp import LlamaCppBackend, LlamaCppTokenizer, Vocabulary, alone
from engine.backends.llamacpp_joint import JointBackend
from engine.backends.llamacpp_states import StatesBackend
from engine.backends.special_tokens import imitable
from engine.errors import first_line
from engine.models.format import recommended
from engine.models.gguf import (
    Unusable,
    context_length,
    exact,
    free,
    keeps_state,
    metadata,
    offloads,
    opened,
    threads_of,
    weights_type,
)
from engine.models.gguf_files import file_fingerprint
from engine.models.gguf_heads import with_head
from engine.models.probe import Probe, refusal
from engine.settings import Runtime
from engine.thinking import marks_of

KINDS = {1: "BPE", 2: "BPE", 3: "WordPiece", 4: "Unigram"}
"""Vocabulary types of the library with their names in transformers. The first type is SentencePiece
with scores instead of merges; converted tokenizers of that kind are BPE in transformers."""
SAMPLER = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
"""Our settings, with their names in the header of a file that recommends values."""
HEADLESS = Runtime(head="off")
TOLERANCE, EXACT = 0.5, 1e-3
"""The largest logit difference that the check allows: in general, and if everything is float32. A
wrong mask or position differs by whole units."""


def load_gguf(source: str, runtime: Runtime, found: Probe) -> LlamaCppBackend:
    """The backend of a probed GGUF file. Raises ModelError; other loaded models are not
    affected."""
    FILLER.prepare("llama_cpp")
    slow = fast_path.problem(found.types)
    path = Path(os.path.expanduser(source))
    lean = replace(runtime, head="off") if found.head else runtime
    try:
        snapshots, places = found.snapshots, runtime.parallel
        model, context = opened(path, lean, fast=not slow, snapshots=snapshots, places=places)
    except Unusable as problem:
        raise refusal(source, str(problem)) from problem
    vocabulary = Vocabulary(model)
    info, template, note = describe(path, model, context, vocabulary, runtime)
    given = model, context, vocabulary, template
    allowed = EXACT if info.dtype == "F32" and exact(runtime) else TOLERANCE
    backend: LlamaCppBackend
    if runtime.parallel > 1 and info.leaves != 1:
        info = replace(info, leaves=llama_cpp.llama_n_seq_max(context) // runtime.parallel)
        backend = JointBackend(*given, info, runtime.batch_size, runtime.parallel)
        backend.joins = joins(backend, allowed)
    else:
        kind = StatesBackend if keeps_state(model) else LlamaCppBackend
        backend = kind(*given, info, runtime.batch_size)
    reach = llama_cpp.llama_model_n_swa(model)
    backend.info = check(backend, partial(alone, backend), allowed, reach)
    if slow:
        slow = (
            f"llama.cpp's fast path {slow} on this machine: {info.name} runs without it and reads "
            "prompts more slowly."
        )
    notes = (backend.info.note, slow, note)
    head = with_head(backend, path, runtime, not slow, found.head)
    backend.info = replace(
        backend.info,
        note=" ".join(filter(None, notes)),
        head=head,
        imitable=imitable(backend.render, backend.special),
    )
    return backend


def load_tokenizer(source: str, runtime: Runtime = HEADLESS) -> LlamaCppTokenizer:
    """The tokenizer of a probed GGUF file, of which only the header is read. Its `info` describes
    the whole model. Raises ModelError."""
    FILLER.prepare("llama_cpp")
    path = Path(os.path.expanduser(source))
    try:
        model, context = opened(path, runtime, fast=False, weights=False)
    except Unusable as problem:
        raise refusal(source, str(problem)) from problem
    vocabulary = Vocabulary(model)
    info, template, note = describe(path, model, context, vocabulary, runtime)
    made = LlamaCppTokenizer(vocabulary, template, replace(info, note=note))
    weakref.finalize(made, free, context, model)
    return made


def tokenizer_type(vocabulary: Vocabulary) -> str:
    return KINDS.get(llama_cpp.llama_vocab_type(vocabulary.raw), "other")


def describe(
    path: Path, model: Any, context: Any, vocabulary: Vocabulary, runtime: Runtime
) -> tuple[BackendInfo, Fill | None, str]:
    """The description of an opened model, the function that fills its chat template, None without
    one, and the problem with the template, if any. That it can verify trees is a guess."""
    name = path.name.removesuffix(path.suffix)
    kind = tokenizer_type(vocabulary)
    written = (llama_cpp.llama_model_chat_template(model, None) or b"").decode("utf-8", "replace")
    template, note = chat_template(written, vocabulary)
    family = metadata(model, "general.architecture")
    used, experts = (
        int(metadata(model, f"{family}.expert_{count}") or 0) for count in ("used_count", "count")
    )
    info = BackendInfo(
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
        sampling=recommended(own_sampler(model)),
        begin=vocabulary.begin,
        can_think=template is not None and can_choose(written, template, True, False),
        has_efforts=template is not None and can_choose(written, template, "low", "high"),
        marks=marks_of(written, vocabulary.texts),
        calls=template and call_form(written, template),
        experts=experts,
        used_experts=used,
    )
    return info, template, note


def chat_template(text: str, vocabulary: Vocabulary) -> tuple[Fill | None, str]:
    """The function that fills the file's chat template, None without one, and the problem with the
    template, if any."""
    problem = "The file brings no chat template"
    if text:
        raw = vocabulary.raw
        tokens = {
            "bos_token": vocabulary.spelled(llama_cpp.llama_vocab_bos(raw)),
            "eos_token": vocabulary.spelled(llama_cpp.llama_vocab_eos(raw)),
        }
        try:
            FILLER.fill("llama_cpp", text, tokens, None)
            return partial(FILLER.fill, "llama_cpp", text, tokens), ""
        except (TemplateError, TemplateStopped) as error:
            problem = f"Its chat template cannot be read ({first_line(error)})"
    return None, f"{problem}: the conversation is sent as plain lines."


def own_sampler(model: Any) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, key in SAMPLER.items():
        with suppress(ValueError):
            value = float(metadata(model, f"general.sampling.{key}"))
            values[name] = int(value) if name == "top_k" and value.is_integer() else value
    return values
