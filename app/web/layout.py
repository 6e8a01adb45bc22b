"""Assembles the interface from its tabs, and wires what happens when a page opens.

Around the tabs are the header with the model, and help, tour and simple mode, which run in the
browser (assets/guide.js). A native select element lies over the model's name, so that another model
can be chosen with the keyboard, with a screen reader and on a phone. The Models tab loads the
chosen model (app/web/tabs/models.py).
"""

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import gradio as gr
from gradio.blocks import Block

from app.service.current import line
from app.service.models import Models
from app.service.session import Session
from app.web import colors, models_html
from app.web.gradio_workarounds import KEEP_NO_STATUS, STOP_CLOCKS, without_apps
from app.web.kit import AFTER, AT_ONCE, Event, Memory, Updates, html, small_button, watched
from app.web.markup import millions, template
from app.web.metrics_panel import pace
from app.web.tabs import (
    api,
    benchmark,
    catalogue,
    chat,
    compare,
    composer,
    conversations,
    databases,
    diagnostics,
    models,
    settings,
    stack,
    tools,
    welcome,
    why,
)
from assets import read
from engine.errors import StrataError
from engine.settings import Sampling

UPLOADS_KEPT = (600, 3600)
"""Every ten minutes, uploads that are an hour old are deleted. An upload that was read is deleted
at once, but a page may upload a file that is never read."""
Shown = tuple[str, Sampling]
"""The name of the model that a page shows ("" without one), and its recommended sampler."""
SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "sans-serif")
MONO = ("ui-monospace", "SF Mono", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")

LOOK = {
    "body_background_fill": ("#fcfcfd", "#101319"),
    "background_fill_primary": ("#ffffff", "#161a22"),
    "background_fill_secondary": ("#f5f6f8", "#1b202a"),
    "border_color_primary": ("#dfe3ea", "#2b313d"),
    "block_background_fill": ("transparent", "transparent"),
    "block_border_width": ("0px",),
    "block_label_background_fill": ("transparent",),
    "block_info_text_color": ("#667189", "#94a0b8"),
    "block_title_text_color": ("*body_text_color",),
    "block_title_text_weight": ("550",),
    "input_background_fill": ("#ffffff", "#181d26"),
    "input_placeholder_color": ("#667189", "#94a0b8"),
    "input_border_width": ("1px",),
    "input_border_color": ("#d5dae3", "#323947"),
    "input_border_color_focus": ("#64708a", "#8792a6"),
    "button_primary_background_fill": ("#2f3a52", "#4a587a"),
    "button_primary_background_fill_hover": ("#3d4a66", "#5a6a90"),
    "button_secondary_background_fill": ("#eef0f4", "#232936"),
    "slider_color": ("#64708a", "#8792a6"),
}
"""Values of the theme in light mode and, where they differ, in dark mode."""

STYLES = (
    "base",
    "chat",
    "list",
    "messages",
    "composer",
    "figures",
    "tabs",
    "why",
    "guide",
    "small",
)
"""The style sheets. A later one overrides an earlier one."""

SWITCH_THEME = """() => {
  const dark = document.body.classList.toggle("dark");
  localStorage.setItem("strata-theme", dark ? "dark" : "light");
}"""
RESTORE_THEME = """() => {
  const chosen = localStorage.getItem("strata-theme");
  if (chosen) document.body.classList.toggle("dark", chosen === "dark");
}"""
OPENED = """() => { document.documentElement.dataset.opened = ""; }"""
"""Marks the page as fully opened. Programs that drive a page, such as the browser tests, wait for
this mark."""
LOG_OUT = """async () => {
  await fetch("/logout", { method: "POST" });
  location.reload();
}"""


def theme() -> gr.themes.Base:
    """Quiet greys and one accent, with fonts of the system, so that nothing is fetched."""
    return gr.themes.Base(
        primary_hue=gr.themes.colors.slate,
        secondary_hue=gr.themes.colors.slate,
        neutral_hue=gr.themes.colors.slate,
        radius_size=gr.themes.sizes.radius_md,
        spacing_size=gr.themes.sizes.spacing_sm,
        text_size=gr.themes.sizes.text_md,
        font=[gr.themes.Font(name) for name in SANS],
        font_mono=[gr.themes.Font(name) for name in MONO],
    ).set(
        **{
            f"{name}{mode}": value
            for name, values in LOOK.items()
            for mode, value in zip(("", "_dark"), values, strict=False)
        }
    )


def css() -> str:
    return colors.variables() + read(*(f"styles/{name}.css" for name in STYLES))


def model_choices(models: Models) -> list[tuple[str, str]]:
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
    curve, drafts = session.costs.curve, list(session.stacks.drafts)
    drafted = line(info, drafts, curve.points if curve else None)
    return brand(
        info.name if models.is_loaded or loading else "",
        facts=facts,
        plain=pace(session.current.plain) if models.is_loaded and info.server is None else "",
        drafted=drafted if models.is_loaded else "",
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


def build(session: Session, notices: Sequence[str] = (), password: bool = False) -> gr.Blocks:
    """Build and wire all tabs. With a `password`, users can log out."""
    return Page(session, notices, password).blocks


class Page:
    """The tabs, and the events that concern the page as a whole.

    Guests have no Benchmark, Stack, Models, Databases and API tabs, so the events of these tabs do
    not exist for them. `shown` holds the model that a page shows. `coming` holds whether a model
    was being loaded when the page began to open, and `waited` changes when it is loaded.
    """

    drafts: stack.StackTab | None = None
    choice: models.ModelsTab | None = None

    def __init__(
        self, session: Session, notices: Sequence[str] = (), password: bool = False
    ) -> None:
        self.session, self.notices = session, notices
        self.blocks: gr.Blocks
        with (
            without_apps(),
            gr.Blocks(
                title="Strata", fill_width=True, analytics_enabled=False, delete_cache=UPLOADS_KEPT
            ) as self.blocks,
        ):
            self.memory = gr.BrowserState({}, storage_key="strata", secret="strata")
            self.current, self.shown = gr.State(None), gr.State(())
            self.waited, self.coming = gr.State(0), gr.State(False)
            self.kept = settings.hidden_text()
            with gr.Row(elem_id="top"):
                # Pages that open later begin with this text too, so it holds nothing that changes.
                name = brand(session.current.info.name)
                self.head = html(name, js_on_load=read("pick.js"), elem_id="header")
                theme_switch, leave = switches(password)
            self.build()
            guide()
            self.wire()
            for once in (RESTORE_THEME, KEEP_NO_STATUS, STOP_CLOCKS):
                self.blocks.load(None, js=once, **AT_ONCE)
            theme_switch.click(None, js=SWITCH_THEME, **AT_ONCE)
            leave.click(None, js=LOG_OUT, **AT_ONCE)

    def build(self) -> None:
        session, memory = self.session, self.memory
        self.starters: list[catalogue.Card] = []
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Chat"), gr.Row(elem_classes="chat"):
                self.shelf = conversations.ConversationList(session, memory, self.current)
                self.chat = chat.Chat(session, memory, self.current)
                why.Why(session, memory, self.chat.tokens.explain)
            with gr.Tab("Compare") as self.comparing:
                self.pair = compare.Compare(session, memory)
            with gr.Tab("Diagnostics") as tab:
                self.runs = diagnostics.Diagnostics(session, memory, tab)
            if not session.guests:
                with self.chat.empty:
                    self.starters = catalogue.build_starter("starter", session)
                with gr.Tab("Benchmark") as tab:
                    self.measured = benchmark.BenchmarkTab(session, memory, tab)
                with gr.Tab("Stack") as tab:
                    self.drafts = stack.StackTab(session, memory, tab)
                with gr.Tab("Models") as tab:
                    self.choice = models.ModelsTab(session, memory, tab, self.starters)
                with gr.Tab("Databases") as tab:
                    self.tiers = databases.Databases(session, memory, tab)
                with gr.Tab("API") as tab:
                    self.access = api.Programs(session, memory, tab)
            with gr.Tab("Settings") as tab:
                ready = self.chat.composer.channels["ready"]
                self.saved = settings.Presets(session, memory, self.shelf.start_from, ready)
                temperature = {"temperature": self.chat.temperature}
                self.controls = settings.Settings(session, memory, temperature, self.kept)
                if not session.guests:
                    self.tools = tools.Tools(session, memory, tab)

    def wire(self) -> None:
        controls, current = self.controls, self.current
        redraw = Event(self.header, None, self.head)
        opening = self.shelf.wire(self.chat, controls)
        self.chat.wire(controls, self.shelf.with_list)
        compared = self.pair.wire(controls, self.comparing)
        compared.then(*redraw, **AFTER)
        replayed = self.chat.tokens.replay, self.runs.replay, self.runs.shown
        why.Replay(self.session, self.memory, *replayed)
        self.runs.wire()
        self.chat.race.wire()
        keep = controls.wire(current)
        follow = self.following()
        begin = self.saved.wire(controls, current, keep)
        loaded = self.waited.change(*follow, **AT_ONCE).then(*begin, **AFTER)
        if self.drafts is not None and self.choice is not None:
            for event in self.drafts.wire(controls, self.pair.method, keep):
                event.then(*redraw, **AFTER)
            loaded.then(*self.choice.wire((follow, begin), redraw), **AFTER)
            self.tiers.wire(current)
            self.access.wire()
            self.tools.wire()
            self.measured.wire(controls)
        waiting = Event(self.wait, self.coming, [self.head, self.chat.composer.box, self.waited])
        # A page shows the loaded model and the conversation that was open in its browser.
        opened = [self.memory, current, self.coming]
        event = self.blocks.load(None, None, self.kept, js=settings.READ_KEPT, **AT_ONCE)
        event = event.then(self.arrive, self.memory, opened, **AFTER)
        for step in (follow, begin, self.shelf.refresh, opening, waiting):
            event = event.then(*step, **AFTER)
        event.then(None, js=OPENED, **AFTER)
        self.blocks.unload(self.leave)

    def header(self) -> str:
        return header(self.session, self.notices)

    def invitation(self) -> Updates:
        """The placeholder of the composer."""
        name, models = self.session.current.info.name, self.session.models
        text = "No model is loaded"
        if models.is_loaded:
            text = composer.invitation(name)
        elif models.loading:
            text = f"{name} is loading. Write now; it answers as soon as it is ready."
        return {self.chat.composer.box: gr.update(placeholder=text)}

    def following(self) -> Event:
        """The event that updates a page which does not show the model that is loaded now."""
        parts, again = self.controls.parts, self.runs.again_button
        inputs = [self.shown, parts["method"], parts["max_tokens"], self.pair.method, self.current]
        outputs: list[Block] = [self.shown, self.head, self.chat.composer.box]
        outputs += [self.pair.method, self.pair.verdict]
        outputs += [*self.chat.examples, *self.controls.followers]
        outputs += [card.box for card in self.starters if card.box is not None]
        outputs += [again] if again else []
        outputs += self.drafts.followers if self.drafts else []
        return Event(self.follow, inputs, outputs)

    def follow(
        self,
        before: Shown | tuple[()] | None,
        method: str,
        length: float | None,
        compared: str,
        conversation: str | None,
    ) -> Updates:
        """Show the loaded model, if the page shows another one (`before`).

        The sampler on the page stays in two cases: the new model has the same recommended sampler
        as the previous one, or a conversation with its own settings was open before a model was
        loaded.
        """
        session, pair, models = self.session, self.pair, self.session.models
        sampling = session.current.info.sampling
        now = (repr((models.source, models.runtime)) if models.is_loaded else "", sampling)
        if now == before:
            return {self.shown: gr.skip()}
        had, before_sampling = before or ("", None)
        sampler = before_sampling != sampling and not (before and not had and conversation)
        other = compared if settings.usable(session, compared) else settings.USUAL_METHOD
        updates: Updates = {
            self.shown: now,
            self.head: self.header(),
            **self.invitation(),
            **welcome.suggest(models, self.chat.examples),
            pair.method: gr.update(choices=settings.methods(session), value=other),
            pair.verdict: gr.skip() if had else compare.idle(session),
            **self.controls.follow(method, length, sampler),
        }
        if self.runs.again_button:
            can_tree = session.engine.state.info.can_tree
            updates[self.runs.again_button] = gr.update(visible=can_tree)
        for card in self.starters:
            if card.box is not None:
                updates[card.box] = gr.update(visible=models.demonstration)
        return {**updates, **(self.drafts.follow() if self.drafts else {})}

    async def wait(self, coming: bool) -> AsyncIterator[Updates]:
        """Show the progress of a load on a page that opens meanwhile, until the load ends."""
        before = None
        while (job := self.session.models.slot.running) is not None:
            async for now in watched(job):
                if now != before:
                    yield {self.head: self.header(), **self.invitation()}
                before = now
        # If an event changes nothing, Gradio empties the components that it could have changed.
        if coming or before is not None:
            yield {self.head: self.header(), **self.invitation(), self.waited: 1}
        else:
            yield {self.waited: gr.skip()}

    def arrive(self, memory: Memory) -> tuple[Memory, str | None, bool]:
        remembered = dict(memory or {})
        remembered.setdefault("browser", secrets.token_urlsafe(18))
        loading = self.session.models.loading is not None
        return remembered, remembered.get("conversation"), loading

    def leave(self, request: gr.Request) -> None:
        """Forget a page that closes."""
        session = self.session
        for known in (session.viewing, session.drawn, session.listed):
            known.pop(request.session_hash or "", None)
