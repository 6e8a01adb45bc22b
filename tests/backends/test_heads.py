"""What every head promises, of either library: answers stay what they were, whatever it guesses,
and it knows of a text what was decided, and nothing else."""

from collections.abc import Callable
from functools import cache
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import pytest

from engine.decode import decode, never
from engine.settings import Generation, Sampling
from engine.types import Step
from tests.backends.test_eagle3 import KNOWN, flat, numbers, written
from tests.backends.test_eagle3 import loaded as with_head
from tests.support import dflash_files
from tests.support.head_files import model_with_head, opened_head
from tests.support.heads import DRAFTING, SAMPLINGS, answer, fresh, guessing, law, law_ahead, loaded
from tests.support.lossless import assert_lossless, ids
from tests.support.predicting import (
    save_assistant,
    save_deepseek,
    save_gemma,
    save_glm,
    save_qwen,
)

TEXT = [1, *(3 + 37 * at % 240 for at in range(24))]
"""Longer than the windows of an assistant."""
BLOCKS = ("dflash", "dflash2")
TORCH = (
    *("shipped", "eagle3", "qwen3.5", "qwen3-next", "two", "glm", "deepseek", "gemma", "sharing"),
    *BLOCKS,
)
"""EAGLE-3 with weights that know and with random ones; prediction layers, of "two" and GLM several;
Gemma 4's assistant, also where layers share keys; heads that guess a block at once."""
GGUF = ("gguf EAGLE-3", "gguf assistant", "gguf MTP", "gguf MTP, marks")
HEADS = [
    *(pytest.param(name, marks=pytest.mark.model) for name in TORCH),
    *(pytest.param(name, marks=pytest.mark.gguf) for name in GGUF),
]


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str], Any]:
    """A model with its head."""

    @cache
    def model(name: str) -> Any:
        folder = tmp_path_factory.mktemp("head")
        if name in GGUF:
            kind = name.removeprefix("gguf ")
            return opened_head(kind, model_with_head(kind, folder))
        if name == "shipped":
            return request.getfixturevalue("embedded")
        if name == "eagle3":
            config = flat("LlamaForCausalLMEagle3")
            return with_head(written(folder, config, numbers(3, known=KNOWN)))
        if name in BLOCKS:
            second = name == "dflash2"
            settings, tensors = dflash_files.config(second), dflash_files.numbers(3, second)
            return with_head(written(folder, settings, tensors))
        if name in ("gemma", "sharing"):
            save_gemma(folder, 2 if name == "sharing" else 0)
            save_assistant(folder / "head")
        elif name in ("glm", "deepseek"):
            {"glm": save_glm, "deepseek": save_deepseek}[name](folder)
        else:
            save_qwen("qwen3.5" if name == "two" else name, folder, layers=1 + (name == "two"))
        return loaded(folder)

    return model


@pytest.fixture
def backend(made: Callable[[str], Any], request: pytest.FixtureRequest) -> Any:
    return made(request.param).open()


every = pytest.mark.parametrize("backend", HEADS, indirect=True)


@pytest.mark.soak(stay=3)
@every
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda each: f"{each.temperature}")
def test_answers_are_the_same_with_wrong_drafts_beside_the_head(
    backend: Any, sampling: Sampling
) -> None:
    plain, head = backend.open(), guessing(backend, sampling)
    first = answer(backend, TEXT, sampling, head)
    assert_lossless(answer(plain, TEXT, sampling), first)
    assert head.calls > len(first) / 2
    # A second turn goes on behind the first one, and one that begins otherwise as well.
    for text in ([*TEXT, *ids(first), 1, 3, 250, 41, 4], [*TEXT[:-3], 77, 3, 4]):
        again = answer(backend, text, sampling, guessing(backend, sampling))
        assert_lossless(answer(plain, text, sampling), again)


@pytest.mark.soak(stay=6)
@pytest.mark.parametrize("backend", HEADS[1:], indirect=True)
def test_a_head_knows_what_was_decided_and_nothing_else(backend: Any) -> None:
    """The shipped one, of 16 or eight bits, only nearly so."""
    drafter = guessing(backend, SAMPLINGS[1])
    steps = answer(backend, TEXT, SAMPLINGS[1], drafter, tokens=30)
    text = [*TEXT, *ids(steps)]
    # The cache lacks the last token at least; another text shares a part of it. Heads of llama.cpp
    # have forgotten by then what is far before its end.
    cut = [[*text[:-9], 11, 12, 13], text[:30], [*text[:29], 99]]
    for tokens in (text, *(cut if backend.info.kind == "transformers" else []), [*text, 4, 5]):
        backend.prefill(tokens, never)
        here, there = law_ahead(backend, tokens), fresh(backend, tokens, law_ahead)
        assert np.abs(here - there).max() < 2e-3


@pytest.mark.soak(stay=3)
@every
def test_a_stopped_answer_is_the_beginning_of_it(backend: Any) -> None:
    sampling = SAMPLINGS[1]
    plain = ids(answer(backend.open(), TEXT, sampling))
    backend.head.listen(True)
    wanted = Generation(sampling, max_tokens=40)
    run = decode(backend, TEXT, [guessing(backend, sampling)], wanted, DRAFTING)
    begun = ids([event for event in islice(run, 6) if isinstance(event, Step)])
    run.close()
    assert len(begun) >= 5 and begun == plain[: len(begun)]
    assert ids(answer(backend, TEXT, sampling, guessing(backend, sampling))) == plain


@every
def test_what_was_read_while_nobody_listened_is_a_gap(backend: Any) -> None:
    head = backend.head
    answer(backend, TEXT, SAMPLINGS[0], tokens=8)
    if backend.info.kind == "llama.cpp":
        assert not head.states.size and not head.shared.capturing
    else:
        assert not head.rows and not head.found and not head.bytes
    known = list(backend.cached)
    head.listen(True)
    assert head.start([*known, 5], SAMPLINGS[0], never) is None
    longer = [*known, 5, 9, 200]
    backend.prefill(longer, never)
    assert np.isfinite(law(backend, longer)).all()
    assert backend.bytes > 0
    backend.close()
    assert not backend.bytes


@pytest.mark.soak(stay=3)
@every
def test_sequences_take_turns_with_a_head_each(backend: Any) -> None:
    sampling, runs, plain = SAMPLINGS[1], [], []
    for text in (TEXT, TEXT[5:], [90, *TEXT[::-1]]):
        own = backend.open()
        plain.append(ids(answer(own.open(), text, sampling)))
        own.head.listen(True)
        wanted = Generation(sampling, max_tokens=40)
        runs.append(decode(own, text, [guessing(own, sampling)], wanted, DRAFTING))
    said: list[list[int]] = [[] for _ in runs]
    for events in zip_longest(*runs):
        for own, event in zip(said, events, strict=True):
            own += [token.id for token in event.tokens] if isinstance(event, Step) else []
    assert said == plain
