"""What states take is read from a config.json, however a family names its sizes."""

from typing import Any

import pytest

from engine.models.state_memory import FLOAT32, KEPT, layers_of, state_bytes

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
