"""Statistics files: built while answers go on, stopped without a trace, taken in after a check."""

import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.service import statistics_files
from app.service.jobs import Stop
from app.service.session import Session
from app.service.statistics_files import StatisticsFiles
from engine.errors import Cancelled, ModelError, SettingError, StorageError
from engine.local import Local
from engine.types import STATISTICS
from storage.database import Database
from storage.statistics import SUFFIX, StatisticsTable, open_table
from tests.support.inside import ask, memory, soon, swap
from tests.support.toy import ToyBackend

TEXT = "The cat sat on the mat and looked at the sea. " * 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "statistics"


@pytest.fixture
def session(db: Database, folder: Path) -> Session:
    engine = Local(lambda tokenizer, report: open_table([folder], tokenizer, report))
    session = Session(engine, db, folders=[folder])
    swap(session, ToyBackend(), "/m/toy")
    return session


@pytest.fixture
def files(session: Session) -> StatisticsFiles:
    return session.statistics_files


def text(tmp_path: Path, content: str = TEXT, name: str = "notes.txt") -> Path:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    return path


def built(files: StatisticsFiles, *paths: Path, **more: Any) -> list[str]:
    """What was told of a build, and what it made."""
    job = files.start(paths, **more)
    return [*(progress.text for progress in job.watch()), job.result()]


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_file_is_built_reported_and_used_by_the_next_answer(
    session: Session, files: StatisticsFiles, folder: Path, tmp_path: Path
) -> None:
    assert session.current.statistics is None and not files.own()
    lines = built(files, text(tmp_path), text(tmp_path, '{"text": "a dog"}\n', "b.jsonl"))
    assert any(message.startswith("Counting ") for message in lines)
    assert lines[-1].startswith("Made from 2,765 tokens, 2 documents")
    assert left(folder) == [f"bytes{SUFFIX}"] and files.own()
    table = session.current.statistics
    assert table is not None and table.meta["title"] == "notes.txt, b.jsonl"
    assert table.look_up(b" ca") is not None
    found = memory(session).statistics
    assert found is not None and found.look_up(b" ca") is not None
    _, answer = ask(session, "The cat sat on the")
    assert STATISTICS in answer.metrics.proposed


def test_a_second_one_takes_the_place_of_the_first_and_the_chat_continues(
    session: Session, files: StatisticsFiles, folder: Path, tmp_path: Path
) -> None:
    built(files, text(tmp_path))
    first = memory(session).statistics
    ask(session, "The cat")
    built(files, text(tmp_path, "other words for a change " * 50, "other.txt"))
    assert memory(session).statistics is not first
    assert session.current.statistics and session.current.statistics.meta["title"] == "other.txt"
    ask(session, "and then")
    assert left(folder) == [f"bytes{SUFFIX}"]


def test_uploads_are_deleted_whatever_came_of_it_and_files_of_this_machine_stay(
    files: StatisticsFiles, tmp_path: Path
) -> None:
    mine, sent, bad = (text(tmp_path, name=name) for name in ("a.txt", "b.txt", "c.jsonl"))
    built(files, mine)
    built(files, sent, uploaded=True)
    with pytest.raises(StorageError, match="is not a document"):
        built(files, bad, uploaded=True)
    assert mine.exists() and not sent.exists() and not bad.exists()


@pytest.mark.parametrize("stage", ["Reading", "Counting"])
def test_stopped_it_leaves_what_was_there_and_nothing_else(
    files: StatisticsFiles, folder: Path, tmp_path: Path, stage: str
) -> None:
    built(files, text(tmp_path))
    before = (folder / f"bytes{SUFFIX}").read_bytes()
    job = files.start([text(tmp_path, TEXT * 60)])
    with pytest.raises(Cancelled, match="Nothing was changed"):
        for progress in job.watch():
            if progress.text.startswith(stage):
                files.stop()
    assert left(folder) == [f"bytes{SUFFIX}"]
    assert (folder / f"bytes{SUFFIX}").read_bytes() == before
    assert files.slot.running is None and job.stop.endings == []
    assert built(files, text(tmp_path)), "and the next one can begin"


def test_while_an_answer_grows_it_rests(
    session: Session, files: StatisticsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rests, clock = text(tmp_path, TEXT * 60), list[float](), [0.0]

    class Rests(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            rests.append(timeout or 0.0)
            clock[0] += timeout or 0.0
            return False

    def init(self: Stop) -> None:
        usual(self)
        self.event = Rests()

    usual = Stop.__init__
    monkeypatch.setattr(Stop, "__init__", init)
    monkeypatch.setattr(statistics_files, "monotonic", lambda: clock[0])
    built(files, path)
    assert rests == []
    with session.tasks.begin("someone", "else"):
        built(files, path)
    batches = len(TEXT) * 60 // statistics_files.BATCH
    assert sum(rests) >= batches * statistics_files.REST_SECONDS > 1


def test_reading_ends_where_memory_would(
    files: StatisticsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics_files, "MOST_TOKENS", 100_000)
    lines = built(files, text(tmp_path, TEXT * 60))
    assert "Reading stopped after 1" in lines[-1]


def test_what_cannot_be_built_is_reported(
    session: Session, files: StatisticsFiles, folder: Path, tmp_path: Path
) -> None:
    cases: list[tuple[list[Path], str]] = [
        ([], "No file is chosen"),
        ([tmp_path], "There is no file"),
        ([tmp_path / "gone.txt"], "gone.txt"),
        ([text(tmp_path, "")], "notes.txt' is empty"),
        ([text(tmp_path, "x", "one.txt")], "There is no text in 'one.txt'"),
        ([text(tmp_path, "x", "a.parquet")], "Parquet"),
        ([text(tmp_path, "x", "a.zip")], "cannot be read"),
    ]
    for paths, expected in cases:
        with pytest.raises(StorageError, match=expected):
            built(files, *paths)
    assert left(folder) == []


def test_with_guests_nothing_is_built_imported_or_removed(
    files: StatisticsFiles, folder: Path, tmp_path: Path
) -> None:
    built(files, text(tmp_path))
    copy = files.copy_to(tmp_path)
    files.guests = True
    acts: list[Callable[[], Any]] = [
        lambda: built(files, text(tmp_path)),
        lambda: files.take_in(copy),
        lambda: files.copy_to(tmp_path / "other.db"),
        files.remove,
    ]
    for act in acts:
        with pytest.raises(SettingError, match="Others use this app"):
            act()
    assert left(folder) == [f"bytes{SUFFIX}"] and not (tmp_path / "other.db").exists()
    assert not files.own()


def test_a_model_that_goes_while_its_texts_are_counted_gets_its_file_nevertheless(
    session: Session,
    files: StatisticsFiles,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, other = files.count, ToyBackend(name="other")
    other.info = replace(other.info, tokenizer_fingerprint="another one")

    def then_swapped(*arguments: Any) -> dict[str, str]:
        swap(session, other, "/m/other")
        return count(*arguments)

    monkeypatch.setattr(files, "count", then_swapped)
    lines = built(files, text(tmp_path))
    assert "to be used when its model is loaded again" in lines[-1]
    assert left(folder) == [f"bytes{SUFFIX}"] and session.current.statistics is None


def test_another_tokenizer_meanwhile_ends_it(
    session: Session,
    files: StatisticsFiles,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, other = session.engine.tokens, ToyBackend(name="other")
    other.info = replace(other.info, tokenizer_fingerprint="another one")

    def then_swapped(*arguments: Any) -> list[list[int]]:
        found = tokens(*arguments)
        swap(session, other, "/m/other")
        return found

    monkeypatch.setattr(session.engine, "tokens", then_swapped)
    with pytest.raises(ModelError, match="other is loaded now, and its tokenizer is another one"):
        built(files, text(tmp_path, TEXT * 60))
    assert left(folder) == []


# files from elsewhere


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000] + b"\xff" * 5000)


def sql(*lines: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with sqlite3.connect(path) as connection:
            for line in lines:
                connection.execute(line)
        connection.close()

    return change


REFUSED: list[tuple[Callable[[Path], Any], str]] = [
    (damaged, "damaged|cannot be used"),
    (sql("DELETE FROM grams WHERE key % 2"), "should have"),
    (sql("UPDATE meta SET value = 'other' WHERE name = 'tokenizer'"), "another tokenizer"),
    (sql("UPDATE meta SET value = '7' WHERE name = 'vocabulary'"), "is for 7 tokens"),
]


@pytest.mark.parametrize(("change", "expected"), REFUSED)
def test_a_bad_file_is_refused_and_the_one_in_use_stays(
    session: Session,
    files: StatisticsFiles,
    folder: Path,
    tmp_path: Path,
    change: Callable[[Path], Any],
    expected: str,
) -> None:
    built(files, text(tmp_path))
    before = (folder / f"bytes{SUFFIX}").read_bytes()
    copy = files.copy_to(tmp_path / "copy.db")
    change(copy)
    with pytest.raises(StorageError, match=expected):
        files.take_in(copy)
    assert left(folder) == [f"bytes{SUFFIX}"]
    assert (folder / f"bytes{SUFFIX}").read_bytes() == before
    assert session.current.statistics is not None


def test_a_file_that_is_too_large_or_not_there_is_refused(
    files: StatisticsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(files, text(tmp_path))
    copy = files.copy_to(tmp_path / "copy.db")
    monkeypatch.setattr(statistics_files, "MOST_IMPORTED", 1000)
    with pytest.raises(StorageError, match="at most"):
        files.take_in(copy)
    with pytest.raises(StorageError, match="cannot be read"):
        files.take_in(tmp_path / "gone.db")


def test_a_copy_comes_back_as_it_was(
    session: Session, files: StatisticsFiles, folder: Path, tmp_path: Path
) -> None:
    built(files, text(tmp_path))
    copy = files.copy_to(tmp_path)
    assert copy == tmp_path / f"bytes{SUFFIX}"
    with pytest.raises(StorageError, match="cannot be written"):
        files.copy_to(copy)
    files.remove()
    assert session.current.statistics is None and memory(session).statistics is None
    assert left(folder) == [] and not files.own()
    with pytest.raises(StorageError, match="no file for this model to copy"):
        files.copy_to(tmp_path / "x")
    files.take_in(copy)
    assert (folder / f"bytes{SUFFIX}").read_bytes() == copy.read_bytes()
    assert soon(lambda: memory(session).statistics is not None)
    table = StatisticsTable(copy)
    assert table.meta["title"] == "notes.txt"
    table.close()


def test_without_a_model_nothing_is_done(db: Database, folder: Path, tmp_path: Path) -> None:
    files = Session(Local(), db, folders=[folder]).statistics_files
    assert not files.own()
    for act in (lambda: built(files, text(tmp_path)), lambda: files.take_in(tmp_path)):
        with pytest.raises(StorageError, match="No model is loaded"):
            act()
