"""The list's handlers: what an import stores, and that whatever is stored can be opened."""

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import orjson
import pytest

from app.service.generation import Answer
from app.service.preferences import Preferences
from app.service.session import Session
from app.web.tabs import chat, conversations, messages, settings
from engine.engine import Request
from engine.local import Local
from engine.settings import Drafting
from storage.database import Database
from storage.traces import Traces
from tests.service.test_session import ask, soon
from tests.support.inside import OWNER, Held, forgotten
from tests.web.test_tabs import made

REQUEST: Any = SimpleNamespace(username=None, session_hash="page")


@pytest.fixture
def toy() -> Held:
    return Held()


@pytest.fixture
def session(db: Database, toy: Held) -> Session:
    return Session(Local(backend=toy), db)


@pytest.fixture
def on(session: Session) -> conversations.Handlers:
    def build() -> conversations.Handlers:
        with gr.Blocks():
            shelf, talk = conversations.build(), chat.build(session)
            controls = settings.build(session)
            return conversations.Handlers(
                session, shelf, talk, controls, gr.State(None), gr.BrowserState({})
            )

    return made(build)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    notices: list[str] = []
    monkeypatch.setattr(gr, "Warning", notices.append)
    return notices


def exported(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "format": "strata-conversation",
        "version": 1,
        "title": "A talk",
        "system_prompt": "Be brief.",
        "settings": {},
        "messages": [{"role": "user", "content": "Hi"}],
    }
    return data | changes


def said(**values: object) -> gr.EventData:
    """What the list tells of an entry."""
    return gr.EventData(None, values)


def entries(on: conversations.Handlers, search: str = "") -> list[dict[str, Any]]:
    """What the list shows."""
    value: Any = on.redraw(REQUEST, None, search, {})[on.parts.listed]
    return [item for group in value["groups"] for item in group["items"]]


def shown(on: conversations.Handlers, updates: dict[Any, Any]) -> Any:
    """What the page is sent for the transcript, after the way it is sent."""
    return json.loads(orjson.dumps(updates[on.talk.tokens]))["turns"]


BAD = [
    {"generation": {"stop": 5}},
    {"generation": {"stop": "text"}},
    {"generation": {"stop": [5]}},
    {"generation": 5},
    {"generation": None},
    {"generation": {"sampling": "x"}},
    {"generation": {"sampling": {"temperature": "hot"}}},
    {"generation": {"sampling": {"seed": 1.5}}},
    {"generation": {"max_tokens": True}},
    {"generation": {"more": 1}},
    {"drafting": [["tiers", 5]]},
    {"drafting": {"tiers": 5}},
    {"drafting": {"tiers": "context"}},
    {"drafting": {"tiers": [5]}},
    {"drafting": {"budget": ["fixed"]}},
    {"method": 5},
    {"method": "magic"},
    {"method": "m" * 60_000},
    {"fresh_seed": "no"},
    {"seed": 3},
]


def test_an_export_with_settings_of_earlier_versions_is_imported_with_the_others(
    on: conversations.Handlers, told: list[str], tmp_path: Path
) -> None:
    drafting = {"policy": "hierarchical", "harvest": True, "budget": "fixed", "nodes": 9}
    file = tmp_path / "upload.json"
    file.write_text(json.dumps(exported(settings={"method": "hd", "drafting": drafting})))
    on.import_(REQUEST, str(file), {})
    (item,) = on.session.chat.conversations(OWNER).list()
    assert Preferences.from_mapping(item.settings).drafting == Drafting(budget="fixed", nodes=9)
    assert not any("could not be used" in notice for notice in told)


@pytest.mark.parametrize("bad", BAD)
def test_settings_that_cannot_be_used_are_not_imported(
    on: conversations.Handlers, told: list[str], tmp_path: Path, bad: dict[str, Any]
) -> None:
    file = tmp_path / "upload.json"
    file.write_text(json.dumps([exported(settings=bad), exported()]))
    updates = on.import_(REQUEST, str(file), {})
    assert [turn["text"] for turn in shown(on, updates)] == ["Hi"]
    stored = [item.settings for item in on.session.chat.conversations(OWNER).list()]
    assert stored == [{}, {}]
    (notice,) = told
    assert "settings of 1 conversations could not be used" in notice and len(notice) < 500


@pytest.mark.parametrize("bad", BAD)
def test_stored_settings_that_cannot_be_used_give_way_to_the_usual_ones(
    on: conversations.Handlers, told: list[str], bad: dict[str, Any]
) -> None:
    store = on.session.chat.conversations(OWNER)
    id = store.create().id
    store.append(id, "user", "Hi")
    store.set_settings(id, bad)
    updates = on.open_(said(id=id), REQUEST, {})
    assert updates[on.current] == id and [turn["text"] for turn in shown(on, updates)] == ["Hi"]
    (notice,) = told
    assert notice.startswith("The settings of this conversation cannot be used")
    _, read = on.controls.read([updates[part] for part in on.controls.inputs])
    assert read == Preferences()


def test_settings_that_can_be_used_are_imported_and_shown(
    on: conversations.Handlers, told: list[str], tmp_path: Path
) -> None:
    chosen = Preferences(method="hsd:small@8", fresh_seed=False)
    file = tmp_path / "upload.json"
    file.write_text(json.dumps(exported(settings=chosen.mapping())))
    updates = on.import_(REQUEST, str(file), {})
    values = [updates[part] for part in on.controls.inputs]
    assert on.controls.read(values) == ("Be brief.", chosen) and told == []


def test_an_imported_system_prompt_is_shown_without_settings(
    on: conversations.Handlers, tmp_path: Path
) -> None:
    file = tmp_path / "upload.json"
    file.write_text(
        json.dumps([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}])
    )
    updates = on.import_(REQUEST, str(file), {})
    assert updates[on.controls.system] == "Be kind."


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps(exported()), ""),
        ("not json", "no readable JSON"),
        ("[" * 100_000, "too deeply"),
        ('{"a": 1}', "formats that can be read"),
        (None, "cannot be read"),
    ],
)
def test_an_upload_is_deleted_whatever_came_of_it(
    on: conversations.Handlers, told: list[str], tmp_path: Path, content: str | None, words: str
) -> None:
    file = tmp_path / "upload.json"
    if content is None:
        file.mkdir()
        (file / "inside").touch()
    else:
        file.write_text(content)
    on.import_(REQUEST, str(file), {})
    assert not file.is_file()
    assert len(told) == bool(words) and all(words in notice for notice in told)


def test_lone_surrogates_reach_the_page_as_replacement_marks(
    on: conversations.Handlers, tmp_path: Path
) -> None:
    piece = ["a\ud800", "draft:\udfff", 0, 0, 0, 0.5]
    message = {"role": "assistant", "content": "a\ud800", "pieces": [piece]}
    file = tmp_path / "upload.json"
    file.write_text(json.dumps(exported(messages=[message], title="\ud800")))
    updates = on.import_(REQUEST, str(file), {})
    (turn,), names = shown(on, updates), updates[on.talk.tokens]["sources"]
    assert turn["groups"][0][3] == ["a\ufffd"] and names == ["draft:\ufffd"]


def damage(table: str, column: str, value: str) -> Callable[[Database], None]:
    def act(db: Database) -> None:
        with db.write() as handle:
            handle.execute(f"UPDATE {table} SET {column} = {value}")

    return act


@pytest.mark.parametrize(
    "act",
    [
        damage("messages", "pieces", "'nonsense'"),
        damage("messages", "pieces", '\'[["\\ud800","m",0,0,0,0.5]]\''),
        damage("messages", "content", "CAST(x'ff' AS TEXT)"),
        damage("messages", "content", "x'ff'"),
        damage("messages", "created", "'text'"),
        damage("conversations", "settings", "'{'"),
        damage("conversations", "settings", "CAST(x'ff' AS TEXT)"),
        damage("conversations", "title", "x'ff'"),
        damage("conversations", "updated", "'text'"),
        damage("runs", "settings", "'{'"),
        damage("runs", "prefill_seconds", "'text'"),
        damage("steps", "tokens", "'{'"),
        damage("steps", "levels", "'[7]'"),
    ],
)
def test_a_damaged_conversation_can_be_opened_and_deleted(
    on: conversations.Handlers, told: list[str], db: Database, act: Callable[[Database], None]
) -> None:
    id, _ = ask(on.session)
    sound = on.session.chat.conversations(OWNER).create("sound").id
    forgotten(on.session)
    act(db)
    assert {entry["id"] for entry in entries(on)} == {id, sound}
    updates = on.open_(said(id=id), REQUEST, {})
    assert updates[on.current] == id and len(shown(on, updates)) == 2
    on.remove(said(id=id), REQUEST, id, {})
    assert [item.id for item in on.session.chat.conversations(OWNER).list()] == [sound]
    assert Traces(db, OWNER).history() == []


def groups(on: conversations.Handlers, search: str = "") -> list[tuple[str, list[str]]]:
    """The names of the list's groups, each with its titles."""
    value: Any = on.redraw(REQUEST, None, search, {})[on.parts.listed]
    return [
        (group["name"], [item["title"] for item in group["items"]]) for group in value["groups"]
    ]


def test_the_list_is_in_groups(on: conversations.Handlers, db: Database) -> None:
    ids = {name: on.session.chat.conversations(OWNER).create(name).id for name in "abcdefg"}
    on.pin(said(id=ids["a"], pinned=True), REQUEST, {})
    for name, folder in (("b", "Work"), ("c", "home"), ("d", "Work")):
        on.file(said(id=ids[name], folder=folder), REQUEST, {})
    on.rename(said(id=ids["e"], title="E!"), REQUEST, {})
    for name, days in (("f", 3), ("g", 30)):
        with db.write() as handle:
            query = "UPDATE conversations SET updated = updated - 86400 * ? WHERE id = ?"
            handle.execute(query, [days, ids[name]])
    assert groups(on) == [
        ("Pinned", ["a"]),
        ("home", ["c"]),
        ("Work", ["d", "b"]),
        ("Today", ["E!"]),
        ("Last seven days", ["f"]),
        ("Earlier", ["g"]),
    ]
    on.pin(said(id=ids["a"], pinned=False), REQUEST, {})
    assert groups(on)[-3] == ("Today", ["E!", "a"]) and groups(on, "b") == [("", ["b"])]


def test_a_search_leads_to_the_version_that_holds_the_words(on: conversations.Handlers) -> None:
    store = on.session.chat.conversations(OWNER)
    id = store.create("talk").id
    asked_first = store.append(id, "user", "Of whales, please")
    store.beside(id, asked_first.id, "user", "Of birds, please")
    (entry,) = entries(on, "whales")
    assert entry["hit"] == ["Of ", "whales", ", please"]
    updates = on.open_(said(**entry), REQUEST, {})
    assert [turn["text"] for turn in shown(on, updates)] == ["Of whales, please"]


def test_what_was_deleted_is_offered_back(on: conversations.Handlers) -> None:
    store = on.session.chat.conversations(OWNER)
    here, there = store.create("here").id, store.create("there").id
    store.append(here, "user", "Hi")
    on.open_(said(id=here), REQUEST, {})
    updates: Any = on.remove(said(id=there), REQUEST, here, {})
    assert updates[on.current] == here and [each.id for each in store.list()] == [here]
    assert updates[on.talk.tokens]["undo"]["words"] == conversations.DELETED
    gone: Any = on.remove(said(id=here), REQUEST, here, {})
    assert gone[on.current] is None and store.list() == []
    for each in (gone, updates):
        on.session.chat.undo(OWNER, each[on.talk.tokens]["undo"]["token"])
    assert {each.id for each in store.list()} == {here, there}


def fetched(on: conversations.Handlers, offer: str) -> tuple[str, bytes]:
    """The file that a page was offered."""
    told = json.loads(offer)
    download = on.session.downloads.take(told["token"])
    assert download is not None and download.name == told["name"]
    assert on.session.downloads.take(told["token"]) is None, "once"
    return download.name, b"".join(download.parts())


def test_one_conversation_is_exported_in_every_format(on: conversations.Handlers) -> None:
    store = on.session.chat.conversations(OWNER)
    id = store.create("A <b>: talk/../?").id
    store.append(id, "user", "Hi <b>")
    wanted = {"json": '"Hi <b>"', "markdown": "## You\n\nHi <b>", "page": "Hi &lt;b&gt;"}
    for kind, words in wanted.items():
        name, content = fetched(on, on.export(said(id=id, kind=kind), REQUEST, {}))
        assert words in content.decode() and name.startswith("A b talk.")


def test_all_conversations_are_exported_and_come_back(
    on: conversations.Handlers, told: list[str], tmp_path: Path
) -> None:
    assert on.export_all("json")(REQUEST, {})[0] == "" and "no conversation" in told.pop()
    store = on.session.chat.conversations(OWNER)
    for title in ("same", "same", "other"):
        store.append(store.create(title).id, "user", f"Hi {title}")
    for kind, suffix in (("markdown", "md"), ("page", "html")):
        name, content = fetched(on, on.export_all(kind)(REQUEST, {})[0])
        assert name == f"strata-conversations-{suffix}.zip"
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert archive.testzip() is None
            assert archive.namelist() == [
                f"{n:04} {title}.{suffix}" for n, title in enumerate(("other", "same", "same"), 1)
            ]
    name, content = fetched(on, on.export_all("json")(REQUEST, {})[0])
    file = tmp_path / name
    file.write_bytes(content)
    on.import_(REQUEST, str(file), {})
    assert [each.title for each in store.list()] == ["other", "same", "same"] * 2 and told == []


def test_another_guest_gets_nothing(on: conversations.Handlers, told: list[str]) -> None:
    id = on.session.chat.conversations(OWNER).create("mine").id
    other: Any = SimpleNamespace(username="guest", session_hash="other")
    memory = {"browser": "x"}
    assert on.export(said(id=id), other, memory) == ""
    on.rename(said(id=id, title="stolen"), other, memory)
    on.remove(said(id=id), other, None, memory)
    assert len(told) == 3 and all("There is no conversation" in notice for notice in told)
    assert [title for _, titles in groups(on) for title in titles] == ["mine"]


def test_the_list_shows_the_newest_and_finds_the_others(
    on: conversations.Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "SHOWN", 2)
    for name in ("one", "two", "three"):
        on.session.chat.conversations(OWNER).create(name)

    assert [entry["title"] for entry in entries(on)] == ["three", "two"]
    value: Any = on.redraw(REQUEST, None, "", {})[on.parts.listed]
    assert value["more"].startswith("1 more")
    assert [entry["title"] for entry in entries(on, "one")] == ["one"]
    value = on.redraw(REQUEST, None, "nothing like it", {})[on.parts.listed]
    assert value["groups"] == [] and value["empty"]


def test_an_event_brings_the_list_where_the_page_shows_another(
    session: Session, on: conversations.Handlers
) -> None:
    store, brought = session.chat.conversations(OWNER), on.parts.listed

    def handler(data: gr.EventData, request: Any, word: str) -> dict[Any, Any]:
        if word:
            session.viewing["page"] = store.create(word).id
        return {on.current: word}

    def build() -> Any:
        with gr.Blocks():
            return on.with_list(handler, [on.current], [on.current])

    event = made(build)
    assert event.outputs == [on.current, brought] and len(event.inputs) == 4

    def said(word: str) -> dict[Any, Any]:
        found: dict[Any, Any] = event.handler(gr.EventData(None, {}), REQUEST, None, "", {}, word)
        assert found.pop(on.current) == word
        return found

    value = said("one")[brought]
    assert [item["title"] for item in value["groups"][0]["items"]] == ["one"]
    assert value["current"] == session.viewing["page"], "what is open now, not what was"
    assert said("") == {}, "the page shows it already"
    again: Any = on.redraw(REQUEST, session.viewing["page"], "", {})[on.parts.listed]
    assert again["drawn"] != value["drawn"], "who asks for it gets it"
    assert said("two")[brought]["groups"]


@pytest.fixture
def talking(session: Session) -> chat.Handlers:
    def build() -> chat.Handlers:
        with gr.Blocks():
            talk, controls = chat.build(session), settings.build(session)
            return chat.Handlers(session, talk, controls, gr.State(None), gr.BrowserState({}))

    return made(build)


def test_a_page_is_told_which_answer_to_follow_and_how_far_all_has_changed(
    session: Session, toy: Held, talking: chat.Handlers
) -> None:
    """The stored messages, and which answer to follow: what there is of it comes by its stream."""
    toy.allow(1)
    other = session.engine.generate(Request(prompt=(1, 2)))
    begun = asked(talking, "hello")
    conversation, tokens = begun[talking.current], talking.parts.tokens
    assert [turn["text"] for turn in begun[tokens]["turns"]] == ["hello"]
    answer = session.generations.find(OWNER, conversation)
    assert answer is not None and begun[tokens]["stream"] == {"token": answer.token}
    before = begun[tokens]["watch"]
    assert session.watches.place(before["token"]) == (OWNER, conversation)
    seen = talking.look(REQUEST, conversation, {})[tokens]
    assert seen["turns"] == [] and seen["stream"] == {"token": answer.token}
    other.close()
    toy.allow()
    assert soon(lambda: answer.over)
    seen = talking.look(REQUEST, conversation, {})[tokens]
    assert [turn["key"] for turn in seen["turns"]] == [answer.message_id] and "stream" not in seen
    assert seen["watch"]["token"] == before["token"]
    assert seen["watch"]["revision"] > before["revision"]


def asked(on: chat.Handlers, text: str, conversation: str | None = None) -> dict[Any, Any]:
    """What a message changes on the page."""
    data = gr.EventData(None, {"number": 1, "text": text, "conversation": conversation})
    values = (part.value for part in on.controls.inputs)
    return on.say(data, REQUEST, conversation, None, {}, *values)


def over(on: chat.Handlers, answer: Answer, drawn: int) -> dict[Any, Any]:
    """What its end changes on a page that has drawn so many tokens."""
    data = gr.EventData(None, {"token": answer.token, "drawn": drawn})
    return on.over(data, REQUEST, answer.conversation, {})


def test_a_page_is_sent_no_message_twice(session: Session, talking: chat.Handlers) -> None:
    tokens, keys = talking.parts.tokens, list[str]()
    conversation: str | None = None
    for number, text in enumerate(("hello", "there", "again")):
        begun = asked(talking, text, conversation)
        conversation = str(begun[talking.current])
        (turn,) = begun[tokens]["turns"]
        assert turn["text"] == text and begun[tokens]["kept"] == 2 * number == len(keys)
        assert begun[tokens]["after"] == (keys[-1] if keys else "")
        answer = session.generations.get(begun[tokens]["stream"]["token"])
        assert answer is not None and soon(lambda answer=answer: answer.over)
        left = over(talking, answer, answer.tokens)
        assert left[tokens]["turns"] == [] and left[tokens]["adopt"]["key"] == answer.message_id
        keys += [turn["key"], answer.message_id]
    again = talking.resend(REQUEST, conversation, {})[tokens]
    assert [turn["key"] for turn in again["turns"]] == keys, "unless it has drawn something else"


def test_a_page_that_missed_some_of_an_answer_is_sent_it(
    session: Session, talking: chat.Handlers
) -> None:
    begun = asked(talking, "hello")
    answer = session.generations.get(begun[talking.parts.tokens]["stream"]["token"])
    assert answer is not None and soon(lambda: answer.over)
    left = over(talking, answer, answer.tokens - 1)[talking.parts.tokens]
    assert [turn["key"] for turn in left["turns"]] == [answer.message_id] and "adopt" not in left


def test_nobody_is_told_of_another_ones_answer(session: Session, talking: chat.Handlers) -> None:
    begun = asked(talking, "hello")
    token = begun[talking.parts.tokens]["stream"]["token"]
    data = gr.EventData(None, {"token": token, "drawn": 10})
    for owner, conversation in (
        ("other", begun[talking.current]),
        (OWNER, "elsewhere"),
        (OWNER, None),
    ):
        assert talking.answer_of(data, owner, conversation) == (None, 10)
    for nonsense in (None, {}, {"token": 3, "drawn": "x"}, {"token": [], "drawn": -1}):
        made_up = gr.EventData(None, nonsense)
        assert talking.answer_of(made_up, OWNER, begun[talking.current]) == (None, 0)
    answer = session.generations.get(token)
    assert answer is not None and soon(lambda: answer.over)


def test_nothing_is_said_into_an_answer_that_grows(
    session: Session, toy: Held, talking: chat.Handlers, told: list[str]
) -> None:
    """It would be answered without knowing that answer, which would not be kept."""
    toy.allow(1)
    other = session.engine.generate(Request(prompt=(1, 2)))
    conversation = asked(talking, "hello")[talking.current]
    refused = {talking.parts.written.channels["sent"]: {"number": 1, "ok": False}}
    assert asked(talking, "too early", conversation) == refused, "it stays written"
    values = [part.value for part in talking.controls.inputs]
    (said,) = session.chat.conversations(OWNER).messages(conversation)
    own = talking.parts, talking.controls, talking.current, talking.memory
    acting = messages.Actions(session, *own)
    for act in ("again", "on", "remove", "branch", "show"):
        pressed = gr.EventData(None, {"act": act, "message": said.id})
        acting.act(pressed, REQUEST, conversation, {}, *values)
    data = gr.EventData(None, {"text": "differently", "conversation": conversation})
    talking.say(data, REQUEST, conversation, said.id, {}, *values)
    assert len(told) == 7 and all("still being answered" in words for words in told)
    assert [m.content for m in session.chat.conversations(OWNER).messages(conversation)] == [
        "hello"
    ]
    answer = session.generations.find(OWNER, conversation)
    session.tasks.stop(OWNER, conversation)
    assert answer is not None and soon(lambda: answer.over) and not answer.error
    other.close()
    toy.allow()
