"""The runs that are over: the last answer of each conversation is remembered so that it can be
proved, and the runs of a comparison are stored. An answer's run is stored while it grows
(app/service/recorder.py)."""

from dataclasses import dataclass

from app.service.latest import Latest
from app.service.notices import Notices
from engine.backends.base import BackendInfo
from engine.compare import Speedup
from engine.errors import PromptError
from engine.methods import Method
from engine.runs import worth
from engine.settings import Generation
from engine.types import CalibrationRow, Run
from storage.conversations import Conversations
from storage.database import Database
from storage.traces import Traces

PROVABLE = 16
"""Conversations whose last answer is remembered so that it can be proved."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What it takes to decode the last answer again: its prompt and model, its settings, its run.

    `calibration` holds the evidence weights before it, `run_id` what the run is stored as;
    `same_text` says whether decoding it again must give the same text. It is `one` run, unless it
    went on with other settings or another model than it began with.
    """

    prompt: tuple[int, ...]
    info: BackendInfo
    generation: Generation
    method: Method
    run: Run
    calibration: tuple[CalibrationRow, ...]
    run_id: str | None
    same_text: bool = True
    one: bool = True


class History:
    """See the module's docstring. `last` is the last answer of each (owner, conversation)."""

    def __init__(self, database: Database, notices: Notices) -> None:
        self.database, self.notices = database, notices
        self.last: Latest[tuple[str, str], Answered] = Latest(PROVABLE)

    def provable(self, owner: str, conversation_id: str) -> Answered | None:
        """The last answer of a conversation, if it is among those that are shown there. Raises
        PromptError for one that no single run can prove."""
        found = self.last.get((owner, conversation_id))
        if found is not None and not found.one:
            raise PromptError(
                "This answer went on with another model, or other settings, than it began with. "
                "So no single run can prove it."
            )
        if found is None or found.run_id is None:
            return found
        messages = Conversations(self.database, owner).messages(conversation_id, pieces=False)
        return found if found.run_id in [message.run_id for message in messages] else None

    def save_pair(self, owner: str, plain: Run, fast: Run) -> None:
        """Store a plain and an accelerated run of one prompt, and what the latter gained."""
        store, gained = Traces(self.database, owner), worth([(plain, fast)])

        def write() -> None:
            with self.database.write():
                store.save(plain, kind="compare")
                run_id = store.save(fast, kind="compare")
                store.note(run_id, gained.whole, gained.decoding)

        self.notices.keep(owner, write)

    def save_runs(self, owner: str, *runs: Run) -> None:
        """Store runs of a comparison that tells no gain."""
        store = Traces(self.database, owner)

        def write() -> None:
            with self.database.write():
                for run in runs:
                    store.save(run, kind="compare")

        self.notices.keep(owner, write)

    def note(self, owner: str, run_id: str, gained: Speedup) -> None:
        """Store what a run turned out to gain."""
        store = Traces(self.database, owner)
        self.notices.keep(owner, lambda: store.note(run_id, gained.whole, gained.decoding))
