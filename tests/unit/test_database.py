"""The database file: transactions, threads, crashes, damage, refusals, and its published schema."""

import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from engine.errors import StorageError
from storage import migrations
from storage.database import Database, pack_tokens, unpack_tokens
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
    assert block == migrations.blank_schema()


def test_a_new_file_has_the_blank_schema_and_safe_settings(tmp_path: Path) -> None:
    with Database(tmp_path / "deep" / "down" / "strata.db") as db, db.read() as handle:
        assert handle.schema == migrations.blank_schema()
        assert handle.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert handle.execute("PRAGMA foreign_keys").fetchone() == (1,)
        assert db.notices == []


@pytest.mark.parametrize("name", ["strata.db", "with space #?%.db", "名前 ü.db"])
def test_rows_survive_closing(tmp_path: Path, name: str) -> None:
    with Database(tmp_path / name) as db:
        add_owner(db, "ada")
    with Database(tmp_path / name) as db:
        assert owners(db) == ["ada"]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_block_that_raises_changes_nothing(db: Database) -> None:
    with pytest.raises(ZeroDivisionError), db.write() as handle:
        handle.execute("INSERT INTO owners (name) VALUES ('ada')")
        handle.table("owners").insert({"name": "bob"})
        raise ZeroDivisionError
    assert owners(db) == []


def test_an_inner_block_can_be_undone_alone(db: Database) -> None:
    with db.write():
        add_owner(db, "ada")
        with pytest.raises(ZeroDivisionError), db.write() as handle:
            handle.execute("INSERT INTO owners (name) VALUES ('bob')")
            raise ZeroDivisionError
        add_owner(db, "cyd")
    assert owners(db) == ["ada", "cyd"]


def test_an_inner_block_falls_with_the_outer(db: Database) -> None:
    with pytest.raises(ZeroDivisionError), db.write():
        add_owner(db, "ada")
        raise ZeroDivisionError
    assert owners(db) == []


def test_a_read_block_sees_one_moment(tmp_path: Path) -> None:
    with Database(tmp_path / "strata.db") as db:
        add_owner(db, "ada")
        with db.read():
            assert owners(db) == ["ada"]
            run_threads(lambda: add_owner(db, "bob"))
            assert owners(db) == ["ada"]
        assert owners(db) == ["ada", "bob"]


def test_a_write_inside_a_read_is_a_mistake_of_ours(db: Database) -> None:
    with pytest.raises(AssertionError), db.read(), db.write():
        pass
    add_owner(db, "ada")
    assert owners(db) == ["ada"]


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


def test_one_key_per_name_from_any_thread(tmp_path: Path) -> None:
    with Database(tmp_path / "strata.db") as db:
        keys: list[int] = []
        run_threads(*[lambda: keys.append(db.key("owners", "ada"))] * 6)
        assert len(set(keys)) == 1
        assert db.key("owners", "bob") not in keys


def test_connections_of_ended_threads_are_closed(tmp_path: Path) -> None:
    with Database(tmp_path / "strata.db") as db:
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
        said = [int(child.stdout.readline()) for _ in range(40)]
        child.send_signal(signal.SIGKILL if os.name == "posix" else signal.SIGTERM)
        said += [int(line) for line in child.stdout if line.endswith("\n")]
    with Database(path) as db:
        assert db.notices == []
        names = set(owners(db))
        assert {f"{number}-{half}" for number in said for half in "ab"} <= names
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


def test_two_damaged_files_are_both_kept(tmp_path: Path) -> None:
    path = tmp_path / "strata.db"
    for _ in range(2):
        damage_header(path)
        Database(path).close()
    assert len(list(tmp_path.glob("strata.db.corrupt-*"))) == 2


def test_an_empty_file_is_a_new_database(tmp_path: Path) -> None:
    path = tmp_path / "strata.db"
    path.touch()
    with Database(path) as db:
        assert db.notices == []
        assert owners(db) == []


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for parts in (["strata.db"], ["deeper", "strata.db"]):
        path = Path(tmp_path / "file", *parts)
        with pytest.raises(StorageError, match="data directory") as caught:
            Database(path)
        assert str(path.parent) in str(caught.value)


def test_a_path_that_is_a_directory(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is a directory") as caught:
        Database(tmp_path)
    assert str(tmp_path) in str(caught.value)


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


def test_a_full_disk_undoes_the_block_and_the_program_goes_on(tmp_path: Path) -> None:
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


def test_a_read_only_file(db: Database) -> None:
    with db.read() as handle:
        handle.execute("PRAGMA query_only = ON")
    with pytest.raises(StorageError, match="read-only"):
        add_owner(db, "ada")


def test_our_own_mistakes_stay_what_they_are(db: Database) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        db.execute_read("SELECT * FROM missing")
    add_owner(db, "ada")
    with pytest.raises(sqlite3.IntegrityError):
        add_owner(db, "ada")


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


def test_a_file_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "strata.db"
    with Database(path) as db, db.write() as handle:
        handle.execute("INSERT INTO migrations (name) VALUES ('9999-future')")
    before = path.read_bytes()
    with pytest.raises(StorageError, match="newer version.*9999-future"):
        Database(path)
    assert path.read_bytes() == before


def test_a_file_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "photos.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE photos (id)")
    other.close()
    with pytest.raises(StorageError, match="another program.*photos"):
        Database(path)
    other = sqlite3.connect(path)
    assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("photos",)]
    other.close()


def test_tokens_round_trip_as_little_endian_words() -> None:
    tokens = (0, 1, 256, 151_643, 2**32 - 1)
    assert pack_tokens([1, 256]) == b"\x01\x00\x00\x00\x00\x01\x00\x00"
    assert unpack_tokens(pack_tokens(tokens)) == tokens
