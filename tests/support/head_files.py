"""GGUF files made for tests of heads: tiny models whose next token hangs mostly on the last one.

Their heads know that. So a head is right more often than chance, and not always.

All share a vocabulary of single bytes. Heads that know nothing are those of tiny_gguf.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from gguf import GGUFReader

from tests.support.gguf_files import BYTES, BYTES_TYPES, WORDS, opened_gguf, rewritten, write_gguf
from tests.support.tiny_gguf import HEAD, HEADS, WIDTH, Weights, sizes, tiny

NOISE = 0.03
"""How much a layer adds to what the last token alone says."""
CONTEXT = 512
MASK = 2
"""The token at the places that a block is to guess."""
NARROW = 48
"""The width of Gemma 4's assistant, which is less than that of its model."""
SOURCES = ("attn_output", "ssm_out", "ffn_down")
"""What a layer adds comes through these."""
GEMMA = {
    **sizes(2, CONTEXT),
    "attention.sliding_window": 32,
    "attention.sliding_window_pattern": [True, False],
    "attention.key_length_swa": HEAD,
    "attention.value_length_swa": HEAD,
    "attention.shared_kv_layers": 0,
    "rope.dimension_count_swa": HEAD,
    "embedding_length_per_layer_input": 0,
    "rope.freq_base_swa": 10000.0,
}
"""What Gemma 4's header says."""
Arrays = dict[str, np.ndarray]


def written(
    path: Path,
    architecture: str,
    own: Mapping[str, Any],
    arrays: Arrays,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """A file of these arrays; `own` are the values that the architecture names."""
    values = BYTES | {f"{architecture}.{name}": value for name, value in own.items()}
    values |= more or {}
    return write_gguf(path, architecture, values, arrays, BYTES_TYPES)


def following(seed: int = 0) -> Arrays:
    """Embeddings, and an output that expects one token behind each, and another one a little."""
    draw = np.random.default_rng(seed)
    tokens = draw.standard_normal((len(WORDS), WIDTH)).astype(np.float32)
    after, also = draw.permutation(len(WORDS)), draw.permutation(len(WORDS))
    output = np.empty_like(tokens)
    output[after] = tokens
    output[also] += 0.6 * tokens
    output[:2] *= 0.3  # a turn shall not end at once
    return {"token_embd.weight": tokens, "output.weight": output * 8 / WIDTH}


def quieter(arrays: Arrays) -> Arrays:
    """The same with layers that add little to what the last token says."""
    return {
        name: array * NOISE if any(part in name for part in SOURCES) else array
        for name, array in arrays.items()
    }


def qwen35_gguf(folder: Path) -> Path:
    """A Qwen3.5, most layers of which keep a state; its file holds a head that knows."""
    source = tiny(folder, "qwen35", heads=1)
    found = {tensor.name: tensor.data.copy() for tensor in GGUFReader(source).tensors}
    joined = np.hstack([np.eye(WIDTH), NOISE * np.eye(WIDTH)]).astype(np.float32)
    arrays = quieter(found) | following() | {"blk.4.nextn.eh_proj.weight": joined}
    return rewritten(source, folder / "knowing.gguf", BYTES, arrays)


def llama_gguf(folder: Path, layers: int = 3) -> Path:
    weights = Weights(1)
    for number in range(layers):
        weights.layer(number)
        weights.norm("attn_norm", "ffn_norm")
        weights.attention()
        weights.forward()
    weights.prefix = ""
    weights.norm("output_norm")
    arrays = quieter(weights.arrays) | following()
    return written(folder / "attending.gguf", "llama", sizes(layers, CONTEXT), arrays)


def eagle3_gguf(
    folder: Path,
    layers: tuple[int, ...] = (0, 1, 2),
    known: int | None = None,
    hidden: int = WIDTH,
    own: bool = True,
    name: str = "eagle3-attending.gguf",
) -> Path:
    """An EAGLE-3 head for llama_gguf(), which reads these layers; `known` is how many tokens it
    can say, all unless given. It has an output of its `own`, or takes the model's.

    It attends to the token that it stands at, and takes its embedding over.
    """
    weights = Weights(2)
    weights.matrix("fc", WIDTH, len(layers) * hidden, size=NOISE)
    weights.norm("output_norm")
    weights.layer(0)
    weights.norm("attn_norm", "attn_norm_2", "ffn_norm")
    weights.forward()
    whole, nothing = np.eye(WIDTH), np.zeros((WIDTH, WIDTH))
    first = np.eye(HEADS * HEAD, WIDTH)
    weights.plain("attn_q.weight", np.hstack([3 * first, 0 * first]))
    weights.plain("attn_k.weight", np.hstack([3 * first, 0 * first]))
    weights.plain("attn_v.weight", np.hstack([whole, nothing]))
    weights.plain("attn_output.weight", whole)
    weights.arrays["blk.0.ffn_down.weight"] *= NOISE
    arrays = weights.arrays
    output = following()["output.weight"]
    if known is not None:
        arrays["d2t"] = np.arange(known, dtype=np.int64)
        output = output[:known]
    if own:
        arrays["output.weight"] = output
    values = sizes(1, CONTEXT) | {
        "attention.head_count_kv": HEADS,
        "target_layers": list(layers),
        "target_hidden_size": hidden,
    }
    return written(folder / name, "eagle3", values, arrays)


def dflash_gguf(
    folder: Path, second: bool = False, name: str = "dflash-attending.gguf", **more: Any
) -> Path:
    """A DFlash head for llama_gguf(). Each of its places says what may follow the token that the
    block begins with; what it reads of the text and of mask tokens is small beside that.

    That of the `second` kind has a selector, and convolutions that change little. `more` are values
    of the header, None for those that it lacks.
    """
    weights, width = Weights(5), HEADS * HEAD
    mask = following()["token_embd.weight"][MASK]
    weights.matrix("fc", WIDTH, 2 * WIDTH)
    weights.norm("output_norm")
    weights.plain("enc.output_norm.weight", np.full(WIDTH, NOISE))
    weights.layer(0)
    weights.norm("attn_norm", "ffn_norm")
    weights.norm("attn_q_norm", "attn_k_norm", length=HEAD)
    weights.plain("attn_q.weight", np.zeros((width, WIDTH)))
    weights.matrix("attn_k", width, WIDTH)
    weights.plain("attn_v.weight", np.eye(width) - np.outer(mask, mask) / (mask @ mask))
    weights.plain("attn_output.weight", 30 * np.eye(WIDTH))
    weights.forward()
    weights.arrays["blk.0.ffn_down.weight"] *= NOISE**2
    values = sizes(1, CONTEXT) | {
        "attention.head_count_kv": HEADS,
        "target_layers": [1, 2],
        "block_size": 6,
        "embedding_scale": NOISE,
    }
    if second:
        values |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8}
        values |= {"selector_top_k": 7, "logit_scale": 0.7, "final_logit_softcapping": 9.0}
        for part in ("attn", "ffn"):
            kernels = np.zeros((2, 2, WIDTH))
            kernels[:, 0], kernels[:, 1] = 1.0, NOISE
            weights.plain(f"{part}_conv_base", kernels)
            weights.matrix(f"{part}_conv_proj", 4 * WIDTH // 16, WIDTH, size=NOISE)
        weights.prefix = ""
        weights.matrix("selector_predecessor", len(WORDS), 8, size=1.0)
        weights.matrix("selector_successor", len(WORDS), 8, size=1.0)
        weights.matrix("selector_hidden", 8, WIDTH)
    own = {key: value for key, value in (values | more).items() if value is not None}
    marked = {"tokenizer.ggml.mask_token_id": MASK}
    return written(folder / name, "dflash", own, weights.arrays, marked)


def gemma4_gguf(folder: Path) -> Path:
    """A Gemma 4 of a layer that sees a window and one that sees all."""
    weights = Weights(3)
    for number in range(2):
        weights.layer(number)
        weights.norm("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
        weights.attention()
        weights.norm("attn_q_norm", "attn_k_norm", length=HEAD)
        weights.forward()
        weights.plain("layer_output_scale.weight", np.ones(1))
        for norm in ("post_attention_norm", "post_ffw_norm"):
            weights.arrays[f"blk.{number}.{norm}.weight"] *= NOISE
    weights.prefix = ""
    weights.norm("output_norm")
    weights.norm("rope_freqs", length=HEAD // 2)
    arrays = weights.arrays | following()
    arrays["token_embd.weight"] = arrays["token_embd.weight"] / np.float32(np.sqrt(WIDTH))
    return written(folder / "gemma.gguf", "gemma4", GEMMA, arrays)


def assistant_gguf(folder: Path, width: int = WIDTH, name: str = "mtp-gemma.gguf") -> Path:
    """Gemma 4's assistant for gemma4_gguf(): two narrow layers that read the model's cache."""
    weights = Weights(4)
    model = following()
    narrower = np.linalg.qr(weights.draw.standard_normal((width, width)))[0][:NARROW]
    weights.plain("nextn.pre_projection.weight", np.hstack([narrower, NOISE * narrower]))
    weights.plain("nextn.post_projection.weight", narrower.T)
    output = model["output.weight"] if width == WIDTH else np.tile(model["output.weight"], 2)
    weights.plain("token_embd.weight", output[:, :width] @ narrower.T)
    weights.norm("output_norm", length=NARROW)
    weights.norm("rope_freqs", length=HEAD // 2)
    for number in range(2):
        weights.layer(number)
        weights.norm("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", length=NARROW)
        weights.matrix("attn_q", HEADS * HEAD, NARROW)
        weights.norm("attn_q_norm", length=HEAD)
        weights.matrix("attn_output", NARROW, HEADS * HEAD)
        weights.plain("layer_output_scale.weight", np.ones(1))
        for part in ("gate", "up"):
            weights.matrix(f"ffn_{part}", 96, NARROW)
        weights.matrix("ffn_down", NARROW, 96)
        for norm in ("post_attention_norm", "post_ffw_norm"):
            weights.arrays[f"blk.{number}.{norm}.weight"] *= NOISE
    values = GEMMA | {
        "embedding_length": NARROW,
        "embedding_length_out": width,
        "nextn_predict_layers": 2,
    }
    return written(folder / name, "gemma4-assistant", values, weights.arrays)


def model_with_head(kind: str, folder: Path) -> Path:
    if kind == "EAGLE-3":
        eagle3_gguf(folder)
        return llama_gguf(folder)
    if kind.startswith("DFlash"):
        dflash_gguf(folder, kind == "DFlash2")
        return llama_gguf(folder)
    if kind == "assistant":
        assistant_gguf(folder)
        return gemma4_gguf(folder)
    return qwen35_gguf(folder)


def opened_head(kind: str, path: Path, **settings: Any) -> Any:
    """The model of a kind, with what the library needs to go back."""
    with patch("engine.models.probe.SNAPSHOTS", 0 if kind == "MTP, marks" else 8):
        return opened_gguf(path, **settings)
