"""Folders that were quantised already: the core keeps their numbers, its logits are those of the
weights that the numbers stand for, and drafts change no token."""

import gc
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, modeling_utils

from engine.backends import captured
from engine.backends.native_forward import NativeForwards
from engine.backends.quantised import Layout, Numbers, PackedConfig, PackedLinear
from engine.backends.rounded import FewBits, RoundedLinear, rounded
from engine.drafting.databases import Databases
from engine.errors import ModelError
from engine.methods import METHODS
from engine.models import load_quantised, quantised_files
from engine.models.load_transformers import packing_of
from engine.models.memory import memory_need
from engine.native import core
from engine.settings import Generation, Sampling
from tests.support.backends import after, assert_counted, assert_exact, load, prompt_of
from tests.support.lossless import assert_lossless, events_of
from tests.support.quantised_folders import WIDE, Way, configure, quantised, rewrite

pytestmark = pytest.mark.model
EIGHT, ASYMMETRIC = Way(bits=8, group=-1), Way(symmetric=False)
WAYS: Mapping[str, Way] = {
    "gptq": Way(),
    "gptq, 32": Way(group=32),
    "gptq, 128": Way(group=128),
    "gptq, all": Way(group=-1),
    "gptq with zeros": ASYMMETRIC,
    "gptq_v2 with zeros": replace(ASYMMETRIC, more={"checkpoint_format": "gptq_v2"}),
    "gptq of 8 bits": Way(bits=8),
    "gptq of 8 bits, 128": Way(bits=8, group=128),
    "gptq of 8 bits with zeros": Way(bits=8, group=32, symmetric=False),
    "awq": Way("awq", symmetric=False),
    "awq, 128": Way("awq", group=128, symmetric=False),
    "packed": Way("pack-quantized", group=32, scales=torch.bfloat16),
    "packed with zeros": Way("pack-quantized", group=128, symmetric=False),
    "packed of 8 bits": Way("pack-quantized", 8, group=-1, scales=torch.bfloat16),
    "bytes": Way("int-quantized", 8, group=-1, scales=torch.float32),
    "bytes with zeros": Way("int-quantized", 8, group=-1, symmetric=False),
}
TITLES = {"gptq": "GPTQ", "awq": "AWQ"}
DESC_ACT = {
    "gptq": Way(order=True),
    "gptq of 8 bits with zeros": Way(bits=8, order=True, symmetric=False),
    "packed": Way("pack-quantized", group=128, order=True),
}
ALL = {**WAYS, **{f"{name}, in another order": way for name, way in DESC_ACT.items()}}


def packed_layers(model: Any) -> dict[str, PackedLinear]:
    found = model.model.named_modules()
    return {name: each for name, each in found if isinstance(each, PackedLinear)}


def with_rounded_inputs(model: Any) -> None:
    """Round the inputs of a model's products as the core does: to 8 bits, 128 together."""

    def rounded(module: Any, given: tuple[torch.Tensor]) -> torch.Tensor:
        (states,) = given
        count = states.shape[-1]
        groups = torch.nn.functional.pad(states, (0, -count % 128)).unflatten(-1, (-1, 128))
        peaks = groups.abs().amax(-1, keepdim=True)
        whole = (groups * (127 / peaks)).round()
        return (whole * (peaks / 127)).flatten(-2)[..., :count]

    for each in model.modules():
        if isinstance(each, torch.nn.Linear):
            each.register_forward_pre_hook(rounded)


def gap(left: Any, right: Any) -> float:
    return float(np.linalg.norm(left - right) / np.linalg.norm(right))


@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", ["llama-gqa", "qwen2"])
@pytest.mark.parametrize("way", ALL.values(), ids=ALL)
def test_a_model_has_the_numbers_of_its_folder(kind: str, way: Way, tmp_path: Path) -> None:
    """Symmetric weights to the bit. A low is half of 2 ** -10 of itself off at most, and it is at
    most as large as the largest number of its group."""
    few, exact = quantised(kind, tmp_path, way, **WIDE)
    mine, other = load(few), load(exact, dtype="float32", bits="off")
    layers = packed_layers(mine)
    assert len(layers) == 2 * 7 + 1
    for name, layer in layers.items():
        if name != "lm_head":
            expected = other.model.get_submodule(name).weight
            assert layer.bits == way.bits
            most = 0.0 if way.symmetric else 2.0**-10 * float(expected.abs().max())
            assert float((layer.weight - expected).abs().max()) <= most
    title = TITLES.get(way.format, "compressed-tensors")
    assert mine.info.dtype == f"{title}, {way.bits} bits" and mine.info.can_tree
    assert_counted(few, mine.info)
    assert mine.info.parameters == other.info.parameters
    text = prompt_of(60, 160)
    found, unrounded = after(mine, text), after(other, text)
    with_rounded_inputs(other.model)
    for name, layer in layers.items():
        other.model.get_submodule(name).weight.data = layer.weight
    if way.order:
        # Inputs are rounded in the order of the numbers: of the same size, not the same.
        assert gap(found, unrounded) < 2 * gap(other.alone(text), unrounded)
        assert not mine.info.exact and "orders of their own (desc_act)" in mine.info.note
    else:
        # Where a sum rounds differently, an input may round to the next of its 8 bits.
        assert gap(found, other.alone(text)) < 0.02
        assert isinstance(mine.captured, NativeForwards) and mine.info.note == ""


@pytest.mark.parametrize("name", ["gptq", "gptq of 8 bits with zeros", "awq", "packed", "bytes"])
def test_drafts_change_no_token(name: str, tmp_path: Path) -> None:
    few, _ = quantised("qwen2", tmp_path, WAYS[name], **WIDE)
    model = load(few)
    assert model.info.exact
    for sampling in (Sampling(0.0), Sampling(0.7, seed=5)):
        assert_exact(model, prompt_of(20, 160), Generation(sampling, max_tokens=30))


def test_drafts_change_no_token_in_another_order(tmp_path: Path) -> None:
    few, _ = quantised("llama-gqa", tmp_path, Way(order=True), **WIDE)
    model = load(few)
    rows = torch.randn((9, 256), generator=torch.Generator().manual_seed(1))
    layer = model.model.model.layers[0].self_attn.q_proj
    assert torch.equal(layer(rows), torch.cat([layer(row[None]) for row in rows]))


# The setting of the bits


def test_the_bits_are_the_most_of_a_weight(tmp_path: Path) -> None:
    """Fewer than those of the folder round again; the output matrix keeps 8."""
    few, _ = quantised("llama-gqa", tmp_path, EIGHT, **WIDE)
    models = {bits: load(few, bits=bits) for bits in ("auto", "8", "4")}
    eight, four = models["8"], models["4"]
    assert eight.info == models["auto"].info
    assert (eight.info.dtype, four.info.dtype) == ("GPTQ, 8 bits", "4 bits")
    assert {name: each.bits for name, each in packed_layers(four).items()} == {
        name: 8 if name == "lm_head" else 4 for name in packed_layers(eight)
    }
    for bits, model in models.items():
        assert_counted(few, model.info, bits)
    assert four.info.memory_bytes < 0.7 * eight.info.memory_bytes
    assert four.info.fingerprint != eight.info.fingerprint
    weights = [packed_layers(each)["model.layers.0.mlp.up_proj"].weight for each in (four, eight)]
    assert 0.01 < gap(*weights) < 0.12


def test_what_the_folder_has_in_16_bits_is_rounded_as_without(tmp_path: Path) -> None:
    """A module that was not quantised gets the bits of the setting."""
    few, exact = quantised("llama-gqa", tmp_path, Way(), **WIDE)
    name = "model.layers.1.mlp.down_proj"
    stored = load_file(few / "model.safetensors")
    left = {key: each for key, each in stored.items() if not key.startswith(name)}
    left[f"{name}.weight"] = load_file(exact / "model.safetensors")[f"{name}.weight"]
    save_file(left, few / "model.safetensors", metadata={"format": "pt"})
    for bits, expected in (("auto", 8), ("4", 4)):
        model = load(few, bits=bits)
        layer = packed_layers(model)[name]
        assert layer.bits == expected and model.info.exact
        assert_counted(few, model.info, bits)


def test_an_output_matrix_that_is_the_embedding(tmp_path: Path) -> None:
    few, _ = quantised("qwen2", tmp_path, Way(), **WIDE, tie_word_embeddings=True)
    model = load(few)
    assert model.info.exact and packed_layers(model)["lm_head"].bits == 8
    assert_counted(few, model.info)


def test_biases_that_the_model_does_not_have(tmp_path: Path) -> None:
    """Some programs store one for each matrix: zeros, and other values count as well."""
    few, exact = quantised("llama-gqa", tmp_path, Way(), **WIDE)
    name = "model.layers.0.mlp.up_proj"
    rewrite(few, lambda stored: stored.update({f"{name}.bias": torch.linspace(-1, 1, 384)}))
    mine, other = load(few), load(exact, dtype="float32", bits="off")
    linear = other.model.get_submodule(name)
    text = prompt_of(40, 160)
    without = other.alone(text)
    linear.bias = torch.nn.Parameter(torch.linspace(-1, 1, 384))
    found = after(mine, text)
    assert mine.info.exact and gap(found, other.alone(text)) < 0.15 < gap(found, without)
    assert_counted(few, mine.info)


def test_nothing_is_reported_as_unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[str] = []
    few, _ = quantised("llama-gqa", tmp_path, Way(), **WIDE)
    monkeypatch.setattr(modeling_utils.logger, "warning", reports.append)
    load(few)
    assert not reports


def test_an_output_matrix_of_few_bits(tmp_path: Path) -> None:
    """Its number of outputs is no multiple of those that are packed together."""
    way = Way("pack-quantized", symmetric=False)
    endings = ("_proj.weight", "lm_head.weight")
    few, exact = quantised("llama-gqa", tmp_path, way, endings, **WIDE, vocab_size=157)
    model = load(few)
    head = packed_layers(model)["lm_head"]
    expected = load_file(exact / "model.safetensors")["lm_head.weight"]
    assert head.bits == 4 and model.info.exact
    assert float((head.weight - expected).abs().max()) <= 2.0**-10 * float(expected.abs().max())
    assert_counted(few, model.info)


def test_a_scale_for_all_inputs_is_kept_in_float32(tmp_path: Path) -> None:
    """Also where the inputs are no multiple of 128."""
    sizes = {**WIDE, "intermediate_size": 352}
    few, exact = quantised("llama-gqa", tmp_path, WAYS["bytes"], **sizes)
    model, name = load(few), "model.layers.0.mlp.down_proj"
    layer = packed_layers(model)[name]
    assert layer.scales.dtype == torch.float32
    assert torch.equal(layer.weight, load_file(exact / "model.safetensors")[f"{name}.weight"])
    assert_counted(few, model.info)


def test_prediction_layers_are_no_matrices_of_the_model(tmp_path: Path) -> None:
    few, _ = quantised("llama-gqa", tmp_path, Way(), **WIDE)
    usual = load(few).info
    rewrite(few, copied("model.layers.0.mlp.up_proj", "mtp.layers.0.mlp.up_proj"))
    found = load(few, head="off").info
    assert (found.memory_bytes, found.exact) == (usual.memory_bytes, True)
    assert_counted(few, usual, ahead=False)


def test_matrices_are_read_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When one is read, those before it are in the core already, and nothing of them is held."""
    few, _ = quantised("llama-gqa", tmp_path, Way(), **WIDE)
    held: list[Any] = []
    inner = load_quantised.read

    def read(*given: Any) -> Any:
        gc.collect()
        assert not [each for each in held if each() is not None]
        found = inner(*given)
        held.append(weakref.ref(found.scales))
        return found

    monkeypatch.setattr(load_quantised, "read", read)
    load(few)
    assert len(held) == 14


# What is refused


def refused(folder: Path, bits: str = "auto") -> str:
    with pytest.raises(ModelError) as told:
        load(folder, bits=bits)
    return str(told.value)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"quant_method": "aqlm", "bits": 2}, "aqlm in the format aqlm with 2 bits is not known"),
        ({"quant_method": "gptq", "bits": 3}, "gptq in the format gptq with 3 bits is not known"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "gptq in the format marlin with 4 bits is not known",
        ),
        (
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            "awq in the format gemv with 4 bits is not known",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"a": {"weights": {"type": "float", "num_bits": 8}}},
            },
            "compressed-tensors in the format float-quantized with float of 8 bits is not known",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}},
            "compressed-tensors in the format dense with no weights is not known",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {
                    "a": {"weights": {"type": "int", "num_bits": 8}},
                    "b": {"weights": {"type": "int", "num_bits": 4}},
                },
            },
            "compressed-tensors in the format pack-quantized with int of 4 bits and int of 8 bits",
        ),
    ],
)
def test_unknown_forms_are_left_to_transformers(
    changes: dict[str, Any], part: str, tmp_path: Path
) -> None:
    """Which says what it lacks."""
    few, _ = quantised("llama-gqa", tmp_path, Way(), **WIDE)
    configure(few, quantization_config=changes)
    assert f"few bits already, in a form of their own: {part}" in refused(few, "8")
    told = refused(few)
    assert "could not be loaded" in told and "form of their own" not in told


def test_off_leaves_a_folder_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As does a core that cannot compute it."""
    few, _ = quantised("llama-gqa", tmp_path, Way(), **WIDE)
    assert "optimum" in refused(few, "off")
    kept = memory_need(str(few), "cpu", "auto", 1024)
    assert memory_need(str(few), "cpu", "auto", 1024, bits="off") != kept
    monkeypatch.setattr(quantised_files, "core", None)
    assert "optimum" in refused(few)
    assert memory_need(str(few), "cpu", "auto", 1024) != kept


def copied(source: str, place: str) -> Any:
    """Store the tensors of a matrix once more, in another place."""

    def change(stored: dict[str, torch.Tensor]) -> None:
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            stored[f"{place}.{part}"] = stored[f"{source}.{part}"].clone()

    return change


def spoil(name: str, value: Any) -> Any:
    """Put another tensor in the place of one of a matrix, or none."""

    def change(stored: dict[str, torch.Tensor]) -> None:
        place = f"model.layers.1.mlp.up_proj.{name}"
        found = stored.pop(place)
        if value is not None:
            stored[place] = value(found).contiguous()

    return change


@pytest.mark.parametrize(
    ("way", "change", "part"),
    [
        (Way(), spoil("qweight", None), "has no tensor qweight"),
        (Way(), spoil("qzeros", None), "has no tensor qzeros"),
        (Way(), spoil("qweight", lambda it: it.short()), "has numbers of the type I16"),
        (Way(), spoil("qweight", lambda it: it[:, :80]), "has numbers of the shape [32, 80]"),
        (Way(), spoil("qzeros", lambda it: it + 1), "has zeros of its own"),
        (Way(), spoil("scales", lambda it: it[:3]), "has 256 inputs in 3 groups"),
        (
            Way(order=True),
            spoil("g_idx", lambda it: torch.arange(256).int() // 60),
            "has groups that are no multiples of 32 inputs",
        ),
        (
            Way("pack-quantized"),
            spoil("weight_scale", lambda it: it[:, 0]),
            "has scales of the shape [384]",
        ),
        (
            Way("pack-quantized", scales=torch.float32),
            spoil("weight_scale", lambda it: it * 1e9),
            "scales that are too large for float16",
        ),
    ],
)
def test_damaged_matrices_are_refused(way: Way, change: Any, part: str, tmp_path: Path) -> None:
    few, _ = quantised("llama-gqa", tmp_path, way, **WIDE)
    rewrite(few, change)
    told = refused(few)
    assert part in told
    if part.startswith("has"):
        assert "model.layers.1.mlp.up_proj" in told and "bits set to off" in told


def test_a_folder_without_such_matrices_is_refused(tmp_path: Path) -> None:
    _, exact = quantised("llama-gqa", tmp_path, Way(), **WIDE)
    configure(exact, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "config.json says GPTQ, and the files have no such matrices" in refused(exact)
    with pytest.raises(ModelError, match="its quantised matrices are not known"):
        memory_need(str(exact), "cpu", "auto", 1024)


def test_matrices_without_a_place_in_the_model_are_refused(tmp_path: Path) -> None:
    """As those of experts, which are one tensor in the library's model."""
    few, _ = quantised("llama-gqa", tmp_path, Way(), **WIDE)
    rewrite(few, copied("model.layers.1.mlp.up_proj", "model.layers.1.mlp.experts.0.up_proj"))
    told = refused(few)
    assert "its matrix model.layers.1.mlp.experts.0.up_proj" in told and "has no place" in told
    assert "bits set to off" in told


# On a GPU, here computed without one


def on_gpu(kind: str, folder: Path, way: Way, **changes: Any) -> tuple[Path, Path]:
    """As `quantised`, in a type that a GPU computes in."""
    few, exact = quantised(kind, folder, way, **{**WIDE, **changes})
    configure(few, dtype="float16")
    return few, exact


def rounded_layers(model: Any) -> dict[str, FewBits]:
    found = model.model.named_modules()
    return {name: each.matrix for name, each in found if isinstance(each, RoundedLinear)}


GPU = {
    **ALL,
    "gptq, 96": Way(group=96, symmetric=False),
    "packed of 8 bits with zeros": Way("pack-quantized", 8, group=192, symmetric=False),
}
SIXES = {"hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 6}
"""Sizes in which groups of 96 and 192 are whole."""


@pytest.mark.soak(stay=14)
@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("way", GPU.values(), ids=GPU)
def test_on_a_gpu_a_model_has_the_numbers_of_its_folder(way: Way, tmp_path: Path) -> None:
    """Exactly, but for scales of float32, which are rounded to float16."""
    few, exact = on_gpu("llama-gqa", tmp_path, way, **({} if way in ALL.values() else SIXES))
    mine, other = load(few), load(exact, dtype="float32", bits="off")
    layers = rounded_layers(mine)
    assert len(layers) == 2 * 7 + 1 and layers["lm_head"].bits == 8
    for name, matrix in layers.items():
        if name != "lm_head":
            assert matrix.bits == way.bits
            assert matrix.group == (32 if way.group % 64 and way.group > 0 else 64)
            assert (matrix.zeros is None) == way.symmetric
            assert (matrix.places is None) != way.order
            expected = other.model.get_submodule(name).weight
            allowed = 2.0**-11 * expected.abs() * (way.scales == torch.float32)
            assert ((matrix.weight - expected).abs() <= allowed).all()
    title = TITLES.get(way.format, "compressed-tensors")
    assert mine.info.dtype == f"{title}, {way.bits} bits"
    assert_counted(few, mine.info, device="cuda")
    assert mine.info.parameters == other.info.parameters
    text = prompt_of(60, 160)
    assert gap(after(mine, text), after(other, text)) < 0.02


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("name", ["gptq", "awq", "gptq of 8 bits with zeros, in another order"])
def test_on_a_gpu_captured_forwards_compute_with_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one input as one matrix, unless each has an order of its own."""
    monkeypatch.setattr(captured, "TREES", (1, 4, 16))
    monkeypatch.setattr(captured, "PROMPTS", (32,))
    few, _ = quantised("qwen2", tmp_path, ALL[name], **WIDE)
    backend = load(few, context_length=80)
    prompt, wanted = prompt_of(27, 160), Generation(Sampling(0.8, seed=2), max_tokens=20)
    plain = events_of(backend, prompt, wanted)
    assert captured.capture(backend) == ""
    assert len(backend.captured.joined) == (0 if ALL[name].order else 2 * 2)
    drafters = METHODS["hd"].drafters(Databases(), target=backend)
    assert_lossless(plain, events_of(backend, prompt, wanted, drafters))


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("way", [EIGHT, WAYS["gptq of 8 bits with zeros"]])
def test_on_a_gpu_the_bits_are_the_most_of_a_weight(way: Way, tmp_path: Path) -> None:
    """Weights that are rounded again have zeros and groups as others."""
    few, exact = on_gpu("llama-gqa", tmp_path, way)
    models = {bits: load(few, bits=bits) for bits in ("auto", "8", "4")}
    assert models["8"].info == models["auto"].info
    for bits, model in models.items():
        assert_counted(few, model.info, bits, device="cuda")
    assert models["4"].info.dtype == "4 bits"
    layers = rounded_layers(models["4"])
    assert {name for name, each in layers.items() if each.bits == 8} == {"lm_head"}
    name = "model.layers.0.mlp.up_proj"
    weight = load_file(exact / "model.safetensors")[f"{name}.weight"]
    assert torch.equal(layers[name].weight, rounded(weight, 4, "cpu").weight)


@pytest.mark.usefixtures("on_a_gpu")
def test_on_a_gpu_scales_that_are_too_large_are_refused(tmp_path: Path) -> None:
    few, _ = on_gpu("llama-gqa", tmp_path, Way("pack-quantized", scales=torch.bfloat16))
    rewrite(few, spoil("weight_scale", lambda it: it * 1e9))
    assert "scales that are too large for float16" in refused(few)


def test_a_gpu_keeps_numbers_with_triton_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything else is left to transformers, and never gets other bits."""
    few, _ = quantised("llama-gqa", tmp_path, EIGHT, **WIDE)

    def packing(device: str, bits: str) -> PackedConfig | None:
        config = AutoConfig.from_pretrained(few)
        found = packing_of(config, torch.device(device), bits)
        assert hasattr(config, "quantization_config") == (found is None)
        return found

    def told(device: str, bits: str = "auto") -> int:
        return memory_need(str(few), device, "auto", 1024, bits=bits).weights

    monkeypatch.setattr(quantised_files, "core", None)
    titles = {"auto": "GPTQ, 8 bits", "8": "GPTQ, 8 bits", "4": "4 bits"}
    for bits, title in titles.items():
        found = packing("cuda:0", bits)
        assert found is not None and (found.title, found.device) == (title, "cuda:0")
    left = told("cuda:0", "off")
    assert packing("cuda:0", "off") is None and left not in (told("cuda:0"), told("cuda:0", "4"))
    monkeypatch.setattr("engine.backends.rounded.find_spec", lambda name: None)
    for device in ("cuda:0", "mps"):
        assert packing(device, "auto") is None and told(device) == left
        with pytest.raises(ValueError, match="few bits already, in a form of their own"):
            packing(device, "4")


# Numbers of 8 bits in the core


@pytest.mark.parametrize("fine", [True, False])
def test_every_set_of_instructions_multiplies_them_alike(fine: bool, level: str) -> None:
    draw = np.random.default_rng(2)
    rows = draw.integers(0, 256, (40, 352), dtype=np.uint8)
    rows[0], rows[1] = 127, 128
    groups = 11 if fine else 3
    scales = torch.from_numpy(draw.uniform(0.5, 1.5, (40, groups))).float().half().float()
    lows = torch.from_numpy(draw.integers(-90, 90, (40, groups))).float() if fine else None
    given = Numbers(8, Layout(32, 0, 32), rows, np.arange(40), scales, lows, fine)
    linear = PackedLinear(given, None, 8)
    spread = np.repeat(np.arange(groups), 32 if fine else 128)[:352]
    expected = torch.from_numpy(rows.view(np.int8)).float() * scales[:, spread]
    assert torch.equal(linear.weight, expected if lows is None else expected - lows[:, spread])
    states = torch.randn((21, 352), generator=torch.Generator().manual_seed(2))
    core.use_level("plain")
    plain = linear(states)
    core.use_level(level)
    found = linear(states)
    assert torch.equal(found, plain)
    assert torch.equal(torch.cat([linear(row[None]) for row in states]), found)
    assert gap(found, states @ linear.weight.T) < 0.01
