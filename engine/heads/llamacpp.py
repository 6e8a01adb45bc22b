"""Heads of GGUF models: in the model's file (MTP), or in a small file beside it.

The bindings that llama.cpp calls unstable are used here and nowhere else. Where the installed
library lacks one of them a model has no head, and all else works.

A head is a context of its own beside the model's. A row of it is a token with the hidden state that
the model had at the token before; the row's logits say what follows. What the model hands out:

- MTP: the state behind its last layer. The head's layers have a cache of their own.
- Gemma 4's assistant: the same, but its layers read the model's cache, so it has no other.
- EAGLE-3: the states before three layers, which the head first makes one of.

Invariant: the head's cache holds the rows of the tokens from place `begin` to before `fed`, and
guesses behind them, which go with `forget`. `states` are those of the decided tokens from place
`first` on, as far as rows to come need them. Where some are missing, the cache begins anew behind
the gap: the head then knows less of the text, and guesses worse.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol, Self

import llama_cpp
import numpy as np

from engine.errors import ModelError
from engine.heads.base import HeadInfo, LogitGuess
from engine.sampling import Floats
from engine.settings import Sampling

DEPTH = 8
"""Tokens that one head guesses in a row, from its own states. What that is worth is measured."""
ROWS = 64
"""Rows of a head that are computed at a time. Some compute the logits of all of them."""
WIDTH = 8
"""Nodes of one level that are computed at a time."""
FEW = 8
"""Rows that are computed together with the one that guesses, where logits of all are computed."""
FLOATS = ctypes.POINTER(ctypes.c_float)
NUMBERS = ctypes.POINTER(ctypes.c_int32)
CONTEXT, MODEL = llama_cpp.llama_context_p_ctypes, llama_cpp.llama_model_p_ctypes
SYMBOLS: dict[str, tuple[str, str, list[Any], Any]] = {
    "llama_set_embeddings_nextn": (
        "P13llama_contextbb",
        "XPEAUllama_context@@_N1",
        [CONTEXT, ctypes.c_bool, ctypes.c_bool],
        None,
    ),
    "llama_get_embeddings_nextn": (
        "P13llama_context",
        "PEAMPEAUllama_context@@",
        [CONTEXT],
        FLOATS,
    ),
    "llama_get_embeddings_nextn_ith": (
        "P13llama_contexti",
        "PEAMPEAUllama_context@@H",
        [CONTEXT, ctypes.c_int32],
        FLOATS,
    ),
    "llama_set_embeddings_layer_inp": (
        "P13llama_contextjb",
        "XPEAUllama_context@@I_N",
        [CONTEXT, ctypes.c_uint32, ctypes.c_bool],
        None,
    ),
    "llama_get_embeddings_layer_inp": (
        "P13llama_contextj",
        "PEAMPEAUllama_context@@I",
        [CONTEXT, ctypes.c_uint32],
        FLOATS,
    ),
    "llama_model_target_layer_ids": (
        "PK11llama_model",
        "PEBHPEBUllama_model@@",
        [MODEL],
        NUMBERS,
    ),
    "llama_model_target_layer_ids_n": (
        "PK11llama_model",
        "IPEBUllama_model@@",
        [MODEL],
        ctypes.c_uint32,
    ),
}
"""The unstable functions: what C++ compilers (Itanium, Microsoft) append to the name, the types of
the arguments and of what comes back."""

NEEDED = ("LLAMA_CONTEXT_TYPE_MTP", "llama_model_n_layer_nextn")
"""Of the stable ones, what came with heads."""


class NoHead(Exception):
    """A model that brings a head gets none; the text is why."""


def bound() -> Any:
    """The unstable functions by their names. Raises NoHead where one is missing, or something else
    that heads need."""
    for name in NEEDED:
        if not hasattr(llama_cpp, name):
            raise lacking(name)
    return SimpleNamespace(**{name: function(name) for name in SYMBOLS})


def function(name: str) -> Any:
    """One of the unstable functions. Raises NoHead where the library has it under no name."""
    itanium, microsoft, arguments, result = SYMBOLS[name]
    library = getattr(llama_cpp.llama_cpp, "_lib", None)
    for known in (name, f"_Z{len(name)}{name}{itanium}", f"?{name}@@YA{microsoft}@Z"):
        if found := getattr(library, known, None):
            found.argtypes, found.restype = arguments, result
            return found
    raise lacking(name)


def lacking(name: str) -> NoHead:
    """The error for a library without something that heads need."""
    return NoHead(
        f"llama-cpp-python {llama_cpp.__version__} is installed, which lacks {name}; 0.3.36 has it"
    )


@dataclass(frozen=True, slots=True)
class Kind:
    """How a head computes.

    `layers` are those of the model whose inputs it sees; () where it sees the state behind the last
    one. `shared` says that it reads the model's cache. `cropped` says that the library hands out
    the states of those rows only whose logits are wanted, and `whole` that it computes the logits
    of all rows, wanted or not.
    """

    name: str
    layers: tuple[int, ...] = ()
    shared: bool = False
    cropped: bool = False

    @property
    def whole(self) -> bool:
        return bool(self.layers)


class HeadContext:
    """What the heads of all sequences of a model have in common: the library's `context` of the
    head, the arrays of its rows, and what is read of `target`, the model's context.

    `own` is the head's model, where it has a file of its own. `keep` must live as long as this
    does. Rows of decided tokens belong to sequence 0. What fails raises ModelError.
    """

    def __init__(self, kind: Kind, target: Any, context: Any, own: Any, keep: object) -> None:
        self.library, self.kind, self.target, self.context = bound(), kind, target, context
        self.keep = keep
        weakref.finalize(self, free, context, own)
        served = llama_cpp.llama_get_model(target)
        self.memory = llama_cpp.llama_get_memory(context)
        self.behind = llama_cpp.llama_model_n_layer(served)
        self.width = llama_cpp.llama_model_n_embd_out(served)
        self.inner = llama_cpp.llama_model_n_embd(own) if kind.layers else self.width
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(served))
        self.capturing = False
        self.copies = set[int]()
        """Sequences beside the first that hold rows."""
        self.rows = rows = min(ROWS, llama_cpp.llama_n_batch(context))
        self.tokens: Any = (ctypes.c_int32 * rows)()
        self.places: Any = (ctypes.c_int32 * rows)()
        self.counts: Any = (ctypes.c_int32 * rows)(*[1] * rows)
        self.wanted: Any = (ctypes.c_int8 * rows)()
        self.numbers: Any = (ctypes.c_int32 * (WIDTH + 1))(*range(WIDTH + 1))
        self.sequences: Any = (ctypes.c_size_t * rows)()
        self.library.llama_set_embeddings_nextn(context, True, kind.cropped)

    @property
    def features(self) -> int:
        """How many numbers of the model go into a row."""
        return int(self.width) * max(1, len(self.kind.layers))

    def capture(self, on: bool) -> None:
        """Have the model's next forwards hand out their hidden states, or not."""
        if on == self.capturing:
            return
        for layer in self.kind.layers or (self.behind,):
            if layer < self.behind:
                self.library.llama_set_embeddings_layer_inp(self.target, layer, on)
            else:
                self.library.llama_set_embeddings_nextn(self.target, on, False)
        self.capturing = on

    def captured(self, rows: Sequence[int]) -> Floats:
        """The hidden states of rows of the model's last forward; shape (rows, features)."""
        parts = []
        for layer in self.kind.layers or (self.behind,):
            if layer < self.behind:
                found = self.library.llama_get_embeddings_layer_inp(self.target, layer)
            else:
                found = self.library.llama_get_embeddings_nextn(self.target)
            parts.append(np.ctypeslib.as_array(found, (max(rows) + 1, self.width))[list(rows)])
        return parts[0] if len(parts) == 1 else np.hstack(parts)

    def batch(
        self,
        states: Floats,
        places: Sequence[int],
        tokens: Sequence[int] = (),
        sequences: Sequence[int] = (),
    ) -> Any:
        """Rows of these states at these places, of sequence 0 unless others are given; with their
        tokens, where they have some."""
        rows, first = len(states), ctypes.addressof(self.numbers)
        step = ctypes.sizeof(ctypes.c_int32)
        self.tokens[: len(tokens)] = tokens
        self.places[:rows] = places
        self.sequences[:rows] = [first + step * number for number in sequences or [0] * rows]
        return llama_cpp.llama_batch(
            n_tokens=rows,
            token=self.tokens if tokens else None,
            embd=states.ctypes.data_as(FLOATS),
            pos=self.places,
            n_seq_id=self.counts,
            seq_id=ctypes.cast(self.sequences, ctypes.POINTER(NUMBERS)),
            logits=self.wanted,
        )

    def fused(self, states: Floats, places: Sequence[int]) -> Floats:
        """What rows at these places take of the model's states; shape (rows, inner)."""
        if not self.kind.layers:
            return states
        rows = len(states)
        self.wanted[:rows] = [True] * rows
        self.check(llama_cpp.llama_encode(self.context, self.batch(states, places)))
        found = self.library.llama_get_embeddings_nextn(self.context)
        return np.ctypeslib.as_array(found, (rows, self.inner)).copy()

    def compute(
        self, states: Floats, places: Sequence[int], tokens: Sequence[int], guess: bool
    ) -> None:
        """Compute rows of decided tokens; `guess` says whether the last one's logits are wanted."""
        rows = len(tokens)
        self.wanted[:rows] = [guess and self.kind.whole] * (rows - 1) + [guess]
        self.check(llama_cpp.llama_decode(self.context, self.batch(states, places, tokens)))

    def branch(
        self, states: Floats, place: int, tokens: Sequence[int], sequences: Sequence[int]
    ) -> None:
        """Compute rows that all stand at one place, each of a sequence; all logits are wanted."""
        rows = len(tokens)
        self.wanted[:rows] = [True] * rows
        batch = self.batch(states, [place] * rows, tokens, sequences)
        self.check(llama_cpp.llama_decode(self.context, batch))

    def check(self, code: int) -> None:
        """Raise ModelError for a forward that failed."""
        if code:
            raise ModelError(f"The head ({self.kind.name}) failed: llama.cpp returned {code}.")

    def guess(self, row: int) -> tuple[LogitGuess, Floats]:
        """What a row says, and the state that it leaves to the next one, shape (1, inner)."""
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        state = self.library.llama_get_embeddings_nextn_ith(self.context, row)
        if not logits or not state:
            raise ModelError(f"The head ({self.kind.name}) gives no numbers.")
        found = np.ctypeslib.as_array(logits, (self.vocabulary,)).copy()
        return LogitGuess(found), np.ctypeslib.as_array(state, (1, self.inner)).copy()

    def remove(self, start: int) -> None:
        """Drop the rows from a place on. The model's own cache is left alone."""
        if not self.kind.shared:
            llama_cpp.llama_memory_seq_rm(self.memory, -1, start, -1)

    def join(self) -> None:
        """Have sequence 0 alone hold rows."""
        for number in self.copies:
            llama_cpp.llama_memory_seq_rm(self.memory, number, -1, -1)
        self.copies.clear()

    def split(self, source: int, number: int) -> None:
        """Have a sequence hold what another one holds."""
        self.copies.add(number)
        llama_cpp.llama_memory_seq_rm(self.memory, number, -1, -1)
        llama_cpp.llama_memory_seq_cp(self.memory, source, number, -1, -1)


class Serving(Protocol):
    """What a head needs of its backend: the decided tokens; its turn in the caches; and that
    sequence 0 of the model's cache holds them, where the head reads that."""

    cached: list[int]

    def enter(self) -> None: ...

    def lead_first(self) -> None: ...


class LlamaHead:
    """The head of one sequence; see engine/heads/base.py, and the invariant above."""

    def __init__(self, shared: HeadContext, info: HeadInfo, backend: Serving) -> None:
        self.shared, self.info, self.owner = shared, info, weakref.ref(backend)
        self.on = False
        self.clear()

    def open(self, backend: Serving) -> Self:
        """The head of another sequence."""
        return type(self)(self.shared, self.info, backend)

    def clear(self) -> None:
        """Nothing is known, and no row counts any more."""
        self.begin = self.fed = 1
        self.first = self.depth = 0
        self.branches = [0]
        self.states: Floats = np.zeros((0, self.shared.features), np.float32)
        self.leading: Floats | None = None
        self.parked: Any = None

    @property
    def known(self) -> int:
        """The place behind the last token whose state is known."""
        return self.first + len(self.states)

    def size(self, holds: bool) -> int:
        """The bytes that it takes for its sequence, which `holds` the caches or is parked."""
        if holds and not self.shared.kind.shared:
            cached = int(llama_cpp.llama_state_seq_get_size(self.shared.context, 0))
        else:
            cached = len(self.parked or ())
        return cached + int(self.states.nbytes)

    # What the backend tells.

    def prepare(self) -> None:
        """The model is about to compute for this sequence."""
        self.shared.capture(self.on)

    def take(self, start: int, rows: Sequence[int]) -> None:
        """These rows of the model's last forward are the decided tokens from place `start` on."""
        if self.states.size and start < self.known:
            # Some were read once more: their states are the same.
            rows, start = rows[self.known - start :], self.known
        if not self.on or not rows:
            return
        found = self.shared.captured(rows)
        if not self.states.size or start != self.known:
            found = self.across(start, found)
        self.states = np.vstack([self.states, found])
        if self.shared.kind.shared:
            self.begin = self.fed = self.known
            self.trim()
        owner = self.owner()
        assert owner is not None, "a head is told by its backend"
        # A head that fails here knows nothing, and goes on with what comes next.
        with suppress(ModelError):
            while self.known - self.fed >= self.shared.rows:
                self.feed(owner.cached, self.fed + self.shared.rows)

    def across(self, start: int, found: Floats) -> Floats:
        """Go on at place `start`, without the state before it, with the states `found` there.

        The rows so far stay if only that one is missing: zeros take its place.
        """
        self.first, self.states = start, found[:0]
        if self.begin < start == self.fed:
            self.first -= 1
            return np.vstack([np.zeros_like(found[:1]), found])
        self.begin = self.fed = start + 1
        self.shared.remove(0)
        return found

    def keep(self, length: int) -> None:
        """The model's cache holds so many tokens, or will: what lies behind them is forgotten."""
        self.states = self.states[: max(0, length - self.first)]
        if length < self.fed:
            self.fed = max(length, self.begin)
            self.shared.remove(self.fed)

    def reset(self, holds: bool = True) -> None:
        """Know nothing. The head's rows are this sequence's where it `holds` the caches."""
        self.clear()
        if holds:
            self.shared.remove(0)

    def park(self) -> None:
        """Another sequence takes over the caches: keep what this one's holds as bytes."""
        self.parked, owner = None, self.owner()
        self.keep(len(owner.cached) if owner else 0)
        if self.begin < self.fed and not self.shared.kind.shared:
            context = self.shared.context
            size = llama_cpp.llama_state_seq_get_size(context, 0)
            with suppress(MemoryError):
                parked = (ctypes.c_uint8 * size)()
                if llama_cpp.llama_state_seq_get_data(context, parked, size, 0) == size:
                    self.parked = parked

    def restore(self) -> None:
        """The caches are this sequence's again."""
        self.shared.remove(0)
        parked, self.parked = self.parked, None
        if self.begin < self.fed:
            size, context = len(parked or ()), self.shared.context
            read = size and llama_cpp.llama_state_seq_set_data(context, parked, size, 0)
            if read != size or not size:
                self.reset()

    # What drafting asks.

    def listen(self, on: bool) -> None:
        self.on = on

    def start(
        self, tokens: Sequence[int], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> LogitGuess | None:
        owner, length, rows = self.owner(), len(tokens), self.shared.rows
        assert owner is not None, "a head is asked by its backend"
        owner.enter()
        self.keep(length - 1)
        if not self.states.size or self.known != length - 1:
            return None
        if self.shared.kind.shared:
            owner.lead_first()
        # The last rows are computed with the one that guesses, where that makes it no dearer.
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
        # Where the model's cache is read, nothing is added to it: all rows stand where that ends.
        apart = not shared.kind.shared
        self.branches = self.parted(parents) if apart else [0] * len(parents)
        place = self.fed - 1 + (self.depth if apart else 0)
        shared.branch(self.leading[list(parents)], place, tokens, self.branches)
        self.depth += 1
        return self.lead(range(len(tokens)))

    def parted(self, parents: Sequence[int]) -> list[int]:
        """A sequence for each child of these nodes: its parent's, or a copy for all but the first.

        Sequence 0 is nobody's copy, as the decided rows stay in it.
        """
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
        """What rows that were computed last say; the next level goes on from them."""
        found = [self.shared.guess(row) for row in rows]
        self.leading = np.vstack([state for _, state in found])
        return [guess for guess, _ in found]

    def forget(self) -> None:
        self.leading, self.depth = None, 0
        self.branches = [0]
        self.shared.remove(self.fed)
        self.shared.join()

    def feed(self, tokens: Sequence[int], end: int, guess: bool = False) -> None:
        """Compute the rows up to place `end`, the last one's logits where it is to `guess`.

        One that fails leaves the head as if it knew nothing.
        """
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
        """Let go of states that no row needs any more; the last row may be computed again."""
        gone = max(0, self.fed - 2 - self.first)
        self.states, self.first = self.states[gone:], self.first + gone


def free(context: Any, model: Any) -> None:
    """Give the library's memory back: the head's context, and its model if it has one."""
    llama_cpp.llama_free(context)
    if model:
        llama_cpp.llama_model_free(model)
