"""Guesses the encoding of a text file that does not state it.

Any of the `ENCODINGS` decodes a file to some text. The one whose characters are most plausible for
a language written in it wins (`plausibility`). UTF-8 is not a guess, because text in other
encodings is hardly ever valid UTF-8. A few wrong bytes in it are replaced; a single one only if no
other encoding is plausible. A file without plausible text is not decoded.
"""

import codecs
import json
import unicodedata
from collections.abc import Callable, Mapping
from typing import NamedTuple

from assets import read

SAMPLE = 1 << 12
"""The number of bytes by which an encoding is chosen. They begin with the first line that is not
ASCII; if its first such byte is too far away, half of them stand before that byte."""
HEAD = 1 << 16
"""The characters in which control characters are counted."""
CONTROLS = 0.02
"""Content with a larger share of control characters is not text."""
LEAST = 0.45
"""The least plausibility of a text, of at most 1."""
BAD_SHARE = 0.25
"""The largest share of wrong bytes, of all characters that are not ASCII, in a file in UTF-8."""
BAD_ELSEWHERE = 0.01
"""The largest share of wrong characters in a file in another encoding."""
MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
CUT = "\ufffd"

DATA = json.loads(read("encodings.json"))
"""The encodings, the letters of languages that are not ASCII, the most frequent first, and the most
usual characters of Eastern languages."""
PUNCTUATION = {
    *"“”‘’„‚«»‹›–—…•·°§©®™€£¥№×±²³µ¼½¾\u00a0\u00ad¿¡",
    *"、。，：；！？（）「」『』《》〈〉【】・　～ー－／％＋",
}
APOSTROPHES = set("’‘´\u00ad\u00a0")
ROMAN = ("latin", "central", "turkish", "baltic", "vietnamese")
Weigh = Callable[[str], float]


def alphabetic(letters: str, others: str, slope: float) -> Weigh:
    """The weights of the letters of a language, and of the `others` in its script. The rarest one
    weighs less than the most frequent one by `slope`."""
    weights = {form: 0.5 for letter in others for form in (letter, letter.upper())}
    weights |= {
        form: 0.95 - slope * at / len(letters)
        for at, letter in enumerate(letters)
        for form in (letter, letter.upper())
    }
    return lambda letter: weights.get(letter, -0.3)


def ideographic(common: str, kana: float, hangul: float) -> Weigh:
    known = set(common)

    def weigh(letter: str) -> float:
        if letter in known:
            return 1.0
        if "\u3041" <= letter <= "\u30fe":
            return kana
        if "\uac00" <= letter <= "\ud7a3":
            return hangul
        if "\u4e00" <= letter <= "\u9fff":
            return 0.3
        return 0.5 if "\uff01" <= letter <= "\uff5e" else -0.5

    return weigh


def weights_of(languages: Mapping[str, str], roman: bool) -> tuple[Weigh, ...]:
    others, slope = ("".join(languages.values()), 0.3) if roman else ("", 0.65)
    return tuple(alphabetic(letters, others, slope) for letters in languages.values())


EASTERN: dict[str, Weigh] = {
    "zh": ideographic(DATA["common"]["zh"], 0.1, -0.5),
    "tw": ideographic(DATA["common"]["tw"], 0.1, -0.5),
    "ja": ideographic(DATA["common"]["ja"], 1.0, -0.5),
    "ko": ideographic(DATA["common"]["ko"], 0.0, 0.3),
}
SCRIPTS: dict[str, tuple[Weigh, ...]] = {
    **{name: weights_of(known, name in ROMAN) for name, known in DATA["alphabets"].items()},
    **{name: (weigh,) for name, weigh in EASTERN.items()},
}


class Encoding(NamedTuple):
    """An encoding: Python's name, the name that users know, and the scripts that it holds."""

    codec: str
    name: str
    scripts: tuple[str, ...]


ALL = tuple(SCRIPTS)
ENCODINGS = tuple(
    Encoding(codec, name, tuple(scripts)) for codec, name, scripts in DATA["encodings"]
)
"""The more usual ones come first."""
RARER = 0.002
"""By how much less plausible an encoding is than the one before it."""
WIDE = tuple(
    Encoding(f"utf_{bits}_{order}", f"UTF-{bits}", ALL)
    for bits in (32, 16)
    for order in ("le", "be")
)
ESCAPED = (
    Encoding("iso2022_jp_2", "ISO-2022-JP", ("ja",)),
    Encoding("iso2022_kr", "ISO-2022-KR", ("ko",)),
)


class Decoded(NamedTuple):
    """A text, the encoding if it was guessed ("" if not), and how many wrong places it has."""

    text: str
    guess: str = ""
    bad: int = 0


def decode(content: bytes) -> Decoded | None:
    for mark, codec in MARKS:
        if content.startswith(mark):
            return sound(content, codec)
    if b"\x1b$" in content or b"\x1b(" in content:
        for encoding in ESCAPED:
            found = sound(content, encoding.codec)
            if found and not found.bad and not found.text.isascii():
                return found._replace(guess=encoding.name)
    return utf_8(content) or guessed(content) or utf_8(content, 1)


def sound(content: bytes, codec: str) -> Decoded | None:
    """The content in this encoding, with wrong bytes replaced; None if the result is not text."""
    text = content.decode(codec, "replace")
    head = text[:HEAD]
    odd = sum(unicodedata.category(c) == "Cc" and c not in "\t\n\r\f\x1b\x0e\x0f" for c in head)
    if "\0" in text or odd > CONTROLS * len(head):
        return None
    return Decoded(text, bad=text.count(CUT) if CUT.encode() not in content else 0)


def utf_8(content: bytes, wrong: int = 0) -> Decoded | None:
    found = sound(content, "utf-8")
    if found is None or not found.bad:
        return found
    whole = sum(1 for c in found.text if c > "\x7f") - found.bad
    return found if whole > 0 and found.bad <= max(wrong, BAD_SHARE * whole) else None


def guessed(content: bytes) -> Decoded | None:
    first = next((at for at, byte in enumerate(content) if byte > 0x7F or not byte), 0)
    begin = max(content.rfind(b"\n", 0, first) + 1, first - SAMPLE // 2)
    samples = dict.fromkeys(ENCODINGS, content[begin : begin + SAMPLE])
    samples |= dict.fromkeys(WIDE, content[:SAMPLE])
    scores = {encoding: score(encoding, sample) for encoding, sample in samples.items()}
    ranks = {encoding: scores[encoding] - RARER * at for at, encoding in enumerate(scores)}
    for encoding in sorted(ranks, key=lambda each: -ranks[each]):
        if scores[encoding] < LEAST:
            return None
        found = sound(content, encoding.codec)
        if found is not None and found.bad <= BAD_ELSEWHERE * len(found.text):
            return found._replace(guess=encoding.name)
    return None


def score(encoding: Encoding, sample: bytes) -> float:
    """How plausible the sample is in this encoding, -1 if it is not text. Its last character may be
    incomplete."""
    text = codecs.getincrementaldecoder(encoding.codec)("replace").decode(sample)
    if not text or "\0" in text:
        return -1.0
    if encoding in WIDE and text.isascii():
        return 1.0
    scripts = {weigh: name for name in encoding.scripts for weigh in SCRIPTS[name]}
    return max(plausibility(text, weigh, name) for weigh, name in scripts.items())


def plausibility(text: str, weigh: Weigh, script: str) -> float:
    """The mean weight of the characters that are not ASCII, at most 1."""
    total, count, before = 0.0, 0, " "
    for letter, after in zip(text, [*text[1:], " "], strict=True):
        if letter > "\x7f":
            count += 1
            total += weight(letter, before, after, weigh, script)
        before = letter
    return total / count if count else 0.0


def weight(letter: str, before: str, after: str, weigh: Weigh, script: str) -> float:
    kind, in_word = unicodedata.category(letter)[0], before.isalpha()
    if letter in PUNCTUATION:
        symbol = kind == "S" and (in_word or after.isalpha())
        inside = in_word and after.isalpha() and letter not in APOSTROPHES
        return -0.5 if script not in EASTERN and (symbol or inside) else 0.7
    if kind == "C" or letter == CUT:
        return -2.0
    if kind == "M" and not (before > "\x7f" or in_word):
        return -1.0
    if kind not in "LM" and script not in EASTERN:
        return -0.5
    if letter.isupper() and before.islower():
        return -1.0
    latin = [each.isascii() and each.isalpha() for each in (before, after)]
    if script not in ROMAN and (all(latin) or any(latin) and script not in EASTERN):
        return -0.5
    shouted = 0.08 if letter.isupper() and before.isupper() else 0.0
    alone = script not in ROMAN and script not in EASTERN and not (in_word or after.isalpha())
    return min(weigh(letter) - shouted, 0.5 if alone else 1.0)
