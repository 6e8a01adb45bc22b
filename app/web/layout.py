"""The interface, assembled: what stands where, and what happens when a page opens."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from html import escape

import gradio as gr
from gradio.blocks import Block

from app.service.drafters import line
from app.service.session import Session
from app.web import colors, guide
from app.web.gradio_app import without_apps
from app.web.gradio_status import KEEP_NO_STATUS
from app.web.gradio_timers import STOP_CLOCKS
from app.web.stack_html import millions
from app.web.tabs import (
    api,
    benchmark,
    catalogue,
    chat,
    chat_view,
    compare,
    composer,
    conversations,
    databases,
    diagnostics,
    models,
    presets,
    race,
    replay,
    settings,
    stack,
    why,
)
from app.web.tabs.loading import UPDATE_SECONDS
from app.web.wiring import AFTER, AT_ONCE, Event, Memory, Updates
from assets import ASSETS
from engine.settings import Sampling

UPLOADS_KEPT = (600, 3600)
"""Every ten minutes uploads go that are an hour old: what is read is deleted at once, but a page
may send a file and then never have it read."""
Shown = tuple[str, Sampling]
"""What names the model that a page shows, "" while there is none, and its makers' sampler."""
SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "sans-serif")
MONO = ("ui-monospace", "SF Mono", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")

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
"""The style sheets, in the order in which they are read: a later one has the last word."""

DIAGNOSTICS = "diagnostics"
"""The id of that tab, which replays answers."""

SWITCH_THEME = """() => {
  const dark = document.body.classList.toggle("dark");
  localStorage.setItem("strata-theme", dark ? "dark" : "light");
}"""
RESTORE_THEME = """() => {
  const chosen = localStorage.getItem("strata-theme");
  if (chosen) document.body.classList.toggle("dark", chosen === "dark");
}"""
OPENED = """() => { document.documentElement.dataset.opened = ""; }"""
"""The page shows all that it opens with. Who drives a page waits for this, and not for a time."""
LOG_OUT = """async () => {
  await fetch("/logout", { method: "POST" });
  location.reload();
}"""


def theme() -> gr.themes.Base:
    """Quiet greys, one accent, fonts that every system has: nothing is fetched."""
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
        body_background_fill="#fcfcfd",
        body_background_fill_dark="#101319",
        background_fill_primary="#ffffff",
        background_fill_primary_dark="#161a22",
        background_fill_secondary="#f5f6f8",
        background_fill_secondary_dark="#1b202a",
        border_color_primary="#dfe3ea",
        border_color_primary_dark="#2b313d",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_label_background_fill="transparent",
        block_info_text_color="#667189",
        block_info_text_color_dark="#94a0b8",
        block_title_text_color="*body_text_color",
        block_title_text_weight="550",
        input_background_fill="#ffffff",
        input_background_fill_dark="#181d26",
        input_placeholder_color="#667189",
        input_placeholder_color_dark="#94a0b8",
        input_border_width="1px",
        input_border_color="#d5dae3",
        input_border_color_dark="#323947",
        input_border_color_focus="#64708a",
        input_border_color_focus_dark="#8792a6",
        button_primary_background_fill="#2f3a52",
        button_primary_background_fill_hover="#3d4a66",
        button_primary_background_fill_dark="#4a587a",
        button_primary_background_fill_hover_dark="#5a6a90",
        button_secondary_background_fill="#eef0f4",
        button_secondary_background_fill_dark="#232936",
        slider_color="#64708a",
        slider_color_dark="#8792a6",
    )


def css() -> str:
    """The palette's rules, then the style sheets."""
    files = (ASSETS / "styles" / f"{name}.css" for name in STYLES)
    return colors.variables() + "\n".join(file.read_text(encoding="utf-8") for file in files)


def header(session: Session, notices: Sequence[str]) -> str:
    """Logo, name, model, and what the user should know about it; all of it escaped."""
    info, models = session.current.info, session.models
    facts = facts_of(session) if models.there else []
    loading = models.loading
    if loading:
        share = f" {100 * loading.share:.0f} %" if loading.share is not None else ""
        facts.append(loading.words + share)
    drafted = line(info, list(session.stacks.drafts)) if models.there else ""
    notes = [info.note] if info.note and (models.there or not loading) else []
    if models.demonstration:
        where = "" if session.guests else " Load your own in the Models tab."
        notes.append(
            "This small demonstration model writes fluent English but knows almost nothing." + where
        )
    lines = f'<p class="note drafted">{escape(drafted)}</p>' if drafted else ""
    lines += "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    said = [*notices, *models.notices]
    if models.problem and not models.there:
        said.append(models.problem)
    lines += "".join(f'<p class="notice">{escape(notice)}</p>' for notice in said)
    return brand(info.name if models.there or loading else "", facts) + lines


def brand(model: str, facts: Sequence[str] = ()) -> str:
    """Logo, name, and the model's name with its facts."""
    logo = (ASSETS / "logo.svg").read_text(encoding="utf-8")
    return (
        f'<div class="brand">{logo}<h1>Strata</h1><span class="model">{escape(model)}</span>'
        f'<span class="facts">{escape(" · ".join(facts))}</span></div>'
    )


def facts_of(session: Session) -> list[str]:
    """What the header says of the loaded model."""
    info = session.current.info
    if info.server is not None:
        length = f"{info.context_length:,}" if info.context_length else "not told"
        return [f"on the server {info.server.host}", f"context {length}"]
    facts = [millions(info.parameters)] if info.parameters else []
    facts += [info.device, info.dtype, f"context {info.context_length:,}"]
    facts.append("compiled core" if session.current.state.compiled else "core in Python")
    plain = session.current.plain
    if plain.tokens_per_second:
        speed = f"{plain.tokens_per_second:,.0f} tokens/s"
        facts.append(f"plain decoding {speed}, measured {plain.when}")
    return facts


def invitation(session: Session) -> str:
    """What the empty composer says."""
    name = session.current.info.name
    if session.models.there:
        return composer.invitation(name)
    if session.models.loading:
        return f"{name} is loading. Write now; it answers as soon as it is ready."
    return "No model is loaded"


def build(session: Session, notices: Sequence[str] = (), password: bool = False) -> gr.Blocks:
    """All tabs, wired. Guests get no models, no stack, no databases and no API tab, so that the
    events of these do not exist for them. Where a `password` let them in, they can log out."""
    blocks: gr.Blocks
    with (
        without_apps(),
        gr.Blocks(
            title="Strata", fill_width=True, analytics_enabled=False, delete_cache=UPLOADS_KEPT
        ) as blocks,
    ):
        memory = gr.BrowserState({}, storage_key="strata", secret="strata")
        current = gr.State(None)
        # Pages that open later begin with this too, so it says nothing that passes.
        name = brand(session.current.info.name)
        with gr.Row(elem_id="top"):
            head = gr.HTML(name, elem_id="header", apply_default_css=False)
            theme_switch, leave = guide.switches(password)
        drafts, choice, access, starters = None, None, None, list[catalogue.Card]()
        with gr.Tabs(elem_id="tabs") as tabs:
            with gr.Tab("Chat"), gr.Row(elem_classes="chat"):
                shelf = conversations.build()
                talk = chat.build(session)
                told = why.build()
            with gr.Tab("Compare") as comparing:
                pair = compare.build(session)
            with gr.Tab("Diagnostics", id=DIAGNOSTICS) as tab:
                runs = diagnostics.build(tab, session)
            if not session.guests:
                with talk.empty:
                    starters = catalogue.build_starter("starter", session)
                with gr.Tab("Benchmark") as tab:
                    measured = benchmark.build(tab, session)
                with gr.Tab("Stack") as tab:
                    drafts = stack.build(tab, session)
                with gr.Tab("Models") as tab:
                    choice = models.build(tab, session, starters)
                with gr.Tab("Databases") as tab:
                    tiers = databases.build(tab)
                with gr.Tab("API") as tab:
                    access = api.build(tab, session)
            with gr.Tab("Settings"):
                saved = presets.build()
                controls = settings.build(session)
        guide.guide()
        listing, opening = conversations.wire(session, shelf, talk, controls, current, memory)
        chat.wire(session, talk, controls, current, memory, listing)
        compare.wire(session, pair, controls, memory, comparing)
        diagnostics.wire(session, runs, memory)
        race.wire(session, talk.race, memory)
        why.wire(session, talk.tokens, told, memory)
        replay.wire_chat(session, runs.replay, talk.tokens, tabs, DIAGNOSTICS, runs.shown, memory)
        keep = settings.wire(session, controls, current, memory)
        boxes = [card.box for card in starters if card.box is not None]
        shown = talk, pair, runs, controls, drafts
        follow = following(session, head, notices, *shown, current, boxes)
        waited, coming = gr.State(0), gr.State(False)
        shelved = shelf.new, shelf.start_from
        begin = presets.wire(session, saved, shelved, controls, current, memory, keep)
        loaded = waited.change(*follow, **AT_ONCE).then(*begin, **AFTER)
        if drafts is not None and choice is not None and access is not None:
            for event in stack.wire(session, drafts, controls, pair.method, keep):
                event.then(lambda: header(session, notices), None, head, **AFTER)
            loaded.then(*models.wire(session, choice, (follow, begin)), **AFTER)
            databases.wire(session, tiers, current, memory)
            api.wire(session, access)
            benchmark.wire(session, measured, controls, memory)
        wait = waiting(session, head, notices, talk.box, waited, coming)
        steps = follow, begin, listing.refresh, opening, wait
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
    talk: chat_view.Parts,
    pair: compare.Parts,
    runs: diagnostics.Parts,
    controls: settings.Controls,
    drafts: stack.Parts | None,
    current: gr.State,
    starters: Sequence[gr.Column] = (),
) -> Event:
    """The event by which a page shows the model that is loaded now, if it shows another one.
    `starters` are there while that is the demonstration model.

    The sampler on the page stays where the model's makers want the one that it had, and where a
    conversation with settings of its own was open before there was a model.
    """
    shown = gr.State(())

    def follow(
        before: Shown | tuple[()] | None,
        method: str,
        length: float | None,
        compared: str,
        conversation: str | None,
    ) -> Updates:
        models, wanted = session.models, session.current.info.sampling
        now = (repr((models.source, models.runtime)) if models.there else "", wanted)
        if now == before:
            return {shown: gr.skip()}
        had, before_wanted = before or ("", None)
        sampler = before_wanted != wanted and not (before and not had and conversation)
        offered = compare.choices(session)
        other = compared if settings.usable(session, compared) else settings.USUAL_METHOD
        return {
            shown: now,
            head: header(session, notices),
            talk.box: gr.update(placeholder=invitation(session)),
            pair.method: gr.update(choices=offered, value=other),
            pair.verdict: gr.skip() if had else compare.idle(session),
            **controls.follow(session, method, length, sampler),
            **({runs.again: gr.update(visible=session.costs.wanted)} if runs.again else {}),
            **{box: gr.update(visible=models.demonstration) for box in starters},
            **(stack.follow(session, drafts) if drafts else {}),
        }

    parts = controls.parts
    inputs = [shown, parts["method"], parts["max_tokens"], pair.method, current]
    outputs: list[Block] = [shown, head, talk.box, pair.method, pair.verdict]
    outputs += [*controls.followers, *starters]
    outputs += [runs.again] if runs.again else []
    return Event(follow, inputs, [*outputs, *(stack.followers(drafts) if drafts else ())])


def waiting(
    session: Session,
    head: gr.HTML,
    notices: Sequence[str],
    box: gr.Textbox,
    waited: gr.State,
    coming: gr.State,
) -> Event:
    """The event by which a page that opens while a model is being loaded says how far that is. It
    ends with the load, and changes `waited` if there was one: now, or when the page began to open,
    which `coming` knows."""

    def said() -> Updates:
        placeholder = gr.update(placeholder=invitation(session))
        return {head: header(session, notices), box: placeholder}

    async def wait(coming: bool) -> AsyncIterator[Updates]:
        before = None
        while (now := session.models.loading) is not None:
            if now != before:
                yield said()
            before = now
            await asyncio.sleep(UPDATE_SECONDS)
        # Of an event that changes nothing Gradio empties what it could have changed.
        yield {**said(), waited: 1} if coming or before is not None else {waited: gr.skip()}

    return Event(wait, coming, [head, box, waited])


def wire_page(
    session: Session,
    blocks: gr.Blocks,
    memory: gr.BrowserState,
    current: gr.State,
    coming: gr.State,
    steps: Sequence[Event],
) -> None:
    """A page that opens takes these steps, one after the other, to show the loaded model and what
    its browser had open; `coming` is whether a model was being loaded then. One that closes is
    forgotten."""

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
