"""What tests look at inside of an engine in this process, and a toy that waits when it is told."""

import threading
import time
from collections.abc import Callable
from typing import Any

from app.service.session import Session
from engine.backends.base import Backend
from engine.backends.toy import ToyBackend
from engine.drafting.memory import DraftingMemory, OpenConversation, PastAnswers
from engine.local import Local
from engine.settings import Runtime

OWNER = "local"
SECONDS = 20.0
"""After which what does not come about never will."""


class Held(ToyBackend):
    """A toy that makes as many forwards as it is allowed, and then waits for more; all its
    sequences together."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.allowed = [float("inf")]
        self.changed = threading.Condition()

    def allow(self, forwards: float = float("inf")) -> None:
        """Let it make so many from now on."""
        with self.changed:
            self.allowed[0] = forwards
            self.changed.notify_all()

    def score(self, *arguments: Any, **named: Any) -> Any:
        with self.changed:
            assert self.changed.wait_for(lambda: self.allowed[0] > 0, SECONDS)
            self.allowed[0] -= 1
        return super().score(*arguments, **named)


def local(session: Session) -> Local:
    """The engine, which is in this process."""
    assert isinstance(session.engine, Local)
    return session.engine


def memory(session: Session) -> DraftingMemory:
    """What its drafters know, once nothing uses it."""
    engine = local(session)
    engine.queue.thread.submit(lambda: None).result(SECONDS)
    return engine.loaded.memory


def past_answers(session: Session, owner: str = OWNER) -> PastAnswers:
    """What the model said to an owner."""
    return memory(session).past_answers[owner]


def open_conversation(session: Session, conversation: str, owner: str = OWNER) -> OpenConversation:
    """An open conversation."""
    return memory(session).conversations[owner, conversation]


def forgotten(session: Session) -> None:
    """Have everything read again that is stored."""
    known = memory(session)
    for owner in list(known.past_answers):
        session.engine.forget(owner, past=True)
    assert not (memory(session).past_answers or known.conversations)


def swap(session: Session, backend: Backend, source: str) -> None:
    """Have another model in the place of the loaded one."""
    engine = local(session)
    engine.use(engine.loaded_of(backend, source, Runtime(), lambda problem: None))


def soon(wanted: Callable[[], bool]) -> bool:
    """Whether it comes about while nothing else happens."""
    deadline = time.monotonic() + SECONDS
    while not wanted() and time.monotonic() < deadline:
        time.sleep(0.01)
    return wanted()
