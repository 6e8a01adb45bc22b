"""How much to draft: as long as a node pays (docs/how-it-works.md).

A tree of n nodes is worth E / t(n): the tokens it is expected to emit over the time of its step. A
node of path probability p adds p tokens, so growing on pays while p / E exceeds the relative cost
of a further node. The tree is then cut where its worth was highest: at no node at all when
nothing pays. Without a measured cost curve, a node pays when it is likelier than the threshold.

This decides within one step. Over many steps engine/drafting/controller.py decides whether to draft
at all.
"""

from collections.abc import Collection

from engine.drafting.costs import LARGEST, CostCurve, StepTimes
from engine.settings import Drafting
from engine.types import DATABASES, WAYS


class Budget:
    """The room for one step's tree: `nodes` nodes, `depth` levels, tokens below `vocabulary`.

    `floor` is the least path probability worth considering. `best` is the number of nodes at which
    the tree was worth most so far; `expected` is E, the number of tokens the tree as grown so far
    is expected to emit, its bonus token included. `near` asks for drafts of near databases alone,
    those that are as good as free to look into. `due` names who drafts in this step whatever is
    expected of it, as it has not drafted for long: one of WAYS (engine/types.py). `owed` is whether
    that is the databases. `asked` are the ways that draft in this step. Of the tree no more than
    `leaves` branches are verified, None for any number: with 1 it is a chain.
    """

    __slots__ = (
        "asked",
        "best",
        "costs",
        "depth",
        "due",
        "expected",
        "floor",
        "leaves",
        "near",
        "nodes",
        "owed",
        "vocabulary",
        "worth",
    )

    def __init__(
        self,
        drafting: Drafting,
        depth: int,
        vocabulary: int,
        costs: CostCurve | None = None,
        due: str = "",
        near: bool = False,
        leaves: int | None = None,
        asked: Collection[str] = WAYS,
    ) -> None:
        self.nodes = min(drafting.nodes, LARGEST) if depth > 0 else 0
        self.depth, self.vocabulary = depth, vocabulary
        self.costs: StepTimes | None = costs if drafting.budget == "adaptive" else None
        self.leaves, self.asked = leaves, asked
        self.due, self.owed, self.near = due, due == DATABASES, near
        self.floor = drafting.threshold
        self.expected = 1.0
        self.best = 0
        self.worth = 0.0
        if self.costs is not None and not self.owed:
            self.worth = 1.0 / self.costs.table[0]
            # No node below this can ever pay, so nothing is looked up for it.
            self.floor = max(self.floor, self.costs.entry)

    def spend(self, seconds: float) -> None:
        """So long was taken before the tree is grown: what is drafted has to be worth that too."""
        if self.costs is not None:
            self.costs = self.costs.delayed(seconds)
            self.worth = 0.0 if self.owed else 1.0 / self.costs.table[0]

    def pays(self, size: int, probability: float) -> bool:
        """Whether a tree of `size` nodes should grow by one of that path probability."""
        if size >= self.nodes or probability < self.floor:
            return False
        if self.costs is None or (self.owed and not size):
            return True
        return probability > self.expected * self.costs.slopes[size]

    def added(self, size: int, probability: float) -> None:
        """The tree has `size` nodes now; the last one has that path probability."""
        self.expected += probability
        if self.costs is None:
            self.best = size
            return
        # The larger E, the likelier a node must be to pay; no slope is below the cheapest.
        self.floor = max(self.floor, self.expected * self.costs.cheapest)
        worth = self.expected / self.costs.table[size]
        if worth > self.worth:
            self.worth, self.best = worth, size
