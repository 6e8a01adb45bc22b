"""Whether two runs said the same, in words; token texts are escaped."""

from html import escape

from app.comparison import Proof, Verdict
from app.panel import milliseconds
from app.turns import Waiting
from engine.errors import SettingError
from engine.methods import method_named


def difference(found: Verdict, place: str = "") -> str:
    """Where two runs part, and what each says there."""
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
        f"({speed}, time per token). To compare texts, keep drafts by Same text.</div>"
    )


def title_of(name: str) -> str:
    """What a method is called; the name itself for one that this version does not know."""
    try:
        return method_named(name).title
    except SettingError:
        return name


def waiting_line(waiting: Waiting) -> str:
    """What stands where an answer will be while others use the model."""
    others = "1 request comes" if waiting.ahead == 1 else f"{waiting.ahead} requests come"
    return f'<div class="verdict running">Waiting for the model: {others} first …</div>'


def proof_line(proof: Proof) -> str:
    """How far a plain rerun is, then its outcome."""
    found = proof.verdict
    if found is None:
        return f'<div class="verdict running">Decoding plainly … {proof.tokens:,} tokens</div>'
    if not found.identical:
        if proof.same_text:
            return difference(found)
        return another_text(found, f"<b>{proof.speedup or 0:.2f}×</b>")
    assert proof.plain and proof.accelerated
    slow, fast = proof.plain.metrics.decode_seconds, proof.accelerated.metrics.decode_seconds
    return (
        f'<div class="verdict same"><b>Identical</b>: all {found.tokens:,} tokens. Plain '
        f"{milliseconds(slow)}, accelerated {milliseconds(fast)}: "
        f"<b>{proof.speedup or 0:.2f}×</b>, measured.</div>"
    )
