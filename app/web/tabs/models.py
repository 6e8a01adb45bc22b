"""Models: the loaded one, those that can replace it, and the memory each needs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from html import escape
from typing import Any

import gradio as gr
from gradio.blocks import Block

from app.service import removal
from app.service.catalogue import Model
from app.service.formats import BOTH
from app.service.models import Candidate, Progress, reported
from app.service.session import Session
from app.web import models_html
from app.web.models_html import FLOAT32
from app.web.stack_html import fine
from app.web.tabs import catalogue, gguf_support
from app.web.tabs.catalogue import Card
from app.web.tabs.loading import Place, build_adding, build_place, paced
from app.web.tabs.settings import control, number
from app.web.wiring import (
    AFTER,
    AT_ONCE,
    LATEST,
    Deeds,
    Event,
    Updates,
    counted,
    told,
    unless_done,
    warn,
)
from engine.errors import Cancelled, ModelError, StrataError
from engine.models.formats import FORMATS, format_of
from engine.models.loaders import DEFAULT_RUNTIME
from engine.servers.address import KIND
from engine.settings import Runtime

AUTO = "auto"
OPEN = {
    "device": ("cpu", "cuda", "mps"),
    "dtype": ("float32", "bfloat16", "float16"),
    "head": ("off",),
}
"""What is offered for settings whose declaration leaves it open."""
TYPED = ("head",)
"""Settings for which a path may be typed as well."""
RARE = ("batch_size", "flash_attention", "cache_type")
"""Settings that are rarely changed."""
OF_ALL = ("context_length", "threads", "head")
OF_KIND = {each.kind: tuple(n for n in each.settings if n not in RARE + OF_ALL) for each in FORMATS}
"""The settings that only one kind of model knows."""
HERE = "here"
"""Names the column of settings that all models on this machine know."""
ADVANCED = {each.kind: tuple(n for n in each.settings if n in RARE) for each in FORMATS}
"""Those of them that are rarely changed."""


@dataclass(slots=True)
class Removing:
    """The button that takes the chosen model away, and what is asked before."""

    button: gr.Button
    asking: gr.Column
    question: gr.HTML
    yes: gr.Button
    no: gr.Button


@dataclass(slots=True)
class Parts:
    """The tab's components. `runtime` has one for each setting of `Runtime`, `groups` a column for
    each kind of model, and one for all that are on this machine."""

    tab: gr.Tab
    loaded: gr.HTML
    exact: gr.Button
    choice: gr.Radio
    box: gr.Textbox
    add: gr.Button
    key: gr.Textbox
    remove: Removing
    reset: gr.Button
    runtime: dict[str, gr.components.Component]
    groups: dict[str, gr.Column]
    need: gr.HTML
    place: Place
    gguf: gguf_support.Parts
    cards: list[Card]


def build(tab: gr.Tab, session: Session, first: Sequence[Card] = ()) -> Parts:
    """This machine: what is loaded, what there is, what the chosen one will need. `first` is what
    the chat offers to begin with."""
    starters = [*first, *catalogue.build_starter("starter-models", session)]
    with gr.Row(elem_classes="cards"):
        with gr.Column(elem_classes="card", scale=3):
            loaded = gr.HTML(elem_id="models-loaded", apply_default_css=False)
            exact = gr.Button(
                f"Load in {FLOAT32}", size="sm", visible=False, elem_id="models-exact"
            )
        with gr.Column(elem_classes="card", scale=3):
            choice, removing, box, add = listing()
        with gr.Column(elem_classes="card", scale=4):
            gr.HTML("<h3>How it runs</h3>")
            runtime, groups = controls(session.models.runtime)
            with groups[KIND]:
                key = gr.Textbox(
                    label="Key of the server",
                    type="password",
                    max_lines=1,
                    info="Only where it wants one. It is kept until Strata ends, and never stored.",
                    elem_id="models-key",
                )
            need = gr.HTML(elem_id="models-need", apply_default_css=False)
            here = build_place("models", "Load")
            with gr.Row(elem_classes="presets"):
                reset = gr.Button("Reset to the usual settings", size="sm", elem_id="models-reset")
    gguf, cards = gguf_support.build(session.gguf), [*starters, *catalogue.build()]
    shown = runtime, groups, need, here, gguf, cards
    return Parts(tab, loaded, exact, choice, box, add, key, removing, reset, *shown)


def listing() -> tuple[gr.Radio, Removing, gr.Textbox, gr.Button]:
    """The models to choose from, how to take one away, and how to add more."""
    gr.HTML(
        "<h3>Models</h3><p>Add a GGUF file, a folder, a Hugging Face model (owner/name or "
        "owner/name:file.gguf), or the address of an OpenAI-compatible server "
        "(http://host:8000/v1). Folders are searched and remembered.</p>"
    )
    choice = gr.Radio([], show_label=False, container=False, elem_id="models-choice")
    with gr.Row(elem_classes="tools"):
        button = gr.Button("Remove", size="sm", min_width=40, elem_id="models-remove")
    with gr.Column(visible=False, elem_classes="asking") as asking:
        question = gr.HTML(elem_id="models-question", apply_default_css=False)
        with gr.Row():
            yes = gr.Button(
                "Remove", size="sm", variant="stop", min_width=40, elem_id="models-remove-yes"
            )
            no = gr.Button("Keep", size="sm", min_width=40, elem_id="models-remove-no")
    return (
        choice,
        Removing(button, asking, question, yes, no),
        *build_adding("models", "Folder, GGUF file, Hugging Face id or address"),
    )


def controls(
    runtime: Runtime,
) -> tuple[dict[str, gr.components.Component], dict[str, gr.Column]]:
    """A component for each setting, those of one kind of model in a column of their own, and those
    of all models on this machine in another one."""
    made: dict[str, gr.components.Component] = {}
    groups: dict[str, gr.Column] = {}

    def pairs(names: Sequence[str]) -> None:
        for start in range(0, len(names), 2):
            with gr.Row(elem_classes="pair"):
                for name in names[start : start + 2]:
                    value = getattr(runtime, name)
                    offered = choices(name, value)
                    made[name] = (
                        typed(name, offered)
                        if name in TYPED
                        else control(Runtime, name, value, offered)
                    )

    with gr.Column() as groups[HERE]:
        pairs(OF_ALL)
    for kind, names in OF_KIND.items():
        with gr.Column(elem_classes="card") as groups[kind]:
            pairs(names)
            if ADVANCED[kind]:
                with gr.Accordion("Advanced", open=False, elem_id="models-advanced"):
                    pairs(ADVANCED[kind])
    return {item.name: made[item.name] for item in fields(Runtime)}, groups


def typed(name: str, offered: Sequence[str]) -> gr.Dropdown:
    """A setting to choose or to type."""
    meta = next(item.metadata for item in fields(Runtime) if item.name == name)
    return gr.Dropdown(
        list(offered), value=AUTO, label=meta["label"], info=meta["help"], allow_custom_value=True
    )


def choices(name: str, value: object, usable: Sequence[str] | None = None) -> list[str]:
    """What is offered for an open setting: that it is decided by itself, what is usable, and what
    is in use, as "cuda:1"."""
    offered = OPEN.get(name, ()) if usable is None else usable
    return list(dict.fromkeys([AUTO, *offered, str(value)]))


class Handlers:
    """What the tab's events do."""

    def __init__(self, session: Session, parts: Parts) -> None:
        self.session, self.models, self.parts = session, session.models, parts

    # what is shown

    def candidates(self) -> dict[str, Candidate]:
        """All models to choose from, by source. Raises StorageError."""
        return {candidate.source: candidate for candidate in self.models.candidates()}

    def screen(self, source: str | None, values: Sequence[object] = ()) -> Updates:
        """Everything that the tab shows, with that model chosen, or the loaded one if it is gone.

        Without `values` the controls show how it ran last.
        """
        offered = self.candidates()
        chosen = next((s for s in (source, self.models.source) if s in offered), None)
        shown = self.listed(offered, chosen)
        shown[self.parts.remove.asking] = gr.update(visible=False)
        if chosen and (chosen != source or not values):
            return {**shown, **self.settings(offered[chosen])}
        return {**shown, **self.needs(chosen, values)}

    def listed(self, offered: Mapping[str, Candidate], *chosen: str | None) -> Updates:
        """What there is, with the chosen one if that is given."""
        choices = [models_html.choice(candidate) for candidate in offered.values()]
        value: dict[str, Any] = {"value": chosen[0]} if chosen else {}
        return {
            self.parts.loaded: self.loaded(),
            self.parts.exact: gr.update(visible=self.coarse),
            **self.starters(),
            self.parts.choice: gr.update(choices=choices, **value),
        }

    def overview(self) -> Updates:
        """What there is, at once: what the chosen model needs may take a second to find out."""
        with told():
            return self.listed(self.candidates())
        return {self.parts.loaded: gr.skip()}

    def loaded(self) -> str:
        """The facts of the loaded model."""
        faster = self.models.formats.faster if self.models.source in BOTH else None
        words = faster.words if faster else ""
        info, curve = self.session.current.info, self.session.costs.curve
        costs = models_html.verifying(info, curve.points) if curve else ""
        drafts = list(self.session.stacks.drafts)
        return models_html.loaded(info, self.models.source, words, drafts, costs)

    @property
    def coarse(self) -> bool:
        """Whether the loaded model could compute in finer numbers."""
        return self.models.there and bool(models_html.precision(self.session.current.info))

    def starters(self) -> Updates:
        """What is offered while the demonstration model is loaded."""
        shown = gr.update(visible=self.models.demonstration)
        return {card.box: shown for card in self.parts.cards if card.box is not None}

    def settings(self, candidate: Candidate) -> Updates:
        """The controls as a model runs, or as it ran last, and what it then needs."""
        runtime = self.models.runtime if candidate.loaded else candidate.runtime
        values = {item.name: getattr(runtime, item.name) for item in fields(Runtime)}
        shown: Updates = {
            self.parts.runtime[name]: gr.update(value=value) for name, value in values.items()
        }
        here = candidate.kind != KIND
        for kind, column in self.parts.groups.items():
            shown[column] = gr.update(visible=here if kind == HERE else kind == candidate.kind)
        if candidate.kind == "transformers":
            offered = choices("device", runtime.device, self.devices(candidate.source))
            device = gr.update(choices=offered, value=runtime.device)
            shown[self.parts.runtime["device"]] = device
        return {**shown, **self.needs(candidate.source, list(values.values()))}

    def devices(self, source: str) -> list[str]:
        """Where a model could run on this machine."""
        found = []
        for name in OPEN["device"]:
            with suppress(ModelError):
                self.session.engine.device(source, Runtime(device=name))
                found.append(name)
        return found

    def read(self, values: Sequence[object]) -> Runtime:
        """The settings in the controls. Raises SettingError."""
        given = zip(fields(Runtime), values, strict=True)
        return Runtime(**{item.name: number(item.default, value) for item, value in given})

    def needs(self, source: str | None, values: Sequence[object]) -> Updates:
        """What the chosen model and the families of the catalogue need with these settings."""
        if source is None:
            return {self.parts.need: fine("Choose a model to see the memory it needs.")}
        try:
            runtime = self.read(values)
            families = catalogue.shown(self.models, self.parts.cards, runtime)
        except StrataError as error:
            return {self.parts.need: models_html.unknown(source, str(error))}
        return {**families, self.parts.need: self.need(source, runtime)}

    def need(self, source: str, runtime: Runtime) -> str:
        """What a model will need, or why that cannot be told."""
        loaders = self.models.loaders
        if format_of(source).elsewhere:
            return models_html.elsewhere(source)
        if not loaders.present(source):
            return models_html.absent(source)
        try:
            need, free = self.models.need(source, runtime), self.models.free(source, runtime)
            return models_html.need(source, need, free, self.session.engine.device(source, runtime))
        except StrataError as error:
            return models_html.unknown(source, str(error))

    # events

    def refresh(self, source: str | None, *values: object) -> Updates:
        """Show how things are now, a load that another page began included."""
        busy = self.models.busy.locked()
        place = self.parts.place
        shown: Updates = {place.stop: gr.update(visible=busy)}
        if busy:
            shown[place.status] = models_html.progress(Progress(None, "A model is being loaded …"))
        with told():
            shown |= self.screen(source, values)
        return shown

    def settle(self, source: str | None, *values: object) -> Updates:
        """Show how things are after a load that another page began, or the program."""
        return {self.parts.place.status: "", **self.refresh(source, *values)}

    def weigh(self, source: str | None, *values: object) -> Updates:
        """Show what is needed with other settings."""
        return self.needs(source, values)

    def choose(self, source: str) -> Updates:
        """Show the settings of a model, and what it will need."""
        with told():
            return self.screen(source)
        return {self.parts.need: gr.skip()}

    def add(self, named: str) -> Updates:
        """Offer the models of a folder, or one that is named; the first of them is chosen."""
        with told():
            return {self.parts.box: "", **self.screen(self.models.add(named))}
        return {self.parts.box: gr.skip()}

    def reset(self, source: str | None) -> Updates:
        """Show the usual settings; they count once the model is loaded with them."""
        with told():
            candidate = self.candidates().get(source or "")
            if candidate is None:
                raise ModelError("No model is chosen. Choose one from the list first.")
            return self.settings(replace(candidate, loaded=False, runtime=DEFAULT_RUNTIME))
        return {self.parts.need: gr.skip()}

    def ask(self, source: str | None) -> Updates:
        """Say what removing the chosen model would do, and ask."""
        removing = self.parts.remove
        with told():
            question = removal.plan(self.models, source or "").question
            shown = gr.update(visible=True)
            return {removing.question: f"<p>{escape(question)}</p>", removing.asking: shown}
        return {removing.asking: gr.update(visible=False)}

    def remove(self, source: str | None) -> Updates:
        """Remove it."""
        with told():
            done = removal.remove(self.models, source or "").done
            return {**self.screen(None), self.parts.place.status: fine(done)}
        return {self.parts.remove.asking: gr.update(visible=False)}

    def open(self, key: str, source: str | None, *values: object) -> Iterator[Updates]:
        """The same as `load`, with the key of the model's server; the page forgets it."""
        if source and key and format_of(source).elsewhere:
            self.models.give_key(source, key)
        yield {self.parts.key: ""}
        yield from self.load(source, *values)

    def load(self, source: str | None, *values: object) -> Iterator[Updates]:
        """Let the chosen model take the place of the loaded one."""

        def start(runtime: Runtime) -> Iterator[Progress]:
            if not source:
                raise ModelError("No model is chosen. Choose one from the list first.")
            return self.models.load(source, runtime)

        yield from self.work(self.parts.place, start, source, values)

    def load_exact(self, source: str | None, *values: object) -> Iterator[Updates]:
        """Load the same model again, in float32; nothing else changes."""
        models = self.models

        def start(_: Runtime) -> Iterator[Progress]:
            return models.load(models.source, replace(models.runtime, dtype=FLOAT32))

        yield from self.work(self.parts.place, start, source, values)

    def take(
        self, card: Card, drafts: Sequence[Model], source: str | None, *values: object
    ) -> Iterator[Updates]:
        """Load a family's target; its drafts, those to be downloaded included, are offered."""

        def start(runtime: Runtime) -> Iterator[Progress]:
            models, stacks = self.models, self.session.stacks
            entry = catalogue.chosen(models, card.entry, runtime)
            target = entry.target
            catalogue.check(models, entry, runtime)
            yield from models.load(target.source, runtime)
            for draft in drafts:
                if not models.loaders.present(draft.source):
                    yield from reported(draft.name, partial(models.fetch_alone, draft.source))
            here = [d for d in card.entry.drafts if models.loaders.present(d.source)]
            for draft in here:
                stacks.offer(draft.source)
            if here:
                words = f"{target.name} is loaded. Its draft models are in the Stack tab."
                yield Progress(1.0, words)

        yield from self.work(card.place, start, source, values)

    def work(
        self,
        place: Place,
        start: Callable[[Runtime], Iterator[Progress]],
        source: str | None,
        values: Sequence[object],
    ) -> Iterator[Updates]:
        """A load with its progress, until it is done or stopped; `source` is the chosen model."""
        places = [self.parts.place, *(card.place for card in self.parts.cards)]
        buttons = [button for each in places for button in each.buttons]
        yield {
            **{button: gr.update(interactive=False) for button in buttons},
            **{button: gr.update(visible=False) for button in place.buttons},
            place.stop: gr.update(visible=True),
            place.status: "",
        }
        words, shown = "", (source, values)
        try:
            for report in paced(start(self.read(values))):
                yield {place.status: models_html.progress(report)}
                words = fine(report.words)
            shown = (self.models.source, ())
        except Cancelled as error:
            words = fine(str(error))
        except StrataError as error:
            warn(str(error))
            words = models_html.still(self.session.current.info, self.models.source)
        for notice in self.models.notices:
            warn(notice)
        with told():
            yield self.screen(*shown)
        yield {
            **{button: gr.update(interactive=True, visible=True) for button in buttons},
            place.stop: gr.update(visible=False),
            place.status: words,
        }


def wire(session: Session, parts: Parts, follow: Sequence[Event]) -> Event:
    """Connect the tab. `follow` are the events by which the page follows the loaded model. Returns
    the event that shows how things are after a load that was begun elsewhere."""
    on = Handlers(session, parts)
    controls = list(parts.runtime.values())
    inputs = [parts.choice, *controls]
    deeds = gr.State(Deeds())
    places = [parts.place, *(card.place for card in parts.cards)]
    needs: list[Block] = [parts.need, *(card.facts for card in parts.cards)]
    needs += [card.place.buttons[0] for card in parts.cards]
    removing = parts.remove
    boxes = [card.box for card in parts.cards if card.box is not None]
    shown = [parts.loaded, parts.exact, parts.choice, *needs, *controls, *parts.groups.values()]
    shown += [removing.asking, *boxes]
    own = [parts.place.stop, parts.place.status]
    there = [parts.loaded, parts.exact, parts.choice, *boxes]
    opened = parts.tab.select(on.overview, None, there, **AT_ONCE)
    opened.then(unless_done(on.refresh), [deeds, *inputs], [*shown, *own], **AFTER)
    parts.choice.input(counted(on.choose), [deeds, parts.choice], shown, **LATEST)
    edits = [control.input for control in controls]  # type: ignore[attr-defined]
    weigh = counted(on.weigh)
    gr.on(edits, weigh, [deeds, *inputs], needs, **LATEST)
    added = [parts.add.click, parts.box.submit]
    gr.on(added, counted(on.add), [deeds, parts.box], [parts.box, *shown], **AT_ONCE)
    parts.reset.click(counted(on.reset), [deeds, parts.choice], shown, **AT_ONCE)
    asked = [removing.asking, removing.question]
    removing.button.click(on.ask, parts.choice, asked, **AT_ONCE)
    removing.no.click(lambda: gr.update(visible=False), None, removing.asking, **AT_ONCE)
    removed = [*shown, parts.place.status]
    removing.yes.click(counted(on.remove), [deeds, parts.choice], removed, **AT_ONCE)
    buttons = [button for each in places for button in each.buttons]

    def loads(
        button: gr.Button, handler: Callable[..., object], place: Place, *given: Block
    ) -> None:
        outputs = list(dict.fromkeys([*shown, *buttons, place.stop, place.status, *given]))
        event = button.click(counted(handler), [deeds, *given, *inputs], outputs, **AT_ONCE)
        for step in follow:
            event = event.then(*step, **AFTER)

    loads(parts.place.buttons[0], on.open, parts.place, parts.key)
    loads(parts.exact, on.load_exact, parts.place)
    for card in parts.cards:
        for button, drafts in zip(card.place.buttons, ((), card.entry.stack), strict=False):
            loads(button, partial(on.take, card, drafts), card.place)
    for each in places:
        each.stop.click(session.models.stop, None, None, **AT_ONCE)
    settle = Event(unless_done(on.settle), [deeds, *inputs], [*shown, *own])
    gguf_support.wire(session.gguf, parts.gguf, parts.tab, settle)
    return settle
