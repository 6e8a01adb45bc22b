"""Describes runs as HTML: the verdict on two runs, and a run with its steps for Diagnostics. Every
text is escaped."""

from collections.abc import Sequence
from datetime import datetime
from html import escape
from typing import NamedTuple

from app.service.comparison import Progress, Proof
from app.service.why import server_sentence
from app.web.colors import INKS, STAGES, ink, others
from app.web.markup import DASH, fine_print, milliseconds, template, times, verdict
from app.web.metrics_panel import NO_DIFFERENCE, NO_GAIN, range_of
from engine.compare import Speedup
from engine.errors import SettingError
from engine.methods import PLAIN, method_named
from engine.queue import Waiting
from engine.runs import Verdict, from_server
from engine.servers.client import GUARANTEE
from engine.types import HEAD, TARGET, Prefill, Run, Step
from storage.traces import StoredPrompt, Trace


class SideNames(NamedTuple):
    """The names of one side of a comparison. They are used as markup."""

    name: str
    answer: str
    continuation: str


Sides = tuple[SideNames, SideNames]
PLAIN_AND_DRAFTS = (
    SideNames("plain", "the plain answer", "Plain decoding continues with"),
    SideNames("with drafts", "the answer with drafts", "The answer with drafts continues with"),
)
LEFT_AND_RIGHT = (
    SideNames("left", "the left answer", "The left one continues with"),
    SideNames("right", "the right answer", "The right one continues with"),
)


def gained(speedup: Speedup, of: str = "speedup") -> str:
    """A speedup in words, for whole answers and for decoding alone. Returns markup."""
    between = f" ({range_of(speedup)})" if speedup.low != speedup.high else ""
    if speedup.whole is None:
        return f"{NO_DIFFERENCE}{between}" if between else NO_GAIN
    decoding = f"decoding alone {times(speedup.decoding)}"
    return f"{of} <b>{times(speedup.whole)}</b>{between}, {decoding}"


def difference(found: Verdict, place: str = "", sides: Sides = PLAIN_AND_DRAFTS) -> str:
    """Where two runs differ first, and the token of each there. `sides` name them, in markup."""
    first, second = sides
    plain, other = (
        f"<code>{escape(repr(text))}</code>" for text in (found.plain, found.accelerated)
    )
    if found.ended_early:
        text = f"{second.answer} ended at token {found.position:,}. {first.continuation} {plain}."
        return verdict(f"<b>Ended early</b>{place}: {text}", "differs")
    gap = "" if found.gap is None else f"Their scores are {found.gap:.2g} apart (logit gap). "
    return verdict(
        f"<b>First difference</b>{place} at token {found.position:,}: {first.name} {plain}, "
        f"{second.name} {other}. {gap}In reduced precision, rounding can decide between two "
        "tokens that are almost equally likely.",
        "differs",
    )


def another_text(found: Verdict, speed: str) -> str:
    """The verdict on two texts drawn from the same distribution, whose difference proves nothing.
    `speed` is markup."""
    return verdict(
        f"<b>Different text</b> from token {found.position:,} on. This is expected, as Same "
        f"distribution does not keep the text of a seed ({speed}, by time per token). To compare "
        "texts, choose Same text in Settings, under Advanced."
    )


def on_server(progress: Progress, other: Verdict | None, speed: str) -> str:
    """The verdict on pairs of runs of a server. `other` is the verdict on a pair that differs, if
    one does. `speed` is markup."""
    count = len(progress.pairs)
    kind, text = "same", f"<b>The same text</b> in {count} repeat{'s' * (count > 1)}"
    if other is not None:
        kind, text = "", f"<b>Different text</b> from token {other.position:,} on"
    return verdict(f"{text} ({speed}). {GUARANTEE}", kind)


def two_servers(progress: Progress) -> bool:
    left, right = progress.pairs[-1]
    return left.model == right.model and None not in (from_server(left), from_server(right))


def same_texts(progress: Progress) -> str:
    """Whether two servers gave the same text. Texts are compared, as servers need not send
    tokens."""
    texts = [
        ["".join(token.text for token in run.tokens) for run in pair] for pair in progress.pairs
    ]
    same = all(left == right for left, right in texts)
    return "Two servers, the same text" if same else "Two servers, different texts"


def title_of(name: str) -> str:
    """The title of a method; its name if this version does not know the method."""
    try:
        return method_named(name).title
    except SettingError:
        return name


def waiting_line(waiting: Waiting) -> str:
    """Why an answer has not begun: other requests come first, or the model is still loading."""
    others = "1 request comes" if waiting.ahead == 1 else f"{waiting.ahead} requests come"
    reason = " to load" if waiting.loading else f": {others} first"
    return verdict(f"Waiting for the model{reason} …", "running")


EXACT = " The logits of this model have the same bits with and without drafts."
"""The sentence for models that are `exact`."""


def proof_line(proof: Proof, exact: bool = False) -> str:
    """The progress of the reruns of an answer, then their outcome. `exact` is that of the model."""
    found, reruns = proof.verdict, proof.reruns
    if found is None or reruns is None:
        how = "plainly" if proof.running == PLAIN.name else "with drafts"
        text = f"Decoding {how}, pair {proof.pair} … {proof.tokens:,} tokens"
        return verdict(text, "running")
    speed = gained(proof.speedup, "speedup of the whole answer")
    if not found.identical:
        return difference(found) if proof.same_text else another_text(found, speed)
    assert proof.shown is not None
    whole = f"all {found.tokens:,} tokens"
    if proof.shown.broken_off:
        whole += " up to where it was stopped"
    often = f"{reruns.pairs} times each way, in turn" if reruns.pairs > 1 else "each way"
    return verdict(
        f"<b>Identical</b>: {whole}. Decoded again {often}: plain "
        f"{milliseconds(reruns.plain_seconds)}, with drafts {milliseconds(reruns.seconds)}; "
        f"{speed}.{EXACT if exact else ''}",
        "same",
    )


MOST_CHARS = 20_000
"""Only this many characters at the end of a prompt are shown, so that a long one stays off the
page."""
NO_RUN_YET = verdict("No run yet. Ask something in the Chat tab.")
KINDS = {"chat": "Chat", "compare": "Compare"}


def run_row(run: Trace) -> list[str]:
    speed = run.emitted_tokens / run.decode_seconds if run.decode_seconds else 0.0
    return [
        f"{datetime.fromtimestamp(run.created):%d %b %H:%M:%S}",
        KINDS.get(run.kind, run.kind),
        title_of(run.method),
        run.label,
        f"{run.emitted_tokens:,}",
        f"{speed:,.0f}",
        f"{run.emitted_tokens / run.forwards:.2f}" if run.forwards else DASH,
        times(run.speedup),
    ]


def heading(trace: Trace, run: Run) -> str:
    prompt = run.prefill or Prefill(0, 0)
    when = f"{datetime.fromtimestamp(trace.created):%d %b %H:%M:%S}"
    text = (
        f"{when}: {trace.emitted_tokens:,} tokens in {trace.forwards:,} steps. The prompt had "
        f"{prompt.tokens:,} tokens, {prompt.reused:,} of them from the cache."
    )
    if count := len(run.parts):
        text += f" It was continued {'once' if count == 1 else f'{count} times'}."
    if (server := from_server(run)) is not None:
        text += (
            f" It came from the server {server.get('host', '')}; its times are measured as the "
            f"tokens arrive. {server_sentence(run) or ''}"
        )
    method = f"<b>{escape(title_of(trace.method))}</b>"
    return verdict(f"{method} on {escape(trace.label)}, {escape(text)}")


def prompt(stored: StoredPrompt | None, exact: str | None = None) -> str:
    """The prompt of a run as far as it is stored, and which part of it is not known. `exact` is the
    text of the prompt's tokens, None if these are not kept or belong to another model."""
    parts = [("system", stored.system_prompt), *stored.messages] if stored is not None else []
    room, shown = MOST_CHARS, list[tuple[str, str]]()
    for role, text in reversed(parts):
        if room > 0 and (role != "system" or text.strip()):
            shown.insert(0, (role, text[-room:]))
            room -= len(text)
    return template(
        "prompt.html", stored=stored, messages=shown, cut=room < 0, most=MOST_CHARS, exact=exact
    )


def step_card(step: Step, count: int) -> str:
    found = {**step.proposed, **step.accepted, **step.look_ups}
    names = [name for name in INKS if name in found and name != TARGET] + others(found)
    times = {name: getattr(step, f"{name}_seconds") for name in STAGES}
    return template("step.html", step=step, count=count, names=names, times=times, head=HEAD)


def step_row(step: Step) -> list[str]:
    drafted, kept = sum(step.proposed.values()), sum(step.accepted.values())
    given = dict.fromkeys(ink(token.source).title for token in step.tokens)
    return [
        f"{step.index + 1:,}",
        repr("".join(token.text for token in step.tokens))[1:-1],
        ", ".join(given),
        f"{kept:,} of {drafted:,}" if drafted else DASH,
        str(len(step.by_depth)) if step.by_depth else DASH,
        milliseconds(step.seconds),
    ]


def rows_shown(start: int, rows: Sequence[object], count: int) -> str:
    if not rows:
        return fine_print("No run matches. Change the filters above.")
    return fine_print(f"{start + 1:,} to {start + len(rows):,} of {count:,} runs")
