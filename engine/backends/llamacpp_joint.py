"""Several conversations of a GGUF model in one forward, for more answers per second.

Reading the weights takes most of the time of a forward over few rows, so the rows of further
conversations cost little. Each conversation has a place in the library's cache, with sequences of
its own, so its rows see none of the others. All share the cells of one conversation of the full
length. If their texts do not fit together, a forward is computed in parts, between which
conversations are parked.

Models whose layers keep a state, and models that verify only chains because of their positions,
have no such forwards: the library's cache holds one of their conversations at a time.
"""

from collections.abc import Iterator, Sequence
from typing import cast

from engine.backends.base import LogitScores, Wanted
from engine.backends.llamacpp import LlamaCppBackend
from engine.models.gguf import TREE_ROWS


class JointBackend(LlamaCppBackend):
    """One sequence of a model that has several places in the library's cache. See
    LlamaCppBackend."""

    joins = False
    """Whether the sequences of this model were found to share forwards correctly."""

    def score_all(self, wanted: Sequence[Wanted]) -> list[LogitScores]:
        found: dict[int, LogitScores] = {}
        for group in self.groups(wanted):
            trees = [(sequence_of(wanted[number]), wanted[number].tree) for number in group]
            first, rows = 0, sum(len(tree.tokens) for _, tree in trees)
            # A later forward overwrites the library's logits before all of these are read.
            logits = self.forward(trees)[:rows].copy()
            for number, (sequence, tree) in zip(group, trees, strict=True):
                own = logits[first : first + len(tree.tokens)]
                positions = sequence.positions(tree)
                found[number] = LogitScores(own.__getitem__, positions, wanted[number].sampling)
                first += len(tree.tokens)
        return [found[number] for number in range(len(wanted))]

    def groups(self, wanted: Sequence[Wanted]) -> Iterator[list[int]]:
        """The numbers of trees that are computed together, those first whose sequences are in the
        cache."""
        group, rows, cells = list[int](), 0, 0
        most = len(self.shared.places) if self.joins else 1
        for number in sorted(
            range(len(wanted)), key=lambda number: not sequence_of(wanted[number]).resident
        ):
            more = len(wanted[number].tree.tokens)
            taken = len(sequence_of(wanted[number]).cached) + more
            full = rows + more > TREE_ROWS or cells + taken > self.cells
            if group and (full or len(group) == most):
                yield group
                group, rows, cells = [], 0, 0
            group.append(number)
            rows, cells = rows + more, cells + taken
        if group:
            yield group


def sequence_of(wanted: Wanted) -> LlamaCppBackend:
    return cast(LlamaCppBackend, wanted.sequence)
