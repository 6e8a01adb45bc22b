"""Models whose layers keep a state, verified as chains: the same words as without drafts.

A reference of its own for every claim: the library's forward without a cache, and plain decoding.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from engine.backends.base import Filled
from engine.decode import never
from engine.drafting.costs import measure_costs
from engine.drafting.databases import Databases
from engine.methods import METHODS
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree, graft
from tests.backends.test_interrupted import Broken, breaking
from tests.backends.test_transformers import GREEDY, Counting, alone, fresh, gap, prompt_of
from tests.support.lossless import Adversary, assert_lossless, events_of, tokens_of
from tests.support.tiny_hybrids import FAMILIES, MORE, UNDRAFTED, save_hybrid

if TYPE_CHECKING:
    from engine.backends.transformers import TransformersBackend

pytestmark = pytest.mark.model
Load = Callable[[str], "TransformersBackend"]
CLOSE = 1e-3
FIXED = Drafting(budget="fixed", nodes=32)
LONG = 20
"""Tokens of a draft: more than a chain may have."""


@pytest.fixture(scope="session")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A tiny model of a family, with an empty cache: each is made and loaded once. No token ends
    its answers, as random ones would end at once."""
    from engine.models.load_transformers import load_transformers

    loaded: dict[str, TransformersBackend] = {}

    def load(family: str) -> "TransformersBackend":
        if family not in loaded:
            folder = save_hybrid(family, tmp_path_factory.mktemp(family))
            backend = loaded[family] = load_transformers(str(folder), device="cpu")
            backend.info = replace(backend.info, eos_ids=frozenset())
        return loaded[family].open()

    return load


def wrong_at(truth: Sequence[int], seed: int, share: float = 0.3) -> Adversary:
    """Drafts the truth, where each token is wrong with some probability: short and long ones."""
    draw = random.Random(seed)

    def say(tokens: Sequence[int]) -> list[tuple[int, ...]]:
        rest = truth[len(tokens) : len(tokens) + draw.choice((1, 3, 8, LONG))]
        return [tuple(t if draw.random() > share else (t + 1) % 6144 for t in rest)]

    return Adversary(say, obedient=False)


def after(backend: "TransformersBackend", text: Sequence[int]) -> Any:
    """The logits after a text, which is read first."""
    backend.prefill(text, never)
    row = backend.score(Tree(text[-1]), GREEDY).row(0).copy()
    backend.accept([])
    return row


def chain_of(root: int, tokens: Sequence[int]) -> Tree:
    tree = Tree(root)
    graft(tree, tokens, "context", 1, len(tokens))
    return tree


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_a_family_verifies_chains_and_says_so(hybrids: Load, family: str) -> None:
    info = hybrids(family).info
    assert info.can_tree and info.leaves == 1
    assert info.note.endswith("models keep a state, so chains are verified, not trees.")


@pytest.mark.parametrize("family", UNDRAFTED)
def test_a_family_whose_states_cannot_be_followed_says_that_it_decodes_plainly(
    hybrids: Load, family: str
) -> None:
    backend = hybrids(family)
    assert not backend.info.can_tree
    assert "decodes plainly: its chain forward fails" in backend.info.note
    text = prompt_of(40)
    assert gap(after(backend, text), alone(backend, text)) < CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_with_wrong_drafts(hybrids: Load, family: str) -> None:
    """In a conversation of two turns, at three temperatures."""
    prompt = prompt_of(70)
    for number, temperature in enumerate((0.0, 0.7, 1.0)):
        wanted = Generation(Sampling(temperature, seed=number), max_tokens=48)
        slow, fast = hybrids(family), hybrids(family)
        text = prompt
        for turn in range(2):
            plain = events_of(slow, text, wanted)
            said = [token.id for token in tokens_of(plain)]
            drafter = wrong_at([*text, *said], turn)
            steps = events_of(fast, text, wanted, [drafter], FIXED)
            assert_lossless(plain, steps)
            lengths = [len(step.tokens) for step in steps]
            assert min(lengths[:-1]) == 1 and max(lengths) > 4, "some rejected, some accepted"
            drafted = [sum(step.proposed.values()) for step in steps]
            assert max(drafted) == fast.depth_limit(1), "as long as a chain may be"
            text = [*text, *said, *prompt_of(40 + turn)[20:]]


@pytest.mark.parametrize("kept", [0, 1, 7, 15, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_may_be_accepted_up_to_any_row(hybrids: Load, family: str, kept: int) -> None:
    backend, text, chain = hybrids(family), prompt_of(9), prompt_of(25)[9:]
    backend.prefill(text, never)
    scores = backend.score(chain_of(text[-1], chain), GREEDY)
    for row in (0, 1, 9, 16):
        assert gap(scores.row(row), alone(backend, [*text, *chain[:row]])) < CLOSE
    backend.accept(range(1, kept + 1))
    assert backend.cached == [*text, *chain[:kept]]
    text = [*text, *chain[:kept], 77]
    scores = backend.score(chain_of(77, [5, 6]), GREEDY)
    assert gap(scores.row(0), alone(backend, text)) < CLOSE
    assert gap(scores.row(2), alone(backend, [*text, 5, 6])) < CLOSE


def test_the_test_above_can_fail(hybrids: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of one token too many shows, in a recurrence as in a convolution."""
    from engine.backends.caches import StateLayer

    settle = StateLayer.settle

    def late(layer: StateLayer, kept: int, rows: int) -> None:
        settle(layer, min(kept + 1, rows), rows)

    for family in ("qwen3.5", "lfm2", "mamba", "nemotron-h"):
        backend, text = hybrids(family), prompt_of(9)
        backend.prefill(text, never)
        backend.score(chain_of(text[-1], [5, 6, 7]), GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(StateLayer, "settle", late)
            backend.accept([1])
        row = backend.score(Tree(77), GREEDY).row(0)
        assert gap(row, alone(backend, [*text, 5, 77])) > 10 * CLOSE, family


def test_a_prompt_of_one_token_begins_with_a_chain(hybrids: Load) -> None:
    for family in FAMILIES:
        backend = hybrids(family)
        assert backend.prefill([9], never) == Filled(0, True)
        scores = backend.score(chain_of(9, [5, 6, 7]), GREEDY)
        assert gap(scores.row(3), alone(backend, [9, 5, 6, 7])) < CLOSE
        backend.accept([1])
        assert gap(backend.score(Tree(8), GREEDY).row(0), alone(backend, [9, 5, 8])) < CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_takes_few_forwards(
    hybrids: Load, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Its 500 new tokens are read in two; what begins otherwise, from the best mark."""
    backend, text = hybrids(family), prompt_of(700)
    backend.prefill(text[:200], never)
    count = Counting(backend, monkeypatch)
    assert backend.prefill(text, never) == Filled(199, True) and count.rows == [484, 16]
    assert gap(after(backend, text), alone(backend, text)) < CLOSE
    for length, reused in ((700, 700), (690, 683), (650, 199)):
        backend.reset()
        backend.prefill(text[:200], never)
        after(backend, text)
        other = [*text[:length], 9, 8, 7]
        count.rows.clear()
        assert backend.prefill(other, never) == Filled(reused, True)
        assert len(count.rows) <= 2 and sum(count.rows) == length + 2 - reused
        assert gap(after(backend, other), alone(backend, other)) < CLOSE


def test_an_answer_again_reads_nothing(hybrids: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, text = hybrids("qwen3.5"), prompt_of(300)
    wanted = Generation(Sampling(0.7, seed=3), max_tokens=20)
    first = events_of(backend, text, wanted)
    count = Counting(backend, monkeypatch)
    assert backend.prefill(text, never) == Filled(299, True) and count.rows == []
    assert_lossless(first, events_of(backend, text, wanted))


@pytest.mark.parametrize("family", ["qwen3.5", "nemotron-h", "lfm2", "falcon-h1", "mamba"])
@pytest.mark.parametrize("layer", [0, 1])
def test_after_a_failure_the_next_answer_is_right(
    hybrids: Load, monkeypatch: pytest.MonkeyPatch, family: str, layer: int
) -> None:
    """In a forward, half way; and behind one, before it was accepted."""
    backend, text = hybrids(family), prompt_of(60)
    wanted = Generation(Sampling(0.7, seed=1), max_tokens=12)
    plain = events_of(hybrids(family), text, wanted)
    drafter = wrong_at([*text, *(token.id for token in tokens_of(plain))], 1)
    with monkeypatch.context() as patch:
        breaking(backend, patch, layer, 3)
        with pytest.raises(Broken):
            events_of(backend, text, wanted, [drafter], FIXED)
    assert backend.cached == [] and backend.bytes == 0
    assert_lossless(plain, events_of(backend, text, wanted, [drafter], FIXED))
    backend.prefill(text, never)
    backend.score(chain_of(text[-1], [5, 6]), GREEDY)  # not accepted
    assert_lossless(plain, events_of(backend, text, wanted, [drafter], FIXED))


@pytest.mark.parametrize("family", ["qwen3.5", "mamba2", "lfm2", "falcon-h1", "jamba"])
def test_stop_anywhere_in_a_prompt(
    hybrids: Load, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The next prompt goes on from the last mark that it shares."""
    monkeypatch.setattr("engine.backends.transformers.PREFILL_CHUNK", 64)
    backend, text = hybrids(family), prompt_of(300)
    wanted = alone(backend, text)
    for at in (1, 3, 7, 9):
        backend.reset()
        backend.prefill(text[:100], never)
        asked = iter(range(at))
        assert not backend.prefill(text, lambda: next(asked, None) is None).complete  # noqa: B023
        filled = backend.prefill(text, never)
        assert filled.complete and filled.reused >= 99
        assert gap(after(backend, text), wanted) < CLOSE


def test_stop_in_an_answer(hybrids: Load) -> None:
    backend, text = hybrids("qwen3.5"), prompt_of(50)
    wanted = Generation(Sampling(0.7, seed=5), max_tokens=40)
    plain = tokens_of(events_of(hybrids("qwen3.5"), text, wanted))
    drafter = wrong_at([*text, *(token.id for token in plain)], 4)
    steps = events_of(
        backend,
        text,
        wanted,
        [drafter],
        FIXED,
        cancelled=lambda: len(backend.cached) > len(text) + 8,
    )
    said = [token.id for token in tokens_of(steps)]
    assert steps[-1].finish == "cancelled" and said == [token.id for token in plain][: len(said)]
    other = [*text, *said, 9, 8]
    assert gap(after(backend, other), alone(backend, other)) < CLOSE


def test_sequences_of_one_model_know_nothing_of_each_other(hybrids: Load) -> None:
    """Three in turn, step by step, each with chains that are rejected."""
    for family in ("qwen3.5", "lfm2", "mamba", "falcon-h1"):
        texts = [prompt_of(30 + at)[at:] for at in range(3)]
        backends = [hybrids(family) for _ in texts]
        for backend, text in zip(backends, texts, strict=True):
            backend.prefill(text, never)
        for round_ in range(3):
            for backend, text in zip(backends, texts, strict=True):
                scores = backend.score(chain_of(text[-1], [5, 6, 7]), GREEDY)
                assert gap(scores.row(0), alone(backend, text)) < CLOSE
                backend.accept([1, 2][:round_])
                text += [5, 6][:round_] + [90 + round_]


def test_databases_draft_for_such_a_model(hybrids: Load) -> None:
    """On a text that says the same again and again, with a curve that is measured."""
    backend = hybrids("qwen3.5")
    curve = measure_costs(backend, seconds=0.05)
    assert max(curve.points) <= backend.depth_limit(1), "no longer chain is ever verified"
    assert backend.bytes < 64 << 20
    prompt = [*prompt_of(40), *prompt_of(40), *prompt_of(40)]
    wanted = Generation(GREEDY, max_tokens=60)
    plain = events_of(fresh(backend), prompt, wanted)
    fast = events_of(backend, prompt, wanted, METHODS["hd"].drafters(Databases()))
    assert_lossless(plain, fast)


def test_a_model_whose_chains_cannot_be_undone_decodes_plainly_and_says_so(
    hybrids: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from engine.backends.caches import StateLayer
    from engine.models.load_transformers import load_transformers

    with monkeypatch.context() as patch:
        patch.setattr(StateLayer, "settle", lambda *_: None)
        backend = load_transformers(str(save_hybrid("qwen3.5", tmp_path)), device="cpu")
    assert not backend.info.can_tree
    assert "decodes plainly: its chain forward is off by" in backend.info.note
    wanted = Generation(Sampling(0.7, seed=2), max_tokens=12)
    plain = events_of(hybrids("qwen3.5"), prompt_of(20), wanted)
    assert_lossless(plain, events_of(backend, prompt_of(20), wanted))


def test_the_librarys_own_recurrences_are_untouched(hybrids: Load) -> None:
    """Its generate() says what plain decoding says, before and behind forwards of ours."""
    import torch

    for family in FAMILIES:
        backend, prompt = hybrids(family), prompt_of(20)
        plain = events_of(backend, prompt, Generation(GREEDY, max_tokens=10))
        said = backend.model.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None
        )
        assert said[0, len(prompt) :].tolist() == [token.id for token in tokens_of(plain)], family


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_takes_is_told_before_it_is_loaded(
    hybrids: Load, family: str, tmp_path: Any
) -> None:
    """All states that are kept: the current ones, three marks, those of the longest chain."""
    from engine.backends.caches import bytes_of, tensors_in
    from engine.models.memory import memory_need

    backend, text = hybrids(family), prompt_of(400)
    backend.prefill(text[:100], never)
    backend.prefill(text, never)
    assert len(backend.cache.marks) == (3 if backend.cache.state_layers else 0)
    backend.score(chain_of(text[-1], prompt_of(16)), GREEDY)
    kept = [
        (layer.conv_states, layer.recurrent_states, layer.inputs, layer.chain, layer.marks)
        for layer in backend.cache.state_layers
    ]
    states = sum(each.nbytes for each in tensors_in(kept))
    for layer in backend.cache.tree_layers:
        layer.grow(2048 + 129 - 64)
    told = memory_need(str(save_hybrid(family, tmp_path)), "cpu", "auto", 2048).cache
    taken = bytes_of(backend.cache)
    assert states > 0 and 0.7 * told < taken < 1.05 * told, (told, taken, states)


def test_a_model_that_remembers_beside_its_cache_is_refused(tmp_path: Any) -> None:
    """Two conversations with it would mix."""
    from engine.errors import ModelError
    from engine.models.load_transformers import load_transformers

    folder = save_hybrid("recurrent-gemma", tmp_path)
    with pytest.raises(ModelError, match="with a second conversation open, the first one is off"):
        load_transformers(str(folder), device="cpu")


SWITCH = 64
FACTORS = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 5.0, 9.0], "original_max_position_embeddings": SWITCH, "factor": 4.0,
}  # fmt: skip


def test_a_hybrid_whose_rotary_factors_depend_on_the_length(tmp_path: Any) -> None:
    """Chains end at the switch, and behind it the same tokens follow."""
    from engine.models.load_transformers import load_transformers

    folder = save_hybrid("lfm2", tmp_path, rope_parameters=FACTORS, eos_token_id=None)
    backend = load_transformers(str(folder), device="cpu")
    backend.info = replace(backend.info, eos_ids=frozenset())
    assert backend.info.leaves == 1 and backend.rotary.switches == [SWITCH]
    assert [backend.depth_limit(length) for length in (40, 50, 60, 64, 65)] == [16, 14, 4, 0, 16]
    for size in (50, 60, 63, 64, 65, 80):
        text, wanted = prompt_of(size), Generation(Sampling(0.7, seed=size), max_tokens=30)
        plain = events_of(fresh(backend), text, wanted)
        truth = [*text, *(token.id for token in tokens_of(plain))]
        steps = events_of(backend, text, wanted, [wrong_at(truth, size, 0.1)], FIXED)
        assert_lossless(plain, steps)
        assert len(steps) < 20 < len(plain)
        assert gap(after(fresh(backend), truth), alone(backend, truth)) < CLOSE


@pytest.mark.parametrize("family", ["qwen3.5", "granite-hybrid", "jamba"])
def test_chains_are_verified_in_bfloat16(tmp_path: Any, family: str) -> None:
    """Near-ties are common there, so texts may part: what is drafted is accepted all the same."""
    from engine.models.load_transformers import load_transformers

    backend = load_transformers(str(save_hybrid(family, tmp_path)), device="cpu", dtype="bfloat16")
    backend.info = replace(backend.info, eos_ids=frozenset())
    assert backend.info.can_tree and backend.info.leaves == 1
    text, wanted = prompt_of(70), Generation(Sampling(0.7, seed=1), max_tokens=40)
    plain = tokens_of(events_of(fresh(backend), text, wanted))
    truth = [*text, *(token.id for token in plain)]
    steps = events_of(backend, text, wanted, [wrong_at(truth, 1, 0.1)], FIXED)
    assert len(tokens_of(steps)) == 40 and len(steps) < 30
