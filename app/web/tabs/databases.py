"""Databases: what each of them holds, its best entries as text, and how to empty it."""

from dataclasses import dataclass
from html import escape

import gradio as gr

from app.service.draft_models import amount
from app.service.session import Session
from app.web import charts
from app.web.colors import ink
from app.web.plots import grid
from app.web.wiring import AT_ONCE, Memory, owner_of, told
from engine.drafting.calibration import Calibration
from engine.types import CONTEXT, MODEL, STATISTICS
from storage.contexts import ContextStore

TOP = 40
WIDE, NO_TEXT = 400, "\ufffd"
"""The best entries are chosen from so many; those that hold part of a character are left out."""


@dataclass(slots=True)
class Parts:
    """The tab's components."""

    tab: gr.Tab
    cards: dict[str, gr.HTML]
    tables: dict[str, gr.Dataframe]
    wipes: dict[str, gr.Button]
    confirms: dict[str, tuple[gr.Row, gr.Button, gr.Button]]
    worth: gr.Plot


def build(tab: gr.Tab) -> Parts:
    """A card per database: size, entries, and a way to empty what can be emptied."""
    cards, tables, wipes, confirms = {}, {}, {}, {}
    with gr.Row(elem_classes="cards"):
        for tier in (CONTEXT, MODEL, STATISTICS):
            with gr.Column(elem_classes="card", min_width=320):
                cards[tier] = gr.HTML(elem_id=f"tier-{tier}", apply_default_css=False)
                if tier != STATISTICS:
                    wipes[tier] = gr.Button(f"Empty {ink(tier).title}", size="sm")
                    with gr.Row(visible=False, elem_classes="asking") as row:
                        yes = gr.Button("Empty it", size="sm", variant="stop", min_width=60)
                        no = gr.Button("Keep it", size="sm", min_width=60)
                    confirms[tier] = (row, yes, no)
                if tier != CONTEXT:
                    third = "Seen" if tier == MODEL else "Share"
                    tables[tier] = gr.Dataframe(
                        headers=["After", "Next", third],
                        datatype="str",
                        interactive=False,
                        max_height=420,
                        show_label=False,
                        column_widths=["42%", "38%", "20%"],
                    )
    (worth,) = grid([charts.worth_of_evidence(Calibration())])
    gr.HTML(
        "<p class='fine'>A database that finds the last tokens of an answer proposes what came "
        "next. Strata learns from your answers how much such a match is worth. Emptying "
        f"{ink(MODEL).title} also resets this.</p>"
    )
    return Parts(tab, cards, tables, wipes, confirms, worth)


def card(tier: str, meaning: str, facts: list[tuple[str, str]]) -> str:
    """A database's name and facts; values that come from files are escaped."""
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    look = ink(tier)
    name = f'<span class="tok k-{tier}" title="{escape(look.meaning)}">{look.title}</span>'
    return f"<h3>{name}</h3><p>{escape(meaning)}</p><dl>{lines}</dl>"


def context_card(session: Session, owner: str, conversation: str | None) -> str:
    """The open conversation's log."""
    fingerprint = session.current.info.tokenizer_fingerprint
    store = ContextStore(session.database, owner)
    tokens = store.size(conversation, fingerprint) if conversation else 0
    return card(
        CONTEXT,
        "All tokens of the open conversation, also those that were edited or regenerated.",
        [
            ("tokens", f"{tokens:,}"),
            ("on disk", amount(4 * tokens)),
            ("kept at most", f"{store.CAP:,} tokens"),
        ],
    )


def model_card(session: Session, owner: str) -> tuple[str, list[list[str]]]:
    """This model's past answers, and the n-grams that most of them share."""
    store = session.past_answers.ngrams(owner, session.current.info.fingerprint)
    top = store.top(TOP)
    keys = session.engine.texts([gram.tokens[:-1] for gram in top])
    nexts = session.engine.texts([gram.tokens[-1:] for gram in top])
    rows = [
        [repr(key), repr(token), f"{gram.documents:,}"]
        for gram, key, token in zip(top, keys, nexts, strict=True)
    ]
    facts = [
        ("n-grams", f"{store.rows():,}"),
        ("on disk", amount(store.size_bytes())),
        ("model", session.current.info.name),
    ]
    return card(MODEL, "What this model wrote before, in all your conversations.", facts), rows


def statistics_card(session: Session) -> tuple[str, list[list[str]]]:
    """The statistics file for the model's tokenizer."""
    meaning = "What usually comes next in large collections of text. Read-only."
    table = session.current.statistics
    if table is None:
        facts = [("file", "none for this model's tokenizer; the others work without it")]
        return card(STATISTICS, meaning, facts), []
    facts = [("texts", table.meta["title"]), ("file size", amount(table.size_bytes))]
    facts += [
        (name, f"{int(table.meta[name]):,}")
        for name in ("keys", "tokens", "documents")
        if table.meta[name].isdecimal()
    ]
    top = list(table.top(WIDE))
    keys = session.engine.texts([[found.key] for found in top])
    nexts = session.engine.texts([[found.token] for found in top])
    rows = [
        [repr(key), repr(token), f"{100 * found.share:.0f} %"]
        for found, key, token in zip(top, keys, nexts, strict=True)
        if NO_TEXT not in key + token
    ][:TOP]
    return card(STATISTICS, meaning, facts), rows


def wire(session: Session, parts: Parts, current: gr.State, memory: gr.BrowserState) -> None:
    """Read the databases when the tab opens; empty one after asking."""

    def refresh(
        request: gr.Request, conversation: str | None, memory: Memory
    ) -> tuple[object, ...]:
        owner = owner_of(session, memory, request)
        with told():
            context = context_card(session, owner, conversation)
            model, grams = model_card(session, owner)
            statistics, shares = statistics_card(session)
            learned = Calibration(
                session.past_answers.calibrations(owner, session.current.info.fingerprint).load()
            )
            worth = charts.worth_of_evidence(learned)
            return context, model, statistics, grams, shares, worth
        return tuple(gr.skip() for _ in range(6))

    def wipe_context(request: gr.Request, conversation: str | None, memory: Memory) -> object:
        with told():
            if conversation:
                session.stores.wipe_context(owner_of(session, memory, request), conversation)
        return gr.update(visible=False)

    def wipe_model(request: gr.Request, memory: Memory) -> object:
        with told():
            session.past_answers.wipe(
                owner_of(session, memory, request), session.current.info.fingerprint
            )
        return gr.update(visible=False)

    outputs = [*parts.cards.values(), *parts.tables.values(), parts.worth]
    parts.tab.select(refresh, [current, memory], outputs, **AT_ONCE)
    for tier, (row, yes, no) in parts.confirms.items():
        parts.wipes[tier].click(lambda: gr.update(visible=True), None, row, **AT_ONCE)
        no.click(lambda: gr.update(visible=False), None, row, **AT_ONCE)
        done = (
            yes.click(wipe_context, [current, memory], row, **AT_ONCE)
            if tier == CONTEXT
            else yes.click(wipe_model, memory, row, **AT_ONCE)
        )
        done.then(refresh, [current, memory], outputs, **AT_ONCE)
