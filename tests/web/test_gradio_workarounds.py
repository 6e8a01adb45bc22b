"""What is replaced in Gradio: its queue sleeps, and its updates lose nothing."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio.to_thread
import gradio as gr
import httpx
import plotly.graph_objects as go
import pytest
from gradio import utils

from app.web.gradio_import import without_environment
from app.web.gradio_workarounds import (
    SCRIPTS,
    EventQueue,
    WaitForWork,
    finding_components,
    keep_keys,
)
from tests.support.blocks import SmallPage, serving
from tests.support.clocked import simulated


def test_an_idle_queue_does_not_look_for_work() -> None:
    count = 0

    class Counting(EventQueue):
        def __len__(self) -> int:
            nonlocal count
            count += 1
            return super().__len__()

    async def idle() -> None:
        queue = Counting(True, 4, 1, None, SimpleNamespace(), 4)
        queue.start()
        await asyncio.sleep(60)
        queue.close()

    simulated(idle())
    assert count == 1


def test_a_poll_that_is_held_continues_when_there_is_work_and_ends_with_its_task() -> None:
    calls: list[str] = []

    async def poll() -> None:
        try:
            while True:
                calls.append("looked")
                await asyncio.sleep(0)
                await asyncio.sleep(0.001)
        finally:
            calls.append("ended")

    async def held() -> None:
        work = asyncio.Event()
        task = asyncio.ensure_future(WaitForWork(poll(), work))
        for count in (1, 2, 3):
            await asyncio.sleep(0.02)
            assert calls == ["looked"] * count
            work.set()
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    simulated(held())
    assert calls == ["looked"] * 4 + ["ended"]


@pytest.fixture
def served() -> Iterator[SmallPage]:
    """A page with one event, which takes one at a time and says how often it was called."""
    calls: list[int] = []

    def called() -> str:
        calls.append(len(calls) + 1)
        return f"call {calls[-1]}"

    def build(blocks: gr.Blocks) -> None:
        blocks.load(called, None, gr.HTML(), concurrency_limit=1)

    with serving(build=build) as page:
        yield page


def results(client: httpx.Client, count: int, data: Sequence[object] = ()) -> list[Any]:
    """What so many events with this data, asked for at once, return first."""
    for _ in range(count):
        body = {"data": [*data], "fn_index": 0, "session_hash": "here"}
        assert client.post("/gradio_api/queue/join", json=body).status_code == 200
    found: list[Any] = []
    with client.stream("GET", "/gradio_api/queue/data?session_hash=here") as reply:
        for line in reply.iter_lines():
            message = json.loads(line.removeprefix("data: ")) if line else {}
            if message.get("msg") == "process_completed":
                found.append(message["output"]["data"][0])
    return found


def test_events_begin_as_they_come_and_as_places_come_free(served: SmallPage) -> None:
    url, _, blocks = served
    assert isinstance(blocks._queue, EventQueue)
    with httpx.Client(base_url=url, headers={"origin": url}, timeout=60) as client:
        for first in (1, 4):
            expected = [f"call {number}" for number in range(first, first + 3)]
            assert sorted(results(client, 3)) == expected
    assert blocks._queue.cached_event_analytics_summary == {"functions": {}}, "no tables are made"


def test_an_event_changes_threads_once_however_many_values_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For its handler alone: ten values were passed to another thread and back, one by one. Those
    that may take long still are."""
    elsewhere: list[str] = []
    hand_over = anyio.to_thread.run_sync

    async def noting(work: Any, *values: Any, **options: Any) -> Any:
        elsewhere.append(getattr(work, "__qualname__", ""))
        return await hand_over(work, *values, **options)

    def handler(*values: Any) -> tuple[Any, ...]:
        return (*reversed(values), go.Figure())

    def build(blocks: gr.Blocks) -> None:
        kinds = (gr.Number, gr.Slider, gr.Textbox, gr.HTML, gr.Checkbox)
        parts = [kind() for kind in kinds]
        blocks.load(handler, parts, [*reversed(parts), gr.Plot()])

    with serving(build=build) as page:
        monkeypatch.setattr(anyio.to_thread, "run_sync", noting)
        with httpx.Client(base_url=page.address, headers={"origin": page.address}) as client:
            assert results(client, 1, [1, 2, "three", "four", True]) == [True]
    ours = [name for name in elsewhere if "process" in name or "handler" in name]
    assert ours == [handler.__qualname__, "Plot.postprocess"]


def test_this_machine_is_not_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving() as page:
        assert httpx.get(page.address, trust_env=False, timeout=60).status_code == 200


def test_clients_that_gradio_makes_on_import_ignore_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALL_PROXY", "odd://127.0.0.1:9")
    found = list[Exception]()

    def of_another_thread() -> None:
        with suppress(ValueError):
            httpx.Client()
            found.append(AssertionError("it ignores the environment"))

    with without_environment():
        httpx.Client().close()
        thread = threading.Thread(target=of_another_thread)
        thread.start()
        thread.join()
    with pytest.raises(ValueError, match="odd"):
        httpx.Client()
    assert not found


def test_a_slow_machine_is_no_reason_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradio asks for its own page, and gives up where that takes more than three seconds."""

    def slow(url: str, **_: object) -> httpx.Response:
        raise httpx.ReadTimeout(f"{url} took more than 3 s")

    monkeypatch.setattr("gradio.networking.httpx.head", slow)

    with serving() as page:
        assert httpx.get(page.address, timeout=60).status_code == 200


def applied(old: Any, edits: list[list[Any]]) -> Any:
    """What Gradio's page makes of an update: it changes the one before in place."""
    for action, path, value in edits:
        if not path:
            old = value if action == "replace" else old + value
            continue
        place = old
        for key in path[:-1]:
            place = place[key]
        if action == "delete":
            del place[path[-1]]
        elif action == "append":
            place[path[-1]] += value
        else:
            place[path[-1]] = value
    return old


def test_an_update_that_waits_to_be_shown_loses_nothing_to_the_next() -> None:
    keep_keys()
    keep_keys()
    shown = {"__type__": "update", "visible": True}
    skipped = {"__type__": "update"}
    waiting = deepcopy(shown)
    assert applied(waiting, utils.diff(shown, skipped)) == skipped
    assert waiting == shown
    # A text that grows is still sent once.
    assert utils.diff("one", "one two") == [["append", [], " two"]]


def test_components_are_looked_up_where_gradio_has_a_tree_of_them(tmp_path: Path) -> None:
    script = finding_components()
    (name,) = re.findall(r'import { AppTree } from "./assets/(core-[\w-]+\.js)";', script)
    assert "AppTree" in (SCRIPTS / name).read_text("utf-8")
    (tmp_path / "core-1.js").write_text("export { Other };")
    assert finding_components(tmp_path) == ""
