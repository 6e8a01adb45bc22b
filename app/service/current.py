"""The model in use, or the first one to be loaded: its name, the text of its tokens, its speed of
plain decoding, the cost of its forwards, and its drafters.

All pages show one plain speed: tokens per second of plain decoding, at the machine's load when it
was last measured: by a short run after loading, or by the plain runs of a proof or a comparison.
Each answer gives an estimate as well, the one of the live speedup
(engine/drafting/controller.py), so the speed of an answer divided by the plain speed is its speedup
of decoding.

What is known about a model is forgotten when it is unloaded, so `follow` is called with every new
state of the engine. Cost curves are stored. All owners share them, as they hold times and no text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.backends.base import BackendInfo, ServerInfo
from engine.compare import FEWEST
from engine.drafting.ceiling import LIKELY, ceiling
from engine.drafting.costs import LARGEST, CostCurve
from engine.engine import CostsMeasured, Engine, State
from engine.loaded import NO_MODEL_INFO, NoModel
from engine.metrics import Metrics
from engine.runs import PlainSpeed
from engine.types import Costs as CostRecord
from storage.database import Database
from storage.machine import CostStore
from storage.statistics import StatisticsTable, open_table


class Current:
    """`plain` is the plain speed, 0 where it is unknown.

    `folders` hold the statistics files, one per tokenizer; `coming` is what is known about the
    first model before it is loaded.
    """

    def __init__(
        self, engine: Engine, folders: Sequence[Path] = (), coming: BackendInfo = NO_MODEL_INFO
    ) -> None:
        self.engine, self.folders, self.coming = engine, folders, NoModel(coming).info
        self.state = engine.state
        self.plain = self.state.plain
        self.table: tuple[str, StatisticsTable | None] | None = None
        """The tokenizer and its opened statistics; None if they must be opened again."""

    def follow(self, state: State) -> None:
        """Take over a new state of the engine: another model, or other draft models."""
        if state.plain != self.state.plain:
            self.plain = state.plain
        self.table = None
        self.state = state

    @property
    def info(self) -> BackendInfo:
        state = self.engine.state
        return state.info if state.is_loaded or state.info.fingerprint else self.coming

    def text(self, tokens: Sequence[int]) -> str:
        return self.engine.texts([tokens])[0]

    @property
    def statistics(self) -> StatisticsTable | None:
        tokenizer = self.info.tokenizer_fingerprint
        if self.table is None or self.table[0] != tokenizer:
            self.table = tokenizer, open_table(self.folders, tokenizer, lambda problem: None)
        return self.table[1]


def seen_in(metrics: Metrics) -> PlainSpeed | None:
    """The plain speed that an answer measured; None if it has few tokens or measured none."""
    speed = metrics.plain_tokens_per_second
    return PlainSpeed(speed, "by the last answer") if metrics.tokens >= FEWEST and speed else None


class Costs:
    def __init__(self, engine: Engine, database: Database) -> None:
        self.engine, self.database = engine, database
        self.known: tuple[BackendInfo, CostRecord] | None = None

    @property
    def record(self) -> CostRecord | None:
        info, record = self.known or (None, None)
        return record if info and info.costs_key == self.engine.state.info.costs_key else None

    @property
    def curve(self) -> CostCurve | None:
        record = self.record
        return record and CostCurve(*record[:3], record.token, record.row)

    @property
    def measured(self) -> float:
        """When the curve was measured, in seconds since 1970; 0 if it was not."""
        return self.record.measured if self.record else 0.0

    def save(self, info: BackendInfo, costs: CostRecord) -> None:
        self.known = info, costs
        CostStore(self.database, *info.costs_key).save(costs)

    def measure(self) -> None:
        """Measure the curve once nobody uses the model, which takes about two seconds. Raises
        ModelError if that fails; then the known curve stays."""
        for item in self.engine.measure_costs():
            if isinstance(item, CostsMeasured):
                self.save(item.info, item.costs)


SHORT = 3
"""The drafted tokens of the example that shows what verifying takes."""
NO_HEAD = "none came with this model"
NO_MODELS = "none loaded; the Stack tab lists those that fit"


@dataclass(frozen=True, slots=True)
class Drafter:
    """One kind of drafter. `how` describes how it drafts; if it does not draft, `how` is "" and
    `problem` says why."""

    name: str
    how: str
    problem: str = ""

    @property
    def text(self) -> str:
        return self.how or self.problem


def drafters(info: BackendInfo, models: Sequence[str] = ()) -> tuple[Drafter, ...]:
    """The three kinds of drafters of a loaded model, or the server's own one. `models` are the
    names of the loaded draft models, which only some methods use; each conversation has its
    own method."""
    if info.server is not None:
        return (Drafter("the server", *on_server(info.server)),)
    plain = "" if info.can_tree else "not possible: this model decodes plainly"
    head, named = info.head, ", ".join(models)
    if plain:
        found = ("", plain), ("", plain if head else NO_HEAD), ("", plain)
    else:
        deep = f"{head.name}, up to {tokens(head.depth)} ahead, where it pays" if head else ""
        why = NO_HEAD if head is None else head.note or head.expensive
        built_in = ("", why) if why else (deep, "")
        stacked = f"{named}, if the chosen method uses them" if named else ""
        found = (shape(info), ""), built_in, (stacked, "" if named else NO_MODELS)
    kinds = "databases", "built-in head", "draft models"
    return tuple(Drafter(name, *each) for name, each in zip(kinds, found, strict=True))


def shape(info: BackendInfo) -> str:
    """How many guesses per token are verified together: several in a tree, one in a chain. A limit
    of as many branches as the largest tree has nodes is no limit, so it is not shown."""
    facts = [
        "one guess per token" if info.leaves == 1 else "several guesses per token",
        f"up to {info.leaves} branches" if info.leaves and 1 < info.leaves < LARGEST else "",
        f"up to {tokens(info.depth)} ahead" if info.depth else "",
    ]
    return ", ".join(filter(None, facts))


def tokens(count: int) -> str:
    return f"{count} token{'s' if count != 1 else ''}"


def line(
    info: BackendInfo, models: Sequence[str] = (), points: Mapping[int, float] | None = None
) -> str:
    """What drafts, and why that hardly pays, if so: by the measured `points` of the cost curve, the
    seconds of a forward by its number of drafted tokens."""
    if info.server is not None:
        how, problem = on_server(info.server)
        return f"The server drafts {how}." if how else f"The server {problem}."
    found = [f"{each.name} ({each.how})" for each in drafters(info, models) if each.how]
    named = f"Guesses come from: {', '.join(found) or 'nothing, as it decodes plainly'}."
    return f"{named} {losing(info, verified(info, points or {}))}".rstrip()


def verified(info: BackendInfo, points: Mapping[int, float]) -> dict[int, float]:
    """How many times as long as computing one token it takes to verify so many drafted ones, by
    measured `points`; empty if the model cannot verify drafts or nothing was measured."""
    found = {n: s for n, s in points.items() if n <= (info.depth or n)}
    if not info.can_tree or len(found) < 2:
        return {}
    # A forward over fewer rows cannot take longer; a busy machine may have measured it so.
    plain = min(found.values())
    return {n: seconds / plain for n, seconds in found.items()} | {0: 1.0}


def losing(info: BackendInfo, times: Mapping[int, float]) -> str:
    """Why drafts hardly pay on this machine, by the times of `verified`; "" if they may."""
    if not times or ceiling(times, LIKELY).nodes:
        return ""
    sizes = times.keys() - {0}
    drafted = max((n for n in sizes if n <= SHORT), default=min(sizes))
    why = f", {mixture(info)}" if info.experts else ""
    return (
        f"They hardly pay here: verifying {tokens(drafted)} takes {times[drafted]:.1f} times as "
        f"long as computing one{why}."
    )


def mixture(info: BackendInfo) -> str:
    """Why a mixture of experts verifies slowly, as the end of a sentence."""
    return (
        f"because each token uses {info.used_experts} of {info.experts} experts in every layer, "
        "and every further token mostly needs others"
    )


def on_server(server: ServerInfo) -> tuple[str, str]:
    if not server.drafting:
        return "", "does not draft now" if server.sources else "does not report whether it drafts"
    if not server.databases:
        return "in a way that it does not report", ""
    deep = f", up to {tokens(server.draft_tokens)} ahead" if server.draft_tokens else ""
    return f"with its databases{deep}", ""
