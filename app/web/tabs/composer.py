"""Where messages are written: the box, its files, the messages that wait, how full the context is.

The page owns what is being written (assets/composer). It asks by events of the component `writer`,
and is answered by values of hidden components, its channels: each becomes an event of the document.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder

from app.service import attachments
from app.service.attachments import Pending
from app.service.session import Session
from app.web.render import Data
from app.web.wiring import AT_ONCE, LATEST, Memory, owner_of, sent
from assets import ASSETS
from engine.errors import PromptError, StrataError

SCRIPT = ("state", "drafts", "sending", "files", "gauge", "keys", "begin")
CHANNELS = ("sent", "place", "attached", "filled")
"""What the page is told: a message was taken, what is open, a file was read, how full it is."""
READERS = 2
"""Files that are read at once: a long PDF file keeps a core busy."""
TEMPLATE = (
    '<div class="writer"><div class="editing" role="status" hidden><span>Editing an earlier '
    "message. Sending makes another version of it.</span>"
    '<button type="button" class="cancel">Cancel</button></div>'
    '<div class="waiting" hidden><span></span><ol class="waits" aria-label="Messages that wait">'
    '</ol></div><ul class="files" aria-label="Attached files" hidden></ul>'
    '<p class="drops" role="status" hidden></p>'
    '<div class="gauge" role="meter" tabindex="0" aria-label="Context" aria-valuemin="0" '
    'aria-valuemax="100" aria-valuenow="0"><i></i><span class="tip">Context: empty</span></div>'
    '<input class="choose" type="file" multiple hidden aria-label="Files"></div>'
)


def invitation(name: str) -> str:
    """What an empty composer says."""
    return f"Message {name}"


@dataclass(slots=True)
class Composer:
    """The components. Of the channels each has the name of what it tells."""

    box: gr.Textbox
    send: gr.Button
    stop: gr.Button
    writer: gr.HTML
    channels: dict[str, gr.HTML]


@cache
def script() -> str:
    """The composer's script."""
    files = (ASSETS / "composer" / f"{name}.js" for name in SCRIPT)
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def channel(name: str) -> gr.HTML:
    """A hidden component whose values become events of the document."""
    return gr.HTML(
        visible="hidden",
        html_template="",
        js_on_load=f'watch("value", () => document.dispatchEvent('
        f'new CustomEvent("strata:{name}", {{ detail: props.value }})));',
        apply_default_css=False,
    )


def composer(name: str, most: int = attachments.MAX_BYTES) -> Composer:
    """Where messages are written to the model of that name, with Send and, while an answer grows,
    Stop. `most` are the bytes that a file may have."""
    writer = gr.HTML(
        html_template=TEMPLATE,
        js_on_load=script(),
        apply_default_css=False,
        elem_id="writer",
        most=most,
    )
    with gr.Row(elem_classes="composer"):
        gr.Button("+", elem_id="attach", min_width=36, scale=0)
        box = gr.Textbox(
            show_label=False,
            container=False,
            lines=1,
            max_lines=8,
            scale=8,
            placeholder=invitation(name),
            elem_id="box",
            autofocus=True,
            interactive=True,
        )
        gr.Button("Queue", elem_id="queue", scale=1, min_width=80)
        send = gr.Button("Send", variant="primary", scale=1, min_width=88, elem_id="send")
        stop = gr.Button(
            "Stop", variant="stop", scale=1, min_width=88, visible=False, elem_id="stop"
        )
    return Composer(box, send, stop, writer, {name: channel(name) for name in CHANNELS})


class Asked:
    """What a page asks for by an event, each part of the type that it should have."""

    def __init__(self, data: gr.EventData) -> None:
        self.said = sent(data)

    def text(self, name: str) -> str:
        """A text, "" where it is none."""
        found = self.said.get(name)
        return found if isinstance(found, str) else ""

    @property
    def number(self) -> int:
        """Which question it is."""
        found = self.said.get("number")
        return found if isinstance(found, int) else 0

    @property
    def files(self) -> list[str]:
        """The keys of files."""
        found = self.said.get("files")
        return [key for key in found if isinstance(key, str)] if isinstance(found, list) else []

    def about(self, conversation: str | None) -> bool:
        """Whether the page means the conversation that is open."""
        return (self.said.get("conversation") or None) == (conversation or None)


def chip(session: Session, pending: Sequence[Pending]) -> list[Data]:
    """Files that wait, as the page shows them."""
    counts = session.gauge.counts([each.file.block for each in pending])
    return [
        {
            "key": each.key,
            "name": each.file.name,
            "size": each.size,
            "tokens": tokens,
            "exact": exact,
        }
        for each, (tokens, exact) in zip(pending, counts, strict=True)
    ]


def upload(path: str) -> bytes:
    """What a page has sent, which is deleted. Raises PromptError for what nobody has sent."""
    file = Path(path).resolve()
    if not file.is_relative_to(Path(get_upload_folder()).resolve()):
        raise PromptError("Only a file that was sent to this page can be attached.")
    try:
        if file.stat().st_size > attachments.MAX_BYTES:
            return bytes(attachments.MAX_BYTES + 1)
        return file.read_bytes()
    except OSError as error:
        raise PromptError(
            f"The file did not arrive ({error.strerror}). Attach it again."
        ) from error
    finally:
        with suppress(OSError):
            file.unlink()


class Handlers:
    """What the composer's events do."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def attach(self, data: gr.EventData, request: gr.Request, memory: Memory) -> Data:
        """Read a file, and keep it until it is sent."""
        owner, asked = owner_of(self.session, memory, request), Asked(data)
        try:
            found = attachments.read(asked.text("name"), upload(asked.text("path")))
        except StrataError as error:
            return {"number": asked.number, "error": str(error)}
        (shown,) = chip(self.session, self.session.attachments.add(owner, [found]))
        return {"number": asked.number, "file": shown}

    def drop(self, data: gr.EventData, request: gr.Request, memory: Memory) -> None:
        """Forget files."""
        owner = owner_of(self.session, memory, request)
        self.session.attachments.drop(owner, Asked(data).files)

    def measure(
        self,
        data: gr.EventData,
        request: gr.Request,
        conversation: str | None,
        memory: Memory,
        system: str,
    ) -> Data:
        """How full the context is."""
        owner, asked = owner_of(self.session, memory, request), Asked(data)
        size = None
        if asked.about(conversation):
            with suppress(StrataError):
                text = self.session.attachments.message(owner, asked.files, asked.text("text"))
                edited = asked.text("editing") or None
                size = self.session.gauge.size(owner, conversation, system or "", text, edited)
        if size is None:
            return {"number": asked.number}
        return {
            "number": asked.number,
            "tokens": size.tokens,
            "room": size.room,
            "context": self.session.current.info.context_length,
            "dropped": size.dropped,
            "fits": size.fits,
        }

    def place(
        self, request: gr.Request, conversation: str | None, editing: str | None, memory: Memory
    ) -> Data:
        """What is open, and the message that is edited, with its files."""
        owner = owner_of(self.session, memory, request)
        shown: Data = {"conversation": conversation, "editing": None}
        if conversation is None or editing is None:
            return shown
        with suppress(StrataError):
            store = self.session.chat.conversations(owner)
            for message in store.messages(conversation, pieces=False):
                if message.id == editing:
                    files, text = attachments.split(message.content)
                    added = self.session.attachments.add(owner, files)
                    chips = chip(self.session, added)
                    return {**shown, "editing": message.id, "text": text, "files": chips}
        return shown


def wire(
    session: Session,
    parts: Composer,
    current: gr.State,
    editing: gr.State,
    memory: gr.BrowserState,
    system: gr.Textbox,
) -> None:
    """Connect what the page asks for while a message is written."""
    on, writer, told = Handlers(session), parts.writer, parts.channels
    reading: dict[str, Any] = {**AT_ONCE, "concurrency_limit": READERS}
    writer.attach(on.attach, memory, told["attached"], trigger_mode="multiple", **reading)
    writer.drop(on.drop, memory, None, trigger_mode="multiple", **AT_ONCE)
    writer.measure(on.measure, [current, memory, system], told["filled"], **AT_ONCE)
    writer.cancel(lambda: None, None, editing, **AT_ONCE)
    gr.on(
        [current.change, editing.change],
        on.place,
        [current, editing, memory],
        told["place"],
        **LATEST,
    )
