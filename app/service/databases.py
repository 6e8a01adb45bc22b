"""What drafting remembers for an owner: wiping, importing, exporting, pruning and looking it up.

The engine reads past answers and adds to them (storage/drafting.py). Changes by the user are stored
here, and then the engine drops its copy.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.service.current import Current
from engine.backends.base import BackendInfo
from engine.drafting.tiers import CONTEXT_KEY, MODEL_KEY
from engine.engine import Engine
from engine.errors import StorageError
from engine.types import CONTEXT, MODEL, STATISTICS
from storage import drafting, ngrams
from storage.database import Database
from storage.drafting import ContextStore
from storage.ngrams import ModelNgrams, Pruning
from storage.statistics import KEY_SIZE
from storage.steps import Contributions, contributions


class PastAnswersStore:
    """The stored past answers of all owners. `forget(owner)` makes the engine drop its copy."""

    def __init__(self, database: Database, forget: Callable[[str], None]) -> None:
        self.database, self.forget = database, forget

    def ngrams(self, owner: str, fingerprint: str) -> ModelNgrams:
        return ModelNgrams(self.database, owner, fingerprint)

    def saved(self, owner: str, info: BackendInfo) -> str:
        store = self.ngrams(owner, info.fingerprint)
        held = ngrams.NgramFile(store.learned(), store.load())
        return ngrams.to_file(info.name, info.tokenizer_fingerprint, held)

    def take_in(self, owner: str, info: BackendInfo, content: bytes) -> int:
        """Add the n-grams of a file; returns their number. Raises `StorageError`, with nothing
        stored, if the file cannot be used."""
        tokenizer, vocabulary = info.tokenizer_fingerprint, info.vocabulary_size
        held = ngrams.from_file(content, tokenizer, vocabulary)
        self.ngrams(owner, info.fingerprint).merge(*held)
        self.forget(owner)
        return len(held.grams)

    def drop(self, owner: str, fingerprint: str, pruning: Pruning) -> int:
        dropped = self.ngrams(owner, fingerprint).drop(pruning)
        self.forget(owner)
        return dropped

    def wipe(self, owner: str, fingerprint: str) -> None:
        """Forget the owner's past answers of a model. A running answer is not learned any more."""
        drafting.wipe(self.database, owner, fingerprint)
        self.forget(owner)

    def lend(self, owner: str | None, fingerprint: str = "") -> None:
        """Copy the owner's past answers of a model for benchmarks; with None, copy nothing."""
        drafting.lend(self.database, owner, fingerprint)
        self.forget(drafting.BENCHMARK)


Query = Callable[[Sequence[int]], Counter[int]]
"""Returns the tokens that followed a key, with their counts."""
MOST = 12
"""The most next tokens to list."""
LONGEST = 400
"""The most characters to look up; of a longer text only the end is used."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A token that followed a key, as text, with its count and its share of all counts."""

    text: str
    count: int
    share: float


@dataclass(frozen=True, slots=True)
class Hit:
    """What a database knows for the last `matched` tokens of a text, whose own text is `key`.
    `matched` is 0 if it knows none."""

    matched: int = 0
    key: str = ""
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class Entries:
    """Looks up what the databases know for a text, and what each contributed recently.

    A database is queried as in drafting: by the longest run of the text's last tokens that it
    knows. A word at the start of a text is another token than the same word after a space, so both
    are tried, and the one with the longer match is shown.
    """

    engine: Engine
    database: Database
    current: Current
    past_answers: PastAnswersStore

    def find(self, owner: str, conversation: str | None, words: str) -> dict[str, Hit]:
        words = words[-LONGEST:]
        if not words.strip():
            raise StorageError("There is nothing to look up. Write one or more words.")
        tokenizer = self.current.info.tokenizer_fingerprint
        spellings = self.engine.tokens([words, f" {words.lstrip()}"], tokenizer)
        context = ContextStore(self.database, owner)
        log = context.load(conversation, tokenizer) if conversation is not None else []
        past = self.past_answers.ngrams(owner, self.current.info.fingerprint)
        return {
            CONTEXT: self.hit(spellings, CONTEXT_KEY, lambda key: followers(log, key)),
            MODEL: self.hit(spellings, MODEL_KEY, lambda key: Counter(dict(past.after(key)))),
            STATISTICS: self.hit(spellings, KEY_SIZE, self.general),
        }

    def general(self, key: Sequence[int]) -> Counter[int]:
        table = self.current.statistics
        found = table.look_up(key) if table and max(key) < table.vocabulary else None
        counts = found.counts if found else {}
        return Counter({token: max(1, round(count)) for token, count in counts.items()})

    def hit(self, spellings: Sequence[Sequence[int]], longest: int, query: Query) -> Hit:
        """The longest run of last tokens that a database knows, and what followed it."""
        for size in range(longest, 0, -1):
            for tokens in spellings:
                if len(tokens) >= size and (found := query(tokens[-size:])):
                    return self.described(tokens[-size:], found)
        return Hit()

    def described(self, key: Sequence[int], found: Counter[int]) -> Hit:
        best, total = found.most_common(MOST), found.total()
        texts = self.engine.texts([key, *([token] for token, _ in best)])
        entries = (
            Entry(text, count, count / total)
            for text, (_, count) in zip(texts[1:], best, strict=True)
        )
        return Hit(len(key), texts[0], tuple(entries))

    def contributions(self, owner: str) -> Contributions:
        return contributions(self.database, owner, self.current.info.fingerprint)


def followers(log: Sequence[int], key: Sequence[int]) -> Counter[int]:
    found, at, key = Counter[int](), -1, list(key)
    while True:
        try:
            at = log.index(key[-1], at + 1, len(log) - 1)
        except ValueError:
            return found
        if log[max(0, at - len(key) + 1) : at + 1] == key:
            found[log[at + 1]] += 1
