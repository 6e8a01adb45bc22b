"""The section of the Models tab that measures all ways to run the loaded model."""

from collections.abc import Iterator

import gradio as gr
from gradio.blocks import Block

from app.service.draft_models import amount
from app.service.jobs import Job, Progress
from app.service.session import Session
from app.service.ways import PROMPTS, TOKENS, Found, title
from app.web import models_html
from app.web.kit import ACT, REFRESH, Event, JobCard, Tab, Updates, html
from app.web.markup import fine_print, template

TEXT = (
    "<h3>The fastest way to run it</h3><p>The fewer bits a weight has, the less there is to read "
    f"in each step. {len(PROMPTS)} prompts are answered with up to {TOKENS} tokens each, plainly "
    "and with guessing, in each way that this machine has. The model is loaded once for each, and "
    "at the end as it is now. Rounded weights make it a slightly different model.</p>"
)
TITLES = ("weights", "computed by", "memory", "plain tokens/s", "with guessing")


def speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.{0 if tokens_per_second >= 100 else 1}f}"


def table(found: Found) -> str:
    best_first = sorted(found.ways, key=lambda way: way.fastest, reverse=True)
    rows = [
        (way.dtype, way.by, amount(way.bytes), speed(way.plain), speed(way.drafted))
        for way in best_first
    ]
    name = "Tokens per second of whole answers, the fastest way first"
    return template("results.html", name=name, titles=TITLES, rows=rows, explained={})


def suggestion(found: Found) -> str:
    best, usual = found.fastest, found.usual
    if best is usual:
        text = "No other way is faster by more than the machine's pace changed meanwhile"
        return f"{text}, {100 * (found.least - 1):.0f} %."
    times = best.fastest / usual.fastest
    return (
        f"With {title(best.runtime)} it answers {times:.2f} times as fast as now. Press Load to "
        "use it so."
    )


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
