"""Looks into the databases: what they hold for some words, and what each of them brought of late.

A database is asked as drafting asks it: by the last tokens of the words, the longest run of them
that it knows. A word at the start of a text is another token than the same word behind a space, so
both are tried, and the one is told that is found by more tokens.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.service.current import Current
from app.service.learned import PastAnswersStore
from engine.drafting.context import KEY as CONTEXT_KEY
from engine.drafting.model import KEY as MODEL_KEY
from engine.engine import Engine
from engine.errors import StorageError
from engine.types import CONTEXT, MODEL, STATISTICS
from storage.brought import Brought, brought
from storage.contexts import ContextStore
from storage.database import Database
from storage.statistics import KEY_SIZE

Ask = Callable[[Sequence[int]], Counter[int]]
"""What followed a key, and how often."""
MOST = 12
"""So many next tokens are told."""
LONGEST = 400
"""Of longer words the end is looked up."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A token that followed a key, as text: how often, and in what share of all cases known."""

    text: str
    count: int
    share: float


@dataclass(frozen=True, slots=True)
class Hit:
    """What a database holds for some words: for their last `matched` tokens, which are `key` as
    text. `matched` is 0 where it knows none of them."""

    matched: int = 0
    key: str = ""
    entries: tuple[Entry, ...] = ()


class Entries:
    """See the module's docstring."""

    def __init__(
        self,
        engine: Engine,
        database: Database,
        current: Current,
        past_answers: PastAnswersStore,
    ) -> None:
        self.engine, self.database, self.current = engine, database, current
        self.past_answers = past_answers

    def find(self, owner: str, conversation: str | None, words: str) -> dict[str, Hit]:
        """What each database holds for some words."""
        words = words[-LONGEST:]
        if not words.strip():
            raise StorageError("There is nothing to look up. Write one or more words.")
        tokenizer = self.current.info.tokenizer_fingerprint
        spellings = self.engine.tokens([words, f" {words.lstrip()}"], tokenizer)
        log = self.log(owner, conversation)
        return {
            CONTEXT: self.hit(spellings, CONTEXT_KEY, lambda key: followers(log, key)),
            MODEL: self.hit(spellings, MODEL_KEY, lambda key: self.said(owner, key)),
            STATISTICS: self.hit(spellings, KEY_SIZE, self.general),
        }

    def log(self, owner: str, conversation: str | None) -> list[int]:
        """The tokens of the open conversation."""
        if conversation is None:
            return []
        store = ContextStore(self.database, owner)
        return store.load(conversation, self.current.info.tokenizer_fingerprint)

    def said(self, owner: str, key: Sequence[int]) -> Counter[int]:
        """What followed a key in past answers."""
        store = self.past_answers.ngrams(owner, self.current.info.fingerprint)
        return Counter(dict(store.after(key)))

    def general(self, key: Sequence[int]) -> Counter[int]:
        """What usually follows a key."""
        table = self.current.statistics
        if table is None or max(key) >= table.vocabulary:
            return Counter()
        found = table.look_up(key)
        if found is None:
            return Counter()
        return Counter({token: max(1, round(count)) for token, count in found.counts.items()})

    def hit(self, spellings: Sequence[Sequence[int]], longest: int, ask: Ask) -> Hit:
        """The longest run of last tokens that a database knows, and what followed it."""
        for size in range(longest, 0, -1):
            for tokens in spellings:
                if len(tokens) >= size and (found := ask(tokens[-size:])):
                    return self.told(tokens[-size:], found)
        return Hit()

    def told(self, key: Sequence[int], found: Counter[int]) -> Hit:
        """A hit in words."""
        best, total = found.most_common(MOST), found.total()
        texts = self.engine.texts([key, *([token] for token, _ in best)])
        entries = (
            Entry(text, count, count / total)
            for text, (_, count) in zip(texts[1:], best, strict=True)
        )
        return Hit(len(key), texts[0], tuple(entries))

    def brought(self, owner: str) -> Brought:
        """What each source brought to the model's latest answers."""
        return brought(self.database, owner, self.current.info.fingerprint)


def followers(log: Sequence[int], key: Sequence[int]) -> Counter[int]:
    """What followed a key in a list of tokens."""
    found, at, wanted = Counter[int](), -1, list(key)
    while True:
        try:
            at = log.index(wanted[-1], at + 1, len(log) - 1)
        except ValueError:
            return found
        if log[max(0, at - len(wanted) + 1) : at + 1] == wanted:
            found[log[at + 1]] += 1
