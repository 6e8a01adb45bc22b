"""The parts around the tabs: the header with the model, and help, tour and simple mode.

A native select element lies over the model's name, so that another model can be chosen with the
keyboard, with a screen reader and on a phone. The Models tab loads the chosen model
(app/web/tabs/models.py). Help, tour and simple mode run in the browser (assets/guide.js), which
also remembers them.
"""

from collections.abc import Sequence
from contextlib import suppress

import gradio as gr

from app.service.current import line
from app.service.models import Models
from app.service.session import Session
from app.web import models_html
from app.web.kit import html, small_button
from app.web.markup import millions, template
from app.web.metrics_panel import pace
from assets import read
from engine.errors import StrataError


def model_choices(models: Models) -> list[tuple[str, str]]:
    """The label and source of each model on this machine and of those that servers run."""
    with suppress(StrataError):
        found = models.candidates()
        return [models_html.choice(each) for each in found if models.loaders.present(each.source)]
    return []


def guide() -> gr.HTML:
    """The component of help and tour, which shows nothing at first."""
    return html(
        html_template=template("guide.html"),
        js_on_load=read("guide.js"),
        elem_id="guide",
    )


def bar() -> gr.HTML:
    """The buttons that open the conversations and the figures, on a small screen and in simple
    mode."""
    return html(html_template=template("bar.html"), js_on_load=None, elem_id="bar")


def switches(password: bool) -> tuple[gr.Button, gr.Button]:
    """Build the buttons at the right of the header. Returns the button for light and dark mode, and
    the one that logs out, which is visible if there is a `password`."""
    with gr.Row(elem_classes="switches"):
        small_button("Simple mode", elem_id="mode", min_width=40)
        theme = small_button("Light / dark", elem_id="theme", min_width=40)
        small_button("Help", elem_id="to-help", min_width=40)
        leave = small_button("Log out", elem_id="log-out", min_width=40, visible=password)
    return theme, leave


def header(session: Session, notices: Sequence[str]) -> str:
    """The header: logo, name, the model with its facts, and notices. A select element offers other
    models; while a model is being loaded, it is a Stop button instead."""
    info, models = session.current.info, session.models
    facts = facts_of(session) if models.is_loaded else []
    loading = models.loading
    if loading:
        share = f" {100 * loading.share:.0f} %" if loading.share is not None else ""
        facts.append(loading.text + share)
    notes = [info.note] if info.note and (models.is_loaded or not loading) else []
    if models.demonstration:
        where = "" if session.guests else " Load your own in the Models tab."
        notes.append(
            "This small demonstration model writes grammatical nonsense: it shows how fast Strata "
            "is, not what a model can say." + where
        )
    warnings = [*notices, *models.notices]
    if locked := session.notices.locked:
        warnings.append(locked)
    if models.problem and not models.is_loaded:
        warnings.append(models.problem)
    return brand(
        info.name if models.is_loaded or loading else "",
        facts=facts,
        plain=pace(session.current.plain) if models.is_loaded and info.server is None else "",
        drafted=line(info, list(session.stacks.drafts)) if models.is_loaded else "",
        notes=notes,
        warnings=warnings,
        stoppable=loading is not None and not session.guests,
        loaded=models.source if models.is_loaded else "",
        **({} if session.guests else {"choices": model_choices(models)}),
    )


def brand(model: str, **more: object) -> str:
    """The logo, the name and the model, with `more` of the header's template. The page replaces the
    speed in `plain` when an answer measures a new one (assets/panel.js)."""
    return template("header.html", logo=read("logo.svg"), model=model, **more)


def facts_of(session: Session) -> list[str]:
    info = session.current.info
    if info.server is not None:
        length = f"{info.context_length:,}" if info.context_length else "not reported"
        return [f"on the server {info.server.host}", f"context {length}"]
    facts = [millions(info.parameters)] if info.parameters else []
    facts += [info.device, info.dtype, f"context {info.context_length:,}"]
    facts.append("compiled core" if session.current.state.compiled else "core in Python")
    return facts
