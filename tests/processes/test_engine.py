"""The door to the engine: what is asked, what comes back, and that the text is the model's own.

Only what engine/engine.py names is used here, and the engine is made by a function of this module,
so that the same tests can be run against an engine in a process of its own.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.backends.base import Backend
from engine.decode import decode
from engine.engine import (
    CostsMeasured,
    Engine,
    Load,
    Measured,
    Request,
    Room,
    Share,
    Started,
    State,
)
from engine.errors import Busy, Cancelled, EngineDied, ModelError, PromptError
from engine.hsd.profile import Profile
from engine.local import Local
from engine.methods import METHODS
from engine.models.loaders import ModelLoaders
from engine.models.memory import Need
from engine.queue import OWNER, Waiting
from engine.remote import Remote
from engine.settings import Drafting, Generation, Runtime, Sampling
from engine.streams import Stream
from engine.types import CalibrationRow, Costs, Learned, Message, Past, Prefill, Step, Token
from storage.database import STORED, Database
from storage.drafting import CalibrationStore, ContextStore, DraftingStore, wipe
from storage.ngrams import ModelNgrams
from tests.support.inside import soon
from tests.support.toy import ToyBackend, deviating

DATABASES = [
    name for name, method in METHODS.items() if method.stack is None and "head" not in name
]
"""Methods without draft models."""
STACKS = ["hsd", "hd+hsd"]
PACE = 0.005
"""Seconds that a slow model takes for each forward."""
LONG = 3000
"""Tokens of an answer that takes long."""
EACH = 2
"""Runs of one owner that may wait."""
HELLO = (Message("user", "hello there"),)


class Slow(ToyBackend):
    """Takes its time over each forward."""

    def score(self, *arguments: Any) -> Any:
        time.sleep(PACE)
        return super().score(*arguments)


def read(source: str, runtime: Runtime) -> Backend:
    """The models of these tests."""
    if source in ("damaged", ""):
        raise ModelError("The file is damaged.")
    if source in ("small", "mid"):
        return ToyBackend(name=source, logits=deviating(0.4 if source == "mid" else 0.8))
    kinds: dict[str, Callable[..., Backend]] = {"slow": Slow}
    return kinds.get(source, ToyBackend)(name=source)


def need(source: str, runtime: Runtime) -> Need:
    return Need(1, 7, runtime.threads or 1)


class Noted(DraftingStore):
    """Notes in a file what is read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Database(folder / "strata.db", made=True))
        self.asked = folder / "asked"

    def note(self, what: str) -> None:
        with self.asked.open("a") as file:
            file.write(f"{what}\n")

    def past(self, owner: str, fingerprint: str) -> Past:
        self.note("past")
        return super().past(owner, fingerprint)

    def log(self, owner: str, conversation: str, tokenizer: str) -> Sequence[int]:
        self.note("log")
        return super().log(owner, conversation, tokenizer)

    def costs(self, key: tuple[str, str, str, str, int]) -> Costs | None:
        self.note("costs")
        return super().costs(key)


def make(model: str, folder: Path) -> Engine:
    """The engine of these tests, with a model, and a database that is there."""
    loaders = ModelLoaders(read, need, lambda source, runtime: "cpu", lambda device: 99)
    backend = read(model, Runtime())
    return Local(loaders=loaders, each=EACH, backend=backend, store=Noted(folder))


def apart(model: str, folder: Path) -> Engine:
    """The same in a process of its own."""
    engine = Remote(partial(make, model, folder))
    assert soon(lambda: engine.state.is_loaded)
    return engine


ENGINES = [pytest.param(make, id="here"), pytest.param(apart, id="process")]
"""Where an engine runs. `soak(stay=1)` keeps the first of them, which starts at once."""


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, store: "Store", tmp_path: Path) -> Iterator[Engine]:
    made: Engine = request.param("toy", tmp_path)
    yield made
    made.close()


@pytest.fixture(params=ENGINES)
def slow(request: pytest.FixtureRequest, store: "Store", tmp_path: Path) -> Iterator[Engine]:
    made: Engine = request.param("slow", tmp_path)
    yield made
    made.close()


@dataclass(frozen=True)
class Store:
    """What the engine stores and reads, seen from here."""

    database: Database
    asked: Path

    def questions(self) -> list[str]:
        """What was read since the last look."""
        found = self.asked.read_text().split() if self.asked.exists() else []
        self.asked.write_text("")
        return found

    def grams(self, owner: str = OWNER) -> dict[tuple[int, ...], int]:
        """The n-grams of past answers of the toy, and how many answers held each."""
        return {g.tokens: g.documents for g in ModelNgrams(self.database, owner, "toy").load()}

    def rows(self, owner: str = OWNER) -> list[CalibrationRow]:
        """The evidence weights."""
        return sorted(CalibrationStore(self.database, owner, "toy").load())

    def log(self) -> list[int]:
        """The log of the conversation "c"."""
        return ContextStore(self.database, OWNER).load("c", "bytes")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A new database with a conversation "c"."""
    with Database(tmp_path / "strata.db") as database:
        owner = database.key("owners", OWNER)
        with database.write() as handle:
            handle.execute(
                "INSERT INTO conversations (id, owner, title, created, updated) "
                "VALUES ('c', ?, '', 0, 0)",
                [owner],
            )
        yield Store(database, tmp_path / "asked")


def asking(method: str = "hd", seed: int = 3, tokens: int = 60, **named: Any) -> Request:
    generation = Generation(Sampling(temperature=0.8, seed=seed), max_tokens=tokens)
    wanted = {"messages": HELLO} | named
    return Request(generation=generation, method=METHODS[method], **wanted)


def events(stream: Stream[Any]) -> list[Any]:
    """All that comes but places in the queue."""
    return [event for event in stream if not isinstance(event, Waiting)]


def of(kind: type, found: Sequence[Any]) -> list[Any]:
    return [event for event in found if isinstance(event, kind)]


def said(found: Sequence[Any]) -> list[Token]:
    return [token for step in of(Step, found) for token in step.tokens]


def kept(found: Sequence[Any], source: str = "") -> int:
    """Tokens that were drafted and accepted, by that source."""
    return sum(n for step in of(Step, found) for s, n in step.accepted.items() if source in (s, ""))


def run(engine: Engine, request: Request) -> list[Any]:
    return events(engine.generate(request))


def have(engine: Engine, source: str) -> None:
    """Load a model."""
    list(engine.load(Load(source)))


# answers


def test_the_events_of_an_answer_come_in_their_order(engine: Engine, store: Store) -> None:
    found = run(engine, asking(conversation="c"))
    started, prefill, *rest = found
    assert isinstance(started, Started) and started.info == engine.state.info
    assert (started.dropped, started.calibration) == (0, ())
    assert isinstance(prefill, Prefill) and prefill.tokens == len(started.prompt)
    steps = of(Step, found)
    assert [step.index for step in steps] == list(range(len(steps))) and steps[-1].finish
    assert all(step.finish is None for step in steps[:-1])
    assert [type(event) for event in rest[rest.index(steps[-1]) + 1 :]] == [Learned]
    # Before the stream ends, all that the answer taught is stored.
    tokens = [token.id for token in said(found)]
    assert store.log() == [*started.prompt, *tokens] and store.rows()
    whole = [*started.prompt, *tokens]
    grams = {tuple(whole[max(0, at - 4) : at + 1]) for at in range(len(started.prompt), len(whole))}
    assert store.grams() == dict.fromkeys(grams, 1)


@pytest.mark.parametrize("wanted", ["", "0"])
def test_an_engine_says_whether_its_core_is_compiled(
    wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its own process's, whatever is there in this one."""
    monkeypatch.setenv("STRATA_NATIVE", wanted)
    engine = apart("toy", tmp_path)
    assert engine.state.compiled == (wanted != "0")
    engine.close()


@pytest.mark.soak(stay=3)
@pytest.mark.parametrize("method", DATABASES)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_that_of_plain_decoding(
    engine: Engine, method: str, seed: int, temperature: float
) -> None:
    """Whatever is known, in every turn of a conversation and for every owner."""
    generation = Generation(Sampling(temperature, seed=seed), max_tokens=60)
    messages = list(HELLO)
    for turn in range(3):
        owner = f"owner {turn % 2}"
        request = Request(
            tuple(messages), (), generation, METHODS[method], owner=owner, conversation="c"
        )
        found = run(engine, request)
        same_as_plain(found, generation)
        answer = engine.texts([[token.id for token in said(found)]])[0]
        messages += [Message("assistant", answer), *HELLO]


def same_as_plain(found: Sequence[Any], generation: Generation) -> None:
    """Token by token, with their texts, and in what ended it."""
    (started,) = of(Started, found)
    plain = list(decode(ToyBackend(), started.prompt, (), generation, Drafting()))
    texts = [[(t.id, t.position, t.text) for t in said(each)] for each in (plain, found)]
    assert texts[0] == texts[1] != []
    assert of(Step, found)[-1].finish == of(Step, plain)[-1].finish


@pytest.mark.soak(stay=2)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_text_is_that_of_plain_decoding_with_draft_models(engine: Engine, seed: int) -> None:
    list(engine.load_drafts([("small", "small"), ("mid", "mid")]))
    profiling = engine.profile(Sampling(0.8), ["Tell a story.", "Explain rain."], 16)
    *shares, profile = profiling
    assert isinstance(profile, Profile)
    told = [share.share for share in shares if isinstance(share, Share)]
    assert told == sorted(told) != []
    for method in STACKS:
        for _ in range(2):
            request = asking(method, seed, profile=profile, conversation=method)
            found = run(engine, request)
            same_as_plain(found, request.generation)
    assert kept(found) > 0


@pytest.mark.soak(stay=1)
def test_a_text_is_gone_on_with_as_its_tokens_are_and_read_once(engine: Engine) -> None:
    text = "once upon a time"
    first = run(engine, asking("plain", messages=(), text=text, conversation="c"))
    (started,) = of(Started, first)
    assert bytes(started.prompt).decode() == text
    again = run(engine, asking("plain", messages=(), prompt=started.prompt))
    assert of(Step, again) == of(Step, first)
    longer = text + "".join(token.text for token in said(first))
    (prefill,) = of(Prefill, run(engine, asking(messages=(), text=longer, conversation="c")))
    assert prefill.reused >= of(Prefill, first)[0].tokens + len(said(first)) - 2


@pytest.mark.soak(stay=1)
def test_the_likeliest_tokens_are_told_at_each_place_and_change_nothing(engine: Engine) -> None:
    plain, told = run(engine, asking("plain")), run(engine, asking("hd", likeliest=3))
    assert [token.id for token in said(plain)] == [token.id for token in said(told)]
    assert {len(token.likeliest) for token in said(told)} == {3}
    assert not any(token.likeliest for token in said(plain))
    for token in said(told):
        shares = [share for _, share in token.likeliest]
        assert shares == sorted(shares, reverse=True) and token.probability <= shares[0]
        assert dict(token.likeliest).get(token.id, token.probability) == token.probability


@pytest.mark.soak(stay=2)
@pytest.mark.parametrize(
    "request_", [asking(messages=()), asking(messages=(Message("user", "x" * 9000),))]
)
def test_what_cannot_be_answered_says_why_and_ends_nothing_else(
    engine: Engine, request_: Request
) -> None:
    with pytest.raises(PromptError):
        run(engine, request_)
    assert said(run(engine, asking()))


# what is learned, and what is read


@pytest.mark.soak(stay=1)
def test_what_is_known_is_not_read_again_before_it_is_forgotten(
    engine: Engine, store: Store
) -> None:
    request = asking(conversation="c")
    run(engine, request)
    assert store.questions() == ["past", "log"]
    run(engine, request)
    engine.forget(request.owner, "another")
    engine.forget("another owner", past=True)
    run(engine, request)
    assert store.questions() == []
    engine.forget(request.owner, "c")
    run(engine, request)
    assert store.questions() == ["log"]
    engine.forget(request.owner)
    run(engine, request)
    assert store.questions() == ["log"]
    engine.forget(request.owner, past=True)
    run(engine, request)
    assert store.questions() == ["past", "log"]
    run(engine, replace(request, owner="another owner"))
    assert store.questions() == ["past", "log"]


@pytest.mark.soak(stay=1)
def test_without_a_conversation_there_is_no_log(engine: Engine, store: Store) -> None:
    for _ in range(2):
        run(engine, asking())
    run(engine, asking(conversation="one that is not stored"))
    assert store.questions() == ["past", "log"]
    assert not store.database.execute_read("SELECT * FROM contexts")


@pytest.mark.soak(stay=1)
def test_an_owner_draws_nothing_from_another(engine: Engine) -> None:
    run(engine, asking())
    other = run(engine, asking("model", owner="other"))
    assert kept(other) == 0 and of(Started, other)[0].calibration == ()


@pytest.mark.soak(stay=1)
def test_what_is_wiped_within_an_answer_does_not_come_back(slow: Engine, store: Store) -> None:
    """Nor does the answer add to what is imported after that."""
    run(slow, asking(tokens=8))
    known = ModelNgrams(store.database, OWNER, "slow").load()
    stream, items = begun(slow, conversation="c")
    wipe(store.database, OWNER, "slow")
    ModelNgrams(store.database, OWNER, "slow").merge(1, known)
    slow.forget(OWNER, past=True)
    stream.stop()
    list(items)
    assert ModelNgrams(store.database, OWNER, "slow").load() == known != []
    assert not CalibrationStore(store.database, OWNER, "slow").load()
    assert store.log(), "the conversation is there"
    run(slow, asking(tokens=8))
    assert ModelNgrams(store.database, OWNER, "slow").rows() >= len(known)
    assert CalibrationStore(store.database, OWNER, "slow").load()


def test_another_program_that_locks_the_database_holds_up_no_answer(
    engine: Engine, store: Store
) -> None:
    told = list[tuple[str, str]]()
    engine.notify = lambda owner, notice: told.append((owner, notice))
    with closing(sqlite3.connect(str(store.database.path), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert said(run(engine, asking(conversation="c")))
        assert soon(lambda: bool(engine.state.locked))
        assert not store.database.execute_read("SELECT * FROM ngrams")
        assert soon(lambda: told == [(OWNER, engine.state.locked)])
        other.execute("ROLLBACK")
    assert soon(lambda: not engine.state.locked)
    assert soon(lambda: told[1:] == [(OWNER, STORED)])
    assert store.grams() and store.rows() and store.log()


def test_a_write_of_the_other_process_is_waited_for_and_no_problem(
    engine: Engine, store: Store
) -> None:
    told = list[tuple[str, str]]()
    engine.notify = lambda owner, notice: told.append((owner, notice))
    stream = engine.generate(asking())
    with store.database.write():
        while not of(Step, [event := next(stream)]) or event.finish is None:
            pass
    list(stream)
    assert store.grams() and store.rows() and told == []


# measured runs


def measuring(method: str = "hd", **named: Any) -> Request:
    return asking(method, measured=Measured(**named), conversation="c")


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("method", DATABASES)
def test_a_measured_run_starts_from_nothing_and_leaves_no_trace(
    engine: Engine, store: Store, method: str
) -> None:
    first = run(engine, asking(conversation="c"))
    known = store.rows(), store.grams(), store.log()
    store.questions()
    for warm in (False, True):
        runs = [run(engine, measuring(method, warm=warm)) for _ in range(2)]
        assert of(Step, runs[0]) == of(Step, runs[1])
        for found in runs:
            assert {type(event) for event in found} == {Started, Prefill, Step, Learned}
            assert of(Prefill, found)[0].reused == 0
            assert [t.id for t in said(found)] == [t.id for t in said(first)]
    assert store.questions() == [] and (store.rows(), store.grams(), store.log()) == known
    again = run(engine, asking("plain", conversation="c"))
    assert sorted(of(Started, again)[0].calibration) == store.rows()


@pytest.mark.soak(stay=1)
def test_a_measured_run_knows_what_was_said_before_but_for_what_it_is_to_unlearn(
    engine: Engine,
) -> None:
    first = run(engine, asking())
    tokens = tuple(token.id for token in said(first))
    whole = (*of(Started, first)[0].prompt, *tokens)
    assert kept(run(engine, measuring("model")), "model") > 0
    assert kept(run(engine, measuring("model", unlearned=whole, new=len(tokens)))) == 0
    assert kept(run(engine, measuring("model")), "model") > 0


@pytest.mark.soak(stay=1)
def test_a_measured_run_trusts_as_it_is_told(engine: Engine, store: Store) -> None:
    run(engine, asking())
    rows = tuple(store.rows())
    for trusted in (None, (), rows):
        found = run(engine, measuring(calibration=trusted))
        trusts = tuple(sorted(of(Started, found)[0].calibration))
        assert trusts == (rows if trusted is None else trusted)


# the queue, and stops


def begun(engine: Engine, **named: Any) -> tuple[Stream[Any], Iterator[Any]]:
    """A long answer of a slow model that is under way: its stream, and what comes after its first
    step."""
    stream = engine.generate(asking(tokens=LONG, seed=5, **named))
    for item in stream:
        if isinstance(item, Step):
            break
    return stream, iter(stream)


def test_a_stop_ends_the_answer_with_what_it_said_and_taught(slow: Engine, store: Store) -> None:
    stream, items = begun(slow, conversation="c")
    stream.stop()
    rest = list(items)
    last = of(Step, rest)[-1]
    assert last.finish == "cancelled" and len(said(rest)) < LONG - 1
    assert store.log()[-1] == last.tokens[-1].id
    assert said(run(slow, asking("plain", tokens=4)))


@pytest.mark.soak(stay=1)
def test_an_owner_has_so_many_waiting_answers_and_no_more(slow: Engine) -> None:
    first, _ = begun(slow, owner="a")
    slow.check("a")
    waiting = [slow.generate(asking(owner="a")) for _ in range(EACH)]

    def full() -> bool:
        try:
            slow.check("a")
        except Busy:
            return True
        return False

    assert soon(full), "they are on their way to it"
    for refused in (lambda: slow.check("a"), lambda: run(slow, asking(owner="a"))):
        with pytest.raises(Busy, match="of your requests wait"):
            refused()
    slow.check("b")
    for stream in (*waiting, first):
        stream.close()
    assert soon(lambda: said(run(slow, asking("plain", tokens=4, owner="a"))) != [])


def test_closing_the_engine_ends_what_is_under_way(slow: Engine) -> None:
    _, items = begun(slow)
    waiting = slow.generate(asking())
    slow.close()
    with suppress(EngineDied):
        assert of(Step, list(items))[-1].finish == "cancelled"
    with pytest.raises((Cancelled, EngineDied)):
        events(waiting)


# models


def test_another_model_takes_the_place_of_the_loaded_one_and_everyone_is_told(
    engine: Engine,
) -> None:
    seen: list[State] = []
    engine.watch = seen.append
    found = list(engine.load(Load("other", Runtime(threads=2), "Other")))
    assert soon(lambda: bool(seen) and seen[-1].plain.tokens_per_second > 0)
    state = seen[-1]
    assert state == engine.state and state.is_loaded and state.source == "other"
    assert (state.info.name, state.runtime.threads) == ("Other", 2)
    (costed,) = of(CostsMeasured, found)
    assert costed.info == state.info and set(costed.costs.points) and of(Share, found)
    assert of(Started, run(engine, asking()))[0].info == state.info


@pytest.mark.soak(stay=1)
def test_a_load_stops_the_answer_under_way(slow: Engine) -> None:
    _, items = begun(slow)
    loading = slow.load(Load("other"))
    assert of(Step, list(items))[-1].finish == "cancelled"
    list(loading)
    assert slow.state.source == "other"


@pytest.mark.soak(stay=2)
@pytest.mark.parametrize("keep_loaded", [True, False])
def test_a_model_that_cannot_be_read_leaves_the_one_that_was_there(
    engine: Engine, keep_loaded: bool
) -> None:
    have(engine, "first")
    list(engine.load_drafts([("small", "small")]))
    before = engine.state
    with pytest.raises(ModelError, match="The file is damaged") as error:
        list(engine.load(Load("damaged", keep_loaded=keep_loaded)))
    assert ("first is back." in str(error.value)) is not keep_loaded
    now = engine.state
    assert (now.info, now.source, now.drafts) == (before.info, "first", before.drafts)
    assert said(run(engine, asking()))


def test_without_a_model_everything_says_so(engine: Engine) -> None:
    with pytest.raises(ModelError, match="damaged"):
        list(engine.load(Load("damaged", keep_loaded=False)))
    # The toy was made and not read, so that it cannot be read again.
    assert not engine.state.is_loaded
    for begin in (lambda: engine.generate(asking()), engine.measure_costs):
        with pytest.raises(ModelError, match="No model is loaded"):
            list(begin())


# at once


def test_small_questions_are_answered_at_once(slow: Engine) -> None:
    """Also while the model is used."""
    first, _ = begun(slow)
    tokens = list(b"hello")
    assert slow.texts([tokens, tokens[:1], []]) == ["hello", "h", ""]
    slow.check("a", "hello")
    for text in ("", "x" * 9000):
        with pytest.raises(PromptError):
            slow.check("a", text)
    chat = (Message("user", "hi"), Message("assistant", "there"))
    found = slow.tokens(["hello", chat, chat[:1]], "bytes")
    assert found[0] == tokens
    assert slow.texts(found[1:]) == [
        "<|user|>hi<|end|><|assistant|>there<|end|>", "<|user|>hi<|end|><|assistant|>"
    ]  # fmt: skip
    with pytest.raises(ModelError, match="and its tokenizer is another one"):
        slow.tokens(["hello"], "another tokenizer")
    slow.read_statistics()
    assert slow.need("other", Runtime(threads=3)) == Need(1, 7, 3)
    assert slow.room("other", Runtime()) == Room("cpu", 99)
    first.close()
