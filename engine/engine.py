"""The door to the engine: what can be asked of it, and what it answers, as plain values.

Whoever runs a model goes through here: the app with its pages, the benchmarks, the tests. Nothing
that goes through is bound to a process: a request holds no function and no connection, an event is
a value. So the engine may live in this process (engine/local.py) or in one of its own behind a pipe
(engine/remote.py), and the same tests run against both.

Long work is a `Stream` (engine/streams.py): its events come as they are made, whether or not anyone
looks, and its `stop` ends this piece of work alone. All of it waits in one queue (engine/queue.py).

The engine keeps what it learns in memory and stores nothing. What is to be kept comes as events
(ContextLogged, NgramsLearned, Calibrated, CostsMeasured). What it needs and does not know, or no
longer knows, it asks for (WantedPastAnswers, WantedContextLog, WantedCosts). Whoever reads the
stream answers with `reply`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from engine.backends.base import BackendInfo
from engine.hsd.profile import Profile
from engine.hsd.trials import Trial
from engine.loaded import NO_MODEL_INFO, Costs
from engine.methods import METHODS, Method
from engine.models.memory import Need
from engine.prompt import Size
from engine.queue import OWNER, Waiting
from engine.runs import UNMEASURED, PlainSpeed
from engine.settings import Drafting, Generation, Runtime, Sampling
from engine.streams import Stream
from engine.types import CalibrationRow, Document, Gram, Learned, Message, Prefill, Step

# what is asked for


@dataclass(frozen=True, slots=True)
class Measured:
    """A run that starts from nothing and leaves no trace, so that runs can be compared.

    Its drafters know what the model said to the owner before, but for `unlearned`: an answer, the
    last `new` of its tokens. `calibration` holds the evidence weights of the run, None for
    those of now. `warm` has the machine woken up first, by a few steps that are not part of it.
    """

    unlearned: tuple[int, ...] = ()
    new: int = 0
    calibration: tuple[CalibrationRow, ...] | None = None
    warm: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """An answer that is wanted: to `messages`, or what follows a `text`, or a `prompt` of tokens.

    It goes on behind what was `said` of it, in tokens of the model with the fingerprint `speaker`,
    or behind what it has `begun` with, a text.
    It is drafted from what belongs to `owner` and `conversation`, and both learn from it; "" is no
    conversation, of which nothing is kept. `profile` is that of the loaded draft models, where
    `method` needs one. Whose turn it is goes by the owner; a `patient` one has its turn when nobody
    else wants one, and is stopped when somebody does. So many of the `likeliest` tokens are told at
    each place.
    """

    messages: tuple[Message, ...] = ()
    prompt: tuple[int, ...] = ()
    generation: Generation = Generation()
    method: Method = METHODS["hd"]
    profile: Profile | None = None
    owner: str = OWNER
    conversation: str = ""
    measured: Measured | None = None
    said: tuple[int, ...] = ()
    speaker: str = ""
    begun: str = ""
    text: str = ""
    likeliest: int = 0
    patient: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """A model that is wanted in the place of the loaded one: it is called `name`, or as it calls
    itself. With `beside` both are in memory until it is there; else the old one makes room. `key`
    opens the server that runs it, where one does."""

    source: str
    runtime: Runtime = Runtime()
    name: str = ""
    beside: bool = True
    key: str = field(default="", repr=False)


# what comes back


@dataclass(frozen=True, slots=True)
class Started:
    """The run's turn has come: by the model of `info`, behind the tokens of `prompt`.

    Of an answer that goes on, `told` is the text of what was said of it as far as it is certain: no
    part of a character, nothing that may become a stop string. `dropped` older messages did not fit
    the context. `calibration` holds the evidence weights before the run. `thinks` says that the
    prompt ends within thinking, which the chat template has begun.
    """

    info: BackendInfo
    prompt: tuple[int, ...]
    dropped: int
    calibration: tuple[CalibrationRow, ...]
    told: str = ""
    thinks: bool = False


@dataclass(frozen=True, slots=True)
class ContextLogged:
    """Tokens that the conversation's log is to be continued with."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NgramsLearned:
    """The distinct n-grams of an answer, for what the model said to the owner; with them it holds
    `size` n-grams."""

    grams: tuple[tuple[int, ...], ...]
    size: int


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The evidence weights from now on."""

    rows: tuple[CalibrationRow, ...]


@dataclass(frozen=True, slots=True)
class CostsMeasured:
    """What forwards of a model cost, as it was measured or corrected."""

    info: BackendInfo
    costs: Costs


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that went wrong aside from the work itself, for people."""

    text: str


@dataclass(frozen=True, slots=True)
class ServerCounted:
    """What a server drafted and accepted since an answer began, in tokens: for all who asked it
    meanwhile, not for this answer alone. `own` tokens were drafted for this answer, None where that
    is not told."""

    drafted: int
    accepted: int
    own: int | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """How far a piece of work is, from 0 to 1; None where that is not known. `words` say what is
    being done, "" where there is but one thing."""

    share: float | None
    words: str = ""


# what it asks back


@dataclass(frozen=True, slots=True)
class WantedPastAnswers:
    """What the model said to the owner: reply with a `StoredPastAnswers`."""

    fingerprint: str


@dataclass(frozen=True, slots=True)
class WantedContextLog:
    """The conversation's log in the tokens of that tokenizer: reply with a `StoredContextLog`."""

    tokenizer_fingerprint: str


@dataclass(frozen=True, slots=True)
class WantedCosts:
    """What forwards of a model cost: reply with `Costs`, or None where that is not known."""

    info: BackendInfo


class StoredPastAnswers(NamedTuple):
    """What was stored of all the answers of a model to an owner."""

    grams: Sequence[Gram] = ()
    rows: Sequence[CalibrationRow] = ()


class StoredContextLog(NamedTuple):
    """What was stored of a conversation: its newest tokens, of which at most `cap` are kept."""

    tokens: Sequence[int] = ()
    cap: int = 1 << 18


Event = (
    Waiting
    | Started
    | Prefill
    | Step
    | Learned
    | ContextLogged
    | NgramsLearned
    | Calibrated
    | CostsMeasured
    | Notice
    | ServerCounted
    | WantedPastAnswers
    | WantedContextLog
)
"""What an answer consists of: Started, a Prefill, its Steps, Learned; around them the rest."""
Loading = Waiting | Share | CostsMeasured | Notice | WantedCosts
"""What loading a model reports."""


# what is there


@dataclass(frozen=True, slots=True)
class Draft:
    """A loaded draft model: what plans call it, and where it came from."""

    name: str
    source: str
    info: BackendInfo


@dataclass(frozen=True, slots=True)
class State:
    """What is loaded. `there` says whether a model is: while one makes room for another, `info` is
    still the old one's. `compiled` says whether its engine drafts with the compiled core."""

    info: BackendInfo = NO_MODEL_INFO
    there: bool = False
    source: str = ""
    runtime: Runtime = Runtime()
    drafts: tuple[Draft, ...] = ()
    plain: PlainSpeed = UNMEASURED
    compiled: bool = False


class Engine(Protocol):
    """What runs models. Every method may be called from any thread."""

    watch: Callable[[State], None]
    """Called with every new state, from a thread of the engine's; to be set by who wants to know.
    """

    @property
    def state(self) -> State:
        """What is loaded now."""

    def generate(self, request: Request) -> Stream[Event]:
        """An answer. Its stream raises Busy when too much waits already, Cancelled when it is
        stopped before its turn has come, else what went wrong."""

    def load(self, wanted: Load) -> Stream[Loading]:
        """Let another model take the place of the loaded one; the run under way is stopped.

        Its stream raises ModelError, with the old model as it was, or with what became of it.
        """

    def load_drafts(self, wanted: Sequence[tuple[str, str]]) -> Stream[Loading]:
        """Have just these (name, source) draft models in memory. Raises ModelError in its stream,
        with nothing changed."""

    def unload_drafts(self) -> Stream[Loading]:
        """Free the draft models, once no answer is under way."""

    def measure_costs(self) -> Stream[Loading]:
        """Measure what forwards cost."""

    def profile(
        self, sampling: Sampling, texts: Sequence[str], tokens: int
    ) -> Stream[Waiting | Share | Profile]:
        """Profile the loaded models on answers to `texts`; the profile comes last."""

    def trials(
        self,
        profile: Profile,
        sampling: Sampling,
        drafting: Drafting,
        chosen: str,
        texts: Sequence[str],
        tokens: int,
    ) -> Stream[Waiting | Share | list[Trial]]:
        """Put plans to the test on answers to `texts`; what came of them comes last."""

    def check(self, text: str) -> None:
        """Raise PromptError for a message that cannot be answered even alone."""

    def measure(self, messages: Sequence[Message]) -> Size:
        """How much of the context these messages take. It disturbs no answer and no cache, but it
        takes time that an answer under way could use."""

    def counts(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has."""

    def check_turn(self, owner: str) -> None:
        """Raise Busy unless another run of this owner may wait."""

    def texts(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """The text of each list of tokens."""

    def tokens(self, documents: Sequence[Document], tokenizer: str) -> list[list[int]]:
        """The tokens of each document. Raises ModelError unless the loaded model's tokenizer has
        this fingerprint: another one's tokens would mean something else."""

    def read_statistics(self) -> None:
        """Look again for the statistics of the loaded model's tokenizer: what begins from now on
        drafts from what is there."""

    def need(self, source: str, runtime: Runtime) -> Need:
        """What a model would take. Raises ModelError where that cannot be told."""

    def device(self, source: str, runtime: Runtime) -> str:
        """Where a model would run. Raises ModelError for what is not there."""

    def free(self, device: str) -> int:
        """Bytes that are free there."""

    def forget(self, owner: str, conversation: str | None = None, past: bool = False) -> None:
        """Drop what is in memory of a conversation, or of all of an owner's; with `past` what the
        model said to the owner as well. What is stored is the caller's."""

    def close(self) -> None:
        """End it; what is under way ends with it."""


def answered(stream: Stream[Any], reply: Callable[[Any], Any]) -> Iterator[Any]:
    """The items of a stream; what it asks for is answered by `reply`. Where that fails, the stream
    is stopped: nobody may wait for an answer that never comes."""
    for item in stream:
        if isinstance(item, WantedPastAnswers | WantedContextLog | WantedCosts):
            try:
                stream.reply(reply(item))
            except BaseException:
                stream.stop()
                raise
        else:
            yield item


def unknown(wanted: Any) -> Any:
    """The reply of who has stored nothing."""
    if isinstance(wanted, WantedPastAnswers):
        return StoredPastAnswers()
    return StoredContextLog() if isinstance(wanted, WantedContextLog) else None
