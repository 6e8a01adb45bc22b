"""Train a family member on packed tokens, from random weights or from those of a folder.

With a teacher it learns the teacher's distribution instead of the tokens alone: a draft that agrees
with its target is accepted more often than one that knows the text as well in its own way.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from bench.shape import Config, Model, Shape
from engine.errors import ModelError, SettingError
from engine.models.load_transformers import pick_device
from training.corpus import Corpus
from training.fit import Fit, Loss, Plan
from training.prepare import TransformersTokenizer, copy_tokenizer

HEAD = 64
"""The size of every head: what the inflated models of the benchmarks are made for."""
PLAN = Plan(steps=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `training train`."""
    add = parser.add_argument
    add("data", type=Path, help="the folder that `training prepare` wrote")
    add("--output", required=True, type=Path, help="a folder for checkpoint, log and weights")
    add("--shape", type=Shape.read, help="HIDDEN,INTERMEDIATE,HEADS,KV_HEADS,LAYERS")
    add("--start", type=Path, help="begin with the weights in this folder")
    add("--teacher", type=Path, help="learn the distribution of the model in this folder")
    add("--context", type=int, default=2048, help="positions that a new model has")
    add("--theta", type=float, default=10_000.0, help="base of its rotary positions")
    add("--compile", action="store_true", help="have torch compile model and loss first")
    add_plan(parser)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Declare what any training is told: how often, how long, where, and the plan."""
    add = parser.add_argument
    add("--passes", nargs="*", default=[], metavar="SOURCE=N", help="how often per epoch")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--minutes", type=float, help="stop after so many, to be gone on with later")
    add("--steps", type=int, required=True)
    for name in ("length", "sequences", "micro", "seed"):
        add(f"--{name}", type=int, default=getattr(PLAN, name))
    for name in ("rate", "adam_rate", "warmup", "decay", "weight_decay", "clip"):
        add(f"--{name.replace('_', '-')}", type=float, default=getattr(PLAN, name))


def run(options: argparse.Namespace) -> None:
    """Train to the end of the plan or of the time, and write the weights."""
    wanted = vars(options) | {"passes": passes_of(options.passes)}
    plan = Plan(**{name: wanted[name] for name in Plan.__slots__})
    corpus = Corpus.open(options.data / "train")
    tokenizer = AutoTokenizer.from_pretrained(str(options.data / "tokenizer"))
    device = pick_device(options.device)
    model = placed(student(options, tokenizer), device)
    check(model.config, tokenizer, plan)
    loss = of_text(model)
    if options.teacher:
        loss = of_teacher(model, placed(loaded(options.teacher), device).eval())
    if options.compile:
        loss = torch.compile(loss)
    windows = corpus.windows(plan.length, plan.passes, plan.seed)
    fit = Fit(model, loss, windows, plan, options.output, device)
    if fit.resume():
        print(f"Going on after step {fit.step:,} of {plan.steps:,}.")
    done = fit.run(options.minutes)
    weights = options.output / "weights"
    model.save_pretrained(weights)
    copy_tokenizer(options.data / "tokenizer", weights)
    print(f"{fit.step:,} of {plan.steps:,} steps in {fit.seconds / 60:.1f} minutes: {weights}")
    if not done:
        print("The same command goes on from here.")


def student(options: argparse.Namespace, tokenizer: TransformersTokenizer) -> Model:
    """The model to be trained, in float32. Raises SettingError, ModelError."""
    if (options.start is None) == (options.shape is None):
        raise SettingError("Say either the --shape of a new model or a folder to --start from.")
    if options.start is not None:
        return loaded(options.start)
    torch.manual_seed(options.seed)
    config = config_of(options.shape, tokenizer, options.context, options.theta)
    maker: Any = AutoModelForCausalLM  # it does not annotate what is called
    return maker.from_config(config, dtype=torch.float32)


def config_of(
    shape: Shape, tokenizer: TransformersTokenizer, context: int, theta: float
) -> LlamaConfig:
    """The config of a family member: a Llama model whose embeddings are also its last layer."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=HEAD,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def loaded(folder: Path) -> Model:
    """The model in a folder, in float32. Raises ModelError."""
    try:
        return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ModelError(f"There is no model in {str(folder)!r}: {error}") from error


def placed(model: Model, device: torch.device) -> Model:
    """The model on its device. Plain attention, once compiled, trains faster on a processor than
    torch's fused one does (docs/log.md)."""
    if device.type == "cpu":
        model.set_attn_implementation("eager")
    return model.to(device)


def check(config: Config, tokenizer: TransformersTokenizer, plan: Plan) -> None:
    """Raise SettingError where a model cannot read the windows of a plan."""
    if len(tokenizer) > config.vocab_size:
        raise SettingError(
            f"The model knows {config.vocab_size:,} tokens, the tokenizer of the data "
            f"{len(tokenizer):,}. Prepare the data with the model's own: --tokenizer."
        )
    if plan.length > config.max_position_embeddings:
        raise SettingError(
            f"Windows of {plan.length:,} tokens are longer than the model's context of "
            f"{config.max_position_embeddings:,}. Choose a shorter --length."
        )


def passes_of(words: list[str]) -> dict[str, float]:
    """How often each source comes in an epoch, from texts like "gsm8k=2". Raises SettingError."""
    passes = {}
    for word in words:
        name, _, times = word.partition("=")
        try:
            passes[name] = float(times)
        except ValueError:
            passes[name] = -1.0
        if not 0 <= passes[name] <= 100:
            raise SettingError(f"There is no pass {word!r}. Write SOURCE=N, with N up to 100.")
    return passes


def of_text(model: Model) -> Loss:
    """Cross entropy of the text."""

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(inputs, use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    return loss


def of_teacher(model: Model, teacher: Model) -> Loss:
    """Kullback-Leibler divergence of the student's distribution from the teacher's."""

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(inputs, use_cache=False).logits.float().log_softmax(-1)
        found = model(inputs, use_cache=False).logits.float().log_softmax(-1)
        return functional.kl_div(
            found.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True
        )

    return loss
