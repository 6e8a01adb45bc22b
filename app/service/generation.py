"""Answers under way, or just over. They need no page: each runs to its end in a thread of its own.

A page may close, reload or lose its connection, and several may watch one answer. Whoever knows an
answer's token may watch it. Nobody can guess one, so it also says that they may. Watching holds no
thread: an answer rings a bell in the event loops of those who wait for news.
"""

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from app.service.preferences import Preferences
from app.service.recorder import Update
from app.service.tasks import Wanted
from engine.errors import Cancelled, StrataError
from engine.queue import Waiting

KEPT = 16
"""Answers that are over and still known, for pages that have yet to see their end."""

log = logging.getLogger(__name__)


class Bell:
    """Wakes those who wait in an event loop. It may be rung from any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.listening: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    @contextmanager
    def heard(self) -> Iterator[asyncio.Event]:
        """An event of the running loop that is set at every ring until the block ends."""
        event = asyncio.Event()
        with self.lock:
            self.listening[event] = asyncio.get_running_loop()
        try:
            yield event
        finally:
            with self.lock:
                del self.listening[event]

    def ring(self) -> None:
        """Wake all who listen."""
        with self.lock:
            for event, loop in self.listening.items():
                with suppress(RuntimeError):  # The loop has ended, and with it who listened.
                    loop.call_soon_threadsafe(event.set)


class Answer:
    """One answer. `ahead` is how many come before it in the queue, 0 once its turn has come;
    `loading`: one of them loads a model. `wanted` says which message it follows; None: the last.

    `update` is what there is of it, None before its first step. Once it is `over` nothing changes
    any more; `error` then says what went wrong, "" if nothing did.
    """

    def __init__(self, owner: str, conversation: str, wanted: Wanted | None = None) -> None:
        self.owner, self.conversation, self.wanted = owner, conversation, wanted
        self.token = secrets.token_urlsafe(18)
        self.bell = Bell()
        self.ahead, self.loading = 0, False
        self.update: Update | None = None
        self.error = ""
        self.over = False

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return self.update.tokens if self.update else 0

    @property
    def message_id(self) -> str:
        """The message that it is stored as, "" as long as it is not."""
        return self.update.recorder.message_id if self.update else ""

    def run(self, items: Iterator[Update | Waiting]) -> None:
        """Take it to its end."""
        try:
            for item in items:
                if isinstance(item, Waiting):
                    self.ahead, self.loading = item.ahead, item.loading
                else:
                    self.ahead, self.update = 0, item
                self.bell.ring()
        except Cancelled:
            pass  # It was stopped before its turn had come: there is nothing to tell.
        except StrataError as error:
            self.error = str(error)
        except Exception as error:
            log.exception("An answer broke off.")
            self.error = f"The answer broke off: {error!r}. Its beginning is kept. Ask again."
        finally:
            self.over = True
            self.bell.ring()


class Generations:
    """The answers of all owners. `answer` is what makes one: see `Answering.answer`; `wanted` says
    which one was asked for."""

    def __init__(
        self,
        answer: Callable[[str, str, Preferences], Iterator[Update | Waiting]],
        wanted: Callable[[str, str], Wanted | None] = lambda owner, conversation: None,
    ) -> None:
        self.answer, self.wanted = answer, wanted
        self.known: dict[str, Answer] = {}
        self.lock = threading.Lock()

    def start(self, owner: str, conversation: str, preferences: Preferences) -> Answer:
        """Have the last message of a conversation answered."""
        begun = Answer(owner, conversation, self.wanted(owner, conversation))
        with self.lock:
            over = [answer for answer in self.known.values() if answer.over]
            for answer in over[: max(0, len(over) - KEPT + 1)]:
                del self.known[answer.token]
            self.known[begun.token] = begun
        items = self.answer(owner, conversation, preferences)
        threading.Thread(target=begun.run, args=(items,), name="answer", daemon=True).start()
        return begun

    def find(self, owner: str, conversation: str) -> Answer | None:
        """The answer that is under way in a conversation."""
        with self.lock:
            for answer in reversed(self.known.values()):
                if (answer.owner, answer.conversation) == (owner, conversation) and not answer.over:
                    return answer
        return None

    def get(self, token: str) -> Answer | None:
        """The answer with this token."""
        with self.lock:
            return self.known.get(token)
