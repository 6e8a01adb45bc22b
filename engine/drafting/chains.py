"""Chains for many sequences that share one forward: the best path of each, under one budget.

An engine that verifies chains alone, many at once, takes them from here. Each sequence's tree is
grown best first, all in one call. Of the tree the best path of each length is known by the tokens
that it is expected to emit. Then all sequences compete for the rows of the forward: a path is made
longer while that brings more tokens per time. So drafting shrinks by itself as the load grows.

There is no clock in here. Whoever drafts for the same sequences elsewhere decides the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from engine.drafting.budget import Budget
from engine.drafting.compiled import Draft, grow_all
from engine.drafting.hierarchy import Hierarchy
from engine.drafting.paths import path_to
from engine.settings import Drafting
from engine.tree import Tree

WIDER = 4
"""Nodes that are looked at beside those that the longest chain has."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a forward over many rows takes, in those over none: 1 + rows / `rows`, and `drafted`
    more where any row is a draft."""

    rows: float
    drafted: float = 0.0

    def of(self, rows: int, drafted: int) -> float:
        """A step over so many rows, of which so many are drafts."""
        return 1.0 + rows / self.rows + (self.drafted if drafted else 0.0)


@dataclass(frozen=True, slots=True)
class Room:
    """What one sequence may have: chains of `length` tokens, all below `vocabulary`, none of a
    probability below `floor`."""

    length: int
    vocabulary: int
    floor: float

    def budget(self) -> Budget:
        """The same for a tree in which the best of these chains is looked for."""
        nodes = self.length + WIDER if self.length else 0
        drafting = Drafting(nodes=nodes, threshold=self.floor, budget="fixed")
        return Budget(drafting, self.length, self.vocabulary)


@dataclass(frozen=True, slots=True)
class Chain:
    """What is drafted for a sequence: tokens, with the source of each."""

    tokens: list[int]
    sources: list[str]


NOTHING = Chain([], [])


def grow_chains(
    sequences: Sequence[tuple[Hierarchy, Sequence[int], Room]], cost: StepCost
) -> list[Chain]:
    """The chains that make a step over all these sequences worth most.

    Each is a drafter and its decided tokens. The drafter learns from the whole tree afterwards.
    """
    drafts: list[Draft] = [
        (drafter, Tree(tokens[-1]), tokens, room.budget()) for drafter, tokens, room in sequences
    ]
    grow_all(drafts)
    steps: list[tuple[float, int, int, int]] = []
    for number, (drafter, tree, *_) in enumerate(drafts):
        if len(tree):
            before = 0
            for row, slope in hull(tree, drafter.chances()):
                steps.append((slope, number, row, tree.depths[row] - before))
                before = tree.depths[row]
    ends = affordable(steps, len(sequences), cost)
    trees = enumerate(tree for _, tree, *_ in drafts)
    return [chain_to(tree, ends[number]) if number in ends else NOTHING for number, tree in trees]


def hull(tree: Tree, chances: Sequence[float]) -> Iterator[tuple[int, float]]:
    """The rows at which the best paths end, shorter ones first, each with the tokens that it is
    expected to emit per row beyond the one before. These only fall: what lies below is left out.
    """
    expected, best = [0.0], {0: (0.0, 0)}
    for row in range(1, len(chances)):
        depth = tree.depths[row]
        expected.append(expected[tree.parents[row]] + chances[row])
        if expected[row] > best.get(depth, (0.0, 0))[0]:
            best[depth] = expected[row], row
    at, here, least = 0, 0.0, 1.0
    deepest = len(best) - 1
    while at < deepest:
        slope, depth = max(
            ((best[further][0] - here) / (further - at), further)
            for further in range(at + 1, deepest + 1)
        )
        at, (here, row) = depth, best[depth]
        least = min(least, slope)  # whatever rounding does
        yield row, least


def affordable(
    steps: list[tuple[float, int, int, int]], sequences: int, cost: StepCost
) -> dict[int, int]:
    """The row at which each sequence's chain ends, of those that have one.

    `steps` says what each is worth: tokens per row, sequence, the row at its end, and its rows. The
    best come first; of one sequence they do so in their order. Equals go by their sequence.
    """
    steps.sort(key=lambda step: (-step[0], step[1]))
    tokens, drafted = float(sequences), 0
    worth, kept = tokens / cost.of(sequences, 0), 0
    for number, (slope, _, _, rows) in enumerate(steps, 1):
        tokens, drafted = tokens + slope * rows, drafted + rows
        if tokens > worth * cost.of(sequences + drafted, drafted):
            worth, kept = tokens / cost.of(sequences + drafted, drafted), number
    return dict(map(itemgetter(1, 2), steps[:kept]))


def chain_to(tree: Tree, end: int) -> Chain:
    """The path from below the root to a row."""
    rows = path_to(tree, end)
    return Chain([tree.tokens[row] for row in rows], [tree.sources[row] for row in rows])
