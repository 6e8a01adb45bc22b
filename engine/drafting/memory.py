"""What drafting knows, in memory: open conversations and what the model said to each owner.

Everything here is a copy. What is learned travels to whoever asked as values (engine/engine.py), is
stored there, and comes back when it is needed again. So the least recently used can go whenever all
of it together takes more than one limit allows. All of that happens on the model's thread alone,
before and after an answer: nothing that a run uses goes. Other threads only say what to forget,
which goes before anything is drafted from it again.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from engine.drafting.base import NgramTable
from engine.drafting.calibration import SIZE, Calibration
from engine.drafting.databases import Databases
from engine.drafting.model import ModelTier

LIMIT = 512 << 20
"""Bytes for open conversations, past answers and remembered look-ups in the statistics together.
What the answer under way uses stays even where that alone is more: a log at its cap takes up to
140 MB. What is shared by all is bounded where it is kept: noise by 32 MB (engine/sampling.py),
followers of keys seen once by 32 MB (engine/types.py)."""
MOST_OPEN = 16
"""Conversations that are open at once; the others are made from what was stored when needed."""
TOKEN = 40
"""Bytes per token of what the cache may know, as measured."""
USES = count()
"""The order in which things are used."""


@dataclass(slots=True)
class PastAnswers:
    """What the model said to one owner, and the evidence weights learned on it."""

    tier: ModelTier
    calibration: Calibration
    used: int = field(default_factory=lambda: next(USES))

    @property
    def bytes(self) -> int:
        """About what it takes in memory."""
        return self.tier.bytes + SIZE


@dataclass(slots=True)
class OpenConversation:
    """One open conversation: what drafts for it, and `tokens`, those of its last turn."""

    databases: Databases
    tokens: list[int] = field(default_factory=list)
    used: int = field(default_factory=lambda: next(USES))

    @property
    def bytes(self) -> int:
        """About what it takes in memory, beside the owner's past answers."""
        return self.databases.bytes + TOKEN * len(self.tokens)


class DraftingMemory:
    """The open conversations and past answers of all owners with one model, in `limit` bytes."""

    def __init__(self, statistics: NgramTable | None = None, limit: int = LIMIT) -> None:
        self.statistics, self.limit = statistics, limit
        # Read while the model gets ready: the first answer finds the statistics in memory.
        getattr(statistics, "in_memory", lambda: None)()
        self.conversations: OrderedDict[tuple[str, str], OpenConversation] = OrderedDict()
        self.past_answers: dict[str, PastAnswers] = {}
        self.unwanted: deque[tuple[str, str | None, bool]] = deque()
        """What threads asked to forget: an owner, a conversation or all, past answers as well."""

    def answers_of(self, owner: str, recall: Callable[[], PastAnswers]) -> PastAnswers:
        """The owner's past answers; `recall` makes it from what was stored."""
        if owner not in self.past_answers:
            self.past_answers[owner] = recall()
        self.past_answers[owner].used = next(USES)
        return self.past_answers[owner]

    def conversation(
        self, owner: str, conversation: str, recall: Callable[[], OpenConversation]
    ) -> OpenConversation:
        """The open conversation; `recall` makes it from what was stored."""
        key = owner, conversation
        if key not in self.conversations:
            self.conversations[key] = recall()
            while len(self.conversations) > MOST_OPEN:
                self.conversations.popitem(last=False)
        self.conversations.move_to_end(key)
        self.conversations[key].used = next(USES)
        return self.conversations[key]

    def close(self, owner: str, conversation: str | None = None) -> None:
        """Forget one conversation, or all of an owner's."""
        for key in list(self.conversations):
            if key[0] == owner and conversation in (None, key[1]):
                del self.conversations[key]

    def forget(self, owner: str) -> None:
        """Forget what the model said to an owner, and the conversations that draft from it."""
        self.close(owner)
        self.past_answers.pop(owner, None)

    def sweep(self) -> None:
        """Forget what other threads asked for."""
        while self.unwanted:
            owner, conversation, past = self.unwanted.popleft()
            if past:
                self.forget(owner)
            else:
                self.close(owner, conversation)

    @property
    def bytes(self) -> int:
        """About the bytes that are taken now."""
        conversations = sum(entry.bytes for entry in self.conversations.values())
        answers = sum(past.bytes for past in self.past_answers.values())
        return conversations + answers + int(getattr(self.statistics, "cached_bytes", 0))

    def fit(self, owner: str) -> None:
        """Drop what was used longest ago until the rest fits.

        The past answers of `owner` stay, and the conversation entered last. Past answers that go
        take all conversations along that draft from them.
        """
        entered = sorted((entry.used, *key) for key, entry in self.conversations.items())
        ages = [*entered[:-1], *((past.used, who, None) for who, past in self.past_answers.items())]
        for _, who, what in sorted(ages, key=lambda age: age[0]):
            if self.bytes <= self.limit:
                return
            if what is not None:
                self.close(who, what)
            elif who != owner:
                self.forget(who)
