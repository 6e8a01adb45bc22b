"""The context tier: it knows what was said in this conversation, once, and follows edits."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.base import common_prefix
from engine.drafting.context import KEY, SLACK, ContextTier
from engine.types import CONTEXT
from tests.unit.test_drafters_ngrams import brute_force

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def said(tier: ContextTier, *suffix: int) -> list[dict[int, float]]:
    """The counts behind the last 1, 2, ... tokens of the suffix."""
    return [followers.counts for followers in tier.matches(suffix)]


def learned(*tokens: int) -> ContextTier:
    tier = ContextTier()
    tier.observe(tokens, len(tokens))
    return tier


@settings(deadline=None, derandomize=True, max_examples=200)
@given(TOKENS, TOKENS.filter(bool), st.lists(st.integers(1, 5), max_size=9))
def test_it_knows_what_followed_the_same_words(
    log: list[int], prompt: list[int], steps: list[int]
) -> None:
    """Stored tokens, then a prompt, then an answer in steps of some tokens each."""
    tier, tokens = ContextTier(log), list(prompt)
    tier.observe(tokens, len(tokens))
    for step in steps:
        tokens += [(len(tokens) * step + at) % 4 for at in range(step)]
        tier.observe(tokens, step)
    whole = [*log, *tokens]
    assert tier.log == whole and tier.seen == tokens
    wanted = brute_force(whole, KEY)
    for end in range(len(whole) + 1):
        suffix = tuple(whole[max(0, end - KEY) : end])
        keys = [suffix[-size:] for size in range(1, len(suffix) + 1)]
        known = [wanted[key] for key in keys if key in wanted]
        assert said(tier, *suffix) == known


def test_a_longer_match_is_the_more_certain_one() -> None:
    tier = learned(1, 2, 3, 7, 9, 3, 8, 1, 2, 3)
    assert said(tier, 1, 2, 3) == [{7: 1, 8: 1}, {7: 1}, {7: 1}]
    assert said(tier, 0, 2, 3) == [{7: 1, 8: 1}, {7: 1}]
    assert said(tier, 4) == [] == said(tier)
    assert (tier.name, tier.source) == (CONTEXT, CONTEXT)


@pytest.mark.parametrize("log", [[], [5], [5, 5], [5, 6], [5, 5, 5]])
def test_short_logs(log: list[int]) -> None:
    tier = ContextTier(log)
    for suffix in ((), (5,), (5, 5), (6,)):
        assert set().union(*said(tier, *suffix)) <= set(log)


def test_a_second_turn_is_learned_from_where_it_is_new() -> None:
    tier = learned(1, 2, 3)
    tier.observe([1, 2, 3, 4, 5], 2)
    tier.observe([1, 2, 3, 4, 5, 6], 6)
    assert tier.log == [1, 2, 3, 4, 5, 6]
    assert said(tier, 3) == [{4: 1}]


def test_an_edited_prompt_keeps_the_old_words_and_leads_in_with_shared_ones() -> None:
    tokens = list(range(20))
    tier = learned(*tokens)
    edited = [*tokens[:12], 98, 99]
    tier.observe(edited, len(edited))
    assert tier.log == [*tokens, *tokens[12 - KEY : 12], 98, 99] and tier.seen == edited
    assert said(tier, *tokens[12 - KEY : 12]) == [{12: 1, 98: 1}] * KEY, "either way, as it was"
    tier.observe(tokens[:12], 12)
    assert tier.log[-KEY:] == tokens[12 - KEY : 12] and tier.seen == tokens[:12]


def test_a_loaded_log_expects_the_words_it_holds() -> None:
    tier = ContextTier([1, 2, 3, 4])
    tier.expect([1, 2, 3])
    tier.observe([1, 2, 3, 4, 5], 5)
    assert tier.log == [1, 2, 3, 4, 4, 5], "only what comes behind them is new"
    tier.expect([9, 9])
    tier.observe([1, 2, 3, 4, 5, 6], 1)
    assert tier.log[-2:] == [5, 6], "once something was seen, nothing is expected"
    empty = ContextTier()
    empty.expect([1, 2])
    empty.observe([1, 2, 3], 3)
    assert empty.log == [1, 2, 3], "without a log, nothing is known of them"


def test_what_was_logged_is_saved_once_and_what_was_stored_is_not() -> None:
    saved: list[list[int]] = []

    def save(tokens: Sequence[int]) -> None:
        saved.append(list(tokens))

    tier = ContextTier([1, 2, 3], save)
    tier.observe([4, 5], 2)
    tier.observe([4, 5, 6], 1)
    tier.finish([4, 5, 6], 1)
    tier.finish([4, 5, 6], 0)
    tier.observe([4, 5, 6, 7], 1)
    tier.finish([4, 5, 6, 7], 1)
    assert saved == [[4, 5, 6], [7]]


def test_a_stored_log_comes_back_as_it_was() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 5] * 3
    saved: list[int] = []
    first = ContextTier((), saved.extend)
    first.observe(text, len(text))
    first.finish(text, 0)
    again = ContextTier(saved)
    assert again.log == first.log
    for end in range(len(text) + 1):
        suffix = tuple(text[max(0, end - KEY) : end])
        assert said(again, *suffix) == said(first, *suffix)


@given(TOKENS, TOKENS)
@settings(deadline=None, derandomize=True)
def test_common_prefix(left: list[int], right: list[int]) -> None:
    size = common_prefix(left, right)
    assert left[:size] == right[:size]
    assert size == min(len(left), len(right)) or left[size] != right[size]


def test_what_was_left_out_is_logged_and_not_learned() -> None:
    """In a rest on a fast model: the tokens between two lessons, and those behind the last."""
    saved: list[int] = []
    tier = ContextTier((), saved.extend)
    tokens = list(range(30))
    tier.observe(tokens[:10], 10)
    tier.observe(tokens[:20], 4)
    assert tier.log == tier.seen == tokens[:20]
    assert said(tier, 12) == [], "left out"
    assert said(tier, 14, 15) == [{16: 1}] * 2 and said(tier, 18) == [{19: 1}]
    tier.finish(tokens, 20)
    assert saved == tier.log == tier.seen == tokens and said(tier, 20) == []
    tier.observe([*tokens, 77, 78], 32)
    assert tier.log == [*tokens, 77, 78] and said(tier, 29) == [{77: 1}], "and goes on from there"
    assert said(ContextTier(saved), 20) == [{21: 1}], "when it is opened again, all is learned"


@pytest.mark.parametrize("cap", [20, 50])
def test_a_live_log_forgets_as_the_stored_one_does(cap: int) -> None:
    """Between two answers; what is left is as if it had been all from the start."""
    saved: list[int] = []
    tier = ContextTier(range(300, 400), saved.extend, cap)
    assert tier.log == list(range(400 - cap, 400))
    tokens: list[int] = []
    largest = 0
    for turn in range(60):
        for step in range(3):
            tokens += [turn % 7, step, turn]
            tier.observe(tokens, 3)
            largest = max(largest, len(tier.log))
        before = len(tier.log)
        tier.finish(tokens, 9)
        assert len(tier.log) <= cap * SLACK
        if len(tier.log) < before:
            again = ContextTier(tier.log)
            for end in range(len(tier.log)):
                suffix = tuple(tier.log[max(0, end - KEY) : end])
                assert said(tier, *suffix) == said(again, *suffix)
    assert largest <= cap * SLACK + 9, "it forgot when an answer was over, not in a step"
    assert saved == tokens and tier.log == tokens[-len(tier.log) :]
    assert tier.seen == tokens


def test_a_long_log_takes_as_much_as_it_says(cap: int = 2_000) -> None:
    draw = random.Random(1)
    tier, tokens = ContextTier((), cap=cap), list[int]()
    sizes = []
    for _ in range(40):
        tokens += [draw.randrange(3000) for _ in range(500)]
        tier.observe(tokens, 500)
        tier.finish(tokens, 500)
        sizes.append(tier.bytes)
    # Memory that is compiled grows by doubling.
    assert max(sizes[10:]) < 2 * min(sizes[10:]), "it does not grow for ever"
    assert sizes[0] > 150 * 500
