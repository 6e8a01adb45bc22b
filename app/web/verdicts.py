"""Whether two runs said the same, in words; token texts are escaped."""

from html import escape
from typing import NamedTuple

from app.service.comparison import Progress, Proof
from app.web.metrics_panel import NO_GAIN, milliseconds, times
from engine.compare import Speedup
from engine.errors import SettingError
from engine.methods import PLAIN, method_named
from engine.metrics import summarise
from engine.queue import Waiting
from engine.runs import Verdict, from_server
from engine.servers.makers import GUARANTEE
from engine.types import Run


class SideWords(NamedTuple):
    """What a side of a comparison is called, in our own words."""

    name: str
    answer: str
    goes_on: str


Sides = tuple[SideWords, SideWords]
PLAIN_AND_DRAFTS = (
    SideWords("plain", "the plain answer", "Plain decoding goes on with"),
    SideWords("with drafts", "the answer with drafts", "The answer with drafts goes on with"),
)
LEFT_AND_RIGHT = (
    SideWords("left", "the left answer", "The left one goes on with"),
    SideWords("right", "the right answer", "The right one goes on with"),
)


def gained(speedup: Speedup, of: str = "speedup") -> str:
    """A speedup in words, as our own markup: of whole answers, and beside it of decoding alone."""
    if speedup.whole is None:
        return f"{of} <b>–</b>: {NO_GAIN}"
    return f"{of} <b>{times(speedup.whole)}</b>, decoding alone {times(speedup.decoding)}"


def difference(found: Verdict, place: str = "", sides: Sides = PLAIN_AND_DRAFTS) -> str:
    """Where two runs part, and what each says there. `sides` are our own words for them."""
    first, second = sides
    if found.ended_early:
        return (
            f'<div class="verdict differs"><b>Ended early</b>{place}: {second.answer} ended '
            f"at token {found.position:,}. {first.goes_on} "
            f"<code>{escape(repr(found.plain))}</code>.</div>"
        )
    return (
        f'<div class="verdict differs"><b>First difference</b>{place} at token '
        f"{found.position:,}: {first.name} <code>{escape(repr(found.plain))}</code>, {second.name} "
        f"<code>{escape(repr(found.accelerated))}</code>. {apart(found.gap)}In reduced precision, "
        "rounding can decide between two tokens that are almost equally likely.</div>"
    )


def apart(gap: float | None) -> str:
    """How near a tie two tokens were, as a sentence with a space behind it."""
    if gap is None:
        return ""
    return f"Their scores are {gap:.2g} apart (logit gap). "


def another_text(found: Verdict, speed: str) -> str:
    """Two texts of one distribution, which proves nothing. `speed` is our own markup."""
    return (
        f'<div class="verdict"><b>Another text</b> from token {found.position:,} on. This is '
        "expected: Same distribution does not keep the text of a seed "
        f"({speed}, by time per token). To compare texts, choose Same text in Settings, under "
        "Advanced.</div>"
    )


def on_server(progress: Progress, other: Verdict | None, speed: str) -> str:
    """The verdict on pairs of runs of a server; `other` is where two part, if they do. `speed` is
    our own markup."""
    count = len(progress.pairs)
    kind, said = "verdict same", f"<b>The same text</b> in {count} repeat{'s' * (count > 1)}"
    if other is not None:
        kind, said = "verdict", f"<b>Another text</b> from token {other.position:,} on"
    return f'<div class="{kind}">{said} ({speed}). {GUARANTEE}</div>'


def two_servers(progress: Progress) -> bool:
    """Whether both sides are the same model, on two servers."""
    left, right = progress.pairs[-1]
    return left.model == right.model and None not in (from_server(left), from_server(right))


def same_texts(progress: Progress) -> str:
    """Whether two servers said the same. Their texts are compared: they need not tell tokens."""
    same = all(written(left) == written(right) for left, right in progress.pairs)
    return "Two servers, the same text" if same else "Two servers, another text"


def written(run: Run) -> str:
    """What a run said."""
    return "".join(token.text for token in run.tokens)


def title_of(name: str) -> str:
    """What a method is called; the name itself for one that this version does not know."""
    try:
        return method_named(name).title
    except SettingError:
        return name


def waiting_line(waiting: Waiting) -> str:
    """Why an answer has not begun: others use the model, or it is still being loaded."""
    if waiting.loading:
        return '<div class="verdict running">Waiting for the model to load …</div>'
    others = "1 request comes" if waiting.ahead == 1 else f"{waiting.ahead} requests come"
    return f'<div class="verdict running">Waiting for the model: {others} first …</div>'


def proof_line(proof: Proof) -> str:
    """How far the reruns of an answer are, then their outcome."""
    found = proof.verdict
    if found is None:
        how = "plainly" if proof.running == PLAIN.name else "with drafts"
        return f'<div class="verdict running">Decoding {how} … {proof.tokens:,} tokens</div>'
    if not found.identical:
        if proof.same_text:
            return difference(found)
        return another_text(found, gained(proof.speedup))
    assert proof.plain and proof.accelerated and proof.shown
    slow, fast = summarise(proof.plain).seconds, summarise(proof.accelerated).seconds
    whole = f"all {found.tokens:,} tokens"
    if proof.shown.broken_off:
        whole += " up to where it was stopped"
    return (
        f'<div class="verdict same"><b>Identical</b>: {whole}. Decoded again from the start: '
        f"plain {milliseconds(slow)}, with drafts {milliseconds(fast)}, "
        f"{gained(proof.speedup)}.</div>"
    )
