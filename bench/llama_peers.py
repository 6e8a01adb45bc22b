"""The decoders of llama-cpp-python, on the same GGUF file and with the same settings as ours.

Its users get an answer from `Llama.create_completion`, which decodes through the generator
`Llama.generate` and, around it, makes text of all tokens again after each one. What is measured is
`generate` itself, the least overhead that they get: token ids, no text. Above temperature 0 it
takes the likeliest token of what our sampler makes of the logits, so that it says the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import llama_cpp
from llama_cpp import LogitsProcessorList
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from bench.peer import LLAMA_LOOKUP, Reply, chosen_first, paced
from engine.backends import fast_path
from engine.backends.base import Backend
from engine.backends.llamacpp import LlamaCppBackend
from engine.models.formats import format_of
from engine.models.gguf import ATTENTION, NUMBERS, context_parameters
from engine.models.load_llamacpp import probed
from engine.sampling import COLDEST, Floats
from engine.settings import Generation, Runtime, Sampling

NGRAM, DRAFTED = 3, 10
"""Prompt lookup: the longest key and the tokens drafted, as for its like in transformers."""
SEEDS = 2**32 - 1
"""The library's seeds are smaller; this one it takes for "any"."""


@dataclass(frozen=True, slots=True)
class Gguf:
    """A GGUF file, our backend of it, and the settings that it runs with there.

    `attention` is "auto", "on" or "off", `cache` the type of numbers in the cache; `fast` says
    whether the library may rearrange the weights.
    """

    backend: LlamaCppBackend
    path: str
    context: int
    batch: int
    threads: int
    gpu_layers: int
    attention: str
    cache: str
    fast: bool


def gguf_of(backend: Backend, source: str, runtime: Runtime) -> Gguf:
    """How the peers are to run the file that `backend` was loaded from."""
    assert isinstance(backend, LlamaCppBackend), "the kind of the model was checked"
    path = format_of(source).located(source)
    assert path is not None, "it was loaded"
    ours = context_parameters(backend.model, runtime)
    return Gguf(
        backend,
        path,
        backend.info.context_length,
        ours.n_batch,
        ours.n_threads,
        runtime.gpu_layers,
        next(name for name, kind in ATTENTION.items() if kind == ours.flash_attn_type),
        next(name for name, kind in NUMBERS.items() if kind == ours.type_k),
        not fast_path.problem(probed(path, runtime).types),
    )


def temperature_of(sampling: Sampling) -> float:
    """The temperature, 0 where ours takes the likeliest token."""
    return sampling.temperature if sampling.temperature >= COLDEST else 0.0


class Llama(llama_cpp.Llama):
    """The library's own class, which counts its forwards.

    `fast` says whether it may rearrange the weights. It has no argument for that, so it is set as
    soon as there are parameters to set it in.
    """

    def __init__(self, fast: bool, *arguments: Any, **settings: Any) -> None:
        self.fast, self.forwards = fast, 0
        super().__init__(*arguments, **settings)

    @property
    def model_params(self) -> Any:
        """What the model is loaded with."""
        return self.parameters

    @model_params.setter
    def model_params(self, parameters: Any) -> None:
        parameters.use_extra_bufts = self.fast
        self.parameters = parameters

    def eval(self, tokens: Sequence[int]) -> None:
        self.forwards += 1
        super().eval(tokens)


class LlamaPeer:
    """`Llama.generate`, plainly or with the library's prompt lookup.

    Prompt lookup needs `logits_all`: without it the library keeps the logits of one batch only, and
    breaks beyond. Where ours leaves flash attention to llama.cpp ("auto"), it is on here: the class
    knows on and off alone.
    """

    def __init__(self, name: str, file: Gguf) -> None:
        self.name = name
        self.ends = file.backend.info.eos_ids
        drafts = name == LLAMA_LOOKUP
        self.llama = Llama(
            file.fast,
            file.path,
            n_ctx=file.context,
            n_batch=file.batch,
            n_ubatch=file.batch,
            n_threads=file.threads,
            n_threads_batch=file.threads,
            n_gpu_layers=file.gpu_layers,
            flash_attn=file.attention != "off",
            type_k=NUMBERS[file.cache],
            type_v=NUMBERS[file.cache],
            logits_all=drafts,
            draft_model=LlamaPromptLookupDecoding(NGRAM, DRAFTED) if drafts else None,
            no_perf=True,
            verbose=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.llama.close()

    def answer(self, prompt: Sequence[int], generation: Generation) -> Reply:
        """One run of the generator from an empty cache."""
        llama: Any = self.llama  # its annotations do not say what it takes
        llama.reset()
        llama.forwards = 0
        sampler = keyed(generation.sampling, len(prompt))
        tokens: list[int] = []
        times = [perf_counter()]
        for token in llama.generate(
            list(prompt), temp=0.0, repeat_penalty=1.0, logits_processor=sampler
        ):
            tokens.append(token)
            times.append(perf_counter())
            if token in self.ends or len(tokens) >= generation.max_tokens:
                break
        asked, first, last = times[0], times[1], times[-1]
        decoding = paced(last - asked, last - first, len(tokens))
        return Reply(tokens, last - asked, decoding, llama.forwards)


def keyed(sampling: Sampling, start: int) -> LogitsProcessorList | None:
    """Our sampler for one answer that begins at position `start`; None at temperature 0.

    The library asks for one place after another, and never behind a draft that was wrong.
    """
    if temperature_of(sampling) == 0:
        return None
    positions = count(start)

    def raised(_: object, logits: Floats) -> Floats:
        return chosen_first(logits, sampling, next(positions))[1]

    return LogitsProcessorList([raised])
