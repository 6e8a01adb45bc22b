"""What forwards of a real model cost."""

from typing import Any

import pytest

from engine.drafting.costs import measure_costs
from engine.settings import Drafting, Generation, Sampling
from tests.support.lossless import assert_lossless, events_of


@pytest.mark.model
def test_a_real_model_is_measured_and_left_usable(embedded: Any) -> None:
    from engine.backends.transformers import TransformersBackend

    backend = TransformersBackend(embedded.model, embedded.tokenizer, embedded.info)
    curve = measure_costs(backend, (0, 7, 63), seconds=0.1)
    assert curve.points[63] > curve.points[0] > 0
    wanted = Generation(Sampling(0.8, seed=3), max_tokens=12)
    prompt = backend.tokenize("And now for something else")
    after = events_of(backend, prompt, wanted, [], Drafting(), costs=curve)
    embedded.reset()
    assert_lossless(events_of(embedded, prompt, wanted), after)
