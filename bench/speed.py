"""Commands that compare methods on the same prompts, in one process, in rotated order.

Each method opens the statistics for itself, so none finds look-ups cached that another has paid
for. Times are wall times of whole answers, including what the drafters learn at the end. The cost
of a forward is measured once, before anything else; every method with an adaptive budget starts
from it and corrects a copy of its own.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import combinations, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.harness import (
    EMBEDDED,
    TRANSFORMERS,
    Add,
    Bar,
    Benchmark,
    Record,
    Setup,
    draft_options,
    has_drafts,
    headline,
    kind_of,
    numbers,
    one_of,
    prompts_line,
    runtime_of,
    show_bars,
    show_rows,
    source_of,
)
from bench.measure import (
    ASSISTED,
    PEERS,
    PLAIN,
    Peer,
    Result,
    Results,
    compared,
    curve_for,
    is_peer,
    show_categories,
    show_methods,
    speed,
)
from engine.backends.base import Backend
from engine.decode import never
from engine.drafting.base import Drafter
from engine.drafting.costs import measure_costs
from engine.drafting.databases import Databases
from engine.drafting.hierarchy import Hierarchy
from engine.errors import SettingError
from engine.heads.base import Guess, Head, HeadInfo
from engine.hsd.family import Family
from engine.methods import (
    FIXED,
    METHODS,
    PREFIXES,
    FromDatabases,
    Method,
    hierarchy,
    method_named,
    no_head,
)
from engine.settings import BUDGETS, Drafting, Sampling
from engine.types import HEAD, TIERS

SMALL = EMBEDDED.with_name("small")
DEFAULTS = {
    kind: ("plain", *peers, "rest", "hd-published", "lookup", "hd") for kind, peers in PEERS.items()
}
"""The methods of a run that names none."""


def checked_methods(options: argparse.Namespace) -> list[str]:
    """The names of the methods of a run, checked before any model is loaded.

    Of the default methods those that cannot run here are left out, and a line is printed. Raises
    SettingError for unknown methods, and for peers that were named and cannot run.
    """
    kind = kind_of(options.model)
    if options.methods is None:
        problems = {name: obstacle(name, options) for name in DEFAULTS[kind]}
        for problem in dict.fromkeys(filter(None, problems.values())):
            absent = ", ".join(name for name in problems if problems[name] == problem)
            print(f"Left out: {absent}, as {problem}.")
        return [name for name, problem in problems.items() if not problem]
    names = [name.strip() for name in options.methods.split(",") if name.strip()]
    if not names:
        raise SettingError("Give at least one method.")
    known = ("plain", *PEERS[kind], *(name for name in METHODS if name != "plain"))
    for name in names:
        other = next((other for other in PEERS if name in PEERS[other]), kind)
        if other != kind:
            raise SettingError(
                f"The peer {name!r} is of {other} models, and {options.model!r} is none. Choose "
                f"from: {', '.join(PEERS[kind])}."
            )
        ours = name.partition(":")[0] in PREFIXES or name.startswith(FIXED)
        if name not in known and not ours:
            raise SettingError(f"There is no method {name!r}. Choose from: {', '.join(known)}.")
        if problem := obstacle(name, options):
            raise SettingError(
                f"The method {name!r} cannot run, as {problem}. Change that, or leave it out of "
                "--methods."
            )
    return names


def obstacle(name: str, options: argparse.Namespace) -> str:
    """Why a method cannot run with these options; "" if it can."""
    if name == ASSISTED and options.model != "embedded" and not options.assistant:
        return f"it needs a draft model for {options.model!r} (--assistant)"
    return ""


def made_peers(
    names: Sequence[str], backend: Backend, options: argparse.Namespace, stack: ExitStack
) -> dict[str, Peer]:
    """The peers among the methods, ready to answer; `stack` closes them."""
    chosen = [name for name in names if is_peer(name)]
    # Imported late, because only one of the two libraries may be installed.
    if chosen and kind_of(options.model) == TRANSFORMERS:
        from bench.transformers_peers import transformers_peer

        assistant = options.assistant or str(SMALL)
        return {name: transformers_peer(name, backend, assistant) for name in chosen}
    if chosen:
        from bench.llama_peers import LlamaPeer

        given = backend, source_of(options.model), runtime_of(options)
        return {name: stack.enter_context(closing(LlamaPeer(name, *given))) for name in chosen}
    return {}


class Speed(Benchmark):
    """Speed of decoding methods and their peers on the same prompts."""

    groups = (*Benchmark.groups, draft_options)

    def add_options(self, add: Add) -> None:
        add("--assistant", help="the draft model of 'assisted' (the embedded model brings one)")
        defaults = "; ".join(f"{kind}: {','.join(names)}" for kind, names in DEFAULTS.items())
        add("--methods", help=f"comma between; default for {defaults}")
        add("--nodes", type=int, default=Drafting().nodes)
        add("--budget", default=Drafting().budget, help=f"{' or '.join(BUDGETS)}: limits a draft")

    def check(self, options: argparse.Namespace) -> None:
        super().check(options)
        options.methods = checked_methods(options)
        Drafting(nodes=options.nodes, budget=options.budget)

    def measure(self, setup: Setup) -> Record:
        options, backend, names = setup.options, setup.backend, setup.options.methods
        drafting = Drafting(nodes=options.nodes, budget=options.budget)
        peers = made_peers(names, backend, options, setup.stack)
        methods = {name: peers.get(name) or method_named(name, drafting) for name in names}
        curve = curve_for(backend, methods)
        family = setup.family() if any(map(has_drafts, methods.values())) else None
        _, found = compared(setup, methods, curve, family)
        return found | {
            "assistant": Path(options.assistant or SMALL).name if ASSISTED in names else None,
            "drafts": list(family.drafts) if family else [],
            "forward_ms": milliseconds(curve.points) if curve else None,
        }

    def show(self, record: Record) -> None:
        statistics = "with" if record["statistics"] else "no"
        print(f"{headline(record)}\n{prompts_line(record)}, {statistics} statistics")
        if record["forward_ms"]:
            points = ", ".join(f"{n}: {ms:.4g}" for n, ms in record["forward_ms"].items())
            print(f"ms of a forward by drafted nodes: {points}")
        print()
        show_methods(record)
        print()
        show_categories(record)


def milliseconds(points: Mapping[int, float]) -> dict[int, float]:
    return {nodes: round(1e3 * seconds, 4) for nodes, seconds in points.items()}


# ablation


NODES = (7, 15, 31)
GROUPS = ("tiers", "order", "access", "budget")


class Ablation(Benchmark):
    """What each part of hierarchy drafting is worth: the same prompts with parts taken away.

    Compares the tiers alone, in pairs and all together; the order of the tiers; all tiers at once
    ("merged", ours) with tier after tier ("hierarchical", as in the paper); and the adaptive budget
    with fixed ones.
    """

    def add_options(self, add: Add) -> None:
        add("--groups", type=one_of("group", GROUPS), nargs="*", default=GROUPS, help="to compare")

    def measure(self, setup: Setup) -> Record:
        methods: dict[str, Method | Peer] = {"plain": method_named("plain")}
        methods |= {method.title: method for method in variants(setup.options.groups)}
        return compared(setup, methods, curve_for(setup.backend, methods))[1]

    def show(self, record: Record) -> None:
        print(f"{headline(record)}\n{prompts_line(record)}\n")
        show_methods(record)


def tier_after_tier(
    databases: Databases, drafting: Drafting, sampling: Sampling | None = None
) -> list[Drafter]:
    """One drafter per tier, as in the paper: each may use the nodes that those before it left."""
    tiers = databases.tiers(drafting.tiers)
    return [Hierarchy([tier], databases.calibration, sampling) for tier in tiers]


def variants(groups: Sequence[str]) -> list[Method]:
    """The configurations, titled by what is special about each. The first is the default."""
    found = [Method("hd", "all, as by default", Drafting())]

    def add(title: str, drafting: Drafting, databases: FromDatabases = hierarchy) -> None:
        found.append(Method("hd", title, drafting, databases))

    if "tiers" in groups:
        for size in (1, 2):
            for tiers in combinations(TIERS, size):
                add(" + ".join(tiers), Drafting(tiers=tiers))
    if "order" in groups:
        for tiers in permutations(TIERS):
            if tiers != TIERS:
                add(f"merged: {', '.join(tiers)}", Drafting(tiers=tiers))
                add(f"hierarchical: {', '.join(tiers)}", Drafting(tiers=tiers), tier_after_tier)
    if "access" in groups:
        add("hierarchical", Drafting(), tier_after_tier)
        for nodes in NODES:
            drafting = Drafting(nodes=nodes, budget="fixed")
            add(f"hierarchical, fixed {nodes} nodes", drafting, tier_after_tier)
    if "budget" in groups or "access" in groups:
        for nodes in NODES:
            add(f"merged, fixed {nodes} nodes", Drafting(nodes=nodes, budget="fixed"))
    return found


# heads


DATABASES, ALONE, MERGED, SHUFFLED = "hd", "head", "hd+head", "shuffled"
HEAD_BARS = (
    Bar("over_databases", "both in one tree, over the databases", 1.15, least=True),
    Bar("over_fixed", "both, over the head at its best fixed depth", 1.15, least=True),
    Bar("least_category", "both, over plain, in the slowest category", 0.97, least=True),
    Bar("bad_over_plain", "both with a bad head, over plain", 0.97, least=True),
    Bar("bad_over_databases", "both with a bad head, over the databases", 0.97, least=True),
)
HEAD_COLUMNS = {
    "head": "{name}",
    "calls/step": "{head_calls_per_step:.2f}",
    "asked": "{head_asked:.0%}",
    "drafted": "{head_drafted}",
    "accepted": "{head_accepted}",
    "kept of those reached, by depth": "{kept}",
}


class Heads(Benchmark):
    """A model's head and its databases: each alone, the head at fixed depths, both in one tree.

    `shuffled` is the method with both, and a head that is as sure as the real one but always
    proposes other tokens: it measures what a bad head costs. HEAD_BARS are the targets.
    """

    defaults = {"limit": 39}

    def add_options(self, add: Add) -> None:
        usual = "1,2,3,4,6"
        add("--depths", type=numbers(0), default=usual, help=f"fixed, comma between ({usual})")
        add("--peers", action=argparse.BooleanOptionalAction, default=True)
        add("--assistant", help="the draft model of 'assisted' (the embedded model has one)")

    def measure(self, setup: Setup) -> Record:
        options, backend = setup.options, setup.backend
        if missing := no_head(backend.info):
            raise SettingError(missing)
        head = backend.info.head
        assert head is not None
        fixed = [f"{FIXED}{depth}" for depth in options.depths if depth <= head.depth]
        methods: dict[str, Method | Peer] = {
            name: method_named(name) for name in ("plain", DATABASES, *fixed, ALONE, MERGED)
        }
        methods[SHUFFLED] = shuffled()
        if options.peers:
            known = PEERS[kind_of(options.model)]
            names = [name for name in known if name not in PLAIN and not obstacle(name, options)]
            methods |= made_peers(names, backend, options, setup.stack)
        results, found = compared(setup, methods, measure_costs(backend))
        for name, own in results.items():
            found["methods"][name] |= head_figures(own)
        described = {"name": head.name, "depth": head.depth, "parameters": head.parameters}
        return found | {"head": described, "bars": head_bars(results)}

    def show(self, record: Record) -> None:
        print(f"{headline(record)}\n{record['head']['name']} head, {record['prompts']} prompts\n")
        show_methods(record)
        print()
        show_categories(record)
        print()
        found = [{"name": name} | f for name, f in record["methods"].items() if "head_asked" in f]
        show_rows(found, HEAD_COLUMNS, left=(0, 5))
        print()
        show_bars(HEAD_BARS, record["bars"])


# a head that is wrong


class ShuffledGuess:
    """A guess in which each token is replaced by the one half the vocabulary away."""

    def __init__(self, guess: Guess, size: int) -> None:
        self.guess, self.size = guess, size

    def other(self, token: int) -> int:
        return (token + self.size // 2) % self.size

    def likeliest(self, count: int) -> list[tuple[int, float]]:
        return [(self.other(token), chance) for token, chance in self.guess.likeliest(count)]

    def probability(self, token: int) -> float:
        return self.guess.probability((token - self.size // 2) % self.size)

    def draw(self, position: int, sampling: Sampling) -> int:
        return self.other(self.guess.draw(position, sampling))


class ShuffledHead:
    """A head whose guesses are shuffled: it takes what the real one takes."""

    def __init__(self, head: Head, size: int) -> None:
        self.head, self.size = head, size
        self.info: HeadInfo = head.info
        self.listen, self.forget = head.listen, head.forget

    def start(
        self, tokens: Sequence[int], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> Guess | None:
        guess = self.head.start(tokens, sampling, cancelled)
        return None if guess is None else ShuffledGuess(guess, self.size)

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Guess]:
        guesses = self.head.extend(parents, tokens)
        return [ShuffledGuess(guess, self.size) for guess in guesses]


class ShuffledMethod(Method):
    """The method with databases and head, whose head is shuffled."""

    def drafters(
        self,
        databases: Databases,
        family: Family | None = None,
        sampling: Sampling | None = None,
        cancelled: Callable[[], bool] = never,
        target: Any = None,
    ) -> list[Drafter]:
        bad = ShuffledHead(target.head, target.info.vocabulary_size)
        wearing: Any = SimpleNamespace(info=target.info, head=bad)
        return method_named(MERGED).drafters(databases, family, sampling, cancelled, wearing)


def shuffled() -> Method:
    method = method_named(MERGED)
    drafting, databases = method.drafting, method.databases
    return ShuffledMethod(SHUFFLED, "A bad head", drafting, databases, head=method.head)


# figures


def head_figures(own: Sequence[Result]) -> Record:
    steps = [step for result in own if result.run for step in result.run.steps]
    calls = [step.levels[HEAD][0] for step in steps if HEAD in step.levels]
    drafted = sum(step.proposed.get(HEAD, 0) for step in steps)
    if not steps or not (calls or drafted):
        return {}
    depth = max(len(step.by_depth) for step in steps)
    at = [[step.by_depth[d] for step in steps if len(step.by_depth) > d] for d in range(depth)]
    kept = [sum(k for _, k in each) for each in at]
    reached = [sum(n > 0 for n, _ in at[0]), *kept]
    shares = [k / r for k, r in zip(kept, reached, strict=False) if r]
    return {
        "head_calls_per_step": sum(calls) / len(steps),
        "head_asked": len(calls) / len(steps),
        "head_drafted": drafted,
        "head_accepted": sum(step.accepted.get(HEAD, 0) for step in steps),
        "kept_of_reached": [round(share, 3) for share in shares],
        "kept": ", ".join(f"{share:.0%}" for share in shares[:6]),
    }


def head_bars(results: Results) -> dict[str, float]:
    merged, bad = speed(results[MERGED]), speed(results[SHUFFLED])
    fixed = [name for name in results if name.startswith(FIXED)] or [ALONE]
    plain, both = (speed_by_category(results[name]) for name in ("plain", MERGED))
    return {
        "over_databases": merged / speed(results[DATABASES]),
        "over_fixed": merged / max(speed(results[name]) for name in fixed),
        "least_category": min(both[name] / plain[name] for name in plain),
        "bad_over_plain": bad / speed(results["plain"]),
        "bad_over_databases": bad / speed(results[DATABASES]),
    }


def speed_by_category(own: Sequence[Result]) -> dict[str, float]:
    categories = dict.fromkeys(result.category for result in own)
    return {name: speed([r for r in own if r.category == name]) for name in categories}
