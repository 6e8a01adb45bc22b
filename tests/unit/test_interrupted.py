"""What was stopped or failed half way: no answer comes from it, and the next one is the true one.
Texts that are read again once they outgrow a length. All with the toy."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.backends.base import Filled
from engine.sampling import Floats
from engine.settings import Generation, Sampling
from engine.tree import Tree
from engine.types import Step
from tests.support.lossless import Adversary, assert_lossless, events_of
from tests.support.toy import CHUNK, ToyBackend, toy_logits

WANTED = Generation(Sampling(0.7, seed=1), max_tokens=12)


class Broken(RuntimeError):
    """What a forward raises here."""


class Failing(ToyBackend):
    """Fails in the forward of that number; what it had added to its cache by then stays."""

    def __init__(self, at: int) -> None:
        self.at, self.done = at, 0
        super().__init__(logits=self.logits_of)

    def logits_of(self, suffix: tuple[int, ...]) -> Floats:
        self.done += 1
        if self.done == self.at:
            raise Broken
        return toy_logits(suffix)


@pytest.mark.parametrize("at", [1, 2, 7])
def test_the_toy_answers_rightly_after_a_failure(at: int) -> None:
    backend, prompt = Failing(at), list(b"once upon a time")
    with pytest.raises(Broken):
        events_of(backend, prompt, WANTED)
    assert_lossless(events_of(ToyBackend(), prompt, WANTED), events_of(backend, prompt, WANTED))


def flag(answers: Sequence[bool]) -> Callable[[], bool]:
    """A stop flag that says so in turn, and False from then on: somebody has cleared it."""
    left = iter(answers)
    return lambda: next(left, False)


@pytest.mark.parametrize("read", [0, 1, 2])
def test_a_prompt_that_broke_off_is_not_answered_whatever_the_flag_says_later(read: int) -> None:
    told: list[tuple[str, int]] = []

    class Listener:
        name = "context"

        def grow(self, *_: Any) -> dict[str, Any]:
            return {}

        def observe(self, tokens: Sequence[int], new: int) -> None:
            told.append(("observe", new))

        def finish(self, tokens: Sequence[int], new: int) -> None:
            told.append(("finish", new))

    backend, prompt = ToyBackend(), [97 + at % 26 for at in range(3 * CHUNK)]
    steps = events_of(
        backend, prompt, WANTED, [Listener()], cancelled=flag([*[False] * read, True])
    )
    assert steps == [Step(0, (), finish="cancelled")] and backend.forwards == 0
    assert backend.cache == prompt[: read * CHUNK]
    assert told == [("finish", 0)], "nothing was decided"
    assert_lossless(events_of(ToyBackend(), prompt, WANTED), events_of(backend, prompt, WANTED))


class Turning(ToyBackend):
    """A model that reads all again once a text is longer than `switch`, as some real ones do."""

    def __init__(self, switch: int) -> None:
        super().__init__()
        self.switch, self.long = switch, False
        self.prefills: list[int] = []

    def prefill(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> Filled:
        self.prefills.append(len(tokens))
        if (len(tokens) > self.switch) != self.long:
            self.cache, self.long = [], not self.long
        limit = None if len(tokens) > self.switch else self.switch
        return super().prefill(tokens, cancelled)._replace(limit=limit)

    def depth_limit(self, length: int) -> int | None:
        return None if length > self.switch else self.switch - length

    def score(self, tree: Tree, sampling: Sampling) -> Any:
        root = len(self.cache) + 1
        if self.prefills and root <= self.switch:
            assert root + max(tree.depths) <= self.switch, "a forward across the switch"
        if root > self.switch:
            assert self.prefills[-1] > self.switch, "a cache of the other side"
        return super().score(tree, sampling)


@pytest.mark.parametrize("ahead", [1, 6])
@pytest.mark.parametrize("switch", [16, 17, 20, 26, 27])
def test_no_forward_reaches_across_a_switch(switch: int, ahead: int) -> None:
    prompt = list(b"once upon a time")
    plain = events_of(ToyBackend(), prompt, WANTED)
    truth = [*prompt, *(token.id for step in plain for token in step.tokens)]
    known = Adversary(
        lambda tokens: [tuple(truth[len(tokens) : len(tokens) + ahead])], obedient=False
    )
    backend = Turning(switch)
    assert_lossless(plain, events_of(backend, prompt, WANTED, [known]))
    crossed = len(truth) - 1 > switch
    assert backend.prefills == ([16, switch + 1] if crossed else [16])


def test_reading_again_can_be_stopped() -> None:
    prompt, backend = list(b"once upon a time"), Turning(20)
    steps = events_of(backend, prompt, WANTED, cancelled=lambda: len(backend.prefills) > 1)
    plain = events_of(ToyBackend(), prompt, WANTED)
    assert steps[-1] == Step(len(steps) - 1, (), finish="cancelled")
    said = [token.id for step in steps for token in step.tokens]
    assert said == [token.id for step in plain for token in step.tokens][: len(said)]
    assert len(prompt) + len(said) == 21 and backend.prefills == [16, 21]
