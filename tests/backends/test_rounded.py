"""Weights of few bits on a GPU, here computed without one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends import captured, quantised
from engine.backends.rounded import GROUP, RoundedLinear
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
    linear = RoundedLinear(weight, None, bits, "cpu")
    missing = -inputs % GROUP
    gaps, sizes = (
        torch.nn.functional.pad(each, (0, missing)).view(6, -1, GROUP).abs()
        for each in (weight - linear.weight, weight)
    )
    allowed = 1.002 * STEPS[bits] * sizes.amax(2, keepdim=True)
    # Half a step, but for the few beyond the highest number: a whole one.
    assert (gaps <= allowed).all() and ((gaps <= allowed / 2).float().mean() > 0.95)
    assert not linear.weight[2].any()
    states = torch.randn(3, inputs)
    assert torch.allclose(linear(states), states @ linear.weight.T, atol=1e-5)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models get the weights of a GPU, but on the processor."""
    packer = quantised.Packer.__init__

    def prepare(self: Any, *of: Any, **others: Any) -> None:
        packer(self, *of, **others)
        self.on_cpu = False

    monkeypatch.setattr(quantised.Packer, "__init__", prepare)
    monkeypatch.setattr("engine.models.load_transformers.with_native", lambda backend: None)


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
