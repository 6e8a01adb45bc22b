"""The one object that the tabs talk to: a loaded model, the stores, and who may touch what.

Everything is scoped by owner. One answer is decoded at a time; what the user said is stored before
decoding begins and the answer while it grows, so a crash costs a second at most. A store
that fails costs memory, never the answer: it becomes a notice. Whatever decodes looks at the model
on the model's thread alone, so that another one can take its place between two answers.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from app.comparison import (
    UPDATE_SECONDS,
    Pace,
    PlainSpeed,
    Progress,
    Proof,
    Timed,
    keeps_text,
)
from app.costs import Costs
from app.loaded import Loaded, open_table
from app.memory import Latest, Memory
from app.model_thread import ModelThread
from app.models import Models
from app.past import Pasts
from app.preferences import Preferences
from app.proofs import compared, proved
from app.reading import READING, USUAL, Reading
from app.rooms import Answered, Guarded, Room, Rooms
from app.stacks import Stacks
from app.turns import MOST_WAITING, Runs, Waiting
from app.writer import Update, Writer
from engine.backends.base import Backend
from engine.chat import Chat
from engine.compare import UNKNOWN, Speedup
from engine.costs import CostCurve
from engine.drafters.base import Drafter
from engine.drafters.context import ContextTier
from engine.errors import Cancelled, PromptError, StorageError
from engine.methods import Databases, Method, drafters_of
from engine.settings import Generation, Runtime, Sampling
from engine.types import Message, Prefill
from storage.contexts import ContextStore
from storage.conversations import Conversations
from storage.database import Database
from storage.statistics import StatisticsTable
from storage.traces import Kind, Traces

T = TypeVar("T")

TITLE = 48
UNTITLED = "New conversation"


class Session:
    """See the module's docstring. `guests` means that others may come in: they only chat.

    `folders` are where statistics files lie, one per tokenizer.
    """

    def __init__(
        self,
        backend: Backend,
        database: Database,
        guests: bool = False,
        reading: Reading = READING,
        folders: Sequence[Path] = (),
    ) -> None:
        self.database, self.guests, self.folders = database, guests, folders
        self.model = ModelThread(each=1 if guests else MOST_WAITING)
        self.runs = Runs()
        self.rooms, self.memory = Rooms(), Memory()
        self.notices: Latest[str, list[str]] = Latest()
        self.viewing: Latest[str, str | None] = Latest()
        self.views: Latest[str, str] = Latest()
        self.loaded = self.dressed(backend)
        self.stacks = Stacks(self.loaded, database, self.model, reading)
        self.models = Models(self, reading)

    # the model

    def dressed(
        self,
        backend: Backend,
        source: str = "",
        runtime: Runtime = USUAL,
        report: Callable[[str], None] = lambda problem: None,
    ) -> Loaded:
        """A backend with all that it takes to chat with it; `report` is told what is damaged."""
        info = backend.info
        return Loaded(
            backend,
            Chat(backend),
            Costs(backend, self.database),
            Pasts(self.database, info.fingerprint, self.keep),
            open_table(info.tokenizer_fingerprint, self.folders, report),
            source,
            runtime,
        )

    def swap(self, loaded: Loaded) -> None:
        """Let another model take the place of the loaded one, on the model's thread.

        Conversations stay. What was opened or loaded for the old model goes with it.
        """
        self.loaded = loaded
        self.stacks.aim(loaded)
        self.rooms.clear()

    @property
    def backend(self) -> Backend:
        """The loaded model."""
        return self.loaded.backend

    @property
    def chat(self) -> Chat:
        """The loaded model in conversation."""
        return self.loaded.chat

    @property
    def costs(self) -> Costs:
        """What its forwards cost."""
        return self.loaded.costs

    @property
    def pasts(self) -> Pasts:
        """What it said to each owner."""
        return self.loaded.pasts

    @property
    def statistics(self) -> StatisticsTable | None:
        """The statistics for its tokenizer."""
        return self.loaded.statistics

    @property
    def plain(self) -> PlainSpeed:
        """How fast it decodes without drafts."""
        return self.loaded.plain

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
        self.rooms.close(owner, conversation_id)

    def say(self, owner: str, conversation_id: str | None, text: str) -> str:
        """Store what the user said; makes a conversation if there is none. Returns its id.

        Raises PromptError, with nothing stored, for an empty message or one that cannot fit, and
        Busy while too much of the owner's waits for the model.
        """
        self.chat.check(text)
        self.model.turns.check(owner)
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

    def edit(self, owner: str, conversation_id: str, position: int, text: str) -> None:
        """Say something else at a position; what followed it is gone."""
        self.chat.check(text)
        self.model.turns.check(owner)
        store = self.conversations(owner)
        with self.database.write():
            store.truncate(conversation_id, position)
            store.append(conversation_id, "user", text)
        self.runs.ask(owner, conversation_id)

    def drop_answer(self, owner: str, conversation_id: str) -> None:
        """Take back what follows the user's last message, before answering it again."""
        self.model.turns.check(owner)
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
    ) -> Iterator[Update | Waiting]:
        """Answer the user's last message; the last update has a `finish`.

        Closing the iterator early keeps what was emitted. Raises Cancelled when it was stopped
        before its turn had come, and Busy.
        """
        with self.runs.begin(owner, conversation_id, asked=True) as run:
            items = self.decoded(owner, conversation_id, preferences, run.stop.is_set)
            yield from self.model.stream(items, run)

    def decoded(
        self,
        owner: str,
        conversation_id: str,
        preferences: Preferences,
        cancelled: Callable[[], bool],
    ) -> Generator[Update, None, None]:
        """`answer`, on the model's thread."""
        method, generation = preferences.chosen(), preferences.seeded()
        messages = self.prompt_messages(owner, conversation_id)
        room = self.room(owner, conversation_id)
        self.memory.fit(self.loaded, self.rooms, owner)
        self.chat.tokens = room.tokens
        prompt, dropped = self.chat.fit(messages)
        context = room.databases.context
        if context.log and not context.seen:
            # It was opened again: all but the last message was logged before.
            fresh = len(self.backend.tokenize(self.backend.render(messages[-1:])))
            context.expect(prompt[: max(0, len(prompt) - fresh)])
        sampling = generation.sampling
        drafters = self.drafters(owner, method, room.databases, sampling, cancelled)
        costs = self.costs.of(method) if drafters else None
        writer = Writer(
            self.conversations(owner),
            conversation_id,
            generation.sampling.seed,
            lambda write: self.keep(owner, write),
        )
        trusted = room.databases.calibration.rows()
        pace = Pace(UPDATE_SECONDS)
        try:
            for event in self.chat.reply(
                prompt, drafters, generation, method.drafting, cancelled, costs
            ):
                writer.add(event)
                if writer.steps and (writer.finish or pace.due()):
                    yield writer.update(dropped)
        finally:
            room.tokens = self.chat.tokens
            writer.close()
            timed = writer.run(method.name)
            if timed.tokens:
                run_id = self.save(owner, conversation_id, timed, generation, method)
                same_text = keeps_text(method, generation.sampling)
                writer.flush(run_id)
                room.answered = Answered(
                    tuple(prompt), generation, method, timed, trusted, run_id, same_text
                )
                self.learn(owner, room.databases, costs)

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

    def room(self, owner: str, conversation_id: str) -> Room:
        """The open conversation, its context tier warm from what was stored."""
        fingerprint = self.backend.info.tokenizer_fingerprint
        store = ContextStore(self.database, owner)

        def save(tokens: Sequence[int]) -> None:
            self.keep(owner, lambda: store.append(conversation_id, fingerprint, tokens))

        past = self.pasts.of(owner)

        def make() -> Room:
            log = self.keep(owner, lambda: store.load(conversation_id, fingerprint)) or []
            context = ContextTier(log, save, ContextStore.CAP)
            return Room(Databases(context, past.tier, self.statistics, past.calibration))

        return self.rooms.get(owner, conversation_id, make)

    def learn(self, owner: str, databases: Databases, costs: CostCurve | None) -> None:
        """Keep what an answer taught beside its n-grams, which the model tier stores itself."""
        self.pasts.save(owner, databases.calibration)
        if costs is not None:
            self.keep(owner, self.costs.save)
        if self.pasts.prune(owner):
            self.rooms.close(owner)
        self.memory.fit(self.loaded, self.rooms, owner)

    def wipe_model(self, owner: str) -> None:
        """Forget what this model said to the owner, and what that taught about the evidence."""
        self.pasts.wipe(owner)
        self.rooms.close(owner)

    def wipe_context(self, owner: str, conversation_id: str) -> None:
        """Forget the token log of a conversation; its messages stay."""
        ContextStore(self.database, owner).clear(conversation_id)
        self.rooms.close(owner, conversation_id)

    def drafters(
        self,
        owner: str,
        method: Method,
        databases: Databases,
        sampling: Sampling,
        cancelled: Callable[[], bool],
    ) -> list[Drafter]:
        """What drafts for one answer, its faults become notices. Draft models that read a prompt
        end that once it is cancelled.

        Raises SettingError for draft models that are not there.
        """
        family = self.stacks.family_for(sampling)
        found = drafters_of(method, databases, family, sampling, cancelled)
        return [Guarded(d, lambda text: self.report(owner, text)) for d in found]

    # measuring

    def measure_costs(self, progress: Callable[[float], None] = lambda share: None) -> None:
        """Measure what forwards cost, in about two seconds, once nobody uses the model."""
        self.model.run(lambda: self.costs.measure(progress))

    def prove(self, owner: str, conversation_id: str) -> Iterator[Proof | Waiting]:
        """Decode the last answer again, plainly and with drafts, from the same prompt and seed."""
        with self.runs.begin(owner, conversation_id) as run:
            proofs = proved(self, owner, conversation_id, run.stop.is_set)
            yield from self.model.stream(proofs, run)

    def compare(
        self, owner: str, text: str, system: str, preferences: Preferences, repeats: int
    ) -> Iterator[Progress | Waiting]:
        """Plain against accelerated on one prompt, each run with a fresh context tier.

        Between two pairs others may use the model. Stopped while it waits for them, it ends with
        the pairs there are.
        """
        messages = [Message("system", system.strip())] if system.strip() else []
        messages.append(Message("user", text))
        last: Progress | None = None
        with self.runs.begin(owner, "") as run:
            pairs = compared(self, owner, messages, preferences, repeats, run.stop.is_set)
            try:
                for item in self.model.stream(pairs, run):
                    last = item if isinstance(item, Progress) else last
                    yield item
            except Cancelled:
                if last is None:
                    raise
                yield replace(last, running=None, cancelled=True)

    def save(
        self,
        owner: str,
        conversation_id: str | None,
        timed: Timed,
        generation: Generation,
        method: Method,
        kind: Kind = "chat",
        gained: Speedup = UNKNOWN,
    ) -> str | None:
        """Store a run with its steps; returns its id, or None when the store refused."""
        figures, info = timed.metrics, self.backend.info
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
