"""GGUF support: what it is, a button that sets it up, how far that is, and what went wrong."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape

import gradio as gr
from gradio.blocks import Block

from app.service.gguf_support import GgufSupport
from app.web import models_html
from app.web.stack_html import fine
from app.web.tabs.loading import Place, build_place
from app.web.wiring import AFTER, AT_ONCE, Deeds, Event, counted, unless_done
from engine.errors import Cancelled, StrataError

BUTTON = "Set up GGUF support"
WORDS = (
    "<h3>GGUF files</h3><p>GGUF files need llama.cpp, which is compiled on your machine: about 6 "
    "minutes on 2 cores. This takes a C++ compiler and a network. You can chat meanwhile.</p>"
)
DONE = "GGUF support is set up. Choose a GGUF file and load it."

Changes = dict[Block, object]
"""What an event changes, by component."""


@dataclass(slots=True)
class Parts:
    """The section's components."""

    section: gr.Column
    place: Place


def build(support: GgufSupport) -> Parts:
    """The section, which is there as long as GGUF support is not."""
    with gr.Column(elem_classes="card", elem_id="gguf", visible=not support.installed()) as section:
        gr.HTML(WORDS)
        return Parts(section, build_place("gguf", BUTTON))


def output(lines: Iterable[str]) -> str:
    """The end of what pip said."""
    said = escape("\n".join(lines))
    return f'<pre class="output">{said}</pre>' if said else ""


class Handlers:
    """What the section's events do."""

    def __init__(self, support: GgufSupport, parts: Parts) -> None:
        self.support, self.parts = support, parts

    def show(self) -> Iterator[Changes]:
        """Show whether it is there, and how far the work is if another page began it."""
        if self.support.busy.locked():
            yield from self.follow()
        else:
            yield {self.parts.section: gr.update(visible=not self.support.installed())}

    def set_up(self) -> Iterator[Changes]:
        """Set it up, until it is done or stopped."""
        try:
            self.support.start()
        except StrataError as error:
            yield {self.parts.place.status: fine(str(error))}
        else:
            yield from self.follow()

    def follow(self) -> Iterator[Changes]:
        """Show how far the work is, and what becomes of it."""
        (button,), stop, status = self.parts.place.buttons, self.parts.place.stop, ""
        yield {
            self.parts.section: gr.update(visible=True),
            button: gr.update(visible=False),
            stop: gr.update(visible=True),
        }
        again = True
        try:
            for progress in self.support.watch():
                yield {self.parts.place.status: models_html.progress(progress)}
            status, again = fine(DONE), False
        except Cancelled as error:
            status = fine(str(error))
        except StrataError as error:
            status = models_html.broken(str(error)) + output(self.support.lines)
        yield {
            button: gr.update(visible=again),
            stop: gr.update(visible=False),
            self.parts.place.status: status,
        }


def wire(support: GgufSupport, parts: Parts, tab: gr.Tab, after: Event) -> None:
    """Connect the section. `after` is the event by which the rest of the tab follows."""
    on = Handlers(support, parts)
    outputs = [parts.section, *parts.place.buttons, parts.place.stop, parts.place.status]
    deeds = gr.State(Deeds())
    tab.select(unless_done(on.show), deeds, outputs, **AT_ONCE)
    event = parts.place.buttons[0].click(counted(on.set_up), deeds, outputs, **AT_ONCE)
    event.then(*after, **AFTER)
    parts.place.stop.click(support.stop, None, None, **AT_ONCE)
