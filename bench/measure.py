"""Methods and their peers over the same prompts, in one process, in rotated order.

A peer is the decoder of another library. It answers with the same weights, sampler settings and end
tokens, and with our sampler, so its text must equal that of plain decoding at every temperature,
and choosing a token costs it what it costs us.

Every run starts from an empty cache (engine/compare.py). A method's model tier learns from each
answer once, after its repeats, so that no repeat is drafted from the one before. A prompt's time is
the median of its repeats; a method's speed is all its tokens over all its time. Figures of steps
come from the first repeat of each prompt, whose look-ups are cold: that is what a user meets.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import log
from statistics import median, quantiles
from time import perf_counter
from typing import Protocol

import numpy as np
from tqdm import tqdm

from bench.harness import EMBEDDED, Setup
from bench.report import LLAMA_CPP, TRANSFORMERS, Record, show_rows, table, times
from engine.backends.base import Backend, common_prefix
from engine.compare import gain, reset_caches, rotated
from engine.constraint import Constraint
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
LLAMA, OTHER_FILE = "llama-cpp-python", "llama.cpp"
PEERS = {TRANSFORMERS: (GENERATE, PROMPT_LOOKUP, ASSISTED, OTHER_FILE), LLAMA_CPP: (LLAMA,)}
"""The peers of each kind of model."""
PLAIN = ("plain", GENERATE, LLAMA, OTHER_FILE)
"""Decoding without drafts, by any program. Speedups are relative to the fastest of these."""
BEST = (PROMPT_LOOKUP, "hd-published")
"""The peers to beat: they draft without a draft model, and are not ours."""
SMALL = EMBEDDED.with_name("small")
"""The draft model of "assisted"."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: its tokens, the end token included, and the seconds from prompt to end.

    `decode_seconds` exclude the time of the prompt (see `paced`). Peers have no `run`.
    """

    tokens: list[int]
    seconds: float
    decode_seconds: float
    forwards: int
    run: Run | None = None


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


@dataclass(slots=True)
class Result:
    """One method on one prompt: a reply for each repeat; tokens and steps are the first one's."""

    category: str
    replies: list[Reply] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.replies[0].tokens

    @property
    def forwards(self) -> int:
        return self.replies[0].forwards

    @property
    def metrics(self) -> Metrics | None:
        run = self.replies[0].run
        return None if run is None else summarise(run)

    def seconds(self, decode_only: bool) -> float:
        return median(r.decode_seconds if decode_only else r.seconds for r in self.replies)


Results = Mapping[str, Sequence[Result]]
"""By method, one per prompt."""


def measure(
    setup: Setup,
    databases: Mapping[str, Databases],
    methods: Mapping[str, Method | Peer],
    curve: CostCurve | None = None,
    family: Family | None = None,
    ungated: Collection[str] = (),
) -> dict[str, list[Result]]:
    """Run every method on every prompt, in an order that rotates from run to run.

    Methods with an adaptive budget start from a copy of `curve`, except for those in `ungated`,
    which draft in every step. `family` holds the draft models. What the first repeat learned about
    its tiers is kept for the next prompts.
    """
    backend, generation = setup.backend, setup.generation
    costs = {name: curve.fresh() if curve and name not in ungated else None for name in methods}

    def once(name: str, prompt: list[int], generation: Generation) -> tuple[Reply, Calibration]:
        fresh = databases[name].for_measuring()
        given = methods[name], fresh, prompt, generation, costs[name], family
        return answered(backend, *given), fresh.calibration

    hello = Chat(backend).prompt([Message("user", "Say hello.")], known=())
    for name in methods:
        once(name, hello, replace(generation, max_tokens=8))
    results: dict[str, list[Result]] = {name: [] for name in methods}
    for number, (category, prompt) in enumerate(tqdm(setup.prompts, desc="Prompts", leave=False)):
        for own in results.values():
            own.append(Result(category))
        learned: dict[str, Calibration] = {}
        for repeat in range(setup.options.repeats):
            for name in rotated([*methods], number + repeat):
                seeded = replace(generation, sampling=sampling_of(generation.sampling, number))
                reply, calibration = once(name, prompt, seeded)
                results[name][-1].replies.append(reply)
                learned.setdefault(name, calibration)
        for name, method in methods.items():
            answer = results[name][-1].tokens
            databases[name].calibration = learned[name]
            if isinstance(method, Method):
                for drafter in method.databases(databases[name], method.drafting.tiers, None):
                    drafter.finish([*prompt, *answer], len(answer))
    return results


def sampling_of(sampling: Sampling, number: int) -> Sampling:
    """The sampler of a prompt. Each has a seed of its own: with the same random numbers in every
    answer, the rule *rejection* would keep as many drafts at the beginning of all of them."""
    return replace(sampling, seed=sampling.seed + number)


def answered(
    backend: Backend,
    method: Method | Peer,
    databases: Databases,
    prompt: Sequence[int],
    generation: Generation,
    costs: CostCurve | None = None,
    family: Family | None = None,
) -> Reply:
    """An answer by one method; `costs` limits what an adaptive budget drafts."""
    reset_caches((backend, *(family.drafts.values() if family else ())))
    if not isinstance(method, Method):
        return method.answer(prompt, generation)
    measured, form = costs if method.adaptive else None, generation.format
    constraint = None if form is None else Constraint(backend, form)
    drafters = method.drafters(
        databases, family, generation.sampling, target=backend, constraint=constraint
    )
    plan = planned(backend.info, method, generation)
    start = perf_counter()
    how = generation, method.drafting
    events = decode(backend, prompt, drafters, *how, costs=measured, constraint=constraint)
    run = collected(plan, events)
    seconds, metrics = perf_counter() - start, summarise(run)
    tokens = [token.id for token in run.tokens]
    return Reply(tokens, seconds, metrics.decode_seconds, metrics.forwards, run)


# where two answers differ


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an answer first differs from the plain one: the numbers of the prompt and of the token,
    from 0.

    `gap` is how much higher plain decoding scored its own token, in logits; above temperature 0 it
    includes the noise of the position, as the choice does. A gap of about one rounding step of the
    dtype is a near-tie, a larger one is a fault. It is None when one answer begins the other.
    """

    prompt: int
    position: int
    gap: float | None


def divergences(
    backend: Backend,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
    sampling: Sampling,
) -> list[Divergence]:
    found = []
    for number, (prompt, own, other) in enumerate(zip(prompts, plain, others, strict=True)):
        at = common_prefix(own, other)
        if at < min(len(own), len(other)):
            text, pair = [*prompt, *own[:at]], [own[at], other[at]]
            how = sampling_of(sampling, number)
            gap = gap_between(backend, text, len(prompt), pair, how)
            found.append(Divergence(number, at, gap))
        elif len(own) != len(other):
            found.append(Divergence(number, at, None))
    return found


def gap_between(
    backend: Backend, text: Sequence[int], start: int, pair: Sequence[int], sampling: Sampling
) -> float:
    """How much higher plain decoding scores the first of two tokens after a text than the second.

    The forwards of an answer that begins at `start` are repeated one token at a time, because
    logits computed in another arrangement would round differently. Cuts (top-k and so on) are not
    applied.
    """
    reset_caches((backend,))
    backend.prefill(text[:start], never)
    chances = [0.0, 0.0]
    for root in text[start - 1 :]:
        scores = backend.score(Tree(root), sampling)
        chances = [max(scores.probability(0, token), 1e-38) for token in pair]
        backend.accept([])
    gap = log(chances[0]) - log(chances[1])
    if sampling.temperature >= COLDEST:
        noise = gumbel(sampling.seed, len(text), pair)
        gap += sampling.temperature * float(noise[0] - noise[1])
    return gap


def add_gaps(setup: Setup, figures: Mapping[str, Record], results: Results) -> None:
    sampling, prompts = setup.generation.sampling, [tokens for _, tokens in setup.prompts]
    for name, own in figures.items():
        if own["differing_answers"]:
            plain, other = ([r.tokens for r in results[each]] for each in ("plain", name))
            found = divergences(setup.backend, prompts, plain, other, sampling)
            gaps = [each.gap for each in found if each.gap is not None]
            own["largest_gap"] = max(gaps) if len(gaps) == len(found) else None
            own["divergences"] = [asdict(divergence) for divergence in found]


def verdict(figures: Record) -> str:
    if figures["identical"] is None:
        return "-"
    if figures["identical"]:
        return "yes"
    differ = f"NO: {figures['differing_answers']} differ"
    if "largest_gap" not in figures:
        return differ
    gap = figures["largest_gap"]
    return f"{differ}, {'lengths differ' if gap is None else f'gap at most {gap:.3g}'}"


# figures


def speed(results: Sequence[Result], decode_only: bool = False) -> float:
    """Tokens per second over all prompts, from the median time of each."""
    seconds = sum(result.seconds(decode_only) for result in results)
    return sum(len(result.tokens) for result in results) / seconds


def gained(
    name: str, own: Sequence[Result], base: float, decode_only: bool = False
) -> float | None:
    """The speed of a method's answers over the `base`. A ratio above 1 is noise, and becomes None,
    if one of our methods had no draft accepted."""
    accepted = sum(len(result.tokens) - result.forwards for result in own)
    ratio = speed(own, decode_only) / base
    return ratio if is_peer(name) else gain(ratio, 1.0, accepted)


def baselines(results: Results) -> list[str]:
    return [name for name in PLAIN if name in results]


def summary(name: str, results: Results) -> Record:
    """One method's figures relative to the fastest decoding without drafts, and as
    `over_best_peer` to the fastest peer that drafts."""
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
        "unsteady_answers": sum(
            any(reply.tokens != result.tokens for reply in result.replies) for result in own
        ),
        **step_figures(own),
    }


def step_figures(own: Sequence[Result]) -> Record:
    """The tokens per forward of a method and, for our methods, the costs of its steps."""
    metrics = [result.metrics for result in own if result.metrics]
    tokens, forwards = sum(len(r.tokens) for r in own), sum(r.forwards for r in own)
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


def by_category(results: Results) -> dict[str, dict[str, list[Result]]]:
    kinds = dict.fromkeys(result.category for own in results.values() for result in own)
    return {
        kind: {name: [r for r in own if r.category == kind] for name, own in results.items()}
        for kind in kinds
    }


def categories(results: Results) -> Iterator[tuple[str, dict[str, float | None]]]:
    for category, chosen in by_category(results).items():
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


def compared(
    setup: Setup, methods: Mapping[str, Method | Peer], family: Family | None = None
) -> tuple[Results, Record]:
    backend, databases = setup.backend, setup.databases(methods)
    curve = measure_costs(backend) if backend.info.can_tree else None
    results = measure(setup, databases, methods, curve, family)
    figures = {name: summary(name, results) for name in methods}
    add_gaps(setup, figures, results)
    points = curve.points.items() if curve else ()
    return results, {
        "statistics": any(own.statistics is not None for own in databases.values()),
        "forward_ms": {nodes: round(1e3 * seconds, 4) for nodes, seconds in points},
        "methods": figures,
        "categories": dict(categories(results)),
    }


def show_methods(record: Record) -> None:
    methods = record["methods"]
    show_rows(({"name": name, "verdict": verdict(f), **f} for name, f in methods.items()), COLUMNS)
    for name, figures in methods.items():
        if figures["unsteady_answers"]:
            print(f"{name}: {figures['unsteady_answers']} answers differ between repeats")
    print()
    found = record["categories"].items()
    rows = ((category, *map(times, speedups.values())) for category, speedups in found)
    table(("category", *methods), rows)
