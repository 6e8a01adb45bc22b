"""Presets: chosen beside New conversation, and managed in Settings.

A preset changes the settings on the page. A conversation keeps those it was begun with, so a preset
that is changed or deleted later changes no conversation.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path

import gradio as gr

from app.service.session import Session
from app.web.saving import SAVE_FILE, saved
from app.web.tabs.settings import Controls
from app.web.wiring import AFTER, AT_ONCE, LATEST, Event, Memory, Updates, owner_of, told, warn
from engine.errors import StorageError
from storage.presets import MAX_NAME, StoredPreset

AS_SET = ("As set in Settings", "")
"""The first choice beside New conversation: no preset."""
USES = {
    "use": "Use now",
    "update": "Update",
    "copy": "Duplicate",
    "delete": "Delete",
    "undo": "Undo delete",
}
KEEPS = {"save": "Save as new", "rename": "Rename", "export": "Export mine"}
FIRSTS = {
    "begin": "Begin with it",
    "begin-plain": "Begin with none",
    "makers": "Reset settings",
}
"""The buttons, by their ids."""


@dataclass(slots=True)
class Parts:
    """The components of the card in Settings. `deleted` is what a deletion is taken back with,
    `model` the one whose first preset the page has heeded."""

    choice: gr.Dropdown
    use: gr.Button
    update: gr.Button
    copy: gr.Button
    delete: gr.Button
    undo: gr.Button
    name: gr.Textbox
    save: gr.Button
    rename: gr.Button
    export: gr.Button
    import_: gr.UploadButton
    makers: gr.Button
    first: gr.HTML
    begin: gr.Button
    begin_plain: gr.Button
    outgoing: gr.Textbox
    deleted: gr.State
    model: gr.State


def picker() -> gr.Dropdown:
    """What the next conversation starts from."""
    return gr.Dropdown(
        [AS_SET],
        value=AS_SET[1],
        label="Start from",
        filterable=False,
        elem_id="start-from",
        elem_classes="start-from",
    )


def buttons(named: Mapping[str, str]) -> list[gr.Button]:
    """Buttons by their ids."""
    return [
        gr.Button(words, size="sm", min_width=80, elem_id=f"preset-{name}")
        for name, words in named.items()
    ]


def build() -> Parts:
    """Which preset and what to do with it, how another is made, what models begin with."""

    with gr.Row(elem_classes="cards", elem_id="presets"):
        with gr.Column(elem_classes="card"):
            gr.HTML(
                "<h3>Presets</h3><p>A preset is a name for everything on this page. New "
                "conversations start from the one chosen beside New conversation.</p>"
            )
            choice = gr.Dropdown([], label="Preset", filterable=False, elem_id="preset")
            with gr.Row(elem_classes="presets"):
                use, update, copy, delete, undo = buttons(USES)
            undo.visible = False
        with gr.Column(elem_classes="card"):
            gr.HTML(
                "<h3>Keep</h3><p>Keep the settings below under a name of your own, or give the "
                "chosen preset another name.</p>"
            )
            name = gr.Textbox(
                label="Name of the preset", max_lines=1, max_length=MAX_NAME, elem_id="preset-name"
            )
            with gr.Row(elem_classes="presets"):
                save, rename, export = buttons(KEEPS)
                import_ = gr.UploadButton(
                    "Import",
                    size="sm",
                    min_width=80,
                    file_types=[".json"],
                    type="filepath",
                    elem_id="preset-import",
                )
        with gr.Column(elem_classes="card"):
            gr.HTML(
                "<h3>At the start</h3><p>Each model can begin with a preset of its own. Without "
                "one it begins with what its makers recommend.</p>"
            )
            first = gr.HTML(elem_id="preset-first", apply_default_css=False)
            with gr.Row(elem_classes="presets"):
                begin, begin_plain, makers = buttons(FIRSTS)
        outgoing = gr.Textbox(visible="hidden")
    return Parts(
        choice,
        use,
        update,
        copy,
        delete,
        undo,
        name,
        save,
        rename,
        export,
        import_,
        makers,
        first,
        begin,
        begin_plain,
        outgoing,
        gr.State(""),
        gr.State(""),
    )


class Handlers:
    """What the events of presets do."""

    def __init__(
        self, session: Session, parts: Parts, start_from: gr.Dropdown, controls: Controls
    ) -> None:
        self.session, self.presets, self.parts = session, session.presets, parts
        self.start_from, self.controls = start_from, controls

    # what is shown

    def listed(self, owner: str, chosen: str | None, picked: str | None) -> Updates:
        """Both lists, and what the loaded model begins with. Raises StorageError."""
        offered = [(preset.name, preset.id) for preset in self.presets.list(owner)]
        there = {id for _, id in offered}
        return {
            self.parts.choice: gr.update(
                choices=offered, value=chosen if chosen in there else offered[0][1]
            ),
            self.start_from: gr.update(
                choices=[AS_SET, *offered], value=picked if picked in there else AS_SET[1]
            ),
            self.parts.first: self.words(owner),
        }

    def words(self, owner: str) -> str:
        """What conversations with the loaded model begin with."""
        models = self.session.models
        if not models.there:
            return ""
        first = self.presets.first(owner, models.source)
        what = f"the preset {first.name!r}" if first else "its makers' settings"
        name = self.session.current.info.name
        return f"<p>A page that opens with {escape(name)} begins with {escape(what)}.</p>"

    def applied(self, preset: StoredPreset) -> Updates:
        """The settings on the page as the preset has them."""
        preferences, problem = self.presets.preferences(preset)
        if problem:
            warn(problem)
        values = self.controls.show(preset.system_prompt, preferences)
        return dict(zip(self.controls.inputs, values, strict=True))

    def follow(
        self,
        request: gr.Request,
        model: str,
        chosen: str | None,
        picked: str | None,
        conversation: str | None,
        memory: Memory,
    ) -> Updates:
        """The presets that there are; a page that meets a model begins with what was chosen for
        it, unless a conversation is open."""
        owner, models = owner_of(self.session, memory, request), self.session.models
        source = models.source if models.there else ""
        with told():
            first = self.presets.first(owner, source) if source != model else None
            picked = first.id if first else picked
            shown = self.listed(owner, chosen, picked)
            begun = self.applied(first) if first and conversation is None else {}
            return {self.parts.model: source, **shown, **begun}
        return {self.parts.model: gr.skip()}

    # what is chosen

    def pick(
        self, request: gr.Request, id: str | None, conversation: str | None, memory: Memory
    ) -> Updates:
        """With no conversation open, the next one starts from it at once."""
        if conversation is None:
            return self.use(request, id, memory)
        return {self.parts.name: gr.skip()}

    def use(self, request: gr.Request, id: str | None, memory: Memory) -> Updates:
        """Show the settings of a preset; of none they stay as they are."""
        owner = owner_of(self.session, memory, request)
        with told():
            if id:
                return self.applied(self.presets.get(owner, id))
        return {self.parts.name: gr.skip()}

    def reset(self) -> Updates:
        """Show what the makers of the loaded model recommend."""
        return self.applied(StoredPreset("", "", "", {}))

    # what is done to them

    def save(
        self,
        request: gr.Request,
        name: str,
        picked: str | None,
        memory: Memory,
        *values: object,
    ) -> Updates:
        """Keep the settings on the page under a new name."""
        owner = owner_of(self.session, memory, request)
        with told():
            made = self.presets.save(owner, name, *self.controls.read(values))
            gr.Info(f"The preset {escape(made.name)} is saved.")
            return {self.parts.name: "", **self.listed(owner, made.id, picked)}
        return {self.parts.name: gr.skip()}

    def update(
        self, request: gr.Request, id: str | None, memory: Memory, *values: object
    ) -> Updates:
        """Keep the settings on the page in the chosen preset."""
        owner = owner_of(self.session, memory, request)
        with told():
            made = self.presets.update(owner, id or "", *self.controls.read(values))
            gr.Info(f"The preset {escape(made.name)} now holds the settings on this page.")
        return {self.parts.name: gr.skip()}

    def rename(
        self, request: gr.Request, id: str | None, name: str, picked: str | None, memory: Memory
    ) -> Updates:
        """Give the chosen preset another name."""
        owner = owner_of(self.session, memory, request)
        with told():
            made = self.presets.rename(owner, id or "", name)
            return {self.parts.name: "", **self.listed(owner, made.id, picked)}
        return {self.parts.name: gr.skip()}

    def copy(
        self, request: gr.Request, id: str | None, picked: str | None, memory: Memory
    ) -> Updates:
        """Make another preset like the chosen one."""
        owner = owner_of(self.session, memory, request)
        with told():
            return self.listed(owner, self.presets.duplicate(owner, id or "").id, picked)
        return {self.parts.name: gr.skip()}

    def delete(
        self, request: gr.Request, id: str | None, picked: str | None, memory: Memory
    ) -> Updates:
        """Delete the chosen preset, which can be taken back."""
        owner = owner_of(self.session, memory, request)
        with told():
            token = self.presets.delete(owner, id or "")
            shown = self.listed(owner, None, picked)
            return {**shown, self.parts.deleted: token, self.parts.undo: gr.update(visible=True)}
        return {self.parts.name: gr.skip()}

    def undo(self, request: gr.Request, token: str, picked: str | None, memory: Memory) -> Updates:
        """Take the deletion back."""
        owner = owner_of(self.session, memory, request)
        shown: Updates = {self.parts.undo: gr.update(visible=False)}
        with told():
            shown |= self.listed(owner, self.presets.undo(owner, token).id, picked)
        return shown

    def begin(self, request: gr.Request, id: str | None, memory: Memory) -> Updates:
        """Have pages that open with the loaded model begin with a preset; "" for none."""
        owner, models = owner_of(self.session, memory, request), self.session.models
        with told():
            self.presets.choose(owner, models.source if models.there else "", id or None)
            return {self.parts.first: self.words(owner)}
        return {self.parts.first: gr.skip()}

    def export(self, request: gr.Request, memory: Memory) -> str:
        """The owner's presets as a file of JSON, which the browser saves."""
        with told():
            mine = self.presets.export(owner_of(self.session, memory, request))
            return saved("presets.json", "application/json", json.dumps(mine, indent=1))
        return ""

    def import_(
        self, request: gr.Request, file: str | None, picked: str | None, memory: Memory
    ) -> Updates:
        """Read a file of presets."""
        owner = owner_of(self.session, memory, request)
        with told():
            try:
                content = Path(file or "").read_bytes()
            except OSError as error:
                raise StorageError(f"The file cannot be read ({error.strerror}).") from error
            finally:
                with suppress(OSError):
                    Path(file or "").unlink()  # Gradio would keep what was uploaded
            made = self.presets.import_(owner, content)
            gr.Info(f"{len(made)} preset{'s' if len(made) > 1 else ''} imported.")
            return self.listed(owner, made[0].id, picked)
        return {self.parts.name: gr.skip()}


def wire(
    session: Session,
    parts: Parts,
    shelf: tuple[gr.Button, gr.Dropdown],
    controls: Controls,
    current: gr.State,
    memory: gr.BrowserState,
    keep: Event,
) -> Event:
    """Connect the card, and what stands beside New conversation: `shelf` is that button and the
    picker. `keep` stores the settings with the open conversation. Returns the event by which a
    page shows the presets, and begins with the one of its model."""
    new, start_from = shelf
    on = Handlers(session, parts, start_from, controls)
    lists = [parts.choice, start_from, parts.first, parts.name]
    page: Sequence[gr.components.Component] = controls.inputs
    settings = [*page, parts.name]
    start_from.input(on.pick, [start_from, current, memory], settings, **LATEST)
    new.click(on.use, [start_from, memory], settings, **AT_ONCE)
    parts.use.click(on.use, [parts.choice, memory], settings, **AT_ONCE).then(*keep, **AFTER)
    parts.makers.click(on.reset, None, settings, **AT_ONCE).then(*keep, **AFTER)
    gr.on(
        [parts.save.click, parts.name.submit],
        on.save,
        [parts.name, start_from, memory, *page],
        lists,
        **AT_ONCE,
    )
    parts.update.click(on.update, [parts.choice, memory, *page], parts.name, **AT_ONCE)
    chosen = [parts.choice, start_from, memory]
    parts.rename.click(on.rename, [parts.choice, parts.name, start_from, memory], lists, **AT_ONCE)
    parts.copy.click(on.copy, chosen, lists, **AT_ONCE)
    parts.delete.click(on.delete, chosen, [*lists, parts.deleted, parts.undo], **AT_ONCE)
    undone = [parts.deleted, start_from, memory]
    parts.undo.click(on.undo, undone, [*lists, parts.undo], **AT_ONCE)
    parts.begin.click(on.begin, [parts.choice, memory], parts.first, **AT_ONCE)
    none = gr.State("")
    parts.begin_plain.click(on.begin, [none, memory], parts.first, **AT_ONCE)
    parts.export.click(on.export, memory, parts.outgoing, **AT_ONCE).then(
        None, parts.outgoing, None, js=SAVE_FILE, **AFTER
    )
    parts.import_.upload(on.import_, [parts.import_, start_from, memory], lists, **AT_ONCE)
    known = [parts.model, parts.choice, start_from, current, memory]
    return Event(on.follow, known, [parts.model, *lists, *page])
