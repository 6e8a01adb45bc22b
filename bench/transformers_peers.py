"""The decoders of the transformers library: `generate()` on the same model, with our settings and
the library's attention.

Above temperature 0 the library takes the token of highest score, and our sampler sets the scores,
so the text equals that of plain decoding. Prompt lookup and assisted generation keep a draft that
equals that token. An assistant draws with the same noise, as the draft models of our stacks do.
"""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from bench.measure import ASSISTED, PROMPT_LOOKUP, SMALL, Reply, chosen_first, paced
from engine.backends.base import Backend
from engine.backends.folded_attention import unfold, unfolded
from engine.backends.transformers import TransformersBackend
from engine.models.load_transformers import load_transformers
from engine.sampling import COLDEST
from engine.settings import Generation, Runtime, Sampling


def transformers_peer(name: str, backend: Backend) -> "GeneratePeer":
    """The peer called `name`. The draft model of "assisted" has the target's dtype and device."""
    assert isinstance(backend, TransformersBackend), "the kind of the model was checked"
    settings: dict[str, Any] = {}
    if name == PROMPT_LOOKUP:
        settings = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}
    elif name == ASSISTED:
        runtime = Runtime(device=backend.info.device, dtype=backend.info.dtype)
        assistant = load_transformers(str(SMALL), runtime).model
        unfold(assistant)
        settings = {"assistant_model": assistant}
    return GeneratePeer(name, backend, settings)


class GeneratePeer:
    """A way to call `generate()`, with `settings` in addition to those of the sampler."""

    def __init__(
        self, name: str, backend: TransformersBackend, settings: Mapping[str, Any]
    ) -> None:
        self.name, self.backend, self.settings = name, backend, settings

    def answer(self, prompt: Sequence[int], generation: Generation) -> Reply:
        """One call with the same settings as ours; other defaults of the model are undone."""
        sampling, model = generation.sampling, self.backend.model
        settings: dict[str, Any] = {
            "do_sample": False,
            "max_new_tokens": generation.max_tokens,
            "repetition_penalty": 1.0,
            "eos_token_id": sorted(self.backend.info.eos_ids) or None,
        }
        if sampling.temperature >= COLDEST:
            settings["logits_processor"] = LogitsProcessorList([Keyed(sampling)])
        inputs = torch.tensor([list(prompt)], device=model.device)
        arrivals = Arrivals()
        start = perf_counter()
        with torch.inference_mode(), unfolded(model):
            output = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                streamer=arrivals,
                **settings,
                **self.settings,
            )
        seconds = perf_counter() - start
        tokens = output[0, len(prompt) :].tolist()
        return Reply(tokens, seconds, arrivals.decode_seconds(), len(arrivals.times) - 1)


class Keyed(LogitsProcessor):
    """Our sampler for one answer: the token that we would choose gets the highest score.

    The library asks for every drafted position. Our own loop chooses only until the first wrong
    draft, so nothing is computed after one here either. Nothing is computed for logits that are all
    equal, by which prompt lookup asks which tokens are forbidden (none are).
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.chosen: dict[int, int | None] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores of the place after `input_ids`, shape (1, tokens); scores: (1, vocabulary)."""
        position, row = input_ids.shape[1], scores[0].cpu().numpy()
        if row[0] == row[-1] and row.min() == row.max():
            return scores
        before = position - 1
        if before in self.chosen and self.chosen[before] != int(input_ids[0, before]):
            self.chosen[position] = None
            return scores
        self.chosen[position], raised = chosen_first(row, self.sampling, position)
        return torch.from_numpy(raised)[None].to(scores.device)


class Arrivals:
    """The streamer of `generate()`: when tokens arrive, and how many at a time; first the prompt,
    then the tokens of each forward."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(perf_counter())
        self.sizes.append(value.numel())

    def end(self) -> None:
        """Called when the answer is over."""

    def decode_seconds(self) -> float:
        begun, first, last = self.times[0], self.times[1], self.times[-1]
        return paced(last - begun, last - first, sum(self.sizes[1:]), self.sizes[1])
