"""A toy that kills its process at a given moment."""

import os
import signal
from collections.abc import Sequence
from typing import Any, Self

from engine.backends.base import Filled, LogitScores
from engine.drafting.databases import NoStore
from engine.local import Local
from engine.models.loaders import ModelLoaders
from engine.models.memory import Need
from engine.settings import Sampling
from engine.tree import Tree
from engine.types import Costs
from tests.support.toy import ToyBackend


class Mortal(ToyBackend):
    """A toy whose process is killed in so many calls of its sequences."""

    answers = False

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = [calls]

    def open(self) -> Self:
        other = super().open()
        other.answers = True
        return other

    def called(self) -> None:
        self.left[0] -= self.answers
        if not self.left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def prefill(self, *arguments: Any) -> Filled:
        self.called()
        return super().prefill(*arguments)

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        self.called()
        return super().score(tree, sampling)

    def accept(self, rows: Sequence[int]) -> None:
        self.called()
        super().accept(rows)


class Measured(NoStore):
    """What forwards cost is known, so that loading a model takes no time."""

    def costs(self, key: tuple[str, str, str, str, int]) -> Costs:
        return Costs({0: 1e-4, 7: 2e-4, 63: 1e-3}, 0.0, 0.0, 0.0)


def mortals() -> Local:
    """An engine for models that are named by the number of these calls; "-1" lives."""
    loaders = ModelLoaders(
        load=lambda source, runtime: Mortal(int(source)),
        need=lambda source, runtime: Need(1, 1, 1),
        device=lambda source, runtime: "cpu",
        free=lambda device: 1 << 30,
    )
    return Local(loaders=loaders, store=Measured())
