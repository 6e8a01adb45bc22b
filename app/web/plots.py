"""The components that show charts, two in a row."""

from collections.abc import Sequence

import gradio as gr
import plotly.graph_objects as go


def grid(figures: Sequence[go.Figure]) -> list[gr.Plot]:
    """A component per figure, in their order; an odd last one takes the whole width."""
    plots: list[gr.Plot] = []
    for start in range(0, len(figures), 2):
        with gr.Row(elem_classes="plots"):
            plots += [
                gr.Plot(figure, show_label=False, container=False)
                for figure in figures[start : start + 2]
            ]
    return plots
