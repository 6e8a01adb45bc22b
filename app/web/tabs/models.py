"""The Models tab: the loaded model, the models that can replace it with the memory that each needs,
the catalogue, and GGUF support."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from html import escape
from typing import Any

import gradio as gr
from gradio.blocks import Block

from app.service.catalogue import Model
from app.service.jobs import Job, Progress
from app.service.models import Candidate
from app.service.session import Session
from app.service.ways import fewer_bits
from app.web import markup, models_html
from app.web.kit import (
    ACT,
    REFRESH,
    Confirmation,
    Event,
    JobCard,
    Payload,
    Tab,
    Trigger,
    Updates,
    hide,
    html,
    notify_errors,
    show,
    small_button,
    warn,
    watched,
)
from app.web.markup import fine_print
from app.web.metrics_panel import pace
from app.web.tabs import catalogue
from app.web.tabs.catalogue import Card
from app.web.tabs.settings import control, number
from app.web.tabs.ways import WaysSection
from engine.errors import ModelError, StrataError
from engine.models.formats import FORMATS
from engine.models.loaders import DEFAULT_RUNTIME
from engine.servers.client import KIND, is_address
from engine.settings import Runtime

AUTO = "auto"
OPEN = {
    "device": ("cpu", "cuda", "mps"),
    "dtype": ("float32", "bfloat16", "float16"),
    "head": ("off",),
}
"""The choices for settings whose declaration does not name them."""
TYPED = ("head",)
"""Settings for which a path can be typed as well."""
RARE = ("batch_size", "flash_attention", "cache_type")
"""Settings that are rarely changed."""
OF_ALL = ("context_length", "threads", "bits", "parallel", "head")
OF_KIND = {each.kind: tuple(n for n in each.settings if n not in RARE + OF_ALL) for each in FORMATS}
"""The settings that only one kind of model has."""
HERE = "here"
"""The name of the column with the settings that all models on this machine have."""
ADVANCED = {each.kind: tuple(n for n in each.settings if n in RARE) for each in FORMATS}
"""The settings of each kind of model that are rarely changed."""


def source_box(
    name: str, placeholder: str = "Folder, GGUF file or Hugging Face id"
) -> tuple[gr.Textbox, gr.Button]:
    """A box in which a model is named, and the button that adds it. Their ids begin with `name`."""
    with gr.Row(elem_classes="adding"):
        box = gr.Textbox(
            show_label=False,
            container=False,
            placeholder=placeholder,
            max_lines=1,
            scale=5,
            elem_id=f"{name}-source",
        )
        add = small_button("Add", scale=1, min_width=60, elem_id=f"{name}-add")
    return box, add


def controls(
    runtime: Runtime,
) -> tuple[dict[str, gr.components.Component], dict[str, gr.Column]]:
    """A component for each setting, and the columns that hold them: one for each kind of model, and
    one (HERE) for the settings of all models on this machine."""
    made: dict[str, gr.components.Component] = {}
    groups: dict[str, gr.Column] = {}

    def pairs(names: Sequence[str]) -> None:
        for start in range(0, len(names), 2):
            with gr.Row(elem_classes="pair"):
                for name in names[start : start + 2]:
                    value = getattr(runtime, name)
                    offered = choices(name, value)
                    made[name] = control(Runtime, name, value, offered, typed=name in TYPED)

    with gr.Column() as groups[HERE]:
        pairs(OF_ALL)
    for kind, names in OF_KIND.items():
        with gr.Column(elem_classes="card") as groups[kind]:
            pairs(names)
            if ADVANCED[kind]:
                with gr.Accordion("Advanced", open=False, elem_id="models-advanced"):
                    pairs(ADVANCED[kind])
    return {item.name: made[item.name] for item in fields(Runtime)}, groups


META = {item.name: item.metadata for item in fields(Runtime)}


def choices(name: str, value: object, usable: Sequence[str] | None = None) -> list[str]:
    """The choices of a setting: AUTO, the `usable` values, and the current one, such as
    "cuda:1"."""
    offered = OPEN.get(name, ()) if usable is None else usable
    return list(dict.fromkeys([AUTO, *offered, str(value)]))


class ModelsTab(Tab):
    """The loaded model, the models on this machine, and the memory that the chosen one needs.

    `runtime` holds a component for each setting of `Runtime`. `groups` holds a column for each kind
    of model, and one (HERE) for all models on this machine. `first` are the cards of models that
    the chat offers on its first screen.
    """

    def __init__(
        self,
        session: Session,
        memory: gr.BrowserState,
        tab: gr.Tab,
        first: Sequence[Card] = (),
    ) -> None:
        super().__init__(session, memory)
        self.models, self.tab = session.models, tab
        starters = [*first, *catalogue.build_starter("starter-models", session)]
        with gr.Row(elem_classes="cards"):
            with gr.Column(elem_classes="card", scale=3):
                self.facts = html(elem_id="models-loaded")
                self.exact = small_button("Load in float32", visible=False, elem_id="models-exact")
            with gr.Column(elem_classes="card", scale=3):
                self.build_list()
            with gr.Column(elem_classes="card", scale=4):
                gr.HTML("<h3>How it runs</h3>")
                self.runtime, self.groups = controls(session.models.runtime)
                with self.groups[KIND]:
                    self.key = gr.Textbox(
                        label="Key of the server",
                        type="password",
                        max_lines=1,
                        info=(
                            "Only if the server asks for one. It is kept until Strata closes, and "
                            "never stored."
                        ),
                        elem_id="models-key",
                    )
                self.needed = html(elem_id="models-need")
                self.place = JobCard.build("models", "Load")
                with gr.Row(elem_classes="presets"):
                    self.reset_button = small_button("Reset to defaults", elem_id="models-reset")
        self.ways = WaysSection(session, memory, self.runtime["bits"])
        self.gguf = GgufSection(session, memory)
        self.cards = [*starters, *catalogue.build()]
        self.places = [self.place, *(card.place for card in self.cards)]
        self.boxes = [card.box for card in self.cards if card.box is not None]

    def build_list(self) -> None:
        gr.HTML(
            "<h3>Models</h3><p>Add a GGUF file, a folder, a Hugging Face model (owner/name or "
            "owner/name:file.gguf), or the address of an OpenAI-compatible server "
            "(http://host:8000/v1). Folders are searched and remembered.</p>"
        )
        self.choice = gr.Radio([], show_label=False, container=False, elem_id="models-choice")
        with gr.Row(elem_classes="tools"):
            button = small_button("Remove", min_width=40, elem_id="models-remove")
        with gr.Column(visible=False, elem_classes="asking") as asking:
            self.question = html(elem_id="models-question")
            with gr.Row():
                yes = small_button(
                    "Remove", variant="stop", min_width=40, elem_id="models-remove-yes"
                )
                no = small_button("Keep", min_width=40, elem_id="models-remove-no")
        self.removing = Confirmation(button, asking, yes, no)
        self.box, self.add_button = source_box(
            "models", "Folder, GGUF file, Hugging Face id or address"
        )

    def wire(self, follow: Sequence[Event], header: Event) -> Event:
        """Connect the tab, and the choice of a model in the page's header. The events in `follow`
        update the page after a load, and `header` redraws its header. Returns the event that
        updates the tab after a load that began elsewhere."""
        removing = self.removing
        controls, context = [*self.runtime.values()], self.runtime["context_length"]
        inputs = [self.choice, *controls]
        needs: list[Block] = [self.needed, *(card.facts for card in self.cards)]
        needs += [card.place.buttons[0] for card in self.cards]
        listed: list[Block] = [self.facts, self.exact, self.choice]
        shown = [*listed, *needs, *controls, *self.groups.values(), removing.shown, *self.boxes]
        settle = self.event(
            self.settle, inputs, [*shown, self.place.stop, self.place.status], guard=REFRESH
        )
        seen = settle.outputs or ()
        self.on(self.tab.select, self.show, inputs, seen, mode="multiple", guard=REFRESH)
        chosen = self.on(
            self.choice.input, self.screen, self.choice, shown, mode="always_last", guard=ACT
        )
        self.then(chosen, self.hint, self.choice, context)
        edits = [control.input for control in controls]  # type: ignore[attr-defined]
        self.on(edits, self.needs, inputs, needs, mode="always_last", guard=ACT)
        adding = [self.add_button.click, self.box.submit]
        added = self.on(adding, self.add, self.box, [self.box, *shown], guard=ACT)
        self.then(added, header)
        self.on(self.reset_button.click, self.reset, self.choice, shown, guard=ACT)
        left = [*shown, self.place.status, self.question]
        removed = self.confirm(
            removing, self.remove, self.choice, left, ask=self.ask_removal, guard=ACT
        )
        self.then(removed, header)
        measured = self.ways.wire(self.tab, settle)
        self.wire_loads([*follow, measured], header, inputs, shown)
        self.gguf.wire(self.tab, settle)
        return settle

    def wire_loads(
        self,
        follow: Sequence[Event],
        header: Event,
        inputs: Sequence[Block],
        shown: Sequence[Block],
    ) -> None:
        head: Any = header.outputs
        buttons = [button for each in self.places for button in each.buttons]

        def loads(
            trigger: Trigger,
            handler: Callable[..., object],
            place: JobCard,
            given: Sequence[Block] = (),
            filled: Sequence[Block] = (),
        ) -> None:
            outputs = dict.fromkeys([*shown, *buttons, place.stop, place.status, *given, *filled])
            done = self.on(trigger, handler, [*given, *inputs], [*outputs], guard=ACT)
            for step in follow:
                done = self.then(done, step)

        def pick(data: gr.EventData, source: str | None, *values: object) -> Iterator[Updates]:
            for shown in self.pick(data, source, *values):
                yield {**shown, head: header.handler()}

        loads(self.place.buttons[0].click, self.open, self.place, given=[self.key])
        loads(self.exact.click, self.load_exact, self.place)
        loads(head.pick, pick, self.place, filled=[head])
        for card in self.cards:
            for button, drafts in zip(card.place.buttons, ((), card.entry.stack), strict=False):
                loads(button.click, partial(self.load_family, card, drafts), card.place)
        for stop in (head.stop, *(each.stop.click for each in self.places)):
            self.on(stop, self.models.stop)

    # showing

    def candidates(self) -> dict[str, Candidate]:
        return {candidate.source: candidate for candidate in self.models.candidates()}

    def screen(self, source: str | None, values: Sequence[object] = ()) -> Updates:
        """Update everything that the tab shows. The model `source` is chosen, or the loaded one if
        that is gone. Without `values`, the controls show the settings with which it ran last.
        """
        offered = self.candidates()
        chosen = next((s for s in (source, self.models.source) if s in offered), None)
        # An unchanged choice is not sent, because it would undo a choice made meanwhile.
        shown = self.listed(offered, *([] if values and chosen == source else [chosen]))
        shown[self.removing.shown] = hide()
        if chosen and (chosen != source or not values):
            return {**shown, **self.settings(offered[chosen])}
        shown |= self.limited(offered[chosen] if chosen else None)
        return {**shown, **self.needs(chosen, *values)}

    def listed(self, offered: Mapping[str, Candidate], *chosen: str | None) -> Updates:
        choices = [models_html.choice(candidate) for candidate in offered.values()]
        value: dict[str, Any] = {"value": chosen[0]} if chosen else {}
        return {
            self.facts: self.loaded(),
            # Loading in float32 is offered to models that run with reduced precision.
            self.exact: gr.update(
                visible=self.models.is_loaded and models_html.halved(self.session.current.info)
            ),
            **dict.fromkeys(self.boxes, gr.update(visible=self.models.demonstration)),
            self.choice: gr.update(choices=choices, **value),
        }

    def overview(self) -> Updates:
        """Show the list of models at once. Finding the memory that the chosen one needs may take a
        second."""
        offered = self.candidates()
        return {**self.listed(offered), **self.limited(offered.get(self.models.source))}

    def loaded(self) -> str:
        info, curve = self.session.current.info, self.session.costs.curve
        others = not self.models.demonstration and not fewer_bits(info)
        costs = models_html.verifying(info, curve.points, others) if curve else ""
        drafts = list(self.session.stacks.drafts)
        plain = pace(self.session.current.plain) if self.models.is_loaded else ""
        return models_html.loaded(info, self.models.source, drafts, costs, plain)

    def settings(self, candidate: Candidate) -> Updates:
        runtime = self.models.runtime if candidate.loaded else candidate.runtime
        values = {item.name: getattr(runtime, item.name) for item in fields(Runtime)}
        shown: Updates = {
            self.runtime[name]: gr.update(value=value) for name, value in values.items()
        }
        here = candidate.kind != KIND
        for kind, column in self.groups.items():
            shown[column] = gr.update(visible=here if kind == HERE else kind == candidate.kind)
        if candidate.kind == "transformers":
            offered = choices("device", runtime.device, self.devices(candidate.source))
            device = gr.update(choices=offered, value=runtime.device)
            shown[self.runtime["device"]] = device
        return {**shown, **self.needs(candidate.source, *values.values())}

    def hint(self, source: str | None) -> Updates:
        """Show the help text of the context length. This is a separate event, because a number
        field whose help text and value change at once behaves as if a person typed the value."""
        return self.limited(self.candidates().get(source or ""))

    def limited(self, candidate: Candidate | None) -> Updates:
        """Show the help text of the context length. A loaded model may have less than requested.
        The text holds for every value, as any may be typed."""
        info, actual = META["context_length"]["help"], self.session.current.info.context_length
        if candidate and candidate.loaded and actual < self.models.runtime.context_length:
            info = f"{candidate.name} reads at most {actual:,} tokens: no more can be loaded."
        return {self.runtime["context_length"]: gr.update(info=info)}

    def devices(self, source: str) -> list[str]:
        found = []
        for name in OPEN["device"]:
            with suppress(ModelError):
                self.session.engine.room(source, Runtime(device=name))
                found.append(name)
        return found

    def read(self, values: Sequence[object]) -> Runtime:
        given = zip(fields(Runtime), values, strict=True)
        return Runtime(**{item.name: number(item.default, value) for item, value in given})

    def needs(self, source: str | None, *values: object) -> Updates:
        if source is None:
            return {self.needed: fine_print("Choose a model to see the memory it needs.")}
        try:
            runtime = self.read(values)
            families = catalogue.shown(self.models, self.cards, runtime)
        except StrataError as error:
            return {self.needed: models_html.unknown(source, str(error))}
        return {**families, self.needed: self.need(source, runtime)}

    def need(self, source: str, runtime: Runtime) -> str:
        engine = self.session.engine
        if is_address(source):
            return models_html.elsewhere(source)
        if not self.models.loaders.present(source):
            return models_html.absent(source)
        try:
            need, room = engine.need(source, runtime), engine.room(source, runtime)
            return models_html.need(source, need, room.total, room.device)
        except StrataError as error:
            return models_html.unknown(source, str(error))

    # events

    def refresh(self, source: str | None, *values: object) -> Updates:
        place, loading = self.place, self.models.loading
        shown: Updates = {place.stop: gr.update(visible=loading is not None)}
        if loading is not None:
            shown[place.status] = markup.progress(loading)
        with notify_errors():
            shown |= self.screen(source, values)
        return shown

    async def show(self, source: str | None, *values: object) -> AsyncIterator[Updates]:
        """Show the list at once, then everything else, and the progress of a load that another page
        began."""
        yield await asyncio.to_thread(self.overview)
        job = self.models.slot.running
        yield await asyncio.to_thread(self.refresh, source, *values)
        if job is None:
            return
        async for now in watched(job):
            yield {self.place.status: markup.progress(now)}
        yield await asyncio.to_thread(self.settle, source, *values)

    def settle(self, source: str | None, *values: object) -> Updates:
        return {self.place.status: "", **self.refresh(source, *values)}

    def add(self, named: str) -> Updates:
        """Add the models of a folder, or a single model, and choose the first of them."""
        return {self.box: "", **self.screen(self.models.add(named))}

    def reset(self, source: str | None) -> Updates:
        """Show the default settings. They take effect when the model is loaded with them."""
        candidate = self.candidates().get(source or "")
        if candidate is None:
            raise ModelError("No model is chosen. Choose one from the list first.")
        return self.settings(replace(candidate, loaded=False, runtime=DEFAULT_RUNTIME))

    def ask_removal(self, source: str | None) -> Updates:
        question = self.models.removal(source or "").question
        return {self.question: f"<p>{escape(question)}</p>", self.removing.shown: show()}

    def remove(self, source: str | None) -> Updates:
        done = self.models.remove(source or "").done
        return {**self.screen(None), self.place.status: fine_print(done)}

    def open(self, key: str, source: str | None, *values: object) -> Iterator[Updates]:
        """Load the chosen model, with the key of its server, which is then cleared on the page."""
        if source and key and is_address(source):
            self.models.give_key(source, key)
        yield {self.key: ""}
        yield from self.load(source, *values)

    def load(self, source: str | None, *values: object) -> Iterator[Updates]:

        def start(runtime: Runtime) -> Iterator[Progress]:
            if not source:
                raise ModelError("No model is chosen. Choose one from the list first.")
            return self.models.load(source, runtime)

        yield from self.run_load(self.place, start, source, values)

    def pick(self, data: gr.EventData, source: str | None, *values: object) -> Iterator[Updates]:
        """Load the model that was chosen in the page's header, with its last settings."""
        named = Payload(data).text("source")

        def start(_: Runtime) -> Iterator[Progress]:
            found = self.candidates().get(named)
            if found is None:
                raise ModelError(f"There is no model {named!r} any more. Choose another one.")
            return self.models.load(found.source, found.runtime)

        yield from self.run_load(self.place, start, source, values)

    def load_exact(self, source: str | None, *values: object) -> Iterator[Updates]:
        models = self.models

        def start(_: Runtime) -> Iterator[Progress]:
            return models.load(models.source, replace(models.runtime, dtype="float32"))

        yield from self.run_load(self.place, start, source, values)

    def load_family(
        self, card: Card, drafts: Sequence[Model], source: str | None, *values: object
    ) -> Iterator[Updates]:
        """Load the target of a family. Download the draft models in `drafts`, and offer all draft
        models of the family that are on this machine."""

        def start(runtime: Runtime) -> Iterator[Progress]:
            models, stacks = self.models, self.session.stacks
            entry = catalogue.chosen(models, card.entry, runtime)
            target = entry.target
            catalogue.check(models, entry, runtime)
            if card.box is None:
                yield from models.load(target.source, runtime)
            else:
                yield from catalogue.load_starter(models, target.source, runtime)
            for draft in drafts:
                if not models.loaders.present(draft.source):
                    yield from models.fetch_alone(draft.source, draft.name)
            here = [d for d in card.entry.drafts if models.loaders.present(d.source)]
            for draft in here:
                stacks.offer(draft.source)
            if here:
                text = f"{target.name} is loaded. Its draft models are in the Stack tab."
                yield Progress(1.0, text)

        yield from self.run_load(card.place, start, source, values)

    def run_load(
        self,
        place: JobCard,
        start: Callable[[Runtime], Iterator[Progress]],
        source: str | None,
        values: Sequence[object],
    ) -> Iterator[Updates]:
        """Run a load and show its progress, until it is done or stopped. `source` is the chosen
        model."""
        others = [button for each in self.places if each is not place for button in each.buttons]
        shown = source, values

        def reports() -> Iterator[Progress]:
            yield from start(self.read(values))

        def done(last: Progress) -> str:
            nonlocal shown
            shown = self.models.source, ()
            return fine_print(last.text)

        def failed(error: StrataError) -> str:
            warn(str(error))
            return models_html.still_loaded(self.session.current.info, self.models.source)

        yield {**place.busy(*others), place.status: ""}
        status = yield from place.follow(reports(), done, failed)
        for notice in self.models.notices:
            warn(notice)
        with notify_errors():
            yield self.screen(*shown)
        yield place.idle(*others, status=status)


SET_UP = "Set up GGUF support"
GGUF_TEXT = (
    "<h3>GGUF files</h3><p>GGUF files need llama.cpp, which is compiled on your machine: about 6 "
    "minutes on 2 cores. This takes a C++ compiler and a network. You can chat meanwhile.</p>"
)
GGUF_READY = "GGUF support is set up. Choose a GGUF file and load it."


def output(lines: Iterable[str]) -> str:
    text = escape("\n".join(lines))
    return f'<pre class="output">{text}</pre>' if text else ""


def timed(job: Job[Progress, None]) -> Iterator[Progress]:
    for report in job.watch():
        minutes, seconds = divmod(int(job.seconds), 60)
        yield replace(report, text=f"{report.text} · {minutes}:{seconds:02}")


class GgufSection(Tab):
    """The section that sets up GGUF support. It is visible until that is installed."""

    def __init__(self, session: Session, memory: gr.BrowserState) -> None:
        super().__init__(session, memory)
        self.support, visible = session.gguf, not session.gguf.installed()
        with gr.Column(elem_classes="card", elem_id="gguf", visible=visible) as self.section:
            gr.HTML(GGUF_TEXT)
            self.place = JobCard.build("gguf", SET_UP)

    def wire(self, tab: gr.Tab, after: Event) -> None:
        """Connect the section. `after` is the event that refreshes the rest of the tab."""
        (button,) = self.place.buttons
        outputs = [self.section, button, self.place.stop, self.place.status]
        self.on(tab.select, self.show, (), outputs, guard=REFRESH)
        self.then(self.on(button.click, self.set_up, (), outputs, guard=ACT), after)
        self.on(self.place.stop.click, self.support.stop)

    def show(self) -> Iterator[Updates]:
        """Show the section if it is needed, or the progress of a setup that another page began."""
        if (job := self.support.slot.running) is not None:
            yield from self.follow(job)
        else:
            yield {self.section: gr.update(visible=not self.support.installed())}

    def set_up(self) -> Iterator[Updates]:
        try:
            job = self.support.start()
        except StrataError as error:
            yield {self.place.status: fine_print(str(error))}
        else:
            yield from self.follow(job)

    def follow(self, job: Job[Progress, None]) -> Iterator[Updates]:
        yield {**self.place.busy(), self.section: gr.update(visible=True)}
        status = yield from self.place.follow(
            timed(job),
            lambda last: fine_print(GGUF_READY),
            lambda error: models_html.broken(str(error)) + output(self.support.lines),
        )
        again = gr.update(visible=job.error is not None)
        yield {**self.place.idle(status=status), self.place.buttons[0]: again}
