"""The queue of events: it sleeps when there is nothing to do, and begins an event when it comes.

What is counted is how often it looks, not how long it takes.
"""

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gradio as gr
import httpx
import pytest

from app.arguments import parse
from app.web import server
from app.web.gradio_queue import EventQueue, Held


def looks(seconds: float = 0.3) -> int:
    """How often the server's queue looks for work in that time, when there is none."""
    count = 0

    class Counting(EventQueue):
        def __len__(self) -> int:
            nonlocal count
            count += 1
            return super().__len__()

    async def idle() -> None:
        queue = Counting(True, 4, 1, None, SimpleNamespace(), 4)
        queue.start()
        await asyncio.sleep(seconds)
        queue.close()

    asyncio.run(idle())
    return count


def test_an_idle_queue_does_not_look_for_work() -> None:
    assert looks() == 1


def test_a_poll_that_is_held_goes_on_when_there_is_work_and_ends_with_its_task() -> None:
    said: list[str] = []

    async def poll() -> None:
        try:
            while True:
                said.append("looked")
                await asyncio.sleep(0)
                await asyncio.sleep(0.001)
        finally:
            said.append("ended")

    async def held() -> None:
        work = asyncio.Event()
        task = asyncio.ensure_future(Held(poll(), work))
        for count in (1, 2, 3):
            await asyncio.sleep(0.02)
            assert said == ["looked"] * count
            work.set()
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(held())
    assert said == ["looked"] * 4 + ["ended"]


@pytest.fixture
def served() -> Iterator[tuple[str, gr.Blocks]]:
    """A page with one event, which takes one at a time and says how often it was called."""
    calls: list[int] = []

    def called() -> str:
        calls.append(len(calls) + 1)
        return f"call {calls[-1]}"

    async def launched() -> tuple[str, gr.Blocks]:
        with gr.Blocks(analytics_enabled=False) as blocks:
            shown = gr.HTML()
            blocks.load(called, None, shown, concurrency_limit=1)
        port = server.pick_port("127.0.0.1", 0)
        return server.launch(blocks, parse(["--no-browser"]), port), blocks

    url, blocks = asyncio.run(launched())
    yield url, blocks
    blocks.close(verbose=False)


def results(client: httpx.Client, count: int) -> list[Any]:
    """What so many events, asked for at once, return."""
    for _ in range(count):
        body = {"data": [], "fn_index": 0, "session_hash": "here"}
        assert client.post("/gradio_api/queue/join", json=body).status_code == 200
    found: list[Any] = []
    with client.stream("GET", "/gradio_api/queue/data?session_hash=here") as reply:
        for line in reply.iter_lines():
            message = json.loads(line.removeprefix("data: ")) if line else {}
            if message.get("msg") == "process_completed":
                found.append(message["output"]["data"][0])
    return found


def test_events_begin_as_they_come_and_as_places_come_free(served: tuple[str, gr.Blocks]) -> None:
    url, blocks = served
    assert isinstance(blocks._queue, EventQueue)
    with httpx.Client(base_url=url, headers={"origin": url.rstrip("/")}, timeout=20) as client:
        for first in (1, 4):
            wanted = [f"call {number}" for number in range(first, first + 3)]
            assert sorted(results(client, 3)) == wanted
    assert blocks._queue.cached_event_analytics_summary == {"functions": {}}, "no tables are made"


def test_a_slow_machine_is_no_reason_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradio asks for its own page, and gives up where that takes more than three seconds."""

    def slow(url: str, **_: object) -> httpx.Response:
        raise httpx.ReadTimeout(f"{url} took more than 3 s")

    monkeypatch.setattr("gradio.networking.httpx.head", slow)

    async def launched() -> tuple[str, gr.Blocks]:
        with gr.Blocks(analytics_enabled=False) as blocks:
            gr.HTML("inside")
        port = server.pick_port("127.0.0.1", 0)
        return server.launch(blocks, parse(["--no-browser"]), port), blocks

    url, blocks = asyncio.run(launched())
    assert httpx.get(url).status_code == 200
    blocks.close(verbose=False)
