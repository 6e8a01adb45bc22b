"""HTML and formats of numbers that several tabs use. Every text is escaped here."""

from collections.abc import Iterable
from html import escape

from jinja2 import Environment, FunctionLoader

from app.service.jobs import Progress
from app.web.colors import INKS, css_class, ink
from assets import read

Facts = Iterable[tuple[str, str]]


def facts(items: Facts) -> str:
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in items)
    return f"<dl>{lines}</dl>"


def fine_print(*sentences: str) -> str:
    """A paragraph in small print; nothing if the sentences are empty."""
    text = " ".join(sentence for sentence in sentences if sentence)
    return f'<p class="fine">{escape(text)}</p>' if text else ""


def finding(kind: str, title: str, text: str) -> str:
    """A finding with a title. `kind` is a class of the style sheet."""
    return f'<div class="verdict {kind}"><b>{escape(title)}</b>: {escape(text)}</div>'


def millions(parameters: int) -> str:
    if parameters >= 1e9:
        return f"{parameters / 1e9:,.1f} B parameters"
    return f"{parameters / 1e6:,.1f} M parameters"


DASH = "–"


def times(ratio: float | None) -> str:
    """A speedup."""
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
TEMPLATES.globals |= {
    "ink": ink,
    "inks": INKS,
    "css_class": css_class,
    "milliseconds": milliseconds,
}


def template(name: str, /, **values: object) -> str:
    """A template of assets/templates, filled with values, which are escaped."""
    return TEMPLATES.get_template(name).render(values)
