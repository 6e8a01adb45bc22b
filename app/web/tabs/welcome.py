"""The first screen of the chat: examples, and a race of plain decoding against drafting.

Both lanes of the race play back runs that were just measured on this machine
(app/service/race.py). The page draws the race from JSON (assets/race.js). A race without a gain is
not played; the page says why, and offers the pace of a real model.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from app.service.comparison import Progress
from app.service.draft_models import amount
from app.service.jobs import Progress as Making
from app.service.models import Models, is_embedded
from app.service.race import BYTES, PROMPT, NoGain, Race
from app.service.session import Session
from app.web import render
from app.web.kit import Payload, Tab, Updates, html, notify_errors, numbered, small_button
from app.web.markup import template
from app.web.run_html import title_of
from assets import read
from engine.methods import PLAIN
from engine.queue import Waiting
from engine.types import Run

EXAMPLES = (
    "Tell me a short story about a boat and a storm.",
    "Tell a story about two friends, then tell it once more, more slowly.",
    "Write a list of ten things a curious child might find in a garden.",
    "Describe the same evening twice: once by the sea, once in a city.",
)
SIMPLE_EXAMPLES = (
    "Which syrups do you have for coffee?",
    "Can you order a pizza for me?",
    "Hi, how are you? What do you like to do for fun?",
    "What kinds of books do you like to read?",
)
"""Examples for the demonstration model, which answers small talk and orders, but cannot tell a
story. With its recommended sampling, all 80 answers (20 seeds for each example) ended after 6 to 88
tokens."""


def examples(models: Models) -> tuple[str, ...]:
    return SIMPLE_EXAMPLES if is_embedded(models.source or models.requested.source) else EXAMPLES


def suggest(models: Models, buttons: Sequence[gr.Button]) -> Updates:
    return {
        button: gr.update(value=text)
        for button, text in zip(buttons, examples(models), strict=True)
    }


def welcome(models: Models) -> tuple[gr.Column, list[gr.Button]]:
    with gr.Column(elem_classes="empty-state", elem_id="empty") as empty:
        gr.HTML(
            "<h2>Ask something, and watch where each word comes from.</h2>"
            "<p>Three databases guess the next words, and so does the model's built-in head if it "
            "has one. The model checks all guesses in one step and keeps only what it would have "
            "said anyway.</p>"
        )
        with gr.Row(elem_classes="examples"):
            buttons = [small_button(text) for text in examples(models)]
        html(
            '<p class="offer">New here? <button type="button" class="to-tour">Take the tour'
            '</button> It takes 20 seconds. <button type="button" class="no-tour">No, thanks'
            "</button></p>"
        )
    return empty, buttons


RACE = template("race.html")
ABOUT_PACE = (
    "The pace of a real model: the demonstration model, padded to the cost of 0.5\u00a0B "
    "parameters. It says nearly the same, and takes as long for each word. It is made here from "
    f"the same weights, once, and takes {amount(BYTES)} on the disk until you remove it in the "
    "Models tab."
)


def race_value(item: Making | Progress | Waiting | NoGain | Race) -> render.Data:
    if isinstance(item, Making):
        share = "" if item.share is None else f" {100 * item.share:.0f} %"
        return {"state": "making", "text": item.text.removesuffix(" …") + f" …{share}"}
    if isinstance(item, Waiting):
        return {"state": "waiting"}
    if isinstance(item, NoGain):
        text = "With this model, guessing is not expected to gain anything on this machine: "
        return {"state": "none", "outcome": f"{text}{item.why}."}
    if isinstance(item, Race):
        lanes = [lane(item.plain), lane(item.fast)]
        played = {"state": "over", "prompt": PROMPT, "lanes": lanes}
        return {**(played if item.gains else {"state": "none"}), "outcome": outcome(item)}
    if item.running is None:
        return {"state": "waiting"}
    plain = item.running.method == PLAIN.name
    return {"state": "plain" if plain else "fast", "tokens": len(item.running.tokens)}


def lane(run: Run) -> render.Data:
    """A run as it was measured: [milliseconds since the start, texts, sources] for each step."""
    clock = run.prefill.seconds if run.prefill else 0.0
    steps: list[list[object]] = []
    for step in run.steps:
        clock += step.seconds
        if step.tokens:
            texts, sources = [t.text for t in step.tokens], [t.source for t in step.tokens]
            steps.append([round(1e3 * clock, 2), texts, sources])
    clock += run.learned.seconds if run.learned else 0.0
    name = "Plain decoding" if run.method == PLAIN.name else title_of(run.method)
    return {"name": name, "steps": steps, "seconds": clock, "tokens": len(run.tokens)}


def outcome(race: Race) -> str:
    plain, fast = race.seconds
    by = f" with {race.model}" if race.model else ""
    text = f"Recorded just now on this machine{by}: plain {plain:.2f} s, "
    text += f"with guessing {fast:.2f} s{ratio(race)}. "
    if race.verdict.identical:
        return text + f"Both say the same, all {race.verdict.tokens:,} tokens."
    return text + f"The texts diverge at token {race.verdict.position:,}, where rounding decided."


def ratio(race: Race) -> str:
    if race.gains:
        return f", {race.speedup.whole:.2f}× as fast"
    if race.speedup.whole is None:
        return ". No guess was kept, so there is no gain to show"
    return f" ({race.speedup.whole:.2f}×). That is no gain to show"


class RaceView(Tab):
    def __init__(self, session: Session, memory: gr.BrowserState) -> None:
        super().__init__(session, memory)
        self.view: Any = html(
            value={},
            html_template=RACE,
            js_on_load=read("race.js"),
            names=render.names(),
            pace=ABOUT_PACE if session.padded.offered else "",
            elem_id="race",
            padding=False,
        )

    def wire(self) -> None:
        """Record a race when the user starts one, and end it when they leave."""
        self.on(self.view.watch, self.watch, (), self.view, mode="multiple")
        self.on(self.view.end, self.session.races.stop)

    def watch(self, owner: str, data: gr.EventData) -> Iterator[render.Data]:
        last: Making | Progress | Waiting | NoGain | Race | None = None
        sent = Payload(data).values
        padded, anyway = sent.get("padded") is True, sent.get("anyway") is True
        with notify_errors():
            for last in self.session.races.run(owner, padded, anyway):
                yield numbered(race_value(last))
        if not isinstance(last, Race | NoGain):
            yield numbered({"state": "idle"})
