"""The one object that the tabs talk to: the engine, the stores, and who may touch what.

Everything is scoped by owner. What the user said is stored before decoding begins and the answer
while it grows, so a crash of this program, or of the engine's, costs a second at most. A store that
fails costs memory, never the answer: it becomes a notice. The engine stores nothing: what it learns
comes as values, is stored here, and is given back when the engine asks for it.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from app.service.comparison import Pace, Progress, Proof
from app.service.costs import Costs
from app.service.draft_models import Stacks
from app.service.generation import Generations
from app.service.gguf_support import GgufSupport
from app.service.latest import Latest
from app.service.learned import PastAnswersStore
from app.service.models import Models
from app.service.preferences import Preferences
from app.service.proofs import Answered, compared, proved
from app.service.recorder import UPDATE_SECONDS, Recorder, Update
from app.service.revival import Revival
from app.service.runs import Run, Runs
from engine.backends.base import BackendInfo
from engine.compare import UNKNOWN, Speedup
from engine.engine import (
    Calibrated,
    ContextLogged,
    CostsMeasured,
    Engine,
    NgramsLearned,
    Notice,
    Request,
    Started,
    State,
    StoredContextLog,
    WantedContextLog,
    WantedPastAnswers,
    answered,
)
from engine.errors import EngineDied, ModelError, PromptError, StorageError, StrataError
from engine.loaded import NO_MODEL, NO_MODEL_INFO, NoModel
from engine.methods import Method
from engine.models.loaders import MODEL_LOADERS, ModelLoaders
from engine.queue import Waiting, before_it_began
from engine.runs import Timed, keeps_text
from engine.settings import Generation
from engine.types import Message, Prefill
from storage.contexts import ContextStore
from storage.conversations import Conversations
from storage.database import Database
from storage.statistics import StatisticsTable, open_table
from storage.traces import Kind, Traces

T = TypeVar("T")

TITLE = 48
UNTITLED = "New conversation"
LOOK_SECONDS = 0.25
"""How often an answer that waits for the first model looks whether it was stopped."""
PROVABLE = 16
"""Conversations whose last answer is remembered so that it can be proved."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What an answer needs of the stores: whose it is, in which conversation, by which model, and
    how often the owner's past had been wiped when it began."""

    owner: str
    conversation: str
    info: BackendInfo
    wiped: int


class Session:
    """See the module's docstring. `guests` means that others may come in: they only chat.

    `folders` are where statistics files lie, one per tokenizer; `loaders` finds models. `coming` is
    what is known of the first model before it is there.
    """

    def __init__(
        self,
        engine: Engine,
        database: Database,
        guests: bool = False,
        loaders: ModelLoaders = MODEL_LOADERS,
        folders: Sequence[Path] = (),
        coming: BackendInfo = NO_MODEL_INFO,
    ) -> None:
        self.engine, self.database = engine, database
        self.guests, self.folders, self.coming = guests, folders, NoModel(coming).info
        self.runs = Runs(lambda: self.revival.end())
        self.notices: Latest[str, list[str]] = Latest()
        self.viewing: Latest[str, str | None] = Latest()
        self.views: Latest[str, str] = Latest()
        self.drawn: Latest[str, tuple[str, ...]] = Latest()
        self.answered: Latest[tuple[str, str], Answered] = Latest(PROVABLE)
        self.past_answers = PastAnswersStore(database, self.keep, partial(engine.forget, past=True))
        self.costs = Costs(engine, database)
        self.stacks = Stacks(engine, database, loaders)
        self.models = Models(self, loaders)
        self.gguf = GgufSupport(guests)
        self.revival = Revival(self)
        self.generations = Generations(self.answer)
        self.state = engine.state
        self.plain = self.state.plain
        self.table: tuple[str, StatisticsTable | None] | None = None
        engine.watch = self.follow
        self.follow(engine.state)

    # the model

    def follow(self, state: State) -> None:
        """Another model is there, or other draft models are."""
        if state.plain != self.state.plain:
            self.plain = state.plain
        self.table = None
        self.state = state
        self.revival.follow(state)
        self.stacks.follow(state)

    @property
    def info(self) -> BackendInfo:
        """The loaded model, or the first one that is to come."""
        state = self.engine.state
        return state.info if state.there or state.info.fingerprint else self.coming

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens of the loaded model."""
        return self.engine.texts([tokens])[0]

    @property
    def statistics(self) -> StatisticsTable | None:
        """The statistics for the loaded model's tokenizer, to look into."""
        tokenizer = self.info.tokenizer_fingerprint
        if self.table is None or self.table[0] != tokenizer:
            self.table = tokenizer, open_table(self.folders, tokenizer, lambda problem: None)
        return self.table[1]

    def recall(self, wanted: Any, owner: str, conversation_id: str) -> Any:
        """What the engine asks for, as it is stored."""
        if isinstance(wanted, WantedPastAnswers):
            return self.past_answers.recall(owner, wanted.fingerprint)
        assert isinstance(wanted, WantedContextLog)
        store, fingerprint = ContextStore(self.database, owner), wanted.tokenizer_fingerprint
        log = self.keep(owner, lambda: store.load(conversation_id, fingerprint)) or []
        return StoredContextLog(log, ContextStore.CAP)

    def store(self, learned: Any, kept: Kept) -> bool:
        """Store what the engine learned; False for what is not to be stored."""
        owner, info = kept.owner, kept.info
        if isinstance(learned, ContextLogged):
            log = ContextStore(self.database, owner)
            where = kept.conversation, info.tokenizer_fingerprint
            self.keep(owner, lambda: log.append(*where, learned.tokens))
        elif isinstance(learned, NgramsLearned):
            self.past_answers.learn(owner, info.fingerprint, kept.wiped, learned.grams)
            self.past_answers.prune(owner, info.fingerprint, learned.size)
        elif isinstance(learned, Calibrated):
            self.past_answers.save(owner, info.fingerprint, kept.wiped, learned.rows)
        elif isinstance(learned, CostsMeasured):
            self.keep(owner, lambda: self.costs.save(learned.info, learned.costs))
        elif isinstance(learned, Notice):
            self.report(owner, learned.text)
        else:
            return False
        return True

    # who, and what went wrong

    @staticmethod
    def owner(username: str | None, browser: str | None) -> str:
        """Whose data it is. Guests share a password, so their browser tells them apart."""
        return "local" if username is None else f"{username}:{browser or ''}"

    def report(self, owner: str, notice: str) -> None:
        """Remember a notice for the owner, once."""
        waiting = self.notices.setdefault(owner, [])
        if notice not in waiting:
            waiting.append(notice)

    def take_notices(self, owner: str) -> list[str]:
        """What the owner has not been told yet."""
        return self.notices.pop(owner, [])

    def keep(self, owner: str, write: Callable[[], T]) -> T | None:
        """Do a write that the answer can do without; a failure becomes a notice."""
        try:
            return write()
        except StorageError as error:
            self.report(owner, str(error))
            return None

    # conversations

    def conversations(self, owner: str) -> Conversations:
        """The owner's conversations."""
        return Conversations(self.database, owner)

    def delete(self, owner: str, conversation_id: str) -> None:
        """Delete a conversation with all that was derived from it but the model tier."""
        self.stop(owner, conversation_id)
        self.conversations(owner).delete(conversation_id)
        self.answered.pop((owner, conversation_id), None)
        self.engine.forget(owner, conversation_id)

    def say(self, owner: str, conversation_id: str | None, text: str) -> str:
        """Store what the user said; makes a conversation if there is none. Returns its id.

        Raises PromptError, with nothing stored, for an empty message or one that cannot fit, and
        Busy while too much of the owner's waits for the model.
        """
        self.check(owner, text)
        store = self.conversations(owner)
        if conversation_id is None:
            conversation_id = store.create().id
        if not store.messages(conversation_id):
            title = " ".join(text.split())
            if store.get(conversation_id).title == UNTITLED:
                store.rename(conversation_id, title[:TITLE].rstrip() or UNTITLED)
        store.append(conversation_id, "user", text)
        self.runs.ask(owner, conversation_id)
        return conversation_id

    def check(self, owner: str, text: str) -> None:
        """Raise PromptError for a message that cannot be answered, and Busy.

        While no model is there and one is being loaded, nobody knows how long a message may be:
        that is found out when it is answered.
        """
        if not text.strip():
            raise PromptError("The message is empty. Write something first.")
        if self.engine.state.there:
            with suppress(EngineDied):  # It comes back, and then answers what was said meanwhile.
                self.engine.check(text)
                self.engine.check_turn(owner)
        elif self.models.loading is None and not self.revival.busy:
            raise ModelError(NO_MODEL)

    def awaited(self, run: Run) -> Iterator[Waiting]:
        """Wait for the model that is being loaded, if none is there. Raises Cancelled."""
        while not self.engine.state.there and (self.models.loading or self.revival.busy):
            if run.stop.is_set():
                raise before_it_began()
            yield Waiting(1, loading=True)
            self.models.over.wait(LOOK_SECONDS)

    def edit(self, owner: str, conversation_id: str, position: int, text: str) -> None:
        """Say something else at a position; what followed it is gone."""
        self.check(owner, text)
        store = self.conversations(owner)
        with self.database.write():
            store.truncate(conversation_id, position)
            store.append(conversation_id, "user", text)
        self.runs.ask(owner, conversation_id)

    def drop_answer(self, owner: str, conversation_id: str) -> None:
        """Take back what follows the user's last message, before answering it again."""
        with suppress(EngineDied):
            self.engine.check_turn(owner)
        store = self.conversations(owner)
        said = [m.position for m in store.messages(conversation_id) if m.role == "user"]
        if not said:
            raise PromptError("There is no message to answer yet. Write something first.")
        store.truncate(conversation_id, said[-1] + 1)
        self.runs.ask(owner, conversation_id)

    # answering

    def stop(self, owner: str, conversation_id: str) -> None:
        """End what the conversation's model does: after the step under way, before its first one,
        or while it still waits. A later answer is not touched."""
        self.runs.stop(owner, conversation_id)

    def answer(
        self, owner: str, conversation_id: str, preferences: Preferences
    ) -> Generator[Update | Waiting, None, None]:
        """Answer the user's last message; the last update has a `finish`.

        Closing the iterator early keeps what was emitted. Raises Cancelled when it was stopped
        before its turn had come, and Busy.
        """
        with self.runs.begin(owner, conversation_id, asked=True) as run:
            try:
                yield from self.decoded(owner, conversation_id, preferences, run)
                return
            except EngineDied:
                if self.conversations(owner).messages(conversation_id)[-1].role != "user":
                    raise
            # Nothing of it was said: the next engine may do better.
            yield from self.revival.awaited(run)
            yield from self.decoded(owner, conversation_id, preferences, run)

    def decoded(
        self, owner: str, conversation_id: str, preferences: Preferences, run: Run
    ) -> Generator[Update | Waiting, None, None]:
        """`answer`, as one run."""
        yield from self.awaited(run)
        method, generation = preferences.chosen(), preferences.seeded()
        messages = tuple(self.prompt_messages(owner, conversation_id))
        profile = self.stacks.profile_for(generation.sampling)
        request = Request(messages, (), generation, method, profile, owner, conversation_id)
        recorder = Recorder(
            self.conversations(owner),
            conversation_id,
            generation.sampling.seed,
            lambda write: self.keep(owner, write),
        )
        pace, started = Pace(UPDATE_SECONDS), None
        kept = Kept(owner, conversation_id, self.info, self.past_answers.wiped[owner])
        stream = run.stop.start(lambda: self.engine.generate(request))

        def reply(wanted: Any) -> Any:
            nonlocal kept
            if isinstance(wanted, WantedPastAnswers):
                kept = replace(kept, wiped=self.past_answers.wiped[owner])
            return self.recall(wanted, owner, conversation_id)

        events = answered(stream, reply)

        def end() -> None:
            with suppress(StrataError):
                for event in events:
                    if not self.store(event, kept):
                        recorder.add(event)
            recorder.close()
            timed = recorder.run(method.name)
            if timed.tokens and started is not None:
                self.finish(owner, conversation_id, timed, recorder, started, generation, method)

        try:
            for event in events:
                if isinstance(event, Started):
                    started = event
                    kept = replace(kept, info=event.info)
                elif isinstance(event, Waiting):
                    yield event
                elif not self.store(event, kept):
                    recorder.add(event)
                    if recorder.steps and (recorder.finish or pace.due()):
                        yield recorder.update(started.dropped if started else 0)
        except GeneratorExit:
            # Who stops looking stops the answer; what it said and taught by then is kept. Nobody
            # waits for that: it may be any thread that notices, also one the answer needs.
            stream.stop()
            threading.Thread(target=end, name="answer").start()
            raise
        except BaseException:
            stream.stop()
            end()
            raise
        end()

    def finish(
        self,
        owner: str,
        conversation_id: str,
        timed: Timed,
        recorder: Recorder,
        started: Started,
        generation: Generation,
        method: Method,
    ) -> None:
        """Store the run of an answer, and remember what it takes to prove it."""
        run_id = self.save(owner, conversation_id, timed, generation, method, started.info)
        recorder.flush(run_id)
        same_text = keeps_text(method, generation.sampling)
        self.answered[owner, conversation_id] = Answered(
            started.prompt,
            started.info,
            generation,
            method,
            timed,
            started.calibration,
            run_id,
            same_text,
        )

    def prompt_messages(self, owner: str, conversation_id: str) -> list[Message]:
        """The conversation as the model reads it; messages in a row by one role become one.

        Chat templates expect roles to take turns, and a stopped answer may be empty.
        """
        store = self.conversations(owner)
        system = store.get(conversation_id).system_prompt.strip()
        messages = [Message("system", system)] if system else []
        for stored in store.messages(conversation_id):
            if not stored.content.strip():
                continue
            if messages and messages[-1].role == stored.role:
                both = f"{messages.pop().content}\n\n{stored.content}"
                messages.append(Message(stored.role, both))
            else:
                messages.append(Message(stored.role, stored.content))
        return messages

    def wipe_model(self, owner: str) -> None:
        """Forget what this model said to the owner, and what that taught about the evidence."""
        self.past_answers.wipe(owner, self.info.fingerprint)

    def wipe_context(self, owner: str, conversation_id: str) -> None:
        """Forget the token log of a conversation; its messages stay."""
        ContextStore(self.database, owner).clear(conversation_id)
        self.engine.forget(owner, conversation_id)

    # measuring

    def measure_costs(self, progress: Callable[[float], None] = lambda share: None) -> None:
        """Measure what forwards cost, in about two seconds, once nobody uses the model."""
        self.costs.measure(progress)

    def prove(self, owner: str, conversation_id: str) -> Iterator[Proof | Waiting]:
        """Decode the last answer again, plainly and with drafts, from the same prompt and seed."""
        with self.runs.begin(owner, conversation_id) as run:
            yield from proved(self, owner, conversation_id, run)

    def compare(
        self, owner: str, text: str, system: str, preferences: Preferences, repeats: int
    ) -> Iterator[Progress | Waiting]:
        """Plain against accelerated on one prompt, each run with a fresh context tier.

        Between two runs others may use the model. Stopped while it waits for them, it ends with
        the pairs there are.
        """
        messages = [Message("system", system.strip())] if system.strip() else []
        messages.append(Message("user", text))
        with self.runs.begin(owner, "") as run:
            yield from self.awaited(run)
            yield from compared(self, owner, messages, preferences, repeats, run)

    def save(
        self,
        owner: str,
        conversation_id: str | None,
        timed: Timed,
        generation: Generation,
        method: Method,
        info: BackendInfo,
        kind: Kind = "chat",
        gained: Speedup = UNKNOWN,
    ) -> str | None:
        """Store a run with its steps; returns its id, or None when the store refused."""
        figures = timed.metrics
        prefill = timed.prefill or Prefill(0, 0)

        def write() -> str:
            stored = Traces(self.database, owner).save(
                conversation_id=conversation_id,
                model=info.name,
                fingerprint=info.fingerprint,
                method=method.name,
                settings={"generation": asdict(generation), "drafting": asdict(method.drafting)},
                prompt_tokens=prefill.tokens,
                emitted_tokens=figures.tokens,
                reused_tokens=prefill.reused,
                ttft_seconds=figures.ttft_seconds,
                decode_seconds=figures.decode_seconds,
                forwards=figures.forwards,
                finish=timed.steps[-1].finish if timed.steps else None,
                steps=timed.steps,
                speedup=gained.whole,
                decode_speedup=gained.decoding,
                kind=kind,
            )
            return stored.id

        return self.keep(owner, write)
