"""Random tiny GGUF files of the architectures that keep a state, and of some that only turn.

Each is one to three megabytes in float32: a few layers of width 64 over the vocabulary of the
embedded family, so that its prompts, databases and draft models fit. The weights are random, but
large enough that what a layer remembers decides what is said.

A new architecture is one entry in ARCHITECTURES: its values, and what its layers consist of.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
        self.prefix = f"blk.{number}."

    def matrix(self, name: str, *shape: int, size: float = 3.0) -> None:
        """Random numbers; the last length of the shape is that of what they are multiplied with."""
        found = self.draw.standard_normal(shape) * size / np.sqrt(shape[-1])
        self.arrays[f"{self.prefix}{name}.weight"] = found.astype(np.float32)

    def norm(self, *names: str, length: int = WIDTH, ending: str = ".weight") -> None:
        for name in names:
            self.arrays[f"{self.prefix}{name}{ending}"] = np.ones(length, np.float32)

    def plain(self, name: str, array: np.ndarray) -> None:
        self.arrays[self.prefix + name] = array.astype(np.float32)

    def attention(self, queries: int = HEADS * HEAD) -> None:
        for name, size in {"q": queries, "k": KEY_HEADS * HEAD, "v": KEY_HEADS * HEAD}.items():
            self.matrix(f"attn_{name}", size, WIDTH)
        self.matrix("attn_output", WIDTH, HEADS * HEAD)

    def normed_attention(self, queries: int = HEADS * HEAD) -> None:
        self.attention(queries)
        self.norm("attn_q_norm", "attn_k_norm", length=HEAD)

    def gated_attention(self) -> None:
        self.normed_attention(2 * HEADS * HEAD)

    def forward(self, *inputs: str) -> None:
        """The layers that see one token at a time."""
        for name in inputs or ("gate", "up"):
            self.matrix(f"ffn_{name}", FORWARD, WIDTH)
        self.matrix("ffn_down", WIDTH, FORWARD)

    def upward(self) -> None:
        self.forward("up")

    def experts(self) -> None:
        """The same: several of them, two of which are asked, and one that is always asked."""
        self.matrix("ffn_gate_inp", EXPERTS, WIDTH)
        for name in ("gate", "up"):
            self.matrix(f"ffn_{name}_exps", EXPERTS, FORWARD, WIDTH)
        self.matrix("ffn_down_exps", EXPERTS, WIDTH, FORWARD)
        self.plain("ffn_gate_inp_shexp.weight", self.draw.standard_normal(WIDTH) / 8)
        for name in ("gate", "up"):
            self.matrix(f"ffn_{name}_shexp", FORWARD, WIDTH)
        self.matrix("ffn_down_shexp", WIDTH, FORWARD)

    def merged_delta(self) -> None:
        self.delta(merged=True)

    def delta(self, merged: bool = False) -> None:
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

    def normed_mamba(self) -> None:
        self.mamba()
        self.norm("ssm_dt_norm", length=RANK)
        self.norm("ssm_b_norm", "ssm_c_norm", length=STATE)

    def mamba(self) -> None:
        self.matrix("ssm_in", 2 * INNER, WIDTH)
        self.matrix("ssm_conv1d", INNER, KERNEL, size=2.0)
        self.plain("ssm_conv1d.bias", self.draw.standard_normal(INNER) / 4)
        self.matrix("ssm_x", RANK + 2 * STATE, INNER)
        self.matrix("ssm_dt", INNER, RANK)
        self.plain("ssm_dt.bias", self.draw.uniform(-3, 0, INNER))
        self.plain("ssm_a", -np.tile(np.arange(1, STATE + 1) / 4, (INNER, 1)))
        self.plain("ssm_d", np.ones(INNER))
        self.matrix("ssm_out", WIDTH, INNER)

    def mamba2(self) -> None:
        mixed = INNER + 2 * GROUPS * STATE
        self.matrix("ssm_in", INNER + mixed + STATE_HEADS, WIDTH)
        self.matrix("ssm_conv1d", mixed, KERNEL, size=2.0)
        self.plain("ssm_conv1d.bias", self.draw.standard_normal(mixed) / 4)
        self.plain("ssm_dt.bias", self.draw.uniform(-3, 0, STATE_HEADS))
        self.plain("ssm_a", -self.draw.uniform(0.1, 1, (STATE_HEADS, 1)))
        self.plain("ssm_d", np.ones((STATE_HEADS, 1)))
        self.plain("ssm_norm.weight", np.ones((GROUPS, INNER // GROUPS)))
        self.matrix("ssm_out", WIDTH, INNER)

    def bare_norm(self) -> None:
        self.norm("ffn_norm", ending="")

    def convolution(self) -> None:
        self.matrix("shortconv.conv", WIDTH, KERNEL, size=2.0)
        self.matrix("shortconv.in_proj", 3 * WIDTH, WIDTH)
        self.matrix("shortconv.out_proj", WIDTH, WIDTH)

    def prediction(self) -> None:
        """What a layer that predicts further tokens has besides."""
        self.matrix("nextn.eh_proj", WIDTH, 2 * WIDTH)
        self.norm("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")


MAMBA = {"ssm.conv_kernel": KERNEL, "ssm.inner_size": INNER, "ssm.state_size": STATE}
MAMBA1 = {**MAMBA, "ssm.time_step_rank": RANK}
MAMBA2 = {**MAMBA, "ssm.time_step_rank": STATE_HEADS, "ssm.group_count": GROUPS}
DELTA = {**MAMBA2, "ssm.inner_size": STATE_HEADS * STATE, "full_attention_interval": 4}
MIXED = {
    "expert_count": EXPERTS,
    "expert_used_count": USED,
    "expert_feed_forward_length": FORWARD,
    "expert_shared_feed_forward_length": FORWARD,
}
TURNING = {"rope.dimension_sections": [3, 3, 2, 0]}
ONE_ATTENDS = {"attention.head_count_kv": [0] * (LAYERS - 1) + [KEY_HEADS]}
"""Key heads by layer, where those that have none keep a state."""
NO_ATTENTION = {
    "feed_forward_length": 0,
    "attention.head_count": 0,
    "attention.head_count_kv": None,
    "attention.key_length": None,
    "attention.value_length": None,
    "rope.dimension_count": None,
}
Part = Callable[[Weights], None]
PRE_NORM, POST_NORM = ("attn_norm", "ffn_norm"), ("attn_norm", "post_attention_norm")


@dataclass(frozen=True)
class Architecture:
    """The values of its own in the header, and the norms and parts of each layer."""

    values: Values
    layers: Sequence[Sequence[Part]]
    norms: Sequence[str] = PRE_NORM
    head: Sequence[Part] = ()
    """The parts of a layer that predicts further tokens, if it may have some."""


def hybrid(usual: Part, last: Part, forward: Part) -> list[list[Part]]:
    """Layers of which the last one attends."""
    return [*[[usual, forward]] * (LAYERS - 1), [last, forward]]


ARCHITECTURES = {
    "qwen35": Architecture(
        {**DELTA, **TURNING},
        hybrid(Weights.delta, Weights.gated_attention, Weights.forward),
        POST_NORM,
        (Weights.gated_attention, Weights.forward, Weights.prediction),
    ),
    "qwen35moe": Architecture(
        {**DELTA, **TURNING, **MIXED},
        hybrid(Weights.delta, Weights.gated_attention, Weights.experts),
        POST_NORM,
        (Weights.gated_attention, Weights.experts, Weights.prediction),
    ),
    "qwen3next": Architecture(
        {**DELTA, **MIXED},
        hybrid(Weights.merged_delta, Weights.gated_attention, Weights.experts),
        POST_NORM,
    ),
    "nemotron_h": Architecture(
        {
            **MAMBA2,
            "attention.layer_norm_epsilon": 1e-5,
            "attention.head_count_kv": [0, 0, KEY_HEADS, 0, 0],
            "feed_forward_length": [0, FORWARD, 0, 0, FORWARD],
        },
        [
            *([Weights.mamba2], [Weights.upward], [Weights.attention]),
            *([Weights.mamba2], [Weights.upward]),
        ],
        ("attn_norm",),
    ),
    "lfm2": Architecture(
        {"shortconv.l_cache": KERNEL, **ONE_ATTENDS},
        [
            *[[Weights.forward, Weights.convolution]] * (LAYERS - 1),
            [Weights.forward, Weights.normed_attention],
        ],
    ),
    "granitehybrid": Architecture(
        {**MAMBA2, **ONE_ATTENDS}, hybrid(Weights.mamba2, Weights.attention, Weights.forward)
    ),
    "falcon-h1": Architecture(
        MAMBA2,
        [[Weights.bare_norm, Weights.mamba2, Weights.attention, Weights.forward]] * 2,
        ("attn_norm",),
    ),
    "mamba": Architecture({**MAMBA1, **NO_ATTENTION}, [[Weights.mamba]] * 2, ("attn_norm",)),
    "mamba2": Architecture({**MAMBA2, **NO_ATTENTION}, [[Weights.mamba2]] * 2, ("attn_norm",)),
    "jamba": Architecture(
        {**MAMBA1, **ONE_ATTENDS},
        hybrid(Weights.normed_mamba, Weights.attention, Weights.forward),
    ),
    "qwen3vl": Architecture(
        {**TURNING, "n_deepstack_layers": 0}, [[Weights.normed_attention, Weights.forward]] * 2
    ),
}


def sizes(layers: int, context: int = CONTEXT) -> Values:
    return {
        "context_length": context,
        "embedding_length": WIDTH,
        "feed_forward_length": FORWARD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KEY_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD,
        "rope.freq_base": 10000.0,
        "block_count": layers,
    }


def tiny(folder: Path, architecture: str, heads: int = 0, seed: int = 0) -> Path:
    """A random file of an architecture in a folder. `heads` is how many layers that predict further
    tokens it has; only those of Qwen 3.5 have any."""
    weights, made = Weights(seed), ARCHITECTURES[architecture]
    layers = [*made.layers, *[made.head] * heads]
    for number, parts in enumerate(layers):
        weights.layer(number)
        weights.norm(*made.norms)
        for part in parts:
            part(weights)
    own = {
        **sizes(len(layers)),
        **made.values,
        "nextn_predict_layers": heads or None,
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
