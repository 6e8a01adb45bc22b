"""Clocks that only tests move: a toy model whose forwards take stated seconds, and an event loop
whose timers take no time."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from selectors import SelectorKey, SelectSelector
from typing import Any, TypeVar

import pytest

from engine.backends.base import Filled, LogitScores
from engine.sampling import Floats
from engine.settings import Sampling
from engine.tree import Tree
from tests.support.toy import END, ToyBackend, toy_logits

Result = TypeVar("Result")


class Clock:
    """Stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def clock_of(monkeypatch: pytest.MonkeyPatch, *modules: str) -> Clock:
    clock = Clock()
    for module in modules:
        monkeypatch.setattr(f"{module}.perf_counter", clock)
    return clock


@cache
def endless(suffix: tuple[int, ...]) -> Floats:
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


class Skipping(SelectSelector):
    """Moves the time of a loop on instead of waiting for it to pass."""

    loop: "SimulatedLoop"

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout is not None:
            self.loop.now += timeout
        return super().select(timeout and 0.0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Its time stands still while there is something to do, and then jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = Skipping()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def simulated(work: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(work)
