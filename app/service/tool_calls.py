"""Runs the calls of an answer, each after the owner allowed it, and lets the model answer on.

The state is the conversation itself: a call waits while no result follows the answer that made it.
So a question survives a reload and a restart, and whoever writes another message instead leaves the
call without a result. Only the permission for a whole chat, and what runs now, are in memory.
"""

import logging
import threading
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Literal

from app.service import called
from app.service.answering import Answering, Generations, Update
from app.service.core import Core
from app.service.jobs import AnswerTarget, Stop
from app.service.preferences import Preferences
from engine.errors import Busy, Cancelled, PromptError, StrataError, first_line
from engine.queue import Waiting
from engine.types import ToolCall
from storage.conversations import StoredMessage
from storage.tool_servers import ToolServer
from storage.traces import Traces

ROUNDS = 10
"""How many times the model may call tools before it must answer the user's message."""
REFUSED = "The user did not allow this call."
Choice = Literal["once", "always", "no"]
Key = tuple[str, str]
"""An owner and one of their conversations."""
Permission = tuple[str, str, str, str]
"""An owner, a conversation, the id of a server, and the name of its tool."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pending:
    """The next call without a result: call number `number` of the answer `message`.

    Its result will follow the message `after`. `allowed` says that it needs no question, `problem`
    why it failed before, and `exhausted` that the limit of rounds is reached.
    """

    message: str
    number: int
    after: str
    call: ToolCall
    server: ToolServer
    allowed: bool
    problem: str
    exhausted: bool


Decided = tuple[Pending, Choice]


class ToolCalls:
    """`generations` are the answers of all owners, each followed by the calls in it."""

    def __init__(self, core: Core, answering: Answering) -> None:
        self.core, self.servers, self.answering = core, core.tool_servers, answering
        self.generations = Generations(self.answer, core.tasks.target)
        self.allowed = set[Permission]()
        self.running = set[Key]()
        self.problems = dict[Key, str]()
        self.lock = threading.Lock()

    def pending(self, owner: str, conversation: str) -> Pending | None:
        """The call that waits at the end of a conversation, in the form of the loaded model, if the
        tool is offered. Answers that were not made here, such as imported ones, call nothing."""
        tools, form = self.servers.offered(), self.core.current.info.calls
        if not tools or form is None:
            return None
        messages = self.core.chat.conversations(owner).messages(conversation, pieces=False)
        at = len(messages) - 1
        while at >= 0 and messages[at].role == "tool":
            at -= 1
        if at < 0 or messages[at].role != "assistant" or messages[at].run_id is None:
            return None
        answer, number = messages[at], len(messages) - 1 - at
        worths = Traces(self.core.database, owner).worths(conversation)
        calls = called.said(answer, tools, worths, forms=[form]).calls
        if number >= len(calls) or (server := self.servers.server_of(calls[number].name)) is None:
            return None
        key, call = (owner, conversation), calls[number]
        return Pending(
            answer.id,
            number,
            messages[-1].id,
            call,
            server,
            (*key, server.id, call.name) in self.allowed,
            self.problems.get(key, ""),
            rounds(messages) > ROUNDS,
        )

    def busy(self, owner: str, conversation: str) -> bool:
        with self.lock:
            return (owner, conversation) in self.running

    def decide(
        self,
        owner: str,
        conversation: str,
        message: str,
        number: int,
        choice: Choice,
        preferences: Preferences,
    ) -> None:
        """Run the call that waits, once or always in this conversation, or refuse it; then go on
        in the background. Raises PromptError if another call waits, and Busy while one runs."""
        found = self.pending(owner, conversation)
        if found is None or (found.message, found.number) != (message, number) or found.exhausted:
            raise PromptError("This call does not wait any more. Look at the conversation again.")
        if choice == "always":
            self.allowed.add((owner, conversation, found.server.id, found.call.name))
        self.begin(owner, conversation, preferences, (found, choice))

    def answer(
        self, owner: str, conversation: str, preferences: Preferences
    ) -> Generator[Update | Waiting | None, None, None]:
        """Answer the last message, and begin the calls of a complete answer that need no
        question."""
        update: Update | None = None
        with closing(self.answering.answer(owner, conversation, preferences)) as items:
            for item in items:
                update = item if isinstance(item, Update) else update
                yield item
        self.problems.pop((owner, conversation), None)
        if update is not None and update.finish in ("eos", "stop"):
            found = self.pending(owner, conversation)
            if found is not None and found.allowed:
                self.begin(owner, conversation, preferences)

    def begin(
        self,
        owner: str,
        conversation: str,
        preferences: Preferences,
        decided: Decided | None = None,
    ) -> None:
        key = owner, conversation
        with self.lock:
            if key in self.running:
                raise Busy("A call of this conversation runs already. Wait for it, or press Stop.")
            self.running.add(key)
        self.problems.pop(key, None)
        given = owner, conversation, preferences, decided
        threading.Thread(target=self.work, args=given, name="tool", daemon=True).start()

    def work(
        self, owner: str, conversation: str, preferences: Preferences, decided: Decided | None
    ) -> None:
        key, answers = (owner, conversation), False
        try:
            with self.core.tasks.begin(owner, conversation) as task:
                answers = self.run(owner, conversation, decided, task.stop)
        except Exception as error:
            # What failed or was stopped is asked about again.
            self.allowed = {each for each in self.allowed if each[:2] != key}
            if not isinstance(error, StrataError):
                log.exception("A call of a tool broke off.")
                self.problems[key] = f"The call broke off ({first_line(error)}). Try it again."
            elif not isinstance(error, Cancelled):
                self.problems[key] = str(error)
        finally:
            store = self.core.chat.conversations(owner)
            with suppress(StrataError):
                # Between the two, nobody may take the conversation for idle.
                with self.lock:
                    self.running.discard(key)
                    if answers:
                        target = AnswerTarget(store.last(conversation))
                        self.core.tasks.ask(owner, conversation, target)
                        self.generations.start(owner, conversation, preferences)
                store.mark_changed(conversation)

    def run(self, owner: str, conversation: str, decided: Decided | None, stop: Stop) -> bool:
        """Run or refuse the call that was decided about, then run those that follow, until one
        needs a question. Returns whether the model can answer on, because each has a result."""
        store = self.core.chat.conversations(owner)
        found, choice = decided or (self.pending(owner, conversation), None)
        while found is not None:
            if choice == "no":
                result = REFUSED
            elif not found.exhausted and (choice or found.allowed):
                result = self.servers.call(found.server, found.call, stop)
            else:
                return False
            content = called.content_of(found.call, result)
            store.append(conversation, "tool", content, after=found.after)
            found, choice = self.pending(owner, conversation), None
        return not stop.is_set()


def rounds(messages: Sequence[StoredMessage]) -> int:
    """How many answers follow the user's last message."""
    count = 0
    for message in reversed(messages):
        if message.role == "user":
            break
        count += message.role == "assistant"
    return count
