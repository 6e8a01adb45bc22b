"""The trial of a format: both speeds of a model, measured in a process of its own."""

import pytest

from app.service import demonstration
from engine.settings import Runtime
from tests.conftest import EMBEDDED


@pytest.mark.soak
@pytest.mark.model
def test_a_trial_measures_in_a_process_of_its_own() -> None:
    small = str(EMBEDDED.with_name("small"))
    speed = demonstration.trial(small, Runtime(threads=1), lambda: True)
    assert speed is not None and min(speed) > 1
    assert demonstration.trial(f"{small}/gone", Runtime(), lambda: True) == demonstration.FAILED
    assert demonstration.trial(small, Runtime(), lambda: False) is None
