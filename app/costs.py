"""What forwards of the loaded model cost on this machine: known from the store, or measured.

The curve is shared by all owners: it holds times, no text. Every answer corrects it.
"""

from collections.abc import Callable
from time import time

from engine.backends.base import Backend
from engine.costs import CostCurve, measure_costs
from engine.errors import ModelError
from engine.methods import Method
from storage.costs import CostStore
from storage.database import Database


class Costs:
    """The curve of the loaded model. `curve` is None until it is loaded or measured.

    `measured` says when it was measured, in seconds since 1970.
    """

    def __init__(self, backend: Backend, database: Database) -> None:
        self.backend, self.database = backend, database
        self.curve: CostCurve | None = None
        self.measured = 0.0

    @property
    def wanted(self) -> bool:
        """Whether there is anything to draft for: a model that decodes plainly needs no curve."""
        return self.backend.info.can_tree

    def store(self) -> CostStore:
        """Where the curve is kept: what runs the model, and how, is its name."""
        info = self.backend.info
        return CostStore(
            self.database, info.fingerprint, info.kind, info.device, info.dtype, info.threads
        )

    def load(self) -> bool:
        """Take the stored curve; False when there is none that can be used."""
        stored = self.store().load()
        if stored is None:
            return False
        try:
            self.curve = CostCurve(stored.points, stored.node, stored.other)
        except ValueError:
            return False
        self.measured = stored.measured
        return True

    def measure(self, progress: Callable[[float], None] = lambda share: None) -> None:
        """Measure and store the curve, in about two seconds; runs the model.

        Raises ModelError when the model cannot do such forwards; what was known stays.
        """
        try:
            self.curve = measure_costs(self.backend, progress=progress)
        except Exception as error:
            # The libraries below raise many types, out of memory among them.
            raise ModelError(
                f"What a forward costs could not be measured ({error}). Drafts are sized without "
                "it: lower Tree nodes in the settings if answers fail too."
            ) from error
        self.measured = time()
        self.save()

    def save(self) -> None:
        """Store the curve as it was corrected."""
        if self.curve is not None:
            self.store().save(self.curve.points, self.curve.node, self.curve.other, self.measured)

    def of(self, method: Method) -> CostCurve | None:
        """The curve for a method whose budget depends on it.

        Others are kept from correcting it: the time of their drafting is not the databases'.
        """
        drafting = method.drafting
        drafts = (drafting.tiers or method.stack is not None) and drafting.nodes
        return self.curve if drafts and drafting.budget == "adaptive" else None

    def copy_of(self, method: Method) -> CostCurve | None:
        """The same as a copy, for a run that must not change what the next one drafts."""
        curve = self.of(method)
        if curve is None:
            return None
        return CostCurve(curve.points, curve.node, curve.other)
