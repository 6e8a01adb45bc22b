"""An EAGLE-3 head as a GGUF file, for llama.cpp to draft with for the model's GGUF file.

The weights stay float16, norms float32. Embedding and output matrix are those of the model, so the
file has none. Its header has the tokenizer of the model, by which programs tell that both belong
together. It is found beside a model's file when its name begins with "eagle3-".
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig

from bench.shape import Config
from bench.to_gguf import FLOAT16, add_tokenizer, paired, types
from engine.errors import ModelError
from engine.heads.eagle3 import Eagle3, Eagle3Shape
from engine.heads.eagle3_files import Target, read_head

if TYPE_CHECKING:
    from gguf import GGUFWriter

NAMES = {
    "fc": "fc",
    "norm": "output_norm",
    "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
    "midlayer.self_attn.q_proj": "blk.0.attn_q",
    "midlayer.self_attn.k_proj": "blk.0.attn_k",
    "midlayer.self_attn.v_proj": "blk.0.attn_v",
    "midlayer.self_attn.o_proj": "blk.0.attn_output",
    "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
    "midlayer.mlp.gate_proj": "blk.0.ffn_gate",
    "midlayer.mlp.up_proj": "blk.0.ffn_up",
    "midlayer.mlp.down_proj": "blk.0.ffn_down",
}
"""Tensors by their names in GGUF files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench head-to-gguf`."""
    add = parser.add_argument
    add("head", type=Path, help="the folder of an EAGLE-3 head that knows all tokens")
    add("model", type=Path, help="the folder of the model that it drafts for")
    add("target", type=Path, help="the GGUF file to write")


def run(options: argparse.Namespace) -> None:
    """Write the file and say how large it is."""
    write(options.head, options.model, options.target)
    print(f"{options.target.name}: {options.target.stat().st_size:,} bytes, {FLOAT16}")


def write(folder: Path, model: Path, file: Path) -> None:
    """Write a head in float16. Raises ModelError for one that cannot be written so."""
    kinds = types()
    import gguf

    config: Config = AutoConfig.from_pretrained(str(model), trust_remote_code=False)
    fits = Target(config.hidden_size, config.num_hidden_layers, config.vocab_size)
    head, tokens = read_head(folder, fits)
    left = set(head.state_dict()) - {f"{name}.weight" for name in NAMES}
    if tokens is not None or left:
        what = "knows some tokens only" if tokens is not None else f"has {', '.join(sorted(left))}"
        raise ModelError(
            f"The head in {str(folder)!r} {what}, which is not written here. Use the converter of "
            "llama.cpp."
        )
    writer = gguf.GGUFWriter(file, "eagle3")
    writer.add_name(f"EAGLE-3 head of {model.resolve().name}")
    writer.add_file_type(kinds[FLOAT16])
    describe(writer, head.shape)
    add_tokenizer(writer, model)
    for name, values in arrays(head).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: "GGUFWriter", shape: Eagle3Shape) -> None:
    """The header's part about the shape."""
    layer: Config = shape.layer
    size = layer.head_dim
    writer.add_context_length(layer.max_position_embeddings)
    writer.add_embedding_length(layer.hidden_size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(layer.intermediate_size)
    writer.add_head_count(layer.num_attention_heads)
    writer.add_head_count_kv(layer.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(layer.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(layer.rms_norm_eps)
    writer.add_vocab_size(layer.vocab_size)
    writer.add_array("eagle3.target_layers", list(shape.layers))
    writer.add_uint32("eagle3.target_hidden_size", shape.target_hidden)
    writer.add_bool("eagle3.norm_before_residual", shape.norm_before_residual)


def arrays(head: Eagle3) -> dict[str, NDArray[Any]]:
    """Every weight by its name in GGUF files."""
    layer: Config = head.shape.layer
    found = {}
    heads = {"q_proj": layer.num_attention_heads, "k_proj": layer.num_key_value_heads}
    for name, values in head.state_dict().items():
        values = values.to(torch.float32)
        if (kind := name.split(".")[-2]) in heads:
            values = paired(values, heads[kind])
        dtype = np.float32 if values.ndim == 1 else np.float16
        found[f"{NAMES[name.removesuffix('.weight')]}.weight"] = values.numpy().astype(dtype)
    return found
