"""`python -m app.build_statistics`: what it reads, what it refuses, with file and line."""

import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from app.build_statistics import main, tokenized
from engine.backends.toy import ToyBackend
from engine.errors import StorageError
from engine.local import document_text
from engine.models.loaders import ModelLoaders
from engine.settings import Runtime
from storage import documents as reader
from storage.documents import Meter, document_of, documents

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


def zipped(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return made.getvalue()


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
        ("a.txt", b"\xef\xbb\xbfwith a mark", ["with a mark"]),
        ("a.TXT", b"loud", ["loud"]),
        ("a.json", json.dumps(RECORDS).encode(), TEXTS),
        ("a.json", json.dumps(RECORDS[0]).encode(), TEXTS[:1]),
        ("a.csv", b'id,Text\n1,"one, ""two"""\n2,three\n3\n', ['one, "two"', "three"]),
        ("a.csv", b"a,b\none,two\nthree,four\n", ["one, two", "three, four"]),
        ("a.csv.gz", gzip.compress(b"content\nin it\n", mtime=0), ["in it"]),
        ("a.zip", zipped({"b.txt": b"one", "c/d.jsonl": lines(RECORDS[:1])}), ["one", "one text"]),
        ("a.zip", zipped({"../../e.txt": b"inert", "f.exe": b"no"}), ["inert"]),
    ],
)
def test_every_kind_of_file(tmp_path: Path, name: str, content: bytes, wanted: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert [document_text(each, ToyBackend()) for each in documents(path)] == wanted


@pytest.mark.parametrize(
    "bad",
    ['{"text": ', '["text"]', '"text"', "7", "null", '{"body": "x"}', '{"messages": 3}',
     '{"messages": [{"role": "user"}]}', '{"messages": ["hi"]}', "\ufeff{}", "", "[" * 100_000],
)  # fmt: skip
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + bad + "\n", encoding="utf-8")
    found = documents(path)
    assert next(found) == "good"
    with pytest.raises(StorageError) as caught:
        next(found)
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
        ("a.zip", b"not a zip"),
        ("a.zip", corrupt(zipped({"b.txt": NOISE * 9}))),
        ("a.csv", b"text\n" + b"x" * (17 << 20)),
    ],
)
def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StorageError, match="cannot be read") as caught:
        list(documents(path))
    assert repr(str(path)) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.parquet", b"PAR1", "Parquet"),
        ("a.zip", zipped({"b.exe": b"x", "d.zip": zipped({"e.txt": b"x"})}), "no file that can"),
        ("a.jsonl", b'"' + b"x" * (16 << 20) + b'"', "Line 1 .* longer than"),
        ("a.json", b'[{"text": "x"}, {"no": 1}]', "Entry 2 of"),
        ("a.json", b"[" * 100_000, "not a document"),
    ],
)
def test_what_is_refused_is_told(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StorageError, match=words):
        list(documents(tmp_path / name))


def test_a_packed_file_gives_only_so_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MOST_BYTES", 1 << 20)
    bomb = b"x\n" * (8 << 20)
    for name, content in (
        ("a.txt.xz", lzma.compress(bomb, preset=0)),
        ("a.txt.gz", gzip.compress(bomb, mtime=0)),
        ("a.zip", zipped({"b.txt": bomb})),
    ):
        (tmp_path / name).write_bytes(content)
        taken = 0
        with pytest.raises(StorageError, match="the most that is unpacked"):
            for found in documents(tmp_path / name):
                taken += len(found)
        assert taken <= 1 << 20


def test_a_long_text_is_cut_where_lines_end_and_nothing_is_lost(tmp_path: Path) -> None:
    content = "".join(f"line {n} of many é\n" for n in range(20_000)) + "y" * 200_000
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    meter = Meter()
    found = [str(each) for each in documents(tmp_path / "a.txt", meter)]
    assert "".join(found) == content and len(found) > 5
    assert all(len(each) <= 3 * reader.PIECE for each in found)
    assert all(each.endswith("\n") for each in found[:4])
    assert meter.done == len(content.encode())


def test_a_chat_becomes_what_the_model_sees() -> None:
    found = [document_of(record) for record in RECORDS]
    assert [document_text(each, ToyBackend()) for each in found] == TEXTS


def test_reading_stops_at_the_token_limit(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": "x" * 10}] * 9))
    arrays = tokenized([tmp_path / "a.jsonl"], ToyBackend(), 25)
    assert [len(array) for array in arrays] == [10, 10, 10]
    assert arrays[0].dtype == np.uint32


# The whole command.


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("The cat sat on the mat. " * 40)
    return path


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
