"""What a head says, and the toy's."""

import numpy as np
import pytest

from engine.decode import never
from engine.heads.base import HeadInfo, LogitGuess
from engine.methods import METHODS
from engine.sampling import choose, probabilities
from engine.settings import Sampling
from engine.tree import Tree
from engine.types import CONTEXT, HEAD, MODEL, Message
from tests.support.lossless import PROMPT, events_of, generation, warm_toy
from tests.support.toy import ToyBackend, deviating, shuffled, toy_logits

GREEDY = Sampling(temperature=0.0)


def logits(size: int = 50, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32) * 3


def test_a_guess_tells_the_likeliest_and_any_probability() -> None:
    row = logits()
    law, guess = probabilities(row), LogitGuess(row)
    best = guess.likeliest(4)
    assert [token for token, _ in best] == np.argsort(-row)[:4].tolist()
    assert [chance for _, chance in best] == pytest.approx(np.sort(law)[::-1][:4].tolist())
    assert guess.probability(7) == pytest.approx(float(law[7]))
    assert len(guess.likeliest(99)) == 50
    assert guess.likeliest(0) == []


@pytest.mark.parametrize("size", [50, 64, 6144, 50_000])
def test_the_likeliest_of_any_vocabulary_are_those_of_a_full_sort(size: int) -> None:
    row = np.round(logits(size), 2)  # many are equal
    order = np.lexsort((np.arange(size), -row))
    for count in (1, 2, 24, size):
        assert [token for token, _ in LogitGuess(row).likeliest(count)] == order[:count].tolist()


def test_a_draw_leaves_the_same_probabilities() -> None:
    row = logits(6144)
    drawn, fresh = LogitGuess(row), LogitGuess(row)
    drawn.draw(9, Sampling(temperature=0.7, top_k=5, seed=2))
    for token, chance in fresh.likeliest(24):
        assert drawn.probability(token) == pytest.approx(chance, rel=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_guess_draws_as_the_target_would(temperature: float) -> None:
    row = logits()
    for position in range(40):
        sampling = Sampling(temperature=temperature, seed=5)
        assert LogitGuess(row).draw(position, sampling) == choose(row, sampling, position)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_head_may_know_a_part_of_the_vocabulary(temperature: float) -> None:
    row = logits()
    known = np.arange(1, 50, 2)
    full = np.full(50, -1e9, np.float32)
    full[known] = row[known]
    guess, whole = LogitGuess(row[known], known), LogitGuess(full)
    sampling = Sampling(temperature=temperature, seed=5)
    assert [t for t, _ in guess.likeliest(9)] == [t for t, _ in whole.likeliest(9)]
    assert guess.probability(7) == pytest.approx(whole.probability(7))
    assert guess.probability(8) == guess.probability(98) == 0.0
    for position in range(40):
        assert guess.draw(position, sampling) == whole.draw(position, sampling)


def test_a_head_that_cannot_draft_says_why() -> None:
    assert HeadInfo("MTP", 1, branches=False).drafts
    assert not HeadInfo("MTP", 1, branches=False, note="no memory").drafts
    assert not HeadInfo("MTP", 0, branches=False).drafts


def test_the_toy_head_guesses_behind_what_is_decided() -> None:
    toy = ToyBackend(guesses=toy_logits)
    assert toy.head is not None and toy.info.head is toy.head.info
    prompt = toy.tokenize(toy.render([Message("user", "hello")]))
    toy.head.listen(True)
    toy.prefill(prompt, never)
    first = toy.head.start(prompt, GREEDY, never)
    assert first is not None
    guessed = first.draw(len(prompt), GREEDY)
    [second] = toy.head.extend([0], [guessed])
    after = second.draw(len(prompt) + 1, GREEDY)
    toy.head.forget()
    tree = Tree(prompt[-1])
    tree.add(tree.add(0, guessed, "head"), after, "head")
    rows, tokens = tree.walk(toy.score(tree, GREEDY).choose)
    assert rows == [1, 2] and tokens[:2] == [guessed, after]


def test_another_sequence_has_a_head_of_its_own_whose_start_can_be_cancelled() -> None:
    toy = ToyBackend(guesses=deviating(1.0))
    other = toy.open()
    assert other.head is not None and other.head is not toy.head
    other.head.listen(True)
    other.prefill([1, 2, 3], never)
    assert other.head.start([1, 2, 3], GREEDY, lambda: True) is None
    assert other.head.start([1, 2, 3], GREEDY, never) is not None


def test_a_shuffled_head_is_as_sure_and_wrong() -> None:
    suffixes = [(a, b) for a in range(97, 107) for b in range(97, 107)]
    sure = [probabilities(shuffled(s)).max() for s in suffixes]
    assert sure == pytest.approx([probabilities(toy_logits(s)).max() for s in suffixes])
    right = [shuffled(s).argmax() == toy_logits(s).argmax() for s in suffixes]
    assert sum(right) < 5


def test_what_databases_search_for_a_head_is_their_time() -> None:
    """Growing the tree afterwards finds what was searched before the head was asked."""
    toy, method, wanted = ToyBackend(guesses=deviating(1.0)), METHODS["hd+head"], generation(0.0, 1)
    drafters = method.drafters(warm_toy(), None, wanted.sampling, target=toy)
    steps = events_of(toy, PROMPT, wanted, drafters, method.drafting)
    drafted = [step for step in steps if step.proposed]
    assert len(drafted) > 3 and any(step.levels.get(HEAD) for step in drafted)
    for step in drafted:
        searched = [step.look_ups[source] for source in (CONTEXT, MODEL, HEAD)]
        assert min(searched) > 0 and sum(searched) <= step.draft_seconds
