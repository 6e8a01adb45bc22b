"""`python -m app.build_statistics`: what it reads, what it refuses, with file and line."""

import gzip
import json
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from app.build_statistics import documents_of, main, text_of, tokenized
from engine.backends.toy import ToyBackend
from engine.errors import StorageError
from engine.models.loaders import ModelLoaders
from engine.settings import Runtime
from storage.statistics import SUFFIX, StatisticsTable
from tests.conftest import EMBEDDED

RECORDS = [
    {"text": "one text"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]},
    {"messages": [{"role": "user", "content": "hi"}]},
]
TEXTS = [
    "one text",
    "<|user|>hi<|end|><|assistant|>there<|end|>",
    "<|user|>hi<|end|><|assistant|>",
]


def lines(records: Sequence[object]) -> bytes:
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.txt", "two\nlines é".encode(), ["two\nlines é"]),
        ("a.md", b"# title", ["# title"]),
        ("a", b"no suffix", ["no suffix"]),
        ("a.jsonl", lines(RECORDS), TEXTS),
        ("a.txt.xz", lzma.compress(b"packed"), ["packed"]),
        ("a.txt.gz", gzip.compress(b"packed", mtime=0), ["packed"]),
        ("a.jsonl.xz", lzma.compress(lines(RECORDS)), TEXTS),
        ("a.jsonl.gz", gzip.compress(lines(RECORDS), mtime=0), TEXTS),
        ("a.jsonl", b"", []),
    ],
)
def test_every_kind_of_file(tmp_path: Path, name: str, content: bytes, wanted: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert list(documents_of(path, ToyBackend())) == wanted


@pytest.mark.parametrize(
    "bad",
    ['{"text": ', '["text"]', '"text"', "7", "null", '{"body": "x"}', '{"messages": 3}',
     '{"messages": [{"role": "user"}]}', '{"messages": ["hi"]}', "\ufeff{}", "", "[" * 100_000],
)  # fmt: skip
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + bad + "\n", encoding="utf-8")
    documents = documents_of(path, ToyBackend())
    assert next(documents) == "good"
    with pytest.raises(StorageError) as caught:
        next(documents)
    assert str(caught.value).startswith(f"Line 2 of {str(path)!r} is not a document")


def corrupt(packed: bytes) -> bytes:
    middle = len(packed) // 2
    return packed[:middle] + bytes(b ^ 0x55 for b in packed[middle : middle + 20]) + packed[-20:]


NOISE = np.random.Generator(np.random.Philox(key=1)).bytes(400).hex().encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b"\xff\xfe\x00"),
        ("a.txt.xz", b"not xz"),
        ("a.txt.gz", b"not gzip"),
        ("a.txt.xz", lzma.compress(NOISE)[:60]),
        ("a.txt.gz", gzip.compress(NOISE, mtime=0)[:60]),
        ("a.txt.xz", corrupt(lzma.compress(NOISE))),
        ("a.txt.gz", corrupt(gzip.compress(NOISE, mtime=0))),
        ("a.txt", None),
    ],
)
def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StorageError, match="cannot be read") as caught:
        list(documents_of(path, ToyBackend()))
    assert repr(str(path)) in str(caught.value)


def test_a_chat_becomes_what_the_model_sees() -> None:
    assert [text_of(record, ToyBackend()) for record in RECORDS] == TEXTS


def test_reading_stops_at_the_token_limit(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": "x" * 10}] * 9))
    documents = tokenized([tmp_path / "a.jsonl"], ToyBackend(), 25)
    assert [len(document) for document in documents] == [10, 10, 10]
    assert documents[0].dtype == np.uint32


# The whole command, with the embedded model's tokenizer.


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("The cat sat on the mat. " * 40)
    return path


@pytest.mark.model
def test_the_command_builds_a_file_that_drafts(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], embedded
) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "data"
    status = main([str(texts), "--model", str(EMBEDDED), "--data-dir", str(folder)])
    assert status == 0
    fingerprint = embedded.info.tokenizer_fingerprint
    path = folder / "statistics" / f"{fingerprint}{SUFFIX}"
    assert [child for child in folder.rglob("*") if child.is_file()] == [path]
    table = StatisticsTable(path)
    assert f"{int(table.meta['keys']):,} keys" in capsys.readouterr().out
    assert table.meta["tokenizer"] == fingerprint and table.meta["title"] == "texts.txt"
    tokens = embedded.tokenize(" cat sat on the mat.")
    found = table.look_up(tokens[:1])
    assert found is not None and found.counts == {tokens[1]: found.total}
    for at in range(3, len(tokens)):
        found = table.look_up(tokens[at - 3 : at])
        assert found is not None and list(found.counts) == [tokens[at]]
    table.close()


@pytest.mark.gguf
@pytest.mark.model
def test_a_file_and_a_folder_of_one_tokenizer_share_their_statistics(
    texts: Path, tmp_path: Path
) -> None:
    contents = []
    for name, source in (("folder", EMBEDDED), ("file", EMBEDDED.with_suffix(".gguf"))):
        assert main([str(texts), "--model", str(source), "--data-dir", str(tmp_path / name)]) == 0
        (made,) = (tmp_path / name / "statistics").iterdir()
        contents.append((made.name, made.read_bytes()))
    assert contents[0] == contents[1]


def test_a_model_that_is_not_here_is_downloaded_first(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def download(
        source: str, progress: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> str:
        progress(5, 10)
        progress(10, 10)
        done.append("download " * (not cancelled()) + source)
        return source

    def load(source: str, runtime: Runtime) -> ToyBackend:
        done.append(f"load {source}")
        return ToyBackend()

    loaders = ModelLoaders(load=load, present=lambda source: False, download=download)
    monkeypatch.setattr("app.build_statistics.MODEL_LOADERS", loaders)
    out = tmp_path / "a.db"
    assert main([str(texts), "--model", "owner/name:file.gguf", "--out", str(out)]) == 0
    assert done == ["download owner/name:file.gguf", "load owner/name:file.gguf"]
    assert out.is_file()


@pytest.mark.model
def test_mistakes_end_with_status_2_and_leave_nothing(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "a.db"
    for arguments, words in [
        (["missing.txt", "--model", str(EMBEDDED), "--out", str(out)], "missing.txt"),
        ([str(texts), "--model", str(tmp_path / "none"), "--out", str(out)], "does not exist"),
        ([str(texts), "--model", str(EMBEDDED), "--out", str(texts / "a.db")], "written"),
    ]:
        assert main(arguments) == 2
        errors = capsys.readouterr().err
        assert words in errors and "Traceback" not in errors
    assert [child.name for child in tmp_path.iterdir()] == ["texts.txt"]


@pytest.mark.model
def test_an_interrupted_command_leaves_the_old_file(
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "a.db"
    out.write_bytes(b"the old one")

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("storage.statistics_build.write", interrupt)
    assert main([str(texts), "--model", str(EMBEDDED), "--out", str(out)]) == 130
    assert "Cancelled" in capsys.readouterr().err
    assert out.read_bytes() == b"the old one"
    assert sorted(child.name for child in tmp_path.iterdir()) == ["a.db", "texts.txt"]
