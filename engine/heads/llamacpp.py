"""Heads of GGUF models: in the model's file (MTP), or in a small separate file.

Only this module uses the bindings that llama.cpp calls unstable. If the installed library lacks one
of them, models run without a head.

A head has its own llama.cpp context. A row of it is a token with the hidden state that the model
had at the token before; the row's logits predict the next token. The model provides:

- MTP: the state after its last layer. The head's layers have their own cache.
- Gemma 4's assistant: the same, but its layers read the model's cache, so it has no other.
- EAGLE-3: the states before three layers, which the head first combines into one.
- DFlash: the states before some layers. See engine/heads/llamacpp_block.py.

Invariant: the head's cache holds the rows of the tokens from place `begin` to before `fed`, and
guesses after them, which `forget` drops. `states` are those of the decided tokens from place
`first` on, as far as later rows need them. If some are missing, the cache starts again from empty
after the gap: the head then knows less of the text, and guesses worse.

The context holds the rows of one sequence at a time. Those of others are parked as bytes: a head
has one layer or two, so this takes little of the time of a forward of the model.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import llama_cpp
import numpy as np

from engine.errors import ModelError
from engine.heads.base import HeadInfo, LogitGuess
from engine.models.gguf import Batch, free, restored, saved
from engine.sampling import Floats
from engine.settings import Sampling

DEPTH = 8
"""The most tokens that one head guesses in a row, from its own states. Their worth is measured."""
ROWS = 64
"""The most rows of a head that are computed at a time. Some heads compute the logits of all
rows."""
WIDTH = 8
"""The most nodes of one level that are computed at a time."""
FEW = 8
"""The most rows that are computed together with the guessing row, if logits of all are computed."""
FLOATS = ctypes.POINTER(ctypes.c_float)
NUMBERS = ctypes.POINTER(ctypes.c_int32)
CONTEXT, MODEL = llama_cpp.llama_context_p_ctypes, llama_cpp.llama_model_p_ctypes
SYMBOLS: dict[str, tuple[str, str, list[Any], Any]] = {
    "llama_set_embeddings_nextn": (
        "P13llama_contextbb", "XPEAUllama_context@@_N1", [CONTEXT, *[ctypes.c_bool] * 2], None
    ),
    "llama_get_embeddings_nextn": (
        "P13llama_context", "PEAMPEAUllama_context@@", [CONTEXT], FLOATS
    ),
    "llama_get_embeddings_nextn_ith": (
        "P13llama_contexti", "PEAMPEAUllama_context@@H", [CONTEXT, ctypes.c_int32], FLOATS
    ),
    "llama_set_embeddings_layer_inp": (
        "P13llama_contextjb", "XPEAUllama_context@@I_N", [CONTEXT, ctypes.c_uint32, ctypes.c_bool],
        None,
    ),
    "llama_get_embeddings_layer_inp": (
        "P13llama_contextj", "PEAMPEAUllama_context@@I", [CONTEXT, ctypes.c_uint32], FLOATS
    ),
    "llama_model_target_layer_ids": (
        "PK11llama_model", "PEBHPEBUllama_model@@", [MODEL], NUMBERS
    ),
    "llama_model_target_layer_ids_n": (
        "PK11llama_model", "IPEBUllama_model@@", [MODEL], ctypes.c_uint32
    ),
}  # fmt: skip
"""The unstable functions: the mangled parts of their names (Itanium, Microsoft), and the types of
arguments and result."""
NEEDED = ("LLAMA_CONTEXT_TYPE_MTP", "llama_model_n_layer_nextn")
"""Stable names that the library has since it supports heads."""


class NoHead(Exception):
    """The head of a model cannot be used; the text is the reason."""


def bound() -> Any:
    """The unstable functions by their names. Raises NoHead if anything that heads need is
    missing."""
    for name in NEEDED:
        if not hasattr(llama_cpp, name):
            raise lacking(name)
    return SimpleNamespace(**{name: function(name) for name in SYMBOLS})


def function(name: str) -> Any:
    """One of the unstable functions. Raises NoHead if the library does not have it."""
    itanium, microsoft, arguments, result = SYMBOLS[name]
    library = getattr(llama_cpp.llama_cpp, "_lib", None)
    for known in (name, f"_Z{len(name)}{name}{itanium}", f"?{name}@@YA{microsoft}@Z"):
        if found := getattr(library, known, None):
            found.argtypes, found.restype = arguments, result
            return found
    raise lacking(name)


def lacking(name: str) -> NoHead:
    return NoHead(
        f"llama-cpp-python {llama_cpp.__version__} is installed, which lacks {name}; 0.3.36 has it"
    )


@dataclass(frozen=True, slots=True)
class Block:
    """The block of a DFlash head: its `places`, the last decided token included, the token of those
    to guess, and how many `candidates` of a place its selector keeps, 0 without one. With `causal`
    a place does not see later ones. Logits are scaled, and capped unless `cap` is 0; with a
    selector the library does this."""

    places: int
    mask: int
    candidates: int = 0
    causal: bool = False
    scale: float = 1.0
    cap: float = 0.0


@dataclass(frozen=True, slots=True)
class Kind:
    """How a head computes.

    `layers` are the layers of the model whose inputs it reads, () if it reads the state after the
    last layer. With `shared` it reads the model's cache. With `cropped` the library returns the
    states of rows only if their logits are requested, and with `whole` it computes the logits of
    all rows in any case. With a `block` it guesses several tokens at once.
    """

    name: str
    layers: tuple[int, ...] = ()
    shared: bool = False
    cropped: bool = False
    block: Block | None = None

    @property
    def whole(self) -> bool:
        return bool(self.layers)

    @property
    def behind(self) -> int:
        """How many places before its own a row reads the model's state."""
        return 0 if self.block else 1


class HeadContext:
    """What the heads of all sequences of a model share: the library's `context` of the head, the
    arrays of its rows, and properties of `target`, the model's context.

    `own` is the head's model, if it has a file of its own. `keep` must live as long as this object.
    Rows of decided tokens belong to sequence 0. Calls that fail raise ModelError.
    """

    def __init__(self, kind: Kind, target: Any, context: Any, own: Any, keep: object) -> None:
        self.library, self.kind, self.target, self.context = bound(), kind, target, context
        self.keep = keep
        weakref.finalize(self, free, context, own)
        served = llama_cpp.llama_get_model(target)
        self.memory = llama_cpp.llama_get_memory(context)
        self.layers = llama_cpp.llama_model_n_layer(served)
        self.width = llama_cpp.llama_model_n_embd_out(served)
        self.inner = llama_cpp.llama_model_n_embd(own) if kind.layers else self.width
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(served))
        self.capturing = False
        self.holder: Callable[[], LlamaHead | None] = lambda: None
        """A weak reference to the head whose rows are in the context."""
        self.copies = set[int]()
        """Sequences other than the first that hold rows."""
        self.rows = min(ROWS, llama_cpp.llama_n_batch(context))
        self.batch = Batch(self.rows, WIDTH + 1)
        self.library.llama_set_embeddings_nextn(context, True, kind.cropped)

    @property
    def features(self) -> int:
        return int(self.width) * max(1, len(self.kind.layers))

    def capture(self, on: bool) -> None:
        """Set whether the model's next forwards return their hidden states."""
        if on == self.capturing:
            return
        for layer in self.kind.layers or (self.layers,):
            if layer < self.layers:
                self.library.llama_set_embeddings_layer_inp(self.target, layer, on)
            else:
                self.library.llama_set_embeddings_nextn(self.target, on, False)
        self.capturing = on

    def captured(self, rows: Sequence[int]) -> Floats:
        """The hidden states of rows of the model's last forward; shape (rows, features)."""
        parts = []
        for layer in self.kind.layers or (self.layers,):
            if layer < self.layers:
                found = self.library.llama_get_embeddings_layer_inp(self.target, layer)
            else:
                found = self.library.llama_get_embeddings_nextn(self.target)
            parts.append(np.ctypeslib.as_array(found, (max(rows) + 1, self.width))[list(rows)])
        return parts[0] if len(parts) == 1 else np.hstack(parts)

    def rows_of(
        self,
        states: Floats,
        places: Sequence[int],
        tokens: Sequence[int],
        outputs: int,
        sequences: Sequence[int] = (),
    ) -> Any:
        """The library's batch of rows with these states and tokens, if any, at these places, with
        logits of the last `outputs` rows. They belong to sequence 0 unless `sequences` are
        given."""
        count = len(states)
        none, raw = [0] * count, self.batch.raw
        self.batch.fill(tokens or none, places, sequences or none, [1] * count, outputs)
        raw.token = self.batch.tokens if tokens else None
        raw.embd = states.ctypes.data_as(FLOATS)
        return raw

    def fused(self, states: Floats, places: Sequence[int]) -> Floats:
        """The inputs of rows at these places, from the model's states; shape (rows, inner)."""
        if not self.kind.layers:
            return states
        rows = len(states)
        self.check(llama_cpp.llama_encode(self.context, self.rows_of(states, places, (), rows)))
        found = self.library.llama_get_embeddings_nextn(self.context)
        return np.ctypeslib.as_array(found, (rows, self.inner)).copy()

    def compute(
        self, states: Floats, places: Sequence[int], tokens: Sequence[int], guess: bool
    ) -> None:
        """Compute rows of decided tokens; with `guess`, also the logits of the last row."""
        outputs = len(tokens) if guess and self.kind.whole else int(guess)
        batch = self.rows_of(states, places, tokens, outputs)
        self.check(llama_cpp.llama_decode(self.context, batch))

    def branch(
        self, states: Floats, place: int, tokens: Sequence[int], sequences: Sequence[int]
    ) -> None:
        """Compute rows at one place, each of its own sequence, with all logits."""
        rows = len(tokens)
        batch = self.rows_of(states, [place] * rows, tokens, rows, sequences)
        self.check(llama_cpp.llama_decode(self.context, batch))

    def check(self, code: int) -> None:
        if code:
            raise ModelError(f"The head ({self.kind.name}) failed: llama.cpp returned {code}.")

    def guess(self, row: int) -> tuple[LogitGuess, Floats]:
        """The guess of a row, and the state for the next row, shape (1, inner)."""
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        state = self.library.llama_get_embeddings_nextn_ith(self.context, row)
        if not logits or not state:
            raise ModelError(f"The head ({self.kind.name}) gives no numbers.")
        found = np.ctypeslib.as_array(logits, (self.vocabulary,)).copy()
        return LogitGuess(found), np.ctypeslib.as_array(state, (1, self.inner)).copy()

    def remove(self, start: int) -> None:
        """Drop the rows from a place on; the model's own cache stays."""
        if not self.kind.shared:
            llama_cpp.llama_memory_seq_rm(self.memory, -1, start, -1)

    def join(self) -> None:
        """Drop the rows of all sequences but 0."""
        for number in self.copies:
            llama_cpp.llama_memory_seq_rm(self.memory, number, -1, -1)
        self.copies.clear()

    def split(self, source: int, number: int) -> None:
        self.copies.add(number)
        llama_cpp.llama_memory_seq_rm(self.memory, number, -1, -1)
        llama_cpp.llama_memory_seq_cp(self.memory, source, number, -1, -1)


class LlamaHead:
    """The head of one sequence, whose backend is a LlamaCppBackend; see engine/heads/base.py and
    the module's docstring."""

    def __init__(self, shared: HeadContext, info: HeadInfo, backend: Any) -> None:
        self.shared, self.info, self.owner = shared, info, weakref.ref(backend)
        self.on = False
        self.clear()

    def open(self, backend: Any) -> Self:
        return type(self)(self.shared, self.info, backend)

    def clear(self) -> None:
        self.begin = self.fed = self.shared.kind.behind
        self.first = self.depth = 0
        self.branches = [0]
        self.states: Floats = np.zeros((0, self.shared.features), np.float32)
        self.leading: Floats | None = None
        self.parked: Any = None

    @property
    def known(self) -> int:
        """The place after the last token whose state is known."""
        return self.first + len(self.states)

    @property
    def resident(self) -> bool:
        """Whether the context holds the rows of this head."""
        return self.shared.holder() is self

    @property
    def bytes(self) -> int:
        if self.resident and not self.shared.kind.shared:
            cached = int(llama_cpp.llama_state_seq_get_size(self.shared.context, 0))
        else:
            cached = len(self.parked or ())
        return cached + int(self.states.nbytes)

    # called by the backend

    def seen(self, rows: Sequence[int]) -> Floats:
        """The hidden states of rows of the model's last forward, if this head uses them; shape
        (rows or 0, features)."""
        return self.shared.captured(rows) if self.on else self.states[:0]

    def take(self, start: int, found: Floats) -> None:
        """Record the hidden states of the decided tokens from `start` on."""
        if self.states.size and start < self.known:
            # Some tokens were read again, with the same states.
            found, start = found[self.known - start :], self.known
        if not len(found):
            return
        if not self.states.size or start != self.known:
            found = self.across(start, found)
        self.states = np.vstack([self.states, found])
        if self.shared.kind.shared:
            self.begin = self.fed = self.known
            self.trim()
        owner = self.owner()
        assert owner is not None, "a head is used by its backend"
        # A head that fails here is empty, and continues with the next tokens.
        with suppress(ModelError):
            if self.known - self.fed >= self.shared.rows:
                self.enter()
            while self.known - self.fed >= self.shared.rows:
                self.feed(owner.cached, self.fed + self.shared.rows)

    def across(self, start: int, found: Floats) -> Floats:
        """Continue at place `start` with the states `found`, without the state before that place.
        If only this one state is missing, it is replaced by zeros and the rows so far stay."""
        self.first, self.states = start, found[:0]
        if self.begin < start == self.fed:
            self.first -= 1
            return np.vstack([np.zeros_like(found[:1]), found])
        self.begin = self.fed = start + 1
        self.remove(0)
        return found

    def keep(self, length: int) -> None:
        """Drop the tokens beyond `length`, as the model's cache does."""
        self.states = self.states[: max(0, length - self.first)]
        if length < self.fed:
            self.fed = max(length, self.begin)
            self.remove(self.fed)

    def reset(self) -> None:
        """Forget everything."""
        self.clear()
        self.remove(0)

    def remove(self, start: int) -> None:
        """Drop the own rows from a place on. Those of a parked head are dropped later."""
        if self.resident:
            self.shared.remove(start)

    # the rows of one head at a time

    def enter(self) -> None:
        """Make the context hold the rows of this head, and park those that it held. If they cannot
        be restored, this head becomes empty."""
        shared, holder = self.shared, self.shared.holder()
        if holder is self or shared.kind.shared:
            return
        if holder is not None:
            holder.park()
        shared.remove(0)
        shared.holder = weakref.ref(self)
        parked, self.parked = self.parked, None
        if self.begin < self.fed and not restored(shared.context, 0, parked):
            self.reset()
        shared.remove(self.fed)

    def park(self) -> None:
        """Save the rows of the decided tokens as bytes, if memory allows."""
        if self.begin < self.fed:
            self.parked = saved(self.shared.context, 0)

    # called by drafting

    def listen(self, on: bool) -> None:
        self.on = on

    def start(
        self, tokens: Sequence[int], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> LogitGuess | None:
        owner, length, rows = self.owner(), len(tokens), self.shared.rows
        assert owner is not None, "a head is used by its backend"
        owner.enter()
        self.enter()
        self.keep(length - 1)
        if not self.states.size or self.known != length - 1:
            return None
        if self.shared.kind.shared:
            owner.lead_first()
        # The last rows are computed together with the guessing row, unless that costs more.
        alone = self.shared.kind.whole and length - self.fed > FEW
        while self.fed < length - 1 and (alone or length - self.fed > rows):
            if cancelled():
                return None
            self.feed(tokens, min(length - 1, self.fed + rows))
        if cancelled():
            return None
        last = length - 1 - self.fed
        self.feed(tokens, length, guess=True)
        self.depth, self.branches = 1, [0]
        return self.lead([last])[0]

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[LogitGuess]:
        assert self.leading is not None, "extend follows start"
        assert len(tokens) <= (WIDTH if self.info.branches else 1), "so many nodes at most"
        shared = self.shared
        # A head that reads the model's cache adds nothing to it: all rows are at its end.
        apart = not shared.kind.shared
        self.branches = self.parted(parents) if apart else [0] * len(parents)
        place = self.fed - 1 + (self.depth if apart else 0)
        shared.branch(self.leading[list(parents)], place, tokens, self.branches)
        self.depth += 1
        return self.lead(range(len(tokens)))

    def parted(self, parents: Sequence[int]) -> list[int]:
        """A sequence for each child of these nodes: the parent's for the first child, copies for
        others. Sequence 0 is never a copy, because it keeps the decided rows."""
        kept = {self.branches[parent] for parent in parents}
        free = iter([number for number in range(1, WIDTH + 1) if number not in kept])
        found: list[int] = []
        for parent in parents:
            number = self.branches[parent]
            if number in found:
                source, number = number, next(free)
                self.shared.split(source, number)
            found.append(number)
        return found

    def lead(self, rows: Iterable[int]) -> list[LogitGuess]:
        """The guesses of the rows computed last; the next level continues from them."""
        found = [self.shared.guess(row) for row in rows]
        self.leading = np.vstack([state for _, state in found])
        return [guess for guess, _ in found]

    def forget(self) -> None:
        self.leading, self.depth = None, 0
        self.branches = [0]
        self.remove(self.fed)
        self.shared.join()

    def feed(self, tokens: Sequence[int], end: int, guess: bool = False) -> None:
        """Compute the rows up to place `end`, with `guess` also the logits of the last row. A
        failure leaves the head empty."""
        start = self.fed
        states = self.states[start - 1 - self.first : end - 1 - self.first]
        try:
            places = range(start, end)
            fused = self.shared.fused(states, places)
            self.shared.compute(fused, places, tokens[start:end], guess)
        except ModelError:
            self.reset()
            raise
        self.fed = end
        self.trim()

    def trim(self) -> None:
        """Drop the states that no later row needs; the last row may be computed again."""
        gone = max(0, self.fed - 1 - self.shared.kind.behind - self.first)
        self.states, self.first = self.states[gone:], self.first + gone
