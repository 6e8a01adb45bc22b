"""What stands in the chat before the first answer."""

import gradio as gr

from app.web import guide

EXAMPLES = (
    "Tell me a short story about a boat and a storm.",
    "Tell a story about two friends, then tell it once more, more slowly.",
    "Write a list of ten things a curious child might find in a garden.",
    "Describe the same evening twice: once by the sea, once in a city.",
)


def welcome() -> tuple[gr.Column, list[gr.Button]]:
    """What stands where the first answer will be."""
    with gr.Column(elem_classes="empty-state", elem_id="empty") as empty:
        gr.HTML(
            "<h2>Ask something, and watch where each word comes from.</h2>"
            "<p>Three databases guess the next words. The model checks all guesses in one step "
            "and keeps only what it would have said anyway.</p>"
        )
        with gr.Row(elem_classes="examples"):
            examples = [gr.Button(text, size="sm") for text in EXAMPLES]
        gr.HTML(guide.OFFER, apply_default_css=False)
    return empty, examples
