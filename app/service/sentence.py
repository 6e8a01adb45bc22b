"""One plain sentence about an answer: how many of its tokens were guessed, and what that saved.

Guessed are accepted drafts. Saved is what plain decoding would have taken at the same load, less
what the answer took, as the live speedup has it (engine/compare.py). It is told only where it means
something: not of a few tokens, and not below what a clock can tell. Where looking for guesses cost
more than it saved, the sentence says that.
"""

from engine.compare import FEWEST
from engine.metrics import Metrics
from engine.types import UNKNOWN
from storage.traces import Worth

SLIGHT = 0.02
"""The part of an answer's time below which nothing was saved or lost that anybody could tell."""


def worth_of(figures: Metrics, proof: dict[str, object] | None = None) -> Worth:
    """What a run came to, from its figures."""
    plain = figures.plain_seconds
    if plain is not None:
        prompt = figures.plain_prefill_seconds
        plain += figures.prefill_seconds if prompt is None else prompt
    known = UNKNOWN not in figures.share
    return Worth(figures.tokens, figures.kept, figures.seconds, plain, proof or {}, known=known)


def sentence(worth: Worth) -> str:
    """What there is to say of an answer; "" of one without a token."""
    if worth.tokens <= 0:
        return ""
    if not worth.known:
        return "The server does not tell which tokens were guessed."
    told = f"{guessed(worth)} guessed"
    if worth.plain_seconds is None or worth.tokens < FEWEST:
        return f"{told}."
    saved = worth.plain_seconds - worth.seconds
    if abs(saved) <= SLIGHT * max(worth.seconds, worth.plain_seconds):
        # With no guess there was nothing to save.
        return f"{told}, which saved no time to speak of." if worth.guessed else f"{told}."
    if saved < 0:
        return f"{told}. Looking for guesses cost about {about(-saved)} more than it saved."
    # A run that accepted no draft cannot be faster: what seems saved is noise.
    return f"{told}, which saved about {about(saved)}." if worth.guessed else f"{told}."


def guessed(worth: Worth) -> str:
    """How many tokens were guessed, as the subject of a sentence."""
    tokens = "1 token" if worth.tokens == 1 else f"{worth.tokens:,} tokens"
    count = f"{worth.guessed:,}" if worth.guessed else "None"
    return f"{count} of {tokens} {'was' if 1 in (worth.guessed, worth.tokens) else 'were'}"


def about(seconds: float) -> str:
    """A duration as people say it: with two digits at most where it is short."""
    if seconds < 0.095:
        return f"{max(1, round(1e3 * seconds))} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 119.5 else f"{seconds / 60:.0f} minutes"
