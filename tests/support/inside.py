"""What tests ask of a session and look at inside of an engine in this process, and a toy that waits
when it is told to."""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, NoReturn

from app.service.answering import Update
from app.service.comparison import Progress, Proof, Side
from app.service.preferences import Preferences
from app.service.session import Session
from engine.backends.base import Backend
from engine.drafting.databases import DraftingMemory, OpenConversation, PastAnswers
from engine.errors import StorageError
from engine.local import Local
from engine.methods import PLAIN
from engine.models.loaders import ModelLoaders
from engine.queue import Waiting
from engine.settings import Drafting, Generation, Runtime, Sampling
from storage.conversations import StoredMessage
from storage.database import Database
from storage.drafting import DraftingStore
from tests.support.toy import ToyBackend

OWNER = "local"
SECONDS = 60.0
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


def preferences(
    method: str = "hd", tokens: int = 60, seed: int = 3, budget: str = "adaptive"
) -> Preferences:
    generation = Generation(Sampling(temperature=0.8, seed=seed), max_tokens=tokens)
    return Preferences(generation, method, Drafting(budget=budget), fresh_seed=False)


TOYS = ModelLoaders(load=lambda source, runtime: ToyBackend(name=source))
"""A toy for any name."""


def on_toy(db: Database, toy: Backend | None = None, **more: Any) -> Session:
    """A program on a toy in this process, as it has just started with a database."""
    guests = more.pop("guests", False)
    engine = Local(backend=toy or ToyBackend(), store=DraftingStore(db), **more)
    return Session(engine, db, guests=guests)


def failing(error: Exception) -> Callable[..., NoReturn]:
    """What stands in the place of a function that fails."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


FULL = StorageError("The disk is full.")


def run(updates: Iterator[Update | Waiting]) -> Update:
    *_, last = updates
    assert isinstance(last, Update)
    return last


def ask(
    session: Session,
    text: str = "hello there",
    method: str = "hd",
    chosen: Preferences | None = None,
    owner: str = OWNER,
) -> tuple[str, Update]:
    """A new conversation, and its first answer."""
    conversation = session.chat.say(owner, None, text)
    return conversation, answer(session, conversation, chosen or preferences(method), owner)


def answer(
    session: Session, conversation: str, chosen: Preferences | None = None, owner: str = OWNER
) -> Update:
    """The answer to the last message of a conversation."""
    return run(updates_of(session, owner, conversation, chosen or preferences()))


def updates_of(
    session: Session, owner: str, conversation: str, chosen: Preferences
) -> Generator[Update | Waiting, None, None]:
    """What an answer to the last message of a conversation says while it grows."""
    with closing(session.answering.answer(owner, conversation, chosen)) as items:
        yield from filter(None, items)


def messages(session: Session, conversation: str, owner: str = OWNER) -> list[StoredMessage]:
    return session.chat.conversations(owner).messages(conversation)


def prove(session: Session, conversation: str, owner: str = OWNER) -> Proof:
    """The proof of the last answer of a conversation."""
    *_, proof = session.proofs.prove(owner, conversation)
    assert isinstance(proof, Proof) and proof.verdict is not None
    return proof


def proven(session: Session, conversation: str) -> Proof:
    """The proof of the last answer, which both ways said."""
    proof = prove(session, conversation)
    assert proof.verdict is not None and proof.verdict.identical
    return proof


def compare(
    session: Session, owner: str, text: str, chosen: Preferences, repeats: int
) -> Iterator[Progress | Waiting]:
    """A prompt answered plainly and by the chosen method, with the same settings."""
    generation = chosen.seeded()
    sides = Side(PLAIN, generation), Side(chosen.chosen(), generation)
    return session.proofs.compare_sides(owner, text, "", sides, repeats)


def first_pair(items: Iterator[Progress | Waiting]) -> None:
    for item in items:
        if isinstance(item, Progress) and item.pairs:
            return


def under_way(
    session: Session, toy: Held, text: str, chosen: Preferences, forwards: int = 1
) -> tuple[str, Iterator[Update | Waiting]]:
    """A new conversation, and its first answer, which waits after so many forwards."""
    conversation = session.chat.say(OWNER, None, text)
    updates = updates_of(session, OWNER, conversation, chosen)
    toy.allow(forwards)
    next(updates)
    return conversation, updates


def texts(session: Session, conversation: str, owner: str = OWNER) -> list[str]:
    return [message.content for message in messages(session, conversation, owner)]


def local(session: Session) -> Local:
    assert isinstance(session.engine, Local)
    return session.engine


def memory(session: Session) -> DraftingMemory:
    """What its drafters know, once nothing uses it."""
    engine = local(session)
    engine.queue.thread.submit(lambda: None).result(SECONDS)
    return engine.loaded.memory


def past_answers(session: Session, owner: str = OWNER) -> PastAnswers:
    return memory(session).past_answers[owner]


def open_conversation(session: Session, conversation: str, owner: str = OWNER) -> OpenConversation:
    return memory(session).conversations[owner, conversation]


def forgotten(session: Session) -> None:
    known = memory(session)
    for owner in list(known.past_answers):
        session.engine.forget(owner, past=True)
    assert not (memory(session).past_answers or known.conversations)


def swap(session: Session, backend: Backend, source: str) -> None:
    engine = local(session)
    engine.use(engine.loaded_of(backend, source, Runtime(), lambda problem: None))


def selects(db: Database) -> list[str]:
    """What this thread asks a database from now on."""
    asked: list[str] = []

    def note(statement: str) -> None:
        if statement.startswith(("SELECT", "WITH")):
            asked.append(statement)

    with db.read() as handle:
        handle.conn.set_trace_callback(note)
    return asked


def soon(wanted: Callable[[], bool]) -> bool:
    """Whether it comes about while nothing else happens."""
    deadline = time.monotonic() + SECONDS
    while not wanted() and time.monotonic() < deadline:
        time.sleep(0.01)
    return wanted()
