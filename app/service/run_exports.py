"""Runs and steps as files for other programs: CSV for tables, JSON for all that is stored.

Figures are written as they are stored, times in seconds, so that a file can be reckoned with. A
text may be anything, and a spreadsheet takes what begins with one of `FORMULA` for a program: such
a text gets an apostrophe before it in CSV. Ids, which are ours, and JSON hold what is stored.
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from app.service.why import guesses_of
from engine.types import TIERS, Run, Step
from storage.traces import Trace

FORMULA = ("=", "+", "-", "@", "\t", "\r")
RUNS = (
    "run",
    "created",
    "kind",
    "conversation",
    "model",
    "method",
    "tokens",
    "steps",
    "decode_seconds",
    "speedup",
    "decode_speedup",
)
STEPS = (
    "step",
    "tokens",
    "text",
    "depth",
    "draft_seconds",
    "verify_seconds",
    "sample_seconds",
    "other_seconds",
    "plain_seconds",
    "finish",
)
Cell = str | int | float | None


def runs_csv(runs: Iterable[Trace]) -> str:
    """A line per run."""
    return table(
        RUNS,
        (
            (
                run.id,
                datetime.fromtimestamp(run.created, UTC).isoformat(timespec="milliseconds"),
                run.kind,
                run.conversation_id,
                harmless(run.model),
                harmless(run.method),
                run.emitted_tokens,
                run.forwards,
                run.decode_seconds,
                run.speedup,
                run.decode_speedup,
            )
            for run in runs
        ),
    )


def steps_csv(steps: Sequence[Step]) -> str:
    """A line per step, with two columns per source: what it drafted, and what was accepted."""
    drafted = {source for step in steps for source in (*step.proposed, *step.accepted)}
    sources = [*TIERS, *sorted(drafted - {*TIERS})]
    titles = [f"{kind} {source}" for source in sources for kind in ("drafted", "accepted")]
    return table((*STEPS, *titles), (step_row(step, sources) for step in steps))


def step_row(step: Step, sources: Sequence[str]) -> list[Cell]:
    """A step as the cells of its line."""
    text = harmless("".join(token.text for token in step.tokens))
    row: list[Cell] = [step.index, len(step.tokens), text]
    row += [len(step.by_depth), step.draft_seconds, step.verify_seconds]
    row += [step.sample_seconds, step.other_seconds, step.plain_seconds, step.finish]
    for source in sources:
        row += [step.proposed.get(source, 0), step.accepted.get(source, 0)]
    return row


def run_json(trace: Trace, run: Run) -> str:
    """A run with all that is stored of it; draft trees as the guesses that they hold."""
    steps = []
    for step in run.steps:
        guesses = guesses_of(step)
        tree = None if guesses is None else [guess._asdict() for guess in guesses]
        steps.append({**asdict(step), "tree": tree})
    return json.dumps({**asdict(trace), **asdict(run), "steps": steps}, indent=1)


def table(titles: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """CSV as RFC 4180 has it."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(titles)
    writer.writerows(rows)
    return text.getvalue()


def harmless(text: str) -> str:
    """A text that no spreadsheet runs."""
    return f"'{text}" if text.startswith(FORMULA) else text
