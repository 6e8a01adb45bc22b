"""A small OpenAI-compatible server on a real socket, whose answers a test decides.

Plainly it streams one text per chunk, as most servers do. With `strata` it also tells the numbers
of its tokens, where they came from, and its counters, as vLLM with our drafter does. It answers
"word-0 word-1 …", as long as was asked for, and keeps what it was asked.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from app.http.access import pick_port
from tests.support.served import listening

SOURCES = ("target", "context", "context", "statistics")
"""Where the tokens of a forward come from, again and again."""
FORWARD = len(SOURCES)


@dataclass
class Stub:
    """The server. What a test sets here counts from the next request on.

    `key` is wanted where there is one. `status` is answered in place of a stream, with `said`.
    `refuses` names parameters that are not taken `unless` they have that value, which it may say
    within a stream. `breaks` after so many words, `hangs` there.
    """

    address: str = ""
    model: str = "stub-model"
    strata: bool = False
    words: int = 40
    pace: float = 0.002
    key: str = ""
    status: int = 200
    said: Any = field(default_factory=lambda: {"error": {"message": "as the test wants"}})
    refuses: tuple[str, ...] = ()
    unless: Any = None
    streams_refusals: bool = False
    breaks: int | None = None
    hangs: int | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    """Set when the other end closed the connection before the answer was over."""
    silent: threading.Event = field(default_factory=threading.Event)
    """Set when it hangs."""
    drafted: int = 0
    accepted: int = 0

    @property
    def base(self) -> str:
        return f"{self.address}/v1"

    # what it tells of itself

    def turned_away(self, request: Request) -> Response | None:
        self.paths.append(request.url.path)
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no such key"}}, 401)
        return None

    async def models(self, request: Request) -> Response:
        if refusal := self.turned_away(request):
            return refusal
        maker = "vllm" if self.strata else "somebody"
        listed = {"id": self.model, "object": "model", "owned_by": maker}
        if self.strata:
            listed["max_model_len"] = 2048
        return JSONResponse({"object": "list", "data": [listed]})

    async def about(self, request: Request) -> Response:
        if not self.strata:
            return JSONResponse({"detail": "Not Found"}, 404)
        databases = ["context", "model", "statistics"]
        found = {"name": "strata", "version": "1", "databases": databases}
        return JSONResponse(found | {"draft_tokens": 3, "drafting": True})

    async def metrics(self, request: Request) -> Response:
        if not self.strata:
            return PlainTextResponse("", 404)
        name = 'vllm:spec_decode_num_{}_tokens_total{{engine="0"}} {}\n'
        text = name.format("draft", float(self.drafted))
        return PlainTextResponse(text + name.format("accepted", float(self.accepted)))

    async def sources(self, request: Request) -> Response:
        ids = (await request.json())["token_ids"]
        whole, rest = divmod(len(ids), FORWARD)
        return JSONResponse(
            {
                "sources": [SOURCES[n % FORWARD] for n in range(len(ids))],
                "steps": [FORWARD] * whole + [rest] * bool(rest),
                "drafted": 5 * whole,
            }
        )

    # its answers

    async def chat(self, request: Request) -> Response:
        if refusal := self.turned_away(request):
            return refusal
        body = await request.json()
        self.asked.append(body)
        for name in self.refuses:
            if name in body and body[name] != self.unless:
                words = f"Unrecognized request argument supplied: {name}"
                refusal = {"error": {"message": words, "code": 400}}
                if self.streams_refusals:
                    said = f"data: {json.dumps(refusal)}\n\ndata: [DONE]\n\n"
                    return PlainTextResponse(said, media_type="text/event-stream")
                return JSONResponse(refusal, 400)
        if self.status != 200:
            return JSONResponse(self.said, self.status, {"location": "http://elsewhere.invalid/"})
        return StreamingResponse(self.streamed(body), media_type="text/event-stream")

    async def streamed(self, body: dict[str, Any]) -> AsyncIterator[str]:
        off = body.get("vllm_xargs") == {"strata": "off"}
        size = FORWARD if self.strata and not off else 1
        most = min(self.words, body["max_tokens"])
        ended = False
        try:
            for start in range(0, most, size):
                if self.breaks is not None and start >= self.breaks:
                    raise ConnectionResetError("as the test wants")
                if self.hangs is not None and start >= self.hangs:
                    self.silent.set()
                    await asyncio.sleep(3600)
                await asyncio.sleep(self.pace)
                yield self.part(start, min(most, start + size), most)
                self.drafted += 5 if size > 1 else 0
                self.accepted += size - 1
            usage = {"prompt_tokens": 7, "completion_tokens": most}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
            ended = True
        finally:
            if not ended:
                self.left.set()

    def part(self, start: int, end: int, most: int) -> str:
        texts = [f"word-{n} " for n in range(start, end)]
        reason = None if end < most else "stop" if most == self.words else "length"
        choice: dict[str, Any] = {"index": 0, "delta": {"content": "".join(texts)}}
        choice["finish_reason"] = reason
        found: dict[str, Any] = {"choices": [choice]}
        if self.strata:
            choice["token_ids"] = list(range(100 + start, 100 + end))
            rows = [{"token": text, "logprob": -0.5} for text in texts]
            choice["logprobs"] = {"content": rows}
            if not start:
                found["prompt_token_ids"] = [1, 2, 3, 4, 5, 6, 7]
        return f"data: {json.dumps(found)}\n\n"

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/strata", self.about),
            Route("/strata/sources", self.sources, methods=["POST"]),
            Route("/metrics", self.metrics),
        ]


@contextmanager
def stub(**settings: Any) -> Iterator[Stub]:
    found, port = Stub(**settings), pick_port("127.0.0.1", 0)
    found.address = f"http://127.0.0.1:{port}"
    with listening(Starlette(routes=found.routes()), port, timeout_graceful_shutdown=1):
        yield found
