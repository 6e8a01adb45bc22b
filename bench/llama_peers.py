"""The decoders of llama-cpp-python, on the same GGUF file and with the same settings as ours.

Its users get an answer from `Llama.create_completion`, which decodes with the generator
`Llama.generate` and converts all tokens to text again after each one. Here `generate` itself is
measured, which is the least overhead that users get: token ids, no text. Above temperature 0 it
takes the token of highest score, and our sampler sets the scores, so the text is the same.
"""

from collections.abc import Sequence
from itertools import count
from time import perf_counter
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from transformers import LogitsProcessorList

from bench.measure import LLAMA_LOOKUP, Reply, chosen_first, paced
from engine.backends import fast_path
from engine.backends.base import Backend
from engine.backends.llamacpp import LlamaCppBackend
from engine.compare import cold
from engine.decode import decode
from engine.methods import method_named
from engine.metrics import summarise
from engine.models.formats import format_of
from engine.models.gguf import ATTENTION, context_parameters
from engine.models.loaders import load
from engine.models.probe import probed
from engine.runs import collected, planned
from engine.sampling import COLDEST, Floats
from engine.settings import Drafting, Generation, Runtime, Sampling

NGRAM, DRAFTED = 3, 10
"""Prompt lookup: the longest key and the tokens drafted, as for its like in transformers."""


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
        return self.parameters

    @model_params.setter
    def model_params(self, parameters: Any) -> None:
        parameters.use_extra_bufts = self.fast
        self.parameters = parameters

    def eval(self, tokens: Sequence[int]) -> None:
        self.forwards += 1
        super().eval(tokens)


def opened(path: str, **settings: Any) -> Llama:
    """A file in the library's own class; weights are rearranged only if that works here."""
    fast = not fast_path.problem(probed(path, Runtime()).types)
    return Llama(fast, path, verbose=False, **settings)


class LlamaPeer:
    """`Llama.generate`, plainly or with the library's prompt lookup.

    Prompt lookup needs `logits_all`: without it the library keeps the logits of one batch only, and
    fails beyond that. Where we leave flash attention to llama.cpp ("auto"), it is on here, because
    the class only knows on and off.
    """

    def __init__(self, name: str, backend: Backend, source: str, runtime: Runtime) -> None:
        """Opens the file that `backend` was loaded from, with the settings that it runs with."""
        assert isinstance(backend, LlamaCppBackend), "the kind of the model was checked"
        path = format_of(source).located(source)
        assert path is not None, "it was loaded"
        ours, drafts = context_parameters(backend.model, runtime), name == LLAMA_LOOKUP
        self.name, self.ends = name, backend.info.eos_ids
        self.llama = opened(
            path,
            n_ctx=backend.info.context_length,
            n_batch=ours.n_batch,
            n_ubatch=ours.n_batch,
            n_threads=ours.n_threads,
            n_threads_batch=ours.n_threads,
            n_gpu_layers=runtime.gpu_layers,
            flash_attn=ours.flash_attn_type != ATTENTION["off"],
            type_k=ours.type_k,
            type_v=ours.type_k,
            logits_all=drafts,
            draft_model=LlamaPromptLookupDecoding(NGRAM, DRAFTED) if drafts else None,
            no_perf=True,
        )

    def close(self) -> None:
        self.llama.close()

    def answer(self, prompt: Sequence[int], generation: Generation) -> Reply:
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
        begun, first, last = times[0], times[1], times[-1]
        decoding = paced(last - begun, last - first, len(tokens))
        return Reply(tokens, last - begun, decoding, llama.forwards)


def keyed(sampling: Sampling, start: int) -> LogitsProcessorList | None:
    """Our sampler for one answer that begins at position `start`; None at temperature 0.

    The library asks for one position after another, and never after a wrong draft.
    """
    if sampling.temperature < COLDEST:
        return None
    positions = count(start)

    def raised(_: object, logits: Floats) -> Floats:
        return chosen_first(logits, sampling, next(positions))[1]

    return LogitsProcessorList([raised])


class OtherFile:
    """Plain decoding of a GGUF file by llama.cpp, next to a transformers model of the same weights:
    what people use on a processor. Our own loop calls the library, which takes less time than its
    Python class does."""

    def __init__(self, source: str, runtime: Runtime) -> None:
        self.backend = load(source, runtime)

    def close(self) -> None:
        self.backend.close()

    def answer(self, prompt: Sequence[int], generation: Generation) -> Reply:
        cold((self.backend,))
        plan = planned(self.backend.info, method_named("plain"), generation)
        start = perf_counter()
        run = collected(plan, decode(self.backend, prompt, [], generation, Drafting()))
        seconds, metrics = perf_counter() - start, summarise(run)
        tokens = [token.id for token in run.tokens]
        return Reply(tokens, seconds, metrics.decode_seconds, metrics.forwards)
