"""What the page fetches beside its stream: libraries, and whether a conversation changed."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from app.service.session import Session
from app.web import revisions, token_view, vendor
from app.web.server import with_small_page
from engine.backends.toy import ToyBackend
from engine.local import Local
from storage.database import Database
from tests.conftest import ROOT

OWNER = "local"


@pytest.fixture
def session(db: Database, toy: ToyBackend) -> Session:
    return Session(Local(backend=toy), db)


@pytest.fixture
def client(session: Session) -> Iterator[TestClient]:
    own = [*vendor.routes(), *token_view.routes(), *revisions.routes(session)]
    app = Starlette(routes=own)
    gate = SimpleNamespace(auth=None, tokens=set[str](), cookie_id="x")
    app.__dict__.update(gate.__dict__)
    with TestClient(app) as opened:
        yield opened


def test_the_page_is_compressed_and_nothing_else_waits_for_that() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("0123456789" * 1000)(scope, receive, send)

    client = TestClient(with_small_page(answer))
    page, data = client.get("/"), client.get("/gradio_api/queue/data")
    assert page.text == data.text and page.headers["content-encoding"] == "gzip"
    assert int(page.headers["content-length"]) < 200 and "content-encoding" not in data.headers
    plain = client.get("/", headers={"accept-encoding": "identity"})
    assert plain.text == page.text and "content-encoding" not in plain.headers


def test_libraries_are_served_as_they_are_and_kept_for_ever(client: TestClient) -> None:
    assert len(vendor.files()) > 20
    for name, path in vendor.files().items():
        got = client.get(f"{vendor.prefix()}/{name}")
        assert got.status_code == 200 and got.content == path.read_bytes()
        assert "immutable" in got.headers["cache-control"]
    script = client.get(f"{vendor.prefix()}/katex/katex.min.js")
    assert "javascript" in script.headers["content-type"]


def test_the_script_of_the_chat_is_fetched_once(client: TestClient) -> None:
    got = client.get(token_view.address())
    assert token_view.script(chat=True) in got.text and token_view.script() in got.text
    assert "immutable" in got.headers["cache-control"]
    assert client.get("/chat/0123456789abcdef.js").status_code == 404
    for event in re.findall(r'trigger\(("\w+")', got.text):
        assert event in token_view.loader(chat=True)
    assert len(token_view.loader(chat=True)) < 1000, "the page does not bring it along"


@pytest.mark.parametrize(
    "name", ["README.md", "katex/LICENSE", "../chat/run.js", "%2e%2e/chat/run.js", "katex", ""]
)
def test_no_other_file_is_served(client: TestClient, name: str) -> None:
    assert client.get(f"{vendor.prefix()}/{name}").status_code == 404
    assert client.get("/vendor/0000/katex/katex.min.js").status_code == 404


def test_every_library_has_its_licence_and_a_line_in_the_list() -> None:
    listed = (vendor.FOLDER / "README.md").read_text(encoding="utf-8")
    folders = [path for path in vendor.FOLDER.iterdir() if path.is_dir()]
    assert len(folders) == 3
    for folder in folders:
        assert (folder / "LICENSE").read_text(encoding="utf-8").strip()
        assert folder.name.split("-")[0] in listed.lower()
    assert (ROOT / "assets" / "vendor").samefile(vendor.FOLDER)


def test_a_page_learns_how_far_a_conversation_has_changed(
    client: TestClient, session: Session
) -> None:
    store = session.chat.conversations(OWNER)
    conversation = store.create().id
    name = session.watches.name(OWNER, conversation)
    assert session.watches.name(OWNER, conversation) == name and conversation not in name
    assert session.watches.name("another", conversation) != name
    before = int(client.get(f"/revision/{name}").text)
    assert int(client.get(f"/revision/{name}").text) == before, "asking changes nothing"
    store.append(conversation, "user", "hello")
    assert int(client.get(f"/revision/{name}").text) > before
    others = session.watches.name("another", conversation)
    assert client.get(f"/revision/{others}").status_code == 404
    assert client.get("/revision/unknown").status_code == 404


def test_who_is_not_logged_in_learns_nothing(client: TestClient, session: Session) -> None:
    name = session.watches.name(OWNER, session.chat.conversations(OWNER).create().id)
    client.app.auth = ("name", "password")  # type: ignore[attr-defined]
    assert client.get(f"/revision/{name}").status_code == 401
