"""A fake model for tests: a byte vocabulary and fixed pseudo-random logits that depend on the
context.

It behaves like a model (cache, tree, roll-back, end token) and costs microseconds, so the whole
engine is tested on it. The logits after a context are a hash of its last two tokens, sharpened on a
few tokens, so that text repeats often enough for drafts to be accepted.

It may have a head, whose distribution is any function of the same two tokens: a slightly different
function guesses well, a `shuffled` one as badly as possible.
"""

import builtins
from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache
from typing import Self

import numpy as np

from engine.backends.base import SLICE, BackendInfo, Filled, LogitScores, Wanted, common_prefix
from engine.backends.special_tokens import SpecialTokens
from engine.heads.base import Head, HeadInfo, LogitGuess
from engine.sampling import Floats
from engine.settings import Sampling
from engine.tree import Tree
from engine.types import Message, Tool

END, USER, ASSISTANT, SYSTEM = 256, 257, 258, 259
SPECIAL = {END: "<|end|>", USER: "<|user|>", ASSISTANT: "<|assistant|>", SYSTEM: "<|system|>"}
VOCABULARY = 260
MEMORY = 2
CHUNK = 64
"""Tokens of a prompt that are read at a time."""
CELL = 1024
"""Bytes that a token would take in a real cache."""


def generator(suffix: tuple[int, ...], key: int) -> np.random.Generator:
    """Random numbers that depend only on the end of a context."""
    state = 1469598103934665603 + key
    for token in suffix:
        state = (state ^ (token + 1)) * 1099511628211 % 2**64
    return np.random.Generator(np.random.Philox(key=state))


@lru_cache(maxsize=1 << 16)
def toy_logits(suffix: tuple[int, ...]) -> Floats:
    """The logits after a context that ends in `suffix`; shape (260,)."""
    stream = generator(suffix, 0)
    logits = stream.standard_normal(VOCABULARY, dtype=np.float32)
    letters = stream.integers(97, 123, size=3)
    logits[letters] += np.array([9.0, 6.0, 5.0], dtype=np.float32)
    logits[[END, 32]] += np.array([1.5, 4.0], dtype=np.float32)
    logits[[USER, ASSISTANT, SYSTEM]] = -20.0
    return logits


def deviating(deviation: float, key: int = 1) -> Callable[[tuple[int, ...]], Floats]:
    """The logits of a model that resembles the toy: the more it deviates, the worse it drafts."""

    @lru_cache(maxsize=1 << 16)
    def logits(suffix: tuple[int, ...]) -> Floats:
        noise = generator(suffix, key).standard_normal(VOCABULARY, dtype=np.float32)
        return toy_logits(suffix) + np.float32(deviation) * noise

    return logits


@lru_cache(maxsize=1 << 16)
def shuffled(suffix: tuple[int, ...]) -> Floats:
    """The logits of a head with shuffled weights: as certain as the toy, but of other tokens."""
    return generator(suffix, 2).permutation(toy_logits(suffix))


class ToyHead:
    """The head of a toy: like other heads, it sees decided tokens only through its backend.

    `calls` counts its calls, and `rows` the tokens of its computations.
    """

    def __init__(
        self, backend: "ToyBackend", info: HeadInfo, logits: Callable[[tuple[int, ...]], Floats]
    ) -> None:
        self.backend, self.info, self.logits = backend, info, logits
        self.level: list[tuple[int, ...]] = []
        self.depth = self.calls = self.rows = 0
        self.listening = False
        self.read: list[int] = []
        """The tokens that its own cache would hold."""

    def listen(self, on: bool) -> None:
        self.listening = on

    def start(
        self, tokens: Sequence[int], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> LogitGuess | None:
        assert self.listening, "a head that is called must listen"
        assert list(tokens[:-1]) == self.backend.cache, "a head must get the decided tokens"
        if cancelled() or len(tokens) < 2:
            return None
        self.calls += 1
        self.rows += len(tokens) - common_prefix(self.read, tokens)
        self.read, self.depth = list(tokens), 1
        self.level = [tuple(tokens[-MEMORY:])]
        return LogitGuess(self.logits(self.level[0]))

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[LogitGuess]:
        assert self.depth < self.info.depth, "a head guesses so many tokens ahead"
        assert len(tokens) == 1 or self.info.branches, "this head goes along a chain"
        self.calls += 1
        self.rows += len(tokens)
        self.depth += 1
        self.level = [
            (*self.level[parent], token)[-MEMORY:]
            for parent, token in zip(parents, tokens, strict=True)
        ]
        return [LogitGuess(self.logits(suffix)) for suffix in self.level]

    def forget(self) -> None:
        self.level, self.depth = [], 0


class ToyBackend:
    """The toy model, or one of other `logits` after the last two tokens, shape (260,).

    `cache` is what a real cache would hold, `forwards` counts the forwards of this sequence.
    `guesses` are the logits of its head, which `depth` and `branches` describe; None for no head.
    """

    unread = 0
    at_once, slice_size = True, SLICE
    special = SpecialTokens({name: token for token, name in SPECIAL.items()})

    def __init__(
        self,
        context_length: int = 4096,
        name: str = "toy",
        logits: Callable[[tuple[int, ...]], Floats] = toy_logits,
        guesses: Callable[[tuple[int, ...]], Floats] | None = None,
        depth: int = 6,
        branches: bool = True,
    ) -> None:
        self.logits, self.guesses = logits, guesses
        head = None
        if guesses is not None:
            head = HeadInfo("toy head", depth, branches, fingerprint=f"head of {name}")
        self.info = BackendInfo(
            name=name,
            kind="toy",
            fingerprint=name,
            tokenizer_fingerprint="bytes",
            tokenizer_type="bytes",
            vocabulary_size=VOCABULARY,
            eos_ids=frozenset({END}),
            context_length=context_length,
            can_tree=True,
            head=head,
        )
        self.head: Head | None = self.own_head()
        self.cache: list[int] = []
        self.tree: Tree | None = None
        self.forwards = 0

    def own_head(self) -> ToyHead | None:
        if self.guesses is None or self.info.head is None:
            return None
        return ToyHead(self, self.info.head, self.guesses)

    @property
    def bytes(self) -> int:
        return len(self.cache) * CELL

    def open(self) -> Self:
        other = copy(self)
        other.head = other.own_head()
        other.close()
        other.forwards = 0
        return other

    def close(self) -> None:
        self.cache, self.tree = [], None

    def tokenize(self, text: str) -> list[int]:
        return self.special.tokenize(text, self.encode, lambda text: [*text.encode()])

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        while text:
            special = next((i for i, name in SPECIAL.items() if text.startswith(name)), None)
            if special is None:
                tokens.extend(text[0].encode("utf-8", "replace"))
                text = text[1:]
            else:
                tokens.append(special)
                text = text[len(SPECIAL[special]) :]
        return tokens

    def detokenize(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    def piece(self, token: int) -> builtins.bytes:
        return SPECIAL[token].encode() if token in SPECIAL else bytes([token])

    def vocabulary(self) -> list[str]:
        return [SPECIAL.get(token) or f"<0x{token:02X}>" for token in range(VOCABULARY)]

    def render(
        self, messages: Sequence[Message], thinking: bool | None = None, tools: Sequence[Tool] = ()
    ) -> str:
        marked = self.special.messages(messages)
        turns = "".join(f"<|{m.role}|>{m.content.strip()}<|end|>" for m in marked)
        return turns + "<|assistant|>"

    def prefill(
        self, tokens: Sequence[int], cancelled: Callable[[], bool], most: int | None = None
    ) -> Filled:
        decided = list(tokens[:-1])
        reused = common_prefix(self.cache, decided)
        self.cache, self.tree = decided[:reused], None
        end = len(decided) if most is None else min(len(decided), reused + most)
        while len(self.cache) < end and not cancelled():
            self.cache = decided[: min(end, len(self.cache) + CHUNK)]
        return Filled(reused, len(self.cache) == len(decided))

    def depth_limit(self, length: int) -> int | None:
        return None

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        self.forwards += 1
        self.tree = tree
        suffixes: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            before = tuple(self.cache[-MEMORY:]) if parent < 0 else suffixes[parent]
            suffixes.append((*before, token)[-MEMORY:])
        positions = [len(self.cache) + 1 + depth for depth in tree.depths]
        return LogitScores(lambda row: self.logits(suffixes[row]), positions, sampling)

    def begin_as(self, other: "ToyBackend", tokens: Sequence[int]) -> None:
        shared = common_prefix(other.cache, tokens[:-1])
        if shared > common_prefix(self.cache, tokens[:-1]):
            self.cache = list(tokens[:shared])

    def score_all(self, wanted: Sequence[Wanted["ToyBackend"]]) -> list[LogitScores]:
        return [each.sequence.score(each.tree, each.sampling) for each in wanted]

    def accept(self, rows: Sequence[int]) -> None:
        assert self.tree is not None, "accept follows score"
        self.cache += [self.tree.tokens[row] for row in (0, *rows)]
        self.tree = None
