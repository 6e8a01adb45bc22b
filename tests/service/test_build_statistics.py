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
