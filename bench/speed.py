"""Speed of decoding methods and their peers on the same prompts, in one process, in rotated order.

Every run starts from nothing (engine/compare.py). A method's model tier learns from each answer
once, after its repeats, so no repeat is drafted from the one before; and each method opens the
statistics for itself, so none finds look-ups cached that another has paid for. Times are wall times
of whole answers, what the drafters learn at the end included; a prompt's time is the median of its
repeats; a method's speed is all its tokens over all its time. A speedup is one speed over
another's; of a method of ours that had no draft accepted, one above 1 is noise, and left out. Step
figures (drafting, acceptance, look-ups, forwards) are of the first repeat of each prompt, whose
look-ups are cold: what a user meets. The cost of a forward is measured once, before anything else;
every method with an adaptive budget starts from it and corrects a copy of its own.

`forward_share` is the part of the decode time that the target's forwards take, verify seconds /
decode seconds. It is also how near a method comes to its bound, the decode speed it would have if
nothing but forwards took time: mean acceptance length / mean verify seconds.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

from bench.divergence import divergences
from bench.drafts import add_draft_arguments, load_family
from bench.measure import Result, is_adaptive, measure
from bench.options import (
    Record,
    add_run_arguments,
    check_run,
    conditions,
    generation_of,
    has_drafts,
    headline,
    load_model,
    open_databases,
    print_record,
)
from bench.peer import ASSISTED
from bench.peers import (
    BEST,
    DEFAULTS,
    PLAIN,
    SMALL,
    checked_methods,
    is_peer,
    keeps_text,
    made_peers,
    program_versions,
)
from bench.prompts import prepared, questions_of
from engine.backends.base import Backend
from engine.compare import gain
from engine.drafting.costs import measure_costs
from engine.methods import method_named
from engine.settings import BUDGETS, Drafting, Sampling
from engine.types import TIERS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench speed`."""
    add_run_arguments(parser)
    add_draft_arguments(parser)
    add = parser.add_argument
    add("--assistant", help="the draft model of 'assisted' (the embedded model brings one)")
    defaults = "; ".join(f"{kind}: {','.join(names)}" for kind, names in DEFAULTS.items())
    add("--methods", help=f"comma between; default for {defaults}")
    add("--nodes", type=int, default=Drafting().nodes)
    add("--budget", default=Drafting().budget, help=f"{' or '.join(BUDGETS)}: what limits a draft")


def checked_names(options: argparse.Namespace) -> list[str]:
    """The methods of the run. Raises SettingError for options that cannot work, before any load."""
    check_run(options)
    return checked_methods(options)


def run(options: argparse.Namespace) -> None:
    """Measure, print, save."""
    names = checked_names(options)
    generation = generation_of(options)
    drafting = Drafting(nodes=options.nodes, budget=options.budget)
    questions = questions_of(options)
    backend = load_model(options.model, options)
    prompts = prepared(backend, options, questions)
    with ExitStack() as stack:
        peers = made_peers(names, backend, options, stack)
        methods = {name: peers.get(name) or method_named(name, drafting) for name in names}
        adaptive = backend.info.can_tree and any(is_adaptive(method) for method in methods.values())
        curve = measure_costs(backend) if adaptive else None
        databases = open_databases(backend, methods, options.statistics, stack)
        family = None
        if any(has_drafts(method) for method in methods.values()):
            family = load_family(backend, options, generation.sampling, stack)
        results = measure(
            backend, databases, methods, prompts, generation, options.repeats, curve, family
        )
    figures = {name: summary(name, results, options.temperature) for name in names}
    add_gaps(backend, figures, results, [tokens for _, tokens in prompts], generation.sampling)
    record = conditions(backend, options) | {
        "assistant": Path(options.assistant or SMALL).name if ASSISTED in names else None,
        "programs": program_versions(names),
        "drafts": list(family.drafts) if family else [],
        "statistics": any(own.statistics is not None for own in databases.values()),
        "prompts": len(prompts),
        "forward_ms": {n: round(1e3 * t, 4) for n, t in curve.points.items()} if curve else None,
        "methods": figures,
        "categories": dict(categories(results, options.temperature)),
    }
    show(record)
    print_record(record, options.save)


def speed(results: Sequence[Result], decode_only: bool = False) -> float:
    """Tokens per second over all prompts, from the median time of each."""
    times = [median(r.decode_seconds if decode_only else r.seconds) for r in results]
    return sum(result.length for result in results) / sum(times)


def summary(name: str, results: dict[str, list[Result]], temperature: float) -> Record:
    """One method's figures against the fastest way to decode without drafts.

    `over_best_peer` is against the fastest of the peers that draft.
    """
    own = results[name]
    bases = baselines(results, temperature) or [name]
    base = max(bases, key=lambda base: speed(results[base]))
    ratios = [
        speed([mine]) / speed([other]) for mine, other in zip(own, results[base], strict=True)
    ]
    spread = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    best = [speed(results[peer]) for peer in BEST if peer in results]
    comparable = "plain" in results and keeps_text(name, temperature)
    differing = (
        sum(mine.tokens != plain.tokens for mine, plain in zip(own, results["plain"], strict=True))
        if comparable
        else None
    )
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


def baselines(results: Mapping[str, Sequence[Result]], temperature: float) -> list[str]:
    """What decodes without drafts, and says the same text as ours."""
    return [name for name in PLAIN if name in results and keeps_text(name, temperature)]


def gained(
    name: str, own: Sequence[Result], base: float, decode_only: bool = False
) -> float | None:
    """The speed of a method's answers over the `base`, None where that is noise.

    What is noise is told by the forwards, so of our own methods only: another program may well
    take less time for one.
    """
    accepted = sum(result.length - result.forwards for result in own)
    ratio = speed(own, decode_only) / base
    return ratio if is_peer(name) else gain(ratio, 1.0, accepted)


def step_figures(own: Sequence[Result]) -> Record:
    """What one method's forwards gave; what its steps cost, where they are ours."""
    metrics = [result.metrics for result in own if result.metrics]
    tokens, forwards = sum(r.length for r in own), sum(r.forwards for r in own)
    figures: Record = {"mean_acceptance_length": tokens / (forwards or 1)}
    if not metrics:
        return figures
    decode = sum(m.decode_seconds for m in metrics)
    drafted = sum(m.draft_seconds for m in metrics)
    verified = sum(m.verify_seconds for m in metrics)
    return figures | {
        "acceptance_ratio": sum(m.acceptance_ratio * m.tokens for m in metrics) / tokens,
        "draft_ms_per_step": 1e3 * drafted / forwards,
        "draft_share": drafted / decode,
        "verify_ms_per_step": 1e3 * verified / forwards,
        "forward_share": verified / decode,
        "step_ms": 1e3 * decode / forwards,
        "look_up_us": {
            tier: round(1e6 * median(t for r in own for t in r.look_ups(tier)), 1)
            for tier in TIERS
            if any(result.look_ups(tier) for result in own)
        },
    }


def add_gaps(
    backend: Backend,
    figures: dict[str, Record],
    results: dict[str, list[Result]],
    prompts: Sequence[list[int]],
    sampling: Sampling,
) -> None:
    """Say of every answer that differs from the plain one where it parts, and how near a tie.

    Of answers that are known by their text alone it cannot be said.
    """
    differing = [
        name
        for name in figures
        if figures[name]["differing_answers"] and all(r.text is None for r in results[name])
    ]
    if not differing:
        return
    answers = {name: [r.tokens for r in results[name]] for name in ("plain", *differing)}
    found = divergences(backend, prompts, answers, sampling)
    for name in differing:
        gaps = [divergence.gap for divergence in found[name]]
        figures[name] |= {
            "largest_gap": None if None in gaps else max(gap for gap in gaps if gap is not None),
            "divergences": [divergence.mapping() for divergence in found[name]],
        }


def categories(
    results: dict[str, list[Result]], temperature: float
) -> Iterator[tuple[str, dict[str, float | None]]]:
    """Per category, each method's speedup over the faster baseline."""
    first = next(iter(results.values()))
    for category in dict.fromkeys(result.category for result in first):
        chosen = {name: [r for r in own if r.category == category] for name, own in results.items()}
        base = max(speed(chosen[name]) for name in baselines(results, temperature) or chosen)
        yield category, {name: gained(name, own, base) for name, own in chosen.items()}


def show(record: Record) -> None:
    """Print the tables."""
    methods = record["methods"]
    wide = max(14, *(len(name) + 2 for name in methods))
    print(
        f"{headline(record)}\n"
        f"{record['prompts']} prompts, up to {record['max_new_tokens']} tokens, "
        f"T={record['temperature']:g}, min-p {record['min_p']:g}, "
        f"{'with' if record['statistics'] else 'no'} statistics"
    )
    for program, version in record["programs"].items():
        print(f"{program} {version}")
    if record["forward_ms"]:
        points = ", ".join(f"{n}: {ms:.4g}" for n, ms in record["forward_ms"].items())
        print(f"ms of a forward by drafted nodes: {points}")
    print(
        f"\n{'method':{wide}}{'tok/s':>8}{'speedup':>9}{'quartiles':>15}{'vs peers':>9}"
        f"{'decode':>8}{'tok/step':>10}{'ratio':>7}{'draft ms':>10}{'draft %':>9}{'forward %':>11}"
        "  same text"
    )
    for name, f in methods.items():
        low, _, high = f["speedup_quartiles"]
        peers = f"{f['over_best_peer']:8.2f}x" if f["over_best_peer"] else " " * 9
        drafted = (
            f"{f['acceptance_ratio']:7.0%}{f['draft_ms_per_step']:10.3f}{f['draft_share']:9.1%}"
            f"{f['forward_share']:11.1%}"
            if "step_ms" in f
            else " " * 37
        )
        print(
            f"{name:{wide}}{f['tokens_per_second']:8.1f}{times(f['speedup']):>9}{low:8.2f} - "
            f"{high:4.2f}{peers}{times(f['decode_speedup']):>8}{f['mean_acceptance_length']:10.2f}"
            f"{drafted}  {verdict(f)}"
        )
    print()
    for name, f in methods.items():
        if f.get("look_up_us"):
            tiers = ", ".join(f"{tier} {value:.0f}" for tier, value in f["look_up_us"].items())
            print(f"median look-up of {name}, us per step: {tiers}")
        if f["unsteady_answers"]:
            print(f"{name}: {f['unsteady_answers']} answers differ between repeats")
    print(f"\n{'category':18}" + "".join(f"{name:>{wide}}" for name in methods))
    for category, speedups in record["categories"].items():
        print(f"{category:18}" + "".join(f"{times(value):>{wide}}" for value in speedups.values()))


def times(ratio: float | None) -> str:
    """A speedup, and a dash where there is none to tell."""
    return "-" if ratio is None else f"{ratio:.2f}x"


def verdict(figures: Record) -> str:
    """Whether a method said what plain decoding said, in a few words."""
    if figures["identical"] is None:
        return "-"
    if figures["identical"]:
        return "yes"
    if "largest_gap" not in figures:
        return f"NO: {figures['differing_answers']} differ"
    largest = figures["largest_gap"]
    gap = "lengths differ" if largest is None else f"gap at most {largest:.3g}"
    return f"NO: {figures['differing_answers']} differ, {gap}"
