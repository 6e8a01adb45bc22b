"""Acceptance by depth: how far ahead a head guesses right, on held-out chats.

The target answers plainly. At every position of an answer the head guesses a chain, drawn with the
target's noise as in use, and is compared with what the target then said. "Reached" at depth d is
how often the first d tokens of a chain are all right; "kept" how often the d-th is where the ones
before it are.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.prompts import cut_prompt
from engine.backends.base import Backend
from engine.errors import SettingError
from engine.heads.base import Head
from engine.models.loaders import load
from engine.prompt import Chat
from engine.settings import Runtime, Sampling
from engine.tree import Tree
from training.acceptance import REGULAR, questions
from training.documents import read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `training depths`."""
    add = parser.add_argument
    add("held", type=Path, help="the held.jsonl that `training prepare` wrote")
    add("target", type=Path, help="the folder or GGUF file of the model")
    add("--head", default="auto", help="the head, where it is not beside the model")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    add("--seed", type=int, default=0)
    add("--prompts", type=int, default=60)
    add("--tokens", type=int, default=64, help="per answer")
    add("--depth", type=int, default=6, help="tokens ahead")
    add("--leave-out", nargs="*", default=list(REGULAR), metavar="SOURCE")
    add("--threads", type=int, default=0, help="0: as many as there are cores")


def run(options: argparse.Namespace) -> None:
    """Print a table with a row per temperature."""
    if min(options.prompts, options.tokens, options.depth) < 1:
        raise SettingError("Ask for at least one prompt, one token and one level.")
    runtime = Runtime(dtype="float32", threads=options.threads, head=options.head)
    backend = load(str(options.target), runtime)
    head = backend.head
    if head is None or not head.info.drafts:
        note = backend.info.head.note if backend.info.head else "It has none."
        raise SettingError(f"The model {str(options.target)!r} has no head that drafts. {note}")
    chats = [d for d in read([options.held]) if d.source not in options.leave_out]
    chosen = questions(chats, options.prompts)
    if not chosen:
        raise SettingError(f"No chat is left in {str(options.held)!r} to be answered.")
    room = backend.info.context_length - options.tokens - 1
    prompts = [cut_prompt(Chat(backend), text, room) for text in chosen]
    depth = min(options.depth, head.info.depth)
    print(f"{len(prompts)} prompts; reached (kept)\n")
    print("| temperature | positions |", " | ".join(f"{at + 1}" for at in range(depth)), "|")
    print("|---|--:|" + "--:|" * depth)
    for temperature in options.temperatures:
        sampling = Sampling(temperature=temperature, seed=options.seed)
        chains = []
        for prompt in prompts:
            chains += agreements(backend, head, prompt, sampling, options.tokens, depth)
        print(f"| {temperature:g} | {len(chains):,} |", " | ".join(cells(chains, depth)), "|")


def agreements(
    backend: Backend, head: Head, prompt: Sequence[int], sampling: Sampling, limit: int, depth: int
) -> list[int]:
    """How many tokens of the head's chain are right, at every position of an answer that is so far
    from its end."""
    head.listen(True)
    backend.prefill(prompt, lambda: False)
    tokens, chains = list(prompt), list[list[int]]()
    while len(tokens) < len(prompt) + limit + depth:
        chains.append(chain(head, tokens, sampling, depth))
        tokens.append(backend.score(Tree(tokens[-1]), sampling).choose(0))
        backend.accept(())
        if tokens[-1] in backend.info.eos_ids:
            break
    said = tokens[len(prompt) :]
    return [right(chain, said[at:]) for at, chain in enumerate(chains) if at + depth <= len(said)]


def chain(head: Head, tokens: Sequence[int], sampling: Sampling, depth: int) -> list[int]:
    """What a head says would follow."""
    guess = head.start(tokens, sampling, lambda: False)
    said = list[int]()
    while guess is not None and len(said) < depth:
        said.append(guess.draw(len(tokens) + len(said), sampling))
        if len(said) < depth:
            guess = head.extend([0], said[-1:])[0]
    head.forget()
    return said


def right(chain: Sequence[int], said: Sequence[int]) -> int:
    """The length of what both begin with."""
    return next(
        (at for at, (one, other) in enumerate(zip(chain, said, strict=False)) if one != other),
        min(len(chain), len(said)),
    )


def cells(chains: Sequence[int], depth: int) -> list[str]:
    """Shares by depth."""
    reached = [sum(each >= at for each in chains) for at in range(depth + 1)]
    return [
        f"{reached[at] / max(1, len(chains)):.2f} ({reached[at] / max(1, reached[at - 1]):.2f})"
        for at in range(1, depth + 1)
    ]
