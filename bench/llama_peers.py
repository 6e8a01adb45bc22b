"""The decoders of llama-cpp-python, on the same GGUF file and with the same settings as ours.

`Llama.generate` is measured, which gives token ids: the least overhead that the library's users
get. Above temperature 0 it takes the token of highest score, and our sampler sets the scores, so
the text is the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from time import perf_counter
from typing import Any

import llama_cpp
from transformers import LogitsProcessorList

from bench.measure import Reply, answered, chosen_first, paced
from engine.backends import fast_path
from engine.backends.base import Backend
from engine.backends.llamacpp import LlamaCppBackend
from engine.drafting.databases import Databases
from engine.methods import PLAIN
from engine.models.formats import format_of
from engine.models.gguf import ATTENTION, context_parameters
from engine.models.loaders import load
from engine.models.probe import probed
from engine.sampling import COLDEST, Floats
from engine.settings import Generation, Runtime, Sampling


class Llama(llama_cpp.Llama):
    """The library's own class. `fast` says whether it may rearrange the weights. It has no argument
    for that, so it is set as soon as there are parameters to set it in."""

    def __init__(self, fast: bool, *arguments: Any, **settings: Any) -> None:
        self.fast = fast
        super().__init__(*arguments, **settings)

    @property
    def model_params(self) -> Any:
        return self.parameters

    @model_params.setter
    def model_params(self, parameters: Any) -> None:
        parameters.use_extra_bufts = self.fast
        self.parameters = parameters


def opened(path: str, **settings: Any) -> Llama:
    """A file in the library's own class; weights are rearranged only if that works here."""
    fast = not fast_path.problem(probed(path, Runtime()).types)
    return Llama(fast, path, verbose=False, **settings)


class LlamaPeer:
    """`Llama.generate`. Flash attention is on where we leave it to llama.cpp ("auto"), because the
    class only knows on and off."""

    def __init__(self, backend: Backend, source: str, runtime: Runtime) -> None:
        """Opens the file that `backend` was loaded from, with the settings that it runs with."""
        assert isinstance(backend, LlamaCppBackend), "the kind of the model was checked"
        path = format_of(source).located(source)
        assert path is not None, "it was loaded"
        ours = context_parameters(backend.model, runtime)
        self.ends = backend.info.eos_ids
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
            no_perf=True,
        )

    def close(self) -> None:
        self.llama.close()

    def answer(self, prompt: Sequence[int], generation: Generation) -> Reply:
        llama: Any = self.llama  # its annotations do not say what it takes
        llama.reset()
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
        return Reply(tokens, last - begun, decoding, len(tokens))


def keyed(sampling: Sampling, start: int) -> LogitsProcessorList | None:
    """Our sampler for one answer that begins at position `start`; None at temperature 0."""
    if sampling.temperature < COLDEST:
        return None
    positions = count(start)

    def raised(_: object, logits: Floats) -> Floats:
        return chosen_first(logits, sampling, next(positions))[1]

    return LogitsProcessorList([raised])


class OtherFile:
    """Plain decoding of a GGUF file by llama.cpp, next to a model of the same weights that runs
    otherwise: what people use on a processor. Our own loop calls the library, which takes less time
    than its Python class does."""

    def __init__(self, source: str, runtime: Runtime) -> None:
        self.backend = load(source, replace(runtime, bits="off"))

    def answer(self, prompt: Sequence[int], generation: Generation) -> Reply:
        return answered(self.backend, PLAIN, Databases(), prompt, generation)
