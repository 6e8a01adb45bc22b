"""Which vocabularies match, and what is said where they do not."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.backends.toy import ToyBackend
from engine.errors import ModelError
from engine.hsd.vocabulary import check_vocabulary, first_difference

WORDS = ("a", "b", "c")


class Speaker(ToyBackend):
    """A model with any vocabulary."""

    def __init__(
        self, name: str, words: Sequence[str], fingerprint: str = "", kind: str = "BPE"
    ) -> None:
        super().__init__(name=name)
        self.words = words
        self.info = replace(
            self.info, tokenizer_type=kind, tokenizer_fingerprint=fingerprint or repr(words)
        )

    def vocabulary(self) -> list[str]:
        return list(self.words)


def refusal(target: Speaker, draft: Speaker) -> str:
    with pytest.raises(ModelError) as caught:
        check_vocabulary(target, draft)
    return str(caught.value)


def test_equal_tokenizers_match_without_a_look_at_their_tokens() -> None:
    one, other = Speaker("large", WORDS, "same"), Speaker("small", ("z",), "same")
    check_vocabulary(one, other)


def test_equal_tokens_match_whatever_else_differs() -> None:
    """A tokenizer's file also holds its normaliser and its template."""
    check_vocabulary(Speaker("large", WORDS, "one"), Speaker("small", list(WORDS), "other"))


def test_weights_that_are_padded_differently_do_not_matter() -> None:
    one, other = Speaker("large", WORDS, "one"), Speaker("small", WORDS, "other")
    one.info = replace(one.info, vocabulary_size=64)
    other.info = replace(other.info, vocabulary_size=96)
    check_vocabulary(one, other)


def test_the_first_token_that_differs_is_named() -> None:
    text = refusal(Speaker("large", WORDS), Speaker("small", ("a", "x", "y")))
    assert text == (
        "small cannot draft for large: the first token that differs is 1: 'x', not 'b'. Choose a "
        "smaller model of the same family. The databases draft without one."
    )


@pytest.mark.parametrize("words", [("a", "b"), ("a", "b", "c", "d")])
def test_another_number_of_tokens_is_named(words: Sequence[str]) -> None:
    text = refusal(Speaker("large", WORDS), Speaker("small", words))
    assert f"it has {len(words)} tokens, not 3." in text and "first token" not in text


def test_another_type_is_named_even_where_the_tokens_are_equal() -> None:
    text = refusal(Speaker("large", WORDS, "one"), Speaker("small", WORDS, "other", "Unigram"))
    assert "its tokenizer is Unigram, not BPE." in text
    assert "tokens, not" not in text and "first token" not in text


def test_all_reasons_are_named_together_and_large_numbers_are_readable() -> None:
    many = [str(number) for number in range(150_000)]
    other = [*many[:12_345], "x", *many[12_346:32_000]]
    text = refusal(Speaker("large", many), Speaker("small", other, kind="WordPiece"))
    assert "its tokenizer is WordPiece, not BPE; it has 32,000 tokens, not 150,000; " in text
    assert "the first token that differs is 12,345: 'x', not '12345'." in text


def test_the_first_difference() -> None:
    assert first_difference("abc", "abd") == 2
    assert first_difference("abc", "abcd") is None is first_difference("", "a")
    assert first_difference("xa", "ax") == 0
