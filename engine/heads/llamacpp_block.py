"""DFlash heads of GGUF models, which guess the tokens of a whole block in one forward.

A row of the head's cache holds the keys and values that its layers make of the states that the
model had at that token (engine/heads/dflash.py). The block is computed behind them and dropped
again: the last decided token, and the mask token at all other places. The library returns logits of
all places. If the head has a selector, the library returns the candidates of each place instead,
and for each candidate of the place before their logits after it. What follows other tokens is then
not known.
"""

from collections.abc import Callable, Sequence

import llama_cpp
import numpy as np

from engine.errors import ModelError
from engine.heads.base import BlockGuess, LogitGuess
from engine.heads.llamacpp import Block, HeadContext, LlamaHead
from engine.sampling import Floats
from engine.settings import Sampling


def prepare(context: HeadContext, block: Block) -> None:
    """Make a head's context see the whole block, and return all rows of its selector."""
    llama_cpp.llama_set_causal_attn(context.context, block.causal)
    context.library.llama_set_embeddings_nextn(context.context, True, not block.candidates)


def guess_of(context: HeadContext, block: Block, token: int, place: int) -> BlockGuess:
    """Compute the block whose first token is decided and at a place."""
    places = block.places
    tokens = [token, *[block.mask] * (places - 1)]
    outputs = 0 if block.candidates else places
    where = range(place, place + places)
    context.batch.fill(tokens, where, [0] * places, [1] * places, outputs)
    raw = context.batch.raw
    raw.token, raw.embd = context.batch.tokens, None
    context.check(llama_cpp.llama_decode(context.context, raw))
    if block.candidates:
        return selected(block, token, lattice_of(context, block))
    found = llama_cpp.llama_get_logits(context.context)
    if not found:
        raise ModelError(f"The head ({context.kind.name}) gives no numbers.")
    logits = np.ctypeslib.as_array(found, (places, context.vocabulary))[1:] * np.float32(
        block.scale
    )
    if block.cap:
        logits = np.tanh(logits / block.cap) * np.float32(block.cap)
    return BlockGuess(token, places - 1, lambda depth, _: LogitGuess(logits[depth]), selects=False)


def lattice_of(context: HeadContext, block: Block) -> Floats:
    """What the selector found for the places to guess, shape (places - 1, numbers): the tokens of
    the candidates, and then their logits after each candidate of the place before."""
    found = context.library.llama_get_embeddings_nextn(context.context)
    if not found:
        raise ModelError(f"The head ({context.kind.name}) gives no numbers.")
    numbers = block.candidates * (1 + block.candidates)
    return np.ctypeslib.as_array(found, (block.places, context.inner))[1:, :numbers].copy()


def selected(block: Block, root: int, lattice: Floats) -> BlockGuess:
    tokens = lattice[:, : block.candidates].astype(np.int64)
    logits = lattice[:, block.candidates :].reshape(len(lattice), block.candidates, -1)
    order = tokens.argsort(axis=1)

    def at(depth: int, token: int) -> LogitGuess | None:
        before = np.flatnonzero(tokens[depth - 1] == token) if depth else [0]
        if not len(before):
            return None
        rising = order[depth]
        return LogitGuess(logits[depth, before[0]][rising], tokens[depth][rising])

    return BlockGuess(root, len(lattice), at, selects=True)


class LlamaBlockHead(LlamaHead):
    """The head of one sequence. Its row at a place needs the state of that place only."""

    block: BlockGuess | None = None

    def across(self, start: int, found: Floats) -> Floats:
        """Continue at place `start` with the states `found`. The rows so far stay: the head knows
        nothing of the tokens in between."""
        self.first, self.states = start, found[:0]
        if not self.begin < self.fed <= start:
            self.begin = start
            self.remove(0)
        self.fed = start
        return found

    def start(
        self, tokens: Sequence[int], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> LogitGuess | None:
        owner, last, block = self.owner(), len(tokens) - 1, self.shared.kind.block
        assert owner is not None and block is not None, "a block head of a backend"
        owner.enter()
        self.enter()
        self.keep(last)
        if max(self.known, self.fed) != last:
            return None
        while self.fed < last:
            if cancelled():
                return None
            self.feed(tokens, min(last, self.fed + self.shared.rows))
        if cancelled() or self.begin == last:
            return None
        self.depth = 0
        self.block = guess_of(self.shared, block, tokens[-1], last)
        return self.block

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[LogitGuess]:
        assert self.block is not None, "extend follows start"
        self.depth += 1
        guesses = [self.block.after(self.depth, token) for token in tokens]
        return [guess for guess in guesses if guess is not None]

    def forget(self) -> None:
        super().forget()
        self.block = None

    def feed(self, tokens: Sequence[int], end: int, guess: bool = False) -> None:
        """Make the rows up to place `end`. A failure leaves the head empty."""
        states = self.states[self.fed - self.first : end - self.first]
        try:
            batch = self.shared.rows_of(states, range(self.fed, end), (), 0)
            self.shared.check(llama_cpp.llama_decode(self.shared.context, batch))
        except ModelError:
            self.reset()
            raise
        self.fed = end
        self.trim()
