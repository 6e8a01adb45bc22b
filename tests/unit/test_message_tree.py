"""Messages as a tree: versions beside each other, one path shown, nothing lost, damage included."""

import json
from itertools import pairwise
from typing import Any

import pytest

from engine.errors import StorageError
from engine.types import Run
from storage import deletions, imports
from storage.conversations import Conversations, StoredMessage
from storage.database import Database
from storage.drafting import ContextStore
from storage.exported import Export, ExportedMessage
from storage.traces import Traces
from tests.support.exports import chatgpt, node
from tests.unit.test_conversations import PIECES, contents, step_of


@pytest.fixture
def ada(db: Database) -> Conversations:
    return Conversations(db, "ada")


@pytest.fixture
def id(ada: Conversations) -> str:
    """A conversation in which both the question and its first answer have two versions:

    a - b - c - d
      \\ B - C
    A
    """
    id = ada.create("A talk").id
    for text, role in zip("abcd", ("user", "assistant") * 2, strict=True):
        ada.append(id, role, text)
    ada.append(id, "assistant", "B", after=named(ada, id)["a"])
    ada.append(id, "user", "C")
    ada.append(id, "user", "A", version_of=named(ada, id)["a"])
    return id


def everything(ada: Conversations, id: str) -> list[StoredMessage]:
    """All messages of a conversation, in the order in which they were made."""
    found: dict[str, StoredMessage] = {}
    left = list(ada.following(id, None))
    while left:
        message = ada.messages(id, to=left.pop())[-1]
        found[message.id] = message
        left += ada.following(id, message.id)
    return sorted(found.values(), key=lambda message: message.position)


def named(ada: Conversations, id: str) -> dict[str, str]:
    """The id of each message, by its text."""
    return {message.content: message.id for message in everything(ada, id)}


def shown(ada: Conversations, id: str) -> str:
    return "".join(contents(ada, id))


def test_each_version_is_shown_with_what_was_shown_below_it_last(
    ada: Conversations, id: str
) -> None:
    names, newest = named(ada, id), ada.create("newest").id
    assert shown(ada, id) == "A"
    for text, path in [
        ("a", "aBC"),
        ("b", "abcd"),
        ("A", "A"),
        ("a", "abcd"),
        ("B", "aBC"),
        ("c", "abcd"),
        ("A", "A"),
        ("a", "abcd"),
        ("C", "aBC"),
    ]:
        ada.show(id, names[text])
        assert shown(ada, id) == path, text
    assert ada.last(id) == names["C"]
    assert [found.id for found in ada.list()] == [newest, id], "the list keeps its order"


def test_messages_know_their_versions_and_what_they_follow(ada: Conversations, id: str) -> None:
    names = named(ada, id)
    places = {
        message.content: (message.parent, message.versions) for message in everything(ada, id)
    }
    assert places == {
        "a": (None, (names["a"], names["A"])),
        "A": (None, (names["a"], names["A"])),
        "b": (names["a"], (names["b"], names["B"])),
        "B": (names["a"], (names["b"], names["B"])),
        "c": (names["b"], (names["c"],)),
        "C": (names["B"], (names["C"],)),
        "d": (names["c"], (names["d"],)),
    }
    assert [m.content for m in ada.messages(id, to=names["d"])] == list("abcd")
    assert [(m.content, m.pieces) for m in ada.messages(id, pieces=False)] == [("A", None)]


def test_every_change_makes_another_revision_and_nothing_else_does(
    ada: Conversations, id: str
) -> None:
    names = named(ada, id)
    changes = [
        lambda: ada.rename(id, "other"),
        lambda: ada.set_system_prompt(id, "Be brief."),
        lambda: ada.set_settings(id, {"seed": 3}),
        lambda: ada.show(id, names["a"]),
        lambda: ada.append(id, "user", "x"),
        lambda: ada.extend(names["B"], "x"),
        lambda: ada.append(id, "assistant", "x", version_of=names["b"]),
        lambda: tokens.append(ada.delete_message(id, names["b"])),
        lambda: ada.undo(tokens[-1]),
        lambda: tokens.append(ada.delete(id)) or ada.undo(tokens[-1]),
    ]
    tokens, seen = list[str](), [ada.revision(id)]
    for change in changes:
        change()
        ada.messages(id)
        ada.export(id)
        ada.copy(id, names["a"])
        ada.rename(ada.create().id, "another")
        seen.append(ada.revision(id))
    assert all(before < after for before, after in pairwise(seen)), seen


def test_a_version_that_is_not_to_be_shown_leaves_the_path_as_it_is(
    ada: Conversations, id: str
) -> None:
    names = named(ada, id)
    ada.show(id, names["d"])
    ada.append(id, "assistant", "x", after=names["a"], shown=False)
    assert shown(ada, id) == "abcd"
    ada.append(id, "assistant", "y", after=names["d"], shown=False)
    assert shown(ada, id) == "abcdy", "there is no other version"


def test_a_copy_holds_what_leads_to_a_message(db: Database, ada: Conversations, id: str) -> None:
    ada.set_system_prompt(id, "Be brief.")
    ada.set_settings(id, {"seed": 3})
    names = named(ada, id)
    before = ada.export(id), shown(ada, id)
    made = ada.copy(id, names["c"])
    assert (ada.export(id), shown(ada, id)) == before
    found = ada.get(made)
    assert found.title == "A talk (branch)" and found.system_prompt == "Be brief."
    assert found.settings == {"seed": 3} and shown(ada, made) == "abc"
    ada.append(made, "assistant", "e")
    assert shown(ada, made) == "abce" and "e" not in named(ada, id)
    assert not {m.id for m in everything(ada, made)} & {*names.values()}
    long = ada.create("x" * 200).id
    ada.append(long, "user", "a")
    assert len(ada.get(ada.copy(long, ada.last(long) or "")).title) == 200


@pytest.mark.parametrize("first", ["original", "copy"])
def test_a_copy_and_its_original_outlive_each_other_with_their_runs(
    db: Database, ada: Conversations, first: str
) -> None:
    id, traces = ada.create().id, Traces(db, "ada")
    run = traces.save(Run(steps=(step_of(0, PIECES[0]),)), id)
    answer = ada.append(id, "assistant", "Hel", run)
    copy = ada.copy(id, answer.id)
    pieces = [message.pieces for message in ada.messages(id)]
    assert pieces[0] and len(traces.history()) == 1, "it is counted once"
    gone, kept = (id, copy) if first == "original" else (copy, id)
    token = ada.delete(gone)
    assert [trace.conversation_id for trace in traces.history()] == [kept]
    assert [message.pieces for message in ada.messages(kept)] == pieces
    other = ada.delete(kept)
    assert traces.history() == []
    assert ada.undo(token) == gone and [t.conversation_id for t in traces.history()] == [gone]
    deletions.purge(db, 0.0)
    assert [message.pieces for message in ada.messages(gone)] == pieces
    with pytest.raises(StorageError, match="cannot be undone"):
        ada.undo(other)
    assert traces.load(run).steps


def whole(db: Database, ada: Conversations, id: str) -> Any:
    """All that there is of a conversation."""
    log = ContextStore(db, "ada").load(id, "f")
    return ada.export(id), everything(ada, id), log, Traces(db, "ada").history(), len(ada.list())


def test_a_deleted_message_comes_back_with_all_below_it(
    db: Database, ada: Conversations, id: str
) -> None:
    names, traces = named(ada, id), Traces(db, "ada")
    run = traces.save(Run(steps=(step_of(0, PIECES[0]),)), id)
    ada.show(id, names["d"])
    answer = ada.append(id, "assistant", "Hel", run).id
    ContextStore(db, "ada").append(id, "f", [1, 2, 3])
    before, room = whole(db, ada, id), ada.room()
    token = ada.delete_message(id, names["b"])
    assert shown(ada, id) == "aBC" and ada.room() == room
    assert {*named(ada, id)} == set("aABC") and traces.history() == []
    assert ada.list("Hel") == [] and len(ada.export(id)["messages"]) == 4
    for gone in (names["b"], answer):
        assert not ada.has(id, gone)
        with pytest.raises(StorageError, match="There is no message"):
            ada.extend(gone, "x")
    ada.append(id, "user", "x")
    with pytest.raises(StorageError, match="cannot be undone"):
        Conversations(db, "bob").undo(token)
    assert ada.undo(token) == id
    added = named(ada, id)["x"]
    ada.delete_message(id, added)
    assert whole(db, ada, id) == before
    ada.show(id, names["b"])
    assert shown(ada, id) == "abcdHel"


def test_what_was_deleted_below_something_deleted_comes_back_after_it(
    ada: Conversations, id: str
) -> None:
    names = named(ada, id)
    inner = ada.delete_message(id, names["c"])
    outer = ada.delete_message(id, names["a"])
    with pytest.raises(StorageError, match="Restore that one first"):
        ada.undo(inner)
    ada.undo(outer)
    assert {*named(ada, id)} == set("abBCA")
    ada.undo(inner)
    assert {*named(ada, id)} == set("abcdBCA")
    inner, all_ = ada.delete_message(id, names["c"]), ada.delete(id)
    with pytest.raises(StorageError, match="There is no conversation"):
        ada.undo(inner)
    ada.undo(all_)
    ada.undo(inner)
    assert {*named(ada, id)} == set("abcdBCA")


def test_what_is_deleted_goes_when_it_is_due(
    db: Database, ada: Conversations, id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    names, traces = named(ada, id), Traces(db, "ada")
    traces.save(Run(steps=(step_of(0, PIECES[0]),)), id)
    run = traces.save(Run(steps=(step_of(0, PIECES[0]),)), id)
    ada.append(id, "assistant", "secret words", run, after=names["d"])
    for each in (id, ada.create("other").id):
        ContextStore(db, "ada").append(each, "f", [1, 2, 3])
    token = ada.delete_message(id, names["d"])
    assert deletions.oldest(db) == 1000.0
    now[0] += deletions.SECONDS - 1
    later = ada.delete_message(id, names["C"])
    assert deletions.purge(db, deletions.SECONDS) == []
    now[0] += 2
    assert deletions.purge(db, deletions.SECONDS) == [deletions.Gone("ada", id, token)]
    dump = "".join(map(str, db.execute_read("SELECT * FROM messages")))
    assert "secret words" not in dump and {*named(ada, id)} == set("abcBA")
    assert db.execute_read("SELECT id FROM runs WHERE id = ?", [run]) == []
    assert len(traces.history()) == 1, "a run that was of no message here is not one of these"
    assert len(db.execute_read("SELECT * FROM contexts")) == 1, "its log held what it said"
    with pytest.raises(StorageError, match="cannot be undone"):
        ada.undo(token)
    ada.undo(later)
    assert {*named(ada, id)} == set("abcBCA") and deletions.oldest(db) is None
    assert deletions.purge(db, 0.0) == [] and len(ada.list()) == 2


@pytest.mark.parametrize(
    ("damage", "path"),
    [
        ("UPDATE messages SET parent = 'gone' WHERE content = 'c'", "abcd"),
        ("UPDATE messages SET parent = 'gone' WHERE content = 'a'", "abcd"),
        ("UPDATE messages SET parent = id WHERE content = 'b'", "abcd"),
        ("UPDATE messages SET parent = (SELECT id FROM messages WHERE content = 'd')", "abcd"),
        (
            "UPDATE messages SET parent = (SELECT id FROM messages WHERE content = 'd') "
            "WHERE content = 'b'",
            "abcd",
        ),
        ("UPDATE messages SET parent = x'00ff' WHERE content IN ('b', 'd')", "abcd"),
        ("UPDATE messages SET chosen = 'x', position = position + 0.5", "abcd"),
        ("UPDATE conversations SET revision = 'x'", "abcd"),
    ],
)
def test_damaged_places_hide_nothing(
    db: Database, ada: Conversations, damage: str, path: str
) -> None:
    id = ada.create().id
    for text in "abcd":
        ada.append(id, "user", text)
    with db.write() as handle:
        handle.execute(damage)
    assert {*named(ada, id)} == set("abcd") and shown(ada, id) == path
    assert len(ada.export(id)["messages"]) == 4 and ada.list("c")
    ada.append(id, "user", "e")
    assert shown(ada, id) == f"{path}e"
    ada.show(id, named(ada, id)["a"])
    ada.undo(ada.delete_message(id, named(ada, id)["c"]))
    assert shown(ada, id) == f"{path}e"
    ada.delete(id)


def test_a_stored_conversation_is_found_again_by_all_its_versions(
    ada: Conversations, db: Database, id: str
) -> None:
    export = imports.read(ada.export(id))
    *most, last = export.messages
    elsewhere = [*most, last._replace(parent=0)]
    changes: list[dict[str, Any]] = [
        {"title": "another"},
        {"system_prompt": "another"},
        {"messages": most},
        {"messages": [*most, last._replace(content="another")]},
        {"messages": [*most, last._replace(role="system")]},
        {"messages": elsewhere},
    ]
    assert last.parent != 0
    assert ada.stored([export, *(export._replace(**each) for each in changes)]) == [id, *[None] * 6]
    arranged = export._replace(folder="Work", pinned=True, created=1.0, settings={"seed": 3})
    shown = [message._replace(created=1.0, chosen=0, pieces=None) for message in export.messages]
    assert ada.stored([arranged._replace(messages=shown)]) == [id]
    assert ada.stored([export, export]) == [id, None], "the file holds two"
    (copy,) = ada.import_([export])
    assert ada.stored([export] * 3) == [copy, id, None]
    assert Conversations(db, "bob").stored([export]) == [None]
    ada.delete(copy)
    assert ada.stored([export] * 2) == [id, None]
    odd = export._replace(title=" \ud800 ", system_prompt="\ud800")
    (odd_id,) = ada.import_([odd])
    assert ada.stored([odd]) == [odd_id]


def test_a_long_conversation_is_deep(db: Database, ada: Conversations) -> None:
    """Deeper than Python or SQLite would recurse."""
    count = 5000
    rows = [ExportedMessage("user", f"m{n}", 1.0, None, n - 1 if n else None) for n in range(count)]
    (id,) = ada.import_([Export("deep", "", {}, 1.0, rows)])
    messages = ada.messages(id)
    assert len(messages) == count and messages[-1].content == f"m{count - 1}"
    assert ada.stored([imports.read(ada.export(id))]) == [id]
    token = ada.delete_message(id, messages[1].id)
    assert contents(ada, id) == ["m0"]
    ada.undo(token)
    assert len(ada.messages(id)) == count
    ada.delete_message(id, messages[1].id)
    deletions.purge(db, 0.0)
    assert db.execute_read("SELECT count(*) FROM messages") == [(1,)]


def test_an_export_carries_all_branches(ada: Conversations, db: Database, id: str) -> None:
    ada.show(id, named(ada, id)["b"])
    ada.pin(id, True)
    ada.file(id, "Work")
    ada.set_settings(id, {"seed": 3})
    data = json.loads(json.dumps(ada.export(id)))
    assert data["version"] == 2 and len(data["messages"]) == 7
    bob = Conversations(db, "bob")
    (copy,) = bob.import_([imports.read(data)])
    assert bob.export(copy) == data == ada.export(id) and shown(bob, copy) == "abcd"
    assert bob.get(copy).pinned and bob.get(copy).folder == "Work"
    assert copy != id and [each.id for each in bob.list()] == [copy]
    for text, path in (("C", "aBC"), ("A", "A"), ("a", "aBC"), ("b", "abcd")):
        bob.show(copy, named(bob, copy)[text])
        assert shown(bob, copy) == path
    bob.append(copy, "user", "e")
    assert shown(bob, copy) == "abcde"


CHATGPT = chatgpt(
    node("second", "tool", "assistant", "B"),
    node("note", "root", "system", ""),
    node("question", "note", "user", "a"),
    node("first", "question", "assistant", "b"),
    node("tool", "question", "tool", "result"),
    node("more", "first", "user", "c"),
    node("other", "note", "user", "A"),
    node("empty", "more", "assistant", " "),
    node("last", "empty", "user", "d"),
    node("below", "broken", "user", "x"),
)
CHATGPT["mapping"]["broken"] = 7
WEB = {
    id: {"id": id, "parentId": parent, "role": role, "content": id}
    for id, parent, role in (
        ("B", "a", "assistant"),
        ("a", None, "user"),
        ("b", "a", "assistant"),
        ("c", "b", "user"),
        ("A", None, "user"),
        ("odd", "c", "function"),
        ("d", "odd", "user"),
        ("x", "nowhere", "user"),
    )
}


@pytest.mark.parametrize("kind", ["ChatGPT", "Open WebUI"])
def test_trees_of_other_programs_keep_their_branches(ada: Conversations, kind: str) -> None:
    def read(node: str) -> Export:
        if kind == "ChatGPT":
            return imports.read(CHATGPT | {"current_node": node})
        ids = {"second": "B", "question": "a", "last": "c", "other": "A", "more": "c"}
        return imports.read({"chat": {"history": {"messages": WEB, "currentId": ids[node]}}})

    (id,) = ada.import_([read("more")])
    names = named(ada, id)
    assert {*names} == set("abBcAdx")
    assert shown(ada, id) == "abcd"
    for text, path in (("B", "aB"), ("A", "A"), ("x", "x"), ("a", "aB"), ("c", "abcd")):
        ada.show(id, names[text])
        assert shown(ada, id) == path
    for current, path in (("second", "aB"), ("other", "A")):
        (id,) = ada.import_([read(current)])
        assert shown(ada, id) == path
