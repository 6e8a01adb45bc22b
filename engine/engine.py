"""The interface of the engine: its methods, requests, events and results.

Everything that runs a model uses this interface: the app, the benchmarks, the tests. Requests,
events and results are plain values without functions or connections, so the engine may live in this
process (engine/local.py) or in another one behind a pipe (engine/remote.py). `Engine` is the one
list of its methods, and the same tests run against both implementations.

Long work returns a `Stream` (engine/streams.py): events arrive as they are made, whether or not
anyone reads them, and `stop` ends this piece of work alone. All such work waits in one queue
(engine/queue.py).

What drafting learns is not part of these values. The process that runs the model reads and stores
it itself (`Store` in engine/drafting/databases.py), before the stream of the answer ends. If the
app changes what is stored, it calls `forget`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.backends.base import BackendInfo
from engine.hsd.profile import Profile
from engine.hsd.trials import Trial
from engine.loaded import NO_MODEL_INFO
from engine.methods import METHODS, Method
from engine.models.memory import Need
from engine.prompt import Size
from engine.queue import OWNER, Waiting
from engine.runs import UNMEASURED, PlainSpeed
from engine.settings import Drafting, Generation, Runtime, Sampling
from engine.streams import Stream
from engine.types import CalibrationRow, Costs, Document, Learned, Message, Prefill, Step, Tool

# requests


@dataclass(frozen=True, slots=True)
class Measured:
    """A run that starts from nothing and leaves no trace, so that runs can be compared.

    Its drafters know the owner's past answers, except for the n-grams that the last `new` tokens of
    the answer `unlearned` added, and for the texts of its `conversation` and of others that
    answered the same prompt. `calibration` holds the evidence weights of the run, None for the
    current ones. With `warm` a few uncounted steps run first, to warm the machine up.
    """

    unlearned: tuple[int, ...] = ()
    new: int = 0
    conversation: str = ""
    calibration: tuple[CalibrationRow, ...] | None = None
    warm: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A request for an answer: to `messages`, or the continuation of a `text` or of the tokens of a
    `prompt`.

    An answer that was begun before is continued: after its tokens `answered`, if the loaded model
    has the fingerprint `model_fingerprint`, or after its text `prefix`.

    The drafters use the data of `owner` and `conversation`, and learn from the answer; without a
    conversation ("") nothing of it is kept. `profile` is that of the loaded draft models, if
    `method` uses them. `prediction` is a text that much of the answer may repeat. The queue takes
    owners in turn. A `background` request gets its turn when no other request waits, and is stopped
    as soon as one does. Each token comes with so many of the `likeliest` tokens at its place. Stop
    strings count in the answer, not in the thinking before it, unless the text is wanted as a
    `whole`. The model may call the `tools`, if `BackendInfo.calls` says that it can: the text of
    the answer then holds calls (engine/tools.py).
    """

    messages: tuple[Message, ...] = ()
    prompt: tuple[int, ...] = ()
    generation: Generation = Generation()
    method: Method = METHODS["hd"]
    profile: Profile | None = None
    owner: str = OWNER
    conversation: str = ""
    measured: Measured | None = None
    answered: tuple[int, ...] = ()
    model_fingerprint: str = ""
    prefix: str = ""
    text: str = ""
    prediction: str = ""
    likeliest: int = 0
    background: bool = False
    whole: bool = False
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """A request to load a model in place of the loaded one. `name` replaces the model's own name.

    With `keep_loaded` the old model stays in memory until the new one is ready, and otherwise it is
    unloaded first. `key` is the API key of the server that runs the model, if one does.
    """

    source: str
    runtime: Runtime = Runtime()
    name: str = ""
    keep_loaded: bool = True
    key: str = field(default="", repr=False)


# events


@dataclass(frozen=True, slots=True)
class Started:
    """The turn of a run has come: the model of `info` continues the tokens of `prompt`.

    `text` is the text of a continued answer as far as it is certain: without a part of a character,
    and without anything that may become a stop string. `dropped` older messages did not fit into
    the context. `calibration` holds the evidence weights before the run. With `thinks` the
    prompt ends within thinking, which the chat template has begun.
    """

    info: BackendInfo
    prompt: tuple[int, ...]
    dropped: int
    calibration: tuple[CalibrationRow, ...]
    text: str = ""
    thinks: bool = False


@dataclass(frozen=True, slots=True)
class CostsMeasured:
    """The costs of a model's forwards, after they were measured or corrected."""

    info: BackendInfo
    costs: Costs


@dataclass(frozen=True, slots=True)
class Notice:
    """A message for the user about a problem that did not end the work."""

    text: str


@dataclass(frozen=True, slots=True)
class ServerCounted:
    """The tokens that a server drafted and accepted since an answer began. They include those of
    other requests to it in the meantime; `own` of them were drafted for this answer, None if the
    server does not say."""

    drafted: int
    accepted: int
    own: int | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """The progress of a piece of work, from 0 to 1; None if it is not known. `activity` is what is
    being done, "" if there is only one thing."""

    share: float | None
    activity: str = ""


Event = Waiting | Started | Prefill | Step | Learned | CostsMeasured | Notice | ServerCounted
"""The events of an answer: Started, a Prefill, Steps, Learned; the other kinds come in between."""


@dataclass(frozen=True, slots=True)
class Beside:
    """An event of one of several answers: the number of its request, and the event."""

    answer: int
    event: Event


Loading = Waiting | Share | CostsMeasured | Notice
"""The events of work that loads or measures models."""


# the state


@dataclass(frozen=True, slots=True)
class Draft:
    """A loaded draft model: its name in plans, and its source."""

    name: str
    source: str
    info: BackendInfo


@dataclass(frozen=True, slots=True)
class State:
    """The loaded models. `is_loaded` is False without a model; `info` is then that of the last one.
    `compiled` is true if the engine drafts with the compiled core. `locked` is the reason why it
    cannot store what it learns, "" if it can."""

    info: BackendInfo = NO_MODEL_INFO
    is_loaded: bool = False
    source: str = ""
    runtime: Runtime = Runtime()
    drafts: tuple[Draft, ...] = ()
    plain: PlainSpeed = UNMEASURED
    compiled: bool = False
    locked: str = ""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of the device where a model would run, in bytes: what is `free`, and what the
    loaded models have `held` there, which becomes free when they are unloaded."""

    device: str
    free: int
    held: int = 0

    @property
    def total(self) -> int:
        """Bytes for a model that takes the place of the loaded ones."""
        return self.free + self.held


class Engine(Protocol):
    """Runs models. Every method may be called from any thread."""

    watch: Callable[[State], None]
    """Called with every new state, from a thread of the engine. The user of the engine sets it."""

    notify: Callable[[str, str], None]
    """Called like `watch`, with an owner and a notice about the store."""

    @property
    def state(self) -> State:
        """The current state."""

    def generate(self, request: Request) -> Stream[Event]:
        """Answer a request. The stream raises Busy if too many requests wait already, Cancelled if
        it is stopped before its turn has come, and the errors of the answer."""

    def take_turns(self, requests: Sequence[Request]) -> Stream[Waiting | Beside]:
        """Answer measured requests side by side: each gets the model for as long as the others, in
        turns of a tenth of a second. Their times are not those of answers that have the machine to
        themselves. The stream raises what that of `generate` does."""

    def load(self, request: Load) -> Stream[Loading]:
        """Replace the loaded model by another one; the current run is stopped.

        The stream raises ModelError. The old model then stays loaded, or the message describes what
        happened to it.
        """

    def load_drafts(self, named: Sequence[tuple[str, str]]) -> Stream[Loading]:
        """Load exactly these draft models, given as (name, source), and unload all others. If the
        stream raises ModelError, nothing has changed."""

    def unload_drafts(self) -> Stream[Loading]:
        """Unload the draft models, as soon as no answer is in progress."""

    def measure_costs(self) -> Stream[Loading]:
        """Measure the costs of forwards."""

    def profile(
        self, sampling: Sampling, texts: Sequence[str], tokens: int
    ) -> Stream[Waiting | Share | Profile]:
        """Profile the loaded models on answers to `texts` of so many tokens; the profile is the
        last item."""

    def trials(
        self,
        profile: Profile,
        sampling: Sampling,
        drafting: Drafting,
        chosen: str,
        texts: Sequence[str],
        tokens: int,
    ) -> Stream[Waiting | Share | list[Trial]]:
        """Test plans on answers to `texts` of so many tokens; the results are the last item."""

    def check(self, owner: str, text: str | None = None) -> None:
        """Raise PromptError if the message `text` cannot be answered even if it is the only one,
        and Busy unless another run of its owner may wait. None stands for a message that was
        checked before."""

    def measure(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Size:
        """How much of the context these messages and tools take. This changes no cache, but takes
        computing time from an answer in progress."""

    def counts(self, texts: Sequence[str]) -> list[int]:
        """The number of tokens of each text."""

    def texts(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """The text of each list of tokens."""

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes that each token adds to a text."""

    def tokens(self, documents: Sequence[Document], tokenizer: str) -> list[list[int]]:
        """The tokens of each document. Raises ModelError unless the loaded model's tokenizer has
        the fingerprint `tokenizer`, because the tokens of another one would mean something else."""

    def read_statistics(self) -> None:
        """Read the statistics for the loaded model's tokenizer again; later runs use them."""

    def need(self, source: str, runtime: Runtime) -> Need:
        """The memory that a model would take. Raises ModelError if it cannot be determined."""

    def room(self, source: str, runtime: Runtime) -> Room:
        """The device where a model would run, and its memory; "" stands for the loaded model.
        Raises ModelError for a device that this machine does not have."""

    def forget(self, owner: str, conversation: str | None = None, past: bool = False) -> None:
        """Drop from memory the data of a conversation, or of all conversations of an owner (None);
        with `past` the owner's past answers as well. The store is not changed: the caller has done
        that before."""

    def close(self) -> None:
        """End the engine and all of its work."""
