"""What belongs to the page as a whole: help, a tour, simple mode, and its layout on small screens.

Everything here happens in the browser (assets/guide.js), and is remembered there.
"""

from functools import cache

import gradio as gr

from assets import ASSETS

KEYS = (
    ("Enter", "send the message; while an answer grows it waits, where you can see it"),
    ("Shift Enter", "begin a new line"),
    ("Esc", "stop the answer, or leave the edit mode"),
    ("↑", "in an empty box: edit your last message"),
    ("Ctrl K", "find a conversation"),
    ("Ctrl Shift O", "begin a new conversation"),
    ("↑ ↓", "in the list of conversations: go from one to the next"),
    ("F2", "in the list: rename; Delete deletes, Shift F10 shows all else"),
    ("← →", "in an answer: go from word to word, to see where each came from"),
    ("?", "open this sheet"),
)
"""The shortcuts. On a Mac the command key takes the place of Ctrl."""
TOUR = (
    (
        "#tokens .legend",
        "Where words come from",
        "Coloured words were guessed: from this chat, from past answers, or from general text. "
        "The others are the model's own. Point at a word to see more.",
    ),
    (
        "#figures",
        "How fast it is",
        "The figures follow each answer: tokens per second, the speedup, and how many tokens "
        "one step of the model gave.",
    ),
    (
        "#prove, [data-act=prove]",
        "Prove it",
        "Guesses never change the text. Prove it decodes an answer again without them, and "
        "compares the two word by word.",
    ),
    (
        "tab:Compare",
        "Compare",
        "One prompt, two ways to answer it, measured in turn on this machine.",
    ),
    (
        "tab:Models",
        "Models",
        "Load a model of your own here, or take one from the catalogue.",
    ),
)
"""Steps of the tour: what is pointed at, its title, what there is to say."""


def keys() -> str:
    """The shortcuts as a table."""
    rows = (
        f"<dt>{''.join(f'<kbd>{key}</kbd>' for key in shortcut.split())}</dt><dd>{words}</dd>"
        for shortcut, words in KEYS
    )
    return f"<dl>{''.join(rows)}</dl>"


OFFER = (
    '<p class="offer">New here? <button type="button" class="to-tour">Take the tour</button> '
    'It takes 20 seconds. <button type="button" class="no-tour">No, thanks</button></p>'
)
"""Offered once, on the first screen, below all else."""


def template() -> str:
    """The help sheet, and the card of the tour's steps: hidden until asked for."""
    return (
        '<dialog class="sheet" id="help" aria-labelledby="help-title">'
        '<h2 id="help-title">Keyboard</h2>' + keys() + '<div class="ends">'
        '<button type="button" class="to-tour">Show the tour</button>'
        '<button type="button" class="close">Close</button></div></dialog>'
        '<div class="step" role="dialog" aria-labelledby="step-title" aria-describedby="step-words"'
        ' tabindex="-1" hidden><h2 id="step-title"></h2><p id="step-words"></p><div class="ends">'
        '<small></small><button type="button" class="skip">Skip</button>'
        '<button type="button" class="next">Next</button></div></div>'
        '<div class="scrim" hidden></div>'
    )


@cache
def script() -> str:
    """The guide's script."""
    return (ASSETS / "guide.js").read_text(encoding="utf-8")


def guide() -> gr.HTML:
    """The component; it shows nothing until it is asked to."""
    return gr.HTML(
        html_template=template(),
        js_on_load=script(),
        tour=[{"at": at, "title": title, "words": words} for at, title, words in TOUR],
        apply_default_css=False,
        elem_id="guide",
    )


def bar() -> gr.HTML:
    """Above the chat on a small screen and in simple mode: the way to the conversations, and to all
    of the figures."""
    return gr.HTML(
        html_template='<div class="ways"><button type="button" class="to-shelf" '
        'aria-expanded="false">Conversations</button><button type="button" class="to-figures" '
        'aria-expanded="false">Figures</button></div>',
        js_on_load=None,
        apply_default_css=False,
        elem_id="bar",
    )


def switches(password: bool) -> tuple[gr.Button, gr.Button]:
    """The buttons at the right of the header. Returns the one for light and dark, and the one that
    logs out, which is there where a `password` let somebody in."""
    with gr.Row(elem_classes="switches"):
        gr.Button("Simple mode", size="sm", elem_id="mode", min_width=40)
        theme = gr.Button("Light / dark", size="sm", elem_id="theme", min_width=40)
        gr.Button("Help", size="sm", elem_id="to-help", min_width=40)
        leave = gr.Button("Log out", size="sm", elem_id="log-out", min_width=40, visible=password)
    return theme, leave
