"""An endpoint plug-in of vLLM with two routes about drafting.

    GET /strata: the databases that draft, with their figures since the server started.
    POST /strata/sources: the drafter of each token of a recent answer.

The plug-in runs in the server's process and the drafter in the workers, so it calls them through
vLLM's own `collective_rpc`, between two steps. Nothing is stored for it. If the server needs a key,
these routes need it as well.
"""

import os
import secrets
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from app.vllm.attached import NAME
from strata_chat import __version__

MOST = 1 << 20
"""The most tokens in a request."""


class Plugin:
    """The plug-in that vLLM creates from the entry point."""

    name = NAME
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.engine: Any = None
        self.keys: list[str] = []

    def attach_router(self, app: Starlette) -> None:
        app.router.routes.append(Route("/strata", self.figures))
        app.router.routes.append(Route("/strata/sources", self.sources, methods=["POST"]))

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Remember the engine and the keys, and give the drafters access to the requests."""
        self.engine = engine_client
        given = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY", "")]
        self.keys = [key for key in given if key]
        await self.ask("strata_figures")

    async def ask(self, method: str, *arguments: object) -> dict[str, Any] | None:
        """The reply of the first worker that drafts, None if no worker does."""
        if self.engine is None:
            return None
        replies = await self.engine.collective_rpc(method, args=arguments)
        return next((reply for reply in replies if reply is not None), None)

    def refused(self, request: Request) -> JSONResponse | None:
        """The refusal of a request without a valid key; None if it is allowed."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        right = [
            secrets.compare_digest(given.encode(), key.encode())
            for key in self.keys
            if scheme.lower() == "bearer"
        ]
        if not self.keys or any(right):
            return None
        return JSONResponse({"error": "Unauthorized"}, 401)

    async def figures(self, request: Request) -> JSONResponse:
        """GET /strata"""
        if (no := self.refused(request)) is not None:
            return no
        figures = await self.ask("strata_figures")
        if figures is None:
            return JSONResponse({"error": "nothing of Strata drafts here"}, 404)
        return JSONResponse({"name": NAME, "version": __version__, **figures})

    async def sources(self, request: Request) -> JSONResponse:
        """POST /strata/sources"""
        if (no := self.refused(request)) is not None:
            return no
        try:
            body = await request.json()
            prompt, tokens = ids(body["prompt_token_ids"]), ids(body["token_ids"])
        except (ValueError, TypeError, LookupError, RecursionError):
            form = '{"prompt_token_ids": [...], "token_ids": [...]}'
            return JSONResponse({"error": f"the body must be {form}, lists of numbers"}, 422)
        found = await self.ask("strata_sources", prompt, tokens)
        unknown = {"sources": [None] * len(tokens), "steps": [], "drafted": 0}
        return JSONResponse(found if found is not None else unknown)


def ids(given: object) -> Sequence[int]:
    """A list of token ids. Raises ValueError for anything else."""
    if not isinstance(given, list) or len(given) > MOST or not all(type(n) is int for n in given):
        raise ValueError("no token ids")
    return given
