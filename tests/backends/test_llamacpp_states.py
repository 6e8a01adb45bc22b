"""GGUF models whose layers keep a state, and those that cannot branch: they verify chains, and say
what they say plainly, whatever is rejected, undone, stopped or parked."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.backends.base import Filled
from engine.decode import decode, never
from engine.drafting.costs import measure_costs
from engine.drafting.databases import Databases
from engine.methods import METHODS
from engine.settings import Drafting
from engine.tree import Tree, graft
from tests.backends.test_llamacpp import CLOSE, Stop, after, counted, prompt_of
from tests.backends.test_sequences import interleaved
from tests.backends.test_transformers import GREEDY, gap
from tests.support.gguf_files import opened_gguf
from tests.support.lossless import (
    Adversary,
    assert_lossless,
    curves,
    events_of,
    generation,
)
from tests.support.tiny_gguf import ARCHITECTURES, tiny
from tests.unit.test_stack import FIXED, drafted_by_models, ids, stack_of

pytestmark = pytest.mark.gguf
SNAPSHOTS = dict.fromkeys(("qwen35", "qwen35moe", "nemotron_h", "lfm2"), 8)
"""Architectures that the library lets go back by snapshots; the others go back to marks."""
STATES = [name for name in ARCHITECTURES if name != "qwen3vl"]
BOTH = ["qwen35", "qwen3next", "mamba"]
"""One of each way to go back, and one that has nothing but states."""
LENGTH, WRONG = 40, 0.3
FURTHER = 6
"""How much more may be lost in rounding where random weights magnify it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def models(folder: Path) -> Callable[[str], Any]:
    """Each architecture's model, loaded once."""
    return cache(lambda name: opened_gguf(tiny(folder, name)))


@pytest.fixture
def model(models: Callable[[str], Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    loaded = models(request.param)
    loaded.reset()
    yield loaded


def every(names: Sequence[str]) -> Any:
    return pytest.mark.parametrize("model", names, indirect=True)


def wrongly(truth: Sequence[int], ahead: int, share: float = WRONG) -> Adversary:
    """Drafts what the text says next, with that share of wrong tokens."""
    draw = random.Random(len(truth))

    def say(tokens: Sequence[int]) -> list[tuple[int, ...]]:
        right = truth[len(tokens) : len(tokens) + ahead]
        return [tuple((token + (draw.random() < share)) % 6000 for token in right)]

    return Adversary(say)


def chain(root: int, length: int) -> Tree:
    tree = Tree(root)
    graft(tree, [(5 * at + 3) % 6000 for at in range(length)], "model", 0, length)
    return tree


def decide(model: Any, text: list[int], length: int, taken: int) -> Any:
    """Verify a chain behind the text and accept so much of it; the logits at its root."""
    tree = chain(text[-1], length)
    row = model.score(tree, GREEDY).row(0).copy()
    model.accept(range(1, taken + 1))
    text += [*tree.tokens[1 : taken + 1], (7 * len(text)) % 6000]
    return row


@every([*ARCHITECTURES])
def test_what_cannot_branch_verifies_chains(model: Any) -> None:
    import llama_cpp

    name = model.info.name
    assert (model.info.can_tree, model.info.leaves, model.info.note) == (True, 1, "")
    assert llama_cpp.llama_n_rs_seq(model.context) == SNAPSHOTS.get(name, 0)
    limit = model.depth_limit(20)
    assert limit is None if name == "qwen3vl" else limit == SNAPSHOTS.get(name, limit)
    assert llama_cpp.llama_n_seq_max(model.context) == 1, "a state per sequence would be large"


@pytest.mark.grid(1)
@pytest.mark.parametrize("ahead", [3, 8, 20])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@every([*ARCHITECTURES])
def test_wrong_drafts_change_nothing(
    model: Any, temperature: float, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And take no forward of their own: what is undone is read again by the next one."""
    wanted, prompt = generation(temperature, 1, LENGTH), prompt_of(30)
    plain = events_of(model, prompt, wanted)
    model.reset()
    rows = counted(monkeypatch)
    fast = events_of(model, prompt, wanted, [wrongly([*prompt, *ids(plain)], ahead)])
    assert_lossless(plain, fast)
    accepted = sum(sum(step.accepted.values()) for step in fast)
    assert 0 < accepted < sum(sum(step.proposed.values()) for step in fast)
    assert len(rows) == len(fast) + 1 and len(fast) < len(plain) / 2
    assert max(len(step.by_depth) for step in fast) <= (model.depth_limit(20) or ahead)


@every([*ARCHITECTURES])
def test_chains_of_all_lengths_accepted_in_all_parts(model: Any) -> None:
    """Also longer ones than the model is told to verify, and none accepted twice in a row."""
    text, found = prompt_of(20), []
    model.prefill(text, never)
    cases = [(2, 0), (3, 0), (8, 0), (8, 7), (8, 8), (9, 0), (13, 1), (13, 0), (0, 0), (40, 39)]
    for length, taken in [*cases, (40, 0), (40, 3), (0, 0), (1, 0), (1, 1), (0, 0), (0, 0)]:
        before = [*text]
        found.append((before, decide(model, text, length, taken)))
        assert model.cached == text[:-1]
    for before, row in found:
        assert gap(row, after(model, before)) < FURTHER * CLOSE, len(before)


@every(BOTH)
def test_what_lies_before_a_forward_is_no_snapshot(model: Any) -> None:
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
        assert filled.complete and gap(row, after(model, other)) < FURTHER * CLOSE


@every(STATES)
def test_a_second_turn_reads_what_is_new(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, wanted = prompt_of(300), generation(0.7, 3, LENGTH)
    plain = events_of(model, prompt, wanted)
    model.reset()
    events_of(model, prompt, wanted, [wrongly([*prompt, *ids(plain)], 6)])
    answer, rows = ids(plain), counted(monkeypatch)
    said, question = [*prompt, *answer], prompt_of(200)
    for turn, text, reused in [
        ("the next question", [*said, *question], len(said) - 1),
        ("the same question", [*said, *question], len(said) + len(question) - 1),
        ("another question", [*said, *question[50:150]], len(said) - 1),
    ]:
        rows.clear()
        filled = model.prefill(text, never)
        assert filled == Filled(reused, True), turn
        assert sum(rows) == len(text) - 1 - filled.reused and len(rows) <= 2, turn
        model.score(Tree(text[-1]), GREEDY)
        model.accept(())
    # Templates write the beginning of an answer otherwise once it is over.
    other = [*text[:-6], 7, 8, 9, *prompt_of(40)]
    assert model.prefill(other, never).reused >= len(text) - 20
    row = model.score(Tree(other[-1]), GREEDY).row(0).copy()
    assert gap(row, after(model, other)) < FURTHER * CLOSE


@every(STATES)
def test_a_stop_in_the_middle_keeps_what_was_read(folder: Path, model: Any) -> None:
    backend, prompt = opened_gguf(folder / f"{model.info.name}.gguf", batch_size=64), prompt_of(400)
    wanted, whole = after(backend, prompt), Stop(10**9)
    backend.reset()
    backend.prefill(prompt, whole)
    for share in (0, 0.3, 0.6, 0.9):
        backend.reset()
        backend.prefill(prompt, Stop(1 + int(share * whole.asked)))
        read = len(backend.cached)
        assert backend.cached == prompt[:read] and share * 399 - 64 <= read < 399
        assert backend.prefill(prompt, never) == Filled(read, True)
        assert gap(backend.score(Tree(prompt[-1]), GREEDY).row(0), wanted) < FURTHER * CLOSE


class Broken(Exception):
    """What a test throws."""


@every(STATES)
def test_after_an_exception_the_answer_is_the_same(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llama_cpp

    wanted, prompt = generation(0.7, 2, LENGTH), prompt_of(30)
    plain = events_of(model, prompt, wanted)
    drafters = [wrongly([*prompt, *ids(plain)], 6)]
    model.reset()
    with monkeypatch.context() as patch:
        patch.setattr("engine.verify.Match.walk", lambda *_: (_ for _ in ()).throw(Broken))
        with pytest.raises(Broken):
            events_of(model, prompt, wanted, drafters)
    assert model.dirty and model.cached == prompt[:-1]
    # Its root was decided, so it stays where the drafts can be taken back alone.
    assert model.prefill([*prompt, 9], never) == Filled(30 if model.snapshots else 29, True)
    assert_lossless(plain, events_of(model, prompt, wanted, drafters))
    run = llama_cpp.llama_decode
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_decode", lambda *given: run(*given) or -3)
        with pytest.raises(Exception, match="llama_decode returned -3"):
            events_of(model, prompt, wanted)
    assert model.cached == [] and model.bytes == 0
    assert_lossless(plain, events_of(model, prompt, wanted, drafters))
    # A run that nobody reads to its end.
    run_on = decode(model, prompt, drafters, wanted, Drafting())
    for _ in range(4):
        next(run_on)
    run_on.close()
    assert_lossless(plain, events_of(model, prompt, wanted, drafters))


@every([*ARCHITECTURES])
def test_conversations_take_turns(model: Any) -> None:
    """Each is parked with what it has left unread, and with its marks."""
    wanted = generation(0.7, 3, 30)
    texts = [prompt_of(size) for size in (120, 31, 75)]
    plain = []
    for text in texts:
        model.reset()
        plain.append(events_of(model, text, wanted))
    model.reset()
    sequences = [model.open() for _ in texts]
    for turn in range(2):
        runs = [
            decode(each, text, [wrongly([*text, *ids(truth)], 7)], wanted, Drafting())
            for each, text, truth in zip(sequences, texts, plain, strict=True)
        ]
        for truth, found in zip(plain, interleaved(runs, turn), strict=True):
            assert_lossless(truth, found)
    for each, text, truth in zip(sequences, texts, plain, strict=True):
        assert each.prefill([*text, *ids(truth), 5, 6], never).reused == len(text) + 29
        assert each.bytes > 0
        each.close()
        assert each.bytes == 0


# Where marks cannot be kept, and snapshots are few.


@every(BOTH)
def test_without_marks_a_text_is_read_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for them may be missing: then it takes longer, and says the same."""
    from engine.backends.marks import Marks

    wanted, prompt = generation(0.7, 4, 24), prompt_of(300)
    plain = events_of(model, prompt, wanted)
    model.reset()
    monkeypatch.setattr(Marks, "keep", lambda *_: None)
    fast = events_of(model, prompt, wanted, [wrongly([*prompt, *ids(plain)], 5)])
    assert_lossless(plain, fast)
    assert model.prefill([*prompt[:200], 5], never) == Filled(0, True)


@pytest.mark.parametrize("most", [0, 2])
def test_few_snapshots_are_eked_out_by_marks(
    tmp_path: Path, models: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("engine.models.probe.SNAPSHOTS", most)
    few = opened_gguf(tiny(tmp_path, "qwen35"))
    wanted, prompt = generation(0.7, 4, LENGTH), prompt_of(30)
    assert few.snapshots == most and few.info.note == ""
    whole = models("qwen35")
    whole.reset()
    plain = events_of(whole, prompt, wanted)
    for ahead in (2, 7):
        few.reset()
        fast = events_of(few, prompt, wanted, [wrongly([*prompt, *ids(plain)], ahead)])
        assert_lossless(plain, fast)
        assert max(len(step.by_depth) for step in fast) == min(ahead, most or ahead)
    text = prompt_of(20)
    few.prefill(text, never)
    for length, taken in ((5, 0), (5, 3), (9, 1)):
        decide(few, text, length, taken)
    row = few.score(Tree(text[-1]), GREEDY).row(0).copy()
    assert gap(row, after(whole, text)) < FURTHER * CLOSE


@every(["granitehybrid", "mamba"])
def test_copies_may_stay_on_the_device(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library has room for one; the processor can be such a device, too."""
    wanted, texts = generation(0.7, 4, LENGTH), [prompt_of(30), prompt_of(47)]
    plain = []
    for text in texts:
        plain.append(events_of(model, text, wanted))
        model.reset()
    sequences = [model.open() for _ in texts]
    for each in sequences:
        each.marks.on_device = True
    runs = [
        decode(each, text, [wrongly([*text, *ids(truth)], 6)], wanted, Drafting())
        for each, text, truth in zip(sequences, texts, plain, strict=True)
    ]
    for truth, found in zip(plain, interleaved(runs, 3), strict=True):
        assert_lossless(truth, found)
    sequences[0].prefill(texts[0], never)
    decide(sequences[0], [*texts[0]], 5, 1)
    kept = sequences[0].marks.kept
    assert len(kept["step"][1]) < len(kept["end"][1]) / 2, "what it says is where the copy is"
    assert "step" not in sequences[1].marks.kept


def test_too_much_unread_is_read_by_a_plain_step(models: Callable[[str], Any]) -> None:
    from engine.backends.llamacpp_states import MOST_UNREAD

    model, text = models("qwen3next"), prompt_of(20)
    model.reset()
    model.prefill(text, never)
    while model.depth_limit(len(text)):
        assert model.unread <= MOST_UNREAD
        decide(model, text, 9, 8)
    assert model.unread > MOST_UNREAD
    decide(model, text, 0, 0)
    assert model.unread == 0 and model.depth_limit(len(text))


def test_memory_is_told_before_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is large beside these weights: with fewer snapshots less is needed, by whole states.
    The marks are counted as well."""
    from engine.backends.marks import MOST
    from engine.models.probe import found
    from engine.settings import Runtime

    path = tiny(folder, "qwen35")
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


# Everything that drafts.


@every(["qwen35", "granitehybrid"])
@pytest.mark.parametrize("costs", ["free", "usual", "jumps", "never", "measured"])
def test_databases_draft_chains(model: Any, models: Any, costs: str) -> None:
    """Whatever a forward costs; also by the model's own curve."""
    filled, prompt = Databases(), prompt_of(40)
    curve = curves()[costs] if costs != "measured" else measure_costs(model.open(), seconds=0.1)
    for seed in (1, 2, 1):
        wanted = generation(0.7, seed, LENGTH)
        plain = events_of(models(model.info.name).open(), prompt, wanted)
        drafters = METHODS["hd"].drafters(filled)
        fast = events_of(model, prompt, wanted, drafters, Drafting(), costs=curve)
        assert_lossless(plain, fast)
    if costs == "free":
        assert len(fast) < len(plain) / 2, "it has given the same answer before"


@every(BOTH)
def test_as_a_draft_model_and_as_its_target(model: Any, folder: Path, monkeypatch: Any) -> None:
    """It drafts for itself, so all is accepted; and for a text that takes other turns."""
    twin = opened_gguf(folder / f"{model.info.name}.gguf")
    for batch in (4, 12):
        wanted, prompt = generation(0.7, 6, LENGTH), prompt_of(60)
        plain = events_of(model, prompt, wanted)
        stack = stack_of({"twin": twin}, [batch], wanted.sampling)
        fast = events_of(model, prompt, wanted, [stack], FIXED)
        assert_lossless(plain, fast)
        assert drafted_by_models(fast) > 20
    # Where its drafts are rejected, it reads on from where it drafted, not from the beginning.
    truth, rows = (
        [*prompt, *ids(events_of(model, prompt, generation(1.0, 7, LENGTH)))],
        counted(monkeypatch),
    )
    stack = stack_of({"twin": twin}, [4], wanted.sampling)
    for length in range(len(prompt), len(truth), 2):
        stack.top.grow(Tree(truth[length - 1]), truth[:length], plenty())
    assert max(rows[2:]) < 24


def plenty() -> Any:
    from engine.drafting.budget import Budget

    return Budget(Drafting(), 40, 6144)
