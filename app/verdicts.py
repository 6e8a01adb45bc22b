"""Whether two runs said the same, in words; token texts are escaped."""

from html import escape

from app.comparison import Verdict
from app.panel import milliseconds
from app.session import Proof


def difference(found: Verdict, place: str = "") -> str:
    """Where two runs part, and what each says there."""
    return (
        f'<div class="verdict differs"><b>First difference</b>{place} at token '
        f"{found.position:,}: plain <code>{escape(repr(found.plain))}</code>, accelerated "
        f"<code>{escape(repr(found.accelerated))}</code>. In reduced precision a near-tie "
        "between two tokens can fall either way.</div>"
    )


def proof_line(proof: Proof) -> str:
    """How far a plain rerun is, then its outcome."""
    found = proof.verdict
    if found is None:
        return f'<div class="verdict running">Decoding plainly … {proof.tokens:,} tokens</div>'
    if not found.identical:
        return difference(found)
    assert proof.plain and proof.accelerated
    slow, fast = proof.plain.metrics.decode_seconds, proof.accelerated.metrics.decode_seconds
    return (
        f'<div class="verdict same"><b>Identical</b>: all {found.tokens:,} tokens. Plain '
        f"{milliseconds(slow)}, accelerated {milliseconds(fast)}: "
        f"<b>{proof.speedup or 0:.2f}×</b>, measured.</div>"
    )
