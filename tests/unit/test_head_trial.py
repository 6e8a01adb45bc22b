"""A head that cannot pay on a machine is found when its model is loaded, and left alone."""

from dataclasses import replace

import pytest

from app.service.drafters import drafters, line
from engine.backends.toy import ToyBackend, deviating
from engine.drafting import head_trial
from engine.drafting.costs import CostCurve
from engine.drafting.databases import Databases
from engine.drafting.head_trial import HeadTimes, timed, too_dear
from engine.drafting.memory import DraftingMemory
from engine.loaded import Loaded
from engine.methods import METHODS
from engine.settings import Sampling
from engine.types import HEAD


@pytest.fixture
def toy() -> ToyBackend:
    return ToyBackend(guesses=deviating(0.5))


FLAT = CostCurve({0: 1.0, 8: 1.0})
STEEP = CostCurve({0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0, 8: 9.0})


def test_the_most_that_a_head_can_bring_is_what_its_guesses_save() -> None:
    free, dear = HeadTimes(0.0, 0.0, 0.0), HeadTimes(1.0, 0.5, 0.25)
    assert free.best(FLAT, 1) == pytest.approx(1.8)
    assert free.best(FLAT, 2) == pytest.approx(1.8 + 0.64)
    assert free.best(STEEP, 8) == pytest.approx(0.9), "one guess costs what it saves"
    assert dear.best(FLAT, 1) == pytest.approx(1.8 / 2.25)
    assert dear.best(FLAT, 2) == pytest.approx(2.44 / 2.75)
    assert HeadTimes(1.0, 0.1, 0.25).best(FLAT, 8) > 1, "many guesses pay for the first"


@pytest.mark.parametrize(("start", "left"), [(0.0, False), (2.0, True)])
def test_the_usual_method_leaves_a_head_alone_that_cannot_pay(
    toy: ToyBackend, monkeypatch: pytest.MonkeyPatch, start: float, left: bool
) -> None:
    times = HeadTimes(start, start, 0.0)
    monkeypatch.setattr(head_trial, "timed", lambda backend, head, rounds: times)
    loaded = Loaded(toy, DraftingMemory(), curve=FLAT.copy())
    loaded.weigh_head()
    info = toy.info
    assert info.head is not None and bool(info.head.too_dear) == left
    assert METHODS["auto"].asks(info) != left
    assert METHODS["hd+head"].asks(info) and not METHODS["hd+head"].missing(info)
    found = METHODS["auto"].drafters(Databases(), sampling=Sampling(), target=toy)
    assert (HEAD in {each.name for each in found}) != left
    (head,) = (each for each in drafters(info) if each.name == "head")
    assert bool(head.how) != left and ("2000.0 ms" in head.problem) == left
    assert ("head" in line(info)) != left


def test_it_is_timed_by_calls_of_its_own(toy: ToyBackend) -> None:
    head = toy.head
    assert head is not None
    found = timed(toy, head, 3)
    assert found is not None and found.start > 0 and found.extend > 0 and found.listening >= 0
    toy.info = replace(toy.info, head=None)
    loaded = Loaded(toy, DraftingMemory(), curve=FLAT.copy())
    loaded.weigh_head()
    assert toy.info.head is None


def test_a_head_that_fails_or_says_nothing_is_judged_by_answers(
    toy: ToyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = toy.head
    assert head is not None
    monkeypatch.setattr(type(head), "start", lambda *_: None)
    assert too_dear(toy, head, FLAT) == ""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(head), "start", fail)
    loaded = Loaded(toy, DraftingMemory(), curve=FLAT.copy())
    loaded.weigh_head()
    assert toy.info.head is not None and not toy.info.head.too_dear
