"""The interface between the decode loop and the code that runs the target model."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeGuard, TypeVar

from engine.backends.special_tokens import SpecialTokens
from engine.heads.base import Head, HeadInfo
from engine.sampling import Choice, Floats, distribution, ranked, select
from engine.settings import Sampling, ThinkingChoice
from engine.thinking import MARKS, Marks
from engine.tools import CallForm
from engine.tree import Tree
from engine.types import Message, Tool

SLICE = 64
"""Tokens of a prompt that are read between two steps of other answers, if reading them takes the
time of a few steps."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server that runs a model elsewhere, and its abilities.

    `host` names it, `maker` is the program that it runs. With `drafting` it reports that it drafts,
    from these `databases`, chains of at most `draft_tokens` (0: unknown). `sources`: it reports the
    sources of tokens. `counts`: it has counters of drafts. `switches`: its drafting can be switched
    off for a request. `continues`: it can continue an answer that has begun.
    """

    host: str
    maker: str = ""
    drafting: bool = False
    databases: tuple[str, ...] = ()
    draft_tokens: int = 0
    sources: bool = False
    counts: bool = False
    switches: bool = False
    continues: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """A tokenizer, also without a model. `tokenizer_fingerprint` identifies the vocabulary: n-grams
    of one tokenizer mean nothing to another."""

    name: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    eos_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class BackendInfo(TokenizerInfo):
    """What the rest of the program may know of a loaded model.

    `fingerprint` identifies the weights. `note` gives the reason if a model decodes plainly, and
    anything else that its user should know. `threads` is the number of threads on the host, 0 if it
    does not matter. `tokenizer_type` is the way the vocabulary splits text ("BPE", "Unigram", ...).

    A draft tree may have `leaves` branches, any number for None; 1 means that only chains are
    verified. It may be `depth` tokens deep if the model's memory bounds that, and have `nodes`
    nodes if more take another, slower way. `sampling` is what the makers of the model recommend,
    the default settings if they recommend none. `begin` is the text of the token that every text
    begins with, "" if the model uses none. `can_think` is true if its chat template can switch
    thinking on and off, `has_efforts` if it can be told how much to think, and `marks` may stand
    around its thinking. `calls` is the form in which it calls tools, None if its chat template has
    no place for tools or the form is not known. `imitable` says that a message can imitate a turn,
    because nothing but ordinary text separates turns. `head` describes the model's own head for
    guessing tokens, if any. In a mixture every layer has so many `experts`, of which a token uses
    `used_experts`; both are 0 for other models.

    `exact` says that the logits of a token have the same bits whether it is decoded alone or among
    drafts. `server` is the server that runs it, None for a model on this machine.
    """

    kind: str
    fingerprint: str
    context_length: int
    can_tree: bool
    leaves: int | None = None
    depth: int | None = None
    nodes: int | None = None
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
    has_efforts: bool = False
    marks: tuple[Marks, ...] = MARKS
    calls: CallForm | None = None
    imitable: bool = False
    head: HeadInfo | None = None
    experts: int = 0
    used_experts: int = 0
    exact: bool = False
    server: ServerInfo | None = None

    @property
    def weights(self) -> str:
        """What runs the model and the type of its weights, as people read it: "llama.cpp, Q8_0". It
        distinguishes a folder from a GGUF file of the same name."""
        return ", ".join(filter(None, (self.kind, self.server.host if self.server else self.dtype)))

    @property
    def computes_alone(self) -> bool:
        """Whether the thread that calls for a forward also computes all of it."""
        return self.device == "cpu" and self.threads == 1 and self.server is None

    @property
    def costs_key(self) -> tuple[str, str, str, str, int]:
        """Everything that the costs of its forwards depend on."""
        return self.fingerprint, self.kind, self.device, self.dtype, self.threads

    @property
    def label(self) -> str:
        """The name with what distinguishes its formats: "tiny-chat (llama.cpp, Q8_0)"."""
        return f"{self.name} ({self.weights})"


class Tokenizer(Protocol):
    """How a model reads text: the part of a `Backend` that needs none of its weights."""

    special: SpecialTokens

    @property
    def info(self) -> TokenizerInfo: ...

    def tokenize(self, text: str) -> list[int]:
        """The token ids of a text, with no special tokens added. Those in it are read as such,
        except those with LITERAL (engine/backends/special_tokens.py)."""

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special tokens included; a cut UTF-8 sequence ends in U+FFFD."""

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text; those of several tokens may be one character."""

    def vocabulary(self) -> Sequence[str]:
        """Every token as the tokenizer writes it, by id; padding of the weights is left out."""

    def render(
        self,
        messages: Sequence[Message],
        thinking: ThinkingChoice = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """The prompt text of a conversation in the model's chat template, up to where the answer
        begins, with LITERAL in the special tokens that messages spell.

        `thinking` switches thinking before the answer on or off, if the template supports this;
        None leaves it to the template.
        """


class Filled(NamedTuple):
    """The result of a prefill: how many tokens were in the cache already, and whether all are now.
    `limit` is the longest text, including its root, that can be decided with this cache: once more
    tokens are decided, the cache has to be filled again. None if that never happens."""

    reused: int
    complete: bool
    limit: int | None = None


class LogitScores:
    """The outcome of one forward over a tree: `read(row)` gives the logits of a row, float32, shape
    (vocabulary,), and `positions` are those of the tokens that follow each row.

    A row is read once, when it is first needed: only rows on the walk are. Its choice and its
    normaliser are computed together.
    """

    def __init__(
        self, read: Callable[[int], Floats], positions: Sequence[int], sampling: Sampling
    ) -> None:
        self.read, self.positions, self.sampling = read, positions, sampling
        self.rows: dict[int, Floats] = {}
        self.choices: dict[int, Choice] = {}

    def row(self, row: int) -> Floats:
        if row not in self.rows:
            self.rows[row] = self.read(row)
        return self.rows[row]

    def selected(self, row: int) -> Choice:
        if row not in self.choices:
            self.choices[row] = select(self.row(row), self.sampling, self.positions[row])
        return self.choices[row]

    def choose(self, row: int) -> int:
        """The target's own next token after `row`."""
        return self.selected(row).token

    def distribution(self, row: int) -> Floats:
        """The distribution that `choose` samples from, sampler settings applied: shape
        (vocabulary,)."""
        return distribution(self.row(row), self.sampling)

    def probability(self, row: int, token: int) -> float:
        """The target's unwarped probability of `token` after `row`."""
        return self.selected(row).probability(float(self.row(row)[token]))

    def known(self, row: int, token: int) -> float:
        """The same if it costs nearly nothing; 0 if the row would have to be read."""
        return self.probability(row, token) if row in self.rows else 0.0

    def likeliest(self, row: int, count: int) -> list[tuple[int, float]]:
        """The likeliest tokens after `row`, so many, with these probabilities in falling order."""
        if count < 1:
            return []
        logits, choice = self.row(row), self.selected(row)
        best = ranked(logits, count)
        chances = [choice.probability(logit) for logit in logits[best].tolist()]
        pairs = zip(best.tolist(), chances, strict=True)
        # A format may exclude all others (engine/constraint.py).
        return [(token, chance) for token, chance in pairs if chance]


S = TypeVar("S", bound="Backend")


class Wanted(NamedTuple, Generic[S]):
    """A forward that an answer waits for: `sequence.score(tree, sampling)`."""

    sequence: S
    tree: Tree
    sampling: Sampling


class Backend(Tokenizer, Protocol):
    """A sequence of a causal language model: its cache can verify a tree and roll back.

    Call order: `prefill` once, then `score` and `accept` in turn. The cache always holds all
    decided tokens but the last, which is the root of the next tree. If a forward was not accepted,
    the next call is `prefill`, which reads again what is missing. After a forward that failed, the
    cache is empty.

    `open` creates further sequences of the same weights. Between `accept` and the next call, any of
    them may be used; calls never overlap, so nothing is locked.
    """

    info: BackendInfo

    @property
    def head(self) -> Head | None:
        """What guesses ahead for this sequence; `info.head` describes it."""

    @property
    def bytes(self) -> int:
        """About the memory that the cache takes, including that of the head but not the weights;
        0 if nothing was read yet."""

    @property
    def unread(self) -> int:
        """How many of the decided tokens the next forward reads again before its root, because the
        cache could not be rolled back to the place after them; 0 for most models."""

    def open(self) -> "Backend":
        """Create an empty sequence with the same weights and the same `info`."""

    def close(self) -> None:
        """Free the memory of the cache. The sequence is then empty, and stays usable."""

    def prefill(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> Filled:
        """Make the cache hold `tokens[:-1]`, as one forward over all of `tokens` would fill it.

        Stops early once `cancelled()` is true. The cache is then valid but shorter, the result is
        not `complete`, and nothing may be decided with it.
        """

    def depth_limit(self, length: int) -> int | None:
        """How many levels a tree may have below its root, the last of `length` tokens.

        None for any number. If a model computes texts beyond some length in another way, a forward
        must not reach across that length.
        """

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        """One forward over root and nodes. The root's position is the length of the cache."""

    def accept(self, rows: Sequence[int]) -> None:
        """Keep the root and the accepted rows in the cache; drop every other row of the tree."""


class Batching(Backend, Protocol):
    """A backend whose sequences may take turns after each forward at no cost, if `at_once` is true,
    and share forwards. `slice_size` tokens of a prompt are read between two steps of other
    answers."""

    @property
    def at_once(self) -> bool: ...

    @property
    def slice_size(self) -> int: ...

    def prefill(
        self, tokens: Sequence[int], cancelled: Callable[[], bool], most: int | None = None
    ) -> Filled:
        """As `Backend.prefill`, but this stops after `most` tokens as well, unless the model can
        only read a text as a whole."""

    def begin_as(self, other: Any, tokens: Sequence[int]) -> None:
        """Copy what another sequence of these weights holds of the beginning of some tokens, if
        this takes less time than reading it."""

    def score_all(self, wanted: Sequence[Wanted[Any]]) -> list[LogitScores]:
        """`score` of several sequences of these weights, in one forward if the model allows it."""


def is_batching(backend: Backend) -> TypeGuard[Batching]:
    """As isinstance, which would read every property of the backend."""
    return getattr(type(backend), "score_all", None) is not None


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the longest common prefix of two lists of tokens, by bisection: comparing
    slices takes nanoseconds per token, and a loop fifty times that."""
    known, limit = 0, min(len(left), len(right))
    while known < limit:
        middle = (known + limit + 1) // 2
        if list(left[known:middle]) == list(right[known:middle]):
            known = middle
        else:
            limit = middle - 1
    return known


def fingerprint(tokenizer_type: str, vocabulary: Sequence[str]) -> str:
    """Identifies a vocabulary: n-grams of token ids mean the same wherever it is equal."""
    return digest([tokenizer_type, *vocabulary])


def digest(parts: Sequence[str | bytes]) -> str:
    """A short hash of texts and bytes."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part)
        state.update(b"\0")
    return state.hexdigest()[:16]
