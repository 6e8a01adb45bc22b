"""The file of general text in the Databases tab: build it from files, take one in, copy, remove."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import gradio as gr
from gradio.blocks import Block

from app.service.statistics_files import StatisticsFiles
from app.web import models_html
from app.web.stack_html import fine, line
from app.web.wiring import AFTER, AT_ONCE, Deeds, Event, counted, unless_done
from engine.errors import Cancelled, StorageError, StrataError
from storage.documents import KINDS, PACKED

Changes = dict[Block, object]
"""What an event changes, by component."""
ABOUT = (
    "<p class='fine'>Build one from texts like those that you talk about: text, Markdown, JSON, "
    "JSON lines or CSV, also packed (zip, xz, gz). It takes the place of the file above. You can "
    "chat meanwhile: reading waits while an answer grows.</p>"
)


@dataclass(slots=True)
class Parts:
    """The section's components."""

    upload: gr.UploadButton
    bring: gr.UploadButton
    paths: gr.Textbox
    build: gr.Button
    take: gr.Button
    copy: gr.Button
    remove: gr.Button
    stop: gr.Button
    status: gr.HTML

    @property
    def actions(self) -> list[gr.Button | gr.UploadButton]:
        """What begins something."""
        return [self.upload, self.bring, self.build, self.take, self.copy]


def build() -> Parts:
    """Buttons for files that are sent, and a box for those that are on this machine."""
    gr.HTML(ABOUT, apply_default_css=False)
    with gr.Row(elem_classes="presets"):
        upload = gr.UploadButton(
            "Build from files",
            size="sm",
            file_count="multiple",
            file_types=[*KINDS, *PACKED],
            type="filepath",
            elem_id="general-upload",
        )
        bring = gr.UploadButton(
            "Import a file", size="sm", file_types=[".db"], type="filepath", elem_id="general-bring"
        )
    with gr.Accordion("Files on this machine", open=False, elem_id="general-local"):
        paths = gr.Textbox(
            label="Paths, one per line",
            lines=2,
            max_lines=6,
            placeholder="~/notes/talks.jsonl",
            elem_id="general-paths",
        )
        with gr.Row(elem_classes="presets"):
            start = gr.Button("Build from these", size="sm", elem_id="general-build")
            take = gr.Button("Import it", size="sm", elem_id="general-take")
            copy = gr.Button("Save a copy there", size="sm", elem_id="general-copy")
    with gr.Row(elem_classes="presets"):
        stop = gr.Button("Stop", size="sm", variant="stop", visible=False, elem_id="general-stop")
        remove = gr.Button("Remove your file", size="sm", visible=False, elem_id="general-remove")
    status = gr.HTML(elem_id="general-status", apply_default_css=False)
    return Parts(upload, bring, paths, start, take, copy, remove, stop, status)


def paths_of(said: str) -> list[Path]:
    """The paths that were named, a line each."""
    lines = (line.strip().strip("\"'") for line in said.splitlines())
    return [Path(line).expanduser() for line in lines if line]


class Handlers:
    """What the section's events do."""

    def __init__(self, files: StatisticsFiles, parts: Parts) -> None:
        self.files, self.parts = files, parts

    def show(self) -> Iterator[Changes]:
        """Show what can be done, and how far a build is that another page began."""
        if self.files.busy.locked():
            yield from self.follow()
        else:
            yield self.idle()

    def idle(self, status: str | None = None) -> Changes:
        """Nothing is under way."""
        parts = self.parts
        changes: Changes = {part: gr.update(interactive=True) for part in parts.actions}
        changes[parts.stop] = gr.update(visible=False)
        changes[parts.remove] = gr.update(visible=self.files.own())
        return changes if status is None else {**changes, parts.status: status}

    def uploaded(self, sent: list[str] | str | None) -> Iterator[Changes]:
        """Build from files that the page sent."""
        names = [sent] if isinstance(sent, str) else sent or []
        yield from self.begin([Path(name) for name in names], True)

    def local(self, said: str) -> Iterator[Changes]:
        """Build from files of this machine."""
        yield from self.begin(paths_of(said), False)

    def begin(self, files: list[Path], uploaded: bool) -> Iterator[Changes]:
        """Begin to build, until that is done or stopped."""
        try:
            self.files.start(files, uploaded)
        except (StrataError, OSError) as error:
            yield {self.parts.status: line("differs", "Not done", str(error))}
        else:
            yield from self.follow()

    def follow(self) -> Iterator[Changes]:
        """Show how far the build is, and what becomes of it."""
        parts = self.parts
        yield {
            **{part: gr.update(interactive=False) for part in parts.actions},
            parts.stop: gr.update(visible=True),
            parts.remove: gr.update(visible=False),
        }
        try:
            for progress in self.files.watch():
                yield {parts.status: models_html.progress(progress)}
            status = fine(self.files.done)
        except Cancelled as error:
            status = fine(str(error))
        except StrataError as error:
            status = line("differs", "Not done", str(error))
        yield self.idle(status)

    def done(self, act: Callable[[], str]) -> Changes:
        """Do something at once, and say what came of it."""
        try:
            return self.idle(fine(act()))
        except (StrataError, OSError) as error:
            return {self.parts.status: line("differs", "Not done", str(error))}

    def bring(self, sent: str | None) -> Changes:
        """Use a statistics file that the page sent."""
        try:
            return self.done(lambda: self.taken(Path(sent or "")))
        finally:
            with suppress(OSError):
                Path(sent or "").unlink()  # Gradio would keep what was uploaded

    def take(self, said: str) -> Changes:
        """Use a statistics file of this machine."""
        return self.done(lambda: self.taken(one(said)))

    def taken(self, path: Path) -> str:
        """Use a statistics file from elsewhere."""
        self.files.take_in(path)
        return "The file was imported, and is in use."

    def copy(self, said: str) -> Changes:
        """Copy the file in use to where the box says."""
        return self.done(lambda: f"A copy is at {self.files.copy_to(one(said))}.")

    def remove(self) -> Changes:
        """Delete the user's own file."""

        def act() -> str:
            self.files.remove()
            return "Your file was removed. One that came along is used again, if there is one."

        return self.done(act)


def one(said: str) -> Path:
    """The one path that is named. Raises StorageError for none, or for several."""
    named = paths_of(said)
    if len(named) != 1:
        raise StorageError(f"Name one path. There are {len(named)}.")
    return named[0]


def wire(files: StatisticsFiles, parts: Parts, tab: gr.Tab, after: Event) -> None:
    """Connect the section. `after` is the event by which the rest of the tab follows."""
    on = Handlers(files, parts)
    outputs = [*parts.actions, parts.stop, parts.remove, parts.status]
    deeds = gr.State(Deeds())
    tab.select(unless_done(on.show), deeds, outputs, **AT_ONCE)
    for event in (
        parts.upload.upload(counted(on.uploaded), [deeds, parts.upload], outputs, **AT_ONCE),
        parts.build.click(counted(on.local), [deeds, parts.paths], outputs, **AT_ONCE),
        parts.bring.upload(counted(on.bring), [deeds, parts.bring], outputs, **AT_ONCE),
        parts.take.click(counted(on.take), [deeds, parts.paths], outputs, **AT_ONCE),
        parts.remove.click(counted(on.remove), deeds, outputs, **AT_ONCE),
    ):
        event.then(*after, **AFTER)
    parts.copy.click(counted(on.copy), [deeds, parts.paths], outputs, **AT_ONCE)
    parts.stop.click(files.stop, None, None, **AT_ONCE)
