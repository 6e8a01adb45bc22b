"""The routes that other programs ask: each is checked, answered, and told what was wrong.

Every answer is JSON or, where it streams, server-sent events. Whatever a request holds, its answer
is one of ours: an error has the shape of OpenAI's, and a status that says whose fault it is.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.api import prometheus
from app.api.answers import Reply
from app.api.asked import Kind, Wanted, parsed, wanted
from app.api.errors import ApiError, told
from app.api.gate import Gate
from app.api.running import Arrival, Begun, News, Over, Piece, Running, Service
from app.http.access import MAX_REQUEST
from app.http.problems import encoded, problem
from engine.errors import ModelError, StrataError
from engine.loaded import NO_MODEL
from engine.methods import offered

PATIENCE = 10.0
"""So long a stream waits for its turn before it begins, so that what goes wrong by then has a
status of its own."""
QUIET_SECONDS = 15.0
"""After so long without news a comment says that the connection lives."""
ALIVE, DONE = b": waiting\n\n", b"data: [DONE]\n\n"
EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}
GONE = 499
"""The status of an answer that nobody reads, as web servers write it."""
JSON = "application/json"
Handler = Callable[[Request], Awaitable[Response]]


def answer(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer in JSON. A text may quote half of a surrogate pair, which JSON escapes."""
    return Response(encoded(data), status, headers, JSON)


def event(data: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + encoded(data) + b"\n\n"


class Stream(StreamingResponse):
    """A stream whose request ends with it, also where it never began."""

    def __init__(self, body: AsyncGenerator[bytes, None], running: Running) -> None:
        super().__init__(body, headers=EVENTS)
        self.running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.running.stop()


@dataclass(frozen=True, slots=True)
class Api:
    """See the module's docstring. `coming` says whether a model is being loaded."""

    service: Service
    gate: Gate
    coming: Callable[[], bool]

    @property
    def routes(self) -> list[Route]:
        """All of them; app/http/access.py lets them in."""
        gets = {
            "/health": self.health,
            "/metrics": self.metrics,
            "/v1/models": self.models,
            "/v1/models/{model:path}": self.model,
        }
        posts = {"/v1/chat/completions": self.chat, "/v1/completions": self.text}
        return [
            *(Route(path, self.told(handler), methods=["GET"]) for path, handler in gets.items()),
            *(Route(path, self.told(handler), methods=["POST"]) for path, handler in posts.items()),
        ]

    def told(self, handler: Handler) -> Handler:
        """A handler whose errors are answers."""

        async def handled(request: Request) -> Response:
            try:
                return await handler(request)
            except ApiError as error:
                return self.refusal(error)
            except ClientDisconnect:
                return Response(status_code=GONE)
            except StrataError as error:
                return self.refusal(told(error, "messages"))

        return handled

    def refusal(self, error: ApiError) -> Response:
        """What went wrong, as an answer."""
        self.service.counters.failed(error.status)
        body = problem(error.status, error.words, error.param, error.code)
        return answer(body, error.status, error.headers)

    # what there is

    async def health(self, request: Request) -> Response:
        """Whether a model is there, as llama-server says it. Asks for no key."""
        await self.gate.check_on()
        if self.service.engine.state.there:
            return answer({"status": "ok"})
        words = "Loading model" if self.coming() else NO_MODEL
        return answer(problem(503, words, code="model_not_loaded"), 503)

    async def metrics(self, request: Request) -> Response:
        """Counters for Prometheus."""
        await self.gate.enter(request)
        service = self.service
        state = service.engine.state
        name = state.info.name if state.there else ""
        text = service.counters.text(service.waiting, service.running, name)
        return Response(text.encode("utf-8", "replace"), media_type=prometheus.CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        """The loaded model."""
        await self.gate.enter(request)
        there = self.service.engine.state.there
        return answer({"object": "list", "data": [self.description()] if there else []})

    async def model(self, request: Request) -> Response:
        """The same by its name."""
        await self.gate.enter(request)
        name, there = request.path_params["model"], self.service.engine.state.there
        if not there or name != self.service.engine.state.info.name:
            words = f"There is no model {name[:80]!r}. GET /v1/models names those that there are."
            raise ApiError(404, words, "model", "model_not_found")
        return answer(self.description())

    def description(self) -> dict[str, Any]:
        """The loaded model for other programs."""
        state = self.service.engine.state
        info = state.info
        return {
            "id": info.name,
            "object": "model",
            "created": 0,
            "owned_by": "strata",
            "max_model_len": info.context_length,
            "strata": {
                "kind": info.kind,
                "parameters": info.parameters,
                "methods": [method.name for method in offered(info)],
                "draft_models": [draft.name for draft in state.drafts],
            },
        }

    # what is answered

    async def chat(self, request: Request) -> Response:
        """Answer messages."""
        return await self.completion("chat", request)

    async def text(self, request: Request) -> Response:
        """Go on with texts."""
        return await self.completion("text", request)

    async def completion(self, kind: Kind, request: Request) -> Response:
        """Either, whole or as a stream."""
        owner = await self.gate.enter(request)
        asked = await run_in_threadpool(self.asked, kind, await body_of(request))
        running = Running(self.service, owner, asked)
        try:
            return await (self.stream if asked.stream else self.whole)(request, running)
        except BaseException:
            running.stop()
            raise

    def asked(self, kind: Kind, body: bytes) -> Wanted:
        """The checked request. Raises ApiError."""
        given, state = parsed(body), self.service.engine.state
        if not state.there:
            raise told(ModelError(NO_MODEL), "model")
        try:
            return wanted(kind, given, state.info)
        except RecursionError as error:
            raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from error

    async def whole(self, request: Request, running: Running) -> Response:
        """All of it at once, unless the program leaves before."""

        async def collected() -> Response:
            reply = Reply(running.wanted, self.service.engine.state.info)
            while (news := await running.next()) is not None:
                if isinstance(news, ApiError):
                    raise news
                if isinstance(news, Begun):
                    reply.info = news.info
                elif isinstance(news, Piece):
                    reply.choices[news.choice].add(news)
                else:
                    reply.choices[news.choice].over = news
            return answer(reply.whole())

        work, left = asyncio.ensure_future(collected()), asyncio.ensure_future(gone(request))
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            running.stop()
            return Response(status_code=GONE)
        finally:
            work.cancel()
            left.cancel()

    async def stream(self, request: Request, running: Running) -> Response:
        """As it grows. It begins with the first news, or after PATIENCE."""
        first = asyncio.ensure_future(running.next())
        left = asyncio.ensure_future(gone(request))
        try:
            waited = {first, left}
            await asyncio.wait(waited, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
            if first.done() and isinstance(wrong := first.result(), ApiError):
                raise wrong
            if left.done() and not first.done():
                first.cancel()
                running.stop()
                return Response(status_code=GONE)
        finally:
            left.cancel()
        return Stream(self.chunks(running, first), running)

    async def chunks(
        self, running: Running, coming: asyncio.Future[Arrival]
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream, whose first news are `coming`."""
        reply = Reply(running.wanted, self.service.engine.state.info)
        try:
            while True:
                await asyncio.wait((coming,), timeout=QUIET_SECONDS)
                if not coming.done():
                    yield ALIVE
                    continue
                news = coming.result()
                if news is None or isinstance(news, ApiError):
                    break
                for data in written(reply, news):
                    yield event(data)
                coming = asyncio.ensure_future(running.next())
            if isinstance(news, ApiError):  # The status was sent by now.
                self.service.counters.failed(news.status)
                yield event(problem(news.status, news.words, news.param, news.code))
            else:
                if running.wanted.usage:
                    yield event(reply.used())
                yield DONE
        finally:
            coming.cancel()


def written(reply: Reply, news: News) -> list[dict[str, Any]]:
    """The chunks that tell what is new."""
    if isinstance(news, Begun):
        reply.info = news.info
        data = reply.began(news.choice)
    elif isinstance(news, Over):
        data = reply.ended(news)
    else:
        data = reply.part(news)
    return [data] if data else []


async def body_of(request: Request) -> bytes:
    """What was sent, at most MAX_REQUEST bytes of it. Raises ApiError for more."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_REQUEST:
            words = f"The request is too long. Send at most {MAX_REQUEST:,} bytes."
            raise ApiError(413, words, code="request_too_large")
    return bytes(body)


async def gone(request: Request) -> None:
    """Wait until the program has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
