"""The box to name a model in, and the buttons that load it, with Stop and progress."""

from collections.abc import Iterator
from dataclasses import dataclass

import gradio as gr

from app.service.comparison import Pace
from app.service.models import Progress

UPDATE_SECONDS = 0.3


@dataclass(slots=True)
class Place:
    """`buttons` start a load, each in its own way; what becomes of it is told in `status`."""

    buttons: list[gr.Button]
    stop: gr.Button
    status: gr.HTML


def build_adding(
    name: str, what: str = "Folder, GGUF file or Hugging Face id"
) -> tuple[gr.Textbox, gr.Button]:
    """Where a model is named, to be added to those that there are; their ids begin with `name`."""
    with gr.Row(elem_classes="adding"):
        box = gr.Textbox(
            show_label=False,
            container=False,
            placeholder=what,
            max_lines=1,
            scale=5,
            elem_id=f"{name}-source",
        )
        add = gr.Button("Add", size="sm", scale=1, min_width=60, elem_id=f"{name}-add")
    return box, add


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
