"""Random tiny GGUF files of the architectures that keep a state, and of some that only turn.

Each is one to three megabytes in float32: a few layers of width 64 over the vocabulary of the
embedded family, so that its prompts, databases and draft models fit. The weights are random, but
large enough that what a layer remembers decides what is said.

A new architecture is one function that names its values and arrays, and one line in ARCHITECTURES.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

from tests.conftest import EMBEDDED
from tests.support.gguf_files import write_gguf

VOCABULARY = EMBEDDED.parent / "small.gguf"
"""The file whose vocabulary they have."""
WIDTH, FORWARD, LAYERS = 64, 96, 4
HEADS, KEY_HEADS, HEAD = 4, 2, 16
"""Of attention."""
STATE, KERNEL, GROUPS, STATE_HEADS = 16, 4, 2, 8
"""Of recurrent layers: numbers per channel, width of the convolution, groups and heads."""
INNER = 2 * WIDTH
RANK = 4
"""Of the time steps of Mamba's first version."""
EXPERTS, USED = 4, 2
CONTEXT = 2048
Values = dict[str, Any]


class Weights:
    """The arrays of a file, added by name; those of a layer after `layer` was called."""

    def __init__(self, seed: int) -> None:
        self.draw, self.prefix = np.random.default_rng(seed), ""
        self.arrays = dict[str, np.ndarray]()

    def layer(self, number: int) -> None:
        """What is added from now on belongs to this layer."""
        self.prefix = f"blk.{number}."

    def matrix(self, name: str, *shape: int, size: float = 3.0) -> None:
        """Random numbers; the last length of the shape is that of what they are multiplied with."""
        found = self.draw.standard_normal(shape) * size / np.sqrt(shape[-1])
        self.arrays[f"{self.prefix}{name}.weight"] = found.astype(np.float32)

    def norm(self, *names: str, length: int = WIDTH, ending: str = ".weight") -> None:
        """Norms that change nothing."""
        for name in names:
            self.arrays[f"{self.prefix}{name}{ending}"] = np.ones(length, np.float32)

    def plain(self, name: str, array: np.ndarray) -> None:
        """An array as it is, under its whole name."""
        self.arrays[self.prefix + name] = array.astype(np.float32)

    def attention(self, queries: int = HEADS * HEAD) -> None:
        """Queries, keys, values and the way back."""
        for name, size in {"q": queries, "k": KEY_HEADS * HEAD, "v": KEY_HEADS * HEAD}.items():
            self.matrix(f"attn_{name}", size, WIDTH)
        self.matrix("attn_output", WIDTH, HEADS * HEAD)

    def forward(self, gate: bool = True) -> None:
        """The layers that see one token at a time."""
        for name in ("gate", "up") if gate else ("up",):
            self.matrix(f"ffn_{name}", FORWARD, WIDTH)
        self.matrix("ffn_down", WIDTH, FORWARD)

    def experts(self) -> None:
        """The same, several of them, two of which are asked."""
        self.matrix("ffn_gate_inp", EXPERTS, WIDTH)
        for name in ("gate", "up"):
            self.matrix(f"ffn_{name}_exps", EXPERTS, FORWARD, WIDTH)
        self.matrix("ffn_down_exps", EXPERTS, WIDTH, FORWARD)

    def shared_expert(self) -> None:
        """One more, which is always asked."""
        self.plain("ffn_gate_inp_shexp.weight", self.draw.standard_normal(WIDTH) / 8)
        for name in ("gate", "up"):
            self.matrix(f"ffn_{name}_shexp", FORWARD, WIDTH)
        self.matrix("ffn_down_shexp", WIDTH, FORWARD)

    def delta(self, merged: bool) -> None:
        """A gated delta net, as Qwen's linear attention is."""
        keys, values = GROUPS * STATE, STATE_HEADS * STATE
        self.matrix("attn_qkv", 2 * keys + values, WIDTH)
        self.matrix("attn_gate", values, WIDTH)
        self.matrix("ssm_conv1d", 2 * keys + values, KERNEL, size=2.0)
        self.plain("ssm_dt.bias", self.draw.uniform(-3, 0, STATE_HEADS))
        self.plain("ssm_a", -self.draw.uniform(0.1, 1, STATE_HEADS))
        if merged:
            self.matrix("ssm_ba", 2 * STATE_HEADS, WIDTH)
        else:
            self.matrix("ssm_beta", STATE_HEADS, WIDTH)
            self.matrix("ssm_alpha", STATE_HEADS, WIDTH)
        self.norm("ssm_norm", length=STATE)
        self.matrix("ssm_out", WIDTH, values)

    def mamba(self, norms: bool = False) -> None:
        """A Mamba layer of the first version."""
        self.matrix("ssm_in", 2 * INNER, WIDTH)
        self.matrix("ssm_conv1d", INNER, KERNEL, size=2.0)
        self.plain("ssm_conv1d.bias", self.draw.standard_normal(INNER) / 4)
        self.matrix("ssm_x", RANK + 2 * STATE, INNER)
        self.matrix("ssm_dt", INNER, RANK)
        self.plain("ssm_dt.bias", self.draw.uniform(-3, 0, INNER))
        self.plain("ssm_a", -np.tile(np.arange(1, STATE + 1) / 4, (INNER, 1)))
        self.plain("ssm_d", np.ones(INNER))
        self.matrix("ssm_out", WIDTH, INNER)
        if norms:
            self.norm("ssm_dt_norm", length=RANK)
            self.norm("ssm_b_norm", "ssm_c_norm", length=STATE)

    def mamba2(self) -> None:
        """A Mamba layer of the second version."""
        mixed = INNER + 2 * GROUPS * STATE
        self.matrix("ssm_in", INNER + mixed + STATE_HEADS, WIDTH)
        self.matrix("ssm_conv1d", mixed, KERNEL, size=2.0)
        self.plain("ssm_conv1d.bias", self.draw.standard_normal(mixed) / 4)
        self.plain("ssm_dt.bias", self.draw.uniform(-3, 0, STATE_HEADS))
        self.plain("ssm_a", -self.draw.uniform(0.1, 1, (STATE_HEADS, 1)))
        self.plain("ssm_d", np.ones((STATE_HEADS, 1)))
        self.plain("ssm_norm.weight", np.ones((GROUPS, INNER // GROUPS)))
        self.matrix("ssm_out", WIDTH, INNER)


MAMBA = {"ssm.conv_kernel": KERNEL, "ssm.inner_size": INNER, "ssm.state_size": STATE}
MAMBA2 = {**MAMBA, "ssm.time_step_rank": STATE_HEADS, "ssm.group_count": GROUPS}
DELTA = {**MAMBA2, "ssm.inner_size": STATE_HEADS * STATE, "full_attention_interval": 4}
MIXED = {
    "expert_count": EXPERTS,
    "expert_used_count": USED,
    "expert_feed_forward_length": FORWARD,
    "expert_shared_feed_forward_length": FORWARD,
}
TURNING = {"rope.dimension_sections": [3, 3, 2, 0]}
ONE_ATTENDS = [0] * (LAYERS - 1) + [KEY_HEADS]
"""Key heads by layer, where those that have none keep a state."""


def qwen35(weights: Weights, heads: int, experts: bool = False) -> Values:
    """Three layers with a state, one with attention whose positions have several parts."""
    for number in range(LAYERS + heads):
        weights.layer(number)
        weights.norm("attn_norm", "post_attention_norm")
        if number % 4 == 3 or number >= LAYERS:
            weights.attention(queries=2 * HEADS * HEAD)
            weights.norm("attn_q_norm", "attn_k_norm", length=HEAD)
        else:
            weights.delta(merged=False)
        if experts:
            weights.experts()
            weights.shared_expert()
        else:
            weights.forward()
        if number >= LAYERS:
            weights.matrix("nextn.eh_proj", WIDTH, 2 * WIDTH)
            weights.norm("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
    ahead = {"nextn_predict_layers": heads} if heads else {}
    return {**DELTA, **TURNING, **ahead, **(MIXED if experts else {})}


def qwen35moe(weights: Weights, heads: int) -> Values:
    """The same with experts."""
    return qwen35(weights, heads, experts=True)


def qwen3next(weights: Weights, heads: int) -> Values:
    """As Qwen 3.5 with experts, with plain positions."""
    for number in range(LAYERS):
        weights.layer(number)
        weights.norm("attn_norm", "post_attention_norm")
        if number % 4 == 3:
            weights.attention(queries=2 * HEADS * HEAD)
            weights.norm("attn_q_norm", "attn_k_norm", length=HEAD)
        else:
            weights.delta(merged=True)
        weights.experts()
        weights.shared_expert()
    return {**DELTA, **MIXED}


def nemotron_h(weights: Weights, heads: int) -> Values:
    """Layers that keep a state, attend, or see one token at a time, each in a block of its own."""
    kinds = ("state", "forward", "attention", "state", "forward")
    for number, kind in enumerate(kinds):
        weights.layer(number)
        weights.norm("attn_norm")
        if kind == "state":
            weights.mamba2()
        elif kind == "attention":
            weights.attention()
        else:
            weights.forward(gate=False)
    return {
        **MAMBA2,
        "block_count": len(kinds),
        "attention.layer_norm_epsilon": 1e-5,
        "attention.head_count_kv": [KEY_HEADS * (kind == "attention") for kind in kinds],
        "feed_forward_length": [FORWARD * (kind == "forward") for kind in kinds],
    }


def lfm2(weights: Weights, heads: int) -> Values:
    """Short convolutions, and attention in the last layer."""
    for number in range(LAYERS):
        weights.layer(number)
        weights.norm("attn_norm", "ffn_norm")
        weights.forward()
        if ONE_ATTENDS[number]:
            weights.attention()
            weights.norm("attn_q_norm", "attn_k_norm", length=HEAD)
        else:
            weights.matrix("shortconv.conv", WIDTH, KERNEL, size=2.0)
            weights.matrix("shortconv.in_proj", 3 * WIDTH, WIDTH)
            weights.matrix("shortconv.out_proj", WIDTH, WIDTH)
    return {"shortconv.l_cache": KERNEL, "attention.head_count_kv": ONE_ATTENDS}


def granitehybrid(weights: Weights, heads: int) -> Values:
    """Mamba layers of the second version, and attention in the last layer."""
    for number in range(LAYERS):
        weights.layer(number)
        weights.norm("attn_norm", "ffn_norm")
        weights.attention() if ONE_ATTENDS[number] else weights.mamba2()
        weights.forward()
    return {**MAMBA2, "attention.head_count_kv": ONE_ATTENDS}


def falcon_h1(weights: Weights, heads: int) -> Values:
    """Every layer attends and keeps a state as well."""
    for number in range(2):
        weights.layer(number)
        weights.norm("attn_norm")
        weights.norm("ffn_norm", ending="")
        weights.mamba2()
        weights.attention()
        weights.forward()
    return {**MAMBA2, "block_count": 2}


def mamba(weights: Weights, heads: int) -> Values:
    """Nothing but states."""
    for number in range(2):
        weights.layer(number)
        weights.norm("attn_norm")
        weights.mamba()
    return {**MAMBA, "ssm.time_step_rank": RANK, "block_count": 2, **NO_ATTENTION}


def mamba2(weights: Weights, heads: int) -> Values:
    """The same, of the second version."""
    for number in range(2):
        weights.layer(number)
        weights.norm("attn_norm")
        weights.mamba2()
    return {**MAMBA2, "block_count": 2, **NO_ATTENTION}


def jamba(weights: Weights, heads: int) -> Values:
    """Mamba layers of the first version, and attention without positions."""
    for number in range(LAYERS):
        weights.layer(number)
        weights.norm("attn_norm", "ffn_norm")
        weights.attention() if ONE_ATTENDS[number] else weights.mamba(norms=True)
        weights.forward()
    return {**MAMBA, "ssm.time_step_rank": RANK, "attention.head_count_kv": ONE_ATTENDS}


def qwen3vl(weights: Weights, heads: int) -> Values:
    """Attention only, whose positions have several parts."""
    for number in range(2):
        weights.layer(number)
        weights.norm("attn_norm", "ffn_norm")
        weights.attention()
        weights.norm("attn_q_norm", "attn_k_norm", length=HEAD)
        weights.forward()
    return {**TURNING, "block_count": 2, "n_deepstack_layers": 0}


NO_ATTENTION = {
    "feed_forward_length": 0,
    "attention.head_count": 0,
    "attention.head_count_kv": None,
    "attention.key_length": None,
    "attention.value_length": None,
    "rope.dimension_count": None,
}
Architecture = Callable[[Weights, int], Values]
ARCHITECTURES: dict[str, Architecture] = {
    "qwen35": qwen35,
    "qwen35moe": qwen35moe,
    "qwen3next": qwen3next,
    "nemotron_h": nemotron_h,
    "lfm2": lfm2,
    "granitehybrid": granitehybrid,
    "falcon-h1": falcon_h1,
    "mamba": mamba,
    "mamba2": mamba2,
    "jamba": jamba,
    "qwen3vl": qwen3vl,
}


def tiny(folder: Path, architecture: str, heads: int = 0, seed: int = 0) -> Path:
    """A random file of an architecture in a folder. `heads` is how many layers that predict further
    tokens it has; only those of Qwen 3.5 have any."""
    weights = Weights(seed)
    own = {
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "feed_forward_length": FORWARD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KEY_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD,
        "rope.freq_base": 10000.0,
        "block_count": LAYERS + heads,
        **ARCHITECTURES[architecture](weights, heads),
    }
    values: Values = {"general.name": architecture, "general.file_type": 0}
    values |= {f"{architecture}.{name}": value for name, value in own.items() if value is not None}
    known, types = vocabulary()
    weights.prefix = ""
    weights.matrix("token_embd", len(known["tokenizer.ggml.tokens"]), WIDTH, size=4.0)
    weights.norm("token_embd_norm" if architecture == "lfm2" else "output_norm")
    path = folder / f"{architecture}.gguf"
    return write_gguf(path, architecture, values | known, weights.arrays, types)


def vocabulary() -> tuple[Values, dict[str, Sequence[GGUFValueType]]]:
    """What the embedded file tells of its vocabulary and chat template, and the types of that."""
    fields = {
        name: field
        for name, field in GGUFReader(VOCABULARY).fields.items()
        if name.startswith("tokenizer.")
    }
    values = {name: field.contents() for name, field in fields.items()}
    return values, {name: field.types for name, field in fields.items()}
