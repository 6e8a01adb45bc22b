"""Plain decoding measured against drafting, for Prove it and for Compare.

Both decode in the same pairs of runs (app/service/comparison.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from app.service.comparison import Pairs, Progress, Proof
from app.service.current import Current
from app.service.draft_models import Stacks
from app.service.history import Answered, History
from app.service.notices import Notices
from app.service.preferences import Preferences
from app.service.revival import Revival
from app.service.stores import Stores
from app.service.tasks import Task, Tasks
from engine.backends.base import BackendInfo
from engine.engine import (
    Engine,
    Measured,
    Request,
    StoredContextLog,
    StoredPastAnswers,
    WantedContextLog,
    WantedPastAnswers,
)
from engine.errors import PromptError
from engine.metrics import summarise
from engine.queue import Waiting
from engine.runs import PlainSpeed, verdict, worth
from engine.types import Message

PROOFS = 3
"""Pairs of a proof, at most: where the first ones took long enough, the others are left out."""
ENOUGH = 4.0
"""Seconds of pairs after which a proof has seen enough. One pair of short runs may be ten per cent
off on a machine that does something else as well; three have a median."""


@dataclass(frozen=True, slots=True)
class Proofs:
    """See the module's docstring."""

    engine: Engine
    tasks: Tasks
    current: Current
    stacks: Stacks
    stores: Stores
    history: History
    notices: Notices
    revival: Revival

    def prove(self, owner: str, conversation_id: str) -> Iterator[Proof | Waiting]:
        """Decode the last answer of a conversation again, plainly and with drafts, from the same
        prompt and seed.

        The verdict compares what was shown with the plain run, which has the answer's own limit; an
        answer that the user ended can only be the beginning of one. The speedup is of the reruns,
        at one load of the machine; their drafters have not learned this answer. Raises PromptError
        when the loaded model gave none, or when the proof was stopped.
        """
        with self.tasks.begin(owner, conversation_id) as task:
            yield from self.proved(owner, conversation_id, task)

    def proved(self, owner: str, conversation_id: str, task: Task) -> Iterator[Proof | Waiting]:
        """`prove`, as one task."""
        answered = self.history.provable(owner, conversation_id)
        if answered is None or answered.info != self.current.info:
            raise PromptError(
                "There is no answer to prove since the program started. Send a message or "
                "regenerate an answer first."
            )
        pairs = self.reruns(owner, answered, task)
        progress: Progress | None = None
        for item in pairs.compare(PROOFS, ENOUGH):
            if isinstance(item, Waiting):
                yield item
                continue
            progress = item
            if progress.running is not None:
                yield Proof(len(progress.running.tokens), progress.running.method)
        if progress is None or not progress.over:
            raise PromptError("The proof was stopped. Press Prove it to try again.")
        yield self.proof_of(owner, answered, progress)

    def reruns(self, owner: str, answered: Answered, task: Task, patient: bool = False) -> Pairs:
        """An answer decoded again, plainly and with drafts that have not learned it."""
        shown, generation = answered.run, answered.generation
        said = tuple(token.id for token in shown.tokens)
        if shown.broken_off:
            generation = replace(generation, max_tokens=max(1, len(said)))
        request = Request((), answered.prompt, generation, answered.method, None, owner)
        request = replace(request, patient=patient)
        measured = Measured((*answered.prompt, *said), len(said), answered.calibration)
        return self.pairs(request, measured, task, answered.info)

    def proof_of(self, owner: str, answered: Answered, progress: Progress) -> Proof:
        """What the pairs of a proof say of the answer that was shown."""
        # The pair in the middle, so that the times that are told give the speedup that is told.
        ranked = sorted(
            progress.pairs, key=lambda pair: summarise(pair[0]).seconds / summarise(pair[1]).seconds
        )
        middle = ranked[(len(ranked) - 1) // 2]
        shown, (plain, fast) = answered.run, middle
        speeds = [summarise(slow).tokens_per_second for slow, _ in progress.pairs]
        self.current.plain = PlainSpeed(median(speeds), "by the last proof")
        kept = min(summarise(run).kept for run in (shown, *(quick for _, quick in progress.pairs)))
        gained = worth([middle], kept)
        if answered.run_id:
            self.history.note(owner, answered.run_id, gained)
        return Proof(
            len(plain.tokens),
            answered.method.name,
            verdict(self.current.text, plain, shown),
            gained,
            plain,
            fast,
            shown,
            answered.same_text,
        )

    def compare(
        self, owner: str, text: str, system: str, preferences: Preferences, repeats: int
    ) -> Iterator[Progress | Waiting]:
        """Answer one prompt plainly and by the chosen method, in pairs, until it is stopped.

        Every run has a fresh context tier, and is stored with its pair. Between two runs others may
        use the model; raises ModelError when it is another one then. Stopped while it waits for
        them, it ends with the pairs there are.
        """
        messages = [Message("system", system.strip())] if system.strip() else []
        messages.append(Message("user", text))
        with self.tasks.begin(owner, "") as task:
            yield from self.revival.loaded(task)
            yield from self.compared(owner, messages, preferences, repeats, task)

    def compared(
        self,
        owner: str,
        messages: Sequence[Message],
        preferences: Preferences,
        repeats: int,
        task: Task,
    ) -> Iterator[Progress | Waiting]:
        """`compare`, as one task.

        The answer that was last given to the same prompt is not known to its drafters: who compares
        after asking wants to see what a first answer gains.
        """

        def unlearn(prompt: tuple[int, ...]) -> Measured:
            for (who, _), last in reversed(self.history.last.items()):
                if who == owner and last.prompt == prompt:
                    said = tuple(token.id for token in last.run.tokens)
                    return Measured((*prompt, *said), len(said), last.calibration)
            return Measured()

        method, generation = preferences.chosen(), preferences.seeded()
        request = Request(tuple(messages), (), generation, method, None, owner)
        pairs = self.pairs(request, Measured(), task)
        pairs.unlearn = unlearn
        progress: Progress | None = None
        for item in pairs.compare(repeats):
            yield item
            if isinstance(item, Waiting):
                continue
            progress = item
            if progress.running is None and not progress.cancelled:
                self.history.save_pair(owner, *progress.pairs[-1])
        if progress and progress.pairs:
            speeds = [summarise(plain).tokens_per_second for plain, _ in progress.pairs]
            self.current.plain = PlainSpeed(median(speeds), "in the last comparison")

    def pairs(
        self, request: Request, measured: Measured, task: Task, info: BackendInfo | None = None
    ) -> Pairs:
        """Pairs of runs of a request by the model of `info`, or whichever is loaded; they end with
        `task`."""
        owner = request.owner
        request = replace(request, profile=self.stacks.profile_for(request.generation.sampling))

        def reply(
            wanted: WantedPastAnswers | WantedContextLog,
        ) -> StoredPastAnswers | StoredContextLog:
            return self.stores.recall(wanted, owner, "")

        def report(problem: str) -> None:
            self.notices.report(owner, problem)

        return Pairs(self.engine, request, measured, reply, report, task.stop, info)
