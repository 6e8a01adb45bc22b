"""Requests of all kinds, and how answers that come together are held against what each says alone,
decoded plainly."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice
from typing import NamedTuple

from hypothesis import strategies as st

from engine.engine import Event, Measured, Request, Started
from engine.errors import Cancelled
from engine.local import Local
from engine.methods import PLAIN, method_named
from engine.settings import AnswerFormat, Generation, Sampling
from engine.streams import Stream
from engine.types import Finish, Message, Step
from tests.support.lossless import CUTS, TEMPERATURES, made_up
from tests.support.toy import ToyBackend

WORDS = ("once", "upon", "a", "time", "there", "was", "a", "small", "house", "by", "the", "sea")
METHOD_NAMES = ("hd", "auto", "plain", "context", "lookup", "model", "hd-published")
FORMATS = (
    None,
    None,
    AnswerFormat("regex", "[a-f]{4,30}"),
    AnswerFormat("json_schema", '{"type": "array", "items": {"enum": [1, "two"]}}'),
)
OWNERS, CONVERSATIONS = ("a", "b"), ("", "", "", "one", "two")

PROFILE = made_up(["small", "toy"])


class Wish(NamedTuple):
    """A request in few words. It is `apart` if it shares no forwards."""

    method: str
    text: tuple[int, int]
    sampling: Mapping[str, float]
    tokens: int
    stop: tuple[str, ...]
    form: AnswerFormat | None
    owner: str
    conversation: str
    predicted: bool
    apart: str

    @property
    def request(self) -> Request:
        first, number = self.text
        text, method = " ".join(islice(cycle(WORDS), first, first + number)), self.method
        return Request(
            (Message("user", text),),
            generation=Generation(
                Sampling(**self.sampling), self.tokens, self.stop, format=self.form
            ),
            method=method_named(method),
            profile=PROFILE if ":" in method else None,
            owner=self.owner,
            conversation=self.conversation,
            measured=Measured() if self.apart == "measured" else None,
            prediction=text if self.predicted else "",
            background=self.apart == "background",
        )


def wishes(methods: Sequence[str] = METHOD_NAMES) -> st.SearchStrategy[Wish]:
    samplings = st.builds(
        lambda temperature, seed, cut: {"temperature": temperature, "seed": seed, **cut},
        st.sampled_from(TEMPERATURES),
        st.integers(0, 9),
        st.sampled_from(({}, {}, *CUTS)),
    )
    return st.builds(
        Wish,
        st.sampled_from(methods),
        st.tuples(st.sampled_from((0, 0, 3)), st.sampled_from((1, 3, 12, 40, 90))),
        samplings,
        st.sampled_from((50, 40, 30, 8, 1)),
        st.sampled_from(((), (), ("e", "ab"))),
        st.sampled_from(FORMATS),
        st.sampled_from(OWNERS),
        st.sampled_from(CONVERSATIONS),
        st.booleans(),
        st.sampled_from((*[""] * 20, "measured", "background", "background")),
    )


class Said(NamedTuple):
    tokens: tuple[int, ...]
    text: str
    finish: Finish | None


def said(events: Sequence[Event]) -> Said:
    steps = [event for event in events if isinstance(event, Step)]
    tokens = [token for step in steps for token in step.tokens]
    begun = "".join(event.text for event in events if isinstance(event, Started))
    return Said(
        tuple(token.id for token in tokens),
        begun + "".join(token.text for token in tokens),
        steps[-1].finish if steps else None,
    )


@cache
def plainly(request: Request) -> Said:
    with closing(Local(backend=ToyBackend())) as engine:
        return said(list(engine.generate(request)))


def alone(request: Request) -> Said:
    """What a model of its own says by plain decoding."""
    return plainly(Request(request.messages, generation=request.generation, method=PLAIN))


@dataclass(eq=False)
class Answer:
    """An answer to a request, which others may come beside. `whole` is what it says alone, and
    `before` the tokens that it has said by now. `stopped` tells whether anyone has stopped it."""

    request: Request
    whole: Said
    before: tuple[int, ...] = ()
    stopped: bool = False
    refused: bool = False

    @property
    def complete(self) -> bool:
        return len(self.before) == len(self.whole.tokens)

    def left(self) -> Request:
        """What continues it."""
        generation = self.request.generation
        left = replace(generation, max_tokens=generation.max_tokens - len(self.before))
        begun = {"answered": self.before, "model_fingerprint": "toy"} if self.before else {}
        return replace(self.request, generation=left, **begun)

    def read(self, stream: Stream[Event]) -> Exception | None:
        """All that it said is right, and if it ended by itself it said all. Returns the error that
        ended it, unless it was stopped."""
        events: list[Event] = []
        error: Exception | None = None
        try:
            for event in stream:
                events.append(event)
        except Exception as raised:
            error = raised
        found = said(events)
        self.before += found.tokens
        assert self.before == self.whole.tokens[: len(self.before)]
        assert stream.stopped.is_set() == self.stopped, "nobody else stops it"
        if error is None and found.finish != "cancelled":
            assert found._replace(tokens=self.before) == self.whole
        elif error is None or isinstance(error, Cancelled):
            assert self.stopped and not self.complete
            return None
        return error
