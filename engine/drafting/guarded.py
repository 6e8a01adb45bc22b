"""A drafter whose faults cost speed only.

Drafts can never change an answer, and a faulty source of drafts must not end one either. What
raises is switched off for the rest of the answer, and the user is told.
"""

from collections.abc import Callable, Mapping, Sequence

from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.tree import Tree
from engine.types import Work


class Guarded:
    """A drafter whose faults cost speed only; it may replace what others drafted before it."""

    def __init__(self, drafter: Drafter, report: Callable[[str], None]) -> None:
        self.drafter, self.report = drafter, report
        self.name = drafter.name
        self.silent = False

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Let the drafter grow the tree; what a faulty one added is taken back."""
        if self.silent:
            return {}
        before = list(tree.tokens)
        try:
            look_ups = self.drafter.grow(tree, tokens, budget)
            drafted = tree.tokens[1:]
            if drafted and not 0 <= min(drafted) <= max(drafted) < budget.vocabulary:
                raise ValueError("it drafted a token that the model does not have")
            return look_ups
        except Exception as error:
            # Whatever a damaged source raises, the target can go on without it.
            kept = tree.tokens[: len(before)] == before
            tree.cut(len(before) - 1 if kept else 0)
            self.fail(error)
            return {}

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Let the drafter learn."""
        self.guard(lambda: self.drafter.observe(tokens, new))

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Let the drafter keep the answer."""
        self.guard(lambda: self.drafter.finish(tokens, new))

    def guard(self, learn: Callable[[], None]) -> None:
        """Let the source learn unless it is silent."""
        try:
            if not self.silent:
                learn()
        except Exception as error:
            # As above: not learning costs speed, losing the answer would cost the answer.
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Silence the source and say so once."""
        self.silent = True
        self.report(
            f"Drafting from the {self.name} failed ({error}) and was switched off for this "
            "answer. The text is not affected."
        )
