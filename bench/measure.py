"""Methods and their peers over the same prompts, in one process, in rotated order.

Every run starts from nothing (engine/compare.py). A method's model tier learns from each answer
once, after its repeats, so no repeat is drafted from the one before.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from tqdm import tqdm

from bench.peer import Peer, Reply
from engine.backends.base import Backend
from engine.compare import cold, rotated
from engine.decode import decode
from engine.drafting.calibration import Calibration
from engine.drafting.costs import CostCurve
from engine.drafting.databases import Databases
from engine.hsd.family import Family
from engine.methods import Method
from engine.metrics import Metrics, summarise
from engine.prompt import Chat
from engine.runs import collected, planned
from engine.settings import Generation
from engine.types import Message, Run

CUT = "\ufffd"
"""What a text ends in whose last character is not complete yet."""


@dataclass
class Result:
    """One method on one prompt: the first repeat's tokens and run, one time per repeat.

    The run is not known of peers. `text` and `emitted` are of those that hand out text alone (see
    `Reply`).
    """

    category: str
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)
    forwards: int = 0
    steady: bool = True
    run: Run | None = None
    text: str | None = None
    emitted: int = 0

    @property
    def metrics(self) -> Metrics | None:
        """The figures of the run."""
        return None if self.run is None else summarise(self.run)

    def look_ups(self, tier: str) -> list[float]:
        """The seconds that a tier took for each look-up of the run."""
        steps = self.run.steps if self.run else ()
        return [step.look_ups[tier] for step in steps if tier in step.look_ups]

    @property
    def length(self) -> int:
        """How many tokens were emitted."""
        return self.emitted or len(self.tokens)

    def note(self, reply: Reply) -> None:
        """Add one repeat; `steady` says whether all of them gave the same answer."""
        if not self.seconds:
            self.tokens, self.forwards = reply.tokens, reply.forwards
            self.text, self.emitted = reply.text, reply.emitted
        self.steady &= reply.tokens == self.tokens
        self.seconds.append(reply.seconds)
        self.decode_seconds.append(reply.decode_seconds)


def measure(
    backend: Backend,
    databases: Mapping[str, Databases],
    methods: Mapping[str, Method | Peer],
    prompts: Sequence[tuple[str, list[int]]],
    generation: Generation,
    repeats: int,
    curve: CostCurve | None = None,
    family: Family | None = None,
    ungated: Collection[str] = (),
) -> dict[str, list[Result]]:
    """Every method on every (category, prompt), the order rotated from run to run.

    `curve` is where the methods with an adaptive budget start from, each with a copy that it goes
    on correcting; `family` holds the draft models of those that have some. Those that are `ungated`
    get none, so they draft in every step. What the first repeat learned about its tiers is kept for
    the next prompts.
    """
    costs = {name: curve.fresh() if curve and name not in ungated else None for name in methods}
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
            for name in rotated(names, number + repeat):
                fresh = databases[name].for_measuring()
                result = results[name][-1]
                method = methods[name]
                one_run(backend, method, fresh, prompt, generation, result, costs[name], family)
                learned.setdefault(name, fresh.calibration)
        for name, method in methods.items():
            answer = results[name][-1].tokens
            databases[name].calibration = learned[name]
            if isinstance(method, Method):
                for drafter in method.databases(databases[name], method.drafting, None):
                    drafter.finish([*prompt, *answer], len(answer))
    match_texts(backend, results, generation)
    return results


def one_run(
    backend: Backend,
    method: Method | Peer,
    databases: Databases,
    prompt: list[int],
    generation: Generation,
    result: Result,
    costs: CostCurve | None = None,
    family: Family | None = None,
) -> None:
    """One answer by one method from nothing, added to `result`.

    `costs` bounds what is drafted where the budget is adaptive; `family` has the draft models.
    """
    cold((backend, *(family.drafts.values() if family else ())))
    if not isinstance(method, Method):
        result.note(method.answer(prompt, generation))
        return
    drafters = method.drafters(databases, family, generation.sampling, target=backend)
    measured = costs if is_adaptive(method) else None
    plan = planned(backend.info, method, generation)
    start = perf_counter()
    events = decode(backend, prompt, drafters, generation, method.drafting, costs=measured)
    run = collected(plan, events)
    seconds, metrics = perf_counter() - start, summarise(run)
    result.run = result.run or run
    tokens = [token.id for token in run.tokens]
    result.note(Reply(tokens, seconds, metrics.decode_seconds, metrics.forwards))


def is_adaptive(method: Method | Peer) -> bool:
    """Whether what a method drafts depends on the cost of a forward."""
    return isinstance(method, Method) and method.adaptive


def match_texts(
    backend: Backend, results: Mapping[str, Sequence[Result]], generation: Generation
) -> None:
    """Give answers that are known by their text alone plain decoding's tokens if the text is that.

    One text can be written in several ways. A program may also go on for a few tokens where plain
    decoding was cut, and that counts as the same.
    """
    for own in results.values():
        for mine, plain in zip(own, results.get("plain", ()), strict=False):
            if mine.text is None:
                continue
            said = backend.detokenize(plain.tokens)
            cut = len(plain.tokens) >= generation.max_tokens
            if mine.text == said or (cut and mine.text.startswith(said.rstrip(CUT))):
                mine.tokens = plain.tokens
