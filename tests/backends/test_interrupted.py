"""What was stopped or failed half way: no answer comes from it, and the next one is the true one.

And what a model that keeps a state reads again, counted in forwards.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.backends.base import Filled
from engine.backends.toy import CHUNK, ToyBackend, toy_logits
from engine.decode import never
from engine.sampling import Floats
from engine.settings import Generation, Sampling
from engine.tree import Tree
from engine.types import Step
from tests.backends.test_llamacpp import Stop
from tests.backends.test_transformers import (
    GREEDY,
    PLAIN,
    RECURRENT,
    Counting,
    alone,
    fresh,
    gap,
    load_kind,
    prompt_of,
)
from tests.support.lossless import assert_lossless, events_of

WANTED = Generation(Sampling(0.7, seed=1), max_tokens=12)


class Broken(RuntimeError):
    """What a forward raises here."""


def layers_of(backend: Any) -> list[Any]:
    """The layers of a torch model, in their order."""
    import torch

    stacks = [m for m in backend.model.modules() if isinstance(m, torch.nn.ModuleList)]
    return list(stacks[0])


def breaking(backend: Any, monkeypatch: pytest.MonkeyPatch, layer: int, forwards: int) -> None:
    """Have the layer of that number raise once, behind it so many forwards that work."""
    left = forwards
    module = layers_of(backend)[layer]
    forward = module.forward

    def broken(*given: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1:
            raise Broken
        return forward(*given, **named)

    monkeypatch.setattr(module, "forward", broken)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A backend of each kind: one that can roll back, and some that keep a state."""
    kinds = ("llama-gqa", *RECURRENT)
    return {kind: load_kind(kind, tmp_path_factory.mktemp(kind)) for kind in kinds}


KINDS = ("llama-gqa", *RECURRENT)


@pytest.mark.model
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_failed_step_the_next_answer_is_right(
    states: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: str, layer: int
) -> None:
    """The layers before the one that fails have added to their part of the cache."""
    backend, prompt = fresh(states[kind]), prompt_of(20, 160)
    backend.resumes = states[kind].resumes
    plain = events_of(fresh(states[kind]), prompt, WANTED)
    with monkeypatch.context() as patch:
        breaking(backend, patch, layer, 4)
        with pytest.raises(Broken):
            events_of(backend, prompt, WANTED)
    assert backend.cached == [] and backend.bytes == 0, "nobody can tell what it would hold"
    assert_lossless(plain, events_of(backend, prompt, WANTED))
    longer = [*backend.cached, 9]
    backend.score(Tree(9), GREEDY)  # not accepted
    backend.prefill(longer, never)
    assert gap(backend.score(Tree(9), GREEDY).row(0), alone(backend, longer)) < 1e-3


@pytest.mark.model
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_prompt_that_failed_half_way_the_next_one_is_read_right(
    states: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: str, layer: int
) -> None:
    """In its second chunk where it has some. Nothing is used again."""
    monkeypatch.setattr("engine.backends.transformers.PREFILL_CHUNK", 16)
    backend, prompt = fresh(states[kind]), prompt_of(60, 160)
    backend.resumes = states[kind].resumes
    with monkeypatch.context() as patch:
        breaking(backend, patch, layer, int(backend.resumes))
        with pytest.raises(Broken):
            backend.prefill(prompt, never)
    assert backend.prefill(prompt, never) == Filled(0, True)
    assert gap(backend.score(Tree(prompt[-1]), GREEDY).row(0), alone(backend, prompt)) < 1e-3


@pytest.mark.model
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_any_prompt_can_be_stopped_between_two_layers(
    states: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: str, share: float
) -> None:
    """Also one that is read in a single forward."""
    monkeypatch.setattr("engine.backends.transformers.PREFILL_CHUNK", 16)
    backend, prompt = fresh(states[kind]), prompt_of(60, 160)
    backend.resumes = states[kind].resumes
    whole, forwards = Stop(10**9), 4 if backend.resumes else 1
    assert backend.prefill(prompt, whole) == Filled(0, True)
    # Before each forward, and before each of its two layers.
    assert whole.asked == 3 * forwards
    backend.reset()
    stop = Stop(1 + int(share * (whole.asked - 1)))
    assert backend.prefill(prompt, stop) == Filled(0, False)
    assert stop.asked == stop.at, "it stops at once"
    assert backend.prefill(prompt, never).complete
    assert gap(backend.score(Tree(prompt[-1]), GREEDY).row(0), alone(backend, prompt)) < 1e-3


@pytest.mark.model
def test_which_states_are_gone_on_from_with_several_tokens_is_measured(
    states: dict[str, Any],
) -> None:
    found = {kind: backend.resumes for kind, backend in states.items()}
    assert found == {
        "llama-gqa": True, "mamba": True, "mamba2": True, "qwen3-next-hybrid": True,
        PLAIN: False,
    }  # fmt: skip


@pytest.mark.model
def test_a_model_that_says_wrongly_that_it_resumes_would_be_noticed(states: dict[str, Any]) -> None:
    """The texts of this file are long enough to show it."""
    backend, prompt = fresh(states[PLAIN]), prompt_of(60, 160)
    backend.resumes = True
    backend.prefill(prompt[:30], never)
    backend.prefill(prompt, never)
    assert gap(backend.score(Tree(prompt[-1]), GREEDY).row(0), alone(backend, prompt)) > 0.1


@pytest.mark.model
@pytest.mark.parametrize(
    ("kind", "new", "rows"),
    [
        (PLAIN, 500, [599]),
        (PLAIN, 3, [1, 1, 1]),
        ("mamba", 500, [484, 16]),
        ("mamba2", 60, [60]),
        ("mamba2", 700, [512, 172, 16]),
        ("qwen3-next-hybrid", 500, [484, 16]),
        ("llama-gqa", 100, [100]),
    ],
)
def test_a_second_turn_takes_few_forwards(
    states: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    new: int,
    rows: list[int],
) -> None:
    """Its new tokens in chunks, or, where several tokens begin a state anew, all at once."""
    backend, prompt = fresh(states[kind]), prompt_of(100 + new, 160)
    backend.resumes = states[kind].resumes
    backend.prefill(prompt[:100], never)
    count = Counting(backend, monkeypatch)
    filled = backend.prefill(prompt, never)
    assert count.rows == rows and filled == Filled(99 if sum(rows) == new else 0, True)
    assert gap(backend.score(Tree(prompt[-1]), GREEDY).row(0), alone(backend, prompt)) < 1e-3


# The decode loop, with the toy.


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
    from tests.support.lossless import Adversary

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
