"""Counts of what followed a key: as the slow and obvious way finds them, and shared with care."""

import gc
import random
import re
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafting.ngrams import FREQUENT, Leaf, NgramCounts
from engine.types import STRENGTHS, WIDEST, Followers, strength
from tests.conftest import ROOT

TEXTS = st.lists(st.integers(0, 3), max_size=60)
Key = tuple[int, ...]


def brute_force(text: Sequence[int], longest: int) -> dict[Key, Counter[int]]:
    """What followed each key of up to `longest` tokens in the text."""
    behind: dict[Key, Counter[int]] = defaultdict(Counter)
    for at in range(len(text)):
        for size in range(1, min(longest, at) + 1):
            behind[tuple(text[at - size : at])][text[at]] += 1
    return behind


def counted(text: Sequence[int], longest: int) -> NgramCounts:
    counts = NgramCounts(longest)
    for at in range(len(text)):
        counts.add(tuple(text[max(0, at - longest) : at]), text[at])
    return counts


def every(counts: NgramCounts) -> dict[Key, Followers]:
    """All keys that are known, those that a leaf stands for included."""
    found: dict[Key, Followers] = {}
    for end, known in counts.table.items():
        if isinstance(known, Leaf):
            assert known.key[-len(end) :] == end
            for size in range(len(end), len(known.key) + 1):
                found[known.key[-size:]] = known.followers
        else:
            found[end] = known
    return found


def values(followers: Followers) -> tuple[float, float, dict[int, float], int]:
    return followers.total, followers.distinct, followers.counts, followers.strength


@settings(deadline=None, derandomize=True)
@given(TEXTS, TEXTS, st.integers(1, 8))
def test_matches_are_the_known_suffixes_from_short_to_long(
    text: list[int], asked: list[int], longest: int
) -> None:
    counts = counted(text, longest)
    known = every(counts)
    for suffix in (tuple(asked), tuple(text), tuple(text[-3:]), ()):
        wanted = []
        for size in range(1, min(longest, len(suffix)) + 1):
            if suffix[-size:] in known:
                wanted.append(known[suffix[-size:]])
        assert [id(f) for f in counts.matches(suffix)] == [id(f) for f in wanted]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(0, 2), st.integers(1, 3))
    )
)
def test_keys_of_any_length_in_any_order(said: list[tuple[list[int], int, int]]) -> None:
    counts, wanted = NgramCounts(3), defaultdict[Key, Counter[int]](Counter)
    for key, token, count in said:
        whole = tuple(key[-3:])
        assert counts.add(tuple(key), token, count) == bool(whole and not wanted[whole][token])
        for size in range(1, len(whole) + 1):
            wanted[whole[-size:]][token] += count
    known = {key: followers.counts for key, followers in every(counts).items()}
    assert known == {key: found for key, found in wanted.items() if key and found.total()}
    assert counts.leaves == sum(type(f) is Leaf for f in counts.table.values())
    owned = {id(f) for _, f in counts.items()} - {id(Followers.once(token)) for token in range(3)}
    assert counts.owned == len(owned)
    full = {key: f.counts for key, f in counts.items() if len(key) == 3}
    assert full == {key: found for key, found in known.items() if len(key) == 3}


def test_of_many_tokens_the_frequent_ones_are_kept() -> None:
    counts = NgramCounts(2)
    for token in range(5000):
        counts.add((1,), token)
        counts.add((1,), token % 50)
    assert counts.unigrams is not None
    assert len(counts.unigrams.counts) <= FREQUENT and set(range(50)) <= set(counts.unigrams.counts)
    assert counts.unigrams.total == 10_000


WORDS = [
    word
    for path in sorted(ROOT.glob("engine/**/*.py"))
    for word in re.findall(r"\w+|\s+|[^\w\s]", path.read_text("utf-8"))
][:12_000]


@pytest.mark.parametrize(("longest", "most"), [(4, 330), (8, 490)])
def test_a_token_of_text_takes_little_memory_and_as_much_as_is_said(
    longest: int, most: int
) -> None:
    """Text that hardly repeats is the worst case, text that was said before the usual one."""
    draw = random.Random(1)
    ids = {word: 1000 + number for number, word in enumerate(dict.fromkeys(WORDS))}
    text = [ids[word] for word in WORDS]
    for tokens in (text, text[:4000] * 3, [draw.randrange(5000) for _ in range(12_000)]):
        for token in set(tokens):
            Followers.once(token)
        gc.collect()  # It empties the lists of freed tuples, whose memory would not be counted.
        tracemalloc.start()
        try:
            counts = counted(tokens, longest)
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert taken / len(tokens) < most
        assert 0.8 < counts.bytes / taken < 1.3


def test_what_was_seen_once_is_shared_and_never_changed() -> None:
    draw = random.Random(1)
    text = [draw.randrange(5) for _ in range(400)]
    counted(text, 6)
    other = counted(text[:50], 3)
    for token in range(5):
        once = Followers.once(token)
        assert once is Followers.once(token)
        assert values(once) == (1, 1, {token: 1}, strength(1, 1))
        for second in (token, token + 1):
            grown = once.plus(second)
            assert grown is not once and grown.total == 2
            assert grown.plus(second) is grown, "from then on in place"
        assert values(once) == (1, 1, {token: 1}, strength(1, 1))
    assert {f.total for f in every(other).values()} > {1}


def test_the_frequent_next_tokens_are_kept_and_all_are_counted() -> None:
    followers, said = Followers.once(0), 1
    for _ in range(9):
        followers, said = followers.plus(0).plus(1), said + 2
    for token in range(2, 200):
        followers, said = followers.plus(token), said + 1
        assert len(followers.counts) <= WIDEST
    assert followers.total == said and followers.distinct == 200
    assert followers.counts[0] == 10 and followers.counts[1] == 9 and 199 in followers.counts
    assert followers.ranked()[:2] == [(0, 10), (1, 9)]
    assert sum(followers.counts.values()) <= followers.total
    assert followers.strength == strength(said, 200)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=300))
def test_however_wide_it_grows_the_figures_stay_possible(tokens: list[int]) -> None:
    followers = Followers.once(tokens[0])
    for token in tokens[1:]:
        followers = followers.plus(token)
    assert followers.total == len(tokens)
    assert len(set(tokens)) <= followers.distinct <= len(tokens)
    assert all(0 < count <= tokens.count(token) for token, count in followers.counts.items())
    assert 0 <= followers.strength < STRENGTHS
