"""The Databases tab: building with progress, imports, pruning, looking up; hostile texts inert."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from app.service.databases import Entry, Hit
from app.service.session import Session
from app.web.tabs import databases
from engine.errors import StorageError
from engine.local import Local
from engine.types import MODEL, STATISTICS
from storage.database import Database
from storage.drafting import DraftingStore
from storage.statistics import SUFFIX, open_table
from storage.steps import Contributions
from tests.service.test_session import ask
from tests.support.blocks import EVIL, after, content, tab_of
from tests.support.hostile import MARKUP
from tests.support.inside import OWNER, swap
from tests.support.toy import ToyBackend

Shown = dict[Any, Any]


@pytest.fixture
def session(db: Database, tmp_path: Path) -> Session:
    folder = tmp_path / "statistics"
    opened = partial(open_table, [folder])
    engine = Local(opened, store=DraftingStore(db))
    session = Session(engine, db, folders=[folder])
    swap(session, ToyBackend(), "/m/toy")
    return session


@pytest.fixture
def on(session: Session) -> databases.Databases:
    return tab_of(databases.Databases, session)


@pytest.fixture
def general(on: databases.Databases) -> databases.GeneralText:
    return on.general


def text(path: Path, content: str = "the cat and the dog " * 99) -> Path:
    path.write_text(content)
    return path


def test_files_that_are_sent_are_built_with_progress(
    on: databases.Databases, general: databases.GeneralText, tmp_path: Path
) -> None:
    sent = [str(text(tmp_path / f"{EVIL.replace('/', '')}{n}.txt")) for n in range(2)]
    updates, stop = list(general.build_uploaded(sent)), general.job.stop
    first, done = updates[0], updates[-1]
    assert first[stop]["visible"] and not first[general.build_button]["interactive"]
    bars = [str(update[general.job.status]) for update in updates[1:-1]]
    assert bars and all('class="progress"' in bar and "<img" not in bar for bar in bars)
    assert "Made from 3,960 tokens, 2 documents" in done[general.job.status]
    assert done[general.remove_button]["visible"] and not done[stop]["visible"]
    assert not any(Path(file).exists() for file in sent)
    card = on.refresh(OWNER, None)[on.cards[STATISTICS]]
    assert "3,960" in str(card) and "<img" not in str(card)
    removed = general.remove()
    assert "was removed" in removed[general.job.status]
    assert not removed[general.remove_button]["visible"]


def test_files_of_this_machine_are_named_in_a_box(
    general: databases.GeneralText, tmp_path: Path
) -> None:
    file = text(tmp_path / "a b.txt")
    done = after(general.local(f'\n "{file}" \n\n'))
    assert "Made from 1,980 tokens, 1 documents" in done[general.job.status] and file.exists()
    for shown, expected in (
        ("", "No file is chosen"),
        (f"{tmp_path}/{EVIL}", "There is no file"),
        (str(tmp_path), "There is no file"),
    ):
        status = after(general.local(shown))[general.job.status]
        assert expected in status and "<img" not in status
    copied = general.copy(str(tmp_path))
    assert f"A copy is at {tmp_path}/bytes{SUFFIX}." in copied[general.job.status]
    assert "Name one path. There are 2" in general.import_path("a\nb")[general.job.status]
    assert "is in use" in general.import_path(f"{tmp_path}/bytes{SUFFIX}")[general.job.status]


def test_stop_and_what_another_page_began(
    session: Session, general: databases.GeneralText, tmp_path: Path
) -> None:
    files = session.statistics_files
    (idle,) = general.show()
    assert not idle[general.job.stop]["visible"] and general.job.status not in idle
    files.start([text(tmp_path / "a.txt", "the cat and the dog " * 50_000)])

    def stopped() -> Iterator[Shown]:
        for update in general.show():
            yield update
            files.stop()

    shown = after(stopped())
    assert "it was stopped. Nothing was changed" in shown[general.job.status]
    assert not shown[general.remove_button]["visible"]
    assert shown[general.build_button]["interactive"]


def test_a_file_that_is_sent_is_checked_and_deleted(
    general: databases.GeneralText, tmp_path: Path
) -> None:
    bad = text(tmp_path / "bad.db")
    shown = general.import_file(str(bad))
    assert "cannot be used" in shown[general.job.status] and not bad.exists()


def test_past_answers_are_saved_imported_and_pruned(
    session: Session, on: databases.Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    monkeypatch.setattr(gr, "Info", notices.append)
    ask(session, "hello there")
    store = session.past_answers.ngrams(OWNER, "toy")
    count = store.rows()
    made = on.save(OWNER)
    assert made.name == "past-answers.json"
    assert f"0 of {count:,} n-grams" in str(on.preview(OWNER, 0, 0, 0))
    assert f"{count:,} of {count:,} n-grams" in str(on.preview(OWNER, None, 0, 2))
    on.prune(OWNER, 3, 0, 0)
    assert store.rows() == 3
    sent = tmp_path / "sent.json"
    sent.write_text(content(made))
    on.import_file(OWNER, str(sent))
    assert store.rows() == count and not sent.exists() and f"{count:,}" in notices[-1]
    sent.write_text(content(made).replace('"bytes"', f'"{EVIL}"'))
    with pytest.raises(StorageError, match="another tokenizer"):
        on.import_file(OWNER, str(sent))
    with pytest.raises(StorageError, match="cannot be read"):
        on.import_file(OWNER, None)
    assert not sent.exists() and store.rows() == count


def test_what_is_known_and_was_contributed_is_shown(
    session: Session, on: databases.Databases
) -> None:
    conversation, _ = ask(session, "hello there")
    message = session.chat.conversations(OWNER).messages(conversation)[-1].content
    found = str(on.find(OWNER, message[:-1], conversation))
    assert f"<code>{message[-1]}</code>" in found or "␣" in found
    assert found.count("<h4>") == 3 and databases.UNKNOWN[STATISTICS] in found
    brought = str(on.refresh(OWNER, conversation)[on.contributions])
    assert "The latest answer of toy" in brought and "General text" in brought


def test_saved_seconds_are_shown_where_they_are_known() -> None:
    sums = Contributions(2, Counter({"context": 3, "target": 1}), Counter({"context": 9}),
                   Counter({"context": 3}), {"context": 0.001}, 4, 1.0, 3.5)  # fmt: skip
    shown = databases.contributions_html(sums, EVIL)
    assert "<b>2.5 s less</b>" in shown and "75 %" in shown and "<img" not in shown
    slower = Contributions(1, sums.tokens, sums.drafted, sums.accepted, {}, 2, 3.0, 1.0)
    assert "2 of these tokens took 3.0 s, <b>2.0 s more</b>" in databases.contributions_html(
        slower, "m"
    )
    unknown = Contributions(1, sums.tokens, sums.drafted, sums.accepted, {}, 0, 0.0, 0.0)
    assert "is not known" in databases.contributions_html(unknown, "m")
    nothing = Contributions(0, Counter(), Counter(), Counter(), {}, 0, 0.0, 0.0)
    assert "No answer with drafts" in databases.contributions_html(nothing, "m")


@pytest.mark.parametrize("bad", [EVIL, *MARKUP])
def test_no_text_becomes_markup(bad: str) -> None:
    counts = Counter({bad: 1})
    sums = Contributions(1, counts, counts, counts, {bad: 1.0}, 1, 1.0, 1.0)
    drafts = Counter({f"draft:{bad}": 1})
    for shown in (
        databases.found_html({MODEL: Hit(2, bad, (Entry(bad, 1, 1.0),))}),
        databases.contributions_html(sums, bad),
        databases.contributions_html(Contributions(1, drafts, drafts, drafts, {}, 0, 0, 0), bad),
    ):
        assert bad not in shown and "<img" not in shown and "<script" not in shown
