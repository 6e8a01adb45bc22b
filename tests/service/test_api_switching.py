"""Requests that load the model which they name, on toy models as files."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from app.api.switching import ModelSwitch
from app.service.models import Candidate
from app.service.session import Session
from storage.database import Database
from tests.support.served import Served, ask, served
from tests.support.shop import Shop, load_model


@pytest.fixture
def session(db: Database, shop: Shop) -> Session:
    """Model one is loaded, and two was loaded before."""
    made = shop.session(db, "two")
    load_model(made, shop.source("one"))
    return made


@pytest.fixture
def server(session: Session, db: Database) -> Iterator[Served]:
    with served(None, "--api-load", db=db, session=session) as made:
        yield made


def model_of(client: httpx.Client, **body: Any) -> str:
    found = ask(client, text="hello", max_tokens=4, **body)
    assert found.status_code == 200, found.text
    return str(found.json()["model"])


def test_the_model_that_a_request_names_is_loaded_first(
    server: Served, client: httpx.Client, shop: Shop
) -> None:
    listed = client.get("/v1/models").json()["data"]
    names = [each["id"] for each in listed]
    assert names[0] == "one" and {"one", "two"} <= {*names}
    assert [each["id"] for each in listed if "strata" in each] == ["one"]
    assert client.get("/v1/models/two").json()["id"] == "two"
    assert client.get("/v1/models/three").status_code == 404
    for name in ("two", "one", "two"):
        assert model_of(client, model=name) == name and shop.alive == [name]
        assert model_of(client) == name, "without a name the loaded one answers"
    counted = {"model": "one", "messages": [{"role": "user", "content": "hello"}]}
    assert client.post("/v1/messages/count_tokens", json=counted).json()["input_tokens"] > 0
    assert server.session.models.source == shop.source("one")


def test_what_cannot_be_loaded_leaves_the_model_as_it_is(
    server: Served, client: httpx.Client, shop: Shop
) -> None:
    shop.broken.add(shop.source("two"))
    found = ask(client, text="hello", model="two")
    assert found.status_code == 503 and "damaged" in found.json()["error"]["message"]
    server.session.models.store.add("hub/far", {})
    server.session.models.store.add("http://127.0.0.1:9/v1#near", {})
    for name in ("three", "far", "near", 5, ["two"]):
        found = ask(client, text="hello", model=name)
        error = found.json()["error"]
        assert found.status_code in (400, 404) and error["param"] == "model"
        assert found.status_code == 400 or "GET /v1/models lists all" in error["message"]
    assert client.post("/v1/chat/completions", content=b"{").status_code == 400
    assert model_of(client, model="one") == "one" and shop.alive == ["one"]


def test_without_the_option_no_request_loads_a_model(session: Session, db: Database) -> None:
    with served(None, db=db, session=session) as made, made.client() as client:
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["one"]
        assert ask(client, text="hello", model="two").status_code == 404


class Seen(asyncio.Event):
    """Knows that somebody waited for it."""

    waited = False

    async def wait(self) -> Any:
        self.waited = True
        return await super().wait()


class Watched(ModelSwitch):
    """Counts the requests inside at each load."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.models)
        self.empty = Seen()
        self.loads = list[int]()

    def load(self, candidate: Candidate) -> None:
        self.loads.append(self.inside)
        super().load(candidate)


def test_a_request_waits_for_the_answers_before_it_and_none_overtakes_it(session: Session) -> None:
    async def scenario() -> None:
        switch = Watched(session)
        places = [ExitStack() for _ in range(4)]
        order = list[str]()

        async def enter(name: str, place: ExitStack) -> None:
            await switch.enter(name, place)
            order.append(session.current.info.name)

        await enter("one", places[0])
        await enter("", places[1])
        later = asyncio.gather(enter("two", places[2]), enter("one", places[3]))
        places[0].close()
        while not switch.empty.waited and not switch.loads:
            await asyncio.sleep(0)
        assert order == ["one", "one"]
        places[1].close()
        while len(order) < 3:
            await asyncio.sleep(0)
        places[2].close()
        await later
        assert order == ["one", "one", "two", "one"] and switch.loads == [0, 0]
        places[3].close()
        await switch.empty.wait()

    asyncio.run(scenario())
    session.engine.close()
