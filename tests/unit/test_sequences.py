"""Sequences of models that stay warm: which are kept, which are dropped, and which go first."""

from typing import Any

import pytest

from engine.decode import never
from engine.errors import ModelError
from engine.loaded import NoModel, Sequences
from engine.settings import Sampling
from engine.tree import Tree
from tests.support.toy import CELL, ToyBackend


def test_the_forwards_of_the_toy_are_those_of_one_sequence() -> None:
    class Mine(ToyBackend):
        pass

    toy = Mine(100, "mine")
    toy.prefill([97, 98], never)
    toy.score(Tree(98), Sampling(0.0))
    toy.accept([])
    other = toy.open()
    assert isinstance(other, Mine) and (toy.forwards, other.forwards) == (1, 0)
    assert (toy.cache, other.cache) == ([97, 98], []) and toy.bytes == 2 * CELL


def test_where_no_model_is_nothing_is_opened() -> None:
    away = NoModel()
    away.close()
    assert away.bytes == 0
    with pytest.raises(ModelError, match="No model is loaded"):
        away.open()


def fill(warm: Sequences, model: Any, name: str, tokens: int) -> Any:
    sequence = warm.get(("me", name), model)
    sequence.prefill([97] * (tokens + 1), never)
    return sequence


def test_what_was_used_longest_ago_goes_first() -> None:
    toy, draft, warm = ToyBackend(), ToyBackend(name="draft"), Sequences(100 * CELL)
    held = {name: fill(warm, toy, name, 30) for name in "abc"}
    warm.fit()
    assert [held[name].bytes for name in "abc"] == [30 * CELL] * 3, "it fits"
    assert warm.get(("me", "a"), toy) is held["a"]
    held["d"] = fill(warm, toy, "d", 30)
    assert warm.bytes == 120 * CELL
    warm.fit()
    assert warm.bytes == 90 * CELL and held["b"].bytes == 0, "a was used after b"
    own = [fill(warm, model, "d", 60) for model in (toy, draft)]
    assert own[0] is held["d"] and own[1] is not own[0]
    warm.fit()
    assert {key for key, _ in warm.warm} == {("me", "d")}, "what is in use stays, however large"
    assert [each.bytes for each in own] == [60 * CELL] * 2 and held["a"].bytes == 0
    assert warm.get(("me", "b"), toy).prefill([97, 97], never).reused == 0
    Sequences().fit()


def test_conversations_owners_and_models_are_dropped() -> None:
    toy, draft, warm = ToyBackend(), ToyBackend(name="draft"), Sequences()
    places = [(owner, name, m) for owner in "xy" for name in "ab" for m in (toy, draft)]
    held = {place: warm.get(place[:2], place[2]) for place in places}
    for sequence in held.values():
        sequence.prefill([97] * 11, never)

    def left() -> set[Any]:
        empty = {place for place in places if not held[place].bytes}
        known = {(*key, each) for key, each in warm.warm}
        assert known == set(places) - empty, "what is dropped is closed, and the other way round"
        return known

    assert len(left()) == 8 and warm.bytes == 80 * CELL
    warm.drop(("x", "a"))
    warm.drop(("x", "unknown"))
    assert left() == {place for place in places if place[:2] != ("x", "a")}
    for name in ("a", "b"):
        warm.drop(("y", name))
    assert left() == {("x", "b", toy), ("x", "b", draft)}
    warm.drop_model(draft)
    assert left() == {("x", "b", toy)}
    warm.clear()
    assert left() == set() and warm.bytes == 0


def test_another_model_of_the_same_name_has_sequences_of_its_own() -> None:
    warm, one, other = Sequences(), ToyBackend(), ToyBackend()
    assert warm.get(("me", "a"), one) is not warm.get(("me", "a"), other)


def test_memory_of_closed_sequences_is_given_back_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not after each of them, since that takes time."""
    toy, warm, calls = ToyBackend(), Sequences(10 * CELL), list[int]()
    monkeypatch.setattr("engine.loaded.FREED", 30 * CELL)
    monkeypatch.setattr("engine.loaded.give_back_freed", lambda: calls.append(number))
    for number in range(20):
        fill(warm, toy, str(number), 10)
        warm.fit()
    assert calls == [4, 8, 12, 16]
