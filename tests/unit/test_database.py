"""The database file: transactions, threads, crashes, damage, refusals, and its published schema."""

import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from engine.errors import StorageError
from storage import migrations
from storage.conversations import Conversations
from storage.database import Database, LockedError, pack_tokens, unpack_tokens
from tests.conftest import ROOT

PINNED = {
    "0001-conversations": "875da46aad1afd4c",
    "0002-runs": "2b698aa6dc682c7d",
    "0003-messages": "3de7e6a2d404d9d1",
    "0004-ngrams": "202a46cefb19006c",
    "0005-calibrations-and-costs": "f9e290cb1f16f859",
    "0006-stacks": "730a080cf9f463e3",
    "0007-sources": "6d501b9c703d5850",
    "0008-speedups": "7bfa26fb0e2163e9",
    "0009-one-run": "c891a4b83aeafbca",
    "0010-costs-of-cached-tokens": "9bbea1f33bfb75a4",
    "0011-tree": "cc68281f75774681",
    "0012-api-keys": "b1c227f0c677d644",
    "0013-benchmarks": "6e481d29be9d0c99",
    "0014-presets-and-speeds": "d6c9edb50ad5a741",
    "0015-why": "bd50cc425da851e4",
    "0016-folders": "e4d4d533339029a3",
    "0017-costs-measured-again": "114c0795b2b40d32",
    "0018-speeds-with-drafts": "73178aad72641c6f",
    "0019-wipes": "4a44fea5de50e980",
    "0020-wiped-texts": "d45a5c06f2c5c5b6",
    "0021-tool-servers": "5702fefb98971a19",
    "0022-results-of-tools": "6f339942813617a5",
    "0023-answers-at-once": "ea979379280f58bd",
    "0024-settings-of-tool-servers": "61d3ab9ad60e57e2",
}
"""Digests of the released migrations: a file out there was made by exactly these."""


def owners(db: Database) -> list[str]:
    return [name for (name,) in db.execute_read("SELECT name FROM owners ORDER BY id")]


def add_owner(db: Database, name: str) -> None:
    with db.write() as handle:
        handle.execute("INSERT INTO owners (name) VALUES (?)", [name])


def run_threads(*works: Callable[[], None]) -> None:
    """Run functions on threads of their own, and raise here what any of them raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=[work]) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_the_released_migrations_are_never_edited() -> None:
    digests = {
        name: hashlib.sha256(script.encode()).hexdigest()[:16]
        for name, script in migrations.MIGRATIONS
    }
    assert digests == PINNED


def test_the_documented_schema_is_the_schema() -> None:
    page = (ROOT / "docs" / "storage.md").read_text(encoding="utf-8")
    block = page.split("<!-- schema -->\n```sql\n")[1].split("\n```\n<!-- /schema -->")[0]
    assert block.split() == migrations.blank_schema().split(), "but for line breaks"


@pytest.mark.parametrize("name", ["deep/strata.db", "with space #?%.db", "名前 ü.db"])
def test_a_new_file_has_safe_settings_and_keeps_its_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with Database(path) as db:
        add_owner(db, "ada")
        with db.read() as handle:
            assert handle.schema == migrations.blank_schema()
            assert handle.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            assert handle.execute("PRAGMA foreign_keys").fetchone() == (1,)
    with Database(path) as db:
        assert owners(db) == ["ada"] and db.notices == []
    assert {each.name for each in path.parent.iterdir()} == {path.name, f"{path.name}-turn"}


def test_a_block_that_raises_changes_nothing_and_an_inner_one_is_undone_alone(db: Database) -> None:
    with pytest.raises(ZeroDivisionError), db.write() as handle:
        add_owner(db, "ada")
        handle.table("owners").insert({"name": "bob"})
        raise ZeroDivisionError
    assert owners(db) == []
    with db.write():
        add_owner(db, "ada")
        with pytest.raises(ZeroDivisionError), db.write() as handle:
            handle.execute("INSERT INTO owners (name) VALUES ('bob')")
            raise ZeroDivisionError
        add_owner(db, "cyd")
    assert owners(db) == ["ada", "cyd"]


def test_a_read_block_sees_one_moment(tmp_path: Path) -> None:
    with Database(tmp_path / "strata.db") as db:
        add_owner(db, "ada")
        with db.read():
            assert owners(db) == ["ada"]
            run_threads(lambda: add_owner(db, "bob"))
            assert owners(db) == ["ada"]
        assert owners(db) == ["ada", "bob"]


@pytest.mark.parametrize("in_memory", [True, False])
def test_threads_write_and_read_at_once(tmp_path: Path, in_memory: bool) -> None:
    with Database(None if in_memory else tmp_path / "strata.db") as db:

        def write(writer: int) -> None:
            for number in range(25):
                with db.write() as handle:
                    for half in ("a", "b"):
                        name = f"{writer}-{number}-{half}"
                        handle.execute("INSERT INTO owners (name) VALUES (?)", [name])

        def read() -> None:
            for _ in range(50):
                assert len(owners(db)) % 2 == 0, "half a transaction was seen"

        run_threads(*(partial(write, number) for number in range(4)), read, read)
        assert len(owners(db)) == 200


def test_threads_share_keys_and_their_connections_are_closed(tmp_path: Path) -> None:
    with Database(tmp_path / "strata.db") as db:
        keys: list[int] = []
        run_threads(*[lambda: keys.append(db.key("owners", "ada"))] * 6)
        assert len(set(keys)) == 1
        assert db.key("owners", "bob") not in keys
        for _ in range(20):
            run_threads(lambda: add_owner(db, os.urandom(4).hex()))
        assert len(db._handles) <= 2


def test_a_closed_database_says_so(tmp_path: Path) -> None:
    db = Database(tmp_path / "strata.db")
    db.close()
    db.close()
    with pytest.raises(StorageError, match="closed"):
        owners(db)
    with pytest.raises(StorageError, match="closed"):
        run_threads(lambda: add_owner(db, "ada"))


WRITER = """
import sys
from pathlib import Path
from storage.database import Database
db = Database(Path(sys.argv[1]))
for number in range(1_000_000):
    with db.write() as handle:
        handle.execute("INSERT INTO owners (name) VALUES (?)", [f"{number}-a"])
        handle.execute("INSERT INTO owners (name) VALUES (?)", [f"{number}-b"])
    print(number, flush=True)
"""


def test_a_killed_writer_loses_no_committed_row(tmp_path: Path) -> None:
    path = tmp_path / "strata.db"
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as child:
        assert child.stdout is not None
        confirmed = [int(child.stdout.readline()) for _ in range(40)]
        child.send_signal(signal.SIGKILL if os.name == "posix" else signal.SIGTERM)
        confirmed += [int(line) for line in child.stdout if line.endswith("\n")]
    with Database(path) as db:
        assert db.notices == []
        names = set(owners(db))
        assert {f"{number}-{half}" for number in confirmed for half in "ab"} <= names
        assert len(names) % 2 == 0
        assert db.execute_read("PRAGMA integrity_check") == [("ok",)]


def damage_header(path: Path) -> None:
    path.write_bytes(b"not a database at all, but long enough to be read as one" * 50)


def damage_pages(path: Path) -> None:
    with Database(path) as db, db.write() as handle:
        rows = (("x" * 500 + str(n),) for n in range(200))
        handle.conn.executemany("INSERT INTO owners (name) VALUES (?)", rows)
    content = bytearray(path.read_bytes())
    middle = len(content) // 8192 * 4096
    content[middle : middle + 8192] = b"\xa5" * 8192
    path.write_bytes(content)


def damage_length(path: Path) -> None:
    with Database(path):
        pass
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize("damage", [damage_header, damage_pages, damage_length])
def test_a_damaged_file_is_kept_aside(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "strata.db"
    damage(path)
    before = path.read_bytes()
    Path(f"{path}-wal").write_bytes(b"the log of the damaged file")
    with Database(path) as db:
        (notice,) = db.notices
        aside = Path(notice.split("kept as ")[1].split(",")[0])
        assert aside.name.startswith("strata.db.corrupt-") and str(path) in notice
        assert aside.read_bytes() == before
        assert owners(db) == []
        add_owner(db, "ada")
    with Database(path) as db:
        assert db.notices == []
        assert owners(db) == ["ada"]
    damage_header(path)
    Database(path).close()
    assert len(list(tmp_path.glob("strata.db.corrupt-*[0-9]"))) == 2, "both are kept"


@pytest.mark.parametrize(
    ("expected", "at", "value", "verdict"),
    [
        (b"", 18, 0x41, "unknown format 65"),
        (b"", 19, 0x00, "unknown format 0"),
        (b"", 47, 0x84, "unsupported file format"),
        (b"CREATE TABLE owners", 0, 0xFF, ""),
        (b"TABLE conversations (", 9, ord("x"), ""),
        (b"    title TEXT NOT NULL", 4, ord("u"), "definition of the table conversations"),
        (b"ON conversations(owner, up", 0, 0xC3, ""),
        (b"0003-messages", 0, ord("9"), ""),
    ],
)
def test_one_wrong_byte_of_what_makes_it_a_database(
    tmp_path: Path, expected: bytes, at: int, value: int, verdict: str
) -> None:
    """Each of these once ended the start with a traceback, or with words that led astray."""
    path = tmp_path / "strata.db"
    with Database(path) as db:
        add_owner(db, "ada")
    content = bytearray(path.read_bytes())
    content[content.index(expected) + at] = value
    path.write_bytes(content)
    with Database(path) as db:
        (notice,) = db.notices
        assert "was damaged (" in notice and verdict in notice and owners(db) == []
    with Database(path) as db:
        assert db.notices == []


def test_an_index_that_disagrees_with_its_table_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "strata.db"
    with Database(path) as db:
        add_owner(db, "somebody with a name")
    content = bytearray(path.read_bytes())
    first = content.index(b"somebody with")
    content[content.index(b"somebody with", first + 1)] ^= 1
    path.write_bytes(content)
    with Database(path) as db:
        assert "was damaged (" in db.notices[0]


def test_a_large_file_that_contradicts_itself_says_so_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a file is not looked through when it is opened."""
    monkeypatch.setattr(Database, "CHECKED_BYTES", 0)
    path = tmp_path / "strata.db"
    with Database(path) as db:
        store = Conversations(db, "ada")
        made = store.create().id
        message = store.append(made, "user", "hello")
    content = bytearray(path.read_bytes())
    pages = range(0, len(content), 4096)
    (page,) = (  # of the index by id alone
        at
        for at in pages
        if message.id.encode() in content[at : at + 4096]
        and made.encode() not in content[at : at + 4096]
    )
    content[content.index(message.id.encode(), page)] ^= 1
    path.write_bytes(content)
    with Database(path) as db:
        store = Conversations(db, "ada")
        with pytest.raises(StorageError, match="is damaged. Close the program"):
            store.messages(made)


def test_a_schema_that_cannot_be_read_is_reported_while_the_program_runs(db: Database) -> None:
    def unreadable(*_: object) -> None:
        b"\xff".decode()

    with pytest.raises(StorageError, match="is damaged"), db.read() as handle:
        handle.execute("SELECT 1")
        unreadable()


def test_what_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "strata.db"
    path.touch()
    with Database(path) as db, db.write() as handle:
        assert db.notices == [], "an empty file is a new database"
        handle.execute("CREATE TABLE notes (text)")
        handle.execute("CREATE INDEX notes_text ON notes(text)")
    with Database(path) as db:
        assert db.notices == []


def test_a_path_that_cannot_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path, expected, named in (
        (tmp_path / "file" / "strata.db", "data directory", tmp_path / "file"),
        (tmp_path / "file" / "deeper" / "strata.db", "data directory", tmp_path / "file/deeper"),
        (tmp_path, "is a directory", tmp_path),
    ):
        with pytest.raises(StorageError, match=expected) as caught:
            Database(path)
        assert str(named) in str(caught.value)


def test_a_locked_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Database, "BUSY_SECONDS", 0.05)
    path = tmp_path / "strata.db"
    with Database(path) as db:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match="locked by another program"):
            add_owner(db, "ada")
        assert owners(db) == []
        with pytest.raises(StorageError, match="locked by another program"):
            Database(path)
        other.execute("COMMIT")
        other.close()
        add_owner(db, "ada")
        assert owners(db) == ["ada"]


def test_who_waits_for_another_program_holds_up_no_other_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, goes_on = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        waits.set()
        assert goes_on.wait(20)

    monkeypatch.setattr("storage.database.sleep", sleep)
    path = tmp_path / "strata.db"
    with Database(path) as db:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        thread = threading.Thread(target=add_owner, args=(db, "ada"))
        thread.start()
        assert waits.wait(20)
        with pytest.raises(LockedError, match="locked by another program"), db.at_once():
            add_owner(db, "bob")
        other.execute("COMMIT")
        with db.at_once():
            add_owner(db, "cyd")
        goes_on.set()
        thread.join(20)
        assert owners(db) == ["cyd", "ada"]
        other.close()


def test_a_full_disk_undoes_the_block_and_the_program_continues(tmp_path: Path) -> None:
    with Database(tmp_path / "strata.db") as db:
        add_owner(db, "ada")
        with db.read() as handle:
            (pages,) = handle.execute("PRAGMA page_count").fetchone()
            handle.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StorageError, match="The disk is full") as caught, db.write() as handle:
            handle.execute("INSERT INTO owners (name) VALUES ('bob')")
            handle.execute("INSERT INTO owners (name) VALUES (?)", ["x" * 100_000])
        assert str(db.path) in str(caught.value)
        assert owners(db) == ["ada"]
        add_owner(db, "cyd")
        assert owners(db) == ["ada", "cyd"]


def test_our_own_mistakes_stay_what_they_are(db: Database) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        db.execute_read("SELECT * FROM missing")
    add_owner(db, "ada")
    with pytest.raises(sqlite3.IntegrityError):
        add_owner(db, "ada")
    with pytest.raises(AssertionError), db.read(), db.write():
        pass
    with db.read() as handle:
        handle.execute("PRAGMA query_only = ON")
    with pytest.raises(StorageError, match="read-only"):
        add_owner(db, "bob")
    assert owners(db) == ["ada"]


@pytest.mark.parametrize("age", range(len(migrations.MIGRATIONS)))
def test_a_file_of_any_age_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: int
) -> None:
    path = tmp_path / "strata.db"
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:age])
        with Database(path) as db:
            if age:
                add_owner(db, "ada")
    with Database(path) as db, db.read() as handle:
        assert handle.schema == migrations.blank_schema()
        assert owners(db) == (["ada"] if age else [])


def test_a_migration_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "strata.db"
    Database(path).close()
    broken = ("0099-broken", "CREATE TABLE halfway (id); CREATE TABLE halfway (id);")
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, broken))
        with pytest.raises(sqlite3.OperationalError):
            Database(path)
    with Database(path) as db, db.read() as handle:
        assert handle.schema == migrations.blank_schema()


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("CREATE TABLE photos (id)", "another program.*photos"),
        ("INSERT INTO migrations VALUES ('9999-future')", "newer version.*9999-future"),
    ],
)
def test_a_file_of_others_is_refused_and_left_alone(
    tmp_path: Path, script: str, expected: str
) -> None:
    path = tmp_path / "strata.db"
    if "migrations" in script:
        Database(path).close()
    with closing(sqlite3.connect(path)) as other:
        other.executescript(f"PRAGMA journal_mode = WAL; {script}")
    before = path.read_bytes()
    with pytest.raises(StorageError, match=expected):
        Database(path)
    assert path.read_bytes() == before


def test_tokens_round_trip_as_little_endian_words() -> None:
    tokens = (0, 1, 256, 151_643, 2**32 - 1)
    assert pack_tokens([1, 256]) == b"\x01\x00\x00\x00\x00\x01\x00\x00"
    assert unpack_tokens(pack_tokens(tokens)) == tokens
