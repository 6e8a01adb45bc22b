"""The same choice from 10,800 rows of every kind, with every sampler: in Python, compiled, on a
device."""

import numpy as np
import pytest

from engine import native
from engine.sampling import Floats, probabilities, reference, select
from engine.settings import Sampling
from tests.support.choices import KINDS, SIZES, by_core, by_law, on_device, rows_of, samplers

ROWS = 4


@pytest.mark.soak(stay=23)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.2, 0.7, 1.0, 2.0])
def test_every_way_to_choose_is_the_law(kind: str, temperature: float) -> None:
    stream = np.random.default_rng([*KINDS].index(kind) + 100 * int(10 * temperature))
    asked = told = 0
    for sampling in samplers(temperature, stream):
        rows = rows_of(kind, stream, int(stream.choice(SIZES)), ROWS)
        places = [int(place) for place in stream.integers(0, 40, ROWS)]
        wanted = [by_law(row, sampling, at) for row, at in zip(rows, places, strict=True)]
        assert [
            reference(row, sampling, at) for row, at in zip(rows, places, strict=True)
        ] == wanted
        assert [
            select(row, sampling, at).token for row, at in zip(rows, places, strict=True)
        ] == wanted
        compiled = [by_core(row, sampling, at) for row, at in zip(rows, places, strict=True)]
        assert all(token in (None, other) for token, other in zip(compiled, wanted, strict=True))
        told += sum(token is not None for token in compiled)
        asked += ROWS
        check_device(rows, places, sampling, wanted)
    assert told in (0, asked) or told > 0.95 * asked, "nearly always the compiled core knows"


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_every_width_say_the_same(kind: str) -> None:
    """The compiled core takes the widest that the processor has."""
    core = native.core
    widths = [] if core is None else core.widths()
    stream = np.random.default_rng([*KINDS].index(kind))
    for temperature in (0.0, 0.7, 1.0):
        for sampling in samplers(temperature, stream):
            (row,) = rows_of(kind, stream, int(stream.choice(SIZES)), 1)
            wanted, found = by_law(row, sampling, 3), []
            for width in widths:
                core.use_width(width)
                found.append(by_core(row, sampling, 3))
                assert select(row, sampling, 3).mass == pytest.approx(mass_of(row), rel=1e-6)
            assert set(found) <= {None, wanted}


def mass_of(row: Floats) -> float:
    return float(np.exp(np.float64(row) - row.max()).sum())


def check_device(
    rows: list[Floats], places: list[int], sampling: Sampling, wanted: list[int]
) -> None:
    """The same tokens and probabilities from what a device says of the rows."""
    scores = on_device(rows, places, sampling)
    for row, token in enumerate(wanted):
        assert scores.choose(row) == token
        share = float(probabilities(rows[row])[token])
        assert scores.probability(row, token) == pytest.approx(share, rel=1e-4, abs=1e-9)


SHAPES = ("usual", "spiked", "nearly alike")
WHOLE = [
    (kind, Sampling(temperature, min_p=min_p, seed=7))
    for kind in SHAPES
    for temperature in (0.0, 0.7, 1.0)
    for min_p in (0.0, 0.05)
]
CUT = [Sampling(0.7, top_k=20), Sampling(0.7, top_p=0.9), Sampling(0.2, 50, 0.9, 0.1)]


@pytest.mark.parametrize(("kind", "sampling"), [*WHOLE, *(("spiked", each) for each in CUT)])
def test_whole_rows_stay_on_the_device(kind: str, sampling: Sampling) -> None:
    """Where all fewest tokens of a nucleus or all largest sums are among those that come."""
    read = list[int]()
    rows = rows_of(kind, np.random.default_rng(1), 20_000, 12)
    scores = on_device(rows, range(12), sampling, read)
    chosen = [scores.choose(row) for row in range(12)]
    assert chosen == [by_law(rows[row], sampling, row) for row in range(12)]
    assert all(scores.probability(row, token) > 0 for row, token in enumerate(chosen))
    assert read == []


def test_ties_behind_what_came_have_the_whole_row_read() -> None:
    """Of 20,000 equal logits a device may bring any 1,024."""
    rows, read = [np.ones(20_000, dtype=np.float32)], list[int]()
    for sampling in (Sampling(1.0, top_k=5, seed=3), Sampling(1.0, top_p=0.5, seed=4)):
        assert on_device(rows, [9], sampling, read).choose(0) == by_law(rows[0], sampling, 9)
    assert read == [0, 0]
