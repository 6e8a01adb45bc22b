"""What Diagnostics says of a run and of one of its steps, as HTML; every text is escaped.

A step's card is made of SECTIONS, a function each from the step to markup, in their order: what is
to be shown of a step besides is one more of them.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape

from app.service.served import server_words
from app.web.colors import INKS, STAGES, ink, others
from app.web.metrics_panel import milliseconds, times
from app.web.verdicts import title_of
from engine.runs import from_server
from engine.types import DRAFT, HEAD, TARGET, Prefill, Run, Step, Token
from storage.traces import Asked, Trace

MOST_CHARS = 20_000
"""Of what a run answered the end is shown: the page need not carry a whole book."""
NO_RUN_YET = '<div class="verdict">No run yet. Ask something in the Chat tab.</div>'
UNKNOWN_PROMPT = (
    '<p class="fine">What this run answered is not stored: it was a comparison, or its message '
    "was deleted.</p>"
)
NOT_KEPT = (
    " The tokens of the prompt are kept for your 200 newest answers, and are text again while "
    "their model is loaded. Of this one it is not known what the chat template added, and what did "
    "not fit the context."
)
KINDS = {"chat": "Chat", "compare": "Compare"}


def line(run: Trace) -> list[str]:
    """One row of the table of runs."""
    speed = run.emitted_tokens / run.decode_seconds if run.decode_seconds else 0.0
    return [
        f"{datetime.fromtimestamp(run.created):%d %b %H:%M:%S}",
        KINDS.get(run.kind, run.kind),
        title_of(run.method),
        run.model,
        f"{run.emitted_tokens:,}",
        f"{speed:,.0f}",
        f"{run.emitted_tokens / run.forwards:.2f}" if run.forwards else "–",
        times(run.speedup),
    ]


def heading(trace: Trace, run: Run) -> str:
    """What the chosen run is, in numbers and our own words."""
    prompt = run.prefill or Prefill(0, 0)
    when = f"{datetime.fromtimestamp(trace.created):%d %b %H:%M:%S}"
    return (
        f'<div class="verdict"><b>{escape(title_of(trace.method))}</b> on {escape(trace.model)}, '
        f"{when}: {trace.emitted_tokens:,} tokens in {trace.forwards:,} steps. The prompt had "
        f"{prompt.tokens:,} tokens, {prompt.reused:,} of them from the cache.{gone_on(run)}"
        f"{served(run)}</div>"
    )


def served(run: Run) -> str:
    """What is known of the server that a run came from; nothing for one of this machine."""
    server, words = from_server(run), server_words(run)
    if server is None:
        return ""
    return escape(
        f" It came from the server {server.get('host', '')}; its times are those of arrival here. "
        f"{words or ''}"
    )


def gone_on(run: Run) -> str:
    """How often the answer was gone on with."""
    times_ = len(run.parts)
    return f" It was continued {'once' if times_ == 1 else f'{times_} times'}." if times_ else ""


def prompt(asked: Asked | None, exact: str | None = None) -> str:
    """What a run answered, as far as it is stored, and what of it is not known. `exact` is the text
    of the prompt's tokens, None where these are not kept or belong to another model."""
    whole = exact_prompt(exact) if exact is not None else ""
    if asked is None:
        return whole or UNKNOWN_PROMPT
    told = [("system", asked.system_prompt)] if asked.system_prompt.strip() else []
    told += asked.messages
    room, shown = MOST_CHARS, list[str]()
    for role, text in reversed(told):
        if room <= 0:
            break
        shown.append(message(role, text[-room:]))
        room -= len(text)
    left = "" if room >= 0 else f" Only the last {MOST_CHARS:,} characters are shown."
    return (
        f'<h4>{escape(asked.title)}</h4><div class="asked" tabindex="0" role="region" '
        f'aria-label="What it read">{"".join(reversed(shown))}</div>'
        '<p class="fine">These are the messages before the answer, and the system prompt that the '
        f"conversation has now.{left}{'' if whole else NOT_KEPT}</p>{whole}"
    )


def exact_prompt(text: str) -> str:
    """What the model really read; of a long prompt the end."""
    cut = f"The last {MOST_CHARS:,} of {len(text):,} characters. " if len(text) > MOST_CHARS else ""
    return (
        "<details class='exact'><summary>The exact prompt</summary><p class='fine'>"
        f"{cut}All that the model read, with what the chat template added and without what did not "
        f"fit the context.</p><pre tabindex='0'>{escape(text[-MOST_CHARS:])}</pre></details>"
    )


def message(role: str, text: str) -> str:
    """One message of a prompt."""
    return f"<div><b>{escape(role)}</b><pre>{escape(text)}</pre></div>"


def step_card(step: Step, count: int) -> str:
    """One step of a run of so many."""
    emitted = len(step.tokens)
    words = f"{emitted} token{'' if emitted == 1 else 's'} in {milliseconds(step.seconds)}"
    if step.finish:
        words += f", and the answer ended ({step.finish})"
    head = f"<h4>Step {step.index + 1:,} of {count:,}: {escape(words)}</h4>"
    return f'<div class="step">{head}{"".join(section(step) for section in SECTIONS)}</div>'


def said(step: Step) -> str:
    """The tokens of a step in the colours of their sources."""
    if not step.tokens:
        return '<p class="fine">It was cancelled, and gave no token.</p>'
    return f'<div class="emitted">{"".join(map(chip, step.tokens))}</div>'


def chip(token: Token) -> str:
    """One token."""
    look, text = ink(token.source), token.text or "·"
    known = token.source in INKS
    kind = f"k-{token.source}" if known else "k-draft" if token.source.startswith(DRAFT) else ""
    style = "" if known else f' style="--k:{look.colour}"'
    facts = [look.title]
    if token.match_length:
        facts.append(f"match of {token.match_length} tokens")
    if token.probability:
        facts.append(f"probability {100 * token.probability:.0f} %")
    title = escape(" · ".join(facts))
    return f'<span class="tok {kind}"{style} title="{title}">{escape(text)}</span>'


def sources(step: Step) -> str:
    """What each source drafted for a step, and what was accepted of it."""
    found = {**step.proposed, **step.accepted, **step.look_ups}
    names = [name for name in INKS if name in found and name != TARGET] + others(found)
    if not names:
        return '<p class="fine">Nothing was drafted: this is a plain step.</p>'
    rows = "".join(source_row(step, name) for name in names)
    depths = ", ".join(f"{kept} of {drafted}" for drafted, kept in step.by_depth)
    depth = f"<p class='fine'>Accepted by position in the draft: {depths}.</p>" if depths else ""
    return (
        '<table class="tiers"><thead><tr><th scope="col">source</th><th scope="col">drafted</th>'
        '<th scope="col">accepted</th><th scope="col">look-up</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>{depth}{levels(step)}"
    )


def source_row(step: Step, name: str) -> str:
    """What one source did for a step."""
    look, seconds = ink(name), step.look_ups.get(name)
    kind = f"k-{name}" if name in INKS else "k-draft"
    return (
        f'<tr><td><span class="tok {kind}" style="--k:{look.colour}">{escape(look.title)}</span>'
        f"</td><td>{step.proposed.get(name, 0):,}</td><td>{step.accepted.get(name, 0):,}</td>"
        f"<td>{'–' if seconds is None else milliseconds(seconds)}</td></tr>"
    )


def levels(step: Step) -> str:
    """What the head and the draft models of a stack did for a step."""
    words = [
        f"{ink(name).title}: {forwards} passes"
        + ("" if name == HEAD else f", kept {kept} of {drafted} guesses from below")
        for name, (forwards, drafted, kept) in step.levels.items()
    ]
    return f"<p class='fine'>{escape('. '.join(words))}.</p>" if words else ""


def stages(step: Step) -> str:
    """What a step took, by stage, and what plain decoding would have taken."""
    parts = {name: float(getattr(step, f"{name}_seconds")) for name in STAGES}
    whole = sum(parts.values()) or 1.0
    bar = "".join(
        f'<i style="background:{STAGES[name]};flex:0 0 {100 * seconds / whole:.1f}%"></i>'
        for name, seconds in parts.items()
    )
    words = "".join(
        f'<span><i style="background:{STAGES[name]}"></i>{name} <b>{milliseconds(seconds)}</b>'
        "</span>"
        for name, seconds in parts.items()
    )
    plain = (
        "How long plain decoding would have taken is not known."
        if step.plain_seconds is None
        else f"Plain decoding would have taken {milliseconds(step.plain_seconds)}."
    )
    return (
        f'<div class="bar" aria-hidden="true">{bar}</div><div class="stages">{words}</div>'
        f'<p class="fine">{plain}</p>'
    )


SECTIONS: tuple[Callable[[Step], str], ...] = (said, sources, stages)


def step_line(step: Step) -> list[str]:
    """One row of the table of steps."""
    drafted, kept = sum(step.proposed.values()), sum(step.accepted.values())
    given = dict.fromkeys(ink(token.source).title for token in step.tokens)
    return [
        f"{step.index + 1:,}",
        repr("".join(token.text for token in step.tokens))[1:-1],
        ", ".join(given),
        f"{kept:,} of {drafted:,}" if drafted else "–",
        str(len(step.by_depth)) if step.by_depth else "–",
        milliseconds(step.seconds),
    ]


def range_of(start: int, rows: Sequence[object], count: int) -> str:
    """Which rows of a table are shown."""
    if not rows:
        return '<p class="fine">No run matches. Change the filters above.</p>'
    return f'<p class="fine">{start + 1:,} to {start + len(rows):,} of {count:,} runs</p>'
