"""Where messages are written: the box, Send and Stop."""

import gradio as gr


def invitation(name: str) -> str:
    """What an empty composer says."""
    return f"Message {name}"


def composer(name: str) -> tuple[gr.Textbox, gr.Button, gr.Button]:
    """Where messages are written, with Send and, while an answer grows, Stop."""
    with gr.Row(elem_classes="composer"):
        box = gr.Textbox(
            show_label=False,
            container=False,
            lines=1,
            max_lines=8,
            scale=8,
            placeholder=invitation(name),
            elem_id="box",
            autofocus=True,
        )
        send = gr.Button("Send", variant="primary", scale=1, min_width=88, elem_id="send")
        stop = gr.Button(
            "Stop", variant="stop", scale=1, min_width=88, visible=False, elem_id="stop"
        )
    return box, send, stop
