"""The API on a toy model, served as `strata serve` does, in this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette

from app.api.routes import Api, api_of
from app.arguments import Options, parse
from app.http.access import PROGRAMS, Access, Hosts, pick_port
from app.http.login import LogIns
from app.service.session import Session
from engine.backends.base import Backend
from engine.engine import Engine
from engine.local import Local
from storage.database import Database
from storage.drafting import DraftingStore
from tests.support.toy import ToyBackend


@dataclass
class Served:
    """A server under its address, and what it is made of."""

    address: str
    session: Session
    api: Api

    def client(self, key: str = "", **headers: str) -> httpx.Client:
        if key:
            headers["authorization"] = f"Bearer {key}"
        return httpx.Client(base_url=self.address, headers=headers, timeout=60)


def ask(client: httpx.Client, path: str = "chat/completions", **body: Any) -> httpx.Response:
    """A completion; messages are made of `text` where there is one."""
    if "text" in body:
        body["messages"] = [{"role": "user", "content": body.pop("text")}]
    return client.post(f"/v1/{path}", json=body)


@contextmanager
def listening(app: Any, port: int, **settings: Any) -> Iterator[None]:
    """An app on a socket of this machine, until the block ends."""
    config = uvicorn.Config(app, "127.0.0.1", port, log_level="critical", **settings)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.005)
        yield
    finally:
        server.should_exit = True
        thread.join(20)


@contextmanager
def served(
    backend: Backend | None = None,
    *arguments: str,
    db: Database | None = None,
    each: int = 32,
    engine: Engine | None = None,
    session: Session | None = None,
) -> Iterator[Served]:
    """A server with these arguments behind `strata serve`; without any, private. `engine` takes the
    place of one in this process, and a `session` that of all."""
    database = db or Database()
    options: Options = parse(["serve", *arguments])
    if engine is None and session is None:
        store = DraftingStore(database)
        engine = Local(backend=backend or ToyBackend(), each=each, store=store)
    if session is None:
        assert engine is not None
        session = Session(engine, database)
    port = pick_port("127.0.0.1", 0)
    api = api_of(session, options)
    app: Any = Starlette(routes=api.routes)
    access = Access(app, Hosts(options.host, port), LogIns(), PROGRAMS, options.origins)
    try:
        with listening(access, port, lifespan="off", access_log=False):
            yield Served(f"http://127.0.0.1:{port}", session, api)
    finally:
        session.engine.close()
        if db is None:
            database.close()
