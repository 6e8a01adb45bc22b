"""Makes the models that are measured: small ones in a larger shape.

An inflated model (engine/models/inflate.py) computes the same function as its original. Both are
compared along the same texts, token by token. Sums are arranged differently in the two, so they may
differ as far as rounding explains it.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from bench.harness import EMBEDDED, Add, Measurement, at_least
from bench.prompts import PROMPTS, cut_prompt, read_prompts
from bench.report import Record, table
from engine.backends.transformers import TransformersBackend
from engine.decode import never
from engine.errors import ModelError, SettingError
from engine.models.inflate import WRITERS, inflated_config, skeleton, write
from engine.models.load_transformers import DTYPES, TOLERANCE, load_transformers
from engine.models.shape import SHAPES, Config, Model, Shape, check_fits
from engine.prompt import Chat
from engine.settings import Runtime, Sampling
from engine.tree import Tree

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

    def add_options(self, add: Add) -> None:
        names = ",".join(item.name.upper() for item in fields(Shape))
        add("--size", choices=SHAPES, help="of the embedded model")
        add("--shape", type=Shape.read, metavar=names, help="for a model of any size")
        add("--output", type=Path, required=True, help="a new or empty folder")
        add("--model", default="embedded", help="'embedded' or a folder")
        add("--bits", type=int, choices=BITS, help="round the original's weights first")
        add("--dtype", choices=DTYPES, default="bfloat16")
        add("--seed", type=int, default=0, help="of the idle weights")
        add("--device", default="auto", help="where the two models are compared")
        add("--limit", type=at_least(0), default=0, help="prompts compared, 0 for every one")
        add("--max-new-tokens", type=at_least(1), default=64, help="tokens compared of each")

    def record(self, options: argparse.Namespace, stack: ExitStack) -> Record:
        if (options.size is None) == (options.shape is None):
            raise SettingError("Give --size or --shape. See `python -m bench inflate --help`.")
        shape = options.shape or SHAPES[options.size]
        if options.model != "embedded" and not Path(options.model).is_dir():
            raise SettingError(
                f"The model {options.model!r} is not a folder. Only transformers models can be "
                "inflated: give the folder of one, or 'embedded'."
            )
        output = options.output
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise SettingError(f"The output {str(output)!r} is not an empty folder. Give another.")
        output = output.absolute()
        source = EMBEDDED if options.model == "embedded" else Path(options.model)
        runtime = Runtime(device=options.device, dtype=options.dtype)
        original = load_transformers(str(source), runtime)
        check_fits(original.model.config, shape)
        if options.bits is not None:
            rounded(original.model, options.bits)
        write(original.model, shape, source, output, options.seed)
        record = {"model": output.name, "original": original.info.name, "dtype": options.dtype}
        record |= {"bits": options.bits, "from": asdict(Shape.of(original.model.config))}
        record |= sizes(original.model.config, shape, original.model.dtype)
        inflated = load_transformers(str(output), runtime)
        record |= verify(original, inflated, options)
        self.verified = record["verified"]
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
                f"The model in {str(options.output)!r} is not its original: see above. Do not "
                "measure with it."
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
        return (
            self.tokens > 0
            and self.logit_difference <= TOLERANCE[self.dtype]
            and max(self.gaps, default=0.0) <= NEAR_TIE[self.dtype]
        )


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
    found = compare(original, inflated, prompts, options.max_new_tokens)
    old, new = original.info, inflated.info
    apart = old.fingerprint != new.fingerprint
    same = old.tokenizer_fingerprint == new.tokenizer_fingerprint
    return {
        "verified": found.holds and apart and same,
        "tokens": found.tokens,
        "divergences": len(found.gaps),
        "largest_gap": max(found.gaps, default=0.0),
        "max_logit_difference": found.logit_difference,
        "prompts": len(prompts),
        "fingerprints_differ": apart,
        "same_tokenizer": same,
        "can_tree": new.can_tree,
    }
