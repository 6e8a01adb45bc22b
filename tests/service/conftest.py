"""What tests of the service share: a session over a toy that waits when it is told to, and clients
of the `server` of a module."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from app.service.session import Session
from storage.database import Database
from tests.support.inside import Held, on_toy
from tests.support.quick import each_step, quick
from tests.support.scripted import Scripted
from tests.support.served import Served, served
from tests.support.shop import shop
from tests.support.toy import ToyBackend

__all__ = ["each_step", "quick", "shop"]


@pytest.fixture
def toy() -> Held:
    return Held()


@pytest.fixture
def session(db: Database, toy: Held) -> Session:
    return on_toy(db, toy)


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> ToyBackend:
    """The toy that a module's `script` speaks for, or the usual one."""
    script = getattr(request.module, "script", None)
    return Scripted(script) if script else ToyBackend()


@pytest.fixture(scope="module")
def server(backend: ToyBackend) -> Iterator[Served]:
    with served(backend) as made:
        yield made


@pytest.fixture
def client(server: Served) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


@pytest.fixture
def program(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="any", max_retries=0) as made:
        yield made
