"""Finished answers, with the data that is needed to prove or to continue them.

An answer that was stopped, or cut by a limit or a crash, can be continued. The same model reads
exactly the same tokens again, and the next token depends only on them, the seed and the position
(engine/sampling.py). So with the same settings the whole answer equals, token for token, that of a
single run. Another model, or an answer whose tokens are not known, continues from the text.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from app.service.pages import LimitedDict, Notices
from app.service.preferences import Preferences, generation_of
from engine.backends.base import BackendInfo
from engine.compare import Speedup
from engine.engine import Request
from engine.errors import PromptError, SettingError, StorageError
from engine.methods import Method
from engine.settings import Generation
from engine.types import NO_RUN, TARGET, CalibrationRow, Part, Run, Step
from storage.conversations import Conversations, Piece, StoredMessage, text_of
from storage.database import Database
from storage.traces import Traces

PROVABLE = 16
"""Conversations whose last answer is remembered so that it can be proved."""


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """What is needed to decode the last answer of a conversation again: its prompt, model, settings
    and run.

    `calibration` holds the evidence weights before the answer, `run_id` is the id of the stored
    run, and `same_text` says whether decoding again must give the same text. `one` is False if the
    answer was continued with other settings or another model, so that no single run can give it.
    """

    prompt: tuple[int, ...]
    info: BackendInfo
    generation: Generation
    method: Method
    run: Run
    calibration: tuple[CalibrationRow, ...]
    run_id: str | None
    conversation: str = ""
    same_text: bool = True
    one: bool = True
    prediction: str = ""


class History:
    """`last` is the last answer of each (owner, conversation)."""

    def __init__(self, database: Database, notices: Notices) -> None:
        self.database, self.notices = database, notices
        self.last: LimitedDict[tuple[str, str], FinishedAnswer] = LimitedDict(PROVABLE)

    def provable(self, owner: str, conversation_id: str) -> FinishedAnswer | None:
        """The last answer of a conversation, if the conversation shows it. Raises PromptError for
        an answer that no single run can prove."""
        found = self.last.get((owner, conversation_id))
        if found is not None and not found.one:
            raise PromptError(
                "This answer was continued with another model, or with other settings. So no "
                "single run can prove it."
            )
        if found is None or found.run_id is None:
            return found
        messages = Conversations(self.database, owner).messages(conversation_id, pieces=False)
        return found if found.run_id in [message.run_id for message in messages] else None

    def save_runs(self, owner: str, *runs: Run, gained: Speedup | None = None) -> None:
        """Store the runs of a comparison, and the speedup of the last one if it is known."""
        store = Traces(self.database, owner)

        def write() -> None:
            with self.database.write():
                ids = [store.save(run, kind="compare") for run in runs]
                if gained is not None:
                    store.note(ids[-1], gained.whole, gained.decoding)

        self.notices.keep(owner, write)

    def note(self, owner: str, run_id: str, gained: Speedup) -> None:
        store = Traces(self.database, owner)
        self.notices.keep(owner, lambda: store.note(run_id, gained.whole, gained.decoding))


@dataclass(frozen=True, slots=True)
class StartedAnswer:
    """A stored answer that is to be continued.

    `run` made the answer, as far as that is known; its empty steps are left out. `head` holds the
    pieces before the run's text. `tokens` are the ids of the run's tokens from the step `start` on.
    They follow `prompt`, which is empty if it was not kept. `prompt` and `tokens` belong to the
    model `model_fingerprint`, which is "" if they are not known.
    """

    message: StoredMessage
    run_id: str
    run: Run
    head: tuple[Piece, ...]
    start: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    model_fingerprint: str

    @property
    def exact(self) -> bool:
        """Whether every token is known, beginning with the prompt."""
        return bool(self.prompt) and not self.start and not self.head


def started_answer(database: Database, owner: str, message: StoredMessage) -> StartedAnswer:
    traces, run = Traces(database, owner), NO_RUN
    if message.run_id is not None:
        with suppress(StorageError):  # It may be damaged.
            run = traces.load(message.run_id)
    run = replace(run, steps=tuple(step for step in run.steps if step.tokens))
    text, pieces = "".join(token.text for token in run.tokens), message.pieces or ()
    count = len(pieces) - len(run.tokens)
    consistent = count >= 0 and text_of(pieces) == message.content
    if not run.steps or not consistent or text_of(pieces[count:]) != text:
        whole = Piece(message.content, TARGET, 0, 0, 0, 0.0)
        return StartedAnswer(message, "", NO_RUN, pieces if consistent else (whole,), 0, (), (), "")
    run_id = message.run_id or ""
    start, prompt = traces.prompt(run_id) or (0, ())
    newest = run.parts[-1] if run.parts else run
    whole_run = not run.parts or all(p.fingerprint == run.fingerprint for p in run.parts)
    known = bool(prompt) or whole_run and not count
    tokens = tuple(t.id for step in run.steps if step.index >= start for t in step.tokens)
    model_fingerprint = newest.fingerprint if known else ""
    return StartedAnswer(
        message,
        run_id,
        run,
        pieces[:count],
        start,
        prompt,
        tokens if known else (),
        model_fingerprint,
    )


def settings_of(made: Run | Part) -> Generation | None:
    """The generation settings of a run or a part; None if they cannot be used any more."""
    try:
        return generation_of(made.settings)
    except SettingError:
        return None


def chosen(found: StartedAnswer, preferences: Preferences) -> Generation:
    """The settings to continue with. A seed that the user did not choose stays the same."""
    generation = preferences.generation
    before = settings_of(found.run.parts[-1] if found.run.parts else found.run)
    if not preferences.fresh_seed:
        return generation
    if before is None or not found.run_id:
        return preferences.seeded()
    return replace(generation, sampling=replace(generation.sampling, seed=before.sampling.seed))


def without_end(steps: Sequence[Step], text: str | None) -> Step:
    """The last of these steps as it would be in a run that did not end there.

    The end of an answer emits text that was held back, such as parts of a character or of a stop
    string. `text` is the text of all tokens without it, None if that is not known.
    """
    *others, token = [token for step in steps for token in step.tokens]
    prefix = "".join(other.text for other in others)
    if text is not None and text.startswith(prefix):
        token = replace(token, text=text[len(prefix) :])
    return replace(steps[-1], tokens=(*steps[-1].tokens[:-1], token), finish=None)


def parts_of(run: Run) -> Sequence[Run | Part]:
    return (run, *run.parts)


def one_run(run: Run) -> bool:
    """Whether a single run could have made all parts of an answer: by one model, with one seed and
    one way to choose tokens."""
    parts = [(made.fingerprint, settings_of(made)) for made in parts_of(run)]
    choices = [(model, made.sampling, made.stop) for model, made in parts if made is not None]
    return len(choices) == len(parts) and all(choice == choices[0] for choice in choices)


def keeps_text_of(made: Run | Part) -> bool:
    """Whether the same seed must give the same text as plain decoding: see `keeps_text`."""
    generation, drafting = settings_of(made), made.settings.get("drafting")
    if generation is None or not isinstance(drafting, dict):
        return False
    return drafting.get("rule") == "match" or generation.sampling.temperature == 0


def continuing(request: Request, found: StartedAnswer, info: BackendInfo) -> Request:
    """The request to continue an answer with the loaded model. A server takes text, not tokens."""
    if found.tokens and found.model_fingerprint == info.fingerprint and info.server is None:
        request = replace(request, answered=found.tokens, model_fingerprint=found.model_fingerprint)
        return replace(request, messages=(), prompt=found.prompt) if found.prompt else request
    return replace(request, prefix=found.message.content)
