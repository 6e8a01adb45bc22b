"""Train a DFlash head, which guesses a whole block of tokens in one forward.

The target is frozen, as are embedding and output matrix, which the head shares. In every window
some places within answers are taken as the last decided token of a block. The head learns the
target's distributions of the tokens after it, and never sees these tokens, except that its selector
is given the one before each place.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import LlamaConfig

from bench.harness import Add, Command
from engine.heads.dflash import SELECTING, Dflash, DflashShape, read_dflash
from engine.heads.eagle3 import LAYER_FIELDS, TARGET_KEY, tapped, taps_of, usual_layers
from engine.models.shape import Model
from engine.models.torch_heads import weights_digest
from training.head import SPREAD, add_head, train_head, within
from training.train import Loss

FADE = 0.85
"""The weight of a place relative to the one before."""
ALONE = 0.5
"""The weight of the loss without the selector relative to the one with it."""
SHARP = 1.5
"""The first weights of the norms of queries and keys."""


class TrainBlock(Command):
    """Train a DFlash head, which guesses a whole block of tokens in one forward."""

    def add_options(self, add: Add) -> None:
        add_head(add, "+")
        add("--depth", type=int, default=2, help="its own layers")
        add("--places", type=int, default=8, help="of a block, the last decided token included")
        add("--rank", type=int, default=48, help="numbers per token in its selector")
        add("--candidates", type=int, default=32, help="tokens per place in its selector")
        add("--blocks", type=int, default=32, help="taken from each window")

    def run(self, options: argparse.Namespace) -> None:
        train_head(
            options,
            lambda target: new_head(target, shape_of(target, options)),
            read_dflash,
            lambda head, target, *marks: of_blocks(head, target, options.blocks, *marks),
            save,
        )


def shape_of(target: Model, options: argparse.Namespace) -> DflashShape:
    config = target.config
    own = LlamaConfig(**config.to_dict() | {"num_hidden_layers": options.depth})
    return DflashShape(
        own,
        tuple(options.layers or usual_layers(config.num_hidden_layers)),
        options.places,
        config.bos_token_id,  # no answer holds it
        (0,) * options.depth,
        (False,) * options.depth,
        rank=options.rank,
        candidates=options.candidates,
    )


def new_head(target: Model, shape: DflashShape) -> Dflash:
    """A head that begins as a copy of its target's last layers, which read the highest of the
    chosen states and nothing else yet."""
    head = Dflash(shape)
    size, last = shape.layer.hidden_size, target.model.layers[-len(head.layers) :]
    with torch.no_grad():
        head.fc.weight.normal_(0, SPREAD)
        head.fc.weight[:, -size:] += torch.eye(size)
        head.hidden_norm.load_state_dict(last[-1].input_layernorm.state_dict())
        head.norm.load_state_dict(target.model.norm.state_dict())
        head.candidate_selector.hidden_projection.weight.normal_(0, SPREAD)
        for each in (
            head.candidate_selector.predecessor_codebook,
            head.candidate_selector.successor_codebook,
        ):
            each.normal_(0, 4 * SPREAD)
        layers: Any = head.layers
        for own, layer in zip(layers, last, strict=True):
            own.load_state_dict(layer.state_dict(), strict=False)
            for name in ("q_norm", "k_norm"):
                own.self_attn[name].weight.fill_(SHARP)
    return head


def of_blocks(head: Dflash, target: Model, blocks: int, answering: int, special: int) -> Loss:
    """Cross entropy of the target's distributions under those of the head, within answers.

    A token below `special` begins or ends a message; `answering` begins an answer.
    """
    base, taps = target.model, taps_of(target, head.shape.layers)
    embedding = target.get_input_embeddings().weight
    output = target.get_output_embeddings().weight
    shape, selector = head.shape, head.candidate_selector
    places = shape.places

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        batch, length = inputs.shape
        answers = within(inputs, answering, special)
        usable = answers[:, : length - places + 1].float() + 1e-9
        first = torch.multinomial(usable, blocks, replacement=True)
        where = first[..., None] + torch.arange(places, device=first.device)
        flat = where.flatten(1)
        # A place counts if it and all before it are in the same answer.
        counted = answers.gather(1, flat).view_as(where)[..., :-1].int().cumprod(-1).bool()
        with torch.no_grad():
            found: list[torch.Tensor] = []
            with tapped(taps, found):
                seen = base(inputs, use_cache=False).last_hidden_state
            rows = seen.gather(1, flat[..., None].expand(-1, -1, seen.shape[-1]))
            rows = rows.unflatten(1, (blocks, places))[:, :, :-1][counted]
            chances = functional.linear(rows, output).float().softmax(-1)
        columns, visible = torch.arange(length, device=first.device), seen_by(first, places, length)
        tokens = torch.full_like(where, shape.mask)
        tokens[..., 0] = inputs.gather(1, first)

        def attend(
            _: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            return functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=visible,
                enable_gqa=queries.shape[1] != keys.shape[1],
            )

        embedded = functional.embedding(tokens.flatten(1), embedding)
        positions = torch.cat((columns.expand(batch, -1), flat), dim=1)
        hidden = head(embedded, head.join(torch.cat(found, dim=-1)), positions, attend)
        hidden = hidden.unflatten(1, (blocks, places))[:, :, 1:][counted]
        before = inputs.gather(1, flat).view_as(where)[..., :-1][counted]
        alone = head.logits(functional.linear(hidden, output))
        vectors = selector.predecessor_codebook[before] * selector.hidden_projection(hidden)
        joint = alone + functional.linear(vectors, selector.successor_codebook)
        weights = FADE ** torch.arange(places - 1, device=first.device)
        weights = weights.expand_as(counted)[counted]
        losses = [-(chances * each.log_softmax(-1)).sum(-1) for each in (joint, alone)]
        each = (losses[0] + ALONE * losses[1]) / (1 + ALONE)
        return (each * weights).sum() / weights.sum().clamp(min=1)

    return loss


def seen_by(first: torch.Tensor, places: int, length: int) -> torch.Tensor:
    """What the places of blocks see: the rows before the block, and the block itself. `first` are
    the first places of the blocks, shape (windows, blocks); returns shape (windows, 1, rows of all
    blocks, `length` + rows of all blocks)."""
    windows, blocks = first.shape
    columns = torch.arange(length, device=first.device)
    block = torch.arange(blocks * places, device=first.device) // places
    before = columns < first.repeat_interleave(places, dim=1)[..., None]
    own = (block[:, None] == block).expand(windows, -1, -1)
    return torch.cat((before, own), dim=-1)[:, None]


def save(head: Dflash, target: Path, folder: Path) -> None:
    """Write a head as float16, with a config in the format of its authors."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: each.half().contiguous() for name, each in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    shape = head.shape
    config = {
        "architectures": [SELECTING],
        "model_type": "qwen3",
        "num_hidden_layers": shape.layer.num_hidden_layers,
        **{name: value for name, value in shape.layer.to_dict().items() if name in LAYER_FIELDS},
        "is_causal": False,
        "dflash_config": {
            "block_size": shape.places,
            "mask_token_id": shape.mask,
            "target_layer_ids": [each - 1 for each in shape.layers],
            "selector_rank": shape.rank,
            "selector_top_k": shape.candidates,
        },
        "dtype": "float16",
        TARGET_KEY: weights_digest(str(target)),
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
