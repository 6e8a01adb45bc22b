"""The longest match: every place is found, by the compiled core as well, and nothing that was
removed, hidden or forgotten is copied."""

import random
from array import array
from collections.abc import Sequence

import pytest

from engine.drafting import copies as module
from engine.drafting.calibration import CLASSES, LONGEST, WINDOW, least_length
from engine.drafting.copies import END, EXAMINED, CompiledCopies, Copies, Texts, with_copies
from engine.types import Followers, holds

Some = Copies | CompiledCopies


def text(rng: random.Random, size: int, words: int = 4) -> list[int]:
    return [rng.randrange(words) for _ in range(size)]


def said(found: tuple[int, Followers | None]) -> tuple[int, float, float, dict[int, float]] | None:
    length, followers = found
    return followers and (length, followers.total, followers.distinct, dict(followers.counts))


def by_hand(tokens: Sequence[int], suffix: Sequence[int]) -> tuple[int, dict[int, int]]:
    """The longest match of a suffix among the newest places that have its last tokens."""
    found = list[tuple[int, int]]()
    for at in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < min(at, len(suffix)) and tokens[at - 1 - length] == suffix[-1 - length]:
            length += 1
        if length >= LONGEST and tokens[at] != END:
            found.append((length, tokens[at]))
    found = found[:EXAMINED]
    best = max((length for length, _ in found), default=0)
    counts = dict[int, int]()
    for length, token in found:
        if length == best:
            counts[token] = counts.get(token, 0) + 1
    return best, counts


@pytest.mark.parametrize("make", [Copies, CompiledCopies])
def test_the_longest_match_is_found(make: type[Some]) -> None:
    rng = random.Random(5)
    copies, known = make(), list[int]()
    lengths = set[int]()
    for _ in range(60):
        part = text(rng, rng.randrange(40))
        if known and rng.random() < 0.7:  # repeat a passage
            start = rng.randrange(len(known))
            part += [t for t in known[start : start + rng.randrange(90)] if t != END]
        copies.read(part)
        known += part
        if rng.random() < 0.2:
            copies.end()
            known.append(END)
        for _ in range(10):
            end = rng.randrange(1, len(known) + 1)
            suffix = [t for t in known[max(0, end - WINDOW) : end] if t != END]
            if rng.random() < 0.3:
                suffix = [*text(rng, 3), *suffix][-WINDOW:]
            length, counts = by_hand(known, suffix)
            found = copies.longest(suffix)
            expected = (length, sum(counts.values()), len(counts), counts) if length else None
            assert said(found) == expected
            lengths.add(length)
    assert len(copies) == len(known) and {0, WINDOW} < lengths and len(lengths) > 30


@pytest.mark.parametrize("make", [Copies, CompiledCopies])
def test_what_was_removed_or_is_hidden_is_not_found(make: type[Some]) -> None:
    rng = random.Random(6)
    first, second = text(rng, 100, 50), text(rng, 100, 50)
    copies = make()
    copies.read(first)
    copies.end()
    copies.read(second)
    for source, (start, end) in ((first, (0, 100)), (second, (101, 201))):
        assert copies.part(start, end) == source
        for at in (9, 40, 99):
            shown = copies.longest(source[:at][-WINDOW:])
            assert said(shown) == (min(at, WINDOW), 1, 1, {source[at]: 1})
            assert copies.longest(source[:at][-WINDOW:], [(start, end)]) == (0, None)
    copies.remove(0, 100)
    assert copies.longest(first[:40]) == (0, None) and copies.longest(second[:40])[0] == 40
    copies.read(first)
    assert copies.longest(first[:40])[0] == 40, "what is read again is known again"
    copies.clear()
    assert len(copies) == 0 and copies.longest(second[:40]) == (0, None)


def test_longer_matches_are_further_classes() -> None:
    once, often = Followers(1, 1, {5: 1}), Followers(9, 2, {5: 8, 6: 1})
    counted = [often] * LONGEST
    for length, size in ((8, 8), (15, 8), (16, 9), (31, 9), (32, 10), (63, 10), (64, 11)):
        assert with_copies(counted, (length, once)) == [*counted, *[once] * (size - LONGEST)]
        assert with_copies(counted[:4], (length, once)) == [*counted[:4], *[once] * (size - 4)]
        assert least_length(size) <= length
    assert with_copies(counted, (0, None)) == counted
    assert [least_length(size) for size in range(CLASSES + 1)] == [*range(9), 16, 32, 64]


@pytest.mark.parametrize("compiled", [False, True])
def test_texts_belong_to_conversations(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "copying", CompiledCopies if compiled else Copies)
    rng, texts = random.Random(7), Texts()
    one, two, more = (text(rng, 60, 1000) for _ in range(3))
    texts.read("a", one)
    texts.read("b", two)
    texts.read("a", more[:30])
    texts.read("a", more[30:])
    assert texts.copies.longest(more[:40])[0] == 40, "a text goes on where it stopped"
    assert len(texts.parts["a"]) == 2 and len(texts.parts["b"]) == 1
    texts.forget("a")
    assert texts.copies.longest(one[:40]) == texts.copies.longest(more[:40]) == (0, None)
    assert texts.copies.longest(two[:40])[0] == 40
    texts.read("a", one)
    texts.forget("nowhere")
    assert texts.copies.longest(one[:40])[0] == 40 and texts.bytes > 0


@pytest.mark.parametrize("compiled", [False, True])
def test_the_oldest_texts_go_first(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "copying", CompiledCopies if compiled else Copies)
    rng, texts, read = random.Random(8), Texts(most=400), list[list[int]]()
    for number in range(30):
        read.append(text(rng, 50, 1000))
        texts.read(f"conversation {number}", read[-1])
        assert len(texts.copies) <= 500 + 10
    for number, tokens in enumerate(read):
        length = texts.copies.longest(tokens[:40])[0]
        assert number < 23 or length == 40
    assert texts.copies.longest(read[0][:40])[0] == 0
    texts.forget("conversation 29")
    assert texts.copies.longest(read[29][:40])[0] == 0 and texts.copies.longest(read[28][:40])[0]


def test_tokens_are_found_whole() -> None:
    def packed(*tokens: int) -> bytes:
        return array("I", tokens).tobytes()

    assert holds(packed(256, 1, 7), packed(1, 7)) and holds(packed(5), packed(5))
    assert not holds(packed(256, 0, 7), packed(1)), "the bytes of two tokens"
    assert not holds(packed(1, 2), packed(3)) and not holds(b"", packed(3))
