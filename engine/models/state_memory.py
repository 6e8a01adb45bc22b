"""What the states of recurrent layers take, told from a config.json alone.

A state has the same size however long the text is. But several are kept: that of the text, marks to
go back to, and one for each row of a chain that is verified (engine/backends/caches.py). Families
name the same sizes differently, so each is looked for by all of its names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

CHAIN = 16
"""Levels of a chain at most, where the state after each is kept."""
MARKS = 3
KEPT = 1 + MARKS + CHAIN + 1
"""States of a layer at most: the current one, marks, and one for each row of a chain, its root
included."""
FLOAT32 = 4
"""Recurrences are computed and kept in float32, whatever the weights are."""
STATE, BOTH, ATTENTION = "state", "both", "attention"
STATES = {"linear_attention", "conv", "mamba", "mamba2"}
HYBRIDS = {"hybrid", "parallel", "hybrid_sliding"}
PATTERN = {"M": STATE, "*": ATTENTION}
"""What the letters of Nemotron's patterns mean; the others have neither."""
PURE = {"mamba", "mamba2", "falcon_mamba"}
PARALLEL = {"falcon_h1"}
"""Types of models all of whose layers keep a state, or have attention as well."""


def layers_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """How many layers of a model have attention, and how many keep a state.

    Where the config tells no kinds, all have attention. Raises KeyError, TypeError or ValueError.
    """
    listed = config.get("layer_types") or config.get("layers_block_type") or ()
    count = len(listed) or whole(config, "num_hidden_layers", "n_layer")
    model = config.get("model_type")
    if model in PURE:
        return 0, count
    if model in PARALLEL:
        return count, count
    kinds = [kind_of(str(kind)) for kind in listed] or kinds_of(config, count)
    attention = sum(kind in (ATTENTION, BOTH) for kind in kinds)
    return attention, sum(kind in (STATE, BOTH) for kind in kinds)


def kinds_of(config: Mapping[str, Any], count: int) -> Sequence[str]:
    """The kind of each layer, where the config does not list them: STATE, ATTENTION, or neither."""
    if pattern := config.get("hybrid_override_pattern"):
        return [PATTERN.get(letter, "") for letter in pattern]
    if "attn_layer_period" in config:
        period, offset = int(config["attn_layer_period"]), int(config["attn_layer_offset"])
        return [ATTENTION if at % period == offset else STATE for at in range(count)]
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if config.get(name) is not None:
            places = set(config[name])
            return [ATTENTION if at in places else STATE for at in range(count)]
    if every := config.get("full_attention_interval"):
        return [STATE if (at + 1) % int(every) else ATTENTION for at in range(count)]
    return [ATTENTION] * count


def kind_of(listed: str) -> str:
    """What a config's name for a kind of layer means."""
    if listed in STATES:
        return STATE
    if listed in HYBRIDS:
        return BOTH
    return ATTENTION if "attention" in listed else listed


def state_bytes(config: Mapping[str, Any]) -> int:
    """What all states of a conversation take at most; 0 where no layer keeps one."""
    layers = layers_of(config)[1]
    return layers * state_numbers(config) * FLOAT32 * KEPT if layers else 0


def state_numbers(config: Mapping[str, Any]) -> int:
    """The numbers of one state of a layer. Raises KeyError, TypeError or ValueError."""
    if "linear_key_head_dim" in config:
        keys, values = (
            whole(config, f"linear_{name}_head_dim") * whole(config, f"linear_num_{name}_heads")
            for name in ("key", "value")
        )
        kernel = whole(config, "linear_conv_kernel_dim")
        return values * whole(config, "linear_key_head_dim") + (2 * keys + values) * kernel
    if "conv_L_cache" in config:
        return whole(config, "hidden_size") * whole(config, "conv_L_cache")
    states = whole(config, "ssm_state_size", "mamba_d_state", "state_size")
    groups = whole(config, "n_groups", "mamba_n_groups", "mamba_ngroups", default=1)
    kernel = whole(config, "conv_kernel", "mamba_d_conv", default=4)
    wide = inner(config)
    return wide * states + (wide + 2 * groups * states) * kernel


def inner(config: Mapping[str, Any]) -> int:
    """The channels of a Mamba layer."""
    if config.get("mamba_d_ssm"):
        return whole(config, "mamba_d_ssm")
    if config.get("mamba_num_heads"):
        return whole(config, "mamba_num_heads") * whole(config, "mamba_head_dim")
    return whole(config, "expand", "mamba_expand", default=2) * whole(config, "hidden_size")


def whole(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of these settings that is given, as a whole number from 1."""
    for name in names:
        if config.get(name) is not None:
            value = int(config[name])
            if value < 1:
                raise ValueError(f"{name} is {value}")
            return value
    if default is None:
        raise KeyError(names[0])
    return default
