"""Stack: draft models for the loaded model, what they gain, and which of them to use."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import gradio as gr
import plotly.graph_objects as go
from gradio.blocks import Block
from gradio.events import Dependency

from app.service.comparison import Pace
from app.service.families import Family
from app.service.preferences import Preferences
from app.service.session import Session
from app.web import stack_charts, stack_html
from app.web.colors import DRAFT_SHADES, INK, PLAIN
from app.web.plots import grid
from app.web.tabs.compare import choices
from app.web.tabs.loading import build_adding
from app.web.tabs.settings import Controls, methods
from app.web.wiring import AFTER, AT_ONCE, LATEST, Event, Updates, told, warn
from engine.errors import Cancelled, SettingError, StrataError
from engine.hsd.planner import Plan, Recursion
from engine.hsd.trials import Entry, entries
from engine.models.loaders import name_of

UPDATE_SECONDS = 0.25


@dataclass(slots=True)
class Parts:
    """The tab's components."""

    tab: gr.Tab
    models: gr.HTML
    ticked: gr.CheckboxGroup
    box: gr.Textbox
    add: gr.Button
    load: gr.Button
    unload: gr.Button
    profiled: gr.HTML
    profile: gr.Button
    stop: gr.Button
    status: gr.HTML
    plan: gr.HTML
    spec: gr.Textbox
    first: gr.Checkbox
    use: gr.Button
    findings: gr.HTML
    measure: gr.Button
    outcome: gr.HTML
    charts: gr.Column
    plots: list[gr.Plot]


def build(tab: gr.Tab, session: Session) -> Parts:
    """Models, profile and plan beside each other; what they mean; the charts."""
    with gr.Row(elem_classes="cards"):
        with gr.Column(elem_classes="card"):
            models, ticked, box, add, load, unload = models_card(session)
        with gr.Column(elem_classes="card"):
            profiled = gr.HTML(elem_id="stack-profiled", apply_default_css=False)
            status = gr.HTML(elem_id="stack-status", apply_default_css=False)
            with gr.Row(elem_classes="presets"):
                profile = gr.Button("Profile", size="sm", elem_id="stack-profile")
                measure = gr.Button("Measure", size="sm", elem_id="stack-measure")
                stop = gr.Button(
                    "Stop", size="sm", variant="stop", visible=False, elem_id="stack-stop"
                )
            outcome = gr.HTML(elem_id="stack-outcome", apply_default_css=False)
        with gr.Column(elem_classes="card"):
            plan = gr.HTML(elem_id="stack-planned", apply_default_css=False)
            spec = gr.Textbox(
                session.stacks.spec,
                label="Another plan",
                info="Smallest model first, each with the tokens it drafts at a time: "
                "small@8/mid@4. Write databases/ in front to draft for the smallest. Empty: the "
                "best plan.",
                elem_id="stack-plan",
            )
            first = gr.Checkbox(
                False,
                label="Ask the databases first",
                info="Draft models then draft only where the databases are expected to be slower.",
                elem_id="stack-first",
            )
            use = gr.Button("Use for chat", variant="primary", size="sm", elem_id="stack-use")
    findings = gr.HTML(elem_id="stack-findings", apply_default_css=False)
    with gr.Column(visible=False) as charts:
        plots = grid(drawn(session, None, Preferences(), None))
    cards = (models, ticked, box, add, load, unload, profiled, profile, stop, status)
    return Parts(tab, *cards, plan, spec, first, use, findings, measure, outcome, charts, plots)


def models_card(
    session: Session,
) -> tuple[gr.HTML, gr.CheckboxGroup, gr.Textbox, gr.Button, gr.Button, gr.Button]:
    """Which models there are, what they need, and what is loaded."""
    stacks = session.stacks
    gr.HTML(
        "<h3>Draft models</h3><p>Smaller models with the same vocabulary. They draft and the main "
        "model checks. They cost memory, but never change a word.</p>",
    )
    candidates = stacks.candidates()
    ticked = gr.CheckboxGroup(
        [stack_html.choice(candidate) for candidate in candidates],
        value=[candidate.source for candidate in candidates],
        show_label=False,
        container=False,
        elem_id="stack-models",
    )
    box, add = build_adding("stack")
    models = gr.HTML(elem_id="stack-loaded", apply_default_css=False)
    with gr.Row(elem_classes="presets"):
        load = gr.Button("Load", size="sm", elem_id="stack-load")
        unload = gr.Button("Unload", size="sm", elem_id="stack-unload")
    return models, ticked, box, add, load, unload


def followers(parts: Parts) -> list[Block]:
    """What `follow` changes."""
    return [parts.ticked, parts.spec]


def follow(session: Session, parts: Parts) -> Updates:
    """The draft models on offer for the loaded model, all ticked. What they need is shown when the
    tab opens."""
    offered = session.stacks.offered
    return {
        parts.ticked: gr.update(choices=[(name_of(s), s) for s in offered], value=list(offered)),
        parts.spec: session.stacks.spec,
    }


def drawn(
    session: Session,
    family: Family | None,
    preferences: Preferences,
    plan: Plan | None,
    spec: str = "",
) -> list[go.Figure]:
    """The four charts of the family's profile and of the plan, which is that of `spec`."""
    rule = preferences.drafting.rule
    profile = family.profile if family else None
    return [
        stack_charts.hierarchy(profile, rule, plan),
        stack_charts.plans(bars(session, family, preferences, spec)),
        stack_charts.acceptance(profile, rule),
        stack_charts.cost_curves(profile),
    ]


def bars(
    session: Session, family: Family | None, preferences: Preferences, spec: str
) -> list[stack_charts.Bar]:
    """Every plan that would be measured, with what was."""
    if family is None or family.profile is None:
        return []
    recursion = Recursion(family.profile, preferences.drafting.rule)
    measured = {trial.title: trial.seconds for trial in session.stacks.trials}
    return [
        stack_charts.Bar(
            entry.title,
            colour(entry),
            recursion.latency(entry.plan) if entry.plan is not None else None,
            measured.get(entry.title),
        )
        for entry in entries(family, preferences.drafting, spec)
    ]


def colour(entry: Entry) -> str:
    """Grey for plain decoding, ink for the databases, the draft models' hue for the rest."""
    if entry.gated:
        return INK
    return DRAFT_SHADES[1] if entry.plan and entry.plan.levels else PLAIN


class Handlers:
    """What the tab's events do. `method` and `compared` are the dropdowns of other tabs."""

    def __init__(
        self, session: Session, parts: Parts, controls: Controls, compared: gr.Dropdown
    ) -> None:
        self.session, self.stacks, self.parts = session, session.stacks, parts
        self.controls, self.compared = controls, compared
        self.method = controls.parts["method"]

    def screen(self, preferences: Preferences, ticked: Sequence[str], spec: str) -> Updates:
        """Everything that the tab shows."""
        parts, stacks, spec = self.parts, self.stacks, spec.strip()
        sampling, rule = preferences.generation.sampling, preferences.drafting.rule
        family = stacks.family_for(sampling)
        ready = family is not None and family.profile is not None
        plan, card = None, ""
        if family is not None and ready:
            try:
                plan = family.plan(spec, rule)
            except SettingError as error:
                card, spec = stack_html.no_plan(str(error)), ""
                plan = family.plan("", rule)
        figures = drawn(self.session, family, preferences, plan, spec)
        return {
            **self.candidates(ticked),
            parts.profiled: stack_html.profiled(stacks, sampling),
            parts.plan: card
            or stack_html.planned(family, rule, plan, spec, stacks.learned(sampling)),
            parts.findings: stack_html.findings(family, rule, plan, stacks.trials),
            parts.outcome: stack_html.outcome(stacks.trials) if ready else "",
            parts.profile: gr.update(interactive=family is not None),
            parts.unload: gr.update(interactive=family is not None),
            parts.measure: gr.update(interactive=ready),
            parts.use: gr.update(interactive=ready),
            parts.charts: gr.update(visible=ready),
            **dict(zip(parts.plots, figures, strict=True)),
        }

    def candidates(self, ticked: Sequence[str], shown: Sequence[str] | None = None) -> Updates:
        """The models on offer, which are read once, and what they need.

        The page shows `shown` ticked, if these are others: it is told only what changes, so that a
        tick which someone sets meanwhile stays.
        """
        offered = self.stacks.candidates()
        update = gr.update(choices=[stack_html.choice(each) for each in offered])
        # A page that is older than the loaded model may have ticked what is gone.
        kept = [each.source for each in offered if each.source in ticked]
        if set(kept) != set(ticked if shown is None else shown):
            update["value"] = kept
        return {
            self.parts.models: stack_html.models(self.stacks, offered, kept),
            self.parts.ticked: update,
        }

    def offers(self) -> Updates:
        """The methods to choose from in other tabs."""
        return {
            self.method: gr.update(choices=methods(self.session)),
            self.compared: gr.update(choices=choices(self.session)),
        }

    def refresh(self, ticked: Sequence[str], spec: str, *values: object) -> Updates:
        """Show how things are now."""
        with told():
            return self.screen(self.controls.read(values)[1], ticked, spec)
        return {self.parts.status: gr.skip()}

    def tick(self, ticked: Sequence[str]) -> str:
        """What the ticked models need."""
        return stack_html.models(self.stacks, self.stacks.candidates(), ticked)

    def add(self, source: str, ticked: Sequence[str]) -> Updates:
        """Offer another model."""
        with told():
            wanted = list(dict.fromkeys([*ticked, self.stacks.offer(source)]))
            return {self.parts.box: "", **self.candidates(wanted, ticked)}
        return {self.parts.box: gr.skip()}

    def load(self, ticked: Sequence[str], spec: str, *values: object) -> Iterator[Updates]:
        """Load the ticked models."""
        yield {self.parts.status: stack_html.fine("Loading …")}
        with told():
            self.stacks.load(ticked)
        yield {
            **self.refresh(ticked, spec, *values),
            **self.offers(),
            self.parts.status: "",
        }

    def unload(self, ticked: Sequence[str], spec: str, *values: object) -> Updates:
        """Free the draft models."""
        with told():
            self.stacks.unload()
        return {**self.refresh(ticked, spec, *values), **self.offers()}

    def use(self, spec: str, first: bool, *values: object) -> Updates:
        """Choose the plan for the chat, now and at the next start."""
        with told():
            _, preferences = self.controls.read(values)
            sampling = preferences.generation.sampling
            name = self.stacks.choose(spec, sampling, preferences.drafting, first)
            words = f"The chat now drafts with {name}. Settings and Compare offer it too."
            found = {**self.offers(), self.parts.status: stack_html.fine(words)}
            return {**found, self.method: gr.update(choices=methods(self.session), value=name)}
        return {self.parts.status: gr.skip()}

    def profile(self, ticked: Sequence[str], spec: str, *values: object) -> Iterator[Updates]:
        """Profile the loaded models with the sampler of the settings."""

        def start() -> Iterator[float]:
            return self.stacks.profile(self.controls.read(values)[1].generation.sampling)

        yield from self.long("Profiling", start, (ticked, spec, *values))

    def measure(self, ticked: Sequence[str], spec: str, *values: object) -> Iterator[Updates]:
        """Put the plans to the test."""

        def start() -> Iterator[float]:
            _, chosen = self.controls.read(values)
            return self.stacks.measure(chosen.generation.sampling, chosen.drafting, spec)

        yield from self.long("Measuring", start, (ticked, spec, *values))

    def long(
        self,
        what: str,
        start: Callable[[], Iterator[float]],
        inputs: tuple[Sequence[str], str, *tuple[object, ...]],
    ) -> Iterator[Updates]:
        """A long piece of work with its progress, until it is done or stopped."""
        parts, pace, words = self.parts, Pace(UPDATE_SECONDS), ""
        buttons = (parts.profile, parts.measure, parts.load, parts.unload)
        yield {
            **{button: gr.update(interactive=False) for button in buttons},
            parts.stop: gr.update(visible=True),
            parts.status: stack_html.progress(what, 0.0),
        }
        try:
            for share in start():
                if pace.due():
                    yield {parts.status: stack_html.progress(what, share)}
        except Cancelled as error:
            words = stack_html.fine(str(error))
        except StrataError as error:
            warn(str(error))
        yield {
            **{button: gr.update(interactive=True) for button in buttons},
            **self.refresh(*inputs),
            parts.stop: gr.update(visible=False),
            parts.status: words,
        }


def wire(
    session: Session,
    parts: Parts,
    controls: Controls,
    compared: gr.Dropdown,
    keep: Event,
) -> Sequence[Dependency]:
    """Connect the tab. `keep` is the event that stores changed settings. Returns the events by
    which draft models come and go."""
    on = Handlers(session, parts, controls, compared)
    inputs = [parts.ticked, parts.spec, *controls.inputs]
    shown: list[Block] = [parts.models, parts.ticked, parts.profiled, parts.plan, parts.findings]
    shown += [parts.profile, parts.unload, parts.measure, parts.use, parts.status]
    shown += [parts.outcome, parts.charts, *parts.plots]
    others = [on.method, compared]
    parts.tab.select(on.refresh, inputs, shown, **AT_ONCE)
    gr.on([parts.spec.submit, parts.spec.blur], on.refresh, inputs, shown, **LATEST)
    parts.ticked.input(on.tick, parts.ticked, parts.models, **LATEST)
    added = [parts.box, parts.ticked, parts.models]
    gr.on([parts.add.click, parts.box.submit], on.add, [parts.box, parts.ticked], added, **AT_ONCE)
    come = parts.load.click(on.load, inputs, [*shown, *others], **AT_ONCE)
    gone = parts.unload.click(on.unload, inputs, [*shown, *others], **AT_ONCE)
    running = [*shown, parts.load, parts.stop]
    parts.profile.click(on.profile, inputs, running, **AT_ONCE)
    parts.measure.click(on.measure, inputs, running, **AT_ONCE)
    parts.stop.click(session.stacks.stop, None, None, **AT_ONCE)
    chosen = [parts.spec, parts.first, *controls.inputs]
    used = parts.use.click(on.use, chosen, [parts.status, *others], **AT_ONCE)
    used.then(*keep, **AFTER)
    return come, gone
