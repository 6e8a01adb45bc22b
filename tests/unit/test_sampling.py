"""The sampler: its law, its cuts, and noise that depends on (seed, position) alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import (
    Noise,
    choose,
    distribution,
    gumbel,
    nucleus_floor,
    probabilities,
    warp,
)
from engine.settings import Sampling
from tests.support.laws import p_of_counts, p_of_gumbel


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(np.float64(logits) - np.float64(logits.max()))
    return weights / weights.sum()


def reference(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The sampler's law, written down the slow way: every cut on a sorted list of tokens."""
    scaled = np.float64(logits) / sampling.temperature
    order = [int(i) for i in np.argsort(-scaled, kind="stable")]
    kept = set(order[: sampling.top_k] if sampling.top_k else order)
    if sampling.top_p < 1:
        law = {i: np.exp(scaled[i] - scaled.max()) for i in kept}
        total, mass, nucleus = sum(law.values()), 0.0, set()
        for token in order:
            if token in kept:
                nucleus.add(token)
                mass += law[token]
                if mass >= sampling.top_p * total:
                    break
        kept &= nucleus
    best = softmax(scaled).max()
    kept = {i for i in kept if softmax(scaled)[i] >= sampling.min_p * best}
    return softmax(np.array([x if i in kept else -np.inf for i, x in enumerate(scaled)]))


def draw(logits: np.ndarray, sampling: Sampling, positions: range) -> np.ndarray:
    counts = np.zeros(len(logits), dtype=int)
    for position in positions:
        counts[choose(logits, sampling, position)] += 1
    return counts


LOGITS = np.float32([2.0, 1.5, 1.0, 0.0, -0.5, 1.9, -3.0, 0.7])
VARIANTS = [
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.5, seed=2),
    Sampling(temperature=2.0, seed=3),
    Sampling(temperature=1.0, top_k=3, seed=4),
    Sampling(temperature=1.2, top_p=0.8, seed=5),
    Sampling(temperature=1.0, min_p=0.3, seed=6),
    Sampling(temperature=1.5, top_k=6, top_p=0.9, min_p=0.05, seed=7),
]


@pytest.mark.parametrize("sampling", VARIANTS)
def test_the_distribution_is_the_law_that_is_sampled_from(sampling: Sampling) -> None:
    law = distribution(LOGITS, sampling)
    assert law == pytest.approx(reference(LOGITS, sampling), rel=1e-5, abs=1e-12)
    assert law.dtype == np.float32 and law.sum() == pytest.approx(1.0)
    assert draw(LOGITS, sampling, range(2_000))[law == 0].sum() == 0


@pytest.mark.parametrize("temperature", [0.0, 1e-60, 1e-5])
def test_the_distribution_of_a_cold_sampler_is_certain(temperature: float) -> None:
    law = distribution(np.float32([1.0, 3.0, 3.0, -2.0]), Sampling(temperature))
    assert law.tolist() == [0.0, 1.0, 0.0, 0.0] and law.dtype == np.float32


@pytest.mark.parametrize("sampling", VARIANTS)
def test_choices_over_many_positions_follow_the_softmax(sampling: Sampling) -> None:
    counts, law = draw(LOGITS, sampling, range(20_000)), reference(LOGITS, sampling)
    assert counts[law == 0].sum() == 0
    assert p_of_counts(counts[law > 0], 20_000 * law[law > 0]) > 1e-3


def test_the_law_test_can_fail() -> None:
    counts = draw(LOGITS, Sampling(temperature=1.0, seed=1), range(20_000))
    wrong = reference(LOGITS, Sampling(temperature=1.1))
    assert p_of_counts(counts, 20_000 * wrong) < 1e-6


def test_choices_over_many_seeds_follow_the_softmax() -> None:
    counts = np.zeros(len(LOGITS), dtype=int)
    for seed in range(10_000):
        counts[choose(LOGITS, Sampling(temperature=1.0, seed=seed), 17)] += 1
    law = softmax(LOGITS)
    assert p_of_counts(counts, 10_000 * law) > 1e-3


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40, unique=True),
    st.floats(0.1, 2.0),
    st.integers(0, 50),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
)
def test_cuts_keep_what_the_slow_reference_keeps(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    warped = warp(np.float32(values), sampling)
    kept = np.isfinite(warped)
    looser = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=min(1.0, top_p * (1 + 1e-4) + 1e-6),
        min_p=min_p * (1 - 1e-4),
    )
    tighter = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=max(0.0, top_p * (1 - 1e-4) - 1e-6) if top_p < 1 else 1.0,
        min_p=min(1.0, min_p * (1 + 1e-4)),
    )
    # Single precision may decide a cut on the brink either way; nothing else may differ.
    logits = np.float32(values)
    close = np.abs(logits[:, None] - logits[None, :]) < 1e-4
    if close.sum() == len(values):
        assert set(np.flatnonzero(kept)) <= set(np.flatnonzero(reference(logits, looser)))
        assert set(np.flatnonzero(reference(logits, tighter))) <= set(np.flatnonzero(kept))
    assert kept[logits.argmax()]


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.999, 0.9999999])
@pytest.mark.parametrize("size", [10, 257, 5_000, 150_000])
def test_the_nucleus_of_a_huge_flat_vocabulary(size: int, top_p: float) -> None:
    """A flat law has a nucleus far beyond the candidates that are sorted first."""
    stream = np.random.Generator(np.random.Philox(key=size))
    logits = stream.normal(0, 0.5, size).astype(np.float32)
    law = np.sort(softmax(logits))[::-1]
    kept = int((logits >= nucleus_floor(logits, top_p)).sum())
    assert law[:kept].sum() >= top_p - 1e-5
    assert kept == 1 or law[: kept - 1].sum() < top_p + 1e-5


def test_ties_at_a_cut_are_kept() -> None:
    logits = np.float32([1, 1, 1, 0])
    kept = np.isfinite(warp(logits, Sampling(temperature=1.0, top_k=1)))
    assert kept.tolist() == [True, True, True, False]


def test_warping_leaves_the_logits_alone() -> None:
    logits = LOGITS.copy()
    choose(logits, Sampling(temperature=0.7, top_k=2, top_p=0.5, min_p=0.1), 3)
    assert (logits == LOGITS).all()


def test_noise_depends_on_seed_and_position_only() -> None:
    first = gumbel(5, 9, 100).copy()
    for other in range(200):  # more than the cache holds
        gumbel(5, 10 + other, 100)
    assert (gumbel(5, 9, 100) == first).all()
    assert (gumbel(6, 9, 100) != first).mean() > 0.99
    assert (gumbel(5, 10, 100) != first).mean() > 0.99
    with pytest.raises(ValueError, match="read-only"):
        gumbel(5, 9, 100)[0] = 0.0


def test_noise_of_a_smaller_vocabulary_is_the_beginning_of_the_same() -> None:
    """Models of one family may be padded to different sizes; their choices stay comparable."""
    for size in (1, 100, 255):
        assert (gumbel(5, 9, size) == gumbel(5, 9, 256)[:size]).all()


def test_noise_of_different_positions_and_seeds_is_independent() -> None:
    rows = np.array([gumbel(seed, at, 400) for seed in range(4) for at in range(10)])
    correlations = np.corrcoef(rows)[np.triu_indices(len(rows), 1)]
    assert abs(correlations).max() < 5 / np.sqrt(400)
    flat = np.array([gumbel(3, at, 1)[0] for at in range(3_000)])
    assert abs(np.corrcoef(flat[1:], flat[:-1])[0, 1]) < 5 / np.sqrt(3_000)


@pytest.mark.parametrize("size", [1, 256, 262_144])
def test_noise_is_kept_within_its_bytes_whatever_the_vocabulary(size: int) -> None:
    """128 positions of the largest vocabularies took 134 MB."""
    kept = Noise(32 << 20)
    for position in range(200):
        noise = kept(3, position, size)
        assert kept(3, position, size) is noise, "drawn once"
    held = sum(array.nbytes for array in kept.kept.values())
    assert held == kept.bytes <= 32 << 20
    assert len(kept.kept) == min(128, (32 << 20) // (4 * size))
    small = Noise(1)
    assert (small(3, 9, size) == kept(3, 9, size)).all()
    small(3, 10, size)
    assert list(small.kept) == [(3, 10, size)], "the last one stays"
    kept.cache_clear()
    assert kept.bytes == 0 and not kept.kept


def test_noise_follows_the_gumbel_law() -> None:
    noise = np.concatenate([gumbel(11, at, 5_000) for at in range(4)])
    assert p_of_gumbel(noise) > 1e-3


def test_noise_has_no_outliers_that_win_whatever_the_logits() -> None:
    """Single-precision draws are exactly zero once in 2**23, and would have noise of 87.

    The largest of n honest draws is log(n) + a few: with a vocabulary of 150,000 the zeros would
    put a random token into about one of a hundred positions.
    """
    largest = max(float(gumbel(0, position, 1 << 20).max()) for position in range(60))
    assert np.log(60 * (1 << 20)) - 3 < largest < np.log(60 * (1 << 20)) + 12


@pytest.mark.parametrize("temperature", [0.0, 1e-60, 1e-38, 1e-5])
def test_cold_sampling_is_greedy_without_overflow(temperature: float) -> None:
    logits = np.float32([-4.0, 1e4, 1e4 - 1, 3.0])
    for position in range(50):
        assert choose(logits, Sampling(temperature=temperature, seed=position), position) == 1


def test_greedy_takes_the_first_of_equals() -> None:
    assert choose(np.float32([0, 2, 2]), Sampling(temperature=0.0), 0) == 1


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.float32([-np.inf, 0, -np.inf, 0])
    drawn = {choose(logits, Sampling(temperature=2.0, seed=s), 4) for s in range(200)}
    assert drawn == {1, 3}


def test_a_vocabulary_of_one() -> None:
    sampling = Sampling(temperature=1.0, top_k=1, top_p=0.1, min_p=0.5)
    assert choose(np.float32([3.0]), sampling, 0) == 0


def test_the_largest_seed_and_position_work() -> None:
    assert 0 <= choose(LOGITS, Sampling(temperature=1.0, seed=2**63 - 1), 2**31) < len(LOGITS)


def test_probabilities_are_the_softmax() -> None:
    assert probabilities(LOGITS) == pytest.approx(softmax(LOGITS), rel=1e-5)
    assert probabilities(LOGITS).dtype == np.float32


def test_the_probability_of_a_hopeless_token_is_zero_without_a_warning() -> None:
    law = probabilities(np.float32([200.0, -200.0, -np.inf]))
    assert law.tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-30)
