"""Tests plans: what each really takes per token, compared with the prediction.

Every plan answers the same prompts with the same seeds, starting with empty caches, and the order
rotates from prompt to prompt. Predictions are compared with the times of decoding, which they
predict; speedups refer to whole answers (engine/compare.py). A stack runs without the controller
that pauses it in a chat, so that its own speed is measured; hierarchy drafting, alone and before a
stack, runs as it does in a chat.

`why` explains why a plan is slower than plain decoding: its costs, its acceptance or its batches.
Verifying n drafts takes n x + c(n) + h (E - 1) seconds, where x is the time per drafted token, h
the time of every choice after the first, and E the number of emitted tokens. That beats c(0) per
token if E is larger than

    need(n) = (n x + c(n) - h) / (c(0) - h).

E is n + 1 at most. If even that is too small for every n, the cost is the cause, otherwise the
acceptance. The formulas were derived for this project, like those of engine/hsd/planner.py.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor, inf
from typing import Any

import numpy as np

from engine.backends.base import Backend
from engine.compare import Speedup, overall, rotated
from engine.drafting.costs import CostCurve
from engine.drafting.databases import Databases
from engine.errors import Cancelled
from engine.hsd.family import Family, Plans
from engine.hsd.planner import (
    LONGEST,
    NAMES,
    Distribution,
    Plan,
    Recursion,
    batches,
    best,
    candidates,
    emitted,
)
from engine.hsd.profile import ModelProfile, Profile
from engine.methods import ALONE, PLAIN, Method, method_named
from engine.metrics import summarise
from engine.runs import Verdict, keeps_text, run, verdict, warm_up
from engine.settings import Drafting, Generation, Sampling
from engine.types import Message, Rule, Run

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
"""The prompts of profiles and measurements. They contain nothing that a user wrote."""
TRIED = 3
"""The number of prompts of a measurement."""
TOKENS = 64


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one plan: decode seconds per token, measured and, if possible, `predicted`;
    `speedup` is over plain decoding."""

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
    """A plan to test, as a method; a `gated` one runs with the controller, as in a chat."""

    title: str
    method: Method
    plan: Plan | None
    gated: bool = False


def prompts_of(backend: Backend, texts: Sequence[str]) -> list[list[int]]:
    return [backend.tokenize(backend.render([Message("user", text)])) for text in texts]


def entries(family: Plans[Any], drafting: Drafting, chosen: str) -> list[Entry]:
    """The entries to measure: plain decoding, the databases, each draft model, the best stacks, and
    the chosen plan."""
    profile, rule = family.profiled(), drafting.rule
    plans = candidates(profile, rule, family.allowed)
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
    """Run all entries; yields the share that is done, and the results as the last item.

    Raises Cancelled when `cancelled()` turns true.
    """
    runs: dict[str, list[Run]] = {entry.title: [] for entry in tried}
    warm_up(family.target, prompts[0], Generation(sampling, tokens))
    done = 0
    for number, prompt in enumerate(prompts):
        generation = Generation(replace(sampling, seed=number), tokens)
        for entry in rotated(tried, number):
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
    """The figures of a plan over all prompts, with the first difference to plain decoding, if
    any."""
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


TOLERANCE = 1.1
"""The factor by which a measurement may exceed its prediction before the profile is in doubt."""


def why(profile: Profile, plan: Plan, rule: Rule, measured: float | None = None) -> list[str]:
    """Sentences on why a plan is slow and what to change; none if it is fast.

    `measured` are its seconds per token, if it ran; otherwise its prediction counts.
    """
    recursion = Recursion(profile, rule)
    plain, predicted = profile.target.seconds(0), recursion.latency(plan)
    seconds = predicted if measured is None else measured
    if predicted <= plain and seconds > TOLERANCE * predicted:
        return [
            f"{plan} takes {ms(seconds)} per token, and {ms(predicted)} were predicted. The "
            "profile was measured on other text or under another load. Profile again."
        ]
    if not plan.levels and not plan.source or min(seconds, predicted) < plain:
        return []
    found = [
        f"{plan} takes {ms(seconds)} per token, plain decoding {ms(plain)}.",
        *reasons(recursion, plan, rule),
    ]
    better = best(profile, rule)
    if better == Plan():
        return [*found, "Plain decoding is the fastest here."]
    return [*found, f"The fastest here is {better}: {ms(recursion.latency(better))}."]


def reasons(recursion: Recursion, plan: Plan, rule: Rule) -> list[str]:
    """A sentence for each drafter in a plan whose model is faster without it."""
    profile = recursion.profile
    levels = [*(profile.index(level.model) for level in plan.levels), len(profile.models) - 1]
    found = [source_reason(profile.models[levels[0]], plan)] if plan.source else []
    for at, (below, above) in enumerate(pairwise(levels)):
        drafts = replace(plan, levels=plan.levels[: at + 1])
        proposed, drafting = recursion.proposed(drafts)
        emits, seconds = recursion.round(drafts, above)
        if seconds >= mean(emits) * profile.models[above].seconds(0):
            batch = mean(proposed)
            found.append(pair_reason(profile, rule, below, above, batch, drafting / batch))
    return [sentence for sentence in found if sentence]


def mean(shares: Distribution) -> float:
    return float(shares @ np.arange(len(shares)))


def source_reason(model: ModelProfile, plan: Plan) -> str:
    """Why the source of the lowest model of a plan does not pay; "" if it does."""
    rounds = model.rounds(plan.databases, plan.head)
    assert rounds is not None, f"no {plan.source} were measured for {model.name}"
    emits, needed = mean(np.array([0.0, *rounds.law])), rounds.seconds / model.seconds(0)
    if emits > needed:
        return ""
    return (
        f"With the {NAMES[plan.source]} {model.name} gives {emits:.2f} tokens per step. It would "
        f"need {needed:.2f} to be faster than without."
    )


def pair_reason(
    profile: Profile, rule: Rule, below: int, above: int, batch: float, each: float
) -> str:
    """Why drafts of `below`, with this mean batch and `each` seconds per token, slow `above`
    down."""
    draft, model = profile.models[below].name, profile.models[above]
    pair, alone = profile.pairs[below, above], model.seconds(0)
    edges = batches(profile, rule, below, above)
    least = min(edges, key=lambda edge: edge.seconds(each))
    if least.seconds(each) < alone:
        return (
            f"{draft} drafts {batch:.3g} tokens at a time. With {least.batch}, {model.name} would "
            f"take {ms(least.seconds(each))} per token; alone it takes {ms(alone)}."
        )
    needed = {n: need(model, rule, n, each) for n in range(1, LONGEST + 1)}
    rates = [(acceptance(tokens, n), n) for n, tokens in needed.items() if tokens < n + 1]
    if not rates:
        return cost_reason(draft, model, each)
    pays, drafted = min(rates)
    rate = acceptance(emitted(pair, rule, drafted), drafted)
    # Rounded in opposite directions, because two equal numbers would explain nothing.
    return (
        f"{model.name} accepts {floor(round(100 * rate, 6))} % of the tokens of {draft}. These "
        f"take {ms(each)} each, so at least {ceil(round(100 * pays, 6))} % would have to be "
        "accepted."
    )


def cost_reason(draft: str, model: ModelProfile, each: float) -> str:
    alone, choice = model.seconds(0), model.choice
    limit = max(
        ((n + 1) * (alone - choice) - model.seconds(n) + choice) / n for n in range(1, LONGEST + 1)
    )
    if limit <= 0:
        return (
            f"{model.name} takes {ms(alone)} per token alone, and {ms(model.seconds(1))} to check "
            "one draft. No draft model can make it faster."
        )
    return (
        f"{draft} takes {ms(each)} per token, {model.name} alone {ms(alone)}. Even if all its "
        f"tokens were accepted, {draft} would have to take less than {ms(limit)}."
    )


def need(model: ModelProfile, rule: Rule, drafted: int, each: float) -> float:
    """The tokens that a round must emit to be as fast as plain decoding: a choice more for each of
    them, or for each draft if these are verified as a chain."""
    alone, choice = model.seconds(0), model.choice
    seconds = drafted * each + model.seconds(drafted)
    if rule == "rejection":
        return (seconds + drafted * choice) / alone
    return (seconds - choice) / (alone - choice) if alone > choice else inf


def acceptance(tokens: float, drafted: int) -> float:
    """The a for which 1 + a + ... + a^n is `tokens`: the acceptance that emits as many tokens."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**depth for depth in range(drafted + 1)) < tokens:
            low = middle
        else:
            high = middle
    return high


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"
