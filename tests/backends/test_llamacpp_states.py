"""GGUF models whose layers keep a state, and those that cannot branch, beside the contract: how
they go back, by snapshots or by marks, and what is left unread."""

from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from engine.backends.base import Filled
from engine.backends.llamacpp_states import MOST, MOST_UNREAD, Marks
from engine.decode import decode, never
from engine.drafting.budget import Budget
from engine.settings import Drafting, Runtime
from engine.tree import Tree
from tests.support.backends import (
    GREEDY,
    Stop,
    Subject,
    chain_of,
    counted,
    gap,
    interleaved,
    prompt_of,
    wrong_at,
)
from tests.support.gguf_files import alone, opened_gguf
from tests.support.lossless import assert_lossless, events_of, generation
from tests.support.tiny_gguf import ARCHITECTURES, tiny
from tests.unit.test_stack import FIXED, drafted_by_models, ids, stack_of

pytestmark = pytest.mark.gguf
SNAPSHOTS = dict.fromkeys(("qwen35", "qwen35moe", "nemotron_h", "lfm2"), 8)
"""Architectures that the library lets go back by snapshots; the others go back to marks."""
STATES = [name for name in ARCHITECTURES if name != "qwen3vl"]
BOTH = ["qwen35", "qwen3next", "mamba"]
"""One of each way to go back, and one that has nothing but states."""
LENGTH = 40


@pytest.fixture
def subject(subjects: Any, request: pytest.FixtureRequest) -> Subject:
    found: Subject = subjects(f"gguf-{request.param}")
    return found


@pytest.fixture
def model(subject: Subject) -> Any:
    return subject.model.open()


def every(names: Any) -> Any:
    return pytest.mark.parametrize("subject", names, indirect=True)


def wrongly(truth: Any, seed: int = 0) -> Any:
    return wrong_at(truth, 6000, seed)


def decide(model: Any, text: list[int], length: int, taken: int) -> Any:
    """Verify a chain behind the text and accept so much of it; the logits at its root."""
    tree = chain_of(text[-1], [(5 * at + 3) % 6000 for at in range(length)])
    row = model.score(tree, GREEDY).row(0).copy()
    model.accept(range(1, taken + 1))
    text += [*tree.tokens[1 : taken + 1], (7 * len(text)) % 6000]
    return row


@every([*ARCHITECTURES])
def test_what_cannot_branch_verifies_chains(model: Any) -> None:
    name = model.info.name
    assert (model.info.can_tree, model.info.leaves, model.info.note) == (True, 1, "")
    assert llama_cpp.llama_n_rs_seq(model.context) == SNAPSHOTS.get(name, 0)
    limit = model.depth_limit(20)
    assert limit is None if name == "qwen3vl" else limit == SNAPSHOTS.get(name, limit)
    assert llama_cpp.llama_n_seq_max(model.context) == 1, "a state per sequence would be large"


@every(STATES)
def test_what_is_undone_takes_no_forward_of_its_own(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read again by the next one."""
    wanted, prompt = generation(0.7, 1, LENGTH), prompt_of(30)
    plain = events_of(model.open(), prompt, wanted)
    rows = counted(model, monkeypatch)
    fast = events_of(model, prompt, wanted, [wrongly([*prompt, *ids(plain)])])
    assert_lossless(plain, fast)
    assert len(rows) == len(fast) + 1 and len(fast) < len(plain) * 0.8


@every(BOTH)
def test_what_lies_before_a_forward_is_no_snapshot(subject: Subject, model: Any) -> None:
    """The library would go back to before a forward of few rows, and take an older state for it."""
    prompt = prompt_of(30)
    for shorter in (1, 2, 5):
        model.reset()
        text = [*prompt]
        model.prefill(text, never)
        for _ in range(6):
            decide(model, text, 0, 0)
        other = [*text[:-shorter], 9]
        filled = model.prefill(other, never)
        row = model.score(Tree(9), GREEDY).row(0).copy()
        assert filled.complete and gap(row, subject.alone(other)) < subject.close


@every(STATES)
def test_the_beginning_of_an_answer_may_be_written_otherwise_later(
    subject: Subject, model: Any
) -> None:
    """As templates do once it is over."""
    text = prompt_of(500)
    model.prefill(text, never)
    other = [*text[:-6], 7, 8, 9, *prompt_of(40)]
    assert model.prefill(other, never).reused >= len(text) - 20
    assert gap(model.score(Tree(other[-1]), GREEDY).row(0), subject.alone(other)) < subject.close


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_said_depends_on_all_that_was_read(tmp_path: Path, name: str) -> None:
    """Else any damage to a state would pass."""
    path = tiny(tmp_path, name)
    assert path.stat().st_size < 4 << 20
    backend = opened_gguf(path)
    prompt = backend.tokenize("The sky is blue.")
    assert len(set(ids(events_of(backend, prompt, generation(0.0, 0, 16))))) > 4
    other = [prompt[1], *prompt[1:]]
    far = gap(alone(backend, prompt), alone(backend, other))
    assert far > 0.05, "the first of the tokens still matters behind the last"


# Where marks cannot be kept, and snapshots are few.


@every(BOTH)
def test_without_marks_a_text_is_read_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for them may be missing: then it takes longer, and says the same."""
    wanted, prompt = generation(0.7, 4, 24), prompt_of(300)
    plain = events_of(model.open(), prompt, wanted)
    monkeypatch.setattr(Marks, "keep", lambda *_: None)
    fast = events_of(model, prompt, wanted, [wrongly([*prompt, *ids(plain)])])
    assert_lossless(plain, fast)
    assert model.prefill([*prompt[:200], 5], never) == Filled(0, True)


@pytest.mark.parametrize("most", [0, 2])
def test_few_snapshots_are_eked_out_by_marks(
    tmp_path: Path, subjects: Any, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    whole = subjects("gguf-qwen35")  # shared with other tests, so it is made before the change
    monkeypatch.setattr("engine.models.probe.SNAPSHOTS", most)
    few = opened_gguf(tiny(tmp_path, "qwen35"))
    wanted, prompt = generation(0.7, 4, LENGTH), prompt_of(30)
    assert few.snapshots == most and few.info.note == ""
    plain = events_of(whole.model.open(), prompt, wanted)
    for seed in (2, 7):
        few.reset()
        fast = events_of(few, prompt, wanted, [wrongly([*prompt, *ids(plain)], seed)])
        assert_lossless(plain, fast)
        assert (max(len(step.by_depth) for step in fast) == most) == (most > 0)
    text = prompt_of(20)
    few.prefill(text, never)
    for length, taken in ((5, 0), (5, 3), (9, 1)):
        decide(few, text, length, taken)
    row = few.score(Tree(text[-1]), GREEDY).row(0).copy()
    assert gap(row, whole.alone(text)) < whole.close


@every(["granitehybrid", "mamba"])
def test_copies_may_stay_on_the_device(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library has room for one; the processor can be such a device, too."""
    wanted, texts = generation(0.7, 4, LENGTH), [prompt_of(30), prompt_of(47)]
    plain = [events_of(model.open(), text, wanted) for text in texts]
    sequences = [model.open() for _ in texts]
    for each in sequences:
        each.marks.on_device = True
    runs = [
        decode(each, text, [wrongly([*text, *ids(truth)])], wanted, Drafting())
        for each, text, truth in zip(sequences, texts, plain, strict=True)
    ]
    for truth, found in zip(plain, interleaved(runs, 3), strict=True):
        assert_lossless(truth, found)
    sequences[0].prefill(texts[0], never)
    decide(sequences[0], [*texts[0]], 5, 1)
    kept = sequences[0].marks.kept
    assert len(kept["step"][1]) < len(kept["end"][1]) / 2, "what it says is where the copy is"
    assert "step" not in sequences[1].marks.kept


def test_too_much_unread_is_read_by_a_plain_step(subjects: Any) -> None:
    model, text = subjects("gguf-qwen3next").model.open(), prompt_of(20)
    model.prefill(text, never)
    while model.depth_limit(len(text)):
        assert model.unread <= MOST_UNREAD
        decide(model, text, 9, 8)
    assert model.unread > MOST_UNREAD
    decide(model, text, 0, 0)
    assert model.unread == 0 and model.depth_limit(len(text))


def test_memory_is_told_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is large beside these weights: with fewer snapshots less is needed, by whole states.
    The marks are counted as well."""
    from engine.models.probe import found

    path = tiny(tmp_path, "qwen35")
    needs = {}
    for most in (1, 8):
        monkeypatch.setattr("engine.models.probe.SNAPSHOTS", most)
        told = found(path, Runtime())
        assert told.snapshots == most
        needs[most] = told.cache
    monkeypatch.setattr("engine.models.probe.SHARE", 0.05)
    told = found(path, Runtime())
    assert 0 < told.snapshots < 8, "a twentieth of the weights holds a few states"
    assert needs[1] < told.cache < needs[8]
    model = opened_gguf(path)
    model.prefill(prompt_of(200), Stop(10**9))
    assert len(model.marks.kept) <= MOST and model.marks.bytes > 0


# As draft models.


@every(BOTH)
def test_as_a_draft_model_and_as_its_target(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts for itself, so all is accepted; and for a text that takes other turns."""
    twin = opened_gguf(tiny(tmp_path, model.info.name))
    for batch in (4, 12):
        wanted, prompt = generation(0.7, 6, LENGTH), prompt_of(60)
        plain = events_of(model, prompt, wanted)
        stack = stack_of({"twin": twin}, [batch], wanted.sampling)
        fast = events_of(model, prompt, wanted, [stack], FIXED)
        assert_lossless(plain, fast)
        assert drafted_by_models(fast) > 20
    # Where its drafts are rejected, it reads on from where it drafted, not from the beginning.
    truth = [*prompt, *ids(events_of(model, prompt, generation(1.0, 7, LENGTH)))]
    rows = counted(model, monkeypatch)
    stack = stack_of({"twin": twin}, [4], wanted.sampling)
    for length in range(len(prompt), len(truth), 2):
        budget = Budget(Drafting(), 40, 6144)
        stack.top.grow(Tree(truth[length - 1]), truth[:length], budget)
    assert max(rows[2:]) < 24
