"""The catalogue in the Models tab: a card for every family, with the memory that it needs here."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import gradio as gr

from app.service.catalogue import Entry, entries, starter
from app.service.draft_models import amount
from app.service.jobs import Progress
from app.service.models import Models
from app.service.session import Session
from app.web import models_html
from app.web.kit import JobCard, Updates, html
from engine.errors import ModelError, StrataError
from engine.machine import computes_bfloat16
from engine.models import llama_cpp_python
from engine.models.gguf_files import ENDING
from engine.native import multiplies_few_bits
from engine.settings import Runtime

FETCH = "Download and load"


@dataclass(slots=True)
class Card:
    """The card of a family: its facts, and the controls that load it, alone or with its suggested
    draft models. A card with a `box` is an offer that is visible while the demonstration model is
    loaded; its facts do not change."""

    entry: Entry
    facts: gr.HTML
    place: JobCard
    box: gr.Column | None = None


def build() -> list[Card]:
    with gr.Column(elem_classes="card", elem_id="catalogue"):
        html(models_html.CATALOGUE)
    try:
        found = entries()
    except StrataError as error:
        html(models_html.broken(str(error)))
        return []
    cards = []
    with gr.Row(elem_classes="catalogue"):
        for number, entry in enumerate(found):
            with gr.Column(elem_classes="card", min_width=0):
                # The needs of a family take time to find, so they follow when the tab opens.
                about = models_html.family(entry, ())
                facts = html(about, elem_id=f"family-{number}")
                titles = [FETCH, "With drafts"] if entry.stack else [FETCH]
                cards.append(Card(entry, facts, JobCard.build(f"family-{number}", *titles)))
    return cards


def build_starter(name: str, session: Session) -> list[Card]:
    """The offer of a small real model; none if the catalogue cannot be read."""
    try:
        entry = starter(llama_cpp_python.installed())
    except StrataError:
        return []
    shown = session.models.demonstration
    with gr.Column(elem_classes=["card", "starter"], elem_id=name, visible=shown) as box:
        facts = html(models_html.starter(entry, rounds(entry.target.source)))
        return [Card(entry, facts, JobCard.build(name, FETCH), box)]


def shown(models: Models, cards: Sequence[Card], runtime: Runtime) -> Updates:
    """Show the memory that every family takes with these settings, and which files are already
    here."""
    changes: Updates = {}
    for card in cards:
        if card.box is None:
            changes[card.facts] = facts(models, card.entry, runtime)
        here = models.loaders.present(chosen(models, card.entry, runtime).target.source)
        changes[card.place.buttons[0]] = "Load" if here else FETCH
    return changes


def chosen(models: Models, entry: Entry, runtime: Runtime) -> Entry:
    """The family with the file of its target that suits the device on which it would run."""
    with suppress(StrataError):
        return entry.on(models.engine.room(entry.target.source, runtime).device)
    return entry


def in_half(runtime: Runtime) -> bool:
    """Whether transformers models of the catalogue are loaded with two bytes per number, as they
    are stored."""
    return computes_bfloat16() if runtime.dtype == "auto" else runtime.dtype != "float32"


def facts(models: Models, entry: Entry, runtime: Runtime) -> str:
    entry, length = chosen(models, entry, runtime), runtime.context_length
    family = (entry.target, *entry.drafts)
    here = {each.source for each in family if models.loaders.present(each.source)}
    try:
        room, half = models.engine.room(entry.target.source, runtime), in_half(runtime)
    except StrataError as error:
        return models_html.family(entry, here, tail=models_html.broken(str(error)))
    need = entry.alone_need(length, room.device, half)
    needs = models_html.family_needs(entry, length, room.device, room.total, half)
    bar = models_html.bar((need.weights, need.cache), room.total)
    return models_html.family(entry, here, needs, bar)


def rounds(source: str) -> bool:
    """Whether to load a model with weights of 8 bits on a processor. GGUF files need no such
    setting, because the compiled core takes them where it is faster."""
    return multiplies_few_bits() and not source.endswith(ENDING)


def load_starter(models: Models, source: str, runtime: Runtime) -> Iterator[Progress]:
    """Load a first real model, on a processor with weights of 8 bits if nothing else was chosen.
    A model that the compiled core cannot compute is loaded without them."""
    on_processor = models.engine.room(source, runtime).device == "cpu"
    if runtime.bits == "auto" and on_processor and rounds(source):
        try:
            yield from models.load(source, replace(runtime, bits="8"))
            return
        except ModelError:
            if not models.loaders.present(source):
                raise
    yield from models.load(source, runtime)


def check(models: Models, entry: Entry, runtime: Runtime) -> None:
    """Raise ModelError for a target that does not fit, before it is downloaded for nothing."""
    target = entry.target
    if models.loaders.present(target.source):
        return  # The loader knows the exact need.
    room = models.engine.room(target.source, runtime)
    need = entry.alone_need(runtime.context_length, room.device, in_half(runtime))
    if need.total > room.total:
        raise ModelError(
            f"{target.name} needs {amount(need.total)} ({amount(need.weights)} for weights and "
            f"{amount(need.cache)} for the cache), but {amount(room.total)} are free on "
            f"{room.device}. Nothing was downloaded. Choose a smaller model or a shorter context, "
            "or close other programs."
        )
