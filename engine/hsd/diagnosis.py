"""Why a plan is slower than plain decoding, in words: its costs, its acceptance or its batches.

To verify n drafts takes n x + c(n) + h (E - 1) seconds, where a drafted token takes x and every
choice after the first h, and it emits E tokens. That beats c(0) per token if E is more than

    need(n) = (n x + c(n) - h) / (c(0) - h).

E is n + 1 at most. Where even that is too little for every n the cost is the cause, and otherwise
acceptance. The formulas are this project's own, as those of engine/hsd/planner.py are.
"""

from dataclasses import replace
from itertools import pairwise
from math import ceil, floor, inf

import numpy as np

from engine.hsd.planner import LONGEST, Law, Plan, Recursion, batches, best, emitted
from engine.hsd.profile import ModelProfile, Profile
from engine.types import Rule

TOLERANCE = 1.1
"""A measurement may exceed its prediction by so much before the profile is in doubt."""


def why(profile: Profile, plan: Plan, rule: Rule, measured: float | None = None) -> list[str]:
    """What is wrong with a plan and what to change, in sentences; none if all is well.

    `measured` are the seconds per token that it took, if it ran; else its prediction counts.
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
    """A sentence for everything in a plan that drafts for a model which is faster without it."""
    profile = recursion.profile
    levels = [*(profile.index(level.model) for level in plan.levels), len(profile.models) - 1]
    found = [of_source(profile.models[levels[0]], plan)] if plan.source else []
    for at, (below, above) in enumerate(pairwise(levels)):
        drafts = replace(plan, levels=plan.levels[: at + 1])
        handed, drafting = recursion.handed(drafts)
        emits, seconds = recursion.round(drafts, above)
        if seconds >= mean(emits) * profile.models[above].seconds(0):
            batch = mean(handed)
            found.append(of_pair(profile, rule, below, above, batch, drafting / batch))
    return [sentence for sentence in found if sentence]


def mean(law: Law) -> float:
    """The expected number of tokens."""
    return float(law @ np.arange(len(law)))


def of_source(model: ModelProfile, plan: Plan) -> str:
    """Why what drafts for the lowest model of a plan does not pay; empty if it does."""
    rounds = model.rounds(plan.databases, plan.head)
    assert rounds is not None, f"no {plan.source} were measured for {model.name}"
    emits, needed = mean(np.array([0.0, *rounds.law])), rounds.seconds / model.seconds(0)
    if emits > needed:
        return ""
    return (
        f"With the {plan.source} {model.name} gives {emits:.2f} tokens per step. It would need "
        f"{needed:.2f} to be faster than without."
    )


def of_pair(profile: Profile, rule: Rule, below: int, above: int, batch: float, each: float) -> str:
    """Why drafts of `below`, in such batches on average at `each` seconds, slow `above` down."""
    draft, model = profile.models[below].name, profile.models[above]
    pair, alone = profile.pairs[below, above], model.seconds(0)
    edges = batches(profile, rule, below, above)
    least = min(edges, key=lambda edge: edge.seconds(each))
    if least.seconds(each) < alone:
        return (
            f"{draft} drafts {batch:.3g} tokens at a time. With {least.batch}, {model.name} would "
            f"take {ms(least.seconds(each))} per token; alone it takes {ms(alone)}."
        )
    needed = {n: need(model, n, each) for n in range(1, LONGEST + 1)}
    rates = [(acceptance(tokens, n), n) for n, tokens in needed.items() if tokens < n + 1]
    if not rates:
        return of_cost(draft, model, each)
    pays, drafted = min(rates)
    rate = acceptance(emitted(pair, rule, drafted), drafted)
    # Rounded away from each other: two equal numbers would explain nothing.
    return (
        f"{model.name} accepts {floor(round(100 * rate, 6))} % of the tokens of {draft}. These "
        f"take {ms(each)} each, so at least {ceil(round(100 * pays, 6))} % would have to be "
        "accepted."
    )


def of_cost(draft: str, model: ModelProfile, each: float) -> str:
    """Why drafts cannot pay even if all are accepted: what they, or verifying them, would cost."""
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


def need(model: ModelProfile, drafted: int, each: float) -> float:
    """The tokens that verifying so many drafts of `each` seconds must emit to be worth it."""
    won = model.seconds(0) - model.choice
    return (drafted * each + model.seconds(drafted) - model.choice) / won if won > 0 else inf


def acceptance(tokens: float, drafted: int) -> float:
    """The a for which 1 + a + ... + a^n is `tokens`: equal acceptances that emit as much."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**depth for depth in range(drafted + 1)) < tokens:
            low = middle
        else:
            high = middle
    return high


def ms(seconds: float) -> str:
    """Milliseconds, in three digits."""
    return f"{1000 * seconds:.3g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"
