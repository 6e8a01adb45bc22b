"""The API for other programs: its access rules, its routes, and the server of `strata serve`.

Every answer is JSON or, if it is streamed, server-sent events. Every error has OpenAI's format and
a status that says whose fault it is, whatever the request contains.

A request with a valid key is allowed. Without a key, a request must use a loopback name and must
not come from a page of another origin, and the server must be reachable only from this machine and
need no password. So neither a foreign page nor a DNS name that was pointed at this machine
(app/http/access.py refuses both) can send requests like a program. Keys are looked up for every
request, so a revoked key stops working at once. Wrong keys are slowed down like wrong passwords.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from app.api.answers import OpenAIReply, Reply
from app.api.figures import CONTENT_TYPE
from app.api.messages import Messages, MessagesReply
from app.api.requests import (
    Body,
    Chat,
    Completion,
    Continuation,
    completion,
    no_earlier,
    parsed,
)
from app.api.responses import Responses, ResponsesReply
from app.api.running import AnswerEvent, Arrival, Over, Running, Service
from app.api.switching import ModelSwitch
from app.arguments import Options
from app.http.access import LOOPBACK, MAX_REQUEST, PROGRAMS, Access, Hosts
from app.http.login import LogIns, Throttle
from app.http.problems import EVENT_STREAM, ApiError, api_error, encoded, problem
from app.service.session import Session
from engine.errors import StrataError
from engine.methods import offered
from engine.types import Message
from storage.api_keys import KEYLESS, PREFIX, ApiKeys

HOW = (
    'Send "Authorization: Bearer KEY" or "x-api-key: KEY". Keys are made in the API tab, or with: '
    "strata keys make NAME"
)
OFF = (
    "The API is off. Switch it on in the API tab, or start Strata with --api, or start the API "
    "alone: strata serve"
)


@dataclass(frozen=True, slots=True)
class Gate:
    """Checks who may use the API; see the module's docstring. A `private` server is reachable only
    from this machine and needs no password. `on` says whether the API is on."""

    keys: ApiKeys
    private: bool
    on: Callable[[], bool]
    throttle: Throttle = field(default_factory=Throttle)

    async def enter(self, request: Request) -> str:
        """The owner of a request. Raises ApiError."""
        await self.check_on()
        secret = bearer(request)
        found = await run_in_threadpool(self.keys.find, secret) if secret else None
        if found is not None:
            await run_in_threadpool(self.keys.use, found)
            return found.owner
        # Some clients always send a key, so an arbitrary word counts as no key. A word that looks
        # like one of our keys is refused, so that a revoked key is noticed.
        if not secret.startswith(PREFIX) and self.private and is_of_this_machine(request):
            return KEYLESS
        if not secret:
            raise unknown(f"A key is missing. {HOW}", "missing_api_key")
        await self.throttle.slow(request.scope)
        raise unknown(f"This key is not known, or was revoked. {HOW}", "invalid_api_key")

    async def check_on(self) -> None:
        """Raise ApiError while the API is off."""
        if not await run_in_threadpool(self.on):
            raise ApiError(404, OFF, code="api_off")


def bearer(request: Request) -> str:
    """The key in a request, as OpenAI's clients send it or Anthropic's; "" if there is none."""
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    key = secret if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    return key.strip()


def is_of_this_machine(request: Request) -> bool:
    """Whether a request uses a loopback name, and comes from no page of another origin."""
    host = request.headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    origin = request.headers.get("origin")
    return name in LOOPBACK and origin in (None, f"http://{host.lower()}")


def unknown(message: str, code: str) -> ApiError:
    return ApiError(401, message, None, code, {"www-authenticate": "Bearer"})


# the routes

BODY_SECONDS = 60.0
"""The most seconds that a request may take to arrive."""
PATIENCE = 10.0
"""How many seconds a stream waits for its turn before it sends its headers. An error until then can
still have its own status."""
QUIET_SECONDS = 15.0
"""After how many seconds without an event a comment keeps the connection alive."""
ALIVE, DONE = b": waiting\n\n", b"data: [DONE]\n\n"
GONE = 499
"""The status of an answer that nobody reads, as some web servers use it."""
JSON = "application/json"
Handler = Callable[[Request], Awaitable[Response]]


def answer(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer in JSON. A text may quote half of a surrogate pair, which JSON escapes."""
    return Response(encoded(data), status, headers, JSON)


def event(data: Any, named: bool = False) -> bytes:
    name = f"event: {data['type']}\n" if named else ""
    return name.encode() + b"data: " + encoded(data) + b"\n\n"


class Stream(StreamingResponse):
    """A stream that stops its request when it ends, even if it never began."""

    def __init__(self, body: AsyncGenerator[bytes, None], running: Running) -> None:
        super().__init__(body, headers=EVENT_STREAM)
        self.running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.running.stop()


class Form(NamedTuple):
    """A format: what a request has to be, and what makes its answer."""

    body: type[Body]
    reply: type[Reply]


FORMS = {
    "/v1/chat/completions": Form(Chat, OpenAIReply),
    "/v1/completions": Form(Continuation, OpenAIReply),
    "/v1/messages": Form(Messages, MessagesReply),
    "/v1/responses": Form(Responses, ResponsesReply),
}
"""The formats by their routes."""


@dataclass(frozen=True, slots=True)
class Api:
    """The routes and their handlers. `coming` says whether a model is being loaded. With a
    `switch`, requests load the model that they name."""

    service: Service
    gate: Gate
    coming: Callable[[], bool]
    switch: ModelSwitch | None = None

    @property
    def routes(self) -> list[Route]:
        """All routes; app/http/access.py must allow each of them."""
        gets: dict[str, Handler] = {
            "/health": self.health,
            "/metrics": self.metrics,
            "/v1/models": self.models,
            "/v1/models/{model:path}": self.model,
        }
        posts: dict[str, Handler] = {
            **{path: partial(self.completion, form) for path, form in FORMS.items()},
            "/v1/messages/count_tokens": self.count_tokens,
        }
        return [
            Route(path, self.with_errors(handler), methods=[method])
            for method, handlers in (("GET", gets), ("POST", posts))
            for path, handler in handlers.items()
        ]

    def with_errors(self, handler: Handler) -> Handler:
        async def handled(request: Request) -> Response:
            try:
                return await handler(request)
            except ApiError as error:
                return self.refusal(error)
            except ClientDisconnect:
                return Response(status_code=GONE)
            except StrataError as error:
                return self.refusal(api_error(error, "messages"))

        return handled

    def refusal(self, error: ApiError) -> Response:
        self.service.counters.failed(error.status)
        body = problem(error.status, error.message, error.param, error.code)
        return answer(body, error.status, error.headers)

    async def health(self, request: Request) -> Response:
        """Whether a model is loaded, in llama-server's format. Needs no key."""
        await self.gate.check_on()
        if self.service.engine.state.is_loaded:
            locked = self.service.programs.notices.locked
            storage = {"storage": {"status": "locked", "message": locked}} if locked else {}
            return answer({"status": "ok", **storage})
        message = (
            "Loading model"
            if self.coming()
            else self.service.programs.core.revival.not_loaded_reason
        )
        return answer(problem(503, message, code="model_not_loaded"), 503)

    async def metrics(self, request: Request) -> Response:
        await self.gate.enter(request)
        state = self.service.engine.state
        text = self.service.counters.text(state.info.name if state.is_loaded else "")
        return Response(text.encode("utf-8", "replace"), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        await self.gate.enter(request)
        listed = await run_in_threadpool(self.described)
        return answer({"object": "list", "data": [*listed.values()]})

    async def model(self, request: Request) -> Response:
        await self.gate.enter(request)
        name = request.path_params["model"]
        listed = await run_in_threadpool(self.described)
        if name not in listed:
            message = f"There is no model {name[:80]!r}. GET /v1/models lists those that there are."
            raise ApiError(404, message, "model", "model_not_found")
        return answer(listed[name])

    def described(self) -> dict[str, dict[str, Any]]:
        """The models that a request can name, the loaded one first."""
        state = self.service.engine.state
        names = [state.info.name] if state.is_loaded else []
        names += self.switch.known() if self.switch else []
        shared = {"object": "model", "created": 0, "owned_by": "strata"}
        found = {name: {"id": name, **shared} for name in names}
        if state.is_loaded:
            found[state.info.name] |= self.description()
        return found

    def description(self) -> dict[str, Any]:
        state = self.service.engine.state
        info = state.info
        return {
            "max_model_len": info.context_length,
            "strata": {
                "kind": info.kind,
                "parameters": info.parameters,
                "methods": [
                    method.name for method in offered(info) if method.stack is None or state.drafts
                ],
                "draft_models": [draft.name for draft in state.drafts],
                "tools": info.calls is not None,
            },
        }

    async def completion(self, form: Form, request: Request) -> Response:
        owner = await self.gate.enter(request)
        with ExitStack() as place:
            given = await self.given(request, owner, place)
            checked = await run_in_threadpool(self.checked, form, owner, given)
            running = Running(self.service, owner, checked, place.pop_all())
        reply = form.reply(checked, self.service.engine.state.info)
        try:
            answers = self.stream if checked.body.stream else self.whole
            response = await answers(request, running, reply)
        except BaseException:
            running.stop()
            raise
        if self.service.programs.notices.locked:
            response.headers["strata-storage"] = "locked"
        return response

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens the prompt of a request for messages has."""
        owner = await self.gate.enter(request)
        with ExitStack() as place:
            given = await self.given(request, owner, place)

            def counted() -> int:
                (asked,) = self.checked(FORMS["/v1/messages"], owner, given).requests
                return self.service.engine.measure(asked.messages, asked.tools).tokens

            return answer({"input_tokens": await run_in_threadpool(counted)})

    async def given(self, request: Request, owner: str, place: ExitStack) -> dict[str, Any]:
        """The parameters of a request, which has a `place`, and its model until that is closed."""
        # Without a place the body is not read, so nothing of it needs memory.
        place.enter_context(self.service.programs.place(owner))
        found = await run_in_threadpool(parsed, await body_of(request))
        if self.switch:
            await self.switch.enter(found.get("model"), place)
        return found

    def checked(self, form: Form, owner: str, given: dict[str, Any]) -> Completion:
        """The checked request. Raises ApiError."""

        def earlier(id: str) -> Sequence[Message]:
            found = self.service.programs.answers.find(owner, id)
            return no_earlier(id) if found is None else found

        self.service.programs.check_loaded()
        try:
            return completion(form.body, given, self.service.engine.state.info, earlier)
        except RecursionError as error:
            raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from error

    def taken(self, running: Running, reply: Reply, event: AnswerEvent) -> list[dict[str, Any]]:
        """The chunks of an event. An answer is kept before its program learns of its end."""
        chunks = reply.take(event)
        if isinstance(event, Over) and reply.kept:
            self.service.programs.answers.keep(running.owner, *reply.kept)
        return chunks

    async def whole(self, request: Request, running: Running, reply: Reply) -> Response:
        """The whole answer, unless the program disconnects before its end."""

        async def collected() -> Response:
            while (item := await running.next()) is not None:
                if isinstance(item, ApiError):
                    raise item
                self.taken(running, reply, item)
            return answer(reply.whole())

        work = asyncio.ensure_future(collected())
        try:
            if await leaves_before(request, work):
                running.stop()
                return Response(status_code=GONE)
            return work.result()
        finally:
            work.cancel()

    async def stream(self, request: Request, running: Running, reply: Reply) -> Response:
        """The answer as a stream, which begins with the first event or after PATIENCE."""
        first = asyncio.ensure_future(running.next())
        if await leaves_before(request, first, PATIENCE):
            first.cancel()
            running.stop()
            return Response(status_code=GONE)
        if first.done() and isinstance(wrong := first.result(), ApiError):
            raise wrong
        return Stream(self.chunks(running, reply, first), running)

    async def chunks(
        self, running: Running, reply: Reply, coming: asyncio.Future[Arrival]
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream; `coming` is its first event."""
        sent = monotonic()
        try:
            while True:
                await asyncio.wait((coming,), timeout=QUIET_SECONDS)
                if not coming.done():
                    yield ALIVE
                    continue
                item = coming.result()
                if item is None or isinstance(item, ApiError):
                    break
                parts = [event(data, reply.named) for data in self.taken(running, reply, item)]
                if not parts and monotonic() - sent >= QUIET_SECONDS:
                    parts = [ALIVE]  # A long call is held back until it is whole.
                for part in parts:
                    yield part
                    sent = monotonic()
                coming = asyncio.ensure_future(running.next())
            if isinstance(item, ApiError):  # The status was sent already.
                self.service.counters.failed(item.status)
                body = problem(item.status, item.message, item.param, item.code)
                yield event(body, reply.named)
            else:
                for data in reply.last():
                    yield event(data, reply.named)
                if not reply.named:
                    yield DONE
        finally:
            coming.cancel()


async def body_of(request: Request) -> bytes:
    """The body of a request. Raises ApiError for more than MAX_REQUEST bytes, and if it takes more
    than BODY_SECONDS to arrive."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_REQUEST:
                    message = f"The request is too long. Send at most {MAX_REQUEST:,} bytes."
                    raise ApiError(413, message, code="request_too_large")
    except TimeoutError as error:
        message = (
            f"The request did not arrive within {BODY_SECONDS:g} seconds: {len(body):,} bytes did. "
            "Send all of it at once."
        )
        # Closing the connection saves reading the rest.
        headers = {"connection": "close"}
        raise ApiError(408, message, code="request_timeout", headers=headers) from error
    return bytes(body)


async def leaves_before(
    request: Request, work: asyncio.Future[Any], seconds: float | None = None
) -> bool:
    """Wait for `work`, at most `seconds`; returns whether the program disconnected before it
    ended."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    left = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((work, left), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return left.done() and not work.done()
    finally:
        left.cancel()


# the server

GOODBYE, ABANDONED = 3, 5
"""Seconds after which running answers are stopped when the program is ended, and after which those
are abandoned that do not stop."""


def api_of(session: Session, options: Options) -> Api:
    programs = session.programs
    programs.always = options.api
    private = not options.public and options.password is None
    gate = Gate(programs.keys, private, lambda: programs.on)
    switch = ModelSwitch(session.models) if options.api_load else None
    service = Service(session.engine, programs)
    return Api(service, gate, lambda: session.revival.coming, switch)


class Server(uvicorn.Server):
    """Calls `ready` once it listens, unless it is to end already. `should_exit` ends it, and
    `stop_answers` is called if answers still run GOODBYE seconds later, or at a second signal."""

    def __init__(
        self, config: uvicorn.Config, ready: Callable[[], None], stop_answers: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.ready, self.stop_answers = ready, stop_answers
        self.loop: asyncio.AbstractEventLoop | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)
        elif self.loop is not None:
            self.loop.call_soon_threadsafe(self.stop_answers)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started and not self.should_exit:
            self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = asyncio.get_running_loop().call_later(GOODBYE, self.stop_answers)
        try:
            await super().shutdown(sockets)
        finally:
            stopping.cancel()


def server_of(
    options: Options,
    port: int,
    routes: Sequence[BaseRoute],
    ready: Callable[[], None],
    stop_answers: Callable[[], None],
) -> Server:
    """A server that runs until interrupted."""
    hosts = Hosts(options.host, port)
    app = Access(Starlette(routes=routes), hosts, LogIns(), PROGRAMS, options.origins)
    config = uvicorn.Config(
        app,
        options.host,
        port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=ABANDONED,
    )
    return Server(config, ready, stop_answers)
