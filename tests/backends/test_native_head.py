"""EAGLE-3 heads in the compiled core: they guess what torch does, up to rounding, and a head that
the core does not know, or computes wrongly, is left to torch."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.quantised import PackedLinear
from engine.heads import eagle3_head
from engine.heads.eagle3_head import Eagle3Head
from engine.heads.native_head import FEW_ROWS, NativeHead
from engine.models.loaders import load
from engine.settings import Runtime
from tests.backends.test_eagle3 import FORMS, HIDDEN, TEXT, guessed, loaded, numbers, read, written
from tests.conftest import EMBEDDED

pytestmark = pytest.mark.model


def made(form: str, folder: Path, eight_bits: bool = True) -> Any:
    """The embedded model with a head of random weights."""
    config, names, more = FORMS[form]
    tensors = numbers(1, **more)
    if form == "flags":
        tensors["input_norm.weight"] = torch.full((3 * HIDDEN,), 0.7)
    return loaded(written(folder, config(), names(tensors)), eight_bits)


@pytest.mark.parametrize("form", FORMS)
def test_the_core_guesses_what_torch_guesses_along_a_tree(form: str, tmp_path: Path) -> None:
    backend = made(form, tmp_path / "a")
    exact = made(form, tmp_path / "a", eight_bits=False)
    assert type(backend.head) is NativeHead and type(exact.head) is Eagle3Head
    wanted = guessed(exact)
    for path, logits in guessed(backend).items():
        assert logits.shape == wanted[path].shape
        one, two = torch.tensor(logits), torch.tensor(wanted[path])
        assert torch.cosine_similarity(one, two, dim=0) > 0.99, path


def test_logits_are_computed_in_the_core_for_few_rows_only(tmp_path: Path) -> None:
    """Of many rows, only the last is asked for. Either way the guess is the same."""
    backend = made("speculators", tmp_path / "a")
    assert isinstance(backend.head.weights.output, PackedLinear)
    longer = [*TEXT, *range(40, 40 + 2 * FEW_ROWS)]
    for text in (TEXT[: FEW_ROWS - 1], longer):
        head, guess = read(backend.open(), text)
        one, two = torch.tensor(guess.logits), torch.tensor(head.guesses(head.root)[0].logits)
        assert torch.cosine_similarity(one, two, dim=0) > 0.999
        assert head.bytes > 0 and len(head.parts) == 1


def test_texts_cross_the_parts_of_the_cache(tmp_path: Path) -> None:
    backend, exact = (made("speculators", tmp_path / "a", bits) for bits in (True, False))
    text = [3 + at * 37 % 6000 for at in range(320)]
    for each in (backend, exact):
        each.head.latest = len(text)
    (head, guess), (_, wanted) = read(backend, text), read(exact, text)
    assert len(head.parts) == 2
    one, two = torch.tensor(guess.logits), torch.tensor(wanted.logits)
    assert torch.cosine_similarity(one, two, dim=0) > 0.99


def test_what_the_core_points_to_stays_in_memory(tmp_path: Path) -> None:
    """In bfloat16 the norms are copies, to which nothing else refers."""
    config, names, _ = FORMS["speculators"]
    folder = written(tmp_path / "a", config(), names(numbers(1)))
    with pytest.MonkeyPatch.context() as here:
        here.setattr(eagle3_head, "verifies_cheaply", lambda: True)
        backend: Any = load(str(EMBEDDED), Runtime(dtype="bfloat16", threads=1, head=str(folder)))
    assert type(backend.head) is NativeHead
    wanted = read(backend, TEXT)[1].logits.copy()
    network = backend.head.weights.head
    network.norms, network.packed = [], []
    gc.collect()
    others = [torch.full((HIDDEN,), 1e9) for _ in range(1000)]
    assert len(others) == 1000 and (read(backend.open(), TEXT)[1].logits == wanted).all()


def test_a_head_that_the_core_does_not_know_is_computed_by_torch(tmp_path: Path) -> None:
    config, names, _ = FORMS["LlamaForCausalLMEagle3"]
    for number, changes in enumerate(
        ({"hidden_act": "gelu"}, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    ):
        folder = written(tmp_path / str(number), config() | changes, names(numbers(1)))
        assert type(loaded(folder, eight_bits=True).head) is Eagle3Head


def test_a_wrong_result_of_the_core_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = NativeHead.step
    monkeypatch.setattr(NativeHead, "step", lambda self, *of: step(self, *of).flip(-1))
    assert type(made("speculators", tmp_path / "a").head) is Eagle3Head


def test_the_head_that_comes_along_is_computed_by_the_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for fast, kind in ((True, NativeHead), (False, Eagle3Head)):
        monkeypatch.setattr(eagle3_head, "verifies_cheaply", lambda fast=fast: fast)
        assert type(load(str(EMBEDDED), Runtime(dtype="float32")).head) is kind
