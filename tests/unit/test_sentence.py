"""The sentence about an answer: true figures, and none where they mean nothing."""

import pytest

from app.service.why import about, sentence, worth_of
from engine.compare import FEWEST, live
from engine.types import Learned, Prefill, Step, Token
from storage.traces import Worth
from tests.support.runs import summed


def sentence_of(tokens: int, guessed: int, seconds: float = 1.0, plain: float | None = None) -> str:
    return sentence(Worth(tokens, guessed, seconds, plain, {}))


@pytest.mark.parametrize(
    ("tokens", "guessed", "seconds", "plain", "expected"),
    [
        (200, 68, 1.0, 1.3, "68 of 200 tokens were guessed, which saved about 0.3 s."),
        (200, 1, 1.0, 1.3, "1 of 200 tokens was guessed, which saved about 0.3 s."),
        (
            2000, 1200, 60.0, 200.0,
            "1,200 of 2,000 tokens were guessed, which saved about 2 minutes.",
        ),
        (200, 68, 1.0, None, "68 of 200 tokens were guessed."),
        (200, 68, 1.0, 1.01, "68 of 200 tokens were guessed, which saved no time to speak of."),
        (200, 68, 1.0, 0.99, "68 of 200 tokens were guessed, which saved no time to speak of."),
        (
            200, 68, 1.0, 0.7,
            "68 of 200 tokens were guessed. "
            "Looking for guesses cost about 0.3 s more than it saved.",
        ),
        (
            200, 0, 1.0, 0.9,
            "None of 200 tokens were guessed. "
            "Looking for guesses cost about 0.1 s more than it saved.",
        ),
        # Nothing was accepted, so nothing was saved, whatever the clock says.
        (200, 0, 1.0, 1.4, "None of 200 tokens were guessed."),
        (200, 0, 1.0, 1.0, "None of 200 tokens were guessed."),
        (FEWEST - 1, 9, 1.0, 5.0, "9 of 15 tokens were guessed."),
        (FEWEST, 9, 1.0, 5.0, "9 of 16 tokens were guessed, which saved about 4.0 s."),
        (1, 0, 1.0, 1.0, "None of 1 token was guessed."),
        (1, 1, 1.0, 1.0, "1 of 1 token was guessed."),
        (0, 0, 0.0, 0.0, ""),
        (200, 68, 0.0, 0.0, "68 of 200 tokens were guessed, which saved no time to speak of."),
    ],
)  # fmt: skip
def test_the_sentence_says_what_is_so(
    tokens: int, guessed: int, seconds: float, plain: float | None, expected: str
) -> None:
    assert sentence_of(tokens, guessed, seconds, plain) == expected


def test_durations_are_as_people_say_them() -> None:
    seconds = (0.0, 0.0004, 0.012, 0.094, 0.095, 0.3, 0.94, 0.96, 9.94, 9.96, 119.0, 120.0, 3600.0)
    assert [about(each) for each in seconds] == [
        "1 ms", "1 ms", "12 ms", "94 ms", "0.1 s", "0.3 s", "0.9 s", "1.0 s", "9.9 s", "10 s",
        "119 s", "2 minutes", "60 minutes",
    ]  # fmt: skip


def test_saved_is_what_the_live_speedup_says() -> None:
    """Reading the prompt and learning the answer included."""
    tokens = tuple(Token(1, at, "context") for at in range(20))
    steps = [
        Step(0, tokens, {"context": 25}, {"context": 19}, verify_seconds=1.0, plain_seconds=4.0)
    ]
    figures = summed(Prefill(9, 0, 1.0, 0.5), steps, Learned(0.25))
    worth = worth_of(figures)
    assert worth == Worth(20, 19, 2.25, 4.5, {})
    assert worth.plain_seconds is not None
    assert live(figures).whole == worth.plain_seconds / worth.seconds
    assert sentence(worth) == "19 of 20 tokens were guessed, which saved about 2.2 s."
    unknown = summed(Prefill(9, 0, 1.0), [Step(0, tokens, verify_seconds=1.0)])
    assert worth_of(unknown).plain_seconds is None
    plain = summed(Prefill(9, 0, 1.0), steps)
    assert worth_of(plain).plain_seconds == 5.0, "plain decoding reads the prompt as we do"
