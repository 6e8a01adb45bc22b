"""What it takes to go on with an answer that ended early: stopped, cut by a limit, or by a crash.

With the same model the tokens are read again just as they were, and what chooses the next one
depends on them, the seed and the position alone (engine/sampling.py). So with the same settings the
whole is, token for token, what one run would have said. Another model, or an answer whose tokens
are not known, goes on from the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.service.preferences import Preferences, mapping_of
from engine.backends.base import BackendInfo
from engine.engine import Request
from engine.errors import SettingError, StorageError
from engine.settings import Generation, Sampling
from engine.types import NO_RUN, TARGET, Part, Run, Step
from storage.conversations import Piece, StoredMessage, text_of
from storage.database import Database
from storage.traces import Traces


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer as it is stored, to be gone on with.

    `run` is how it was made, as far as that is known, with its steps but for empty ones; `head` are
    the pieces in front of what the run said. `said` are its tokens from the step `start` on, behind
    `prompt`, which is empty where it is not kept. Both are tokens of the model `speaker`, "" where
    there are none.
    """

    message: StoredMessage
    run_id: str
    run: Run
    head: tuple[Piece, ...]
    start: int
    prompt: tuple[int, ...]
    said: tuple[int, ...]
    speaker: str

    @property
    def exact(self) -> bool:
        """Whether all of it is known to the token, from its prompt on."""
        return bool(self.prompt) and not self.start and not self.head


def begun(database: Database, owner: str, message: StoredMessage) -> Begun:
    """An answer that is to go on."""
    traces, run = Traces(database, owner), NO_RUN
    if message.run_id is not None:
        try:
            run = traces.load(message.run_id)
        except StorageError:
            run = NO_RUN  # It is damaged.
    run = replace(run, steps=tuple(step for step in run.steps if step.tokens))
    text, pieces = "".join(token.text for token in run.tokens), message.pieces or ()
    count = len(pieces) - len(run.tokens)
    told = count >= 0 and text_of(pieces) == message.content
    if not run.steps or not told or text_of(pieces[count:]) != text:
        whole = Piece(message.content, TARGET, 0, 0, 0, 0.0)
        return Begun(message, "", NO_RUN, pieces if told else (whole,), 0, (), (), "")
    run_id = message.run_id or ""
    start, prompt = traces.prompt(run_id) or (0, ())
    newest = run.parts[-1] if run.parts else run
    whole_run = not run.parts or all(p.fingerprint == run.fingerprint for p in run.parts)
    known = bool(prompt) or whole_run and not count
    said = tuple(t.id for step in run.steps if step.index >= start for t in step.tokens)
    speaker = newest.fingerprint if known else ""
    return Begun(
        message, run_id, run, pieces[:count], start, prompt, said if known else (), speaker
    )


def settings_of(made: Run | Part) -> Generation | None:
    """The generation settings that something was made with; None where they cannot be used."""
    try:
        values = mapping_of(made.settings, "generation")
        sampling = Sampling.from_mapping(mapping_of(values, "sampling"))
        return Generation.from_mapping({**values, "sampling": sampling})
    except SettingError:
        return None


def chosen(found: Begun, preferences: Preferences) -> Generation:
    """The settings to go on with: those that are wanted. A seed that nobody chose stays."""
    generation = preferences.generation
    before = settings_of(found.run.parts[-1] if found.run.parts else found.run)
    if not preferences.fresh_seed:
        return generation
    if before is None or not found.run_id:
        return preferences.seeded()
    return replace(generation, sampling=replace(generation.sampling, seed=before.sampling.seed))


def told_again(steps: Sequence[Step], told: str | None) -> Step:
    """The last of these steps as a run tells it that did not end there.

    At its end an answer tells what it held back: parts of a character, of a stop string. `told` is
    the text of all tokens without that; None where it is not known.
    """
    *others, token = [token for step in steps for token in step.tokens]
    prefix = "".join(other.text for other in others)
    if told is not None and told.startswith(prefix):
        token = replace(token, text=told[len(prefix) :])
    return replace(steps[-1], tokens=(*steps[-1].tokens[:-1], token), finish=None)


def parts_of(run: Run) -> Sequence[Run | Part]:
    """How an answer was begun, and how it was gone on with each time."""
    return (run, *run.parts)


def one_run(run: Run) -> bool:
    """Whether the parts of an answer are those of one run: by one model, with one seed and one way
    to choose tokens."""
    ways = [way_of(made) for made in parts_of(run)]
    return None not in ways and all(way == ways[0] for way in ways)


def way_of(made: Run | Part) -> Any:
    """What the tokens of a part depend on, beside those before them; None: not known."""
    generation = settings_of(made)
    return generation and (made.fingerprint, generation.sampling, generation.stop)


def keeps_text_of(made: Run | Part) -> bool:
    """Whether a seed's text must be that of plain decoding: see `keeps_text`."""
    generation, drafting = settings_of(made), made.settings.get("drafting")
    if generation is None or not isinstance(drafting, dict):
        return False
    return drafting.get("rule") == "match" or generation.sampling.temperature == 0


def going_on(request: Request, found: Begun, info: BackendInfo) -> Request:
    """The request for more of an answer, by the model that is loaded now. A server takes texts."""
    if found.said and found.speaker == info.fingerprint and info.server is None:
        request = replace(request, said=found.said, speaker=found.speaker)
        return replace(request, messages=(), prompt=found.prompt) if found.prompt else request
    return replace(request, begun=found.message.content)
