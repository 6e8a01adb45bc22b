"""The texts of the Benchmark tab as HTML. Names of models, questions and categories are escaped."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from app.service.benchmark import BenchmarkStatus
from app.service.benchmark_report import DROP, Drop, MethodMetrics, Report, differences, shared
from app.web.charts import ALL, category_name
from app.web.markup import DASH, finding, milliseconds, progress_bar, template, times
from app.web.run_html import title_of
from engine.methods import PLAIN
from engine.settings import shortened
from storage.benchmarks import Benchmark

MOST_NAMED = 5
"""The most questions that are named one by one."""
EXPLAINED = {
    "Speedup": (
        "time per token of whole answers, plain decoding divided by this method, over all questions"
    ),
    "Quartiles": "a quarter of the questions gained less, a quarter more",
    "Decoding alone": "the same, without reading the prompt and learning from the answer",
    "Tokens/step": "tokens from one pass of the model; plain decoding: 1.00",
    "Accepted": "accepted tokens / drafted tokens",
    "First token": "median time until the model had its first token",
    "Same text": "answers that match plain decoding, token for token",
}


def when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%d %b %H:%M}"


def status(progress: BenchmarkStatus | None, problem: str = "") -> str:
    """The progress of the running benchmark, or why the last one ended early."""
    if progress is None:
        return finding("differs", "Ended early", problem) if problem else ""
    text = f"{progress.done:,} of {progress.runs:,} runs"
    if progress.waiting:
        text += "; waiting: other requests come first"
    elif progress.method:
        text += f"; question {progress.question + 1:,}, {title_of(progress.method)}"
    if progress.seconds_left is not None:
        text += f"; {remaining(progress.seconds_left)} left"
    return progress_bar(text, progress.done / progress.runs if progress.runs else 0.0)


def remaining(seconds: float) -> str:
    if seconds < 90:
        return f"about {max(5, 5 * round(seconds / 5))} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {round(minutes / 60)} h"


def summary(report: Report, before: Report | None, drops: Sequence[Drop]) -> str:
    """What was measured and where, changes since the run `before`, and reasons to doubt the
    figures."""
    return template(
        "benchmark.html",
        report=report,
        before=before,
        drops=drops,
        most_lost=DROP,
        named=MOST_NAMED,
        percent=percent,
        shortened=shortened,
        title_of=title_of,
        when=when,
    )


def tables(report: Report) -> str:
    titles = ("Method", "Tokens/s", *EXPLAINED)
    rows = [method_cells(each) for each in report.metrics]
    return table("All questions", titles, rows) if rows else ""


def method_cells(each: MethodMetrics) -> list[str]:
    spread = DASH
    if each.quartiles is not None and each.speedup.whole is not None:
        spread = f"{each.quartiles[0]:.2f}–{each.quartiles[2]:.2f}×"
    return [
        title_of(each.method),
        f"{each.tokens_per_second:,.1f}",
        times(each.speedup.whole),
        spread,
        times(each.speedup.decoding),
        f"{each.tokens_per_step:.2f}",
        DASH if each.accepted is None else percent(each.accepted),
        milliseconds(each.first_seconds),
        identical_answers(each),
    ]


def identical_answers(each: MethodMetrics) -> str:
    if not each.compared:
        return DASH
    text = f"{each.identical:,} of {each.compared:,}"
    if each.differing:
        more = " …" if len(each.differing) > MOST_NAMED else ""
        names = ", ".join(shortened(name) for name in each.differing[:MOST_NAMED])
        text += f" (not {names}{more})"
    return text


def categories(report: Report) -> str:
    """The table of categories: each method's speedup, or its speed if plain decoding was not
    measured."""
    if not report.metrics:
        return ""
    measured = [method.name for method in report.plan.methods]
    plain = PLAIN.name in measured
    shown = [name for name in measured if not plain or name != PLAIN.name]
    titles = (
        "Category",
        "Questions",
        *(f"{title_of(name)}{'' if plain else ', tokens/s'}" for name in shown),
    )
    rows = []
    for kind, own in {ALL: report.metrics, **report.categories}.items():
        by_name = {each.method: each for each in own}
        cells = [cell(by_name[name], plain) for name in shown]
        rows.append([category_name(kind), f"{own[0].questions:,}", *cells])
    return table("By category", titles, rows) if shown else ""


def cell(each: MethodMetrics, plain: bool) -> str:
    speed = times(each.speedup.whole) if plain else f"{each.tokens_per_second:,.1f}"
    return f"{speed} ({each.tokens_per_step:.2f} tokens/step)"


def comparison(one: Report, other: Report) -> str:
    """A table of two benchmarks: the figures of each method, and how they changed. If both have the
    same questions, the figures cover those that both have answered."""
    apart, text = differences(one.benchmark, other.benchmark), ""
    left, right = ({each.method: each for each in report.metrics} for report in (one, other))
    if apart:
        text = f"The two differ in: {', '.join(apart)}. That may explain a change."
        text = finding("", "Not the same", text)
    if "questions" not in apart:
        left, right = (
            {method.name: each for method, each in side.items()} for side in shared(one, other)
        )
    then = f"on {when(other.benchmark.created)}"
    titles = ("Method", "Tokens/s", then, "Change", "Speedup", then, "Change")
    rows = []
    for name in dict.fromkeys([*left, *right]):
        sides = left.get(name), right.get(name)
        cells = [title_of(name)]
        speeds = [each and each.tokens_per_second for each in sides]
        gains = [each and each.speedup.whole for each in sides]
        for (now, past), show in ((speeds, "{:,.1f}".format), (gains, times)):
            cells += [show(value) if value else DASH for value in (now, past)]
            cells.append(percent(now / past - 1, "+") if now and past else DASH)
        rows.append(cells)
    return f"{text}{table(f'Compared with {title(other.benchmark)}', titles, rows)}"


def percent(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.0f} %".replace("-", "−")


def title(stored: Benchmark) -> str:
    return f"{when(stored.created)} · {stored.label} · {stored.title} · version {stored.version}"


def table(name: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return template("results.html", name=name, titles=titles, rows=rows, explained=EXPLAINED)
