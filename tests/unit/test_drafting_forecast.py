"""What files tell before a model is loaded: what will draft for it, the memory of its states."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.models.gguf_files import forecast_of as of_gguf
from engine.models.memory import FLOAT32, KEPT, DraftingForecast, layers_of, prediction, state_bytes
from engine.models.memory import forecast_of as of_config
from tests.conftest import EMBEDDED
from tests.support.gguf_files import write_gguf

TOKENS = {
    "tokenizer.ggml.tokens": ["a", "bc", ""],
    "tokenizer.ggml.scores": [1.0, 2.0],
    "general.tags": ["some", "tags"],
    "general.weight": 1.5,
    "general.flag": True,
}


def made(folder: Path, kind: str, **values: Any) -> Path:
    """A file of that architecture with values behind its tokens, where writers may put them."""
    keys = {f"{kind}.{name.replace('__', '.')}": value for name, value in values.items()}
    numbers = {"x": np.zeros(4, np.float32)}
    return write_gguf(folder / f"{kind}.gguf", kind, {**TOKENS, **keys}, numbers)


@pytest.mark.parametrize(
    ("kind", "values", "found"),
    [
        ("llama", {"block_count": 3}, DraftingForecast()),
        ("mamba", {"ssm__state_size": 16}, DraftingForecast(chains=True)),
        ("lfm2", {"shortconv__l_cache": 3}, DraftingForecast(chains=True)),
        ("rwkv7", {"wkv__head_size": 64}, DraftingForecast(chains=True)),
        ("qwen2vl", {"rope__dimension_sections": [1, 2, 3, 4]}, DraftingForecast(chains=True)),
        (
            "qwen35",
            {"ssm__state_size": 16, "nextn_predict_layers": 1},
            DraftingForecast(True, "MTP, in its file"),
        ),
        ("glm4moe", {"nextn_predict_layers": 1}, DraftingForecast(False, "MTP, in its file")),
        ("glm4moe", {"nextn_predict_layers": 0}, DraftingForecast()),
    ],
)
def test_what_the_header_of_a_gguf_file_tells(
    tmp_path: Path, kind: str, values: dict[str, Any], found: DraftingForecast
) -> None:
    assert of_gguf(made(tmp_path, kind, **values)) == found


def test_a_head_beside_a_file_is_named(tmp_path: Path) -> None:
    path = made(tmp_path, "gemma4")
    assert of_gguf(path, ["mtp-gemma.gguf"]) == DraftingForecast(head="in the file mtp-gemma.gguf")


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = made(tmp_path, "llama")
    assert of_gguf(path) == DraftingForecast()
    other = made(tmp_path, "mamba", ssm__state_size=16)
    path.write_bytes(other.read_bytes())
    assert of_gguf(path) == DraftingForecast(chains=True)


def test_a_damaged_header_tells_nothing(tmp_path: Path) -> None:
    """Wherever it is cut, whatever stands in it: no error, no endless list."""
    whole = EMBEDDED.with_suffix(".gguf").read_bytes()[:2000]
    path = tmp_path / "a.gguf"
    for end in (0, 3, 8, 23, 24, 40, 100, 700, 1999):
        path.write_bytes(whole[:end])
        assert of_gguf(path) is None
    assert of_gguf(tmp_path / "none.gguf") is None
    whole = made(tmp_path, "llama", block_count=3).read_bytes()
    unread = 0
    for at in range(len(whole) - 8):
        path.write_bytes(whole[:at] + b"\xff" * 8 + whole[at + 8 :])
        found = of_gguf(path)
        assert found in (None, DraftingForecast())
        unread += found is None
    assert unread > len(whole) // 4


@pytest.mark.parametrize(
    ("config", "chains"),
    [
        ({}, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"layer_types": ["linear_attention", "full_attention"]}, True),
        ({"model_type": "mamba", "num_hidden_layers": 2}, True),
        ({"full_attention_interval": 4, "num_hidden_layers": 8}, True),
    ],
)
def test_what_a_config_tells(tmp_path: Path, config: dict[str, Any], chains: bool) -> None:
    assert of_config(config, tmp_path) == DraftingForecast(chains)


def test_a_head_in_the_folder_and_prediction_layers_in_its_files(tmp_path: Path) -> None:
    ahead = {"mtp_num_hidden_layers": 1}
    assert "do not hold it" in of_config(ahead, tmp_path).problem
    joint = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0.mlp.up_proj")
    found = prediction([f"mtp.{name}.weight" for name in joint], 1)
    assert of_config(ahead, tmp_path, found) == DraftingForecast(head="MTP, in its files")
    broken = of_config(ahead, tmp_path, prediction(["mtp.fc.weight"], 1))
    assert not broken.head and "layer 0 has no tensor" in broken.problem
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text("{}")
    assert of_config({}, tmp_path) == DraftingForecast(head="in its folder head")
    assert of_config(ahead, tmp_path, found) == DraftingForecast(head="in its folder head")


# prediction layers, by the names of their tensors

OWN = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
AROUND = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
APART = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
PARTS = {"fc", "embedding", "hidden", "norm"}


@pytest.mark.parametrize("place", ["mtp", "model.mtp"])
def test_layers_that_share_what_is_around_them(place: str) -> None:
    own = [f"{place}.{name}.weight" for name in AROUND]
    own += [f"{place}.layers.{number}.mlp.up_proj.weight" for number in (0, 1)]
    found = prediction([*OWN, *own], layers=1)
    assert found is not None and found.names == set(own) and not found.problem
    assert found.shared and found.joints[0].keys() == PARTS
    assert [dict(each) for each in found.layers] == [
        {"mlp.up_proj.weight": f"{place}.layers.{number}.mlp.up_proj.weight"} for number in (0, 1)
    ]


def test_layers_behind_those_of_the_model() -> None:
    own = [
        f"model.layers.{number}.{name}.weight"
        for number in (2, 3)
        for name in (*APART, "mlp.up_proj", "embed_tokens", "shared_head.head")
    ]
    # Another part of the model has more layers than the part that writes.
    seeing = [f"vision.layers.{number}.mlp.up_proj.weight" for number in range(5)]
    found = prediction([*OWN, *own, *seeing], layers=2)
    assert found is not None and found.names == set(own) and not found.problem
    assert not found.shared and [each.keys() for each in found.joints] == [PARTS, PARTS]
    assert [set(each) for each in found.layers] == [{"mlp.up_proj.weight"}] * 2


def test_models_without_any() -> None:
    assert prediction(OWN, layers=1) is None
    assert prediction([*OWN, "model.layers.1.mlp.up_proj.weight", "smtp.weight"], 1) is None


def test_what_is_missing_or_not_known_is_said() -> None:
    own = [f"mtp.{name}.weight" for name in AROUND] + ["mtp.layers.0.mlp.up_proj.weight"]
    for name in own:
        found = prediction([each for each in own if each != name], layers=1)
        assert found is not None
        assert (
            name.removeprefix("mtp.") in found.problem or "no tensors of its own" in found.problem
        )
    found = prediction([*OWN, "model.mtp_layers.0.input_proj.weight"], layers=1)
    assert found is not None and "(model.mtp_layers.0.input_proj.weight, ...)" in found.problem


# states, by the sizes in a config.json

QWEN: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 32,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


@pytest.mark.parametrize(
    ("config", "attention", "states"),
    [
        ({"num_hidden_layers": 4}, 4, 0),
        ({"n_layer": 4}, 4, 0),
        ({"num_hidden_layers": 4, "model_type": "mamba2"}, 0, 4),
        ({"num_hidden_layers": 4, "model_type": "falcon_h1"}, 4, 4),
        ({"num_hidden_layers": 8, "full_attention_interval": 4}, 2, 6),
        ({"num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 1}, 2, 6),
        ({"num_hidden_layers": 8, "attn_layer_indices": [1, 2, 5]}, 3, 5),
        ({"num_hidden_layers": 8, "full_attn_idxs": [3]}, 1, 7),
        ({"num_hidden_layers": 5, "hybrid_override_pattern": "M-M*-"}, 1, 2),
        ({"layer_types": ["linear_attention", "moe", "full_attention", "conv"]}, 1, 2),
        ({"layers_block_type": ["mamba", "hybrid", "attention"]}, 2, 2),
        ({"layer_types": ["sliding_attention", "full_attention"]}, 2, 0),
    ],
)
def test_which_layers_have_attention_and_which_a_state(
    config: dict[str, Any], attention: int, states: int
) -> None:
    assert layers_of(config) == (attention, states)


def test_the_states_of_a_hybrid_of_nine_billion_parameters() -> None:
    """24 layers of 32 heads of 128 x 128, and 4 inputs of 8,192 channels each."""
    config = {**QWEN, "full_attention_interval": 4}
    one = 24 * (32 * 128 * 128 + 4 * 8192) * FLOAT32
    assert state_bytes(config) == one * KEPT and one == 53_477_376


def test_a_model_of_attention_alone_keeps_none() -> None:
    assert state_bytes({"num_hidden_layers": 4}) == 0


def test_sizes_that_are_not_told_are_missed() -> None:
    with pytest.raises(KeyError, match="linear_value_head_dim"):
        state_bytes({"linear_key_head_dim": 8, "layer_types": ["linear_attention"],
                     "linear_num_key_heads": 2})  # fmt: skip
    with pytest.raises(ValueError, match="hidden_size is 0"):
        state_bytes({"conv_L_cache": 3, "hidden_size": 0, "layer_types": ["conv"]})
