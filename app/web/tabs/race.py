"""The race on the first screen: plain decoding against drafting, recorded just now, side by side.

No figure is made up: both lanes play back what was measured on this machine a moment ago
(app/service/race.py). The page draws it from JSON alone (assets/race.js).
"""

from collections.abc import Iterator
from functools import cache
from itertools import count

import gradio as gr

from app.service.comparison import Progress
from app.service.race import PROMPT, Race
from app.service.session import Session
from app.web import render
from app.web.verdicts import title_of
from app.web.wiring import AT_ONCE, Memory, owner_of
from app.web.wiring import told as reported
from assets import ASSETS
from engine.compare import Speedup
from engine.methods import PLAIN
from engine.queue import Waiting
from engine.types import Run

TEMPLATE = (
    '<section class="race" aria-label="A race of plain decoding against guessing">'
    '<div class="keys"><button type="button" class="watch">Watch a race</button>'
    '<button type="button" class="stop" hidden>Stop</button>'
    '<span class="line" aria-live="polite"></span></div>'
    '<div class="lanes" hidden><p class="asked fine"></p>'
    + 2
    * '<article><h3><span></span><output></output></h3><div class="bar"><i></i></div>'
    '<p class="words" tabindex="0" role="group" aria-label="Its answer"></p></article>'
    + '<p class="told" aria-live="polite"></p></div></section>'
)
NUMBERS = count(1)
"""No two values are equal: an equal one would not be looked at."""


@cache
def script() -> str:
    """The race's script."""
    return (ASSETS / "race.js").read_text(encoding="utf-8")


def build() -> gr.HTML:
    """The button, and the race once it was recorded."""
    return gr.HTML(
        value={},
        html_template=TEMPLATE,
        js_on_load=script(),
        names=render.names(),
        elem_id="race",
        apply_default_css=False,
        padding=False,
    )


def wire(session: Session, part: gr.HTML, memory: gr.BrowserState) -> None:
    """Record a race when somebody wants to watch one, and end it when they do not."""

    def watch(request: gr.Request, memory: Memory) -> Iterator[render.Data]:
        last: Progress | Waiting | Race | None = None
        with reported():
            for last in session.races.run(owner_of(session, memory, request)):
                yield {**told(last), "number": next(NUMBERS)}
        if not isinstance(last, Race):
            yield {"state": "idle", "number": next(NUMBERS)}

    def stop(request: gr.Request, memory: Memory) -> None:
        session.races.stop(owner_of(session, memory, request))

    part.watch(watch, memory, part, trigger_mode="multiple", **AT_ONCE)
    part.end(stop, memory, None, **AT_ONCE)


def told(item: Progress | Waiting | Race) -> render.Data:
    """What the page is sent of a race."""
    if isinstance(item, Waiting):
        return {"state": "waiting"}
    if isinstance(item, Race):
        lanes = [lane(item.plain), lane(item.fast)]
        return {"state": "over", "asked": PROMPT, "lanes": lanes, "told": outcome(item)}
    if item.running is None:
        return {"state": "waiting"}
    plain = item.running.method == PLAIN.name
    return {"state": "plain" if plain else "fast", "tokens": len(item.running.tokens)}


def lane(run: Run) -> render.Data:
    """A run as it came: [milliseconds since the start, texts, sources] for each step."""
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
    """What came of it, in a sentence or two."""
    plain, fast = race.seconds
    said = f"Recorded just now on this machine: plain {plain:.2f} s, with guessing {fast:.2f} s"
    said += f"{ratio(race.speedup)}. "
    found = race.verdict
    if found.identical:
        return said + f"Both say the same, all {found.tokens:,} tokens."
    return said + f"The texts part at token {found.position:,}, where rounding decided."


def ratio(speedup: Speedup) -> str:
    """How the times compare; nothing where no guess was kept."""
    if speedup.whole is None:
        return ""
    if speedup.whole < 1:
        return f". This time guessing cost more than it saved ({speedup.whole:.2f}×)"
    return f", {speedup.whole:.2f}× as fast"
