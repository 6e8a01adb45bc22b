"""The loaded model, with everything that belongs to it and is released with it.

It is one value that is replaced in one assignment, so no reader ever sees the tokenizer of one
model together with the costs of another.

Its cached sequences stay open, one per conversation and model. A conversation that continues finds
its tokens in the caches of the target and of the draft models, and prefills only the new ones.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import time
from typing import NoReturn

from engine.backends.base import Backend, BackendInfo, is_batching
from engine.backends.special_tokens import SpecialTokens
from engine.drafting.ceiling import expensive
from engine.drafting.costs import CostCurve, measure_costs
from engine.drafting.databases import DraftingMemory
from engine.drafting.head_record import broken_head
from engine.errors import ModelError
from engine.heads.base import Head
from engine.methods import IF_PRESENT, Method
from engine.process import give_back_freed
from engine.prompt import Chat
from engine.runs import UNMEASURED, PlainSpeed, plain_speed
from engine.servers.served import ServedChat, ServedModel
from engine.settings import Runtime
from engine.types import HEAD, Costs, Message

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
    """Stands in while no model is loaded: at the start, and while one model replaces another.
    `info` is that of the last model. Every request to it raises ModelError."""

    def __init__(self, info: BackendInfo = NO_MODEL_INFO) -> None:
        self.info = replace(info, can_tree=False, note=NO_MODEL)

    bytes = unread = 0
    head: Head | None = None
    special = SpecialTokens({})

    def refuse(self, *_: object) -> NoReturn:
        raise ModelError(NO_MODEL)

    def vocabulary(self) -> Sequence[str]:
        self.refuse()

    tokenize = detokenize = piece = render = refuse
    prefill = depth_limit = score = accept = open = refuse

    def close(self) -> None:
        """There is nothing to free."""


LIMIT = 512 << 20
"""Bytes of all cached sequences: 32,768 tokens of the embedded model, or 4,096 of a typical model
of eight billion parameters."""

FREED = 64 << 20
"""Bytes of closed sequences after which freed memory is given back to the system. Otherwise it
stays with the process, in pieces that no further sequence fits into."""

Key = tuple[str, str]
"""An owner, and one of the owner's conversations."""
Place = tuple[Key, Backend]
"""A conversation in a loaded model."""


class Sequences:
    """At most `limit` bytes of open sequences, each of one conversation and one loaded model.

    After `fit` they keep the limit, or only those of the most recent conversation are left. Only
    the thread that runs the models may use this.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.warm: dict[Place, Backend] = {}
        """Ordered by their last use, the most recent last."""
        self.freed = 0
        """Bytes of closed sequences that may not have been given back to the system yet."""
        self.using: set[Key] = set()
        """The conversations that are answered now."""

    def get(self, key: Key, model: Backend) -> Backend:
        sequence = self.warm.pop((key, model), None) or model.open()
        self.warm[key, model] = sequence
        return sequence

    def begin(self, key: Key, model: Backend, tokens: Sequence[int]) -> None:
        """Let the sequence of a conversation begin with what another one of its owner holds."""
        own = self.warm[key, model]
        if is_batching(own):
            for (other, its_model), sequence in self.warm.items():
                if other[0] == key[0] and its_model is model and sequence is not own:
                    own.begin_as(sequence, tokens)

    @property
    def bytes(self) -> int:
        return sum(sequence.bytes for sequence in self.warm.values())

    def release(self, key: Key) -> None:
        """The answer has ended."""
        self.using.discard(key)
        self.fit()

    def fit(self) -> None:
        """Close the least recently used sequences until the limit is kept, but none of a
        conversation in use, or of the one that was used last."""
        excess, places = self.bytes - self.limit, list(self.warm)
        for place in places:
            if excess > 0 and place[0] not in {*self.using, places[-1][0]}:
                excess -= self.warm[place].bytes
                self.close(place)

    def drop(self, key: Key) -> None:
        self.close(*(place for place in self.warm if place[0] == key))

    def drop_model(self, model: Backend) -> None:
        """Free the sequences of a model that is being unloaded: they keep its weights in memory."""
        self.close(*(place for place in self.warm if place[1] is model))

    def close(self, *places: Place) -> None:
        for place in places:
            sequence = self.warm.pop(place)
            self.freed += sequence.bytes
            sequence.close()
        if self.freed > FREED:
            self.freed = 0
            give_back_freed()

    def clear(self) -> None:
        self.close(*self.warm)


@dataclass(slots=True)
class Loaded:
    """A model and everything that was measured of it. `source` is "" for a backend that was created
    in memory.

    `curve` is None until it is read from the store or measured.
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
    def is_loaded(self) -> bool:
        return not isinstance(self.backend, NoModel)

    # the costs of forwards

    def know(self, costs: Costs) -> bool:
        try:
            self.curve = CostCurve(*costs[:3], costs.token, costs.row)
        except ValueError:
            return False
        self.measured = costs.measured
        return True

    def measure_costs(self, progress: Callable[[float], None] = lambda share: None) -> None:
        """Measure the curve, in about two seconds. Raises ModelError if such a forward fails; the
        previous curve stays."""
        try:
            self.curve = measure_costs(self.backend, progress=progress)
        except Exception as error:
            # The libraries below raise many types, out of memory among them.
            raise ModelError(
                f"The cost of a step could not be measured ({error}). Drafts are sized without it. "
                "If answers fail too, lower Max drafted tokens in Settings, under Advanced."
            ) from error
        self.measured = time()

    def weigh_head(self) -> None:
        """Find out whether the head can pay on this machine. If the head fails, the first answer
        that uses it will report that."""
        head, info = self.backend.head, self.backend.info
        if head is None or info.head is None or not info.head.drafts or self.curve is None:
            return
        with suppress(Exception):
            found = expensive(self.backend, head, self.curve)
            self.backend.info = replace(info, head=replace(info.head, expensive=found))

    def judge_head(self) -> str:
        """A notice if the head turns out to be broken, once; "" otherwise. It is then not used."""
        info = self.backend.info
        if info.head is None or info.head.expensive or self.curve is None:
            return ""
        why = broken_head(self.curve.gate.head.record)
        if not why:
            return ""
        self.backend.info = replace(info, head=replace(info.head, expensive=why))
        return f"The {info.head.name} head of {info.name} is {why}."

    def suited(self, method: Method) -> Method:
        """The method; while the head rests, the default method is used without it, because even an
        idle head would cost a little time in each step."""
        return replace(method, head=None) if method.head == IF_PRESENT and self.rests else method

    @property
    def rests(self) -> bool:
        """Whether the head backs off, or is of no use. While it may be broken it does not back off,
        because only its guesses can tell."""
        if self.curve is None:
            return False
        head, gate = self.backend.info.head, self.curve.gate
        useless = head is not None and head.expensive != ""
        return useless or (gate.gains[HEAD].backoff > 0 and not gate.head.record.suspect)

    def rested(self, steps: int) -> None:
        if self.curve is not None:
            gain = self.curve.gate.gains[HEAD]
            gain.backoff = max(0, gain.backoff - steps)

    @property
    def costs(self) -> Costs:
        curve = self.curve
        assert curve is not None
        growth = curve.growth
        return Costs(curve.points, curve.node, curve.other, self.measured, growth.token, growth.row)

    def curve_of(self, method: Method) -> CostCurve | None:
        """The curve, for a method whose budget depends on it; None for other methods, because they
        must not correct it."""
        return self.curve if method.adaptive else None

    def copy_of(self, method: Method) -> CostCurve | None:
        """A copy of that curve for a measured run, which then drafts as the next answer would and
        changes nothing for that answer."""
        curve = self.curve_of(method)
        return curve and curve.copy()

    def measure_plain(self) -> None:
        prompt = self.backend.tokenize(self.backend.render([Message("user", "Tell a story.")]))
        self.plain = PlainSpeed(plain_speed(self.backend, prompt), "after loading")


def no_model(info: BackendInfo = NO_MODEL_INFO) -> Loaded:
    return Loaded(NoModel(info), DraftingMemory())
