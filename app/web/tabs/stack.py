"""The Stack tab: draft models for the loaded model, their gain, and which of them to use."""

from collections.abc import Callable, Iterator, Sequence

import gradio as gr
import plotly.graph_objects as go
from gradio.blocks import Block
from gradio.events import Dependency

from app.service.comparison import Pace
from app.service.draft_models import Family
from app.service.jobs import LOOK_SECONDS, Progress
from app.service.preferences import Preferences
from app.service.session import Session
from app.web import markup, stack_charts, stack_html
from app.web.colors import DRAFT_SHADES, INK, PLAIN
from app.web.kit import Event, JobCard, Tab, Updates, grid, html, notify_errors, small_button, warn
from app.web.stack_html import PLAN
from app.web.tabs.models import source_box
from app.web.tabs.settings import Settings, methods
from engine.errors import SettingError, StrataError
from engine.hsd.planner import Plan, Recursion
from engine.hsd.trials import Entry, entries
from engine.models.loaders import name_of


def drawn(
    session: Session,
    family: Family | None,
    preferences: Preferences,
    plan: Plan | None,
    spec: str = "",
) -> list[go.Figure]:
    """The four charts of a family's profile and of its plan. `spec` is the text of the plan."""
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
    if family is None or family.profile is None:
        return []
    recursion = Recursion(family.profile, preferences.drafting.rule)
    measured, bars = {each.title: each.seconds for each in session.stacks.trials}, []
    for entry in entries(family, preferences.drafting, spec):
        predicted = recursion.latency(entry.plan) if entry.plan is not None else None
        took = measured.get(entry.title)
        bars.append(stack_charts.Bar(entry.title, colour(entry), predicted, took))
    return bars


def colour(entry: Entry) -> str:
    if entry.gated:
        return INK
    return DRAFT_SHADES[1] if entry.plan and entry.plan.levels else PLAIN


class StackTab(Tab):
    controls: Settings
    compared: gr.Dropdown
    """The method of the right side in the Compare tab."""

    def __init__(self, session: Session, memory: gr.BrowserState, tab: gr.Tab) -> None:
        super().__init__(session, memory)
        self.stacks, self.tab = session.stacks, tab
        with gr.Row(elem_classes="cards"):
            with gr.Column(elem_classes="card"):
                self.build_models()
            with gr.Column(elem_classes="card"):
                self.profiled = html(elem_id="stack-profiled")
                status = html(elem_id="stack-status")
                with gr.Row(elem_classes="presets"):
                    self.profile_button = small_button("Profile", elem_id="stack-profile")
                    self.measure_button = small_button("Measure", elem_id="stack-measure")
                    stop = small_button("Stop", variant="stop", visible=False, elem_id="stack-stop")
                self.outcome = html(elem_id="stack-outcome")
            with gr.Column(elem_classes="card"):
                self.plan = html(elem_id="stack-planned")
                self.spec = gr.Textbox(
                    session.stacks.spec,
                    label="Another plan",
                    info="The smallest model comes first, each with the number of tokens it drafts "
                    "at a time: small@8/mid@4. Put databases/ in front to let the databases "
                    "draft for the smallest model. Leave it empty for the best plan.",
                    elem_id="stack-plan",
                )
                self.first = gr.Checkbox(
                    False,
                    label="Ask the databases first",
                    info="Draft models then draft only where the databases are expected to be "
                    "slower.",
                    elem_id="stack-first",
                )
                self.use_button = small_button(
                    "Use for chat", variant="primary", elem_id="stack-use"
                )
        self.findings = html(elem_id="stack-findings")
        with gr.Column(visible=False) as self.charts:
            self.plots = grid(drawn(session, None, Preferences(), None))
        self.job = JobCard([], stop, status)
        self.followers = [self.ticked, self.spec]
        """The components that `follow` changes."""

    def build_models(self) -> None:
        gr.HTML(
            "<h3>Draft models</h3><p>Smaller models with the same vocabulary. They draft and the "
            "main model checks. They cost memory, but never change a word.</p>"
        )
        candidates = self.stacks.candidates()
        self.ticked = gr.CheckboxGroup(
            [stack_html.choice(candidate) for candidate in candidates],
            value=[candidate.source for candidate in candidates],
            show_label=False,
            container=False,
            elem_id="stack-models",
        )
        self.box, self.add_button = source_box("stack")
        self.needs = html(elem_id="stack-loaded")
        with gr.Row(elem_classes="presets"):
            self.load_button = small_button("Load", elem_id="stack-load")
            self.unload_button = small_button("Unload", elem_id="stack-unload")

    def wire(self, controls: Settings, compared: gr.Dropdown, keep: Event) -> Sequence[Dependency]:
        """Connect the tab. `keep` is the event that stores changed settings. Returns the events
        that load and unload draft models."""
        self.controls, self.compared = controls, compared
        inputs = [self.ticked, self.spec, *controls.inputs]
        shown: list[Block] = [self.needs, self.ticked, self.profiled, self.plan, self.findings]
        shown += [self.profile_button, self.unload_button, self.measure_button, self.use_button]
        shown += [self.job.status, self.outcome, self.charts, *self.plots]
        others = [self.method, compared]
        refresh = self.event(self.refresh, inputs, shown)
        self.on(self.tab.select, refresh)
        self.on([self.spec.submit, self.spec.blur], refresh, mode="always_last")
        self.on(self.ticked.input, self.tick, self.ticked, self.needs, mode="always_last")
        adding = [self.add_button.click, self.box.submit]
        self.on(adding, self.add, [self.box, self.ticked], [self.box, self.ticked, self.needs])
        loaded = self.on(self.load_button.click, self.load, inputs, [*shown, *others])
        unloaded = self.on(self.unload_button.click, self.unload, inputs, [*shown, *others])
        running = [*shown, self.load_button, self.job.stop]
        self.on(self.profile_button.click, self.profile, inputs, running)
        self.on(self.measure_button.click, self.measure, inputs, running)
        self.on(self.job.stop.click, self.stacks.stop)
        chosen = [self.spec, self.first, *controls.inputs]
        used = self.on(self.use_button.click, self.use, chosen, [self.job.status, *others])
        self.then(used, keep)
        return loaded, unloaded

    @property
    def method(self) -> gr.components.Component:
        return self.controls.parts["method"]

    def follow(self) -> Updates:
        """List the draft models for the loaded model, all ticked. The memory that they need is
        shown when the tab opens."""
        offered = self.stacks.offered
        choices = [(name_of(source), source) for source in offered]
        return {
            self.ticked: gr.update(choices=choices, value=list(offered)),
            self.spec: self.stacks.spec,
        }

    def screen(self, preferences: Preferences, ticked: Sequence[str], spec: str) -> Updates:
        stacks, spec = self.stacks, spec.strip()
        sampling, rule = preferences.generation.sampling, preferences.drafting.rule
        family = stacks.family_for(sampling)
        ready = family is not None and family.profile is not None
        plan, card = None, ""
        if family is not None and ready:
            try:
                plan = family.plan(spec, rule)
            except SettingError as error:
                card, spec = PLAN + markup.finding("differs", "No such plan", str(error)), ""
                plan = family.plan("", rule)
        figures = drawn(self.session, family, preferences, plan, spec)
        return {
            **self.candidates(ticked),
            self.profiled: stack_html.profiled(stacks, sampling),
            self.plan: card
            or stack_html.planned(family, rule, plan, spec, stacks.learned(sampling)),
            self.findings: stack_html.findings(family, rule, plan, stacks.trials),
            self.outcome: stack_html.outcome(stacks.trials) if ready else "",
            self.profile_button: gr.update(interactive=family is not None),
            self.unload_button: gr.update(interactive=family is not None),
            self.measure_button: gr.update(interactive=ready),
            self.use_button: gr.update(interactive=ready),
            self.charts: gr.update(visible=ready),
            **dict(zip(self.plots, figures, strict=True)),
        }

    def candidates(self, ticked: Sequence[str], shown: Sequence[str] | None = None) -> Updates:
        """List the available models with those of `ticked` ticked, and the memory that they need.

        `shown` are the models that the page shows as ticked, if these differ from `ticked`. Ticks
        are sent only if they change, so that a tick which the user sets meanwhile stays.
        """
        offered = self.stacks.candidates()
        update = gr.update(choices=[stack_html.choice(each) for each in offered])
        # A page from before the last load may have ticked models that are gone.
        kept = [each.source for each in offered if each.source in ticked]
        if set(kept) != set(ticked if shown is None else shown):
            update["value"] = kept
        return {self.needs: stack_html.models(self.stacks, offered, kept), self.ticked: update}

    def offers(self) -> Updates:
        return {
            self.method: gr.update(choices=methods(self.session)),
            self.compared: gr.update(choices=methods(self.session)),
        }

    def refresh(self, ticked: Sequence[str], spec: str, *values: object) -> Updates:
        with notify_errors():
            return self.screen(self.controls.read(values)[1], ticked, spec)
        return {self.job.status: gr.skip()}

    def tick(self, ticked: Sequence[str]) -> str:
        return stack_html.models(self.stacks, self.stacks.candidates(), ticked)

    def add(self, source: str, ticked: Sequence[str]) -> Updates:
        sources = list(dict.fromkeys([*ticked, self.stacks.offer(source)]))
        return {self.box: "", **self.candidates(sources, ticked)}

    def load(self, ticked: Sequence[str], spec: str, *values: object) -> Iterator[Updates]:
        yield {self.job.status: markup.fine_print("Loading …")}
        with notify_errors():
            self.stacks.load(ticked)
        yield {**self.refresh(ticked, spec, *values), **self.offers(), self.job.status: ""}

    def unload(self, ticked: Sequence[str], spec: str, *values: object) -> Updates:
        with notify_errors():
            self.stacks.unload()
        return {**self.refresh(ticked, spec, *values), **self.offers()}

    def use(self, spec: str, first: bool, *values: object) -> Updates:
        _, preferences = self.controls.read(values)
        sampling = preferences.generation.sampling
        name = self.stacks.choose(spec, sampling, preferences.drafting, first)
        text = f"The chat now drafts with {name}. Settings and Compare offer it too."
        found = {**self.offers(), self.job.status: markup.fine_print(text)}
        return {**found, self.method: gr.update(choices=methods(self.session), value=name)}

    def profile(self, ticked: Sequence[str], spec: str, *values: object) -> Iterator[Updates]:
        def start(chosen: Preferences) -> Iterator[float]:
            return self.stacks.profile(chosen.generation.sampling)

        yield from self.run_job("Profiling", start, ticked, spec, *values)

    def measure(self, ticked: Sequence[str], spec: str, *values: object) -> Iterator[Updates]:
        def start(chosen: Preferences) -> Iterator[float]:
            return self.stacks.measure(chosen.generation.sampling, chosen.drafting, spec)

        yield from self.run_job("Measuring", start, ticked, spec, *values)

    def run_job(
        self,
        title: str,
        start: Callable[[Preferences], Iterator[float]],
        ticked: Sequence[str],
        spec: str,
        *values: object,
    ) -> Iterator[Updates]:
        job = self.job
        buttons = (self.profile_button, self.measure_button, self.load_button, self.unload_button)

        def reports() -> Iterator[Progress]:
            pace = Pace(LOOK_SECONDS)
            for share in start(self.controls.read(values)[1]):
                if pace.due():
                    yield Progress(share, title)

        def failed(error: StrataError) -> str:
            warn(str(error))
            return ""

        yield {**job.busy(*buttons), job.status: markup.progress(Progress(0.0, title))}
        text = yield from job.follow(reports(), lambda last: "", failed)
        yield {**job.idle(*buttons), **self.refresh(ticked, spec, *values), job.status: text}
