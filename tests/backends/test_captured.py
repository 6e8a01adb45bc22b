"""Captured forwards, here without a GPU: the same code without a recording."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends import captured
from engine.backends.base import Wanted
from engine.backends.device_scores import DeviceScores
from engine.backends.fused import Joined, Products
from engine.backends.transformers import TransformersBackend
from engine.decode import never
from engine.drafting.databases import Databases
from engine.engine import Request
from engine.heads import eagle3_head
from engine.heads.captured_head import capture_head
from engine.heads.eagle3_head import Eagle3Head
from engine.local import Local
from engine.methods import METHODS, method_named
from engine.models.load_transformers import with_captured
from engine.models.torch_heads import with_head
from engine.settings import Generation, Sampling
from engine.types import Message, Step
from tests.conftest import EMBEDDED
from tests.support.backends import load, prompt_of, save_model, tree_of
from tests.support.lossless import Adversary, assert_lossless, events_of, ids

pytestmark = pytest.mark.model
SIZES = {"TREES": (1, 4, 16), "PROMPTS": (32,), "REACH": 64}
"""Fewer sizes, and a smaller reach, so that a trial takes little time on a processor."""
ALL_SIZES = {"TREES": (1, 4, 16, 32, 64), "PROMPTS": (128, 256, 384, 512), "REACH": 512}
FAMILIES = (
    "llama-gqa", "qwen3", "phi3", "gpt-neox", "gpt2", "mistral-window", "gemma2-mixed",
    "gemma3-mixed", "llama4-chunks",
)  # fmt: skip
CONTEXT = 80


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, sizes in SIZES.items():
        monkeypatch.setattr(captured, name, sizes)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Models by their kind, each loaded once; tests change copies."""
    made: dict[str, Any] = {}

    def model(kind: str) -> Any:
        if kind not in made:
            folder = save_model(kind, tmp_path_factory.mktemp("captured"))
            made[kind] = load(folder, context_length=CONTEXT)
        return made[kind].open()

    return model


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_captured_forward_gives_what_the_others_give(
    models: Callable[[str], Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees and prompts of all sizes, anywhere in the pool, with other tokens in the padding."""
    gaps, gap = [], captured.largest_gap
    monkeypatch.setattr(captured, "largest_gap", lambda *of: (gaps.append(gap(*of)), gaps[-1])[1])
    backend = models(kind)
    assert captured.capture(backend) == "" and backend.captured is not None
    assert 0 < gaps[0] < 1e-5


@pytest.mark.parametrize("context", [20, 700])
def test_all_sizes_fit_into_any_context(
    models: Callable[[str], Any], context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = models("llama-gqa")
    for name, sizes in ALL_SIZES.items():
        monkeypatch.setattr(captured, name, sizes)
    backend.info = replace(backend.info, context_length=context)
    backend.close()
    assert captured.capture(backend) == ""
    longest = prompt_of(context - 1, 160)
    assert backend.prefill(longest, never).complete
    row = backend.score(tree_of(longest[-1]), Sampling(0.0)).row(8)
    assert abs(row - backend.alone([*longest, 4, 6, 7, 1])).max() < 1e-3


def without_root(given: Any, used: int) -> None:
    given.visible[1:used, 0] = 0


def with_a_sibling(given: Any, used: int) -> None:
    given.visible[2:used, 1:2] = 1


def one_further(given: Any, used: int) -> None:
    given.positions[used - 1] += 1


def one_less_cached(given: Any, used: int) -> None:
    given.lengths[:] = given.lengths.clip(1) - 1


FAULTS = (without_root, with_a_sibling, one_further, one_less_cached)


def with_fault(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any, int, int], None]) -> None:
    """Have captured forwards spoil what they are told in their rows from a first to a last one.
    Rounding is judged as in bfloat16."""
    fill = captured.CapturedForward.fill

    def wrong(forward: Any, first: int, tokens: Any, *rest: Any) -> None:
        fill(forward, first, tokens, *rest)
        fault(forward, first, first + len(tokens))

    monkeypatch.setattr(captured.CapturedForward, "fill", wrong)
    monkeypatch.setitem(captured.SHARES, torch.float32, captured.SHARES[torch.bfloat16])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_at_load(
    models: Callable[[str], Any], fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by what is allowed in bfloat16."""
    backend = models("llama-gqa")
    with_fault(
        monkeypatch,
        lambda forward, _, last: None if forward.prompt else fault(forward.given, last),
    )
    assert captured.capture(backend).startswith("its logits are off by")
    assert backend.captured is None and backend.bytes == 0
    prompt = prompt_of(20, 160)
    assert backend.prefill(prompt, never).complete


def test_joined_products_are_forgotten_once_all_have_taken_their_part() -> None:
    """Also if some are asked in another order, or twice."""
    torch.manual_seed(0)
    parts = [torch.nn.Linear(6, size) for size in (4, 3, 2)]
    states, other = torch.randn(5, 6), torch.randn(5, 6)
    with torch.inference_mode():
        wanted = {id(x): [part(x) for part in parts] for x in (states, other)}
        joined = Joined(parts)
        forwards = [forward for _, forward in joined.forwards(Products(None, torch.float32))]
        for x in (states, other, states):
            for at in (1, 0, 2):
                assert torch.allclose(forwards[at](x), wanted[id(x)][at])
            assert joined.output.numel() == 0
        forwards[0](states)
        assert torch.allclose(forwards[0](other), wanted[id(other)][0])
    assert all(part.weight.data_ptr() != joined.matrix[0].data_ptr() for part in parts[1:])
    assert parts[0].weight.data_ptr() == joined.matrix[0].data_ptr(), "held once"


def test_a_model_that_does_not_fit_is_told_with_the_reason(
    models: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = models("phi3")
    monkeypatch.setattr(backend.rotary, "switches", [40])
    with_captured(backend)
    assert backend.captured is None and backend.info.nodes is None
    assert backend.info.note.endswith(
        "starts its operations one by one, as its rotary factors depend on the length of the text."
    )


def test_code_that_cannot_be_recorded_is_told(
    models: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, compute: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(captured.Recorder, "recorded", refuse)
    backend = models("llama-gqa")
    assert captured.capture(backend).startswith("its forwards fail (operation not permitted")
    assert backend.captured is None


@pytest.fixture(scope="module")
def own(embedded: Any) -> Any:
    """The embedded model, with its head, in captured forwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "TREES", (1, 4, 16, 64))
        patch.setattr(captured, "PROMPTS", (96,))
        # On a GPU, no matrix of a head is rounded.
        patch.setattr(eagle3_head, "verifies_cheaply", lambda: False)
        info = replace(embedded.info, context_length=200)
        backend = TransformersBackend(embedded.model, embedded.tokenizer, info)
        with_head(backend, str(EMBEDDED), "auto")
        assert captured.tried(backend, None, answers=4) == ""
        capture_head(backend)
        assert backend.head.weights.captured is not None
    return backend


@pytest.mark.soak(stay=5)
@pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(0.7, seed=3, min_p=0.02), Sampling(1.0, 40, 0.9, seed=5)]
)
@pytest.mark.parametrize("method", ["hd", "head", "hd-published"])
def test_the_text_is_that_of_plain_decoding(
    own: Any, embedded: Any, method: str, sampling: Sampling
) -> None:
    """Two answers, so that the second is drafted from the first; the head reads its hidden states
    in the captured forwards."""
    prompt, wanted = embedded.tokenize("Once upon a time"), Generation(sampling, max_tokens=40)
    databases, plain, accepted = Databases(), events_of(embedded.open(), prompt, wanted), 0
    for _ in range(2):
        drafters = method_named(method).drafters(databases, target=own)
        steps = events_of(own, prompt, wanted, drafters)
        assert_lossless(plain, steps)
        accepted += sum(sum(step.accepted.values()) for step in steps)
    assert accepted > 0


def test_the_survey_comes_with_the_forward(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And choices are made from it: no row is read."""
    monkeypatch.setattr(DeviceScores, "survey", lambda scores: pytest.fail("a second survey"))
    prompt = prompt_of(30)
    for sampling in (Sampling(0.0), Sampling(0.7, seed=1), Sampling(1.0, 40, 0.9, seed=2)):
        own.prefill(prompt, never)
        scores = own.score(tree_of(prompt[-1]), sampling)
        scores.read = lambda row: pytest.fail("a row was read")
        assert len({scores.choose(row) for row in range(9)}) > 1


def test_a_tree_of_more_rows_is_computed_outside(own: Any) -> None:
    prompt, many = prompt_of(20), [(3, at) for at in range(70)]
    own.prefill(prompt, never)
    scores = own.score(tree_of(prompt[-1], [(3,), *many]), Sampling(0.0))
    assert abs(scores.row(71) - own.alone([*prompt, 3, 69])).max() < 1e-3
    own.accept([1])
    row = own.score(tree_of(9), Sampling(0.0)).row(0)
    assert abs(row - own.alone([*prompt, 3, 9])).max() < 1e-3


def test_no_more_is_drafted_than_fits(models: Callable[[str], Any]) -> None:
    backend = models("llama-gqa")
    with_captured(backend)
    assert backend.info.nodes == 15 and backend.info.note == ""
    backend.info = replace(backend.info, nodes=5, eos_ids=frozenset())
    drafter = Adversary(lambda tokens: [(at,) for at in range(40)], obedient=True)
    steps = events_of(
        backend, prompt_of(9, 160), Generation(Sampling(0.0), max_tokens=4), [drafter]
    )
    assert max(sum(step.proposed.values()) for step in steps) == 5


def test_recorded_steps_of_a_head_guess_as_others_do(own: Any) -> None:
    """For two texts in turn, whose keys take turns in the same memory."""
    pairs = []
    for length in (20, 45):
        prompt, pair = prompt_of(length), [own.open(), own.open()]
        pair[1].head = Eagle3Head(replace(own.head.weights, captured=None))
        for sequence in pair:
            sequence.head.listen(True)
            sequence.prefill(prompt, never)
        pairs.append((prompt, pair))

    def compare(found: Any, wanted: Any) -> None:
        for one, other in zip(found, wanted, strict=True):
            assert np.allclose(one.logits, other.logits, atol=1e-3)

    greedy = Sampling(0.0)
    for _ in range(3):
        for prompt, pair in pairs:
            heads = [sequence.head for sequence in pair]
            compare(*([head.start(prompt, greedy, never)] for head in heads))
            for parents, tokens in (((0, 0, 0, 0, 0), (3, 4, 5, 6, 7)), ((1, 4), (8, 9))):
                compare(*(head.extend(parents, tokens) for head in heads))
            for sequence in pair:
                sequence.score(tree_of(prompt[-1]), greedy)
                sequence.accept([1, 2])
            prompt += [*pair[0].cached[len(prompt) :], 11]


# Several sequences in one forward


SAMPLERS = (
    Sampling(0.0), Sampling(0.7, seed=1), Sampling(1.0, 40, 0.9, seed=2),
    Sampling(1.3, seed=3, min_p=0.05),
)  # fmt: skip


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the captured forwards from now on."""
    sizes, run = list[int](), captured.CapturedForward.run
    monkeypatch.setattr(
        captured.CapturedForward, "run", lambda own: (sizes.append(own.rows), run(own))[1]
    )
    return sizes


def test_trees_of_several_samplers_share_a_forward(
    own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices are those of each alone, from the survey; no later forward changes them."""
    monkeypatch.setattr(DeviceScores, "survey", lambda scores: pytest.fail("a second survey"))
    wanted, expected = [], []
    for number, sampling in enumerate(SAMPLERS):
        prompt, sequence = prompt_of(20 + 9 * number), own.open()
        sequence.prefill(prompt, never)
        tree = tree_of(prompt[-1])
        scores = sequence.score(tree, sampling)
        expected.append([(scores.choose(row), scores.row(row).copy()) for row in range(9)])
        wanted.append(Wanted(sequence, tree, sampling))
    sizes = counted(monkeypatch)
    found = own.score_all(wanted)
    assert sizes == [64]
    own.prefill(prompt_of(90), never)
    own.score_all(wanted[::-1])
    for scores, rows in zip(found, expected, strict=True):
        for row, (token, logits) in enumerate(rows):
            assert scores.choose(row) == token
            assert abs(scores.row(row) - logits).max() < 1e-3


def test_each_head_gets_the_states_of_its_own_rows(own: Any) -> None:
    """Also where a sequence whose head does not listen has rows before them."""
    found: list[list[Any]] = []
    for together in (True, False):
        wanted = []
        for number, listens in enumerate((False, True, True)):
            prompt, sequence = prompt_of(20 + number), own.open()
            sequence.head.listen(listens)
            sequence.prefill(prompt, never)
            wanted.append(Wanted(sequence, tree_of(prompt[-1]), Sampling(0.0)))
        for each in [wanted] if together else [[each] for each in wanted]:
            own.score_all(each)
            if together:
                own.prefill(prompt_of(50), never)
            for one in each:
                one.sequence.accept([1, 2])
        found.append([each.sequence.head.waiting for each in wanted])
    assert found[0][0] == found[1][0] == []
    for inside, alone in zip(found[0][1:], found[1][1:], strict=True):
        assert torch.allclose(torch.cat(inside), torch.cat(alone), atol=1e-3)


def test_what_does_not_fit_together_takes_several_forwards(
    models: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many rows, or more answers than places. A tree of too many rows is computed outside."""
    model = models("llama-gqa")
    assert captured.tried(model, None, answers=4) == "" and model.at_once
    sizes = counted(monkeypatch)

    def check(texts: list[list[int]], trees: list[Any]) -> list[int]:
        sequences = [model.open() for _ in texts]
        for sequence, text in zip(sequences, texts, strict=True):
            sequence.prefill(text, never)
        sizes.clear()
        wanted = [
            Wanted(sequence, tree, Sampling(0.0))
            for sequence, tree in zip(sequences, trees, strict=True)
        ]
        for text, tree, scores in zip(texts, trees, model.score_all(wanted), strict=True):
            for row in range(len(tree) + 1):
                assert abs(scores.row(row) - model.alone([*text, *tree.path(row)])).max() < 1e-3
        for sequence in sequences:
            sequence.accept([1])
            row = sequence.score(tree_of(9), Sampling(0.0)).row(0)
            assert abs(row - model.alone([*sequence.cached, 9])).max() < 1e-3
        return sizes[: -len(texts)]

    texts = [prompt_of(9 + 22 * number, 160) for number in range(4)]
    chains = [tree_of(text[-1], [(3, 4, 5)[:length] for length in range(1, 4)]) for text in texts]
    assert check(texts, chains) == [16]
    pairs = [tree_of(text[-1], [(3,)]) for text in texts]
    assert check([*texts, *texts[:2]], [*pairs, *pairs[:2]]) == [16, 4]
    trees = [tree_of(text[-1], [(3, 4, 5)[:n] for n in range(1, 4)] + [(8,)]) for text in texts]
    assert check(texts, trees) == [16, 16]
    wide = [(at,) for at in range(3, 23)]
    assert check(texts, [tree_of(texts[0][-1], wide), *pairs[1:]]) == [16]


def where_another_begins(given: Any, first: int, last: int) -> None:
    given.starts[first:last] = given.starts[0]


def at_the_place_of_another(given: Any, first: int, last: int) -> None:
    given.places[first:last] += 1


def after_the_text_of_another(given: Any, first: int, last: int) -> None:
    given.lengths[first:last] = given.lengths[0]


def before_its_place(given: Any, first: int, last: int) -> None:
    given.starts[first:last] -= 8


@pytest.mark.parametrize(
    "fault",
    [where_another_begins, at_the_place_of_another, after_the_text_of_another, before_its_place],
)
def test_a_fault_in_shared_forwards_is_found_at_load(
    models: Callable[[str], Any], fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one answer is captured all the same."""
    backend = models("llama-gqa")
    with_fault(
        monkeypatch,
        lambda forward, first, last: fault(forward.given, first, last) if first else None,
    )
    assert captured.tried(backend, None, answers=2).startswith("its logits are off by")
    assert backend.captured is None
    assert captured.capture(backend, answers=2) == "" and not backend.at_once


@pytest.mark.parametrize("method", ["plain", "hd", "head"])
def test_answers_at_once_say_what_they_say_alone(own: Any, method: str) -> None:
    texts = ("Once upon a time", "Tell me a story about a dog. " * 9, "What is a cat?")
    requests = [
        Request(
            (Message("user", text),),
            method=METHODS[method],
            generation=Generation(sampling, max_tokens=30),
            owner=str(number),
        )
        for number, (text, sampling) in enumerate(zip((*texts, *texts), SAMPLERS, strict=False))
    ]
    said: list[list[list[int]]] = []
    for parallel in (1, 4):
        with closing(Local(backend=own)) as engine:
            engine.queue.parallel = parallel
            streams = [engine.generate(request) for request in requests]
            steps = [[e for e in stream if isinstance(e, Step)] for stream in streams]
            said.append([ids(each) for each in steps])
        beside = {step.beside for each in steps for step in each}
        assert max(beside) == parallel - 1
    assert said[0] == said[1] and all(said[0])
