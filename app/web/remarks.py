"""What stands below an answer beside its actions: a plain sentence, and the badge of its proof.

Both travel as data, and become text on the page (assets/chat/actions.js). With them it is told of
an answer that it begins within thinking.
"""

from collections.abc import Mapping
from typing import Any

from app.service.sentence import sentence
from app.web import render
from app.web.metrics_panel import times
from engine.errors import StorageError
from storage.database import Database
from storage.traces import Traces, Worth

LONGEST = 40
"""Characters of a token's text in a badge's explanation."""


def remarks(database: Database, owner: str, conversation: str | None) -> render.Said:
    """What there is to say of the answers of a conversation, by their runs."""
    if not conversation:
        return {}
    try:
        worths = Traces(database, owner).worths(conversation)
    except StorageError:
        return {}  # The conversation itself tells what is wrong with the file.
    return {run_id: remark(worth) for run_id, worth in worths.items()}


def remark(worth: Worth) -> dict[str, object]:
    """What there is to say of one answer."""
    said: dict[str, object] = {}
    if words := sentence(worth):
        said["note"] = words
    if found := badge(worth.proof):
        said["badge"] = found
    if worth.thinks:
        said["thinking"] = True
    return said


def badge(proof: Mapping[str, Any]) -> dict[str, str]:
    """The badge of a proof that was made in the background; {} where there is none. What is stored
    may come from a damaged file."""
    kind = proof.get("kind")
    if kind == "same":
        speed = proof.get("speedup")
        known = isinstance(speed, int | float) and not isinstance(speed, bool)
        told = f", {times(float(speed))}" if known else ""  # type: ignore[arg-type]
        return {
            "text": f"proved: same text{told}",
            "kind": "good",
            "title": "Decoded again in the background, plainly and with drafts, each from nothing. "
            "Plain decoding gives this text, token for token.",
        }
    if kind == "differs":
        return {
            "text": f"differs at token {proof.get('at')}",
            "kind": "bad",
            "title": parted(proof),
        }
    if kind == "skipped":
        return {"text": "not proved", "kind": "", "title": str(proof.get("why", ""))}
    return {}


def parted(proof: Mapping[str, Any]) -> str:
    """What either run says where a proof found a difference."""
    plain, said = (str(proof.get(name, ""))[:LONGEST] for name in ("plain", "said"))
    if proof.get("early"):
        return f"The answer ended there. Plain decoding goes on with {plain!r}."
    words = f"Plain decoding says {plain!r} there, and this answer {said!r}."
    gap = proof.get("gap")
    if isinstance(gap, int | float):
        words += f" Their logits are {gap:.4f} apart."
    return words + " In reduced precision, rounding can decide between two tokens so close."
