"""The tiers: this conversation follows edits, past answers count once, large texts stay."""

from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafting.base import Tier
from engine.drafting.tiers import (
    CONTEXT_KEY,
    MODEL_KEY,
    SLACK,
    STATISTICS_KEY,
    ContextTier,
    LimitedView,
    ModelTier,
    StatisticsTier,
    grams_of,
)
from engine.types import Gram
from tests.support.tiers import Table, followers
from tests.unit.test_ngram_counts import brute_force

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
    wanted = brute_force(whole, CONTEXT_KEY)
    for end in range(len(whole) + 1):
        suffix = tuple(whole[max(0, end - CONTEXT_KEY) : end])
        keys = [suffix[-size:] for size in range(1, len(suffix) + 1)]
        known = [wanted[key] for key in keys if key in wanted]
        assert said(tier, *suffix) == known


def test_an_edited_prompt_keeps_the_old_words_and_leads_in_with_shared_ones() -> None:
    tokens = list(range(20))
    tier = learned(*tokens)
    edited = [*tokens[:12], 98, 99]
    tier.observe(edited, len(edited))
    assert tier.log == [*tokens, *tokens[12 - CONTEXT_KEY : 12], 98, 99] and tier.seen == edited
    assert said(tier, *tokens[12 - CONTEXT_KEY : 12]) == [{12: 1, 98: 1}] * CONTEXT_KEY, (
        "either way, as it was"
    )
    tier.observe(tokens[:12], 12)
    assert tier.log[-CONTEXT_KEY:] == tokens[12 - CONTEXT_KEY : 12] and tier.seen == tokens[:12]


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
                suffix = tuple(tier.log[max(0, end - CONTEXT_KEY) : end])
                assert said(tier, *suffix) == said(again, *suffix)
    assert largest <= cap * SLACK + 9, "it forgot when an answer was over, not in a step"
    assert saved == tokens and tier.log == tokens[-len(tier.log) :]
    assert tier.seen == tokens


# past answers


def behind(counts: Counter[tuple[int, ...]], key: tuple[int, ...]) -> dict[int, float]:
    """What followed a key: the counts of the n-grams that end with it and one token."""
    found = Counter[int]()
    for gram, count in counts.items():
        if gram[:-1][-len(key) :] == key:
            found[gram[-1]] += count
    return dict(found)


@settings(deadline=None, derandomize=True)
@given(TOKENS, TOKENS)
def test_grams_are_the_windows_that_end_at_each_answer_token(
    prompt: list[int], answer: list[int]
) -> None:
    tokens = [*prompt, *answer]
    grams = grams_of(tokens, len(answer))
    assert grams == {
        tuple(tokens[: at + 1][-MODEL_KEY - 1 :]) for at in range(len(prompt), len(tokens)) if at
    }
    assert all(2 <= len(gram) <= MODEL_KEY + 1 for gram in grams)


@settings(deadline=None, derandomize=True)
@given(st.lists(TOKENS, max_size=6), TOKENS)
def test_documents_are_answers_that_held_the_gram(
    answers: list[list[int]], asked: list[int]
) -> None:
    handed: list[set[tuple[int, ...]]] = []
    tier = ModelTier(learned=lambda grams: handed.append(set(grams)))
    counts: Counter[tuple[int, ...]] = Counter()
    for answer in answers:
        tier.observe(answer, 1)
        tier.finish(answer, len(answer) - 1)
        counts.update(grams_of(answer, len(answer) - 1))
    assert Counter(gram for grams in handed for gram in grams) == counts
    full = {gram: count for gram, count in counts.items() if len(gram) == MODEL_KEY + 1}
    assert dict(tier.grams()) == full
    found = tier.matches(tuple(asked))
    for size, each in enumerate(found, start=1):
        assert each.counts == behind(counts, tuple(asked[-size:]))
        assert each.total == sum(each.counts.values())
    assert len(found) == min(MODEL_KEY, len(asked)) or not behind(
        counts, tuple(asked[-len(found) - 1 :])
    )


@settings(deadline=None, derandomize=True)
@given(st.lists(TOKENS, max_size=4), TOKENS, TOKENS, st.lists(TOKENS, max_size=2))
def test_a_tier_without_an_answer_is_one_that_never_learned_it(
    before: list[list[int]], prompt: list[int], answer: list[int], after: list[list[int]]
) -> None:
    tier, wanted = ModelTier(), ModelTier()
    tokens = [*prompt, *answer]
    for text in before:
        tier.finish(text, len(text))
        wanted.finish(text, len(text))
    tier.finish(tokens, len(answer))
    for text in after:
        tier.finish(text, len(text))
        wanted.finish(text, len(text))
    keys = [key for key, _ in tier.counts.items()]
    known, unlearned = told(tier, keys), tier.without(tokens, len(answer))
    assert told(unlearned, keys) == told(wanted, keys)
    assert dict(unlearned.grams()) == dict(wanted.grams())
    assert told(tier, keys) == known, "the tier itself has learned it"


Told = dict[tuple[int, ...], list[tuple[float, float, dict[int, float]]]]


def told(tier: Tier, keys: Iterable[tuple[int, ...]]) -> Told:
    """What a tier says of these keys."""
    return {key: [(f.total, f.distinct, dict(f.counts)) for f in tier.matches(key)] for key in keys}


def test_an_answer_that_was_pruned_meanwhile_takes_nothing_of_others_away() -> None:
    tier = ModelTier([Gram((1, 2, 3, 4, 5), 2, 1)])
    keys = [(1, 2, 3, 4), (4,), (5,), (9, 4)]
    assert told(tier.without([7, 3, 4, 5, 9, 4, 5], 3), keys) == told(tier, keys)


def test_measuring_learns_at_the_usual_cost_and_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, answer = ModelTier(), [1, 2, 3, 4, 5, 6, 7]
    counted: list[tuple[int, ...]] = []
    add = ModelTier.add
    monkeypatch.setattr(
        ModelTier, "add", lambda self, gram, n=1: (counted.append(gram), add(self, gram, n))
    )
    tier.finish(answer, 5)
    keys = [gram[:-1] for gram in counted]
    usual, known = sorted(counted), told(tier, keys)
    counted.clear()
    forgetful = LimitedView(tier)
    forgetful.finish(answer, 5)
    assert sorted(counted) == usual and told(tier, keys) == known
    assert told(forgetful, keys) == known and all(known.values())


def test_an_answer_that_never_began_teaches_nothing() -> None:
    calls: list[Iterable[object]] = []
    tier = ModelTier([Gram((1, 2, 3, 4, 5), 1, 6)], calls.append)
    tier.finish([1, 2, 3, 4, 5, 6, 7, 8, 9], 0)
    tier.finish([1], 1)
    assert calls == [] and dict(tier.grams()) == {(1, 2, 3, 4, 5): 1} and tier.size == 1


def test_grams_of_other_lengths_are_harmless() -> None:
    """A store of an earlier version, or a damaged one."""
    tier = ModelTier([Gram((1, 2), 3, 1), Gram((0, 0, 0, 1, 2, 3, 4, 5), 2, 1), Gram((5,), 1, 1)])
    assert [f.counts for f in tier.matches((1,))] == [{2: 3}]
    assert [f.counts for f in tier.matches((1, 2, 3, 4))] == [{5: 2}] * 4
    assert tier.matches((5,)) == []


def test_what_is_often_said_is_known_and_goes_with_its_answer() -> None:
    tier = ModelTier()
    assert tier.unigrams() is None
    tier.finish([1, 2, 3, 2, 3], 4)
    before = tier.unigrams()
    assert before is not None and before.counts == {2: 2, 3: 2}
    kept = dict(before.counts)
    tier.finish([9, 7, 7, 3], 3)
    without = tier.without([9, 7, 7, 3], 3).unigrams()
    assert without is not None and without.counts == kept
    frozen, own = LimitedView(tier).unigrams(), tier.unigrams()
    assert frozen is not None and own is not None and frozen.counts == own.counts


# large texts


def test_keys_are_asked_from_short_to_long_until_one_is_unknown() -> None:
    one, two, three = followers({7: 9}), followers({7: 4}), followers({8: 1})
    known = {(4,): one, (3, 4): two, (2, 3, 4): three, (1, 2, 3, 4): one}
    for entries in range(4):
        table = Table(dict([*known.items()][:entries]))
        assert StatisticsTier(table).matches((1, 2, 3, 4)) == [one, two, three][:entries]
        assert table.asked == [(4,), (3, 4), (2, 3, 4)][: entries + 1]
    assert StatisticsTier(Table(known)).matches((1, 2, 3, 4)) == [one, two, three]
    assert StatisticsTier(Table(known)).matches((3, 4)) == [one, two]
    assert StatisticsTier(Table(known)).matches(()) == []
    assert STATISTICS_KEY == 3, "what a statistics file holds"
