"""The shipped fake behaves like a model: cache, tree, roll-back, text."""

import pytest

from engine.decode import never
from engine.settings import Sampling
from engine.tree import Tree, graft
from engine.types import Message
from tests.support.toy import ASSISTANT, END, VOCABULARY, ToyBackend, toy_logits

GREEDY = Sampling(temperature=0.0)


def test_special_tokens_are_single_tokens() -> None:
    toy = ToyBackend()
    assert toy.tokenize("a<|end|>b<|assistant|>") == [97, END, 98, ASSISTANT]
    assert toy.detokenize([97, END, 98]) == "a<|end|>b"
    assert toy.detokenize([0xE2, 0x82]) == "\ufffd"
    assert toy.render([Message("user", " hi ")]) == "<|user|>hi<|end|><|assistant|>"


def test_a_tree_row_scores_as_its_path_alone(toy: ToyBackend) -> None:
    prompt = list(b"some prompt")
    tree = Tree(prompt[-1])
    for path in [(97,), (98,), (97, 99), (98, 99), (97, 99, 98)]:
        graft(tree, path, "context", 1, 9)
    toy.prefill(prompt, never)
    for sampling in (GREEDY, Sampling(temperature=1.3, seed=3)):
        scores = toy.score(tree, sampling)
        for row in range(len(tree) + 1):
            alone, path = ToyBackend(), tree.path(row)
            alone.prefill([*prompt, *path], never)
            single = alone.score(Tree([*prompt, *path][-1]), sampling)
            assert single.choose(0) == scores.choose(row)
            assert single.probability(0, 97) == scores.probability(row, 97)
            assert (single.distribution(0) == scores.distribution(row)).all()


def test_accept_keeps_the_root_and_the_accepted_rows(toy: ToyBackend) -> None:
    toy.prefill([1, 2, 3], never)
    tree = Tree(3)
    for path in [(4,), (5,), (5, 6)]:
        graft(tree, path, "context", 1, 9)
    toy.score(tree, GREEDY)
    toy.accept([2, 3])
    assert toy.cache == [1, 2, 3, 5, 6] and toy.forwards == 1
    with pytest.raises(AssertionError):
        toy.accept([])


def test_the_text_repeats_itself_and_ends() -> None:
    """Otherwise nothing would be accepted, and nothing that ends an answer would be tested."""
    best = [int(toy_logits((a, b)).argmax()) for a in range(97, 123) for b in range(97, 123)]
    assert sum(97 <= token < 123 for token in best) > 0.95 * len(best)
    draws = [Sampling(temperature=1.5, seed=seed) for seed in range(400)]
    toy = ToyBackend()
    toy.prefill(list(b"ab"), never)
    assert END in {toy.score(Tree(98), sampling).choose(0) for sampling in draws}


def test_every_token_has_a_name_of_its_own(toy: ToyBackend) -> None:
    names = toy.vocabulary()
    assert len(set(names)) == len(names) == toy.info.vocabulary_size == VOCABULARY
    assert toy.tokenize(names[END]) == [END] and toy.info.tokenizer_type == "bytes"
