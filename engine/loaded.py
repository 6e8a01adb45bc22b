"""The loaded model with all that belongs to it and goes when it goes.

It is held as one value, so that it changes in one assignment: nobody ever sees the tokenizer of one
model beside the costs of another.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import time
from typing import NamedTuple, NoReturn

from engine.backends.base import Backend, BackendInfo
from engine.drafting.costs import CostCurve, measure_costs
from engine.drafting.head_trial import too_dear
from engine.drafting.memory import DraftingMemory
from engine.errors import ModelError
from engine.heads.base import Head
from engine.methods import WHERE_THERE, Method
from engine.prompt import Chat
from engine.runs import UNMEASURED, PlainSpeed, plain_speed
from engine.sequences import Sequences
from engine.servers.served import ServedChat, ServedModel
from engine.settings import Runtime
from engine.types import HEAD, Message

NO_MODEL_INFO = BackendInfo(
    name="no model",
    kind="",
    fingerprint="",
    tokenizer_fingerprint="",
    vocabulary_size=0,
    eos_ids=frozenset(),
    context_length=0,
    can_tree=False,
)
NO_MODEL = "No model is loaded at the moment. Wait until one is, or load it in the Models tab."


class NoModel:
    """Stands where no model is: before the first one, and while one makes room for the next.

    `info` is that of the model which was there. Whatever is asked of it raises ModelError.
    """

    def __init__(self, info: BackendInfo = NO_MODEL_INFO) -> None:
        self.info = replace(info, can_tree=False, note=NO_MODEL)

    bytes = unread = 0
    head: Head | None = None

    def refuse(self, *_: object) -> NoReturn:
        """There is nothing here that could answer."""
        raise ModelError(NO_MODEL)

    def vocabulary(self) -> Sequence[str]:
        self.refuse()

    tokenize = detokenize = render = prefill = depth_limit = score = accept = open = refuse

    def close(self) -> None:
        """There is nothing to free."""


class Costs(NamedTuple):
    """What forwards cost, as plain values: a CostCurve's, and when it was measured (seconds since
    1970)."""

    points: dict[int, float]
    node: float
    other: float
    measured: float
    token: float = 0.0
    row: float = 0.0


@dataclass(slots=True)
class Loaded:
    """A model with what is known of it. `source` is "" for a backend that was made, not read.

    `curve` is None until it is known or measured.
    """

    backend: Backend
    memory: DraftingMemory
    source: str = ""
    runtime: Runtime = Runtime()
    curve: CostCurve | None = None
    measured: float = 0.0
    plain: PlainSpeed = UNMEASURED
    sequences: Sequences = field(default_factory=Sequences)
    chat: Chat = field(init=False)

    def __post_init__(self) -> None:
        served = isinstance(self.backend, ServedModel)
        self.chat = ServedChat(self.backend) if served else Chat(self.backend)

    @property
    def there(self) -> bool:
        """Whether there is a model."""
        return not isinstance(self.backend, NoModel)

    # what forwards cost

    def know(self, costs: Costs) -> bool:
        """Take a curve that was stored; False when it cannot be used."""
        try:
            self.curve = CostCurve(*costs[:3], costs.token, costs.row)
        except ValueError:
            return False
        self.measured = costs.measured
        return True

    def measure_costs(self, progress: Callable[[float], None] = lambda share: None) -> None:
        """Measure the curve, in about two seconds. Raises ModelError when the model cannot do such
        forwards; what was known stays."""
        try:
            self.curve = measure_costs(self.backend, progress=progress)
        except Exception as error:
            # The libraries below raise many types, out of memory among them.
            raise ModelError(
                f"The cost of a step could not be measured ({error}). Drafts are sized without it. "
                "If answers fail too, lower Most drafted tokens in Settings, under Advanced."
            ) from error
        self.measured = time()

    def weigh_head(self) -> None:
        """Find out whether the head can pay on this machine; a head that fails is told of by the
        answer that asks it."""
        head, info = self.backend.head, self.backend.info
        if head is None or info.head is None or not info.head.drafts or self.curve is None:
            return
        with suppress(Exception):
            found = too_dear(self.backend, head, self.curve)
            self.backend.info = replace(info, head=replace(info.head, too_dear=found))

    def suited(self, method: Method) -> Method:
        """The usual method without the head while that backs off: to listen costs a little in each
        step, and so does looking for what a guess could bring."""
        resting = self.curve is not None and self.curve.gate.gains[HEAD].backoff > 0
        return replace(method, head=None) if method.head == WHERE_THERE and resting else method

    def rested(self, steps: int) -> None:
        """The head was left out of so many steps."""
        if self.curve is not None:
            gain = self.curve.gate.gains[HEAD]
            gain.backoff = max(0, gain.backoff - steps)

    @property
    def costs(self) -> Costs:
        """The curve as it is now, which has to be known."""
        curve = self.curve
        assert curve is not None
        growth = curve.growth
        return Costs(curve.points, curve.node, curve.other, self.measured, growth.token, growth.row)

    def curve_of(self, method: Method) -> CostCurve | None:
        """The curve for a method whose budget depends on it.

        Others are kept from correcting it: the time of their drafting is not the databases'.
        """
        return self.curve if method.adaptive else None

    def copy_of(self, method: Method) -> CostCurve | None:
        """The same as a copy, for a run that must not change what the next one drafts.

        With it goes what drafting was worth of late: a measured run of a prompt must draft as the
        next answer would.
        """
        curve = self.curve_of(method)
        return curve and curve.copy()

    def measure_plain(self) -> None:
        """How fast it decodes plainly, measured now with a short run."""
        prompt = self.backend.tokenize(self.backend.render([Message("user", "Tell a story.")]))
        self.plain = PlainSpeed(plain_speed(self.backend, prompt), "after loading")


def no_model(info: BackendInfo = NO_MODEL_INFO) -> Loaded:
    """No model, in the place of the one of that info."""
    return Loaded(NoModel(info), DraftingMemory())
