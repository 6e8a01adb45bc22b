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

from app.service.answering import Answer
from app.service.pages import THE_LIST, Download
from app.service.preferences import Preferences
from app.service.session import Session
from app.web.kit import Visit
from app.web.tabs import conversations, settings
from app.web.tabs.chat import Chat
from app.web.tabs.conversations import ConversationList
from engine.engine import Request
from engine.errors import StorageError
from engine.settings import Drafting
from storage.database import Database
from storage.traces import Traces
from tests.service.test_session import ask, soon
from tests.support.blocks import made, tab_of
from tests.support.inside import OWNER, Held, forgotten, selects

PAGE = "page"
VISIT = Visit(OWNER, PAGE, {})


@pytest.fixture
def on(session: Session) -> ConversationList:
    def build() -> ConversationList:
        memory, current = gr.BrowserState({}), gr.State(None)
        with gr.Blocks():
            found = ConversationList(session, memory, current)
            found.wire(Chat(session, memory, current), settings.Settings(session, memory))
            return found

    return made(build)


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


def event_data(**values: object) -> gr.EventData:
    return gr.EventData(None, values)


def listed(on: ConversationList, search: str = "") -> dict[str, Any]:
    value: Any = on.look(VISIT, None, search)[on.listed]
    return dict(value)


def entries(on: ConversationList, search: str = "") -> list[dict[str, Any]]:
    return [item for group in listed(on, search)["groups"] for item in group["items"]]


def shown(on: ConversationList, updates: dict[Any, Any]) -> Any:
    """What the page is sent for the transcript, after the way it is sent."""
    return json.loads(orjson.dumps(updates[on.chat.tokens]))["turns"]


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


@pytest.fixture
def imported(on: ConversationList, tmp_path: Path) -> Callable[..., dict[Any, Any]]:
    def act(content: object) -> dict[Any, Any]:
        file = tmp_path / "upload.json"
        file.write_text(json.dumps(content))
        return on.import_(VISIT, str(file))

    return act


Imported = Callable[..., dict[Any, Any]]


def test_an_export_with_settings_of_earlier_versions_is_imported_with_the_others(
    on: ConversationList, warned: list[str], imported: Imported
) -> None:
    drafting = {"policy": "hierarchical", "harvest": True, "budget": "fixed", "nodes": 9}
    imported(exported(settings={"method": "hd", "drafting": drafting}))
    (item,) = on.session.chat.conversations(OWNER).list()
    assert Preferences.from_mapping(item.settings).drafting == Drafting(budget="fixed", nodes=9)
    assert not any("could not be used" in notice for notice in warned)


def test_settings_that_cannot_be_used_are_neither_imported_nor_shown(
    on: ConversationList, warned: list[str], imported: Imported
) -> None:
    store = on.session.chat.conversations(OWNER)
    for bad in BAD:
        warned.clear()
        updates = imported([exported(settings=bad), exported()])
        assert [turn["text"] for turn in shown(on, updates)] == ["Hi"]
        assert [item.settings for item in store.list()] == [{}, {}]
        assert "settings of 1 conversations could not be used" in warned[0] and len(warned[0]) < 500
        id = store.create().id
        store.append(id, "user", "Hi")
        store.set_settings(id, bad)
        updates = on.open(VISIT, event_data(id=id))
        assert updates[on.current] == id and [turn["text"] for turn in shown(on, updates)] == ["Hi"]
        _, notice = warned
        assert notice.startswith("The settings of this conversation cannot be used")
        _, read = on.controls.read([updates[part] for part in on.controls.inputs])
        assert read == Preferences()
        for item in store.list():
            store.delete(item.id)


def test_settings_that_can_be_used_are_imported_and_shown(
    on: ConversationList, warned: list[str], imported: Imported
) -> None:
    chosen = Preferences(method="hsd:small@8", fresh_seed=False)
    updates = imported(exported(settings=chosen.mapping()))
    values = [updates[part] for part in on.controls.inputs]
    assert on.controls.read(values) == ("Be brief.", chosen) and warned == []
    prompts = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert imported(prompts)[on.controls.system] == "Be kind.", "also without settings"


def test_an_import_without_settings_keeps_those_that_it_is_answered_with(
    on: ConversationList, toy: Held, warned: list[str], imported: Imported
) -> None:
    controls, chat = on.controls, on.chat
    chat.controls = controls
    id = imported(exported())[on.current]
    chosen = Preferences(method="plain", fresh_seed=False)
    data = event_data(number=1, text="hello", conversation=id)
    shown = chat.say(VISIT, data, id, *controls.show("Be brief.", chosen))
    answer = on.session.generations.get(shown[chat.tokens]["stream"]["token"])
    assert answer is not None and soon(lambda: answer.over) and warned == []
    updates = on.open(VISIT, event_data(id=id))
    values = [updates[part] for part in controls.inputs]
    assert controls.read(values) == ("Be brief.", chosen)


def test_a_new_conversation_comes_with_the_settings_of_its_preset(
    on: ConversationList, warned: list[str]
) -> None:
    """In one update, so that nothing is sent with the settings from before."""
    chosen = Preferences(method="plain", fresh_seed=False)
    made = on.session.presets.save(OWNER, "mine", "Be brief.", chosen)
    ready, id = on.chat.composer.channels["ready"], on.session.chat.conversations(OWNER).create().id
    on.open(VISIT, event_data(id=id))
    updates = on.new(VISIT, made.id)
    values = [updates[part] for part in on.controls.inputs]
    assert on.controls.read(values) == ("Be brief.", chosen) and updates[on.current] is None
    assert updates[ready] != on.new(VISIT, "")[ready], "Gradio sends no value twice"
    on.session.presets.delete(OWNER, made.id)
    assert warned == [] and on.controls.system not in on.new(VISIT, "")
    assert on.new(VISIT, made.id)[on.current] is None and "no preset" in warned[0]


def test_a_page_says_what_an_import_left_out(
    on: ConversationList, warned: list[str], imported: Imported
) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {}}]
    updates = imported([{"role": "user", "content": parts}])
    assert [turn["text"] for turn in shown(on, updates)] == ["What is this?"]
    assert warned == ["These parts of the conversations were left out: images (1)."]
    assert {".json", ".jsonl", ".zip"} == set(on.import_button.file_types or ())


def test_an_upload_is_deleted_whatever_came_of_it(
    on: ConversationList, warned: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "upload.json"
    for content, expected in (
        (json.dumps(exported()), []),
        ("not json", ["no readable JSON"]),
        ("[" * 100_000, ["too deeply"]),
        ('{"a": 1}', ["formats that can be read"]),
    ):
        file.write_text(content)
        warned.clear()
        on.import_(VISIT, str(file))
        assert not file.exists() and len(warned) == len(expected)
        assert all(word in notice for word, notice in zip(expected, warned, strict=True))
    (file / "a folder").mkdir(parents=True)
    on.import_(VISIT, str(file))
    assert "cannot be read" in warned[-1] and len(warned) == 2


def test_lone_surrogates_reach_the_page_as_replacement_marks(
    on: ConversationList, imported: Imported
) -> None:
    piece = ["a\ud800", "draft:\udfff", 0, 0, 0, 0.5]
    message = {"role": "assistant", "content": "a\ud800", "pieces": [piece]}
    updates = imported(exported(messages=[message], title="\ud800"))
    (turn,), names = shown(on, updates), updates[on.chat.tokens]["sources"]
    assert turn["groups"][0][3] == ["a\ufffd"] and names == ["draft:\ufffd"]


def damage(table: str, column: str, value: str) -> Callable[[Database], None]:
    def act(db: Database) -> None:
        with db.write() as handle:
            handle.execute(f"UPDATE {table} SET {column} = {value}")

    return act


@pytest.mark.soak(stay=5)
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
    on: ConversationList, warned: list[str], db: Database, act: Callable[[Database], None]
) -> None:
    id, _ = ask(on.session)
    sound = on.session.chat.conversations(OWNER).create("sound").id
    forgotten(on.session)
    act(db)
    assert {entry["id"] for entry in entries(on)} == {id, sound}
    updates = on.open(VISIT, event_data(id=id))
    assert updates[on.current] == id and len(shown(on, updates)) == 2
    on.remove(VISIT, event_data(id=id), id)
    assert [item.id for item in on.session.chat.conversations(OWNER).list()] == [sound]
    assert Traces(db, OWNER).history() == []


def groups(on: ConversationList, search: str = "") -> list[tuple[str, list[str]]]:
    return [
        (group["name"], [item["title"] for item in group["items"]])
        for group in listed(on, search)["groups"]
    ]


def test_the_list_is_in_groups(on: ConversationList, db: Database) -> None:
    ids = {name: on.session.chat.conversations(OWNER).create(name).id for name in "abcdefg"}
    on.pin(OWNER, event_data(id=ids["a"], pinned=True))
    for name, folder in (("b", "Work"), ("c", "home"), ("d", "Work")):
        on.file(OWNER, event_data(id=ids[name], folder=folder))
    on.rename(OWNER, event_data(id=ids["e"], title="E!"))
    for name, days in (("f", 3), ("g", 30)):
        with db.write() as handle:
            query = "UPDATE conversations SET updated = updated - 86400 * ? WHERE id = ?"
            handle.execute(query, [days, ids[name]])
    assert groups(on) == [
        ("Pinned", ["a"]),
        ("home", ["c"]),
        ("Work", ["d", "b"]),
        ("Today", ["E!"]),
        ("Last 7 days", ["f"]),
        ("Earlier", ["g"]),
    ]
    on.pin(OWNER, event_data(id=ids["a"], pinned=False))
    assert groups(on)[-3] == ("Today", ["E!", "a"]) and groups(on, "b") == [("", ["b"])]


def test_a_search_leads_to_the_version_that_holds_the_words(on: ConversationList) -> None:
    store = on.session.chat.conversations(OWNER)
    id = store.create("talk").id
    asked_first = store.append(id, "user", "Of whales, please")
    store.append(id, "user", "Of birds, please", version_of=asked_first.id)
    (entry,) = entries(on, "whales")
    assert entry["hit"] == ["Of ", "whales", ", please"]
    updates = on.open(VISIT, event_data(**entry))
    assert [turn["text"] for turn in shown(on, updates)] == ["Of whales, please"]


def fetched(on: ConversationList, file: Download) -> tuple[str, bytes]:
    token = on.session.downloads.offer(file)
    assert on.session.downloads.take(token) is file
    assert on.session.downloads.take(token) is None, "once"
    return file.name, b"".join(file.parts())


def test_one_conversation_is_exported_in_every_format(on: ConversationList) -> None:
    store = on.session.chat.conversations(OWNER)
    id = store.create("A <b>: talk/../?").id
    store.append(id, "user", "Hi <b>")
    expected = {"json": '"Hi <b>"', "markdown": "## You\n\nHi <b>", "page": "Hi &lt;b&gt;"}
    for kind, text in expected.items():
        name, content = fetched(on, on.export(OWNER, event_data(id=id, kind=kind)))
        assert text in content.decode() and name.startswith("A b talk.")


def test_all_conversations_are_exported_and_come_back(
    on: ConversationList, warned: list[str], tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match="no conversation"):
        on.export_all("json", OWNER)
    store = on.session.chat.conversations(OWNER)
    for title in ("same", "same", "other"):
        store.append(store.create(title).id, "user", f"Hi {title}")
    for kind, suffix in (("markdown", "md"), ("page", "html")):
        name, content = fetched(on, on.export_all(kind, OWNER))
        assert name == f"strata-conversations-{suffix}.zip"
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert archive.testzip() is None
            assert archive.namelist() == [
                f"{n:04} {title}.{suffix}" for n, title in enumerate(("other", "same", "same"), 1)
            ]
    name, content = fetched(on, on.export_all("json", OWNER))
    file = tmp_path / name
    file.write_bytes(content)
    on.import_(VISIT._replace(owner="another"), str(file))
    theirs = on.session.chat.conversations("another").list()
    assert [each.title for each in theirs] == ["other", "same", "same"] and warned == []


def test_what_is_here_already_is_opened_and_not_imported_again(
    on: ConversationList, warned: list[str], imported: Imported
) -> None:
    store = on.session.chat.conversations(OWNER)
    one, other = exported(), exported(title="Another talk")
    first = imported(one)[on.current]
    store.set_settings(first, Preferences(method="plain").mapping())
    store.pin(first, True)
    again = imported(one)
    assert again[on.current] == first and len(store.list()) == 1
    assert warned.pop().startswith("This conversation is here already")
    made = imported([one, other])[on.current]
    assert store.get(made).title == "Another talk" and len(store.list()) == 2
    assert warned.pop().startswith("1 of 2 conversations are here already")
    assert imported([other, one])[on.current] == made and len(store.list()) == 2
    assert warned.pop().startswith("2 of 2 conversations are here already")
    store.append(first, "user", "And more")
    assert imported(one)[on.current] not in (first, made) and warned == [], "it has gone on here"


def test_another_guest_gets_nothing(on: ConversationList) -> None:
    id, guest = on.session.chat.conversations(OWNER).create("mine").id, "guest:x"
    for call in (
        lambda: on.export(guest, event_data(id=id)),
        lambda: on.rename(guest, event_data(id=id, title="stolen")),
        lambda: on.remove(Visit(guest, "other", {}), event_data(id=id), None),
    ):
        with pytest.raises(StorageError, match="There is no conversation"):
            call()
    assert [title for _, titles in groups(on) for title in titles] == ["mine"]


def test_the_list_shows_the_newest_and_finds_the_others(
    on: ConversationList, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "SHOWN", 2)
    for name in ("one", "two", "three"):
        on.session.chat.conversations(OWNER).create(name)
    assert [entry["title"] for entry in entries(on)] == ["three", "two"]
    assert listed(on)["more"].startswith("1 more")
    assert [entry["title"] for entry in entries(on, "one")] == ["one"]
    nothing = listed(on, "nothing like it")
    assert nothing["groups"] == [] and nothing["empty"]


def test_an_event_brings_the_list_where_the_page_shows_another(
    session: Session, on: ConversationList
) -> None:
    store, brought = session.chat.conversations(OWNER), on.listed

    def handler(
        visit: Visit, data: gr.EventData, conversation: str | None, word: str
    ) -> dict[Any, Any]:
        assert (visit, conversation) == (VISIT, None)
        if word:
            session.viewing["page"] = store.create(word).id
        return {on.current: word}

    def build() -> Any:
        with gr.Blocks():
            return on.with_list(handler, [on.current], [on.current])

    event = made(build)
    assert event.outputs == [on.current, brought] and len(event.inputs) == 4
    request = SimpleNamespace(username=None, session_hash=PAGE)

    def searched(word: str) -> dict[Any, Any]:
        found: dict[Any, Any] = event.handler(request, gr.EventData(None, {}), {}, None, "", word)
        assert found.pop(on.current) == word
        return found

    value = searched("one")[brought]
    assert [item["title"] for item in value["groups"][0]["items"]] == ["one"]
    assert value["current"] == session.viewing["page"], "what is open now, not what was"
    assert searched("") == {}, "the page shows it already"
    again: Any = on.look(VISIT, session.viewing["page"], "")[on.listed]
    assert again["number"] != value["number"], "who asks for it gets it"
    assert searched("two")[brought]["groups"]


def test_a_page_notices_that_another_one_changed_the_list(
    session: Session, on: ConversationList
) -> None:
    store, brought = session.chat.conversations(OWNER), on.listed

    def seen() -> tuple[str, int]:
        (watch,) = (value["watch"] for value in on.look(VISIT, None, "").values())
        return watch["token"], watch["revision"]

    others = session.chat.revision("another", THE_LIST)
    name, number = seen()
    assert session.change_tokens.keys.get(name) == (OWNER, THE_LIST) and seen() == (name, number)
    first, second = store.create("first").id, store.create("second").id
    changes: list[Callable[[], object]] = [
        lambda: store.rename(first, "renamed"),
        lambda: store.pin(first, True),
        lambda: store.file(second, "Work"),
        lambda: store.append(second, "user", "hello"),
        lambda: store.delete(first),
    ]
    numbers = [number, seen()[1]]
    for change in changes:
        change()
        numbers.append(seen()[1])
    assert numbers == sorted(set(numbers)), "each of them is another list, and the numbers grow"
    store.append(second, "assistant", "hello")
    assert seen()[1] == numbers[-1], "what the list does not show is no change of it"
    assert seen()[1] == session.chat.revision(OWNER, THE_LIST)
    assert session.chat.revision("another", THE_LIST) == others
    assert set(on.look(VISIT, second, "")) == {brought}, "the browser's memory stays"


@pytest.fixture
def talking(session: Session) -> Chat:
    return tab_of(Chat, session)


def test_a_page_learns_which_answer_to_follow_and_what_has_changed(
    session: Session, toy: Held, talking: Chat
) -> None:
    """The stored messages, and which answer to follow: what there is of it comes by its stream."""
    toy.allow(1)
    other = session.engine.generate(Request(prompt=(1, 2)))
    begun = begin_answer(talking, "hello")
    conversation, tokens = begun[talking.current], talking.tokens
    assert [turn["text"] for turn in begun[tokens]["turns"]] == ["hello"]
    answer = session.generations.find(OWNER, conversation)
    assert answer is not None and begun[tokens]["stream"] == {"token": answer.token}
    before = begun[tokens]["watch"]
    assert session.change_tokens.keys.get(before["token"]) == (OWNER, conversation)
    seen = talking.shown(VISIT, conversation)[tokens]
    assert seen["turns"] == [] and seen["stream"] == {"token": answer.token}
    unreached = over(talking, answer, 0)
    assert unreached[tokens]["stream"] == {"token": answer.token}, "it is not over yet"
    assert unreached[talking.composer.stop]["visible"]
    other.close()
    toy.allow()
    assert soon(lambda: answer.over)
    seen = talking.shown(VISIT, conversation)[tokens]
    assert [turn["key"] for turn in seen["turns"]] == [answer.message_id] and "stream" not in seen
    assert seen["watch"]["token"] == before["token"]
    assert seen["watch"]["revision"] > before["revision"]


def test_a_conversation_that_is_opened_is_read_once(
    session: Session, db: Database, talking: Chat
) -> None:
    """What it shows and the figures of its last answer come from the same messages."""
    conversation, _ = ask(session)
    asked, seen = selects(db), talking.shown(VISIT, conversation)
    assert len(seen[talking.tokens]["turns"]) == 2 and seen[talking.figures]["h"]
    for part in ("content, run, created", "FROM steps WHERE run IN"):
        assert sum(part in statement for statement in asked) == 1


def begin_answer(on: Chat, text: str, conversation: str | None = None) -> dict[Any, Any]:
    data = gr.EventData(None, {"number": 1, "text": text, "conversation": conversation})
    values = (part.value for part in on.controls.inputs)
    return on.say(VISIT, data, conversation, *values)


def over(on: Chat, answer: Answer, drawn: int) -> dict[Any, Any]:
    data = gr.EventData(None, {"token": answer.token, "drawn": drawn})
    return on.over(VISIT, data, answer.conversation)


def test_a_page_that_missed_some_of_an_answer_is_sent_it(
    session: Session, toy: Held, talking: Chat
) -> None:
    toy.allow(0)
    begun = begin_answer(talking, "hello")
    toy.allow()
    answer = session.generations.get(begun[talking.tokens]["stream"]["token"])
    assert answer is not None and soon(lambda: answer.over)
    left = over(talking, answer, answer.tokens - 1)[talking.tokens]
    assert [turn["key"] for turn in left["turns"]] == [answer.message_id] and "adopt" not in left


def test_nobody_learns_of_another_owners_answer(session: Session, toy: Held, talking: Chat) -> None:
    toy.allow(0)
    begun = begin_answer(talking, "hello")
    toy.allow()
    token = begun[talking.tokens]["stream"]["token"]
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
    session: Session, toy: Held, talking: Chat, warned: list[str]
) -> None:
    """It would be answered without knowing that answer, which would not be kept."""
    toy.allow(1)
    other = session.engine.generate(Request(prompt=(1, 2)))
    conversation = begin_answer(talking, "hello")[talking.current]
    sent, stop = talking.composer.channels["sent"], talking.composer.stop
    early = begin_answer(talking, "too early", conversation)
    assert early[sent] == {"number": 1, "ok": False, "waits": True} and early[stop]["visible"]
    assert warned == [], "it waits on the page for the end of that answer"
    values = [part.value for part in talking.controls.inputs]
    (message,) = session.chat.conversations(OWNER).messages(conversation)
    acting = talking
    for act in ("again", "on", "remove", "branch", "show"):
        pressed = gr.EventData(None, {"act": act, "message": message.id})
        shown = acting.act(VISIT, pressed, conversation, *values)
        assert shown[stop]["visible"], "the page has the Stop that the notice speaks of"
    edit = {"text": "differently", "message": message.id, "conversation": conversation}
    edited = acting.revise(VISIT, gr.EventData(None, edit), conversation, *values)
    revised = talking.composer.channels["revised"]
    assert edited[revised]["ok"] is False and edited[stop]["visible"]
    assert len(warned) == 6 and all("still being answered" in text for text in warned)
    assert [m.content for m in session.chat.conversations(OWNER).messages(conversation)] == [
        "hello"
    ]
    answer = session.generations.find(OWNER, conversation)
    session.tasks.stop(OWNER, conversation)
    assert answer is not None and soon(lambda: answer.over) and not answer.error
    other.close()
    toy.allow()
