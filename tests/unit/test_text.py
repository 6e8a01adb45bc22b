"""Texts from outside, some of which hold halves of surrogate pairs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unicodedata import combining

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.service import preferences
from engine import questions
from engine.servers.answer import chunk_of
from engine.text import apart, find_folded, folded, read_json, well_formed
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


@pytest.mark.parametrize(
    ("words", "text", "found"),
    [
        ("привет", "Ну, Привет, как дела?", "Привет"),
        ("МОСКВА", "про Москву и Москва", "Москва"),
        ("über", "weit ÜBER", "ÜBER"),
        ("ΑΘΉΝΑ", "Η Αθήνα", "Αθήνα"),
        ("οδος", "ΟΔΟΣ", "ΟΔΟΣ"),
        ("istanbul", "İSTANBUL'da", "İSTANBUL"),
        ("İstanbul", "in istanbul", "istanbul"),
        ("café", "Un cafe\u0301 noir", "cafe\u0301"),
        ("cafe\u0301", "Un CAFÉ noir", "CAFÉ"),
        ("strasse", "eine\nStraße", "Straße"),
        ("file", "ﬁle", "ﬁle"),
        ("abc", "ＡＢＣ", "ＡＢＣ"),
        ("한글", "\u1112\u1161\u11ab\u1100\u1173\u11af!", "\u1112\u1161\u11ab\u1100\u1173\u11af"),
        ("b\u0301\u0323", "ab\u0323\u0301c", "b\u0323\u0301"),
        ("a%_\\", "x\r\nA%_\\", "A%_\\"),
        ("cafe", "Un thé", None),
        ("ab", "a\nb", None),
    ],
)
def test_words_are_found_in_other_letters(words: str, text: str, found: str | None) -> None:
    assert (folded(words) in folded(text)) is (found is not None)
    place = find_folded(words, text)
    assert (place and text[place[0] : place[1]]) == found


@settings(deadline=None, derandomize=True)
@given(st.text(alphabet="aIİıéÉe\u0301\u0307ßﬁσςΣ\n 한"), st.data())
def test_what_is_found_folds_to_what_holds_the_words(text: str, data: st.DataObject) -> None:
    # A mark without its letter is no word: the dot of a capital I with a dot folds away.
    starts = [at for at in range(len(text) + 1) if not combining(text[at : at + 1] or " ")]
    start = data.draw(st.sampled_from(starts)) if starts else len(text)
    words = text[start : data.draw(st.integers(start, len(text)))]
    place = find_folded(words, text)
    assert place is not None
    assert apart(words) in apart(text[place[0] : place[1]])
