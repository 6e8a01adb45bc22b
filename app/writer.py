"""One answer on its way to the screen and to the store."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from app.comparison import Pace, Timed
from engine.errors import StorageError
from engine.metrics import Metrics, summarise
from engine.types import TARGET, Event, Learned, Prefill, Step, Token
from storage.conversations import Conversations, Piece

FLUSH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Update:
    """An answer as it grows. `dropped` older messages did not fit the context."""

    pieces: Sequence[Piece]
    metrics: Metrics
    steps: Sequence[Step]
    finish: str | None
    dropped: int
    seed: int

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(piece.text for piece in self.pieces)


class Writer:
    """Collects an answer and stores it about once a second; `keep` does a write that may fail."""

    def __init__(
        self,
        store: Conversations,
        conversation_id: str,
        seed: int,
        keep: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self.store, self.conversation_id, self.seed, self.keep = store, conversation_id, seed, keep
        self.message = store.append(conversation_id, "assistant", "", pieces=())
        self.pieces: list[Piece] = []
        self.steps: list[Step] = []
        self.prefill: Prefill | None = None
        self.learned: Learned | None = None
        self.finish: str | None = None
        self.pace = Pace(FLUSH_SECONDS)
        self.pace.due()

    def add(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, Prefill):
            self.prefill = event
            return
        if isinstance(event, Learned):
            self.learned = event
            return
        self.steps.append(event)
        self.finish = event.finish
        self.pieces += [piece_of(token, event.index) for token in event.tokens]
        if self.pace.due():
            self.flush()

    def update(self, dropped: int) -> Update:
        """What the interface shows now."""
        return Update(
            tuple(self.pieces),
            summarise(self.prefill, self.steps, self.learned),
            tuple(self.steps),
            self.finish,
            dropped,
            self.seed,
        )

    def run(self, method: str) -> Timed:
        """The answer as a run."""
        return Timed(method, self.prefill, tuple(self.steps), self.learned)

    def flush(self, run_id: str | None = None) -> None:
        """Store the answer so far."""
        text = "".join(piece.text for piece in self.pieces)
        self.keep(lambda: self.store.update_message(self.message.id, text, self.pieces, run_id))

    def discard(self) -> None:
        """Take the message back: nothing was answered."""
        with suppress(StorageError):
            self.store.truncate(self.conversation_id, self.message.position)


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
