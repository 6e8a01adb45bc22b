"""Answers for other programs: they use the same queue as the page's answers, and are not stored.

A program sends the whole conversation with every request. A request that continues an earlier one
shares its session, so the model reads only the new part. Only n-grams and their calibration are
stored, for the owner of the request: each key is an owner, and so are all programs without a key
together. So the page and every key take turns, and no key drafts from another key's text.
"""

import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace

from app.service.core import Core
from app.service.jobs import Task
from engine.engine import Request, Started
from engine.errors import Busy, ModelError, PromptError, StrataError
from engine.queue import Waiting
from engine.types import Learned, Message, Prefill, Step
from storage.api_keys import ApiKey, ApiKeys

MOST_EACH = 8
"""The most requests of one owner that are being read, waiting or running at the same time, so that
the queue keeps room for the page's owner; more by the answers at once that go beyond one."""
ProgramEvent = Waiting | Started | Prefill | Step | Learned
"""The events of an answer that a program gets."""


def common_prefix(left: str, right: str) -> int:
    """The length of the common prefix of two texts, by bisection."""
    known, limit = 0, min(len(left), len(right))
    while known < limit:
        middle = (known + limit + 1) // 2
        if left[known:middle] == right[known:middle]:
            known = middle
        else:
            limit = middle - 1
    return known


def text_of(request: Request) -> str:
    """The conversation of a request as one text. Requests that continue it begin with this text."""
    if request.messages:
        turns = (*map(str, request.tools), *map(turn_of, request.messages))
        return "".join(turns) + (turn("assistant", request.prefix) if request.prefix else "")
    return f"\1{request.text}" if request.text else "\2" + "".join(map(chr, request.prompt))


def turn_of(message: Message) -> str:
    return turn(message.role, message.content) + "".join(map(str, message.calls))


def turn(role: str, content: str) -> str:
    return f"\0{role}\0{content}"


class Sessions:
    """Finds which requests of an owner continue one another. `forget` frees the engine's memory of
    a session that was not used for long.

    A request is remembered only when it begins, as then it is known to fit the context. Before, its
    text may have any length, and its program may disconnect before its turn.
    """

    KEPT, CHARACTERS = 32, 4_000_000
    """The most sessions to remember, and the most text of all of them together. The last one is
    remembered whatever its length."""

    def __init__(self, forget: Callable[[str, str], None]) -> None:
        self.forget = forget
        self.known: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()
        """The last text of each session and the length of its request, by owner and name. The most
        recently used session comes last."""
        self.using = Counter[tuple[str, str]]()
        """The number of requests of each session that wait or are being answered."""
        self.lock = threading.Lock()

    @contextmanager
    def reserved(self, owner: str, text: str, at_once: bool = False) -> Generator[str, None, None]:
        """The session that a request continues, or the name of a new one. With `at_once`, nobody
        else gets it until the block ends, so that requests are answered at the same time.

        It must share at least half of the session's last request, so that another conversation with
        the same first words does not replace the session.
        """
        with self.lock:
            name = self.find(owner, text, at_once)
            self.using[owner, name] += 1
        try:
            yield name
        finally:
            with self.lock:
                self.using -= Counter([(owner, name)])

    def find(self, owner: str, text: str, at_once: bool) -> str:
        best, most = f"api-{secrets.token_hex(6)}", -1
        for key, (before, length) in self.known.items():
            if key[0] != owner or (at_once and self.using[key]):
                continue
            shared = common_prefix(before, text)
            if 2 * shared >= length and shared > most:
                best, most = key[1], shared
        return best

    def enter(self, owner: str, name: str, text: str) -> None:
        dropped = []
        with self.lock:
            self.known[owner, name] = text, len(text)
            self.known.move_to_end((owner, name))
            left = sum(len(text) for text, _ in self.known.values())
            while len(self.known) > self.KEPT or len(self.known) > 1 and left > self.CHARACTERS:
                key, (text, _) = self.known.popitem(last=False)
                left -= len(text)
                dropped.append(key)
        for key in dropped:
            self.forget(*key)

    def leave(self, owner: str, name: str) -> None:
        with self.lock:
            self.known.pop((owner, name), None)
        self.forget(owner, name)

    def grow(self, owner: str, name: str, text: str) -> None:
        with self.lock:
            if (owner, name) in self.known:
                before, length = self.known[owner, name]
                self.known[owner, name] = before + text, length


class Answers:
    """The messages up to each of the last answers that may be continued by their ids: in memory
    alone, and with as many characters as Sessions remembers."""

    KEPT = 1024

    def __init__(self) -> None:
        self.known: OrderedDict[tuple[str, str], tuple[tuple[Message, ...], int]] = OrderedDict()
        self.lock = threading.Lock()

    def keep(self, owner: str, id: str, messages: tuple[Message, ...]) -> None:
        with self.lock:
            self.known[owner, id] = messages, sum(len(turn_of(each)) for each in messages)
            left = sum(size for _, size in self.known.values())
            while len(self.known) > self.KEPT or len(self.known) > 1 and left > Sessions.CHARACTERS:
                left -= self.known.popitem(last=False)[1][1]

    def find(self, owner: str, id: str) -> tuple[Message, ...] | None:
        with self.lock:
            found = self.known.get((owner, id))
        return found and found[0]

    def forget(self, owner: str) -> None:
        with self.lock:
            for key in [key for key in self.known if key[0] == owner]:
                del self.known[key]


class Programs:
    """`always` says that the command line allows programs. If guests share the app, this is the
    only way to allow them."""

    def __init__(self, core: Core) -> None:
        self.core, self.notices = core, core.notices
        self.always = False
        self.keys = ApiKeys(core.database)
        self.sessions = Sessions(core.engine.forget)
        self.answers = Answers()
        self.asking = Counter[str]()
        """The number of each owner's requests that are being read, wait or run."""
        self.lock = threading.Lock()

    @property
    def on(self) -> bool:
        return self.always or (not self.core.guests and self.keys.on)

    def revoke(self, key_id: str) -> ApiKey:
        """Revoke a key and forget what drafting learned from it. Raises SettingError."""
        key = self.keys.revoke(key_id)
        self.core.engine.forget(key.owner, past=True)
        self.answers.forget(key.owner)
        return key

    @contextmanager
    def place(self, owner: str) -> Generator[None, None, None]:
        """Reserve a place for a request of an owner; held from before its body is read until its
        end. Raises Busy."""
        with self.lock:
            if self.asking[owner] >= MOST_EACH + self.parallel - 1:
                raise Busy(
                    f"{self.asking[owner]} of your requests wait or are being answered already. "
                    "Wait until one is over."
                )
            self.asking[owner] += 1
        try:
            yield
        finally:
            with self.lock:
                self.asking[owner] -= 1
                if not self.asking[owner]:
                    del self.asking[owner]

    @property
    def parallel(self) -> int:
        """How many answers the loaded model gives at once."""
        return self.core.engine.state.runtime.parallel

    def task_for(self, owner: str) -> AbstractContextManager[Task]:
        return self.core.tasks.begin(owner, f"api-{secrets.token_hex(6)}")

    def check_loaded(self) -> None:
        """Raise ModelError with the reason if no model is loaded."""
        if not self.core.engine.state.is_loaded:
            raise ModelError(self.core.revival.not_loaded_reason)

    def stop(self, task: Task) -> None:
        self.core.tasks.stop(task.owner, task.about)

    def answer(
        self, owner: str, request: Request, task: Task
    ) -> Generator[ProgramEvent, None, None]:
        """Yields the events of one answer, from waiting in the queue to learning. Closing the
        iterator ends the answer.

        Raises Busy, PromptError if not all messages fit, ModelError if no model is loaded,
        EngineDied, and Cancelled if the task is stopped before its turn.
        """
        yield from self.core.model_swap.gate(task)
        self.check_loaded()
        text = text_of(request)
        with self.sessions.reserved(owner, text, self.parallel > 1) as name:
            yield from self.answer_in(name, owner, text, request, task)

    def answer_in(
        self, name: str, owner: str, text: str, request: Request, task: Task
    ) -> Generator[ProgramEvent, None, None]:
        """The events of an answer in the session of that name. `text` is its conversation."""
        profile = self.core.stacks.profile_for(request.generation.sampling)
        request = replace(request, owner=owner, conversation=name, profile=profile)
        stream = task.stop.start(lambda: self.core.engine.generate(request))
        reply = list[str]()
        try:
            for event in stream:
                if isinstance(event, Started):
                    if event.dropped:
                        raise PromptError(
                            f"The messages do not fit: {event.info.name} reads at most "
                            f"{event.info.context_length:,} tokens with the answer, and the "
                            f"{event.dropped} oldest messages would be left out. Send fewer or "
                            "shorter ones."
                        )
                    self.sessions.enter(owner, name, text)
                if isinstance(event, Step):
                    reply += [token.text for token in event.tokens]
                if isinstance(event, Waiting | Started | Prefill | Step | Learned):
                    yield event
                else:
                    self.core.take_aside(owner, event)
        except BaseException as error:
            stream.stop()
            if isinstance(error, ModelError):
                self.check_loaded()
            if isinstance(error, PromptError):
                self.sessions.leave(owner, name)
            raise
        finally:
            with suppress(StrataError):
                for event in stream:
                    self.core.take_aside(owner, event)
            if reply:
                answer = "".join(reply)
                begins = request.messages and not request.prefix
                self.sessions.grow(owner, name, turn("assistant", answer) if begins else answer)
