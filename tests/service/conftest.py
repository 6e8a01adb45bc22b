"""What tests of the service share: no toy needs two seconds to be timed."""

from functools import partial

import pytest

from engine.drafting.costs import measure_costs


@pytest.fixture(autouse=True)
def quick_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure what forwards cost with few rounds."""
    measure = partial(measure_costs, sizes=(0, 1, 4), seconds=0.01)
    monkeypatch.setattr("engine.loaded.measure_costs", measure)
