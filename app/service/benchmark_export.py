"""A benchmark as a file: JSON with everything, CSV with a row per answer."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from app.service.benchmark_report import Figures, Report
from engine.methods import PLAIN
from storage.benchmarks import Result

COLUMNS = (
    "question_id",
    "category",
    "method",
    "repeat",
    "tokens",
    "steps",
    "drafted",
    "accepted",
    "seconds",
    "decode_seconds",
    "first_token_seconds",
    "tokens_per_second",
    "tokens_per_step",
    "same_text",
    "disturbed",
    "problem",
)
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula."""


def as_csv(report: Report, results: Sequence[Result]) -> str:
    """A row per answer. Names come from a file of anyone's, so none of them is a formula."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows(report, results):
        writer.writerow({name: plain_text(value) for name, value in row.items()})
    return text.getvalue()


def plain_text(value: Any) -> Any:
    """A cell that a spreadsheet does not compute."""
    if isinstance(value, str) and value.startswith(FORMULA):
        return f"'{value}"
    return "" if value is None else value


def rows(report: Report, results: Sequence[Result]) -> Iterator[dict[str, Any]]:
    """Every answer with its question."""
    base = {r.position: r.answer for r in reversed(results) if r.method == PLAIN.name}
    for result in results:
        if result.position >= len(report.plan.questions):
            continue
        question = report.plan.questions[result.position]
        plain = base.get(result.position)
        answers = result.tokens and not result.problem
        yield {
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
    """Everything: what was measured where, the figures, and every answer."""
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
        "all": [figures_of(figures) for figures in report.figures],
        "categories": {
            name: [figures_of(each) for each in own] for name, own in report.categories.items()
        },
        "failed": [{"question_id": name, "problem": why} for name, why in report.failed],
        "results": list(rows(report, results)),
    }


def figures_of(figures: Figures) -> dict[str, Any]:
    """One method's figures, the speedups by their names."""
    values = asdict(figures)
    speedup = values.pop("speedup")
    return {**values, "speedup": speedup["whole"], "decode_speedup": speedup["decoding"]}
