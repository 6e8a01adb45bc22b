"""Held-out bits per byte: how well models know text that none of them was trained on.

Bits of all tokens, special ones included, over the bytes that somebody wrote: so models with other
tokenizers are measured alike. A document that is longer than the context is read in windows, each
without what came before it.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import log
from pathlib import Path

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoTokenizer

from bench.shape import Model
from engine.errors import SettingError
from engine.models.load_transformers import pick_device
from training.documents import Document, read
from training.labels import label, labelled
from training.prepare import tokenized
from training.train import loaded

TOKENS_AT_ONCE = 1 << 13
"""Padded tokens of a batch."""
ALL = "all"

Window = tuple[str, list[int]]
"""Tokens that are read together, and their source."""


@dataclass
class Bits:
    """What a model needs for some documents."""

    bits: float = 0.0
    bytes: int = 0
    documents: int = 0

    @property
    def per_byte(self) -> float:
        """Bits per byte."""
        return self.bits / max(self.bytes, 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `training bits`."""
    add = parser.add_argument
    add("held", type=Path, help="the held.jsonl that `training prepare` wrote")
    add("models", nargs="+", type=Path, help="folders of models with their tokenizers")
    add("--context", type=int, help="read so many tokens at a time (default: all a model can)")
    add("--device", default="auto", help="auto, cpu, cuda, mps")


def run(options: argparse.Namespace) -> None:
    """Print a table: a line per source, a column per model."""
    if options.context is not None and options.context < 2:
        raise SettingError(
            f"A context of {options.context} leaves nothing to tell. Give 2 or more."
        )
    documents = list(read([options.held]))
    if not documents:
        raise SettingError(f"There are no documents in {str(options.held)!r}.")
    device = pick_device(options.device)
    models = labelled(options.models)
    found = [held_out_bits(path, documents, device, options.context) for path in models.values()]
    print("| source | documents | bytes |", " | ".join(models), "|")
    print("|---|--:|--:|" + "--:|" * len(found))
    for source in [*sorted(set(found[0]) - {ALL}), ALL]:
        first, each = found[0][source], [f"{bits[source].per_byte:.3f}" for bits in found]
        print(f"| {source} | {first.documents:,} | {first.bytes:,} |", " | ".join(each), "|")


def held_out_bits(
    folder: Path, documents: Iterable[Document], device: torch.device, context: int | None = None
) -> dict[str, Bits]:
    """The bits of a model by source, and of ALL."""
    model = loaded(folder).to(device).eval()
    longest = model.config.max_position_embeddings
    length = min(context or longest, longest)
    found: dict[str, Bits] = defaultdict(Bits)
    pieces: list[Window] = []
    for document, tokens in tokenized(AutoTokenizer.from_pretrained(str(folder)), documents):
        for source in (document.source, ALL):
            found[source].documents += 1
            found[source].bytes += document.size
        pieces += windows(document.source, tokens, length)
    pieces.sort(key=lambda piece: len(piece[1]))
    with tqdm(total=len(pieces), desc=label(folder), unit=" windows", leave=False) as bar:
        for batch in batches(pieces):
            for source, bits in batch_bits(model, batch, device):
                for name in (source, ALL):
                    found[name].bits += bits
            bar.update(len(batch))
    return dict(found)


def windows(source: str, tokens: list[int], length: int) -> Iterator[Window]:
    """Pieces that a model reads; each but the first begins with the last token before it, from
    which it has to tell the next."""
    for start in range(0, max(1, len(tokens) - 1), length - 1):
        yield source, tokens[start : start + length]


def batches(pieces: Iterable[Window]) -> Iterator[list[Window]]:
    """Windows in order of length, as many at a time as are cheap to pad."""
    batch: list[Window] = []
    for piece in pieces:
        if batch and len(piece[1]) * (len(batch) + 1) > TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


@torch.inference_mode()
def batch_bits(
    model: Model, batch: list[Window], device: torch.device
) -> Iterator[tuple[str, float]]:
    """Source and bits of each window. Padding is behind all that it could change."""
    longest = max(len(tokens) for _, tokens in batch)
    rows = torch.zeros(len(batch), longest, dtype=torch.long)
    wanted = torch.full((len(batch), longest), -100)
    for row, (_, tokens) in enumerate(batch):
        rows[row, : len(tokens)] = torch.tensor(tokens)
        wanted[row, : len(tokens)] = rows[row, : len(tokens)]
    logits = model(rows[:, :-1].to(device), use_cache=False).logits.float()
    nats = functional.cross_entropy(
        logits.transpose(1, 2), wanted[:, 1:].to(device), ignore_index=-100, reduction="none"
    ).sum(1)
    for (source, _), value in zip(batch, nats.tolist(), strict=True):
        yield source, value / log(2)
