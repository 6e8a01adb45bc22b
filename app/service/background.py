"""Answers that are proved in the background: a badge on each, where the user wants that.

It costs time, so it is off by default. An answer is decoded again, plainly and with drafts, as
*Prove it* does (app/service/proofs.py), by patient runs: they begin while nobody wants anything of
the model and are stopped as soon as somebody does (engine/queue.py). What was stopped begins again
later. The outcome is stored with the answer's run, and goes with it.

What waits here is forgotten when the program ends, as an answer's prompt is not stored.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from math import log
from typing import Any

from app.service.comparison import Progress, Proof
from app.service.history import Answered
from app.service.preferences import Preferences
from app.service.proofs import ELSEWHERE, Proofs
from app.service.recorder import Update
from app.service.tasks import Task
from engine.errors import Cancelled, EngineDied, ModelError, StrataError
from engine.queue import Waiting
from engine.runs import Verdict
from engine.types import Run
from storage.conversations import Conversations
from storage.traces import Traces

MOST = 16
"""Answers that wait to be proved; of more the oldest are left out."""
TRIES = 20
"""Times that a proof may have to give way before it is given up."""
Answers = Callable[[str, str, Preferences], Generator[Update | Waiting, None, None]]
"""See Answering.answer."""

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Job:
    """An answer that is to be proved. Its task is no task of its owner's: nobody waits for it."""

    owner: str
    conversation: str
    answered: Answered
    task: Task = field(init=False)
    tries: int = 0

    def __post_init__(self) -> None:
        self.task = Task(self.owner, self.conversation)

    @property
    def run_id(self) -> str:
        """What the answer's run is stored as."""
        return self.answered.run_id or ""


class Background:
    """See the module's docstring. One thread works while there is something to prove."""

    def __init__(self, proofs: Proofs) -> None:
        self.proofs = proofs
        self.jobs: deque[Job] = deque()
        self.running: Job | None = None
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def checking(self, answers: Answers) -> Answers:
        """The same answers; those whose preferences say so are proved when they are over."""

        def answer(
            owner: str, conversation: str, preferences: Preferences
        ) -> Generator[Update | Waiting, None, None]:
            before = self.proofs.history.last.get((owner, conversation))
            yield from answers(owner, conversation, preferences)
            answered = self.proofs.history.last.get((owner, conversation))
            if preferences.check and answered is not None and answered is not before:
                self.add(owner, conversation, answered)

        return answer

    def add(self, owner: str, conversation: str, answered: Answered) -> None:
        """Have an answer proved that is stored."""
        if not answered.run_id:
            return
        job = Job(owner, conversation, answered)
        if not answered.same_text:
            why = "Same distribution does not keep the text of a seed."
            self.store(job, skipped(why if answered.info.server is None else ELSEWHERE))
            return
        if not answered.one:
            self.store(job, skipped("It was gone on with by other settings or another model."))
            return
        with self.changed:
            self.jobs.append(job)
            while len(self.jobs) > MOST:
                self.jobs.popleft()
            if self.thread is None:
                self.thread = threading.Thread(target=self.work, name="proofs", daemon=True)
                self.thread.start()

    def forget(self, owner: str, conversation: str) -> None:
        """Prove nothing of a conversation any more; what is under way ends."""
        with self.changed:
            known = [*self.jobs, *([self.running] if self.running else [])]
            for job in known:
                if (job.owner, job.conversation) == (owner, conversation):
                    job.task.stop.set()

    def idle(self, seconds: float) -> bool:
        """Whether there is nothing to prove, or will not be within so many seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: self.thread is None, seconds)

    def work(self) -> None:
        """Prove one answer after the other, until there is none."""
        while True:
            with self.changed:
                self.running = self.jobs.popleft() if self.jobs else None
                if self.running is None:
                    self.thread = None
                    self.changed.notify_all()
                    return
            self.prove(self.running)

    def prove(self, job: Job) -> None:
        """Prove an answer, unless it has to give way: then it waits again."""
        try:
            found = self.outcome(job)
        except Cancelled:
            found = None
        except EngineDied:
            return
        except ModelError:
            found = skipped("Another model was loaded before this answer could be checked.")
        except StrataError as error:
            found = skipped(str(error))
        except Exception:
            logger.exception("A proof in the background broke off.")
            found = skipped("The check broke off. The log says why.")
        if job.task.stop.is_set():
            return
        job.tries += 1
        if found is None and job.tries < TRIES:
            with self.changed:
                self.jobs.appendleft(job)
        else:
            self.store(job, found or skipped("The model was wanted for other things."))

    def outcome(self, job: Job) -> dict[str, Any] | None:
        """What the proof says; None where it had to give way."""
        Traces(self.proofs.stores.database, job.owner).get(job.run_id)
        if job.task.stop.is_set():
            return None
        for _ in self.proofs.revival.loaded(job.task):
            pass
        if self.proofs.current.info != job.answered.info:
            raise ModelError("another model")
        progress: Progress | None = None
        pairs = self.proofs.reruns(job.owner, job.answered, job.task, patient=True)
        for item in pairs.compare(1):
            progress = item if isinstance(item, Progress) else progress
        if progress is None or not progress.over:
            return None
        return told(self.proofs.proof_of(job.owner, job.answered, progress))

    def store(self, job: Job, found: dict[str, Any]) -> None:
        """Keep an outcome with the answer's run, and have pages show it."""
        database = self.proofs.stores.database

        def write() -> None:
            with database.write():
                Traces(database, job.owner).prove(job.run_id, found)
                Conversations(database, job.owner).remarked(job.conversation)

        self.proofs.notices.keep(job.owner, write)


def skipped(why: str) -> dict[str, Any]:
    """The outcome of an answer that was not proved."""
    return {"kind": "skipped", "why": why}


def told(proof: Proof) -> dict[str, Any]:
    """The outcome of a proof as it is stored."""
    found, plain, shown = proof.verdict, proof.plain, proof.shown
    assert found is not None and plain is not None and shown is not None
    if found.identical:
        return {"kind": "same", "tokens": found.tokens, "speedup": proof.speedup.whole}
    return {
        "kind": "differs",
        "at": found.position,
        "plain": found.plain,
        "said": found.accelerated,
        "early": found.ended_early,
        "gap": gap(found, plain, shown),
    }


def gap(found: Verdict, plain: Run, shown: Run) -> float | None:
    """How far the logits of the two tokens are apart where two runs part: the logarithm of how much
    likelier the one is, as the model itself has it. None where one of the runs has ended there."""
    at = found.position - 1
    runs = [run.tokens for run in (plain, shown)]
    if any(at >= len(tokens) or tokens[at].probability <= 0 for tokens in runs):
        return None
    left, right = (tokens[at].probability for tokens in runs)
    return round(abs(log(left / right)), 6)
