"""Fixtures that spare tests with toys the time that real models need."""

from functools import partial

import pytest

from engine.drafting.costs import measure_costs


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure what forwards cost with few rounds, look at jobs often, and prove an answer once."""
    monkeypatch.setattr("engine.drafting.costs.LEAST", 10**9)  # No text is long enough to be timed.
    measure = partial(measure_costs, sizes=(0, 1, 4), seconds=0.001)
    monkeypatch.setattr("engine.loaded.measure_costs", measure)
    monkeypatch.setattr(
        "engine.hsd.measure.measure_costs", lambda backend, seconds: measure(backend)
    )
    monkeypatch.setattr("app.service.jobs.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("app.service.proofs.ENOUGH", 0.0)


@pytest.fixture
def each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of an answer is an update of its own, however fast they follow each other."""
    monkeypatch.setattr("app.service.answering.UPDATE_SECONDS", 0.0)
    monkeypatch.setattr("app.service.comparison.UPDATE_SECONDS", 0.0)
