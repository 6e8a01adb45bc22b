"""Plans put to the test: what each really takes per token, beside what was predicted.

Every plan answers the same prompts with the same seeds, from nothing, and the order rotates from
prompt to prompt. Predictions are of decoding, so decoding is what they are held against; speedups
are of whole answers (engine/compare.py). A stack runs without the gate that lets it rest in a chat,
since its own speed is in question; hierarchy drafting, alone and before a stack, runs as it does in
a chat.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.backends.base import Backend
from engine.compare import Speedup, overall
from engine.drafting.costs import CostCurve
from engine.drafting.databases import Databases
from engine.errors import Cancelled
from engine.hsd.family import Family, Plans
from engine.hsd.planner import Plan, Recursion, candidates
from engine.methods import ALONE, PLAIN, Method, method_named
from engine.metrics import summarise
from engine.runs import Verdict, keeps_text, run, verdict, warm_up
from engine.settings import Drafting, Generation, Sampling
from engine.types import Message, Run

PROMPTS = (
    "Tell me a short story about a boat and a storm.",
    "Explain to a child why the sky is blue.",
    "Write a list of ten things one finds in a garden.",
    "What should I cook tonight? I have rice, eggs and spinach.",
    "Write a Python function that reverses a list, with a short comment.",
    "Describe a walk by the sea in the early morning.",
    "Summarise in three sentences how a bicycle stays upright.",
    "Write a polite letter that asks a neighbour to be quieter at night.",
    "A train leaves at nine and travels for three hours and a half. When does it arrive, and why?",
    "Tell a story about two friends, then tell it once more, more slowly.",
    "Compare cats and dogs as companions, in two short paragraphs.",
    "Give step-by-step instructions for planting a tree.",
)
"""What profiles and measurements are made of: nothing that a user wrote."""
TRIED = 3
"""Prompts of a measurement."""
TOKENS = 64


@dataclass(frozen=True, slots=True)
class Trial:
    """One plan and what came of it: decode seconds per token, `predicted` where there is a
    prediction; `speedup` is over plain decoding."""

    name: str
    title: str
    predicted: float | None
    seconds: float
    tokens: int
    verdict: Verdict
    same_text: bool
    speedup: Speedup


@dataclass(frozen=True, slots=True)
class Entry:
    """A plan to try, as a method; `gated` if it is to run as in a chat."""

    title: str
    method: Method
    plan: Plan | None
    gated: bool = False


def prompts_of(backend: Backend, texts: Sequence[str]) -> list[list[int]]:
    """The prompts as the model reads them."""
    return [backend.tokenize(backend.render([Message("user", text)])) for text in texts]


def entries(family: Plans[Any], drafting: Drafting, chosen: str) -> list[Entry]:
    """What is measured: plain, the databases, each draft model, the best stacks, the chosen one."""
    profile, rule = family.profiled(), drafting.rule
    plans = candidates(profile, rule)
    if chosen:
        plan = family.plan(chosen, rule)
        plans.setdefault(str(plan), plan)
    found = [Entry("plain", PLAIN, Plan())]
    has_databases = profile.target.databases is not None
    alone = Plan(databases=True) if has_databases else None
    found.append(Entry("databases", method_named("hd", drafting), alone, gated=True))
    for text, plan in plans.items():
        if plan.head and not plan.levels:
            found.append(Entry(text, method_named(ALONE[plan.source], drafting), plan, gated=True))
        if plan.levels:
            found.append(Entry(text, method_named(f"hsd:{text}", drafting), plan))
    both = method_named("hd+hsd", drafting)
    return [*found, Entry("databases, then draft models", both, None, gated=True)]


def trials(
    family: Family,
    databases: Databases,
    tried: Sequence[Entry],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    costs: Callable[[Method], CostCurve | None],
    cancelled: Callable[[], bool],
    tokens: int = TOKENS,
) -> Generator[float | list[Trial], None, None]:
    """Run everything: yields the share that is done, and the outcome last.

    Raises Cancelled when `cancelled()` turns true.
    """
    runs: dict[str, list[Run]] = {entry.title: [] for entry in tried}
    warm_up(family.target, prompts[0], Generation(sampling, tokens))
    done = 0
    for number, prompt in enumerate(prompts):
        generation = Generation(replace(sampling, seed=number), tokens)
        at = number % len(tried)
        for entry in [*tried[at:], *tried[:at]]:
            fresh = databases.for_measuring()
            drafters = entry.method.drafters(
                fresh, family, generation.sampling, cancelled, family.target
            )
            curve = costs(entry.method) if entry.gated else None
            drafts = tuple(family.drafts.values())
            last = run(
                family.target, prompt, entry.method, drafters, generation, cancelled, curve, drafts
            )
            if cancelled():
                raise Cancelled("The measurement was stopped. What was known before stays.")
            runs[entry.title].append(last)
            done += 1
            yield done / (len(prompts) * len(tried))
    recursion = Recursion(family.profiled(), tried[-1].method.drafting.rule)
    plain = runs[tried[0].title]
    yield [outcome(family, entry, runs[entry.title], plain, recursion, sampling) for entry in tried]


def outcome(
    family: Family,
    entry: Entry,
    runs: Sequence[Run],
    plain: Sequence[Run],
    recursion: Recursion,
    sampling: Sampling,
) -> Trial:
    """One plan's figures over all prompts; the first difference to plain decoding, if any."""
    figures = [*map(summarise, runs)]
    tokens = sum(f.tokens for f in figures)
    found = [
        verdict(family.target.detokenize, slow, fast)
        for slow, fast in zip(plain, runs, strict=True)
    ]
    return Trial(
        entry.method.name,
        entry.title,
        recursion.latency(entry.plan) if entry.plan is not None else None,
        sum(f.decode_seconds for f in figures) / tokens if tokens else 0.0,
        tokens,
        next((v for v in found if not v.identical), Verdict(True, tokens)),
        keeps_text(entry.method, sampling),
        overall([*map(summarise, plain)], figures),
    )
