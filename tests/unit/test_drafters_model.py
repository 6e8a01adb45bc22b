"""The model tier: every answer counts once, and nothing is learned before it is over."""

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafting.base import Tier
from engine.drafting.model import KEY, Forgetful, ModelTier, grams_of
from engine.types import MODEL, Gram

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=50)


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
        tuple(tokens[: at + 1][-KEY - 1 :]) for at in range(len(prompt), len(tokens)) if at
    }
    assert all(2 <= len(gram) <= KEY + 1 for gram in grams)


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
    full = {gram: count for gram, count in counts.items() if len(gram) == KEY + 1}
    assert dict(tier.grams()) == full
    found = tier.matches(tuple(asked))
    for size, followers in enumerate(found, start=1):
        assert followers.counts == behind(counts, tuple(asked[-size:]))
        assert followers.total == sum(followers.counts.values())
    assert len(found) == min(KEY, len(asked)) or not behind(counts, tuple(asked[-len(found) - 1 :]))


def test_nothing_is_learned_before_the_answer_is_over() -> None:
    tier = ModelTier()
    tier.observe(list(range(20)), 20)
    tier.observe(list(range(22)), 2)
    assert tier.matches((3,)) == [] and list(tier.grams()) == []
    assert (tier.name, tier.source) == (MODEL, MODEL)


def test_a_prompt_leads_in_and_is_not_learned() -> None:
    tier = ModelTier()
    tier.finish([1, 2, 3, 4, 50, 51], 2)
    assert [f.counts for f in tier.matches((1, 2, 3, 4))] == [{50: 1}] * 4
    assert tier.matches((3,)) == [], "that 4 follows 3 is what the user said"


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
    forgetful = Forgetful(tier)
    forgetful.finish(answer, 5)
    assert sorted(counted) == usual and told(tier, keys) == known
    assert told(forgetful, keys) == known and all(known.values())


def test_stored_grams_come_back() -> None:
    handed: list[Gram] = []
    first = ModelTier(learned=lambda grams: handed.extend(Gram(gram, 1, 0) for gram in grams))
    for answer in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [9, 2, 3, 4, 8, 8], [1, 2, 3, 4, 8]):
        first.finish(answer, 3)
    documents = Counter(gram.tokens for gram in handed)
    stored = [Gram(tokens, count, 1) for tokens, count in documents.items()]
    again = ModelTier(reversed(stored))
    assert dict(again.grams()) == dict(first.grams()) and again.size == first.size
    for key in ((1, 2, 3, 4), (4,), (3, 4), (2,), (8,)):
        left, right = ([(f.total, f.counts) for f in t.matches(key)] for t in (first, again))
        assert left == right


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
    frozen, own = Forgetful(tier).unigrams(), tier.unigrams()
    assert frozen is not None and own is not None and frozen.counts == own.counts
