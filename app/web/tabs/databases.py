"""Databases: what each holds and brought, what it knows of some words, and how to fill, save, prune
and empty it. The file of general text has a section of its own (general_text.py)."""

from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path

import gradio as gr

from app.service.draft_models import amount
from app.service.session import Session
from app.web import charts, databases_html
from app.web.colors import ink
from app.web.plots import grid
from app.web.saving import SAVE_FILE, saved
from app.web.stack_html import fine
from app.web.tabs import general_text
from app.web.wiring import AFTER, AT_ONCE, LATEST, Event, Memory, Updates, owner_of, told
from engine.backends.base import BackendInfo, ServerInfo
from engine.drafting.calibration import Calibration
from engine.errors import StorageError
from engine.types import CONTEXT, MODEL, STATISTICS
from storage.contexts import ContextStore
from storage.ngram_files import MOST_BYTES
from storage.ngrams import Pruning

TOP = 40
WIDE, NO_TEXT = 400, "\ufffd"
"""The best entries are chosen from so many; those that hold part of a character are left out."""


PRUNING = (
    "Keep so many n-grams, the newest",
    "Keep what one of the last … answers held",
    "Keep what at least … answers held",
)
"""What `Pruning` wishes for, in its order; 0 is no wish."""


@dataclass(slots=True)
class Learned:
    """Past answers as a file, and what of them is to be forgotten."""

    save: gr.Button
    bring: gr.UploadButton
    prune: gr.Button
    row: gr.Column
    numbers: list[gr.Number]
    told: gr.HTML
    yes: gr.Button
    no: gr.Button
    outgoing: gr.Textbox


@dataclass(slots=True)
class Parts:
    """The tab's components."""

    tab: gr.Tab
    cards: dict[str, gr.HTML]
    tables: dict[str, gr.Dataframe]
    wipes: dict[str, gr.Button]
    confirms: dict[str, tuple[gr.Row, gr.Button, gr.Button]]
    learned: Learned
    general: general_text.Parts
    words: gr.Textbox
    look: gr.Button
    found: gr.HTML
    brought: gr.HTML
    worth: gr.Plot


def build(tab: gr.Tab) -> Parts:
    """A card per database: size, entries, and what can be done with it. Below, what they know and
    brought."""
    cards, tables, wipes, confirms = {}, {}, {}, {}
    with gr.Row(elem_classes="cards"):
        for tier in (CONTEXT, MODEL, STATISTICS):
            with gr.Column(elem_classes="card", min_width=320):
                cards[tier] = gr.HTML(elem_id=f"tier-{tier}", apply_default_css=False)
                if tier == MODEL:
                    learned = build_learned()
                if tier == STATISTICS:
                    general = general_text.build()
                else:
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
                        label=f"Best entries of {ink(tier).title}",
                        column_widths=["42%", "38%", "20%"],
                    )
    gr.HTML("<h3>What they know of some words</h3>", elem_classes="side-head")
    with gr.Row(elem_classes="adding"):
        words = gr.Textbox(
            label="Words",
            show_label=False,
            container=False,
            placeholder="Write words: each database says what it would propose next",
            max_lines=1,
            scale=5,
            elem_id="words",
        )
        look = gr.Button("Look up", size="sm", scale=1, min_width=70, elem_id="look-up")
    found = gr.HTML(elem_id="found", apply_default_css=False)
    gr.HTML("<h3>What each brought of late</h3>", elem_classes="side-head")
    brought = gr.HTML(elem_id="brought", apply_default_css=False)
    (worth,) = grid([charts.worth_of_evidence(Calibration())])
    gr.HTML(
        "<p class='fine'>A database that finds the last tokens of an answer proposes what came "
        "next. Strata learns from your answers how much such a match is worth. Emptying "
        f"{ink(MODEL).title} also resets this.</p>"
    )
    return Parts(
        tab,
        cards,
        tables,
        wipes,
        confirms,
        learned,
        general,
        words,
        look,
        found,
        brought,
        worth,
    )


def build_learned() -> Learned:
    """Buttons for past answers, and the numbers that say what of them is to stay."""
    with gr.Row(elem_classes="presets"):
        save = gr.Button("Save as a file", size="sm", elem_id="learned-save")
        bring = gr.UploadButton(
            "Import a file",
            size="sm",
            file_types=[".json"],
            type="filepath",
            elem_id="learned-bring",
        )
        prune = gr.Button("Prune", size="sm", elem_id="learned-prune")
    with gr.Column(visible=False, elem_classes="asking") as row:
        numbers = [
            gr.Number(0, label=label, precision=0, minimum=0, elem_id=f"prune-{number}")
            for number, label in enumerate(PRUNING)
        ]
        told_ = gr.HTML(elem_id="prune-told", apply_default_css=False)
        with gr.Row():
            yes = gr.Button("Forget the others", size="sm", variant="stop", min_width=60)
            no = gr.Button("Keep all", size="sm", min_width=60)
    outgoing = gr.Textbox(visible="hidden")
    return Learned(save, bring, prune, row, numbers, told_, yes, no, outgoing)


def card(tier: str, meaning: str, facts: list[tuple[str, str]]) -> str:
    """A database's name and facts; values that come from files are escaped."""
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    look = ink(tier)
    name = f'<span class="tok k-{tier}" title="{escape(look.meaning)}">{look.title}</span>'
    return f"<h3>{name}</h3><p>{escape(meaning)}</p><dl>{lines}</dl>"


def elsewhere(tier: str, info: BackendInfo, server: ServerInfo) -> str:
    """A database while a server runs the model: what drafts there is there, not here."""
    there = "drafts there" if tier in server.databases else "not known there"
    words = f"{info.name} runs on {server.host}. Nothing of its answers is learned on this machine."
    return card(tier, words, [("on the server", there)])


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


def pruning(keep: float | None, answers: float | None, documents: float | None) -> Pruning:
    """What the numbers say."""
    return Pruning(*(max(0, int(number or 0)) for number in (keep, answers, documents)))


class Handlers:
    """What the tab's events do."""

    def __init__(self, session: Session, parts: Parts) -> None:
        self.session, self.parts = session, parts

    @property
    def info(self) -> BackendInfo:
        """The loaded model."""
        return self.session.current.info

    def refresh(self, request: gr.Request, conversation: str | None, memory: Memory) -> Updates:
        """Read the databases."""
        session, parts = self.session, self.parts
        owner = owner_of(session, memory, request)
        with told():
            store = session.past_answers.calibrations(owner, self.info.fingerprint)
            sums = session.entries.brought(owner)
            brought: Updates = {
                parts.brought: databases_html.brought(sums, self.info.name),
                parts.worth: charts.worth_of_evidence(Calibration(store.load())),
            }
            server = self.info.server
            if server is not None:
                cards: Updates = {
                    parts.cards[t]: elsewhere(t, self.info, server) for t in parts.cards
                }
                return {**cards, **dict.fromkeys(parts.tables.values(), []), **brought}
            context = context_card(session, owner, conversation)
            model, grams = model_card(session, owner)
            statistics, shares = statistics_card(session)
            return {
                parts.cards[CONTEXT]: context,
                parts.cards[MODEL]: model,
                parts.cards[STATISTICS]: statistics,
                parts.tables[MODEL]: grams,
                parts.tables[STATISTICS]: shares,
                **brought,
            }
        return {parts.worth: gr.skip()}

    def wipe_context(self, request: gr.Request, conversation: str | None, memory: Memory) -> object:
        """Empty the open conversation's log."""
        with told():
            if conversation:
                owner = owner_of(self.session, memory, request)
                self.session.stores.wipe_context(owner, conversation)
        return gr.update(visible=False)

    def wipe_model(self, request: gr.Request, memory: Memory) -> object:
        """Empty the past answers."""
        with told():
            owner = owner_of(self.session, memory, request)
            self.session.past_answers.wipe(owner, self.info.fingerprint)
        return gr.update(visible=False)

    def find(
        self, request: gr.Request, words: str, conversation: str | None, memory: Memory
    ) -> object:
        """What the databases know of some words."""
        with told():
            owner = owner_of(self.session, memory, request)
            return databases_html.found(self.session.entries.find(owner, conversation, words))
        return gr.skip()

    # past answers

    def save(self, request: gr.Request, memory: Memory) -> str:
        """The past answers as a file."""
        with told():
            owner = owner_of(self.session, memory, request)
            text = self.session.past_answers.saved(owner, self.info)
            return saved("past-answers.json", "application/json", text)
        return ""

    def bring(self, request: gr.Request, sent: str | None, memory: Memory) -> object:
        """Take in a file of past answers."""
        path = Path(sent or "")
        try:
            with told():
                owner = owner_of(self.session, memory, request)
                count = self.session.past_answers.take_in(owner, self.info, content_of(path))
                gr.Info(f"{count:,} n-grams were imported.")
        finally:
            with suppress(OSError):
                path.unlink()  # Gradio would keep what was uploaded
        return gr.skip()

    def preview(self, request: gr.Request, memory: Memory, *numbers: float | None) -> object:
        """How many n-grams would be forgotten."""
        with told():
            owner = owner_of(self.session, memory, request)
            store = self.session.past_answers.ngrams(owner, self.info.fingerprint)
            gone, all_ = store.pruned(pruning(*numbers)), store.rows()
            return fine(f"{gone:,} of {all_:,} n-grams would be forgotten. 0 is no limit.")
        return gr.skip()

    def prune(self, request: gr.Request, memory: Memory, *numbers: float | None) -> object:
        """Forget them."""
        with told():
            owner = owner_of(self.session, memory, request)
            self.session.past_answers.drop(owner, self.info.fingerprint, pruning(*numbers))
        return gr.update(visible=False)


def content_of(path: Path) -> bytes:
    """What is in an uploaded file, as far as it is read. Raises StorageError."""
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise StorageError(f"The file cannot be read ({error.strerror}). Try again.") from error


def wire(session: Session, parts: Parts, current: gr.State, memory: gr.BrowserState) -> None:
    """Read the databases when the tab opens, and whenever one was changed."""
    on, learned = Handlers(session, parts), parts.learned
    outputs = [*parts.cards.values(), *parts.tables.values(), parts.brought, parts.worth]
    refresh = Event(on.refresh, [current, memory], outputs)
    parts.tab.select(*refresh, **AT_ONCE)
    general_text.wire(session.statistics_files, parts.general, parts.tab, refresh)
    show, hide = (lambda: gr.update(visible=True)), (lambda: gr.update(visible=False))
    for tier, (row, yes, no) in parts.confirms.items():
        parts.wipes[tier].click(show, None, row, **AT_ONCE)
        no.click(hide, None, row, **AT_ONCE)
        done = (
            yes.click(on.wipe_context, [current, memory], row, **AT_ONCE)
            if tier == CONTEXT
            else yes.click(on.wipe_model, memory, row, **AT_ONCE)
        )
        done.then(*refresh, **AFTER)
    gr.on(
        [parts.words.submit, parts.look.click],
        on.find,
        [parts.words, current, memory],
        parts.found,
        **AT_ONCE,
    )
    learned.save.click(on.save, memory, learned.outgoing, **AT_ONCE).then(
        None, learned.outgoing, None, js=SAVE_FILE, **AFTER
    )
    learned.bring.upload(on.bring, [learned.bring, memory], learned.told, **AT_ONCE).then(
        *refresh, **AFTER
    )
    preview = Event(on.preview, [memory, *learned.numbers], learned.told)
    learned.prune.click(show, None, learned.row, **AT_ONCE).then(*preview, **AFTER)
    for number in learned.numbers:
        number.input(*preview, **LATEST)
    learned.no.click(hide, None, learned.row, **AT_ONCE)
    learned.yes.click(on.prune, [memory, *learned.numbers], learned.row, **AT_ONCE).then(
        *refresh, **AFTER
    )
