"""Stacks of draft models: profile the family, plan, and measure what was planned beside its rivals.

Every single draft model at its best batch, the best stack of every height (the depth ablation) with
the planned one among them, the databases alone and in front of the planned stack, in one process,
in rotated order. Stacks draft in every step here, as their own speed is in question; the databases,
alone and in front, run as in a chat. Measured are decode seconds per emitted token, the median of
the repeats of every prompt; predicted is what the planner computed from the profile before. The
machine may have been faster or slower then, which plain decoding shows: `error_at_pace` is the
error that is left when predictions are scaled so that plain decoding is right. Speedups are of
whole answers, as everywhere (bench/speed.py), and of decoding alone beside them.

`behind_fastest` is how much longer the plan took than the fastest plan measured, and
`speedup_over_best_single` its speed over the single draft that was the fastest in decoding. The
planner's own arithmetic says what it may be at best: `reachable`. `planned_again` is the plan once
the profile knows what was measured, as it would after these answers in a chat.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median

from bench.drafts import add_draft_arguments, load_family
from bench.measure import Result, measure
from bench.options import (
    Record,
    add_run_arguments,
    check_run,
    conditions,
    generation_of,
    headline,
    load_model,
    open_databases,
    print_record,
)
from bench.peer import Peer
from bench.prompts import prepared, questions_of
from bench.speed import gained, speed, times
from engine.drafting.costs import measure_costs
from engine.hsd.diagnosis import why
from engine.hsd.planner import SOURCES, Plan, Recursion, best, candidates, latency, stack_of
from engine.hsd.profile import Outcome, Profile
from engine.methods import ALONE, Method, method_named
from engine.settings import Drafting
from engine.types import RULES, Rule

BOTH = "hd+hsd"
WORTH = 1.2
"""What a stack should be worth over the best single draft."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench stack`."""
    add_run_arguments(parser)
    add_draft_arguments(parser)
    parser.add_argument("--rule", choices=RULES, default=RULES[0], help="how drafts are verified")


def rivals(profile: Profile, rule: Rule) -> dict[str, Plan]:
    """The plans with draft models, by the name of their method."""
    named = {}
    for spec, plan in candidates(profile, rule).items():
        if plan.levels:
            named[f"single:{spec}" if is_single(plan) else f"hsd:{spec}"] = plan
    return named


def without_models(profile: Profile) -> dict[str, Plan]:
    """The same for the databases, and for the target's head where it was profiled."""
    plans = {ALONE[source]: Plan((), *has) for source, has in SOURCES.items() if source}
    return {
        name: plan
        for name, plan in plans.items()
        if profile.target.rounds(plan.databases, plan.head) is not None
    }


def is_single(plan: Plan) -> bool:
    """Whether one draft model drafts alone."""
    return len(plan.levels) == 1 and not plan.source


def run(options: argparse.Namespace) -> None:
    """Profile, plan, measure, print, save."""
    check_run(options)
    generation = generation_of(options)
    questions = questions_of(options)
    target = load_model(options.model, options)
    prompts = prepared(target, options, questions)
    rule: Rule = options.rule
    drafting = Drafting(rule=rule)
    with ExitStack() as stack:
        family = load_family(target, options, generation.sampling, stack)
        profile = family.profiled()
        plans = rivals(profile, rule)
        alone = without_models(profile)
        names = ["plain", *plans, *alone, BOTH]
        methods: dict[str, Method | Peer] = {name: method_named(name, drafting) for name in names}
        databases = open_databases(target, methods, options.statistics, stack)
        curve = measure_costs(target)
        results = measure(
            target, databases, methods, prompts, generation, options.repeats, curve, family, plans
        )
    plans |= {"plain": Plan(), **alone}
    record = conditions(target, options) | {"bench": "stack", "rule": rule}
    record |= {"drafts": list(family.drafts), "prompts": len(prompts)}
    record |= figures(profile, plans, results, rule)
    show(record, profile)
    print_record(record, options.save)


def figures(
    profile: Profile, plans: dict[str, Plan], results: dict[str, list[Result]], rule: Rule
) -> Record:
    """What was predicted and what came of it."""
    measured = {name: seconds_per_token(own) for name, own in results.items()}
    predicted = {name: latency(profile, plan, rule) for name, plan in plans.items()}
    pace = measured["plain"] / predicted["plain"]
    planned = min(plans, key=lambda name: predicted[name])
    singles = [name for name in plans if is_single(plans[name])]
    single = min(singles, key=lambda name: measured[name])
    plain = [result.tokens for result in results["plain"]]
    return {
        "planned": str(plans[planned]),
        "best_single": str(plans[single]),
        "fastest": str(plans[min(plans, key=lambda name: measured[name])]),
        "predicted_ms_per_token": {name: round(1e3 * s, 4) for name, s in predicted.items()},
        "measured_ms_per_token": {name: round(1e3 * s, 4) for name, s in measured.items()},
        "behind_fastest": measured[planned] / min(measured[name] for name in plans) - 1,
        "speedup_over_best_single": speed(results[planned]) / speed(results[single]),
        "decode_speedup_over_best_single": measured[single] / measured[planned],
        "reachable": min(predicted[name] for name in singles) / predicted[planned],
        "arithmetic": arithmetic(profile, rule, [plans[name] for name in (planned, *singles)]),
        "planned_again": str(best(learned(profile, plans, results, rule), rule)),
        "speedup_over_plain": over_plain(results),
        "decode_speedup_over_plain": over_plain(results, decode_only=True),
        "prediction_error": {name: measured[name] / s - 1 for name, s in predicted.items()},
        "error_at_pace": {name: measured[name] / (pace * s) - 1 for name, s in predicted.items()},
        "tokens_per_forward": {
            name: sum(r.length for r in own) / sum(r.forwards for r in own)
            for name, own in results.items()
        },
        "differing_answers": {
            name: sum(r.tokens != said for r, said in zip(own, plain, strict=True))
            for name, own in results.items()
        },
        "plans": {name: str(plan) for name, plan in plans.items()},
        "why": why(profile, plans[planned], rule, measured[planned]),
        "profile": profile.mapping(),
    }


def arithmetic(profile: Profile, rule: Rule, plans: Sequence[Plan]) -> list[str]:
    """How the planner comes to what plans take: a round's seconds over its tokens."""
    recursion, found = Recursion(profile, rule), []
    for plan in plans:
        emits, seconds = recursion.round(plan, len(profile.models) - 1)
        tokens = float(sum(n * share for n, share in enumerate(emits)))
        drafting = recursion.handed(plan)[1] if plan.levels else 0.0
        found.append(
            f"{plan}: ({1e3 * drafting:.2f} drafting + {1e3 * (seconds - drafting):.2f} verifying) "
            f"/ {tokens:.3f} tokens = {1e3 * seconds / tokens:.2f} ms, to the end of answers "
            f"{1e3 * recursion.latency(plan):.2f} ms"
        )
    return found


def learned(
    profile: Profile, plans: dict[str, Plan], results: dict[str, list[Result]], rule: Rule
) -> Profile:
    """The profile with what was measured, beside plain decoding of the same prompts."""
    plain, recursion = seconds_per_token(results["plain"]), Recursion(profile, rule)
    for name, plan in plans.items():
        tokens = sum(result.length for result in results[name])
        if name == "plain" or not tokens:
            continue
        took = seconds_per_token(results[name]) * tokens
        expected = recursion.profiled(plan) / profile.target.seconds(0) * plain * tokens
        outcome = Outcome(tokens, took, expected, plain * tokens)
        profile = profile.learned(stack_of(plan, rule), outcome)
    return profile


def over_plain(
    results: dict[str, list[Result]], decode_only: bool = False
) -> dict[str, float | None]:
    """Every method's speed over that of plain decoding."""
    base = speed(results["plain"], decode_only)
    return {name: gained(name, own, base, decode_only) for name, own in results.items()}


def seconds_per_token(own: Sequence[Result]) -> float:
    """Decode seconds per emitted token over all prompts."""
    return sum(median(r.decode_seconds) for r in own) / sum(r.length for r in own)


def show(record: Record, profile: Profile) -> None:
    """Print the tables."""
    print(
        f"{headline(record)}\nwith {', '.join(record['drafts'])}; {record['prompts']} prompts, "
        f"T={record['temperature']:g}, rule {record['rule']}\n"
    )
    target = profile.target
    print(f"{'model':18}{'params':>10}{'ms':>8}{'of target':>11}  acceptance by the larger ones")
    for at, model in enumerate(profile.models):
        accepted = [
            f"{profile.models[above].name} {profile.pairs[at, above].acceptance:.0%}"
            for above in range(at + 1, len(profile.models))
        ]
        print(
            f"{model.name:18}{model.parameters / 1e6:8.1f} M{1e3 * model.seconds(0):8.2f}"
            f"{model.seconds(0) / target.seconds(0):11.3f}  {', '.join(accepted)}"
        )
    print(
        f"\n{'method':34}{'predicted':>11}{'measured':>10}{'error':>8}{'at pace':>9}"
        f"{'speedup':>9}{'decode':>8}{'tok/step':>10}  same text"
    )
    for name, measured in record["measured_ms_per_token"].items():
        predicted = record["predicted_ms_per_token"].get(name)
        error = record["prediction_error"].get(name)
        known = f"{predicted:8.2f} ms" if predicted else " " * 11
        off = f"{error:+8.1%}{record['error_at_pace'][name]:+9.1%}" if predicted else " " * 17
        differing = record["differing_answers"][name]
        print(
            f"{name:34}{known}{measured:7.2f} ms{off}"
            f"{times(record['speedup_over_plain'][name]):>9}"
            f"{times(record['decode_speedup_over_plain'][name]):>8}"
            f"{record['tokens_per_forward'][name]:10.2f}  "
            f"{f'{differing} differ' if differing else 'yes'}"
        )
    print(
        f"\nplanned: {record['planned']}, {record['behind_fastest']:.1%} behind the fastest plan "
        f"measured ({record['fastest']})\n{record['speedup_over_best_single']:.2f}x over the best "
        f"single draft ({record['best_single']}), decoding alone "
        f"{record['decode_speedup_over_best_single']:.2f}x; by the profile "
        f"{record['reachable']:.2f}x"
    )
    if record["reachable"] < WORTH:
        print(f"{WORTH:g}x is not reachable with these costs and acceptances:")
    for line in record["arithmetic"]:
        print(f"  {line}")
    print(f"planned again with what was measured: {record['planned_again']}")
    for line in record["why"]:
        print(line)
