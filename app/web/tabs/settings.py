"""The Settings tab: how the next answer is sampled and drafted, and presets of these settings.

The ranges and help texts of numbers come from engine/settings.py. Settings that a chat rarely needs
are under "Advanced". A preset changes the settings on the page. A conversation keeps the settings
with which it began, so changing or deleting a preset later changes no conversation.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from functools import partial
from html import escape
from typing import Any

import gradio as gr
from gradio.blocks import Block

from app.service.pages import Download
from app.service.preferences import DEFAULT_TOKENS, Preferences
from app.service.session import Session
from app.web.colors import ink
from app.web.kit import (
    AFTER,
    AT_ONCE,
    LATEST,
    Event,
    Tab,
    Updates,
    html,
    notify_errors,
    numbered,
    small_button,
    text_file,
    upload_button,
    upload_content,
    warn,
)
from engine.errors import SettingError, StrataError
from engine.methods import USUAL, method_named, offered, served
from engine.settings import (
    ANY_OBJECT,
    BUDGETS,
    AnswerFormat,
    Drafting,
    Generation,
    Sampling,
    ThinkingChoice,
)
from engine.text import well_formed
from engine.types import TIERS, Rule
from storage.presets import MAX_NAME, StoredPreset

SAMPLERS = {
    "Exact": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "Balanced": {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.1},
    "Lively": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.05},
}
SLIDER_STEPS = 2_000
"""A setting with more steps than this has a box to type in instead of a slider."""
USUAL_METHOD = USUAL.name
FOLLOWING = (
    *(f.name for f in fields(Sampling) if f.name != "seed"),
    "max_tokens",
    "method",
    "thinking",
)
"""The settings that change when another model is loaded."""
SAME = "(value) => value"
"""The script that copies a component's value to another component, without the server."""
STORE_KEPT = """(text) => {
  try {
    if (text) sessionStorage.setItem("strata-settings", text);
  } catch {
    // The browser's storage is full or disabled.
  }
}"""
READ_KEPT = """() => {
  try {
    return sessionStorage.getItem("strata-settings") || "";
  } catch {
    return "";
  }
}"""
"""The scripts with which the browser keeps the settings of a page. Another page, also one that is
opened later, begins with the settings of its own."""
THINKING: dict[str, bool | None] = {"Model default": None, "On": True, "Off": False}
VERIFICATION: dict[str, Rule] = {"Same text": "match", "Same distribution": "rejection"}


JSON = "object"
"""The choice of any JSON object."""
FORMAT_CHOICES = {
    "Any text": "",
    "JSON": JSON,
    "JSON with a schema": "json_schema",
    "One of some texts": "choice",
    "Regular expression": "regex",
    "Grammar (GBNF)": "gbnf",
    "Grammar (Lark)": "lark",
}
BOXES = {
    "json_schema": "JSON schema",
    "choice": "The texts, one per line",
    "regex": "Regular expression",
    "gbnf": "Grammar",
    "lark": "Grammar",
}


def hidden_text() -> gr.Textbox:
    return gr.Textbox(visible="hidden")


def thinking_choice(thinking: ThinkingChoice) -> str:
    return next(
        (label for label, value in THINKING.items() if value is thinking), next(iter(THINKING))
    )


def number(default: object, value: Any) -> Any:  # noqa: ANN401
    """A component's number, converted to the type of the setting's default: 3.0 becomes 3 for a
    whole number. Any other value is returned as it is, because the settings report it themselves.
    """
    whole = isinstance(default, int) and isinstance(value, float) and value.is_integer()
    if isinstance(default, float) and isinstance(value, int):
        return float(value)
    return int(value) if whole else value


def control(
    owner: type,
    name: str,
    value: object = None,
    choices: Sequence[str] = (),
    elem_id: str | None = None,
    explained: bool = True,
    typed: bool = False,
) -> gr.components.Component:
    """A component for a setting, made from its declaration: a slider, a box for a wide range, or a
    choice.

    `choices` are for a text whose declaration leaves them open; with `typed`, another text can be
    typed as well. `explained` adds the help text.
    """
    item = next(f for f in fields(owner) if f.name == name)
    meta = item.metadata
    value = item.default if value is None and item.default is not MISSING else value
    options: dict[str, Any] = {"label": meta["label"], "value": value, "elem_id": elem_id}
    if explained:
        options["info"] = meta["help"]
    if "choices" in meta:
        offered = list(meta["choices"] or choices)
        kind = partial(gr.Dropdown, allow_custom_value=True) if typed else gr.Radio
        return kind(offered, **options)
    if (meta["high"] - meta["low"]) / meta["step"] > SLIDER_STEPS:
        # Without a minimum, because Gradio would reject a number that is only half typed.
        return gr.Number(**options, precision=0)
    return gr.Slider(meta["low"], meta["high"], step=meta["step"], **options)


def temperature(session: Session) -> gr.components.Component:
    value = session.current.info.sampling.temperature
    return control(Sampling, "temperature", value, elem_id="temperature", explained=False)


def methods(session: Session) -> list[tuple[str, str]]:
    info = session.current.info
    found = [m if info.server is None else served(m, info.server) for m in offered(info)]
    return [*((m.title, m.name) for m in found), *session.stacks.methods()]


def usable(session: Session, method: str) -> bool:
    try:
        session.stacks.check(method_named(method), session.current.info.sampling)
    except StrataError:
        return False
    return True


def format_of(kind: str, text: str) -> AnswerFormat | None:
    """The format of answers, from the choice and the text below it; None for any text."""
    if kind == JSON:
        return AnswerFormat("json_schema", ANY_OBJECT)
    if not kind or not text.strip():
        return None
    if kind == "choice":
        return AnswerFormat(kind, json.dumps([line for line in text.splitlines() if line.strip()]))
    return AnswerFormat(kind, text)


def format_values(form: AnswerFormat | None) -> dict[str, object]:
    kind, text = (form.kind, form.text) if form is not None else ("", "")
    if form == AnswerFormat("json_schema", ANY_OBJECT):
        kind, text = JSON, ""
    elif kind == "choice":
        with suppress(ValueError, TypeError):
            text = "\n".join(json.loads(text))
    return {"format": kind, "format_text": text}


def asked_for(kind: str) -> object:
    return gr.update(visible=bool(kind) and kind != JSON, label=BOXES.get(kind, ""))


class Settings(Tab):
    """Three groups of settings: instructions, sampling and speed. `parts` holds the component of
    each setting by the setting's name, in a fixed order.

    `chat_parts` are the components of settings that already stand in the chat. Each of them holds
    the value of its setting, and has a mirror in this tab; a change of either changes the other.
    (Gradio reports no change of a component in a tab that was never opened.) An event that needs
    the settings takes the `inputs`, and one that shows others changes the `outputs`. `follow`
    changes the `followers`.

    `kept` holds the settings that the page shows, and the model they are for. The browser stores
    them until the page is closed, so that a reload brings them back.
    """

    def __init__(
        self,
        session: Session,
        memory: gr.BrowserState,
        chat_parts: Mapping[str, gr.components.Component] | None = None,
        kept: gr.Textbox | None = None,
    ) -> None:
        super().__init__(session, memory)
        self.kept = kept or hidden_text()
        self.parts: dict[str, gr.components.Component] = {}
        self.mirrors: dict[str, gr.components.Component] = {}
        chat_parts = chat_parts or {}
        with gr.Row(elem_classes="cards"):
            with gr.Column(elem_classes="card"):
                gr.HTML("<h3>Instructions</h3>")
                self.system = gr.Textbox(
                    label="System prompt",
                    info="Sent before the conversation. Leave it empty for none.",
                    lines=4,
                    max_lines=12,
                )
                length = min(DEFAULT_TOKENS, session.current.info.context_length or DEFAULT_TOKENS)
                self.parts["max_tokens"] = control(Generation, "max_tokens", length)
                self.parts["stop"] = gr.Textbox(
                    label="Stop strings",
                    info="One per line. The answer ends where one of them would begin.",
                    lines=2,
                )
                self.parts["thinking"] = gr.Radio(
                    list(THINKING),
                    value=thinking_choice(None),
                    label="Thinking",
                    info="Whether the model thinks before it answers. Thinking takes time and "
                    "tokens.",
                    visible=session.current.info.can_think,
                    elem_id="thinking",
                )
                self.build_format()
            with gr.Column(elem_classes="card"):
                gr.HTML("<h3>Sampling</h3>")
                with gr.Row(elem_classes="presets"):
                    self.samplers = {name: small_button(name) for name in SAMPLERS}
                for item in fields(Sampling):
                    if item.name == "seed":
                        self.parts["fresh_seed"] = gr.Checkbox(
                            True,
                            label="A new seed for each answer",
                            info="Off: the seed below. The same question then gets the same "
                            "answer.",
                        )
                    value = getattr(session.current.info.sampling, item.name)
                    made = control(Sampling, item.name, value)
                    self.parts[item.name] = chat_parts.get(item.name, made)
                    if item.name in chat_parts:
                        self.mirrors[item.name] = made
            self.build_speed()
        self.inputs = [self.system, *self.parts.values()]
        self.outputs: list[Block] = [*self.inputs, self.kept]
        self.followers = [self.parts[name] for name in FOLLOWING]

    def build_format(self) -> None:
        self.parts["format"] = gr.Dropdown(
            list(FORMAT_CHOICES.items()),
            value="",
            label="Answer format",
            info="The model can only write what the format allows. What it demands is drafted. A "
            "preset keeps the format under a name.",
            filterable=False,
            elem_id="answer-format",
        )
        self.parts["format_text"] = gr.Textbox(
            label="The format",
            placeholder='{"type": "object", "properties": {"name": {"type": "string"}}}',
            lines=4,
            max_lines=16,
            visible=False,
            elem_id="format-text",
        )

    def build_speed(self) -> None:
        with gr.Column(elem_classes="card"):
            gr.HTML(
                "<h3>Speed</h3><p>Drafts make answers faster. The text stays the same unless you "
                "choose otherwise under Advanced.</p>"
            )
            self.parts["method"] = gr.Dropdown(
                methods(self.session),
                value=USUAL_METHOD,
                label="Method",
                info="Where drafts come from. Plain decoding uses none. Load draft models in the "
                "Stack tab, or type a plan such as hsd:small@8/mid@4.",
                allow_custom_value=True,
                elem_id="method",
            )
            self.parts["check"] = gr.Checkbox(
                False,
                label="Check every answer in the background",
                info="Decodes each answer several times more, plainly and with drafts, and says "
                "below it whether the text is the same. That takes about eight seconds. It waits "
                "until nothing else runs, and gives way as soon as you ask something.",
                elem_id="check",
            )
            with gr.Accordion("Advanced", open=False, elem_id="advanced"):
                self.build_advanced()

    def build_advanced(self) -> None:
        self.parts["tiers"] = gr.Dropdown(
            [(ink(name).title, name) for name in TIERS],
            value=list(TIERS),
            multiselect=True,
            label="Databases",
            info="They are asked in this order. Remove one to do without it.",
        )
        self.parts["budget"] = gr.Radio(
            [(name.capitalize(), name) for name in BUDGETS],
            value=BUDGETS[0],
            label="Draft size",
            info=(
                "Adaptive drafts as many tokens as pay off on this machine. Fixed always drafts "
                "the maximum."
            ),
        )
        self.parts["nodes"] = control(Drafting, "nodes")
        self.parts["threshold"] = control(Drafting, "threshold")
        self.parts["rule"] = gr.Radio(
            list(VERIFICATION.items()),
            value="match",
            label="What drafts must not change",
            info="Same text: an answer is exactly what plain decoding gives with the same seed. "
            "Same distribution: every answer is as likely as with plain decoding, but a seed gives "
            "another text. It keeps more drafts at temperatures above 0 (rejection sampling).",
        )

    def read(self, values: Iterable[object]) -> tuple[str, Preferences]:
        system, *rest = values
        # The values have any type here; the settings check them.
        given: dict[str, Any] = dict(zip(self.parts, rest, strict=True))
        sampling = Sampling(**{f.name: number(f.default, given[f.name]) for f in fields(Sampling)})
        stop = tuple(line for line in str(given["stop"] or "").splitlines() if line)
        thinking = THINKING.get(str(given["thinking"]))
        form = format_of(str(given["format"] or ""), str(given["format_text"] or ""))
        generation = Generation(sampling, number(0, given["max_tokens"]), stop, thinking, form)
        drafting = Drafting(
            tuple(given["tiers"] or ()),
            number(0, given["nodes"]),
            number(0.0, given["threshold"]),
            given["budget"],
            given["rule"],
        )
        flags = bool(given["fresh_seed"]), bool(given["check"])
        chosen = Preferences(generation, given["method"], drafting, *flags)
        chosen.chosen()
        return str(system or ""), chosen

    def show(self, system: str, preferences: Preferences) -> list[object]:
        stored = preferences.mapping()
        generation, drafting = stored["generation"], stored["drafting"]
        values: dict[str, object] = {
            **stored,
            **generation,
            **generation["sampling"],
            **drafting,
            "stop": "\n".join(generation["stop"]),
            "thinking": thinking_choice(generation["thinking"]),
            "tiers": list(drafting["tiers"]),
            **format_values(preferences.generation.format),
        }
        return [system, *(values[name] for name in self.parts)]

    def applied(self, preset: StoredPreset) -> Updates:
        preferences, problem = self.session.presets.preferences(preset)
        if problem:
            warn(problem)
        return self.shown(preset.system_prompt, preferences)

    def shown(self, system: str, preferences: Preferences) -> Updates:
        values = [*self.show(system, preferences), self.as_kept(system, preferences)]
        return dict(zip(self.outputs, values, strict=True))

    def as_kept(self, system: str, preferences: Preferences) -> str:
        model = self.session.current.info.fingerprint
        return json.dumps({"model": model, "system": system, "settings": preferences.mapping()})

    def restored(self, kept: str | None) -> Updates:
        """Show the settings from before a reload; nothing if they are for another model."""
        try:
            values = well_formed(json.loads(kept or ""))
            if values["model"] != self.session.current.info.fingerprint:
                return {}
            found, system = Preferences.from_mapping(values["settings"]), str(values["system"])
        except (KeyError, RecursionError, SettingError, TypeError, ValueError):
            return {}  # Anything may stand in a browser's storage.
        if not usable(self.session, found.method):
            found = replace(found, method=USUAL_METHOD)
        return self.shown(system, found)

    def use(self, owner: str, id: str | None) -> Updates:
        """Show the settings of a preset. Without one they stay as they are."""
        return self.applied(self.session.presets.get(owner, id)) if id else {}

    def follow(self, method: str, length: float | None, sampler: bool = True) -> Updates:
        """Show what depends on the loaded model: its recommended sampler (if `sampler`), how long
        an answer can be, the available methods, and whether thinking can be switched. `method` and
        `length` stay if the model supports them."""
        info = self.session.current.info
        values: dict[str, object] = {
            f.name: getattr(info.sampling, f.name) if sampler else gr.skip()
            for f in fields(Sampling)
        }
        longest = info.context_length or DEFAULT_TOKENS
        values["max_tokens"] = min(int(length or DEFAULT_TOKENS), longest)
        chosen = method if usable(self.session, method) else USUAL_METHOD
        values["method"] = gr.update(choices=methods(self.session), value=chosen)
        values["thinking"] = gr.update(visible=info.can_think)
        return {self.parts[name]: values[name] for name in FOLLOWING}

    def wire(self, current: gr.State) -> Event:
        """Connect the tab. Returns the event that stores changed settings with the open
        conversation."""
        keep = self.event(self.keep, [current, *self.inputs], self.kept)
        self.kept.change(None, self.kept, js=STORE_KEPT, **AFTER)
        edits = [part.input for part in self.inputs]  # type: ignore[attr-defined]
        self.on(edits, keep, mode="always_last")
        for name, mirror in self.mirrors.items():
            part: Any = self.parts[name]
            part.change(None, part, mirror, js=SAME, **AT_ONCE)
            chosen = mirror.input(None, mirror, part, js=SAME, **LATEST)  # type: ignore[attr-defined]
            self.then(chosen, keep)
        kind: Any = self.parts["format"]
        self.on(kind.change, asked_for, kind, self.parts["format_text"])
        for name, button in self.samplers.items():
            parts = [self.parts[key] for key in SAMPLERS[name]]
            chosen = self.on(button.click, partial(sampler, name), outputs=parts)
            self.then(chosen, keep)
        return keep

    def keep(self, owner: str, conversation: str | None, *values: object) -> str:
        system, preferences = self.read(values)
        if conversation:
            store = self.session.chat.conversations(owner)
            store.set_system_prompt(conversation, system)
            store.set_settings(conversation, preferences.mapping())
        return self.as_kept(system, preferences)


def sampler(name: str) -> list[float]:
    return list(SAMPLERS[name].values())


PICKED = """(...values) => {
  document.dispatchEvent(new Event("strata:preset"));
  return values;
}"""
"""The script that has the composer wait for the settings of a preset."""
AS_SET = ("As set in Settings", "")
"""The first choice below New conversation: no preset."""
USES = {
    "use": "Use now",
    "update": "Update",
    "copy": "Duplicate",
    "delete": "Delete",
    "undo": "Undo delete",
}
KEEPS = {"save": "Save as new", "rename": "Rename", "export": "Export my presets"}
FIRSTS = {
    "begin": "Start with this preset",
    "begin-plain": "Start without a preset",
    "makers": "Reset settings",
}
"""The buttons, by their ids."""


def preset_picker() -> gr.Dropdown:
    return gr.Dropdown(
        [AS_SET],
        value=AS_SET[1],
        label="Start from",
        filterable=False,
        elem_id="start-from",
        elem_classes="start-from",
    )


def preset_buttons(named: Mapping[str, str]) -> dict[str, gr.Button]:
    return {
        name: small_button(label, min_width=80, elem_id=f"preset-{name}")
        for name, label in named.items()
    }


class Presets(Tab):
    """The presets: choosing, using, changing and making them, and the first preset of each model.

    `start_from` is the picker below New conversation, and `ready` tells the composer that what was
    picked is shown. `deleted` is the token that undoes a deletion. `model` is the model whose first
    preset the page has already applied.
    """

    controls: Settings

    def __init__(
        self, session: Session, memory: gr.BrowserState, start_from: gr.Dropdown, ready: gr.HTML
    ) -> None:
        super().__init__(session, memory)
        self.presets, self.start_from, self.ready = session.presets, start_from, ready
        self.deleted, self.model = gr.State(""), gr.State("")
        with gr.Row(elem_classes="cards", elem_id="presets"):
            with gr.Column(elem_classes="card"):
                gr.HTML(
                    "<h3>Presets</h3><p>A preset saves everything on this page under a name. New "
                    "conversations use the one chosen under Start from, in the Chat tab.</p>"
                )
                self.choice = gr.Dropdown([], label="Preset", filterable=False, elem_id="preset")
                with gr.Row(elem_classes="presets"):
                    self.uses = preset_buttons(USES)
                self.uses["undo"].visible = False
            with gr.Column(elem_classes="card"):
                gr.HTML(
                    "<h3>Save</h3><p>Save the settings below under a name of your own, or rename "
                    "the chosen preset.</p>"
                )
                self.name = gr.Textbox(
                    label="Name of the preset",
                    max_lines=1,
                    max_length=MAX_NAME,
                    elem_id="preset-name",
                )
                with gr.Row(elem_classes="presets"):
                    self.keeps = preset_buttons(KEEPS)
                    self.import_button = upload_button(
                        "Import", min_width=80, file_types=[".json"], elem_id="preset-import"
                    )
            with gr.Column(elem_classes="card"):
                gr.HTML(
                    "<h3>At the start</h3><p>Each model can start with a preset of its own. "
                    "Without one, it starts with the settings its makers recommend.</p>"
                )
                self.first = html(elem_id="preset-first")
                with gr.Row(elem_classes="presets"):
                    self.firsts = preset_buttons(FIRSTS)

    def wire(self, controls: Settings, current: gr.State, keep: Event) -> Event:
        """Connect the cards, and the picker of presets in the chat. `keep` stores the settings with
        the open conversation. Returns the event that shows the presets and applies the first preset
        of the loaded model."""
        self.controls = controls
        uses, keeps, firsts = self.uses, self.keeps, self.firsts
        lists: list[Block] = [self.choice, self.start_from, self.first, self.name]
        page, shown = self.controls.inputs, self.controls.outputs
        settings, chosen = [*shown, self.name], [self.choice, self.start_from]
        self.on(
            self.start_from.input,
            self.pick,
            [self.start_from, current],
            [self.ready, *shown],
            mode="always_last",
            js=PICKED,
        )
        used = self.on(uses["use"].click, self.use, self.choice, settings)
        self.then(used, keep)
        self.then(self.on(firsts["makers"].click, self.reset, outputs=settings), keep)
        saving = [keeps["save"].click, self.name.submit]
        self.on(saving, self.save, [self.name, self.start_from, *page], lists)
        self.on(uses["update"].click, self.update, [self.choice, *page])
        renamed = [self.choice, self.name, self.start_from]
        self.on(keeps["rename"].click, self.rename, renamed, lists)
        self.on(uses["copy"].click, self.copy, chosen, lists)
        undo = uses["undo"]
        self.on(uses["delete"].click, self.delete, chosen, [*lists, self.deleted, undo])
        undone = [self.deleted, self.start_from]
        hidden = {undo: gr.update(visible=False)}
        self.on(undo.click, self.undo, undone, [*lists, undo], refused=hidden)
        self.on(firsts["begin"].click, self.begin, self.choice, self.first)
        self.on(firsts["begin-plain"].click, self.begin, gr.State(""), self.first)
        self.on_save(keeps["export"].click, self.export)
        self.on(
            self.import_button.upload, self.import_, [self.import_button, self.start_from], lists
        )
        known = [self.model, self.choice, self.start_from, current, self.controls.kept]
        return self.event(self.follow, known, [self.model, *lists, *shown])

    def listed(self, owner: str, chosen: str | None, picked: str | None) -> Updates:
        """Both lists of presets, and the one that the loaded model begins with. Raises
        StorageError."""
        offered = [(preset.name, preset.id) for preset in self.presets.list(owner)]
        ids = {id for _, id in offered}
        return {
            self.choice: gr.update(
                choices=offered, value=chosen if chosen in ids else offered[0][1]
            ),
            self.start_from: gr.update(
                choices=[AS_SET, *offered], value=picked if picked in ids else AS_SET[1]
            ),
            self.first: self.opening_text(owner),
        }

    def opening_text(self, owner: str) -> str:
        models = self.session.models
        if not models.is_loaded:
            return ""
        first = self.presets.first(owner, models.source)
        start = f"the preset {first.name!r}" if first else "its makers' settings"
        name = self.session.current.info.name
        return f"<p>A page that opens with {escape(name)} starts with {escape(start)}.</p>"

    def follow(
        self,
        owner: str,
        model: str,
        chosen: str | None,
        picked: str | None,
        conversation: str | None,
        kept: str | None,
    ) -> Updates:
        """List all presets. When another model was loaded and no conversation is open, apply the
        preset chosen for that model, or show what the page showed before it was reloaded."""
        models = self.session.models
        source = models.source if models.is_loaded else ""
        first = self.presets.first(owner, source) if source != model else None
        picked = first.id if first else picked
        shown = self.listed(owner, chosen, picked)
        applied: Updates = {}
        if conversation is None and source != model:
            applied = {} if model else self.controls.restored(kept)
            applied = applied or (self.controls.applied(first) if first else {})
        return {self.model: source, **shown, **applied}

    def pick(self, owner: str, id: str | None, conversation: str | None) -> Updates:
        """Show the settings of a preset if no conversation is open."""
        updates: Updates = {self.ready: numbered({})}
        if conversation is None:
            with notify_errors():
                updates |= self.use(owner, id)
        return updates

    def use(self, owner: str, id: str | None) -> Updates:
        return self.controls.use(owner, id)

    def reset(self) -> Updates:
        return self.controls.applied(StoredPreset("", "", "", {}))

    def save(self, owner: str, name: str, picked: str | None, *values: object) -> Updates:
        made = self.presets.save(owner, name, *self.controls.read(values))
        gr.Info(f"The preset {escape(made.name)} is saved.")
        return {self.name: "", **self.listed(owner, made.id, picked)}

    def update(self, owner: str, id: str | None, *values: object) -> None:
        made = self.presets.update(owner, id or "", *self.controls.read(values))
        gr.Info(f"The preset {escape(made.name)} now holds the settings on this page.")

    def rename(self, owner: str, id: str | None, name: str, picked: str | None) -> Updates:
        made = self.presets.rename(owner, id or "", name)
        return {self.name: "", **self.listed(owner, made.id, picked)}

    def copy(self, owner: str, id: str | None, picked: str | None) -> Updates:
        return self.listed(owner, self.presets.duplicate(owner, id or "").id, picked)

    def delete(self, owner: str, id: str | None, picked: str | None) -> Updates:
        token = self.presets.delete(owner, id or "")
        shown = self.listed(owner, None, picked)
        return {**shown, self.deleted: token, self.uses["undo"]: gr.update(visible=True)}

    def undo(self, owner: str, token: str, picked: str | None) -> Updates:
        shown = self.listed(owner, self.presets.undo(owner, token).id, picked)
        return {**shown, self.uses["undo"]: gr.update(visible=False)}

    def begin(self, owner: str, id: str | None) -> Updates:
        """Choose the preset with which pages of the loaded model begin; "" for none."""
        models = self.session.models
        self.presets.choose(owner, models.source if models.is_loaded else "", id or None)
        return {self.first: self.opening_text(owner)}

    def export(self, owner: str) -> Download:
        mine = self.presets.export(owner)
        return text_file("presets.json", "application/json", json.dumps(mine, indent=1))

    def import_(self, owner: str, file: str | None, picked: str | None) -> Updates:
        made = self.presets.import_(owner, upload_content(file))
        gr.Info(f"{len(made)} preset{'s' if len(made) > 1 else ''} imported.")
        return self.listed(owner, made[0].id, picked)
