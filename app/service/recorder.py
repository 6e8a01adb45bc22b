"""One answer on its way to the store and to whoever watches it grow.

Two invariants. A program that is killed loses what was added in the last second, and no more. So a
thread of its own stores what is new: the model may take long over a step or over learning, and
nobody may be there to fetch the next one. The last step is stored before anyone sees it. A message
comes into being with its first text, and with its run, so that no empty one is left behind.

And what was added stays as it is, so that an `Update` need not copy it: adding an event costs as
much as the event is long, however long the answer is already. Storing what is new costs as much as
that is long, but for the text itself.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.metrics import Metrics, Tally
from engine.runs import Collector
from engine.types import NO_RUN, Event, Run, Step
from storage.conversations import Conversations, Piece
from storage.database import Database
from storage.traces import Traces

FLUSH_SECONDS = 0.5
"""Half of what may be lost: the other half is for the writing itself, and for a busy machine."""
UPDATE_SECONDS = 0.12
"""How often those who watch are told: as often as a page draws."""


class Recorder:
    """Collects an answer to a message and stores it as it grows, until it is closed.

    It is shown, unless the message was answered otherwise meanwhile: then it is another version.
    `keep` does a write that may fail; one that failed is tried again. `message_id` and `run_id` are
    empty until there is text.
    """

    def __init__(
        self,
        database: Database,
        owner: str,
        conversation_id: str,
        after: str | None,
        seed: int,
        keep: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self.database, self.conversation_id, self.seed = database, conversation_id, seed
        self.keep = keep
        self.messages, self.traces = Conversations(database, owner), Traces(database, owner)
        self.after = after
        self.others = self.messages.following(conversation_id, after)
        self.message_id = self.run_id = ""
        self.pieces: list[Piece] = []
        self.collector = Collector(NO_RUN)
        self.tally = Tally()
        self.finish: str | None = None
        self.stored = 0
        self.writing = threading.Lock()
        self.closed = threading.Event()
        self.thread: threading.Thread | None = None

    @property
    def steps(self) -> list[Step]:
        """The steps so far, a list that grows."""
        return self.collector.steps

    @property
    def run(self) -> Run:
        """The answer so far as a run."""
        return self.collector.run

    def begin(self, plan: Run) -> None:
        """The answer's turn has come, and this is how it is made."""
        self.collector.plan = plan

    def add(self, event: Event) -> None:
        """Take in one event."""
        self.tally.add(event)
        self.collector.add(event)
        if not isinstance(event, Step):
            return
        self.finish = event.finish
        self.pieces += [Piece.of(token, event.index) for token in event.tokens]
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

    def flush(self, over: bool = False) -> None:
        """Store what is new of the answer: as soon as there is text, or where it is over."""
        with self.writing:
            run = self.run
            fresh = run.steps[self.stored :]
            text = "".join(token.text for step in fresh for token in step.tokens)
            if not (over and run.tokens or fresh and (text or self.message_id)):
                return
            message_id, run_id = self.message_id, self.run_id

            def write() -> bool:
                nonlocal message_id, run_id
                with self.database.write():
                    if self.message_id:
                        self.messages.extend(message_id, text)
                        self.traces.extend(run_id, fresh, run.learned)
                        return True
                    run_id = self.traces.save(run, self.conversation_id)
                    id, after = self.conversation_id, self.after
                    shown = self.messages.following(id, after) == self.others
                    message = id, "assistant", text, run_id, None, after, shown
                    message_id = self.messages.append(*message).id
                return True

            if self.keep(write):
                self.message_id, self.run_id = message_id, run_id
                self.stored = len(run.steps)

    def close(self) -> None:
        """Store what is left, once the answer is over."""
        self.closed.set()
        if self.thread is not None:
            self.thread.join()
        self.flush(over=True)


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
