"""The catalogue in the Models tab: a card for every family, with the memory it needs here."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import gradio as gr

from app.service.catalogue import Entry, entries, starter
from app.service.draft_models import amount
from app.service.models import Models
from app.service.session import Session
from app.web import models_html
from app.web.tabs.loading import Place, build_place
from app.web.wiring import Updates
from engine.errors import ModelError, StrataError
from engine.machine import computes_bfloat16
from engine.models import llama_cpp_python
from engine.settings import Runtime

FETCH = "Download and load"


@dataclass(slots=True)
class Card:
    """A family: its facts, and where it is loaded from, alone or with its suggested drafts. One
    with a `box` is offered while the demonstration model is loaded, with facts that stay."""

    entry: Entry
    facts: gr.HTML
    place: Place
    box: gr.Column | None = None


def build() -> list[Card]:
    """A card for each family, or why there are none."""
    with gr.Column(elem_classes="card", elem_id="catalogue"):
        gr.HTML(models_html.CATALOGUE, apply_default_css=False)
    try:
        found = entries()
    except StrataError as error:
        gr.HTML(models_html.broken(str(error)), apply_default_css=False)
        return []
    cards = []
    with gr.Row(elem_classes="catalogue"):
        for number, entry in enumerate(found):
            with gr.Column(elem_classes="card", min_width=0):
                facts = gr.HTML(elem_id=f"family-{number}", apply_default_css=False)
                titles = [FETCH, "With drafts"] if entry.stack else [FETCH]
                cards.append(Card(entry, facts, build_place(f"family-{number}", *titles)))
    return cards


def build_starter(name: str, session: Session) -> list[Card]:
    """A small real model, one click away; none where the catalogue cannot be read."""
    try:
        entry = starter(llama_cpp_python.installed())
    except StrataError:
        return []
    shown = session.models.demonstration
    with gr.Column(elem_classes=["card", "starter"], elem_id=name, visible=shown) as box:
        facts = gr.HTML(models_html.starter(entry), apply_default_css=False)
        return [Card(entry, facts, build_place(name, FETCH), box)]


def shown(models: Models, cards: Sequence[Card], runtime: Runtime) -> Updates:
    """What every family would take with these settings, and what of it is here already."""
    changes: Updates = {}
    for card in cards:
        if card.box is None:
            changes[card.facts] = facts(models, card.entry, runtime)
        here = models.loaders.present(chosen(models, card.entry, runtime).target.source)
        changes[card.place.buttons[0]] = "Load" if here else FETCH
    return changes


def chosen(models: Models, entry: Entry, runtime: Runtime) -> Entry:
    """A family with the file of its target that is best where that would run."""
    with suppress(StrataError):
        return entry.on(models.engine.device(entry.target.source, runtime))
    return entry


def in_half(runtime: Runtime) -> bool:
    """Whether transformers models are loaded in two bytes a number; all here are stored so."""
    return computes_bfloat16() if runtime.dtype == "auto" else runtime.dtype != "float32"


def facts(models: Models, entry: Entry, runtime: Runtime) -> str:
    """One family's facts."""
    entry, length = chosen(models, entry, runtime), runtime.context_length
    target = entry.target
    here = {each.source for each in (target, *entry.drafts) if models.loaders.present(each.source)}
    try:
        device = models.engine.device(target.source, runtime)
        free = models.free(target.source, runtime)
    except StrataError as error:
        return models_html.family(entry, here, tail=models_html.broken(str(error)))
    need = entry.alone_need(length, device, in_half(runtime))
    needs = models_html.family_needs(entry, length, device, free, in_half(runtime))
    bar = models_html.bar((need.weights, need.cache), free)
    return models_html.family(entry, here, needs, bar)


def check(models: Models, entry: Entry, runtime: Runtime) -> None:
    """Raise ModelError for a target that does not fit, before it is downloaded for nothing."""
    target = entry.target
    if models.loaders.present(target.source):
        return  # the loader knows better than the formula
    device = models.engine.device(target.source, runtime)
    need = entry.alone_need(runtime.context_length, device, in_half(runtime))
    free = models.free(target.source, runtime)
    if need.total > free:
        raise ModelError(
            f"{target.name} needs {amount(need.total)} ({amount(need.weights)} for weights and "
            f"{amount(need.cache)} for the cache), but {amount(free)} are free on {device}. "
            "Nothing was downloaded. Choose a smaller model or a shorter context, or close other "
            "programs."
        )
