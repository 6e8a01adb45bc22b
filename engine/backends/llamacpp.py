"""A GGUF model through llama.cpp's low-level interface, verified as a tree.

llama.cpp has no tree mask. It has sequences: every cell of its cache belongs to some of them, and a
row sees the cells of its own sequences. So each leaf of a tree is a sequence, a row belongs to the
sequences of the leaves below it, and all share the decided cells. After a step the sequence of the
accepted path continues. The others keep the cells that they share with it, and are extended when
they are needed next, so a step touches a few cells, not the whole cache once per leaf.

The cache has places for a few conversations, usually for one, because attention goes over all cells
in use, and those of other conversations cost time in every forward. A place is a block of sequences
with consecutive numbers. All places share the cells. The other conversations are parked: their
cells are kept as bytes in the host's memory until they are used again. A conversation that needs a
place or cells parks the one that was used longest ago. One that is not used for some time is parked
as well.

Invariant between steps, for a backend that has a place: sequence `order[0]` of it holds exactly the
`cached` tokens, any other one the first `held` of them. This does not hold while there are
`pending` rows, which were computed but not yet settled. For any other backend, `parked` holds its
`cached` tokens, or there are none. Logits are read in place.
"""

import ctypes
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import chain, pairwise
from typing import Any, Self

import llama_cpp
import numpy as np

from engine.backends.base import BackendInfo, Filled, LogitScores, TokenizerInfo, common_prefix
from engine.backends.chat_template import Fill, conversation
from engine.backends.special_tokens import special_tokens
from engine.decode import never
from engine.errors import ModelError, PromptError
from engine.heads.llamacpp import LlamaHead
from engine.models.gguf import TREE_ROWS, Batch, free, restored, saved
from engine.sampling import Floats
from engine.settings import Sampling, ThinkingChoice
from engine.tree import Tree
from engine.types import Message, Tool

NO_MEMORY, ABORTED = 1, 2
"""Results of llama_decode other than 0 (success); any other one is a fault."""
LONGEST = 1 << 13
"""The most characters without a space that the library gets at a time. Its expressions that split a
text may recurse once per character; at 25,000 the stack overflows and the process ends."""
IDLE = 32
"""Forwards, for each place, after which a conversation without any is parked. In turns with others
a draft model makes as many."""
NUMBER = ctypes.sizeof(ctypes.c_int32)
RUNS = re.compile(r"\S+|\s+")


class Vocabulary:
    """The tokens of a GGUF file: `texts` as the file writes them, `pieces` as the bytes they add.

    `texts` ends before tokens that only pad the weights. `ends` are the tokens that end a turn.
    With `splits`, texts are split by regular expressions before they are tokenized.
    """

    def __init__(self, model: Any) -> None:
        self.raw = llama_cpp.llama_model_get_vocab(model)
        self.size = llama_cpp.llama_vocab_n_tokens(self.raw)
        self.splits = llama_cpp.llama_vocab_type(self.raw) == llama_cpp.LLAMA_VOCAB_TYPE_BPE
        self.pieces = [self.piece(token) for token in range(self.size)]
        texts = [self.text(token) for token in range(self.size)]
        used = self.size
        while used and self.attributes(used - 1) & llama_cpp.LLAMA_TOKEN_ATTR_UNUSED:
            used -= 1
        self.texts = texts[:used]
        eog = llama_cpp.llama_vocab_is_eog
        self.ends = frozenset(token for token in range(self.size) if eog(self.raw, token))
        begins = llama_cpp.llama_vocab_get_add_bos(self.raw)
        self.begin = self.spelled(llama_cpp.llama_vocab_bos(self.raw)) if begins else ""
        kinds = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
        user = llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
        added = [(token, self.attributes(token) & (kinds | user)) for token in range(used)]
        template = llama_cpp.llama_model_chat_template(model, None) or b""
        self.special = special_tokens(
            ((texts[token], token, bool(kind & kinds)) for token, kind in added if kind),
            template.decode("utf-8", "replace"),
            self.ends,
        )

    def attributes(self, token: int) -> int:
        return int(llama_cpp.llama_vocab_get_attr(self.raw, token))

    def text(self, token: int) -> str:
        return bytes(llama_cpp.llama_vocab_get_text(self.raw, token)).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text, also if it is special."""
        size = 32
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = llama_cpp.llama_token_to_piece(self.raw, token, buffer, size, 0, True)
            if length >= 0:
                return buffer.raw[:length]
            size = -length

    def spelled(self, token: int) -> str:
        """The text of a special token, "" if the file has none: the library then returns a token
        that may be an ordinary word."""
        if not 0 <= token < self.size:
            return ""
        word = self.attributes(token) & llama_cpp.LLAMA_TOKEN_ATTR_NORMAL
        return "" if word else self.pieces[token].decode("utf-8", "replace")

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text. Special tokens in it are recognised, except those with LITERAL; none
        are added."""
        return self.special.tokenize(text, self.encode, partial(self.encode, special=False))

    def encode(self, text: str, special: bool = True) -> list[int]:
        pieces = parts(text) if self.splits else [text]
        return [token for piece in pieces for token in tokens_of(self.raw, piece, special)]


def tokens_of(vocabulary: Any, text: str, special: bool) -> list[int]:
    """Token ids of a text, in which `special` tokens are recognised or not. Raises PromptError if
    it is too long for the library."""
    data = text.encode("utf-8", "replace")
    room = len(data) + 16
    while True:
        tokens = (llama_cpp.llama_token * room)()
        found = llama_cpp.llama_tokenize(vocabulary, data, len(data), tokens, room, False, special)
        if found >= 0:
            return tokens[:found]
        if -found <= room:
            raise PromptError(f"A text of {len(data):,} bytes is too long to be tokenized.")
        room = -found


def parts(text: str) -> list[str]:
    """The text, cut into parts where a run of characters without a space, or of spaces, is too
    long."""
    if len(text) <= LONGEST:
        return [text]
    cuts = [0]
    for run in RUNS.finditer(text):
        cuts += range(run.start() + LONGEST, run.end(), LONGEST)
    return [text[start:end] for start, end in pairwise([*cuts, len(text)])]


def nobody() -> None:
    """The holder of an empty place."""


class Place:
    """A block of the library's sequences, from number `first` on, for one conversation at a time.

    `order` lists them, the one that holds everything first; each holds `held` tokens that it shares
    with that one. `holder` is a weak reference to the conversation, whose last forward had the
    number `used`.
    """

    def __init__(self, numbers: Any, first: int, count: int) -> None:
        kind = ctypes.c_int32 * count
        self.first, self.order = first, kind.from_buffer(numbers, first * NUMBER)
        self.held = dict.fromkeys(self.order, 0)
        self.used = 0
        self.holder: Callable[[], LlamaCppBackend | None] = nobody


class Shared:
    """What all sequences of a model share: the library's `model` and `context`, freed with the last
    sequence, its cache, which has so many `cells`, and the `places` there, the one that was used
    longest ago first. `forwards` is the number of all forwards so far."""

    def __init__(self, model: Any, context: Any, places: Sequence[Place]) -> None:
        weakref.finalize(self, free, context, model)
        self.memory = llama_cpp.llama_get_memory(context)
        self.cells = llama_cpp.llama_n_ctx(context)
        self.places = list(places)
        self.forwards = 0

    @property
    def single(self) -> bool:
        return len(self.places) == 1

    def clear(self, place: Place) -> None:
        if self.single:
            llama_cpp.llama_memory_clear(self.memory, False)
        else:
            for number in place.order:
                llama_cpp.llama_memory_seq_rm(self.memory, number, -1, -1)
        place.held.update(dict.fromkeys(place.order, 0))

    def vacate(self, place: Place) -> None:
        """Park the conversation in a place, if any, and empty the place."""
        holder = place.holder()
        if holder is not None:
            holder.park()
        self.clear(place)
        place.holder = nobody

    def free_place(self, staying: Collection["LlamaCppBackend"]) -> Place:
        """An empty place. If need be the conversation that was used longest ago is parked, but none
        of those `staying`."""

        def price(place: Place) -> tuple[bool, bool]:
            holder = place.holder()
            return holder in staying, holder is not None and bool(holder.cached)

        place = min(self.places, key=price)
        self.vacate(place)
        return place

    def make_room(self, rows: int, staying: Collection["LlamaCppBackend"]) -> None:
        """Free cells for so many further rows, in the same way. If that does not suffice, the
        library reports it."""
        for place in self.places:
            holder = place.holder()
            if place.holder is nobody or holder in staying:
                continue
            if holder is None or self.used + rows > self.cells:
                self.vacate(place)

    def park_idle(self, staying: Collection["LlamaCppBackend"]) -> None:
        """If a conversation has had no forward for some time, park all. Those in use come back to
        the beginning of the cache: a forward goes over all cells up to the last one in use."""
        oldest = self.forwards - IDLE * len(self.places)
        for place in self.places:
            holder = place.holder()
            if holder is None or not holder.cached or holder in staying:
                continue
            if place.used < oldest:
                for each in self.places:
                    self.vacate(each)
                return

    @property
    def used(self) -> int:
        holders = (place.holder() for place in self.places)
        return sum(len(one.cached) + one.pending for one in holders if one is not None)


class LlamaCppTokenizer:
    """The vocabulary of a file as a Tokenizer. `template` fills the file's chat template, if it has
    one."""

    info: Any

    def __init__(self, vocabulary: Vocabulary, template: Fill | None, info: TokenizerInfo) -> None:
        self.tokens, self.template, self.info = vocabulary, template, info
        self.special = vocabulary.special

    def tokenize(self, text: str) -> list[int]:
        return self.tokens.tokenize(text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        pieces = self.tokens.pieces
        return b"".join([pieces[token] for token in tokens]).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        return bytes(self.tokens.pieces[token])

    def vocabulary(self) -> list[str]:
        return self.tokens.texts

    def render(
        self,
        messages: Sequence[Message],
        thinking: ThinkingChoice = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """The conversation in the file's chat template, after the token that begins a text if the
        file requires one and its template does not write it."""
        begin = self.tokens.begin
        how = self.info, self.special, thinking, tools
        text = conversation(messages, self.template, "", *how)
        return text if text.startswith(begin) else begin + text


class LlamaCppBackend(LlamaCppTokenizer):
    """One sequence of a loaded model, a conversation, as a Backend. `model` and `context` are the
    library's. `rows` is the number of prompt tokens that are read at a time. So many conversations
    have `places` in the cache at once; with one place, taking turns copies the whole cache, so only
    JointBackend (llamacpp_joint.py) shares forwards."""

    info: BackendInfo

    def __init__(
        self,
        model: Any,
        context: Any,
        vocabulary: Vocabulary,
        template: Fill | None,
        info: BackendInfo,
        rows: int,
        places: int = 1,
    ) -> None:
        super().__init__(vocabulary, template, info)
        self.model, self.context = model, context
        self.head: LlamaHead | None = None
        # The library ends the process if it gets more rows at a time than fit its cache.
        self.chunk = min(rows, llama_cpp.llama_n_batch(context))
        sequences = info.leaves or 1
        self.batch = Batch(max(rows, TREE_ROWS), places * sequences)
        blocks = range(0, places * sequences, sequences)
        found = [Place(self.batch.order, first, sequences) for first in blocks]
        self.shared, self.place = Shared(model, context, found), found[0]
        self.memory, self.cells = self.shared.memory, self.shared.cells
        self.cached: list[int] = []
        self.tree: Tree | None = None
        self.leaves: list[int] = []
        self.counts: list[int] = []
        self.pending = 0
        self.hidden: Floats = np.zeros((0, 0), np.float32)
        """What the head, if any, uses of the rows of the last tree."""
        self.address = 0
        self.logits = np.zeros((0, vocabulary.size), np.float32)
        self.parked: Any = None

    @property
    def order(self) -> Any:
        return self.place.order

    @property
    def held(self) -> dict[int, int]:
        return self.place.held

    @property
    def resident(self) -> bool:
        """Whether this sequence has a place in the library's cache."""
        return self.place.holder() is self

    def reset(self) -> None:
        """Empty the cache of this sequence; those of other sequences stay as they are."""
        if self.resident:
            self.clear()
        if self.head:
            self.head.reset()
        self.cached, self.tree, self.pending, self.parked = [], None, 0, None

    def clear(self) -> None:
        self.shared.clear(self.place)

    @property
    def bytes(self) -> int:
        if not self.cached:
            return 0
        head = self.head.bytes if self.head else 0
        if not self.resident:
            return head + len(self.parked or ())
        return head + int(llama_cpp.llama_state_seq_get_size(self.context, self.order[0]))

    def open(self) -> Self:
        other = copy(self)
        other.cached, other.tree, other.pending, other.parked = [], None, 0, None
        other.head = self.head and self.head.open(other)
        return other

    def close(self) -> None:
        self.reset()

    def enter(self, staying: Collection["LlamaCppBackend"] = ()) -> None:
        """Make the library's cache hold this sequence. If need be others are parked, but none of
        those `staying`. If this sequence cannot be restored, it becomes empty."""
        shared = self.shared
        shared.park_idle((self, *staying))
        if not self.resident:
            self.place = shared.free_place(staying)
            shared.make_room(len(self.cached), staying)
            self.place.holder = weakref.ref(self)
            if self.cached and not self.restore():
                self.reset()
            self.parked = None
        self.place.used = shared.forwards
        shared.places.remove(self.place)
        shared.places.append(self.place)

    def park(self) -> None:
        """Save the decided tokens as bytes, if memory allows, because another sequence needs the
        place or its cells."""
        self.settle()
        if self.cached:
            self.parked = saved(self.context, self.order[0])

    def settle(self) -> None:
        self.keep(len(self.cached))

    def restore(self) -> bool:
        """Put the parked bytes into the empty place; returns whether the library accepted them."""
        return restored(self.context, self.order[0], self.parked)

    def prefill(
        self, tokens: Sequence[int], cancelled: Callable[[], bool], most: int | None = None
    ) -> Filled:
        decided = list(tokens[:-1])
        whole, size = len(decided), self.info.vocabulary_size
        if decided and not 0 <= min(decided) <= max(decided) < size:
            raise PromptError(
                f"The prompt holds tokens that are none of the {size:,} of the model."
            )
        self.enter()
        reused = common_prefix(self.cached, decided)
        self.keep(reused)
        reused = len(self.cached)
        if self.head:
            self.head.keep(reused)
        if most is not None:
            decided = decided[: reused + most]
        with stopping(self.context, cancelled):
            self.read_rest(decided, cancelled)
        return Filled(reused, len(self.cached) == whole)

    def read_rest(self, decided: Sequence[int], cancelled: Callable[[], bool]) -> None:
        """Read the tokens that the cache lacks, part by part, until cancelled."""
        for start in range(len(self.cached), len(decided), self.chunk):
            if cancelled():
                break
            chunk = decided[start : start + self.chunk]
            positions, rows = range(start, start + len(chunk)), len(chunk)
            self.batch.fill(chunk, positions, [self.place.first] * rows, [1] * rows, outputs=0)
            self.pending = rows
            if not self.decode([self], cancelled):
                self.keep(start)
                break
            self.cached += chunk
            self.pending = 0
            if self.head:
                self.head.take(start, self.head.seen(range(rows)))

    @property
    def unread(self) -> int:
        return 0

    def depth_limit(self, length: int) -> int | None:
        # Rotary factors that depend on the length are chosen once, by the length of the context.
        return None

    def keep(self, length: int) -> None:
        """Shorten the cache to so many decided tokens, or empty it if it cannot roll back."""
        if self.pending or length < len(self.cached):
            if not self.cut(length):
                self.reset()
            self.held.update({number: min(held, length) for number, held in self.held.items()})
            del self.cached[length:]
        self.pending = 0

    def cut(self, length: int, leaves: int | None = None) -> bool:
        """Remove what the sequences of these first leaves, or of all, hold after so many tokens;
        returns whether the library can."""
        numbers = (-1,) if self.shared.single else self.order[:leaves]
        remove = llama_cpp.llama_memory_seq_rm
        return all(remove(self.memory, number, length, -1) for number in numbers)

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        logits = self.forward([(self, tree)])
        return LogitScores(logits.__getitem__, self.positions(tree), sampling)

    def positions(self, tree: Tree) -> list[int]:
        """Those of the tokens that follow each row of a tree."""
        return [len(self.cached) + 1 + depth for depth in tree.depths]

    def forward(self, trees: Sequence[tuple["LlamaCppBackend", Tree]]) -> Floats:
        """Compute the trees of several sequences. Returns the logits of their rows, which follow
        each other, in the library's memory; shape (at least the rows of all, vocabulary)."""
        sequences = [sequence for sequence, _ in trees]
        for sequence in sequences:
            sequence.come_back(sequences)
        parts = [sequence.rows_of(tree) for sequence, tree in trees]
        tokens, positions, leaves, counts = ([*chain(*lists)] for lists in zip(*parts, strict=True))
        rows = sum(len(tree.tokens) for _, tree in trees)
        # The library must not get more rows than it has room for.
        taken = sum(len(sequence.cached) + len(tree.tokens) for sequence, tree in trees)
        assert len(tokens) <= TREE_ROWS and taken <= self.cells, f"{len(tokens)} rows, {taken}"
        self.batch.fill(tokens, positions, leaves, counts, outputs=rows)
        for sequence in sequences:
            sequence.lead()
        self.decode(sequences)
        end = 0
        for (sequence, tree), (computed, *_) in zip(trees, parts, strict=True):
            end += len(computed)
            if sequence.head:
                sequence.hidden = sequence.head.seen(range(end - len(tree.tokens), end))
        found = llama_cpp.llama_get_logits(self.context)
        address = ctypes.addressof(found.contents)
        if address != self.address or rows > len(self.logits):
            # The library may move its logits when a forward has more rows than any before.
            shape = (rows, self.info.vocabulary_size)
            self.address, self.logits = address, np.ctypeslib.as_array(found, shape=shape)
        return self.logits

    def come_back(self, staying: Collection["LlamaCppBackend"]) -> None:
        """Enter for a forward within an answer. Raises ModelError if the text is lost."""
        length = len(self.cached)
        self.enter(staying)
        if len(self.cached) < length:
            raise ModelError(
                f"{length:,} tokens of this conversation could not be put back into the cache of "
                f"{self.info.name}. Send the message again."
            )

    def rows_of(self, tree: Tree) -> tuple[list[int], list[int], list[int], list[int]]:
        """The rows of a forward over a tree, and over unread tokens before it: tokens, positions,
        first leaves and numbers of leaves, as the batch takes them."""
        start, first = len(self.cached), self.place.first
        self.tree = tree
        self.leaves, self.counts = branches(tree)
        assert self.counts[0] <= len(self.order), f"{self.counts[0]} leaves"
        again = self.cached[start - self.unread :]
        self.pending = len(tree.tokens)
        return (
            [*again, *tree.tokens],
            [*range(start - len(again), start), *(start + depth for depth in tree.depths)],
            [*[first] * len(again), *(first + leaf for leaf in self.leaves)],
            [*[1] * len(again), *self.counts],
        )

    def lead(self) -> None:
        """Give the sequences of all leaves the decided tokens."""
        main, length = self.order[0], len(self.cached)
        for leaf in range(1, self.counts[0]):
            number = self.order[leaf]
            llama_cpp.llama_memory_seq_cp(self.memory, main, number, self.held[number], length)
            self.held[number] = length

    def lead_first(self) -> None:
        """Make sequence 0 the leading one, for a head that reads this cache."""
        main, length = self.order[0], len(self.cached)
        if main:
            place = list(self.order).index(0)
            llama_cpp.llama_memory_seq_cp(self.memory, main, 0, self.held[0], length)
            self.order[0], self.order[place] = 0, main
            self.held[0] = self.held[main] = length

    def decode(
        self, sequences: Sequence["LlamaCppBackend"], cancelled: Callable[[], bool] = never
    ) -> bool:
        """Run the batch, which holds the pending rows of these sequences; returns False if it was
        cancelled. Raises ModelError if the forward fails."""
        self.shared.make_room(0, sequences)
        self.shared.forwards += 1
        if self.head:
            heads = (sequence.head for sequence in sequences)
            self.head.shared.capture(any(head is not None and head.on for head in heads))
        code = llama_cpp.llama_decode(self.context, self.batch.raw)
        if code == 0 or (code == ABORTED and cancelled()):
            return bool(code == 0)
        for sequence in sequences:
            sequence.reset()
        problem = "its cache is full" if code == NO_MEMORY else f"llama_decode returned {code}"
        raise ModelError(
            f"A forward of {self.info.name} over {self.batch.raw.n_tokens:,} tokens failed: "
            f"{problem}. Send the message again; if that does not help, load the model with a "
            "smaller context or batch."
        )

    def accept(self, rows: Sequence[int]) -> None:
        tree = self.tree
        assert tree is not None, "accept follows score"
        path = (0, *rows)
        taken = [tree.tokens[row] for row in path]
        self.tree = None
        if not self.resident:
            # After a forward of several sequences another one needed the cells.
            decided = [*self.cached, *taken]
            self.enter()
            self.read_rest(decided, never)
            return
        self.cached += taken
        self.pending = 0
        if self.head and len(self.hidden):
            self.head.take(len(self.cached) - len(path), self.hidden[list(path)])
        self.drop(tree, path)

    def drop(self, tree: Tree, path: Sequence[int]) -> None:
        """Remove the rows of the tree that are not on the path from the cache."""
        end, last = len(self.cached), path[-1]
        start = end - len(path)
        # Rows after the end of the path are removed at once, other branches leaf by leaf.
        remove = llama_cpp.llama_memory_seq_rm
        lone = not tree.children[last] and end == start + 1
        trimmed = lone or self.cut(end, self.counts[0])
        low = high = self.leaves[last]
        for length, row in zip(range(end, start, -1), reversed(path), strict=True):
            first, after = self.leaves[row], self.leaves[row] + self.counts[row]
            for leaf in (*range(first, low), *range(high, after)):
                number = self.order[leaf]
                self.held[number] = length
                if length < end:
                    trimmed &= remove(self.memory, number, length, end)
            low, high = first, after
        winner = self.leaves[last]
        self.order[0], self.order[winner] = self.order[winner], self.order[0]
        if not trimmed:
            self.reset()
            raise ModelError(
                f"The cache of {self.info.name} cannot be rolled back. Choose the method plain."
            )


def branches(tree: Tree) -> tuple[list[int], list[int]]:
    """For each row, the first leaf below it and the number of its leaves. Leaves are numbered
    branch by branch, so that those below a row have consecutive numbers."""
    parents, rows = tree.parents, len(tree.parents)
    counts = [0] * rows
    for row in range(rows - 1, 0, -1):
        counts[row] = counts[row] or 1
        counts[parents[row]] += counts[row]
    counts[0] = counts[0] or 1
    leaves, free = [0] * rows, [0] * rows
    for row in range(1, rows):
        parent = parents[row]
        leaves[row] = free[row] = free[parent]
        free[parent] += counts[row]
    return leaves, counts


@contextmanager
def stopping(context: Any, cancelled: Callable[[], bool]) -> Iterator[None]:
    """End forwards on the processor early in this block once `cancelled()` is true. Only prompts
    use this, because the library calls back at every node of its graph and then waits for Python's
    lock."""
    callback = llama_cpp.ggml_abort_callback(lambda _: cancelled())
    llama_cpp.llama_set_abort_callback(context, callback, None)
    try:
        yield
    finally:
        llama_cpp.llama_set_abort_callback(context, llama_cpp.ggml_abort_callback(), None)


def alone(backend: LlamaCppBackend, tokens: Sequence[int]) -> Floats:
    """The logits after `tokens` in an empty cache, without a tree; shape (vocabulary,)."""
    backend.reset()
    backend.prefill(tokens, never)
    return backend.score(Tree(tokens[-1]), Sampling()).row(0).copy()
