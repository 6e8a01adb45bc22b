"""The API beside the page: the tab, what it shows once, and the same routes behind one server."""

import json
import shlex
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gradio as gr
import httpx
import pytest

from app.api.routes import api_of
from app.arguments import parse
from app.service.session import Session
from app.web import stream
from app.web.kit import RefreshGuard
from app.web.tabs import api
from engine.local import Local
from storage.database import Database
from tests.support.blocks import made, serving
from tests.support.inside import soon
from tests.support.toy import ToyBackend

EVIL = '<img src=x onerror="alert(1)">'
REQUEST: Any = SimpleNamespace(headers={"origin": "http://127.0.0.1:7860"}, session_hash="page")


class Tab:
    """The tab's handlers, as its page calls them."""

    def __init__(self, session: Session) -> None:
        def build() -> tuple[gr.Blocks, api.Programs]:
            with gr.Blocks() as blocks:
                with gr.Tab("API") as tab:
                    programs = api.Programs(session, gr.BrowserState({}), tab)
                programs.wire()
            return blocks, programs

        blocks, self.tab = made(build)
        self.guard = RefreshGuard()
        self.handlers = {fn.fn.__name__: fn.fn for fn in blocks.fns.values() if fn.fn}

    def call(self, name: str, *given: Any) -> dict[str, Any]:
        changed = self.handlers[name](REQUEST, self.guard, *given)
        names = {id(getattr(self.tab, each)): each for each in PARTS}
        return {names[id(part)]: value for part, value in changed.items() if id(part) in names}


PARTS = ("switch_box", "state", "keys", "name", "secret", "which", "curl", "python")


def test_a_tab_that_is_late_takes_no_key_away(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    tab, address_of = Tab(session), api.address_of

    def meanwhile(request: Any) -> str:
        monkeypatch.setattr(api, "address_of", address_of)
        assert tab.call("make", "my editor")["secret"]["value"]
        return address_of(request)

    monkeypatch.setattr(api, "address_of", meanwhile)
    late = tab.call("refresh")
    assert late["secret"] == late["keys"] == gr.skip()
    assert "secret" not in tab.call("switch", True), "who switches it on still reads the new key"


def test_a_key_is_shown_once(session: Session) -> None:
    tab = Tab(session)
    assert "no keys yet" in tab.call("refresh")["keys"]
    shown = tab.call("make", "my editor")
    secret = shown["secret"]["value"]
    assert secret.startswith("sk-strata-") and shown["secret"]["visible"] and shown["name"] == ""
    assert secret in shown["curl"] and secret in shown["python"] and secret not in shown["keys"]
    again = tab.call("refresh")
    assert secret not in json.dumps(again, default=str) and "my editor" in again["keys"]
    assert not again["secret"]["visible"] and api.NO_KEY in again["curl"]


def test_names_are_inert_and_examples_run(session: Session, toy: ToyBackend) -> None:
    tab = Tab(session)
    shown = tab.call("make", EVIL)
    assert EVIL not in shown["keys"] and "&lt;img" in shown["keys"]
    name = 'it\'s "a" model $(touch x) `y`\n'
    for text in (api.curl_example("http://h/v1", name, "k"), api.curl_example("h", "m", EVIL)):
        parts = shlex.split(text.replace("\\\n", " "))
        body = json.loads(parts[parts.index("-d") + 1])
        assert body["model"] in (name, "m") and len(parts) == 8
    code = api.python_example("http://h/v1", name, "k")
    compile(code, "example", "exec")
    assert repr(name) in code


# beside the page


class Slow(ToyBackend):
    def score(self, *arguments: Any) -> Any:
        time.sleep(0.002)
        return super().score(*arguments)


@pytest.fixture
def beside(db: Database) -> Iterator[tuple[str, Session]]:
    session = Session(Local(backend=Slow()), db)
    api = api_of(session, parse(["--no-browser", "--api"]))
    routes = [*stream.routes(session.generations), *api.routes]
    with serving("--api", routes=routes) as page:
        yield page.address, session
    session.engine.close()


@pytest.mark.parametrize("streamed", [True, False])
def test_a_program_that_leaves_the_page_s_server_ends_its_answer(
    beside: tuple[str, Session], streamed: bool
) -> None:
    address, session = beside

    def counts(name: str, count: int) -> bool:
        """Whether the metrics say so of what has this name."""
        lines = httpx.get(f"{address}/metrics", timeout=60).text.splitlines()
        return any(name in line and line.endswith(f" {count}") for line in lines)

    url = httpx.URL(address)
    queue = session.engine.queue  # type: ignore[attr-defined]
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 4000,
            "stream": streamed,
            "temperature": 0,
            "speculative": False,
        }
    )
    host = f"{url.host}:{url.port}"
    with socket.create_connection((url.host, url.port)) as raw:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
        raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        # One that leaves before its answer begins is not counted.
        assert soon(lambda: counts("vllm:num_requests_running", 1))
    assert soon(lambda: not queue.running)
    # It is counted a moment after the model is free.
    assert soon(lambda: counts('finished_reason="abort"', 1))
