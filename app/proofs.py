"""Plain decoding beside what a session does: the last answer proved, two methods compared.

These run on the model's thread, where no other model can take the loaded one's place.
"""

from collections.abc import Callable, Generator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from app.comparison import PLAIN, PlainSpeed, Progress, Proof, compare, per_token, run, verdict
from app.model_thread import PAUSE, Pause
from app.preferences import Preferences
from engine.costs import CostCurve
from engine.drafters.base import Drafter
from engine.errors import ModelError, PromptError
from engine.methods import Databases, drafters_of
from engine.settings import Generation
from engine.types import Message

if TYPE_CHECKING:
    from app.session import Session


def proved(
    session: "Session", owner: str, conversation_id: str, cancelled: Callable[[], bool]
) -> Generator[Proof, None, None]:
    """Decode the last answer of a conversation again, without drafts, until it is cancelled.

    Raises PromptError when there is none, or when it was stopped.
    """
    room = session.rooms.find(owner, conversation_id)
    answered = room.answered if room else None
    if answered is None:
        raise PromptError(
            "There is no answer of this session to prove. Send or regenerate one first."
        )
    limit = max(1, len(answered.run.tokens))
    generation = Generation(answered.generation.sampling, limit, answered.generation.stop)
    plain = run(session.backend, answered.prompt, PLAIN, (), generation, cancelled)
    for timed in plain:
        yield Proof(len(timed.tokens))
    if cancelled():
        raise PromptError("The proof was stopped before its end. Press Prove it to try again.")
    verdict_ = verdict(session.backend.detokenize, timed, answered.run)
    session.loaded.plain = PlainSpeed(timed.metrics.tokens_per_second, "by the last proof")
    fast, slow = per_token(answered.run), per_token(timed)
    speedup = slow / fast if fast else None
    done = (timed, answered.run, answered.same_text)
    yield Proof(len(timed.tokens), verdict_, speedup, *done)


def compared(
    session: "Session",
    owner: str,
    messages: Sequence[Message],
    preferences: Preferences,
    repeats: int,
    cancelled: Callable[[], bool],
) -> Generator[Progress | Pause, None, None]:
    """Answer the messages plainly and by the chosen method, in pairs, until it is cancelled.

    Every run has a fresh context tier, and is stored with its pair. Between two pairs others may
    use the model; raises ModelError when it is another one then.
    """
    backend = session.backend
    method, generation = preferences.chosen(), preferences.seeded()
    prompt = session.chat.prompt(messages, known=())
    past = session.pasts.of(owner)
    base = Databases(None, past.tier, session.statistics, past.calibration)

    # What takes long to make is made once for all repeats; what is missing is told at once.
    drafters_of(method, base, session.stacks.family_for(generation.sampling), generation.sampling)

    def drafters() -> list[Drafter]:
        return session.drafters(owner, method, base.for_measuring(), generation.sampling)

    def costs() -> CostCurve | None:
        return session.costs.copy_of(method)

    progress = None
    for progress in compare(
        backend, prompt, method, drafters, generation, repeats, cancelled, costs
    ):
        yield progress
        if progress.running is None and not progress.cancelled:
            for timed in progress.pairs[-1]:
                used = PLAIN if timed.method == PLAIN.name else method
                session.save(owner, None, timed, generation, used, "compare")
            if len(progress.pairs) < repeats:
                yield PAUSE
                if session.backend is not backend:
                    raise ModelError(
                        f"{backend.info.name} made room for another model while the comparison "
                        "waited for others. Compare again."
                    )
    if progress and progress.pairs:
        speeds = [plain.metrics.tokens_per_second for plain, _ in progress.pairs]
        session.loaded.plain = PlainSpeed(median(speeds), "in the last comparison")
