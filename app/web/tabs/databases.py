"""The Databases tab: what each database holds, contributed, and knows about some words; saving,
importing, pruning and emptying past answers; and building, importing, copying and removing the file
of general text.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import gradio as gr

from app.service.databases import Hit
from app.service.draft_models import amount
from app.service.jobs import Job, Progress
from app.service.pages import Download
from app.service.session import Session
from app.web import charts
from app.web.colors import INKS, ink, others
from app.web.kit import (
    ACT,
    REFRESH,
    Blocks,
    Confirmation,
    Event,
    JobCard,
    Tab,
    Trigger,
    Updates,
    grid,
    hide,
    html,
    small_button,
    text_file,
    text_table,
    upload_button,
    upload_content,
    uploaded,
)
from app.web.markup import finding, fine_print, template
from engine.backends.base import BackendInfo, ServerInfo
from engine.drafting.calibration import Calibration
from engine.errors import StorageError, StrataError
from engine.types import CONTEXT, MODEL, STATISTICS, TARGET
from storage.documents import KINDS, PACKED
from storage.drafting import CalibrationStore, ContextStore
from storage.ngrams import MOST_BYTES, Pruning
from storage.steps import Contributions

TOP = 40
WIDE, NO_TEXT = 400, "\ufffd"
"""The best TOP entries are chosen from this many. Entries with incomplete characters, which decode
to NO_TEXT, are left out."""


PRUNING = (
    "Keep only so many n-grams, the newest ones",
    "Keep only what appeared in the last … answers",
    "Keep only what appeared in at least … answers",
)
"""The labels of the fields of `Pruning`, in order. 0 means no limit."""


Rows = list[list[str]]


def card(tier: str, meaning: str, facts: list[tuple[str, str]]) -> str:
    return template("database.html", tier=tier, meaning=meaning, facts=facts)


def elsewhere(tier: str, info: BackendInfo, server: ServerInfo) -> str:
    """The card of a database while a server runs the model, for which nothing here drafts."""
    state = "drafts there" if tier in server.databases else "not known there"
    text = (
        f"{info.name} runs on {server.host}. Nothing is learned from its answers on this machine."
    )
    return card(tier, text, [("on the server", state)])


def context_card(session: Session, owner: str, conversation: str | None) -> str:
    fingerprint = session.current.info.tokenizer_fingerprint
    store = ContextStore(session.database, owner)
    tokens = store.size(conversation, fingerprint) if conversation else 0
    return card(
        CONTEXT,
        "All tokens of the open conversation, including those that were edited or regenerated.",
        [
            ("tokens", f"{tokens:,}"),
            ("on disk", amount(4 * tokens)),
            ("limit", f"{store.CAP:,} tokens"),
        ],
    )


def model_card(session: Session, owner: str) -> tuple[str, Rows]:
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


def statistics_card(session: Session) -> tuple[str, Rows]:
    """The card of the statistics file for the model's tokenizer, and the rows of its best
    entries."""
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
    return Pruning(*(max(0, int(number or 0)) for number in (keep, answers, documents)))


class Databases(Tab):
    """A card for each database with its size, entries and actions. Below the cards, what the
    databases know about some words, and what they contributed."""

    def __init__(self, session: Session, memory: gr.BrowserState, tab: gr.Tab) -> None:
        super().__init__(session, memory)
        self.tab = tab
        self.cards: dict[str, gr.HTML] = {}
        self.tables: dict[str, gr.Dataframe] = {}
        self.wipes: dict[str, Confirmation] = {}
        with gr.Row(elem_classes="cards"):
            for tier in (CONTEXT, MODEL, STATISTICS):
                with gr.Column(elem_classes="card", min_width=320):
                    self.build_card(tier)
        gr.HTML("<h3>What they know about some words</h3>", elem_classes="side-head")
        with gr.Row(elem_classes="adding"):
            self.words = gr.Textbox(
                show_label=False,
                container=False,
                max_lines=1,
                label="Words",
                placeholder="Type some words: each database shows what it would propose next",
                scale=5,
                elem_id="words",
            )
            self.look = small_button("Look up", scale=1, min_width=70, elem_id="look-up")
        self.found = html(elem_id="found")
        gr.HTML("<h3>What each contributed recently</h3>", elem_classes="side-head")
        self.contributions = html(elem_id="contributions")
        (self.worth,) = grid([charts.worth_of_evidence(Calibration())])
        gr.HTML(
            "<p class='fine'>A database that finds the last tokens of an answer proposes what came "
            "next. Strata learns from your answers how much such a match is worth. Emptying "
            f"{ink(MODEL).title} also resets this.</p>"
        )

    def build_card(self, tier: str) -> None:
        self.cards[tier] = html(elem_id=f"tier-{tier}")
        if tier == MODEL:
            self.build_learned()
        if tier == STATISTICS:
            self.general = GeneralText(self.session, self.memory)
        else:
            button = small_button(f"Empty {ink(tier).title}")
            self.wipes[tier] = Confirmation.build(button, "Empty it", "Keep it")
        if tier != CONTEXT:
            third = "Seen" if tier == MODEL else "Share"
            self.tables[tier] = text_table(
                headers=["After", "Next", third],
                max_height=420,
                label=f"Best entries of {ink(tier).title}",
                column_widths=["42%", "38%", "20%"],
            )

    def build_learned(self) -> None:
        with gr.Row(elem_classes="presets"):
            self.save_button = small_button("Save as a file", elem_id="learned-save")
            self.import_button = upload_button(
                "Import a file", file_types=[".json"], elem_id="learned-bring"
            )
            button = small_button("Prune", elem_id="learned-prune")
        with gr.Column(visible=False, elem_classes="asking") as column:
            self.numbers = [
                gr.Number(0, label=label, precision=0, minimum=0, elem_id=f"prune-{number}")
                for number, label in enumerate(PRUNING)
            ]
            self.preview_line = html(elem_id="prune-preview")
            with gr.Row():
                yes = small_button("Forget the others", variant="stop", min_width=60)
                no = small_button("Keep all", min_width=60)
        self.pruning = Confirmation(button, column, yes, no)

    def wire(self, current: gr.State) -> None:
        """Connect the tab. It reads the databases when it opens and after each change."""
        outputs = [*self.cards.values(), *self.tables.values(), self.contributions, self.worth]
        refresh = self.event(self.refresh, current, outputs)
        self.on(self.tab.select, refresh)
        self.general.wire(self.tab, refresh)
        for wipe, act in ((CONTEXT, self.wipe_context), (MODEL, self.wipe_model)):
            done = self.confirm(self.wipes[wipe], act, current if wipe == CONTEXT else ())
            self.then(done, refresh)
        self.on([self.words.submit, self.look.click], self.find, [self.words, current], self.found)
        self.on_save(self.save_button.click, self.save)
        imported = self.on(self.import_button.upload, self.import_file, self.import_button)
        self.then(imported, refresh)
        preview = self.event(self.preview, self.numbers, self.preview_line)
        self.then(self.confirm(self.pruning, self.prune, self.numbers), refresh)
        self.on(self.pruning.button.click, preview)
        for number in self.numbers:
            self.on(number.input, preview, mode="always_last")

    @property
    def info(self) -> BackendInfo:
        return self.session.current.info

    def refresh(self, owner: str, conversation: str | None) -> Updates:
        session = self.session
        store = CalibrationStore(session.database, owner, self.info.fingerprint)
        sums = session.entries.contributions(owner)
        below: Updates = {
            self.contributions: contributions_html(sums, self.info.name),
            self.worth: charts.worth_of_evidence(Calibration(store.load())),
        }
        server = self.info.server
        if server is not None:
            cards: Updates = {self.cards[t]: elsewhere(t, self.info, server) for t in self.cards}
            return {**cards, **dict.fromkeys(self.tables.values(), []), **below}
        model, grams = model_card(session, owner)
        statistics, shares = statistics_card(session)
        return {
            self.cards[CONTEXT]: context_card(session, owner, conversation),
            self.cards[MODEL]: model,
            self.cards[STATISTICS]: statistics,
            self.tables[MODEL]: grams,
            self.tables[STATISTICS]: shares,
            **below,
        }

    def wipe_context(self, owner: str, conversation: str | None) -> object:
        if conversation:
            self.session.chat.wipe_context(owner, conversation)
        return hide()

    def wipe_model(self, owner: str) -> object:
        self.session.past_answers.wipe(owner, self.info.fingerprint)
        return hide()

    def find(self, owner: str, words: str, conversation: str | None) -> object:
        return found_html(self.session.entries.find(owner, conversation, words))

    def save(self, owner: str) -> Download:
        text = self.session.past_answers.saved(owner, self.info)
        return text_file("past-answers.json", "application/json", text)

    def import_file(self, owner: str, sent: str | None) -> None:
        content = upload_content(sent, MOST_BYTES)
        count = self.session.past_answers.take_in(owner, self.info, content)
        gr.Info(f"{count:,} n-grams were imported.")

    def preview(self, owner: str, *numbers: float | None) -> object:
        store = self.session.past_answers.ngrams(owner, self.info.fingerprint)
        gone, all_ = store.pruned(pruning(*numbers)), store.rows()
        return fine_print(f"{gone:,} of {all_:,} n-grams would be forgotten. 0 is no limit.")

    def prune(self, owner: str, *numbers: float | None) -> object:
        self.session.past_answers.drop(owner, self.info.fingerprint, pruning(*numbers))
        return hide()


UNKNOWN = {
    CONTEXT: "Not found in this conversation, or no conversation is open.",
    MODEL: "Not found in past answers.",
    STATISTICS: "Not found in these texts, or there is no file for this model.",
}
"""The text if a database does not contain the words."""
TIMES = {CONTEXT: "times", MODEL: "answers", STATISTICS: "times"}
"""The unit in which a database counts."""


def shown(text: str) -> str:
    return repr(text)[1:-1].replace(" ", "␣")


def found_html(hits: Mapping[str, Hit]) -> str:
    return template("found.html", hits=hits, unknown=UNKNOWN, times=TIMES, shown=shown)


def contributions_html(sums: Contributions, model: str) -> str:
    whole, sources = sums.tokens.total(), [*INKS, *others({*sums.tokens, *sums.drafted})]
    values = {"sums": sums, "model": model, "whole": whole, "sources": sources}
    return template("contributions.html", target=TARGET, **values)


ABOUT = (
    "<p class='fine'>Build one from texts about what you discuss: text, Markdown, JSON, JSON "
    "lines or CSV, also compressed (zip, xz, gz). It replaces the file above. You can chat "
    "meanwhile: building pauses while an answer is written.</p>"
)


def not_done(error: Exception) -> str:
    return finding("differs", "Not done", str(error))


def paths_of(text: str) -> list[Path]:
    lines = (line.strip().strip("\"'") for line in text.splitlines())
    return [Path(os.path.expanduser(line)) for line in lines if line]


def single_path(text: str) -> Path:
    named = paths_of(text)
    if len(named) != 1:
        raise StorageError(f"Name one path. There are {len(named)}.")
    return named[0]


class GeneralText(Tab):
    """The section for the file of general text: buttons for uploads, and a box for paths of files
    on this machine."""

    def __init__(self, session: Session, memory: gr.BrowserState) -> None:
        super().__init__(session, memory)
        self.files = session.statistics_files
        html(ABOUT)
        with gr.Row(elem_classes="presets"):
            self.upload = upload_button(
                "Build from files",
                file_count="multiple",
                file_types=[*KINDS, *PACKED],
                elem_id="general-upload",
            )
            self.import_button = upload_button(
                "Import a file", file_types=[".db"], elem_id="general-bring"
            )
        with gr.Accordion("Files on this machine", open=False, elem_id="general-local"):
            self.paths = gr.Textbox(
                label="Paths, one per line",
                lines=2,
                max_lines=6,
                placeholder="~/notes/talks.jsonl",
                elem_id="general-paths",
            )
            with gr.Row(elem_classes="presets"):
                self.build_button = small_button("Build from these", elem_id="general-build")
                self.take_button = small_button("Import it", elem_id="general-take")
                self.copy_button = small_button("Save a copy to this path", elem_id="general-copy")
        with gr.Row(elem_classes="presets"):
            stop = small_button("Stop", variant="stop", visible=False, elem_id="general-stop")
            self.remove_button = small_button(
                "Remove your file", visible=False, elem_id="general-remove"
            )
        status = html(elem_id="general-status")
        self.job = JobCard([], stop, status)
        self.actions = [self.upload, self.import_button, self.build_button]
        self.actions += [self.take_button, self.copy_button]

    def wire(self, tab: gr.Tab, after: Event) -> None:
        """Connect the section. `after` is the event that refreshes the rest of the tab."""
        outputs = [*self.actions, self.job.stop, self.remove_button, self.job.status]
        self.on(tab.select, self.show, (), outputs, guard=REFRESH)
        acts: Sequence[tuple[Trigger, Callable[..., object], Blocks]] = (
            (self.upload.upload, self.build_uploaded, self.upload),
            (self.build_button.click, self.local, self.paths),
            (self.import_button.upload, self.import_file, self.import_button),
            (self.take_button.click, self.import_path, self.paths),
            (self.remove_button.click, self.remove, ()),
        )
        for trigger, act, inputs in acts:
            self.then(self.on(trigger, act, inputs, outputs, guard=ACT), after)
        self.on(self.copy_button.click, self.copy, self.paths, outputs, guard=ACT)
        self.on(self.job.stop.click, self.files.stop)

    def show(self) -> Iterator[Updates]:
        """Show the available actions, or the progress of a build that another page began."""
        if (job := self.files.slot.running) is not None:
            yield from self.follow(job)
        else:
            yield self.idle()

    def idle(self, status: str | None = None) -> Updates:
        own = gr.update(visible=self.files.own())
        return {**self.job.idle(*self.actions, status=status), self.remove_button: own}

    def build_uploaded(self, sent: list[str] | str | None) -> Iterator[Updates]:
        names = [sent] if isinstance(sent, str) else sent or []
        yield from self.begin([Path(name) for name in names], True)

    def local(self, text: str) -> Iterator[Updates]:
        yield from self.begin(paths_of(text), False)

    def begin(self, files: list[Path], uploaded: bool) -> Iterator[Updates]:
        try:
            job = self.files.start(files, uploaded)
        except (StrataError, OSError) as error:
            yield {self.job.status: not_done(error)}
        else:
            yield from self.follow(job)

    def follow(self, job: Job[Progress, str]) -> Iterator[Updates]:
        yield {**self.job.busy(*self.actions), self.remove_button: gr.update(visible=False)}
        status = yield from self.job.follow(
            job.watch(), lambda last: fine_print(job.result()), not_done
        )
        yield self.idle(status)

    def done(self, act: Callable[[], str]) -> Updates:
        try:
            return self.idle(fine_print(act()))
        except (StrataError, OSError) as error:
            return {self.job.status: not_done(error)}

    def import_file(self, sent: str | None) -> Updates:
        with uploaded(sent) as path:
            return self.done(lambda: self.files.take_in(path))

    def import_path(self, text: str) -> Updates:
        return self.done(lambda: self.files.take_in(single_path(text)))

    def copy(self, text: str) -> Updates:
        return self.done(lambda: f"A copy is at {self.files.copy_to(single_path(text))}.")

    def remove(self) -> Updates:
        return self.done(self.files.remove)
