"""What forwards of the loaded model cost on this machine, as it is stored and drawn.

The curve is shared by all owners: it holds times, no text. The engine measures it, every answer
corrects it, and what comes of that is stored here.
"""

from collections.abc import Callable

from engine.backends.base import BackendInfo
from engine.drafting.costs import CostCurve
from engine.engine import CostsMeasured, Engine, Share
from engine.loaded import Costs as CostRecord
from storage.costs import CostStore
from storage.database import Database


class Costs:
    """The curve of the loaded model. `known` is the last one that came from the engine, and the
    model that it is of."""

    def __init__(self, engine: Engine, database: Database) -> None:
        self.engine, self.database = engine, database
        self.known: tuple[BackendInfo, CostRecord] | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is anything to draft for: a model that decodes plainly needs no curve."""
        return self.engine.state.info.can_tree

    @property
    def record(self) -> CostRecord | None:
        """What is known of the loaded model."""
        info = self.engine.state.info
        if self.known is not None and key(self.known[0]) == key(info):
            return self.known[1]
        return None

    @property
    def curve(self) -> CostCurve | None:
        """The same as a curve."""
        record = self.record
        return record and CostCurve(*record[:3], record.token, record.row)

    @property
    def measured(self) -> float:
        """When it was measured, in seconds since 1970; 0 before it was."""
        return self.record.measured if self.record else 0.0

    def store(self, info: BackendInfo) -> CostStore:
        """Where a curve is kept: what runs the model, and how, is its name."""
        return CostStore(self.database, *key(info))

    def recall(self, info: BackendInfo) -> CostRecord | None:
        """The stored curve of a model; None when there is none that can be used."""
        stored = self.store(info).load()
        return stored and CostRecord(*stored)

    def save(self, info: BackendInfo, costs: CostRecord) -> None:
        """Store a curve that the engine measured or corrected."""
        self.known = info, costs
        self.store(info).save(*costs)

    def measure(self, progress: Callable[[float], None] = lambda share: None) -> None:
        """Have it measured, in about two seconds, once nobody uses the model. Raises ModelError
        when it cannot be; what was known stays."""
        for item in self.engine.measure_costs():
            if isinstance(item, Share) and item.share is not None:
                progress(item.share)
            elif isinstance(item, CostsMeasured):
                self.save(item.info, item.costs)


def key(info: BackendInfo) -> tuple[str, str, str, str, int]:
    """What a curve depends on."""
    device = info.device if info.ranks == 1 else f"{info.device} x {info.ranks}"
    return info.fingerprint, info.kind, device, info.dtype, info.threads
