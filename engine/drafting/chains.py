"""Drafts chains for many sequences that share one forward: the best path of each, under one budget.

This is for engines that verify only chains, many at once. The trees of all sequences are grown best
first, in one call. For every length, the best path of a tree is the one that is expected to emit
the most tokens. All sequences then compete for the rows of the forward: a path is extended as long
as this gives more tokens per time, so less is drafted as the load grows.

No clock is used, so other processes that draft for the same sequences make the same decisions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from engine.drafting.budget import Budget
from engine.drafting.compiled import Draft, grow_all
from engine.drafting.hierarchy import Hierarchy, path_to
from engine.settings import Drafting
from engine.tree import Tree

WIDER = 4
"""Nodes that are grown in addition to those of the longest chain."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """The relative time of a forward over many rows: 1 + rows / `rows`, plus `drafted` if any row
    is a draft."""

    rows: float
    drafted: float = 0.0

    def of(self, rows: int, drafted: int) -> float:
        return 1.0 + rows / self.rows + (self.drafted if drafted else 0.0)


@dataclass(frozen=True, slots=True)
class Room:
    """The limits of one sequence: chains of `length` tokens, all below `vocabulary`, none of a
    probability below `floor`."""

    length: int
    vocabulary: int
    floor: float

    def budget(self) -> Budget:
        nodes = self.length + WIDER if self.length else 0
        drafting = Drafting(nodes=nodes, threshold=self.floor, budget="fixed")
        return Budget(drafting, self.length, self.vocabulary)


@dataclass(frozen=True, slots=True)
class Chain:
    """The draft of a sequence: tokens, with the source of each."""

    tokens: list[int]
    sources: list[str]


NOTHING = Chain([], [])


def grow_chains(
    sequences: Sequence[tuple[Hierarchy, Sequence[int], Room]], cost: StepCost
) -> list[Chain]:
    """The chains that maximise the value of a step over all these sequences.

    Each sequence is a drafter and its decided tokens. The drafter learns from the whole tree
    afterwards.
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
    chains = []
    for number, (_, tree, *_) in enumerate(drafts):
        rows = path_to(tree, ends.get(number, 0))
        tokens, sources = [tree.tokens[row] for row in rows], [tree.sources[row] for row in rows]
        chains.append(Chain(tokens, sources))
    return chains


def hull(tree: Tree, chances: Sequence[float]) -> Iterator[tuple[int, float]]:
    """The last rows of the best paths, shorter ones first, each with the number of tokens that the
    path is expected to emit per additional row, compared with the path before it. These numbers
    never rise; rows that would break this are left out."""
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
    """The last row of each sequence's chain, for sequences that have one.

    `steps` gives the value of each step: tokens per row, sequence, the row at its end, and its
    rows. The best come first; those of one sequence are in their order. Ties are broken by the
    sequence.
    """
    steps.sort(key=lambda step: (-step[0], step[1]))
    tokens, drafted = float(sequences), 0
    worth, kept = tokens / cost.of(sequences, 0), 0
    for number, (slope, _, _, rows) in enumerate(steps, 1):
        tokens, drafted = tokens + slope * rows, drafted + rows
        if tokens > worth * cost.of(sequences + drafted, drafted):
            worth, kept = tokens / cost.of(sequences + drafted, drafted), number
    return dict(map(itemgetter(1, 2), steps[:kept]))
