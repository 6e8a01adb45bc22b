"""What will draft for a model by the headers of its files, sound and damaged ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.models.outlook import Outlook, of_config, of_gguf
from engine.models.prediction_layers import prediction
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
        ("llama", {"block_count": 3}, Outlook()),
        ("mamba", {"ssm__state_size": 16}, Outlook(chains=True)),
        ("lfm2", {"shortconv__l_cache": 3}, Outlook(chains=True)),
        ("rwkv7", {"wkv__head_size": 64}, Outlook(chains=True)),
        ("qwen2vl", {"rope__dimension_sections": [1, 2, 3, 4]}, Outlook(chains=True)),
        (
            "qwen35",
            {"ssm__state_size": 16, "nextn_predict_layers": 1},
            Outlook(True, "MTP, in its file"),
        ),
        ("glm4moe", {"nextn_predict_layers": 1}, Outlook(False, "MTP, in its file")),
        ("glm4moe", {"nextn_predict_layers": 0}, Outlook()),
    ],
)
def test_what_the_header_of_a_gguf_file_tells(
    tmp_path: Path, kind: str, values: dict[str, Any], found: Outlook
) -> None:
    assert of_gguf(made(tmp_path, kind, **values)) == found


def test_a_head_beside_a_file_is_named(tmp_path: Path) -> None:
    path = made(tmp_path, "gemma4")
    assert of_gguf(path, ["mtp-gemma.gguf"]) == Outlook(head="in mtp-gemma.gguf, beside it")


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = made(tmp_path, "llama")
    assert of_gguf(path) == Outlook()
    other = made(tmp_path, "mamba", ssm__state_size=16)
    path.write_bytes(other.read_bytes())
    assert of_gguf(path) == Outlook(chains=True)


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
        assert found in (None, Outlook())
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
    assert of_config(config, tmp_path) == Outlook(chains)


def test_a_head_in_the_folder_and_prediction_layers_in_its_files(tmp_path: Path) -> None:
    ahead = {"mtp_num_hidden_layers": 1}
    assert "do not hold it" in of_config(ahead, tmp_path).problem
    joint = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0.mlp.up_proj")
    found = prediction([f"mtp.{name}.weight" for name in joint], 1)
    assert of_config(ahead, tmp_path, found) == Outlook(head="MTP, in its files")
    broken = of_config(ahead, tmp_path, prediction(["mtp.fc.weight"], 1))
    assert not broken.head and "layer 0 has no tensor" in broken.problem
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text("{}")
    assert of_config({}, tmp_path) == Outlook(head="in its folder head")
    assert of_config(ahead, tmp_path, found) == Outlook(head="in its folder head")
