"""The tools in the Settings tab, and the question about a call in the Chat tab."""

import json
import shlex

import pytest

from app.service.session import Session
from app.service.tool_calls import Pending
from app.web import render
from app.web.tabs.tools import Tools
from engine.types import ToolCall
from storage.tool_servers import ServerTool, ToolServer
from tests.support.blocks import EVIL, after, tab_of
from tests.support.calling import COMMAND

LOOK = ServerTool(name="look", description=f"{EVIL}\n Looks. {'x' * 200}")


@pytest.fixture
def tab(session: Session) -> Tools:
    return tab_of(Tools, session)


def test_what_went_wrong_is_shown_and_escaped(tab: Tools) -> None:
    shown = after(tab.add(EVIL, f"/no/such/{EVIL}", ""))
    text = str(shown[tab.status])
    assert "cannot be started" in text and "<img" not in text and "&lt;img" in text
    assert tab.name not in shown, "what was typed stays"
    text = str(after(tab.list_again(None))[tab.status])
    assert "There is no such tool server" in text


def test_what_was_typed_goes_once_its_servers_are_there(tab: Tools) -> None:
    command, *arguments = shlex.split(COMMAND)
    known = {"command": command, "args": arguments}
    shown = after(tab.add("", json.dumps({"mcpServers": {"One": known, "Two": known}}), ""))
    assert "One has 9 tools. Two has 9 tools." in str(shown[tab.status])
    assert [shown[box] for box in (tab.name, tab.address, tab.settings)] == ["", "", ""]
    tab.servers.connections.close()


def test_tools_are_switched_and_servers_removed(tab: Tools) -> None:
    first, second = (tab.servers.store.add(name, "true", (LOOK,)) for name in ("One", "Two"))
    shown = tab.refresh()
    (label, value), other = shown[tab.chosen]["choices"]
    assert label.startswith("One: look (<img") and label.endswith("x…)") and len(label) < 150
    assert shown[tab.chosen]["value"] == [] and shown[tab.known]["visible"]
    assert tab.switch([value]) == {tab.status: ""}
    assert tab.refresh()[tab.chosen]["value"] == [value]
    refused = tab.switch([value, other[1]])
    assert "Two servers have a tool" in str(refused[tab.status])
    assert refused[tab.chosen]["value"] == [value]
    assert tab.ask(None)[tab.confirmation.shown] != tab.ask(first.id)[tab.confirmation.shown]
    tab.remove(first.id)
    left = tab.remove(second.id)
    assert left[tab.which]["choices"] == [] and not left[tab.known]["visible"]


def test_models_that_call_no_tools_are_named(tab: Tools) -> None:
    assert "toy cannot call tools" in str(tab.refresh()[tab.problem])


def test_a_question_shows_what_could_hide(session: Session) -> None:
    call = ToolCall("1", "look", '{"path": "a\\u202eb\\u0000\u200bä"}')
    server = ToolServer("1", "Mine", "true")
    asked = render.question(Pending("m", 0, "m", call, server, False, "", False), False)
    assert asked["arguments"] == '{\n "path": "a\\u202eb\\u0000\\u200bä"\n}'
    over = render.question(Pending("m", 0, "m", call, server, True, "", True), False)
    assert over["exhausted"] and "in 10 answers" in str(over["problem"])
