"""What a killed program left is cleaned at the next start; what another is using is not."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from engine.errors import StorageError
from engine.types import CalibrationRow
from storage import cleanup
from storage.conversations import Conversations
from storage.database import Database
from storage.drafting import BENCHMARK, CalibrationStore, DraftingStore, lend
from storage.ngrams import ModelNgrams
from storage.statistics import SUFFIX, StatisticsTable
from storage.statistics_build import build
from tests.conftest import ROOT
from tests.unit.test_conversations import contents, save_run

BUILDER = """
import sys
import numpy as np
from pathlib import Path
from storage.statistics_build import build

def wait(stage, done):
    if stage == "write":
        print("writing", flush=True)
        sys.stdin.readline()

documents = [np.array([1, 2] * 50, dtype=np.uint32)]
build(documents, Path(sys.argv[1]), "tok", 100, "a title", 1 << 20, wait)
print("done", flush=True)
"""


def test_answers_without_a_word_are_deleted(db: Database, tmp_path: Path) -> None:
    mine = Conversations(db, "ada")
    id = mine.create().id
    question = mine.append(id, "user", "Hi")
    mine.append(id, "assistant", "", save_run(db, "ada", id), [("", "target", 0, 0, 0, 0.5)])
    mine.append(id, "user", "")
    empty = mine.append(id, "assistant", "", pieces=())
    mine.append(id, "assistant", "Hello", after=question.id, pieces=())
    mine.append(id, "user", "again", after=empty.id)
    mine.show(id, empty.id)
    cleanup.clean(db, tmp_path / "no folder")
    found = [(message.role, message.content) for message in mine.messages(id)]
    assert found == [("user", "Hi"), ("assistant", ""), ("user", ""), ("user", "again")]
    mine.show(id, mine.messages(id)[1].versions[1])
    assert contents(mine, id) == ["Hi", "Hello"]


def test_what_a_benchmark_knew_is_deleted(db: Database, tmp_path: Path) -> None:
    ModelNgrams(db, "ada", "model").learn([(1, 2), (2, 3)])
    CalibrationStore(db, "ada", "model").save([CalibrationRow("context", 1, 1, 1.0, 1.0)])
    lend(db, "ada", "model")
    store = DraftingStore(db)
    assert store.past(BENCHMARK, "model")[:2] == store.past("ada", "model")[:2]
    cleanup.clean(db, tmp_path)
    assert not any(store.past(BENCHMARK, "model")[:2])
    assert len(store.past("ada", "model").grams) == 2


def test_what_was_deleted_goes_at_the_next_start(db: Database, tmp_path: Path) -> None:
    mine = Conversations(db, "ada")
    kept, gone = mine.create().id, mine.create().id
    question = mine.append(kept, "user", "secret")
    mine.append(gone, "user", "secret")
    tokens = [mine.delete_message(kept, question.id), mine.delete(gone)]
    cleanup.clean(db, tmp_path)
    assert db.execute_read("SELECT count(*) FROM messages") == [(0,)]
    assert [each.id for each in mine.list()] == [kept]
    for token in tokens:
        with pytest.raises(StorageError, match="cannot be undone"):
            mine.undo(token)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / cleanup.STATISTICS).mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "content", [b"", b"not a database", b"SQLite format 3\x00" + b"\x00" * 90, None]
)
def test_builds_that_broke_off_are_deleted(
    db: Database, folder: Path, content: bytes | None
) -> None:
    sound = folder / cleanup.STATISTICS / f"tok{SUFFIX}"
    build([np.array([1, 2] * 9, dtype=np.uint32)], sound, "tok", 9, "", 1 << 20)
    path = sound.with_name(f"{sound.name}.123.partial")
    path.write_bytes(sound.read_bytes() if content is None else content)
    cleanup.clean(db, folder)
    assert not path.exists() and StatisticsTable(sound).meta["tokenizer"] == "tok"


@pytest.mark.parametrize("killed", [False, True])
def test_a_build_under_way_stays_and_a_killed_one_goes(
    db: Database, folder: Path, killed: bool
) -> None:
    place = folder / cleanup.STATISTICS
    target = place / f"tok{SUFFIX}"
    command = [sys.executable, "-c", BUILDER, str(target)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as child:  # type: ignore[call-overload]
        assert child.stdout.readline() == "writing\n"
        cleanup.clean(db, folder)
        (path,) = place.iterdir()
        assert path.name.endswith(".partial")
        if killed:
            child.kill()
            child.wait()
            cleanup.clean(db, folder)
            assert list(place.iterdir()) == []
        else:
            out, _ = child.communicate("\n")
            assert out == "done\n" and child.returncode == 0
            assert [path.name for path in place.iterdir()] == [target.name]


def test_uploads_that_nobody_read_are_deleted_when_they_are_old(db: Database, folder: Path) -> None:
    old, new = (folder / cleanup.UPLOADS / name / "file.json" for name in ("old", "new"))
    for path in (old, new):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    before = time.time() - cleanup.UPLOAD_SECONDS - 60
    os.utime(old, (before, before))
    cleanup.clean(db, folder)
    assert not old.exists() and new.exists()
