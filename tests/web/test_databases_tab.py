"""The Databases tab: building with progress, imports, pruning, looking up; hostile texts inert."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.service import statistics_files
from app.service.entries import Entry, Hit
from app.service.session import Session
from app.web import databases_html
from app.web.tabs import databases, general_text
from engine.backends.toy import ToyBackend
from engine.local import Local
from engine.types import MODEL, STATISTICS
from storage.brought import Brought
from storage.database import Database
from storage.statistics import SUFFIX, open_table
from tests.service.test_session import ask
from tests.support.hostile import MARKUP
from tests.support.inside import OWNER, swap
from tests.web.test_gguf_section import after
from tests.web.test_tabs import made

EVIL = "<img src=x onerror=alert(1)>"
REQUEST: Any = SimpleNamespace(username=None, session_hash="page")
Shown = dict[Any, Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_files, "LOOK_SECONDS", 0.01)


@pytest.fixture
def session(db: Database, tmp_path: Path) -> Session:
    folder = tmp_path / "statistics"
    engine = Local(lambda tokenizer, report: open_table([folder], tokenizer, report))
    session = Session(engine, db, folders=[folder])
    swap(session, ToyBackend(), "/m/toy")
    return session


@pytest.fixture
def on(session: Session) -> databases.Handlers:
    def build() -> databases.Handlers:
        with gr.Blocks(), gr.Tab("Databases") as tab:
            return databases.Handlers(session, databases.build(tab))

    return made(build)


@pytest.fixture
def general(on: databases.Handlers, session: Session) -> general_text.Handlers:
    return general_text.Handlers(session.statistics_files, on.parts.general)


def text(path: Path, content: str = "the cat and the dog " * 99) -> Path:
    path.write_text(content)
    return path


def test_files_that_are_sent_are_built_with_progress(
    on: databases.Handlers, general: general_text.Handlers, tmp_path: Path
) -> None:
    parts = general.parts
    sent = [str(text(tmp_path / f"{EVIL.replace('/', '')}{n}.txt")) for n in range(2)]
    updates = list(general.uploaded(sent))
    assert updates[0][parts.stop]["visible"] and not updates[0][parts.build]["interactive"]
    bars = [str(update[parts.status]) for update in updates[1:-1]]
    assert bars and all('class="progress"' in bar and "<img" not in bar for bar in bars)
    assert "Made from 3,960 tokens, 2 documents" in updates[-1][parts.status]
    assert updates[-1][parts.remove]["visible"] and not updates[-1][parts.stop]["visible"]
    assert not any(Path(file).exists() for file in sent)
    card = on.refresh(REQUEST, None, {})[on.parts.cards[STATISTICS]]
    assert "3,960" in str(card) and "<img" not in str(card)
    removed = general.remove()
    assert "was removed" in removed[parts.status] and not removed[parts.remove]["visible"]


def test_files_of_this_machine_are_named_in_a_box(
    general: general_text.Handlers, tmp_path: Path
) -> None:
    parts, file = general.parts, text(tmp_path / "a b.txt")
    done = after(general.local(f'\n "{file}" \n\n'))
    assert "Made from 1,980 tokens, 1 documents" in done[parts.status] and file.exists()
    for said, words in (
        ("", "No file is chosen"),
        (f"{tmp_path}/{EVIL}", "There is no file"),
        (str(tmp_path), "There is no file"),
    ):
        status = after(general.local(said))[parts.status]
        assert words in status and "<img" not in status
    copied = general.copy(str(tmp_path))
    assert f"A copy is at {tmp_path}/bytes{SUFFIX}." in copied[parts.status]
    assert "Name one path. There are 2" in general.take("a\nb")[parts.status]
    assert "is in use" in general.take(f"{tmp_path}/bytes{SUFFIX}")[parts.status]


def test_stop_and_what_another_page_began(
    session: Session, general: general_text.Handlers, tmp_path: Path
) -> None:
    parts, files = general.parts, session.statistics_files
    (idle,) = general.show()
    assert not idle[parts.stop]["visible"] and parts.status not in idle
    files.start([text(tmp_path / "a.txt", "the cat and the dog " * 50_000)])

    def stopped() -> Iterator[Shown]:
        for update in general.show():
            yield update
            files.stop()

    shown = after(stopped())
    assert "it was stopped. Nothing was changed" in shown[parts.status]
    assert not shown[parts.remove]["visible"] and shown[parts.build]["interactive"]


def test_a_file_that_is_sent_is_checked_and_deleted(
    general: general_text.Handlers, tmp_path: Path
) -> None:
    bad = text(tmp_path / "bad.db")
    shown = general.bring(str(bad))
    assert "cannot be used" in shown[general.parts.status] and not bad.exists()


def test_past_answers_are_saved_imported_and_pruned(
    session: Session, on: databases.Handlers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    monkeypatch.setattr(gr, "Info", notices.append)
    monkeypatch.setattr(gr, "Warning", notices.append)
    ask(session, "hello there")
    store = session.past_answers.ngrams(OWNER, "toy")
    count = store.rows()
    made_ = json.loads(on.save(REQUEST, {}))
    assert made_["name"] == "past-answers.json"
    assert f"0 of {count:,} n-grams" in str(on.preview(REQUEST, {}, 0, 0, 0))
    assert f"{count:,} of {count:,} n-grams" in str(on.preview(REQUEST, {}, None, 0, 2))
    on.prune(REQUEST, {}, 3, 0, 0)
    assert store.rows() == 3
    sent = tmp_path / "sent.json"
    sent.write_text(made_["text"])
    on.bring(REQUEST, str(sent), {})
    assert store.rows() == count and not sent.exists() and f"{count:,}" in notices[-1]
    sent.write_text(made_["text"].replace('"bytes"', f'"{EVIL}"'))
    on.bring(REQUEST, str(sent), {})
    assert "another tokenizer" in notices[-1] and not sent.exists()
    on.bring(REQUEST, None, {})
    assert "cannot be read" in notices[-1] and store.rows() == count


def test_what_is_known_and_brought_is_told(session: Session, on: databases.Handlers) -> None:
    conversation, _ = ask(session, "hello there")
    said = session.chat.conversations(OWNER).messages(conversation)[-1].content
    found = str(on.find(REQUEST, said[:-1], conversation, {}))
    assert f"<code>{said[-1]}</code>" in found or "␣" in found
    assert found.count("<h4>") == 3 and databases_html.UNKNOWN[STATISTICS] in found
    brought = str(on.refresh(REQUEST, conversation, {})[on.parts.brought])
    assert "The latest answer of toy" in brought and "General text" in brought


def test_saved_seconds_are_told_where_they_are_known() -> None:
    sums = Brought(2, Counter({"context": 3, "target": 1}), Counter({"context": 9}),
                   Counter({"context": 3}), {"context": 0.001}, 4, 1.0, 3.5)  # fmt: skip
    told = databases_html.brought(sums, EVIL)
    assert "<b>2.5 s less</b>" in told and "75 %" in told and "<img" not in told
    slower = Brought(1, sums.tokens, sums.drafted, sums.accepted, {}, 2, 3.0, 1.0)
    assert "2 of these tokens took 3.0 s, <b>2.0 s more</b>" in databases_html.brought(slower, "m")
    unknown = Brought(1, sums.tokens, sums.drafted, sums.accepted, {}, 0, 0.0, 0.0)
    assert "is not known" in databases_html.brought(unknown, "m")
    nothing = Brought(0, Counter(), Counter(), Counter(), {}, 0, 0.0, 0.0)
    assert "No answer with drafts" in databases_html.brought(nothing, "m")


@pytest.mark.parametrize("bad", [EVIL, *MARKUP])
def test_no_text_becomes_markup(bad: str) -> None:
    counts = Counter({bad: 1})
    sums = Brought(1, counts, counts, counts, {bad: 1.0}, 1, 1.0, 1.0)
    drafts = Counter({f"draft:{bad}": 1})
    for told in (
        databases_html.found({MODEL: Hit(2, bad, (Entry(bad, 1, 1.0),))}),
        databases_html.brought(sums, bad),
        databases_html.brought(Brought(1, drafts, drafts, drafts, {}, 0, 0, 0), bad),
    ):
        assert bad not in told and "<img" not in told and "<script" not in told
