"""The training loop, for models that learn from text or from a larger model.

Muon for the matrices inside the layers, AdamW for embeddings and norms, both torch's own; a
learning rate that rises, stays and decays (WSD). A checkpoint holds all that the loop needs, so a
run that was stopped continues exactly where it stopped.
"""

import argparse
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    get_wsd_schedule,
)

from bench.harness import Add, Command
from engine.errors import ModelError, SettingError, first_line
from engine.models.load_transformers import pick_device
from engine.models.shape import Config, Model, Shape
from training.gguf import convert
from training.prepare import Corpus, TransformersTokenizer, copy_tokenizer

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
ADAM = re.compile("embed|codebook")
"""Matches the names of matrices with a row per token, which AdamW trains."""
EVERY_SECONDS = 300.0
"""How often a checkpoint is written."""
LOGGED = 10
"""Steps per line of the log."""

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The mean loss of a batch: of inputs and the tokens after them, shape (sequences, length)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast a model learns. `rate` is Muon's learning rate, `adam_rate` AdamW's;
    `warmup` and `decay` are parts of `steps`. A batch is read in pieces of `micro` sequences.
    `passes` says how often a source comes in an epoch, for sources that do not come once."""

    steps: int
    length: int = 512
    sequences: int = 32
    micro: int = 8
    rate: float = 0.01
    adam_rate: float = 0.004
    warmup: float = 0.02
    decay: float = 0.3
    weight_decay: float = 0.05
    clip: float = 1.0
    seed: int = 0
    passes: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name == "passes":
                continue
            if value < 0 or (value == 0 and name in {"steps", "length", "sequences", "micro"}):
                raise SettingError(f"The training plan has {name} = {value}. Choose more.")
            if value > 1 and name in {"warmup", "decay"}:
                raise SettingError(f"The training plan has {name} = {value}. It is a part of 1.")
        if self.sequences % self.micro:
            raise SettingError(
                f"A batch of {self.sequences} sequences is no multiple of {self.micro}, the "
                "sequences that are computed at a time."
            )


class Fit:
    """One model in training."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss,
        corpus: Corpus,
        plan: Plan,
        folder: Path,
        device: torch.device,
    ) -> None:
        self.model, self.loss = model, loss
        self.windows = corpus.windows(plan.length, plan.passes, plan.seed)
        self.plan, self.folder, self.device = plan, folder, device
        self.optimizers = optimizers_of(model, plan)
        warmup = max(1, round(plan.warmup * plan.steps))
        decay = min(round(plan.decay * plan.steps), plan.steps - warmup)
        self.schedules = [
            get_wsd_schedule(
                optimizer, warmup, decay, num_training_steps=plan.steps, decay_type="1-sqrt"
            )
            for optimizer in self.optimizers
        ]
        self.parts = (*self.optimizers, *self.schedules)
        # A processor that only emulates bfloat16 takes three times as long (docs/log.md).
        self.few_bits = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
        self.step = 0
        self.seconds = 0.0
        folder.mkdir(parents=True, exist_ok=True)

    def resume(self) -> bool:
        """Continue from the checkpoint, if there is one. Raises SettingError for another plan."""
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return False
        try:
            found = torch.load(path, map_location=self.device, weights_only=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise SettingError(
                f"The checkpoint {str(path)!r} cannot be read ({first_line(error)}). Delete it to "
                "begin again."
            ) from error
        shapes = {name: values.shape for name, values in self.model.state_dict().items()}
        if {name: values.shape for name, values in found["model"].items()} != shapes:
            raise SettingError(
                f"The checkpoint {str(path)!r} is of a model of another shape. Choose another "
                "folder, or delete it."
            )
        if found["plan"] != asdict(self.plan):
            raise SettingError(
                f"The checkpoint {str(path)!r} is of another training plan: {found['plan']}. "
                "Choose another folder, or delete it."
            )
        self.model.load_state_dict(found["model"])
        for part, state in zip(self.parts, found["parts"], strict=True):
            part.load_state_dict(state)
        self.step, self.seconds = found["step"], found["seconds"]
        skipped = self.step * self.plan.sequences
        next(islice(self.windows, skipped, skipped), None)
        return True

    def save(self) -> None:
        """Write the checkpoint. A crash leaves either the old or the new one."""
        path = self.folder / CHECKPOINT
        state = {
            "plan": asdict(self.plan),
            "model": self.model.state_dict(),
            "parts": [part.state_dict() for part in self.parts],
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(state, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)

    def run(self, minutes: float | None = None) -> bool:
        """Train to the end of the plan, at most for `minutes`; returns whether the plan is done."""
        start = saved = time.monotonic()
        already = self.seconds
        progress = tqdm(total=self.plan.steps, initial=self.step, unit=" steps")
        losses: list[float] = []
        self.model.train()
        with progress, (self.folder / LOG).open("a", encoding="utf-8") as log:
            while self.step < self.plan.steps:
                losses.append(self.learn())
                self.step += 1
                now = time.monotonic()
                self.seconds = already + now - start
                progress.update()
                if self.step % LOGGED == 0 or self.step == self.plan.steps:
                    line = {
                        "step": self.step,
                        "tokens": self.step * self.plan.sequences * self.plan.length,
                        "loss": round(float(np.mean(losses)), 4),
                        "seconds": round(self.seconds, 1),
                    }
                    progress.set_postfix(loss=line["loss"])
                    log.write(json.dumps(line) + "\n")
                    log.flush()
                    losses.clear()
                if now - saved > EVERY_SECONDS:
                    self.save()
                    saved = time.monotonic()
                if minutes is not None and now - start > 60 * minutes:
                    break
        self.save()
        return self.step >= self.plan.steps

    def learn(self) -> float:
        """One step of all optimizers; returns the mean loss of its batch."""
        plan, total = self.plan, torch.zeros((), device=self.device)
        pieces = plan.sequences // plan.micro
        for _ in range(pieces):
            rows = np.stack(list(islice(self.windows, plan.micro))).astype(np.int64)
            batch = torch.from_numpy(rows).to(self.device, non_blocking=True)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.few_bits):
                loss: Any = self.loss(batch[:, :-1], batch[:, 1:])
            (loss / pieces).backward()  # torch does not annotate it
            total += loss.detach() / pieces
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), plan.clip)
        for part in self.parts:
            part.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return float(total)


def optimizers_of(model: torch.nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    named = [(name, values) for name, values in model.named_parameters() if values.requires_grad]
    inner = [values for name, values in named if values.ndim == 2 and not ADAM.search(name)]
    outer = [values for name, values in named if values.ndim != 2 or ADAM.search(name)]
    muon = torch.optim.Muon(
        inner, lr=plan.rate, weight_decay=plan.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(outer, lr=plan.adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adam]


# family members


HEAD = 64
"""The size of every head, which the inflated models of the benchmarks require."""
PLAN = Plan(steps=1)


class Train(Command):
    """Train a family member on packed tokens, from random weights or from those of a folder.

    With a teacher it learns the teacher's distribution instead of the tokens alone. A draft that
    agrees with its target is accepted more often than one that knows the text as well in its own
    way.
    """

    def add_options(self, add: Add) -> None:
        add_plan(add)
        add("--shape", type=Shape.read, help="HIDDEN,INTERMEDIATE,HEADS,KV_HEADS,LAYERS")
        add("--start", type=Path, help="begin with the weights in this folder")
        add("--teacher", type=Path, help="learn the distribution of the model in this folder")
        add("--context", type=int, default=2048, help="positions that a new model has")
        add("--theta", type=float, default=10_000.0, help="base of its rotary positions")
        add("--compile", action="store_true", help="have torch compile model and loss first")

    def run(self, options: argparse.Namespace) -> None:
        plan, corpus = plan_of(options), Corpus.open(options.data / "train")
        tokenizer = AutoTokenizer.from_pretrained(str(options.data / "tokenizer"))
        device = pick_device(options.device)
        model = placed(student(options, tokenizer), device)
        check(model.config, tokenizer, plan)
        loss = of_text(model)
        if options.teacher:
            loss = of_teacher(model, placed(loaded(options.teacher), device).eval())
        if options.compile:
            loss = torch.compile(loss)

        def save(weights: Path) -> None:
            model.save_pretrained(weights)
            copy_tokenizer(options.data / "tokenizer", weights)

        train(options, Fit(model, loss, corpus, plan, options.output, device), save)


def add_plan(add: Add) -> None:
    add("data", type=Path, help="the folder that `training prepare` wrote")
    add("--output", required=True, type=Path, help="a folder for checkpoint, log and weights")
    add("--passes", nargs="*", default=[], metavar="SOURCE=N", help="how often per epoch")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--minutes", type=float, help="stop after so many; the same command continues later")
    add("--steps", type=int, required=True)
    for name in ("length", "sequences", "micro", "seed"):
        add(f"--{name}", type=int, default=getattr(PLAN, name))
    for name in ("rate", "adam_rate", "warmup", "decay", "weight_decay", "clip"):
        add(f"--{name.replace('_', '-')}", type=float, default=getattr(PLAN, name))


def plan_of(options: argparse.Namespace) -> Plan:
    values = vars(options) | {"passes": passes_of(options.passes)}
    return Plan(**{name: values[name] for name in Plan.__slots__})


def train(options: argparse.Namespace, fit: Fit, save: Callable[[Path], None]) -> None:
    """Train to the end of the plan or of the time, `save` the weights, and report progress."""
    if fit.resume():
        print(f"Going on after step {fit.step:,} of {fit.plan.steps:,}.")
    done = fit.run(options.minutes)
    weights = options.output / "weights"
    save(weights)
    print(f"{fit.step:,} of {fit.plan.steps:,} steps in {fit.seconds / 60:.1f} minutes: {weights}")
    if not done:
        print("The same command continues from here.")


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
    """The model on its device. Compiled plain attention trains faster on a processor than torch's
    fused attention (docs/log.md)."""
    if device.type == "cpu":
        model.set_attn_implementation("eager")
    return model.to(device)


def check(config: Config, tokenizer: TransformersTokenizer, plan: Plan) -> None:
    """Raise SettingError if a model cannot read the windows of a plan."""
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
    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(inputs, use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    return loss


def of_teacher(model: Model, teacher: Model) -> Loss:
    """Kullback-Leibler divergence of the student's distribution from the teacher's."""

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            expected = teacher(inputs, use_cache=False).logits.float().log_softmax(-1)
        found = model(inputs, use_cache=False).logits.float().log_softmax(-1)
        return functional.kl_div(
            found.flatten(0, 1), expected.flatten(0, 1), reduction="batchmean", log_target=True
        )

    return loss


# export


class Export(Command):
    """Write the files that the project ships: a folder for transformers and a GGUF file.

    Weights are stored in float16, those of the GGUF file in Q8_0. The recommended sampler goes into
    generation_config.json, and from there into the header of the GGUF file.
    """

    def add_options(self, add: Add) -> None:
        add("weights", type=Path, help="a folder that `training train` wrote")
        add("output", type=Path, help="the folder to write; the GGUF file goes next to it")
        add("--type", default="Q8_0", help="of the GGUF weights: F16, Q8_0, ...")
        add("--temperature", type=float, default=0.8, help="the recommended temperature")
        add("--min-p", type=float, default=0.05)
        add("--threads", type=int, default=2)

    def run(self, options: argparse.Namespace) -> None:
        folder, file = options.output, options.output.with_suffix(".gguf")
        folder.parent.mkdir(parents=True, exist_ok=True)
        # If anything fails, the existing files are kept.
        with tempfile.TemporaryDirectory(dir=folder.parent) as place:
            written = Path(place) / folder.name
            store(options, written)
            convert(written, written.with_suffix(".gguf"), options.type, options.threads)
            shutil.rmtree(folder, ignore_errors=True)
            written.replace(folder)
            written.with_suffix(".gguf").replace(file)
        for path in (folder / "model.safetensors", file):
            print(f"{path}: {path.stat().st_size:,} bytes")


def store(options: argparse.Namespace, folder: Path) -> None:
    """Write weights, tokenizer and recommended sampler. Raises ModelError."""
    model = loaded(options.weights)
    largest = max(float(values.detach().abs().max()) for values in model.parameters())
    if not largest <= torch.finfo(torch.float16).max:
        raise ModelError(
            f"The largest weight in {str(options.weights)!r} is {largest:g}, which float16 cannot "
            "hold. The training went wrong; begin again with a lower --rate."
        )
    config: dict[str, Any] = {
        name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id")
    }
    config |= {"pad_token_id": model.config.pad_token_id, "do_sample": True}
    config |= {"temperature": options.temperature, "min_p": options.min_p}
    model.generation_config = GenerationConfig.from_dict(config)
    model.half().save_pretrained(folder)
    copy_tokenizer(options.weights, folder)
