"""What every backend promises, over tiny models of every kind that either library runs.

A row of a tree is scored as its path alone, whatever was accepted, rejected, stopped, broken or
begun anew before, and whichever conversation had the model in between. So drafts change no word.
"""

from collections.abc import Callable

import pytest

from engine.backends.base import Filled, Wanted, common_prefix, is_batching
from engine.decode import decode, never
from engine.drafting.databases import Databases
from engine.methods import METHODS
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from tests.support.backends import (
    GREEDY,
    PATHS,
    PLAIN,
    SUBJECTS,
    Stop,
    Subject,
    after,
    chain_of,
    counted,
    failing,
    gap,
    interleaved,
    leaves_of,
    tree_of,
    wrong_at,
)
from tests.support.lossless import assert_lossless, events_of, ids

FIXED = Drafting(budget="fixed", nodes=32)
SIZES = (1, 2, 5, 7, 8, 9, 17, 40, 63, 64, 65)
"""Lengths of prompts: an empty cache, and trees inside, at the edge of and beyond windows."""


@pytest.fixture
def subject(subjects: Callable[[str], Subject], request: pytest.FixtureRequest) -> Subject:
    found = subjects(request.param)
    found.assert_verifies(leaves_of(request.param))
    return found


every = pytest.mark.parametrize("subject", SUBJECTS, indirect=True)
one_of_each = pytest.mark.parametrize(
    "subject", [each for each in SUBJECTS if each.values[0] in ("llama-gqa", "gguf-small")],
    indirect=True,
)  # fmt: skip


@every
def test_a_row_is_scored_as_its_path_alone(subject: Subject) -> None:
    sequence = subject.model.open()
    for size in SIZES:
        prompt = subject.prompt(size)
        assert sequence.prefill(prompt, never).complete and sequence.cached == prompt[:-1]
        tree = subject.tree(sequence, prompt[-1], size)
        scores = sequence.score(tree, GREEDY)
        assert [*scores.positions] == [size + depth for depth in tree.depths]
        for row in range(len(tree) + 1):
            path = [*prompt, *tree.path(row)]
            assert gap(scores.row(row), subject.alone(path)) < subject.close, (size, row)
        sequence.accept([])
        assert sequence.cached == prompt


@every
def test_rows_of_several_sequences_are_scored_as_their_paths_alone(subject: Subject) -> None:
    """In one forward or in several; some take part in the next one, and one joins."""
    if not (is_batching(subject.model) and subject.model.at_once):
        return  # Its answers take turns as wholes.
    texts = [subject.prompt(size)[at:] for at, size in enumerate((40, 9, 17, 66))]
    sequences = [subject.model.open() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        sequence.prefill(text, never)
    for chosen in ((0, 1, 2), (1, 3), (3, 0, 2, 1), (2,)):
        trees = [subject.tree(sequences[n], texts[n][-1], len(texts[n])) for n in chosen]
        wanted = [Wanted(sequences[n], t, GREEDY) for n, t in zip(chosen, trees, strict=True)]
        for number, tree, scores in zip(
            chosen, trees, subject.model.score_all(wanted), strict=True
        ):
            size, last = len(texts[number]), len(tree)
            assert [*scores.positions] == [size + depth for depth in tree.depths]
            for row in {0, last // 2, last}:
                path = [*texts[number], *tree.path(row)]
                assert gap(scores.row(row), subject.alone(path)) < subject.close, (number, row)
            kept, at = list[int](), last if number % 2 else 0
            while at:
                kept, at = [at, *kept], tree.parents[at]
            sequences[number].accept(kept)
            texts[number] += [*tree.path(kept[-1] if kept else 0), 11]
            assert sequences[number].cached == texts[number][:-1]


@every
def test_a_prompt_can_be_read_in_slices(subject: Subject) -> None:
    if not is_batching(subject.model):
        return
    sequence, prompt = subject.model.open(), subject.prompt(65)
    filled = [sequence.prefill(prompt, never, 20)]
    while not filled[-1].complete:
        assert sequence.cached == prompt[: 20 * len(filled)]
        filled.append(sequence.prefill(prompt, never, 20))
    assert len(filled) in (1, 4), "at once only where a text is read as a whole"
    scores = sequence.score(Tree(prompt[-1]), GREEDY)
    assert gap(scores.row(0), subject.alone(prompt)) < subject.close


@every
def test_a_sequence_begins_as_another_one_does(subject: Subject) -> None:
    """And then they go their own ways."""
    if not is_batching(subject.model):
        return
    first, second = subject.model.open(), subject.model.open()
    text = subject.prompt(65)
    others = [*text[:50], 9, 8, 7, *text[:9]]
    first.prefill(text, never)
    second.begin_as(first, others)
    for sequence, prompt in ((second, others), (first, text), (second, others)):
        reused = sequence.prefill(prompt, never).reused
        assert reused in (0, 50, len(prompt) - 1)
        scores = sequence.score(subject.tree(sequence, prompt[-1], len(prompt)), GREEDY)
        assert gap(scores.row(0), subject.alone(prompt)) < subject.close
    second.begin_as(first, text[:20])
    assert second.cached == others[:-1] or second.cached == others, "20 are no gain"


@one_of_each
def test_the_test_above_can_fail(subject: Subject) -> None:
    sequence, prompt = subject.model.open(), subject.prompt(30)
    sequence.prefill(prompt, never)
    scores = sequence.score(tree_of(prompt[-1]), GREEDY)
    wrong = [*prompt, *PATHS[-2], 2]
    assert gap(scores.row(len(PATHS)), subject.alone(wrong)) > 10 * subject.close


@pytest.mark.soak(stay=12)
@every
def test_any_row_can_be_accepted(subject: Subject) -> None:
    """With the rows before it; the others leave no trace in what follows."""
    sequence, prompt = subject.model.open(), subject.prompt(20)
    for row in range(len(subject.tree(sequence, prompt[-1], 20)) + 1):
        sequence.prefill(prompt, never)
        tree = subject.tree(sequence, prompt[-1], 20)
        sequence.score(tree, GREEDY)
        path, at = list[int](), row
        while at:
            path, at = [at, *path], tree.parents[at]
        sequence.accept(path)
        text = [*prompt, *tree.path(row), 11]
        assert sequence.cached == text[:-1]
        following = subject.tree(sequence, 11, len(text))
        scores = sequence.score(following, GREEDY)
        for last in (0, len(following)):
            wanted = subject.alone([*text, *following.path(last)])
            assert gap(scores.row(last), wanted) < subject.close, (row, last)
        sequence.accept([])


@pytest.mark.soak(stay=12)
@every
def test_chains_of_all_lengths_are_accepted_in_all_parts(subject: Subject) -> None:
    """Also none twice in a row, and longer ones than a model that keeps a state is told to
    verify."""
    sequence, text = subject.model.open(), subject.prompt(20)
    sequence.prefill(text, never)
    rows = []
    for length, taken in [
        (2, 0), (3, 0), (8, 0), (8, 7), (8, 8), (9, 0), (16, 16), (16, 1), (13, 0), (0, 0),
        (17, 15), (17, 0), (17, 3), (0, 0), (1, 0), (1, 1), (0, 0), (0, 0),
    ]:  # fmt: skip
        length = length if sequence.info.can_tree else 0
        chain = [(5 * at + 3) % subject.vocabulary for at in range(length)]
        rows.append(([*text], sequence.score(chain_of(text[-1], chain), GREEDY).row(0).copy()))
        sequence.accept(range(1, min(taken, length) + 1))
        text += [*chain[:taken], (7 * len(text)) % subject.vocabulary]
        assert sequence.cached == text[:-1]
    for before, row in rows:
        assert gap(row, subject.alone(before)) < subject.close, len(before)


@pytest.mark.soak(stay=18)
@every
@pytest.mark.parametrize("scored", [False, True], ids=["decided", "not accepted"])
def test_another_prompt_goes_on_from_what_it_shares(subject: Subject, scored: bool) -> None:
    """Where keys can be dropped, from all of it; where states cannot be shortened, from a mark."""
    begin = subject.prompt(30)
    for kept, new in [(30, [7]), (30, []), (25, [9, 8]), (5, []), (0, [9, 5, 6]), (1, [])]:
        text = [*begin[:kept], *new]
        sequence = subject.model.open()
        assert sequence.prefill(begin, never) == Filled(0, True)
        if scored:
            sequence.score(subject.tree(sequence, begin[-1], 30), GREEDY)
        filled = sequence.prefill(text, never)
        assert filled.complete and filled.reused <= common_prefix(begin, text[:-1])
        if sequence.info.leaves != 1 and sequence.info.can_tree:
            assert filled.reused == common_prefix(begin[:-1], text[:-1])
        assert sequence.cached == text[:-1]
        row = sequence.score(Tree(text[-1]), GREEDY).row(0)
        assert gap(row, subject.alone(text)) < subject.close, text


@pytest.mark.soak(stay=26)
@every
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_wrong_drafts_change_nothing(subject: Subject, temperature: float) -> None:
    """In a conversation of two turns, within the limits that the model states."""
    slow, fast = subject.model.open(), subject.model.open()
    info, text, accepted = fast.info, subject.prompt(70), 0
    for turn in range(2):
        wanted = Generation(Sampling(temperature, seed=turn), max_tokens=40)
        plain = events_of(slow, text, wanted)
        truth = [*text, *ids(plain)]
        drafter = wrong_at(truth, subject.vocabulary, turn, branches=info.leaves != 1)
        steps = events_of(fast, text, wanted, [drafter], FIXED)
        assert_lossless(plain, steps)
        accepted += sum(sum(step.accepted.values()) for step in steps)
        deepest = fast.depth_limit(1) or FIXED.nodes
        assert max(len(step.by_depth) for step in steps) <= deepest
        learned = METHODS["hd"].drafters(Databases())
        assert_lossless(plain, events_of(fast, text, wanted, learned))
        text = [*truth, *subject.prompt(60)[20:]]
    assert (accepted > 20) == info.can_tree
    assert gap(after(fast, text), subject.alone(text)) < subject.close


@pytest.mark.soak(stay=12)
@every
def test_conversations_take_turns(subject: Subject) -> None:
    """Each says what it says alone, and is closed alone."""
    wanted = Generation(Sampling(0.7, seed=3), max_tokens=24)
    texts = [subject.prompt(size) for size in (120, 3, 75)]
    sequences = [subject.model.open() for _ in texts]
    assert not any(each.bytes for each in sequences)
    truths = [events_of(subject.model.open(), text, wanted) for text in texts]
    runs = [
        decode(
            each, text,
            [wrong_at([*text, *ids(truth)], subject.vocabulary, branches=each.info.leaves != 1)],
            wanted, Drafting(),
        )
        for each, text, truth in zip(sequences, texts, truths, strict=True)
    ]  # fmt: skip
    for truth, steps in zip(truths, interleaved(runs, 1), strict=True):
        assert_lossless(truth, steps)
    one, other, _ = sequences
    taken = other.bytes
    assert one.info is other.info is subject.model.info and type(one) is type(subject.model)
    assert min(one.bytes, taken) > 0
    for _ in range(2):
        one.close()
        assert one.bytes == 0 and other.bytes == taken
    longer = [*texts[1], *ids(truths[1]), 5, 6]
    assert other.prefill(longer, never) == Filled(len(longer) - 3, True)
    assert one.prefill(texts[0], never) == Filled(0, True)


@pytest.mark.soak(stay=18)
@every
@pytest.mark.parametrize("at", ["prefill", "score"])
def test_after_a_failed_forward_the_next_answer_is_right(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """It empties its own sequence alone."""
    wanted = Generation(Sampling(0.7, seed=1), max_tokens=8)
    bad, good, prompt = subject.model.open(), subject.model.open(), subject.prompt(40)
    plain = events_of(good, prompt, wanted)
    bad.prefill(prompt[:30], never)
    with monkeypatch.context() as patch:
        wrong = failing(bad, patch)
        with pytest.raises(wrong):
            if at == "prefill":
                bad.prefill(prompt, never)
            bad.score(subject.tree(bad, prompt[29], 30), GREEDY)
    assert bad.bytes == 0 and bad.cached == []
    assert good.bytes > 0 and good.cached[:40] == prompt
    assert bad.prefill(prompt, never) == Filled(0, True)
    for sequence in (bad, good):
        assert ids(events_of(sequence, prompt, wanted)) == ids(plain)


@pytest.mark.soak(stay=12)
@every
def test_a_stopped_prompt_goes_on_where_it_stopped(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anywhere: between forwards, or inside of one, whose rows are thrown away."""
    monkeypatch.setattr("engine.backends.transformers.PREFILL_CHUNK", 32, raising=False)
    sequence, prompt, whole = subject.model.open(), subject.prompt(150), Stop(10**9)
    if sequence.info.kind == "llama.cpp":
        sequence.chunk = 32
    assert sequence.prefill(prompt, whole) == Filled(0, True)
    wanted, lengths = subject.alone(prompt), set[int]()
    for share in (0.0, 0.3, 0.7, 1.0):
        sequence.close()
        stop = Stop(1 + int(share * (whole.asked - 1)))
        stopped = sequence.prefill(prompt, stop)
        read = len(sequence.cached)
        assert not stopped.complete or share == 1.0
        assert sequence.cached == prompt[:read]
        lengths.add(read)
        assert sequence.prefill(prompt, never) == Filled(read, True)
        row = sequence.score(Tree(prompt[-1]), GREEDY).row(0)
        assert gap(row, wanted) < subject.close, share
    assert len(lengths) > 1 or sequence.info.name == PLAIN or not sequence.info.can_tree


@one_of_each
def test_the_bytes_of_tokens_are_those_of_their_text(subject: Subject) -> None:
    tokens = subject.prompt(40)
    pieces = [subject.model.piece(token) for token in tokens]
    assert b"".join(pieces).decode("utf-8", "replace") == subject.model.detokenize(tokens)
    assert len({*pieces}) > 1


@pytest.mark.soak(stay=12)
@every
def test_a_second_turn_reads_only_what_is_new(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In few forwards, behind an answer with rejected drafts; and the same prompt reads nothing."""
    sequence, prompt = subject.model.open(), subject.prompt(300)
    wanted = Generation(Sampling(0.7, seed=3), max_tokens=24)
    truth = [*prompt, *ids(events_of(sequence, prompt, wanted))]
    events_of(sequence, prompt, wanted, [wrong_at(truth, subject.vocabulary)])
    text = [*truth, *subject.prompt(200)]
    rows = counted(sequence, monkeypatch)
    for new in (len(text) - len(truth), 0):
        rows.clear()
        filled = sequence.prefill(text, never)
        assert filled == Filled(len(text) - 1 - new, True) or not sequence.info.can_tree
        assert sum(rows) == len(text) - 1 - filled.reused and len(rows) <= 4
    assert gap(after(sequence, text), subject.alone(text)) < subject.close
