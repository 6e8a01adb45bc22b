"""The llama.cpp backend beside the contract: its cells after any trees, chunks and stops, forwards
that fail, memory, texts, and what other settings and architectures change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends import check
from engine.backends.base import Filled
from engine.backends.llamacpp import LONGEST, parts
from engine.decode import never
from engine.errors import ModelError, PromptError
from engine.hsd.family import check_vocabulary
from engine.settings import Generation, Sampling
from engine.tree import Tree
from engine.types import Message
from tests.support.backends import GREEDY, PATHS, Stop, Trees, counted, gap, prompt_of, tree_of
from tests.support.gguf_files import (
    alone,
    byte_tokens,
    check_cells,
    longrope_gguf,
    opened_gguf,
    tiny_gguf,
    window_gguf,
)
from tests.support.lossless import QUESTIONS, assert_lossless, events_of

pytestmark = pytest.mark.gguf
CLOSE = 1e-4
"""Rounding of float32 was seen to make a hundredth of this."""


@pytest.fixture(scope="module")
def small(gguf_files: dict[str, Path]) -> Any:
    return opened_gguf(gguf_files["small-F32"])


@pytest.fixture(scope="module")
def other(gguf_files: dict[str, Path]) -> Any:
    """The same model with a cache of its own, to compare with."""
    return opened_gguf(gguf_files["small-F32"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return opened_gguf(tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


# Cells.


TREES = 10_000


@pytest.mark.soak
def test_ten_thousand_random_trees(small: Any, other: Any) -> None:
    """After each: the cache, every sequence of it. Now and then: the logits, and the cells used."""
    made, text = Trees(20_261_121), [1]
    small.reset()
    worst, rolled = 0.0, 0
    cells = cells_of(other)
    for step in range(TREES):
        where = f"tree {step}"
        text = made.prompt(text)
        before = len(small.cached)
        small.prefill(text, never)
        assert small.cached == text[:-1], where
        rolled += len(small.cached) < before
        tree = made.tree(text[-1])
        scores = small.score(tree, GREEDY)
        rows = made.path(tree)
        last = scores.row(rows[-1] if rows else 0).copy()
        if made.draw.random() < 0.01:
            continue  # nothing is accepted: the next prompt has to clear it away
        small.accept(rows)
        decided = [*text, *(tree.tokens[row] for row in rows)]
        assert small.cached == decided, where
        check_cells(small, where)
        if step % 20 == 0:
            worst = max(worst, gap(last, alone(other, decided)))
            follow = small.score(Tree(7), GREEDY).row(0).copy()
            small.accept([])
            worst = max(worst, gap(follow, alone(other, [*decided, 7])))
            assert worst < CLOSE, where
            decided.append(7)
            for number in small.order:
                held = len(decided) if number == small.order[0] else small.held[number]
                assert size_of(small, number) == cells(held), (where, number)
        text = [*decided, made.token()]
    assert rolled > 300


def size_of(backend: Any, number: int) -> int:
    """Bytes it would take to store what a sequence holds."""
    return int(llama_cpp.llama_state_seq_get_size(backend.context, number))


def cells_of(backend: Any) -> Callable[[int], int]:
    """The size of a sequence of so many cells, told by caches that never saw a tree."""
    sizes = []
    for held in (1, 2, 9):
        backend.reset()
        backend.prefill([5] * (held + 1), never)
        sizes.append(size_of(backend, backend.order[0]))
    backend.reset()
    empty = size_of(backend, backend.order[0])
    step = sizes[1] - sizes[0]
    assert step > 0 and sizes[2] == sizes[0] + 8 * step
    return lambda held: sizes[0] + (held - 1) * step if held else empty


def test_after_many_trees_the_cache_can_be_filled_to_its_last_cell(
    gguf_files: dict[str, Path],
) -> None:
    """A cell that is lost would be missed here; one more token than it has is a clear error."""
    backend = opened_gguf(gguf_files["small-F32"], context_length=64)
    made, text = Trees(5), [1]
    for _ in range(300):
        text = made.prompt(text)[:60]
        backend.prefill(text, never)
        tree = made.tree(text[-1])
        backend.score(tree, GREEDY)
        rows = made.path(tree)
        backend.accept(rows)
        text = [*backend.cached, made.token()]
    check_cells(backend)
    full = prompt_of(backend.cells + 1)
    backend.prefill(full, never)
    assert len(backend.cached) == backend.cells
    check_cells(backend)
    backend.reset()
    with pytest.raises(ModelError, match="its cache is full"):
        backend.prefill(prompt_of(backend.cells + 2), never)
    fits = prompt_of(backend.cells + 1 - 129)
    backend.prefill(fits, never)
    backend.score(tree_of(fits[-1], [(token,) for token in range(128)]), GREEDY)
    backend.accept([128])
    check_cells(backend)


# Prompts: chunks, stopping, what is no token.


@pytest.mark.parametrize("size", [32, 64, 512])
def test_a_long_prompt_is_read_in_chunks(
    gguf_files: dict[str, Path], other: Any, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    backend, prompt = opened_gguf(gguf_files["small-F32"], batch_size=size), prompt_of(1201)
    rows = counted(backend, monkeypatch)
    backend.prefill(prompt, never)
    assert rows == [size] * (1200 // size) + ([1200 % size] if 1200 % size else [])
    tree = tree_of(prompt[-1])
    scores = backend.score(tree, GREEDY)
    found = scores.row(len(tree)).copy()
    assert gap(found, alone(other, [*prompt, *PATHS[-1]])) < CLOSE


def test_a_cancelled_prompt_stops_within_a_forward_and_goes_on_later(
    gguf_files: dict[str, Path], other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every node of its graph the library asks; what was read by then is thrown away."""
    backend = opened_gguf(gguf_files["small-F32"], batch_size=256)
    prompt = prompt_of(1500)
    wanted = alone(other, prompt)
    whole = Stop(10**9)
    rows = counted(backend, monkeypatch)
    backend.prefill(prompt, whole)
    per_forward = whole.asked / len(rows)
    assert len(rows) == 6 and per_forward > 20
    lengths = set()
    for at in (1, 2, 9, 30, whole.asked // 2, whole.asked - 9):
        backend.reset()
        stop = Stop(at)
        rows.clear()
        assert backend.prefill(prompt, stop).reused == 0
        # Asked once more to tell a stop from a failure, and for the next chunk.
        assert stop.asked <= at + 3, "it stops at once"
        # The first time it is asked before the first forward.
        assert len(rows) == (0 if at == 1 else -(-at // per_forward))
        assert len(backend.cached) % 256 == 0 and backend.cached == prompt[: len(backend.cached)]
        assert len(backend.cached) < 1499
        check_cells(backend)
        lengths.add(len(backend.cached))
        assert backend.prefill(prompt, never).reused in lengths
        found = backend.score(Tree(prompt[-1]), GREEDY).row(0).copy()
        assert gap(found, wanted) < CLOSE
        backend.accept([])
    assert len(lengths) > 2


def test_once_a_prompt_is_read_the_library_asks_no_more(small: Any) -> None:
    """Each question would wait for Python's lock."""
    asked = Stop(10**9)
    small.reset()
    small.prefill(prompt_of(40), asked)
    before = asked.asked
    assert before > 10
    small.score(tree_of(prompt_of(40)[-1]), GREEDY)
    small.accept([])
    assert asked.asked == before


@pytest.mark.parametrize("token", [-1, 260, 2**31 - 1, 2**40])
def test_what_is_no_token_is_refused(tiny: Any, token: int) -> None:
    tiny.prefill([5, 6, 7], never)
    with pytest.raises(PromptError, match="none of the 260 of the model"):
        tiny.prefill([5, token, 7], never)
    assert tiny.cached == [5, 6]
    check_cells(tiny)


# Forwards that fail.


@pytest.mark.parametrize("code", [1, 2, -3])
@pytest.mark.parametrize("when", ["prompt", "tree"])
def test_a_failed_forward_is_an_error_and_the_next_answer_works(
    small: Any, other: Any, monkeypatch: pytest.MonkeyPatch, when: str, code: int
) -> None:
    prompt = prompt_of(40)
    small.prefill(prompt[:20] if when == "prompt" else prompt, never)
    with monkeypatch.context() as patched:
        patched.setattr(llama_cpp, "llama_decode", lambda context, batch: code)
        with pytest.raises(ModelError) as caught:
            if when == "prompt":
                small.prefill(prompt, never)
            small.score(tree_of(prompt[-1]), GREEDY)
    rows = 20 if when == "prompt" else 9
    text = str(caught.value)
    assert f"A forward of small-F32 over {rows} tokens failed" in text
    assert ("its cache is full" if code == 1 else f"llama_decode returned {code}") in text
    assert "Send the message again" in text and text.endswith(".")
    assert small.cached == []
    check_cells(small)
    small.prefill(prompt, never)
    scores = small.score(tree_of(prompt[-1]), GREEDY)
    found = scores.row(len(PATHS)).copy()
    assert gap(found, alone(other, [*prompt, *PATHS[-1]])) < CLOSE
    small.accept([])


def test_a_cache_that_does_not_roll_back_is_an_error(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.prefill([5, 6, 7], never)
    small.score(tree_of(7), GREEDY)
    with monkeypatch.context() as patched:
        patched.setattr(llama_cpp, "llama_memory_seq_rm", lambda *_: False)
        with pytest.raises(ModelError, match="cannot be rolled back. Choose the method plain"):
            small.accept([1])
        assert small.cached == []
        # A prompt then begins anew instead.
        small.prefill([5, 6, 7, 8], never)
        assert small.prefill([5, 6, 9], never).reused == 0 and small.cached == [5, 6]
    check_cells(small)


# Memory.


@pytest.mark.soak
def test_loading_again_and_again_takes_no_more_memory(gguf_files: dict[str, Path]) -> None:
    process, cycles = psutil.Process(), 30

    def cycle() -> None:
        backend = opened_gguf(gguf_files["small-F32"], context_length=512)
        events_of(backend, prompt_of(60), Generation(GREEDY, max_tokens=3))

    for _ in range(4):
        cycle()
    before = process.memory_info().rss
    for _ in range(cycles):
        cycle()
    grown = process.memory_info().rss - before
    assert grown < 12 << 20, f"{grown / 2**20:.1f} MiB more after {cycles} models"


# Texts.


EMBEDDED_WORDS = st.sampled_from(
    ["<|end|>", "<|user|>", "<|bos|>", "<|assistant|>", "<|", "|>", "Ġ", "<0x0A>", "\n\n", " "]
)
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=12),
        EMBEDDED_WORDS,
        st.text(alphabet="😀👨‍👩‍👧é日本ß\0\u200d\ufeff\u00a0", max_size=6),
        st.text(alphabet=st.characters(codec="ascii"), max_size=20),
    ),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d\ud83d", "😀\udc00<|end|>"])
def test_half_characters_become_question_marks(gguf_target: Any, text: str) -> None:
    tokens = gguf_target.tokenize(text)
    assert gguf_target.detokenize(tokens) == text.encode("utf-8", "replace").decode()


@pytest.mark.soak(stay=8)
@pytest.mark.parametrize(
    "text",
    ["a" * 300_000, " " * 300_000, "!?" * 150_000, "日" * 100_000, "a \n" * 60_000, "\n" * 90_000],
    ids=lambda text: repr(text[:3]),
)
@pytest.mark.parametrize("pre", ["gpt-2", "tekken", "deepseek-llm", "gpt-4o"])
def test_texts_of_any_length_are_tokenized(tmp_path: Path, pre: str, text: str) -> None:
    """The library's expressions call themselves once per character of a run."""
    backend = opened_gguf(tiny_gguf(tmp_path / "tiny.gguf", tokenizer__ggml__pre=pre))
    tokens = backend.tokenize(text)
    assert backend.detokenize(tokens) == text


def test_where_a_long_text_is_cut_its_words_stay_whole() -> None:
    words = " ".join(["word"] * LONGEST)
    assert parts(words) == [words] and parts("") == [""]
    for run in ("x" * (2 * LONGEST + 5), " " * (LONGEST + 1)):
        text = f"before{'' if run[0] == 'x' else 'x'} {run} after <|end|>"
        pieces = parts(text)
        assert "".join(pieces) == text and len(pieces) == 1 + len(run.strip(" ") or run) // LONGEST
        assert max(len(piece) for piece in pieces) <= LONGEST + len("before  after <|end|>x")


def test_the_vocabulary_is_as_the_file_writes_it(tiny: Any) -> None:
    names = tiny.vocabulary()
    assert names == ["<s>", "</s>", *byte_tokens(), "Ġt", "he"]
    assert tiny.info.vocabulary_size == 260 and tiny.info.eos_ids == {1}
    assert tiny.detokenize(tiny.tokenize("the</s>")) == "the</s>"
    assert tiny.tokenize("</s>") == [1], "special tokens are read as such"


def test_padding_behind_the_vocabulary_is_left_out(tmp_path: Path) -> None:
    """As weights are padded beyond it, such tokens are in no text."""
    words = ["<s>", "</s>", *byte_tokens(), "Ġt", "he"]
    kinds = [3, 3] + [1] * 254 + [5] * 4
    path = tiny_gguf(tmp_path / "x.gguf", tokenizer__ggml__token_type=kinds)
    backend = opened_gguf(path)
    assert backend.vocabulary() == words[:256] and backend.info.vocabulary_size == 260


def test_a_tokenizer_of_another_type_is_refused(tmp_path: Path, tiny: Any) -> None:
    """The same tokens, put together by another rule."""
    words = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁t", "▁"]
    kinds = [3, 3] + [6] * 256 + [1, 1]
    values = {
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
    }
    pieces, scores = opened_with(tmp_path / "t5.gguf", "t5", values), "its tokenizer is Unigram"
    with pytest.raises(ModelError, match=f"{scores}, not BPE"):
        check_vocabulary(tiny, pieces)
    other = opened_with(tmp_path / "llama.gguf", "llama", values)
    assert other.info.tokenizer_type == "BPE"
    for text in ("the", "é日😀\0", " the  t\n", "x" * 20_000):
        assert other.detokenize(other.tokenize(text)) == f" {text}"


def opened_with(path: Path, kind: str, values: dict[str, Any]) -> Any:
    """A tiny model with a vocabulary of another kind."""
    changed = {name.replace(".", "__"): value for name, value in values.items()}
    scores = [float(-number) for number in range(260)]
    return opened_gguf(
        tiny_gguf(path, tokenizer__ggml__model=kind, tokenizer__ggml__scores=scores, **changed)
    )


# The same model behind both libraries.


@pytest.mark.soak(stay=1)
@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_both_libraries_say_the_same(gguf_target: Any, embedded: Any, temperature: float) -> None:
    """At every temperature: what is drawn depends on logits, seed and position alone."""
    lengths, questions = [], (*QUESTIONS, "Write a poem about the sea.", "Hello!")
    for seed, question in enumerate(questions):
        messages = [Message("system", "Be brief."), Message("user", question)]
        prompt = embedded.tokenize(embedded.render(messages))
        assert gguf_target.tokenize(gguf_target.render(messages)) == prompt
        wanted = Generation(Sampling(temperature, seed=seed), max_tokens=60)
        gguf_target.reset()
        theirs, ours = (events_of(model, prompt, wanted) for model in (embedded, gguf_target))
        assert_lossless(theirs, ours)
        lengths.append(len(ours))
    assert sum(lengths) > 100, lengths


TURNS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXTS),
    min_size=1,
    max_size=5,
).map(lambda turns: [Message(role, text) for role, text in turns])


@pytest.mark.model
@settings(deadline=None, derandomize=True, max_examples=200)
@given(turns=TURNS, tokens=st.lists(st.integers(0, 6143), max_size=30))
def test_both_read_and_write_alike(
    gguf_target: Any, embedded: Any, turns: list[Message], tokens: list[int]
) -> None:
    assert gguf_target.render(turns) == embedded.render(turns)
    assert gguf_target.detokenize(tokens) == embedded.detokenize(tokens)
    for turn in turns:
        found = embedded.tokenize(turn.content)
        assert gguf_target.tokenize(turn.content) == found
        assert embedded.detokenize(found) == turn.content


# Settings.


@pytest.mark.parametrize(
    ("changes", "near"),
    [
        ({"threads": 2}, CLOSE),
        ({"batch_size": 32}, CLOSE),
        ({"context_length": 600}, CLOSE),
        ({"flash_attention": "off"}, CLOSE),
        ({"cache_type": "f32"}, CLOSE),
        ({"gpu_layers": 0}, CLOSE),
        ({"flash_attention": "on"}, 0.05),
        ({"cache_type": "f16"}, 0.05),
        ({"cache_type": "f16", "flash_attention": "on"}, 0.05),
        ({"cache_type": "q8_0"}, 0.3),
        ({"cache_type": "q4_0"}, 3.0),
    ],
    ids=str,
)
def test_settings_change_no_number_but_by_rounding(
    gguf_files: dict[str, Path], other: Any, changes: dict[str, Any], near: float
) -> None:
    """That of a cache, or of flash attention, is no fault of the tree."""
    backend, prompt = opened_gguf(gguf_files["small-F32"], **changes), prompt_of(300)
    assert backend.info.leaves == 128 and backend.info.note == ""
    backend.prefill(prompt, never)
    scores = backend.score(tree_of(prompt[-1]), GREEDY)
    found = scores.row(len(PATHS)).copy()
    assert gap(found, alone(other, [*prompt, *PATHS[-1]])) < near
    assert backend.info.threads == changes.get("threads", 1)
    assert backend.info.context_length == changes.get("context_length", 2048)


# Other architectures.


def test_a_tree_across_the_window_is_checked_at_load(
    gguf_files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, tree_gap = list[int](), check.tree_gap

    def noted(*given: Any) -> float:
        sizes.append(given[4])
        return tree_gap(*given)

    monkeypatch.setattr(check, "tree_gap", noted)
    path = window_gguf(gguf_files["small-F32"], tmp_path / "window.gguf", 64)
    assert opened_gguf(path).info.note == "" and sizes == [7, 63]


def test_rotary_factors_are_chosen_once_for_all_lengths(tmp_path: Path) -> None:
    """By the room of the context: where it is longer than the original one, the long ones are
    those of short texts, too. So nothing changes at the switch."""
    texts = [prompt_of(size, 250) for size in (10, 60, 64, 65, 100)]
    made = {
        factors: opened_gguf(longrope_gguf(tmp_path / f"{number}.gguf", *factors))
        for number, factors in enumerate([(1.0, 9.0), (9.0, 9.0), (1.0, 1.0)])
    }
    both, long, short = made.values()
    for text in texts:
        wanted = alone(long, text)
        assert gap(alone(both, text), wanted) < CLOSE < 0.1 < gap(alone(short, text), wanted)
    text = [*texts[-1][:30], *reversed(prompt_of(31, 250))]
    both.reset()
    both.prefill(texts[-1], never)
    assert both.prefill(text, never) == Filled(31, True), "30 and one that is the same by chance"
    tree = tree_of(text[-1])
    scores = both.score(tree, GREEDY)
    rows = [scores.row(row).copy() for row in range(len(tree) + 1)]
    both.accept([])
    for row, found in enumerate(rows):
        assert gap(found, alone(both, [*text, *tree.path(row)])) < CLOSE
    assert both.depth_limit(64) is None
