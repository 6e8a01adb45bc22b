"""Measurements on held-out chats and texts: bits per byte, acceptance, acceptance by depth."""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoTokenizer

from bench.harness import Add, Command, profile_of
from bench.prompts import cut_prompt
from bench.report import table
from engine.backends.base import Backend, common_prefix
from engine.errors import ModelError, SettingError
from engine.heads.base import Head
from engine.hsd.family import Family
from engine.hsd.measure import TOKENS, Profiler
from engine.hsd.profile import Profile
from engine.models.load_transformers import pick_device
from engine.models.loaders import load
from engine.prompt import Chat
from engine.settings import Runtime, Sampling
from engine.tree import Tree
from training.answers import labelled
from training.prepare import REGULAR, Document, read, tokenized
from training.train import loaded

ALL = "all"
GGUF = ".gguf"
Logits = Callable[[list[int]], torch.Tensor]
"""Returns the logits after each of some tokens, shape (tokens, vocabulary)."""


@dataclass
class Bits:
    """The bits that a model needs for some documents."""

    bits: float = 0.0
    bytes: int = 0
    documents: int = 0

    @property
    def per_byte(self) -> float:
        return self.bits / max(self.bytes, 1)


class HeldOutBits(Command):
    """Bits per byte of held-out texts, which show how well models know text they never saw.

    The bits of all tokens, special ones included, are divided by the bytes that somebody wrote, so
    models with different tokenizers are comparable. A document longer than the context is read in
    windows, each without what came before it.
    """

    def add_options(self, add: Add) -> None:
        add("held", type=Path, help="the held.jsonl that `training prepare` wrote")
        add("models", nargs="+", type=Path, help="folders of models, or GGUF files next to theirs")
        add("--context", type=int, help="read so many tokens at a time (default: all a model can)")
        add("--device", default="auto", help="auto, cpu, cuda, mps")

    def run(self, options: argparse.Namespace) -> None:
        if options.context is not None and options.context < 2:
            raise SettingError(
                f"A context of {options.context} leaves nothing to tell. Give 2 or more."
            )
        documents = list(read([options.held]))
        if not documents:
            raise SettingError(f"There are no documents in {str(options.held)!r}.")
        device = pick_device(options.device)
        models = labelled(options.models)
        found = [
            held_out_bits(path, documents, device, options.context) for path in models.values()
        ]
        rows = []
        for source in [*sorted(set(found[0]) - {ALL}), ALL]:
            first, each = found[0][source], [f"{bits[source].per_byte:.3f}" for bits in found]
            rows.append((source, f"{first.documents:,}", f"{first.bytes:,}", *each))
        table(("source", "documents", "bytes", *models), rows)


def held_out_bits(
    path: Path, documents: Iterable[Document], device: torch.device, context: int | None = None
) -> dict[str, Bits]:
    """The bits of a model by source, and of ALL. Raises ModelError and SettingError."""
    folder = path.with_suffix("") if path.suffix == GGUF else path
    if not folder.is_dir():
        raise SettingError(
            f"There is no folder {str(folder)!r}. Its tokenizer is needed to measure {path.name}."
        )
    logits, longest = llama_cpp_logits(path) if path.suffix == GGUF else torch_logits(path, device)
    length = min(context or longest, longest)
    found: dict[str, Bits] = defaultdict(Bits)
    for document, tokens in tokenized(AutoTokenizer.from_pretrained(str(folder)), documents):
        bits = sum(bits_of(logits, window) for window in windows(tokens, length))
        for source in (document.source, ALL):
            found[source].documents += 1
            found[source].bytes += document.size
            found[source].bits += bits
    return dict(found)


def torch_logits(folder: Path, device: torch.device) -> tuple[Logits, int]:
    """The logits of the model in a folder, and the most tokens that it can read."""
    model = loaded(folder).to(device).eval()

    def logits(tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(torch.tensor([tokens], device=device), use_cache=False).logits
        return found[0].float().cpu()

    return torch.inference_mode()(logits), int(model.config.max_position_embeddings)


def llama_cpp_logits(path: Path) -> tuple[Logits, int]:
    """The same for a GGUF file, by llama.cpp on the processor."""
    from bench.llama_peers import opened

    try:
        # A context of 0 stands for the longest context that the model was trained for.
        model = opened(str(path), n_ctx=0, logits_all=True, n_gpu_layers=0, n_threads_batch=1)
    except (OSError, ValueError) as error:
        raise ModelError(f"There is no model in {str(path)!r}: {error}") from error

    def logits(tokens: list[int]) -> torch.Tensor:
        model.reset()  # type: ignore[no-untyped-call]
        model.eval(tokens)
        return torch.from_numpy(model.scores[: len(tokens)])

    return logits, int(model.n_ctx())


def windows(tokens: list[int], length: int) -> Iterator[list[int]]:
    """Pieces that a model reads; each but the first begins with the last token of the one before,
    from which it predicts the next."""
    for start in range(0, len(tokens) - 1, length - 1):
        yield tokens[start : start + length]


def bits_of(logits: Logits, tokens: list[int]) -> float:
    """The bits of all tokens but the first."""
    targets = torch.tensor(tokens[1:])
    nats = functional.cross_entropy(logits(tokens[:-1]), targets, reduction="sum")
    return float(nats) / log(2)


# acceptance


class Acceptance(Command):
    """The acceptance matrix: how well each model drafts for each larger one.

    Measured as in the Stack tab (engine/hsd/measure.py): the target answers, and every draft model
    predicts the tokens along these answers. Models of another family with the same
    tokenizer can be compared with those of this one.
    """

    def add_options(self, add: Add) -> None:
        add_held(add, "the folder of the model that answers", TOKENS)
        add("drafts", nargs="+", type=Path, help="the folders of models that draft")
        add("--temperature", type=float, default=0.7)
        add("--min-p", type=float, default=0.0)

    def run(self, options: argparse.Namespace) -> None:
        if min(options.prompts, options.tokens) < 1:
            raise SettingError("Ask for at least one prompt and one token.")
        sampling = Sampling(temperature=options.temperature, min_p=options.min_p, seed=options.seed)
        runtime = Runtime(dtype="float32", threads=options.threads)
        folders = labelled([options.target, *options.drafts])
        target, *drafts = (named(name, folder, runtime) for name, folder in folders.items())
        family = Family(target, {draft.info.name: draft for draft in drafts})
        prompts = held_prompts(target, options)
        profiler = Profiler(target, family.drafts, prompts, sampling, tokens=options.tokens)
        show(profile_of(profiler), len(prompts))


def add_held(add: Add, target: str, tokens: int) -> None:
    """Declare the options for asking a model questions from held-out chats."""
    add("held", type=Path, help="the held.jsonl that `training prepare` wrote")
    add("target", type=Path, help=target)
    add("--seed", type=int, default=0)
    add("--prompts", type=int, default=60)
    add("--tokens", type=int, default=tokens, help="per answer")
    add("--leave-out", nargs="*", default=list(REGULAR), metavar="SOURCE")
    add("--threads", type=int, default=0, help="0: as many as there are cores")


def named(name: str, folder: Path, runtime: Runtime) -> Backend:
    """A model named after its family as well, because families share the names of members."""
    backend = load(str(folder), runtime)
    backend.info = replace(backend.info, name=name)
    return backend


def held_prompts(backend: Backend, options: argparse.Namespace) -> list[list[int]]:
    """The tokens of questions from held-out chats, cut so that an answer fits after them.

    Raises SettingError if there are no questions.
    """
    chats = [d for d in read([options.held]) if d.source not in options.leave_out]
    chosen = questions(chats, options.prompts)
    if not chosen:
        raise SettingError(f"No chat is left in {str(options.held)!r} to be answered.")
    chat, room = Chat(backend), backend.info.context_length - options.tokens - 1
    return [cut_prompt(chat, text, room) for text in chosen]


def questions(documents: Sequence[Document], limit: int) -> list[str]:
    """The first questions of users, from documents spread evenly over all."""
    found = [
        document.messages[0]["content"]
        for document in documents
        if document.messages and document.messages[0]["role"] == "user"
    ]
    step = max(1, len(found) // limit)
    return [text for text in found[::step] if text.strip()][:limit]


def show(profile: Profile, prompts: int) -> None:
    names = [model.name for model in profile.models]
    sampling = ", ".join(f"{name} {value:g}" for name, value in profile.sampling.items())
    print(f"{prompts} prompts, {profile.positions:,} positions of the target; {sampling}\n")
    print("Probability that a single draft is accepted by rejection, 1 - E[TV]; in brackets, that")
    print("the first draft of a round is the target's own choice, with the same seed:\n")
    rows = []
    for below, model in enumerate(profile.models[:-1]):
        cells = []
        for above in range(1, len(names)):
            pair = profile.pairs.get((below, above))
            same = f" ({pair.survives('match', 1):.2f})" if pair else ""
            cells.append(f"{pair.acceptance:.2f}{same}" if pair else "")
        rows.append((model.name, f"{model.parameters / 1e6:.1f} M", *cells))
    table(("draft", "parameters", *(f"for {name}" for name in names[1:])), rows)


# depths


class Depths(Command):
    """Acceptance by depth: how far ahead a head guesses correctly.

    The target answers plainly. At every position of an answer the head guesses a chain, drawn with
    the target's noise as in use, which is compared with the tokens that the target then emits.
    "Reached" at depth d is how often the first d tokens of a chain are all correct; "kept" is how
    often the d-th token is correct if those before it are.
    """

    def add_options(self, add: Add) -> None:
        add_held(add, "the folder or GGUF file of the model", 64)
        add("--head", default="auto", help="the head, if it is not next to the model")
        add("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
        add("--depth", type=int, default=6, help="tokens ahead")

    def run(self, options: argparse.Namespace) -> None:
        if min(options.prompts, options.tokens, options.depth) < 1:
            raise SettingError("Ask for at least one prompt, one token and one level.")
        runtime = Runtime(dtype="float32", threads=options.threads, head=options.head)
        backend = load(str(options.target), runtime)
        head = backend.head
        if head is None or not head.info.drafts:
            note = backend.info.head.note if backend.info.head else "It has none."
            raise SettingError(f"The model {str(options.target)!r} has no head that drafts. {note}")
        prompts = held_prompts(backend, options)
        depth = min(options.depth, head.info.depth)
        print(f"{len(prompts)} prompts; reached (kept)\n")
        rows = []
        for temperature in options.temperatures:
            sampling = Sampling(temperature=temperature, seed=options.seed)
            chains = []
            for prompt in prompts:
                chains += agreements(backend, head, prompt, sampling, options.tokens, depth)
            rows.append((f"{temperature:g}", f"{len(chains):,}", *cells(chains, depth)))
        table(("temperature", "positions", *(f"{at + 1}" for at in range(depth))), rows)


def agreements(
    backend: Backend, head: Head, prompt: Sequence[int], sampling: Sampling, limit: int, depth: int
) -> list[int]:
    """How many tokens of the head's chain are right, at every position of an answer that is at
    least `depth` tokens before its end."""
    head.listen(True)
    backend.prefill(prompt, lambda: False)
    tokens, chains = list(prompt), list[list[int]]()
    while len(tokens) < len(prompt) + limit + depth:
        chains.append(chain(head, tokens, sampling, depth))
        tokens.append(backend.score(Tree(tokens[-1]), sampling).choose(0))
        backend.accept(())
        if tokens[-1] in backend.info.eos_ids:
            break
    answer = tokens[len(prompt) :]
    whole = range(len(answer) - depth + 1)
    return [common_prefix(chains[at], answer[at:]) for at in whole]


def chain(head: Head, tokens: Sequence[int], sampling: Sampling, depth: int) -> list[int]:
    guess = head.start(tokens, sampling, lambda: False)
    guessed = list[int]()
    while guess is not None and len(guessed) < depth:
        guessed.append(guess.draw(len(tokens) + len(guessed), sampling))
        if len(guessed) < depth:
            guess = head.extend([0], guessed[-1:])[0]
    head.forget()
    return guessed


def cells(chains: Sequence[int], depth: int) -> list[str]:
    reached = [sum(each >= at for each in chains) for at in range(depth + 1)]
    return [
        f"{reached[at] / max(1, len(chains)):.2f} ({reached[at] / max(1, reached[at - 1]):.2f})"
        for at in range(1, depth + 1)
    ]
