"""What the target will choose, given its noise: chances, what is learned, and within what bounds.

A law is drawn per position, estimates are that law with an error, and the choice is the real one:
the largest log P + g.
"""

import random
from dataclasses import dataclass
from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafting.noise import FIRST, MEMORY, PRIOR, RANGES, ErrorModel
from engine.sampling import gumbel

CANDIDATES, OTHERS = 12, 60
"""Tokens that the estimates name, and those that they leave out."""


@dataclass
class Position:
    """Estimates with the noise, and the candidate that was said: None for an unnamed token."""

    shares: list[float]
    noise: list[float]
    said: int | None


def positions(count: int, error: float, seed: int = 1) -> list[Position]:
    """Positions with estimates whose logarithm is off by Gumbel noise of that scale."""
    draw = np.random.default_rng(seed)
    size = CANDIDATES + OTHERS
    found = []
    for position in range(count):
        law = draw.dirichlet([0.6] * CANDIDATES + [0.05] * OTHERS)
        noise = gumbel(seed, position, range(size)).astype(float)
        with np.errstate(divide="ignore"):
            said = int((np.log(law) + noise).argmax())
        guess = law * np.exp(error * draw.gumbel(size=size))
        guess /= guess.sum()
        shares = np.maximum(guess[:CANDIDATES], 1e-9).tolist()
        named = said if said < CANDIDATES else None
        found.append(Position(shares, noise[:CANDIDATES].tolist(), named))
    return found


def taught(found: list[Position], temperature: float = 1.0) -> ErrorModel:
    model = ErrorModel()
    for at in found:
        model.learn(at.shares, at.noise, CANDIDATES, temperature, at.said)
    return model


def likelihood(model: ErrorModel, found: list[Position], temperature: float = 1.0) -> float:
    total = 0.0
    for at in found:
        chances, others = model.estimates(at.shares, at.noise, CANDIDATES, temperature)
        total += log(others if at.said is None else chances[at.said])
    return total / len(found)


def model_of(*values: float) -> ErrorModel:
    model = ErrorModel()
    model.values[:] = type(model.values)("d", values)
    return model


SHARES = st.lists(st.floats(1e-12, 1.0), max_size=9)
VALUES = st.tuples(*(st.floats(low, high) for low, high in RANGES))


@settings(deadline=None, derandomize=True)
@given(SHARES, st.integers(0, 99), st.integers(0, 9), VALUES, st.floats(1e-4, 2.0))
def test_chances_are_a_distribution(
    shares: list[float], seed: int, named: int, values: tuple[float, ...], temperature: float
) -> None:
    noise = gumbel(seed, 3, range(len(shares))).tolist()
    chances, others = model_of(*values).estimates(shares, noise, named, temperature)
    assert len(chances) == len(shares) and min([*chances, others]) >= 0.0
    assert sum(chances) + others == pytest.approx(1.0)


def test_what_is_learned_fits_better_than_probabilities_and_than_first_values() -> None:
    for error in (0.3, 1.0):
        found = positions(3000, error)
        model = taught(found[:2000])
        later = likelihood(model, found[2000:])
        assert later > likelihood(ErrorModel(), found[2000:])
        assert later > likelihood(model_of(0.0, *FIRST[1:]), found[2000:]) + 0.2


@pytest.mark.parametrize("error", [0.5, 0.7, 1.0])
def test_chances_come_true(error: float) -> None:
    """Of candidates with a certain chance, that part is chosen: in every fifth of all chances."""
    found, model, pairs = positions(5000, error), ErrorModel(), list[tuple[float, bool]]()
    for at in found:
        chances, _ = model.estimates(at.shares, at.noise, CANDIDATES, 1.0)
        best = chances.index(max(chances))
        pairs.append((chances[best], best == at.said))
        model.learn(at.shares, at.noise, CANDIDATES, 1.0, at.said)
    expected, came = (sum(pair[kind] for pair in pairs[1000:]) for kind in (0, 1))
    assert expected == pytest.approx(came, rel=0.07)
    pairs = sorted(pairs[1000:])
    for fifth in range(5):
        part = pairs[fifth * 800 : (fifth + 1) * 800]
        mean = sum(chance for chance, _ in part) / 800
        assert mean == pytest.approx(sum(hit for _, hit in part) / 800, abs=0.1)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(0, 10**6), st.floats(1e-4, 2.0))
def test_whatever_is_observed_the_values_stay_within_their_ranges(
    seed: int, temperature: float
) -> None:
    draw, model = random.Random(seed), ErrorModel()
    for _ in range(200):
        size = draw.randrange(0, 6)
        shares = [10 ** draw.uniform(-12, 0) for _ in range(size)]
        noise = [draw.choice((-2.8, 0.0, 17.3)) for _ in range(size)]
        said = draw.choice([None, *range(size)])
        model.learn(shares, noise, draw.randrange(7), temperature, said)
    for value, precision, (low, high) in zip(model.values, model.precisions, RANGES, strict=True):
        assert low <= value <= high and PRIOR <= precision <= MEMORY


def test_what_was_learned_is_taken_over_and_what_cannot_be_is_not() -> None:
    model = taught(positions(300, 0.5))
    again = ErrorModel()
    for which, (precision, value) in enumerate(model.learned()):
        again.load(which, precision, value)
    assert again.values == pytest.approx(model.values)
    assert again.precisions == pytest.approx(model.precisions)
    assert all(precision == 0.0 for precision, _ in ErrorModel().learned())
    fresh = ErrorModel()
    for which, precision, value in ((-1, 9.0, 1.0), (4, 9.0, 1.0), (0, 0.0, 1.0), (0, -1.0, 1.0)):
        fresh.load(which, precision, value)
    assert fresh.learned() == ErrorModel().learned()
    fresh.load(0, 1e9, 1e9)
    assert fresh.values[0] == RANGES[0][1] and fresh.precisions[0] == MEMORY
