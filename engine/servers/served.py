"""A model that a server runs, in the place of one of this machine.

It is loaded as others are: its server is asked which model it has and what drafts there. Then
answers come from it. Its weights and its tokenizer are not here, so nothing here drafts for it, and
whatever needs them says so.

What is guaranteed is what the server guarantees. With drafts vLLM promises its own greedy tokens
at temperature 0 and the distribution above that, but not the text of a seed.
"""

from collections.abc import Sequence
from typing import NoReturn

from engine.backends.base import BackendInfo, ServerInfo, digest
from engine.errors import PromptError, ServerError
from engine.heads.base import Head
from engine.prompt import Chat, Size
from engine.servers.address import KIND, Address
from engine.servers.client import Access, Found, find
from engine.servers.makers import GOES_ON, GUARANTEE, OFF, STRATA
from engine.types import CONTEXT, MODEL, STATISTICS, Message

CHARACTERS = 4
"""Of a token, where nobody can be asked: about right for English."""
MOST_TEXTS = 1 << 18
"""Texts of tokens that are remembered."""


class ServedModel:
    """See the module's docstring. Until `connect` nothing is known of it."""

    def __init__(self, address: Address) -> None:
        self.access = Access(address)
        self.info = info_of(address, Found(address.model or address.host, 0, "", None, False))
        self.without: set[str] = set()
        """Parameters that the server does not take."""
        self.texts: dict[int, str] = {}
        """What tokens say, as far as it was told."""
        self.numbers: dict[str, int] = {}
        """Stand for tokens whose numbers are not told: one for each text."""

    @property
    def address(self) -> Address:
        """Where it is."""
        return self.access.address

    @property
    def server(self) -> ServerInfo:
        """What its server told of itself."""
        found = self.info.server
        assert found is not None
        return found

    def connect(self, key: str) -> None:
        """Ask the server what it is. Raises ServerError."""
        self.access = Access(self.address, key)
        self.info = info_of(self.address, find(self.access))

    # what tokens say

    def number(self, text: str) -> int:
        """What stands for a token of which only the text is told: the same for the same text."""
        if text not in self.numbers and len(self.numbers) >= MOST_TEXTS:
            self.numbers.clear()
        number = self.numbers.setdefault(text, len(self.numbers))
        self.learn(number, text)
        return number

    def learn(self, number: int, text: str) -> None:
        """Remember what a token says."""
        if len(self.texts) >= MOST_TEXTS:
            self.texts.clear()
        self.texts[number] = text

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens that the server sent."""
        return "".join(self.texts.get(token, "") for token in tokens)

    # what is not here

    bytes = unread = 0
    head: Head | None = None

    def refuse(self, *_: object) -> NoReturn:
        """There is nothing here that could do it."""
        raise ServerError(
            f"{self.info.name} runs on {self.address.host}, and this needs a model on this "
            "machine. Load one in the Models tab."
        )

    def vocabulary(self) -> Sequence[str]:
        self.refuse()

    tokenize = render = prefill = depth_limit = score = accept = open = refuse

    def close(self) -> None:
        """There is nothing to free."""


class ServedChat(Chat):
    """A conversation with such a model. How much of the context it takes is an estimate: the server
    counts for itself, and says so where it does not fit."""

    def check(self, text: str) -> None:
        if not text.strip():
            raise PromptError("The message is empty. Write something first.")

    def measure(self, messages: Sequence[Message]) -> Size:
        tokens = sum(self.counted(message.content) for message in messages)
        context = self.backend.info.context_length
        return Size(tokens, context or max(1, tokens))

    def counted(self, text: str) -> int:
        return -(-len(text) // CHARACTERS)


def info_of(address: Address, found: Found) -> BackendInfo:
    """What the rest of the program may know of a model on a server."""
    name, strata = found.model, found.strata
    databases = strata.get("databases") if strata else None
    deepest = strata.get("draft_tokens") if strata else None
    drafting = found.counts if strata is None else strata.get("drafting") is True
    server = ServerInfo(
        address.host,
        found.maker,
        drafting,
        tuple(each for each in (CONTEXT, MODEL, STATISTICS) if each in (databases or ())),
        deepest if isinstance(deepest, int) else 0,
        sources=strata is not None,
        counts=found.counts,
        switches=found.maker == STRATA or strata is not None and found.maker in OFF,
        goes_on=found.maker in GOES_ON,
    )
    identity = digest([KIND, address.base, name])
    return BackendInfo(
        name=name,
        kind=KIND,
        fingerprint=identity,
        tokenizer_fingerprint=identity,
        vocabulary_size=0,
        eos_ids=frozenset(),
        context_length=found.context,
        can_tree=False,
        device=address.host,
        dtype="",
        note=GUARANTEE,
        server=server,
    )
