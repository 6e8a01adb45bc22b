"""Answers in a given format: which tokens may come next, and which must.

An `AnswerFormat` describes texts. llguidance, a library, compiles it with the model's vocabulary
into a matcher, which tells at each place the tokens that some text of this format continues with.
All others are excluded before the choice: their logits become minus infinity. The choice itself
(engine/sampling.py) stays as it is, with the same noise. So the text is still a function of the
decided tokens, the seed and the position, and drafts change nothing.

Where the format leaves no choice, the tokens are known before the model is asked. They are drafted
like the evidence of a database (`FormatTier`), in one tree with all other drafts, so drafting goes
on behind them. Nodes that the format excludes are removed before they cost a row.

While a model thinks, before its answer, everything is allowed. If it may begin to think by itself,
the marks for that are allowed at the beginning, beside what the format allows.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import llguidance
import numpy as np
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from engine.backends.base import LogitScores, Tokenizer
from engine.drafting.base import Tier
from engine.drafting.calibration import CLASSES
from engine.errors import FormatError
from engine.sampling import Floats
from engine.settings import AnswerFormat, Sampling
from engine.thinking import Marks
from engine.tools import as_json
from engine.tree import Tree
from engine.types import SCHEMA, Followers, Tool

COMPACT: Any = {"whitespace_flexible": False}
"""JSON without white space between its parts: where white space is free, hardly any token is
certain."""
SPACED = COMPACT | {"item_separator": ", ", "key_separator": ": "}
"""The arguments of a call, as chat templates write them."""
SUFFIX = 32
"""How many of the last tokens identify a node of a draft tree."""
SENTINEL = "\x02"
"""Text is tokenized after this character, because some tokenizers treat the beginning of a text
differently."""
LIMITS = llguidance.LLParserLimits(initial_lexer_fuel=200_000, verbose_errors=False)
"""Of the size of a grammar: larger ones would take seconds before the first token."""
LONGEST_RUN = 256
"""The most demanded tokens that are looked up at a time."""
REMEMBERED = 4096
"""How many texts are remembered with their tokens: the demanded ones return in each answer."""
SHORTER: Sequence[Followers] = tuple(Followers(1.0, 1.0, {}) for _ in range(CLASSES - 1))


def grammar_of(form: AnswerFormat, special: Mapping[str, int] = {}) -> str:
    """The format as a grammar of llguidance, for a model with these `special` tokens. Raises
    FormatError, with the place of the fault."""
    try:
        compile_text: Any = llguidance.grammar_from
        if form.kind == "json_schema":
            grammar = llguidance.LLMatcher.grammar_from_json_schema(form.text, defaults=COMPACT)
        elif form.kind == "call":
            grammar = compile_text("lark", call_grammar(**json.loads(form.text), special=special))
        else:
            grammar = compile_text(form.kind, form.text)
    except (ValueError, TypeError) as error:
        raise refused(form, str(error)) from error
    if problem := llguidance.LLMatcher.validate_grammar(grammar, limits=LIMITS):
        raise refused(form, problem)
    return grammar


def call_format(frame: Sequence[str], tools: Sequence[Tool]) -> AnswerFormat:
    """The format of an answer that is a call of one of these tools, within `frame` (CallForm)."""
    schemas = {tool.name: json.loads(tool.parameters) for tool in tools}
    return AnswerFormat("call", as_json({"frame": list(frame), "tools": schemas}))


def call_grammar(frame: Sequence[str], tools: Mapping[str, Any], special: Mapping[str, int]) -> str:
    pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"

    def quoted(text: str) -> str:
        pieces = filter(None, re.split(f"({pattern})", text))
        return " ".join(f"<[{special[p]}]>" if p in special else as_json(p) for p in pieces)

    before, between, after = map(quoted, frame)
    lines = ["start: " + " | ".join(f"call{n}" for n in range(len(tools)))]
    for number, (name, schema) in enumerate(tools.items()):
        arguments = {"type": "object"} | schema | {"x-guidance": SPACED}
        lines.append(f"call{number}: {before} {quoted(name)} {between} arguments{number} {after}")
        lines.append(f"arguments{number}: %json {as_json(arguments)}")
    return "\n".join(lines)


def refused(form: AnswerFormat, problem: str) -> FormatError:
    return FormatError(
        f"The {form.title} cannot be used: {' '.join(problem.split())[:500]}. Change "
        "it, or leave it out."
    )


class Vocabulary:
    """The vocabulary of a model in the form of llguidance, and its size. It does not keep the model
    in memory. Raises FormatError for a model without end token."""

    made: ClassVar[WeakKeyDictionary[Tokenizer, "Vocabulary"]] = WeakKeyDictionary()

    def __init__(self, model: Tokenizer) -> None:
        info, self.model = model.info, ref(model)
        self.size, self.special = len(model.vocabulary()), model.special.ids
        ends = sorted(end for end in info.eos_ids if end < self.size)
        if not ends:
            raise FormatError(
                f"{info.name} has no end token, so its answers cannot have a given format. Choose "
                "another model, or leave the format out."
            )
        self.eos_token_id, self.bos_token_id = ends[0], None
        self.tokens = [model.piece(token) for token in range(self.size)]
        self.tokenized = lru_cache(maxsize=REMEMBERED)(self.within)
        self.special_token_ids = sorted(model.special.known | set(ends))
        wrapper = llguidance.TokenizerWrapper(self)
        self.tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=self.size, eos_token=ends)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of a text within an answer."""
        return self.tokenized(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)

    def within(self, text: str) -> list[int]:
        model = self.model()
        if model is None:
            return []
        before = model.tokenize(SENTINEL)
        tokens = model.tokenize(SENTINEL + model.special.literal(text))
        return tokens[len(before) :] if tokens[: len(before)] == before else []

    @classmethod
    def of(cls, model: Tokenizer) -> "Vocabulary":
        """The vocabulary of a model, made once: that takes up to a second."""
        if model not in cls.made:
            cls.made[model] = cls(model)
        return cls.made[model]


class Position:
    """A place in a text of the format; `then` gives the place after one more token.

    `demanded` are the tokens that the format demands next, as the tokenizer writes the text that
    must follow. Outside of the format, in the thinking before the answer, there is no `matcher`,
    and `tail` holds the last bytes of it.
    """

    def __init__(
        self, owner: "Constraint", matcher: Any, demanded: Sequence[int] = (), tail: bytes = b""
    ) -> None:
        self.owner, self.matcher, self.tail = owner, matcher, tail
        self.known = demanded
        self.following: dict[int, Position | None] = {}

    @cached_property
    def demanded(self) -> Sequence[int]:
        if self.known or self.matcher is None or self.matcher.is_stopped():
            return self.known
        found: list[int] = self.matcher.compute_ff_tokens()
        return found[:LONGEST_RUN]

    def then(self, token: int) -> "Position | None":
        """The place after a token; None if the format excludes it here."""
        if token not in self.following:
            self.following[token] = self.moved(token)
        return self.following[token]

    def moved(self, token: int) -> "Position | None":
        if self.matcher is None:
            return self.owner.after_thinking(self.tail + self.owner.pieces[token])
        matcher = self.matcher.deep_copy()
        # `consume_token` takes half a millisecond to explain why a token is excluded.
        if not matcher.try_consume_tokens([token]):
            return None
        demanded = self.demanded
        as_demanded = demanded and demanded[0] == token
        return Position(self.owner, matcher, demanded[1:] if as_demanded else ())

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may follow; shape (vocabulary,). Raises FormatError if there is none."""
        mask = allocate_token_bitmask(1, self.owner.size)
        fill_next_token_bitmask(self.matcher, mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.owner.size]
        if not bits.any():
            raise refused(self.owner.form, self.matcher.get_error() or "no token fits")
        return bits.view(np.bool_)

    @property
    def is_free(self) -> bool:
        return self.matcher is None

    def masked(self, logits: Floats) -> Floats:
        """Logits of what follows, with minus infinity where the format excludes a token."""
        if self.is_free:
            return logits
        found = np.full_like(logits, -np.inf)
        np.copyto(found[: self.owner.size], logits[: self.owner.size], where=self.allowed)
        return found


class Beginning(Position):
    """The beginning of an answer whose model may think first. `tail` is what it has written of a
    mark; if the format allows that as well, there is a `matcher`. Nothing is demanded here."""

    is_free = False

    @cached_property
    def demanded(self) -> Sequence[int]:
        return ()

    def moved(self, token: int) -> Position | None:
        text = self.tail + self.owner.pieces[token]
        if place := self.owner.after_mark(text):
            return place
        place = None if self.matcher is None else super().moved(token)
        if self.owner.opens(text):
            return Beginning(self.owner, place.matcher if place else None, tail=text)
        return place

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        found = np.zeros(self.owner.size, np.bool_)
        if self.matcher is not None:
            found |= super().allowed
        parts, rests = self.owner.continued(self.tail)
        # One look at each token of the vocabulary, before the first token of an answer.
        found |= [piece in parts or piece.startswith(rests) for piece in self.owner.pieces]
        return found


class Constraint:
    """The format of one answer while it is decoded. `here` is the place after the decided tokens.

    `marks` are those of the model's thinking, if it thinks before its answer: the chat template has
    opened the thinking, or the model `may_begin` it. The tokens `known` of the answer exist
    already. Raises FormatError if the format or the vocabulary cannot be used, or if the known
    tokens do not have this format.
    """

    def __init__(
        self,
        model: Tokenizer,
        form: AnswerFormat,
        known: Sequence[int] = (),
        marks: Sequence[Marks] = (),
        may_begin: bool = False,
    ) -> None:
        vocabulary = Vocabulary.of(model)
        self.form, self.size, self.pieces = form, vocabulary.size, vocabulary.tokens
        self.matcher = llguidance.LLMatcher(
            vocabulary.tokenizer, grammar_of(form, vocabulary.special), log_level=0, limits=LIMITS
        )
        if self.matcher.is_error():
            raise refused(form, self.matcher.get_error())
        self.ends = [end.encode() for each in marks for end in each.ends]
        self.begins = [each.begin.encode() for each in marks]
        self.direct = {mark.encode() for each in marks for mark in each.direct}
        self.here = Position(self, None if marks else self.matcher)
        if may_begin:
            self.here = Beginning(self, self.matcher)
        self.places: dict[tuple[int, ...], Position] = {}
        self.advance(known)

    def after_thinking(self, text: bytes) -> Position:
        """The place after a thinking part that ends in these bytes: where the format begins, if it
        is over."""
        if any(end in text for end in self.ends):
            return Position(self, self.matcher)
        return Position(self, None, tail=text[-max(map(len, self.ends)) :])

    def continued(self, tail: bytes) -> tuple[set[bytes], tuple[bytes, ...]]:
        """What may follow the beginning of a mark: a part of its rest, or a text with all of it."""
        rests = [m[len(tail) :] for m in (*self.begins, *self.direct) if m.startswith(tail)]
        whole = tuple(m[len(tail) :] for m in self.begins if m.startswith(tail))
        return {rest[: end + 1] for rest in rests for end in range(len(rest))}, whole

    def opens(self, text: bytes) -> bool:
        """Whether an answer that begins so may be about to think, or says that it does not."""
        marks = (*self.begins, *self.direct)
        return text.startswith(tuple(self.begins)) or any(m.startswith(text) for m in marks)

    def after_mark(self, text: bytes) -> Position | None:
        """The place after the first text of an answer; None if it has no whole mark."""
        if text in self.direct:
            return Position(self, self.matcher)
        mark = next((begin for begin in self.begins if text.startswith(begin)), None)
        return None if mark is None else self.after_thinking(text.removeprefix(mark))

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on after tokens that were decided. Raises FormatError if they do not fit."""
        for token in tokens:
            place = self.here.then(token)
            if place is None:
                raise refused(self.form, f"the answer has begun with {self.pieces[token]!r}")
            self.here = place

    def look(self, tokens: Sequence[int]) -> None:
        """Prepare for drafts after these tokens, the prompt and the answer so far."""
        self.places = {tuple(tokens[-SUFFIX:]): self.here}

    def at(self, suffix: Sequence[int]) -> Position | None:
        """The place after the last tokens on the path to a node whose parent was asked for; None if
        it is unknown."""
        key = tuple(suffix[-SUFFIX:])
        if key not in self.places:
            before = self.places.get(tuple(suffix[-SUFFIX - 1 : -1]))
            place = None if before is None else before.then(key[-1])
            if place is None:
                return None
            self.places[key] = place
        return self.places[key]

    def positions(self, tree: Tree) -> list[Position | None]:
        """The place after each row of a tree, None where the format excludes it."""
        found: list[Position | None] = [self.here]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            before = found[parent]
            found.append(None if before is None else before.then(token))
        return found

    def pruned(self, tree: Tree) -> Tree:
        excluded = {row for row, place in enumerate(self.positions(tree)) if place is None}
        return tree.without(excluded) if excluded else tree

    def scores(self, tree: Tree, scores: LogitScores, sampling: Sampling) -> LogitScores:
        """The scores of a tree without what the format excludes."""
        places = self.positions(tree)

        def read(row: int) -> Floats:
            place = places[row]
            assert place is not None, "excluded nodes are pruned"
            return place.masked(scores.row(row))

        return LogitScores(read, scores.positions, sampling)


class FormatTier(Tier):
    """What the format of the answer demands, as evidence: a match of the longest class."""

    name = source = SCHEMA

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        place = self.constraint.at(suffix)
        if place is None or not place.demanded:
            return ()
        return *SHORTER, Followers.once(place.demanded[0])

    def unigrams(self) -> None:
        """None: what a format demands depends on the place."""

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Nothing is learned."""
