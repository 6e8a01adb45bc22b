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

import llama_cpp

from engine.backends.base import SLICE, LogitScores, Wanted, common_prefix
from engine.backends.llamacpp import LlamaCppBackend
from engine.models.gguf import TREE_ROWS


class JointBackend(LlamaCppBackend):
    """One sequence of a model that has several places in the library's cache. See
    LlamaCppBackend."""

    joins = False
    """Whether the sequences of this model were found to share forwards correctly."""
    at_once, slice_size = True, SLICE

    def begin_as(self, other: "JointBackend", tokens: Sequence[int]) -> None:
        own, shared = (common_prefix(each.cached, tokens[:-1]) for each in (self, other))
        if shared <= own:
            return
        self.reset()
        if other.resident:
            # Both have the same cells, until one of them is parked.
            self.enter([other])
            numbers = other.order[0], self.order[0]
            llama_cpp.llama_memory_seq_cp(self.memory, *numbers, 0, shared)
            self.cached = other.cached[:shared]
        else:
            if self.resident:
                self.shared.vacate(self.place)
            self.parked, self.cached = other.parked, [*other.cached]

    def score_all(self, wanted: Sequence[Wanted["JointBackend"]]) -> list[LogitScores]:
        found: dict[int, LogitScores] = {}
        for group in self.groups(wanted):
            trees = [(wanted[number].sequence, wanted[number].tree) for number in group]
            first, rows = 0, sum(len(tree.tokens) for _, tree in trees)
            # A later forward overwrites the library's logits before all of these are read.
            logits = self.forward(trees)[:rows].copy()
            for number, (sequence, tree) in zip(group, trees, strict=True):
                own = logits[first : first + len(tree.tokens)]
                positions = sequence.positions(tree)
                found[number] = LogitScores(own.__getitem__, positions, wanted[number].sampling)
                first += len(tree.tokens)
        return [found[number] for number in range(len(wanted))]

    def groups(self, wanted: Sequence[Wanted["JointBackend"]]) -> Iterator[list[int]]:
        """The numbers of trees that are computed together, those first whose sequences are in the
        cache."""
        group, rows, cells = list[int](), 0, 0
        most = len(self.shared.places) if self.joins else 1
        for number in sorted(
            range(len(wanted)), key=lambda number: not wanted[number].sequence.resident
        ):
            more = len(wanted[number].tree.tokens)
            taken = len(wanted[number].sequence.cached) + more
            full = rows + more > TREE_ROWS or cells + taken > self.cells
            if group and (full or len(group) == most):
                yield group
                group, rows, cells = [], 0, 0
            group.append(number)
            rows, cells = rows + more, cells + taken
        if group:
            yield group
