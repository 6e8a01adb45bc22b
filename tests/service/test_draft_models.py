"""Draft models beside the chat: loaded, refused, profiled, planned, remembered, and never in the
way of an answer."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.api.routes import api_of
from app.arguments import parse
from app.service.answering import Update
from app.service.draft_models import LATEST, Candidate, Stacks, amount, sampler_of
from app.service.preferences import Preferences
from app.service.session import Session
from engine.backends.base import Backend, Filled
from engine.compare import Speedup
from engine.drafting import costs as engine_costs
from engine.errors import Cancelled, ModelError, SettingError, StorageError
from engine.hsd.planner import Recursion, outcome_of, stack_of
from engine.hsd.profile import ENOUGH
from engine.hsd.trials import Trial, prompts_of
from engine.local import Local
from engine.methods import METHODS
from engine.models.loaders import ModelLoaders, free_name
from engine.models.memory import Need
from engine.settings import Drafting, Generation, Runtime, Sampling
from engine.types import DRAFT, Message, Step, Token
from storage.database import Database
from storage.machine import ProfileStore
from tests.support.inside import FULL, answer, ask, compare, failing, messages, prove, proven
from tests.support.toy import ToyBackend, deviating

OWNER = "local"
SAMPLING = Sampling(0.8, seed=3)
TEXTS = ("hello there", "the quick brown fox")
SIZES = {"small": 10, "mid": 20, "large": 30}
DEVIATIONS = {"small": 2.0, "mid": 1.0, "large": 0.1}


class Shelf:
    """Toy draft models as folders, and the memory that there is for them."""

    def __init__(self, root: Path) -> None:
        self.root, self.free, self.loads = root, 100, 0
        for name in SIZES:
            self.put(name)

    def put(self, name: str, contents: str = "") -> str:
        """A model's folder; other contents are another model."""
        (self.root / name).mkdir(exist_ok=True)
        (self.root / name / "config.json").write_text(contents)
        return str(self.root / name)

    def sources(self, *names: str) -> list[str]:
        return [str(self.root / name) for name in names]

    def need(self, source: str) -> Need:
        if not Path(source).is_dir():
            raise ModelError(f"The model folder {source!r} does not exist.")
        size = SIZES.get(Path(source).name, 5)
        return Need(size, size, 1)

    def load(self, source: str) -> Backend:
        self.need(source)
        self.loads += 1
        name = Path(source).name
        toy = ToyBackend(name=name, logits=deviating(DEVIATIONS.get(name, 1.0)))
        contents = (Path(source) / "config.json").read_text()
        toy.info = replace(toy.info, fingerprint=name + contents, parameters=SIZES.get(name, 5))
        if contents == "other tokens":
            toy.info = replace(toy.info, tokenizer_fingerprint="x", tokenizer_type="BPE")
        return toy

    def loaders(self) -> ModelLoaders:
        return ModelLoaders(
            load=lambda source, runtime: self.load(source),
            need=lambda source, runtime: self.need(source),
            device=lambda source, runtime: "cpu",
            free=lambda device: self.free,
        )

    def session(self, db: Database, toy: ToyBackend | None = None) -> Session:
        """An app that has just started with the toy."""
        engine = Local(loaders=self.loaders(), backend=toy or ToyBackend())
        return Session(engine, db, loaders=self.loaders())


def local(stacks: Stacks) -> Local:
    """The engine, from inside."""
    assert isinstance(stacks.engine, Local)
    return stacks.engine


def is_free(stacks: Stacks) -> bool:
    """Whether nothing holds the models."""
    return "free" in local(stacks).start(OWNER, lambda stream: stream.put("free"))


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


@pytest.fixture
def session(db: Database, toy: ToyBackend, shelf: Shelf) -> Session:
    return shelf.session(db, toy)


@pytest.fixture
def stacks(session: Session, shelf: Shelf) -> Stacks:
    """Two draft models, loaded and profiled."""
    session.stacks.load(shelf.sources("mid", "small"))
    profile(session.stacks)
    return session.stacks


def profile(stacks: Stacks, sampling: Sampling = SAMPLING) -> list[float]:
    return list(stacks.profile(sampling, TEXTS, 24))


def measure(session: Session, drafting: Drafting, spec: str = "") -> list[Trial]:
    list(session.stacks.measure(SAMPLING, drafting, spec, TEXTS, 24))
    return session.stacks.trials


def preferences(method: str, drafting: Drafting = METHODS["hd"].drafting) -> Preferences:
    return Preferences(Generation(SAMPLING, 60), method, drafting, fresh_seed=False)


# loading


def test_models_are_loaded_once_and_stand_in_their_order(session: Session, shelf: Shelf) -> None:
    stacks = session.stacks
    assert stacks.family_for(SAMPLING) is None and stacks.drafts == {}
    stacks.load(shelf.sources("mid", "small", "mid"))
    assert list(stacks.drafts) == list(stacks.sources) == ["small", "mid"] and shelf.loads == 2
    small = local(stacks).drafts["small"]
    stacks.load([f"{shelf.root}/../{shelf.root.name}/small", *shelf.sources("large")])
    assert list(stacks.drafts) == ["small", "large"] and shelf.loads == 3
    assert local(stacks).drafts["small"] is small
    stacks.unload()
    assert stacks.family_for(SAMPLING) is None and stacks.sources == local(stacks).drafts == {}


def test_what_a_candidate_needs_is_known_before_it_is_loaded(
    session: Session, shelf: Shelf
) -> None:
    stacks = session.stacks
    small = stacks.offer(f" {shelf.root}/small ")
    assert stacks.offer(small) == small
    assert stacks.candidates() == [Candidate(small, "small", Need(10, 10, 1))]
    (shelf.root / "small" / "config.json").unlink()
    (shelf.root / "small").rmdir()
    (gone,) = stacks.candidates()
    assert gone.need is None and "does not exist" in gone.problem
    for source in (" ", str(shelf.root / "nowhere")):
        with pytest.raises(ModelError):
            stacks.offer(source)
    assert shelf.loads == 0


def test_a_model_that_is_added_while_the_others_are_read_is_listed(
    session: Session, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks = session.stacks
    small, mid = shelf.sources("small", "mid")
    stacks.offered[:] = [small]

    def need(source: str, runtime: Runtime) -> Need:
        if mid not in stacks.offered:
            stacks.offered.append(mid)
        return shelf.need(source)

    monkeypatch.setattr(stacks.engine, "need", need)
    assert [each.source for each in stacks.candidates()] == [small, mid]


def test_what_does_not_fit_is_refused_before_it_is_loaded(session: Session, shelf: Shelf) -> None:
    shelf.free = 31
    session.stacks.load(shelf.sources("small"))
    with pytest.raises(ModelError) as caught:
        session.stacks.load(shelf.sources("small", "mid", "large"))
    assert "need 52 B (mid 21 B, large 31 B), and 31 B are free on cpu" in str(caught.value)
    assert "Choose fewer or smaller" in str(caught.value)
    assert list(session.stacks.drafts) == ["small"] and shelf.loads == 1
    session.stacks.load(shelf.sources("small", "mid"))
    assert list(session.stacks.drafts) == ["small", "mid"]


def test_a_model_of_another_vocabulary_is_refused_and_nothing_changes(
    stacks: Stacks, shelf: Shelf
) -> None:
    shelf.put("large", "other tokens")
    family = stacks.family_for(SAMPLING)
    with pytest.raises(ModelError, match="its tokenizer is BPE, not bytes"):
        stacks.load(shelf.sources("small", "large"))
    assert stacks.family_for(SAMPLING) is family and list(stacks.drafts) == ["small", "mid"]
    with pytest.raises(ModelError, match="No draft model is chosen"):
        stacks.load([])


def test_names_are_those_of_folders_and_none_is_taken_twice(session: Session, shelf: Shelf) -> None:
    stacks = session.stacks
    for name in ("toy", "databases", "plain", "<img src=x onerror=alert(1)>"):
        shelf.put(name)
    (shelf.root / "more").mkdir()
    twin = shelf.put("more/small")
    sources = shelf.sources("toy", "databases", "plain", "small", "<img src=x onerror=alert(1)>")
    stacks.load([*sources, twin])
    assert {"toy-2", "databases-2", "plain-2", "small", "small-2"} < set(stacks.drafts)
    assert free_name("Qwen/Qwen2.5-0.5B", ()) == "Qwen2.5-0.5B"
    assert free_name("/", ()) == "model" and free_name("a\udc80", ()) == "a?"


def test_amounts_are_shown_in_sensible_units() -> None:
    assert [amount(n) for n in (5, 2048, 3 * 2**20, 2**31)] == [
        "5 B",
        "2.0 KiB",
        "3.0 MiB",
        "2.0 GiB",
    ]


# profiles


def test_a_profile_says_how_far_it_is_and_is_there_after_a_restart(
    stacks: Stacks, db: Database, shelf: Shelf
) -> None:
    shares = profile(stacks)
    assert shares == sorted(shares) and shares[-1] == 1
    known = stacks.loaded(SAMPLING).profiled()
    assert [model.name for model in known.models] == ["small", "mid", "toy"]
    assert known.sampling == sampler_of(SAMPLING) and known.target.databases is not None
    later = shelf.session(db).stacks
    later.load(shelf.sources("small", "mid"))
    assert later.loaded(SAMPLING).profiled() == known
    later.load(shelf.sources("small"))
    with pytest.raises(SettingError, match="not profiled"):
        later.loaded(SAMPLING).profiled()


def test_a_profile_of_the_nearest_sampler_serves(
    stacks: Stacks, db: Database, shelf: Shelf
) -> None:
    profile(stacks, replace(SAMPLING, temperature=0.2))

    def used(stacks: Stacks, temperature: float) -> float:
        sampling = replace(SAMPLING, temperature=temperature, seed=9)
        return stacks.loaded(sampling).profiled().sampling["temperature"]

    assert [used(stacks, t) for t in (0.0, 0.2, 0.4, 0.6, 0.8, 2.0)] == [
        0.2,
        0.2,
        0.2,
        0.8,
        0.8,
        0.8,
    ]
    later = shelf.session(db).stacks
    later.load(shelf.sources("small", "mid"))
    assert used(later, 0.7) == 0.2, "the last one is there whatever the sampler is"
    assert used(later, 0.8) == 0.8, "an exact one is looked up"
    assert used(later, 0.7) == 0.8


def test_a_model_that_changed_is_not_served_its_old_profile(
    stacks: Stacks, db: Database, shelf: Shelf
) -> None:
    stacks.choose("", SAMPLING, Drafting(), False)
    shelf.put("mid", "trained further")
    later = shelf.session(db).stacks
    (notice,) = later.restore()
    assert "no profile with" in notice and list(later.drafts) == ["small", "mid"]
    assert later.loaded(SAMPLING).profile is None


@pytest.mark.parametrize("damage", ["names", "fingerprints", "sampler", "rubbish"])
def test_a_stored_profile_is_believed_only_if_it_is_of_these_models(
    stacks: Stacks, db: Database, shelf: Shelf, damage: str
) -> None:
    assert stacks.families is not None
    key = stacks.families.key(LATEST)
    stored = ProfileStore(db).load(key)
    assert stored is not None
    if damage == "names":
        stored["models"][0]["name"] = "renamed"
    elif damage == "fingerprints":
        stored["models"].reverse()
    elif damage == "sampler":
        stored["sampling"] = {"temperature": 0.5}
    else:
        stored = {"models": 7}
    ProfileStore(db).save(key, stored)
    later = shelf.session(db).stacks
    later.load(shelf.sources("small", "mid"))
    assert later.families is not None and bool(later.families.known) == (damage == "names")
    for family in later.families.known.values():
        assert [model.name for model in family.profiled().models] == ["small", "mid", "toy"]


@contextmanager
def stopped(stacks: Stacks) -> Iterator[None]:
    """Each forward stops what is under way."""
    score = ToyBackend.score

    def stop(self: ToyBackend, *arguments: Any, **named: Any) -> Any:
        stacks.stop()
        return score(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ToyBackend, "score", stop)
        yield


def test_a_stopped_profile_leaves_what_was_known(stacks: Stacks) -> None:
    before = stacks.loaded(SAMPLING).profile
    with stopped(stacks), pytest.raises(Cancelled, match="What was known before stays"):
        list(stacks.profile(SAMPLING, TEXTS, 24))
    assert stacks.loaded(SAMPLING).profile is before
    assert is_free(stacks)
    assert profile(stacks)[-1] == 1, "a stop counts once"


def test_a_profile_that_is_left_frees_the_model(stacks: Stacks) -> None:
    running = stacks.profile(SAMPLING, TEXTS, 24)
    next(running)
    running.close()  # type: ignore[attr-defined]
    assert is_free(stacks)


def test_a_profile_that_fails_is_reported(stacks: Stacks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local(stacks).drafts["mid"], "score", failing(MemoryError("no room")))
    with pytest.raises(ModelError, match=r"profile failed \(no room\)"):
        profile(stacks)
    monkeypatch.undo()
    assert stacks.loaded(SAMPLING).profile is not None


def test_a_profile_that_cannot_be_stored_is_used(
    stacks: Stacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProfileStore, "save", failing(FULL))
    monkeypatch.setattr(ProfileStore, "load", failing(FULL))
    warm = replace(SAMPLING, temperature=1.5)
    with pytest.raises(StorageError):
        profile(stacks, warm)
    assert stacks.loaded(warm).profiled().sampling["temperature"] == 1.5


def test_nothing_is_profiled_without_models(session: Session) -> None:
    for start in (
        lambda: session.stacks.profile(SAMPLING),
        lambda: session.stacks.measure(SAMPLING, Drafting(), ""),
    ):
        with pytest.raises(SettingError, match="No draft model is loaded"):
            next(start())


# plans and choices


def test_a_plan_that_is_none_is_refused_and_not_remembered(stacks: Stacks) -> None:
    for spec, expected in (
        ("mid@4/small@8", "out of order"),
        ("large@4", "is unknown"),
    ):
        with pytest.raises(SettingError, match=expected):
            stacks.choose(spec, SAMPLING, Drafting(), False)
    assert stacks.spec == "" and stacks.store.chosen("toy") is None


def test_the_chosen_stack_is_loaded_again_at_the_next_start(
    stacks: Stacks, db: Database, shelf: Shelf
) -> None:
    assert stacks.choose("", SAMPLING, Drafting(), True) == "hd+hsd"
    assert stacks.choose(" small@3/mid@2 ", SAMPLING, Drafting(), False) == "hsd:small@3/mid@2"
    later = shelf.session(db).stacks
    assert later.restore() == [] and list(later.drafts) == ["small", "mid"]
    assert later.spec == "small@3/mid@2"
    assert ("Draft model small", "single:small") in later.methods()
    assert "hd+hsd:small@3/mid@2" in dict(map(reversed, later.methods()))  # type: ignore[arg-type]
    other = shelf.session(db).stacks
    assert other.restore(shelf.sources("large")) != [] and list(other.drafts) == ["large"]
    later.unload()
    last = shelf.session(db).stacks
    assert last.restore() == [] and last.drafts == {}


def test_programs_are_offered_methods_with_draft_models_once_these_are_loaded(
    session: Session, shelf: Shelf
) -> None:
    api = api_of(session, parse(["serve"]))

    def methods() -> set[str]:
        return set(api.description()["strata"]["methods"])

    alone = methods()
    assert {"plain", "auto", "hd"} <= alone and not any("hsd" in name for name in alone)
    session.stacks.load(shelf.sources("mid", "small"))
    assert methods() - alone >= {"hsd", "hd+hsd"} and alone <= methods()


def test_a_chosen_model_that_is_gone_is_a_notice(
    stacks: Stacks, db: Database, shelf: Shelf
) -> None:
    stacks.choose("", SAMPLING, Drafting(), False)
    (shelf.root / "mid").rename(shelf.root / "moved")
    later = shelf.session(db)
    (notice,) = later.stacks.restore()
    assert "mid" in notice and "does not exist" in notice and later.stacks.drafts == {}
    assert ask(later, chosen=preferences("hd"))[1].text
    shelf.free = 0
    shelf.put("mid")
    assert "0 B are free" in later.stacks.restore()[0]


# answers


@pytest.mark.parametrize("method", ["hd+hsd", "hsd:small@4/mid@3"])
def test_draft_models_change_no_word_of_an_answer(
    session: Session, stacks: Stacks, method: str
) -> None:
    _, plain = ask(session, chosen=preferences("plain"))
    conversation, update = ask(session, chosen=preferences(method))
    assert update.text == plain.text and session.notices.take(OWNER) == []
    proven(session, conversation)
    *_, last = compare(session, OWNER, "hello there", preferences(method), 2)
    assert len(last.pairs) == 2 and last.same_text
    assert [timed.tokens for timed in last.pairs[0]][0] == [
        replace(token, source="target", match_length=0) for token in last.pairs[0][1].tokens
    ]


def test_drafted_tokens_say_who_drafted_them_and_are_stored_so(
    session: Session, stacks: Stacks
) -> None:
    conversation, update = ask(session, chosen=preferences("hsd:small@4/mid@3"))
    found = {piece.source for piece in update.pieces} - {"target"}
    assert found and found <= {DRAFT + "small", DRAFT + "mid"}
    assert set(update.metrics.levels) == {DRAFT + "small", DRAFT + "mid"}
    stored = messages(session, conversation)[1].pieces
    assert stored == tuple(update.pieces)


def test_a_stack_draws_from_the_measured_costs_and_the_comparison_leaves_them(
    session: Session, stacks: Stacks
) -> None:
    loaded = local(stacks).loaded
    curve = loaded.curve = engine_costs.CostCurve({0: 1.0, 8: 1.1, 63: 2.0})
    points = dict(curve.points)
    for method in ("hsd", "hsd:small@4"):
        assert loaded.curve_of(preferences(method).chosen()) is curve
        list(compare(session, OWNER, "hello there", preferences(method), 1))
        assert curve.points == points and session.costs.record is None
    ask(session, chosen=preferences("hsd:small@4"))
    assert session.costs.record == loaded.costs and loaded.costs.points != points


@pytest.mark.parametrize("method", ["hsd", "hd+hsd", "single:small", "hsd:large@4"])
def test_missing_models_are_reported_before_anything_is_lost(
    session: Session, shelf: Shelf, method: str
) -> None:
    chosen, sampling = preferences(method).chosen(), SAMPLING
    with pytest.raises(SettingError, match="none is loaded"):
        session.stacks.check(chosen, sampling)
    with pytest.raises(SettingError, match="none is loaded"):
        ask(session, chosen=preferences(method))
    with pytest.raises(SettingError, match="none is loaded"):
        list(compare(session, OWNER, "hello", preferences(method), 1))
    session.stacks.load(shelf.sources("small"))
    with pytest.raises(SettingError, match="not profiled"):
        session.stacks.check(chosen, sampling)
    session.stacks.check(METHODS["hd"], sampling)
    profile(session.stacks)
    if method == "hsd:large@4":
        with pytest.raises(SettingError, match="'large' is unknown"):
            session.stacks.check(chosen, sampling)
    else:
        session.stacks.check(chosen, sampling)


def test_a_draft_model_that_fails_costs_speed_only(
    session: Session, stacks: Stacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plain = ask(session, chosen=preferences("plain"))
    calls = iter(range(1000))
    score = ToyBackend.score

    def fail(self: ToyBackend, *arguments: Any) -> object:
        if self.info.name == "small" and next(calls) > 3:
            raise RuntimeError("out of memory")
        return score(self, *arguments)

    monkeypatch.setattr(ToyBackend, "score", fail)
    _, update = ask(session, chosen=preferences("hsd:small@4/mid@3"))
    assert update.text == plain.text
    (notice,) = session.notices.take(OWNER)
    assert "out of memory" in notice and "not affected" in notice


def test_rejection_keeps_the_distribution_and_says_so(session: Session, stacks: Stacks) -> None:
    rejection = Drafting(rule="rejection")
    conversation, _ = ask(session, chosen=preferences("hsd:small@4", rejection))
    proof = prove(session, conversation)
    assert not proof.same_text and proof.speedup.whole and proof.speedup.decoding
    stack = preferences("hsd:small@4", rejection)
    *_, last = compare(session, OWNER, "hello there", stack, 1)
    assert not last.same_text
    cold = preferences("hsd:small@4", rejection)
    cold = replace(cold, generation=Generation(Sampling(0.0), 60))
    conversation, _ = ask(session, chosen=cold)
    proof = prove(session, conversation)
    assert proof.same_text and proof.verdict is not None and proof.verdict.identical


# measuring


def test_draft_models_start_every_run_with_an_empty_cache(
    session: Session, stacks: Stacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the second run of a pair would have its prompt read for nothing."""
    small: Any = local(stacks).drafts["small"]
    prefill, known = small.prefill, list[int]()
    loaded = local(stacks).loaded
    prompts = [loaded.chat.prompt([Message("user", "hello there")], known=())]
    prompts += prompts_of(loaded.backend, TEXTS)

    def read(tokens: Sequence[int], cancelled: Callable[[], bool]) -> object:
        if list(tokens) in prompts:
            known.append(len(small.cache))
        return prefill(tokens, cancelled)

    monkeypatch.setattr(small, "prefill", read)
    list(compare(session, OWNER, "hello there", preferences("hsd:small@4"), 2))
    assert known == [0, 0]
    measure(session, Drafting(), "small@4")
    assert len(known) > 2 + len(TEXTS) and not any(known)


def test_a_measurement_puts_times_next_to_predictions(session: Session, stacks: Stacks) -> None:
    found = measure(session, Drafting(), "small@5/mid@2")
    titles = [trial.title for trial in found]
    assert titles[:2] == ["plain", "databases"] and titles[-1] == "databases, then draft models"
    assert "small@5/mid@2" in titles
    assert {title.split("@")[0] for title in titles} >= {"small", "mid"}
    for trial in found:
        assert trial.seconds > 0 and trial.tokens > 0
        assert trial.same_text and trial.verdict.identical
        assert (trial.predicted is None) == (trial.title == titles[-1])
        assert trial.predicted is None or math.isfinite(trial.predicted)
    assert found[0].speedup == Speedup(1.0, 1.0)
    assert all(trial.speedup.whole for trial in found if trial.title.startswith("mid@"))
    profile(stacks)
    assert stacks.trials == [], "they were of the profile before"


def test_rejection_is_measured_without_alarm(session: Session, stacks: Stacks) -> None:
    found = measure(session, Drafting(rule="rejection"))
    assert found[0].same_text and not any(trial.same_text for trial in found[1:])


def test_a_measurement_can_be_stopped(session: Session, stacks: Stacks) -> None:
    before = measure(session, Drafting())
    with stopped(stacks), pytest.raises(Cancelled):
        list(stacks.measure(SAMPLING, Drafting(), "", TEXTS, 24))
    assert stacks.trials is before


def test_measuring_needs_a_profile_and_a_plan(session: Session, shelf: Shelf) -> None:
    session.stacks.load(shelf.sources("small"))
    start: Callable[[str], Iterator[float]] = lambda spec: session.stacks.measure(  # noqa: E731
        SAMPLING, Drafting(), spec
    )
    with pytest.raises(SettingError, match="not profiled"):
        next(start(""))
    profile(session.stacks)
    with pytest.raises(SettingError, match="unknown"):
        next(start("mid@4"))


def test_a_stop_is_heard_by_a_draft_model_that_reads_the_prompt(
    session: Session, stacks: Stacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[bool] = []
    draft = local(stacks).drafts["small"]
    prefill = draft.prefill

    def reading(tokens: Sequence[int], cancelled: Callable[[], bool]) -> Filled:
        session.tasks.stop(OWNER, conversation)
        heard.append(cancelled())
        return prefill(tokens, cancelled)

    monkeypatch.setattr(draft, "prefill", reading)
    conversation = session.chat.say(OWNER, None, "hello there")
    method = Preferences(Generation(SAMPLING, 50), "single:small", fresh_seed=False)
    last = answer(session, conversation, method)
    assert isinstance(last, Update) and last.finish == "cancelled" and heard == [True]


# what answers say of the plan


def took(tokens: int, seconds: float, plain: float, model: str = "small") -> list[Step]:
    """A step of an answer in which a draft model drafted."""
    emitted = tuple(Token(97, at, "target") for at in range(tokens))
    looked = {DRAFT + model: 1e-6}
    return [Step(0, emitted, verify_seconds=seconds, look_ups=looked, plain_seconds=plain)]


def test_an_answer_that_draft_models_drafted_for_corrects_the_profile(
    session: Session, stacks: Stacks
) -> None:
    local(stacks).loaded.curve = engine_costs.CostCurve({0: 1.0, 8: 1.1, 63: 2.0})
    for method in ("plain", "hd", "hd+hsd:small@4"):
        ask(session, chosen=preferences(method))
        learned = stacks.learned(SAMPLING)
        assert learned is not None and not learned.outcomes, method
    for number in range(1, 4):
        _, update = ask(session, chosen=preferences("hsd:small@4/mid@3"))
        learned = stacks.learned(SAMPLING)
        assert learned is not None
        (name,), (found,) = learned.outcomes.keys(), learned.outcomes.values()
        assert name == "match small/mid" and len(found) == number
        assert 0 < found[-1].tokens <= update.metrics.tokens
        assert min(found[-1].seconds, found[-1].expected, found[-1].plain_seconds) > 0


def test_a_plan_that_is_off_is_made_again_and_is_there_after_a_restart(
    stacks: Stacks, db: Database, shelf: Shelf
) -> None:
    families = stacks.families
    assert families is not None
    family = stacks.loaded(SAMPLING)
    plan, plain = family.plan("small@4", "match"), family.profiled().target.seconds(0)
    expected = Recursion(family.profiled(), "match").latency(plan) / plain

    def answered(seconds: float) -> None:
        known = families.learned(SAMPLING)
        outcome = known and outcome_of(known, plan, "match", took(ENOUGH, seconds, 1.0))
        assert known and outcome
        families.note(known.learned(stack_of(plan, "match"), outcome))

    answered(1.05 * expected)
    assert stacks.loaded(SAMPLING) is family, "within the bound nothing is planned again"
    answered(40.0 * expected)
    again = stacks.loaded(SAMPLING)
    assert again is not family
    predicted = Recursion(again.profiled(), "match").latency(plan)
    assert predicted == pytest.approx(20.525 * expected * plain)
    best = again.plan("", "match")
    assert [level.model for level in best.levels] != ["small"] or best.databases
    assert Recursion(again.profiled(), "match").latency(best) <= plain
    later = shelf.session(db).stacks
    later.load(shelf.sources("small", "mid"))
    assert later.loaded(SAMPLING).profiled() == again.profiled()
    assert later.loaded(SAMPLING).plan("", "match") == best
    profile(later)
    fresh = later.learned(SAMPLING)
    assert fresh is not None and not fresh.outcomes, "a new profile knows nothing of old answers"


def test_what_was_measured_corrects_what_is_predicted(session: Session, stacks: Stacks) -> None:
    found = measure(session, Drafting(), "small@5/mid@2")
    learned = stacks.learned(SAMPLING)
    assert learned is not None
    plan = stacks.loaded(SAMPLING).plan("small@5/mid@2", "match")
    (trial,) = [trial for trial in found if trial.title == str(plan)]
    outcome = learned.outcomes[stack_of(plan, "match")][-1]
    assert outcome.tokens == trial.tokens
    assert outcome.seconds / outcome.tokens == pytest.approx(trial.seconds)
    assert outcome.plain_seconds / outcome.tokens == pytest.approx(found[0].seconds)
    profiled, plain = Recursion(learned, "match").profiled(plan), learned.target.seconds(0)
    assert outcome.expected == pytest.approx(profiled / plain * outcome.plain_seconds)
