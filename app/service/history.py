"""The runs that are over: each is stored with its steps, and the last answer of each conversation
is remembered so that it can be proved."""

from dataclasses import asdict, dataclass

from app.service.latest import Latest
from app.service.notices import Notices
from engine.backends.base import BackendInfo
from engine.compare import UNKNOWN, Speedup
from engine.methods import Method
from engine.runs import Timed
from engine.settings import Generation
from engine.types import CalibrationRow, Prefill
from storage.database import Database
from storage.traces import Kind, Traces

PROVABLE = 16
"""Conversations whose last answer is remembered so that it can be proved."""


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


class History:
    """See the module's docstring. `last` is the last answer of each (owner, conversation)."""

    def __init__(self, database: Database, notices: Notices) -> None:
        self.database, self.notices = database, notices
        self.last: Latest[tuple[str, str], Answered] = Latest(PROVABLE)

    def save(
        self,
        owner: str,
        conversation_id: str | None,
        timed: Timed,
        generation: Generation,
        method: Method,
        info: BackendInfo,
        kind: Kind = "chat",
        gained: Speedup = UNKNOWN,
    ) -> str | None:
        """Store a run with its steps; returns its id, or None when the store refused."""
        figures = timed.metrics
        prefill = timed.prefill or Prefill(0, 0)

        def write() -> str:
            stored = Traces(self.database, owner).save(
                conversation_id=conversation_id,
                model=info.name,
                fingerprint=info.fingerprint,
                method=method.name,
                settings={"generation": asdict(generation), "drafting": asdict(method.drafting)},
                prompt_tokens=prefill.tokens,
                emitted_tokens=figures.tokens,
                reused_tokens=prefill.reused,
                ttft_seconds=figures.ttft_seconds,
                decode_seconds=figures.decode_seconds,
                forwards=figures.forwards,
                finish=timed.steps[-1].finish if timed.steps else None,
                steps=timed.steps,
                speedup=gained.whole,
                decode_speedup=gained.decoding,
                kind=kind,
            )
            return stored.id

        return self.notices.keep(owner, write)

    def note(self, owner: str, run_id: str, gained: Speedup) -> None:
        """Store what a run turned out to gain."""
        store = Traces(self.database, owner)
        self.notices.keep(owner, lambda: store.note(run_id, gained.whole, gained.decoding))
