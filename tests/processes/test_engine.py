"""The door to the engine: what is asked, what comes back, and that the text is the model's own.

Only what engine/engine.py names is used here, and the engine is made by a function of this module,
so that the same tests can be run against an engine in a process of its own.
"""

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from engine.backends.base import Backend
from engine.backends.toy import ToyBackend, deviating
from engine.decode import decode
from engine.engine import (
    Calibrated,
    ContextLogged,
    CostsMeasured,
    Engine,
    Load,
    Measured,
    NgramsLearned,
    Request,
    Share,
    Started,
    State,
    StoredContextLog,
    StoredPastAnswers,
    WantedContextLog,
    WantedCosts,
    WantedPastAnswers,
    answered,
    unknown,
)
from engine.errors import Busy, Cancelled, EngineDied, ModelError, PromptError, SettingError
from engine.hsd.profile import Profile
from engine.loaded import Costs
from engine.local import Local
from engine.methods import METHODS
from engine.models.loaders import ModelLoaders
from engine.models.memory import Need
from engine.queue import Waiting
from engine.remote import Remote
from engine.settings import Drafting, Generation, Runtime, Sampling
from engine.streams import Stream
from engine.types import Gram, Learned, Message, Prefill, Step, Token
from tests.support.inside import soon

DATABASES = [
    name for name, method in METHODS.items() if method.stack is None and "head" not in name
]
"""Methods without draft models."""
STACKS = ["hsd", "hd+hsd"]
PACE = 0.005
"""Seconds that a slow model takes for each forward."""
EACH = 2
"""Runs of one owner that may wait."""
HELLO = (Message("user", "hello there"),)
SECONDS = 20.0


class Slow(ToyBackend):
    """Takes its time over each forward."""

    def score(self, *arguments: Any) -> Any:
        time.sleep(PACE)
        return super().score(*arguments)


class Failing(ToyBackend):
    """Fails behind a prompt of some length, and answers shorter ones."""

    def score(self, *arguments: Any) -> Any:
        if 600 < len(self.cache) < 700:
            raise ModelError("Out of memory.")
        return super().score(*arguments)


def read(source: str, runtime: Runtime) -> Backend:
    """The models of these tests."""
    if source in ("damaged", ""):
        raise ModelError("The file is damaged.")
    if source in ("small", "mid"):
        return ToyBackend(name=source, logits=deviating(0.4 if source == "mid" else 0.8))
    kinds: dict[str, Callable[..., Backend]] = {"slow": Slow, "failing": Failing}
    return kinds.get(source, ToyBackend)(name=source)


def need(source: str, runtime: Runtime) -> Need:
    return Need(1, 7, runtime.threads or 1)


def make(model: str = "toy") -> Engine:
    """The engine of these tests, with a model."""
    loaders = ModelLoaders(read, need, lambda source, runtime: "cpu", lambda device: 99)
    return Local(loaders=loaders, each=EACH, backend=read(model, Runtime()))


def apart(model: str = "toy") -> Engine:
    """The same in a process of its own."""
    engine = Remote(partial(make, model))
    assert soon(lambda: engine.state.there)
    return engine


ENGINES = [make, apart]
"""Ways to have one: each runs all tests."""


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made: Engine = request.param()
    yield made
    made.close()


@pytest.fixture(params=ENGINES)
def slow(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made: Engine = request.param("slow")
    yield made
    made.close()


@dataclass
class Store:
    """Replies with what it was told before, as an app would; `asked` are the questions."""

    asked: list[Any] = field(default_factory=list)
    grams: dict[tuple[int, ...], int] = field(default_factory=dict)
    rows: tuple[Any, ...] = ()
    log: list[int] = field(default_factory=list)

    def reply(self, wanted: Any) -> Any:
        self.asked.append(wanted)
        if isinstance(wanted, WantedPastAnswers):
            return StoredPastAnswers([Gram(g, n, n) for g, n in self.grams.items()], self.rows)
        return StoredContextLog(tuple(self.log)) if isinstance(wanted, WantedContextLog) else None

    def keep(self, event: Any) -> None:
        if isinstance(event, NgramsLearned):
            for gram in event.grams:
                self.grams[gram] = self.grams.get(gram, 0) + 1
        elif isinstance(event, Calibrated):
            self.rows = event.rows
        elif isinstance(event, ContextLogged):
            self.log += event.tokens

    def questions(self) -> list[type]:
        """What was asked since the last look."""
        kinds = [type(wanted) for wanted in self.asked]
        self.asked.clear()
        return kinds


def asking(method: str = "hd", seed: int = 3, tokens: int = 60, **named: Any) -> Request:
    generation = Generation(Sampling(temperature=0.8, seed=seed), max_tokens=tokens)
    wanted = {"messages": HELLO} | named
    return Request(generation=generation, method=METHODS[method], **wanted)


def events(stream: Stream[Any], store: Store | None = None) -> list[Any]:
    """All that comes but places in the queue."""
    store = store or Store()
    found = [e for e in answered(stream, store.reply) if not isinstance(e, Waiting)]
    for event in found:
        store.keep(event)
    return found


def of(kind: type, found: Sequence[Any]) -> list[Any]:
    return [event for event in found if isinstance(event, kind)]


def said(found: Sequence[Any]) -> list[Token]:
    return [token for step in of(Step, found) for token in step.tokens]


def kept(found: Sequence[Any], source: str = "") -> int:
    """Tokens that were drafted and accepted, by that source."""
    return sum(n for step in of(Step, found) for s, n in step.accepted.items() if source in (s, ""))


def run(engine: Engine, request: Request, store: Store | None = None) -> list[Any]:
    return events(engine.generate(request), store)


def known(wanted: Any) -> Costs:
    """What forwards of all models cost, so that they need not be measured."""
    return Costs({0: 0.001, 7: 0.0012, 63: 0.002}, 0.0, 0.0, 1.0)


def have(engine: Engine, source: str) -> None:
    """Load a model."""
    list(answered(engine.load(Load(source)), known))


# answers


def test_the_events_of_an_answer_come_in_their_order(engine: Engine) -> None:
    found = run(engine, asking(conversation="c"))
    started, prefill, *rest = found
    assert isinstance(started, Started) and started.info == engine.state.info
    assert (started.dropped, started.calibration) == (0, ())
    assert isinstance(prefill, Prefill) and prefill.tokens == len(started.prompt)
    steps = of(Step, found)
    assert [step.index for step in steps] == list(range(len(steps))) and steps[-1].finish
    assert all(step.finish is None for step in steps[:-1])
    taught = [type(event) for event in rest[rest.index(steps[-1]) + 1 :]]
    assert taught[-2:] == [Learned, Calibrated] and set(taught[:-2]) == {
        ContextLogged,
        NgramsLearned,
    }
    tokens = [token.id for token in said(found)]
    logged = [token for event in of(ContextLogged, found) for token in event.tokens]
    assert logged == [*started.prompt, *tokens]
    (learned,) = of(NgramsLearned, found)
    assert learned.size == len([gram for gram in learned.grams if len(gram) > 1])


@pytest.mark.parametrize("wanted", ["", "0"])
def test_an_engine_says_whether_its_core_is_compiled(
    wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own process's, whatever is there in this one."""
    monkeypatch.setenv("STRATA_NATIVE", wanted)
    engine = apart()
    assert engine.state.compiled == (wanted != "0")
    engine.close()


def test_everything_that_goes_through_the_door_is_a_value(engine: Engine) -> None:
    store, request = Store(), asking("hd", conversation="c", measured=None)
    found = run(engine, request, store)
    measured = replace(request, measured=Measured((1, 2, 3), 2, store.rows, True))
    values = [request, measured, Load("toy"), engine.state, *found, *store.asked]
    values += [store.reply(wanted) for wanted in list(store.asked)]
    assert len({type(value) for value in values}) >= 12
    for value in values:
        assert pickle.loads(pickle.dumps(value)) == value


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


def test_a_prompt_of_tokens_is_answered_as_the_messages_that_it_was_made_of(
    engine: Engine,
) -> None:
    first = run(engine, asking("plain"))
    second = run(engine, asking("plain", messages=(), prompt=of(Started, first)[0].prompt))
    assert of(Step, second) == of(Step, first)
    assert of(Started, second)[0].prompt == of(Started, first)[0].prompt


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


def test_the_likeliest_tokens_are_told_at_each_place_and_change_nothing(engine: Engine) -> None:
    plain, told = run(engine, asking("plain")), run(engine, asking("hd", likeliest=3))
    assert [token.id for token in said(plain)] == [token.id for token in said(told)]
    assert {len(token.likeliest) for token in said(told)} == {3}
    assert not any(token.likeliest for token in said(plain))
    for token in said(told):
        shares = [share for _, share in token.likeliest]
        assert shares == sorted(shares, reverse=True) and token.probability <= shares[0]
        assert dict(token.likeliest).get(token.id, token.probability) == token.probability


def test_a_second_turn_reads_its_new_words_alone(engine: Engine) -> None:
    first = run(engine, asking(conversation="c"))
    answer = engine.texts([[token.id for token in said(first)]])[0]
    messages = (*HELLO, Message("assistant", answer), Message("user", "and then?"))
    second = run(engine, asking(messages=messages, conversation="c"))
    (prefill,) = of(Prefill, second)
    assert prefill.reused >= of(Prefill, first)[0].tokens + len(said(first)) - 2


@pytest.mark.parametrize(
    "request_", [asking(messages=()), asking(messages=(Message("user", "x" * 9000),))]
)
def test_what_cannot_be_answered_says_why_and_ends_nothing_else(
    engine: Engine, request_: Request
) -> None:
    with pytest.raises(PromptError):
        run(engine, request_)
    assert said(run(engine, asking()))


def test_draft_models_that_are_not_there_are_told(engine: Engine) -> None:
    with pytest.raises(SettingError):
        run(engine, asking("hsd"))
    with pytest.raises(SettingError, match="No draft model is loaded"):
        list(engine.profile(Sampling(), ["x"], 4))


def test_a_model_that_fails_half_way_ends_this_answer_alone(engine: Engine) -> None:
    have(engine, "failing")
    prompt = tuple(range(97, 117)) * 29
    store = Store()
    with pytest.raises(ModelError, match="Out of memory"):
        run(engine, asking("plain", tokens=200, messages=(), prompt=prompt), store)
    assert said(run(engine, asking("plain")))


# what is learned, and what is asked


def test_what_is_known_is_not_asked_again_before_it_is_forgotten(engine: Engine) -> None:
    store, request = Store(), asking(conversation="c")
    run(engine, request, store)
    past, log = store.asked
    info = engine.state.info
    assert past == WantedPastAnswers(info.fingerprint)
    assert log == WantedContextLog(info.tokenizer_fingerprint)
    store.asked.clear()
    run(engine, request, store)
    assert store.questions() == []
    engine.forget(request.owner, "another")
    engine.forget("another owner", past=True)
    run(engine, request, store)
    assert store.questions() == []
    engine.forget(request.owner, "c")
    run(engine, request, store)
    assert store.questions() == [WantedContextLog]
    engine.forget(request.owner)
    run(engine, request, store)
    assert store.questions() == [WantedContextLog]
    engine.forget(request.owner, past=True)
    run(engine, request, store)
    assert store.questions() == [WantedPastAnswers, WantedContextLog]
    run(engine, replace(request, owner="another owner"), store)
    assert store.questions() == [WantedPastAnswers, WantedContextLog]


def test_another_model_knows_nothing_of_what_this_one_said(engine: Engine) -> None:
    store = Store()
    run(engine, asking(), store)
    have(engine, "other")
    found = run(engine, asking("model"), Store())
    assert kept(found) == 0 and of(NgramsLearned, found)


def test_without_a_conversation_there_is_no_log(engine: Engine) -> None:
    store = Store()
    for _ in range(2):
        found = run(engine, asking(), store)
        assert not of(ContextLogged, found)
    assert store.questions() == [WantedPastAnswers]


@pytest.mark.parametrize("method", ["model", "context"])
def test_what_was_stored_is_drafted_from_when_it_is_asked_for_again(
    engine: Engine, method: str
) -> None:
    store, request = Store(), asking(method, conversation="c")
    run(engine, asking("hd", conversation="c"), store)
    plain = run(engine, asking("plain", conversation="d", owner="else"))
    for replies, works in ((store, True), (Store(), False)):
        engine.forget(request.owner, past=True)
        found = run(engine, request, replies)
        assert (kept(found, method) > 0) >= works
        assert [t.id for t in said(found)] == [t.id for t in said(plain)]
    if method == "model":
        assert kept(found) == 0, "a past that is gone drafts nothing"


def test_trust_goes_on_from_what_was_stored(engine: Engine) -> None:
    store = Store()
    run(engine, asking(), store)
    rows = store.rows
    assert rows and of(Started, run(engine, asking(), store))[0].calibration == rows
    rows = store.rows
    engine.forget(asking().owner, past=True)
    assert sorted(of(Started, run(engine, asking(), store))[0].calibration) == sorted(rows)


def test_an_owner_draws_nothing_from_another(engine: Engine) -> None:
    store = Store()
    run(engine, asking(), store)
    other = run(engine, asking("model", owner="other"), Store())
    assert kept(other) == 0 and of(Started, other)[0].calibration == ()


def test_a_question_that_cannot_be_answered_ends_the_answer(engine: Engine) -> None:
    def fail(wanted: Any) -> Any:
        raise OSError("the disk is gone")

    stream = engine.generate(asking())
    with pytest.raises(OSError, match="the disk is gone"):
        list(answered(stream, fail))
    assert said(run(engine, asking()))


# measured runs


def measuring(method: str = "hd", **named: Any) -> Request:
    return asking(method, measured=Measured(**named), conversation="c")


@pytest.mark.parametrize("method", DATABASES)
def test_a_measured_run_starts_from_nothing_and_leaves_no_trace(
    engine: Engine, method: str
) -> None:
    store = Store()
    first = run(engine, asking(conversation="c"), store)
    store.asked.clear()
    for warm in (False, True):
        runs = [run(engine, measuring(method, warm=warm), store) for _ in range(2)]
        assert of(Step, runs[0]) == of(Step, runs[1])
        for found in runs:
            assert {type(event) for event in found} == {Started, Prefill, Step, Learned}
            assert of(Prefill, found)[0].reused == 0
            assert [t.id for t in said(found)] == [t.id for t in said(first)]
    assert store.questions() == []
    again = run(engine, asking("plain", conversation="c"), store)
    assert of(Started, again)[0].calibration == store.rows


def test_a_measured_run_knows_what_was_said_before_but_for_what_it_is_to_unlearn(
    engine: Engine,
) -> None:
    first = run(engine, asking())
    tokens = tuple(token.id for token in said(first))
    whole = (*of(Started, first)[0].prompt, *tokens)
    assert kept(run(engine, measuring("model")), "model") > 0
    assert kept(run(engine, measuring("model", unlearned=whole, new=len(tokens)))) == 0
    assert kept(run(engine, measuring("model")), "model") > 0


def test_a_measured_run_trusts_as_it_is_told(engine: Engine) -> None:
    rows = of(Calibrated, run(engine, asking()))[-1].rows
    for trusted in (None, (), rows):
        found = run(engine, measuring(calibration=trusted))
        assert of(Started, found)[0].calibration == (rows if trusted is None else trusted)


# the queue, and stops


def begun(engine: Engine, **named: Any) -> tuple[Stream[Any], Iterator[Any]]:
    """A long answer of a slow model that is under way: its stream, and what comes after its first
    step."""
    stream = engine.generate(asking(tokens=3000, seed=5, **named))
    items = answered(stream, unknown)
    for item in items:
        if isinstance(item, Step):
            break
    return stream, items


def test_a_stop_ends_the_answer_with_what_it_said_and_taught(slow: Engine) -> None:
    stream, items = begun(slow, conversation="c")
    stream.stop()
    rest = list(items)
    last = of(Step, rest)[-1]
    assert last.finish == "cancelled" and len(said(rest)) < 500
    said_ = [token for event in of(ContextLogged, rest) for token in event.tokens]
    assert said_[-1] == last.tokens[-1].id
    assert said(run(slow, asking("plain", tokens=4)))


def test_a_stop_before_its_turn_takes_an_answer_out_of_the_queue(slow: Engine) -> None:
    first, items = begun(slow)
    second = slow.generate(asking())
    assert next(second) == Waiting(1)
    second.stop()
    with pytest.raises(Cancelled, match="before it began"):
        list(second)
    first.stop()
    assert of(Step, list(items))[-1].finish == "cancelled", "it was still under way"


def test_a_closed_stream_ends_and_the_next_one_begins(slow: Engine) -> None:
    first, _ = begun(slow)
    second = slow.generate(asking("plain", tokens=4))
    first.close()
    assert list(first) == [] and said(events(second))


def test_owners_have_their_turns_one_after_the_other_and_are_told_their_places(
    slow: Engine,
) -> None:
    first, _ = begun(slow, owner="a")
    streams = [slow.generate(asking("plain", tokens=4, owner=owner)) for owner in "ab"]
    assert [next(stream) for stream in streams] == [Waiting(1), Waiting(1)]
    assert next(streams[0]) == Waiting(2), "the other one has not had a turn"
    first.close()
    # Read in the order of their turns: the engine asks each for what was stored.
    assert said(events(streams[1])) and said(events(streams[0]))


def test_an_owner_has_so_many_waiting_answers_and_no_more(slow: Engine) -> None:
    first, _ = begun(slow, owner="a")
    slow.check_turn("a")
    waiting = [slow.generate(asking(owner="a")) for _ in range(EACH)]

    def full() -> bool:
        try:
            slow.check_turn("a")
        except Busy:
            return True
        return False

    assert soon(full), "they are on their way to it"
    for refused in (lambda: slow.check_turn("a"), lambda: run(slow, asking(owner="a"))):
        with pytest.raises(Busy, match="of your requests wait"):
            refused()
    slow.check_turn("b")
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
    found = list(answered(engine.load(Load("other", Runtime(threads=2), "Other")), unknown))
    assert soon(lambda: bool(seen) and seen[-1].plain.tokens_per_second > 0)
    state = seen[-1]
    assert state == engine.state and state.there and state.source == "other"
    assert (state.info.name, state.runtime.threads) == ("Other", 2)
    (costed,) = of(CostsMeasured, found)
    assert costed.info == state.info and set(costed.costs.points) and of(Share, found)
    assert of(Started, run(engine, asking()))[0].info == state.info


def test_costs_that_were_stored_are_not_measured_again_and_answers_correct_them(
    engine: Engine,
) -> None:
    (costed,) = of(CostsMeasured, list(answered(engine.load(Load("other")), unknown)))
    asked: list[Any] = []

    def reply(wanted: Any) -> Any:
        asked.append(wanted)
        return costed.costs

    found = list(answered(engine.load(Load("other")), reply))
    assert asked == [WantedCosts(costed.info)]
    assert not of(Share, found) and of(CostsMeasured, found) == [costed]
    (corrected,) = of(CostsMeasured, run(engine, asking()))
    assert corrected.costs.points != costed.costs.points
    assert corrected.costs.measured == costed.costs.measured
    assert not of(CostsMeasured, run(engine, asking("plain")) + run(engine, measuring()))
    again = of(CostsMeasured, list(engine.measure_costs()))
    assert again[-1].costs.measured > costed.costs.measured


def test_a_load_stops_the_answer_under_way(slow: Engine) -> None:
    _, items = begun(slow)
    loading = slow.load(Load("other"))
    assert of(Step, list(items))[-1].finish == "cancelled"
    list(answered(loading, known))
    assert slow.state.source == "other"


@pytest.mark.parametrize("beside", [True, False])
def test_a_model_that_cannot_be_read_leaves_the_one_that_was_there(
    engine: Engine, beside: bool
) -> None:
    have(engine, "first")
    list(engine.load_drafts([("small", "small")]))
    before = engine.state
    with pytest.raises(ModelError, match="The file is damaged") as error:
        list(answered(engine.load(Load("damaged", beside=beside)), known))
    assert ("first is back." in str(error.value)) is not beside
    now = engine.state
    assert (now.info, now.source, now.drafts) == (before.info, "first", before.drafts)
    assert said(run(engine, asking()))


@pytest.mark.parametrize(("ranks", "makes_room"), [((2, 2), True), ((2, 4), True), ((1, 2), False)])
def test_of_two_models_over_several_processes_the_first_makes_room(
    engine: Engine, ranks: tuple[int, int], makes_room: bool
) -> None:
    first, second = (Runtime(tensor_parallel=size) for size in ranks)
    list(answered(engine.load(Load("first", first)), known))
    with pytest.raises(ModelError, match="The file is damaged") as error:
        list(answered(engine.load(Load("damaged", second)), known))
    assert ("first is back." in str(error.value)) is makes_room
    assert engine.state.source == "first" and engine.state.runtime == first


def test_draft_models_come_and_go(engine: Engine) -> None:
    seen: list[State] = []
    engine.watch = seen.append
    wanted = [("mid", "mid"), ("little", "small")]
    list(engine.load_drafts(wanted))
    assert soon(lambda: bool(seen) and len(seen[-1].drafts) == 2)
    assert {(draft.name, draft.source) for draft in seen[-1].drafts} == set(wanted)
    with pytest.raises(ModelError, match="The file is damaged"):
        list(engine.load_drafts([("mid", "mid"), ("bad", "damaged")]))
    assert engine.state.drafts == seen[-1].drafts
    list(engine.unload_drafts())
    assert soon(lambda: not seen[-1].drafts) and not engine.state.drafts
    list(engine.load_drafts(wanted))
    have(engine, "other")
    assert not engine.state.drafts, "they drafted for another one"


def test_without_a_model_everything_says_so(engine: Engine) -> None:
    with pytest.raises(ModelError, match="damaged"):
        list(answered(engine.load(Load("damaged", beside=False)), known))
    # The toy was made and not read, so that it cannot be read again.
    assert not engine.state.there
    for begin in (lambda: engine.generate(asking()), engine.measure_costs):
        with pytest.raises(ModelError, match="No model is loaded"):
            list(answered(begin(), unknown))


# at once


def test_small_questions_are_answered_at_once(slow: Engine) -> None:
    """Also while the model is used."""
    first, _ = begun(slow)
    tokens = list(b"hello")
    assert slow.texts([tokens, tokens[:1], []]) == ["hello", "h", ""]
    slow.check("hello")
    for text in ("", "x" * 9000):
        with pytest.raises(PromptError):
            slow.check(text)
    chat = (Message("user", "hi"), Message("assistant", "there"))
    found = slow.tokens(["hello", chat, chat[:1]], "bytes")
    assert found[0] == tokens
    assert slow.texts(found[1:]) == [
        "<|user|>hi<|end|><|assistant|>there<|end|>", "<|user|>hi<|end|><|assistant|>"
    ]  # fmt: skip
    with pytest.raises(ModelError, match="whose tokenizer is another one"):
        slow.tokens(["hello"], "another tokenizer")
    slow.read_statistics()
    assert slow.need("other", Runtime(threads=3)) == Need(1, 7, 3)
    assert (slow.device("other", Runtime()), slow.free("cpu")) == ("cpu", 99)
    first.close()
