"""What the page fetches beside its stream: libraries, and whether a conversation changed."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from app.service.pages import THE_LIST
from app.service.session import Session
from app.web import routes, token_view
from app.web.server import with_small_page
from tests.conftest import ROOT

OWNER = "local"


@pytest.fixture
def client(session: Session) -> Iterator[TestClient]:
    own = [*routes.routes(session), token_view.route()]
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
    assert len(routes.library_files()) > 20
    for name, path in routes.library_files().items():
        got = client.get(f"{routes.library_prefix()}/{name}")
        assert got.status_code == 200 and got.content == path.read_bytes()
        assert "immutable" in got.headers["cache-control"]
    script = client.get(f"{routes.library_prefix()}/katex/katex.min.js")
    assert "javascript" in script.headers["content-type"]


def test_the_script_of_the_chat_is_fetched_once(client: TestClient) -> None:
    got = client.get(routes.script_address("/chat", token_view.module()))
    assert token_view.script(chat=True) in got.text and token_view.script() in got.text
    assert "immutable" in got.headers["cache-control"]
    assert client.get("/chat/0123456789abcdef.js").status_code == 404
    for event in re.findall(r'trigger\(("\w+")', got.text):
        assert event in token_view.loader(chat=True)
    assert len(token_view.loader(chat=True)) < 1000, "the page does not bring it along"


def test_no_other_file_is_served(client: TestClient) -> None:
    for name in ("README.md", "katex/LICENSE", "../chat/run.js", "%2e%2e/chat/run.js", "katex", ""):
        assert client.get(f"{routes.library_prefix()}/{name}").status_code == 404, name
    assert client.get("/vendor/0000/katex/katex.min.js").status_code == 404


def test_every_library_has_its_licence_and_a_line_in_the_list() -> None:
    listed = (routes.FOLDER / "README.md").read_text(encoding="utf-8")
    folders = [path for path in routes.FOLDER.iterdir() if path.is_dir()]
    assert len(folders) == 3
    for folder in folders:
        assert (folder / "LICENSE").read_text(encoding="utf-8").strip()
        assert folder.name.split("-")[0] in listed.lower()
    assert (ROOT / "assets" / "vendor").samefile(routes.FOLDER)


def test_a_page_learns_how_far_a_conversation_has_changed(
    client: TestClient, session: Session
) -> None:
    store = session.chat.conversations(OWNER)
    conversation = store.create().id
    name = session.change_tokens.token(OWNER, conversation)
    assert session.change_tokens.token(OWNER, conversation) == name and conversation not in name
    assert session.change_tokens.token("another", conversation) != name
    before = int(client.get(f"/revision/{name}").text)
    assert int(client.get(f"/revision/{name}").text) == before, "asking changes nothing"
    store.append(conversation, "user", "hello")
    assert int(client.get(f"/revision/{name}").text) > before
    others = session.change_tokens.token("another", conversation)
    assert client.get(f"/revision/{others}").status_code == 404
    assert client.get("/revision/unknown").status_code == 404


def test_a_page_learns_that_a_conversation_was_started_elsewhere(
    client: TestClient, session: Session
) -> None:
    name = session.change_tokens.token(OWNER, THE_LIST)
    before = int(client.get(f"/revision/{name}").text)
    assert int(client.get(f"/revision/{name}").text) == before
    session.chat.conversations("another").create()
    assert int(client.get(f"/revision/{name}").text) == before, "nobody else's"
    session.chat.conversations(OWNER).create()
    assert int(client.get(f"/revision/{name}").text) > before


def test_who_is_not_logged_in_learns_nothing(client: TestClient, session: Session) -> None:
    name = session.change_tokens.token(OWNER, session.chat.conversations(OWNER).create().id)
    client.app.auth = ("name", "password")  # type: ignore[attr-defined]
    assert client.get(f"/revision/{name}").status_code == 401
