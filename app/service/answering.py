"""From the user's last message to an answer that is stored.

The answer is stored while it grows, so a crash of this program, or of the engine's, costs a second
at most.
"""

import threading
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, replace

from app.service.chat import Chat
from app.service.comparison import Pace
from app.service.continuing import chosen, going_on, keeps_text_of, one_run, parts_of
from app.service.current import Current
from app.service.draft_models import Stacks
from app.service.history import Answered, History
from app.service.notices import Notices
from app.service.preferences import Preferences
from app.service.recorder import UPDATE_SECONDS, Recorder, Update
from app.service.revival import Revival
from app.service.stores import Kept, Stores
from app.service.tasks import Task, Tasks, Wanted
from engine.engine import (
    Engine,
    Event,
    Request,
    Started,
    StoredContextLog,
    StoredPastAnswers,
    WantedContextLog,
    WantedPastAnswers,
    answered,
)
from engine.errors import EngineDied, StrataError
from engine.queue import Waiting
from engine.runs import planned
from engine.streams import Stream


class Growing:
    """One answer as it grows: what it says is recorded, what it teaches is stored."""

    def __init__(
        self,
        request: Request,
        stream: Stream[Event],
        recorder: Recorder,
        stores: Stores,
        history: History,
        kept: Kept,
        stacks: Stacks,
    ) -> None:
        self.request, self.stream, self.recorder = request, stream, recorder
        self.stores, self.history, self.kept, self.stacks = stores, history, kept, stacks
        self.started: Started | None = None
        self.events = answered(stream, self.recall)

    def recall(
        self, wanted: WantedPastAnswers | WantedContextLog
    ) -> StoredPastAnswers | StoredContextLog:
        """What the engine asks for."""
        if isinstance(wanted, WantedPastAnswers):
            self.kept = replace(self.kept, wiped=self.stores.past_answers.wiped[self.kept.owner])
        return self.stores.recall(wanted, self.kept.owner, self.kept.conversation)

    def updates(self) -> Generator[Update | Waiting, None, None]:
        """The answer at most every UPDATE_SECONDS; closing them early ends it there."""
        pace = Pace(UPDATE_SECONDS)
        try:
            for event in self.events:
                if isinstance(event, Started):
                    self.started = event
                    self.kept = replace(self.kept, info=event.info)
                    method, generation = self.request.method, self.request.generation
                    told = event.told if self.request.said else None
                    plan = planned(event.info, method, generation, event.thinks)
                    self.recorder.begin(plan, event.prompt, told)
                    self.recorder.thinks = event.thinks
                elif isinstance(event, Waiting):
                    yield event
                elif not self.stores.save(event, self.kept):
                    self.recorder.add(event)
                    if self.recorder.steps and (self.recorder.finish or pace.due()):
                        yield self.recorder.update(self.started.dropped if self.started else 0)
        except GeneratorExit:
            # Who stops looking stops the answer; what it said and taught by then is kept. Nobody
            # waits for that: it may be any thread that notices, also one the answer needs.
            self.stream.stop()
            threading.Thread(target=self.end, name="answer").start()
            raise
        except BaseException:
            self.stream.stop()
            self.end()
            raise
        self.end()

    def end(self) -> None:
        """Take in what is left, store it, and remember what it takes to prove the answer."""
        with suppress(StrataError):
            for event in self.events:
                if not self.stores.save(event, self.kept):
                    self.recorder.add(event)
        self.recorder.close()
        method, generation, started = self.request.method, self.request.generation, self.started
        if not self.recorder.grown or started is None:
            return
        run, begun = self.recorder.run, self.recorder.begun
        with suppress(StrataError):
            self.stacks.learn(self.request, run)
        if begun:
            most = generation.max_tokens + len(begun.said)
            generation = replace(generation, max_tokens=most)
        self.history.last[self.kept.owner, self.kept.conversation] = Answered(
            started.prompt,
            started.info,
            generation,
            method,
            run,
            started.calibration,
            self.recorder.run_id or None,
            all(map(keeps_text_of, parts_of(run))),
            begun is None or begun.exact and one_run(run),
        )


@dataclass(frozen=True, slots=True)
class Answering:
    """See the module's docstring."""

    engine: Engine
    tasks: Tasks
    current: Current
    stacks: Stacks
    chat: Chat
    stores: Stores
    history: History
    notices: Notices
    revival: Revival

    def answer(
        self, owner: str, conversation_id: str, preferences: Preferences
    ) -> Generator[Update | Waiting, None, None]:
        """Answer the user's last message; the last update has a `finish`.

        Closing the iterator early keeps what was emitted. Raises Cancelled when it was stopped
        before its turn had come, and Busy.
        """
        with self.tasks.begin(owner, conversation_id, asked=True) as task:
            wanted = task.wanted = task.wanted or self.chat.unanswered(owner, conversation_id)
            said = self.chat.said(owner, conversation_id, wanted)
            try:
                yield from self.decoded(owner, conversation_id, preferences, task, wanted)
                return
            except EngineDied:
                if self.chat.said(owner, conversation_id, wanted) != said:
                    raise
            # Nothing of it was said: the next engine may do better.
            yield from self.revival.awaited(task)
            yield from self.decoded(owner, conversation_id, preferences, task, wanted)

    def decoded(
        self,
        owner: str,
        conversation_id: str,
        preferences: Preferences,
        task: Task,
        wanted: Wanted,
    ) -> Generator[Update | Waiting, None, None]:
        """`answer`, as one task."""
        yield from self.revival.loaded(task)
        begun = self.chat.begun(owner, conversation_id, wanted)
        generation = chosen(begun, preferences) if begun else preferences.seeded()
        request = Request(
            tuple(self.chat.prompt(owner, conversation_id, wanted.after)),
            (),
            generation,
            preferences.chosen(),
            self.stacks.profile_for(generation.sampling),
            owner,
            conversation_id,
        )
        if begun:
            request = going_on(request, begun, self.engine.state.info)
        recorder = Recorder(
            self.stores.database,
            owner,
            conversation_id,
            wanted.after,
            generation.sampling.seed,
            lambda write: self.notices.keep(owner, write),
            begun,
        )
        wiped = self.stores.past_answers.wiped[owner]
        kept = Kept(owner, conversation_id, self.current.info, wiped)
        stream = task.stop.start(lambda: self.engine.generate(request))
        growing = Growing(request, stream, recorder, self.stores, self.history, kept, self.stacks)
        yield from growing.updates()
