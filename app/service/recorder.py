"""One answer on its way to the store and to whoever watches it grow.

Two invariants. A program that is killed loses what was added in the last second, and no more. So a
thread of its own stores what is new: the model may take long over a step or over learning, and
nobody may be there to fetch the next one. The last step is stored before anyone sees it. A message
comes into being with its first text, so that no empty one is left behind.

And what was added stays as it is, so that an `Update` need not copy it: adding an event costs as
much as the event is long, however long the answer is already.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.metrics import Metrics, Tally
from engine.runs import Timed
from engine.types import TARGET, Event, Learned, Prefill, Step, Token
from storage.conversations import Conversations, Piece

FLUSH_SECONDS = 0.5
"""Half of what may be lost: the other half is for the writing itself, and for a busy machine."""
UPDATE_SECONDS = 0.12
"""How often those who watch are told: as often as a page draws."""


class Recorder:
    """Collects an answer to the last message and stores it as it grows, until it is closed.

    `keep` does a write that may fail; one that failed is tried again. `message_id` is empty until
    there is text.
    """

    def __init__(
        self,
        store: Conversations,
        conversation_id: str,
        seed: int,
        keep: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self.store, self.conversation_id, self.seed, self.keep = store, conversation_id, seed, keep
        self.after = store.last(conversation_id)
        self.message_id = ""
        self.pieces: list[Piece] = []
        self.steps: list[Step] = []
        self.tally = Tally()
        self.prefill: Prefill | None = None
        self.learned: Learned | None = None
        self.finish: str | None = None
        self.stored = 0
        self.writing = threading.Lock()
        self.closed = threading.Event()
        self.thread: threading.Thread | None = None

    def add(self, event: Event) -> None:
        """Take in one event."""
        self.tally.add(event)
        if isinstance(event, Prefill):
            self.prefill = event
            return
        if isinstance(event, Learned):
            self.learned = event
            return
        self.steps.append(event)
        self.finish = event.finish
        self.pieces += [piece_of(token, event.index) for token in event.tokens]
        if self.finish:
            self.flush()
        elif self.thread is None:
            self.thread = threading.Thread(target=self.keep_up, name="recorder", daemon=True)
            self.thread.start()

    def keep_up(self) -> None:
        """Store what is new, again and again."""
        while not self.closed.wait(FLUSH_SECONDS):
            self.flush()

    def update(self, dropped: int) -> "Update":
        """The answer so far."""
        counts, metrics = (len(self.pieces), len(self.steps)), self.tally.metrics()
        return Update(self, *counts, metrics, self.finish, dropped, self.seed)

    def run(self, method: str) -> Timed:
        """The answer as a run."""
        return Timed(method, self.prefill, tuple(self.steps), self.learned)

    def flush(self, run_id: str | None = None) -> None:
        """Store the answer so far, if there is more of it than was stored, or with its run."""
        with self.writing:
            pieces = tuple(self.pieces)
            text = "".join(piece.text for piece in pieces)
            if run_id is None and (len(pieces) == self.stored or not text):
                return

            def write() -> bool:
                if self.message_id:
                    self.store.update_message(self.message_id, text, pieces, run_id)
                else:
                    where = self.conversation_id, "assistant"
                    made = self.store.append(*where, text, run_id, pieces, self.after)
                    self.message_id = made.id
                return True

            if self.keep(write):
                self.stored = len(pieces)

    def close(self) -> None:
        """Store what is left; from here on only `flush` does."""
        self.closed.set()
        if self.thread is not None:
            self.thread.join()
        self.flush()


@dataclass(frozen=True, slots=True)
class Update:
    """An answer up to a moment: its first `tokens` tokens, from its first `forwards` steps, and
    what they were worth.

    No token is copied before it is asked for. `dropped` older messages did not fit the context.
    """

    recorder: Recorder
    tokens: int
    forwards: int
    metrics: Metrics
    finish: str | None
    dropped: int
    seed: int

    def since(self, start: int, most: int | None = None) -> Sequence[Piece]:
        """The tokens from number `start` on, at most so many."""
        end = self.tokens if most is None else min(self.tokens, start + most)
        return self.recorder.pieces[start:end]

    @property
    def pieces(self) -> Sequence[Piece]:
        """All tokens."""
        return self.since(0)

    @property
    def steps(self) -> Sequence[Step]:
        """The steps that they came from."""
        return self.recorder.steps[: self.forwards]

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(piece.text for piece in self.pieces)


def piece_of(token: Token, step: int) -> Piece:
    """What is kept of a token for the token view."""
    return Piece(
        token.text,
        token.source or TARGET,
        token.match_length,
        step,
        token.position,
        round(token.probability, 4),
    )
