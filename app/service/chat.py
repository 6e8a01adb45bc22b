"""Conversations: what the user says, says anew and takes back, and what the model reads of it.

What the user said is stored before anything is decoded. A message that cannot be answered is
refused, with nothing stored.
"""

from contextlib import suppress

from app.service.history import History
from app.service.revival import Revival
from app.service.tasks import Tasks
from engine.engine import Engine
from engine.errors import EngineDied, ModelError, PromptError
from engine.loaded import NO_MODEL
from engine.types import Message
from storage.conversations import Conversations
from storage.database import Database

TITLE = 48
UNTITLED = "New conversation"


class Chat:
    """See the module's docstring."""

    def __init__(
        self, engine: Engine, database: Database, tasks: Tasks, history: History, revival: Revival
    ) -> None:
        self.engine, self.database = engine, database
        self.tasks, self.history, self.revival = tasks, history, revival

    def conversations(self, owner: str) -> Conversations:
        """The owner's conversations."""
        return Conversations(self.database, owner)

    def delete(self, owner: str, conversation_id: str) -> None:
        """Delete a conversation with all that was derived from it but the model tier."""
        self.tasks.stop(owner, conversation_id)
        self.conversations(owner).delete(conversation_id)
        self.history.last.pop((owner, conversation_id), None)
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
        if not store.messages(conversation_id, pieces=False):
            title = " ".join(text.split())
            if store.get(conversation_id).title == UNTITLED:
                store.rename(conversation_id, title[:TITLE].rstrip() or UNTITLED)
        store.append(conversation_id, "user", text)
        self.tasks.ask(owner, conversation_id)
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

    def edit(self, owner: str, conversation_id: str, position: int, text: str) -> None:
        """Say something else at a position; what followed it is gone."""
        self.check(owner, text)
        store = self.conversations(owner)
        with self.database.write():
            store.truncate(conversation_id, position)
            store.append(conversation_id, "user", text)
        self.tasks.ask(owner, conversation_id)

    def drop_answer(self, owner: str, conversation_id: str) -> None:
        """Take back what follows the user's last message, before answering it again."""
        with suppress(EngineDied):
            self.engine.check_turn(owner)
        store = self.conversations(owner)
        said = [
            m.position for m in store.messages(conversation_id, pieces=False) if m.role == "user"
        ]
        if not said:
            raise PromptError("There is no message to answer yet. Write something first.")
        store.truncate(conversation_id, said[-1] + 1)
        self.tasks.ask(owner, conversation_id)

    def prompt(self, owner: str, conversation_id: str) -> list[Message]:
        """The conversation as the model reads it; messages in a row by one role become one.

        Chat templates expect roles to take turns, and a stopped answer may be empty.
        """
        store = self.conversations(owner)
        system = store.get(conversation_id).system_prompt.strip()
        messages = [Message("system", system)] if system else []
        for stored in store.messages(conversation_id, pieces=False):
            if not stored.content.strip():
                continue
            if messages and messages[-1].role == stored.role:
                both = f"{messages.pop().content}\n\n{stored.content}"
                messages.append(Message(stored.role, both))
            else:
                messages.append(Message(stored.role, stored.content))
        return messages
