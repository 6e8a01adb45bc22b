"""Streams a growing answer to the page as server-sent events. Nothing is sent twice.

`GET /stream/<token>?from=N` continues after the first N tokens, or after `Last-Event-ID`: each
event's `id` is the number of tokens sent so far. A waiting connection holds no thread. The events
carry JSON:

- `sources` gives the meaning of the sources' numbers. It is the first event, and shows the page
  that it is connected.
- An event without a name carries tokens; see `app.web.render.groups`.
- `figures` carries the values of the panel with the live figures.
- `waiting` is a line that says how many requests come first.
- `end` says that the answer is complete.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from app.http.login import logged_in
from app.http.problems import EVENT_STREAM
from app.service.answering import UPDATE_SECONDS, Answer, Generations, Update
from app.service.current import seen_in
from app.service.why import server_sentence
from app.web import render
from app.web.metrics_panel import panel_values, with_pace
from app.web.run_html import waiting_line
from engine.queue import Waiting
from engine.thinking import Thought

FIGURES_SECONDS = 0.5
FRESH_SHARE = 8
"""Figures are sent early when they miss more than one in this many tokens of the answer. A fast
model writes several lines in the first half second."""
QUIET_SECONDS = 15.0
"""After this long without an event, a comment keeps the connection alive."""
MOST = 64
"""Most tokens in one event. Short events let a page get further even on a bad connection."""
HELLO = b": open\nretry: 500\n\n"
KEEP_ALIVE = b":\n\n"


class StreamEvent(NamedTuple):
    kind: str
    data: object
    tokens: int


TOKENS = ""
"""The kind of an event that carries tokens."""


class AnswerEvents:
    """The events of an answer that one page has not received. It has the first `sent` tokens."""

    def __init__(self, answer: Answer, sent: int) -> None:
        self.answer, self.sent, self.ahead = answer, sent, 0
        self.sources: dict[str, int] = {}
        self.thought: Thought | None = None
        self.steps = 0
        self.tokens_in_figures = 0
        """How many tokens the last figures covered."""
        self.figures_due = 0.0

    def pending(self, now: float) -> list[StreamEvent]:
        """The new events, in order. `now` is the time in seconds on any monotonic clock."""
        over, update, found = self.answer.over, self.answer.update, list[StreamEvent]()
        if self.answer.ahead != self.ahead:
            self.ahead = self.answer.ahead
            waiting = Waiting(self.ahead, self.answer.loading)
            line = waiting_line(waiting) if self.ahead else ""
            found.append(StreamEvent("waiting", line, self.sent))
        if update is not None:
            found += self.tokens(update)
            missing = update.tokens - self.tokens_in_figures
            if over or now >= self.figures_due or missing * FRESH_SHARE > update.tokens:
                self.figures_due = now + FIGURES_SECONDS
                found.append(StreamEvent("figures", self.figures(update), self.sent))
        return [*found, StreamEvent("end", self.sent, self.sent)] if over else found

    def tokens(self, update: Update) -> list[StreamEvent]:
        found: list[StreamEvent] = []
        while fresh := update.since(self.sent, MOST):
            known = len(self.sources)
            step = update.recorder.pieces[self.sent - 1].step if self.sent else 0
            groups = render.groups(fresh, self.sources, step)
            if len(self.sources) > known or update.recorder.splitter.thought != self.thought:
                found.append(self.legend())
            self.sent += len(fresh)
            found.append(StreamEvent(TOKENS, groups, self.sent))
        return found

    def figures(self, update: Update) -> render.Data:
        fresh = update.recorder.steps[self.steps : update.forwards]
        self.steps, self.tokens_in_figures = update.forwards, update.tokens
        served = server_sentence(update.recorder.collector.plan, update.counted)
        values = panel_values(update.metrics, fresh, server=served)
        return with_pace(values, seen_in(update.metrics))

    def legend(self) -> StreamEvent:
        """The meaning of the sources' numbers, and the position of the thinking."""
        update, known = self.answer.update, render.legend(self.sources)
        if update is None:
            return StreamEvent("sources", known, self.sent)
        self.thought = update.recorder.splitter.thought
        data = {**known, **render.thought_data(update.recorder.text, self.thought)}
        return StreamEvent("sources", data, self.sent)


async def events(answer: Answer, start: int) -> AsyncGenerator[list[StreamEvent], None]:
    """Lists of new events, until the answer is over. The first tokens come at once, further ones at
    most every UPDATE_SECONDS. After QUIET_SECONDS without an event, the list is empty."""
    unsent, clock = AnswerEvents(answer, start), asyncio.get_running_loop().time
    yield [unsent.legend()]
    due = 0.0
    with answer.bell.heard() as bell:
        while True:
            bell.clear()
            before, now = unsent.sent, clock()
            if pending := unsent.pending(now):
                yield pending
                if pending[-1].kind == "end":
                    return
            if unsent.sent > before:
                due = now + UPDATE_SECONDS
            try:
                await asyncio.wait_for(bell.wait(), QUIET_SECONDS)
            except TimeoutError:
                yield []
            await asyncio.sleep(max(0.0, due - clock()))


def encoded(pending: list[StreamEvent]) -> bytes:
    """Events as bytes. Only events that carry tokens have an id."""
    if not pending:
        return KEEP_ALIVE
    lines = []
    for kind, data, tokens in pending:
        name = f"event:{kind}" if kind else f"id:{tokens}"
        lines.append(f"{name}\ndata:{compact(data)}\n\n")
    return "".join(lines).encode("utf-8", "replace")


def compact(data: object) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def first_token(request: Request) -> int:
    """How many tokens the page already has, which is the index of the first one to send."""
    for given in (request.headers.get("last-event-id", ""), request.query_params.get("from", "")):
        if given.isascii() and given.isdecimal() and len(given) < 10:
            return int(given)
    return 0


def routes(generations: Generations) -> list[Route]:
    async def stream(request: Request) -> Response:
        if not logged_in(request.app, request.cookies):
            return PlainTextResponse("Log in first.", 401)
        answer = generations.get(request.path_params["token"])
        if answer is None:
            return PlainTextResponse("There is no such answer. It may have ended.", 404)

        async def body() -> AsyncIterator[bytes]:
            yield HELLO
            async with aclosing(events(answer, first_token(request))) as stream_events:
                async for pending in stream_events:
                    yield encoded(pending)

        return StreamingResponse(body(), headers=EVENT_STREAM)

    return [Route("/stream/{token}", stream, methods=["GET"])]
