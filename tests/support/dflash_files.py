"""DFlash heads of random weights for the embedded model, and the same heads by their definition."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

HIDDEN, HEADS, KV_HEADS, SIZE, INNER, LAYERS, RANK = 256, 4, 2, 32, 96, 2, 6
TARGET_LAYERS, PLACES, MASK, TAPS, GROUP = (0, 3, 6), 6, 5, 3, 64
THETA = 5000.0
Tensors = dict[str, Any]


def config(second: bool = False, **more: Any) -> dict[str, Any]:
    """The config.json of a head; of the second kind if asked for."""
    own: dict[str, Any] = {
        "target_layer_ids": list(TARGET_LAYERS),
        "mask_token_id": MASK,
        "block_size": PLACES,
    }
    if second:
        own |= {"conv_kernel_size": TAPS, "conv_group_size": GROUP}
        own |= {"selector_rank": RANK, "selector_top_k": 40, "output_multiplier": 0.5}
        own |= {"final_logit_softcapping": 3.0, "input_embedding_scale": 1.5}
    return {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": SIZE,
        "num_hidden_layers": LAYERS,
        "rms_norm_eps": 1e-5,
        "rope_theta": THETA,
        "vocab_size": 6144,
        "max_position_embeddings": 2048,
        "dflash_config": own,
    } | more


def numbers(seed: int, second: bool = False) -> Tensors:
    """The weights of such a head, by their names in its file."""
    made = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Any:
        return 0.05 * torch.randn(*shape, generator=made)

    tensors = {
        "fc.weight": random(HIDDEN, len(TARGET_LAYERS) * HIDDEN),
        "hidden_norm.weight": 1 + random(HIDDEN),
        "norm.weight": 1 + random(HIDDEN),
    }
    for layer in (f"layers.{number}." for number in range(LAYERS)):
        tensors |= {
            f"{layer}input_layernorm.weight": 1 + random(HIDDEN),
            f"{layer}post_attention_layernorm.weight": 1 + random(HIDDEN),
            f"{layer}self_attn.q_proj.weight": random(HEADS * SIZE, HIDDEN),
            f"{layer}self_attn.k_proj.weight": random(KV_HEADS * SIZE, HIDDEN),
            f"{layer}self_attn.v_proj.weight": random(KV_HEADS * SIZE, HIDDEN),
            f"{layer}self_attn.o_proj.weight": random(HIDDEN, HEADS * SIZE),
            f"{layer}self_attn.q_norm.weight": 2 + random(SIZE),
            f"{layer}self_attn.k_norm.weight": 2 + random(SIZE),
            f"{layer}mlp.gate_proj.weight": random(INNER, HIDDEN),
            f"{layer}mlp.up_proj.weight": random(INNER, HIDDEN),
            f"{layer}mlp.down_proj.weight": random(HIDDEN, INNER),
        }
        for part in ("attention_conv", "mlp_conv") if second else ():
            tensors[f"{layer}{part}.base_kernel"] = 0.5 + random(2, TAPS, HIDDEN)
            kernels = 2 * TAPS * (HIDDEN // GROUP)
            tensors[f"{layer}{part}.kernel_projection.weight"] = random(kernels, HIDDEN)
    if second:
        selector = "candidate_selector."
        tensors[f"{selector}predecessor_codebook"] = 8 * random(6144, RANK)
        tensors[f"{selector}successor_codebook"] = 8 * random(6144, RANK)
        tensors[f"{selector}hidden_projection.weight"] = 8 * random(RANK, HIDDEN)
    return tensors


class Definition:
    """A head computed from its definition, place by place, in double precision and without a cache.

    `states` are the target's hidden states of a text, shape (rows, 3 x width), and `embedding` is
    its embedding and output matrix.
    """

    def __init__(self, settings: dict[str, Any], tensors: Tensors, states: Any, embedding: Any):
        self.settings, self.own = settings, settings["dflash_config"]
        self.tensors = {name: np.asarray(each, np.float64) for name, each in tensors.items()}
        self.states, self.embedding = np.asarray(states, np.float64), np.asarray(embedding)

    def norm(self, values: Any, name: str) -> Any:
        return values / np.sqrt((values**2).mean() + 1e-5) * self.tensors[f"{name}.weight"]

    def turned(self, values: Any, position: int) -> Any:
        """Rotary positions: pairs of numbers half a head apart turn by an angle."""
        half, out = SIZE // 2, values.copy()
        for at in range(half):
            angle = position / THETA ** (2 * at / SIZE)
            one, other = values[at], values[at + half]
            out[at] = one * math.cos(angle) - other * math.sin(angle)
            out[at + half] = other * math.cos(angle) + one * math.sin(angle)
        return out

    def mixed(self, rows: list[Any], name: str, which: int, inputs: list[Any]) -> list[Any]:
        """The convolution of the rows of a block before (0) or after (1) a part of a layer, with
        kernels from the part's inputs."""
        if f"{name}.base_kernel" not in self.tensors:
            return rows
        out = []
        for at in range(len(rows)):
            dynamic = self.tensors[f"{name}.kernel_projection.weight"] @ inputs[at]
            dynamic = dynamic.reshape(2, TAPS, HIDDEN // GROUP)[which]
            mixed = np.zeros(HIDDEN)
            for tap in range(min(TAPS, at + 1)):
                for number in range(HIDDEN):
                    kernel = self.tensors[f"{name}.base_kernel"][which, tap, number]
                    kernel += dynamic[tap, number // GROUP]
                    mixed[number] += kernel * rows[at - tap][number]
            out.append(mixed)
        return out

    def layer(self, number: int, hidden: list[Any], context: list[Any]) -> list[Any]:
        name = f"layers.{number}."
        inputs = [self.norm(each, f"{name}input_layernorm") for each in hidden]
        rows = self.mixed(inputs, f"{name}attention_conv", 0, inputs)
        keys, values = [], []
        for position, row in enumerate([*context, *rows]):
            key, value = (
                (self.tensors[f"{name}self_attn.{part}_proj.weight"] @ row).reshape(-1, SIZE)
                for part in "kv"
            )
            normed = [self.norm(each, f"{name}self_attn.k_norm") for each in key]
            keys.append([self.turned(each, position) for each in normed])
            values.append(value)
        read = [
            self.attended(number, len(context) + at, row, keys, values)
            for at, row in enumerate(rows)
        ]
        read = self.mixed(read, f"{name}attention_conv", 1, inputs)
        hidden = [one + other for one, other in zip(hidden, read, strict=True)]
        inputs = [self.norm(each, f"{name}post_attention_layernorm") for each in hidden]
        rows = self.mixed(inputs, f"{name}mlp_conv", 0, inputs)
        out = []
        for row in rows:
            gate, up = (self.tensors[f"{name}mlp.{part}_proj.weight"] @ row for part in GATES)
            gated = gate / (1 + np.exp(-gate)) * up
            out.append(self.tensors[f"{name}mlp.down_proj.weight"] @ gated)
        out = self.mixed(out, f"{name}mlp_conv", 1, inputs)
        return [one + other for one, other in zip(hidden, out, strict=True)]

    def attended(self, number: int, position: int, row: Any, keys: Any, values: Any) -> Any:
        name = f"layers.{number}.self_attn."
        kinds = self.settings.get("layer_types")
        slides = bool(kinds) and kinds[number] == "sliding_attention"
        causal = self.settings.get("is_causal")
        causal = slides if causal is None else causal
        seen = [
            at
            for at in range(len(keys))
            if not (causal and at > position)
            and not (slides and position - at >= self.settings["sliding_window"])
        ]
        found = []
        queries = (self.tensors[f"{name}q_proj.weight"] @ row).reshape(-1, SIZE)
        for head, query in enumerate(queries):
            own = head * KV_HEADS // HEADS
            query = self.turned(self.norm(query, f"{name}q_norm"), position)
            scores = np.array([query @ keys[at][own] for at in seen]) / math.sqrt(SIZE)
            weights = np.exp(scores - scores.max())
            read = weights @ np.array([values[at][own] for at in seen]) / weights.sum()
            found.append(read)
        return self.tensors[f"{name}o_proj.weight"] @ np.concatenate(found)

    def logits(self, text: Sequence[int]) -> tuple[Any, Any]:
        """The logits of every place after the text, shape (places - 1, vocabulary), and the states
        there."""
        context = [
            self.norm(self.tensors["fc.weight"] @ each, "hidden_norm")
            for each in self.states[: len(text) - 1]
        ]
        tokens = [text[-1]] + [MASK] * (PLACES - 1)
        scale = self.own.get("input_embedding_scale", 1.0)
        hidden = [scale * self.embedding[token] for token in tokens]
        for number in range(LAYERS):
            hidden = self.layer(number, hidden, context)
        states = np.array([self.norm(each, "norm") for each in hidden[1:]])
        raw = states @ self.embedding.T * self.own.get("output_multiplier", 1.0)
        cap = self.own.get("final_logit_softcapping")
        return (np.tanh(raw / cap) * cap if cap else raw), states

    def after(self, logits: Any, state: Any, token: int) -> dict[int, float]:
        """The logits of a place's candidates if a token is before it."""
        if "selector_rank" not in self.own:
            return dict(enumerate(logits))
        best = np.argsort(-logits)[: self.own["selector_top_k"]]
        name = "candidate_selector."
        vector = self.tensors[f"{name}predecessor_codebook"][token] * (
            self.tensors[f"{name}hidden_projection.weight"] @ state
        )
        successors = self.tensors[f"{name}successor_codebook"]
        return {int(each): logits[each] + float(vector @ successors[each]) for each in best}


GATES = ("gate", "up")
