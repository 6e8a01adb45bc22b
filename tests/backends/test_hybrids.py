"""Models of transformers whose layers keep a state, beside the contract: what they say of
themselves, marks, memory, and the library's own recurrences."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.backends.base import Filled
from engine.backends.caches import StateLayer, bytes_of, tensors_in
from engine.decode import never
from engine.drafting.costs import measure_costs
from engine.errors import ModelError
from engine.models.memory import CHAIN, memory_need
from engine.settings import Drafting, Generation, Sampling
from tests.backends.test_lengths import FACTORS, SWITCH
from tests.support.backends import (
    GREEDY,
    after,
    chain_of,
    counted,
    gap,
    load,
    prompt_of,
    wrong_at,
)
from tests.support.lossless import assert_lossless, events_of, tokens_of
from tests.support.tiny_hybrids import FAMILIES, MORE, UNDRAFTED, save_hybrid

pytestmark = pytest.mark.model
CLOSE = 1e-3
FIXED = Drafting(budget="fixed", nodes=32)
NOTE = "models keep a state, so one guess per token is checked, not several."


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_verifies_chains_and_says_so(subjects: Any, family: str) -> None:
    info = subjects(family).model.info
    assert (info.can_tree, info.leaves, info.depth) == (True, 1, CHAIN)
    assert info.note.endswith(NOTE)


@pytest.mark.parametrize("family", MORE)
def test_families_of_the_same_layers_do_so_too(family: str, tmp_path: Any) -> None:
    info = load(save_hybrid(family, tmp_path)).info
    assert info.can_tree and info.leaves == 1 and info.note.endswith(NOTE)


@pytest.mark.parametrize("family", UNDRAFTED)
def test_a_family_whose_states_cannot_be_followed_says_that_it_decodes_plainly(
    tmp_path: Any, family: str
) -> None:
    backend = load(save_hybrid(family, tmp_path))
    assert not backend.info.can_tree
    assert "decodes plainly: its chain forward fails" in backend.info.note
    text = prompt_of(40)
    assert gap(after(backend, text), backend.alone(text)) < CLOSE


@pytest.mark.parametrize("family", ["qwen3.5", "nemotron-h", "lfm2", "falcon-h1", "mamba"])
def test_a_text_that_begins_otherwise_is_read_from_the_best_mark(
    subjects: Any, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    backend, text = subjects(family).model.open(), prompt_of(700)
    rows = counted(backend, monkeypatch)
    for length, reused in ((700, 700), (690, 683), (650, 199)):
        backend.close()
        backend.prefill(text[:200], never)
        rows.clear()
        assert backend.prefill(text, never) == Filled(199, True) and rows == [484, 16]
        after(backend, text)
        other = [*text[:length], 9, 8, 7]
        rows.clear()
        assert backend.prefill(other, never) == Filled(reused, True)
        assert len(rows) <= 2 and sum(rows) == length + 2 - reused
        assert gap(after(backend, other), backend.alone(other)) < CLOSE


def test_databases_draft_by_a_measured_curve(subjects: Any) -> None:
    backend = subjects("qwen3.5").model.open()
    curve = measure_costs(backend, seconds=0.05)
    assert max(curve.points) <= backend.depth_limit(1), "no longer chain is ever verified"
    assert backend.bytes < 64 << 20


def test_a_model_whose_chains_cannot_be_undone_decodes_plainly_and_says_so(
    subjects: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(StateLayer, "settle", lambda *_: None)
        backend = load(save_hybrid("qwen3.5", tmp_path))
    assert not backend.info.can_tree
    assert "decodes plainly: its chain forward is off by" in backend.info.note
    wanted = Generation(Sampling(0.7, seed=2), max_tokens=12)
    plain = events_of(subjects("qwen3.5").model.open(), prompt_of(20), wanted)
    assert_lossless(plain, events_of(backend, prompt_of(20), wanted))


def test_the_librarys_own_recurrences_are_untouched(subjects: Any) -> None:
    """Its generate() says what plain decoding says, before and behind forwards of ours."""
    for family in FAMILIES:
        backend, prompt = subjects(family).model.open(), prompt_of(20)
        plain = events_of(backend, prompt, Generation(GREEDY, max_tokens=10))
        said = backend.model.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None
        )
        assert said[0, len(prompt) :].tolist() == [token.id for token in tokens_of(plain)], family


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_takes_is_told_before_it_is_loaded(
    subjects: Any, family: str, tmp_path: Any
) -> None:
    """All states that are kept: the current ones, three marks, those of the longest chain."""
    backend, text = subjects(family).model.open(), prompt_of(400)
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
    folder = save_hybrid("recurrent-gemma", tmp_path)
    with pytest.raises(ModelError, match="with a second conversation open, the first one is off"):
        load(folder)


def test_a_hybrid_whose_rotary_factors_depend_on_the_length(tmp_path: Any) -> None:
    """Chains end at the switch, and behind it the same tokens follow."""
    folder = save_hybrid("lfm2", tmp_path, rope_parameters=FACTORS, eos_token_id=None)
    backend = load(folder)
    backend.info = replace(backend.info, eos_ids=frozenset())
    assert backend.info.leaves == 1 and backend.rotary.switches == [SWITCH]
    assert [backend.depth_limit(length) for length in (40, 50, 60, 64, 65)] == [16, 14, 4, 0, 16]
    for size in (50, 60, 63, 64, 65, 80):
        text, wanted = prompt_of(size), Generation(Sampling(0.7, seed=size), max_tokens=30)
        plain = events_of(backend.open(), text, wanted)
        truth = [*text, *(token.id for token in tokens_of(plain))]
        steps = events_of(backend, text, wanted, [wrong_at(truth, 6144, size, 0.1)], FIXED)
        assert_lossless(plain, steps)
        assert len(steps) < 20 < len(plain)
        assert gap(after(backend.open(), truth), backend.alone(truth)) < CLOSE


@pytest.mark.parametrize("family", ["qwen3.5", "granite-hybrid", "jamba"])
def test_chains_are_verified_in_bfloat16(tmp_path: Any, family: str) -> None:
    """Near-ties are common there, so texts may part: what is drafted is accepted all the same."""
    backend = load(save_hybrid(family, tmp_path), dtype="bfloat16")
    backend.info = replace(backend.info, eos_ids=frozenset())
    assert backend.info.can_tree and backend.info.leaves == 1
    text, wanted = prompt_of(70), Generation(Sampling(0.7, seed=1), max_tokens=40)
    plain = tokens_of(events_of(backend.open(), text, wanted))
    truth = [*text, *(token.id for token in plain)]
    steps = events_of(backend, text, wanted, [wrong_at(truth, 6144, 1, 0.1)], FIXED)
    assert len(tokens_of(steps)) == 40 and len(steps) < 30
