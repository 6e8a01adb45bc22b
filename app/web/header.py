"""The parts around the tabs: the header with the model, and help, tour and simple mode.

A native select element lies over the model's name, so that another model can be chosen with the
keyboard, with a screen reader and on a phone. The Models tab loads the chosen model
(app/web/tabs/models.py). Help, tour and simple mode run in the browser (assets/guide.js), which
also remembers them.
"""

from collections.abc import Sequence
from contextlib import suppress
from html import escape

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


def model_choices(models: Models) -> str:
    """A select element with the models on this machine and those that servers run. While a model is
    being loaded, it is a Stop button instead."""
    if models.loading is not None:
        return '<button type="button" class="stop-loading">Stop</button>'
    loaded = models.source if models.is_loaded else ""
    options = [] if loaded else ['<option value="" selected disabled>Choose a model</option>']
    with suppress(StrataError):
        for each in models.candidates():
            if models.loaders.present(each.source):
                words, source = models_html.choice(each)
                chosen = " selected" if each.source == loaded else ""
                options.append(f'<option value="{escape(source)}"{chosen}>{escape(words)}</option>')
    return (
        f'<select aria-label="Choose another model" title="Choose another model" '
        f'data-loaded="{escape(loaded)}">{"".join(options)}</select>'
    )


KEYS = (
    ("Enter", "send the message; while an answer is being written, it waits above the box"),
    ("Shift Enter", "begin a new line"),
    ("Esc", "stop the answer, leave an edit as it was, or empty the search"),
    ("↑", "in an empty box: edit your last message"),
    ("Ctrl K", "find a conversation"),
    ("Ctrl Shift O", "begin a new conversation"),
    ("↑ ↓", "in the list of conversations: go from one to the next"),
    ("F2", "in the list: rename; Delete deletes, Shift F10 opens the menu"),
    ("← →", "in an answer: go from word to word, to see where each came from"),
    ("?", "show these shortcuts"),
)
"""The keyboard shortcuts. On a Mac, the command key replaces Ctrl."""
TOUR = (
    (
        "#race .keys",
        "Watch a race",
        "One prompt, decoded plainly and with guesses, played back side by side. The demonstration "
        "model is far smaller than real ones, so race at the pace of a real model: the same "
        "weights, padded to the cost of 0.5\u00a0B parameters, which say nearly the same.",
    ),
    (
        "#tokens .legend",
        "Where words come from",
        "Coloured words were guessed: from this chat, from past answers, or from general text. "
        "The others are the model's own. Point at a word, or tap it, to see more.",
    ),
    (
        "#figures",
        "How fast it is",
        "The figures follow each answer: tokens per second, the speedup, and how many tokens "
        "one step of the model gave.",
    ),
    (
        "#prove, [data-act=prove]",
        "Prove it",
        "Guesses never change the text. Prove it decodes an answer again without them, and "
        "compares the two word by word.",
    ),
    (
        "tab:Compare",
        "Compare",
        "One prompt, two ways to answer it, measured in turn on this machine.",
    ),
    (
        "tab:Models",
        "Models",
        "Load a model of your own here, or take one from the catalogue.",
    ),
)
"""The steps of the tour: a selector or a tab, a title and a text."""


OFFER = (
    '<p class="offer">New here? <button type="button" class="to-tour">Take the tour</button> '
    'It takes 20 seconds. <button type="button" class="no-tour">No, thanks</button></p>'
)
"""The offer of the tour, shown once at the bottom of the first screen."""


def guide() -> gr.HTML:
    """The component of help and tour, which shows nothing at first."""
    return html(
        html_template=template("guide.html", keys=KEYS),
        js_on_load=read("guide.js"),
        tour=[{"at": at, "title": title, "words": words} for at, title, words in TOUR],
        elem_id="guide",
    )


def bar() -> gr.HTML:
    """The buttons that open the conversations and the figures, on a small screen and in simple
    mode."""
    return html(
        html_template='<div class="ways"><button type="button" class="to-shelf" '
        'aria-expanded="false">Conversations</button><button type="button" class="to-figures" '
        'aria-expanded="false">Figures</button></div>',
        js_on_load=None,
        elem_id="bar",
    )


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
    """The header: logo, name, the model with its facts, and notices. Every text is escaped."""
    info, models = session.current.info, session.models
    facts = facts_of(session) if models.is_loaded else []
    loading = models.loading
    if loading:
        share = f" {100 * loading.share:.0f} %" if loading.share is not None else ""
        facts.append(loading.words + share)
    drafted = line(info, list(session.stacks.drafts)) if models.is_loaded else ""
    notes = [info.note] if info.note and (models.is_loaded or not loading) else []
    if models.demonstration:
        where = "" if session.guests else " Load your own in the Models tab."
        notes.append(
            "This small demonstration model writes grammatical nonsense: it shows how fast Strata "
            "is, not what a model can say." + where
        )
    lines = f'<p class="note drafted">{escape(drafted)}</p>' if drafted else ""
    lines += "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    warnings = [*notices, *models.notices]
    if locked := session.notices.locked:
        warnings.append(locked)
    if models.problem and not models.is_loaded:
        warnings.append(models.problem)
    lines += "".join(f'<p class="notice">{escape(notice)}</p>' for notice in warnings)
    name = info.name if models.is_loaded or loading else ""
    plain = pace(session.current.plain) if models.is_loaded and info.server is None else ""
    choices = "" if session.guests else model_choices(session.models)
    return brand(name, facts, plain, choices) + lines


def brand(model: str, facts: Sequence[str] = (), plain: str = "", choices: str = "") -> str:
    """The logo, the name, and the model with its facts. `choices` is the markup with which another
    model is chosen. The page replaces the speed in `plain` when an answer measures a new one
    (assets/panel.js)."""
    logo = read("logo.svg")
    shown = "".join(f"{escape(fact)} · " for fact in facts) if plain else escape(" · ".join(facts))
    return (
        f'<div class="brand">{logo}<h1>Strata</h1><span class="picked"><span class="model">'
        f"{escape(model)}</span>{choices}</span>"
        f'<span class="facts">{shown}<span class="pace">{escape(plain)}</span></span></div>'
    )


def facts_of(session: Session) -> list[str]:
    info = session.current.info
    if info.server is not None:
        length = f"{info.context_length:,}" if info.context_length else "not told"
        return [f"on the server {info.server.host}", f"context {length}"]
    facts = [millions(info.parameters)] if info.parameters else []
    facts += [info.device, info.dtype, f"context {info.context_length:,}"]
    facts.append("compiled core" if session.current.state.compiled else "core in Python")
    return facts
