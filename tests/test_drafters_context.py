"""The context tier: every draft was said before, long matches first, edits are followed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafters.context import LONGEST_COPY, PLACES, ContextDrafter, common_prefix
from engine.drafters.votes import Votes, confidence
from engine.types import Candidate

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def keeps_its_promises(candidates: list[Candidate], room: int, threshold: float) -> None:
    """The Drafter protocol: room, threshold, likeliest first, every prefix before its path."""
    assert len(candidates) <= room
    seen: set[tuple[int, ...]] = {()}
    for candidate in candidates:
        assert candidate.path and candidate.path not in seen and candidate.path[:-1] in seen
        seen.add(candidate.path)
        assert threshold <= candidate.probability <= 1 + 1e-9 and candidate.match_length >= 1
    values = [candidate.probability for candidate in candidates]
    assert values == sorted(values, reverse=True)
    children: dict[tuple[int, ...], float] = {}
    for candidate in candidates:
        parent = candidate.path[:-1]
        children[parent] = children.get(parent, 0.0) + candidate.probability
    known = {(): 1.0} | {candidate.path: candidate.probability for candidate in candidates}
    assert all(total <= known[path] + 1e-9 for path, total in children.items())


@settings(deadline=None, derandomize=True, max_examples=400)
@given(TOKENS, TOKENS.filter(bool), st.integers(0, 12), st.floats(0.0, 0.6))
def test_drafts_are_what_followed_the_same_words(
    log: list[int], prompt: list[int], room: int, threshold: float
) -> None:
    drafter = ContextDrafter(log)
    drafter.observe(prompt, len(prompt))
    whole = [*log, *prompt]
    assert drafter.log == whole
    candidates = drafter.propose(prompt, room, threshold)
    keeps_its_promises(candidates, room, threshold)
    for path, _, length in candidates:
        size = min(length, 3)
        wanted = [*whole[len(whole) - size :], *path]
        assert any(wanted == whole[i : i + len(wanted)] for i in range(len(whole))), path


def test_a_copy_grows_likelier_with_every_token_and_is_bounded() -> None:
    text = list(range(100))
    drafter = ContextDrafter()
    drafter.observe([*text, *text[:20]], 120)
    candidates = drafter.propose([19], 200, 0.0)
    assert [c.path for c in candidates] == [
        tuple(range(20, 20 + depth)) for depth in range(1, LONGEST_COPY + 1)
    ]
    assert {c.match_length for c in candidates} == {12}
    assert candidates[0].probability == pytest.approx(0.92)


def test_a_weak_match_drafts_less_than_a_strong_one() -> None:
    text = list(range(50))
    weak, strong = ContextDrafter(), ContextDrafter()
    weak.observe([*text, 99, 10], 52)
    strong.observe([*text, *range(11)], 61)
    found = [len(drafter.propose([10], 50, 0.05)) for drafter in (weak, strong)]
    assert 0 < found[0] < found[1]


def test_longer_matches_come_first_and_later_places_join() -> None:
    drafter = ContextDrafter()
    drafter.observe([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], 10)
    first, second = drafter.propose([3], 2, 0.0)
    assert (first.path, first.match_length) == ((7,), 3)
    assert second.path in {(8,), (7, 9)}


def test_the_latest_places_are_kept() -> None:
    drafter = ContextDrafter()
    tokens = [token for i in range(200) for token in (7, 1000 + i)]
    drafter.observe(tokens, len(tokens))
    assert max(len(found) for found in drafter.places.values()) <= 2 * PLACES
    drafter.observe([*tokens, 7], 1)
    paths = {c.path for c in drafter.propose([7], 50, 0.0) if len(c.path) == 1}
    assert paths == {(1000 + i,) for i in range(200 - PLACES, 200)}


@pytest.mark.parametrize("log", [[], [5], [5, 5], [5, 6], [5, 5, 5]])
def test_short_logs(log: list[int]) -> None:
    drafter = ContextDrafter()
    drafter.observe(log or [1], len(log) or 1)
    for candidate in drafter.propose(log or [1], 9, 0.0):
        assert set(candidate.path) <= set(log) and candidate.match_length < 3


def test_a_second_turn_is_learned_from_where_it_is_new() -> None:
    drafter = ContextDrafter()
    drafter.observe([1, 2, 3], 3)
    drafter.observe([1, 2, 3, 4, 5], 2)
    drafter.observe([1, 2, 3, 4, 5, 6], 6)
    assert drafter.log == [1, 2, 3, 4, 5, 6]


def test_an_edited_prompt_keeps_the_old_words_and_leads_in_with_shared_ones() -> None:
    drafter = ContextDrafter()
    drafter.observe([1, 2, 3, 4, 5, 6], 6)
    drafter.observe([1, 2, 3, 4, 9, 8], 6)
    assert drafter.log == [1, 2, 3, 4, 5, 6, 2, 3, 4, 9, 8]
    assert drafter.seen == [1, 2, 3, 4, 9, 8]
    drafter.observe([1, 2, 3, 4], 4)
    assert drafter.log[-3:] == [2, 3, 4] and drafter.seen == [1, 2, 3, 4]
    following = {c.path[0] for c in drafter.propose([4], 9, 0.0)}
    assert following == {5, 9}


def test_what_was_logged_is_saved_once_and_what_was_stored_is_not() -> None:
    saved: list[list[int]] = []
    drafter = ContextDrafter([1, 2, 3], lambda tokens: saved.append(list(tokens)))
    drafter.observe([4, 5], 2)
    drafter.observe([4, 5, 6], 1)
    drafter.finish([4, 5, 6], 1)
    drafter.finish([4, 5, 6], 0)
    drafter.observe([4, 5, 6, 7], 1)
    drafter.finish([4, 5, 6, 7], 1)
    assert saved == [[4, 5, 6], [7]]


@given(TOKENS, TOKENS)
@settings(deadline=None, derandomize=True)
def test_common_prefix(left: list[int], right: list[int]) -> None:
    size = common_prefix(left, right)
    assert left[:size] == right[:size]
    assert size == min(len(left), len(right)) or left[size] != right[size]


def test_votes_rank_and_cut() -> None:
    votes = Votes(0.1)
    for path, value, length in [
        ((1,), 0.4, 3), ((1, 2), 0.4, 3), ((5,), 0.05, 2), ((1,), 0.1, 1), ((5,), 0.06, 1),
        ((6,), 0.09, 1),
    ]:  # fmt: skip
        votes.add(path, value, length)
    ranked = votes.ranked(9)
    assert [c.path for c in ranked] == [(1,), (1, 2), (5,)]
    assert [c.match_length for c in ranked] == [3, 3, 2]
    assert ranked[2].probability == pytest.approx(0.11)
    assert [c.path for c in votes.ranked(1)] == [(1,)] and votes.ranked(0) == []


def test_longer_matches_share_the_last_confidence() -> None:
    assert [confidence((0.1, 0.5), length) for length in (1, 2, 3, 99)] == [0.1, 0.5, 0.5, 0.5]
