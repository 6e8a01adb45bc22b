"""What vLLM's server answers about drafting: an endpoint plug-in of vLLM, and two routes.

    GET /strata: what drafts, and what came of it since the server started.
    POST /strata/sources: who drafted each token of an answer that was made lately.

The plug-in is in the server's process and the drafter in the workers', so it asks them through
vLLM's own `collective_rpc`, between two steps. Nothing is written down for it. Where the server
asks for a key, so do these.
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
"""Tokens that may be asked about."""


class Plugin:
    """What vLLM makes of the entry point."""

    name = NAME
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.engine: Any = None
        self.keys: list[str] = []

    def attach_router(self, app: Starlette) -> None:
        """Add the routes."""
        app.router.routes.append(Route("/strata", self.figures))
        app.router.routes.append(Route("/strata/sources", self.sources, methods=["POST"]))

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """The engine is there: whoever drafts in it can look at the requests from now on."""
        self.engine = engine_client
        given = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY", "")]
        self.keys = [key for key in given if key]
        await self.ask("strata_figures")

    async def ask(self, method: str, *words: object) -> dict[str, Any] | None:
        """What the first worker that drafts says; None where none does."""
        if self.engine is None:
            return None
        said = await self.engine.collective_rpc(method, args=words)
        return next((one for one in said if one is not None), None)

    def refused(self, request: Request) -> JSONResponse | None:
        """The answer to who has no key, where one is needed."""
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
        said = await self.ask("strata_figures")
        if said is None:
            return JSONResponse({"error": "nothing of Strata drafts here"}, 404)
        return JSONResponse({"name": NAME, "version": __version__, **said})

    async def sources(self, request: Request) -> JSONResponse:
        """POST /strata/sources"""
        if (no := self.refused(request)) is not None:
            return no
        try:
            asked = await request.json()
            prompt, tokens = ids(asked["prompt_token_ids"]), ids(asked["token_ids"])
        except (ValueError, TypeError, LookupError, RecursionError):
            form = '{"prompt_token_ids": [...], "token_ids": [...]}'
            return JSONResponse({"error": f"the body must be {form}, lists of numbers"}, 422)
        said = await self.ask("strata_sources", prompt, tokens)
        unknown = {"sources": [None] * len(tokens), "steps": [], "drafted": 0}
        return JSONResponse(said if said is not None else unknown)


def ids(given: object) -> Sequence[int]:
    """A list of token ids. Raises ValueError for anything else."""
    if not isinstance(given, list) or len(given) > MOST or not all(type(n) is int for n in given):
        raise ValueError("no token ids")
    return given
