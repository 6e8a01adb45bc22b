"""An answer as it grows, as server-sent events: what is new, and nothing twice.

`GET /stream/<token>?from=N` goes on behind the first N tokens, or where `Last-Event-ID` says that
the connection was lost: `id` is how many tokens were sent. So a lost connection, a reload and a
second page cost nothing but the tokens that they have not seen. A connection that waits holds no
thread.

Events, all with JSON: `sources` (what the numbers of sources mean; the first event of all, by which
the page knows that it is connected), tokens (without a name; see `app.web.render.groups`),
`figures`, `waiting` (a line that says how many come first), `end`.
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
from app.service.generation import Answer, Generations
from app.service.recorder import UPDATE_SECONDS, Update
from app.service.served import server_words
from app.web import render
from app.web.metrics_panel import panel_values
from app.web.verdicts import waiting_line
from engine.queue import Waiting

FIGURES_SECONDS = 0.5
QUIET_SECONDS = 15.0
"""After so long without an event a comment says that the connection lives."""
MOST = 64
"""Tokens of one event: so that a bad connection, too, gets further each time."""
HELLO = b": open\nretry: 500\n\n"
ALIVE = b":\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


class News(NamedTuple):
    """One event. `tokens` were told by now, this one included."""

    kind: str
    data: object
    tokens: int


TOKENS = ""
"""The kind of event that tokens come by."""


class Teller:
    """Tells one page what is new of an answer, behind its first `sent` tokens."""

    def __init__(self, answer: Answer, sent: int) -> None:
        self.answer, self.sent, self.ahead = answer, sent, 0
        self.sources: dict[str, int] = {}
        self.steps = 0
        self.figures_due = 0.0

    def news(self, now: float) -> list[News]:
        """What is new, in the order in which it is told; `now` is a clock's seconds."""
        over, update, found = self.answer.over, self.answer.update, list[News]()
        if self.answer.ahead != self.ahead:
            self.ahead = self.answer.ahead
            waiting = Waiting(self.ahead, self.answer.loading)
            line = waiting_line(waiting) if self.ahead else ""
            found.append(News("waiting", line, self.sent))
        if update is not None:
            found += self.tokens(update)
            if over or now >= self.figures_due:
                self.figures_due = now + FIGURES_SECONDS
                found.append(News("figures", self.figures(update), self.sent))
        return [*found, News("end", self.sent, self.sent)] if over else found

    def tokens(self, update: Update) -> list[News]:
        """The tokens that are new, each event behind the sources that are."""
        found: list[News] = []
        while fresh := update.since(self.sent, MOST):
            known = len(self.sources)
            step = update.recorder.pieces[self.sent - 1].step if self.sent else 0
            groups = render.groups(fresh, self.sources, step)
            if len(self.sources) > known:
                found.append(self.legend())
            self.sent += len(fresh)
            found.append(News(TOKENS, groups, self.sent))
        return found

    def figures(self, update: Update) -> render.Data:
        """What the panel beside the answer shows: the figures, and the steps that are new."""
        fresh = update.recorder.steps[self.steps : update.forwards]
        self.steps = update.forwards
        served = server_words(update.recorder.collector.plan, update.counted)
        return panel_values(update.metrics, fresh, server=served)

    def legend(self) -> News:
        """What the sources' numbers mean; whether the answer begins within thinking."""
        update, said = self.answer.update, render.legend(self.sources)
        thinks = {"thinking": True} if update is not None and update.recorder.thinks else {}
        return News("sources", {**said, **thinks}, self.sent)


async def tell(answer: Answer, start: int) -> AsyncGenerator[list[News], None]:
    """What is new of an answer, again and again until it is over: one list at most every
    UPDATE_SECONDS, an empty one after QUIET_SECONDS without any news."""
    teller, clock = Teller(answer, start), asyncio.get_running_loop().time
    yield [teller.legend()]
    with answer.bell.heard() as bell:
        while True:
            bell.clear()
            told = clock()
            if news := teller.news(told):
                yield news
            if news and news[-1].kind == "end":
                return
            try:
                await asyncio.wait_for(bell.wait(), QUIET_SECONDS)
            except TimeoutError:
                yield []
            await asyncio.sleep(max(0.0, told + UPDATE_SECONDS - clock()))


def encoded(news: list[News]) -> bytes:
    """Events as they are sent; the id is told where tokens are."""
    if not news:
        return ALIVE
    lines = []
    for kind, data, tokens in news:
        name = f"event:{kind}" if kind else f"id:{tokens}"
        lines.append(f"{name}\ndata:{compact(data)}\n\n")
    return "".join(lines).encode("utf-8", "replace")


def compact(data: object) -> str:
    """JSON without a space too many."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def begins(request: Request) -> int:
    """How many tokens the page has already."""
    for said in (request.headers.get("last-event-id", ""), request.query_params.get("from", "")):
        if said.isascii() and said.isdecimal() and len(said) < 10:
            return int(said)
    return 0


def routes(generations: Generations) -> list[Route]:
    """The route by which answers are watched."""

    async def stream(request: Request) -> Response:
        if not logged_in(request.app, request.cookies):
            return PlainTextResponse("Log in first.", 401)
        answer = generations.get(request.path_params["token"])
        if answer is None:
            return PlainTextResponse("There is no such answer. It may be over.", 404)

        async def body() -> AsyncIterator[bytes]:
            yield HELLO
            async with aclosing(tell(answer, begins(request))) as told:
                async for news in told:
                    yield encoded(news)

        return StreamingResponse(body(), headers=HEADERS)

    return [Route("/stream/{token}", stream, methods=["GET"])]
