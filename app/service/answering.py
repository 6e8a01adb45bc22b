"""Answers the user's last message: decodes the answer, stores it, and updates the pages it grows
on.

If the program is killed or the engine crashes, at most the last second of the answer is lost: a
separate thread stores new text, because the model may take long over a step, and no page may be
open. The last step is stored before anyone sees it. A message is created together with its first
text and its run, so that no empty message remains.

What was added never changes, so an `Update` copies nothing: adding and storing an event costs time
by the length of the event, not of the answer, except for the text itself.

An answer needs no page. It runs to its end on its own thread. Any page that knows its token may
watch, as tokens cannot be guessed. Watching holds no thread: an answer rings a bell in the event
loops that wait for updates.
"""

import asyncio
import logging
import secrets
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from app.service.comparison import Pace
from app.service.core import Core
from app.service.current import seen_in
from app.service.history import (
    FinishedAnswer,
    StartedAnswer,
    chosen,
    continuing,
    keeps_text_of,
    one_run,
    parts_of,
    without_end,
)
from app.service.jobs import AnswerTarget, Task
from app.service.preferences import Preferences
from engine.engine import Event, Request, ServerCounted, Started
from engine.errors import Cancelled, EngineDied, StrataError
from engine.metrics import Metrics, tallied
from engine.queue import Waiting
from engine.runs import Collector, planned
from engine.settings import MOST_TOKENS
from engine.streams import Stream
from engine.thinking import Splitter, named
from engine.types import NO_RUN, Learned, Part, Prefill, Run, Step
from storage.conversations import Conversations, Piece, text_of
from storage.database import Database
from storage.traces import Traces

FLUSH_SECONDS = 0.5
"""Half of the second that may be lost; the other half is for writing, and for a busy machine."""
UPDATE_SECONDS = 0.12
"""How often watchers get an update, which is how often a page draws."""


class Recorder:
    """Collects an answer to a message and stores it as it grows, until it is closed.

    The answer is shown, unless the message got another answer meanwhile: then it becomes another
    version. `keep` does a write that may fail. A failed write is tried again, and writes that still
    fail at the end are passed to `later`. `message_id` and `run_id` are empty until text is stored.

    A continued answer (`continued`) stays as stored until it grows.
    """

    def __init__(
        self,
        database: Database,
        owner: str,
        conversation_id: str,
        after: str | None,
        seed: int,
        keep: Callable[[Callable[[], Any]], Any],
        continued: StartedAnswer | None = None,
        later: Callable[[Callable[[], Any]], None] = lambda write: None,
    ) -> None:
        self.database, self.conversation_id, self.seed = database, conversation_id, seed
        self.keep, self.later, self.after = keep, later, after
        self.messages, self.traces = Conversations(database, owner), Traces(database, owner)
        self.others = self.messages.following(conversation_id, after)
        self.continued, run = continued, continued.run if continued else NO_RUN
        self.message_id = continued.message.id if continued else ""
        self.run_id = continued.run_id if continued else ""
        self.pieces: list[Piece] = (
            list(continued.message.pieces or continued.head) if continued else []
        )
        self.given = len(self.pieces)
        self.collector = Collector(run)
        self.tally = tallied(run)
        self.first = run.steps[-1].index + 1 if run.steps else 0
        """The number of the first step that is added."""
        self.part: Part | None = None
        self.prompt: tuple[int, ...] = ()
        self.certain_text: str | None = None
        self.splitter = Splitter()
        """What finds the thinking in the text of `pieces`."""
        self.finish: str | None = None
        self.counted: ServerCounted | None = None
        """What the counters of a server report."""
        self.stored = len(run.steps)
        self.opened = continued is None
        """Whether steps can be appended to what is stored."""
        self.writing = threading.Lock()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self.keep_up, name="recorder", daemon=True)

    @property
    def steps(self) -> list[Step]:
        return self.collector.steps

    @property
    def run(self) -> Run:
        return self.collector.run

    @property
    def grown(self) -> bool:
        return len(self.pieces) > self.given

    def begin(self, plan: Run, prompt: tuple[int, ...] = (), text: str | None = None) -> None:
        """Decoding begins, as planned and from this prompt. `text` is the certain part of the text
        of a continued answer, None where its tokens are not continued. The thread that stores also
        begins now, because the first token should wait for nothing."""
        self.thread.start()
        continued = self.continued
        self.prompt, self.certain_text = prompt, text
        if continued is None or not continued.run_id:
            self.collector.plan = plan
        else:
            nothing = Prefill(0, 0)
            self.part = Part(
                self.first, plan.method, plan.model, plan.fingerprint, plan.settings, nothing
            )
            steps = self.collector.steps
            steps[-1] = without_end([s for s in steps if s.index >= continued.start], text)
            count = len(steps[-1].tokens)
            self.pieces[-count:] = [Piece.of(token, steps[-1].index) for token in steps[-1].tokens]
        settings = self.collector.plan.settings
        self.splitter = Splitter(named(settings.get("marks", ())), bool(settings.get("thinks")))
        self.splitter.push(self.text)

    @property
    def text(self) -> str:
        return text_of(self.pieces)

    def add(self, event: Prefill | Step | Learned | ServerCounted) -> None:
        if isinstance(event, ServerCounted):
            self.counted = event
        elif isinstance(event, Step):
            self.take(replace(event, index=self.first + event.index))
        elif isinstance(event, Prefill) and self.part is not None:
            self.part = replace(self.part, prefill=event)
            plan = self.collector.plan
            self.collector.plan = replace(plan, parts=(*plan.parts, self.part))
            self.tally.resume(event)
        else:
            if isinstance(event, Learned):
                event = Learned(event.seconds + self.tally.learning_seconds)
            self.tally.add(event)
            self.collector.add(event)

    def take(self, step: Step) -> None:
        self.finish = step.finish
        if not step.tokens and not self.opened:
            return  # It was stopped before it grew.
        self.tally.add(step)
        self.collector.add(step)
        self.pieces += [Piece.of(token, step.index) for token in step.tokens]
        self.splitter.push("".join(token.text for token in step.tokens))
        if self.finish:
            self.flush()

    def keep_up(self) -> None:
        while not self.closed.wait(FLUSH_SECONDS):
            self.flush()

    def update(self, dropped: int) -> "Update":
        counts, metrics = (len(self.pieces), len(self.steps)), self.tally.metrics()
        return Update(self, *counts, metrics, self.finish, dropped, self.seed, self.counted)

    def flush(self, over: bool = False) -> bool:
        """Store the new part of the answer, if it has text or the answer is over. Returns whether
        nothing is left to store."""
        with self.writing:
            counts = over and self.counted is not None and (self.run_id or self.due(over))
            return not (counts or self.due(over)) or bool(self.keep(lambda: self.store(over)))

    def due(self, over: bool) -> bool:
        run, opened = self.run, self.opened
        fresh = run.steps[self.stored :]
        text = any(token.text for step in fresh for token in step.tokens)
        return bool(over and run.tokens and opened or fresh and (text or self.message_id))

    def store(self, over: bool) -> bool:
        """Store what is due, in one transaction. Raises StorageError."""
        due, ids = self.due(over), (self.message_id, self.run_id)
        run = self.run
        with self.database.write():
            if due:
                fresh = run.steps[self.stored :]
                text = "".join(token.text for step in fresh for token in step.tokens)
                ids = self.write(run, fresh, text)
            if over and self.counted is not None and ids[1]:
                self.traces.store_counts(ids[1], asdict(self.counted))
        self.message_id, self.run_id = ids
        self.stored, self.opened = len(run.steps), True
        return True

    def write(self, run: Run, fresh: Sequence[Step], text: str) -> tuple[str, str]:
        if not self.opened:
            return self.message_id, self.write_continuation(run, fresh, text)
        if self.message_id:
            self.messages.extend(self.message_id, text)
            self.traces.extend(self.run_id, fresh, run.learned)
            return self.message_id, self.run_id
        id, after = self.conversation_id, self.after
        run_id = self.traces.save(run, id, prompt=self.prompt)
        shown = self.messages.following(id, after) == self.others
        message = self.messages.append(id, "assistant", text, run_id, None, after, shown)
        return message.id, run_id

    def write_continuation(self, run: Run, fresh: Sequence[Step], text: str) -> str:
        continued = self.continued
        assert continued is not None
        head = "".join(piece.text for piece in continued.head)
        if self.part is None:
            run_id = self.traces.save(run, self.conversation_id, prompt=self.prompt)
            self.messages.rewrite(self.message_id, f"{head}{text}", run_id, continued.head)
            return run_id
        prompt = self.prompt  # Another model read all of it.
        if self.certain_text is not None:
            prompt = () if continued.prompt else (*self.prompt, *continued.tokens)
        run_id = self.traces.continue_run(
            self.run_id, run.steps[self.stored - 1], self.part, prompt
        )
        self.traces.extend(run_id, fresh, run.learned)
        whole = "".join(token.text for token in run.tokens)
        self.messages.rewrite(self.message_id, f"{head}{whole}", run_id, continued.head or None)
        return run_id

    def close(self) -> None:
        self.closed.set()
        if self.thread.ident is not None:
            self.thread.join()
        if not self.flush(over=True):
            self.later(partial(self.store, True))


@dataclass(frozen=True, slots=True)
class Update:
    """An answer at one moment: its first `tokens` tokens, from its first `forwards` steps, and its
    metrics.

    Tokens are copied only when they are read. `dropped` older messages did not fit the context.
    `counted` is what the counters of a server report, where a server answers.
    """

    recorder: Recorder
    tokens: int
    forwards: int
    metrics: Metrics
    finish: str | None
    dropped: int
    seed: int
    counted: ServerCounted | None = None

    def since(self, start: int, most: int | None = None) -> Sequence[Piece]:
        end = self.tokens if most is None else min(self.tokens, start + most)
        return self.recorder.pieces[start:end]

    @property
    def pieces(self) -> Sequence[Piece]:
        return self.since(0)

    @property
    def steps(self) -> Sequence[Step]:
        return self.recorder.steps[: self.forwards]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass(slots=True)
class RunningAnswer:
    """Feeds the events of one answer to its recorder. `finished` is what it takes to prove the
    answer, once it is over."""

    core: Core
    request: Request
    stream: Stream[Event]
    recorder: Recorder
    started: Started | None = None
    finished: FinishedAnswer | None = None

    def take(self, event: Event) -> bool:
        """Process an event; returns whether there is a step to show."""
        if isinstance(event, Prefill | Step | Learned | ServerCounted):
            self.recorder.add(event)
            return bool(self.recorder.steps)
        self.core.take_aside(self.request.owner, event)
        return False

    def updates(self) -> Generator[Update | Waiting | None, None, None]:
        """None, as the engine was asked, and then updates, at most one per UPDATE_SECONDS. Closing
        the iterator early ends the answer."""
        pace = Pace(UPDATE_SECONDS)
        try:
            yield None
            for event in self.stream:
                if isinstance(event, Started):
                    self.started = event
                    method, generation = self.request.method, self.request.generation
                    text = event.text if self.request.answered else None
                    plan = planned(event.info, method, generation, event.thinks)
                    self.recorder.begin(plan, event.prompt, text)
                elif isinstance(event, Waiting):
                    yield event
                elif self.take(event) and (self.recorder.finish or pace.due()):
                    yield self.recorder.update(self.started.dropped if self.started else 0)
        except GeneratorExit:
            # Closing the updates stops the answer, and keeps its text and what drafting learned so
            # far. This thread does not wait for that, as the answer itself may need the thread.
            self.stream.stop()
            if not sys.is_finalizing():  # At exit no thread can start, and a wait would never end.
                threading.Thread(target=self.end, name="answer").start()
            raise
        except BaseException:
            self.stream.stop()
            self.end()
            raise
        self.end()

    def end(self) -> None:
        """Process the remaining events, store them, and remember how to prove the answer."""
        with suppress(StrataError):
            for event in self.stream:
                self.take(event)
        self.recorder.close()
        method, generation, started = self.request.method, self.request.generation, self.started
        if not self.recorder.grown or started is None:
            return
        run, continued = self.recorder.run, self.recorder.continued
        if started.info == self.core.current.info:
            current = self.core.current
            current.plain = seen_in(self.recorder.tally.metrics()) or current.plain
        with suppress(StrataError), self.core.database.at_once():
            self.core.stacks.learn(self.request, run)
        if continued:
            most = min(generation.max_tokens + len(continued.tokens), MOST_TOKENS)
            generation = replace(generation, max_tokens=most)
        self.finished = FinishedAnswer(
            started.prompt,
            started.info,
            generation,
            method,
            run,
            started.calibration,
            self.recorder.run_id or None,
            self.request.conversation,
            all(map(keeps_text_of, parts_of(run))),
            continued is None or continued.exact and one_run(run),
            self.request.prediction,
        )
        self.core.history.last[self.request.owner, self.request.conversation] = self.finished


@dataclass(frozen=True, slots=True)
class Answering:
    core: Core
    prove: Callable[[str, str, FinishedAnswer], None]
    """Proves an answer in the background."""

    def answer(
        self, owner: str, conversation_id: str, preferences: Preferences
    ) -> Generator[Update | Waiting | None, None, None]:
        """Answer the user's last message. None comes as soon as the engine was asked, and the last
        update has a `finish`.

        Closing the iterator early keeps what was emitted. Raises Cancelled if the answer was
        stopped before its turn, and Busy.
        """
        chat = self.core.chat
        with self.core.tasks.begin(owner, conversation_id, requested=True) as task:
            target = task.target = task.target or chat.unanswered(owner, conversation_id)
            before = chat.progress(owner, conversation_id, target)
            try:
                yield from self.decoded(owner, conversation_id, preferences, task, target)
                return
            except EngineDied:
                if chat.progress(owner, conversation_id, target) != before:
                    raise
            # No text was lost, so the answer is tried once more with the next engine.
            yield from self.core.revival.awaited(task)
            yield from self.decoded(owner, conversation_id, preferences, task, target)

    def decoded(
        self,
        owner: str,
        conversation_id: str,
        preferences: Preferences,
        task: Task,
        target: AnswerTarget,
    ) -> Generator[Update | Waiting | None, None, None]:
        yield from self.core.revival.loaded(task)
        continued = self.core.chat.started_answer(owner, conversation_id, target)
        generation = chosen(continued, preferences) if continued else preferences.seeded()
        prediction = self.core.chat.prediction(owner, conversation_id, target.after)
        # The limit holds for what an answer adds to the text that it repeats. A text has at most
        # about half as many tokens as characters.
        most = min(generation.max_tokens + len(prediction) // 2, MOST_TOKENS)
        generation = replace(generation, max_tokens=most)
        request = Request(
            tuple(self.core.chat.prompt(owner, conversation_id, target.after)),
            (),
            generation,
            preferences.chosen(),
            self.core.stacks.profile_for(generation.sampling),
            owner,
            conversation_id,
            prediction=prediction,
            tools=self.core.tool_servers.offered(),
        )
        if continued:
            request = continuing(request, continued, self.core.engine.state.info)
        recorder = Recorder(
            self.core.database,
            owner,
            conversation_id,
            target.after,
            generation.sampling.seed,
            partial(self.core.notices.tried, owner),
            continued,
            partial(self.core.notices.keep, owner),
        )
        stream = task.stop.start(lambda: self.core.engine.generate(request))
        growing = RunningAnswer(self.core, request, stream, recorder)
        yield from growing.updates()
        if preferences.check and growing.finished:
            self.prove(owner, conversation_id, growing.finished)


KEPT = 16
"""How many finished answers to remember, for pages that have yet to see the end."""

log = logging.getLogger(__name__)


class Bell:
    """Wakes waiters in event loops. Any thread may ring it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.listening: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    @contextmanager
    def heard(self) -> Iterator[asyncio.Event]:
        """An event of the running loop that every ring sets, until the block ends."""
        event = asyncio.Event()
        with self.lock:
            self.listening[event] = asyncio.get_running_loop()
        try:
            yield event
        finally:
            with self.lock:
                del self.listening[event]

    def ring(self) -> None:
        with self.lock:
            for event, loop in self.listening.items():
                with suppress(RuntimeError):  # The loop has ended, with its waiters.
                    loop.call_soon_threadsafe(event.set)


class Answer:
    """One answer that pages can watch.

    `ahead` is how many requests come before it in the queue, 0 once its turn has come; `loading`
    says that one of them loads a model. `target` says which answer it is, None for an answer to the
    last message. `update` is the answer so far, None before its first step. Once the answer is
    `over` nothing changes any more, and `error` says what went wrong, "" if nothing did.
    """

    def __init__(self, owner: str, conversation: str, target: AnswerTarget | None = None) -> None:
        self.owner, self.conversation, self.target = owner, conversation, target
        self.token = secrets.token_urlsafe(18)
        self.bell = Bell()
        self.ahead, self.loading = 0, False
        self.update: Update | None = None
        self.error = ""
        self.over = False

    @property
    def tokens(self) -> int:
        return self.update.tokens if self.update else 0

    @property
    def message_id(self) -> str:
        """The id of the answer's message, "" until it is stored."""
        return self.update.recorder.message_id if self.update else ""

    def run(self, items: Iterator[Update | Waiting | None]) -> None:
        while self.take(items):
            pass

    def take(self, items: Iterator[Update | Waiting | None]) -> bool:
        """Wait for the next of the items; returns whether there may be more."""
        more = False
        try:
            item = next(items)
            more = True
            if isinstance(item, Waiting):
                self.ahead, self.loading = item.ahead, item.loading
            elif item is not None:
                self.ahead, self.update = 0, item
        except (StopIteration, Cancelled):
            pass  # If it was stopped before its turn, there is nothing to show.
        except StrataError as error:
            self.error = str(error)
        except Exception as error:
            log.exception("An answer broke off.")
            self.error = f"The answer was interrupted: {error!r}. Its beginning is kept. Ask again."
        finally:
            self.over = not more
            self.bell.ring()
        return more


class Generations:
    """The answers of all owners. `answer` makes one, like `Answering.answer`, whose first item must
    not wait for the model; `target` says which answer was requested last in a conversation."""

    def __init__(
        self,
        answer: Callable[[str, str, Preferences], Iterator[Update | Waiting | None]],
        target: Callable[[str, str], AnswerTarget | None] = lambda owner, conversation: None,
    ) -> None:
        self.answer, self.target = answer, target
        self.known: dict[str, Answer] = {}
        self.lock = threading.Lock()

    def start(self, owner: str, conversation: str, preferences: Preferences) -> Answer:
        started = Answer(owner, conversation, self.target(owner, conversation))
        with self.lock:
            over = [answer for answer in self.known.values() if answer.over]
            for answer in over[: max(0, len(over) - KEPT + 1)]:
                del self.known[answer.token]
            self.known[started.token] = started
        items = self.answer(owner, conversation, preferences)
        # The first item comes once the engine was asked. Another thread would compete with this
        # one, which now draws the page, and the engine would be asked later.
        if started.take(items):
            threading.Thread(target=started.run, args=(items,), name="answer", daemon=True).start()
        return started

    def find(self, owner: str, conversation: str) -> Answer | None:
        with self.lock:
            for answer in reversed(self.known.values()):
                if (answer.owner, answer.conversation) == (owner, conversation) and not answer.over:
                    return answer
        return None

    def get(self, token: str) -> Answer | None:
        with self.lock:
            return self.known.get(token)
