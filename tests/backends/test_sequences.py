"""Many conversations in one loaded model: each reads only what is new to it, however they take
turns, and what memory they take. What each says is in the contract."""

import ctypes
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import ref

import llama_cpp
import numpy as np
import pytest

from engine.backends import caches
from engine.backends.base import Filled
from engine.decode import decode, never
from engine.drafting.databases import Databases
from engine.errors import ModelError
from engine.hsd.family import Family
from engine.loaded import Sequences
from engine.methods import method_named
from engine.settings import Generation, Sampling
from engine.tree import Tree
from tests.support.backends import (
    GREEDY,
    Broken,
    Trees,
    gap,
    interleaved,
    prompt_of,
    tree_of,
)
from tests.support.gguf_files import Saved, check_cells, opened_gguf
from tests.support.gguf_files import alone as alone_in
from tests.support.lossless import (
    QUESTIONS,
    assert_lossless,
    events_of,
    made_up,
    tokens_of,
)
from tests.support.tiny_gguf import tiny
from tests.unit.test_stack import FIXED, drafted_by_models, ids

TURN = 12
"""New tokens of a second turn."""
BEHIND = 8
"""At the end of an answer, the cache of a draft model lacks the last tokens."""
CLOSE = 1e-4
"""Rounding of float32 was seen to make a hundredth of this."""


def text_of(model: Any, size: int, number: int = 0) -> list[int]:
    """So many tokens of a text that begins and ends like no other."""
    words = " ".join(f"{number + at} {QUESTIONS[at % 2]}" for at in range(1 + size // 8))
    tokens: list[int] = model.tokenize(words)
    assert len(tokens) >= size
    return tokens[:size]


def prefills(backend: Any, monkeypatch: pytest.MonkeyPatch) -> list[Filled]:
    """What comes of every prefill of a sequence from now on."""
    found, own = list[Filled](), backend.prefill

    def prefill(tokens: Sequence[int], cancelled: Callable[[], bool]) -> Filled:
        found.append(own(tokens, cancelled))
        return found[-1]

    monkeypatch.setattr(backend, "prefill", prefill)
    return found


@pytest.mark.soak
@pytest.mark.parametrize(
    ("target", "drafts"),
    [
        pytest.param("embedded", "embedded_drafts", marks=pytest.mark.model),
        pytest.param("gguf_target", "gguf_drafts", marks=pytest.mark.gguf),
    ],
)
def test_draft_models_have_a_sequence_per_conversation(
    target: str, drafts: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stack over databases, turns of three conversations interleaved; in the second turn
    each draft model reads only what is new, though its level is another one."""
    warm, wanted, drafted = Sequences(), Generation(Sampling(0.7, seed=3), max_tokens=32), 0
    names, databases = ("a", "b", "c"), Databases()
    method, read = method_named("hsd:databases/small@3/mid@5", FIXED), {}
    model, small = map(request.getfixturevalue, (target, drafts))
    profile = made_up([*small, model.info.name])
    texts = {name: text_of(model, 60, number) for number, name in enumerate(names)}
    for turn in range(2):
        truths = {name: events_of(model.open(), texts[name], wanted) for name in names}
        runs = []
        for name in names:
            key = ("me", name)
            own = {each: warm.get(key, draft) for each, draft in small.items()}
            family = Family(warm.get(key, model), own, profile)
            drafters = method.drafters(databases, family, wanted.sampling)
            runs.append(decode(family.target, texts[name], drafters, wanted, FIXED))
            for level in own:
                read[name, turn, level] = prefills(own[level], monkeypatch)
        for name, steps in zip(names, interleaved(runs, turn), strict=True):
            assert_lossless(truths[name], steps)
            drafted += drafted_by_models(steps)
            held = len(texts[name]) - TURN if turn else 0
            for level in small:
                known = read[name, turn, level][0].reused
                assert held - BEHIND <= known <= held, (name, turn, level)
            texts[name] += [*ids(steps), *text_of(model, TURN, 7)]
    assert drafted > 30


@pytest.mark.model
def test_a_closed_sequence_takes_no_memory_until_the_collector_comes(embedded: Any) -> None:
    sequence = embedded.open()
    sequence.prefill(text_of(embedded, 30), never)
    cache, layers = ref(sequence.cache), [ref(layer) for layer in sequence.cache.layers]
    assert layers
    gc.disable()
    try:
        sequence.close()
        assert cache() is None and not any(layer() for layer in layers)
    finally:
        gc.enable()


# Second turns.


@pytest.mark.model
def test_rows_that_could_not_be_moved_empty_the_sequence(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence, prompt = embedded.open(), text_of(embedded, 30)
    sequence.prefill(prompt, never)
    sequence.score(tree_of(prompt[-1]), GREEDY)

    def broken(*_: Any) -> None:
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr("engine.backends.caches.TreeLayer.move", broken)
        with pytest.raises(Broken):
            sequence.accept([3])
    assert sequence.bytes == 0 and sequence.prefill(prompt, never) == Filled(0, True)


# The cache of the transformers backend grows.


@pytest.mark.soak
@pytest.mark.model
def test_a_cache_takes_what_its_text_needs_and_grows_in_few_steps(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence, grown, enlarged = embedded.open(), list[int](), caches.enlarged

    def noted(states: Any, rows: int, length: int) -> Any:
        grown.append(length)
        return enlarged(states, rows, length)

    layers = embedded.model.config.num_hidden_layers
    row = 2 * layers * 4 * 4 * 64
    sequence.prefill(text_of(embedded, 50), never)
    assert sequence.bytes == (49 + 129) * row, "of 2,177 rows that it may have"
    monkeypatch.setattr(caches, "enlarged", noted)
    text = text_of(embedded, 1300)
    sequence.prefill(text[:200], never)
    for token in text[200:]:
        sequence.score(Tree(token), GREEDY)
        sequence.accept([])
    assert grown == [rows for rows in (49, 356, 712) for _ in range(2 * layers)]
    assert len(sequence.cached) == 1299 and sequence.bytes == 1424 * row
    sequence.prefill(text_of(embedded, 2048, 1), never)
    sequence.score(tree_of(5), GREEDY)
    assert sequence.bytes == (2048 + 129) * row, "no more than the largest tree needs"
    sequence.prefill([5, 6], never)
    assert sequence.bytes == (2048 + 129) * row, "what is there is used again"


# The sequences of llama.cpp are parked.


@pytest.fixture(scope="module")
def gguf_small(gguf_files: dict[str, Path]) -> Any:
    return opened_gguf(gguf_files["small-F32"])


@pytest.fixture(scope="module")
def gguf_other(gguf_files: dict[str, Path]) -> Any:
    return opened_gguf(gguf_files["small-F32"])


@pytest.mark.gguf
def test_what_was_parked_scores_to_the_last_bit_what_it_scored_before(gguf_small: Any) -> None:
    one, other = gguf_small.open(), gguf_small.open()
    for size in (2, 30, 255, 256, 257, 1500):
        text = prompt_of(size)
        one.prefill(text, never)
        tree = tree_of(text[-1])
        scores = one.score(tree, GREEDY)
        before = [scores.row(row).copy() for row in range(len(tree) + 1)]
        one.prefill(text, never)
        other.prefill(prompt_of(77)[7:], never)
        assert llama_cells(gguf_small) == 69, "nobody else is in the cache"
        parked = one.bytes
        scores = one.score(tree, GREEDY)
        assert all(np.array_equal(row, scores.row(n)) for n, row in enumerate(before)), size
        one.accept([1, 2])
        check_cells(one)
        assert one.cached == [*text, 3, 5] and one.bytes > parked > 0


@pytest.mark.gguf
def test_a_cache_that_is_full_to_its_last_cell_can_be_parked(gguf_files: dict[str, Path]) -> None:
    backend = opened_gguf(gguf_files["small-F32"], context_length=64)
    one, other = backend.open(), backend.open()
    texts = [[(token + shift) % 6000 + 5 for token in prompt_of(backend.cells)] for shift in (0, 9)]
    for _ in range(2):
        for sequence, text in zip((one, other), texts, strict=True):
            held = sequence.prefill(text, never).reused
            sequence.score(Tree(text[-1]), GREEDY)
            sequence.accept([])
            check_cells(sequence)
            assert held in (0, len(text) - 1) and len(sequence.cached) == backend.cells
    assert held == len(text) - 1


def llama_cells(backend: Any) -> int:
    """The tokens in the library's cache, by the positions of all its sequences."""
    return 1 + max(
        int(llama_cpp.llama_memory_seq_pos_max(backend.memory, number)) for number in backend.order
    )


@pytest.mark.gguf
@pytest.mark.parametrize(
    "settings",
    [{}, {"cache_type": "f16"}, {"flash_attention": "on"}, {"cache_type": "q8_0"}],
    ids=str,
)
def test_after_random_trees_two_sequences_still_hold_their_own(
    gguf_files: dict[str, Path], settings: dict[str, Any]
) -> None:
    """Each against a model that has one sequence: cells that lay apart lie together afterwards."""
    path = gguf_files["small-F32"]
    shared = opened_gguf(path, **settings)
    # In sixteen bits a last digit turns over now and then, on some processors.
    near = 0.01 if settings == {"cache_type": "f16"} else 0.1 if settings else CLOSE
    pairs = [(shared.open(), opened_gguf(path, **settings)) for _ in range(2)]
    made, texts, worst = Trees(11), [[1], [2]], 0.0
    for turn in range(150):
        number = made.draw.randrange(2)
        text = texts[number] = made.prompt(texts[number])
        tree = made.tree(text[-1])
        rows = made.path(tree)
        last = rows[-1] if rows else 0
        found = []
        for backend in pairs[number]:
            backend.prefill(text, never)
            found.append(backend.score(tree, GREEDY).row(last).copy())
        worst = max(worst, gap(*found))
        assert worst < near, (turn, worst)
        if made.draw.random() < 0.1:
            continue  # nothing is accepted: that is undone before the sequence is parked
        for backend in pairs[number]:
            backend.accept(rows)
            check_cells(backend, f"tree {turn}")
        texts[number] = [*text, *(tree.tokens[row] for row in rows), made.token()]


@pytest.mark.gguf
def test_an_unsettled_state_is_settled_and_parked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its root was decided before."""
    backend = opened_gguf(tiny(tmp_path, "mamba"))
    saved, one, other = Saved(monkeypatch), backend.open(), backend.open()
    one.prefill(prompt_of(20), never)
    one.score(Tree(7), GREEDY)
    other.prefill(prompt_of(9), never)
    assert saved.written == 1 and one.bytes > 0
    assert one.prefill([*prompt_of(19), 7, 5], never) == Filled(20, True)
    assert (saved.written, saved.read) == (2, 1)


@pytest.mark.gguf
def test_nothing_is_parked_where_nothing_would_be_lost(
    gguf_small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_small.close()
    saved, text = Saved(monkeypatch), prompt_of(20)
    one, other, third = (gguf_small.open() for _ in range(3))
    one.prefill([5], never)
    other.prefill(text, never)
    assert (saved.written, saved.read) == (0, 0), "an empty one"
    other.prefill([*text, 5], never)
    other.score(Tree(5), GREEDY)
    other.accept([])
    assert (saved.written, saved.read) == (0, 0), "the same one"
    other.close()
    one.prefill(text, never)
    assert (saved.written, saved.read) == (0, 0), "a closed one"
    del one
    gc.collect()
    third.prefill(text, never)
    assert (saved.written, saved.read) == (0, 0), "one that nobody has any more"
    other.prefill(text, never)
    assert (saved.written, saved.read) == (1, 0) and third.bytes > 0
    third.close()
    assert third.prefill(text, never).reused == 0
    assert (saved.written, saved.read) == (2, 0), "one that was closed while it was parked"
    assert other.prefill([*text, 5], never).reused == 19 and saved.read == 1


@pytest.mark.gguf
@pytest.mark.parametrize("lost", ["written", "memory", "damaged"])
def test_what_cannot_be_restored_begins_from_nothing(
    gguf_small: Any, gguf_other: Any, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """A prompt is read again. A forward within an answer is refused: it would say nonsense."""

    def full(*_: Any) -> None:
        raise MemoryError

    one, other, text = gguf_small.open(), gguf_small.open(), prompt_of(40)
    for kept in (True, False, False):
        one.prefill(text, never)
        with monkeypatch.context() as patch:
            if not kept and lost == "written":
                patch.setattr(llama_cpp, "llama_state_seq_get_data", lambda *_: 0)
            if not kept and lost == "memory":
                patch.setattr(ctypes, "c_uint8", type("Full", (), {"__mul__": full})())
            other.prefill(text[9:], never)
        if not kept and lost == "damaged":
            ctypes.memset(one.parked, 255, 64)
        assert one.prefill(text, never) == Filled(39 if kept else 0, True)
        assert gap(one.score(Tree(text[-1]), GREEDY).row(0), alone_in(gguf_other, text)) < CLOSE
        one.accept([])
    other.prefill(text, never)
    one.parked = None
    with pytest.raises(ModelError, match="40 tokens of this conversation could not be put back"):
        one.score(Tree(5), GREEDY)
    assert one.prefill(text, never) == Filled(0, True)
    check_cells(one)
    assert other.prefill([*text, 5], never).reused == 39


@pytest.mark.gguf
def test_a_model_is_freed_with_its_last_sequence(
    gguf_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context before the model, each once, and without waiting for the garbage collector."""
    freed: list[str] = []
    backend = opened_gguf(gguf_files["small-F32"], context_length=128)
    sequence = backend.open()
    for name in ("llama_free", "llama_model_free"):
        own = getattr(llama_cpp, name)
        monkeypatch.setattr(
            llama_cpp, name, lambda raw, name=name, own=own: (freed.append(name), own(raw))
        )
    gc.disable()
    try:
        del backend
        wanted = Generation(GREEDY, max_tokens=3)
        assert freed == [] and tokens_of(events_of(sequence, [5, 6], wanted))
        del sequence
        assert freed == ["llama_free", "llama_model_free"]
    finally:
        gc.enable()
