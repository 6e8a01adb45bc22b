"""The section of the Models tab that measures all ways to run the loaded model."""

from types import SimpleNamespace

import pytest

from app.service.jobs import Job, Progress
from app.service.ways import CORE, LLAMA_CPP, Found, Way
from app.web.tabs.ways import WaysSection, suggestion, table
from engine.errors import ModelError
from engine.settings import Runtime
from tests.support.blocks import EVIL, after, tab_of
from tests.support.inside import OWNER

USUAL = Way(Runtime(bits="off"), LLAMA_CPP, "Q4_0", 4 << 20, 20.04, 21.0)
FASTER = Way(Runtime(), CORE, "Q4_0", 5 << 20, 30.0, 52.5)
FOUND = Found((USUAL, FASTER), (("Bits 8", f"no room {EVIL}"),))


def section(result: Found | ModelError) -> WaysSection:
    """The section of a program on which measuring ends so."""

    def work(job: Job[Progress, Found]) -> Found:
        job.report(Progress(0.5, "Measuring Q4_0"))
        if isinstance(result, ModelError):
            raise result
        return result

    ways = SimpleNamespace(
        start=lambda owner: Job(work, Progress(0.0, "Starting")).start("ways"),
        slot=SimpleNamespace(running=None),
        known={"/m/it.gguf": FOUND},
        offered=True,
    )
    session = SimpleNamespace(ways=ways, models=SimpleNamespace(source="/m/it.gguf"))
    return tab_of(WaysSection, session)  # type: ignore[arg-type]


def test_the_fastest_way_comes_first_and_is_chosen() -> None:
    on = section(FOUND)
    shown = after(on.measure(OWNER))
    rows = shown[on.table]
    assert rows.index(CORE) < rows.index(LLAMA_CPP)
    assert all(text in rows for text in ("30.0", "52.5", "20.0", "5.0 MiB"))
    assert shown[on.bits] == {"value": "auto", "__type__": "update"}
    said = shown[on.place.status]
    assert "With Bits auto it answers 2.50 times as fast as with Bits off." in said
    assert "Bits 8: no room" in said and EVIL not in said, "it is escaped"


def test_no_other_way_is_suggested_for_a_gain_within_the_noise() -> None:
    assert "No other way is faster" in suggestion(Found((USUAL,)))
    assert "5 %" in suggestion(Found((USUAL,)))
    assert "160 %" in suggestion(Found((USUAL, FASTER), spread=2.6))


def test_a_failure_is_told_and_another_try_is_possible() -> None:
    on = section(ModelError(f"It died {EVIL}"))
    shown = after(on.measure(OWNER))
    assert "It died" in shown[on.place.status] and EVIL not in shown[on.place.status]
    assert shown[on.place.buttons[0]]["visible"] and not shown[on.place.stop]["visible"]
    assert on.bits not in shown and shown[on.table] == ""


@pytest.mark.parametrize("offered", [True, False])
def test_what_was_measured_is_shown_again_where_ways_are_offered(offered: bool) -> None:
    on = section(FOUND)
    on.session.ways.offered = offered  # type: ignore[misc]
    shown = after(on.show())
    assert shown[on.section]["visible"] is offered and shown[on.table] == table(FOUND)
