"""A model that a server runs, used in place of a model on this machine.

It is loaded like other models: its server is queried for its model and its drafting. Answers then
come from the server. The weights and the tokenizer are not on this machine, so nothing here drafts
for it, and features that need them raise an error.

The guarantees are those of the server. With drafts, vLLM promises its own greedy tokens at
temperature 0 and the distribution at higher temperatures, but not the same text for a seed.
"""

from collections.abc import Sequence
from typing import NoReturn

from engine.backends.base import BackendInfo, ServerInfo, digest
from engine.backends.special_tokens import SpecialTokens
from engine.errors import PromptError, ServerError
from engine.heads.base import Head
from engine.prompt import Chat, Size
from engine.servers.client import (
    COMPLETE,
    GUARANTEE,
    KIND,
    OFF,
    STRATA,
    Access,
    Address,
    ServerModel,
    find,
)
from engine.types import CONTEXT, MODEL, STATISTICS, Message, Tool

CHARACTERS = 4
"""An estimate of the characters per token, about right for English."""
MOST_TEXTS = 1 << 18
"""The most texts of tokens that are kept."""


class ServedModel:
    """See the module's docstring. Before `connect`, only its address is known."""

    def __init__(self, address: Address) -> None:
        self.access = Access(address)
        self.info = info_of(address, ServerModel(address.model or address.host, 0, "", None, False))
        self.without: set[str] = set()
        """Parameters that the server refuses."""
        self.texts: dict[int, str] = {}
        """The reported texts of tokens."""
        self.numbers: dict[str, int] = {}
        """Substitutes for ids that are not reported, one for each text."""

    @property
    def address(self) -> Address:
        return self.access.address

    @property
    def server(self) -> ServerInfo:
        found = self.info.server
        assert found is not None
        return found

    def connect(self, key: str) -> None:
        """Query the server for its model and abilities. Raises ServerError."""
        self.access = Access(self.address, key)
        self.info = info_of(self.address, find(self.access))

    # the texts of tokens

    def number(self, text: str) -> int:
        """A substitute for the id of a token whose text alone is known."""
        if text not in self.numbers and len(self.numbers) >= MOST_TEXTS:
            self.numbers.clear()
        number = self.numbers.setdefault(text, len(self.numbers))
        self.learn(number, text)
        return number

    def learn(self, number: int, text: str) -> None:
        if len(self.texts) >= MOST_TEXTS:
            self.texts.clear()
        self.texts[number] = text

    def detokenize(self, tokens: Sequence[int]) -> str:
        return "".join(self.texts.get(token, "") for token in tokens)

    def piece(self, token: int) -> bytes:
        return self.detokenize([token]).encode("utf-8", "replace")

    # needs a model on this machine

    bytes = unread = 0
    head: Head | None = None
    special = SpecialTokens({})

    def refuse(self, *_: object) -> NoReturn:
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
    """A conversation with a model of a server. Its use of the context is an estimate; the server
    counts exactly, and returns an error if the conversation does not fit."""

    def check(self, text: str) -> None:
        if not text.strip():
            raise PromptError("The message is empty. Write something first.")

    def measure(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Size:
        tokens = sum(self.counted(message.content) for message in messages)
        context = self.backend.info.context_length
        return Size(tokens, context or max(1, tokens))

    def counted(self, text: str) -> int:
        return -(-len(text) // CHARACTERS)


def info_of(address: Address, found: ServerModel) -> BackendInfo:
    name, strata = found.model, found.strata
    server = ServerInfo(
        address.host,
        found.maker,
        strata.drafting if strata else found.counts,
        tuple(each for each in (CONTEXT, MODEL, STATISTICS) if strata and each in strata.databases),
        strata.draft_tokens if strata else 0,
        sources=strata is not None,
        counts=found.counts,
        switches=found.maker == STRATA or strata is not None and found.maker in OFF,
        continues=found.maker in COMPLETE,
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
