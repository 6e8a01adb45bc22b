"""GGUF files whose weights the compiled core multiplies: the numbers are those of the file, the
forwards those of llama.cpp, and drafts change no token."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.backends.native_forward import NativeForwards
from engine.backends.quantised import Layout, Numbers, PackedLinear
from engine.decode import never
from engine.errors import ModelError
from engine.models import formats, gguf_files, load_packed
from engine.models.file_heads import UNUSED
from engine.models.load_packed import KEPT, File, Foreign, built
from engine.models.loaders import device, load, need
from engine.models.memory import DraftingForecast
from engine.native import core
from engine.settings import Generation, Runtime, Sampling
from engine.types import Message
from tests.conftest import EMBEDDED
from tests.support.backends import after, assert_exact
from tests.support.gguf_files import BYTES, BYTES_TYPES, WORDS, rewritten, weights, write_gguf
from training.gguf import quantize, write_model

pytestmark = [pytest.mark.model, pytest.mark.gguf]
LAYERS, WIDTH, INNER, HEADS, SHARED, SIZE = 2, 128, 256, 4, 2, 32
EIGHT = Runtime(bits="8")


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The middle demonstration model in float16: the core computes all of its forwards."""
    file = tmp_path_factory.mktemp("packed") / "exact.gguf"
    write_model(EMBEDDED.parent / "mid", file)
    return file


def file_of(folder: Path, family: str, kinds: str = "", width: int = WIDTH, **values: Any) -> Path:
    """A model of two layers over single bytes. `kinds` are what it has besides: "b" for biases of
    queries, keys and values, "n" for norms of queries and keys, "o" for an output matrix, "f" for
    factors of its frequencies."""
    draw = np.random.default_rng(3)
    arrays = {
        "token_embd.weight": weights(draw, len(WORDS), width),
        "output_norm.weight": 1 + weights(draw, width),
    }
    if "o" in kinds:
        arrays["output.weight"] = weights(draw, len(WORDS), width)
    if "f" in kinds:
        arrays["rope_freqs.weight"] = np.linspace(1, 8, SIZE // 2, dtype=np.float32)
    for layer in range(LAYERS):
        made = {
            "attn_norm": 1 + weights(draw, width),
            "ffn_norm": 1 + weights(draw, width),
            "attn_q": weights(draw, HEADS * SIZE, width),
            "attn_k": weights(draw, SHARED * SIZE, width),
            "attn_v": weights(draw, SHARED * SIZE, width),
            "attn_output": weights(draw, width, HEADS * SIZE),
            "ffn_gate": weights(draw, INNER, width),
            "ffn_up": weights(draw, INNER, width),
            "ffn_down": weights(draw, width, INNER),
        }
        if "n" in kinds:
            made |= {f"attn_{name}_norm": 1 + weights(draw, SIZE) for name in "qk"}
        arrays |= {f"blk.{layer}.{name}.weight": array for name, array in made.items()}
        if "b" in kinds:
            for name in "qkv":
                size = len(made[f"attn_{name}"])
                arrays[f"blk.{layer}.attn_{name}.bias"] = weights(draw, size)
    own = {
        "context_length": 256,
        "embedding_length": width,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": SHARED,
        "attention.key_length": SIZE,
        "attention.value_length": SIZE,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": SIZE,
        "rope.freq_base": 10000.0,
        **values,
    }
    header = BYTES | {f"{family}.{name}": value for name, value in own.items()}
    return write_gguf(folder / f"{family}-{kinds}.gguf", family, header, arrays, BYTES_TYPES)


EXPERTS, USED, NARROW = 8, 3, 96


def mixture_of(folder: Path, family: str, **values: Any) -> Path:
    """The same with experts."""
    inner = "feed_forward_length" if family == "llama" else "expert_feed_forward_length"
    own = {"expert_count": EXPERTS, "expert_used_count": USED, inner: NARROW, **values}
    file = file_of(folder, family, "" if family == "llama" else "n", **own)
    draw, arrays = np.random.default_rng(4), dict[str, Any]()
    shapes = {"gate": (NARROW, WIDTH), "up": (NARROW, WIDTH), "down": (WIDTH, NARROW)}
    for layer in range(LAYERS):
        name = f"blk.{layer}.ffn_"
        arrays[f"{name}gate_inp.weight"] = weights(draw, EXPERTS, WIDTH)
        for part, shape in shapes.items():
            arrays[f"{name}{part}.weight"] = None
            arrays[f"{name}{part}_exps.weight"] = weights(draw, EXPERTS, *shape)
    return rewritten(file, folder / f"{family}-experts.gguf", arrays=arrays)


def rows_of(kind: Kind, seed: int = 0) -> tuple[Any, Any]:
    """Rows of a type as the file has them, and the weights that they stand for."""
    draw = np.random.default_rng(seed)
    if kind == Kind.Q4_K:  # which the library of the format does not write
        blocks = draw.integers(0, 256, (40, 2, 144), dtype=np.uint8)
        blocks[..., :4] = draw.uniform(1e-5, 1e-2, (40, 2, 2)).astype(np.float16).view(np.uint8)
        rows = blocks.reshape(40, -1)
    else:
        rows = gguf.quantize(draw.standard_normal((40, 512)).astype(np.float32), kind)
    return rows, torch.from_numpy(gguf.dequantize(rows, kind))


@pytest.mark.parametrize("kind", KEPT)
def test_the_numbers_of_a_file_are_kept(kind: Kind) -> None:
    rows, expected = rows_of(kind)
    found = PackedLinear(KEPT[kind].read(rows, np.arange(40)), None, 8)
    assert found.bits == KEPT[kind].bits
    if kind == Kind.Q4_K:  # a scale is a product of two numbers there
        spread = 15 * found.scales.float().abs().max()
        assert float((found.weight - expected).abs().max()) < float(spread) / 1000
    else:
        assert torch.equal(found.weight, expected)
    kept = found.numbers.nbytes + found.scales.nbytes
    assert kept == 48 * 512 * found.bits // 8 + 48 * 16 * KEPT[kind].scales


def test_rows_that_are_no_blocks_are_refused() -> None:
    rows, order = np.zeros((16, 8 * 20), np.uint8), np.arange(16)
    linear = PackedLinear(torch.ones(16, 256), None, 4)
    linear.matrix.place(rows, order, 20, 4, 16, 16, 1)
    for wrong in (
        (rows[:, :140], order, 20, 4, 16, 16),
        (rows, order[:15], 20, 4, 16, 16),
        (rows, order + 1, 20, 4, 16, 16),
        (rows, order - 1, 20, 4, 16, 16),
        (rows, order, 20, 5, 16, 16),
        (rows, order, 20, 4, 16, 0),
        (rows, order, 20, 4, 16, 3),
        (rows, order, 10, 4, 6, 6),
        (rows, order, 0, 0, 0, 16),
    ):
        with pytest.raises((ValueError, TypeError), match="not known|do not fit|missing|incompat"):
            linear.matrix.place(*wrong, 1)


@pytest.mark.parametrize("kind", KEPT)
def test_every_set_of_instructions_multiplies_them_alike(kind: Kind, level: str) -> None:
    linear = PackedLinear(KEPT[kind].read(rows_of(kind)[0], np.arange(40)), None, 8)
    states = torch.randn((21, 512), generator=torch.Generator().manual_seed(2))
    core.use_level("plain")
    expected = linear(states)
    core.use_level(level)
    found = linear(states)
    assert torch.equal(found, expected)
    assert torch.equal(torch.cat([linear(row[None]) for row in states]), found)
    rounded = states @ linear.weight.T
    assert float((found - rounded).norm() / rounded.norm()) < 0.01


def test_extreme_numbers_with_lows_do_not_overflow() -> None:
    rows = np.full((16, 8 * 20), 255, np.uint8)
    scales = torch.ones(16, 8), torch.ones(16, 8)
    most = Numbers(4, Layout(20, 4, 16, 16), rows, np.arange(16), *scales)
    linear = PackedLinear(most, None, 8)
    for sign in (1.0, -1.0):
        states = torch.full((5, 256), sign)
        assert torch.allclose(linear(states), states @ linear.weight.T, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "kinds", "width"),
    [
        ("llama", "", 128),
        ("llama", "of", 128),
        ("qwen2", "b", 128),
        ("qwen2", "bo", 128),
        ("qwen3", "n", 128),
        ("qwen3", "no", 128),
        ("llama", "o", 160),
    ],
)
def test_a_model_computes_what_llama_cpp_computes(
    family: str, kinds: str, width: int, tmp_path: Path
) -> None:
    file = file_of(tmp_path, family, kinds, width)
    mine, other = load(str(file), EIGHT), load(str(file), Runtime(head="off"))
    assert isinstance(mine.captured, NativeForwards) and mine.info.note == ""  # type: ignore[attr-defined]
    assert mine.info.can_tree and mine.info.leaves is None
    assert mine.info.tokenizer_fingerprint == other.info.tokenizer_fingerprint
    factors = SIZE // 2 if "f" in kinds else 0
    assert mine.info.parameters == other.info.parameters - factors
    assert mine.info.memory_bytes == need(str(file), EIGHT).weights
    text = mine.tokenize("the cat sat on the mat, and the dog saw it. " * 3)
    assert text == other.tokenize("the cat sat on the mat, and the dog saw it. " * 3)
    left, right = after(mine, text), after(other, text)
    assert np.linalg.norm(left - right) < 0.15 * np.linalg.norm(right)


@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_a_mixture_computes_what_llama_cpp_computes(family: str, kind: str, tmp_path: Path) -> None:
    """As files of the architecture "llama" with experts are Mixtral's."""
    file = tmp_path / f"{kind}.gguf"
    quantize(mixture_of(tmp_path, family), file, kind, 1)
    mine, other = load(str(file), EIGHT), load(str(file), Runtime(head="off", bits="off"))
    assert isinstance(mine.captured, NativeForwards) and mine.info.note == ""  # type: ignore[attr-defined]
    assert mine.info.exact and mine.info.parameters == other.info.parameters
    for info in (mine.info, other.info):
        assert (info.used_experts, info.experts) == (3, 8)
    assert mine.info.memory_bytes == need(str(file), EIGHT).weights
    experts = mine.model.model.layers[1].mlp.experts  # type: ignore[attr-defined]
    stored = File(file).tensor("blk.1.ffn_down_exps.weight")
    assert torch.equal(experts.down_proj.weight, load_packed.weights_of(stored))
    text = mine.tokenize("the cat sat on the mat, and the dog saw it. " * 3)
    gaps = []
    for length in range(len(text) - 4, len(text) + 1):
        left, right = after(mine, text[:length]), after(other, text[:length])
        gaps.append(np.linalg.norm(left - right) / np.linalg.norm(right))
    assert np.median(gaps) < 0.2
    assert_exact(mine, text[:20], Generation(Sampling(0.7, seed=5), max_tokens=40))


def test_a_router_of_a_mixture_has_no_few_bits(tmp_path: Path, eager: None) -> None:
    """It is stored in float32, and no reason to leave the file to llama.cpp."""
    file = tmp_path / "it.gguf"
    quantize(mixture_of(tmp_path, "qwen3moe"), file, "Q8_0", 1)
    stored = File(file).tensor("blk.0.ffn_gate_inp.weight")
    assert Kind(stored.kind) == Kind.F32 and load_packed.suits(file, Runtime(threads=1))
    gate = built(File(file), 64, 8).model.layers[0].mlp.gate
    assert torch.equal(gate.weight, load_packed.weights_of(stored))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K_M"])
def test_a_file_of_few_bits_writes_the_same_with_drafts(
    kind: str, exact: Path, tmp_path: Path
) -> None:
    file = tmp_path / f"{kind}.gguf"
    quantize(exact, file, kind, 1)
    mine, other = load(str(file), EIGHT), load(str(file), Runtime(head="off"))
    assert mine.info.dtype == kind and mine.info.weights == f"transformers, {kind}"
    assert mine.info.exact and not other.info.exact
    assert mine.info.fingerprint != other.info.fingerprint
    assert need(str(file), EIGHT).weights == mine.info.memory_bytes
    assert mine.info.sampling == other.info.sampling
    text = mine.tokenize("The sun rises in the east and sets in the")
    left, right = after(mine, text), after(other, text)
    assert np.linalg.norm(left - right) < 0.05 * np.linalg.norm(right)
    assert_exact(mine, text, Generation(Sampling(0.7, seed=5), max_tokens=40))


def test_fewer_bits_than_those_of_the_file_round_again(exact: Path) -> None:
    eight, four = load(str(exact), EIGHT), load(str(exact), Runtime(bits="4"))
    assert (eight.info.dtype, four.info.dtype) == ("F16", "F16 in 4 bits")
    assert four.info.memory_bytes < eight.info.memory_bytes
    assert need(str(exact), Runtime(bits="4")).weights == four.info.memory_bytes
    assert device(str(exact), Runtime(bits="4")) == "cpu"


def test_the_parts_of_a_split_file_are_one_model(exact: Path, tmp_path: Path) -> None:
    """By their tensors: the last one holds the last layer."""
    whole = File(exact)
    for number in (1, 2):
        gone = [each.name for each in whole.tensors if ("blk.1." in each.name) == (number == 1)]
        part = tmp_path / f"it-{number:05}-of-00002.gguf"
        rewritten(exact, part, arrays=dict.fromkeys(gone))
    found = File(tmp_path / "it-00001-of-00002.gguf")
    assert {each.name for each in found.tensors} == {each.name for each in whole.tensors}
    left, right = (built(each, 64, 8).state_dict() for each in (found, whole))
    assert all(torch.equal(left[name], right[name]) for name in right)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor that verifies drafts cheaply, small files are computed by the core as well."""
    monkeypatch.setattr(gguf_files, "SMALL_FILE", 0)
    monkeypatch.setattr(formats, "verifies_cheaply", lambda: True)
    monkeypatch.setattr(load_packed, "LARGER", 1.5)


def test_without_a_choice_the_core_computes_what_it_computes_sooner(
    exact: Path, tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, auto = tmp_path / "it.gguf", Runtime(threads=1)
    quantize(exact, file, "Q8_0", 1)

    def kind(runtime: Runtime = auto, path: Path = file) -> str:
        return load(str(path), runtime).info.kind

    assert kind() == "transformers"
    assert need(str(file), auto) == need(str(file), EIGHT)
    assert kind(replace(auto, bits="off")) == "llama.cpp", "if that is chosen"
    assert kind(replace(auto, cache_type="f16")) == "llama.cpp", "which alone has this setting"
    assert kind(path=exact) == "llama.cpp", "as its weights would be rounded"
    head = tmp_path / "mtp-it.gguf"
    head.write_bytes(b"")
    named = replace(auto, head=str(head))
    assert not load_packed.suits(file, named), "such a head drafts in llama.cpp only"
    assert load_packed.suits(file, auto), "one that lies there does not decide"
    head.unlink()
    monkeypatch.setattr(load_packed, "LARGER", 0.5)
    assert kind() == "llama.cpp", "as it would take more memory"
    monkeypatch.undo()
    assert kind() == "llama.cpp", "as it is small"


def test_what_the_core_turns_out_not_to_compute_is_left_to_llama_cpp(
    exact: Path, tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "it.gguf"
    quantize(exact, file, "Q8_0", 1)
    monkeypatch.setattr(load_packed, "rows_of", lambda count, heads: np.arange(count))
    info = load(str(file), Runtime(threads=1)).info
    assert info.kind == "llama.cpp"
    assert "as the compiled core cannot: its logits differ from those of llama.cpp" in info.note
    assert gguf_files.may_be_in_core(file)
    file.write_bytes(b"GGUF, or nearly")
    assert not gguf_files.may_be_in_core(file) and not load_packed.suits(file, Runtime())


def test_what_is_not_used_is_told(tmp_path: Path) -> None:
    """A file that says it is a head, and conversations without a template."""
    file = file_of(tmp_path, "llama", "")
    bare = rewritten(file, tmp_path / "bare.gguf", values={"tokenizer.chat_template": None})
    assert load(str(bare), EIGHT).info.note.startswith("The file brings no chat template")
    assert need(str(bare), EIGHT).forecast == DraftingForecast()
    file.rename(tmp_path / "eagle3-bare.gguf")
    problem = f"eagle3-bare.gguf does not fit: {UNUSED}"
    for runtime, told in ((EIGHT, problem), (replace(EIGHT, head="off"), "")):
        head, forecast = load(str(bare), runtime).info.head, need(str(bare), runtime).forecast
        assert forecast == DraftingForecast(problem=told)
        assert (head and (head.name, head.note)) == (("EAGLE-3", f"{told}.") if told else None)


def test_a_conversation_has_the_words_of_the_file(exact: Path) -> None:
    mine, other = load(str(exact), EIGHT), load(str(exact), Runtime(head="off"))
    messages = [Message("user", "Tell me about the sea.")]
    assert mine.render(messages) == other.render(messages)
    mine.prefill(mine.tokenize(mine.render(messages)), never)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"rope.scaling.type": "yarn"}, r"positions are scaled \(yarn\)"),
        ({"expert_count": 4, "expert_shared_count": 1}, "llama.expert_shared_count"),
        ({"rope.dimension_count": 16}, "turn in part"),
        ({"attention.sliding_window": [64, 64]}, "attention.sliding_window .*differs"),
        ({"attention.head_count_kv": [2, 1]}, "attention.head_count_kv .*differs"),
    ],
)
def test_what_the_core_would_compute_otherwise_is_refused(
    values: dict[str, Any], part: str, tmp_path: Path
) -> None:
    file = file_of(tmp_path, "llama", "", **values)
    with pytest.raises(Foreign, match=part):
        File(file).config(256)


def test_a_refusal_says_what_to_do(tmp_path: Path) -> None:
    file = file_of(tmp_path, "llama", "", **{"rope.scaling.type": "yarn"})
    for ask in (load, need):
        with pytest.raises(ModelError, match=r"scaled \(yarn\).*Set the bits to off"):
            ask(str(file), EIGHT)


def test_a_file_that_the_core_computes_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a family would be whose rows had another order than is known here."""
    monkeypatch.setattr(load_packed, "rows_of", lambda count, heads: np.arange(count))
    file = file_of(tmp_path, "llama", "")
    with pytest.raises(ModelError, match=r"differ from those of llama\.cpp by .*to off"):
        load(str(file), EIGHT)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"blk.0.attn_q_norm.weight": np.ones(32)}, r"blk\.0\.attn_q_norm\.weight has no place"),
        ({"blk.1.ffn_up.weight": None}, r"no tensor for model\.layers\.1\.mlp\.up_proj\.weight"),
        (
            {"blk.1.ffn_up.weight": np.ones((128, 128))},
            r"ffn_up\.weight has the shape \(128, 128\)",
        ),
    ],
)
def test_tensors_that_are_not_known_or_missing_are_refused(
    changes: dict[str, Any], part: str, tmp_path: Path
) -> None:
    arrays = {n: None if each is None else each.astype("f") for n, each in changes.items()}
    file = rewritten(file_of(tmp_path, "llama", ""), tmp_path / "changed.gguf", arrays=arrays)
    with pytest.raises(Foreign, match=part):
        built(File(file), 256, 8)


def test_other_models_are_refused(tmp_path: Path) -> None:
    qwen = mixture_of(tmp_path, "qwen3moe", expert_feed_forward_length=72)
    with pytest.raises(Foreign, match="experts have other sizes than whole groups of 32"):
        built(File(qwen), 256, 8)
    dense = file_of(tmp_path, "qwen2", "b", expert_count=4)
    gemma = rewritten(dense, tmp_path / "gemma.gguf", architecture="gemma2")
    for file, part in ((dense, "qwen2 models with experts are"), (gemma, "it is a gemma2 model")):
        with pytest.raises(Foreign, match=part):
            File(file).config(256)
