"""Methods and their peers over the same prompts, in one process, in rotated order.

A peer is the decoder of another library: what a user would run instead. It answers the same prompts
with the same weights, sampler settings and end tokens. It uses our sampler, so its text must equal
that of plain decoding at every temperature, and choosing a token costs it what it costs us.

Every run starts from an empty cache (engine/compare.py). A method's model tier learns from each
answer once, after its repeats, so that no repeat is drafted from the one before. A prompt's time is
the median of its repeats; a method's speed is all its tokens over all its time; a speedup is the
ratio of two speeds. Step figures (drafting, acceptance, look-ups, forwards) come from the first
repeat of each prompt, whose look-ups are cold: that is what a user meets.

`forward_share` is the share of the decode time that the target's forwards take. It is also how near
a method comes to its bound, the decode speed if nothing but forwards took time.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import log
from statistics import median, quantiles
from time import perf_counter
from typing import Protocol

import numpy as np
from tqdm import tqdm

from bench.harness import LLAMA_CPP, TRANSFORMERS, Record, Setup, show_rows, table, times
from engine.backends.base import Backend, common_prefix
from engine.compare import cold, gain, rotated
from engine.decode import decode, never
from engine.drafting.calibration import Calibration
from engine.drafting.costs import CostCurve, measure_costs
from engine.drafting.databases import Databases
from engine.hsd.family import Family
from engine.methods import Method
from engine.metrics import Metrics, summarise
from engine.prompt import Chat
from engine.runs import collected, planned
from engine.sampling import COLDEST, Floats, choose, gumbel
from engine.settings import Generation, Sampling
from engine.tree import Tree
from engine.types import HEAD, Message, Run

GENERATE, PROMPT_LOOKUP, ASSISTED = "generate", "prompt-lookup", "assisted"
LLAMA, LLAMA_LOOKUP = "llama-cpp-python", "llama-lookup-python"
OTHER_FILE = "llama.cpp"
PEERS = {
    TRANSFORMERS: (GENERATE, PROMPT_LOOKUP, ASSISTED, OTHER_FILE),
    LLAMA_CPP: (LLAMA, LLAMA_LOOKUP),
}
"""The peers of each kind of model."""
PLAIN = ("plain", GENERATE, LLAMA, OTHER_FILE)
"""Decoding without drafts, by any program. Speedups are relative to the fastest of these."""
BEST = (PROMPT_LOOKUP, LLAMA_LOOKUP, "hd-published")
"""The peers to beat: they draft without a draft model, and are not ours."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: its tokens, the end token included, and the seconds from prompt to end.

    `decode_seconds` exclude the time of the prompt (see `paced`).
    """

    tokens: list[int]
    seconds: float
    decode_seconds: float
    forwards: int


class Peer(Protocol):
    """A decoder of another library, which answers each prompt from an empty cache."""

    def answer(self, prompt: Sequence[int], generation: Generation) -> Reply: ...


def chosen_first(logits: Floats, sampling: Sampling, position: int) -> tuple[int, Floats]:
    """The token that our sampler chooses above temperature 0, and scores that are highest for it.

    All other scores are the logits divided by the temperature, so the probability of the choice is
    nearly the model's own.
    """
    token = choose(logits, sampling, position)
    scores = logits / np.float32(sampling.temperature)
    scores[token] = np.nextafter(scores.max(), np.float32(np.inf))
    return token, scores


def paced(seconds: float, later: float, tokens: int, first: int = 1) -> float:
    """The time of all tokens at the pace of those after the first forward, which took `later`.

    The first forward, which gives `first` tokens, also reads the prompt, and our decode time
    excludes that. An answer of one forward has only the whole time, `seconds`.
    """
    return later * tokens / (tokens - first) if tokens > first else seconds


def is_peer(name: str) -> bool:
    return any(name in peers for peers in PEERS.values())


# measuring


LEAST = float(np.finfo(np.float32).tiny)
"""Smaller probabilities count as this one, so no gap is larger than about 87."""


@dataclass
class Result:
    """One method on one prompt: the first repeat's tokens and run, and one time per repeat.

    Peers have no run.
    """

    category: str
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)
    forwards: int = 0
    steady: bool = True
    run: Run | None = None

    @property
    def metrics(self) -> Metrics | None:
        return None if self.run is None else summarise(self.run)

    @property
    def length(self) -> int:
        return len(self.tokens)

    def note(self, reply: Reply) -> None:
        """Add one repeat; `steady` says whether all of them gave the same answer."""
        if not self.seconds:
            self.tokens, self.forwards = reply.tokens, reply.forwards
        self.steady &= reply.tokens == self.tokens
        self.seconds.append(reply.seconds)
        self.decode_seconds.append(reply.decode_seconds)


Results = Mapping[str, Sequence[Result]]
"""By method, one per prompt."""


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
    """Run every method on every (category, prompt), in an order that rotates from run to run.

    Methods with an adaptive budget start from `curve`, each with a copy that it keeps correcting;
    `family` holds the draft models of the methods that use some. Methods in `ungated` get no curve,
    so they draft in every step. What the first repeat learned about its tiers is kept for the next
    prompts.
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
                result, method = results[name][-1], methods[name]
                one_run(backend, method, fresh, prompt, generation, result, costs[name], family)
                learned.setdefault(name, fresh.calibration)
        for name, method in methods.items():
            answer = results[name][-1].tokens
            databases[name].calibration = learned[name]
            if isinstance(method, Method):
                for drafter in method.databases(databases[name], method.drafting, None):
                    drafter.finish([*prompt, *answer], len(answer))
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
    """Add one answer by one method to `result`; `costs` limits what an adaptive budget drafts."""
    cold((backend, *(family.drafts.values() if family else ())))
    if not isinstance(method, Method):
        result.note(method.answer(prompt, generation))
        return
    measured = costs if method.adaptive else None
    drafters = method.drafters(databases, family, generation.sampling, target=backend)
    plan = planned(backend.info, method, generation)
    start = perf_counter()
    events = decode(backend, prompt, drafters, generation, method.drafting, costs=measured)
    run = collected(plan, events)
    seconds = perf_counter() - start
    metrics = summarise(run)
    result.run = result.run or run
    tokens = [token.id for token in run.tokens]
    result.note(Reply(tokens, seconds, metrics.decode_seconds, metrics.forwards))


def curve_for(backend: Backend, methods: Mapping[str, Method | Peer]) -> CostCurve | None:
    """The cost curve of forwards, measured only if a method's drafts depend on it."""
    adaptive = any(isinstance(method, Method) and method.adaptive for method in methods.values())
    return measure_costs(backend) if adaptive and backend.info.can_tree else None


# where two answers differ


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an answer first differs from the plain one.

    `prompt` is the number of the prompt and `position` that of the token, both from 0. `gap` is how
    much higher plain decoding scored its own token there, in logits; above temperature 0 it
    includes the noise of the position (times the temperature), as the choice does. A gap of about
    one rounding step of the dtype is a near-tie, a larger one is a fault. It is None when one
    answer is the beginning of the other.
    """

    prompt: int
    position: int
    gap: float | None


def divergences(
    backend: Backend,
    prompts: Sequence[Sequence[int]],
    answers: Mapping[str, Sequence[Sequence[int]]],
    sampling: Sampling,
) -> dict[str, list[Divergence]]:
    """The answers of each method that differ from "plain", which is replayed for the gaps."""
    found: dict[str, list[Divergence]] = {name: [] for name in answers}
    for name, own_answers in answers.items():
        for number, (own, plain) in enumerate(zip(own_answers, answers["plain"], strict=True)):
            at, gap = common_prefix(own, plain), None
            if at < min(len(own), len(plain)):
                gap = gap_at(backend, prompts[number], plain, at, own[at], sampling)
            if at < max(len(own), len(plain)):
                found[name].append(Divergence(number, at, gap))
    return found


def gap_at(
    backend: Backend,
    prompt: Sequence[int],
    plain: Sequence[int],
    at: int,
    rival: int,
    sampling: Sampling,
) -> float:
    """How much higher plain decoding scored its token number `at` than the rival.

    The same forwards are repeated one token at a time, because logits computed in another
    arrangement would round differently. Cuts (top-k and so on) are not applied.
    """
    tokens, pair = [*prompt, *plain], [plain[at], rival]
    cold((backend,))
    backend.prefill(prompt, never)
    chances = [0.0, 0.0]
    for root in tokens[len(prompt) - 1 : len(prompt) + at]:
        scores = backend.score(Tree(root), sampling)
        chances = [scores.probability(0, token) for token in pair]
        backend.accept([])
    mine, other = (log(max(chance, LEAST)) for chance in chances)
    if sampling.temperature >= COLDEST:
        noise = gumbel(sampling.seed, len(prompt) + at, pair)
        mine += sampling.temperature * float(noise[0] - noise[1])
    return mine - other


def add_gaps(
    backend: Backend,
    figures: dict[str, Record],
    results: Results,
    prompts: Sequence[list[int]],
    sampling: Sampling,
) -> None:
    """Add to the figures of each method where its answers differ, and how near a tie."""
    differing = [name for name in figures if figures[name]["differing_answers"]]
    if not differing:
        return
    answers = {name: [r.tokens for r in results[name]] for name in ("plain", *differing)}
    found = divergences(backend, prompts, answers, sampling)
    for name in differing:
        gaps = [divergence.gap for divergence in found[name]]
        figures[name] |= {
            "largest_gap": None if None in gaps else max(gap for gap in gaps if gap is not None),
            "divergences": [asdict(divergence) for divergence in found[name]],
        }


def verdict(figures: Record) -> str:
    """Whether a method's answers equal those of plain decoding, as text."""
    if figures["identical"] is None:
        return "-"
    if figures["identical"]:
        return "yes"
    if "largest_gap" not in figures:
        return f"NO: {figures['differing_answers']} differ"
    largest = figures["largest_gap"]
    gap = "lengths differ" if largest is None else f"gap at most {largest:.3g}"
    return f"NO: {figures['differing_answers']} differ, {gap}"


# figures


def speed(results: Sequence[Result], decode_only: bool = False) -> float:
    """Tokens per second over all prompts, from the median time of each."""
    times = [median(r.decode_seconds if decode_only else r.seconds) for r in results]
    return sum(result.length for result in results) / sum(times)


def gained(
    name: str, own: Sequence[Result], base: float, decode_only: bool = False
) -> float | None:
    """The speed of a method's answers over the `base`. A ratio above 1 is noise, and becomes None,
    if one of our methods had no draft accepted."""
    accepted = sum(result.length - result.forwards for result in own)
    ratio = speed(own, decode_only) / base
    return ratio if is_peer(name) else gain(ratio, 1.0, accepted)


def baselines(results: Results) -> list[str]:
    return [name for name in PLAIN if name in results]


def summary(name: str, results: Results) -> Record:
    """One method's figures relative to the fastest decoding without drafts.

    `over_best_peer` is relative to the fastest peer that drafts.
    """
    own = results[name]
    bases = baselines(results) or [name]
    base = max(bases, key=lambda base: speed(results[base]))
    ratios = [
        speed([mine]) / speed([other]) for mine, other in zip(own, results[base], strict=True)
    ]
    spread = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    best = [speed(results[peer]) for peer in BEST if peer in results]
    differing = None
    if "plain" in results:
        pairs = zip(own, results["plain"], strict=True)
        differing = sum(mine.tokens != plain.tokens for mine, plain in pairs)
    return {
        "tokens_per_second": speed(own),
        "decode_tokens_per_second": speed(own, decode_only=True),
        "speedup": gained(name, own, speed(results[base])),
        "decode_speedup": gained(name, own, max(speed(results[b], True) for b in bases), True),
        "speedup_quartiles": [round(value, 3) for value in spread],
        "over_best_peer": speed(own) / max(best) if best else None,
        "identical": None if differing is None else differing == 0,
        "differing_answers": differing,
        "unsteady_answers": sum(not result.steady for result in own),
        **step_figures(own),
    }


def step_figures(own: Sequence[Result]) -> Record:
    """The tokens per forward of a method and, for our methods, the costs of its steps."""
    metrics = [result.metrics for result in own if result.metrics]
    tokens, forwards = sum(r.length for r in own), sum(r.forwards for r in own)
    figures: Record = {"mean_acceptance_length": tokens / (forwards or 1)}
    if not metrics:
        return figures
    decode = sum(m.decode_seconds for m in metrics)
    drafted = sum(m.draft_seconds for m in metrics)
    verified = sum(m.verify_seconds for m in metrics)
    if any(HEAD in m.levels for m in metrics):
        calls = sum(m.levels[HEAD][0] for m in metrics if HEAD in m.levels)
        figures["head_calls_per_step"] = calls / forwards
    return figures | {
        "acceptance_ratio": sum(m.acceptance_ratio * m.tokens for m in metrics) / tokens,
        "draft_ms_per_step": 1e3 * drafted / forwards,
        "draft_share": drafted / decode,
        "verify_ms_per_step": 1e3 * verified / forwards,
        "forward_share": verified / decode,
        "step_ms": 1e3 * decode / forwards,
    }


def categories(results: Results) -> Iterator[tuple[str, dict[str, float | None]]]:
    first = next(iter(results.values()))
    for category in dict.fromkeys(result.category for result in first):
        chosen = {name: [r for r in own if r.category == category] for name, own in results.items()}
        base = max(speed(chosen[name]) for name in baselines(results) or chosen)
        yield category, {name: gained(name, own, base) for name, own in chosen.items()}


# methods side by side


COLUMNS = {
    "method": "{name}",
    "tok/s": "{tokens_per_second:.1f}",
    "speedup": "{speedup:.2f}x",
    "quartiles": "{speedup_quartiles[0]:.2f} - {speedup_quartiles[2]:.2f}",
    "vs peers": "{over_best_peer:.2f}x",
    "decode": "{decode_speedup:.2f}x",
    "tok/step": "{mean_acceptance_length:.2f}",
    "ratio": "{acceptance_ratio:.0%}",
    "head calls": "{head_calls_per_step:.2f}",
    "draft ms": "{draft_ms_per_step:.3f}",
    "draft %": "{draft_share:.1%}",
    "forward %": "{forward_share:.1%}",
    "same text": "{verdict}",
}
"""The columns of a table of methods."""


def compared(
    setup: Setup,
    methods: Mapping[str, Method | Peer],
    curve: CostCurve | None = None,
    family: Family | None = None,
) -> tuple[Results, Record]:
    """Run all methods on all prompts of a benchmark: the results, and their figures."""
    backend, databases = setup.backend, setup.databases(methods)
    given = backend, databases, methods, setup.prompts, setup.generation
    results = measure(*given, setup.options.repeats, curve, family)
    figures = {name: summary(name, results) for name in methods}
    add_gaps(backend, figures, results, setup.tokens, setup.generation.sampling)
    return results, {
        "statistics": any(own.statistics is not None for own in databases.values()),
        "methods": figures,
        "categories": dict(categories(results)),
    }


def show_methods(record: Record) -> None:
    rows = ({"name": name, "verdict": verdict(f), **f} for name, f in record["methods"].items())
    show_rows(rows, COLUMNS)
    for name, f in record["methods"].items():
        if f["unsteady_answers"]:
            print(f"{name}: {f['unsteady_answers']} answers differ between repeats")


def show_categories(record: Record) -> None:
    found = record["categories"].items()
    rows = ((category, *map(times, speedups.values())) for category, speedups in found)
    table(("category", *record["methods"]), rows)
