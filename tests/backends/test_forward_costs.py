"""What forwards of a real model cost."""

from typing import Any

import pytest

from engine.backends.transformers import TransformersBackend
from engine.drafting.costs import LEAST, measure_costs
from engine.settings import Drafting, Generation, Sampling
from tests.support.lossless import assert_lossless, events_of


@pytest.mark.model
def test_a_real_model_is_measured_and_left_usable(embedded: Any) -> None:
    backend = TransformersBackend(embedded.model, embedded.tokenizer, embedded.info)
    curve = measure_costs(backend, (0, 7, 63), seconds=0.1)
    assert curve.points[63] > curve.points[0] > 0
    wanted = Generation(Sampling(0.8, seed=3), max_tokens=12)
    prompt = backend.tokenize("And now for something else")
    after = events_of(backend, prompt, wanted, [], Drafting(), costs=curve)
    embedded.reset()
    assert_lossless(events_of(embedded, prompt, wanted), after)


@pytest.mark.model
def test_a_real_model_is_timed_behind_a_long_text_that_nobody_reads(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TransformersBackend(embedded.model, embedded.tokenizer, embedded.info)
    read, behind = list[int](), list[int]()
    reading, score = TransformersBackend.read, TransformersBackend.score

    def noting_read(self: Any, chunk: Any) -> None:
        read.append(len(chunk))
        reading(self, chunk)

    def noting_score(self: Any, *given: Any) -> Any:
        assert self.cache.length == len(self.cached)
        behind.append(len(self.cached))
        return score(self, *given)

    monkeypatch.setattr(TransformersBackend, "read", noting_read)
    monkeypatch.setattr(TransformersBackend, "score", noting_score)
    curve = measure_costs(backend, (0, 7), seconds=0.01)
    assert sum(read) == min(behind) == 255
    assert LEAST < max(behind) < backend.info.context_length - 7
    assert backend.bytes == 0, "what it took is freed"
    assert min(curve.growth.token, curve.growth.row) >= 0
