"""Texts from outside, some of which hold halves of surrogate pairs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.service import preferences
from engine import questions
from engine.servers.answer import chunk_of
from engine.text import read_json, well_formed
from storage import imports
from storage.documents import documents

HALVES = "high \ud83d, low \ude00, both \ud83d\ude00"
MENDED = "high \ufffd, low \ufffd, both 😀"


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        (HALVES, MENDED),
        ("", ""),
        ("é日😀", "é日😀"),
        ("\ud83d", "\ufffd"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ud83d\ude00", "\ufffd😀"),
        ("\ufeffa\ud83d\0", "\ufeffa\ufffd\0"),
    ],
)
def test_halves_that_belong_together_are_joined_and_others_replaced(text: str, mended: str) -> None:
    assert well_formed(text) == mended and well_formed(mended) is mended


def test_a_value_of_json_is_mended_everywhere() -> None:
    value: Any = {HALVES: [HALVES, 1, None, {"a": HALVES}]}
    mended = {MENDED: [MENDED, 1, None, {"a": MENDED}]}
    assert well_formed(value) == mended
    assert read_json(json.dumps(value)) == mended
    raw = json.dumps(value, ensure_ascii=False)
    for encoding in ("utf-8", "utf-16-le"):
        assert read_json(raw.encode(encoding, "surrogatepass")) == mended
    assert read_json(r'"\uD83D"') == "\ufffd"


def from_documents(path: Path, content: str) -> object:
    path.write_text(content, "utf-8")
    return [*documents(path)]


TURN = {"role": "user", "content": HALVES}
PRESET = {"format": "strata-presets", "version": 1}


@pytest.mark.parametrize(
    "found",
    [
        lambda folder: from_documents(folder / "a.jsonl", json.dumps({"text": HALVES})),
        lambda folder: from_documents(folder / "a.jsonl", json.dumps({"messages": [TURN]})),
        lambda folder: from_documents(folder / "a.json", json.dumps([{"text": HALVES}])),
        lambda folder: questions.typed(json.dumps({"turns": [HALVES]})),
        lambda folder: questions.parsed(json.dumps({"turns": [HALVES]}).encode()),
        lambda folder: imports.read_file(json.dumps([TURN]).encode(), 1).conversations[0].messages,
        lambda folder: [*preferences.read(preset(HALVES))],
        lambda folder: chunk_of(f"data: {json.dumps({'choices': [{'delta': TURN}]})}"),
    ],
)
def test_every_file_and_server_is_read_in_well_formed_texts(
    found: Callable[[Path], object], tmp_path: Path
) -> None:
    assert MENDED in str(found(tmp_path))


def preset(prompt: str) -> bytes:
    each = {"name": "mine", "system_prompt": prompt, "settings": {}}
    return json.dumps({**PRESET, "presets": [each]}).encode()
