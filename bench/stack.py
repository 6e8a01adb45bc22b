"""Stacks of draft models: profile the family, plan, and measure the plan and its rivals.

The rivals are every single draft model at its best batch, the best stack of every height, the
databases alone, and the databases combined with the planned stack. Stacks draft in every step here,
because their own speed is in question; the databases run as in a chat. Measured times are decode
seconds per token; predicted times come from the profile, when the machine may have been faster or
slower: `error_at_pace` is the error that remains if predictions are scaled so that plain decoding
is right.

`behind_fastest` is how much longer the plan took than the fastest plan that was measured, and
`speedup_over_best_single` its speed over the single draft that decoded fastest. `reachable` is the
best that this speedup can be by the planner's own arithmetic.
"""

from bench.harness import Add, Benchmark, Setup
from bench.measure import Peer, Results, measure, speed, summary
from bench.report import Record, headline, show_rows, table
from engine.drafting.costs import measure_costs
from engine.hsd.planner import Plan, candidates, latency
from engine.hsd.profile import Profile
from engine.hsd.trials import why
from engine.methods import ALONE, Method, method_named
from engine.settings import Drafting
from engine.types import RULES, Rule

BOTH = "hd+hsd"
COLUMNS = {
    "method": "{name}",
    "predicted": "{predicted_ms_per_token:.2f} ms",
    "measured": "{measured_ms_per_token:.2f} ms",
    "error": "{prediction_error:+.1%}",
    "at pace": "{error_at_pace:+.1%}",
    "speedup": "{speedup_over_plain:.2f}x",
    "decode": "{decode_speedup_over_plain:.2f}x",
    "tok/step": "{tokens_per_forward:.2f}",
    "texts that differ": "{differing_answers}",
}


class Stack(Benchmark):
    """Stacks of draft models: profile the family, plan, and measure the plan and its rivals."""

    groups = (*Benchmark.groups, "drafts")

    def add_options(self, add: Add) -> None:
        add("--rule", choices=RULES, default=RULES[0], help="how drafts are verified")

    def measure(self, setup: Setup) -> Record:
        rule: Rule = setup.options.rule
        family = setup.family()
        profile = family.profiled()
        plans = {name_of(plan): plan for plan in candidates(profile, rule).values()}
        drafting = Drafting(rule=rule)
        methods: dict[str, Method | Peer] = {
            name: method_named(name, drafting) for name in (*plans, BOTH)
        }
        ungated = [name for name, plan in plans.items() if plan.levels]
        databases, curve = setup.databases(methods), measure_costs(setup.backend)
        results = measure(setup, databases, methods, curve, family, ungated)
        found = {"rule": rule, "drafts": list(family.drafts), "models": models(profile)}
        return found | figures(profile, plans, results, rule)

    def show(self, record: Record) -> None:
        print(
            f"{headline(record)}\nwith {', '.join(record['drafts'])}; {record['prompts']} prompts, "
            f"T={record['temperature']:g}, rule {record['rule']}\n"
        )
        heads = ("model", "params", "ms", "of target", "acceptance by the larger ones")
        table(heads, record["models"])
        print()
        by_name = {key: each for key, each in record.items() if isinstance(each, dict)}
        rows = (
            {key: each.get(name) for key, each in by_name.items()} | {"name": name}
            for name in record["measured_ms_per_token"]
        )
        show_rows(rows, COLUMNS)
        print(
            f"\nplanned: {record['planned']}, {record['behind_fastest']:.1%} behind the fastest "
            f"plan measured ({record['fastest']})\n{record['speedup_over_best_single']:.2f}x over "
            f"the best single draft ({record['best_single']}), decoding alone "
            f"{record['decode_speedup_over_best_single']:.2f}x; by the profile "
            f"{record['reachable']:.2f}x"
        )
        for line in record["why"]:
            print(line)


def name_of(plan: Plan) -> str:
    """The name of the method that follows a plan and nothing else."""
    if plan.levels:
        return f"{'single' if is_single(plan) else 'hsd'}:{plan}"
    return ALONE[plan.source] if plan.source else "plain"


def is_single(plan: Plan) -> bool:
    return len(plan.levels) == 1 and not plan.source


def models(profile: Profile) -> list[list[str]]:
    rows = []
    for at, model in enumerate(profile.models):
        accepted = (
            f"{profile.models[above].name} {profile.pairs[at, above].acceptance:.0%}"
            for above in range(at + 1, len(profile.models))
        )
        cost = model.seconds(0) / profile.target.seconds(0)
        size, seconds = f"{model.parameters / 1e6:.1f} M", f"{1e3 * model.seconds(0):.2f}"
        rows.append([model.name, size, seconds, f"{cost:.3f}", ", ".join(accepted)])
    return rows


def figures(profile: Profile, plans: dict[str, Plan], results: Results, rule: Rule) -> Record:
    measured = {name: 1 / speed(own, decode_only=True) for name, own in results.items()}
    predicted = {name: latency(profile, plan, rule) for name, plan in plans.items()}
    pace = measured["plain"] / predicted["plain"]
    planned = min(plans, key=lambda name: predicted[name])
    singles = [name for name in plans if is_single(plans[name])]
    single = min(singles, key=lambda name: measured[name])
    summaries = {name: summary(name, results) for name in results}

    def each(figure: str) -> Record:
        return {name: found[figure] for name, found in summaries.items()}

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
        "speedup_over_plain": each("speedup"),
        "decode_speedup_over_plain": each("decode_speedup"),
        "prediction_error": {name: measured[name] / s - 1 for name, s in predicted.items()},
        "error_at_pace": {name: measured[name] / (pace * s) - 1 for name, s in predicted.items()},
        "tokens_per_forward": each("mean_acceptance_length"),
        "differing_answers": each("differing_answers"),
        "plans": {name: str(plan) for name, plan in plans.items()},
        "why": why(profile, plans[planned], rule, measured[planned]),
        "profile": profile.mapping(),
    }
