"""Models and heads as GGUF files, for llama.cpp.

The format's own library writes float16; if another type is asked for, llama.cpp then quantizes the
file. The two rows of a rotary pair are neighbours in llama.cpp and half a head apart in
transformers, so the rows of the query and key projections are reordered. Both libraries may be
missing, so they are imported late.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer

from bench.harness import Add, Command
from engine.errors import ModelError, SettingError
from engine.heads.eagle3 import Target, read_head
from engine.models.shape import Config, Shape, check_fits

if TYPE_CHECKING:
    from gguf import GGUFWriter

FLOAT16 = "F16"
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
"""Tensors of a head by their names in GGUF files."""


class ToGguf(Command):
    """A Llama-like model as a GGUF file."""

    def add_options(self, add: Add) -> None:
        add("source", type=Path, help="the folder of a Llama-like model with byte-level BPE")
        add("target", type=Path, help="the GGUF file to write")
        add("--type", default=FLOAT16, help="of the weights: F16, F32, Q8_0, Q4_K_M, ...")
        add("--threads", type=int, default=2)

    def run(self, options: argparse.Namespace) -> None:
        convert(options.source, options.target, options.type, options.threads)
        print(f"{options.target.name}: {options.target.stat().st_size:,} bytes, {options.type}")


class HeadToGguf(Command):
    """An EAGLE-3 head as a GGUF file, for llama.cpp to draft with for the model's GGUF file.

    The file has no embedding and no output matrix, because those are the model's. Its header holds
    the model's tokenizer, by which programs see that the two belong together. The file is found
    next to the model's if its name begins with "eagle3-".
    """

    def add_options(self, add: Add) -> None:
        add("head", type=Path, help="the folder of an EAGLE-3 head that knows all tokens")
        add("model", type=Path, help="the folder of the model that it drafts for")
        add("target", type=Path, help="the GGUF file to write")

    def run(self, options: argparse.Namespace) -> None:
        write_head(options.head, options.model, options.target)
        print(f"{options.target.name}: {options.target.stat().st_size:,} bytes, {FLOAT16}")


def types() -> dict[str, int]:
    """The types of weights that llama.cpp knows, by name. Raises ModelError where it is missing."""
    try:
        import gguf  # noqa: F401 (fails before any work if it is missing)
        import llama_cpp
    except ImportError as error:
        raise ModelError(
            f"Writing GGUF files needs the package {error.name!r}, which is not installed. Install "
            "llama-cpp-python and gguf."
        ) from error
    prefixes = ("LLAMA_FTYPE_MOSTLY_", "LLAMA_FTYPE_ALL_")
    return {
        name.removeprefix(prefix): value
        for name, value in vars(llama_cpp).items()
        for prefix in prefixes
        if name.startswith(prefix)
    }


def convert(source: Path, target: Path, kind: str, threads: int) -> None:
    """Write the model in a folder as a GGUF file. Raises SettingError for an unknown type."""
    known = types()
    if kind not in known:
        raise SettingError(f"There is no type {kind!r}. Choose from: {', '.join(known)}.")
    if kind == FLOAT16:
        write_model(source, target)
        return
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        exact = Path(folder) / "exact.gguf"
        write_model(source, exact)
        quantize(exact, target, kind, threads)


def quantize(source: Path, target: Path, kind: str, threads: int) -> None:
    """Write a GGUF file with weights of another type. Raises ModelError."""
    import llama_cpp

    from engine.models.gguf import complaint

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = types()[kind], threads
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), parameters):
        raise ModelError(
            f"The weights cannot be stored as {kind!r} in {str(target)!r}: {complaint()}."
        )


def write_model(folder: Path, file: Path) -> None:
    """Write a model in float16. Raises ModelError for another architecture or tokenizer."""
    import gguf

    config: Config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    check_fits(config, Shape.of(config))
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name(folder.resolve().name)
    describe(writer, config, config.num_hidden_layers)
    add_tokenizer(writer, folder)
    add_sampler(writer, folder)
    for name, values in tensors(folder, config):
        writer.add_tensor(name, values)
    finish(writer)


def write_head(folder: Path, model: Path, file: Path) -> None:
    """Write a head in float16. Raises ModelError if the format cannot represent it."""
    types()
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
    describe(writer, head.shape.layer, 1)
    writer.add_array("eagle3.target_layers", list(head.shape.layers))
    writer.add_uint32("eagle3.target_hidden_size", head.shape.target_hidden)
    writer.add_bool("eagle3.norm_before_residual", head.shape.norm_before_residual)
    add_tokenizer(writer, model)
    for name, values in head.state_dict().items():
        found = f"{NAMES[name.removesuffix('.weight')]}.weight"
        writer.add_tensor(found, stored(name, values, head.shape.layer))
    finish(writer)


def finish(writer: "GGUFWriter") -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: "GGUFWriter", config: Config, layers: int) -> None:
    size = config.head_dim or config.hidden_size // config.num_attention_heads
    writer.add_file_type(types()[FLOAT16])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def add_tokenizer(writer: "GGUFWriter", folder: Path) -> None:
    """The header's part about tokens. Raises ModelError unless they are byte-level BPE."""
    import gguf

    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    if stored["model"]["type"] != "BPE" or stored["pre_tokenizer"]["type"] != "ByteLevel":
        raise ModelError(f"The tokenizer in {str(folder)!r} is not plain byte-level BPE.")
    special = {token["id"] for token in stored["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
    writer.add_token_types(
        [
            int(gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL)
            for token in range(len(tokenizer))
        ]
    )
    writer.add_token_merges([" ".join(pair) for pair in stored["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)


def add_sampler(writer: "GGUFWriter", folder: Path) -> None:
    path = folder / "generation_config.json"
    values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    adders = {
        "temperature": writer.add_sampling_temp,
        "top_k": writer.add_sampling_top_k,
        "top_p": writer.add_sampling_top_p,
        "min_p": writer.add_sampling_min_p,
    }
    for name, add in adders.items():
        if values.get(name) is not None:
            add(values[name])


def tensors(folder: Path, config: Config) -> Iterator[tuple[str, NDArray[Any]]]:
    import gguf
    from safetensors import safe_open

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for path in tqdm(sorted(folder.glob("*.safetensors")), desc="Writing", leave=False):
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a mapping)
                found = names.get_name(name, try_suffixes=(".weight",))
                assert found is not None, name
                yield found, stored(name, weights.get_tensor(name), config)


def stored(name: str, values: torch.Tensor, config: Config) -> NDArray[Any]:
    """A weight as llama.cpp reads it: rotary pairs are neighbours, norms stay in float32."""
    values = values.to(torch.float32)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if (kind := name.split(".")[-2]) in heads:
        halves = values.reshape(heads[kind], 2, -1, values.shape[1])
        values = halves.transpose(1, 2).reshape(values.shape)
    array: NDArray[Any] = values.numpy().astype(np.float32 if values.ndim == 1 else np.float16)
    return array
