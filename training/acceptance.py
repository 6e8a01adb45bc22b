"""The acceptance matrix: how well each model drafts for each larger one, on held-out chats.

Measured as the Stack tab does (engine/hsd/measure.py): the target answers, and every draft model is
asked along the answers what it would have said. Models of another family with the same tokenizer
can be measured beside those of the family.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.drafts import profile_of
from bench.prompts import cut_prompt
from engine.backends.base import Backend
from engine.errors import SettingError
from engine.hsd.family import Family
from engine.hsd.measure import TOKENS, Profiler
from engine.hsd.profile import Profile
from engine.models.loaders import load
from engine.prompt import Chat
from engine.settings import Runtime, Sampling
from training.documents import Document, read
from training.labels import labelled

REGULAR = ("tldr", "open_english_wordnet", "factbook")
"""Sources whose answers are so regular that every draft is accepted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `training acceptance`."""
    add = parser.add_argument
    add("held", type=Path, help="the held.jsonl that `training prepare` wrote")
    add("target", type=Path, help="the folder of the model that answers")
    add("drafts", nargs="+", type=Path, help="the folders of models that draft")
    add("--temperature", type=float, default=0.7)
    add("--min-p", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--prompts", type=int, default=60)
    add("--tokens", type=int, default=TOKENS, help="per answer")
    add("--leave-out", nargs="*", default=list(REGULAR), metavar="SOURCE")
    add("--threads", type=int, default=0, help="0: as many as there are cores")


def run(options: argparse.Namespace) -> None:
    """Print the matrix."""
    if min(options.prompts, options.tokens) < 1:
        raise SettingError("Ask for at least one prompt and one token.")
    sampling = Sampling(temperature=options.temperature, min_p=options.min_p, seed=options.seed)
    runtime = Runtime(dtype="float32", threads=options.threads)
    folders = labelled([options.target, *options.drafts])
    target, *drafts = (named(name, folder, runtime) for name, folder in folders.items())
    family = Family(target, {draft.info.name: draft for draft in drafts})
    chats = [d for d in read([options.held]) if d.source not in options.leave_out]
    chosen = questions(chats, options.prompts)
    if not chosen:
        raise SettingError(f"No chat is left in {str(options.held)!r} to be answered.")
    chat, room = Chat(target), target.info.context_length - options.tokens - 1
    prompts = [cut_prompt(chat, text, room) for text in chosen]
    profiler = Profiler(target, family.drafts, prompts, sampling, tokens=options.tokens)
    show(profile_of(profiler), len(prompts))


def named(name: str, folder: Path, runtime: Runtime) -> Backend:
    """A model under a name that tells its family: two families have members of one name."""
    backend = load(str(folder), runtime)
    backend.info = replace(backend.info, name=name)
    return backend


def questions(documents: Sequence[Document], limit: int) -> list[str]:
    """What users ask first, from documents that lie evenly apart."""
    asked = [
        document.messages[0]["content"]
        for document in documents
        if document.messages and document.messages[0]["role"] == "user"
    ]
    step = max(1, len(asked) // limit)
    return [text for text in asked[::step] if text.strip()][:limit]


def show(profile: Profile, prompts: int) -> None:
    """Print the tables."""
    names = [model.name for model in profile.models]
    sampling = ", ".join(f"{name} {value:g}" for name, value in profile.sampling.items())
    print(f"{prompts} prompts, {profile.positions:,} positions of the target; {sampling}\n")
    print("Probability that a single draft is accepted by rejection, 1 - E[TV]; in brackets, that")
    print("the first draft of a round is the target's own choice, with the same seed:\n")
    print("| draft | parameters |", " | ".join(f"for {name}" for name in names[1:]), "|")
    print("|---|--:|" + "--:|" * (len(names) - 1))
    for below, model in enumerate(profile.models[:-1]):
        cells = []
        for above in range(1, len(names)):
            pair = profile.pairs.get((below, above))
            same = f" ({pair.survives('match', 1):.2f})" if pair else ""
            cells.append(f"{pair.acceptance:.2f}{same}" if pair else "")
        print(f"| {model.name} | {model.parameters / 1e6:.1f} M |", " | ".join(cells), "|")
