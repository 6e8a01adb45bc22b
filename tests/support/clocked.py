"""A clock that only tests move, and a toy model on it whose forwards take stated seconds."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from engine.backends.base import Filled, LogitScores
from engine.backends.toy import END, ToyBackend, toy_logits
from engine.sampling import Floats
from engine.settings import Sampling
from engine.tree import Tree


class Clock:
    """Stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def clock_of(monkeypatch: pytest.MonkeyPatch, *modules: str) -> Clock:
    """A clock in the place of those of some modules."""
    clock = Clock()
    for module in modules:
        monkeypatch.setattr(f"{module}.perf_counter", clock)
    return clock


@cache
def endless(suffix: tuple[int, ...]) -> Floats:
    """The toy's logits without an end."""
    logits = toy_logits(suffix).copy()
    logits[END] = -20.0
    return logits


class ClockedToy(ToyBackend):
    """A forward over so many nodes takes `forward(nodes)` seconds, reading a prompt takes
    `reading`. The text is endless unless `toy` says otherwise."""

    def __init__(
        self, clock: Clock, forward: Callable[[int], float], reading: float = 0.0, **toy: Any
    ) -> None:
        super().__init__(**({"context_length": 8192, "logits": endless} | toy))
        self.clock, self.forward, self.reading = clock, forward, reading

    def prefill(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> Filled:
        self.clock.now += self.reading
        return super().prefill(tokens, cancelled)

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        seconds = self.forward(len(tree))
        self.clock.now += seconds
        return super().score(tree, sampling)
