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
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer

from bench.harness import Add, Command
from engine.errors import ModelError, SettingError
from engine.heads.dflash import PLAIN, SELECTING, Dflash, read_dflash
from engine.heads.eagle3 import Target, read_head
from engine.models.shape import Config, Shape, check_fits
from engine.models.torch_heads import kinds_of

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
"""Tensors of an EAGLE-3 head by their names in GGUF files."""
BLOCK_NAMES = {
    "fc": "fc",
    "norm": "output_norm",
    "hidden_norm": "enc.output_norm",
    "candidate_selector.predecessor_codebook": "selector_predecessor",
    "candidate_selector.successor_codebook": "selector_successor",
    "candidate_selector.hidden_projection": "selector_hidden",
}
"""Tensors of a DFlash head outside its layers."""
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
"""Those of one of its layers."""
BARE = ("base_kernel",)
"""Tensors whose names have no ending in GGUF files."""


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
    """An EAGLE-3 or DFlash head as a GGUF file, for llama.cpp to draft with for the model's GGUF
    file.

    The file has no embedding and no output matrix, because those are the model's. Its header holds
    the model's tokenizer, by which programs see that the two belong together. The file is found
    next to the model's if its name begins with "eagle3-" or "dflash-".
    """

    def add_options(self, add: Add) -> None:
        add("head", type=Path, help="the folder of a head that knows all tokens")
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
    if set(kinds_of(folder)) & {PLAIN, SELECTING}:
        write_block_head(read_dflash(folder, fits), model, file)
        return
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


def write_block_head(head: Dflash, model: Path, file: Path) -> None:
    """Write a DFlash head in float16. Raises ModelError for what llama.cpp does not compute.

    llama.cpp knows a selector only together with convolutions, and has room for candidates whose
    pairs are as many as a state has numbers.
    """
    import gguf

    shape, config = head.shape, head.shape.layer
    tensors = {block_name(name): whole(values) for name, values in head.state_dict().items()}
    if (shape.taps and not shape.rank) or len({*shape.causal}) > 1:
        raise ModelError(
            "This DFlash head cannot be written for llama.cpp, which knows convolutions only with "
            "a selector, and blocks only of which all layers see later places or none."
        )
    if shape.rank and not shape.taps:
        shape = replace(shape, taps=1, group=config.hidden_size)
        tensors |= unmoving(config)
    writer = gguf.GGUFWriter(file, "dflash")
    writer.add_name(f"DFlash head of {model.resolve().name}")
    describe(writer, config, config.num_hidden_layers)
    writer.add_array("dflash.target_layers", list(shape.layers))
    numbers = {"block_size": shape.places}
    if shape.rank:
        numbers |= {"conv_kernel_size": shape.taps, "conv_group_size": shape.group}
        fitting = (isqrt(4 * config.hidden_size + 1) - 1) // 2
        numbers |= {"selector_rank": shape.rank, "selector_top_k": min(shape.candidates, fitting)}
    for name, number in numbers.items():
        writer.add_uint32(f"dflash.{name}", number)
    writer.add_embedding_scale(shape.input_scale)
    writer.add_logit_scale(shape.output_scale)
    if shape.cap:
        writer.add_final_logit_softcapping(shape.cap)
    if any(shape.windows):
        writer.add_sliding_window(max(shape.windows))
        writer.add_array(
            "dflash.attention.sliding_window_pattern", [each > 0 for each in shape.windows]
        )
    writer.add_causal_attention(all(shape.causal))
    add_tokenizer(writer, model)
    writer.add_mask_token_id(shape.mask)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    finish(writer)


def unmoving(config: Config) -> dict[str, NDArray[Any]]:
    """Convolutions that change nothing."""
    return {
        f"blk.{number}.{part}_conv_{name}": values
        for number in range(config.num_hidden_layers)
        for part in ("attn", "ffn")
        for name, values in (
            ("base", np.ones((2, 1, config.hidden_size), np.float32)),
            ("proj.weight", np.zeros((2, config.hidden_size), np.float16)),
        )
    }


def block_name(name: str) -> str:
    """The name of a tensor of a DFlash head in GGUF files."""
    plain = name.removesuffix(".weight")
    if plain in BLOCK_NAMES:
        return f"{BLOCK_NAMES[plain]}.weight"
    _, number, rest = plain.split(".", 2)
    ending = "" if rest.endswith(BARE) else ".weight"
    return f"blk.{number}.{LAYER_NAMES[rest]}{ending}"


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
    return whole(values)


def whole(values: torch.Tensor) -> NDArray[Any]:
    """A weight in float16; norms and the kernels of convolutions stay in float32."""
    kind = np.float16 if values.ndim == 2 else np.float32
    array: NDArray[Any] = values.to(torch.float32).numpy().astype(kind)
    return array
