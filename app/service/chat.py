"""Conversations: what the user says, says anew and takes back, and what the model reads of it.

What the user said is stored before anything is decoded. A message that cannot be answered is
refused, with nothing stored. What is said or answered anew stands beside what was there before, and
what is deleted can be brought back for an hour.
"""

from collections.abc import Callable
from contextlib import suppress

from app.service.attachments import said
from app.service.continuing import Begun, begun
from app.service.history import History
from app.service.revival import Revival
from app.service.tasks import Tasks, Wanted
from app.service.titles import title_of
from app.service.trash import Trash
from engine.engine import Engine
from engine.errors import EngineDied, ModelError, PromptError
from engine.loaded import NO_MODEL
from engine.types import Message
from storage.conversations import Conversations
from storage.database import Database

UNTITLED = "New conversation"
NOTHING_SAID = "There is no message to answer yet. Write something first."


class Chat:
    """See the module's docstring."""

    def __init__(
        self, engine: Engine, database: Database, tasks: Tasks, history: History, revival: Revival
    ) -> None:
        self.engine, self.database = engine, database
        self.tasks, self.revival = tasks, revival
        self.trash = Trash(engine, database, history)
        self.deleted: Callable[[str, str], None] = lambda owner, conversation: None
        """Told of a conversation that is being deleted."""

    def conversations(self, owner: str) -> Conversations:
        """The owner's conversations."""
        return Conversations(self.database, owner)

    def delete(self, owner: str, conversation_id: str) -> str:
        """Delete a conversation with all that was derived from it but the model tier; what `undo`
        takes to bring it back."""
        self.tasks.end(owner, conversation_id)
        self.deleted(owner, conversation_id)
        token = self.conversations(owner).delete(conversation_id)
        self.trash.remember(token, owner, conversation_id)
        self.engine.forget(owner, conversation_id)
        return token

    def delete_message(self, owner: str, conversation_id: str, message_id: str) -> str:
        """Delete a message with all that follows it, in whatever version; what `undo` takes. An
        answer under way to one of these ends."""
        store, wanted = self.conversations(owner), self.tasks.wanted(owner, conversation_id)
        last = wanted and (wanted.going_on or wanted.after)
        if last and store.has(conversation_id, last):
            above = store.messages(conversation_id, pieces=False, to=last)
            if message_id in [message.id for message in above]:
                self.tasks.end(owner, conversation_id)
        token = store.delete_message(conversation_id, message_id)
        self.trash.remember(token, owner)
        return token

    def undo(self, owner: str, token: str) -> str:
        """Bring back what was deleted; the id of its conversation. Raises StorageError."""
        conversation_id = self.conversations(owner).undo(token)
        self.trash.recall(token)
        return conversation_id

    def revision(self, owner: str, conversation_id: str) -> int:
        """Grows with every change of a conversation: titles, messages, what is shown."""
        return self.conversations(owner).revision(conversation_id)

    def branch(self, owner: str, conversation_id: str, message_id: str) -> str:
        """A new conversation that holds what leads to a message; its id."""
        return self.conversations(owner).copy(conversation_id, message_id)

    def say(self, owner: str, conversation_id: str | None, text: str) -> str:
        """Store what the user said; makes a conversation if there is none. Returns its id.

        Raises PromptError, with nothing stored, for an empty message or one that cannot fit, and
        Busy while too much of the owner's waits for the model.
        """
        self.check(owner, text)
        store = self.conversations(owner)
        if conversation_id is None:
            conversation_id = store.create().id
        if store.last(conversation_id) is None and store.get(conversation_id).title == UNTITLED:
            store.rename(conversation_id, title_of(said(text)) or UNTITLED)
        message = store.append(conversation_id, "user", text)
        self.tasks.ask(owner, conversation_id, Wanted(message.id))
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
        elif not self.revival.coming:
            raise ModelError(NO_MODEL)

    def edit(self, owner: str, conversation_id: str, message_id: str, text: str) -> str:
        """Say something else in the place of a message of the user's; the new message's id. The
        old one stays, with what followed it, as another version."""
        self.check(owner, text)
        store = self.conversations(owner)
        with self.database.write():
            *_, old = store.messages(conversation_id, pieces=False, to=message_id)
            if old.role != "user":
                raise PromptError(
                    "Only what you said can be edited. Answer the message before it again instead."
                )
            message = store.beside(conversation_id, message_id, "user", text)
            store.show(conversation_id, message.id)
        self.tasks.ask(owner, conversation_id, Wanted(message.id))
        return message.id

    def again(self, owner: str, conversation_id: str, message_id: str | None = None) -> None:
        """Have a message of the user's answered again: that one, the one before that answer, or
        the last one. The answers that it has stay as other versions."""
        with suppress(EngineDied):
            self.engine.check_turn(owner)
        store = self.conversations(owner)
        messages = store.messages(conversation_id, pieces=False, to=message_id)
        said = [message.id for message in messages if message.role == "user"]
        if not said:
            raise PromptError(NOTHING_SAID)
        if message_id is not None:
            store.show(conversation_id, message_id)
        self.tasks.ask(owner, conversation_id, Wanted(said[-1]))

    def go_on(self, owner: str, conversation_id: str) -> None:
        """Have the last answer go on where it stopped; a last message without one is answered.

        Raises PromptError for one that the model ended by itself.
        """
        with suppress(EngineDied):
            self.engine.check_turn(owner)
        messages = self.conversations(owner).messages(conversation_id)
        if not messages:
            raise PromptError(NOTHING_SAID)
        last = messages[-1]
        if last.role == "user":
            wanted = Wanted(last.id)
        else:
            if begun(self.database, owner, last).run.finish == "eos":
                raise PromptError(
                    "The model ended this answer, so there is no more of it. Answer the message "
                    "again for another one."
                )
            wanted = Wanted(last.parent, last.id)
        self.tasks.ask(owner, conversation_id, wanted)

    def unanswered(self, owner: str, conversation_id: str) -> Wanted:
        """An answer to the last message. Raises PromptError where there is none."""
        last = self.conversations(owner).last(conversation_id)
        if last is None:
            raise PromptError(NOTHING_SAID)
        return Wanted(last)

    def begun(self, owner: str, conversation_id: str, wanted: Wanted) -> Begun | None:
        """The answer that is wanted, if it is one to go on with."""
        if not wanted.going_on:
            return None
        store = self.conversations(owner)
        return begun(self.database, owner, store.messages(conversation_id, to=wanted.going_on)[-1])

    def said(self, owner: str, conversation_id: str, wanted: Wanted) -> object:
        """What there is of a wanted answer: equal until there is more of it."""
        store = self.conversations(owner)
        if wanted.going_on:
            return store.messages(conversation_id, False, wanted.going_on)[-1].content
        return store.following(conversation_id, wanted.after)

    def prompt(self, owner: str, conversation_id: str, to: str | None) -> list[Message]:
        """The conversation up to a message as the model reads it, None: nothing of it; messages in
        a row by one role become one.

        Chat templates expect roles to take turns, and a stopped answer may be empty.
        """
        store = self.conversations(owner)
        system = store.get(conversation_id).system_prompt.strip()
        messages = [Message("system", system)] if system else []
        for stored in store.messages(conversation_id, pieces=False, to=to) if to else ():
            if not stored.content.strip():
                continue
            if messages and messages[-1].role == stored.role:
                both = f"{messages.pop().content}\n\n{stored.content}"
                messages.append(Message(stored.role, both))
            else:
                messages.append(Message(stored.role, stored.content))
        return messages
