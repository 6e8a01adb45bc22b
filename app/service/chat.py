"""Conversations: what the user says, edits and takes back, and what the model reads of it.

A user's message is stored before anything is decoded. A message that cannot be answered is refused,
and nothing is stored. An edited message, or another answer, becomes a further version of the
earlier one. A deletion can be undone for an hour.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import replace

from app.service import called
from app.service.attachments import without_files
from app.service.history import FinishedAnswer, History, StartedAnswer, started_answer
from app.service.jobs import AnswerTarget, Tasks, later
from app.service.pages import THE_LIST, LimitedDict, ListRevisions
from app.service.revival import Revival
from app.service.rewriting import to_rewrite
from engine.engine import Engine, Event, Measured, Request, Started
from engine.errors import EngineDied, ModelError, PromptError, StorageError, StrataError
from engine.loaded import NO_MODEL
from engine.methods import METHODS
from engine.prompt import Size
from engine.settings import Generation, Sampling
from engine.streams import Stream
from engine.thinking import Splitter, answer_of
from engine.types import Message, Step, Tool
from storage import deletions
from storage.conversations import Conversations
from storage.database import Database
from storage.drafting import ContextStore
from storage.titles import title_of
from storage.traces import Traces


class Trash:
    """Purges deletions when they can no longer be undone.

    Deletions that are left when the program ends are purged when it starts again.
    """

    def __init__(self, engine: Engine, database: Database, history: History) -> None:
        self.engine, self.database, self.history = engine, database, history
        self.proofs: LimitedDict[str, tuple[tuple[str, str], FinishedAnswer]] = LimitedDict()
        """The data for proving the last answers of deleted conversations, by undo token."""
        self.watching = False
        """Whether a timer for the oldest deletion runs."""
        self.lock = threading.Lock()

    def remember(self, token: str, owner: str, conversation_id: str = "") -> None:
        finished = self.history.last.pop((owner, conversation_id), None)
        if finished is not None:
            self.proofs[token] = (owner, conversation_id), finished
        self.watch()

    def recall(self, token: str) -> None:
        key, finished = self.proofs.pop(token, (None, None))
        if key is not None and finished is not None:
            self.history.last[key] = finished

    def watch(self) -> None:
        oldest = deletions.oldest(self.database)
        with self.lock:
            if self.watching or oldest is None:
                return
            self.watching = True
        later(max(0.0, oldest + deletions.SECONDS - time.time()) + 1.0, self.sweep)

    def sweep(self) -> None:
        self.watching = False
        with suppress(StorageError):  # A closed or locked database is purged at the next start.
            for deletion in deletions.purge(self.database, deletions.SECONDS):
                self.proofs.pop(deletion.token, None)
                self.history.last.pop(deletion[:2], None)
                self.engine.forget(deletion.owner, deletion.conversation)
            self.watch()


CHARACTERS = 4
"""Characters per token, for an estimate where no tokenizer is available; about right for
English."""
NEXT = "?"
"""Placeholder for a message that is not written yet."""
QUOTED = 1_000
"""Characters of each message that the model reads to find a title."""
TOKENS, THOUGHT = 24, 1_000
"""The most tokens of a title, and of the thinking before it."""
INSTRUCTION = "Give this conversation a title of at most six words. Answer with the title alone."
UNTITLED = "New conversation"
NO_MESSAGE = "There is no message to answer yet. Write something first."


class Chat:
    def __init__(
        self,
        engine: Engine,
        database: Database,
        tasks: Tasks,
        history: History,
        revival: Revival,
        tools: Callable[[], Sequence[Tool]],
    ) -> None:
        self.engine, self.database = engine, database
        self.tasks, self.revival, self.tools = tasks, revival, tools
        self.trash = Trash(engine, database, history)
        self.lists = ListRevisions()
        self.deleted: Callable[[str, str], None] = lambda owner, conversation: None
        """Called with the owner and the id of a conversation that is being deleted."""

    def conversations(self, owner: str) -> Conversations:
        return Conversations(self.database, owner)

    def delete(self, owner: str, conversation_id: str) -> str:
        """Delete a conversation, with everything derived from it except the model tier. Returns the
        token for `undo`."""
        self.tasks.end(owner, conversation_id)
        self.deleted(owner, conversation_id)
        token = self.conversations(owner).delete(conversation_id)
        self.trash.remember(token, owner, conversation_id)
        self.engine.forget(owner, conversation_id)
        return token

    def delete_message(self, owner: str, conversation_id: str, message_id: str) -> str:
        """Delete a message and all versions of what follows it; returns the token for `undo`. An
        unfinished answer to any of these messages is stopped."""
        store, target = self.conversations(owner), self.tasks.target(owner, conversation_id)
        last = target and (target.continues or target.after)
        if last and store.has(conversation_id, last):
            above = store.messages(conversation_id, pieces=False, to=last)
            if message_id in [message.id for message in above]:
                self.tasks.end(owner, conversation_id)
        token = store.delete_message(conversation_id, message_id)
        self.trash.remember(token, owner)
        return token

    def wipe_context(self, owner: str, conversation_id: str) -> None:
        """Forget the token log of a conversation; its messages stay."""
        ContextStore(self.database, owner).clear(conversation_id)
        self.engine.forget(owner, conversation_id)

    def undo(self, owner: str, token: str) -> str:
        """Undo a deletion; returns the id of the conversation. Raises StorageError."""
        conversation_id = self.conversations(owner).undo(token)
        self.trash.recall(token)
        return conversation_id

    def revision(self, owner: str, conversation_id: str) -> int:
        """A number that grows with every change of a conversation: its title, its messages, the
        versions shown. For THE_LIST it grows with every change of the list of conversations."""
        store = self.conversations(owner)
        if conversation_id == THE_LIST:
            return self.lists.number(owner, store.outline)
        return store.revision(conversation_id)

    def say(self, owner: str, conversation_id: str | None, text: str) -> str:
        """Store a user's message, in a new conversation if there is none. Returns the
        conversation's id.

        Raises PromptError, with nothing stored, for an empty message or one that cannot fit, and
        Busy while too many of the owner's requests wait for the model.
        """
        self.check(owner, text)
        store = self.conversations(owner)
        if conversation_id is None:
            conversation_id = store.create().id
        if store.last(conversation_id) is None and store.get(conversation_id).title == UNTITLED:
            store.rename(conversation_id, title_of(without_files(text)) or UNTITLED)
        message = store.append(conversation_id, "user", text)
        self.tasks.ask(owner, conversation_id, AnswerTarget(message.id))
        return conversation_id

    def check(self, owner: str, text: str) -> None:
        """Raise PromptError for a message that cannot be answered, and Busy.

        While the first model is being loaded, the longest possible message is not known yet, so its
        length is checked when it is answered.
        """
        if not text.strip():
            raise PromptError("The message is empty. Write something first.")
        if self.engine.state.is_loaded:
            with suppress(EngineDied):  # The engine restarts, and then answers.
                self.engine.check(owner, text)
        elif not self.revival.coming:
            raise ModelError(NO_MODEL)

    def edit(self, owner: str, conversation_id: str, message_id: str, text: str) -> str:
        """Replace a user's message; returns the id of the new message. The old message and what
        followed it stay as another version."""
        self.check(owner, text)
        store = self.conversations(owner)
        with self.database.write():
            *_, old = store.messages(conversation_id, pieces=False, to=message_id)
            if old.role != "user":
                raise PromptError(
                    "Only your own messages can be edited. Regenerate the answer instead."
                )
            message = store.append(conversation_id, "user", text, version_of=message_id)
            store.show(conversation_id, message.id)
        self.tasks.ask(owner, conversation_id, AnswerTarget(message.id))
        return message.id

    def again(self, owner: str, conversation_id: str, message_id: str | None = None) -> None:
        """Request another answer to a user's message, or to the result of a tool. The earlier
        answers stay as other versions.

        `message_id` is that message, or an answer to it; None means the last one.
        """
        with suppress(EngineDied):
            self.engine.check(owner)
        store = self.conversations(owner)
        messages = store.messages(conversation_id, pieces=False, to=message_id)
        questions = [message.id for message in messages if message.role != "assistant"]
        if not questions:
            raise PromptError(NO_MESSAGE)
        if message_id is not None:
            store.show(conversation_id, message_id)
        self.tasks.ask(owner, conversation_id, AnswerTarget(questions[-1]))

    def continue_answer(self, owner: str, conversation_id: str) -> None:
        """Request a continuation of the last answer, or an answer if the last message has none.

        Raises PromptError for an answer that the model ended by itself.
        """
        with suppress(EngineDied):
            self.engine.check(owner)
        messages = self.conversations(owner).messages(conversation_id)
        if not messages:
            raise PromptError(NO_MESSAGE)
        last = messages[-1]
        if last.role != "assistant":
            target = AnswerTarget(last.id)
        else:
            if started_answer(self.database, owner, last).run.finish == "eos":
                raise PromptError(
                    "The model ended this answer, so it cannot be continued. Answer the message "
                    "again to get another one."
                )
            target = AnswerTarget(last.parent, last.id)
        self.tasks.ask(owner, conversation_id, target)

    def unanswered(self, owner: str, conversation_id: str) -> AnswerTarget:
        """The target of an answer to the last message. Raises PromptError if there is none."""
        if (last := self.conversations(owner).last(conversation_id)) is None:
            raise PromptError(NO_MESSAGE)
        return AnswerTarget(last)

    def started_answer(
        self, owner: str, conversation_id: str, target: AnswerTarget
    ) -> StartedAnswer | None:
        if not target.continues:
            return None
        *_, message = self.conversations(owner).messages(conversation_id, to=target.continues)
        return started_answer(self.database, owner, message)

    def progress(self, owner: str, conversation_id: str, target: AnswerTarget) -> object:
        """A value that changes when more of the requested answer is stored."""
        store = self.conversations(owner)
        if target.continues:
            return store.messages(conversation_id, False, target.continues)[-1].content
        return store.following(conversation_id, target.after)

    def prompt(self, owner: str, conversation_id: str, to: str | None) -> list[Message]:
        """The conversation as the model reads it: the system prompt, and the messages up to `to`
        (None: no messages)."""
        store = self.conversations(owner)
        messages = [Message("system", store.get(conversation_id).system_prompt.strip())]
        stored = store.messages(conversation_id, pieces=False, to=to) if to else ()
        called_any = any(each.role == "tool" for each in stored)
        worths = Traces(self.database, owner).worths(conversation_id) if called_any else {}
        messages += called.as_read(stored, worths)
        return taking_turns(messages)

    def prediction(self, owner: str, conversation_id: str, to: str | None) -> str:
        """The text that an answer to the message `to` mostly repeats; "" if that is not known."""
        if to is None:
            return ""
        *_, message = self.conversations(owner).messages(conversation_id, pieces=False, to=to)
        old = to_rewrite(message.content) if message.role == "user" else None
        return old.text if old else ""

    @property
    def free(self) -> bool:
        return self.engine.state.is_loaded and self.tasks.idle

    def size(
        self, owner: str, conversation: str | None, system: str, text: str, editing: str | None
    ) -> Size | None:
        """The size of the next prompt with this text as its last message, or in place of the
        message `editing`. None while the model is busy or not loaded."""
        if not self.free or not self.engine.state.info.context_length:
            return None
        with suppress(StrataError):
            if conversation is None:
                messages = [Message("system", system)] if system.strip() else []
            else:
                found = self.conversations(owner).messages(conversation, False, editing)
                before = found[:-1] if editing else found
                messages = self.prompt(owner, conversation, before[-1].id if before else None)
            if not messages and not text.strip():
                return self.engine.measure(())
            following = Message("user", text.strip() or NEXT)
            return self.engine.measure((*messages, following), self.tools())
        return None

    def counts(self, texts: Sequence[str]) -> list[tuple[int, bool]]:
        """The number of tokens of each text, and whether it was counted and not estimated."""
        if self.free and self.engine.state.info.server is None:
            with suppress(StrataError):
                return [(count, True) for count in self.engine.counts(texts)]
        return [(-(-len(text) // CHARACTERS), False) for text in texts]

    def suggest_title(self, owner: str, conversation_id: str) -> str:
        """Let the model find a title for a conversation, and store it. The request waits for its
        turn, and drafting learns nothing from it.

        Raises PromptError for an empty conversation, and if the model gives no usable title.
        """
        store = self.conversations(owner)
        messages = store.messages(conversation_id, pieces=False)
        first = [message for message in messages if message.content.strip()][:2]
        if not first:
            raise PromptError("This conversation has no messages yet. Write something first.")
        texts = (each.content if each.role == "user" else answer_of(each.content) for each in first)
        quoted = "\n\n".join(text.strip()[:QUOTED] for text in texts)
        thinking = False if self.engine.state.info.can_think else None
        generation = Generation(Sampling(temperature=0.0), THOUGHT + TOKENS, thinking=thinking)
        request = Request(
            (Message("user", f"{quoted}\n\n{INSTRUCTION}"),),
            generation=generation,
            method=METHODS["plain"],
            owner=owner,
            measured=Measured(),
        )
        with self.tasks.begin(owner, f"title of {conversation_id}") as task:
            for _ in self.revival.gate(task):
                pass
            stream = task.stop.start(lambda: self.engine.generate(request))
            title = title_of(title_in(stream).replace('"', ""))
        if not title:
            raise PromptError("The model proposed no title. Write one with Rename.")
        store.rename(conversation_id, title)
        return title


def taking_turns(messages: Iterable[Message]) -> list[Message]:
    """The messages without empty ones, and with consecutive ones of one role joined: chat templates
    expect roles to take turns, and a stopped answer may be empty. Each result of a tool stays
    alone."""
    found: list[Message] = []
    for each in messages:
        if not (each.content.strip() or each.calls or each.call):
            continue
        if found and found[-1].role == each.role and not each.call:
            before = found.pop()
            content = "\n\n".join(filter(None, (before.content, each.content)))
            each = replace(each, content=content, calls=before.calls + each.calls)
        found.append(each)
    return found


def title_in(stream: Stream[Event]) -> str:
    """The answer of a stream without its thinking, of at most TOKENS tokens."""
    splitter, text, left = Splitter(), "", TOKENS
    with closing(stream):
        for event in stream:
            if isinstance(event, Started):
                splitter = Splitter(event.info.marks, event.thinks)
            for token in event.tokens if isinstance(event, Step) else ():
                text += splitter.push(token.text).content
                left -= splitter.state == "answers"
            if left <= 0:
                break
    return text + splitter.end().content
