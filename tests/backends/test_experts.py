"""Mixtures of experts in 4 and 8 bits: what the core computes for the chosen experts, which models
are converted, and that a row depends on nothing but its own choices."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.backends import native_forward
from engine.backends.native_forward import NativeForwards
from engine.backends.quantised import SORTED, PackedExperts, PackedLinear, Room
from engine.native import core
from tests.support.backends import (
    BROAD,
    MIXTURES,
    after,
    assert_counted,
    load,
    numbers,
    prompt_of,
    save_model,
)

pytestmark = pytest.mark.model
COUNT, CHOSEN, WIDTH, INNER = 8, 3, 160, 96
BITS = (8, 4)


class Stacks:
    """The library's experts as far as their shape matters."""

    down_proj = torch.empty(COUNT, WIDTH, INNER)


def experts_of(bits: int) -> PackedExperts:
    experts, room = PackedExperts(Stacks), Room(0)
    experts.take("gate_up_proj", numbers(COUNT, 2 * INNER, WIDTH, seed=1), bits, room)
    experts.take("down_proj", numbers(COUNT, WIDTH, INNER, seed=2), bits, room)
    return experts


def routed(rows: int) -> tuple[Any, Any, Any]:
    """States, and the indices and weights of the chosen experts of each row. Some experts are
    chosen by no row, if there are few."""
    shares, choices = numbers(rows, COUNT, seed=3).softmax(1).topk(CHOSEN)
    return numbers(rows, WIDTH, seed=4), choices, shares


def stacked(experts: PackedExperts) -> tuple[Any, Any]:
    """The parameters of the library's experts that the numbers stand for."""
    both = [experts.gate_proj.weight, experts.up_proj.weight]
    gate_up = torch.cat([each.view(COUNT, -1, each.shape[1]) for each in both], dim=1)
    down = experts.down_proj.weight
    return gate_up, down.reshape(COUNT, -1, down.shape[1])


# what the core computes


@pytest.mark.parametrize("bits", BITS)
def test_rows_get_what_their_experts_give(bits: int) -> None:
    experts = experts_of(bits)
    states, choices, shares = routed(20)
    gate_up, down = stacked(experts)
    expected = torch.zeros(20, WIDTH)
    for row in range(20):
        for expert, share in zip(choices[row], shares[row], strict=True):
            gate, up = (gate_up[expert] @ states[row]).chunk(2)
            expected[row] += share * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    found = experts(states, choices, shares)
    assert float((found - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("bits", BITS)
def test_a_row_has_the_same_bits_whatever_the_others_chose(level: str, bits: int) -> None:
    """With every set of instructions, and where more rows are given than are sorted at once."""
    experts = experts_of(bits)
    rows = SORTED + 9
    states, choices, shares = routed(rows)
    core.use_level("plain")
    expected = experts(states[:40], choices[:40], shares[:40])
    core.use_level(level)
    whole = experts(states, choices, shares)
    assert torch.equal(whole[:40], expected)
    for first, many in ((0, 1), (7, 1), (39, 1), (3, 2), (5, 4), (SORTED - 2, 5)):
        part = slice(first, first + many)
        assert torch.equal(experts(states[part], choices[part], shares[part]), whole[part])


def test_more_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, given = experts_of(4), routed(17)
    alone = experts(*given)
    for threads in (1, 2, 3, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(experts(*given), alone)


def test_no_rows_at_all() -> None:
    assert experts_of(4)(*(each[:0] for each in routed(1))).shape == (0, WIDTH)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"count": 0}, "the experts do not fit"),
        ({"count": 7}, "the experts do not fit"),
        ({"count": 16}, "the experts do not fit"),
        ({"down": "up"}, "the experts do not fit"),
        ({"up": "down"}, "the experts do not fit"),
        ({"states": torch.ones(2, WIDTH - 32)}, "the rows do not fit"),
        ({"out": torch.ones(3, WIDTH)}, "the rows do not fit"),
        ({"choices": torch.ones(3, CHOSEN, dtype=torch.int64)}, "the rows do not fit"),
        ({"shares": torch.ones(2, CHOSEN + 1)}, "the rows do not fit"),
        ({"choices": torch.full((2, CHOSEN), COUNT)}, "there is no such expert"),
        ({"choices": torch.full((2, CHOSEN), -1)}, "there is no such expert"),
    ],
)
def test_experts_that_do_not_fit_are_refused(changes: dict[str, Any], part: str) -> None:
    experts = experts_of(8)
    states, choices, shares = routed(2)
    given = {
        "gate": "gate",
        "up": "up",
        "down": "down",
        "count": COUNT,
        "states": states,
        "choices": choices,
        "shares": shares,
        "out": torch.ones(2, WIDTH),
        "threads": 1,
        **changes,
    }
    for name in ("gate", "up", "down"):
        given[name] = getattr(experts, f"{given[name]}_proj").matrix
    with pytest.raises(ValueError, match=part):
        core.mix(**given)


# loading


def of_few_bits(folder: Path, packed: Any) -> Any:
    """The library's model with the weights that the numbers of another stand for, which are near
    its own."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for path, module in packed.named_modules():
        if isinstance(module, PackedExperts):
            own = model.get_submodule(path)
            for kept, rounded in zip(own.parameters(), stacked(module), strict=True):
                assert float((rounded - kept).norm() / kept.norm()) < 0.12
                kept.data = rounded
        elif isinstance(module, PackedLinear) and ".experts." not in path:
            model.get_submodule(path).weight.data = module.weight
    return model.eval()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", MIXTURES)
@torch.inference_mode()
def test_a_mixture_computes_with_the_weights_that_it_has(
    kind: str, bits: int, tmp_path: Path
) -> None:
    folder = save_model(kind, tmp_path)
    model = load(folder, bits=str(bits))
    assert any(isinstance(each, PackedExperts) for each in model.model.modules())
    assert not any(hasattr(each, "gate_up_proj") for each in model.model.modules())
    assert model.info.parameters == load(folder).info.parameters
    text = torch.tensor([prompt_of(24, model.info.vocabulary_size)])
    found = model.model(text).logits[0]
    expected = of_few_bits(folder, model.model)(text).logits[0]
    gaps = (found - expected).norm(dim=1) / expected.norm(dim=1)
    # Where a router hesitates, rounded inputs may have other experts.
    assert float(gaps.median()) < 0.1


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe", "qwen2-moe"])
def test_the_memory_of_experts_is_told_before(kind: str, bits: int, tmp_path: Path) -> None:
    """Also for routers, which stay in float32, and the gate of an expert that all rows have."""
    folder = save_model(kind, tmp_path)
    info = load(folder, bits=str(bits)).info
    assert_counted(folder, info, bits=str(bits))
    assert (info.used_experts, info.experts) == (3, 8)


def test_the_weights_of_the_chosen_need_not_add_up_to_one(tmp_path: Path) -> None:
    folder = save_model("qwen3-moe", tmp_path, num_experts_per_tok=1, norm_topk_prob=False)
    model, text = load(folder, bits="8"), prompt_of(40, 160)
    assert isinstance(model.captured, NativeForwards), model.info.note
    inside, outside = after(model.open(), text), model.alone(text)
    assert np.linalg.norm(inside - outside) < 0.02 * np.linalg.norm(outside)


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"moe_intermediate_size": 72}])
def test_other_experts_stay_as_they_are(changes: dict[str, Any], tmp_path: Path) -> None:
    """With other gates, or with sizes that are no whole groups."""
    folder = save_model("qwen2-moe", tmp_path, **changes)
    model = load(folder, bits="4")
    experts = model.model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.dtype == torch.float32 and model.info.can_tree
    assert_counted(folder, model.info, bits="4")


def test_experts_that_stay_leave_forwards_to_torch(tmp_path: Path) -> None:
    model = load(save_model("qwen3-moe", tmp_path, moe_intermediate_size=72), bits="4")
    assert model.captured is None and "could not be converted" in model.info.note


@pytest.mark.parametrize(
    ("kind", "other", "used"),
    [("qwen3-moe", 4, True), ("qwen3-moe", 12, False), ("qwen3", 1, False)],
)
def test_some_rows_of_a_mixture_may_have_had_other_experts(
    kind: str, other: int, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sums round differently in torch; in other models no row may be far off."""
    compute = native_forward.logits_of

    def logits_of(backend: Any, *given: Any) -> Any:
        found = compute(backend, *given)
        if backend.captured is None:
            found[:other] *= 2
        return found

    monkeypatch.setattr(native_forward, "logits_of", logits_of)
    model = load(save_model(kind, tmp_path, **BROAD), bits="8")
    assert (model.captured is not None) == used, model.info.note
