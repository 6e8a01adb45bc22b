"""The section of the Models tab that measures all ways to run the loaded model."""

from collections.abc import Iterator

import gradio as gr
from gradio.blocks import Block

from app.service.jobs import Job, Progress
from app.service.session import Session
from app.service.ways import PROMPTS, TITLES, TOKENS, Found
from app.web import models_html
from app.web.kit import ACT, REFRESH, Event, JobCard, Tab, Updates, html
from app.web.markup import fine_print, template

TEXT = (
    "<h3>The fastest way to run it</h3><p>The fewer bits a weight has, the less there is to read "
    f"in each step. {len(PROMPTS)} prompts are answered with up to {TOKENS} tokens each, plainly "
    "and with guessing, in each way that this machine has. The model is loaded once for each, and "
    "at the end as it is now. Rounded weights make it a slightly different model.</p>"
)


def table(found: Found) -> str:
    name = "Tokens per second of whole answers, the fastest way first"
    return template("results.html", name=name, titles=TITLES, rows=found.rows(), explained={})


def suggestion(found: Found) -> str:
    press = "" if found.fastest is found.usual else " Press Load to use it so."
    return found.verdict + press


class WaysSection(Tab):
    """`bits` is the control of the Models tab that the suggestion sets."""

    def __init__(self, session: Session, memory: gr.BrowserState, bits: Block) -> None:
        super().__init__(session, memory)
        self.ways, self.bits = session.ways, bits
        with gr.Column(elem_classes="card", elem_id="ways", visible=False) as self.section:
            gr.HTML(TEXT)
            self.place = JobCard.build("ways", "Measure")
            self.table = html(elem_id="ways-table")

    def wire(self, tab: gr.Tab, after: Event) -> Event:
        """Connect the section. `after` is the event that refreshes the rest of the tab. Returns the
        event that shows what is known about the loaded model."""
        (button,) = self.place.buttons
        outputs = [self.section, button, self.place.stop, self.place.status, self.table]
        shown = self.event(self.show, (), outputs, guard=REFRESH)
        self.on(tab.select, shown)
        measured = self.on(button.click, self.measure, (), [*outputs, self.bits], guard=ACT)
        self.then(measured, after)
        self.on(self.place.stop.click, self.ways.stop)
        return shown

    def show(self) -> Iterator[Updates]:
        """Show what was measured, or the progress of what another page began."""
        job = self.ways.slot.running
        found = self.ways.known.get(self.session.models.source)
        yield {
            self.section: gr.update(visible=job is not None or self.ways.offered),
            self.table: table(found) if found else "",
            self.place.status: "",
        }
        if job is not None:
            yield from self.follow(job)

    def measure(self, owner: str) -> Iterator[Updates]:
        job = self.ways.start(owner)
        yield {self.table: ""}
        yield from self.follow(job)
        if job.error is None:
            yield {self.bits: gr.update(value=job.result().fastest.runtime.bits)}

    def follow(self, job: Job[Progress, Found]) -> Iterator[Updates]:
        yield self.place.busy()

        def done(last: Progress) -> str:
            found = job.result()
            left_out = (f"{bits}: {problem}" for bits, problem in found.left_out)
            return fine_print(suggestion(found), *left_out)

        status = yield from self.place.follow(
            job.watch(), done, lambda error: models_html.broken(str(error))
        )
        found = job.result() if job.error is None else None
        yield {**self.place.idle(status=status), self.table: table(found) if found else ""}
