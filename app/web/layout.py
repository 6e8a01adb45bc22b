"""Assembles the interface from its tabs, and wires what happens when a page opens."""

import secrets
from collections.abc import AsyncIterator, Sequence

import gradio as gr
from gradio.blocks import Block

from app.service.session import Session
from app.web import colors
from app.web.gradio_workarounds import KEEP_NO_STATUS, STOP_CLOCKS, without_apps
from app.web.header import brand, guide, header, switches
from app.web.kit import AFTER, AT_ONCE, Event, Memory, Updates, html, watched
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
    welcome,
    why,
)
from assets import read
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


def invitation(session: Session) -> str:
    name = session.current.info.name
    if session.models.is_loaded:
        return composer.invitation(name)
    if session.models.loading:
        return f"{name} is loading. Write now; it answers as soon as it is ready."
    return "No model is loaded"


def build(session: Session, notices: Sequence[str] = (), password: bool = False) -> gr.Blocks:
    """Build and wire all tabs. Guests have no Benchmark, Stack, Models, Databases and API tabs, so
    the events of these tabs do not exist for them. With a `password`, users can log out."""
    blocks: gr.Blocks
    with (
        without_apps(),
        gr.Blocks(
            title="Strata", fill_width=True, analytics_enabled=False, delete_cache=UPLOADS_KEPT
        ) as blocks,
    ):
        memory = gr.BrowserState({}, storage_key="strata", secret="strata")
        current = gr.State(None)
        # Pages that open later begin with this text too, so it holds nothing that changes.
        name = brand(session.current.info.name)
        with gr.Row(elem_id="top"):
            head = html(name, js_on_load=read("pick.js"), elem_id="header")
            theme_switch, leave = switches(password)
        drafts, choice, access, starters = None, None, None, list[catalogue.Card]()
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Chat"), gr.Row(elem_classes="chat"):
                shelf = conversations.ConversationList(session, memory, current)
                chat_tab = chat.Chat(session, memory, current)
                why.Why(session, memory, chat_tab.tokens.explain)
            with gr.Tab("Compare") as comparing:
                pair = compare.Compare(session, memory)
            with gr.Tab("Diagnostics") as tab:
                runs = diagnostics.Diagnostics(session, memory, tab)
            if not session.guests:
                with chat_tab.empty:
                    starters = catalogue.build_starter("starter", session)
                with gr.Tab("Benchmark") as tab:
                    measured = benchmark.BenchmarkTab(session, memory, tab)
                with gr.Tab("Stack") as tab:
                    drafts = stack.StackTab(session, memory, tab)
                with gr.Tab("Models") as tab:
                    choice = models.ModelsTab(session, memory, tab, starters)
                with gr.Tab("Databases") as tab:
                    tiers = databases.Databases(session, memory, tab)
                with gr.Tab("API") as tab:
                    access = api.Programs(session, memory, tab)
            with gr.Tab("Settings"):
                saved = settings.Presets(session, memory, shelf.start_from)
                controls = settings.Settings(session, memory, {"temperature": chat_tab.temperature})
        guide()
        redraw = Event(lambda: header(session, notices), None, head)
        opening = shelf.wire(chat_tab, controls)
        chat_tab.wire(controls, shelf)
        compared = pair.wire(controls, comparing)
        compared.then(*redraw, **AFTER)
        why.Replay(session, memory, chat_tab.tokens.replay, runs.replay, runs.shown)
        runs.wire()
        chat_tab.race.wire()
        keep = controls.wire(current)
        boxes = [card.box for card in starters if card.box is not None]
        shown = chat_tab, pair, runs, controls, drafts
        follow = following(session, head, notices, *shown, current, boxes)
        waited, coming = gr.State(0), gr.State(False)
        begin = saved.wire(shelf.new_button, controls, current, keep)
        loaded = waited.change(*follow, **AT_ONCE).then(*begin, **AFTER)
        if drafts is not None and choice is not None and access is not None:
            for event in drafts.wire(controls, pair.method, keep):
                event.then(*redraw, **AFTER)
            loaded.then(*choice.wire((follow, begin), redraw), **AFTER)
            tiers.wire(current)
            access.wire()
            measured.wire(controls)
        wait = waiting(session, head, notices, chat_tab.composer.box, waited, coming)
        steps = follow, begin, shelf.refresh, opening, wait
        wire_page(session, blocks, memory, current, coming, steps)
        for once in (RESTORE_THEME, KEEP_NO_STATUS, STOP_CLOCKS):
            blocks.load(None, js=once, **AT_ONCE)
        theme_switch.click(None, js=SWITCH_THEME, **AT_ONCE)
        leave.click(None, js=LOG_OUT, **AT_ONCE)
    return blocks


def following(
    session: Session,
    head: gr.HTML,
    notices: Sequence[str],
    chat_tab: chat.Chat,
    pair: compare.Compare,
    runs: diagnostics.Diagnostics,
    controls: settings.Settings,
    drafts: stack.StackTab | None,
    current: gr.State,
    starters: Sequence[gr.Column] = (),
) -> Event:
    """The event that updates a page which does not show the model that is loaded now. `starters`
    are visible while the demonstration model is loaded.

    The sampler on the page stays in two cases: the new model has the same recommended sampler as
    the previous one, or a conversation with its own settings was open before a model was loaded.
    """
    shown = gr.State(())

    def follow(
        before: Shown | tuple[()] | None,
        method: str,
        length: float | None,
        compared: str,
        conversation: str | None,
    ) -> Updates:
        models, sampling = session.models, session.current.info.sampling
        now = (repr((models.source, models.runtime)) if models.is_loaded else "", sampling)
        if now == before:
            return {shown: gr.skip()}
        had, before_sampling = before or ("", None)
        sampler = before_sampling != sampling and not (before and not had and conversation)
        offered = settings.methods(session)
        other = compared if settings.usable(session, compared) else settings.USUAL_METHOD
        return {
            shown: now,
            head: header(session, notices),
            chat_tab.composer.box: gr.update(placeholder=invitation(session)),
            **welcome.suggest(models, chat_tab.examples),
            pair.method: gr.update(choices=offered, value=other),
            pair.verdict: gr.skip() if had else compare.idle(session),
            **controls.follow(method, length, sampler),
            **(
                {runs.again_button: gr.update(visible=session.engine.state.info.can_tree)}
                if runs.again_button
                else {}
            ),
            **{box: gr.update(visible=models.demonstration) for box in starters},
            **(drafts.follow() if drafts else {}),
        }

    parts = controls.parts
    inputs = [shown, parts["method"], parts["max_tokens"], pair.method, current]
    outputs: list[Block] = [shown, head, chat_tab.composer.box, pair.method, pair.verdict]
    outputs += [*chat_tab.examples, *controls.followers, *starters]
    outputs += [runs.again_button] if runs.again_button else []
    return Event(follow, inputs, [*outputs, *(drafts.followers if drafts else ())])


def waiting(
    session: Session,
    head: gr.HTML,
    notices: Sequence[str],
    box: gr.Textbox,
    waited: gr.State,
    coming: gr.State,
) -> Event:
    """The event that shows the progress of a load on a page that opens meanwhile. It ends with the
    load. It changes `waited` if a model was being loaded, either now or when the page began to open
    (`coming`)."""

    def shown() -> Updates:
        placeholder = gr.update(placeholder=invitation(session))
        return {head: header(session, notices), box: placeholder}

    async def wait(coming: bool) -> AsyncIterator[Updates]:
        before = None
        while (job := session.models.slot.running) is not None:
            async for now in watched(job):
                if now != before:
                    yield shown()
                before = now
        # If an event changes nothing, Gradio empties the components that it could have changed.
        yield {**shown(), waited: 1} if coming or before is not None else {waited: gr.skip()}

    return Event(wait, coming, [head, box, waited])


def wire_page(
    session: Session,
    blocks: gr.Blocks,
    memory: gr.BrowserState,
    current: gr.State,
    coming: gr.State,
    steps: Sequence[Event],
) -> None:
    """Run the `steps` one after the other when a page opens, so that it shows the loaded model and
    the conversation that was open in its browser. `coming` becomes whether a model was being loaded
    then. When a page closes, the session forgets it."""

    def arrive(memory: Memory) -> tuple[Memory, str | None, bool]:
        remembered = dict(memory or {})
        remembered.setdefault("browser", secrets.token_urlsafe(18))
        loading = session.models.loading is not None
        return remembered, remembered.get("conversation"), loading

    def leave(request: gr.Request) -> None:
        for known in (session.viewing, session.drawn, session.listed):
            known.pop(request.session_hash or "", None)

    event = blocks.load(arrive, memory, [memory, current, coming], **AT_ONCE)
    for step in steps:
        event = event.then(*step, **AFTER)
    event.then(None, js=OPENED, **AFTER)
    blocks.unload(leave)
