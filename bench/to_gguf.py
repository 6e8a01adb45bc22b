"""A Llama-like model as a GGUF file, to measure one model with both libraries.

The format's own library writes it in float16; llama.cpp then quantizes it, where another type is
asked for. Rotary pairs are neighbours in llama.cpp and halves apart in transformers, so the rows of
the query and key projections change places. Both libraries may be missing, so they are imported
where they are needed.
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

from bench.shape import Config, Shape, check_fits
from engine.errors import ModelError, SettingError

if TYPE_CHECKING:
    from gguf import GGUFWriter

FLOAT16 = "F16"


def types() -> dict[str, int]:
    """The types of weights that llama.cpp knows, by name. Raises ModelError where it is missing."""
    try:
        import gguf  # noqa: F401 (asked for here, so that it is missed before any work)
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench to-gguf`."""
    add = parser.add_argument
    add(
        "source", type=Path, help="the folder of a Llama-like model with a byte-level BPE tokenizer"
    )
    add("target", type=Path, help="the GGUF file to write")
    add("--type", default=FLOAT16, help="of the weights: F16, F32, Q8_0, Q4_K_M, ...")
    add("--threads", type=int, default=2)


def run(options: argparse.Namespace) -> None:
    """Write the file and say how large it is."""
    convert(options.source, options.target, options.type, options.threads)
    print(f"{options.target.name}: {options.target.stat().st_size:,} bytes, {options.type}")


def convert(source: Path, target: Path, kind: str, threads: int) -> None:
    """Write the model in a folder as a GGUF file. Raises SettingError for a type unknown."""
    known = types()
    if kind not in known:
        raise SettingError(f"There is no type {kind!r}. Choose from: {', '.join(known)}.")
    if kind == FLOAT16:
        write(source, target)
        return
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        exact = Path(folder) / "exact.gguf"
        write(source, exact)
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


def write(folder: Path, file: Path) -> None:
    """Write a model in float16. Raises ModelError for another architecture or tokenizer."""
    import gguf

    config: Config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    check_fits(config, Shape.of(config))
    writer = gguf.GGUFWriter(file, "llama")
    describe(writer, config, folder.resolve().name)
    add_tokenizer(writer, folder)
    add_sampler(writer, folder)
    for name, values in tensors(folder, config):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: "GGUFWriter", config: Config, name: str) -> None:
    """The header's part about the shape."""
    size = config.head_dim or config.hidden_size // config.num_attention_heads
    writer.add_name(name)
    writer.add_file_type(types()[FLOAT16])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
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
    """The header's part about recommended settings, where the model has some."""
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
    """Every weight by its name in GGUF files; norms stay in float32."""
    import gguf
    from safetensors import safe_open

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for path in tqdm(sorted(folder.glob("*.safetensors")), desc="Writing", leave=False):
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a mapping)
                values = weights.get_tensor(name).to(torch.float32)
                if (kind := name.split(".")[-2]) in heads:
                    values = paired(values, heads[kind])
                dtype = np.float32 if values.ndim == 1 else np.float16
                found = names.get_name(name, try_suffixes=(".weight",))
                assert found is not None, name
                yield found, values.numpy().astype(dtype)


def paired(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a projection with the two of each rotary pair beside each other."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)
