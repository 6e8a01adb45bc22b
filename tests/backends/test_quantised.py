"""Weights of 4 and 8 bits: what the core multiplies, how models are converted, and that a row of a
model of few bits has the same bits in every tree."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends import native_forward, quantised
from engine.backends.base import Wanted
from engine.backends.quantised import PackedLinear, can_pack
from engine.decode import never
from engine.errors import ModelError
from engine.models.load_transformers import pick_bits
from engine.native import core
from engine.settings import Generation, Sampling
from engine.tree import Tree
from tests.conftest import EMBEDDED, ROOT
from tests.support.backends import (
    BROAD,
    GREEDY,
    LENGTH,
    Trees,
    after,
    assert_counted,
    assert_exact,
    chain_of,
    load,
    numbers,
    prompt_of,
    save_model,
)

pytestmark = pytest.mark.model
assert core is not None, "the tests need the compiled core"
BITS = (8, 4)
FAMILIES = {
    "llama": ("llama-gqa", {}),
    "llama without groups": ("llama-gqa", {"num_key_value_heads": 4}),
    "llama of wide heads": ("llama-gqa", {"head_dim": 128, "num_attention_heads": 2,
                                          "num_key_value_heads": 1}),
    "llama of odd sizes": ("llama-gqa", {"hidden_size": 192, "intermediate_size": 352,
                                         "num_attention_heads": 6, "num_key_value_heads": 2}),
    "llama with biases": ("llama-gqa", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral-window", {**LENGTH, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {}),
    "qwen3 with experts": ("qwen3-moe", {"mlp_only_layers": [1], "num_hidden_layers": 3}),
}  # fmt: skip
"""Models whose forwards the core computes."""


def packed(outputs: int, inputs: int, bits: int, seed: int = 1) -> tuple[PackedLinear, Any]:
    weight = numbers(outputs, inputs, seed=seed)
    return PackedLinear(weight, None, bits), weight


# products


@pytest.mark.parametrize("bits", BITS)
def test_every_set_of_instructions_gives_the_same_bits(level: str, bits: int) -> None:
    linear, _ = packed(80, 384, bits)
    odd = numbers(8, 384)
    odd[0, 7] = odd[1, 200] = float("nan")
    odd[2, 130], odd[3, 383] = float("inf"), -float("inf")
    odd[4:] *= torch.tensor([1e-37, 1e-38, 1e-40, 3e37])[:, None]
    states = torch.cat([numbers(21, 384) * torch.logspace(-3, 3, 21)[:, None], odd])
    core.use_level("plain")
    expected, strange = linear(states), PackedLinear(odd.repeat(4, 1), None, bits)
    core.use_level(level)
    assert torch.allclose(linear(states), expected, rtol=0, atol=0, equal_nan=True)
    again, _ = packed(80, 384, bits)
    assert torch.equal(again.numbers, linear.numbers) and torch.equal(again.scales, linear.scales)
    again = PackedLinear(odd.repeat(4, 1), None, bits)
    assert torch.equal(again.numbers, strange.numbers)
    assert torch.allclose(again.scales, strange.scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("place", [0, 5, 20, 127, 255])
def test_what_is_no_number_stays_none(place: int, level: str, bits: int) -> None:
    """Among inputs and among weights, with every set of instructions."""
    core.use_level(level)
    linear, weight = packed(48, 256, bits)
    states = numbers(3, 256)
    expected = linear(states)
    for wrong in (float("nan"), float("inf"), -float("inf")):
        damaged = states.clone()
        damaged[1, place] = wrong
        found = linear(damaged)
        assert found[1].isnan().all() and torch.equal(found[::2], expected[::2])
        broken = weight.clone()
        broken[17, place] = wrong
        other = PackedLinear(broken, None, bits)
        found = other(states)
        assert found[:, 17].isnan().all() and other.weight[17, place].isnan()
        rest = [*range(17), *range(18, 48)]
        assert torch.equal(found[:, rest], expected[:, rest])


@pytest.mark.parametrize("bits", BITS)
def test_tiny_numbers_count_as_zero(level: str, bits: int) -> None:
    """Where 127 of them have no finite share."""
    core.use_level(level)
    linear, weight = packed(48, 256, bits)
    states = numbers(4, 256)
    for size in (3e-38, 1e-40, 1e-45):
        scaled = size * states / states.abs().amax(1, keepdim=True)
        assert not linear(scaled).any()
        assert not PackedLinear(size * weight / weight.abs().max(), None, bits)(states).any()
    found = linear(states * 1e-35)
    assert torch.allclose(found * 1e35, linear(states), rtol=1e-2, atol=0.5)


@pytest.mark.parametrize("bits", BITS)
def test_extreme_numbers_do_not_overflow(level: str, bits: int) -> None:
    """Pairs of the largest products exceed 16 bits, in which some instructions add."""
    linear = PackedLinear(torch.ones(16, 256), None, bits)
    linear.numbers.fill_(255)
    core.use_level(level)
    for sign in (1.0, -1.0):
        states = torch.full((5, 256), sign)
        assert torch.allclose(linear(states), states @ linear.weight.T, rtol=1e-5)


@pytest.mark.parametrize("bits", BITS)
def test_a_row_has_the_same_bits_whatever_stands_beside_it(level: str, bits: int) -> None:
    core.use_level(level)
    linear, _ = packed(48, 256, bits)
    states = numbers(40, 256)
    alone = torch.cat([linear(row[None]) for row in states])
    for rows in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 40):
        for first in (0, 40 - rows):
            found = linear(states[first : first + rows])
            assert torch.equal(found, alone[first : first + rows])


def test_more_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, _ = packed(160, 256, 4)
    states = numbers(9, 256)
    alone = linear(states)
    for threads in (2, 3, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(linear(states), alone)


def test_threads_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, _ = packed(160, 256, 4)
    states = numbers(9, 256)
    alone = linear(states)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    core.use_openmp(0)
    try:
        assert torch.equal(linear(states), alone)
    finally:
        quantised.share_threads()


@pytest.mark.parametrize(("bits", "most"), [(8, 0.012), (4, 0.12)])
def test_the_product_is_near_that_of_the_weights(bits: int, most: float) -> None:
    linear, weight = packed(64, 512, bits)
    states = numbers(6, 512)
    expected = states @ weight.T
    assert float((linear(states) - expected).norm() / expected.norm()) < most
    rounded = states @ linear.weight.T
    assert float((linear(states) - rounded).norm() / rounded.norm()) < 0.01


@pytest.mark.parametrize("size", [2e-7, 1e-5, 1e-3, 1e4, 4e5])
def test_scales_of_half_precision_are_read_as_they_are_stored(level: str, size: float) -> None:
    """Also where they are so small that they lose digits."""
    core.use_level(level)
    weight = numbers(32, 256, seed=1)
    linear = PackedLinear(size * weight / weight.abs().max(), None, 4)
    assert linear.scales.dtype == torch.float16 and linear.scales.isfinite().all()
    states = numbers(5, 256)
    expected = states @ linear.weight.T
    assert float((linear(states) - expected).norm()) <= 0.01 * float(expected.norm())


def test_matrices_of_a_model_lie_one_behind_the_other() -> None:
    room = quantised.Room()
    first, second = room.take(1000), room.take(4096)
    assert [len(first), len(second)] == [1000, 4096]
    assert second.data_ptr() == first.data_ptr() + 1024
    large = room.take(2 * quantised.ROOM)
    assert len(large) == 2 * quantised.ROOM
    assert not any(each.data_ptr() % quantised.LINE for each in (first, second, large))


def test_four_bits_round_better_than_the_largest_weight_alone_would() -> None:
    linear, weight = packed(64, 512, 4)
    groups = weight.view(64, -1, core.FINE)
    scale = groups.abs().amax(2, keepdim=True) / 7
    usual = ((groups / scale).round() * scale).view_as(weight)
    assert (linear.weight - weight).norm() < 0.95 * (usual - weight).norm()


def test_no_rows_at_all() -> None:
    """In a process of its own: a product that does not end would keep this one busy."""
    code = """
import torch
from engine.backends.quantised import PackedLinear
for threads in (1, 2):
    torch.set_num_threads(threads)
    linear = PackedLinear(torch.ones(32, 256), None, 8)
    assert linear(torch.empty(2, 0, 256)).shape == (2, 0, 32)
    assert linear(torch.ones(1, 256)).any()
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("inputs", [32, 96, 160, 352])
def test_inputs_that_are_no_whole_groups_are_padded(inputs: int, bits: int, level: str) -> None:
    """As if zeros stood there."""
    weight, states = numbers(40, inputs), numbers(9, inputs)
    rest = -inputs % core.GROUP
    linear = PackedLinear(weight, None, bits)
    wide = PackedLinear(torch.nn.functional.pad(weight, (0, rest)), None, bits)
    expected = wide(torch.nn.functional.pad(states, (0, rest)))
    core.use_level(level)
    assert torch.equal(linear(states), expected)
    assert linear.weight.shape == (40, inputs)
    assert torch.equal(linear.weight, wide.weight[:, :inputs])


def test_odd_sizes_and_rows_of_zeros() -> None:
    linear, weight = packed(37, 128, 8)
    assert linear.width == 48
    states = torch.zeros(2, 3, 128)
    states[1] = numbers(3, 128)
    found = linear(states)
    assert found.shape == (2, 3, 37) and not found[0].any()
    assert torch.allclose(found[1], states[1] @ weight.T, atol=0.5)
    assert can_pack(16, 96) and not can_pack(16, 100) and not can_pack(8, 128)


# loading


@pytest.mark.parametrize("bits", BITS)
def test_the_demonstration_model_in_few_bits(bits: int) -> None:
    model = load(EMBEDDED, bits=str(bits))
    info = model.info
    assert info.dtype == f"{bits} bits" and info.can_tree and info.note == "" and info.exact
    assert isinstance(model.captured, native_forward.NativeForwards)
    usual = load(EMBEDDED)
    assert info.parameters == usual.info.parameters
    assert info.fingerprint != usual.info.fingerprint
    assert_counted(EMBEDDED, info, bits=str(bits))
    text = model.tokenize("The sun rises in the east and sets in the")
    left, right = after(model, text), after(usual, text)
    assert np.linalg.norm(left - right) < (0.03 if bits == 8 else 0.25) * np.linalg.norm(right)


def test_a_damaged_model_is_refused_in_few_bits_as_well(tmp_path: Path) -> None:
    folder = save_model("qwen3", tmp_path, **BROAD)
    path = folder / "model.safetensors"
    stored = load_file(path)
    stored["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(stored, path, metadata={"format": "pt"})
    for bits in ("auto", "4", "8"):
        with pytest.raises(ModelError, match="gives no numbers"):
            load(folder, bits=bits)


def test_without_the_compiled_core_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantised, "core", None)
    monkeypatch.setattr(quantised, "missing", "STRATA_NATIVE is 0")
    with pytest.raises(ModelError, match=r"4 bits need the compiled core: .*STRATA_NATIVE is 0.*"):
        load(EMBEDDED, bits="4")


def test_other_gpus_are_refused() -> None:
    with pytest.raises(ModelError, match="8 bits here: .* NVIDIA GPU is needed, .* run on mps"):
        pick_bits("8", torch.device("mps"))


def test_what_cannot_be_converted_stays(tmp_path: Path) -> None:
    """Of this model some matrices have no whole groups of inputs."""
    changes = {**BROAD, "intermediate_size": 200}
    folder = save_model("llama-gqa", tmp_path, **changes)
    model = load(folder, bits="8")
    mlp = model.model.model.layers[0].mlp
    assert isinstance(mlp.gate_proj, PackedLinear) and type(mlp.down_proj) is torch.nn.Linear
    assert model.captured is None and "could not be converted" in model.info.note
    assert not model.info.exact
    assert model.info.can_tree
    assert_counted(folder, model.info, bits="8")


def test_the_output_matrix_may_be_stored_beside_the_embedding_that_it_is(tmp_path: Path) -> None:
    folder = save_model("qwen3", tmp_path, **BROAD, tie_word_embeddings=True)
    path = folder / "model.safetensors"
    stored = load_file(path)
    assert "lm_head.weight" not in stored
    usual = load(folder, bits="8").info
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, path, metadata={"format": "pt"})
    model = load(folder, bits="8")
    assert isinstance(model.model.lm_head, PackedLinear) and model.info.note == ""
    assert_counted(folder, model.info, bits="8")
    assert_counted(folder, usual, bits="8")


def test_another_family_keeps_its_forwards_in_torch(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    model = load(save_model("gpt-neox", tmp_path, **sizes), bits="4")
    assert model.captured is None and "the core does not know GPTNeoX" in model.info.note
    assert model.info.can_tree and model.info.dtype == "4 bits"
    assert any(isinstance(each, PackedLinear) for each in model.model.modules())


# what the core refuses

SIZES = [128, 256, 4, 2, 32, 48]
"""Of a decoder: its width, its inner width, heads, shared heads, their size, its vocabulary."""


def made(**changes: Any) -> Any:
    """A decoder of one layer, with other arguments if they are named."""
    width, inner, heads, shared, size, vocabulary = SIZES
    shapes = [
        *((heads * size, width), (shared * size, width), (shared * size, width)),
        *((width, heads * size), (inner, width), (inner, width), (width, inner)),
    ]
    ones = torch.ones(width)
    given = {
        "sizes": SIZES,
        "experts": [0, 0, 0],
        "norms": [ones, ones, None, None],
        "router": None,
        "beside": None,
        "normed_states": False,
        "matrices": [packed(*shape, 8)[0] for shape in shapes],
        "norm": ones,
        "head": packed(vocabulary, width, 8)[0],
        "cosines": torch.ones(9, size // 2),
        "sines": torch.zeros(9, size // 2),
        **changes,
    }
    matrices = [each.matrix for each in given["matrices"]]
    layers = [[*given["norms"], given["beside"], given["router"], *matrices]]
    sizes, factors = [*given["sizes"], *given["experts"]], [given["cosines"], given["sines"]]
    return core.Decoder(
        *(sizes, True, given["normed_states"], 1e-5, 0.2, layers, given["norm"]),
        *(given["head"] and given["head"].matrix, *factors, given),
    )


def empty_part() -> Any:
    """A part of a cache of this decoder."""
    return torch.zeros(2 * 2 * core.PART * 32)


def computed(decoder: Any, **changes: Any) -> Any:
    """The logits of two rows, with other arguments if they are named."""
    given = {
        "states": numbers(2, 128),
        "spans": [(2, 0, 0, [empty_part()])],
        "positions": np.arange(2),
        "parents": np.arange(-1, 1),
        "logits": torch.zeros(2, 48),
        "taps": [],
        "embedded": None,
        "threads": 1,
        **changes,
    }
    decoder.compute(**given)
    return given["logits"]


def test_arrays_are_not_converted() -> None:
    """Results would be lost with a copy, and pointers to it would outlive it."""
    linear, weight = packed(32, 256, 8)
    matrix, rows = linear.matrix, numbers(3, 256)
    for out in (torch.zeros(32, 3).T, torch.zeros(3, 32, dtype=torch.float64)):
        with pytest.raises(TypeError):
            matrix.multiply(rows, out, 1)
    with pytest.raises(TypeError):
        matrix.multiply(rows.double(), torch.zeros(3, 32), 1)
    with pytest.raises(TypeError):
        matrix.pack(weight.double(), 0, 1)
    with pytest.raises(TypeError):
        core.Matrix(32, 256, 8, linear.numbers, linear.scales.double(), None)
    assert computed(made()).any()
    wide = torch.ones(128, dtype=torch.float64)
    arrays: list[dict[str, Any]] = [
        {"norm": wide},
        {"norms": [wide, wide, None, None]},
        {"cosines": torch.ones(16, 9).T},
    ]
    for changes in arrays:
        with pytest.raises((TypeError, ValueError)):
            made(**changes)
    arrays = [
        {"states": numbers(128, 2).T},
        {"positions": np.arange(2.0)},
        {"spans": [(2, 0, 0, [empty_part().double()])]},
        {"logits": torch.zeros(48, 2).T},
        {"taps": [(0, torch.zeros(128, 2).T)]},
    ]
    for changes in arrays:
        with pytest.raises(TypeError):
            computed(made(), **changes)


@pytest.mark.parametrize(
    ("place", "size", "part"),
    [
        (0, 256, "norm does not fit"),
        (1, 128, "matrix does not fit"),
        (2, 8, "matrix does not fit"),
        (2, 3, "no whole groups"),
        (3, 0, "no whole groups"),
        (4, 48, "heads of this size"),
        (5, 64, "output matrix does not fit"),
    ],
)
def test_a_decoder_of_other_sizes_is_refused(place: int, size: int, part: str) -> None:
    sizes = [*SIZES[:place], size, *SIZES[place + 1 :]]
    with pytest.raises(ValueError, match=part):
        made(sizes=sizes)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"norms": [None, torch.ones(128), None, None]}, "a norm does not fit"),
        ({"norms": [torch.ones(128)] * 3 + [None]}, "a norm does not fit"),
        ({"norms": [torch.ones(128)] * 2 + [None]}, "thirteen parts"),
        ({"router": torch.ones(4 * 128)}, "a router does not fit"),
        ({"router": torch.ones(4 * 128), "experts": [4, 2, 64]}, "a matrix does not fit"),
        ({"experts": [4, 5, 64]}, "the experts do not fit"),
        ({"experts": [4, -1, 64]}, "the experts do not fit"),
        ({"beside": torch.ones(64)}, "a norm does not fit"),
        ({"beside": torch.ones(128)}, "a matrix does not fit"),
        ({"norm": torch.ones(64)}, "the last norm does not fit"),
        ({"cosines": torch.ones(9, 8)}, "rotary factors do not fit"),
        ({"sines": torch.ones(4, 16)}, "rotary factors do not fit"),
    ],
)
def test_a_decoder_of_other_arrays_is_refused(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        made(**changes)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"states": torch.ones(2, 64)}, "rows do not fit"),
        ({"spans": []}, "rows do not fit"),
        ({"spans": [(2, -1, 0, [empty_part()])]}, "rows do not fit"),
        ({"spans": [(2, 255, 0, [empty_part()])]}, "rows do not fit"),
        ({"spans": [(1, 0, 0, [empty_part()])]}, "rows do not fit"),
        ({"spans": [(3, 0, 0, [empty_part()])]}, "rows do not fit"),
        ({"spans": [(3, 0, 0, [empty_part()]), (-1, 0, 0, [empty_part()])]}, "rows do not fit"),
        ({"spans": [(1, 0, 0, [empty_part()]), (1, 0, 0, [])]}, "rows do not fit"),
        ({"spans": [(1, 0, 0, [empty_part()])] * 2}, "a parent stands before"),
        ({"positions": np.array([0, 9])}, "a position has no rotary factors"),
        ({"positions": np.array([-1, 0])}, "a position has no rotary factors"),
        ({"parents": np.array([-1, 1])}, "a parent stands before"),
        ({"parents": np.array([-1])}, "rows do not fit"),
        ({"parents": np.arange(-1, 2)}, "rows do not fit"),
        ({"spans": [(2, 0, -1, [empty_part()])]}, "rows do not fit"),
        ({"spans": [(2, 0, 1, [empty_part()])]}, "rows do not fit"),
        ({"spans": [(2, 0, 255, [empty_part()])]}, "rows do not fit"),
        ({"embedded": torch.ones(2, 128)}, "embeddings do not fit"),
        ({"spans": [(2, 0, 0, [torch.zeros(100)])]}, "cache does not fit"),
        ({"logits": torch.zeros(1, 48)}, "logits do not fit"),
        ({"logits": torch.zeros(2, 64)}, "logits do not fit"),
        ({"taps": [(2, torch.zeros(2, 128))]}, "taps do not fit"),
        ({"taps": [(-1, torch.zeros(2, 128))]}, "taps do not fit"),
        ({"taps": [(0, torch.zeros(1, 128))]}, "taps do not fit"),
    ],
)
def test_rows_that_do_not_fit_are_refused(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        computed(made(), **changes)


@pytest.mark.parametrize("first", [-1600000, -16, 8, 16, 2**31 - 16])
def test_weights_are_packed_inside_their_matrix(first: int) -> None:
    linear, _ = packed(32, 256, 8)
    with pytest.raises(ValueError, match="the weights do not fit"):
        linear.matrix.pack(numbers(32, 256), first, 1)


# forwards in the core


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:

    models = {}
    for name, (kind, changes) in FAMILIES.items():
        folder = save_model(kind, tmp_path_factory.mktemp("model"), **{**BROAD, **changes})
        models[name] = load(folder, bits="4")
        models[name].info = replace(models[name].info, eos_ids=frozenset())
    return models


@pytest.mark.parametrize("name", FAMILIES)
def test_the_core_computes_what_torch_computes(families: dict[str, Any], name: str) -> None:
    model = families[name]
    assert isinstance(model.captured, native_forward.NativeForwards), model.info.note
    text = prompt_of(70, model.info.vocabulary_size)
    inside, outside = after(model.open(), text), model.alone(text)
    assert np.linalg.norm(inside - outside) < 0.02 * np.linalg.norm(outside)
    wrong = model.alone([*text[:-2], text[-1]])
    assert np.linalg.norm(wrong - outside) > 0.2 * np.linalg.norm(outside)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_have_the_same_bits_in_every_tree(families: dict[str, Any], name: str) -> None:
    """Whatever is drafted and accepted, across the parts of the cache."""
    model, trees = families[name], Trees(3)
    sequence, twin = model.open(), model.open()
    text = prompt_of(240, model.info.vocabulary_size)
    for _ in range(12):
        sequence.prefill(text, never)
        tree = some_tree(trees, model, text[-1])
        scores, path = sequence.score(tree, GREEDY), trees.path(tree)
        for row in {0, *path, len(tree)}:
            twin.reset()
            assert np.array_equal(scores.row(row), after(twin, [*text, *tree.path(row)]))
        sequence.accept(path)
        text = [*text, *(tree.tokens[row] for row in path), (11 * len(text)) % 100]


def some_tree(trees: Trees, model: Any, root: int) -> Tree:
    tree = trees.tree(root)
    tree.tokens[1:] = [token % model.info.vocabulary_size for token in tree.tokens[1:]]
    return tree


def counts_of_forwards(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows of each sequence in every forward of the core from now on."""
    counts, compute = [], model.captured.compute

    def computed(spans: Any, logits: Any) -> None:
        counts.append([len(span.tokens) for span in spans])
        compute(spans, logits)

    monkeypatch.setattr(model.captured, "compute", computed)
    return counts


@pytest.mark.parametrize("name", FAMILIES)
def test_sequences_in_one_forward_get_the_bits_that_each_gets_alone(
    families: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With texts that cross the parts of the cache at different times, and new prompts between."""
    model, trees = families[name], Trees(7)
    size = model.info.vocabulary_size
    texts = [prompt_of(length, size)[-length:] for length in (1, 57, 250, 500)]
    pairs = [(model.open(), model.open()) for _ in texts]
    counts = counts_of_forwards(model, monkeypatch)
    for step in range(8):
        for text, pair in zip(texts, pairs, strict=True):
            for sequence in pair:
                sequence.prefill(text, never)
        wanted = [
            Wanted(together, some_tree(trees, model, text[-1]), GREEDY)
            for text, (together, _) in zip(texts, pairs, strict=True)
        ]
        rows = [len(each.tree.tokens) for each in wanted]
        counts.clear()
        scores = model.score_all(wanted)
        assert sum(counts, []) == rows
        assert len(counts) == 1 or sum(rows) > native_forward.CHUNK
        for text, (together, alone), each, found in zip(texts, pairs, wanted, scores, strict=True):
            expected = alone.score(each.tree, GREEDY)
            assert found.positions == expected.positions
            for row in range(len(each.tree) + 1):
                assert np.array_equal(found.row(row), expected.row(row))
            path = trees.path(each.tree)
            together.accept(path)
            alone.accept(path)
            text += [*(each.tree.tokens[row] for row in path), (11 * len(text)) % 100]
        if step == 4:
            texts[1] = texts[1][:20] + prompt_of(240, size)


def test_many_rows_of_many_sequences_take_several_forwards(
    families: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a forward stays that of a part of a prompt."""
    model, text, wanted = families["llama"], prompt_of(25, 160), []
    twin = model.open()
    for number in range(128):
        wanted.append(Wanted(model.open(), chain_of(text[9], text[10:]), GREEDY))
        wanted[-1].sequence.prefill([number, *text[:10]], never)
    counts = counts_of_forwards(model, monkeypatch)
    scores = model.score_all(wanted)
    assert counts == [[16] * (native_forward.CHUNK // 16)] * (128 * 16 // native_forward.CHUNK)
    for number in (0, 63, 64, 127):
        twin.prefill([number, *text[:10]], never)
        expected = twin.score(wanted[number].tree, GREEDY)
        for row in range(16):
            assert np.array_equal(scores[number].row(row), expected.row(row))


def test_every_set_of_instructions_computes_the_same_forward(
    families: dict[str, Any], level: str
) -> None:
    model, text = families["qwen3"], prompt_of(40, 160)
    expected = after(model.open(), text)
    core.use_level(level)
    assert np.array_equal(after(model.open(), text), expected)


def test_more_threads_compute_the_same_forward(
    families: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = families["llama"], prompt_of(90, 160)
    expected = after(model.open(), text)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert np.array_equal(after(model.open(), text), expected)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3 with experts"])
def test_accelerated_answers_are_the_plain_ones(
    families: dict[str, Any], name: str, temperature: float
) -> None:
    model = families[name]
    prompt = prompt_of(20, model.info.vocabulary_size)
    assert_exact(model, prompt, Generation(Sampling(temperature, seed=5), max_tokens=60))


def test_a_head_reads_the_states_of_native_forwards() -> None:
    model = load(EMBEDDED, bits="8")
    model.head.listen(True)
    text = model.tokenize("Tell me a story about a dog and a cat.")
    model.prefill(text, never)
    inside = torch.cat(model.head.waiting)
    captured, model.captured = model.captured, None
    model.cache = None
    model.reset()
    model.head.reset()
    model.prefill(text, never)
    outside = torch.cat(model.head.waiting)
    assert captured is not None and inside.shape == outside.shape
    assert float((inside - outside).norm() / outside.norm()) < 0.02


def test_each_head_gets_the_states_of_its_own_sequence() -> None:
    """Also where a sequence whose head does not listen has rows before them."""
    model = load(EMBEDDED, bits="8")
    text = model.tokenize("Tell me a story about a dog and a cat.")
    found: list[list[Any]] = []
    for together in (True, False):
        wanted = []
        for number, listens in enumerate((False, True, True)):
            sequence = model.open()
            sequence.head.listen(listens)
            sequence.prefill(text[number : -number or None], never)
            tree = chain_of(text[-1 - number], text[: 2 + number])
            wanted.append(Wanted(sequence, tree, GREEDY))
        for each in [wanted] if together else [[each] for each in wanted]:
            model.score_all(each)
        for number, each in enumerate(wanted):
            each.sequence.accept(range(1, 2 + number))
        found.append([each.sequence.head.waiting for each in wanted])
    assert found[0][0] == found[1][0] == []
    for inside, alone in zip(found[0][1:], found[1][1:], strict=True):
        assert len(inside) == 2 and torch.equal(torch.cat(inside), torch.cat(alone))
    assert not torch.equal(found[0][1][1], found[0][2][1][:3])


def test_a_head_multiplies_by_the_output_matrix_of_few_bits() -> None:
    """A copy of its numbers in float32 would take four times the memory."""
    model = load(EMBEDDED, bits="8")
    head, output = model.head, model.model.get_output_embeddings()
    assert head is not None and head.weights.output is output
    head.listen(True)
    text = model.tokenize("Tell me a story about a dog and a cat.")
    model.prefill(text, never)
    found = head.start(text, GREEDY, never).likeliest(3)
    head.weights = replace(head.weights, output=output.weight)
    expected = head.start(text, GREEDY, never).likeliest(3)
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert np.allclose([each for _, each in found], [each for _, each in expected], atol=0.02)


def test_a_cancelled_prompt_ends_after_a_part_of_it(families: dict[str, Any]) -> None:
    sequence, asked = families["llama"].open(), [0]

    def cancelled() -> bool:
        asked[0] += 1
        return asked[0] > 1

    part = sequence.captured.chunk
    text = prompt_of(3 * part, 160)
    filled = sequence.prefill(text, cancelled)
    assert not filled.complete and sequence.cached == text[:part]
    expected = after(families["llama"].open(), text)
    assert np.array_equal(after(sequence, text), expected)


@pytest.mark.parametrize("kind", ["llama-gqa", "qwen3-moe"])
def test_a_wrong_forward_is_not_used(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Although some rows of a mixture may differ from those of torch."""
    factors = native_forward.rotary_factors
    monkeypatch.setattr(native_forward, "rotary_factors", lambda *given: [factors(*given)[0]] * 2)
    model = load(save_model(kind, tmp_path, **BROAD), bits="4")
    assert model.captured is None and "its logits are off by" in model.info.note
    assert model.info.can_tree


def test_the_memory_of_a_conversation_is_counted(families: dict[str, Any]) -> None:
    sequence = families["llama"].open()
    assert sequence.bytes == 0
    sequence.prefill(prompt_of(core.PART + 2, 160), never)
    layers, heads, size = 2, 2, 32
    assert sequence.bytes == 2 * layers * 2 * heads * size * core.PART * 4
    sequence.close()
    assert sequence.bytes == 0
