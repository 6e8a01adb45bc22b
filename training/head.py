"""Train an EAGLE-3 head, which drafts for a target from the target's own hidden states.

The target is frozen, as are embedding and output matrix, which the head shares. It learns the
target's distribution, not the text, and only within answers, where it drafts. As in use, it
continues from its own output for some steps ("training-time test", arXiv 2503.01840): in step k the
row of a position stands for the k-th token after it, and sees the target's states up to the
position and its own earlier steps.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoTokenizer, LlamaConfig

from bench.harness import Add, Command
from engine.heads.eagle3 import (
    Eagle3,
    Eagle3Shape,
    Target,
    read_head,
    tapped,
    taps_of,
    usual_layers,
    write_head,
)
from engine.models.load_transformers import pick_device
from engine.models.shape import Model
from engine.models.torch_heads import weights_digest
from training.prepare import SPECIAL, Corpus
from training.train import Fit, Loss, add_plan, check, loaded, placed, plan_of, train

STEPS, FADE = 5, 0.8
"""Steps on the head's own output, and the weight of each step relative to the one before."""
SPREAD = 0.02
"""The standard deviation of random initial weights."""


class TrainHead(Command):
    """Train an EAGLE-3 head, which drafts for a target from the target's own hidden states."""

    def add_options(self, add: Add) -> None:
        add_head(add, 3)
        add("--ahead", type=int, default=STEPS, help="steps that it learns to go on for")

    def run(self, options: argparse.Namespace) -> None:
        train_head(
            options,
            lambda target: new_head(target, options.layers),
            lambda folder, target: read_head(folder, target)[0],
            lambda head, target, *marks: of_target(head, target, options.ahead, *marks),
            save,
        )


def add_head(add: Add, layers: int | str) -> None:
    """Declare the options of training a head, which reads so many layers (argparse's `nargs`)."""
    add_plan(add)
    add("--target", required=True, type=Path, help="the folder of the model to draft for")
    read = "hidden states that it reads (default: 2, n/2, n-3)"
    add("--layers", type=int, nargs=layers, help=read)
    add("--start", type=Path, help="begin with the weights in this folder")


def train_head(
    options: argparse.Namespace,
    begin: Callable[[Model], nn.Module],
    read: Callable[[Path, Target], nn.Module],
    loss: Callable[[Any, Model, int, int], Loss],
    save: Callable[[Any, Path, Path], None],
) -> None:
    """Train a new head or the one in `options.start`. `loss` is given the head, its target, the
    token that begins an answer, and the number of tokens that begin or end messages."""
    plan, corpus = plan_of(options), Corpus.open(options.data / "train")
    tokenizer = AutoTokenizer.from_pretrained(str(options.data / "tokenizer"))
    device = pick_device(options.device)
    target = placed(loaded(options.target), device).eval().requires_grad_(False)
    check(target.config, tokenizer, plan)
    torch.manual_seed(options.seed)
    head = begin(target)
    if options.start:
        own = target.config
        fits = Target(own.hidden_size, own.num_hidden_layers, own.vocab_size)
        head = read(options.start, fits).float().train().requires_grad_(True)
    head.to(device)
    answering: Any = tokenizer.convert_tokens_to_ids(SPECIAL[-1])
    how = loss(head, target, answering, len(SPECIAL))
    fit = Fit(head, how, corpus, plan, options.output, device)
    train(options, fit, partial(save, head, options.target))


def new_head(target: Model, layers: list[int] | None) -> Eagle3:
    """A head that begins as a copy of its target's last layer, which reads the highest of the
    chosen states and nothing else yet: it learns much faster than from random weights."""
    config, last = target.config, target.model.layers[-1]
    own = LlamaConfig(**config.to_dict() | {"num_hidden_layers": 1})
    chosen = tuple(layers or usual_layers(config.num_hidden_layers))
    head = Eagle3(Eagle3Shape(own, chosen, config.hidden_size))
    size = config.hidden_size
    with torch.no_grad():
        head.fc.weight.normal_(0, SPREAD)
        head.fc.weight[:, -size:] += torch.eye(size)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(head.midlayer.self_attn, name).weight
            weight.normal_(0, SPREAD)
            weight[:, size:] = getattr(last.self_attn, name).weight
        head.midlayer.self_attn.o_proj.load_state_dict(last.self_attn.o_proj.state_dict())
        head.midlayer.hidden_norm.load_state_dict(last.input_layernorm.state_dict())
        for name in ("mlp", "post_attention_layernorm"):
            getattr(head.midlayer, name).load_state_dict(getattr(last, name).state_dict())
        head.norm.load_state_dict(target.model.norm.state_dict())
    return head


def of_target(head: Eagle3, target: Model, ahead: int, answering: int, special: int) -> Loss:
    """Cross entropy of the target's distributions under those of the head, within answers.

    A token below `special` begins or ends a message; `answering` begins an answer.
    """
    base, taps = target.model, taps_of(target, head.shape.layers)
    embedding = target.get_input_embeddings().weight
    output = target.get_output_embeddings().weight

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found: list[torch.Tensor] = []
            with tapped(taps, found):
                seen = base(inputs, use_cache=False)
            states = torch.cat(found, dim=-1)
            rows, places = torch.nonzero(within(inputs, answering, special), as_tuple=True)
            chances = functional.linear(seen.last_hidden_state[rows, places], output)
            chances = chances.float().softmax(-1)
        count = inputs.shape[1] - ahead
        hidden = head.join(states[:, :count])
        seen_so_far = Chain(count, inputs.device)
        total, weight = torch.zeros((), device=inputs.device), 0.0
        for step in range(ahead):
            embedded = functional.embedding(targets[:, step : step + count], embedding)
            positions = torch.arange(step, step + count, device=inputs.device)[None]
            hidden = head(embedded, hidden, positions, seen_so_far.attend)
            bases = places - 1 - step
            used = (bases >= 0) & (bases < count)
            logits = functional.linear(head.norm(hidden[rows[used], bases[used]]), output)
            guessed = logits.float().log_softmax(-1)
            share = FADE**step
            total = total - share * (chances[used] * guessed).sum() / used.sum().clamp(min=1)
            weight += share
        return total / weight

    return loss


def within(inputs: torch.Tensor, answering: int, special: int) -> torch.Tensor:
    """Where the next token belongs to an answer or ends it; shape of `inputs`."""
    places = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    last = torch.where(inputs < special, places, -1).cummax(dim=1).values
    return (last >= 0) & (inputs.gather(1, last.clamp(min=0)) == answering)


class Chain:
    """The attention of all rows, step by step. A row sees the first step of all rows up to itself,
    and its own later steps."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.later = torch.full((count, count), -torch.inf, device=device).triu(1)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        groups = queries.shape[1] // keys.shape[1]
        self.keys.append(keys.repeat_interleave(groups, dim=1) if groups > 1 else keys)
        self.values.append(values.repeat_interleave(groups, dim=1) if groups > 1 else values)
        first, *own = self.keys
        queries = queries * queries.shape[-1] ** -0.5
        scores = [queries @ first.transpose(2, 3) + self.later]
        scores += [(queries * each).sum(-1, keepdim=True) for each in own]
        weights = torch.cat(scores, dim=-1).softmax(-1).to(values.dtype)
        count = first.shape[2]
        read = weights[..., :count] @ self.values[0]
        for at, each in enumerate(self.values[1:]):
            read = read + weights[..., count + at, None] * each
        return read


def save(head: Eagle3, target: Path, folder: Path) -> None:
    write_head(head, folder, target.name, weights_digest(str(target)), STEPS)
