"""How much to draft: nodes are added as long as they pay (docs/how-it-works.md).

A tree of n nodes is worth E / t(n): the number of tokens that it is expected to emit, divided by
the time of its step. A node of path probability p adds p tokens, so growing the tree pays while p /
E exceeds the relative cost of a further node. The tree is then cut to the size at which its worth
was highest, which is no node at all if nothing pays. Without a measured cost curve, a node pays if
its probability exceeds the threshold.

This decides within one step. Over many steps, engine/drafting/controller.py decides whether to
draft at all.
"""

from collections.abc import Collection

from engine.drafting.costs import LARGEST, CostCurve, StepTimes
from engine.settings import Drafting
from engine.types import DATABASES, WAYS


class Budget:
    """The limits of one step's tree: `nodes` nodes, `depth` levels, tokens below `vocabulary`.

    `floor` is the smallest path probability worth considering. `best` is the number of nodes at
    which the tree was worth most so far; `expected` is E, the number of tokens that the tree as
    grown so far is expected to emit, its bonus token included, and the `others`, which other trees
    bring in the same forward. `near` restricts drafts to near databases, whose look-ups cost almost
    nothing. `due` names the way to draft that is used in this step regardless of expectations,
    because it has not been used for long: one of WAYS (engine/types.py). `owed` is true if these
    are the databases. `drafting_ways` are the ways to draft in this step. At most `leaves` branches
    of the tree are verified, any number for None; with 1 the tree is a chain.
    """

    def __init__(
        self,
        drafting: Drafting,
        depth: int,
        vocabulary: int,
        costs: CostCurve | None = None,
        due: str = "",
        near: bool = False,
        leaves: int | None = None,
        drafting_ways: Collection[str] = WAYS,
    ) -> None:
        self.nodes = min(drafting.nodes, LARGEST) if depth > 0 else 0
        self.depth, self.vocabulary = depth, vocabulary
        self.costs: StepTimes | None = costs if drafting.budget == "adaptive" else None
        self.leaves, self.drafting_ways = leaves, drafting_ways
        self.due, self.owed, self.near = due, due == DATABASES, near
        self.threshold = drafting.threshold
        self.others = 0.0
        self.begin()

    def begin(self) -> None:
        """Begin with an empty tree."""
        self.floor, self.expected, self.best, self.worth = self.threshold, 1.0, 0, 0.0
        if self.costs is not None and not self.owed:
            self.worth = 1.0 / self.costs.table[0]
            # No node below this can ever pay, so nothing is looked up for it.
            self.floor = max(self.floor, self.costs.entry)

    def share(self, costs: StepTimes, tokens: float, plain: float) -> None:
        """Share the forward with trees that are expected to bring so many tokens: `costs` are the
        times of the whole step by the nodes of this tree. All answers bring `plain` tokens per
        second if none drafts.

        Beside trees that are too large, a further node seems cheap to each of them, and so all
        would stay too large. Nodes therefore have to pay by the rate of plain decoding at least.
        """
        self.others = tokens
        self.expected += tokens
        excess = costs.table[0] - self.expected / plain
        self.costs = costs.delayed(-excess) if excess > 0 else costs
        self.worth = self.expected / self.costs.table[0]
        self.floor = max(self.floor, self.expected * self.costs.cheapest)

    def again(self, seconds: float) -> None:
        """Begin again with an empty tree after `seconds` seconds of finding out more: the drafts
        have to make up for that time too."""
        if self.costs is not None:
            self.costs = self.costs.delayed(seconds)
        self.begin()

    def pays(self, size: int, probability: float) -> bool:
        """Whether a tree of `size` nodes should grow by one of that path probability."""
        if size >= self.nodes or probability < self.floor:
            return False
        if self.costs is None or (self.owed and not size):
            return True
        return probability > self.expected * self.costs.slopes[size]

    def added(self, size: int, probability: float) -> None:
        self.expected += probability
        if self.costs is None:
            self.best = size
            return
        # The larger E, the likelier a node must be to pay; no slope is below the cheapest.
        self.floor = max(self.floor, self.expected * self.costs.cheapest)
        worth = self.expected / self.costs.table[size]
        if worth > self.worth:
            self.worth, self.best = worth, size
