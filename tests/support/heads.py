"""What tests of heads on transformers share: a drafter that trusts a head, and its guesses."""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.decode import never
from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.models.loaders import load
from engine.settings import Drafting, Generation, Runtime, Sampling
from engine.tree import Tree
from engine.types import Step, Work
from tests.support.lossless import events_of

SAMPLINGS = [Sampling(temperature=each, seed=7) for each in (0.0, 0.7, 1.0)]
DRAFTING = Drafting(budget="fixed", nodes=24)


def loaded(folder: Path, **settings: Any) -> Any:
    return load(str(folder), Runtime(dtype="float32", threads=1, **settings))


class Guessing(Drafter):
    """Drafts the head's tree, two nodes wide, with wrong tokens among its own in three of ten
    places; learns nothing."""

    name = "head"

    def __init__(
        self, head: Any, sampling: Sampling, width: int = 2, wrong: float = 0.3, depth: int = 5
    ) -> None:
        self.head, self.sampling, self.width, self.wrong = head, sampling, width, wrong
        self.depth = depth
        self.random = random.Random(5)
        self.calls = 0

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        guess = self.head.start(tokens, self.sampling, never)
        level = [] if guess is None else [(0, guess)]
        for depth in range(min(self.depth, budget.depth)):
            rows, parents, said = [], [], []
            for at, (row, guess) in enumerate(level):
                drawn = guess.draw(len(tokens) + depth, self.sampling)
                for token in {drawn, *(name for name, _ in guess.likeliest(self.width))}:
                    if self.random.random() < self.wrong:
                        token = self.random.randrange(budget.vocabulary)
                    if len(tree) < budget.nodes and token not in tree.children[row]:
                        rows.append(tree.add(row, token, "model"))
                        parents.append(at)
                        said.append(token)
            if not rows or depth == self.depth - 1:
                break
            most = 4 if self.width > 1 else 1
            rows, parents, said = rows[:most], parents[:most], said[:most]
            level = list(zip(rows, self.head.extend(parents, said), strict=True))
            self.calls += 1
        self.head.forget()
        return {"model": Work(0.0)}


def guessing(backend: Any, sampling: Sampling) -> Guessing:
    """As wide and as deep as the head goes."""
    info = backend.head.info
    return Guessing(backend.head, sampling, 2 if info.branches else 1, depth=min(5, info.depth))


def answer(
    backend: Any,
    prompt: Sequence[int],
    sampling: Sampling,
    drafter: Guessing | None = None,
    tokens: int = 40,
) -> list[Step]:
    if backend.head:
        backend.head.listen(drafter is not None)
    drafters = [] if drafter is None else [drafter]
    return events_of(backend, prompt, Generation(sampling, max_tokens=tokens), drafters, DRAFTING)


def law(backend: Any, tokens: Sequence[int]) -> Any:
    """What a head guesses behind a text that the backend holds but for the last token."""
    guess = backend.head.start(tokens, SAMPLINGS[0], never)
    assert guess is not None
    return guess.logits


def law_ahead(backend: Any, tokens: Sequence[int]) -> Any:
    """The same, and what it guesses after one token more; shape (2, vocabulary)."""
    found = [law(backend, tokens), backend.head.extend([0], [5])[0].logits]
    backend.head.forget()
    return np.array(found)


def fresh(backend: Any, tokens: Sequence[int], ask: Callable[..., Any] = law) -> Any:
    other = backend.open()
    other.head.listen(True)
    other.prefill(tokens, never)
    found = ask(other, tokens)
    other.close()
    return found
