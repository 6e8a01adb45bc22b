"""Another model in the running app: what goes with the old one, what stays, and that whatever
fails, there is a model that answers."""

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.arguments import EMBEDDED
from app.service import models
from app.service.answering import Update
from app.service.jobs import Progress, Stop, Tasks
from app.service.models import Candidate
from app.service.session import Session
from engine.backends.base import Backend, LogitScores
from engine.engine import Event, Request
from engine.errors import Cancelled, ModelError, PromptError, SettingError
from engine.local import Local
from engine.queue import Waiting
from engine.runs import UNMEASURED
from engine.settings import Drafting, Runtime, Sampling
from engine.streams import Stream
from engine.tree import Tree
from storage.database import Database
from storage.drafting import ContextStore
from storage.machine import SourceStore
from storage.ngrams import ModelNgrams
from storage.statistics import SUFFIX, StatisticsTable
from storage.statistics_build import build
from tests.support.inside import FULL, OWNER, compare, failing, local, preferences, updates_of
from tests.support.inside import ask as answered
from tests.support.shop import Shop, ask, fails, load_model
from tests.support.toy import VOCABULARY, ToyBackend

pytestmark = pytest.mark.usefixtures("each_step")


@pytest.fixture
def session(db: Database, shop: Shop) -> Session:
    return shop.session(db)


def loaded(session: Session) -> Backend:
    """The loaded model."""
    return local(session).loaded.backend


class Gate(threading.Event):
    """Models wait for it, `reached` once one does."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()


def held(monkeypatch: pytest.MonkeyPatch, steps: int = 5) -> Gate:
    """After so many forwards the models wait until this is set."""
    gate, forwards, score = Gate(), count(), ToyBackend.score

    def wait(self: ToyBackend, tree: Tree, sampling: Sampling) -> LogitScores:
        if next(forwards) >= steps and not gate.is_set():
            gate.reached.set()
            assert gate.wait(10)
        return score(self, tree, sampling)

    monkeypatch.setattr(ToyBackend, "score", wait)
    return gate


# taking over


def test_the_text_is_that_of_a_program_that_started_with_the_model(
    session: Session, shop: Shop
) -> None:
    texts = [ask(session).text]
    for name in ("two", "three", "one"):
        load_model(session, shop.source(name))
        texts.append(ask(session).text)
        assert session.current.info.name == name and session.models.source == shop.source(name)
    assert texts[0] == texts[3] and len(set(texts)) == 3
    for name, text in zip(("one", "two", "three"), texts, strict=False):
        with Database() as db:
            fresh = shop.session(db, name)
            assert ask(fresh).text == text == ask(fresh, method="plain").text


def test_conversations_stay_and_go_on_with_the_other_model(session: Session, shop: Shop) -> None:
    conversation, _ = answered(session, "hello")
    before = session.chat.conversations(OWNER).messages(conversation)
    load_model(session, shop.source("two"))
    assert session.chat.conversations(OWNER).messages(conversation) == before
    session.chat.say(OWNER, conversation, "and more")
    *_, last = updates_of(session, OWNER, conversation, preferences())
    messages = session.chat.conversations(OWNER).messages(conversation)
    assert messages[:2] == before and messages[3].content == last.text
    with Database() as db:
        fresh = shop.session(db, "two")
        copy = fresh.chat.conversations(OWNER).create().id
        for message in messages[:3]:
            fresh.chat.conversations(OWNER).append(copy, message.role, message.content)
        assert [*updates_of(fresh, OWNER, copy, preferences("plain"))][-1].text == last.text


def remembered(session: Session) -> int | None:
    """How many n-grams the engine holds of what the loaded model said; None before it needs any."""
    past = local(session).loaded.memory.past_answers.get(OWNER)
    return past and past.tier.size


def context(session: Session, conversation: str) -> list[int]:
    """The log of an open conversation."""
    return local(session).loaded.memory.conversations[OWNER, conversation].databases.context.log


def test_what_was_learned_belongs_to_its_model(session: Session, shop: Shop, db: Database) -> None:
    (shop.root / "two.gguf").write_text("other tokens")
    conversation, _ = answered(session, "hello")
    rows = ModelNgrams(db, OWNER, "one").rows()
    assert rows and remembered(session) == rows
    log = ContextStore(db, OWNER).load(conversation, "bytes")
    load_model(session, shop.source("two"))
    assert remembered(session) is None and not local(session).loaded.memory.conversations
    session.chat.again(OWNER, conversation)
    list(updates_of(session, OWNER, conversation, preferences()))
    others = ModelNgrams(db, OWNER, "two").rows()
    assert others and remembered(session) == others
    assert ModelNgrams(db, OWNER, "one").rows() == rows
    assert context(session, conversation) == ContextStore(db, OWNER).load(
        conversation, "other tokens"
    )
    load_model(session, shop.source("one"))
    list(compare(session, OWNER, "hello", preferences(tokens=1), 1))
    assert remembered(session) == rows, "a comparison teaches nothing"
    session.chat.again(OWNER, conversation)
    list(updates_of(session, OWNER, conversation, preferences()))
    assert log and context(session, conversation)[: len(log)] == log


def test_costs_and_speed_are_those_of_the_loaded_model(session: Session, shop: Shop) -> None:
    first = session.costs.record
    assert first is not None and first == local(session).loaded.costs
    assert session.current.plain.tokens_per_second > 0
    session.current.plain = UNMEASURED
    texts = [progress.text for progress in load_model(session, shop.source("two"))]
    assert "Measuring two …" in texts and texts[-1] == "two is loaded."
    second = session.costs.record
    assert second is not None and second == local(session).loaded.costs != first
    assert session.current.plain.tokens_per_second > 0
    again = [progress.text for progress in load_model(session, shop.source("one"))]
    assert "Measuring one …" not in again, "its costs are stored"
    assert session.costs.record == local(session).loaded.costs == first


def test_each_tokenizer_has_its_statistics_and_a_table_is_closed_when_its_model_is_gone(
    shop: Shop, db: Database
) -> None:
    (shop.root / "two.gguf").write_text("other tokens")
    (shop.root / "three.gguf").write_text("third")
    (shop.root / "statistics").mkdir()
    documents = [np.frombuffer(b"hello there, hello there" * 20, np.uint8).astype(np.uint32)]
    for tokenizer in ("bytes", "other tokens"):
        path = shop.root / "statistics" / f"{tokenizer}{SUFFIX}"
        build(documents, path, tokenizer, VOCABULARY, "a title", 1 << 20)
    (shop.root / "statistics" / f"third{SUFFIX}").write_bytes(b"rubbish")
    session = shop.session(db)

    def connections(tokenizer: str) -> list[Callable[[], object]]:
        """Those of the engine, and of the tab that shows the table."""
        tables = local(session).table, session.current.statistics
        for table in tables:
            assert isinstance(table, StatisticsTable) and table.meta["tokenizer"] == tokenizer
        return [partial(table.connection.execute, "SELECT 1") for table in tables]

    first = connections("bytes")
    ask(session)
    load_model(session, shop.source("two"))
    for closed in first:
        with pytest.raises(Exception, match="closed"):
            closed()
    assert "frequent" in vars(local(session).table), "the first answer does not wait for this"
    second = connections("other tokens")
    for opened in second:
        opened()
    load_model(session, shop.source("three"))
    assert local(session).table is session.current.statistics is None and ask(session).text
    (notice,) = session.models.notices
    assert "cannot be used" in notice and "third" in notice
    for closed in second:
        with pytest.raises(Exception, match="closed"):
            closed()


def test_a_table_that_is_still_being_read_stays_open(shop: Shop, db: Database) -> None:
    (shop.root / "two.gguf").write_text("other tokens")
    (shop.root / "statistics").mkdir()
    path = shop.root / "statistics" / f"bytes{SUFFIX}"
    documents = [np.frombuffer(b"hello there, hello there" * 20, np.uint8).astype(np.uint32)]
    build(documents, path, "bytes", VOCABULARY, "a title", 1 << 20)
    session = shop.session(db)
    table: StatisticsTable | None = session.current.statistics
    load_model(session, shop.source("two"))
    assert table is not None and list(table.top(3)) and session.current.statistics is None


@pytest.mark.parametrize("method", ["hd", "hd-published"])
def test_nothing_holds_on_to_a_model_that_went(session: Session, shop: Shop, method: str) -> None:
    conversation, _ = answered(session, "hello there", method=method)
    list(session.proofs.prove(OWNER, conversation))
    list(compare(session, OWNER, "hello there", preferences(method), 1))
    session.stacks.load([shop.source("draft")])
    list(session.stacks.profile(Sampling(), ("hello there",), 8))
    left = updates_of(session, OWNER, session.chat.say(OWNER, None, "left"), preferences(method))
    next(left)
    left.close()  # type: ignore[attr-defined]
    del left
    assert shop.alive == ["draft", "one"]
    load_model(session, shop.source("two"))
    assert shop.alive == ["two"] and session.stacks.drafts == {}


# room in memory


def test_a_model_that_fits_next_to_the_other_is_read_first(
    session: Session, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    load = shop.load

    def watched(source: str, runtime: Runtime) -> Backend:
        seen.append(session.current.info.name + type(loaded(session)).__name__)
        return load(source, runtime)

    local(session).loaders = replace(local(session).loaders, load=watched)
    load_model(session, shop.source("two"))
    shop.room = 50
    load_model(session, shop.source("three"))
    assert seen == ["oneToyBackend", "twoNoModel"] and shop.alive == ["three"]


def test_what_does_not_fit_is_refused_before_anything_changes(session: Session, shop: Shop) -> None:
    session.stacks.load([shop.source("draft")])
    text, backend = ask(session).text, loaded(session)
    shop.room = 47
    message = fails(session, shop.source("two"))
    assert "two needs 48 B (40 B of weights and 8 B of cache), and 47 B are free on cpu" in message
    assert "loaded models included" in message and "Nothing was loaded" in message
    assert loaded(session) is backend and list(session.stacks.drafts) == ["draft"]
    assert ask(session).text == text and len(shop.made) == 2
    del backend
    shorter = Runtime(context_length=1024)
    assert session.engine.need(shop.source("two"), shorter).total == 41
    assert session.engine.room(shop.source("two"), shorter).total == 47
    load_model(session, shop.source("two"), shorter)
    assert session.models.runtime == shorter == shop.runtimes[-1] and shop.alive == ["two"]


def test_a_need_that_is_not_known_refuses_nothing(session: Session) -> None:
    load_model(session, "strange")
    assert session.current.info.name == "strange" and ask(session).text


# failures


@pytest.mark.parametrize("room", [200, 110])
def test_a_model_that_fails_leaves_the_old_one_with_its_drafts(
    session: Session, shop: Shop, room: int
) -> None:
    stacks = session.stacks
    stacks.load([shop.source("draft")])
    list(stacks.profile(Sampling(0.8), ("hello there",), 8))
    stacks.choose("draft@2", Sampling(0.8), Drafting(), False)
    text = ask(session, method="hsd:draft@2").text
    shop.room = room
    shop.broken.add(shop.source("two"))
    message = fails(session, shop.source("two"))
    assert "two.gguf' cannot be used: the file is damaged" in message
    assert ("one is back." in message) == (room == 110)
    assert shop.alive == ["draft", "one"] and session.models.source == shop.source("one")
    assert list(stacks.drafts) == ["draft"] and stacks.spec == "draft@2"
    assert ask(session, method="hsd:draft@2").text == text == ask(session, method="plain").text
    assert session.models.candidates()[-1].source == shop.source("one"), "not remembered"


@pytest.mark.parametrize("room", [200, 60])
def test_a_model_that_cannot_answer_counts_as_one_that_failed(
    session: Session, shop: Shop, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    text = ask(session).text
    shop.room = room
    score = ToyBackend.score

    def fail(self: ToyBackend, *arguments: object) -> object:
        if self.info.name == "two":
            assert len(shop.alive) <= room // 40
            raise MemoryError("no room")
        assert "two" not in shop.alive or room == 200, "its memory is needed"
        return score(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ToyBackend, "score", fail)
    assert "no room" in fails(session, shop.source("two"))
    assert shop.alive == ["one"] and ask(session).text == text


def test_without_any_model_the_app_continues_and_says_so(session: Session, shop: Shop) -> None:
    conversation, _ = answered(session, "hello")
    shop.room = 50
    shop.broken |= {shop.source("one"), shop.source("two")}
    text = fails(session, shop.source("two"))
    assert "cannot be loaded again either (the file is damaged)" in text
    assert "load one in the Models tab" in text and shop.alive == []
    assert session.models.source == "" and not session.models.demonstration
    for reach in (
        lambda: session.chat.say(OWNER, conversation, "more"),
        lambda: list(compare(session, OWNER, "hello", preferences(), 1)),
        session.costs.measure,
        lambda: session.stacks.load([shop.source("draft")]),
        lambda: loaded(session).detokenize([1]),
    ):
        with pytest.raises(ModelError):
            reach()
    assert len(session.chat.conversations(OWNER).messages(conversation)) == 2
    load_model(session, shop.source("three"))
    assert ask(session).text and shop.alive == ["three"]


def test_drafts_that_do_not_come_back_are_reported(session: Session, shop: Shop) -> None:
    session.stacks.load([shop.source("draft")])
    shop.room = 100
    shop.broken |= {shop.source("draft"), shop.source("two")}
    text = fails(session, shop.source("two"))
    assert "one is back, without draft models (the file is damaged)" in text
    assert session.stacks.drafts == {} and ask(session).text


def test_a_download_that_no_one_foresaw_to_fail_says_so(session: Session) -> None:
    def fall(source: str, progress: Callable[[int, int], None], stopped: object) -> None:
        progress(1, 2)
        raise OSError("cable cut")

    session.models.loaders = replace(session.models.loaders, download=fall)
    found = session.models.fetch_alone("hub/two", "two")
    assert next(found).text.startswith("Downloading two")
    with pytest.raises(ModelError, match=r"two was not loaded: cable cut\. Choose another one\."):
        list(found)


def test_a_memory_of_models_that_fails_costs_no_model(
    session: Session, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SourceStore, "add", failing(FULL))
    load_model(session, shop.source("two"))
    assert session.models.notices == ["The disk is full."] and ask(session).text


# stopping and waiting


def stop_of(tasks: Tasks, about: str = "") -> threading.Event:
    """What is set when the engine stops what it does for the one task that is known."""
    (task,) = tasks.known[OWNER, about]
    stream: Stream[Any] = task.stop.endings[-1].__self__  # type: ignore[attr-defined]
    return stream.stopped


def loading_stop(session: Session) -> Stop:
    """What stops the load under way."""
    job = session.models.slot.running
    assert job is not None
    return job.stop


def test_a_download_tells_how_far_it_is(session: Session) -> None:
    found = load_model(session, "hub/two")
    shares = [p.share for p in found if p.text.startswith("Downloading two:")]
    assert shares == [1 / 3, 2 / 3, 1.0]
    assert Progress(1 / 3, "Downloading two: 1.0 KiB of 3.0 KiB") in found
    assert found[-1] == Progress(1.0, "two is loaded.") and session.models.source == "hub/two"
    load_model(session, "hub/three")
    assert not [p for p in load_model(session, "hub/two") if "Downloading" in p.text]


def test_a_stopped_download_leaves_everything(session: Session, shop: Shop) -> None:
    backend = loaded(session)
    shop.between = lambda: loading_stop(session).event.wait(10) and None
    for progress in (loading := session.models.load("hub/two")):
        if "Downloading two:" in progress.text:
            break
    session.models.stop()
    with pytest.raises(Cancelled, match="was stopped"):
        list(loading)
    assert loaded(session) is backend and len(shop.made) == 1 and ask(session).text
    shop.between = lambda: None
    load_model(session, "hub/two")
    assert session.models.source == "hub/two", "a stop counts once"


def test_a_stop_while_it_waits_for_the_model_leaves_everything(
    session: Session, shop: Shop
) -> None:
    backend, began, done = loaded(session), threading.Event(), threading.Event()

    def work(stream: Stream[Any]) -> None:
        began.set()
        assert done.wait(10)

    user = local(session).start(OWNER, work)
    assert began.wait(10)
    loading = session.models.load(shop.source("two"))
    assert next(loading).text == "Loading two …"
    session.models.stop()
    with pytest.raises(Cancelled, match="before it began"):
        list(loading)
    done.set()
    assert all(isinstance(item, Waiting) for item in user)
    assert loaded(session) is backend and len(shop.made) == 1 and ask(session).text


@pytest.mark.parametrize("room", [200, 50])
def test_a_load_that_has_started_is_not_stopped(session: Session, shop: Shop, room: int) -> None:
    """The old model may be gone by then."""
    shop.room = room

    def load(source: str, runtime: Runtime) -> Backend:
        session.models.stop()
        return shop.load(source, runtime)

    local(session).loaders = replace(shop.loaders(), load=load)
    load_model(session, shop.source("two"))
    assert session.models.source == shop.source("two") and ask(session).text


def test_an_answer_under_way_ends_and_is_kept(
    session: Session, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation, gate = session.chat.say(OWNER, None, "hello"), held(monkeypatch)
    updates = updates_of(session, OWNER, conversation, preferences("plain", tokens=200))
    first = next(updates)
    loading = session.models.load(shop.source("two"))
    assert next(loading).text == "Loading two …"
    assert stop_of(session.tasks, conversation).wait(10)
    gate.set()
    *_, last = updates
    assert last.finish == "cancelled" and last.text.startswith(first.text)
    list(loading)
    assert session.current.info.name == "two"
    assert session.chat.conversations(OWNER).messages(conversation)[1].content == last.text
    session.chat.again(OWNER, conversation)
    *_, again = updates_of(session, OWNER, conversation, preferences())
    assert again.finish == "length", "a stop counts once"


def test_a_profile_under_way_ends_too(
    session: Session, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.stacks.load([shop.source("draft")])
    gate = held(monkeypatch, steps=20)
    gate.set()  # It measures costs first.
    running = session.stacks.profile(Sampling(), ("hello there",), 500)
    next(running)
    gate.clear()
    loading = session.models.load(shop.source("two"))
    next(loading)
    assert stop_of(session.stacks.tasks).wait(10)
    gate.set()
    with pytest.raises(Exception, match="stopped") as stopped:
        list(running)
    list(loading)
    del running
    assert shop.alive == ["two"] and stopped.value, "also while the error is held"


def test_what_failed_work_held_is_free_at_once(session: Session) -> None:
    """Also while its error is shown, and before the collector of garbage comes by."""
    held: list[weakref.ref[Any]] = []

    class Model: ...

    def work(stream: Stream[object]) -> None:
        model = Model()
        held.append(weakref.ref(model))
        try:
            raise ModelError("a layer is missing")
        except ModelError as error:
            raise ModelError("it cannot be loaded") from error

    gc.disable()
    try:
        with pytest.raises(ModelError, match="it cannot be loaded") as found:
            list(local(session).start(OWNER, work))
        assert held[0]() is None and found.value.__cause__ is not None
    finally:
        gc.enable()


def test_a_proof_that_another_model_ends_says_so(
    session: Session, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a pair: what it had seen by then is not enough."""
    monkeypatch.setattr("app.service.proofs.ENOUGH", 1e9)
    conversation, _ = answered(session, "hello")
    shop.broken.add(shop.source("two"))
    engine, gate, streams = local(session), held(monkeypatch, steps=0), list[Stream[Event]]()
    generate = engine.generate

    def begun(request: Request) -> Stream[Event]:
        if len(streams) == 2:
            gate.clear()
        streams.append(generate(request))
        return streams[-1]

    monkeypatch.setattr(engine, "generate", begun)
    gate.set()
    with ThreadPoolExecutor(1) as pool:
        proof = pool.submit(list, session.proofs.prove(OWNER, conversation))
        assert gate.reached.wait(10)
        loading = session.models.load(shop.source("two"))
        next(loading)
        assert streams[2].stopped.wait(10)
        gate.set()
        with pytest.raises(PromptError, match="The proof was stopped"):
            proof.result(10)
    with pytest.raises(ModelError, match="damaged"):
        list(loading)


def test_who_waits_is_answered_by_the_new_model(
    session: Session, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is exchanged while two answers wait: both are wholly of one model."""
    conversations = [session.chat.say(OWNER, None, "hello there") for _ in range(3)]
    texts: dict[str, str] = {}
    gate = held(monkeypatch)
    running = updates_of(session, OWNER, conversations[0], preferences("plain", tokens=200))
    next(running)
    loading = session.models.load(shop.source("two"))
    next(loading)

    def answer(conversation: str) -> None:
        *_, last = updates_of(session, OWNER, conversation, preferences())
        texts[conversation] = last.text

    waiting = [threading.Thread(target=answer, args=[c]) for c in conversations[1:]]
    for thread in waiting:
        thread.start()
    gate.set()
    list(running)
    list(loading)
    for thread in waiting:
        thread.join()
    with Database() as db:
        whole = [ask(shop.session(db, name)).text for name in ("one", "two")]
    assert all(any(w.startswith(text) for w in whole) for text in texts.values())


@pytest.mark.soak
def test_answering_and_exchanging_at_once(session: Session, shop: Shop) -> None:
    """No answer mixes two models, none is lost, nobody waits for ever."""
    whole = {
        name: ask(session).text for name in ("one", "two") if load_model(session, shop.source(name))
    }
    found: list[Update] = []
    done = threading.Event()
    errors: list[BaseException] = []

    def answer() -> None:
        try:
            while not done.is_set():
                with suppress(Cancelled):
                    found.append(ask(session))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=answer)
    thread.start()
    for turn in range(8):
        load_model(session, shop.source(("one", "two")[turn % 2]))
    done.set()
    thread.join(60)
    assert not thread.is_alive() and not errors and found
    for update in found:
        shown = update.text.removesuffix("\ufffd")  # half a character, where it was cut
        assert any(text.startswith(shown) for text in whole.values())
        assert update.finish == "cancelled" or update.text in whole.values()


# what may be asked for


def test_the_loaded_model_is_not_loaded_again(session: Session, shop: Shop) -> None:
    backend = loaded(session)
    (only,) = load_model(session, f"{shop.root}/../{shop.root.name}/one.gguf")
    assert only == Progress(1.0, "one is already loaded with these settings.")
    assert loaded(session) is backend and len(shop.made) == 1
    load_model(session, shop.source("one"), Runtime(threads=2))
    assert loaded(session) is not backend and session.models.runtime.threads == 2


def test_guests_load_nothing(shop: Shop, db: Database) -> None:
    session = shop.session(db, guests=True)
    with pytest.raises(SettingError, match="others share this app"):
        load_model(session, shop.source("two"))
    assert session.current.info.name == "one"


def test_a_source_without_a_name_is_refused(session: Session) -> None:
    assert "name is empty" in fails(session, "  ")


# which there are


def names(session: Session) -> list[tuple[str, bool]]:
    return [(c.name, c.loaded) for c in session.models.candidates()]


def embedded() -> list[tuple[str, bool]]:
    """The demonstration model, in as many forms as there are here."""
    forms = [EMBEDDED, models.EMBEDDED_FILE]
    return [("tiny-chat", False)] * sum(form.exists() for form in forms)


def test_candidates_are_the_embedded_model_those_loaded_and_those_found(
    session: Session, shop: Shop, db: Database
) -> None:
    runtime = Runtime(context_length=2048)
    load_model(session, shop.source("two"), runtime)
    load_model(session, "hub/three")
    assert names(session) == [*embedded(), ("three", True), ("two", False), ("one", False)]
    *_, two, _ = session.models.candidates()
    assert two == Candidate(shop.source("two"), "two", "llama.cpp", 5, False, runtime)
    Path(shop.source("two")).unlink()
    assert names(session) == [*embedded(), ("three", True), ("one", False)]
    folder = shop.root / "more"
    folder.mkdir()
    (folder / "four.gguf").write_text("bytes")
    assert session.models.add(f"{folder}/../more") == str(folder / "four.gguf")
    assert ("four", False) in names(session)
    later = shop.session(db, "three")
    assert names(later)[-3:] == [("three", False), ("one", False), ("four", False)]
    (folder / "four.gguf").unlink()
    assert ("four", False) not in names(later)
    first = later.models.candidates()[0]
    assert first.source == str(EMBEDDED) and first.kind == "transformers" and first.bytes > 10**6


def test_a_folder_that_cannot_be_read_any_more_hides_no_other(
    session: Session, shop: Shop, db: Database
) -> None:
    session.models.add(str(shop.root))

    def gone(folder: str) -> list[str]:
        raise ModelError(f"The folder {folder!r} cannot be read.")

    later = Session(Local(backend=ToyBackend()), db, loaders=replace(shop.loaders(), scan=gone))
    assert [c.name for c in later.models.candidates()][len(embedded()) :] == ["one"]


def test_stored_settings_of_another_version_are_the_usual_ones(
    session: Session, shop: Shop, db: Database
) -> None:
    SourceStore(db).add(shop.source("one"), {"threads": -5})
    SourceStore(db).add(shop.source("two"), {"colour": "red"})
    assert {c.runtime for c in session.models.candidates()} == {Runtime()}


def test_stored_settings_stay_without_those_that_are_gone(
    session: Session, shop: Shop, db: Database
) -> None:
    SourceStore(db).add(shop.source("two"), {"context_length": 2048, "tensor_parallel": 2})
    runtimes = {c.source: c.runtime for c in session.models.candidates()}
    assert runtimes[shop.source("two")] == Runtime(context_length=2048)


# draft models


def test_each_target_has_the_draft_models_that_were_chosen_for_it(
    session: Session, shop: Shop
) -> None:
    stacks = session.stacks
    stacks.load([shop.source("draft")])
    list(stacks.profile(Sampling(0.8), ("hello there",), 8))
    stacks.choose("draft@2", Sampling(0.8), Drafting(), False)
    load_model(session, shop.source("two"))
    assert stacks.drafts == {} and stacks.spec == "" and stacks.state == local(session).state
    with pytest.raises(SettingError, match="none is loaded"):
        ask(session, method="hsd")
    load_model(session, shop.source("one"), Runtime(context_length=1024))
    assert list(stacks.drafts) == ["draft"] and stacks.spec == "draft@2"
    assert shop.runtimes[-1] == Runtime(context_length=1024), "as the target runs"
    assert ask(session, method="hsd").text == ask(session, method="plain").text


def test_draft_models_on_the_hub_are_downloaded(session: Session, shop: Shop) -> None:
    session.stacks.load(["hub/draft"])
    list(session.stacks.profile(Sampling(0.8), ("hello there",), 8))
    session.stacks.choose("", Sampling(0.8), Drafting(), False)
    load_model(session, shop.source("two"))
    shop.arrived.clear()
    assert Progress(1.0, "Downloading draft: 3.0 KiB of 3.0 KiB") in load_model(
        session, shop.source("one")
    )
    assert list(session.stacks.drafts) == ["draft"]
    load_model(session, shop.source("two"))
    shop.arrived.clear()
    shop.between = session.models.stop
    load_model(session, shop.source("one"))
    (notice,) = session.models.notices
    assert "draft models were not loaded. The download was stopped" in notice
    shop.between = session.stacks.stop
    with pytest.raises(Cancelled):
        session.stacks.load(["hub/draft"])
    assert session.stacks.drafts == {} and ask(session).text


def test_embedded_targets_offer_their_own_kind_of_drafts(tmp_path: Path) -> None:
    beside = models.embedded_drafts(str(EMBEDDED))
    assert beside == [str(EMBEDDED.with_name(name)) for name in ("mid", "small")]
    assert models.embedded_drafts(str(EMBEDDED.with_name("mid"))) == [beside[1]]
    files = models.embedded_drafts(str(models.EMBEDDED_FILE))
    assert files == [f"{path}.gguf" for path in beside if Path(f"{path}.gguf").exists()]
    assert models.embedded_drafts(str(tmp_path / "own")) == []
    assert models.is_embedded(str(models.EMBEDDED_FILE)) and not models.is_embedded("")
