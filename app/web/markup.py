"""HTML and formats of numbers that several tabs use. Every text is escaped here."""

from collections.abc import Iterable
from html import escape

from jinja2 import Environment, FunctionLoader
from markupsafe import Markup

from app.service.jobs import Progress
from app.web.colors import INKS, STAGES, css_class, ink
from assets import read

Facts = Iterable[tuple[str, str]]


def facts(items: Facts) -> str:
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in items)
    return f"<dl>{lines}</dl>"


def fine_print(*sentences: str) -> str:
    """A paragraph in small print; nothing if the sentences are empty."""
    text = " ".join(sentence for sentence in sentences if sentence)
    return f'<p class="fine">{escape(text)}</p>' if text else ""


def verdict(content: str, kind: str = "") -> str:
    """A framed paragraph. `content` is markup already, `kind` a class of the style sheet."""
    return f'<div class="{f"verdict {kind}".rstrip()}">{content}</div>'


def finding(kind: str, title: str, text: str) -> str:
    return verdict(f"<b>{escape(title)}</b>: {escape(text)}", kind)


def billions(parameters: int) -> str:
    large = parameters >= 1e9
    return f"{parameters / 1e9:,.1f} B" if large else f"{parameters / 1e6:,.1f} M"


def millions(parameters: int) -> str:
    return f"{billions(parameters)} parameters"


DASH = "–"


def times(ratio: float | None) -> str:
    return DASH if ratio is None else f"{ratio:.2f}×"


def milliseconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def progress(report: Progress) -> str:
    share = report.share
    return progress_bar(
        report.text + (f" · {100 * share:.0f} %" if share is not None else ""), share
    )


def progress_bar(text: str, share: float | None) -> str:
    """A bar that fills, or that moves if the progress is not known."""
    look = 'class="moving"' if share is None else f'style="width:{100 * share:.2f}%"'
    return (
        f'<div class="progress"><div class="bar empty"><i {look}></i></div>'
        f"<small>{escape(text)}</small></div>"
    )


def template_source(name: str) -> str:
    """A file of assets/templates without line breaks and indents."""
    return "".join(line.strip() for line in read(f"templates/{name}").splitlines())


TEMPLATES = Environment(loader=FunctionLoader(template_source), autoescape=True)
TEMPLATES.filters["number"] = "{:,}".format
TEMPLATES.globals |= {
    "fact_list": lambda items: Markup(facts(items)),
    "fine_print": lambda text: Markup(fine_print(text)),
    "finding": lambda *texts: Markup(finding(*texts)),
    "ink": ink,
    "inks": INKS,
    "stages": STAGES,
    "css_class": css_class,
    "milliseconds": milliseconds,
    "times": times,
}


def template(name: str, /, **values: object) -> str:
    """A template of assets/templates, filled with values, which are escaped."""
    return TEMPLATES.get_template(name).render(values)
