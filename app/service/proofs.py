"""Prove it: plain decoding measured against drafting. Compare: any two ways to answer.

Both decode in the same pairs of runs (app/service/comparison.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from app.service.comparison import LEFT, RIGHT, Pairs, Progress, Proof, Side, differs
from app.service.current import Current
from app.service.draft_models import Stacks
from app.service.history import Answered, History
from app.service.lending import Lending, Loan
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
    Started,
    StoredContextLog,
    StoredPastAnswers,
    WantedContextLog,
    WantedPastAnswers,
)
from engine.errors import PromptError
from engine.methods import PLAIN
from engine.metrics import summarise
from engine.queue import Waiting
from engine.runs import PlainSpeed, verdict, worth
from engine.types import Message

ELSEWHERE = (
    "This answer came from a server, whose text cannot be proved here. The Compare tab asks it "
    "with and without drafts."
)
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
    lending: Lending

    def prove(self, owner: str, conversation_id: str) -> Iterator[Proof | Waiting]:
        """Decode the last answer of a conversation again, plainly and with drafts, from the same
        prompt and seed.

        The verdict compares what was shown with the plain run, which has the answer's own limit; an
        answer that the user ended can only be the beginning of one. The speedup is of the reruns,
        at one load of the machine; their drafters have not learned this answer. Raises PromptError
        when the loaded model gave none, or when the proof was stopped.
        """
        with self.tasks.begin(owner, conversation_id) as task:
            yield from self.lending.gate(task)
            yield from self.proved(owner, conversation_id, task)

    def proved(self, owner: str, conversation_id: str, task: Task) -> Iterator[Proof | Waiting]:
        """`prove`, as one task."""
        answered = self.history.provable(owner, conversation_id)
        if answered is not None and answered.info.server is not None:
            raise PromptError(ELSEWHERE)
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
        """Answer one prompt plainly and by the chosen method, with the same settings."""
        generation = preferences.seeded()
        sides = Side(PLAIN, generation), Side(preferences.chosen(), generation)
        yield from self.compare_sides(owner, text, system, sides, repeats)

    def compare_sides(
        self, owner: str, text: str, system: str, sides: tuple[Side, Side], repeats: int
    ) -> Iterator[Progress | Waiting]:
        """Answer one prompt in two ways, in pairs, until it is stopped.

        Every run has a fresh context tier, and is stored with its pair. Between two runs others may
        use the model; raises ModelError when it is another one then. Stopped while it waits for
        them, it ends with the pairs there are. Where a side wants another model than the loaded
        one, that is back when this ends, however it ends.
        """
        messages = [Message("system", system.strip())] if system.strip() else []
        messages.append(Message("user", text))
        with self.tasks.begin(owner, "") as task:
            self.lending.check(sides)
            yield from self.revival.loaded(task)
            sides = self.lending.named(sides[LEFT]), self.lending.named(sides[RIGHT])
            check_switch(self.engine.state.info, sides)
            if not any(side.source for side in sides):
                yield from self.compared(owner, messages, sides, repeats, task)
                return
            with self.lending.lend(task) as loan:
                yield from self.compared(owner, messages, sides, repeats, task, loan)
            yield from self.lending.awaited()

    def compared(
        self,
        owner: str,
        messages: Sequence[Message],
        sides: tuple[Side, Side],
        repeats: int,
        task: Task,
        loan: Loan | None = None,
    ) -> Iterator[Progress | Waiting]:
        """`compare_sides`, as one task.

        The answer that was last given to the same prompt is not known to its drafters: who compares
        after asking wants to see what a first answer gains.
        """

        def unlearn(started: Started) -> Measured:
            for (who, _), last in reversed(self.history.last.items()):
                if (who, last.prompt, last.info) == (owner, started.prompt, started.info):
                    said = tuple(token.id for token in last.run.tokens)
                    return Measured((*last.prompt, *said), len(said), last.calibration)
            return Measured()

        left, right = (
            Request(tuple(messages), (), side.generation, side.method, None, owner)
            for side in sides
        )
        pairs = self.pairs_of((left, right), Measured(), task)
        pairs.unlearning(unlearn)
        pairs.differs, pairs.foreign = differs(*sides), all(side.source for side in sides)
        if loan is not None:
            pairs.ready, pairs.exchanged = lambda side: loan.use(sides[side].source), True
        progress: Progress | None = None
        for item in pairs.compare(repeats):
            yield item
            if isinstance(item, Waiting):
                continue
            progress = item
            if progress.running is None and not progress.cancelled:
                self.keep(owner, sides, progress)
        if progress and progress.pairs:
            self.note_plain(sides, progress)

    def keep(self, owner: str, sides: tuple[Side, Side], progress: Progress) -> None:
        """Store the last pair. What drafts gained is known where the one side was plain."""
        left, right = progress.pairs[-1]
        if progress.differs or PLAIN not in (sides[LEFT].method, sides[RIGHT].method):
            self.history.save_runs(owner, left, right)
        elif sides[LEFT].method == PLAIN:
            self.history.save_pair(owner, left, right)
        else:
            self.history.save_pair(owner, right, left)

    def note_plain(self, sides: tuple[Side, Side], progress: Progress) -> None:
        """Remember how fast the loaded model was plainly, where one side says so."""
        for at, side in enumerate(sides):
            if side.method == PLAIN and not side.source:
                speeds = [summarise(pair[at]).tokens_per_second for pair in progress.pairs]
                self.current.plain = PlainSpeed(median(speeds), "in the last comparison")

    def pairs(
        self, request: Request, measured: Measured, task: Task, info: BackendInfo | None = None
    ) -> Pairs:
        """Pairs of runs of a request, plainly and as it asks for, by the model of `info`, or
        whichever is loaded; they end with `task`."""
        return self.pairs_of((replace(request, method=PLAIN), request), measured, task, info)

    def pairs_of(
        self,
        requests: tuple[Request, Request],
        measured: Measured,
        task: Task,
        info: BackendInfo | None = None,
    ) -> Pairs:
        """Pairs of runs of two requests by the model of `info`, or whichever is loaded; they end
        with `task`."""
        owner = requests[RIGHT].owner

        def reply(
            wanted: WantedPastAnswers | WantedContextLog,
        ) -> StoredPastAnswers | StoredContextLog:
            return self.stores.recall(wanted, owner, "")

        def report(problem: str) -> None:
            self.notices.report(owner, problem)

        pairs = Pairs(self.engine, requests, measured, reply, report, task.stop, info)
        pairs.profile = self.stacks.profile_for
        return pairs


def check_switch(info: BackendInfo, sides: tuple[Side, Side]) -> None:
    """Raise PromptError for two sides that would be the same to a server, as it cannot be told to
    answer without drafts."""
    server = info.server
    methods = {side.method == PLAIN for side in sides if not side.source}
    if server is not None and not server.switches and len(methods) > 1:
        raise PromptError(
            f"{server.host} cannot be told to answer without drafts. Start the same server without "
            "drafting at a second address, load that once in the Models tab, and choose it as the "
            "model of the left side."
        )
