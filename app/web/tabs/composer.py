"""The composer, in which messages are written: the box, attached files, waiting messages, and how
full the context is.

The browser owns the unsent message (assets/composer). It sends requests as events of the component
`writer`. Replies are values of hidden components, the channels; each becomes an event of the
document.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder

from app.service import attachments
from app.service.attachments import Attachment
from app.service.session import Session
from app.web.kit import Payload, Tab, channel, explained, html, notify_errors, upload_content
from app.web.markup import template
from app.web.render import Data, remarks, spoken
from assets import read
from engine.errors import PromptError, StrataError
from storage.conversations import StoredMessage

SCRIPT = tuple(
    f"composer/{name}.js"
    for name in ("state", "drafts", "sending", "files", "gauge", "keys", "begin")
)
CHANNELS = ("sent", "revised", "place", "ready", "attached", "filled")
"""The channels: whether a message was accepted, or a new version of one; the open conversation;
that the page has the settings of a new conversation; a file that was read; how full the context
is."""
GONE = "There is no such message. It may have been deleted: reload the page."
READERS = 2
"""How many files are read at the same time, because a long PDF file keeps a core busy."""
TEMPLATE = template("composer.html")


def invitation(name: str) -> str:
    return f"Message {name}"


class ComposerRequest(Payload):
    """A request of the composer, or of the editor of a message."""

    @property
    def number(self) -> int:
        """The number of the request, which the reply repeats."""
        return self.integer("number", 0)

    @property
    def files(self) -> list[str]:
        """The keys of the attached files."""
        return self.all_of("files", str)

    def about(self, conversation: str | None) -> bool:
        return (self.values.get("conversation") or None) == (conversation or None)


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
        """Attach an uploaded file. Only files in the folder of uploads are read."""
        request = ComposerRequest(data)
        path = Path(request.text("path")).resolve()
        try:
            if not path.is_relative_to(Path(get_upload_folder()).resolve()):
                raise PromptError("Only a file that was sent to this page can be attached.")
            content = upload_content(str(path), attachments.MAX_BYTES)
            shown = self.chip(owner, attachments.read(request.text("name"), content))
        except Exception as error:
            return {"number": request.number, "error": explained(error)}
        return {"number": request.number, "file": shown}

    def chip(self, owner: str, file: Attachment) -> Data:
        """Attach a file to the message that is being written. Returns what the page shows of it."""
        (pending,) = self.session.attachments.add(owner, [file])
        ((tokens, exact),) = self.session.chat.counts([file.block])
        return {
            "key": pending.key,
            "name": file.name,
            "size": pending.size,
            "tokens": tokens,
            "exact": exact,
            "note": file.note,
        }

    def requested(
        self, owner: str, conversation: str | None, request: ComposerRequest
    ) -> StoredMessage:
        """The message that a request names. Raises PromptError if it is not shown any more."""
        store = self.session.chat.conversations(owner)
        for message in store.messages(conversation, pieces=False) if conversation else ():
            if message.id == request.text("message"):
                return message
        raise PromptError(GONE)

    def rewrite(self, owner: str, conversation: str | None, request: ComposerRequest) -> Data:
        """Attach a file of a message, or an answer, to be rewritten. Raises PromptError for an
        unknown message or file."""
        message = self.requested(owner, conversation, request)
        if message.role == "user":
            files = dict(enumerate(attachments.split(message.content)[0]))
            found = files.get(request.integer("file"))
        else:
            text = spoken(message, remarks(self.session.database, owner, conversation))
            found = Attachment("answer.md", text) if text else None
        if found is None:
            raise PromptError("There is no text to rewrite in this message. Choose another one.")
        return {"file": self.chip(owner, replace(found, note="to be rewritten", rewrite=True))}

    def edited(self, owner: str, conversation: str | None, request: ComposerRequest) -> str:
        """The new text of a message of the user, as edited on a page: the new words, the files
        that stay and the added files. Raises PromptError for an unknown message or file."""
        message = self.requested(owner, conversation, request)
        if message.role != "user":
            raise PromptError(GONE)
        files, _ = attachments.split(message.content)
        kept = [file for at, file in enumerate(files) if at in request.all_of("kept", int)]
        return attachments.join(kept, self.written(owner, request))

    def written(self, owner: str, request: ComposerRequest) -> str:
        """The text and the attached files of a request."""
        return self.session.attachments.message(owner, request.files, request.text("text"))

    def drop(self, owner: str, data: gr.EventData) -> None:
        self.session.attachments.drop(owner, ComposerRequest(data).files)

    def measure(
        self, owner: str, data: gr.EventData, conversation: str | None, system: str
    ) -> Data:
        request, size = ComposerRequest(data), None
        if request.about(conversation):
            with notify_errors(), suppress(StrataError):
                editing = request.text("message") or None
                text = (
                    self.edited(owner, conversation, request)
                    if editing
                    else self.written(owner, request)
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
