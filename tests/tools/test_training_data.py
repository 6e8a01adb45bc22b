"""From texts to packed tokens: what is read, what is held out, and in which order it is learned."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from engine.errors import SettingError
from tests.support.training_texts import write_texts
from tests.tools.conftest import Program
from training.__main__ import main
from training.prepare import HELD, Corpus, Document, pack, parsed, read

CHAT = {"source": "a", "messages": [{"role": "user", "content": " Hi "}]}


def some(count: int) -> list[tuple[str, list[int]]]:
    """Documents of tokens that say which document they are of."""
    return [("even" if i % 2 == 0 else "odd", [i] * (1 + i % 7)) for i in range(count)]


def test_documents_are_read_compressed_or_not(tmp_path: Path) -> None:
    plain, packed = (write_texts(tmp_path / name, 40) for name in ("a.jsonl", "a.jsonl.xz"))
    documents = list(read([plain]))
    assert documents == list(read([packed])) and len(documents) == 40
    assert Counter(document.source for document in documents) == {"things": 32, "prose": 8}
    assert [parsed(d.line, plain, 1) for d in documents] == documents


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"source": "a"}',
        '{"text": "a"}',
        '{"source": "a", "text": ""}',
        '{"source": "a", "messages": []}',
        '{"source": "a", "messages": [{"role": "user"}]}',
        '{"source": "a", "messages": [{"role": "robot", "content": "Hi"}]}',
    ],
)
def test_a_line_that_is_no_document_is_told(line: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(CHAT) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(SettingError, match=r"Line 2 of '.*bad.jsonl' is no document"):
        list(read([path]))


@pytest.mark.parametrize("name", ["missing.jsonl", "broken.jsonl.xz"])
def test_a_file_that_cannot_be_read_is_told(name: str, tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl.xz").write_bytes(b"no xz")
    with pytest.raises(SettingError, match=f"{name}' cannot be read"):
        list(read([tmp_path / name]))


def test_a_hundredth_is_held_out_whatever_is_read_beside_it(tmp_path: Path) -> None:
    documents = list(read([write_texts(tmp_path / "a.jsonl", 20_000)]))
    held = [document for document in documents if document.held]
    assert 0.7 * HELD < len(held) / len(documents) < 1.3 * HELD
    sampled = list(read([tmp_path / "a.jsonl"], 0.1))
    assert 0.09 < len(sampled) / len(documents) < 0.11
    assert any(document.held for document in sampled), "the two choices are independent"
    assert [document for document in sampled if document in held] == [
        document for document in sampled if document.held
    ]


def test_documents_that_begin_alike_are_held_out_alike() -> None:
    def held(ending: str) -> bool:
        return Document(source="a", text="Once upon a time " * 20 + ending).held

    assert held("x") == held("y")


def test_every_token_comes_once_in_an_epoch(tmp_path: Path) -> None:
    packed = pack(tmp_path, some(500))
    total = sum(len(tokens) for _, tokens in some(500))
    assert len(packed.tokens) == total and packed.names == ["even", "odd"]
    epoch = list(islice(packed.windows(10, {}, seed=3), (total - 1) // 10))
    assert {len(window) for window in epoch} == {11}
    assert all(one[-1] == other[0] for one, other in zip(epoch, epoch[1:], strict=False))
    seen = Counter(np.concatenate([window[:-1] for window in epoch]).tolist())
    wanted = Counter(token for _, tokens in some(500) for token in tokens)
    assert (wanted - seen).total() <= 10 and not seen - wanted


def test_the_order_depends_on_seed_and_epoch_alone(tmp_path: Path) -> None:
    pack(tmp_path, some(200))
    packed = Corpus.open(tmp_path)
    length = (len(packed.tokens) - 1) // 10

    def first(seed: int) -> list[list[int]]:
        return [window.tolist() for window in islice(packed.windows(10, {}, seed), 2 * length)]

    assert first(1) == first(1) != first(2)
    assert first(1)[:length] != first(1)[length:], "another epoch has another order"


def test_too_little_text_for_a_window_is_told(tmp_path: Path) -> None:
    packed = pack(tmp_path / "packed", some(10))
    with pytest.raises(SettingError, match="An epoch has 34 tokens, fewer than a window of 64"):
        next(packed.windows(64, {}, 0))
    with pytest.raises(SettingError, match="An epoch has 0 tokens"):
        next(packed.windows(64, {"even": 0, "odd": 0}, 0))
    with pytest.raises(SettingError, match="no text to pack"):
        pack(tmp_path / "empty", [])
    with pytest.raises(SettingError, match="no packed tokens in '.*nowhere'"):
        Corpus.open(tmp_path / "nowhere")


@pytest.mark.model
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sample", "0"], "The sample is 0.0. It must be above 0"),
        (["--vocabulary", "100000"], "The vocabulary is 100,000. It must be from 300"),
        (["--tokenizer", "/nowhere"], "There is no tokenizer in '/nowhere'"),
    ],
)
def test_what_cannot_be_prepared_is_told(
    options: list[str], words: str, tmp_path: Path, training: Program
) -> None:
    texts = str(write_texts(tmp_path / "a.jsonl", 10))
    assert words in training.refusal("prepare", texts, "--output", str(tmp_path / "data"), *options)


@pytest.mark.model
def test_a_tokenizer_is_trained_or_taken_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = str(write_texts(tmp_path / "a.jsonl", 500))
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["prepare", texts, "--output", str(first), "--vocabulary", "320"]) == 0
    taken = ["--tokenizer", str(first / "tokenizer")]
    assert main(["prepare", texts, "--output", str(second), *taken]) == 0
    for file in (first / "tokenizer").iterdir():
        assert file.read_bytes() == (second / "tokenizer" / file.name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(str(second / "tokenizer"))
    assert len(tokenizer) == 320 and tokenizer.convert_ids_to_tokens([0, 1]) == [
        "<|bos|>",
        "<|end|>",
    ]
    packed, held = Corpus.open(second / "train"), list(read([second / "held.jsonl"]))
    assert len(packed.ends) + len(held) == 500 and all(document.held for document in held)
    learned = (document for document in read([Path(texts)]) if not document.held)
    chat = next(document for document in learned if document.messages)
    text = tokenizer.apply_chat_template(list(chat.messages), tokenize=False)
    ends = [0, *packed.ends]
    chats = [
        tokenizer.decode(packed.tokens[start:end].tolist())
        for start, end in zip(ends, ends[1:], strict=False)
    ]
    assert text in chats and text.endswith("<|end|>")
    assert f"{len(packed.tokens):,}" in capsys.readouterr().out
