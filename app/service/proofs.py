"""Plain decoding beside what a session does: the last answer proved, two methods compared.

Both are measured by the same pairs of runs (app/service/comparison.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from app.service.comparison import Pairs, Progress, Proof
from app.service.preferences import Preferences
from app.service.runs import Run
from engine.backends.base import BackendInfo
from engine.engine import Measured, Request
from engine.errors import PromptError
from engine.methods import Method
from engine.queue import Waiting
from engine.runs import PLAIN, PlainSpeed, Timed, verdict, worth
from engine.settings import Generation
from engine.types import CalibrationRow, Message
from storage.traces import Traces

if TYPE_CHECKING:
    from app.service.session import Session

PROOFS = 3
"""Pairs of a proof, at most: where the first ones took long enough, the others are left out."""
ENOUGH = 4.0
"""Seconds of pairs after which a proof has seen enough. One pair of short runs may be ten per cent
off on a machine that does something else as well; three have a median."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What it takes to decode the last answer again: its prompt and model, its settings, its run.

    `calibration` holds the evidence weights before it, `run_id` what the run is stored as;
    `same_text` says whether decoding it again must give the same text.
    """

    prompt: tuple[int, ...]
    info: BackendInfo
    generation: Generation
    method: Method
    run: Timed
    calibration: tuple[CalibrationRow, ...]
    run_id: str | None
    same_text: bool = True


def pairs_of(
    session: "Session",
    request: Request,
    measured: Measured,
    run: Run,
    info: BackendInfo | None = None,
) -> Pairs:
    """Pairs of runs of a request by the model of `info`, or whichever is loaded; they end with
    `run`."""
    request = replace(request, profile=session.stacks.profile_for(request.generation.sampling))

    def reply(wanted: object) -> object:
        return session.recall(wanted, request.owner, "")

    def report(problem: str) -> None:
        session.report(request.owner, problem)

    return Pairs(session.engine, request, measured, reply, report, run.stop, info)


def proved(
    session: "Session", owner: str, conversation_id: str, run: Run
) -> Iterator[Proof | Waiting]:
    """Decode the last answer of a conversation again, plainly and with drafts.

    The verdict compares what was shown with the plain run, which has the answer's own limit; an
    answer that the user ended can only be the beginning of one. The speedup is of the reruns, at
    one load of the machine; their drafters have not learned this answer. Raises PromptError when
    the loaded model gave none, or when the proof was stopped.
    """
    answered = session.answered.get((owner, conversation_id))
    if answered is None or answered.info != session.info:
        raise PromptError(
            "There is no answer of this session to prove. Send or regenerate one first."
        )
    shown, generation = answered.run, answered.generation
    said = tuple(token.id for token in shown.tokens)
    if shown.broken_off:
        generation = replace(generation, max_tokens=max(1, len(said)))
    method = answered.method
    request = Request((), answered.prompt, generation, method, None, owner)
    measured = Measured((*answered.prompt, *said), len(said), answered.calibration)
    pairs = pairs_of(session, request, measured, run, answered.info)
    progress: Progress | None = None
    for item in pairs.compare(PROOFS, ENOUGH):
        if isinstance(item, Waiting):
            yield item
            continue
        progress = item
        if progress.running is not None:
            yield Proof(len(progress.running.tokens), progress.running.method)
    if progress is None or not progress.over:
        raise PromptError("The proof was stopped before its end. Press Prove it to try again.")
    yield proof_of(session, owner, answered, progress)


def proof_of(session: "Session", owner: str, answered: Answered, progress: Progress) -> Proof:
    """What the pairs of a proof say of the answer that was shown."""
    # The pair in the middle, so that the times that are told give the speedup that is told.
    ranked = sorted(
        progress.pairs, key=lambda pair: pair[0].metrics.seconds / pair[1].metrics.seconds
    )
    middle = ranked[(len(ranked) - 1) // 2]
    shown, (plain, fast) = answered.run, middle
    speeds = [slow.metrics.tokens_per_second for slow, _ in progress.pairs]
    session.plain = PlainSpeed(median(speeds), "by the last proof")
    kept = min(shown.metrics.kept, *(quick.metrics.kept for _, quick in progress.pairs))
    gained = worth([middle], kept)
    if run_id := answered.run_id:
        store = Traces(session.database, owner)
        session.keep(owner, lambda: store.note(run_id, gained.whole, gained.decoding))
    return Proof(
        len(plain.tokens),
        answered.method.name,
        verdict(session.text, plain, shown),
        gained,
        plain,
        fast,
        shown,
        answered.same_text,
    )


def compared(
    session: "Session",
    owner: str,
    messages: Sequence[Message],
    preferences: Preferences,
    repeats: int,
    run: Run,
) -> Iterator[Progress | Waiting]:
    """Answer the messages plainly and by the chosen method, in pairs, until it is stopped.

    Every run has a fresh context tier, and is stored with its pair. The answer that was last given
    to the same prompt is not known to its drafters: who compares after asking wants to see what a
    first answer gains. Between two runs others may use the model; raises ModelError when it is
    another one then.
    """

    def unlearn(prompt: tuple[int, ...]) -> Measured:
        for (who, _), last in reversed(session.answered.items()):
            if who == owner and last.prompt == prompt:
                said = tuple(token.id for token in last.run.tokens)
                return Measured((*prompt, *said), len(said), last.calibration)
        return Measured()

    method, generation = preferences.chosen(), preferences.seeded()
    request = Request(tuple(messages), (), generation, method, None, owner)
    pairs = pairs_of(session, request, Measured(), run)
    pairs.unlearn = unlearn
    progress: Progress | None = None
    for item in pairs.compare(repeats):
        yield item
        if isinstance(item, Waiting):
            continue
        progress = item
        if progress.running is None and not progress.cancelled and pairs.info:
            plain, fast = progress.pairs[-1]
            gained, info = worth([(plain, fast)]), pairs.info
            session.save(owner, None, plain, generation, PLAIN, info, "compare")
            session.save(owner, None, fast, generation, method, info, "compare", gained)
    if progress and progress.pairs:
        speeds = [plain.metrics.tokens_per_second for plain, _ in progress.pairs]
        session.plain = PlainSpeed(median(speeds), "in the last comparison")
