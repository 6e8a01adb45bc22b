"""A running request: a separate thread computes the answer, and the event loop sends it.

The thread does everything that blocks: it waits in the queue, reads the engine's events, and stores
what was learned. The loop only sends finished pieces, so a program that reads slowly blocks nobody
else. The loop also notices when a program disconnects; it then stops the thread without waiting.

Clients know the thinking of a model as `reasoning_content` (engine/thinking.py).
"""

import asyncio
import logging
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from queue import SimpleQueue
from time import monotonic

from app.api.figures import FINISHES, AnswerFigures, Counters
from app.api.requests import Completion
from app.http.problems import AGAIN_SECONDS, ApiError, api_error, later
from app.service.jobs import Task
from app.service.pages import LimitedDict
from app.service.programs import Programs
from engine.backends.base import BackendInfo
from engine.engine import Engine, Request, Started
from engine.errors import Cancelled, StrataError
from engine.metrics import Tally
from engine.thinking import Parted, Splitter
from engine.tools import CallSplitter, Said
from engine.types import Finish, Learned, Prefill, Step, Token, ToolCall

TOKEN_TEXTS = 1 << 16
"""The number of tokens whose texts are remembered."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """The answer of a choice begins, with this model and a prompt of so many tokens."""

    choice: int
    info: BackendInfo
    tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step added to a choice: text of the answer and of the thinking, the calls of tools
    after this text, and its tokens except the one that ends the answer. If probabilities are
    requested, these are the tokens of the text, which begin at `starts` in it, and `names` holds
    the bytes of these tokens and of their likeliest alternatives."""

    choice: int
    text: str
    reasoning: str
    tokens: tuple[Token, ...]
    starts: tuple[int, ...]
    names: dict[int, bytes]
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Over:
    """A choice is over; `finish` is the reason, None if the engine gave none."""

    choice: int
    finish: Finish | None
    answered: AnswerFigures


AnswerEvent = AnswerStart | Piece | Over
Arrival = AnswerEvent | ApiError | None
"""What a running request sends: its events, and at its end None or an error."""


# the work


class Texts:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.known: LimitedDict[tuple[str, int], bytes] = LimitedDict(TOKEN_TEXTS)
        self.lock = threading.Lock()

    def of(self, tokenizer: str, tokens: Sequence[Token]) -> dict[int, bytes]:
        """The bytes of tokens and of their likeliest alternatives, by their ids."""
        ids = {n for token in tokens for n in (token.id, *(t for t, _ in token.likeliest))}
        with self.lock:
            known = {n: self.known[tokenizer, n] for n in ids if (tokenizer, n) in self.known}
        unknown = list(ids - known.keys())
        if unknown:
            found = self.engine.pieces(unknown)
            fresh = dict(zip(unknown, found, strict=True))
            with self.lock:
                self.known.update({(tokenizer, n): text for n, text in fresh.items()})
            known |= fresh
        return known


@dataclass(slots=True)
class Choice:
    number: int
    request: Request
    info: BackendInfo
    splitter: Splitter | None = None
    calls: CallSplitter | None = None
    prefill: Prefill = Prefill(0, 0)
    tally: Tally = field(default_factory=Tally)
    finish: Finish | None = None
    thought: int = 0
    waiting: list[Token] = field(default_factory=list)
    length: int = 0

    def piece(self, step: Step, texts: Texts | None) -> Piece:
        """The piece that a step adds. Raises Cancelled if the app itself stopped the answer."""
        if step.finish == "cancelled":
            raise Cancelled(
                "The answer was stopped, as the program ends or loads another model. "
                "Ask again in a moment."
            )
        self.finish = step.finish
        self.waiting += step.tokens[:-1] if step.finish == "eos" else step.tokens
        reasoning, text = self.parted(step)
        over = self.finish is not None
        text, calls = self.calls.push(text, over) if self.calls else Said(text)
        self.length += len(text)
        tokens, starts = self.emitted(self.length)
        names = texts.of(self.info.tokenizer_fingerprint, tokens) if texts else {}
        return Piece(self.number, text, reasoning, tokens, starts, names, calls)

    def emitted(self, length: int) -> tuple[tuple[Token, ...], tuple[int, ...]]:
        """The waiting tokens of the first `length` characters of the answer, and where they begin
        in it. Those of the thinking are dropped, and others wait until their text is sent."""
        thought = self.splitter.thought if self.splitter else None
        given = len(self.request.prefix)
        first = given if thought is None else thought.answer
        if first is None or not length:
            return (), ()
        first = max(first, given)
        passed = sum(a.start < first and b.start <= first for a, b in pairwise(self.waiting))
        count = sum(token.start < first + length for token in self.waiting)
        found, self.waiting = self.waiting[passed:count], self.waiting[count:]
        return tuple(found), tuple(max(0, token.start - first) for token in found)

    def parted(self, step: Step) -> Parted:
        if self.splitter is None:
            return Parted("", "".join(token.text for token in step.tokens))
        parts = []
        for token in step.tokens:
            self.thought += self.splitter.thinks
            parts.append(self.splitter.push(token.text))
        if self.finish:
            parts.append(self.splitter.end())
        return Parted(*map("".join, zip(*parts, strict=True)))

    @property
    def answered(self) -> AnswerFigures:
        method, seed = self.request.method, self.request.generation.sampling.seed
        metrics = self.tally.metrics()
        nodes = method.drafting.nodes
        return AnswerFigures(
            self.info.name, method.name, nodes, seed, self.prefill, metrics, self.thought
        )


@dataclass(slots=True)
class Service:
    engine: Engine
    programs: Programs
    counters: Counters = field(default_factory=Counters)
    texts: Texts = field(init=False)

    def __post_init__(self) -> None:
        self.texts = Texts(self.engine)

    def events(
        self, owner: str, completion: Completion, task: Task
    ) -> Generator[AnswerEvent, None, None]:
        """All choices: in order, or at once if the model gives several answers at once."""
        choices = [
            self.choice(number, request, owner, task, completion)
            for number, request in enumerate(completion.requests)
        ]
        at_once = min(self.programs.parallel, len(choices))
        for events in choices if at_once == 1 else (merged(choices, at_once, task),):
            yield from events

    def choice(
        self, number: int, request: Request, owner: str, task: Task, completion: Completion
    ) -> Generator[AnswerEvent, None, None]:
        texts = self.texts if completion.options.likeliest is not None else None
        arrived, first, began = monotonic(), None, False
        choice = Choice(number, request, self.engine.state.info)
        self.counters.change(waiting=1)
        try:
            with closing(self.programs.answer(owner, request, task)) as events:
                for event in events:
                    if isinstance(event, Started):
                        began = True
                        self.counters.change(waiting=-1, running=1)
                        choice.info = event.info
                        if request.tools and event.info.calls:
                            form, single = event.info.calls, completion.options.single
                            choice.calls = CallSplitter(form, request.tools, single)
                        if completion.options.parted:
                            known = len(request.prefix)
                            choice.splitter = Splitter(event.info.marks, event.thinks, known)
                            choice.splitter.push(request.prefix)
                        yield AnswerStart(number, event.info, len(event.prompt))
                    elif isinstance(event, Prefill | Step | Learned):
                        choice.tally.add(event)
                    if isinstance(event, Prefill):
                        choice.prefill = event
                    elif isinstance(event, Step):
                        first = first or monotonic() - arrived
                        yield choice.piece(event, texts)
            yield Over(number, choice.finish, choice.answered)
        finally:
            self.counters.change(waiting=began - 1, running=-began)
            if began:
                ended = FINISHES[choice.finish] if choice.finish else "abort"
                self.counters.answered(choice.answered, ended, first, monotonic() - arrived)


def merged(
    choices: Sequence[Generator[AnswerEvent, None, None]], at_once: int, task: Task
) -> Generator[AnswerEvent, None, None]:
    """The events of choices of which so many run at once. The first one begins alone, because the
    others copy what it has read of the same prompt. An error of one ends all."""
    events = SimpleQueue[AnswerEvent | BaseException | None]()

    def run(choice: Generator[AnswerEvent, None, None]) -> None:
        try:
            for event in choice:
                events.put(event)
        except BaseException as error:
            events.put(error)
        else:
            events.put(None)

    with ThreadPoolExecutor(at_once, "choice") as pool:
        pool.submit(run, choices[0])
        over, waiting = 0, list(choices[1:])
        try:
            while over < len(choices):
                event = events.get()
                if isinstance(event, BaseException):
                    raise event
                if isinstance(event, Piece | None):
                    while waiting:
                        pool.submit(run, waiting.pop(0))
                if event is None:
                    over += 1
                else:
                    yield event
        except BaseException:
            task.stop.set()
            raise


class Running:
    """One request of a program, as the event loop sees it. Its `place` is released when its thread
    ends. Raises ApiError if no thread can be started."""

    def __init__(
        self, service: Service, owner: str, completion: Completion, place: ExitStack
    ) -> None:
        self.service, self.owner, self.completion, self.place = service, owner, completion, place
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Arrival] = asyncio.Queue()
        self.task: Task | None = None
        self.left = threading.Event()
        thread = threading.Thread(target=self.work, name="program", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            place.close()
            message = "The system starts no further thread for an answer. Ask again in a moment."
            raise later(503, message, AGAIN_SECONDS, "no_thread") from error

    def work(self) -> None:
        outcome: ApiError | None = None
        try:
            with self.place, self.service.programs.task_for(self.owner) as task:
                self.task = task
                if not self.left.is_set():
                    with closing(self.service.events(self.owner, self.completion, task)) as events:
                        for item in events:
                            self.put(item)
        except StrataError as error:
            outcome = api_error(error, self.completion.body.asked)
        except Exception:
            log.exception("An answer to a program broke off.")
            outcome = ApiError(500, "The answer broke off; the log says why.")
        self.put(outcome)

    def put(self, item: Arrival) -> None:
        with suppress(RuntimeError):  # The loop has ended, with its waiters.
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)

    async def next(self) -> Arrival:
        return await self.queue.get()

    def stop(self) -> None:
        """Stop the answer, because nobody reads it any more."""
        self.left.set()
        if self.task is not None:
            self.service.programs.stop(self.task)
