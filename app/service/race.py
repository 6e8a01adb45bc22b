"""A race of plain decoding against drafting: one short prompt, decoded in both ways, on the clock.

Each has the machine to itself, one after the other, from nothing (app/service/comparison.py). What
is shown side by side afterwards is what was recorded, at the pace at which it came.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from app.service.comparison import Progress
from app.service.current import Current
from app.service.preferences import Preferences
from app.service.proofs import Proofs
from engine.compare import Speedup
from engine.engine import Measured, Request
from engine.errors import Cancelled
from engine.metrics import summarise
from engine.queue import Waiting
from engine.runs import Verdict, verdict, worth
from engine.settings import Generation
from engine.types import Message, Run

ABOUT = "a race"
"""What its task is about: no conversation has this id."""
PROMPT = "Tell a short story about a fox and a bird. Then tell the same story once more."
TOKENS = 128


@dataclass(frozen=True, slots=True)
class Race:
    """Both runs, and what they say of each other."""

    plain: Run
    fast: Run
    verdict: Verdict
    speedup: Speedup

    @property
    def seconds(self) -> tuple[float, float]:
        """What the whole answers took: reading the prompt and learning included."""
        return summarise(self.plain).seconds, summarise(self.fast).seconds


@dataclass(frozen=True, slots=True)
class Races:
    """See the module's docstring."""

    proofs: Proofs
    current: Current

    def run(self, owner: str) -> Iterator[Progress | Waiting | Race]:
        """Record a race, which comes last; stopped, there is none."""
        self.stop(owner)
        with self.proofs.tasks.begin(owner, ABOUT) as task:
            yield from self.proofs.revival.loaded(task)
            # A seed of its own, the sampler that the model's makers want.
            law = Preferences(Generation(self.current.info.sampling, TOKENS))
            request = Request((Message("user", PROMPT),), (), law.seeded(), law.chosen())
            pairs = self.proofs.pairs(replace(request, owner=owner), Measured(), task)
            with suppress(Cancelled):
                for item in pairs.compare(1):
                    yield item
                    if isinstance(item, Progress) and item.over:
                        (pair,) = item.pairs
                        self.proofs.history.save_pair(owner, *pair)
                        yield Race(*pair, verdict(self.current.text, *pair), worth([pair]))

    def stop(self, owner: str) -> None:
        """End the owner's race, if there is one."""
        self.proofs.tasks.stop(owner, ABOUT)
