"""Files of conversations from anywhere: which formats are read, and that the work is bounded."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.errors import StorageError
from storage import imports
from storage.conversations import Conversations
from storage.database import Database
from storage.exported import Export
from tests.support.exports import chatgpt, node
from tests.support.odd import spoiled

ROOM = 20_000


def read(value: object, room: int = ROOM) -> imports.ImportedFile:
    return imports.read_file(json.dumps(value).encode(), room)


def said(export: Export) -> list[tuple[str, str]]:
    """What is shown of a conversation once it is imported."""
    with Database() as db:
        (id,) = Conversations(db, "ada").import_([export])
        return [(m.role, m.content) for m in Conversations(db, "ada").messages(id)]


def chat(title: str = "A chat", text: str = "Hi") -> dict[str, Any]:
    """An entry of a ChatGPT export."""
    return chatgpt(node("a", "root", "user", text), title=title)


def web_message(id: str, parent: str | None, role: str, content: str) -> dict[str, Any]:
    return {"id": id, "parentId": parent, "childrenIds": [], "role": role, "content": content}


WEB_TREE = {
    "1": web_message("1", None, "user", "Hi"),
    "2": web_message("2", "1", "assistant", "Go away"),
    "3": web_message("3", "1", "assistant", "Hello"),
}
WEB = {
    "id": "abc",
    "user_id": "me",
    "title": "A chat",
    "chat": {
        "title": "Its own title",
        "models": ["llama"],
        "params": {"system": "Be brief."},
        "history": {"messages": WEB_TREE, "currentId": "3"},
        "messages": [WEB_TREE["1"], WEB_TREE["2"]],
    },
    "created_at": 1_700_000_000,
    "archived": False,
}
PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image_url"}]},
    {"role": "assistant", "content": "Hello"},
]
TALK = [("user", "Hi"), ("assistant", "Hello")]


@pytest.mark.parametrize(
    "value",
    [
        [WEB],
        WEB,
        WEB["chat"],
        {**WEB, "chat": {**WEB["chat"], "history": None, "messages": [*WEB_TREE.values()][::2]}},
        PLAIN,
        {"messages": PLAIN},
        [{"messages": PLAIN, "title": "A chat"}],
    ],
)
def test_chats_of_other_programs_are_read(value: object) -> None:
    (export,) = read(value).conversations
    assert said(export) == TALK
    assert export.system_prompt == "Be brief."
    assert export.title in ("A chat", "Its own title", TALK[0][1])
    assert export.settings == {}


def test_the_time_of_a_chat_is_kept_where_it_is_one() -> None:
    assert read(WEB).conversations[0].created == 1_700_000_000
    later = read({**WEB, "created_at": 1_700_000_000_000}).conversations[0].created
    assert 1_700_000_000 < later < 2**33


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"uuid": 1, "chat_messages": []}, "'uuid', 'chat_messages'.*formats that can be read"),
        ({}, "it holds nothing"),
        ({"format": "other", "version": 3}, "format is 'other' 3, and this program reads"),
        ({"chat": []}, "chat is of type list"),
        ({"chat": {"title": "x"}}, "messages is missing"),
        ({"messages": "x"}, "messages is of type str"),
        ([{"role": "user"}], "in message 1, content is missing"),
        (
            [{"role": "judge", "content": "x"}],
            "in message 1, role cannot be 'judge'. Give 'system'",
        ),
        ({"mapping": {}}, "no messages with text"),
        ({"mapping": []}, "mapping is of type list"),
        ({"mapping": {"a": 1}, "current_node": "a"}, "tree of messages is of type int"),
        ([], "The file is empty"),
        (7, "of type int"),
        ({"conv": 5, "messages": []}, "cannot be imported"),
        ({"conv": {}, "messages": 5}, "cannot be imported"),
        ({"conv": {}, "messages": [5]}, "cannot be imported"),
        ({"conv": {}, "messages": [{"role": "user", "content": 5}]}, "cannot be imported"),
        ({"conv": {"currNode": []}, "messages": [{"content": "  "}]}, "cannot be imported"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(value: object, expected: str) -> None:
    with pytest.raises(StorageError, match=expected) as caught:
        read(value)
    assert "None None" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        *(
            (text, "nests its values too deeply")
            for text in (b"[" * 100_000, b'{"a":' * 100_000, b"[" * 5_000 + b"]" * 5_000)
        ),
        *(
            (text, "no readable JSON")
            for text in (b"", b"{", b"\xff\xfe\x00", b"9" * 5_000, b"NaN,")
        ),
    ],
)
def test_a_file_that_is_no_json_is_refused(content: bytes, expected: str) -> None:
    with pytest.raises(StorageError, match=expected):
        imports.read_file(content, ROOM)


def test_entries_without_text_make_no_conversations() -> None:
    with pytest.raises(StorageError, match="no messages with text"):
        read([{"mapping": {}}] * 8_000)
    found = read([chat("one"), *[{"mapping": {}}] * 8_000])
    assert [export.title for export in found.conversations] == ["one"]
    (notice,) = found.notices
    assert notice.startswith("8,000 of 8,001 conversations could not be read")


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        ("MAX_CONVERSATIONS", 3),
        ("MAX_FILE_MESSAGES", 3),
        ("MAX_FILE_PIECES", 6),
        ("MAX_FILE_CHARS", 16),
    ],
)
def test_what_is_beyond_a_limit_is_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(imports, limit, most)
    piece = ["x", "m", 0, 0, 0, 0.5]
    message = {"role": "assistant", "content": "x", "pieces": [piece, piece]}
    ours = {"format": "strata-conversation", "version": 1, "title": "t", "messages": [message]}
    found = read([ours] * 10)
    assert len(found.conversations) == 3
    (notice,) = found.notices
    assert "first 3 of 10" in notice and "other 7 were left out" in notice and f"{most:,}" in notice


def test_a_file_is_read_and_stored_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is looked at beyond the limit, and all is stored in one transaction or not at all."""
    monkeypatch.setattr(imports, "MAX_CONVERSATIONS", 50)
    looked: list[object] = []
    checked = imports.read
    monkeypatch.setattr(imports, "read", lambda v: looked.append(v) or checked(v))
    found = read([{"mapping": {}}, chat()] * 500).conversations
    assert len(looked) == 50 and len(found) == 25
    with Database(tmp_path / "strata.db") as db:
        mine = Conversations(db, "ada")
        with pytest.raises(StorageError, match="title"):
            mine.import_([found[0], found[1]._replace(title=" ")])
        assert mine.list() == []
        statements: list[str] = []
        with db.read() as handle:
            handle.conn.set_trace_callback(statements.append)
        mine.import_(found)
        assert [line for line in statements if line in ("BEGIN IMMEDIATE", "COMMIT")] == [
            "BEGIN IMMEDIATE",
            "COMMIT",
        ]
        assert len(mine.list()) == 25


def test_a_chatgpt_export_keeps_its_time_and_what_is_text() -> None:
    message = node("a", "root", "user", ["Hel", {"image": 1}, "lo"])
    export = imports.read(chatgpt(message, title="t" * 300, create_time=1_700_000_000.5))
    assert (export.title, export.created) == ("t" * 200, 1_700_000_000.5)
    assert said(export) == [("user", "Hello")]
    nodes = node("a", "b", "user", "Hi"), node("b", "a", "user", "Ho")
    export = imports.read(chatgpt(*nodes, title=None, current_node="a"))
    assert export.title == "Ho", "what was said first"
    assert said(export) == [("user", "Ho"), ("user", "Hi")]


def test_an_owner_has_room_for_so_many(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conversations, "MOST", 4)
    mine = Conversations(db, "ada")
    mine.create("first")
    found = read([chat(str(number)) for number in range(9)], mine.room())
    mine.import_(found.conversations)
    assert [item.title for item in mine.list()] == ["0", "1", "2", "first"]
    assert "other 6 were left out" in found.notices[0]
    with pytest.raises(StorageError, match="Delete some first"):
        read([chat()], mine.room())
    with pytest.raises(StorageError, match="You have 4 conversations"):
        mine.create()
    assert Conversations(db, "bob").room() == 4


def llama(id: str, parent: str | None, role: str, content: object, **more: Any) -> dict[str, Any]:
    """A message as llama.cpp's page stores it."""
    kind = "root" if parent is None else "text"
    place = {"parent": parent, "children": [], "timestamp": 1_700_000_000_000, "convId": "c"}
    return {"id": id, "type": kind, "role": role, "content": content, **place, **more}


def test_a_chat_of_llama_cpps_page_is_read_with_its_branches() -> None:
    files = [{"type": "TEXT", "name": "notes.md", "content": "a ``` b"}, {"type": "IMAGE"}, 5]
    messages = [
        llama("r", None, "system", ""),
        llama("s", "r", "system", "Be brief."),
        llama("u", "s", "user", "Hi", extra=files),
        llama("old", "u", "assistant", "Hello"),
        llama("new", "u", "assistant", "Hey", reasoningContent=" Short. "),
        llama("t", "new", "tool", "42"),
        llama("more", "t", "user", "Thanks"),
    ]
    conv = {"id": "c", "name": "A talk", "lastModified": 1_700_000_001_000, "currNode": "old"}
    value = [{"conv": conv, "messages": messages}, {"conv": {}, "messages": messages[2:3]}]
    (found, other) = read(value).conversations
    assert (found.title, found.system_prompt, found.created) == ("A talk", "Be brief.", 1.7e9 + 1)
    fenced = "Attached file: notes.md\n````\na ``` b\n````\n\nHi"
    assert [(m.role, m.content, m.parent, m.chosen) for m in found.messages] == [
        ("user", fenced, None, 1),
        ("assistant", "Hello", 0, 1),
        ("assistant", "<think>\nShort.\n</think>\n\nHey", 0, 0),
        ("user", "Thanks", 2, 0),
    ]
    assert {m.created for m in found.messages} == {1.7e9}
    assert other.title == "Hi" and said(other) == [("user", fenced)]


def test_numbers_are_ids_of_llama_cpps_page_as_well() -> None:
    rows: tuple[tuple[Any, Any, str, str], ...] = (
        (1, None, "system", ""), (3, 2, "assistant", "Old"), (2, 1, "user", "Hi"),
        (5, 2, "assistant", "New"),
    )  # fmt: skip
    messages = [llama(*each) for each in rows]
    (found,) = read([{"conv": {"currNode": 3}, "messages": messages}]).conversations
    assert [(m.content, m.parent, m.chosen) for m in found.messages] == [
        ("Hi", None, 1), ("Old", 0, 1), ("New", 0, 0),
    ]  # fmt: skip


def test_a_chat_without_a_title_is_named_after_what_its_user_said() -> None:
    question = {"role": "user", "content": "<think> tags: how are they read?"}
    assert read([question, {"role": "assistant", "content": "So."}]).conversations[0].title == (
        "<think> tags: how are they read?"
    )
    file = "Attached file: a.txt\n```\n" + "x\n" * 11_000 + "```\n\nSum it up."
    assert read([{"role": "user", "content": file}]).conversations[0].title == "Sum it up"


@pytest.mark.parametrize("time", ["x", -1, float("inf"), 10**400, True, None, [], float("nan")])
def test_odd_times_of_llama_cpps_page_are_now(time: object) -> None:
    message = llama("u", "r", "user", "Hi", timestamp=time)
    (found,) = read({"conv": {"lastModified": time}, "messages": [message]}).conversations
    assert said(found) == [("user", "Hi")] and 0 <= found.created < 2**33


PIECE = ["x", "m", 0, 0, 0, 0.5]


def own(version: int = 2, **message: Any) -> dict[str, Any]:
    """A file of ours with one message."""
    complete = {"role": "user", "content": "x", "created": 5} | message
    return {
        "format": "strata-conversation",
        "version": version,
        "title": "t",
        "messages": [complete],
    }


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"x": value}
    return value


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (own(content=["x"]), "messages[0].content cannot be ['x']. Give a text."),
        (own(created=float("nan")), "messages[0].created cannot be nan."),
        (own(created=10**400), "messages[0].created cannot be 1000000"),
        (own(created=float("inf")), "messages[0].created cannot be inf."),
        (own(created=-1), "messages[0].created cannot be -1."),
        (own(created=2**33), "It should be less than 8589934592."),
        (own(parent=0), "the parent of message 1 is not one of the messages before it"),
        (own(chosen=None), "messages[0].chosen cannot be None."),
        (own(chosen=2**31), "messages[0].chosen cannot be 2147483648."),
        (own(pieces={}), "messages[0].pieces cannot be {}. Give a list."),
        (own(pieces=[PIECE, PIECE[:5]]), "messages[0].pieces[1][5] is missing."),
        (own(pieces=[[*PIECE, 1]]), "messages[0].pieces[0] cannot be ["),
        (own(pieces=[["x", "m" * 201, *PIECE[2:]]]), "at most 200 items"),
        (own(pieces=[["x", "m", 1.0, *PIECE[3:]]]), "messages[0].pieces[0][2] cannot be 1.0."),
        (own(pieces=[[*PIECE[:5], 1.5]]), "messages[0].pieces[0][5] cannot be 1.5."),
        (own() | {"format": "other"}, "its format is 'other' 2"),
        (own(version=3), "its format is 'strata-conversation' 3"),
        (own(version=0), "its format is 'strata-conversation' 0"),
        (own() | {"settings": {"x": "y" * 70_000}}, "have 70009 characters and 1 levels"),
        (own() | {"settings": {"x": float("nan")}}, "not plain JSON values"),
        (own() | {"settings": {"x": 10**5000}}, "not plain JSON values"),
        (own() | {"settings": nested(9)}, "have 64 characters and 9 levels"),
        (own() | {"settings": nested(100_000)}, "not plain JSON values"),
        (own() | {"messages": [USER] * 10_001}, "at most 10000 items"),
        (own() | {"messages": [{**USER, "content": "x" * 1_000_001}] * 10}, "it has 10,000,010"),
    ],
)
def test_a_value_of_a_file_of_ours_is_never_coerced(value: object, expected: str) -> None:
    with pytest.raises(StorageError) as caught:
        imports.read(value)
    assert expected in str(caught.value) and "cannot be imported" in str(caught.value)


def test_nothing_of_another_type_is_imported() -> None:
    """At whatever place of a file of ours that holds everything there is."""
    answer = {"role": "assistant", "content": "x", "pieces": [PIECE]}
    places = {"created": 5.0, "parent": 0, "chosen": 0}
    more = {"system_prompt": "Be brief.", "settings": {"seed": 3}, "created": 1_700_000_000.5}
    sound = own() | more | {"pinned": True, "folder": "Work"}
    sound["messages"] = [USER, answer | places]
    named = {*imports.OwnFile.model_fields, *imports.OwnMessage.model_fields}
    assert {*sound, *sound["messages"][1]} == {*named, "format", "version"}
    for data in spoiled(sound, free=frozenset(sound["settings"])):
        with pytest.raises(StorageError):
            imports.read(data)
    imports.read(sound)


def test_what_a_file_of_ours_may_leave_out_or_write_otherwise() -> None:
    old = own(version=1, parent="x", chosen=None, pieces=None, created=None)
    first, second = imports.read(old | {"messages": 2 * old["messages"]}).messages
    assert (first.parent, first.chosen) == (None, 0) and (second.parent, second.chosen) == (0, 0)
    half = imports.read(own(content="a\ud800", pieces=[["\ud800", "m", 0, 0, 0, 1]], created=0))
    assert half.messages[0].created == 0.0 and half.pieces == 1


@pytest.mark.parametrize("name", ["content", "pieces", "created", "parent", "role"])
def test_a_deeply_nested_value_is_refused_shortly(name: str) -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    for bad in (own(**{name: deep}), own() | {"settings": {"a": deep}}, own() | {"title": deep}):
        with pytest.raises(StorageError) as caught:
            imports.read_file(json.dumps(bad).encode(), ROOM)
        assert len(str(caught.value)) < 400


def test_a_title_has_one_to_two_hundred_characters() -> None:
    for title in ("x", f"  {'x' * 200}\n"):
        assert imports.read(own() | {"title": title}).title == title.strip()
    for title in ("", " \n", "x" * 201, None, 5):
        with pytest.raises(StorageError, match="title (cannot be|is missing)"):
            imports.read(own() | {"title": title})


def test_a_file_of_errors_stops_at_the_first() -> None:
    """Each would take memory, and there is room for millions in a file."""
    for bad in (own(pieces=[1] * 1000), own() | {"messages": [1] * 1000}):
        with pytest.raises(StorageError) as caught:
            imports.read(bad)
        assert isinstance(cause := caught.value.__cause__, ValidationError)
        assert cause.error_count() == 1 and len(str(caught.value)) < 400


@pytest.mark.parametrize("id", [[], {}, 5, None])
def test_a_chat_of_open_webui_may_show_nothing(id: object) -> None:
    history = {"messages": WEB_TREE, "currentId": id}
    (export,) = read({**WEB, "chat": {**WEB["chat"], "history": history}}).conversations
    assert said(export) == [("user", "Hi"), ("assistant", "Go away")]
