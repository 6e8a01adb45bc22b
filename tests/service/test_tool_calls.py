"""Tools in the chat: a scripted model calls those of a real server, which runs over its standard
input and output, or over HTTP."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mcp_types import CallToolResult
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from app.http.access import pick_port
from app.service import tool_connections, tool_servers
from app.service.called import result_of
from app.service.comparison import Progress
from app.service.jobs import Stop
from app.service.session import Session
from app.service.tool_calls import REFUSED, ROUNDS, Choice, Pending
from app.service.tool_connections import Connections, text_of
from engine.errors import Busy, PromptError, SettingError, ToolError
from engine.tools import FORMS, CallForm
from engine.types import ToolCall
from storage import imports
from storage.conversations import StoredMessage
from storage.database import Database
from storage.tool_servers import ToolServer, ToolServerStore
from tests.support import tool_server
from tests.support.calling import COMMAND, call, hangs
from tests.support.inside import OWNER, compare, messages, on_toy, preferences, proven, soon, swap
from tests.support.scripted import Scripted
from tests.support.served import listening
from tests.support.tool_server import HOSTILE
from tests.support.toy import END

KNOWN = dict[str, ToolServer]()
"""The servers that were added before, by their addresses."""
QUESTION = "What about Paris?"
CHOSEN = preferences(tokens=400)


class NeedsKey(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        if request.headers.get("authorization") != "Bearer sesame":
            return Response(status_code=401)
        return await call_next(request)


PARIS, ROME = (call("weather", city=city) for city in ("Paris", "Rome"))


class Script:
    """Calls `calls` once, or `always`, and then says how many results it read."""

    def __init__(self, *calls: str, always: bool = False) -> None:
        self.text, self.always = "\n".join(("I look.", *calls)), always

    def __call__(self, prompt: str) -> str:
        asked = prompt.rpartition(QUESTION)[2]
        results = asked.count("<tool_response>")
        if '"weather"' not in prompt:
            return "I know no tools."
        return self.text if self.always or not results else f"Read {results}."


class Chatting:
    """A conversation with a scripted model, whose `session` has the test server."""

    def __init__(self, session: Session, toy: Scripted) -> None:
        self.session, self.toy = session, toy
        self.id = ""

    def ask(self, tokens: int = 400) -> None:
        self.id = self.session.chat.say(OWNER, self.id or None, QUESTION)
        self.answer(tokens)

    def answer(self, tokens: int = 400) -> None:
        answer = self.session.generations.start(OWNER, self.id, preferences(tokens=tokens))
        assert soon(lambda: answer.over and self.idle)
        assert answer.error == ""

    @property
    def server(self) -> ToolServer:
        return self.session.tool_servers.store.list()[0]

    @property
    def idle(self) -> bool:
        busy = self.session.tool_calls.busy(OWNER, self.id)
        return not busy and self.session.generations.find(OWNER, self.id) is None

    @property
    def pending(self) -> Pending | None:
        return self.session.tool_calls.pending(OWNER, self.id)

    def choose(self, choice: Choice, about: Pending | None = None) -> None:
        found = about or self.pending
        assert found is not None
        place = found.message, found.number
        self.session.tool_calls.decide(OWNER, self.id, *place, choice, CHOSEN)

    def decide(self, choice: Choice) -> None:
        """Decide about the call that waits, and wait for what follows."""
        self.choose(choice)
        assert soon(lambda: self.idle)

    @property
    def stored(self) -> list[StoredMessage]:
        return messages(self.session, self.id)

    @property
    def results(self) -> list[str]:
        return [result.text for each in self.stored if (result := result_of(each))]

    @property
    def last(self) -> str:
        return self.stored[-1].content


def chatting(
    db: Database,
    *calls: str,
    always: bool = False,
    address: str = COMMAND,
    form: CallForm = FORMS[0],
) -> Chatting:
    toy = Scripted(Script(*calls, always=always), form)
    toy.info = replace(toy.info, context_length=1 << 18)
    session = on_toy(db, toy)
    servers = session.tool_servers
    if not servers.store.list():
        if address not in KNOWN:
            (added,) = servers.add("Tests", address)
            servers.switch([(added.id, tool.name) for tool in added.tools])
            KNOWN[address] = servers.store.get(added.id)
        else:
            server = KNOWN[address]
            servers.store.add(server.name, address, server.tools)
            db.execute_write("UPDATE tool_servers SET id = ?", [server.id])
    return Chatting(session, toy)


def asked(db: Database, *calls: str, choice: Choice | None = None, **more: Any) -> Chatting:
    """A chat where the question was asked, and the first call decided if there is a `choice`."""
    chat = chatting(db, *calls, **more)
    chat.ask()
    if choice:
        chat.decide(choice)
    return chat


def read(chat: Chatting, conversation: str) -> list[str]:
    """The results that the model reads in a conversation."""
    store = chat.session.chat.conversations(OWNER)
    found = chat.session.chat.prompt(OWNER, conversation, store.last(conversation))
    assert [each.name for m in found for each in m.calls] == [m.call.name for m in found if m.call]
    return [m.content for m in found if m.call]


@pytest.fixture(scope="module")
def connections() -> Iterator[Connections]:
    """The connections of all tests here: a server takes a second to start."""
    with Database() as db:
        made = Connections(ToolServerStore(db))
        yield made
        made.close()
    KNOWN.clear()


@pytest.fixture(autouse=True)
def shared(connections: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_servers, "Connections", lambda store: connections)


def test_an_allowed_call_runs_and_the_model_answers_on(db: Database) -> None:
    chat = asked(db, PARIS)
    assert chat.pending is not None and chat.pending.call.name == "weather"
    assert json.loads(chat.pending.call.arguments) == {"city": "Paris"}
    assert [each.role for each in chat.stored] == ["user", "assistant"]
    chat.decide("once")
    assert [each.role for each in chat.stored] == ["user", "assistant", "tool", "assistant"]
    assert chat.results == ["Paris: 21 degrees"] and chat.last == "Read 1."
    assert f"I look.\n{PARIS}<|end|>" in chat.toy.prompts[-1], "read as it was written"
    assert "<tool_response>weather: Paris: 21 degrees" in chat.toy.prompts[-1]
    assert chat.pending is None


def test_no_refuses_and_the_model_reads_that(db: Database) -> None:
    chat = asked(db, PARIS, choice="no")
    assert chat.results == [REFUSED] and chat.last == "Read 1."
    assert REFUSED in chat.toy.prompts[-1]


def test_always_holds_for_one_tool_in_one_chat(db: Database) -> None:
    chat = asked(db, PARIS, ROME, choice="once")
    found = chat.pending
    assert found is not None and found.number == 1 and "Rome" in found.call.arguments
    assert len(chat.stored) == 3, "the model waits for all results"
    chat.decide("always")
    assert chat.last == "Read 2."
    chat.ask()
    assert chat.last == "Read 2." and len(chat.results) == 4, "both without a question"
    chat.id = ""
    chat.ask()
    assert chat.pending is not None and not chat.pending.allowed, "another chat asks"


def test_the_last_answer_is_proved_and_both_ways_read_the_same_prompt(db: Database) -> None:
    chat = asked(db, PARIS)
    proven(chat.session, chat.id)
    chat.decide("once")
    before = len(chat.toy.prompts)
    proven(chat.session, chat.id)
    assert "<tool_response>" in chat.toy.prompts[-1] and len(chat.toy.prompts) <= before + 1


def test_a_server_that_ends_is_reported_and_the_call_waits(db: Database) -> None:
    chat = asked(db, call("die"), choice="always")
    found = chat.pending
    assert found is not None and "out of luck" in found.problem and "'Tests'" in found.problem
    assert not found.allowed, "what failed is asked about again"
    assert [each.role for each in chat.stored] == ["user", "assistant"], "nothing is lost"
    chat.decide("no")
    assert chat.results == [REFUSED] and chat.last == "Read 1."


def test_a_call_that_takes_too_long_ends(db: Database, monkeypatch: Any, tmp_path: Path) -> None:
    chat = asked(db, call("hang", file=str(tmp_path / "begun")))
    monkeypatch.setattr(tool_connections, "CALL_SECONDS", 0.2)
    chat.decide("once")
    assert chat.pending is not None and "no answer within" in chat.pending.problem


def test_stop_ends_a_call_at_once(db: Database, tmp_path: Path) -> None:
    file = tmp_path / "begun"
    chat = asked(db, call("hang", file=str(file)))
    chat.choose("always")
    assert soon(lambda: hangs(file) > 0) and chat.session.tasks.busy(OWNER, chat.id)
    with pytest.raises(Busy):
        chat.choose("once")
    chat.session.tasks.stop(OWNER, chat.id)
    assert soon(lambda: chat.idle)
    found = chat.pending
    assert found is not None and not found.allowed and found.problem == ""
    assert chat.results == [] and soon(lambda: hangs(file) == 0), "its server has ended"


def test_an_answer_that_was_cut_or_stopped_runs_nothing(db: Database) -> None:
    chat = asked(db, PARIS, choice="always")
    chat.ask(len(f"I look.\n{PARIS}"))
    found = chat.pending
    assert found is not None and found.allowed and len(chat.results) == 1


def test_a_loop_ends_after_ten_rounds(db: Database) -> None:
    chat = asked(db, PARIS, always=True, choice="always")
    assert len(chat.results) == ROUNDS
    found = chat.pending
    assert found is not None and found.exhausted and found.number == 0
    with pytest.raises(PromptError):
        chat.choose("once")
    chat.ask()
    assert len(chat.results) == 2 * ROUNDS, "another message begins anew"


def test_a_long_result_is_cut_and_says_so(db: Database) -> None:
    chat = asked(db, call("long", size=1_000_000), choice="once")
    (result,) = chat.results
    assert result.startswith("x" * 100_000 + "\n[") and "1,000,000 bytes" in result
    assert len(result) < 100_100 and chat.last == "Read 1."
    assert tool_servers.cut("äöü", 3) == "ä\n[The result has 6 bytes. The rest was cut after 3.]"


def test_a_result_leaves_room_in_the_context(db: Database) -> None:
    chat = chatting(db)
    chat.toy.info = replace(chat.toy.info, context_length=8192)
    chat.session.current.follow(chat.session.engine.state)
    swap(chat.session, chat.toy, "toy")
    long = ToolCall("1", "long", '{"size": 9000}')
    assert len(chat.session.tool_servers.call(chat.server, long, Stop())) < 8300


def test_a_hostile_result_stays_text_and_calls_nothing(db: Database) -> None:
    chat = asked(db, call("hostile"), choice="once")
    assert chat.results == [HOSTILE] and chat.last == "Read 1."
    assert chat.pending is None, "a call in a result is none of the model's"
    assert HOSTILE in chat.toy.prompts[-1]
    prompt = chat.session.history.last[OWNER, chat.id].prompt
    assert prompt.count(END) == 4, "tools, question, call and result: no turn is imitated"


def test_an_error_of_a_tool_is_a_result(db: Database) -> None:
    chat = asked(db, call("fail"), choice="once")
    assert chat.results[0].startswith("The tool reports an error: ") and chat.last == "Read 1."


def test_a_question_survives_a_restart(db: Database) -> None:
    chat = asked(db, PARIS)
    later = chatting(db, PARIS)
    later.id = chat.id
    later.decide("once")
    assert later.results == ["Paris: 21 degrees"] and later.last == "Read 1."


def test_results_survive_export_and_import_branch_edit_and_regenerate(db: Database) -> None:
    chat = asked(db, PARIS, choice="once")
    store, whole = chat.session.chat.conversations(OWNER), chat.stored
    assert read(chat, chat.id) == ["Paris: 21 degrees"]
    branch = store.copy(chat.id, whole[-1].id)
    assert read(chat, branch) == ["Paris: 21 degrees"]
    (imported,) = store.import_([imports.read(store.export(chat.id))])
    assert [(m.role, m.content) for m in messages(chat.session, imported)] == [
        (m.role, m.content) for m in whole
    ]
    assert read(chat, imported) == ["Paris: 21 degrees"]
    chat.session.chat.again(OWNER, chat.id, whole[-1].id)
    chat.answer()
    assert len(chat.stored) == 4 and chat.stored[-1].parent == whole[2].id, "the same result"
    assert len(chat.stored[-1].versions) == 2 and chat.results == ["Paris: 21 degrees"]
    chat.session.chat.edit(OWNER, chat.id, whole[0].id, f"Now: {QUESTION}")
    chat.answer()
    assert chat.pending is not None and len(chat.stored) == 2
    store.show(chat.id, whole[-1].id)
    assert [m.id for m in chat.stored] == [m.id for m in whole]


def test_a_message_instead_leaves_the_call_without_a_result(db: Database) -> None:
    chat = asked(db, PARIS)
    first = chat.pending
    chat.ask()
    with pytest.raises(PromptError):
        chat.choose("once", first)
    chat.decide("once")
    assert chat.results == ["Paris: 21 degrees"] and chat.last == "Read 1."


def test_a_call_in_the_form_of_another_model_is_text(db: Database) -> None:
    written = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]'
    chat = asked(db, written)
    assert chat.pending is None and chat.last.endswith(written)


def test_an_imported_call_is_not_offered(db: Database) -> None:
    chat = asked(db, PARIS)
    store = chat.session.chat.conversations(OWNER)
    (chat.id,) = store.import_([imports.read(store.export(chat.id))])
    assert chat.last == f"I look.\n{PARIS}" and chat.pending is None


def test_messages_that_fit_no_call_are_read_as_text(db: Database) -> None:
    chat = chatting(db)
    store = chat.session.chat.conversations(OWNER)
    chat.id = store.create().id
    for role, content in (
        ("tool", "weather {}\nWithout an answer."),
        ("assistant", "Well."),
        ("tool", "not a call"),
        ("tool", 'weather {"a": 1}\nAfter that.'),
    ):
        store.append(chat.id, role, content)
    read = chat.session.chat.prompt(OWNER, chat.id, store.last(chat.id))
    assert [(m.role, m.content, m.calls, m.call) for m in read] == [
        ("user", "weather {}\nWithout an answer.", (), None),
        ("assistant", "Well.", (), None),
        ("user", 'not a call\n\nweather {"a": 1}\nAfter that.', (), None),
    ]


def test_guests_and_models_without_calls_have_no_tools(db: Database, monkeypatch: Any) -> None:
    chat = chatting(db, PARIS)
    servers = chat.session.tool_servers
    assert len(servers.offered()) == 9 and servers.problem == ""
    guests = on_toy(db, Scripted(Script(PARIS)), guests=True)
    assert guests.tool_servers.offered() == ()
    with pytest.raises(SettingError):
        guests.tool_servers.add("Mine", COMMAND)
    mute = on_toy(db, Scripted(Script(PARIS), form=None))
    assert mute.tool_servers.offered() == () and "cannot call tools" in mute.tool_servers.problem
    monkeypatch.setattr(tool_servers, "find_spec", lambda name: None)
    assert servers.offered() == () and "pip install 'mcp" in servers.problem
    with pytest.raises(SettingError, match="pip install"):
        servers.add("Mine", COMMAND)


def test_where_others_can_log_in_tools_need_a_password(db: Database) -> None:
    servers = chatting(db, PARIS).session.tool_servers
    servers.others = lambda: ["ann", "bea", "cid", "dan"]
    assert servers.offered() == ()
    assert "(ann, bea, cid)" in servers.problem and "--auth NAME:PASSWORD" in servers.problem
    with pytest.raises(SettingError, match="--auth"):
        servers.add("Mine", COMMAND)


def test_tools_are_off_until_they_are_switched_on(db: Database) -> None:
    session = on_toy(db, Scripted(Script()))
    servers = session.tool_servers
    (made,) = servers.add(" The  tests ", COMMAND)
    assert made.name == "The tests" and len(made.tools) == 9 and servers.offered() == ()
    servers.switch([(made.id, "weather")])
    (tool,) = servers.offered()
    assert (tool.name, tool.description) == ("weather", "Looks up the weather.")
    assert json.loads(tool.parameters)["required"] == ["city"]
    changed = [each.model_copy(update={"on": True}) for each in made.tools]
    changed[1] = changed[1].model_copy(update={"description": "It was harmless."})
    servers.store.set_tools(made.id, changed)
    again = servers.list_tools(made.id)
    assert [tool.on for tool in again.tools] == [True, False, *[True] * 7]
    (other,) = servers.add("Others", COMMAND)
    with pytest.raises(SettingError, match="'weather'"):
        servers.switch([(made.id, "weather"), (other.id, "weather")])
    servers.remove(made.id)
    assert [each.name for each in servers.store.list()] == ["Others"]


@pytest.mark.parametrize(
    ("name", "address", "words"),
    [
        ("", COMMAND, "1 to 60 characters"),
        ("x" * 61, COMMAND, "1 to 60 characters"),
        ("Mine", " ", "The address is empty"),
        ("Mine", "/no/such/program", "cannot be started or reached (No such file"),
        ("Mine", "false", "failed (Connection closed)"),
        ("Mine", "cat", "failed ("),
        ("Mine", "echo nonsense", "failed (Connection closed)"),
        ("Mine", "'", "failed (No closing quotation)"),
        ("Mine", "http://127.0.0.1:9/mcp", "failed (All connection attempts failed)"),
    ],
)
def test_a_server_that_cannot_be_used_is_not_added(
    db: Database, name: str, address: str, words: str
) -> None:
    servers = on_toy(db).tool_servers
    with pytest.raises((SettingError, ToolError), match=re.escape(words)):
        servers.add(name, address)
    assert servers.store.list() == []


def test_settings_reach_a_server_and_nothing_else_does(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_TEST_KEY", "of the person")
    monkeypatch.setenv("STRATA_TEST_OTHER", "private")
    servers = on_toy(db).tool_servers
    (made,) = servers.add("Mine", COMMAND, "API_KEY=${STRATA_TEST_KEY}\nMODE: fast = best ")
    assert made.settings == {"API_KEY": "${STRATA_TEST_KEY}", "MODE": "fast = best"}
    assert servers.store.list() == [made], "the value itself is stored nowhere"
    asked = ToolCall("1", "environment", "{}")
    names = servers.call(made, asked, Stop()).split()
    assert {"API_KEY", "MODE"} <= {*names} and "STRATA_TEST_OTHER" not in names
    asked = ToolCall("2", "variable", '{"name": "API_KEY"}')
    assert servers.call(made, asked, Stop()) == "of the person"


def test_headers_reach_a_server_over_http(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    app = tool_server.server.streamable_http_app()
    app.add_middleware(NeedsKey)
    port = pick_port("127.0.0.1", 0)
    monkeypatch.setenv("STRATA_TEST_KEY", "sesame")
    with listening(app, port):
        servers, address = on_toy(db).tool_servers, f"http://127.0.0.1:{port}/mcp"
        for settings in ("", "Authorization: Bearer wrong"):
            with pytest.raises(ToolError, match="401"):
                servers.add("Mine", address, settings)
        known = "Authorization: Bearer ${env:STRATA_TEST_KEY}"
        (made,) = servers.add("Mine", address, known)
        weather = servers.call(made, ToolCall("1", "weather", '{"city": "Rome"}'), Stop())
        assert weather == "Rome: 21 degrees"
        described = {"type": "http", "url": address.replace("mcp", "${STRATA_TEST_NONE:-mcp}")}
        text = {"servers": {"Theirs": described | {"headers": {"Authorization": "Bearer sesame"}}}}
        assert [each.name for each in servers.add("", json.dumps(text))] == ["Theirs"]
        servers.connections.close()


def test_servers_are_added_as_other_programs_describe_them(db: Database) -> None:
    command, *arguments = shlex.split(COMMAND)
    known = {"command": command, "args": arguments, "env": {"API_KEY": "x y"}, "disabled": False}
    text = json.dumps({"mcpServers": {"One": known, "Two": known}})
    servers = on_toy(db).tool_servers
    made = servers.add("", text)
    assert [(each.name, each.address) for each in made] == [("One", COMMAND), ("Two", COMMAND)]
    assert all(each.settings == {"API_KEY": "x y"} and len(each.tools) == 9 for each in made)
    (named,) = servers.add("Mine", json.dumps({"mcpServers": {"Three": known}}))
    assert named.name == "Mine"
    with pytest.raises(SettingError, match="'One' already"):
        servers.add("", text)


@pytest.mark.parametrize(
    ("address", "settings", "words"),
    [
        ("true", "no setting", "A setting cannot be 'no setting'"),
        ("true", "A B=c", "A setting cannot be 'A B=c'"),
        ("true", "KEY=ä", "The setting 'KEY' cannot be sent"),
        ("true", "KEY=${STRATA_TEST_NONE}", "Set STRATA_TEST_NONE before you start Strata"),
        ("true", "KEY=${input:key}", "Nothing is known to stand in for ${input:key}"),
        ("{", "", "This JSON describes no servers"),
        ("{}", "", 'names no server under "mcpServers"'),
        ('{"mcpServers": {}}', "KEY=1", "Leave their box empty"),
        ('{"mcpServers": {"a": {}}}', "", "'a' needs either a command or a url"),
        ('{"mcpServers": {"a": {"url": "http://a", "command": "b"}}}', "", "needs either"),
        ('{"mcpServers": {"a": {"command": ["b"]}}}', "", "command cannot be ['b']"),
        ('{"mcpServers": {"a": {"command": "b", "env": {"K": 1}}}}', "", "K cannot be 1"),
        ('{"servers": {"a": {"url": "http://a", "headers": {"K": "1\\r\\n2"}}}}', "", "'K' cannot"),
        ('{"servers": {"a": {"url": "http://a", "headers": {"K\\n": "1"}}}}', "", "'K\\n' cannot"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    db: Database, address: str, settings: str, words: str
) -> None:
    servers = on_toy(db).tool_servers
    with pytest.raises((SettingError, ToolError), match=re.escape(words)):
        servers.add("Mine", address, settings)
    assert servers.store.list() == []


def test_a_server_over_http(db: Database) -> None:
    port = pick_port("127.0.0.1", 0)
    app = tool_server.server.streamable_http_app()
    with listening(app, port):
        address = f"http://127.0.0.1:{port}/mcp"
        chat = asked(db, call("count"), choice="once", address=address)
        chat.ask()
        chat.decide("once")
        assert [int(result) for result in chat.results] == [1, 2], "the connection stays open"
        chat.session.tool_servers.connections.close()
    chat.ask()
    chat.decide("once")
    assert chat.pending is not None and "failed" in chat.pending.problem


def test_damaged_lists_of_tools_are_empty(db: Database) -> None:
    servers = on_toy(db).tool_servers
    made = servers.store.add("Mine", COMMAND, ())
    for stored in ("[", "7", '[{"name": 7}]', "null"):
        db.execute_write("UPDATE tool_servers SET tools = ?", [stored])
        assert servers.store.list() == [made]


def test_compare_shows_the_tools_to_both_sides(db: Database) -> None:
    chat = chatting(db, PARIS)
    *_, progress = compare(chat.session, OWNER, QUESTION, CHOSEN, 1)
    assert isinstance(progress, Progress) and len(progress.pairs) == 1
    sides = ["".join(token.text for token in run.tokens) for run in progress.pairs[0]]
    assert sides == [f"I look.\n{PARIS}"] * 2


def test_the_size_of_a_prompt_counts_the_tools(db: Database) -> None:
    chat = chatting(db)
    whole = chat.session.chat.size(OWNER, None, "", QUESTION, None)
    chat.session.tool_servers.switch([])
    bare = chat.session.chat.size(OWNER, None, "", QUESTION, None)
    assert whole is not None and bare is not None and whole.tokens > bare.tokens + 500


def test_a_server_sees_few_variables_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, connections: Connections
) -> None:
    monkeypatch.setenv("STRATA_SERVER_KEY", "secret")
    server = ToolServer("fresh", "Tests", COMMAND)
    names = connections.call(server, ToolCall("1", "environment", "{}"), Stop()).split()
    assert "PATH" in names and "STRATA_SERVER_KEY" not in names


def test_a_result_is_read_as_text() -> None:
    def read(content: list[Any], **more: Any) -> str:
        return text_of(CallToolResult.model_validate({"content": content, **more}))

    assert read([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "a\nb"
    picture = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
    assert read([picture]) == "[image: image/png]"
    link = {"type": "resource_link", "uri": "file:///x", "name": "x"}
    assert read([link]) == "[resource_link: file:///x]"
    inside = {"type": "resource", "resource": {"uri": "file:///x", "text": "words"}}
    assert read([inside]) == "words"
    assert read([], structuredContent={"ä": 1}) == '{"ä": 1}'
    assert read([], isError=True) == "The tool reports an error: "


def test_a_server_cannot_send_calls_elsewhere(db: Database) -> None:
    heard = list[str]()

    async def other(request: Request) -> Response:
        heard.append(request.url.path)
        return Response(status_code=404)

    async def moved(request: Request) -> Response:
        return RedirectResponse(f"http://127.0.0.1:{ports[1]}/mcp", 307)

    ports = [pick_port("127.0.0.1", 0) for _ in range(2)]
    apps = [Starlette(routes=[Route("/mcp", to, methods=["POST"])]) for to in (moved, other)]
    with listening(apps[0], ports[0]), listening(apps[1], ports[1]):
        servers = on_toy(db).tool_servers
        with pytest.raises(ToolError, match="failed"):
            servers.add("Moved", f"http://127.0.0.1:{ports[0]}/mcp")
    assert heard == []


def test_a_call_that_is_only_thought_about_is_none(db: Database) -> None:
    chat = chatting(db)
    says = [f"<think>Maybe {PARIS}</think>\n\nNo need."]
    chat.toy.script = lambda prompt: says[-1]
    chat.ask()
    assert chat.pending is None
    says.append(f"<think>Maybe {ROME}</think>\n\n{PARIS}")
    chat.ask()
    assert chat.pending is not None and "Paris" in chat.pending.call.arguments
    says.append("Done.")
    chat.decide("once")
    assert chat.results == ["Paris: 21 degrees"] and chat.last == "Done."
    assert f"<think>Maybe {ROME}</think>\n\n\n{PARIS}<|end|>" in chat.toy.prompts[-1]


def test_a_call_of_llama_runs(db: Database) -> None:
    chat = chatting(db, form=FORMS[-1])
    text = '{"name": "weather", "parameters": {"city": "Paris"}}'
    chat.toy.script = lambda prompt: "Done." if "<tool_response>" in prompt else text
    chat.ask()
    chat.decide("once")
    assert chat.results == ["Paris: 21 degrees"] and chat.last == "Done."
    assert f"<|assistant|>\n{PARIS}<|end|>" in chat.toy.prompts[-1], "without the text of the call"
