"""Weights of few bits on a GPU, here computed without one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends import captured
from engine.backends.fused import Joined, Products, join
from engine.backends.rounded import GROUP, RoundedLinear, few_bits, rounded
from engine.drafting.databases import Databases
from engine.methods import METHODS
from engine.models.memory import memory_need
from engine.settings import Generation, Sampling
from tests.conftest import EMBEDDED
from tests.support.backends import load, save_model
from tests.support.lossless import assert_lossless, events_of

pytestmark = pytest.mark.model
STEPS = {4: 1 / 8, 8: 1 / 128}
"""By bits, the distance of two numbers, as a share of the largest weight in their group."""


@pytest.mark.parametrize("bits", STEPS)
@pytest.mark.parametrize("inputs", [64, 200])
def test_a_weight_is_rounded_to_the_nearest_number(bits: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, inputs)
    weight[2] = 0.0
    matrix = rounded(weight, bits, "cpu")
    missing = -inputs % GROUP
    gaps, sizes = (
        torch.nn.functional.pad(each, (0, missing)).view(6, -1, GROUP).abs()
        for each in (weight - matrix.weight, weight)
    )
    allowed = 1.002 * STEPS[bits] * sizes.amax(2, keepdim=True)
    # Half a step, but for the few beyond the highest number: a whole one.
    assert (gaps <= allowed).all() and ((gaps <= allowed / 2).float().mean() > 0.95)
    assert not matrix.weight[2].any()
    states, linear = torch.randn(3, inputs), RoundedLinear(matrix, None)
    assert torch.allclose(linear(states), states @ matrix.weight.T, atol=1e-5)


@pytest.mark.parametrize("bits", STEPS)
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("inputs", [192, 256])
def test_a_matrix_stands_for_its_numbers(bits: int, group: int, inputs: int) -> None:
    """It lies as the kernel reads it, also if columns of the files lie together, as in GPTQ."""
    torch.manual_seed(0)
    groups = inputs // group
    numbers = torch.randint(1 << bits, (inputs, 6), dtype=torch.uint8).T
    zeros = torch.randint(1 << bits, (groups, 6), dtype=torch.int16).T
    scales, places = torch.rand(groups, 6).half().T, torch.randperm(inputs)
    matrix = few_bits(numbers, scales, bits, group, zeros, places)
    assert all(each.is_contiguous() for each in (matrix.numbers, matrix.scales, matrix.zeros))
    steps = -(-inputs // (2 * group))
    assert matrix.nbytes == 6 * steps * (2 * group * bits // 8 + 2 * (2 + 2))
    weights, lows = (each.float().repeat_interleave(group, 1) for each in (scales, zeros))
    assert torch.equal(matrix.weight[:, places], (numbers.float() - lows) * weights)
    states, linear = torch.randn(3, inputs), RoundedLinear(matrix, None)
    assert torch.allclose(linear(states), states @ linear.weight.T, atol=1e-3)
    with pytest.raises(ValueError, match="too large for float16"):
        few_bits(numbers, scales.float() * 1e9, bits, group)


def projection(
    bits: int = 4, group: int = 64, zeroed: bool = True, mixed: bool = False, biased: bool = False
) -> RoundedLinear:
    zeros = torch.randint(1 << bits, (8, 256 // group), dtype=torch.int16) if zeroed else None
    numbers = torch.randint(1 << bits, (8, 256), dtype=torch.uint8)
    places = torch.randperm(256) if mixed else None
    matrix = few_bits(numbers, torch.rand(8, 256 // group), bits, group, zeros, places)
    return RoundedLinear(matrix, torch.nn.Parameter(torch.randn(8)) if biased else None)


def together(*parts: torch.nn.Module) -> list[Joined]:
    module = torch.nn.Module()
    module.gate_proj, module.up_proj = parts
    return join(module, torch.device("cpu"))


@pytest.mark.parametrize("zeroed", [False, True])
def test_projections_of_one_input_are_one_matrix(zeroed: bool) -> None:
    torch.manual_seed(0)
    parts = [projection(zeroed=zeroed), projection(zeroed=zeroed)]
    weights = [part.matrix.weight for part in parts]
    (joined,) = together(*parts)
    assert torch.equal(joined.matrix.weight, torch.cat(weights))
    states = torch.randn(3, 256)
    forwards = [forward for _, forward in joined.forwards(Products(None, torch.float16))]
    for part, forward, weight in zip(parts, forwards, weights, strict=True):
        assert torch.equal(part.matrix.weight, weight)
        assert torch.allclose(forward(states), states @ weight.T, atol=1e-4)
    for name in ("numbers", "scales", *["zeros"] * zeroed):
        own, whole = getattr(parts[0].matrix, name), getattr(joined.matrix, name)
        assert own.data_ptr() == whole.data_ptr(), "held once"


@pytest.mark.parametrize(
    "other", [{"bits": 8}, {"group": 32}, {"zeroed": False}, {"mixed": True}, {"biased": True}]
)
def test_unlike_projections_stay_apart(other: dict[str, Any]) -> None:
    assert not together(projection(), projection(**other))
    assert not together(projection(**other), torch.nn.Linear(256, 8, bias="biased" in other))
    assert len(together(projection(**other), projection(**other))) == ("mixed" not in other)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("bits", ["8", "4"])
def test_its_memory_is_told_to_the_byte(bits: str) -> None:
    backend = load(EMBEDDED, bits=bits, head="off")
    need = memory_need(str(EMBEDDED), "cuda", "auto", 1024, bits=bits)
    assert backend.info.memory_bytes == need.weights
    assert backend.info.parameters == need.parameters
    assert backend.info.dtype == f"{bits} bits"


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("kind", ["llama-gqa", "qwen2", "gemma2-mixed"])
def test_captured_forwards_compute_with_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joined ones, with biases, and an output matrix that is the embedding."""
    monkeypatch.setattr(captured, "TREES", (1, 4, 16))
    monkeypatch.setattr(captured, "PROMPTS", (32,))
    backend = load(save_model(kind, tmp_path), bits="8", context_length=80)
    assert isinstance(backend.model.get_output_embeddings(), RoundedLinear)
    prompt, wanted = [*range(3, 30)], Generation(Sampling(0.8, seed=2), max_tokens=20)
    plain = events_of(backend, prompt, wanted)
    assert captured.capture(backend) == ""
    assert any(
        isinstance(each, RoundedLinear) for group in backend.captured.joined for each in group.parts
    )
    drafters = METHODS["hd"].drafters(Databases(), target=backend)
    assert_lossless(plain, events_of(backend, prompt, wanted, drafters))
