"""The largest speedup that a cost curve allows. A head that cannot pay on a machine is found when
its model is loaded, and left alone."""

from dataclasses import replace

import pytest

from app.service.current import drafters, line
from engine.drafting import ceiling
from engine.drafting.ceiling import Ceiling, HeadTimes, emitted, expensive, timed
from engine.drafting.ceiling import ceiling as largest
from engine.drafting.costs import CostCurve
from engine.drafting.databases import Databases, DraftingMemory
from engine.loaded import Loaded
from engine.methods import METHODS
from engine.settings import Sampling
from engine.types import HEAD
from tests.support.toy import ToyBackend, deviating

FREE = {0: 1.0, 1: 1.0, 3: 1.0, 7: 1.0}
LINEAR = {0: 1.0, 1: 2.0, 3: 4.0, 7: 8.0}


def test_the_best_size_lies_where_the_ratio_is_largest() -> None:
    """All of free nodes, none of those that cost a forward each."""
    assert largest(FREE, 0.5) == Ceiling(emitted(0.5, 7), 7)
    assert largest(FREE, 1.0) == Ceiling(8.0, 7)
    for acceptance in (0.0, 0.6, 0.99, 1.0):
        assert largest(LINEAR, acceptance) == Ceiling(1.0, 0)
    curve = {0: 10.0, 1: 15.0, 3: 20.0, 7: 60.0}
    found = largest(curve, 0.8)
    assert found.nodes == 3 and found.speedup == pytest.approx((1 + 0.8 + 0.64 + 0.512) / 2)
    assert largest(curve, 0.3) == Ceiling(1.0, 0), "three quarters are lost at 7, a tenth at 1"


# heads


@pytest.fixture
def toy() -> ToyBackend:
    return ToyBackend(guesses=deviating(0.5))


FLAT = CostCurve({0: 1.0, 8: 1.0})


@pytest.mark.parametrize(("start", "left"), [(0.0, False), (2.0, True)])
def test_the_usual_method_leaves_a_head_alone_that_cannot_pay(
    toy: ToyBackend, monkeypatch: pytest.MonkeyPatch, start: float, left: bool
) -> None:
    times = HeadTimes(start, start, 0.0)
    monkeypatch.setattr(ceiling, "timed", lambda backend, head, rounds: times)
    loaded = Loaded(toy, DraftingMemory(), curve=FLAT.copy())
    loaded.weigh_head()
    info = toy.info
    assert info.head is not None and bool(info.head.expensive) == left
    assert METHODS["auto"].uses_head(info) != left
    assert METHODS["hd+head"].uses_head(info) and not METHODS["hd+head"].missing(info)
    found = METHODS["auto"].drafters(Databases(), sampling=Sampling(), target=toy)
    assert (HEAD in {each.name for each in found}) != left
    (head,) = (each for each in drafters(info) if each.name == "built-in head")
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
    assert expensive(toy, head, FLAT) == ""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(head), "start", fail)
    loaded = Loaded(toy, DraftingMemory(), curve=FLAT.copy())
    loaded.weigh_head()
    assert toy.info.head is not None and not toy.info.head.expensive
