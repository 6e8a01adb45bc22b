"""Plain decoding beside what a session does: the last answer proved, two methods compared.

Both are measured by the same pairs of runs. They run on the model's thread, where no other model
can take the loaded one's place.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from app.comparison import PLAIN, PlainSpeed, Progress, Proof, compare, verdict, worth
from app.model_thread import PAUSE, Pause
from app.preferences import Preferences
from engine.calibration import Calibration
from engine.costs import CostCurve
from engine.drafters.base import Drafter
from engine.drafters.model import ModelTier
from engine.errors import ModelError, PromptError
from engine.methods import Databases, Method, drafters_of
from engine.settings import Generation
from engine.types import Message
from storage.traces import Traces

if TYPE_CHECKING:
    from app.session import Session


def pairs(
    session: "Session",
    owner: str,
    prompt: Sequence[int],
    method: Method,
    generation: Generation,
    repeats: int,
    cancelled: Callable[[], bool],
    tier: ModelTier,
    calibration: Calibration,
) -> Generator[Progress, None, None]:
    """Pairs of runs whose drafters know what is given, the statistics and the prompt."""
    base = Databases(None, tier, session.statistics, calibration)
    family = session.stacks.family_for(generation.sampling)
    # What takes long to make is made once for all repeats; what is missing is told at once.
    drafters_of(method, base, family, generation.sampling)

    def drafters() -> list[Drafter]:
        fresh, sampling = base.for_measuring(), generation.sampling
        return session.drafters(owner, method, fresh, sampling, cancelled)

    def costs() -> CostCurve | None:
        return session.costs.copy_of(method)

    drafts = tuple(family.drafts.values()) if family else ()
    return compare(
        session.backend, prompt, method, drafters, generation, repeats, cancelled, costs, drafts
    )


def proved(
    session: "Session", owner: str, conversation_id: str, cancelled: Callable[[], bool]
) -> Generator[Proof, None, None]:
    """Decode the last answer of a conversation again, plainly and with drafts, until it is
    cancelled.

    The verdict compares what was shown with the plain run, which has the answer's own limit; an
    answer that the user ended can only be the beginning of one. The speedup is of the two runs,
    at one load of the machine; their drafters have not learned this answer. Raises PromptError when
    there is none, or when the proof was stopped.
    """
    room = session.rooms.find(owner, conversation_id)
    answered = room.answered if room else None
    if answered is None:
        raise PromptError(
            "There is no answer of this session to prove. Send or regenerate one first."
        )
    shown, generation = answered.run, answered.generation
    said = [token.id for token in shown.tokens]
    if shown.broken_off:
        generation = replace(generation, max_tokens=max(1, len(said)))
    tier = session.pasts.of(owner).tier.without([*answered.prompt, *said], len(said))
    prompt, method = answered.prompt, answered.method
    known = (tier, Calibration(answered.trusted))
    for progress in pairs(session, owner, prompt, method, generation, 1, cancelled, *known):
        if progress.running is not None:
            yield Proof(len(progress.running.tokens), progress.running.method)
    if cancelled():
        raise PromptError("The proof was stopped before its end. Press Prove it to try again.")
    ((plain, fast),) = progress.pairs
    session.loaded.plain = PlainSpeed(plain.metrics.tokens_per_second, "by the last proof")
    gained = worth(progress.pairs, min(fast.metrics.kept, shown.metrics.kept))
    if run_id := answered.run_id:
        store = Traces(session.database, owner)
        session.keep(owner, lambda: store.note(run_id, gained.whole, gained.decoding))
    yield Proof(
        len(plain.tokens),
        method.name,
        verdict(session.backend.detokenize, plain, shown),
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
    session.memory.fit(session.loaded, session.rooms, owner)
    known, progress = (past.tier, past.calibration), None
    for progress in pairs(session, owner, prompt, method, generation, repeats, cancelled, *known):
        yield progress
        if progress.running is None and not progress.cancelled:
            plain, fast = progress.pairs[-1]
            gained = worth([(plain, fast)])
            session.save(owner, None, plain, generation, PLAIN, "compare")
            session.save(owner, None, fast, generation, method, "compare", gained)
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
