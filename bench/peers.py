"""Our methods and their peers, the library's own, run side by side; and where two answers part.

A peer is a call of `generate()` in transformers with the same settings as our runs, on the same
weights. At temperature 0 it must say what plain decoding says; above, it draws its own numbers.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from engine.backends.load import load_transformers
from engine.backends.transformers import TransformersBackend
from engine.calibration import Calibration
from engine.chat import Chat
from engine.costs import CostCurve
from engine.decode import decode, never
from engine.errors import SettingError
from engine.hsd.family import Family
from engine.methods import Databases, Method, drafters_of
from engine.metrics import Metrics, summarise
from engine.sampling import COLDEST, Floats, gumbel
from engine.settings import Generation, Sampling
from engine.tree import Tree
from engine.types import Message, Prefill, Step

GENERATE, PROMPT_LOOKUP, ASSISTED = "generate", "prompt-lookup", "assisted"
PEERS = (GENERATE, PROMPT_LOOKUP, ASSISTED)


@dataclass(frozen=True, slots=True)
class Peer:
    """A way to call `generate()`: `settings` are its arguments beside the sampler's."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def peer_named(name: str, assistant: TransformersBackend | None = None) -> Peer:
    """The peer called `name`, one of PEERS; "assisted" drafts with the model of `assistant`."""
    if name == PROMPT_LOOKUP:
        return Peer(name, {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3})
    if name == ASSISTED:
        assert assistant is not None, "the options were checked"
        return Peer(name, {"assistant_model": assistant.model})
    return Peer(name)


def load_assistant(source: str, target: TransformersBackend) -> TransformersBackend:
    """The draft model, in the target's dtype and on its device.

    Raises SettingError when its tokens are not the target's: the library would translate between
    them through text, which is another method.
    """
    assistant = load_transformers(source, target.info.device, target.info.dtype)
    same = assistant.info.vocabulary_size == target.info.vocabulary_size
    if not same or assistant.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise SettingError(
            f"The assistant {assistant.info.name} cannot draft for {target.info.name}: they do "
            "not have the same vocabulary. Choose a smaller model of the same family."
        )
    return assistant


class Arrivals:
    """The streamer of `generate()`: when tokens arrive, and how many at a time."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt first, then with the tokens of each forward."""
        self.times.append(perf_counter())
        self.sizes.append(value.numel())

    def end(self) -> None:
        """Called when the answer is over."""

    @property
    def forwards(self) -> int:
        """The target's forwards, the one that read the prompt included."""
        return len(self.times) - 1

    @property
    def decode_seconds(self) -> float:
        """The time of all tokens at the pace of those behind the first forward.

        That forward reads the prompt as well, which our decode time leaves out. An answer of one
        forward has nothing else to go by.
        """
        total, first = sum(self.sizes[1:]), self.sizes[1]
        if total == first:
            return self.times[-1] - self.times[0]
        return (self.times[-1] - self.times[1]) * total / (total - first)


@dataclass
class Result:
    """One method on one prompt: the first repeat's tokens and figures, one time per repeat."""

    category: str
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)
    forwards: int = 0
    steady: bool = True
    metrics: Metrics | None = None
    look_ups: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def note(self, tokens: list[int], seconds: float, decode_seconds: float, forwards: int) -> None:
        """Add one repeat; `steady` says whether all of them gave the same answer."""
        if not self.seconds:
            self.tokens, self.forwards = tokens, forwards
        self.steady &= tokens == self.tokens
        self.seconds.append(seconds)
        self.decode_seconds.append(decode_seconds)


def measure(
    backend: TransformersBackend,
    databases: Mapping[str, Databases],
    methods: Mapping[str, Method | Peer],
    prompts: Sequence[tuple[str, list[int]]],
    generation: Generation,
    repeats: int,
    curve: CostCurve | None = None,
    family: Family | None = None,
) -> dict[str, list[Result]]:
    """Every method on every (category, prompt), the order rotated from run to run.

    `curve` is where the methods with an adaptive budget start from, each with a copy that it goes
    on correcting; `family` holds the draft models of those that have some. What the first repeat
    learned about its tiers is kept for the next prompts.
    """
    costs = {name: CostCurve(curve.points) if curve else None for name in methods}
    results: dict[str, list[Result]] = {name: [] for name in methods}
    hello = Chat(backend).prompt([Message("user", "Say hello.")], known=())
    short = Generation(generation.sampling, max_tokens=8)
    for name, method in methods.items():
        fresh = databases[name].for_measuring()
        one_run(backend, method, fresh, hello, short, Result(""), costs[name], family)
    names = list(methods)
    for number, (category, prompt) in enumerate(tqdm(prompts, desc="Prompts", leave=False)):
        for name in names:
            results[name].append(Result(category))
        learned: dict[str, Calibration] = {}
        for repeat in range(repeats):
            turn = (number + repeat) % len(names)
            for name in names[turn:] + names[:turn]:
                fresh = databases[name].for_measuring()
                result = results[name][-1]
                method = methods[name]
                one_run(backend, method, fresh, prompt, generation, result, costs[name], family)
                learned.setdefault(name, fresh.calibration)
        for name, method in methods.items():
            answer = results[name][-1].tokens
            databases[name].calibration = learned[name]
            if isinstance(method, Method):
                for drafter in databases[name].drafters(method):
                    drafter.finish([*prompt, *answer], len(answer))
    return results


def one_run(
    backend: TransformersBackend,
    method: Method | Peer,
    databases: Databases,
    prompt: list[int],
    generation: Generation,
    result: Result,
    costs: CostCurve | None = None,
    family: Family | None = None,
) -> None:
    """One answer by one method from empty caches, added to `result`.

    `costs` bounds what is drafted where the budget is adaptive; `family` has the draft models.
    """
    for model in (backend, *(family.drafts.values() if family else ())):
        model.prefill([0], never)
    gumbel.cache_clear()  # else the noise that the run before drew would cost this one nothing
    if isinstance(method, Peer):
        library_run(backend, method, prompt, generation, result)
        return
    drafters = drafters_of(method, databases, family, generation.sampling)
    measured = costs if is_adaptive(method) else None
    start = perf_counter()
    events = list(decode(backend, prompt, drafters, generation, method.drafting, costs=measured))
    seconds = perf_counter() - start
    steps = [event for event in events if isinstance(event, Step)]
    metrics = summarise(next(event for event in events if isinstance(event, Prefill)), steps)
    if not result.seconds:
        result.metrics = metrics
        for step in steps:
            for tier, spent in step.look_ups.items():
                result.look_ups[tier].append(spent)
    tokens = [token.id for step in steps for token in step.tokens]
    result.note(tokens, seconds, metrics.decode_seconds, metrics.forwards)


def is_adaptive(method: Method | Peer) -> bool:
    """Whether what a method drafts depends on the cost of a forward."""
    if isinstance(method, Peer):
        return False
    return method.drafting.nodes > 0 and method.drafting.budget == "adaptive"


def library_run(
    backend: TransformersBackend,
    peer: Peer,
    prompt: list[int],
    generation: Generation,
    result: Result,
) -> None:
    """The same by the library, with the same settings (its own random numbers)."""
    sampling = generation.sampling
    warm = sampling.temperature > 0
    settings: dict[str, Any] = {"do_sample": warm, "max_new_tokens": generation.max_tokens}
    if warm:
        settings |= {"temperature": sampling.temperature, "min_p": sampling.min_p}
        settings |= {"top_k": sampling.top_k, "top_p": sampling.top_p}
        torch.manual_seed(sampling.seed)
    inputs = torch.tensor([prompt], device=backend.model.device)
    arrivals = Arrivals()
    start = perf_counter()
    with torch.inference_mode():
        output = backend.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            streamer=arrivals,
            **settings,
            **peer.settings,
        )
    seconds = perf_counter() - start
    tokens = output[0, len(prompt) :].tolist()
    result.note(tokens, seconds, arrivals.decode_seconds, arrivals.forwards)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an answer first departs from the plain one.

    `prompt` is its number from 0, `position` the token within the answer from 0. `gap` is how much
    higher plain decoding scored its own token there, in logits; above temperature 0 the noise of
    the position counts in (times the temperature), as it does in the choice. A gap of about one
    rounding step of the dtype is a near-tie, a larger one is a fault. None when one answer is the
    beginning of the other.
    """

    prompt: int
    position: int
    gap: float | None

    def mapping(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Where two answers part, None when they are the same."""
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return None if len(left) == len(right) else min(len(left), len(right))


def divergences(
    backend: TransformersBackend,
    prompts: Sequence[Sequence[int]],
    answers: Mapping[str, Sequence[Sequence[int]]],
    sampling: Sampling,
) -> dict[str, list[Divergence]]:
    """Per method the answers that differ from "plain", which is replayed to measure the gaps."""
    found: dict[str, list[Divergence]] = {name: [] for name in answers}
    for number, (prompt, plain) in enumerate(zip(prompts, answers["plain"], strict=True)):
        parts = {name: first_difference(plain, own[number]) for name, own in answers.items()}
        places = {at for at in parts.values() if at is not None}
        scores = replay(backend, prompt, plain, places, sampling) if places else {}
        for name, at in parts.items():
            if at is None:
                continue
            other, gap = answers[name][number], None
            if at < min(len(plain), len(other)):
                gap = float(scores[at][plain[at]] - scores[at][other[at]])
            found[name].append(Divergence(number, at, gap))
    return found


def replay(
    backend: TransformersBackend,
    prompt: Sequence[int],
    plain: Sequence[int],
    places: set[int],
    sampling: Sampling,
) -> dict[int, Floats]:
    """What plain decoding chose by at some places of its answer: shape (vocabulary,) each.

    The same forwards again, one token at a time: logits of another arrangement would round
    differently, and the difference is what is looked for. Cuts (top-k and so on) are left out.
    """
    scores: dict[int, Floats] = {}
    tokens = [*prompt, *plain]
    backend.reset()
    backend.prefill(prompt, never)
    for at in range(max(places) + 1):
        position = len(prompt) + at
        logits = backend.score(Tree(tokens[position - 1]), sampling).row(0)
        if at in places:
            scores[at] = logits.copy()
            if sampling.temperature >= COLDEST:
                noise = gumbel(sampling.seed, position, logits.size)
                scores[at] += sampling.temperature * noise
        backend.accept([])
    return scores
