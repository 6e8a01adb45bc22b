"""The model tier: every answer counts once, the frequent and the recent win, nothing grows wild."""

from collections import Counter
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafters.model import AHEAD, KEY, SIZE, WIDTH, ModelDrafter, grams_of
from engine.types import Gram
from tests.test_drafters_context import keeps_its_promises

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=50)


@settings(deadline=None, derandomize=True)
@given(TOKENS, TOKENS)
def test_grams_are_the_windows_around_each_answer_token(
    prompt: list[int], answer: list[int]
) -> None:
    tokens = [*prompt, *answer]
    grams = grams_of(tokens, len(answer))
    wanted = {
        tuple(tokens[at - KEY : at + AHEAD]) for at in range(KEY, len(tokens)) if at >= len(prompt)
    }
    assert grams == wanted
    assert all(KEY < len(gram) <= SIZE for gram in grams)


@settings(deadline=None, derandomize=True)
@given(st.lists(TOKENS, max_size=6))
def test_documents_are_answers_that_held_the_gram(answers: list[list[int]]) -> None:
    handed: list[set[tuple[int, ...]]] = []
    drafter = ModelDrafter(learned=lambda grams: handed.append(set(grams)))
    counts: Counter[tuple[int, ...]] = Counter()
    for answer in answers:
        drafter.observe(answer, 1)
        drafter.finish(answer, len(answer) - 1)
        counts.update(grams_of(answer, len(answer) - 1))
    assert {gram: value.documents for gram, value in drafter.table.items()} == counts
    assert Counter(gram for grams in handed for gram in grams) == counts


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(TOKENS, max_size=6), TOKENS, st.integers(0, 9), st.floats(0, 0.5))
def test_drafts_keep_the_promises_of_a_drafter(
    answers: list[list[int]], tokens: list[int], room: int, threshold: float
) -> None:
    drafter = ModelDrafter()
    for answer in answers:
        drafter.finish(answer, len(answer))
    candidates = drafter.propose(tokens, room, threshold)
    keeps_its_promises(candidates, room, threshold)
    for path, _, length in candidates:
        suffix = tuple(tokens[-length:])
        assert any(
            gram[KEY - length : KEY] == suffix and gram[KEY:][: len(path)] == path
            for gram in drafter.table
        )


def test_nothing_is_learned_before_the_answer_is_over() -> None:
    drafter = ModelDrafter()
    drafter.observe(list(range(20)), 20)
    assert drafter.table == {} and drafter.propose([3], 9, 0.0) == []


def test_the_longest_key_speaks_first() -> None:
    drafter = ModelDrafter()
    drafter.finish([1, 2, 3, 4, 50, 51, 52, 53], 4)
    for _ in range(3):
        drafter.finish([9, 9, 9, 4, 60, 61, 62, 63], 4)
    best = drafter.propose([0, 1, 2, 3, 4], 9, 0.0)[0]
    assert (best.path, best.match_length) == ((50,), 4)
    best = drafter.propose([0, 4], 9, 0.0)[0]
    assert (best.path, best.match_length) == ((60,), 1)


def test_the_more_frequent_continuation_is_likelier() -> None:
    drafter = ModelDrafter()
    for following, times in ((10, 1), (20, 3), (30, 2)):
        for _ in range(times):
            drafter.finish([1, 2, 3, 4, following], 1)
    found = [c.path for c in drafter.propose([1, 2, 3, 4], 3, 0.0)]
    assert found == [(20,), (30,), (10,)]


def test_a_frequent_gram_is_not_pushed_out_by_new_ones() -> None:
    drafter = ModelDrafter()
    for _ in range(5):
        drafter.finish([1, 2, 3, 4, 7], 1)
    for other in range(100, 200):
        drafter.finish([1, 2, 3, 4, other], 1)
    assert max(len(line) for line in drafter.keys.values()) <= 2 * WIDTH
    found = [c.path for c in drafter.propose([1, 2, 3, 4], 9, 0.0)]
    assert found[0] == (7,) and (199,) in found, "frequent first, then recent"


def test_stored_grams_come_back_in_the_same_order() -> None:
    first = ModelDrafter()
    for answer in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [9, 2, 3, 4, 8, 8], [1, 2, 3, 4, 8]):
        first.finish(answer, 3)
    again = ModelDrafter(reversed(list(first.table.values())))
    assert again.table == first.table and again.answers == first.answers
    for key in ([1, 2, 3, 4], [4], [3, 4], [2]):
        assert again.propose(key, 20, 0.0) == first.propose(key, 20, 0.0)


def test_short_answers_and_short_contexts() -> None:
    drafter = ModelDrafter()
    drafter.finish([1, 2, 3], 3)
    drafter.finish([1], 1)
    assert drafter.table == {} and drafter.propose([1], 9, 0.0) == []
    drafter.finish([1, 2, 3, 4, 5], 1)
    assert [c.path for c in drafter.propose([4], 9, 0.0)] == [(5,)]


def test_an_answer_that_never_began_teaches_nothing() -> None:
    calls: list[Iterable[object]] = []
    drafter = ModelDrafter([Gram((1, 2, 3, 4, 5), 1, 6)], calls.append)
    drafter.finish([1, 2, 3, 4, 5, 6, 7, 8, 9], 0)
    assert calls == [] and len(drafter.table) == 1
    assert drafter.answers == 6, "the store does not count it either"


def test_grams_shorter_than_a_key_are_harmless() -> None:
    drafter = ModelDrafter([Gram((1, 2), 3, 1), Gram((1, 2, 3, 4), 3, 1), Gram((5,), 1, 1)])
    for tokens in ([1], [1, 2], [1, 2, 3, 4], [5], [3, 4]):
        keeps_its_promises(drafter.propose(tokens, 9, 0.0), 9, 0.0)
