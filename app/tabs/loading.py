"""Where a model is loaded from: a button, its Stop, and how far it is."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import gradio as gr

from app.comparison import Pace
from app.models import Progress, Report
from engine.errors import StrataError

UPDATE_SECONDS = 0.3


@dataclass(slots=True)
class Place:
    """`buttons` start a load, each in its own way; what becomes of it is told in `status`."""

    buttons: list[gr.Button]
    stop: gr.Button
    status: gr.HTML


def build_place(name: str, *titles: str) -> Place:
    """A button for each title, and what belongs to them; their ids begin with `name`."""
    with gr.Row(elem_classes="presets"):
        buttons = [
            gr.Button(title, size="sm", elem_id=f"{name}-load{number or ''}")
            for number, title in enumerate(titles)
        ]
        stop = gr.Button("Stop", size="sm", variant="stop", visible=False, elem_id=f"{name}-stop")
    return Place(buttons, stop, gr.HTML(elem_id=f"{name}-status", apply_default_css=False))


def paced(reports: Iterator[Progress]) -> Iterator[Progress]:
    """A few reports a second, with the first one of every stage and the last one of all."""
    pace, known, late = Pace(UPDATE_SECONDS), True, None
    for report in reports:
        begins, known = known and report.share is None, report.share is not None
        late = None if begins or pace.due() else report
        if late is None:
            yield report
    if late is not None:
        yield late


def reported(work: Callable[[Report], None]) -> Iterator[Progress]:
    """What a piece of work reports while it is done in a thread of its own; raises its error."""
    reports: SimpleQueue[Progress | StrataError | None] = SimpleQueue()

    def run() -> None:
        outcome = None
        try:
            work(reports.put)
        except StrataError as error:
            outcome = error
        finally:
            reports.put(outcome)

    threading.Thread(target=run, name="download", daemon=True).start()
    while (report := reports.get()) is not None:
        if isinstance(report, StrataError):
            raise report
        yield report
