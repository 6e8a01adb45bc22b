"""The token logs: append-only, capped, one per conversation and tokenizer, owners apart."""

from typing import Any

import pytest

from engine.errors import StorageError
from storage.contexts import ContextStore
from storage.conversations import Conversations
from storage.database import Database


@pytest.fixture
def store(db: Database) -> ContextStore:
    return ContextStore(db, "ada")


@pytest.fixture
def talk(db: Database) -> str:
    return Conversations(db, "ada").create().id


def chunks(db: Database) -> list[tuple[int, int]]:
    return [
        (start, length)
        for start, length in db.execute_read(
            "SELECT start, length(tokens) / 4 FROM contexts ORDER BY start"
        )
    ]


def test_a_new_log_is_empty(store: ContextStore, talk: str) -> None:
    assert store.load(talk, "f") == []
    assert store.size(talk, "f") == 0


def test_appended_tokens_come_back_in_order(store: ContextStore, talk: str) -> None:
    store.append(talk, "f", [5, 0, 2**32 - 1])
    store.append(talk, "f", [])
    store.append(talk, "f", (7,))
    assert store.load(talk, "f") == [5, 0, 2**32 - 1, 7]
    assert store.size(talk, "f") == 4


def test_logs_are_apart(db: Database, store: ContextStore, talk: str) -> None:
    other = Conversations(db, "ada").create().id
    store.append(talk, "f", [1])
    store.append(talk, "g", [2])
    store.append(other, "f", [3])
    assert store.load(talk, "f") == [1]
    assert store.load(talk, "g") == [2]
    assert store.load(other, "f") == [3]
    store.clear(talk)
    assert store.size(talk, "f") == store.size(talk, "g") == 0
    assert store.load(other, "f") == [3]


def test_an_append_rewrites_nothing(db: Database, store: ContextStore, talk: str) -> None:
    for size in (3, 4, 5):
        store.append(talk, "f", range(size))
    assert chunks(db) == [(0, 3), (3, 4), (7, 5)]


def test_a_long_append_is_cut_into_rows(
    db: Database, store: ContextStore, talk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContextStore, "CHUNK", 4)
    store.append(talk, "f", range(10))
    assert chunks(db) == [(0, 4), (4, 4), (8, 2)]
    assert store.load(talk, "f") == list(range(10))


@pytest.mark.parametrize("step", [1, 3, 4, 7, 40])
def test_the_oldest_tokens_are_forgotten(
    db: Database, store: ContextStore, talk: str, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(ContextStore, "CAP", 10)
    monkeypatch.setattr(ContextStore, "CHUNK", 4)
    for start in range(0, 80, step):
        store.append(talk, "f", range(start, start + step))
        expected = list(range(start + step))[-10:]
        assert store.load(talk, "f") == expected
        assert store.size(talk, "f") == len(expected)
        assert sum(length for _, length in chunks(db)) <= 10 + 4


@pytest.mark.parametrize(
    "act",
    [
        lambda store, id: store.load(id, "f"),
        lambda store, id: store.append(id, "f", [9]),
        lambda store, id: store.size(id, "f"),
        lambda store, id: store.clear(id),
    ],
)
def test_another_owners_log_does_not_exist(
    db: Database, store: ContextStore, talk: str, act: Any
) -> None:
    store.append(talk, "f", [1, 2])
    for id in (talk, "unknown"):
        with pytest.raises(StorageError, match="There is no conversation"):
            act(ContextStore(db, "bob"), id)
    assert store.load(talk, "f") == [1, 2]


@pytest.mark.parametrize("damage", ["x'0102'", "'text'", "7"])
def test_a_damaged_chunk_is_passed_over(
    db: Database, store: ContextStore, talk: str, damage: str
) -> None:
    for token in (1, 2, 3):
        store.append(talk, "f", [token])
    with db.write() as handle:
        handle.execute(f"UPDATE contexts SET tokens = {damage} WHERE start = 1")
    assert store.load(talk, "f") == [1, 3]
