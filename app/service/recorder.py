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
from dataclasses import asdict, dataclass, replace
from typing import Any

from app.service.continuing import Begun, told_again
from engine.engine import ServerCounted
from engine.metrics import Metrics, tallied
from engine.runs import Collector
from engine.types import NO_RUN, Event, Learned, Part, Prefill, Run, Step
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

    An answer that is gone on with (`begun`) stays as it is stored until more of it comes.
    """

    def __init__(
        self,
        database: Database,
        owner: str,
        conversation_id: str,
        after: str | None,
        seed: int,
        keep: Callable[[Callable[[], Any]], Any],
        begun: Begun | None = None,
    ) -> None:
        self.database, self.conversation_id, self.seed = database, conversation_id, seed
        self.keep = keep
        self.messages, self.traces = Conversations(database, owner), Traces(database, owner)
        self.after = after
        self.others = self.messages.following(conversation_id, after)
        self.begun, run = begun, begun.run if begun else NO_RUN
        self.message_id = begun.message.id if begun else ""
        self.run_id = begun.run_id if begun else ""
        self.pieces: list[Piece] = list(begun.message.pieces or begun.head) if begun else []
        self.given = len(self.pieces)
        self.collector = Collector(run)
        self.tally = tallied(run)
        self.first = run.steps[-1].index + 1 if run.steps else 0
        """The number of the first step that this one adds."""
        self.part: Part | None = None
        self.prompt: tuple[int, ...] = ()
        self.told: str | None = None
        self.thinks = False
        """Whether it begins within thinking that the chat template has begun."""
        self.finish: str | None = None
        self.counted: ServerCounted | None = None
        """What the counters of a server tell."""
        self.stored = len(run.steps)
        self.opened = begun is None
        """Whether what is stored ends so that more can follow."""
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

    @property
    def grown(self) -> bool:
        """Whether anything was said."""
        return len(self.pieces) > self.given

    def begin(self, plan: Run, prompt: tuple[int, ...] = (), told: str | None = None) -> None:
        """The answer's turn has come, and this is how it is made, behind this prompt; `told` is
        what of an answer that is gone on with is certain."""
        begun = self.begun
        self.prompt, self.told = prompt, told
        if begun is None or not begun.run_id:
            self.collector.plan = plan
            return
        nothing = Prefill(0, 0)
        self.part = Part(
            self.first, plan.method, plan.model, plan.fingerprint, plan.settings, nothing
        )
        steps = self.collector.steps
        steps[-1] = told_again([step for step in steps if step.index >= begun.start], told)
        count = len(steps[-1].tokens)
        self.pieces[-count:] = [Piece.of(token, steps[-1].index) for token in steps[-1].tokens]

    def add(self, event: Event | ServerCounted) -> None:
        """Take in one event."""
        if isinstance(event, ServerCounted):
            self.counted = event
        elif isinstance(event, Step):
            self.take(replace(event, index=self.first + event.index))
        elif isinstance(event, Prefill) and self.part is not None:
            self.part = replace(self.part, prefill=event)
            plan = self.collector.plan
            self.collector.plan = replace(plan, parts=(*plan.parts, self.part))
            self.tally.resume(event)
        else:
            if isinstance(event, Learned):
                event = Learned(event.seconds + self.tally.learning_seconds)
            self.tally.add(event)
            self.collector.add(event)

    def take(self, step: Step) -> None:
        """Take in a step."""
        self.finish = step.finish
        if not step.tokens and not self.opened:
            return  # It was stopped before more of it came.
        self.tally.add(step)
        self.collector.add(step)
        self.pieces += [Piece.of(token, step.index) for token in step.tokens]
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
        return Update(self, *counts, metrics, self.finish, dropped, self.seed, self.counted)

    def flush(self, over: bool = False) -> None:
        """Store what is new of the answer: as soon as there is text, or where it is over."""
        with self.writing:
            run = self.run
            fresh = run.steps[self.stored :]
            text = "".join(token.text for step in fresh for token in step.tokens)
            if not (over and run.tokens and self.opened or fresh and (text or self.message_id)):
                return
            ids = self.message_id, self.run_id

            def write() -> bool:
                nonlocal ids
                with self.database.write():
                    ids = self.write(run, fresh, text)
                return True

            if self.keep(write):
                self.message_id, self.run_id = ids
                self.stored, self.opened = len(run.steps), True

    def write(self, run: Run, fresh: Sequence[Step], text: str) -> tuple[str, str]:
        """Store these further steps of the answer; the ids of its message and its run."""
        if not self.opened:
            return self.message_id, self.go_on(run, fresh, text)
        if self.message_id:
            self.messages.extend(self.message_id, text)
            self.traces.extend(self.run_id, fresh, run.learned)
            return self.message_id, self.run_id
        id, after = self.conversation_id, self.after
        run_id = self.traces.save(run, id, prompt=self.prompt)
        shown = self.messages.following(id, after) == self.others
        message = self.messages.append(id, "assistant", text, run_id, None, after, shown)
        return message.id, run_id

    def go_on(self, run: Run, fresh: Sequence[Step], text: str) -> str:
        """Store that an answer goes on with these steps; the id of its run."""
        begun = self.begun
        assert begun is not None
        head = "".join(piece.text for piece in begun.head)
        if self.part is None:
            run_id = self.traces.save(run, self.conversation_id, prompt=self.prompt)
            self.messages.rewrite(self.message_id, f"{head}{text}", run_id, begun.head)
            return run_id
        prompt = self.prompt  # Of another model, all that it read.
        if self.told is not None:
            prompt = () if begun.prompt else (*self.prompt, *begun.said)
        run_id = self.traces.go_on(self.run_id, run.steps[self.stored - 1], self.part, prompt)
        self.traces.extend(run_id, fresh, run.learned)
        whole = "".join(token.text for token in run.tokens)
        self.messages.rewrite(self.message_id, f"{head}{whole}", run_id, begun.head or None)
        return run_id

    def close(self) -> None:
        """Store what is left, once the answer is over."""
        self.closed.set()
        if self.thread is not None:
            self.thread.join()
        self.flush(over=True)
        counted, run_id = self.counted, self.run_id
        if counted is not None and run_id:
            self.keep(lambda: self.traces.tell_counts(run_id, asdict(counted)))


@dataclass(frozen=True, slots=True)
class Update:
    """An answer up to a moment: its first `tokens` tokens, from its first `forwards` steps, and
    what they were worth.

    No token is copied before it is asked for. `dropped` older messages did not fit the context.
    `counted` is what the counters of a server tell, where one answers.
    """

    recorder: Recorder
    tokens: int
    forwards: int
    metrics: Metrics
    finish: str | None
    dropped: int
    seed: int
    counted: ServerCounted | None = None

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
