"""Many conversations in one loaded model: each says what it would say alone, and reads only what is
new to it, however they take turns, until it is closed, evicted or broken."""

import ctypes
import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.base import Filled
from engine.backends.toy import CELL, ToyBackend
from engine.decode import decode, never
from engine.drafting.databases import Databases
from engine.errors import ModelError
from engine.hsd.family import Family
from engine.loaded import NoModel
from engine.methods import method_named
from engine.sequences import LIMIT, Sequences
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import Prefill, Step
from tests.backends.test_llamacpp import CLOSE, Trees, after, check_cells, counted
from tests.backends.test_transformers import (
    GREEDY,
    RECURRENT,
    gap,
    load_kind,
    prompt_of,
    tree_of,
)
from tests.support.gguf_files import mamba_gguf, opened_gguf, turning_gguf, window_gguf
from tests.support.lossless import (
    QUESTIONS,
    Adversary,
    assert_lossless,
    events_of,
    made_up,
    tokens_of,
    toy_family,
)
from tests.unit.test_stack import FIXED, drafted_by_models, ids

MODELS = [
    pytest.param("toy_model", id="toy"),
    pytest.param("embedded", marks=pytest.mark.model),
    pytest.param("gguf_target", id="gguf", marks=pytest.mark.gguf),
]
DRAWS = [Sampling(0.0), Sampling(0.7, seed=3)]
TURN = 12
"""New tokens of a second turn."""
BEHIND = 8
"""At the end of an answer, the cache of a draft model lacks the last tokens."""


@pytest.fixture
def toy_model() -> ToyBackend:
    return ToyBackend()


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def text_of(model: Any, size: int, number: int = 0) -> list[int]:
    """So many tokens of a text that begins and ends like no other."""
    words = " ".join(f"{number + at} {QUESTIONS[at % 2]}" for at in range(1 + size // 8))
    tokens: list[int] = model.tokenize(words)
    assert len(tokens) >= size
    return tokens[:size]


def alone(model: Any, prompt: Sequence[int], wanted: Generation) -> list[Step]:
    """What the model says after a prompt in a sequence that nobody else uses, plainly."""
    sequence = model.open()
    steps = events_of(sequence, prompt, wanted)
    sequence.close()
    return steps


def branching(truth: Sequence[int]) -> Adversary:
    """Drafts right and wrong branches, so that trees are accepted in part."""

    def say(tokens: Sequence[int]) -> list[tuple[int, ...]]:
        rest = tuple(truth[len(tokens) : len(tokens) + 4])
        wrong = 97 + len(tokens) % 20
        return [(wrong, wrong), *([rest[:1], (rest[0], wrong), rest] if rest else []), (wrong + 1,)]

    return Adversary(say)


def interleaved(runs: Sequence[Iterator[Any]], seed: int) -> list[list[Step]]:
    """The steps of runs that take turns at random, one event at a time."""
    draw, left, steps = random.Random(seed), dict(enumerate(runs)), [list[Step]() for _ in runs]
    while left:
        number = draw.choice([*left])
        event = next(left[number], None)
        if event is None:
            del left[number]
        elif isinstance(event, Step):
            steps[number].append(event)
    return steps


# Taking turns.


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "trees"])
@pytest.mark.parametrize("sampling", DRAWS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_interleaved_conversations_say_what_each_says_alone(
    model: Any, sampling: Sampling, drafts: bool
) -> None:
    wanted, accepted = Generation(sampling, max_tokens=24), 0
    prompts = [text_of(model, size, size) for size in (40, 3, 90)]
    truths = [alone(model, prompt, wanted) for prompt in prompts]
    for seed in range(2):
        runs, sequences = [], [model.open() for _ in prompts]
        for sequence, prompt, truth in zip(sequences, prompts, truths, strict=True):
            drafters = [branching([*prompt, *ids(truth)])] if drafts else []
            runs.append(decode(sequence, prompt, drafters, wanted, Drafting(nodes=12)))
        for truth, steps in zip(truths, interleaved(runs, seed), strict=True):
            assert_lossless(truth, steps)
            accepted += sum(sum(step.accepted.values()) for step in steps)
        for sequence in sequences:
            sequence.close()
    assert (accepted > 40) == drafts


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.model
def test_states_take_turns_as_well(kind: str, tmp_path: Path) -> None:
    backend = load_kind(kind, tmp_path)
    wanted = Generation(Sampling(0.7, seed=3), max_tokens=12)
    prompts = [prompt_of(size, 160) for size in (30, 9)]
    truths = [alone(backend, prompt, wanted) for prompt in prompts]
    sequences = [backend.open() for _ in prompts]
    runs = [decode(s, p, [], wanted, Drafting()) for s, p in zip(sequences, prompts, strict=True)]
    for truth, steps in zip(truths, interleaved(runs, 1), strict=True):
        assert_lossless(truth, steps)
    before = [sequence.bytes for sequence in sequences]
    assert min(before) > 0 and sequences[0].prefill([*sequences[0].cached, 5], never).reused > 30
    sequences[0].close()
    assert [sequence.bytes for sequence in sequences] == [0, before[1]]


def families(model: Any, drafts: Mapping[str, Any]) -> Callable[[Sequences, str], Family]:
    """Makes the target and the draft models of a conversation."""
    profile = made_up([*drafts, model.info.name])

    def family(sequences: Sequences, name: str) -> Family:
        own = {each: sequences.get(("me", name), draft) for each, draft in drafts.items()}
        return Family(sequences.get(("me", name), model), own, profile)

    return family


def prefills(backend: Any, monkeypatch: pytest.MonkeyPatch) -> list[Filled]:
    """What comes of every prefill of a sequence from now on."""
    found, own = list[Filled](), backend.prefill

    def prefill(tokens: Sequence[int], cancelled: Callable[[], bool]) -> Filled:
        found.append(own(tokens, cancelled))
        return found[-1]

    monkeypatch.setattr(backend, "prefill", prefill)
    return found


@pytest.fixture
def family_of(request: pytest.FixtureRequest) -> Callable[[Sequences, str], Family]:
    if request.param == "toy":
        whole = toy_family()
        return families(whole.target, whole.drafts)
    target, drafts = request.param
    return families(request.getfixturevalue(target), request.getfixturevalue(drafts))


@pytest.mark.parametrize(
    "family_of",
    [
        "toy",
        pytest.param(("embedded", "embedded_drafts"), id="embedded", marks=pytest.mark.model),
        pytest.param(("gguf_target", "gguf_drafts"), id="gguf", marks=pytest.mark.gguf),
    ],
    indirect=True,
)
def test_draft_models_have_a_sequence_per_conversation(
    family_of: Callable[[Sequences, str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stack over databases, turns of three conversations interleaved; in the second turn
    each draft model reads only what is new, though its level is another one."""
    warm, wanted, drafted = Sequences(), Generation(Sampling(0.7, seed=3), max_tokens=32), 0
    names, databases = ("a", "b", "c"), Databases()
    method, read = method_named("hsd:databases/small@3/mid@5", FIXED), {}
    target = family_of(warm, "a").target
    texts = {name: text_of(target, 60, number) for number, name in enumerate(names)}
    for turn in range(2):
        truths = {name: alone(target, texts[name], wanted) for name in names}
        runs = []
        for name in names:
            family = family_of(warm, name)
            drafters = method.drafters(databases, family, wanted.sampling)
            runs.append(decode(family.target, texts[name], drafters, wanted, FIXED))
            for level in ("small", "mid"):
                read[name, turn, level] = prefills(family.drafts[level], monkeypatch)
        for name, steps in zip(names, interleaved(runs, turn), strict=True):
            assert_lossless(truths[name], steps)
            drafted += drafted_by_models(steps)
            held = len(texts[name]) - TURN if turn else 0
            for level in ("small", "mid"):
                known = read[name, turn, level][0].reused
                assert held - BEHIND <= known <= held, (name, turn, level)
            texts[name] += [*ids(steps), *text_of(target, TURN, 7)]
    assert drafted > 30


# Second turns.


class Fed:
    """Counts the tokens that go through a model, whichever sequence they belong to."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: list[int] = []
        if isinstance(model, ToyBackend):
            prefill = ToyBackend.prefill

            def read(backend: ToyBackend, tokens: Sequence[int], cancelled: Any) -> Filled:
                filled = prefill(backend, tokens, cancelled)
                self.counts.append(len(backend.cache) - filled.reused)
                return filled

            monkeypatch.setattr(ToyBackend, "prefill", read)
        elif model.info.kind == "llama.cpp":
            self.counts = counted(monkeypatch)
        else:
            forward = type(model).forward

            def run(backend: Any, tokens: Sequence[int], *rest: Any, **named: Any) -> Any:
                self.counts.append(len(tokens))
                return forward(backend, tokens, *rest, **named)

            monkeypatch.setattr(type(model), "forward", run)


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_five_conversations_prefill_only_their_new_words(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1,500 tokens each, in turns; what they say is what each says alone, read anew."""
    warm, wanted = Sequences(), Generation(Sampling(0.7, seed=3), max_tokens=4)
    texts = {("me", str(number)): text_of(model, 1500, number) for number in range(5)}
    last: dict[tuple[str, str], list[Step]] = {}
    for turn in range(3):
        for key in texts:
            sequence = warm.get(key, model)
            fed = Fed(model, monkeypatch)
            prefill, *events = decode(sequence, texts[key], [], wanted, Drafting())
            monkeypatch.undo()
            assert isinstance(prefill, Prefill)
            new = len(texts[key]) - 1 - prefill.reused
            assert new == (TURN if turn else 1499)
            last[key] = [event for event in events if isinstance(event, Step)]
            steps = 0 if isinstance(model, ToyBackend) else len(last[key])
            assert sum(fed.counts) == new + steps, "counted where they are computed"
            warm.fit()
            if turn == 2:
                assert_lossless(alone(model, texts[key], wanted), last[key])
            texts[key] += [*ids(last[key]), *text_of(model, TURN, turn)]
    assert len(warm.warm) == 5 and 5 * 1500 < warm.bytes < LIMIT
    warm.clear()
    assert warm.bytes == 0


# Opening and closing.


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_a_sequence_is_opened_empty_and_closed_alone(model: Any) -> None:
    wanted = Generation(Sampling(0.7, seed=3), max_tokens=8)
    prompts = [text_of(model, 50, number) for number in range(2)]
    truths = [alone(model, prompt, wanted) for prompt in prompts]
    one, other = model.open(), model.open()
    assert one.info is other.info is model.info and type(one) is type(model)
    assert one.bytes == other.bytes == 0
    for sequence, prompt, truth in zip((one, other), prompts, truths, strict=True):
        assert_lossless(truth, events_of(sequence, prompt, wanted))
    taken = other.bytes
    assert min(one.bytes, taken) > 0 and one.open().bytes == 0
    for _ in range(2):
        one.close()
        assert one.bytes == 0 and other.bytes == taken
    said = ids(truths[1])
    assert other.prefill([*prompts[1], *said], never).reused == 50 + len(said) - 1 > 52
    assert one.prefill(prompts[0], never) == Filled(0, True)
    assert_lossless(truths[0], events_of(one, prompts[0], wanted))
    other.close()
    assert one.bytes > 0 == other.bytes


def test_the_forwards_of_the_toy_are_those_of_one_sequence() -> None:
    class Mine(ToyBackend):
        pass

    toy = Mine(100, "mine")
    toy.prefill([97, 98], never)
    toy.score(Tree(98), GREEDY)
    toy.accept([])
    other = toy.open()
    assert isinstance(other, Mine) and (toy.forwards, other.forwards) == (1, 0)
    assert (toy.cache, other.cache) == ([97, 98], []) and toy.bytes == 2 * CELL


def test_where_no_model_is_nothing_is_opened() -> None:
    away = NoModel()
    away.close()
    assert away.bytes == 0
    with pytest.raises(ModelError, match="No model is loaded"):
        away.open()


# The limit.


def fill(warm: Sequences, model: Any, name: str, tokens: int) -> Any:
    sequence = warm.get(("me", name), model)
    sequence.prefill([97] * (tokens + 1), never)
    return sequence


def test_what_was_used_longest_ago_goes_first() -> None:
    toy, draft, warm = ToyBackend(), ToyBackend(name="draft"), Sequences(100 * CELL)
    held = {name: fill(warm, toy, name, 30) for name in "abc"}
    warm.fit()
    assert [held[name].bytes for name in "abc"] == [30 * CELL] * 3, "it fits"
    assert warm.get(("me", "a"), toy) is held["a"]
    held["d"] = fill(warm, toy, "d", 30)
    assert warm.bytes == 120 * CELL
    warm.fit()
    assert warm.bytes == 90 * CELL and held["b"].bytes == 0, "a was used after b"
    own = [fill(warm, model, "d", 60) for model in (toy, draft)]
    assert own[0] is held["d"] and own[1] is not own[0]
    warm.fit()
    assert {key for key, _ in warm.warm} == {("me", "d")}, "what is in use stays, however large"
    assert [each.bytes for each in own] == [60 * CELL] * 2 and held["a"].bytes == 0
    assert warm.get(("me", "b"), toy).prefill([97, 97], never).reused == 0
    Sequences().fit()


def test_conversations_owners_and_models_are_dropped() -> None:
    toy, draft, warm = ToyBackend(), ToyBackend(name="draft"), Sequences()
    places = [(owner, name, m) for owner in "xy" for name in "ab" for m in (toy, draft)]
    held = {place: warm.get(place[:2], place[2]) for place in places}
    for sequence in held.values():
        sequence.prefill([97] * 11, never)

    def left() -> set[Any]:
        empty = {place for place in places if not held[place].bytes}
        known = {(*key, each) for key, each in warm.warm}
        assert known == set(places) - empty, "what is dropped is closed, and the other way round"
        return known

    assert len(left()) == 8 and warm.bytes == 80 * CELL
    warm.drop(("x", "a"))
    warm.drop(("x", "unknown"))
    assert left() == {place for place in places if place[:2] != ("x", "a")}
    for name in ("a", "b"):
        warm.drop(("y", name))
    assert left() == {("x", "b", toy), ("x", "b", draft)}
    warm.drop_model(draft)
    assert left() == {("x", "b", toy)}
    warm.clear()
    assert left() == set() and warm.bytes == 0


def test_another_model_of_the_same_name_has_sequences_of_its_own() -> None:
    warm, one, other = Sequences(), ToyBackend(), ToyBackend()
    assert warm.get(("me", "a"), one) is not warm.get(("me", "a"), other)


# After an error.


class Broken(RuntimeError):
    """What a forward raises here."""


def failing(model: Any, monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """Have the next forward of the model fail after it was computed; what is raised then."""
    if model.info.kind == "llama.cpp":
        import llama_cpp

        run = llama_cpp.llama_decode
        monkeypatch.setattr(llama_cpp, "llama_decode", lambda *given: run(*given) or -3)
        return ModelError
    inner = model.model.forward

    def broken(*given: Any, **named: Any) -> Any:
        inner(*given, **named)
        raise Broken

    monkeypatch.setattr(model.model, "forward", broken)
    return Broken


@pytest.mark.parametrize("at", ["prefill", "score"])
@pytest.mark.parametrize("model", MODELS[1:], indirect=True)
def test_an_error_empties_its_own_sequence_alone(
    model: Any, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    wanted = Generation(Sampling(0.7, seed=3), max_tokens=8)
    prompts = [text_of(model, 600, number) for number in range(2)]
    truths = [alone(model, prompt, wanted) for prompt in prompts]
    bad, good = model.open(), model.open()
    for sequence, prompt in zip((bad, good), prompts, strict=True):
        assert sequence.prefill(prompt[:550], never) == Filled(0, True)
    with monkeypatch.context() as patch:
        wrong = failing(model, patch)
        with pytest.raises(wrong):
            if at == "prefill":
                bad.prefill(prompts[0], never)
            else:
                bad.score(tree_of(prompts[0][549]), GREEDY)
    assert bad.bytes == 0 and not bad.cached
    assert good.prefill(prompts[1], never).reused == 549
    assert_lossless(truths[1], events_of(good, prompts[1], wanted))
    assert bad.prefill(prompts[0], never) == Filled(0, True)
    assert_lossless(truths[0], events_of(bad, prompts[0], wanted))


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


@pytest.mark.model
def test_a_cache_that_grows_scores_what_a_large_one_scores(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: prompts, trees and accepted rows, at every size of the cache."""
    module = "engine.backends.transformers.TREE_ROWS"
    made, rows = Trees(7), list[list[np.ndarray]]()
    text = text_of(embedded, 300)
    trees = [made.tree(text[size]) for size in range(40)]
    paths = [made.path(tree) for tree in trees]
    for behind in (129, 3000):
        monkeypatch.setattr(module, behind)
        sequence = embedded.open()
        rows.append([])
        for size, tree, path in zip(range(40), trees, paths, strict=True):
            sequence.prefill([*text[: 7 * size], tree.tokens[0]], never)
            scores = sequence.score(tree, GREEDY)
            rows[-1] += [scores.row(row).copy() for row in range(len(tree) + 1)]
            sequence.accept(path)
            follow = sequence.score(Tree(9), GREEDY)
            rows[-1].append(follow.row(0).copy())
            sequence.accept([])
    assert len(rows[0]) == len(rows[1]) > 200
    assert all(np.array_equal(left, right) for left, right in zip(*rows, strict=True))


@pytest.mark.model
def test_a_cache_takes_what_its_text_needs_and_grows_in_few_steps(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.backends import caches

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


class Saved:
    """Counts the states that the library is asked to write and to read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import llama_cpp

        self.written = self.read = 0
        write, read = llama_cpp.llama_state_seq_get_data, llama_cpp.llama_state_seq_set_data

        def writing(*given: Any) -> int:
            self.written += 1
            return int(write(*given))

        def reading(*given: Any) -> int:
            self.read += 1
            return int(read(*given))

        monkeypatch.setattr(llama_cpp, "llama_state_seq_get_data", writing)
        monkeypatch.setattr(llama_cpp, "llama_state_seq_set_data", reading)


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
    import llama_cpp

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
    for turn in range(300):
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
@pytest.mark.parametrize("kind", ["mamba", "window of 8", "window of 64", "turning"])
def test_other_architectures_take_turns_too(
    gguf_files: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    source, path = gguf_files["small-F32"], tmp_path / "model.gguf"
    if kind.startswith("window"):
        window_gguf(source, path, int(kind.split()[-1]))
    else:
        {"mamba": mamba_gguf, "turning": turning_gguf}[kind](source, path)
    backend, fresh = opened_gguf(path), opened_gguf(path)
    texts = [prompt_of(size) for size in (120, 30)]
    sequences = [backend.open() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        sequence.prefill(text, never)
    for _ in range(3):
        for sequence, text in zip(sequences, texts, strict=True):
            assert sequence.prefill([*text, 5, 6], never).reused == len(text) - 1
            row = sequence.score(Tree(6), GREEDY).row(0).copy()
            sequence.accept([])
            text += [5, 6, 7]
            assert gap(row, after(fresh, text[:-1])) < 10 * CLOSE
            fresh.reset()
    wanted = Generation(Sampling(0.7, seed=3), max_tokens=12)
    truths = [alone(fresh, text, wanted) for text in texts]
    runs = [
        decode(s, text, [branching([*text, *ids(truth)])], wanted, Drafting())
        for s, text, truth in zip(sequences, texts, truths, strict=True)
    ]
    for truth, steps in zip(truths, interleaved(runs, 5), strict=True):
        assert_lossless(truth, steps)


@pytest.mark.gguf
def test_an_unsettled_state_is_settled_and_parked(
    gguf_files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its root was decided before."""
    backend = opened_gguf(mamba_gguf(gguf_files["small-F32"], tmp_path / "mamba.gguf"))
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
    import llama_cpp

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
        assert gap(one.score(Tree(text[-1]), GREEDY).row(0), after(gguf_other, text)) < CLOSE
        one.accept([])
    other.prefill(text, never)
    one.parked = None
    with pytest.raises(ModelError, match="40 tokens of this conversation could not be put back"):
        one.score(Tree(5), GREEDY)
    assert one.prefill(text, never) == Filled(0, True)
    check_cells(one)
    assert other.prefill([*text, 5], never).reused == 39


@pytest.mark.gguf
def test_a_tree_that_another_sequence_came_before_cannot_be_accepted(gguf_small: Any) -> None:
    one, other = gguf_small.open(), gguf_small.open()
    one.prefill([5, 6], never)
    one.score(tree_of(6), GREEDY)
    other.prefill([7, 8], never)
    with pytest.raises(AssertionError, match="accept follows score"):
        one.accept([])
    assert one.prefill([5, 6, 7], never).reused == 1


@pytest.mark.gguf
def test_the_model_is_freed_with_its_last_sequence(
    gguf_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import llama_cpp

    freed: list[str] = []
    own = llama_cpp.llama_model_free
    backend = opened_gguf(gguf_files["small-F32"], context_length=128)
    sequence = backend.open()
    monkeypatch.setattr(
        llama_cpp, "llama_model_free", lambda raw: (freed.append("model"), own(raw))
    )
    del backend
    gc.collect()
    wanted = replace(Generation(GREEDY), max_tokens=3)
    assert freed == [] and tokens_of(events_of(sequence, [5, 6], wanted))
    del sequence
    gc.collect()
    assert freed == ["model"]
