"""Models made to be measured: an inflated one computes the same function in a larger shape, and a
GGUF file is the same model."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from bench.__main__ import main
from bench.inflate import Comparison, compare, rounded, sizes
from engine.backends.llamacpp import alone
from engine.backends.transformers import TransformersBackend
from engine.errors import SettingError
from engine.heads.eagle3 import Target, read_head
from engine.models import inflate
from engine.models.load_transformers import load_transformers
from engine.models.loaders import load
from engine.models.shape import SHAPES, Shape, check_fits
from engine.settings import Runtime, Sampling
from engine.types import Message
from tests.conftest import EMBEDDED
from tests.support.backends import save_model
from tests.tools.conftest import Program
from training.measure import ALL, held_out_bits
from training.prepare import Document

pytestmark = pytest.mark.model

SIZES = {
    "same": (32, 48, 4, 2, 2),
    "wider": (128, 48, 4, 2, 2),
    "far wider": (512, 48, 4, 2, 2),
    "heads": (32, 48, 16, 2, 2),
    "kv heads": (32, 48, 8, 4, 2),
    "heads and kv heads": (32, 48, 16, 4, 2),
    "MLP rows": (32, 80, 4, 2, 2),
    "layers": (32, 48, 4, 2, 5),
    "all": (128, 72, 16, 4, 4),
    "all, far wider": (512, 72, 64, 8, 3),
}


def shape_of(name: str) -> Shape:
    return Shape(*SIZES[name])


def tiny(tied: bool, seed: int = 0) -> Any:
    """A random Llama whose logits differ, and whose norms, eps, heads and positions all matter."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.3, rms_norm_eps=1e-2, tie_word_embeddings=tied, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.uniform_(0.5, 1.5)
    return model


def built(config: Any, state: dict[str, Any]) -> Any:
    """The model of a config and a state dict; a missing weight is an error unless it is tied."""
    model = LlamaForCausalLM(config)
    report = model.load_state_dict(state, strict=False)
    missing = ["lm_head.weight"] if config.tie_word_embeddings else []
    assert report.missing_keys == missing and not report.unexpected_keys
    return model.eval().requires_grad_(False)


def forward(model: Any) -> Any:
    """Logits and all hidden states of two rows of text."""
    text = torch.tensor([[(37 * i + i * i + row) % 96 for i in range(40)] for row in (0, 5)])
    with torch.inference_mode():
        return model(text, output_hidden_states=True, use_cache=False)


def backend_of(model: Any, embedded: Any) -> TransformersBackend:
    info = replace(embedded.info, vocabulary_size=96, eos_ids=frozenset(), context_length=128)
    return TransformersBackend(model, embedded.tokenizer, info)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", SIZES)
def test_a_larger_model_has_the_same_logits(name: str, tied: bool) -> None:
    model = tiny(tied)
    config, state = inflate.inflate(model, shape_of(name))
    large = built(config, state)
    assert Shape.of(large.config) == shape_of(name)
    small_logits, logits = forward(model).logits, forward(large).logits
    assert small_logits.std() > 1 and len(small_logits.argmax(-1).unique()) > 10
    torch.testing.assert_close(logits, small_logits, rtol=0, atol=2e-5)
    assert torch.equal(logits.argmax(-1), small_logits.argmax(-1))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_idle_weights_are_random_except_those_that_write_into_the_stream(tied: bool) -> None:
    model = tiny(tied)
    source = model.state_dict()
    _, state = inflate.inflate(model, shape_of("all"))
    assert ("lm_head.weight" in state) is not tied
    for name, weight in state.items():
        there = int(source[name].count_nonzero()) if name in source else 0
        if any(kind in name for kind in ("embed_tokens", "o_proj", "down_proj")):
            assert weight.count_nonzero() == there, name
        else:
            assert weight.count_nonzero() > 0.999 * weight.numel(), name
    added = {name for name in state if name not in source}
    assert {name.split(".")[2] for name in added} == {"2", "3"} and len(added) == 18


HARM = {
    "a norm": ("layers.1.post_attention_layernorm", np.s_[:], 2.0),
    "the last norm": ("norm", np.s_[:4], 1.6),
    "a head": ("layers.0.self_attn.q_proj", np.s_[:8], 0.1),
    "an idle head writes": ("layers.0.self_attn.o_proj", np.s_[:, -8:], 0.5),
    "an idle row writes": ("layers.1.mlp.down_proj", np.s_[:, 48:], 0.5),
    "an added layer writes": ("layers.3.mlp.down_proj", np.s_[:], 0.5),
    "the padding is not zero": ("embed_tokens", np.s_[:, 100], 1.0),
    "no number": ("norm", np.s_[:1], float("nan")),
}
"""Weights of an inflated model that are overwritten: the layer, where, and with what."""


@pytest.mark.parametrize("harm", ["eps", *HARM])
def test_the_comparison_finds_what_is_wrong(embedded: Any, harm: str) -> None:
    model = tiny(tied=True)
    config, state = inflate.inflate(model, shape_of("all"))
    if harm == "eps":
        config.rms_norm_eps *= 4
    else:
        layer, place, value = HARM[harm]
        state[f"model.{layer}.weight"][place] = value
    large = built(config, state)
    prompts = [[3, 1, 4, 1, 5], list(range(40))]
    result = compare(backend_of(model, embedded), backend_of(large, embedded), prompts, 10)
    assert not result.holds
    assert not result.logit_difference <= 1e-3


def test_divergences_are_allowed_only_where_the_original_nearly_ties() -> None:
    def found(gap: float, dtype: torch.dtype, difference: float = 0.1) -> bool:
        return Comparison(dtype, 9, difference, [gap]).holds

    assert found(0.125, torch.bfloat16) and not found(0.5, torch.bfloat16)
    assert not found(0.125, torch.float16) and not found(0.01, torch.float32, 0.0)
    assert not found(0.125, torch.bfloat16, 0.6) and not found(0.0, torch.bfloat16, float("nan"))
    assert not Comparison(torch.float32).holds  # nothing compared is nothing shown


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((64, 48, 4, 2, 2), "power of four"),
        ((256, 48, 4, 2, 2), "power of four"),
        ((8, 48, 4, 2, 2), "power of four"),
        ((96, 48, 4, 2, 2), "power of four"),
        ((32, 40, 4, 2, 2), "intermediate 48"),
        ((32, 48, 2, 2, 2), "heads 4"),
        ((32, 48, 4, 1, 2), "kv_heads 2"),
        ((32, 48, 4, 2, 1), "layers 2"),
        ((32, 48, 4, 4, 2), "no place"),
        ((128, 48, 8, 3, 2), "no place"),
        ((32, 48, 6, 2, 2), "divisor"),
    ],
)
def test_shapes_that_cannot_hold_the_model(shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        inflate.inflate(tiny(tied=True), Shape(*shape))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "llama with biases"),
        ({"mlp_bias": True}, "llama with biases"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"model_type": "qwen3"}, "qwen3"),
    ],
)
def test_models_that_are_not_plain_llamas(changes: dict[str, Any], words: str) -> None:
    config = tiny(tied=True).config
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(SettingError, match=words):
        inflate.inflated_config(config, shape_of("all"))


def test_the_sizes_are_what_they_are_called() -> None:
    config = AutoConfig.from_pretrained(EMBEDDED)
    for name, shape in SHAPES.items():
        check_fits(config, shape)
        figures = sizes(config, shape, torch.bfloat16)
        assert figures["parameters"] / 1e9 == pytest.approx(float(name[:-1]), rel=0.08), name
        assert figures["bytes"] == 2 * figures["parameters"] and 0.2 < figures["zeros"] < 0.5
        assert shape.parameters(config.vocab_size, config.head_dim) == figures["parameters"]
    assert config.hidden_size == 256 and config.head_dim == 64


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_leaves_so_many_levels_per_group(bits: int) -> None:
    model = torch.nn.Linear(64, 6, bias=False)
    before = model.weight.detach().clone()
    rounded(model, bits)
    after = model.weight.detach()
    for old, new in zip(before, after, strict=True):
        assert len(new.unique()) <= 2**bits
        step = float(old.abs().max()) / (2 ** (bits - 1) - 0.5)
        assert float((old - new).abs().max()) <= step / 2 + 1e-6


# The command.


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take no time: for the embedded model, and for one with a hidden size of 32."""
    monkeypatch.setitem(SHAPES, "demo", Shape(1024, 1040, 8, 8, 9))
    monkeypatch.setitem(SHAPES, "mini", Shape(128, 80, 16, 4, 4))


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflate, "SHARD", 100_000)


def mini(folder: Path, *arguments: object) -> tuple[list[object], Path]:
    """The command that inflates a random Llama with a hidden size of 32, and its output."""
    source, output = save_model("llama-gqa", folder / "source"), folder / "larger"
    start = ["--shape", "128,80,16,4,4", "--model", source, "--output", output, "--device", "cpu"]
    return ["inflate", *start, *arguments], output


def index_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "model.safetensors.index.json").read_text())


def test_an_inflated_head_computes_the_same() -> None:
    head, _ = read_head(EMBEDDED / "head", Target(256, 8, 6144))
    larger = inflate.inflated_head(head.float(), Shape(1024, 1040, 8, 8, 9), seed=3)
    made = torch.Generator().manual_seed(1)
    streams = [torch.randn(1, 5, 256, generator=made) for _ in range(4)]
    padded = [functional.pad(each, (0, 768)) for each in streams]

    def attend(queries: Any, keys: Any, values: Any) -> Any:
        return functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )

    found = []
    with torch.no_grad():
        for each, (embedded, *states) in ((head, streams), (larger, padded)):
            joined = each.join(torch.cat(states, dim=-1))
            out = each(embedded, joined, torch.arange(5)[None], attend)
            found.append((out, each.norm(out)))
    (own, normed), (wide, wide_normed) = found
    assert torch.allclose(wide[..., :256], own, atol=1e-5) and not wide[..., 256:].any()
    assert torch.allclose(wide_normed[..., :256], normed, atol=1e-5)
    assert larger.fc.weight.shape == (1024, 3 * 1024)
    count = sum(each.numel() for each in larger.parameters())
    assert count == Shape(1024, 1040, 8, 8, 9).head_parameters(head_size=64)


def test_another_kind_of_head_is_left_out(tmp_path: Path, bench: Program) -> None:
    arguments, output = mini(tmp_path, "--limit", "1", "--max-new-tokens", "4")
    head = tmp_path / "source" / "head"
    head.mkdir()
    (head / "config.json").write_text('{"architectures": ["Other"]}')
    assert bench.record(*arguments)["verified"] and not (output / "head").exists()


@pytest.mark.soak
@pytest.mark.usefixtures("small_sizes")
def test_the_embedded_model_inflated_is_verified_and_keeps_its_statistics(
    tmp_path: Path, bench: Program, embedded: Any
) -> None:
    output = tmp_path / "deep" / "larger"
    output.mkdir(parents=True)
    short = ("--limit", "2", "--max-new-tokens", "12", "--device", "cpu")
    report = bench.record("inflate", "--size", "demo", "--output", output, *short)
    assert report["verified"] and report["dtype"] == "bfloat16"
    assert report["tokens"] == 24 and report["prompts"] == 2
    assert report["fingerprints_differ"] and report["same_tokenizer"] and report["can_tree"]
    names = {path.name for path in output.iterdir()}
    kept = {path.name for path in EMBEDDED.iterdir() if path.is_file()}
    assert names == {*kept, "head"} and list(output.parent.iterdir()) == [output]
    for name in kept - {"config.json", "model.safetensors"}:
        assert (output / name).read_bytes() == (EMBEDDED / name).read_bytes()
    config = json.loads((output / "config.json").read_text())
    assert (config["dtype"], config["hidden_size"]) == ("bfloat16", 1024)
    assert (output / "model.safetensors").stat().st_size > report["bytes"] - 1

    info = load_transformers(str(output), Runtime(device="cpu", dtype="bfloat16")).info
    assert (info.name, info.parameters) == ("larger", report["parameters"])
    assert info.memory_bytes == report["bytes"] and info.sampling == embedded.info.sampling
    assert info.eos_ids == embedded.info.eos_ids
    assert info.context_length == embedded.info.context_length
    # Statistics files are found by this, and what was learned is kept apart by the other.
    assert info.tokenizer_fingerprint == embedded.info.tokenizer_fingerprint
    assert info.fingerprint != embedded.info.fingerprint


@pytest.mark.parametrize(
    "text",
    ["", "1b", "512,1408,8,2", "512,1408,8,2,12,1", "512,1408,8,2,1.5", "512,1408,8,2,0"],
)
def test_texts_that_are_no_shape(tmp_path: Path, text: str, bench: Program) -> None:
    said = bench.refusal("inflate", f"--shape={text}", "--output", tmp_path / "larger")
    assert repr(text) in said and "HIDDEN,INTERMEDIATE,HEADS" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_shards")
def test_many_shards_and_an_untied_head(tmp_path: Path, bench: Program) -> None:
    short = ("--dtype", "float32", "--limit", "3", "--max-new-tokens", "8")
    command, output = mini(tmp_path, *short)
    report = bench.record(*command)
    assert report["verified"] and report["divergences"] == 0 and report["tokens"] > 8
    assert list(report["shape"].values()) == [128, 80, 16, 4, 4]
    files = sorted(path.name for path in output.glob("*.safetensors"))
    weights = index_of(output)["weight_map"]
    assert len(files) > 3 and sorted(set(weights.values())) == files
    assert "lm_head.weight" in weights


def test_a_wrong_model_ends_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflate, "WRITERS", {"embed_tokens", "o_proj"})
    command, _ = mini(tmp_path, "--dtype", "float32", "--limit", "1", "--max-new-tokens", "4")
    assert main([*map(str, command)]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out.strip().splitlines()[-1])["verified"] is False
    assert "WRONG" in captured.out and "Do not measure" in captured.err


def test_an_output_that_is_in_use_is_refused(tmp_path: Path, bench: Program) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    for output in (file, tmp_path):
        assert repr(str(output)) in bench.refusal("inflate", "--size", "0.1b", "--output", output)
    assert file.read_text() == "mine" and list(tmp_path.iterdir()) == [file]


@pytest.mark.usefixtures("small_sizes")
def test_a_full_disk_and_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Program
) -> None:
    source = save_model("llama-gqa", tmp_path / "source")
    start = ("inflate", "--size", "mini", "--model", source, "--device", "cpu", "--output")
    said = bench.refusal(*start, source / "config.json" / "larger")
    assert "cannot be written" in said
    with monkeypatch.context() as patch:
        usage = SimpleNamespace(free=1_000_000)
        patch.setattr(inflate.shutil, "disk_usage", lambda folder: usage)
        assert "free" in bench.refusal(*start, tmp_path / "larger")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.usefixtures("small_shards")
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And while it writes, no folder holds both weights and a config."""
    save, saved = inflate.save_file, []

    def interrupted(tensors: dict[str, Any], path: Path, **options: Any) -> None:
        if saved:
            raise KeyboardInterrupt
        save(tensors, path, **options)
        saved.append(path)
        assert not (path.parent / "config.json").exists() and not (tmp_path / "larger").exists()

    monkeypatch.setattr(inflate, "save_file", interrupted)
    command, _ = mini(tmp_path)
    assert main([*map(str, command)]) == 130
    assert saved and list(tmp_path.iterdir()) == [tmp_path / "source"]


@pytest.mark.usefixtures("small_sizes")
def test_as_a_program_it_says_how_far_it_is_or_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = save_model("llama-gqa", tmp_path / "source"), tmp_path / "larger"
    assert inflate.main(str(source), "mini", str(output)) == 0
    shares = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert shares == sorted(shares) and 0 <= shares[0] < shares[-1] == 1.0
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"
    assert inflate.main(str(source), "mini", str(source / "config.json" / "larger")) == 1
    assert "cannot be written" in capsys.readouterr().out.splitlines()[-1]


# GGUF files


SMALL = EMBEDDED.with_name("small")


@pytest.mark.gguf
@pytest.mark.parametrize(("kind", "allowed"), [("F16", 0.05), ("F32", 1e-4), ("Q8_0", 0.5)])
def test_a_written_model_computes_what_the_original_computes(
    kind: str, allowed: float, tmp_path: Path, training: Program
) -> None:
    file = tmp_path / "written.gguf"
    said = training("to-gguf", SMALL, file, "--type", kind)[-1]
    assert f"{file.stat().st_size:,} bytes, {kind}" in said
    one, other = load(str(file), Runtime(threads=1)), load(str(SMALL), Runtime(dtype="float32"))
    assert one.info.dtype == kind
    assert one.info.tokenizer_fingerprint == other.info.tokenizer_fingerprint
    assert one.info.eos_ids == other.info.eos_ids
    assert one.info.sampling == other.info.sampling != Sampling()
    asked = [Message("user", "Why is the sky blue?")]
    assert one.render(asked) == other.render(asked)
    tokens = one.tokenize(one.render(asked))
    found, wanted = alone(one, tokens), other.alone(tokens)
    assert np.abs(found - wanted).max() < allowed < np.ptp(wanted)


@pytest.mark.gguf
def test_what_cannot_be_written_is_told(tmp_path: Path, training: Program) -> None:
    file = tmp_path / "written.gguf"
    assert "no type 'Q9_9'" in training.refusal("to-gguf", str(SMALL), str(file), "--type", "Q9_9")
    assert not file.exists()


@pytest.mark.soak(stay=1)
@pytest.mark.gguf
@pytest.mark.parametrize("name", ["target", "mid", "small"])
def test_the_shipped_files_are_those_of_the_folders_in_q8_0(
    name: str, gguf_files: dict[str, Path]
) -> None:
    """Tokenizer, chat template, sampler and shape: all but what says the type of the weights."""

    def header(path: Path) -> dict[str, object]:
        fields = gguf.GGUFReader(path).fields
        found = {key: field.contents() for key, field in fields.items() if field.types}
        for key in ("general.file_type", "general.quantization_version", "GGUF.kv_count"):
            found.pop(key, None)
        return found

    shipped = EMBEDDED.parent / f"{name}.gguf"
    assert header(shipped) == header(gguf_files[f"{name}-F16"])
    types, made = (
        {each.name: each.tensor_type.name for each in gguf.GGUFReader(path).tensors}
        for path in (shipped, gguf_files[f"{name}-Q8_0"])
    )
    assert types == made and "Q8_0" in types.values()


@pytest.mark.gguf
def test_held_out_bits_of_a_gguf_file_are_those_of_its_folder(tmp_path: Path) -> None:
    texts = ("The boat came home before the storm.", "A garden has many small things in it. " * 9)
    documents = [Document(source="prose", text=text) for text in texts]
    cpu = torch.device("cpu")
    folder, file = (
        held_out_bits(path, documents, cpu)[ALL] for path in (SMALL, SMALL.with_suffix(".gguf"))
    )
    assert file.per_byte == pytest.approx(folder.per_byte, rel=0.01) and file.per_byte > 0.5
    assert file.bytes == folder.bytes and file.documents == 2
    with pytest.raises(SettingError, match="There is no folder"):
        held_out_bits(tmp_path / "alone.gguf", documents, cpu)
