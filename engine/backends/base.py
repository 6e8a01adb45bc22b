"""The seam between the decode loop and whatever runs the target model."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.backends.chat_template import Fill, TemplateStopped, switched
from engine.errors import PromptError
from engine.heads.base import Head, HeadInfo
from engine.sampling import Floats
from engine.settings import Sampling
from engine.tree import Tree
from engine.types import Message


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server told of itself that runs a model elsewhere.

    `host` names it, `maker` is whose program it is. It is `drafting` as far as it tells, from these
    `databases`, chains of at most `draft_tokens` (0: not told). `sources`: it says where tokens
    came from; `counts`: it has counters of drafts; `switches`: it answers without drafts when asked
    to; `goes_on`: it goes on with an answer that has begun.
    """

    host: str
    maker: str = ""
    drafting: bool = False
    databases: tuple[str, ...] = ()
    draft_tokens: int = 0
    sources: bool = False
    counts: bool = False
    switches: bool = False
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What the rest of the program may know of a loaded model.

    `fingerprint` names the weights and `tokenizer_fingerprint` the vocabulary: n-grams of one
    tokenizer mean nothing to another. `note` says why a model decodes plainly, when it does, and
    what else its user should know.
    `threads` compute on the host, 0 where that does not matter. `tokenizer_type` is how the
    vocabulary splits text ("BPE", "Unigram", ...). `leaves` is how many branches a tree may have,
    None for any number; 1 means that only chains are verified. `depth` is how many tokens deep one
    may be, where the model's memory bounds that. `sampling` is what the model's
    makers recommend, where they do. `begin` is the token that a text begins with, as text, "" where
    the model wants none. `can_think` says whether its chat template can have it think before it
    answers, or not. `head` is what the model brings to guess its own next tokens with, if anything.
    `ranks` is how many processes compute it together; `memory_bytes` are those of the first then.
    `server` is what runs it elsewhere: None for a model on this machine.
    """

    name: str
    kind: str
    fingerprint: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    eos_ids: frozenset[int]
    context_length: int
    can_tree: bool
    leaves: int | None = None
    depth: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0
    tokenizer_type: str = ""
    parameters: int = 0
    memory_bytes: int = 0
    note: str = ""
    sampling: Sampling = Sampling()
    begin: str = ""
    can_think: bool = False
    head: HeadInfo | None = None
    ranks: int = 1
    server: ServerInfo | None = None


class TokenizerInfo(Protocol):
    """What a tokenizer tells of itself; `BackendInfo` does, too."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer_fingerprint(self) -> str: ...
    @property
    def vocabulary_size(self) -> int: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...


class Tokenizer(Protocol):
    """How a model reads text: the part of a `Backend` that needs none of its weights."""

    @property
    def info(self) -> TokenizerInfo: ...

    def tokenize(self, text: str) -> list[int]:
        """The token ids of a text."""

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""

    def render(self, messages: Sequence[Message], thinking: bool | None = None) -> str:
        """The conversation in the model's chat template."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A `TokenizerInfo` where no model is loaded."""

    name: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    eos_ids: frozenset[int]


class Filled(NamedTuple):
    """What came of a prefill: how many tokens were in the cache already, and whether all are now.

    `limit` is the longest text that can be decided with this cache, its root counted: once more
    tokens are decided, the cache has to be filled again. None where that never happens.
    """

    reused: int
    complete: bool
    limit: int | None = None


class Scores(Protocol):
    """The outcome of one forward over a tree, read lazily: only rows on the walk are sampled."""

    def choose(self, row: int) -> int:
        """The target's own next token after `row`."""

    def distribution(self, row: int) -> Floats:
        """The law that `choose` samples from, sampler settings applied: shape (vocabulary,)."""

    def probability(self, row: int, token: int) -> float:
        """The target's unwarped probability of `token` after `row`."""

    def known(self, row: int, token: int) -> float:
        """The same where telling it takes as good as nothing; 0 where it would take a reading."""

    def likeliest(self, row: int, count: int) -> list[tuple[int, float]]:
        """The likeliest tokens after `row`, so many, with these probabilities in falling order."""


class Backend(Protocol):
    """A sequence of a causal language model: its cache can verify a tree and roll back.

    Call order: `prefill` once, then `score` and `accept` in turn. The cache always holds all
    decided tokens but the last, which is the root of the next tree. After a forward that was not
    accepted the next call is `prefill`: it begins again where it has to. After one that failed the
    cache is empty.

    `open` gives more sequences of the same weights. Between `accept` and the next call, any of
    them may be used; calls never overlap, so nothing is locked.
    """

    info: BackendInfo

    @property
    def head(self) -> Head | None:
        """What guesses ahead for this sequence; `info.head` describes it."""

    @property
    def bytes(self) -> int:
        """About what the cache takes in memory, beside the weights: 0 when nothing was read yet.

        The cache of its head is counted.
        """

    @property
    def unread(self) -> int:
        """How many of the decided tokens the next forward reads again before its root, as the cache
        could not be taken back to just behind them: 0 for most models."""

    def open(self) -> "Backend":
        """Another sequence, which is empty: the same weights and the same `info`."""

    def close(self) -> None:
        """Free what the cache takes. Whoever goes on begins from nothing."""

    def tokenize(self, text: str) -> list[int]:
        """Token ids of plain text, with no special tokens added."""

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special tokens included; a cut UTF-8 sequence ends in U+FFFD."""

    def vocabulary(self) -> Sequence[str]:
        """Every token as the tokenizer writes it, by id; padding of the weights is left out."""

    def render(self, messages: Sequence[Message], thinking: bool | None = None) -> str:
        """The prompt text of a conversation, up to where the assistant's answer begins.

        `thinking` says whether the model is to think first, where it can be told; None leaves that
        to its template.
        """

    def prefill(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> Filled:
        """Make the cache hold `tokens[:-1]`, as one forward over all of `tokens` would fill it.

        Stops early, leaving a valid shorter cache, once `cancelled()` is true: nothing may then be
        decided with it, which the answer says.
        """

    def depth_limit(self, length: int) -> int | None:
        """How many levels a tree may have below its root, the last of `length` tokens.

        None for any number. Where a model computes a longer text in another way, one forward stays
        on one side of that length.
        """

    def score(self, tree: Tree, sampling: Sampling) -> Scores:
        """One forward over root and nodes. The root's position is the length of the cache."""

    def accept(self, rows: Sequence[int]) -> None:
        """Keep the root and the accepted rows in the cache, drop every other row of the tree."""


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the longest common prefix of two lists of tokens.

    By halving: comparing slices of lists takes nanoseconds a token, a loop fifty times that.
    """
    known, limit = 0, min(len(left), len(right))
    while known < limit:
        middle = (known + limit + 1) // 2
        if list(left[known:middle]) == list(right[known:middle]):
            known = middle
        else:
            limit = middle - 1
    return known


def conversation(
    messages: Sequence[Message],
    fill: Fill | None,
    begin: str,
    name: str,
    thinking: bool | None = None,
) -> str:
    """The prompt text of a conversation: what `fill`, the chat template of model `name`, makes of
    its turns; without one, lines of text after `begin`. Raises PromptError.
    """
    if fill is None:
        lines = "".join(f"{m.role.capitalize()}: {m.content}\n\n" for m in messages)
        return f"{begin}{lines}Assistant:"
    try:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        return fill(turns, switched(thinking))
    except TemplateStopped as stopped:
        raise PromptError(
            f"The chat template of {name} was stopped: {stopped}. Choose another model, or another "
            "file of this one."
        ) from stopped
    except Exception as error:
        # A template may raise anything, most often because it has no place for a system prompt.
        if messages and messages[0].role == "system" and len(messages) > 1:
            head = f"{messages[0].content}\n\n{messages[1].content}"
            joined = [Message(messages[1].role, head), *messages[2:]]
            return conversation(joined, fill, begin, name, thinking)
        raise PromptError(
            f"The chat template of {name} refuses this conversation: {error}. "
            "Check the order of the messages and the system prompt."
        ) from error


def fingerprint(tokenizer_type: str, vocabulary: Sequence[str]) -> str:
    """Names a vocabulary: n-grams of token ids mean the same wherever it is the same."""
    return digest([tokenizer_type, *vocabulary])


def digest(parts: Sequence[str | bytes]) -> str:
    """A short hash of texts and bytes."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part)
        state.update(b"\0")
    return state.hexdigest()[:16]
