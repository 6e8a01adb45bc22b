"""`python -m app.build_statistics`: what it reads, what it refuses, with file and line."""

import gzip
import io
import json
import lzma
import pickle
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from backports import zstd

from app.build_statistics import main, tokenized
from app.corpus import tokenizer_of
from engine.errors import StorageError
from engine.local import document_text
from engine.models.loaders import ModelLoaders
from engine.settings import Runtime
from storage import documents as reader
from storage.documents import Meter, Reading, connection, documents
from storage.statistics_shards import Job
from tests.support.shards import count_inline
from tests.support.toy import ToyBackend

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


CHAT = "[{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'there'}]"


def parquet(columns: str, rows: int = 1) -> bytes:
    """A Parquet file of these columns, in SQL, of row number i."""
    with tempfile.TemporaryDirectory() as folder, duckdb.connect() as duck:
        path = Path(folder) / "made.parquet"
        duck.execute(f"COPY (SELECT {columns} FROM range({rows}) t(i)) TO '{path}'")
        return path.read_bytes()


def damaged_parquet() -> bytes:
    """One whose end is whole."""
    content = parquet("md5(i::VARCHAR) AS text", 5000)
    return content[:900] + bytes(len(content) // 2) + content[900 + len(content) // 2 :]


PICTURE = [{"type": "image_url", "image_url": {"url": "data:,"}}]
PARTS = [{"type": "text", "text": "one "}, *PICTURE, {"text": "two"}]
CALLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "tool_calls": [{"id": "2"}]},
    {"role": "assistant", "content": "It is sunny."},
]
CALLED = "<|user|>Weather?<|end|><|assistant|>It is sunny.<|end|>"


def zipped(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return made.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "two\nlines é".encode(), ["two\nlines é"]),
        ("a.md", b"# title", ["# title"]),
        ("a", b"no suffix", ["no suffix"]),
        ("a.jsonl", lines(RECORDS), TEXTS),
        ("a.txt.xz", lzma.compress(b"packed"), ["packed"]),
        ("a.txt.gz", gzip.compress(b"packed", mtime=0), ["packed"]),
        ("a.jsonl.xz", lzma.compress(lines(RECORDS)), TEXTS),
        ("a.jsonl.gz", gzip.compress(lines(RECORDS), mtime=0), TEXTS),
        ("a.txt", b"\xef\xbb\xbfwith a mark", ["with a mark"]),
        ("a.TXT", b"loud", ["loud"]),
        ("a.json", json.dumps(RECORDS).encode(), TEXTS),
        ("a.json", json.dumps(RECORDS[0]).encode(), TEXTS[:1]),
        ("a.csv", b'id,Text\n1,"one, ""two"""\n2,three\n3\n', ['one, "two"', "three"]),
        ("a.csv", b"a,b\none,two\nthree,four\n", ["one, two", "three, four"]),
        ("a.csv", b"id;text;label\n1;A boat, slowly;good\n", ["A boat, slowly"]),
        ("a.csv", b"sep=;\r\nid;Content\r\n1;one\r\n", ["one"]),
        ("a.csv", b"sep=\t\nid\ttext\n1\tone\n", ["one"]),
        ("a.csv", b'"id"|"text"\n1|"a|b"\n', ["a|b"]),
        ("a.csv", b"a;b\none;two, three\n", ["one, two, three"]),
        ("a.tsv", b"id\ttext\n1\tone, two\n", ["one, two"]),
        ("a.ndjson", lines(RECORDS), TEXTS),
        ("a.jsonl", b"\n" + lines(RECORDS) + b" \r\n\n" + lines(RECORDS[:1]), [*TEXTS, TEXTS[0]]),
        ("a.jsonl", lines([{"messages": None, "text": "one"}, {"text": None}]), ["one"]),
        ("a.jsonl", lines([{"text": None, "content": "one"}]), ["one"]),
        ("a.jsonl", lines([{"content": PARTS}, {"text": PICTURE}]), ["one two"]),
        (
            "a.jsonl",
            lines([{"messages": [{"role": "user", "content": PARTS}]}]),
            ["<|user|>one two<|end|><|assistant|>"],
        ),
        ("a.jsonl", lines([{"messages": CALLS}, {"messages": CALLS[1:2]}]), [CALLED]),
        ("a.csv.gz", gzip.compress(b"content\nin it\n", mtime=0), ["in it"]),
        ("a.txt.zst", zstd.compress(b"packed"), ["packed"]),
        ("a.jsonl.zst", zstd.compress(lines(RECORDS[:1])) + zstd.compress(b""), TEXTS[:1]),
        ("a.jsonl", lines([{"content": "one"}, {"text": "two", "content": "no"}]), ["one", "two"]),
        ("a.parquet", parquet("'one' AS text, 1 AS id"), ["one"]),
        ("a.parquet", parquet("'no' AS title, 'one' AS Content"), ["one"]),
        ("a.parquet", parquet(f"{CHAT} AS messages, 'no' AS text"), TEXTS[1:2]),
        (
            "a.parquet",
            parquet("nullif(i, 1)::VARCHAR AS text", 3),
            ["0", "2"],
        ),
        ("a[1]*'b.parquet", parquet("'odd name' AS text"), ["odd name"]),
        ("a.zip", zipped({"b.txt": b"one", "c/d.jsonl": lines(RECORDS[:1])}), ["one", "one text"]),
        ("a.zip", zipped({"../../e.txt": b"inert", "f.exe": b"no"}), ["inert"]),
    ],
)
def test_every_kind_of_file(tmp_path: Path, name: str, content: bytes, expected: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert [document_text(each, ToyBackend()) for each in documents(path)] == expected


@pytest.mark.parametrize(
    "bad",
    ['{"text": ', '["text"]', '"text"', "7", "null", '{"body": "x"}', '{"messages": 3}',
     '{"messages": [{"role": "user"}]}', '{"messages": ["hi"]}', "\ufeff{}", "[" * 100_000,
     '{"text": 7}', '{"text": {"a": 1}}', '{"text": [7]}', '{"text": [{"a": 1}]}', '{"text": true}',
     '{"messages": [{"role": 7, "content": "x"}]}',
     '{"messages": [{"role": "user", "content": 7}]}'],
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


UNREADABLE: list[tuple[str, bytes | None]] = [
    ("a.txt", None),
    ("a.parquet", None),
    ("a.txt", b"\xff\xfe\x00"),
    ("a.txt.xz", b"not xz"),
    ("a.txt.gz", b"not gzip"),
    ("a.txt.xz", lzma.compress(NOISE)[:60]),
    ("a.txt.gz", gzip.compress(NOISE, mtime=0)[:60]),
    ("a.txt.xz", corrupt(lzma.compress(NOISE))),
    ("a.txt.gz", corrupt(gzip.compress(NOISE, mtime=0))),
    ("a.txt.zst", b"not zst"),
    ("a.txt.zst", zstd.compress(NOISE)[:60]),
    ("a.txt.zst", corrupt(zstd.compress(NOISE))),
    ("a.parquet", b"PAR1"),
    ("a.parquet", parquet("'one' AS text")[:-9]),
    ("a.parquet", damaged_parquet()),
    ("a.zip", b"not a zip"),
    ("a.zip", corrupt(zipped({"b.txt": NOISE * 9}))),
    ("a.csv", b"text\n" + b"x" * (17 << 20)),
]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        *((name, content, "cannot be read") for name, content in UNREADABLE),
        ("a.txt", b"", "is empty.*Leave it out"),
        ("a.jsonl", b"", "is empty"),
        ("a.parquet", b"", "cannot be read.*Get it again"),
        ("a.txt.gz", gzip.compress(b""), "is empty"),
        ("a.parquet", parquet("'x' AS text", 0), "is empty"),
        ("a.parquet", parquet("'x' AS body, 1 AS id"), r"--field: it has body \(VARCHAR\), id"),
        ("a.parquet", parquet("1 AS text"), "holds no texts or chats, but INTEGER"),
        ("a.parquet", parquet("[{'a': 'x'}] AS messages"), "Row 1 of .* is not a document"),
        ("a.parquet.gz", b"x", "Unpack it first"),
        ("a.zip", zipped({"b.parquet": b"x"}), "no file that can"),
        ("a.zip", zipped({"b.exe": b"x", "d.zip": zipped({"e.txt": b"x"})}), "no file that can"),
        ("a.jsonl", b'"' + b"x" * (16 << 20) + b'"', "Line 1 .* longer than"),
        ("a.json", b'[{"text": "x"}, {"no": 1}]', "Entry 2 of"),
        ("a.json", b"[" * 100_000, "not a document"),
    ],
)
def test_what_is_refused_is_reported(
    tmp_path: Path, name: str, content: bytes | None, expected: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StorageError, match=expected) as caught:
        list(documents(path))
    assert repr(str(path)) in str(caught.value)


def test_a_packed_file_gives_only_so_much(tmp_path: Path) -> None:
    little = Reading(most_bytes=1 << 20)
    bomb = b"x\n" * (8 << 20)
    for name, content in (
        ("a.txt.xz", lzma.compress(bomb, preset=0)),
        ("a.txt.gz", gzip.compress(bomb, mtime=0)),
        ("a.txt.zst", zstd.compress(bomb)),
        ("a.zip", zipped({"b.txt": bomb})),
    ):
        (tmp_path / name).write_bytes(content)
        taken = 0
        with pytest.raises(StorageError, match="the most that is unpacked.*statistics --memory"):
            for found in documents(tmp_path / name, reading=little):
                taken += len(found)
        assert taken <= 1 << 20
    assert len([*documents(tmp_path / name, reading=Reading(most_bytes=None))]) > 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", lines([{"text": "no", "Body": 7, "body": "yes"}])),
        ("a.json", json.dumps({"text": "no", "body": "yes"}).encode()),
        ("a.csv", b"text,Body\nno,yes\n"),
        ("a.parquet", parquet("'no' AS text, 'yes' AS Body")),
    ],
)
def test_a_field_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert [*documents(path, reading=Reading("body"))] == ["yes"]
    with pytest.raises(StorageError, match="(?i)missing.*(it has|must be)"):
        list(documents(path, reading=Reading("missing")))


def test_parquet_is_read_a_few_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they are grouped in the file; the meter moves with them."""
    made = parquet("i::VARCHAR AS text", 5000)
    (tmp_path / "a.parquet").write_bytes(made)
    held: list[int] = []

    class Watched:
        def __init__(self, duck: Any) -> None:
            self.duck = duck

        def execute(self, *asked: Any) -> Any:
            self.duck.execute(*asked)
            return self

        def fetchone(self) -> Any:
            return self.duck.fetchone()

        def fetchall(self) -> Any:
            held.append(len(rows := self.duck.fetchall()))
            return rows

    @contextmanager
    def watched(*words: Any) -> Iterator[Any]:
        with connection(*words) as duck:
            yield Watched(duck)

    monkeypatch.setattr("storage.documents.connection", watched)
    meter, done = Meter(), list[int]()
    for number, found in enumerate(documents(tmp_path / "a.parquet", meter)):
        assert found == str(number)
        done.append(meter.done)
    assert max(held) == 1024 and sum(held) > 5000
    assert done == sorted(done) and len(set(done)) > 100 and meter.done == len(made)


@pytest.mark.parametrize(
    ("name", "module", "expected"),
    [
        ("a.parquet", "duckdb", "needs DuckDB.*pip install duckdb"),
        ("a.txt.zst", reader.ZSTD, "pip install backports.zstd"),
    ],
)
def test_a_library_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, expected: str
) -> None:
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StorageError, match=expected):
        list(documents(tmp_path / name))


def test_a_long_text_is_cut_where_lines_end_and_nothing_is_lost(tmp_path: Path) -> None:
    content = "".join(f"line {n} of many é\n" for n in range(20_000)) + "y" * 200_000
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    meter = Meter()
    found = [str(each) for each in documents(tmp_path / "a.txt", meter)]
    assert "".join(found) == content and len(found) > 5
    assert all(len(each) <= 3 * reader.PIECE for each in found)
    assert all(each.endswith("\n") for each in found[:4])
    assert meter.done == len(content.encode())


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


def test_texts_larger_than_memory_make_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut into volumes and shards, which are counted in parts or at once."""
    files = []
    for number in range(5):
        path = tmp_path / f"{number}.jsonl.zst"
        records = [{"body": f"text {n} of {number}, and again {n}. "} for n in range(40)]
        path.write_bytes(zstd.compress(lines([*records, {"body": "x"}])))
        files.append(str(path))
    monkeypatch.setattr(
        "app.build_statistics.MODEL_LOADERS", ModelLoaders(tokenizer=lambda *_: ToyBackend())
    )
    monkeypatch.setattr("app.corpus.tokenizer", lambda model: ToyBackend())
    tokenizer_of.cache_clear()
    monkeypatch.setattr("app.corpus.VOLUME", 300)
    monkeypatch.setattr("app.build_statistics.CHARACTERS", 1)
    monkeypatch.setattr("app.build_statistics.shard_size", lambda memory, shards: 500)
    counted: list[Job] = []
    parts: list[object] = []

    def inline(job: Job, how: Any, told: Callable[[int, float], None], part: object) -> None:
        assert how == 3
        parts.append(part)
        if part is None:
            counted.append(job)
            count_inline(pickle.loads(pickle.dumps(job)))
        told(0, 1.0)

    monkeypatch.setattr("app.build_statistics.count", inline)
    options = [*files, "--model", "toy", "--field", "body", "--title", "a title"]
    one, many = tmp_path / "one.db", tmp_path / "many.db"
    assert main([*options, "--out", str(one)]) == 0
    large = ["--out", str(many), "--memory", "0.5", "--shards", "3"]
    assert main([*options, *large, "--part", "2/4"]) == 0
    assert "run the command without --part" in capsys.readouterr().out and not many.exists()
    assert main([*options, *large]) == 0
    assert parts == [(2, 4), None]
    assert many.read_bytes() == one.read_bytes()
    texts = counted[0].texts
    assert 1 < texts.volumes < 5
    shards = [shard for n in range(texts.volumes) for shard in texts.shards(n, lambda share: None)]
    assert len(shards) > 9 and sum(map(len, shards)) == 5 * 41


def test_a_file_that_cannot_be_read_is_known_before_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaders = ModelLoaders(tokenizer=lambda *_: ToyBackend())
    monkeypatch.setattr("app.build_statistics.MODEL_LOADERS", loaders)
    monkeypatch.delattr("app.build_statistics.count")
    good, empty, out = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "out.db"
    good.write_text("a text")
    empty.touch()
    command = [str(good), str(empty), "--model", "toy", "--out", str(out), "--memory", "1"]
    assert main(command) == 2
    assert f"{str(empty)!r} is empty" in capsys.readouterr().err
    assert not out.with_name("out.db.work").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["1/2", "--shards", "2"], "needs --memory and --shards"),
        (["1/2", "--memory", "1"], "needs --memory and --shards"),
        (["0/2"], "'0/2' is not a part"),
        (["3/2"], "'3/2' is not a part"),
        (["1"], "'1' is not a part"),
    ],
)
def test_a_part_that_cannot_be_counted_is_refused(
    texts: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    with pytest.raises(SystemExit):
        main([str(texts), "--model", "toy", "--part", *options])
    assert expected in capsys.readouterr().err


def test_the_tokenizer_alone_is_loaded_and_downloaded_first(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def tokenizer(source: str, progress: Callable[[int, int], None]) -> ToyBackend:
        progress(5, 10)
        progress(10, 10)
        done.append(source)
        return ToyBackend()

    def load(source: str, runtime: Runtime) -> ToyBackend:
        raise AssertionError("no weights are needed")

    loaders = ModelLoaders(load=load, tokenizer=tokenizer)
    monkeypatch.setattr("app.build_statistics.MODEL_LOADERS", loaders)
    out = tmp_path / "a.db"
    assert main([str(texts), "--model", "owner/name:file.gguf", "--out", str(out)]) == 0
    assert done == ["owner/name:file.gguf"]
    assert out.is_file()
