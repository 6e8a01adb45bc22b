"""The composer, in which messages are written: the box, attached files, waiting messages, and how
full the context is.

The browser owns the unsent message (assets/composer). It sends requests as events of the component
`writer`. Replies are values of hidden components, the channels; each becomes an event of the
document.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder

from app.service import attachments
from app.service.attachments import Attachment, Pending
from app.service.session import Session
from app.web.kit import Tab, explained, html, notify_errors, payload
from app.web.markup import template
from app.web.render import Data, remarks, spoken
from assets import read
from engine.errors import PromptError, StrataError
from storage.conversations import StoredMessage

SCRIPT = tuple(
    f"composer/{name}.js"
    for name in ("state", "drafts", "sending", "files", "gauge", "keys", "begin")
)
CHANNELS = ("sent", "revised", "place", "attached", "filled")
"""The channels: whether a message was accepted, or a new version of one; the open conversation; a
file that was read; how full the context is."""
GONE = "There is no such message. It may have been deleted: reload the page."
READERS = 2
"""How many files are read at the same time, because a long PDF file keeps a core busy."""
TEMPLATE = template("composer.html")


def invitation(name: str) -> str:
    return f"Message {name}"


def channel(name: str) -> gr.HTML:
    return html(
        visible="hidden",
        html_template="",
        js_on_load=f'watch("value", () => document.dispatchEvent('
        f'new CustomEvent("strata:{name}", {{ detail: props.value }})));',
    )


class ComposerRequest:
    """The request that a page sent with an event. Each part has the expected type, or is empty."""

    def __init__(self, data: gr.EventData) -> None:
        self.sent = payload(data)

    def text(self, name: str) -> str:
        """The text of that name; "" if it is missing or not a text."""
        found = self.sent.get(name)
        return found if isinstance(found, str) else ""

    @property
    def number(self) -> int:
        """The number of the request, which the reply repeats."""
        found = self.sent.get("number")
        return found if isinstance(found, int) else 0

    @property
    def files(self) -> list[str]:
        """The keys of the attached files."""
        found = self.sent.get("files")
        return [key for key in found if isinstance(key, str)] if isinstance(found, list) else []

    @property
    def kept(self) -> set[int]:
        """The indexes of the files that stay with an edited message."""
        found = self.sent.get("kept")
        return {at for at in found if isinstance(at, int)} if isinstance(found, list) else set()

    @property
    def file(self) -> int | None:
        """The index of a file of a message."""
        found = self.sent.get("file")
        return found if isinstance(found, int) else None

    def about(self, conversation: str | None) -> bool:
        return (self.sent.get("conversation") or None) == (conversation or None)


def chip(session: Session, pending: Sequence[Pending]) -> list[Data]:
    counts = session.chat.counts([each.file.block for each in pending])
    return [
        {
            "key": each.key,
            "name": each.file.name,
            "size": each.size,
            "tokens": tokens,
            "exact": exact,
            "note": each.file.note,
        }
        for each, (tokens, exact) in zip(pending, counts, strict=True)
    ]


def upload(path: str) -> bytes:
    """The content of an uploaded file, which is then deleted. Raises PromptError for a path outside
    the folder of uploads, or a file that cannot be read."""
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


def text_to_rewrite(
    session: Session, owner: str, conversation: str | None, request: ComposerRequest
) -> Attachment:
    """A file of a message, or an answer, as a text to rewrite. Raises PromptError for an unknown
    message or file."""
    message = requested(session, owner, conversation, request)
    if message.role == "user":
        files, _ = attachments.split(message.content)
        found = next((file for at, file in enumerate(files) if at == request.file), None)
    else:
        text = spoken(message, remarks(session.database, owner, conversation))
        found = Attachment("answer.md", text) if text else None
    if found is None:
        raise PromptError("There is no text to rewrite in this message. Choose another one.")
    return replace(found, note="to be rewritten", rewrite=True)


def requested(
    session: Session, owner: str, conversation: str | None, request: ComposerRequest
) -> StoredMessage:
    """The message that a request names. Raises PromptError if it is not shown any more."""
    store, message_id = session.chat.conversations(owner), request.text("message")
    for message in store.messages(conversation, pieces=False) if conversation else ():
        if message.id == message_id:
            return message
    raise PromptError(GONE)


def edited_text(
    session: Session, owner: str, conversation: str | None, request: ComposerRequest
) -> str:
    """The new text of a message of the user, as edited on a page: the new words, the files that
    stay and the added files. Raises PromptError for an unknown message or file."""
    message = requested(session, owner, conversation, request)
    if message.role != "user":
        raise PromptError(GONE)
    files, _ = attachments.split(message.content)
    kept = [file for at, file in enumerate(files) if at in request.kept]
    text = session.attachments.message(owner, request.files, request.text("text"))
    return attachments.join(kept, text)


class Composer(Tab):
    """The box with Send and, while an answer grows, Stop; and the hidden components `writer` and
    `channels`. `most` is the largest size of a file in bytes,
    `longest` the most characters of a message."""

    def __init__(self, session: Session, memory: gr.BrowserState) -> None:
        super().__init__(session, memory)
        self.writer: Any = html(
            html_template=TEMPLATE,
            js_on_load=read(*SCRIPT),
            elem_id="writer",
            most=attachments.MAX_BYTES,
            longest=attachments.MAX_CHARACTERS,
        )
        with gr.Row(elem_classes="composer"):
            gr.Button("+", elem_id="attach", min_width=36, scale=0)
            self.box = gr.Textbox(
                show_label=False,
                container=False,
                lines=1,
                max_lines=8,
                scale=8,
                placeholder=invitation(session.current.info.name),
                elem_id="box",
                autofocus=True,
                interactive=True,
            )
            gr.Button("Queue", elem_id="queue", scale=1, min_width=80)
            self.send = gr.Button("Send", variant="primary", scale=1, min_width=88, elem_id="send")
            self.stop = gr.Button(
                "Stop", variant="stop", scale=1, min_width=88, visible=False, elem_id="stop"
            )
        self.channels = {name: channel(name) for name in CHANNELS}

    def wire(self, current: gr.State, system: gr.Textbox) -> None:
        writer, channels = self.writer, self.channels
        self.on(
            writer.attach,
            self.attach,
            (),
            channels["attached"],
            mode="multiple",
            concurrency_limit=READERS,
        )
        self.on(writer.drop, self.drop, mode="multiple")
        self.on(writer.measure, self.measure, [current, system], channels["filled"])

    def attach(self, owner: str, data: gr.EventData) -> Data:
        request = ComposerRequest(data)
        try:
            found = attachments.read(request.text("name"), upload(request.text("path")))
            (shown,) = chip(self.session, self.session.attachments.add(owner, [found]))
        except Exception as error:
            return {"number": request.number, "error": explained(error)}
        return {"number": request.number, "file": shown}

    def drop(self, owner: str, data: gr.EventData) -> None:
        self.session.attachments.drop(owner, ComposerRequest(data).files)

    def measure(
        self, owner: str, data: gr.EventData, conversation: str | None, system: str
    ) -> Data:
        request, size = ComposerRequest(data), None
        if request.about(conversation):
            with notify_errors(), suppress(StrataError):
                editing = request.text("message") or None
                if editing:
                    text = edited_text(self.session, owner, conversation, request)
                else:
                    text = self.session.attachments.message(
                        owner, request.files, request.text("text")
                    )
                size = self.session.chat.size(owner, conversation, system or "", text, editing)
        if size is None:
            return {"number": request.number}
        return {
            "number": request.number,
            "tokens": size.tokens,
            "room": size.room,
            "context": self.session.current.info.context_length,
            "dropped": size.dropped,
            "fits": size.fits,
        }
