"""Conversations: owners apart, hostile words inert, imports checked before they are stored."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import StorageError
from engine.types import NO_RUN, Run, Step, Token
from storage import deletions, imports
from storage.conversations import MAX_TITLE, Conversation, Conversations, Piece
from storage.database import Database
from storage.drafting import ContextStore
from storage.traces import Traces
from tests.unit.test_imports import own

HOSTILE = [
    "'; DROP TABLE messages; --",
    'Robert"); DELETE FROM owners; --',
    "<img src=x onerror=alert(1)>",
    "</span><script>${alert(1)} {{7*7}}</script>",
    "100% _under_ \\back\\ ?1 :owner",
    "zero\x00byte, \x1b[31m, \u202eright to left",
    "🦙 naïve 名前 שלום",
]
PIECES = [("Hel", "model", 3, 0, 7, 0.25), ("lo", "target", 0, 0, 8, 1.0)]

BROKEN = ("'nonsense'", "'{}'", "'[1]'", f"'{'[' * 100_000}'", "x'00ff'", "7")
"""What may stand in the place of stored JSON, in SQL."""


@pytest.fixture
def ada(db: Database) -> Conversations:
    return Conversations(db, "ada")


@pytest.fixture
def bob(db: Database) -> Conversations:
    return Conversations(db, "bob")


def save_run(db: Database, owner: str, conversation_id: str | None) -> str:
    return Traces(db, owner).save(NO_RUN, conversation_id)


def step_of(index: int, piece: tuple[str, str, int, int, int, float]) -> Step:
    """A step that emitted one token: that of the piece."""
    text, source, length, _, position, probability = piece
    return Step(index, (Token(1, position, source, length, text, probability),))


def contents(conversations: Conversations, id: str) -> list[str]:
    return [message.content for message in conversations.messages(id)]


def imported(conversations: Conversations, data: object) -> Conversation:
    (id,) = conversations.import_([imports.read(data)])
    return conversations.get(id)


def test_a_new_conversation_is_empty(ada: Conversations) -> None:
    before = time.time()
    conversation = ada.create("  A talk \n")
    assert (conversation.title, conversation.system_prompt) == ("A talk", "")
    assert conversation.settings == {}
    assert before <= conversation.created <= conversation.updated <= time.time()
    assert ada.get(conversation.id) == conversation
    assert ada.messages(conversation.id) == []
    with pytest.raises(StorageError, match="'ghost'"):
        ada.append(conversation.id, "ghost", "x")
    assert ada.messages(conversation.id) == []
    ids = {ada.create().id for _ in range(20)}
    assert len(ids) == 20 and min(map(len, ids)) >= 16, "ids cannot be guessed"


def test_the_last_changed_comes_first(ada: Conversations) -> None:
    first, second, third = (ada.create(title) for title in ("one", "two", "three"))
    assert [item.id for item in ada.list()] == [third.id, second.id, first.id]
    ada.append(first.id, "user", "hi")
    ada.rename(second.id, "deux")
    assert [item.title for item in ada.list()] == ["deux", "one", "three"]


@pytest.mark.parametrize("title", ["", "  \n", "x" * (MAX_TITLE + 1)])
def test_titles_have_limits(ada: Conversations, title: str) -> None:
    conversation = ada.create("x" * MAX_TITLE)
    with pytest.raises(StorageError, match="title"):
        ada.create(title)
    with pytest.raises(StorageError, match="title"):
        ada.rename(conversation.id, title)
    assert [item.title for item in ada.list()] == ["x" * MAX_TITLE]


def test_messages_keep_order_and_pieces(db: Database, ada: Conversations) -> None:
    id = ada.create().id
    run = save_run(db, "ada", id)
    question = ada.append(id, "user", "Hi")
    answer = ada.append(id, "assistant", "Hello", run, PIECES)
    assert (question.parent, question.pieces, question.run_id) == (None, None, None)
    assert (answer.parent, answer.run_id) == (question.id, run)
    assert question.position < answer.position and answer.versions == (answer.id,)
    assert answer.pieces == tuple(PIECES)
    assert ada.messages(id) == [question, answer]
    stored = ada.messages(id)[1].pieces
    assert stored is not None and stored[0] == Piece("Hel", "model", 3, 0, 7, 0.25)
    assert stored[0].source == "model"


def test_a_message_can_be_updated_while_it_grows(db: Database, ada: Conversations) -> None:
    id = ada.create().id
    traces, first, second = Traces(db, "ada"), step_of(0, PIECES[0]), step_of(1, PIECES[1])
    run = traces.save(Run(steps=(first,)), id)
    answer = ada.append(id, "assistant", "Hel", run)
    assert [message.pieces for message in ada.messages(id)] == [(Piece(*PIECES[0]),)]
    ada.extend(answer.id, "lo")
    traces.extend(run, [second])
    (stored,) = ada.messages(id)
    both = Piece(*PIECES[0]), Piece(*PIECES[1])._replace(step=1)
    assert (stored.id, stored.content, stored.pieces) == (answer.id, "Hello", both)
    assert (stored.position, stored.created) == (answer.position, answer.created)
    assert stored.run_id == run


def test_an_answer_reads_its_tokens_from_its_run(db: Database, ada: Conversations) -> None:
    id, traces = ada.create().id, Traces(db, "ada")
    rows = [(text, f"draft:{text}", 2, 0, 7, 0.5) for text in HOSTILE]
    run = Run(steps=(*(step_of(at, row) for at, row in enumerate(rows)), Step(99, ())))
    ada.append(id, "user", "Hi")
    ada.append(id, "assistant", "".join(HOSTILE), traces.save(run, id))
    ada.append(id, "assistant", "x", pieces=PIECES)
    expected = tuple(Piece(*row)._replace(step=at) for at, row in enumerate(rows))
    found = [message.pieces for message in ada.messages(id)]
    assert found == [None, expected, tuple(Piece(*row) for row in PIECES)]
    plain = ada.messages(id, pieces=False)
    assert [replace(message, pieces=None) for message in ada.messages(id)] == list(plain)
    copy = imported(ada, json.loads(json.dumps(ada.export(id))))
    assert [message.pieces for message in ada.messages(copy.id)] == found


@pytest.mark.parametrize(
    "damage",
    [
        *BROKEN,
        "'[\"abcdef\"]'",
        '\'[[1,7,"model",3,"Hel"]]\'',
        "'[[1,7,\"model\",3,5,0.5]]'",
        '\'[[1,-7,"model",3,"Hel",0.5]]\'',
        '\'[[1,7,"model",3,"Hel",1e999]]\'',
        '\'[[1,7,"model",3,"Hel","0.5"]]\'',
    ],
)
def test_damaged_steps_cost_the_colours_only(db: Database, ada: Conversations, damage: str) -> None:
    id, traces = ada.create().id, Traces(db, "ada")
    run = Run(steps=tuple(step_of(at, row) for at, row in enumerate(PIECES)))
    ada.append(id, "assistant", "Hello", traces.save(run, id))
    ada.append(id, "assistant", "Hello", traces.save(run, id))
    query = f"UPDATE steps SET tokens = {damage} WHERE position = 1 AND run = ?"
    with db.write() as handle:
        handle.execute(query, [ada.messages(id)[0].run_id])
    first, second = ada.messages(id)
    assert (first.content, second.content, second.pieces is None) == ("Hello", "Hello", False)
    assert first.pieces is None


def test_delete_takes_everything_with_it(db: Database, ada: Conversations) -> None:
    kept, gone = ada.create("kept"), ada.create("gone")
    for conversation in (kept, gone):
        run = save_run(db, "ada", conversation.id)
        ada.append(conversation.id, "assistant", "Hello", run, PIECES)
        ContextStore(db, "ada").append(conversation.id, "f", [1, 2, 3])
    ada.delete(gone.id)
    assert ada.list() == [ada.get(kept.id)]
    deletions.purge(db, 0.0)
    for table in ("messages", "contexts", "runs"):
        rows = db.execute_read(f"SELECT DISTINCT conversation FROM {table}")
        assert rows == [(kept.id,)], table
    with db.write() as handle:
        handle.execute("DELETE FROM runs")
    assert [message.run_id for message in ada.messages(kept.id)] == [None]


@pytest.mark.parametrize(
    "act",
    [
        lambda mine, id, _: mine.get(id),
        lambda mine, id, _: mine.rename(id, "taken"),
        lambda mine, id, _: mine.delete(id),
        lambda mine, id, _: mine.set_system_prompt(id, "taken"),
        lambda mine, id, _: mine.set_settings(id, {"taken": 1}),
        lambda mine, id, _: mine.messages(id),
        lambda mine, id, _: mine.append(id, "user", "taken"),
        lambda mine, id, _: mine.revision(id),
        lambda mine, id, _: mine.last(id),
        lambda mine, id, _: mine.has(id, ""),
        lambda mine, id, _: mine.following(id, None),
        lambda mine, id, message_id: mine.messages(id, to=message_id),
        lambda mine, id, message_id: mine.show(id, message_id),
        lambda mine, id, message_id: mine.copy(id, message_id),
        lambda mine, id, message_id: mine.append(id, "user", "taken", version_of=message_id),
        lambda mine, id, message_id: mine.delete_message(id, message_id),
        lambda mine, id, _: mine.export(id),
        lambda mine, _, message_id: mine.extend(message_id, "taken"),
    ],
)
def test_another_owners_conversation_does_not_exist(
    ada: Conversations, bob: Conversations, act: Any
) -> None:
    theirs = ada.create("secret")
    message = ada.append(theirs.id, "user", "a secret word")
    before = ada.export(theirs.id), ada.get(theirs.id)
    with pytest.raises(StorageError) as foreign:
        act(bob, theirs.id, message.id)
    with pytest.raises(StorageError) as unknown:
        act(bob, "x" * 16, "x" * 16)
    text = str(foreign.value).replace(theirs.id, "ID").replace(message.id, "ID")
    assert text == str(unknown.value).replace("x" * 16, "ID")
    assert (ada.export(theirs.id), ada.get(theirs.id)) == before


def test_another_owners_words_and_runs_are_out_of_reach(
    db: Database, ada: Conversations, bob: Conversations
) -> None:
    ada.append(ada.create("secret").id, "user", "a secret word")
    assert bob.list() == bob.list("secret") == []
    run, id = save_run(db, "ada", None), bob.create().id
    with pytest.raises(StorageError, match="no run"):
        bob.append(id, "assistant", "Hello", run)
    assert bob.messages(id) == []
    with pytest.raises(StorageError, match="no run"):
        Traces(db, "bob").extend(run, [Step(9, ())])


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_words_come_back_as_they_were(db: Database, text: str) -> None:
    mine = Conversations(db, text)
    id = mine.create(text).id
    mine.set_system_prompt(id, text)
    mine.set_settings(id, {text: [text, {"on": True, "none": None}]})
    mine.append(id, "user", text, pieces=[(text, text, 0, 0, 0, 0.5)])
    grown = mine.create().id
    answer = mine.append(grown, "assistant", text)
    for _ in range(3):
        mine.extend(answer.id, text)
    assert contents(mine, grown) == [4 * text]
    conversation, (message,) = mine.get(id), mine.messages(id)
    assert (conversation.title, conversation.system_prompt) == (text, text)
    assert conversation.settings == {text: [text, {"on": True, "none": None}]}
    assert message.content == text
    assert message.pieces == ((text, text, 0, 0, 0, 0.5),)
    copy = imported(mine, json.loads(json.dumps(mine.export(id))))
    assert contents(mine, copy.id) == [text]
    assert db.execute_read("SELECT name FROM owners") == [(text,)]


def test_search_reads_titles_and_messages_and_takes_wildcards_literally(ada: Conversations) -> None:
    title, phrase, other = ada.create("50% off"), ada.create("words"), ada.create("50 offers")
    ada.append(phrase.id, "assistant", "snake_case \\ Python")

    def found(search: str | None) -> list[str]:
        return [item.id for item in ada.list(search)]

    assert found("50%") == [title.id]
    assert found("PYTHON") == found("e_c") == found("\\ p") == [phrase.id]
    assert found("_") == [phrase.id]
    assert found("nothing like it") == found("' OR 1=1 --") == []
    assert found("  ") == found("") == found(None) == [phrase.id, other.id, title.id]
    assert found("%" * 100_000) == []


def test_half_a_surrogate_pair_is_replaced(db: Database, ada: Conversations) -> None:
    id = ada.create("a\ud800b").id
    ada.append(id, "user", "c\udfffd")
    assert ada.get(id).title == "a\ufffdb" and contents(ada, id) == ["c\ufffdd"]
    assert [item.id for item in ada.list("c\udfffd")] == [id]
    piece = ["a\ud800b", "m\udfff", 0, 0, 0, 0.5]
    export = imports.read(own(role="assistant", pieces=[piece]))
    (id,) = ada.import_([export._replace(settings={"stop": ["\ud800"]})])
    (message,) = ada.messages(id)
    assert message.pieces == (("a\ufffdb", "m\ufffd", 0, 0, 0, 0.5),)
    assert ada.get(id).settings == {"stop": ["\ufffd"]}
    ada.extend(message.id, "\udfff")
    step = step_of(0, ("\udfff", "m", 0, 0, 0, 0.5))
    ada.append(id, "assistant", "", Traces(db, "ada").save(Run(steps=(step,)), id))
    first, second = ada.messages(id)
    assert first.content == "x\ufffd"
    assert second.pieces == (("\ufffd", "m", 0, 0, 0, 0.5),)
    with db.write() as handle:  # as a version stored it that did not replace it
        handle.execute("UPDATE messages SET pieces = ?", [r'[["\ud800","m",0,0,0,0.5]]'])
    assert ada.messages(id)[0].pieces == (("\ufffd", "m", 0, 0, 0, 0.5),)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("settings", value) for value in BROKEN if value != "'{}'"),
        ("title", "CAST(x'41ff42' AS TEXT)"),
        ("title", "x'00ff'"),
        ("system_prompt", "x'00ff'"),
        ("created", "'yesterday'"),
        ("updated", "x'00ff'"),
    ],
)
def test_a_damaged_conversation_hides_no_other_and_can_be_deleted(
    db: Database, ada: Conversations, column: str, value: str
) -> None:
    other, id = ada.create("other").id, ada.create("damaged").id
    ada.append(id, "user", "Hi")
    with db.write() as handle:
        handle.execute(f"UPDATE conversations SET {column} = {value} WHERE id = ?", [id])
    found = ada.get(id)
    assert isinstance(found.title, str) and isinstance(found.created, float)
    assert found.damaged == (column == "settings") and found.settings == {}
    assert {item.id for item in ada.list()} == {id, other}
    assert contents(ada, id) == ["Hi"]
    ada.delete(id)
    assert [item.id for item in ada.list()] == [other]


@pytest.mark.parametrize(
    "pieces",
    [
        *BROKEN,
        "'[[1,\"m\",0,0,0,0.5]]'",
        '\'[["x","m",0,0,0,1e999]]\'',
        '\'[["x","m",0,0,99999999999999999999999,0.5]]\'',
        "CAST(x'5b5bff' AS TEXT)",
    ],
)
def test_damaged_pieces_cost_the_colours_only(
    db: Database, ada: Conversations, pieces: str
) -> None:
    id = ada.create().id
    ada.append(id, "assistant", "Hello", pieces=PIECES)
    with db.write() as handle:
        handle.execute(f"UPDATE messages SET pieces = {pieces}, content = CAST(x'48ff69' AS TEXT)")
    (message,) = ada.messages(id)
    assert (message.content, message.pieces) == ("H\ufffdi", None)


def test_pinned_ones_and_those_in_folders_come_first_and_that_is_no_change(
    ada: Conversations, bob: Conversations
) -> None:
    old, kept, filed, new = (ada.create(name).id for name in ("old", "kept", "filed", "new"))
    before = {each.id: each.updated for each in ada.list()}
    ada.pin(kept, True)
    ada.file(filed, "  Work \n and play " + "x" * 100)
    assert {each.id: each.updated for each in ada.list()} == before
    assert {each.id for each in ada.list(most=2)} == {kept, filed}
    assert [each.id for each in ada.list()][2:] == [new, old]
    assert ada.get(kept).pinned and not ada.get(filed).pinned
    assert ada.get(filed).folder.startswith("Work and play x") and len(ada.folders()[0]) == 60
    ada.pin(kept, False)
    ada.file(filed, "")
    assert ada.folders() == [] and [each.id for each in ada.list()] == [new, filed, kept, old]
    for folder, id in (("b", old), ("A", kept), ("c", filed), ("A", new)):
        ada.file(id, folder)
    assert ada.folders() == ["A", "b", "c"], "in the order of the alphabet"
    for change in (lambda: bob.pin(kept, True), lambda: bob.file(kept, "Mine")):
        with pytest.raises(StorageError, match="There is no conversation"):
            change()
    assert not ada.get(kept).pinned and bob.folders() == []


def test_search_and_names_ignore_how_letters_are_written(ada: Conversations) -> None:
    first, second = (ada.create(title).id for title in ("Über die Brücke", "Other"))
    ada.append(second, "user", "Ну, ПРИВЕТ! Un cafe\u0301 noir.")
    for search, id in (("ÜBER", first), ("bru\u0308cke", first), ("café", second)):
        assert [item.id for item in ada.list(search)] == [id]
    (found,) = ada.list("привет")
    assert found.hit is not None
    assert (found.hit.before, found.hit.words, found.hit.after[:2]) == ("Ну, ", "ПРИВЕТ", "! ")
    ada.file(first, "Café")
    ada.file(second, "CAFE\u0301")
    assert ada.folders() == ["Café"]


def test_a_search_says_where_the_words_are(ada: Conversations) -> None:
    talk = ada.create("About boats").id
    ada.append(talk, "user", "Tell me of 100% SAILS, please")
    last = ada.append(talk, "assistant", "x" * 100 + "\nThe sails\nare 100% white." + "y" * 100)
    (found,) = ada.list("100% ")
    assert found.hit == (
        last.id,
        "…" + "x" * 17 + " The sails are ",
        "100%",
        " white." + "y" * 53 + "…",
    )
    (found,) = ada.list("sAiLs")
    assert found.hit is not None and found.hit.words == "sails" and found.hit.message == last.id
    (found,) = ada.list("about")
    assert found.hit is None
    assert ada.list("_") == [] and ada.list("boats%") == []


def test_what_a_search_shows_is_not_cut_within_a_word(ada: Conversations) -> None:
    talk = ada.create().id
    text = " ".join(f"word{n}" for n in range(40))
    ada.append(talk, "user", f"{text} sails {text}")
    ada.append(talk, "user", "begin here and end")
    for search, before, after in (
        ("sails", "…word36 word37 word38 word39 ", f" {text[:59]}…"),
        ("begin", "", " here and end"),
        ("END", "begin here and ", ""),
    ):
        (found,) = ada.list(search)
        assert found.hit is not None and found.hit.words == search.lower()
        assert (found.hit.before, found.hit.after) == (before, after)
