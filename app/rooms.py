"""An open conversation's decoding state: what drafts for it and which tokens the cache may know.

Drafts can never change an answer, and a faulty source of drafts must not end one either: `Guarded`
silences a source that fails.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from app.comparison import Timed
from engine.budget import Budget
from engine.drafters.base import Drafter, Likely
from engine.methods import Databases, Method
from engine.settings import Generation
from engine.tree import Tree
from engine.types import TrustRow, Work


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

    def observe(self, tokens: Sequence[int], new: int, likely: Likely | None) -> None:
        """Let the drafter learn."""
        self.guard(lambda: self.drafter.observe(tokens, new, likely))

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


@dataclass(frozen=True, slots=True)
class Answered:
    """What it takes to decode the last answer again: its prompt, its settings, its run.

    `trusted` is how far evidence was trusted before it, `run_id` what the run is stored as;
    `same_text` says whether decoding it again must give the same text.
    """

    prompt: tuple[int, ...]
    generation: Generation
    method: Method
    run: Timed
    trusted: list[TrustRow]
    run_id: str | None
    same_text: bool = True


TOKEN, ANSWERED = 40, 900
"""Bytes per token of what the cache may know, and of an answer with its steps, as measured."""


@dataclass(slots=True)
class Room:
    """One open conversation. `used` is when it was last entered."""

    databases: Databases
    tokens: list[int] = field(default_factory=list)
    answered: Answered | None = None
    used: float = field(default_factory=monotonic)

    @property
    def bytes(self) -> int:
        """About what it takes in memory, beside the owner's past."""
        size = self.databases.bytes + TOKEN * len(self.tokens)
        if self.answered is not None:
            size += TOKEN * len(self.answered.prompt)
            size += ANSWERED * sum(len(step.tokens) for step in self.answered.run.steps)
        return size


class Rooms:
    """The conversations used last; the others are read from the store again when needed."""

    LIMIT = 16

    def __init__(self) -> None:
        self.open: OrderedDict[tuple[str, str], Room] = OrderedDict()

    def get(self, owner: str, conversation_id: str, make: Callable[[], Room]) -> Room:
        """The room of a conversation, made if need be."""
        key = (owner, conversation_id)
        if key not in self.open:
            self.open[key] = make()
            while len(self.open) > self.LIMIT:
                self.open.popitem(last=False)
        self.open.move_to_end(key)
        self.open[key].used = monotonic()
        return self.open[key]

    @property
    def bytes(self) -> int:
        """About what all rooms take in memory."""
        return sum(room.bytes for room in list(self.open.values()))

    def ages(self) -> list[tuple[float, str, str]]:
        """When each conversation was last entered, its owner and itself."""
        return [(room.used, *key) for key, room in list(self.open.items())]

    def find(self, owner: str, conversation_id: str) -> Room | None:
        """The room if it is open."""
        return self.open.get((owner, conversation_id))

    def close(self, owner: str, conversation_id: str | None = None) -> None:
        """Forget one room, or all of an owner's."""
        for key in list(self.open):
            if key[0] == owner and conversation_id in (None, key[1]):
                self.open.pop(key, None)

    def clear(self) -> None:
        """Forget all rooms: another model has another tokenizer, and another past."""
        self.open.clear()
