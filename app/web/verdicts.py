"""Whether two runs said the same, in words; token texts are escaped."""

from html import escape

from app.service.comparison import Proof
from app.web.metrics_panel import NO_GAIN, milliseconds, times
from engine.compare import Speedup
from engine.errors import SettingError
from engine.methods import PLAIN, method_named
from engine.metrics import summarise
from engine.queue import Waiting
from engine.runs import Verdict


def gained(speedup: Speedup, of: str = "speedup") -> str:
    """A speedup in words, as our own markup: of whole answers, and beside it of decoding alone."""
    if speedup.whole is None:
        return f"{of} <b>–</b>: {NO_GAIN}"
    return f"{of} <b>{times(speedup.whole)}</b>, decoding alone {times(speedup.decoding)}"


def difference(found: Verdict, place: str = "") -> str:
    """Where two runs part, and what each says there."""
    if found.ended_early:
        return (
            f'<div class="verdict differs"><b>Ended early</b>{place}: the accelerated answer ended '
            f"at token {found.position:,}, where plain decoding goes on with "
            f"<code>{escape(repr(found.plain))}</code>.</div>"
        )
    return (
        f'<div class="verdict differs"><b>First difference</b>{place} at token '
        f"{found.position:,}: plain <code>{escape(repr(found.plain))}</code>, accelerated "
        f"<code>{escape(repr(found.accelerated))}</code>. In reduced precision a near-tie "
        "between two tokens can fall either way.</div>"
    )


def another_text(found: Verdict, speed: str) -> str:
    """Two texts of one distribution: no fault, and no proof either. `speed` is our own markup."""
    return (
        f'<div class="verdict"><b>Another text</b> from token {found.position:,} on, as is '
        "expected here: rejection sampling keeps the distribution, not the text of a seed "
        f"({speed}, by time per token). To compare texts, keep drafts by Same text.</div>"
    )


def title_of(name: str) -> str:
    """What a method is called; the name itself for one that this version does not know."""
    try:
        return method_named(name).title
    except SettingError:
        return name


def waiting_line(waiting: Waiting) -> str:
    """What stands where an answer will be while others use the model, or it is not there yet."""
    if waiting.loading:
        return '<div class="verdict running">Waiting until the model is loaded …</div>'
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
        whole += " up to where it was stopped, as a beginning is all that can be proved of it"
    return (
        f'<div class="verdict same"><b>Identical</b>: {whole}. Both decoded again from nothing: '
        f"plain {milliseconds(slow)}, accelerated {milliseconds(fast)}, "
        f"{gained(proof.speedup)}.</div>"
    )
