"""The list's handlers: what an import stores, and that whatever is stored can be opened."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import orjson
import pytest

from app.preferences import Preferences
from app.session import Session
from app.tabs import chat, conversations, screen, settings
from engine.backends.toy import ToyBackend
from storage.database import Database
from storage.traces import Traces
from tests.test_session import ME, ask
from tests.test_tabs import made

REQUEST: Any = SimpleNamespace(username=None, session_hash="page")


@pytest.fixture
def session(db: Database, toy: ToyBackend) -> Session:
    return Session(Local(backend=toy), db)


@pytest.fixture
def on(session: Session) -> conversations.Handlers:
    def build() -> conversations.Handlers:
        with gr.Blocks():
            shelf, talk = conversations.build(), chat.build(session)
            controls = settings.build(session)
            return conversations.Handlers(session, shelf, talk, controls, gr.State(None))

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
    {"drafting": {"policy": ["merged"]}},
    {"drafting": {"harvest": "yes"}},
    {"method": 5},
    {"method": "magic"},
    {"method": "m" * 60_000},
    {"fresh_seed": "no"},
    {"seed": 3},
]


@pytest.mark.parametrize("bad", BAD)
def test_settings_that_cannot_be_used_are_not_imported(
    on: conversations.Handlers, told: list[str], tmp_path: Path, bad: dict[str, Any]
) -> None:
    file = tmp_path / "upload.json"
    file.write_text(json.dumps([exported(settings=bad), exported()]))
    updates = on.import_(REQUEST, str(file), {})
    assert [turn["text"] for turn in shown(on, updates)] == ["Hi"]
    stored = [item.settings for item in on.session.conversations(ME).list()]
    assert stored == [{}, {}]
    (notice,) = told
    assert "settings of 1 conversations could not be used" in notice and len(notice) < 500


@pytest.mark.parametrize("bad", BAD)
def test_stored_settings_that_cannot_be_used_give_way_to_the_usual_ones(
    on: conversations.Handlers, told: list[str], bad: dict[str, Any]
) -> None:
    store = on.session.conversations(ME)
    id = store.create().id
    store.append(id, "user", "Hi")
    store.set_settings(id, bad)
    updates = on.open_(REQUEST, id, {})
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
    (turn,) = shown(on, on.import_(REQUEST, str(file), {}))
    assert turn["tokens"][0][:2] == ["a\ufffd", "draft:\ufffd"]


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
        damage("runs", "ttft_seconds", "'text'"),
        damage("steps", "tokens", "'{'"),
        damage("steps", "levels", "'[7]'"),
    ],
)
def test_a_damaged_conversation_can_be_opened_and_deleted(
    on: conversations.Handlers, told: list[str], db: Database, act: Callable[[Database], None]
) -> None:
    id, _ = ask(on.session)
    sound = on.session.conversations(ME).create("sound").id
    on.session.rooms.clear()
    act(db)
    choices, _ = on.redraw(REQUEST, None, "", {})
    assert {key for _, key in choices["choices"]} == {id, sound}
    updates = on.open_(REQUEST, id, {})
    assert updates[on.current] == id and len(shown(on, updates)) == 2
    assert on.ask_delete(updates[on.current])["visible"]
    on.delete(REQUEST, updates[on.current], {})
    assert [item.id for item in on.session.conversations(ME).list()] == [sound]
    assert Traces(db, ME).history() == []


def test_the_list_shows_the_newest_and_finds_the_others(
    on: conversations.Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "SHOWN", 2)
    for name in ("one", "two", "three"):
        on.session.conversations(ME).create(name)

    def titles(search: str) -> list[str]:
        return [title for title, _ in on.redraw(REQUEST, None, search, {})[0]["choices"]]

    assert titles("") == ["three", "two"] and titles("one") == ["one"]


@pytest.fixture
def talking(session: Session) -> chat.Handlers:
    def build() -> chat.Handlers:
        with gr.Blocks():
            talk, controls = chat.build(session), settings.build(session)
            return chat.Handlers(session, talk, controls, gr.State(None))

    return made(build)


def filled(on: chat.Handlers, view: str, conversation: str) -> bool:
    """Whether switching to a view fills it."""
    part = on.parts.tokens if view == screen.TOKENS else on.parts.bubbles
    return "value" in on.look(REQUEST, view, conversation, {})[part]


def test_a_view_is_filled_by_who_switches_to_it_unless_an_answer_grows_there(
    session: Session, talking: chat.Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.session.UPDATE_SECONDS", 0.0)
    other = session.model.stream(number for number in (1, 2))
    assert next(other) == 1
    conversation, elsewhere = (session.say(ME, None, text) for text in ("hello", "there"))
    session.viewing["page"] = conversation
    values = [part.value for part in talking.controls.inputs]
    changes = talking.answer(REQUEST, conversation, {}, *values)
    assert talking.parts.proof in next(changes), "it waits for the model"
    assert filled(talking, screen.MARKDOWN, conversation)
    other.close()  # type: ignore[attr-defined]
    assert talking.parts.bubbles in next(c for c in changes if talking.parts.bubbles in c)
    assert not filled(talking, screen.TOKENS, conversation)
    assert filled(talking, screen.TOKENS, elsewhere)
    session.views["page"] = screen.MARKDOWN
    *_, last = changes
    assert last[talking.parts.bubbles] and filled(talking, screen.TOKENS, conversation)
