"""The report of a benchmark: figures per method and category, comparisons with another run, and
files.

Only questions that every method has answered count, so that all figures of a benchmark are about
the same questions. There is one definition of speedup (engine/compare.py). A repeated question
counts with its median time.
"""

import csv
import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from statistics import median, quantiles
from typing import Any

from app.service.exports import harmless
from app.service.preferences import generation_of
from engine.compare import Speedup, overall
from engine.errors import SettingError, StorageError
from engine.methods import PLAIN, Method, method_named
from engine.runs import keeps_text
from engine.settings import Drafting, Generation
from engine.types import Question
from storage.benchmarks import Benchmark, Result

DROP = 0.10
"""A loss of more than this share since the last run is reported."""
FEWEST = 4
"""The fewest questions for quartiles, or for a comparison with the last run."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: every question by every method, `repeats` times.

    `title` names the questions. With `known` the drafters begin with the user's past answers, else
    with empty databases.
    """

    title: str
    questions: tuple[Question, ...]
    methods: tuple[Method, ...]
    generation: Generation
    repeats: int = 1
    known: bool = False

    @property
    def runs(self) -> int:
        return len(self.questions) * len(self.methods) * self.repeats

    def mapping(self) -> dict[str, Any]:
        """The settings of the benchmark, as JSON values. Its questions are stored separately."""
        methods = [{"name": m.name, "drafting": asdict(m.drafting)} for m in self.methods]
        return {
            "methods": methods,
            "generation": asdict(self.generation),
            "repeats": self.repeats,
            "known": self.known,
        }


def stored_plan(benchmark: Benchmark, questions: Sequence[Question]) -> Plan:
    """The plan of a stored benchmark. Raises StorageError if it is damaged."""
    values = benchmark.plan
    try:
        methods = [
            method_named(each["name"], Drafting.from_mapping(each["drafting"]))
            for each in values["methods"]
        ]
        return Plan(
            benchmark.title,
            tuple(questions),
            tuple(methods),
            generation_of({"generation": values["generation"]}),
            int(values["repeats"]),
            bool(values["known"]),
        )
    except (AttributeError, LookupError, SettingError, TypeError, ValueError) as error:
        raise StorageError(
            f"The benchmark of {benchmark.title!r} is damaged in the database, or of another "
            f"version ({error}). Start a new one."
        ) from error


@dataclass(frozen=True, slots=True)
class Typical:
    """One question by one method: the medians of its repeats, and the first answer."""

    tokens: int
    forwards: int
    drafted: int
    kept: int
    seconds: float
    decode_seconds: float
    first_seconds: float
    answer: tuple[int, ...]
    steady: bool

    @classmethod
    def of(cls, runs: Sequence[Result]) -> "Typical":
        first = runs[0]
        return cls(
            first.tokens,
            first.forwards,
            first.drafted,
            first.kept,
            median(run.seconds for run in runs),
            median(run.decode_seconds for run in runs),
            median(run.first_seconds for run in runs),
            first.answer,
            all(run.answer == first.answer for run in runs),
        )


Measured = Mapping[int, Mapping[str, Typical]]
"""The result of each method, by the position of each question that all methods answered."""


@dataclass(frozen=True, slots=True)
class MethodMetrics:
    """The metrics of one method over some questions.

    `speedup` is UNKNOWN without plain decoding. `quartiles` (lower, median, upper) are of the
    speedups of single questions, None for few of them. Of `compared` answers `identical` equal
    those of plain decoding; `compared` is 0 if another text is no fault, or without plain decoding.
    """

    method: str
    questions: int
    tokens: int
    tokens_per_second: float
    decode_tokens_per_second: float
    tokens_per_step: float
    accepted: float | None
    first_seconds: float
    speedup: Speedup = Speedup()
    quartiles: tuple[float, float, float] | None = None
    identical: int = 0
    compared: int = 0
    differing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """A benchmark with its metrics for all questions, and by category."""

    benchmark: Benchmark
    plan: Plan
    metrics: tuple[MethodMetrics, ...] = ()
    categories: Mapping[str, tuple[MethodMetrics, ...]] = field(default_factory=dict)
    complete: int = 0
    failed: tuple[tuple[str, str], ...] = ()
    """Questions that could not be answered, with the reason."""
    disturbed: int = 0
    unsteady: int = 0
    measured: Measured = field(default_factory=dict)


def report(benchmark: Benchmark, plan: Plan, results: Sequence[Result]) -> Report:
    measured = complete(plan, results)
    kinds: dict[str, list[int]] = defaultdict(list)
    for position in measured:
        kinds[plan.questions[position].category].append(position)
    failed = {
        plan.questions[result.position].id: result.problem
        for result in results
        if result.problem and result.position < len(plan.questions)
    }
    return Report(
        benchmark,
        plan,
        metrics_of(plan, measured, list(measured)),
        {kind: metrics_of(plan, measured, places) for kind, places in kinds.items()},
        len(measured),
        tuple(failed.items()),
        sum(result.disturbed for result in results),
        sum(not typical.steady for row in measured.values() for typical in row.values()),
        measured,
    )


def complete(plan: Plan, results: Sequence[Result]) -> dict[int, dict[str, Typical]]:
    found: dict[int, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        if not result.problem and result.tokens:
            found[result.position][result.method].append(result)
    names = [method.name for method in plan.methods]
    return {
        position: {name: Typical.of(runs[name]) for name in names}
        for position, runs in sorted(found.items())
        if position < len(plan.questions) and all(name in runs for name in names)
    }


def metrics_of(plan: Plan, measured: Measured, places: Sequence[int]) -> tuple[MethodMetrics, ...]:
    methods = plan.methods if places else ()
    return tuple(method_metrics(plan, measured, places, method) for method in methods)


def method_metrics(
    plan: Plan, measured: Measured, places: Sequence[int], method: Method
) -> MethodMetrics:
    own = [measured[at][method.name] for at in places]
    plain = [measured[at][PLAIN.name] for at in places] if PLAIN in plan.methods else []
    tokens, drafted = sum(t.tokens for t in own), sum(t.drafted for t in own)
    found = MethodMetrics(
        method.name,
        len(places),
        tokens,
        rate(tokens, sum(t.seconds for t in own)),
        rate(tokens, sum(t.decode_seconds for t in own)),
        rate(tokens, sum(t.forwards for t in own)),
        sum(t.kept for t in own) / drafted if drafted else None,
        median(t.first_seconds for t in own),
    )
    if not plain or method == PLAIN:
        return found
    found = replace(found, speedup=overall(plain, own), quartiles=spread(plain, own))
    if not keeps_text(method, plan.generation.sampling):
        return found
    pairs = zip(places, own, plain, strict=True)
    parts = [plan.questions[at].id for at, mine, base in pairs if mine.answer != base.answer]
    same = len(places) - len(parts)
    return replace(found, identical=same, compared=len(places), differing=tuple(parts))


def rate(count: int, over: float) -> float:
    return count / over if over else 0.0


def spread(plain: Sequence[Typical], own: Sequence[Typical]) -> tuple[float, float, float] | None:
    ratios = [
        (base.seconds / base.tokens) / (mine.seconds / mine.tokens)
        for base, mine in zip(plain, own, strict=True)
        if mine.seconds and base.tokens and mine.tokens
    ]
    if len(ratios) < FEWEST:
        return None
    low, middle, high = quantiles(ratios, n=4)
    return low, middle, high


@dataclass(frozen=True, slots=True)
class Drop:
    """A method that lost more than DROP since the last run, in its speed (tokens per second) or its
    speedup. `plain` is the loss of plain decoding's speed, None if unknown."""

    method: str
    what: str
    before: float
    now: float
    plain: float | None = None

    @property
    def share(self) -> float:
        return 1 - self.now / self.before


def differences(one: Benchmark, other: Benchmark) -> list[str]:
    """What differs between two benchmarks, and may explain a change of the figures."""
    shared = {
        "model": one.fingerprint == other.fingerprint,
        "machine": one.machine == other.machine,
        "questions": one.asked == other.asked,
        "settings": one.plan.get("generation") == other.plan.get("generation"),
        "past answers": one.plan.get("known") == other.plan.get("known"),
    }
    return [name for name, same in shared.items() if not same]


Sides = tuple[dict[Method, MethodMetrics], dict[Method, MethodMetrics]]


def shared(one: Report, other: Report) -> Sides:
    """The metrics of the methods that two benchmarks of the same questions share, over the
    questions that both have answered. Methods are equal if their drafting settings are equal."""
    both = [place for place in one.measured if place in other.measured]
    methods = [each for each in one.plan.methods if both and each in other.plan.methods]
    new, old = (
        {each: method_metrics(report.plan, report.measured, both, each) for each in methods}
        for report in (one, other)
    )
    return new, old


def drops(now: Report, before: Report) -> list[Drop]:
    new, old = shared(now, before)
    plain = None
    if PLAIN in new:
        plain = 1 - new[PLAIN].tokens_per_second / old[PLAIN].tokens_per_second
    found = []
    for method in new:
        values = {
            "speed": (old[method].tokens_per_second, new[method].tokens_per_second),
            "speedup": (old[method].speedup.whole, new[method].speedup.whole),
        }
        for what, (then, here) in values.items():
            if then and here and here < (1 - DROP) * then:
                found.append(Drop(method.name, what, then, here, plain))
    return found


def as_csv(report: Report, results: Sequence[Result]) -> str:
    """One row per answer. Names may come from a foreign file, so formulas in them are disarmed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(row_of(Question("", "", ""), Result(0, "", 0), None))
    for row in rows(report, results):
        writer.writerow(harmless(each) if isinstance(each, str) else each for each in row.values())
    return text.getvalue()


def rows(report: Report, results: Sequence[Result]) -> Iterator[dict[str, Any]]:
    base = {r.position: r.answer for r in reversed(results) if r.method == PLAIN.name}
    for result in results:
        if result.position < len(report.plan.questions):
            question = report.plan.questions[result.position]
            yield row_of(question, result, base.get(result.position))


def row_of(question: Question, result: Result, plain: tuple[int, ...] | None) -> dict[str, Any]:
    """A row for an answer; `plain` is the first plain answer to the question, if there is one."""
    answers = result.tokens and not result.problem
    return {
        "question_id": question.id,
        "category": question.category,
        "method": result.method,
        "repeat": result.repeat + 1,
        "tokens": result.tokens,
        "steps": result.forwards,
        "drafted": result.drafted,
        "accepted": result.kept,
        "seconds": result.seconds,
        "decode_seconds": result.decode_seconds,
        "first_token_seconds": result.first_seconds,
        "tokens_per_second": result.tokens / result.seconds if result.seconds else None,
        "tokens_per_step": result.tokens / result.forwards if result.forwards else None,
        "same_text": result.answer == plain if plain is not None and answers else None,
        "disturbed": result.disturbed,
        "problem": result.problem,
    }


def as_json(report: Report, results: Sequence[Result]) -> dict[str, Any]:
    benchmark = report.benchmark
    return {
        "format": "strata-benchmark",
        "version": benchmark.version,
        "date": datetime.fromtimestamp(benchmark.created, UTC).isoformat(timespec="seconds"),
        "questions": benchmark.title,
        "asked": benchmark.asked,
        "model": benchmark.model,
        "fingerprint": benchmark.fingerprint,
        "machine": benchmark.machine,
        "plan": dict(benchmark.plan),
        "runs": benchmark.runs,
        "done": benchmark.done,
        "disturbed": report.disturbed,
        "questions_complete": report.complete,
        "all": [metrics_mapping(metrics) for metrics in report.metrics],
        "categories": {
            name: [metrics_mapping(each) for each in own] for name, own in report.categories.items()
        },
        "failed": [{"question_id": name, "problem": why} for name, why in report.failed],
        "results": list(rows(report, results)),
    }


def metrics_mapping(metrics: MethodMetrics) -> dict[str, Any]:
    values = asdict(metrics)
    speedup = values.pop("speedup")
    return {**values, "speedup": speedup["whole"], "decode_speedup": speedup["decoding"]}
