"""Makes the models that are measured: inflated ones, and GGUF files of folders.

An inflated model (engine/models/inflate.py) computes the same function as its original. Both are
compared along the same texts, token by token. Sums are arranged differently in the two, so they may
differ as far as rounding explains it: in logits by little, and in tokens only where the original
nearly ties.

A GGUF file makes it possible to measure one model with both libraries. The format's own library
writes it in float16; if another type is asked for, llama.cpp then quantizes it. The two rows of a
rotary pair are neighbours in llama.cpp and half a head apart in transformers, so the rows of the
query and key projections are reordered. Both libraries may be missing, so they are imported late.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer

from bench.harness import (
    EMBEDDED,
    PROMPTS,
    Add,
    Measurement,
    Record,
    at_least,
    cut_prompt,
    one_of,
    read_prompts,
    table,
)
from engine.backends.transformers import TransformersBackend
from engine.decode import never
from engine.errors import ModelError, SettingError
from engine.heads.eagle3 import Target, read_head
from engine.models.inflate import WRITERS, inflated_config, skeleton, write
from engine.models.load_transformers import DTYPES, TOLERANCE, load_transformers
from engine.models.shape import SHAPES, Config, Model, Shape, check_fits
from engine.prompt import Chat
from engine.settings import Sampling
from engine.tree import Tree

if TYPE_CHECKING:
    from gguf import GGUFWriter

GROUP = 64
"""Weights that share a scale when they are rounded."""
BITS = range(2, 9)
NEAR_TIE = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.03}
"""How far the original's logit of the inflated model's token may be below its best logit.

In bfloat16 the embedded model's logits differ by 0.1 when rows are computed together or alone.
"""
GREEDY = Sampling(temperature=0.0)


class Inflate(Measurement):
    """Write an inflated model, and compare it with its original."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        shapes = parser.add_mutually_exclusive_group(required=True)
        help_ = f"{', '.join(SHAPES)} (for the embedded model)"
        shapes.add_argument("--size", type=one_of("size", SHAPES), help=help_)
        numbers = ",".join(item.name.upper() for item in fields(Shape))
        help_ = "for a model of any size"
        shapes.add_argument("--shape", type=Shape.read, metavar=numbers, help=help_)
        super().add_arguments(parser)

    def add_options(self, add: Add) -> None:
        add("--output", type=Path, required=True, help="a new or empty folder")
        add("--model", default="embedded", help="'embedded' or a folder")
        add("--bits", type=int, help="round the original's weights first: 2 to 8")
        add("--dtype", type=one_of("dtype", DTYPES), default="bfloat16", help=", ".join(DTYPES))
        add("--seed", type=int, default=0, help="of the idle weights")
        add("--device", default="auto", help="where the two models are compared")
        add("--no-verify", action="store_true", help="write only, do not compare")
        add("--limit", type=at_least(0), default=0, help="prompts compared, 0 for every one")
        add("--max-new-tokens", type=at_least(1), default=64, help="tokens compared of each")

    def check(self, options: argparse.Namespace) -> None:
        options.shape = options.shape or SHAPES[options.size]
        if options.bits is not None and options.bits not in BITS:
            raise SettingError(f"Weights cannot be rounded to {options.bits} bits. Give 2 to 8.")
        if options.model != "embedded" and not Path(options.model).is_dir():
            raise SettingError(
                f"The model {options.model!r} is not a folder. Only transformers models can be "
                "inflated: give the folder of one, or 'embedded'."
            )
        output = options.output
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise SettingError(
                f"The output {str(output)!r} exists and is not an empty folder. Give another."
            )

    def record(self, options: argparse.Namespace) -> Record:
        shape, output = options.shape, options.output.absolute()
        source = EMBEDDED if options.model == "embedded" else Path(options.model)
        original = load_transformers(str(source), device=options.device, dtype=options.dtype)
        check_fits(original.model.config, shape)
        if options.bits is not None:
            rounded(original.model, options.bits)
        with tqdm(unit="parameter", unit_scale=True, leave=False) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            write(original.model, shape, source, output, options.seed, progress)
        record = {"model": output.name, "original": original.info.name, "dtype": options.dtype}
        record |= {"bits": options.bits, "from": asdict(Shape.of(original.model.config))}
        record |= sizes(original.model.config, shape, original.model.dtype)
        if not options.no_verify:
            inflated = load_transformers(str(output), device=options.device, dtype=options.dtype)
            record |= verify(original, inflated, options)
        self.original, self.verified = original.info.name, record.get("verified", True)
        return record

    def show(self, record: Record) -> None:
        print(
            f"{record['model']}: {record['parameters'] / 1e6:,.1f} M parameters "
            f"({record['zeros']:.0%} of them zero), {record['bytes'] / 1e9:.2f} GB, "
            f"{record['dtype']}"
            + (f", rounded to {record['bits']} bits\n" if record["bits"] else "\n")
        )
        names = [name.replace("_", " ") for name in record["shape"]]
        rows = ((record["original"], record["from"]), (record["model"], record["shape"]))
        table(("", *names), ((name, *(f"{n:,}" for n in s.values())) for name, s in rows))
        if "verified" not in record:
            print("\nnot compared with the original")
            return
        differ = f"{record['divergences']} differ" if record["divergences"] else "identical"
        print(
            f"\n{record['tokens']} tokens on {record['prompts']} prompts, {differ}, logits by at "
            f"most {record['max_logit_difference']:.3g}; where tokens differ, the original's gap "
            f"is at most {record['largest_gap']:.3g}"
        )
        print("verified" if record["verified"] else "WRONG: this is another model")

    def run(self, options: argparse.Namespace) -> None:
        """Raises ModelError if the model that was written does not equal its original."""
        super().run(options)
        if not self.verified:
            raise ModelError(
                f"The model in {str(options.output)!r} is not what {self.original!r} is: see "
                "above. Do not measure with it."
            )


def rounded(model: Model, bits: int) -> None:
    """Round every matrix of a model to `bits` bits, in groups of GROUP with a common scale.

    The answers are nearly those of the original, so this makes a draft model of high acceptance.
    Written into a shape of a fraction of the original's size, it stands for a quantised copy, which
    reads as many bytes.
    """
    steps = 2 ** (bits - 1)
    for weight in model.parameters():
        if weight.dim() == 2:
            groups = weight.data.float().reshape(-1, GROUP)
            scale = groups.abs().amax(1, keepdim=True).clamp(min=1e-9) / (steps - 0.5)
            # An even number of levels around zero: the middle of each step.
            levels = (groups / scale - 0.5).round().clamp(-steps, steps - 1) + 0.5
            weight.data = (levels * scale).reshape(weight.shape).to(weight.dtype)


def sizes(config: Config, shape: Shape, dtype: torch.dtype) -> Record:
    """The figures that follow from the shape; `zeros` is the share of weights that are zero."""
    new = inflated_config(config, shape)
    weights, original = skeleton(new), skeleton(config)
    parameters = sum(weight.numel() for weight in weights.values())
    zeros = sum(
        weight.numel() - (original[name].numel() if name in original else 0)
        for name, weight in weights.items()
        if name.split(".")[-2] in WRITERS
    )
    return {
        "shape": asdict(shape),
        "parameters": parameters,
        "bytes": parameters * dtype.itemsize,
        "zeros": round(zeros / parameters, 3),
    }


@dataclass(slots=True)
class Comparison:
    """Two models of one dtype on the same texts, greedily, token by token.

    `gaps` belong to the positions where they prefer different tokens: how far the original's logit
    of the other's choice is below its best one.
    """

    dtype: torch.dtype
    tokens: int = 0
    logit_difference: float = 0.0
    gaps: list[float] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether rounding explains every difference."""
        return (
            self.tokens > 0
            and self.logit_difference <= TOLERANCE[self.dtype]
            and max(self.gaps, default=0.0) <= NEAR_TIE[self.dtype]
        )

    def figures(self) -> Record:
        return {
            "verified": self.holds,
            "tokens": self.tokens,
            "divergences": len(self.gaps),
            "largest_gap": max(self.gaps, default=0.0),
            "max_logit_difference": self.logit_difference,
        }


def compare(
    original: TransformersBackend,
    inflated: TransformersBackend,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> Comparison:
    """Run both models along the original's greedy answers, in lock step.

    Where they differ, both continue with the original's token, so that every token counts.
    """
    result = Comparison(original.model.dtype)
    for prompt in tqdm(prompts, desc="Verifying", leave=False):
        tokens = list(prompt)
        for backend in (original, inflated):
            backend.reset()
            backend.prefill(tokens, never)
        for _ in range(max_tokens):
            rows = []
            for backend in (original, inflated):
                rows.append(backend.score(Tree(tokens[-1]), GREEDY).row(0).copy())
                backend.accept([])
            best, other = (int(row.argmax()) for row in rows)
            # Not Python's max, which forgets a NaN.
            difference = np.maximum(result.logit_difference, np.abs(rows[0] - rows[1]).max())
            result.logit_difference = float(difference)
            result.tokens += 1
            if other != best:
                result.gaps.append(float(rows[0][best] - rows[0][other]))
            if best in original.info.eos_ids:
                break
            tokens.append(best)
    return result


def verify(
    original: TransformersBackend, inflated: TransformersBackend, options: argparse.Namespace
) -> Record:
    """Compare, and say whether the inflated model may be used in place of the original.

    It also needs a fingerprint of its own, so that what is learned is kept apart, and the same
    tokenizer, so that its statistics are found.
    """
    room = original.info.context_length - options.max_new_tokens - 1
    questions = read_prompts(PROMPTS, options.limit)
    prompts = [cut_prompt(Chat(original), text, room) for _, text in questions]
    figures = compare(original, inflated, prompts, options.max_new_tokens).figures()
    old, new = original.info, inflated.info
    apart = old.fingerprint != new.fingerprint
    same = old.tokenizer_fingerprint == new.tokenizer_fingerprint
    figures["verified"] &= apart and same
    return figures | {
        "prompts": len(prompts),
        "fingerprints_differ": apart,
        "same_tokenizer": same,
        "can_tree": new.can_tree,
    }


# GGUF files


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


class ToGguf(Measurement):
    """A Llama-like model as a GGUF file."""

    def add_options(self, add: Add) -> None:
        add("source", type=Path, help="the folder of a Llama-like model with byte-level BPE")
        add("target", type=Path, help="the GGUF file to write")
        add("--type", default=FLOAT16, help="of the weights: F16, F32, Q8_0, Q4_K_M, ...")
        add("--threads", type=int, default=2)

    def record(self, options: argparse.Namespace) -> Record:
        convert(options.source, options.target, options.type, options.threads)
        return written(options.target, options.type)

    def show(self, record: Record) -> None:
        print("{file}: {bytes:,} bytes, {type}".format(**record))


class HeadToGguf(ToGguf):
    """An EAGLE-3 head as a GGUF file, for llama.cpp to draft with for the model's GGUF file.

    The file has no embedding and no output matrix, because those are the model's. Its header holds
    the model's tokenizer, by which programs see that the two belong together. The file is found
    next to the model's if its name begins with "eagle3-".
    """

    def add_options(self, add: Add) -> None:
        add("head", type=Path, help="the folder of an EAGLE-3 head that knows all tokens")
        add("model", type=Path, help="the folder of the model that it drafts for")
        add("target", type=Path, help="the GGUF file to write")

    def record(self, options: argparse.Namespace) -> Record:
        write_head(options.head, options.model, options.target)
        return written(options.target, FLOAT16)


def written(file: Path, kind: str) -> Record:
    return {"file": file.name, "bytes": file.stat().st_size, "type": kind}


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
    """Write the model in a folder as a GGUF file. Raises SettingError for a type unknown."""
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
    """Write a head in float16. Raises ModelError for one that cannot be written so."""
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
