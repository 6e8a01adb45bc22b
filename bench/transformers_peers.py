"""The decoders of the transformers library: `generate()` with our settings, on the same model."""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from bench.peers import ASSISTED, PROMPT_LOOKUP, Reply, paced
from engine.backends.base import Backend
from engine.backends.load_transformers import load_transformers
from engine.backends.transformers import TransformersBackend
from engine.errors import SettingError
from engine.settings import Generation


def transformers_peer(name: str, backend: Backend, assistant: str = "") -> "GeneratePeer":
    """The peer called `name`; "assisted" drafts with the model that `assistant` names."""
    assert isinstance(backend, TransformersBackend), "the kind of the model was checked"
    settings: dict[str, Any] = {}
    if name == PROMPT_LOOKUP:
        settings = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}
    elif name == ASSISTED:
        settings = {"assistant_model": load_assistant(assistant, backend).model}
    return GeneratePeer(name, backend, settings)


def load_assistant(source: str, target: TransformersBackend) -> TransformersBackend:
    """The draft model, in the target's dtype and on its device.

    Raises SettingError when its tokens are not the target's: the library would translate between
    them through text, which is another method.
    """
    assistant = load_transformers(source, target.info.device, target.info.dtype)
    same = assistant.info.vocabulary_size == target.info.vocabulary_size
    if not same or assistant.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise SettingError(
            f"The assistant {assistant.info.name} cannot draft for {target.info.name}: they do "
            "not have the same vocabulary. Choose a smaller model of the same family."
        )
    return assistant


class GeneratePeer:
    """A way to call `generate()`: `settings` are its arguments beside the sampler's."""

    def __init__(
        self, name: str, backend: TransformersBackend, settings: Mapping[str, Any]
    ) -> None:
        self.name, self.backend, self.settings = name, backend, settings

    def answer(self, prompt: Sequence[int], generation: Generation) -> Reply:
        """One call, with the same settings as ours and the library's own random numbers."""
        sampling, model = generation.sampling, self.backend.model
        warm = sampling.temperature > 0
        settings: dict[str, Any] = {"do_sample": warm, "max_new_tokens": generation.max_tokens}
        if warm:
            settings |= {"temperature": sampling.temperature, "min_p": sampling.min_p}
            settings |= {"top_k": sampling.top_k, "top_p": sampling.top_p}
            torch.manual_seed(sampling.seed)
        inputs = torch.tensor([list(prompt)], device=model.device)
        arrivals = Arrivals()
        start = perf_counter()
        with torch.inference_mode():
            output = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                streamer=arrivals,
                **settings,
                **self.settings,
            )
        seconds = perf_counter() - start
        tokens = output[0, len(prompt) :].tolist()
        return Reply(tokens, seconds, arrivals.decode_seconds, arrivals.forwards)


class Arrivals:
    """The streamer of `generate()`: when tokens arrive, and how many at a time."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt first, then with the tokens of each forward."""
        self.times.append(perf_counter())
        self.sizes.append(value.numel())

    def end(self) -> None:
        """Called when the answer is over."""

    @property
    def forwards(self) -> int:
        """The target's forwards, the one that read the prompt included."""
        return len(self.times) - 1

    @property
    def decode_seconds(self) -> float:
        """The time of all tokens at the pace of those behind the first forward."""
        asked, first, last = self.times[0], self.times[1], self.times[-1]
        return paced(last - asked, last - first, sum(self.sizes[1:]), self.sizes[1])
