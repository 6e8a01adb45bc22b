"""`python docs/moving_picture.py`: one conversation, written plainly and with Strata, side by side.

First the conversation is decoded both ways, one after the other, and the time of every step is
recorded: reading the prompt, the steps, learning. Then the recording is drawn at its own speed,
with the app's token view and styles, and saved as docs/images/answer.webp. The messages and seeds
are the first ones by which the Stack tab measures plans, so none was picked for its speed.
Needs Chromium on the PATH. Run it while the machine does nothing else.
"""

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from PIL import Image, ImageColor
from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from app.cli import prepare_environment  # noqa: E402

prepare_environment(page=True)

from app.arguments import EMBEDDED  # noqa: E402
from app.service.answering import Update  # noqa: E402
from app.service.preferences import Preferences  # noqa: E402
from app.service.session import Session  # noqa: E402
from app.web import layout, render, token_view  # noqa: E402
from app.web.colors import INKS  # noqa: E402
from app.web.tabs.settings import DEFAULT_TOKENS  # noqa: E402
from assets import ASSETS  # noqa: E402
from bench.page import chromium  # noqa: E402
from engine.hsd.trials import PROMPTS  # noqa: E402
from engine.local import Local  # noqa: E402
from engine.settings import Generation  # noqa: E402
from storage.conversations import Piece  # noqa: E402
from storage.database import Database  # noqa: E402
from storage.statistics import open_table  # noqa: E402

MESSAGES = PROMPTS[:8]
"""About a thousand tokens: some seconds of an answer, on a small machine."""
PICTURE = ROOT / "docs" / "images" / "answer.webp"
PAIRS = 3
"""How often both are decoded, in swapped order. The pair with the median gain is drawn."""
SIZE = {"width": 1120, "height": 540}
SCALE = 1.2
FRAMES_PER_SECOND = 10
SAME = "#2f9e6e"
"""The green of a verdict in assets/styles/composer.css."""
HOLD_MS = 4_000
COLOURS = 96
"""Few enough for a small file, and enough for all colours of the app."""
METHODS = {"plain": "Plain decoding", "hd": "With Strata"}
STYLE = """
body { margin: 0; padding: 16px 26px; background: #fcfcfd; color: #1f2937; overflow: hidden;
  --body-text-color: #1f2937; --body-background-fill: #fcfcfd;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 36px !important; }
.side-head h3 { font-size: 17px; }
.side-head { padding-bottom: 10px; font-size: 13.5px; }
.side-head b { font-size: 15px; }
.side .turns { height: 412px; overflow: hidden; }
.legend, .chip { padding-left: 0; }
.side .legend { gap: 0; flex-wrap: nowrap; }
.chip { font-family: inherit; font-size: 12px; gap: 5px; padding-right: 13px; white-space: nowrap; }
.inspector { display: none; }
#end { margin-top: 12px; min-height: 34px; }
"""
PAGE = """<!doctype html><meta charset="utf-8"><style>%s</style><div class="pair">
<div class="side"><div class="side-head"></div><div class="view">%s</div></div>
<div class="side"><div class="side-head"></div><div class="view">%s</div></div></div>
<div id="end"></div>"""
START = """([script, names]) => {
  window.sides = [...document.querySelectorAll(".view")].map((element) => {
    const side = { props: { names, value: {} } };
    const watch = (name, act) => { side.draw = act; };
    new Function("element", "props", "trigger", "watch", script)(
      element, side.props, () => {}, watch);
    return side;
  });
}"""
DRAW = """([values, heads, end]) => {
  values.forEach((value, at) => {
    window.sides[at].props.value = value;
    window.sides[at].draw();
  });
  document.querySelectorAll(".side-head").forEach((head, at) => { head.innerHTML = heads[at]; });
  document.querySelector("#end").innerHTML = end;
  for (const list of document.querySelectorAll(".turns")) list.scrollTop = 1e9;
}"""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message and its answer; `times` are those of its tokens, in seconds since the
    conversation began."""

    message: str
    pieces: tuple[Piece, ...]
    times: tuple[float, ...]
    start: float
    end: float


def session_of(database: Database) -> Session:
    """The app's own session on the demonstration model, in this process."""
    folders = [ASSETS / "statistics"]
    session = Session(Local(partial(open_table, folders)), database, folders=folders)
    for _ in session.models.load(str(EMBEDDED)):
        pass
    return session


def answered(session: Session, owner: str, method: str) -> list[Turn]:
    """All messages in one conversation, as a new user has it: there are no past answers."""
    conversation, clock, found = None, 0.0, list[Turn]()
    for seed, message in enumerate(MESSAGES):
        generation = Generation(replace(session.current.info.sampling, seed=seed), DEFAULT_TOKENS)
        preferences = Preferences(generation, method, fresh_seed=False)
        conversation = session.chat.say(owner, conversation, message)
        updates = session.answering.answer(owner, conversation, preferences)
        last = [update for update in updates if isinstance(update, Update)][-1]
        found.append(timed(message, last, clock))
        clock = found[-1].end
    return found


def timed(message: str, answer: Update, start: float) -> Turn:
    prefill = answer.metrics.ttft_seconds - answer.steps[0].seconds
    ends = list(accumulate((step.seconds for step in answer.steps), initial=start + prefill))[1:]
    pieces = tuple(answer.pieces)
    times = tuple(ends[piece.step] for piece in pieces)
    return Turn(message, pieces, times, start, start + answer.metrics.seconds)


def recorded() -> tuple[list[Turn], list[Turn]]:
    """The pair with the median gain, plain first."""
    pairs = []
    with Database() as database:
        session = session_of(database)
        for number in range(PAIRS):
            order = [*METHODS][:: -1 if number % 2 else 1]
            runs = {name: answered(session, f"{name}-{number}", name) for name in order}
            pairs.append((runs["plain"], runs["hd"]))
            plain, fast = (side[-1].end for side in pairs[-1])
            print(
                f"plain {plain:.2f} s, with Strata {fast:.2f} s: {plain / fast:.2f} times as fast"
            )
    texts = {tuple(p.text for turn in side for p in turn.pieces) for pair in pairs for side in pair}
    assert len(texts) == 1, "drafts changed the text"
    pairs.sort(key=lambda pair: pair[0][-1].end / pair[1][-1].end)
    return pairs[PAIRS // 2]


def value(conversation: Sequence[Turn], now: float) -> dict[str, Any]:
    """What the token view shows at a moment."""
    sources: dict[str, int] = {}
    turns: list[dict[str, Any]] = []
    for at, turn in enumerate(conversation):
        if turn.start > now:
            break
        shown = [piece for piece, then in zip(turn.pieces, turn.times, strict=True) if then <= now]
        turns.append({"key": f"turn-{at}", "role": "user", "text": turn.message})
        if shown:
            groups = render.groups(shown, sources)
            turns.append({"key": f"answer-{at}", "role": "assistant", "groups": groups})
    return {"kept": 0, "after": "", "turns": turns, **render.legend(sources)}


def head(title: str, conversation: Sequence[Turn], now: float) -> str:
    """The figures above one side at a moment."""
    seconds = min(now, conversation[-1].end)
    tokens = sum(then <= now for turn in conversation for then in turn.times)
    speed = f"{tokens / seconds:,.0f}" if seconds else "–"
    return (
        f"<h3>{title}</h3><span><b>{seconds:.1f} s</b></span>"
        f"<span><b>{tokens:,}</b> tokens</span><span><b>{speed}</b> tokens/s</span>"
    )


def verdict(plain: Sequence[Turn], fast: Sequence[Turn]) -> str:
    tokens = sum(len(turn.pieces) for turn in plain)
    slow, quick = plain[-1].end, fast[-1].end
    return (
        f'<div class="verdict same"><b>Identical</b>: all {tokens:,} tokens. Plain decoding took '
        f"{slow:.2f} s, Strata {quick:.2f} s: <b>{slow / quick:.2f}×</b> as fast.</div>"
    )


def frames(page: Page, sides: tuple[list[Turn], list[Turn]]) -> list[Image.Image]:
    """The conversation as it grows on both sides, FRAMES_PER_SECOND pictures a second."""
    style = layout.css() + STYLE
    page.set_content(PAGE % (style, token_view.TEMPLATE, token_view.TEMPLATE))
    page.evaluate(START, [token_view.script(), render.names()])
    longest = max(side[-1].end for side in sides)
    found = []
    for number in range(int(longest * FRAMES_PER_SECOND) + 2):
        now = number / FRAMES_PER_SECOND
        heads = [
            head(title, side, now) for title, side in zip(METHODS.values(), sides, strict=True)
        ]
        end = verdict(*sides) if now >= longest else ""
        page.evaluate(DRAW, [[value(side, now) for side in sides], heads, end])
        found.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
    return found


def palette_of(shown: Sequence[Image.Image]) -> Image.Image:
    """The colours of the pictures, which always include those of the sources."""
    some = [shown[0], shown[len(shown) // 2], shown[-1]]
    sheet = Image.new("RGB", (some[0].width, sum(frame.height for frame in some)))
    for at, frame in enumerate(some):
        sheet.paste(frame, (0, at * frame.height))
    must = [ImageColor.getrgb(colour) for colour in (*(i.colour for i in INKS.values()), SAME)]
    common = sheet.quantize(COLOURS - len(must)).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette(
        [*common[: 3 * (COLOURS - len(must))], *(part for rgb in must for part in rgb)]
    )
    return palette


def draw(browser: Browser, sides: tuple[list[Turn], list[Turn]]) -> None:
    """Save the moving picture, which loops and holds its last frame."""
    page = browser.new_page(viewport=SIZE, device_scale_factor=SCALE)
    shown = frames(page, sides)
    page.close()
    palette = palette_of(shown)
    few = [
        frame.quantize(palette=palette, dither=Image.Dither.NONE).convert("RGB") for frame in shown
    ]
    times = [round(1000 / FRAMES_PER_SECOND)] * (len(few) - 1) + [HOLD_MS]
    options = {"save_all": True, "append_images": few[1:], "duration": times, "loop": 0}
    few[0].save(PICTURE, lossless=True, quality=60, method=4, minimize_size=True, **options)
    print(f"{PICTURE.name}: {len(few)} frames, {PICTURE.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    sides = recorded()
    with chromium() as browser:
        draw(browser, sides)


if __name__ == "__main__":
    main()
