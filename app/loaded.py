"""What belongs to the loaded model and goes when it goes.

The session holds it as one value, so that it changes in one assignment: nobody ever sees the
tokenizer of one model beside the costs of another.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from app.comparison import UNMEASURED, PlainSpeed, plain_speed
from app.costs import Costs
from app.past import Pasts
from engine.backends.base import Backend, BackendInfo
from engine.chat import Chat
from engine.errors import ModelError, StrataError
from engine.settings import Runtime
from engine.types import Message
from storage.statistics import StatisticsTable, find_table


@dataclass(slots=True)
class Loaded:
    """A model with what is known of it. `source` is "" for a backend that was made, not read."""

    backend: Backend
    chat: Chat
    costs: Costs
    pasts: Pasts
    statistics: StatisticsTable | None = None
    source: str = ""
    runtime: Runtime = Runtime()
    plain: PlainSpeed = UNMEASURED

    def prepare(self, progress: Callable[[float], None] = lambda share: None) -> list[str]:
        """Know what forwards cost: as it was stored, else as it is measured now. Runs the model;
        what went wrong comes back as notices."""
        try:
            if self.costs.wanted and not self.costs.load():
                self.costs.measure(progress)
        except StrataError as error:
            return [str(error)]
        return []

    def measure(self) -> float:
        """Plain tokens per second, measured now with a short run of the model."""
        prompt = self.backend.tokenize(self.backend.render([Message("user", "Tell a story.")]))
        speed = plain_speed(self.backend, prompt)
        self.plain = PlainSpeed(speed, "after loading")
        return speed


def open_table(
    tokenizer: str, folders: Sequence[Path], report: Callable[[str], None]
) -> StatisticsTable | None:
    """The statistics for a tokenizer, closed once nobody has them any more: when their model goes,
    a tab may be reading them. `report` is told what is damaged."""
    table = find_table(tokenizer, *folders, report=report)
    if table is not None:
        weakref.finalize(table, table.connection.close)
    return table


NOTHING = BackendInfo(
    name="no model",
    kind="",
    fingerprint="",
    tokenizer_fingerprint="",
    vocabulary_size=0,
    eos_ids=frozenset(),
    context_length=0,
    can_tree=False,
)


NO_MODEL = "No model is loaded at the moment. Wait until one is, or load it in the Models tab."


class Away:
    """Stands where no model is: before the first one, and while one makes room for the next.

    `info` is that of the model which was there. Whatever is asked of it raises ModelError.
    """

    def __init__(self, info: BackendInfo = NOTHING) -> None:
        self.info = replace(info, can_tree=False, note=NO_MODEL)

    def refuse(self, *_: object) -> NoReturn:
        """There is nothing here that could answer."""
        raise ModelError(NO_MODEL)

    def vocabulary(self) -> Sequence[str]:
        self.refuse()

    tokenize = detokenize = render = prefill = room = score = accept = refuse
