"""Answers for other programs: through the same queue as the page's, and kept nowhere.

A program sends the whole conversation with every request. One that goes on with another shares its
session, so the model reads only what is new; what drafting knows of the conversation lives as long
as the session, in memory alone. Of an answer only the n-grams and what they are worth are stored,
for the owner who asked: one for each key, and one for programs without a key. So the page and every
key take turns, and no key drafts from what another one said.
"""

import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from app.service.current import Current
from app.service.draft_models import Stacks
from app.service.stores import Kept, Stores
from app.service.tasks import Task, Tasks
from engine.engine import (
    ContextLogged,
    Engine,
    Event,
    Request,
    Started,
    StoredContextLog,
    WantedContextLog,
    WantedPastAnswers,
    answered,
)
from engine.errors import Busy, ModelError, PromptError, StrataError
from engine.loaded import NO_MODEL
from engine.queue import Waiting
from engine.types import Learned, Prefill, Step
from storage.api_keys import ApiKey, ApiKeys
from storage.database import Database

MOST_EACH = 8
"""Requests of one owner that wait or are under way at once: the page's owner finds room beside."""
Told = Waiting | Started | Prefill | Step | Learned
"""What a program is told of an answer."""


def beginnings(left: str, right: str) -> int:
    """How many characters two texts begin with alike, found by halving."""
    known, limit = 0, min(len(left), len(right))
    while known < limit:
        middle = (known + limit + 1) // 2
        if left[known:middle] == right[known:middle]:
            known = middle
        else:
            limit = middle - 1
    return known


def said(request: Request) -> str:
    """What a request says as one text: those that go on with it begin with it."""
    if request.messages:
        turns = (turn(message.role, message.content) for message in request.messages)
        return "".join(turns) + (turn("assistant", request.begun) if request.begun else "")
    return f"\1{request.text}" if request.text else "\2" + "".join(map(chr, request.prompt))


def turn(role: str, content: str) -> str:
    """A message within such a text."""
    return f"\0{role}\0{content}"


class Sessions:
    """Which requests of an owner go on with one another. `forget` frees what the engine holds of
    one that was not used for long."""

    KEPT = 32

    def __init__(self, forget: Callable[[str, str], None]) -> None:
        self.forget = forget
        self.known: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()
        """What was said last in each session, by owner and name, and how much of that was asked;
        the last used at the end."""
        self.lock = threading.Lock()

    def enter(self, owner: str, text: str) -> str:
        """The session that a request goes on with, or a new one.

        It must share at least half of what was asked there. So another conversation that begins
        with the same few words does not take its place.
        """
        with self.lock:
            shared = {
                name: (beginnings(before, text), asked)
                for (who, name), (before, asked) in self.known.items()
                if who == owner
            }
            fitting = [name for name, (alike, asked) in shared.items() if 2 * alike >= asked]
            new = f"api-{secrets.token_hex(6)}"
            name = max(fitting, key=lambda each: shared[each][0], default=new)
            self.known[owner, name] = text, len(text)
            self.known.move_to_end((owner, name))
            over = list(self.known)[: max(0, len(self.known) - self.KEPT)]
            for key in over:
                del self.known[key]
        for key in over:
            self.forget(*key)
        return name

    def leave(self, owner: str, name: str) -> None:
        """Nothing was read there: what was said is too long to be remembered."""
        with self.lock:
            self.known.pop((owner, name), None)
        self.forget(owner, name)

    def grow(self, owner: str, name: str, text: str) -> None:
        """This was answered there."""
        with self.lock:
            if (owner, name) in self.known:
                before, asked = self.known[owner, name]
                self.known[owner, name] = before + text, asked


@dataclass(slots=True)
class Programs:
    """See the module's docstring. `always` says that the command line asked for it; where `guests`
    may come in, nothing else does. `gate` lets a task wait while another model stands in for the
    loaded one."""

    engine: Engine
    database: Database
    tasks: Tasks
    current: Current
    stacks: Stacks
    stores: Stores
    gate: Callable[[Task], Iterator[Waiting]]
    guests: bool = False
    always: bool = False
    keys: ApiKeys = field(init=False)
    sessions: Sessions = field(init=False)
    asking: Counter[str] = field(default_factory=Counter)
    """Requests of each owner that wait or are under way."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.sessions = Sessions(self.engine.forget)
        self.keys = ApiKeys(self.database)

    @property
    def on(self) -> bool:
        """Whether programs may ask."""
        return self.always or (not self.guests and self.keys.on)

    def revoke(self, key_id: str) -> ApiKey:
        """Take a key back; what it taught is forgotten. Raises SettingError."""
        key = self.keys.revoke(key_id)
        self.engine.forget(key.owner, past=True)
        return key

    @contextmanager
    def asked(self, owner: str) -> Generator[Task, None, None]:
        """One request of an owner, as a task that can be stopped. Raises Busy."""
        with self.lock:
            if self.asking[owner] >= MOST_EACH:
                raise Busy(
                    f"{self.asking[owner]} of your requests wait or are being answered already. "
                    "Wait until one is over."
                )
            self.asking[owner] += 1
        try:
            with self.tasks.begin(owner, f"api-{secrets.token_hex(6)}") as task:
                yield task
        finally:
            with self.lock:
                self.asking[owner] -= 1
                if not self.asking[owner]:
                    del self.asking[owner]

    def stop(self, task: Task) -> None:
        """End a request, whose program is gone."""
        self.tasks.stop(task.owner, task.about)

    def answer(self, owner: str, request: Request, task: Task) -> Generator[Told, None, None]:
        """One answer, from its place in the queue to what it taught; closing the iterator ends it.

        Raises Busy, PromptError where not all of the messages fit, ModelError where none is loaded,
        EngineDied, and Cancelled when the task is stopped before its turn has come.
        """
        yield from self.gate(task)
        if not self.engine.state.there:
            raise ModelError(NO_MODEL)
        name = self.sessions.enter(owner, said(request))
        profile = self.stacks.profile_for(request.generation.sampling)
        wanted = replace(request, owner=owner, conversation=name, profile=profile)
        stream = task.stop.start(lambda: self.engine.generate(wanted))
        learning = Learning(self.stores, Kept(owner, name, self.current.info, 0))
        events, text = answered(stream, learning.recall), list[str]()
        try:
            for event in events:
                if isinstance(event, Started):
                    learning.kept = replace(learning.kept, info=event.info)
                    check_whole(event)
                if isinstance(event, Step):
                    text += [token.text for token in event.tokens]
                if isinstance(event, Waiting | Started | Prefill | Step | Learned):
                    yield event
                else:
                    learning.take(event)
        except BaseException as error:
            stream.stop()
            if isinstance(error, PromptError):
                self.sessions.leave(owner, name)
            raise
        finally:
            # What it said by now is learned, however it ends.
            with suppress(StrataError):
                for event in events:
                    learning.take(event)
            reply = "".join(text)
            begins = wanted.messages and not wanted.begun
            self.sessions.grow(owner, name, turn("assistant", reply) if begins else reply)


class Learning:
    """What an answer needs of the stores, and teaches them."""

    def __init__(self, stores: Stores, kept: Kept) -> None:
        self.stores, self.kept = stores, kept

    def recall(self, wanted: WantedPastAnswers | WantedContextLog) -> Any:
        """What the engine asks for. No log of a conversation is stored."""
        if isinstance(wanted, WantedContextLog):
            return StoredContextLog()
        self.kept = replace(self.kept, wiped=self.stores.past_answers.wiped[self.kept.owner])
        return self.stores.recall(wanted, self.kept.owner, "")

    def take(self, event: Event) -> None:
        """Store what was learned but the log of the conversation."""
        if not isinstance(event, ContextLogged):
            self.stores.save(event, self.kept)


def check_whole(started: Started) -> None:
    """Raise PromptError where messages were left out: a program decides for itself which."""
    if started.dropped:
        length = started.info.context_length
        raise PromptError(
            f"The messages do not fit: {started.info.name} reads at most {length:,} tokens with "
            f"the answer, and the {started.dropped} oldest messages would be left out. Send fewer "
            "or shorter ones."
        )
