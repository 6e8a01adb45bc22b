"""Tiers, tables and budgets that say what a test wants, for tests of drafting."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from engine import native
from engine.drafting.base import Tier
from engine.drafting.budget import Budget
from engine.settings import Drafting
from engine.types import Followers


class Said(Tier):
    """A tier that always says the same, and perhaps what is `often` said."""

    def __init__(self, name: str, *matches: Followers, often: Followers | None = None) -> None:
        self.name = self.source = name
        self.said, self.often = matches, often

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        return self.said

    def unigrams(self) -> Followers | None:
        return self.often


def sure(token: int, times: int = 50) -> Followers:
    return followers({token: times})


def followers(counts: Mapping[int, float]) -> Followers:
    return Followers(sum(counts.values()), len(counts), dict(counts))


class Table:
    """A dictionary of keys that notes what it was asked."""

    def __init__(self, entries: dict[tuple[int, ...], Followers]) -> None:
        self.entries, self.asked = entries, list[tuple[int, ...]]()
        self.often: Followers | None = None

    def look_up(self, key: Sequence[int]) -> Followers | None:
        self.asked.append(tuple(key))
        return self.entries.get(tuple(key))

    def unigrams(self) -> Followers | None:
        return self.often

    def forget_look_ups(self) -> None:
        """Nothing is remembered."""


class Noting(Budget):
    """A fixed budget that notes the probability of every node that is added."""

    def __init__(self, nodes: int, depth: int, threshold: float = 0.0) -> None:
        super().__init__(Drafting(nodes=nodes, threshold=threshold, budget="fixed"), depth, 1000)
        self.noted: list[float] = []

    def added(self, size: int, probability: float) -> None:
        super().added(size, probability)
        self.noted.append(probability)


def markov(tokens: int, symbols: int = 12, seed: int = 0) -> list[int]:
    """A text in which the next token depends on the last one, a few of them likely."""
    draw = random.Random(seed)
    chances = {
        token: (draw.sample(range(symbols), 4), [0.5, 0.25, 0.15, 0.1]) for token in range(symbols)
    }
    text = [0]
    while len(text) < tokens:
        text += draw.choices(*chances[text[-1]])
    return text


@contextmanager
def using(core: object) -> Iterator[None]:
    """What is made meanwhile is made with this compiled core; in Python if it is None."""
    before, native.core = native.core, core
    try:
        yield
    finally:
        native.core = before
