"""The training loop: the same whether a model learns from text or from a larger model.

Muon for the matrices inside the layers, AdamW for embeddings and norms, both torch's own; a
learning rate that rises, stays and decays (WSD). A checkpoint holds all that the loop needs, so a
run that was stopped goes on exactly where it was.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import get_wsd_schedule

from engine.errors import SettingError, first_line

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
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
    `passes` says how often a source comes in an epoch, where that is not once."""

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
    """One model in training. `windows` yields pieces of length + 1 tokens."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss,
        windows: Iterator[NDArray[np.uint16]],
        plan: Plan,
        folder: Path,
        device: torch.device,
    ) -> None:
        self.model, self.loss, self.windows = model, loss, windows
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
        self.step = 0
        self.seconds = 0.0
        folder.mkdir(parents=True, exist_ok=True)

    def resume(self) -> bool:
        """Go on from the checkpoint, where there is one. Raises SettingError for another plan."""
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
        parts = (*self.optimizers, *self.schedules)
        for part, state in zip(parts, found["parts"], strict=True):
            part.load_state_dict(state)
        self.step, self.seconds = found["step"], found["seconds"]
        skipped = self.step * self.plan.sequences
        next(islice(self.windows, skipped, skipped), None)
        return True

    def save(self) -> None:
        """Write the checkpoint, so that a crash leaves the old one or the new one."""
        path = self.folder / CHECKPOINT
        parts = (*self.optimizers, *self.schedules)
        state = {
            "plan": asdict(self.plan),
            "model": self.model.state_dict(),
            "parts": [part.state_dict() for part in parts],
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(state, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)

    def run(self, minutes: float | None = None) -> bool:
        """Train to the end of the plan, or for so many minutes; returns whether it is done."""
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
            with mixed(self.device):
                loss: Any = self.loss(batch[:, :-1], batch[:, 1:])
            (loss / pieces).backward()  # torch does not annotate it
            total += loss.detach() / pieces
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), plan.clip)
        for part in (*self.optimizers, *self.schedules):
            part.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return float(total)


def mixed(device: torch.device) -> AbstractContextManager[object]:
    """Matrix products in bfloat16; weights and what the optimizers know stay in float32."""
    return torch.autocast(device.type, torch.bfloat16)


def optimizers_of(model: torch.nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for all else."""
    named = [(name, values) for name, values in model.named_parameters() if values.requires_grad]
    inner = [values for name, values in named if values.ndim == 2 and "embed" not in name]
    outer = [values for name, values in named if values.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(
        inner, lr=plan.rate, weight_decay=plan.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(outer, lr=plan.adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adam]
