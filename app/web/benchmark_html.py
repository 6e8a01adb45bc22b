"""What the Benchmark tab says, as HTML; names of models, questions and categories are escaped."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape

from app.service.benchmark import Standing
from app.service.benchmark_report import DROP, Drop, Figures, Report, differences, shared
from app.web.benchmark_charts import ALL
from app.web.metrics_panel import milliseconds, times
from app.web.stack_html import fine, line
from app.web.verdicts import title_of
from engine.methods import PLAIN
from engine.settings import shortened
from storage.benchmarks import Benchmark

DASH = "–"
MOST_NAMED = 5
"""Questions that are named one by one."""
EXPLAINED = {
    "Speedup": "time of whole answers, plain over this method, per token; all questions together",
    "Quartiles": "a quarter of the questions gained less, a quarter more",
    "Decoding alone": "the same without reading the prompt and learning the answer",
    "Tokens/step": "tokens from one pass of the model; plain decoding: 1.00",
    "Accepted": "accepted tokens / drafted tokens",
    "First token": "median time until the model had its first token",
    "Same text": "answers that are those of plain decoding, token for token",
}


def when(seconds: float) -> str:
    """A time for people."""
    return f"{datetime.fromtimestamp(seconds):%d %b %H:%M}"


def status(standing: Standing | None, problem: str = "") -> str:
    """How far the benchmark under way is, or why the last one ended early."""
    if standing is None:
        return line("differs", "Ended early", problem) if problem else ""
    share = 100 * standing.done / standing.runs if standing.runs else 0.0
    words = f"{standing.done:,} of {standing.runs:,} runs"
    if standing.waiting:
        words += "; waiting for others, who come first"
    elif standing.method:
        words += f"; question {standing.question + 1:,}, {title_of(standing.method)}"
    if standing.seconds_left is not None:
        words += f"; {left(standing.seconds_left)} left"
    return (
        f'<div class="progress"><div class="bar empty"><i style="width:{share:.2f}%"></i></div>'
        f"<small>{escape(words)}</small></div>"
    )


def left(seconds: float) -> str:
    """A time that is to come, as roughly as it is known."""
    if seconds < 90:
        return f"about {max(5, 5 * round(seconds / 5))} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {round(minutes / 60)} h"


def heading(report: Report) -> str:
    """What was measured, where and when."""
    stored, plan = report.benchmark, report.plan
    drawn = plan.generation.sampling
    facts = (
        when(stored.created),
        f"Strata {stored.version}",
        stored.machine,
        f"temperature {drawn.temperature:g}, seed {drawn.seed}",
        f"up to {plan.generation.max_tokens:,} tokens",
        f"{plan.repeats} repeat{'s' * (plan.repeats > 1)}",
        "past answers known" if plan.known else "no past answers known",
    )
    return (
        f"<h3>{escape(stored.model)} · {escape(stored.title)}</h3>{fine(' · '.join(facts))}"
        f"{fine(standing_of(report))}"
    )


def standing_of(report: Report) -> str:
    """Of how many questions the figures are."""
    stored, whole = report.benchmark, len(report.plan.questions)
    if not report.complete:
        return (
            f"{stored.done:,} of {stored.runs:,} runs are done. Figures begin with the first "
            "question that every method has answered."
        )
    said = f"Figures are of {report.complete:,} of {whole:,} questions"
    if report.complete == whole:
        said = f"Figures are of all {whole:,} question{'s' * (whole > 1)}"
    return f"{said}; {stored.done:,} of {stored.runs:,} runs are done."


def notes(report: Report, before: Report | None, drops: Sequence[Drop]) -> str:
    """What is to be known before the figures are believed."""
    found = [dropped(drop, before) for drop in drops if before is not None]
    if before is not None and not drops and report.complete:
        words = (
            f"No method lost more than {percent(DROP)} since {when(before.benchmark.created)} "
            f"(version {before.benchmark.version})."
        )
        found.append(line("", "Compared with the last run", words))
    if report.disturbed:
        words = (
            f"{report.disturbed:,} runs were made while others used Strata, after two attempts to "
            "do without. Their times may be too long."
        )
        found.append(line("", "Disturbed", words))
    if report.unsteady:
        words = f"{report.unsteady:,} answers were not the same in all their repeats."
        found.append(line("differs", "Unsteady", words))
    if report.failed:
        names = ", ".join(shortened(name) for name, _ in report.failed[:MOST_NAMED])
        words = f"{len(report.failed):,} questions ({names}). {report.failed[0][1]}"
        found.append(line("", "Not answered", words))
    return "".join(found)


def dropped(drop: Drop, before: Report | None) -> str:
    """One drop, with what plain decoding lost beside it."""
    assert before is not None
    what = f"{drop.now:,.1f} tokens/s after {drop.before:,.1f}"
    if drop.what == "speedup":
        what = f"speedup {times(drop.now)} after {times(drop.before)}"
    words = (
        f"{title_of(drop.method)}: {what}, in the last run of {when(before.benchmark.created)} "
        f"(version {before.benchmark.version})."
    )
    if drop.what == "speed" and drop.plain is not None and drop.method != PLAIN.name:
        if drop.plain > DROP:
            words += f" Plain decoding lost {percent(drop.plain)} too: the machine was slower."
        else:
            words += " Plain decoding was as fast as before."
    title = f"{percent(drop.share)} {'less speedup' if drop.what == 'speedup' else 'slower'}"
    return line("differs", title, words)


def figures(report: Report) -> str:
    """The table of all methods."""
    if not report.figures:
        return ""
    return table("All questions", ("Method", "Tokens/s", *EXPLAINED), map(row, report.figures))


def row(each: Figures) -> list[str]:
    """One method's cells."""
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
        same(each),
    ]


def same(each: Figures) -> str:
    """How many answers are those of plain decoding, and which are not."""
    if not each.compared:
        return DASH
    said = f"{each.identical:,} of {each.compared:,}"
    if each.differing:
        more = " …" if len(each.differing) > MOST_NAMED else ""
        names = ", ".join(shortened(name) for name in each.differing[:MOST_NAMED])
        said += f" (not {names}{more})"
    return said


def categories(report: Report) -> str:
    """The table of categories: each method's speedup, or its speed where nothing was plain."""
    if not report.figures:
        return ""
    measured = [method.name for method in report.plan.methods]
    plain = PLAIN.name in measured
    told = [name for name in measured if not plain or name != PLAIN.name]
    titles = (
        "Category",
        "Questions",
        *(f"{title_of(name)}{'' if plain else ', tokens/s'}" for name in told),
    )
    rows = []
    for kind, own in {ALL: report.figures, **report.categories}.items():
        by_name = {each.method: each for each in own}
        cells = [cell(by_name[name], plain) for name in told]
        rows.append([kind, f"{own[0].questions:,}", *cells])
    return table("By category", titles, rows) if told else ""


def cell(each: Figures, plain: bool) -> str:
    """A speedup with the tokens per step behind it, or a speed."""
    speed = times(each.speedup.whole) if plain else f"{each.tokens_per_second:,.1f}"
    return f"{speed} ({each.tokens_per_step:.2f} tokens/step)"


def beside(one: Report, other: Report) -> str:
    """Two benchmarks side by side: the methods' figures of each, and how they changed. Where they
    asked the same, over the questions that both have answered."""
    apart, words = differences(one.benchmark, other.benchmark), ""
    left, right = ({each.method: each for each in report.figures} for report in (one, other))
    if apart:
        listed = ", ".join(apart)
        words = line("", "Not the same", f"They differ in: {listed}. A change may come from that.")
    if "questions" not in apart:
        own, others = shared(one, other)
        left, right = (
            {method.name: each for method, each in side.items()} for side in (own, others)
        )
    then = f"on {when(other.benchmark.created)}"
    titles = ("Method", "Tokens/s", then, "Change", "Speedup", then, "Change")
    rows = []
    for name in dict.fromkeys([*left, *right]):
        here, there = left.get(name), right.get(name)
        cells = [title_of(name)]
        for figure in (speed, gain):
            now, past = (each and figure(each) for each in (here, there))
            show = (lambda value: f"{value:,.1f}") if figure is speed else times
            cells += [show(value) if value else DASH for value in (now, past)]
            cells.append(f"{percent(now / past - 1, '+')}" if now and past else DASH)
        rows.append(cells)
    return f"{words}{table(f'Beside {title(other.benchmark)}', titles, rows)}"


def percent(share: float, sign: str = "") -> str:
    """A share in hundredths."""
    return f"{100 * share:{sign}.0f} %".replace("-", "−")


def speed(each: Figures) -> float | None:
    """Tokens per second of whole answers."""
    return each.tokens_per_second


def gain(each: Figures) -> float | None:
    """The speedup of whole answers."""
    return each.speedup.whole


def title(stored: Benchmark) -> str:
    """A benchmark in one line."""
    return f"{when(stored.created)} · {stored.model} · {stored.title} · version {stored.version}"


def table(name: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls by itself where it is too wide; all cells are escaped here."""
    head = "".join(
        f'<th scope="col" title="{escape(EXPLAINED.get(each, ""))}">{escape(each)}</th>'
        for each in titles
    )
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(each)}</td>" for each in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="results" role="region" tabindex="0" aria-label="{escape(name)}">'
        f"<table><caption>{escape(name)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )
