"""Heads in GGUF files beside models that the compiled core computes: they guess what they guess in
llama.cpp, and change no text."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.decode import never
from engine.drafting.databases import Databases
from engine.errors import ModelError
from engine.methods import method_named
from engine.models import load_packed
from engine.models.file_heads import UNUSED, unknown
from engine.models.gguf_files import items_of
from engine.models.loaders import load, need
from engine.models.memory import DraftingForecast
from engine.settings import Drafting, Runtime, Sampling
from engine.types import HEAD
from tests.support.gguf_files import rewritten
from tests.support.head_files import (
    assistant_gguf,
    dflash_gguf,
    eagle3_gguf,
    llama_gguf,
    model_with_head,
)
from tests.support.lossless import Adversary, events_of, garbage, generation, ids

pytestmark = pytest.mark.gguf
KINDS = ("EAGLE-3", "DFlash", "DFlash2")
CORE = Runtime(threads=1, bits="8", context_length=256)
LIBRARY = replace(CORE, bits="off")
PROMPT = tuple(range(40, 70))
GREEDY = Sampling(temperature=0.0)


def guesses(model: Any, prompt: tuple[int, ...] = PROMPT) -> list[dict[int, float]]:
    """The likeliest tokens after a text, and after the two that are likeliest in llama.cpp."""
    model.reset()
    model.head.listen(True)
    model.prefill(prompt, never)
    guess = model.head.start(prompt, GREEDY, never)
    found = [dict(guess.likeliest(4))]
    for token in (120, 52):
        (guess,) = model.head.extend([0], [token])
        found.append(dict(guess.likeliest(4)))
    model.head.forget()
    return found


def assert_same(found: list[dict[int, float]], expected: list[dict[int, float]]) -> None:
    for one, other in zip(found, expected, strict=True):
        for token, chance in one.items():
            assert other.get(token, 0.0) == pytest.approx(chance, rel=0.1, abs=0.01)


@pytest.fixture(scope="module", params=KINDS)
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """A model with a head in the core, and in llama.cpp."""
    path = str(model_with_head(request.param, tmp_path_factory.mktemp("headed")))
    return load(path, CORE), load(path, LIBRARY), path


def test_a_head_guesses_what_it_guesses_in_llama_cpp(pair: Any) -> None:
    mine, other, _ = pair
    assert (mine.info.kind, other.info.kind) == ("transformers", "llama.cpp")
    same = ("name", "depth", "at_once", "branches", "parameters")
    assert all(getattr(mine.info.head, each) == getattr(other.info.head, each) for each in same)
    assert mine.info.head.drafts and mine.info.head.fingerprint
    assert_same(guesses(mine), guesses(other))


def test_a_head_in_a_file_changes_no_text(pair: Any) -> None:
    mine, _, _ = pair
    for temperature in (0.0, 0.7):
        chosen = generation(temperature, 3, 40)
        mine.reset()
        plain = events_of(mine, PROMPT, chosen)
        sampling = replace(GREEDY, temperature=temperature, seed=3)
        for name in ("hd+head", "head@3"):
            mine.reset()
            mine.head.listen(True)
            drafters = method_named(name).drafters(Databases(), sampling=sampling, target=mine)
            wrong = [Adversary(garbage)] if name == "head@3" else []
            how = [*wrong, *drafters], Drafting(budget="fixed", nodes=24)
            fast = events_of(mine, PROMPT, chosen, *how)
            assert ids(fast) == ids(plain)
            assert any(step.proposed.get(HEAD) for step in fast)


def test_the_memory_of_a_head_is_counted(pair: Any) -> None:
    mine, _, path = pair
    whole, without = need(path, CORE), need(path, replace(CORE, head="off"))
    assert whole.weights - without.weights == pytest.approx(mine.info.head.memory_bytes, rel=0.05)
    assert whole.cache > without.cache
    assert whole.forecast is not None and whole.forecast.head.startswith("in the file ")


def test_a_head_that_says_a_part_of_the_tokens(tmp_path: Path) -> None:
    head = eagle3_gguf(tmp_path, known=200)
    path = str(llama_gguf(tmp_path))
    mine, other = load(path, replace(CORE, head=str(head))), load(path, LIBRARY)
    found = guesses(mine)
    assert_same(found, guesses(other))
    assert max(token for each in found for token in each) < 200


@pytest.mark.parametrize("make", [eagle3_gguf, dflash_gguf])
def test_rotary_frequencies_are_divided_as_in_llama_cpp(tmp_path: Path, make: Any) -> None:
    path = llama_gguf(tmp_path)
    plain = make(tmp_path, name="plain.bin")
    factors = {"rope_freqs.weight": np.linspace(1, 40, 8, dtype=np.float32)}
    rewritten(plain, tmp_path / "eagle3-attending.gguf", arrays=factors)
    mine, other = load(str(path), CORE), load(str(path), LIBRARY)
    assert_same(guesses(mine), guesses(other))


Change = Callable[[Path], Path]
UNFIT: dict[str, tuple[Change, str]] = {
    "width": (lambda folder: eagle3_gguf(folder, hidden=32), "states of 32 numbers"),
    "layers": (lambda folder: eagle3_gguf(folder, layers=(0, 1, 9)), "hidden states (0, 1, 9)"),
    "kind": (assistant_gguf, UNUSED),
    "DSpark": (lambda folder: dflash_gguf(folder, sample_from_anchor=True), "a DSpark head"),
    "tensor": (
        lambda folder: rewritten(
            eagle3_gguf(folder, name="source.bin"),
            folder / "eagle3-other.gguf",
            arrays={"blk.0.attn_gate.weight": np.ones((2, 2), np.float32)},
        ),
        "the tensor attn_gate is not known",
    ),
    "scale": (
        lambda folder: dflash_gguf(folder, **{"attention.value_scale": 2.0}),
        "it has dflash.attention.value_scale",
    ),
    "activation": (
        lambda folder: dflash_gguf(folder, hidden_act="gelu"), "its activation is gelu"
    ),
    "turn": (
        lambda folder: dflash_gguf(folder, **{"rope.dimension_count": 8}), "turn in part"
    ),
    "positions": (
        lambda folder: rewritten(
            eagle3_gguf(folder, name="source.bin"),
            folder / "eagle3-other.gguf",
            {"eagle3.rope.scaling.type": "yarn"},
        ),
        "positions are scaled (yarn)",
    ),
    "tokens": (
        lambda folder: rewritten(
            eagle3_gguf(folder, name="source.bin"),
            folder / "eagle3-other.gguf",
            {"tokenizer.ggml.tokens": [f"t{number}" for number in range(260)]},
        ),
        "another vocabulary",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_a_head_that_does_not_fit_is_told(tmp_path: Path, name: str) -> None:
    make, reason = UNFIT[name]
    head, path = make(tmp_path), llama_gguf(tmp_path)
    found = load(str(path), CORE)
    assert found.head is None and not found.info.head.drafts  # type: ignore[union-attr]
    assert found.info.head.note.startswith(f"{head.name} does not fit: ")  # type: ignore[union-attr]
    assert reason in found.info.head.note  # type: ignore[union-attr]
    with pytest.raises(ModelError) as caught:
        load(str(path), replace(CORE, head=str(head)))
    assert reason in str(caught.value) and str(head) in str(caught.value)


def test_a_head_that_is_damaged_or_not_there(tmp_path: Path) -> None:
    head, path = eagle3_gguf(tmp_path), llama_gguf(tmp_path)
    whole = head.read_bytes()
    for size in (3000, len(whole) - 4096):
        head.write_bytes(whole[:size])
        found = load(str(path), CORE)
        assert found.head is None and UNUSED not in found.info.head.note  # type: ignore[union-attr]
    head.write_bytes(whole[:3000])
    told = need(str(path), CORE).forecast
    assert told is not None and told.problem.startswith(f"{head.name} does not fit: ")
    assert UNUSED not in told.problem
    head.unlink()
    with pytest.raises(ModelError, match="there is no such file"):
        load(str(path), replace(CORE, head=str(head)))


def test_what_is_known_of_a_head_before_it_is_loaded(tmp_path: Path) -> None:
    path, head = llama_gguf(tmp_path), eagle3_gguf(tmp_path)
    assert need(str(path), CORE).forecast == DraftingForecast(head=f"in the file {head.name}")
    assert unknown(head) == "" and unknown(path) == UNUSED and unknown(tmp_path / "none.gguf")
    assert items_of(head, "eagle3.target_layers") == [0, 1, 2]
    assert items_of(head, "tokenizer.ggml.tokens")[:2] == ["<s>", "</s>"]
    assert items_of(head, "eagle3.embedding_length") == items_of(head, "nothing") == []
    head.unlink()
    other = assistant_gguf(tmp_path)
    told = need(str(path), CORE).forecast
    assert told == DraftingForecast(problem=f"{other.name} does not fit: {UNUSED}")
    assert not load_packed.suits(path, replace(CORE, head=str(other)))
