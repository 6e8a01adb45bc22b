"""Choices from logits on a device, which here is torch on the host: the code is the same."""

import numpy as np
import pytest
import torch

from engine.backends.device_scores import NEAR, DeviceScores, draws_on, noise_on, states_of
from engine.sampling import BITS, draws_of, noise_of
from engine.settings import Sampling
from tests.support.choices import by_law, on_device


@pytest.mark.parametrize("seed", [0, 5, 2**63 - 1])
def test_torch_draws_the_same_integers(seed: int) -> None:
    positions = [0, 9, 2**31]
    found = draws_on(torch.tensor(states_of(seed, positions)), 10_000).numpy()
    wanted = [draws_of(seed, position, range(10_000)) for position in positions]
    assert (found == np.array(wanted)).all()


def test_torch_knows_the_noise_of_every_draw_well_enough() -> None:
    ends = np.r_[: 2**16, 2**23 - 2**16 : 2**23 + 2**16, 2**BITS - 2**16 : 2**BITS]
    draws = np.concatenate([ends, np.arange(0, 2**BITS, 97)]).astype(np.uint64)
    found = noise_on(torch.from_numpy(draws.astype(np.int64))).numpy()
    assert abs(np.float64(found) - noise_of(draws)).max() < 1e-5, "a tenth of what is allowed for"


def test_sums_too_near_to_tell_have_the_row_read() -> None:
    """More tokens than come have the largest sum, up to what a device may be off."""
    size, sampling, read = 5_000, Sampling(1.0, seed=3), list[int]()
    noise = noise_of(draws_of(3, 8, range(size)))
    row = np.full(size, -50.0, dtype=np.float32)
    level = np.random.default_rng(1).choice(size, 2 * NEAR, replace=False)
    row[level] = 10 - noise[level]
    scores = on_device([row], [8], sampling, read)
    assert scores.choose(0) == by_law(row, sampling, 8)
    assert read == [0]


def test_rows_of_one_depth_have_one_noise_and_the_others_their_own() -> None:
    rows, sampling = np.zeros((4, 3_000), dtype=np.float32), Sampling(1.0)
    scores = on_device(rows, [7, 8, 8, 3], sampling)
    found = [scores.choose(row) for row in range(4)]
    assert found == [by_law(rows[0], sampling, at) for at in (7, 8, 8, 3)]
    assert found[1] == found[2] and len(set(found)) == 3


@pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(0.7, seed=1), Sampling(1.0, 40, 0.9, 0.02, seed=2)]
)
def test_half_precision_is_chosen_from_as_on_the_host(sampling: Sampling) -> None:
    rows = np.random.default_rng(2).normal(0, 3, (9, 4_000)).astype(np.float32)
    scores = on_device(rows, range(9), sampling, half=True)
    rounded = [scores.read(row) for row in range(9)]
    assert all(np.unique(row).size < 3_000 for row in rounded), "many are equal"
    found = [scores.choose(row) for row in range(9)]
    assert found == [by_law(row, sampling, at) for at, row in enumerate(rounded)]


def test_one_copy_brings_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, surveys = np.random.default_rng(3).normal(0, 3, (9, 4_000)).astype(np.float32), []
    real = DeviceScores.survey
    monkeypatch.setattr(
        DeviceScores, "survey", lambda scores: (surveys.append(real(scores)), surveys[-1])[1]
    )
    read: list[int] = []
    scores = on_device(rows, range(9), Sampling(0.7), read)
    for row in (3, 0, 8, 3):
        scores.probability(row, scores.choose(row))
    assert [found.shape for found in surveys] == [(9, 4 + 2 * NEAR)] and read == []
