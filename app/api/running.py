"""A request under way: a thread of its own works, the event loop tells what comes.

The thread does all that blocks: it waits in the queue, reads what the engine says, and stores what
it learned. The loop only takes what is there, so a program that reads slowly holds up nobody. Who
leaves is noticed by the loop, which stops the thread's work and does not wait for it.
"""

import asyncio
import logging
import threading
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from time import monotonic

from app.api.asked import Wanted
from app.api.errors import ApiError, told
from app.api.figures import FINISHES, Answered
from app.api.prometheus import Counters
from app.api.reasoning import Said, Splitter
from app.service.latest import Latest
from app.service.programs import Programs
from app.service.tasks import Task
from engine.backends.base import BackendInfo
from engine.engine import Engine, Request, Started
from engine.errors import Cancelled, StrataError
from engine.metrics import Tally
from engine.types import Learned, Prefill, Step, Token

WORDS = 1 << 16
"""Tokens whose texts are remembered."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """A choice has its turn, with this model."""

    choice: int
    info: BackendInfo


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step added to a choice: of the answer and of the thinking told apart from it, its
    tokens but the one that ends the answer, and the texts of these and of the likeliest beside
    them, where probabilities are told."""

    choice: int
    text: str
    reasoning: str
    tokens: tuple[Token, ...]
    names: dict[int, str]


@dataclass(frozen=True, slots=True)
class Over:
    """A choice is over, for this reason (in OpenAI's words)."""

    choice: int
    finish: str
    answered: Answered


News = Begun | Piece | Over
Arrival = News | ApiError | None
"""What comes of a request: news, at the end None or what went wrong."""


class Texts:
    """The texts of single tokens."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.known: Latest[tuple[str, int], str] = Latest(WORDS)
        self.lock = threading.Lock()

    def of(self, tokenizer: str, tokens: Sequence[Token]) -> dict[int, str]:
        """Those of some tokens and of the likeliest beside them, by their numbers."""
        wanted = {n for token in tokens for n in (token.id, *(t for t, _ in token.likeliest))}
        with self.lock:
            known = {n: self.known[tokenizer, n] for n in wanted if (tokenizer, n) in self.known}
        unknown = list(wanted - known.keys())
        if unknown:
            found = self.engine.texts([[number] for number in unknown])
            fresh = dict(zip(unknown, found, strict=True))
            with self.lock:
                self.known.update({(tokenizer, n): text for n, text in fresh.items()})
            known |= fresh
        return known


@dataclass(slots=True)
class Choice:
    """One choice as it grows."""

    number: int
    request: Request
    info: BackendInfo
    splitter: Splitter | None = None
    prefill: Prefill = Prefill(0, 0)
    tally: Tally = field(default_factory=Tally)
    finish: str = ""
    thought: int = 0

    def piece(self, step: Step, texts: Texts | None) -> Piece:
        """What a step adds. Raises Cancelled where something else than the program ended it."""
        if step.finish == "cancelled":
            raise Cancelled(
                "The answer was stopped, as another model is being loaded. Ask again in a moment."
            )
        if step.finish is not None:
            self.finish = FINISHES[step.finish]
        said = step.tokens[:-1] if step.finish == "eos" else step.tokens
        reasoning, text = self.parted(step)
        names = texts.of(self.info.tokenizer_fingerprint, said) if texts else {}
        return Piece(self.number, text, reasoning, said, names)

    def parted(self, step: Step) -> Said:
        """The text of a step, its thinking apart where that is wanted."""
        if self.splitter is None:
            return Said("", "".join(token.text for token in step.tokens))
        parts = []
        for token in step.tokens:
            self.thought += self.splitter.thinks
            parts.append(self.splitter.push(token.text))
        if self.finish:
            parts.append(self.splitter.end())
        return Said(*map("".join, zip(*parts, strict=True)))

    @property
    def answered(self) -> Answered:
        """What it was worth."""
        method, seed = self.request.method, self.request.generation.sampling.seed
        metrics = self.tally.metrics()
        nodes = method.drafting.nodes
        return Answered(
            self.info.name, method.name, nodes, seed, self.prefill, metrics, self.thought
        )


@dataclass(slots=True)
class Service:
    """What all requests share."""

    engine: Engine
    programs: Programs
    counters: Counters = field(default_factory=Counters)
    waiting: int = 0
    running: int = 0
    texts: Texts = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.texts = Texts(self.engine)

    def count(self, waiting: int, running: int) -> None:
        """So many more requests wait, and are answered."""
        with self.lock:
            self.waiting += waiting
            self.running += running

    def news(self, owner: str, wanted: Wanted, task: Task) -> Generator[News, None, None]:
        """All choices of a request, one after the other."""
        for number, request in enumerate(wanted.requests):
            yield from self.choice(number, request, owner, task, wanted)

    def choice(
        self, number: int, request: Request, owner: str, task: Task, wanted: Wanted
    ) -> Generator[News, None, None]:
        """One of them."""
        texts = self.texts if wanted.likeliest is not None else None
        asked, first, began = monotonic(), None, False
        choice = Choice(number, request, self.engine.state.info)
        self.count(1, 0)
        try:
            with closing(self.programs.answer(owner, request, task)) as events:
                for event in events:
                    if isinstance(event, Started):
                        began = True
                        self.count(-1, 1)
                        choice.info = event.info
                        choice.splitter = Splitter(event.thinks) if wanted.parted else None
                        yield Begun(number, event.info)
                    elif isinstance(event, Prefill | Step | Learned):
                        choice.tally.add(event)
                    if isinstance(event, Prefill):
                        choice.prefill = event
                    elif isinstance(event, Step):
                        first = first or monotonic() - asked
                        yield choice.piece(event, texts)
            yield Over(number, choice.finish, choice.answered)
        finally:
            self.count(*((0, -1) if began else (-1, 0)))
            if began:
                ended = choice.finish or "abort"
                self.counters.answered(choice.answered, ended, first, monotonic() - asked)


class Running:
    """One request of a program, from the loop's side."""

    def __init__(self, service: Service, owner: str, wanted: Wanted) -> None:
        self.service, self.owner, self.wanted = service, owner, wanted
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Arrival] = asyncio.Queue()
        self.task: Task | None = None
        self.left = threading.Event()
        threading.Thread(target=self.work, name="program", daemon=True).start()

    def work(self) -> None:
        """Answer it, on a thread of its own."""
        outcome: ApiError | None = None
        try:
            with self.service.programs.asked(self.owner) as task:
                self.task = task
                if not self.left.is_set():
                    with closing(self.service.news(self.owner, self.wanted, task)) as news:
                        for item in news:
                            self.put(item)
        except StrataError as error:
            outcome = told(error, self.wanted.prompt)
        except Exception:
            log.exception("An answer to a program broke off.")
            outcome = ApiError(500, "The answer broke off for a reason that is in the log.")
        self.put(outcome)

    def put(self, item: Arrival) -> None:
        """Tell the loop."""
        with suppress(RuntimeError):  # It has ended, and with it who waited.
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)

    async def next(self) -> Arrival:
        """What comes next."""
        return await self.queue.get()

    def stop(self) -> None:
        """End it: nobody listens any more."""
        self.left.set()
        if self.task is not None:
            self.service.programs.stop(self.task)
