"""The sampler: its law, its cuts, and noise that depends on (seed, position, token) alone."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import native
from engine.sampling import (
    BITS,
    GRID,
    LARGEST,
    Part,
    choose,
    distribution,
    draws_of,
    gumbel,
    kth_largest,
    noise_key,
    noise_of,
    nucleus_floor,
    probabilities,
    reference,
    select,
    split,
    warp,
)
from engine.settings import Sampling
from tests.support.choices import KINDS, SIZES, by_core, by_law, rows_of, samplers
from tests.support.laws import p_of_counts, p_of_gumbel


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(np.float64(logits) - np.float64(logits.max()))
    return weights / weights.sum()


def slow_law(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
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
    assert law == pytest.approx(slow_law(LOGITS, sampling), rel=1e-5, abs=1e-12)
    assert law.dtype == np.float32 and law.sum() == pytest.approx(1.0)
    assert draw(LOGITS, sampling, range(2_000))[law == 0].sum() == 0


@pytest.mark.parametrize("sampling", VARIANTS)
def test_choices_over_many_positions_follow_the_softmax(sampling: Sampling) -> None:
    counts, law = draw(LOGITS, sampling, range(20_000)), slow_law(LOGITS, sampling)
    assert counts[law == 0].sum() == 0
    assert p_of_counts(counts[law > 0], 20_000 * law[law > 0]) > 1e-3


def test_the_law_test_can_fail() -> None:
    counts = draw(LOGITS, Sampling(temperature=1.0, seed=1), range(20_000))
    wrong = slow_law(LOGITS, Sampling(temperature=1.1))
    assert p_of_counts(counts, 20_000 * wrong) < 1e-6


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
        assert set(np.flatnonzero(kept)) <= set(np.flatnonzero(slow_law(logits, looser)))
        assert set(np.flatnonzero(slow_law(logits, tighter))) <= set(np.flatnonzero(kept))
    assert kept[logits.argmax()]


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.999, 0.9999999])
@pytest.mark.parametrize("size", [10, 257, 5_000, 150_000])
def test_the_nucleus_of_a_huge_flat_vocabulary(size: int, top_p: float) -> None:
    """A flat law has a nucleus far beyond the candidates that are sorted first."""
    stream = np.random.Generator(np.random.Philox(key=size))
    logits = stream.normal(0, 0.5, size).astype(np.float32)
    law = np.sort(softmax(logits))[::-1]
    mass = float(np.exp(logits - logits.max()).sum(dtype=np.float64))
    kept = int((logits >= nucleus_floor(logits, top_p * mass)).sum())
    assert law[:kept].sum() >= top_p - 1e-5
    assert kept == 1 or law[: kept - 1].sum() < top_p + 1e-5


@pytest.mark.parametrize("k", [1, 2, 20, 63, 1000])
@pytest.mark.parametrize("size", [1000, 6144, 64_001, 100_000])
def test_the_kth_largest_is_that_of_a_sorted_list(size: int, k: int) -> None:
    stream = np.random.default_rng(size + k)
    for values in (stream.normal(size=size), np.round(stream.normal(size=size)), np.ones(size)):
        row = values.astype(np.float32)
        assert kth_largest(row, k) == np.sort(row)[-k]


def test_ties_at_a_cut_are_kept() -> None:
    logits = np.float32([1, 1, 1, 0])
    kept = np.isfinite(warp(logits, Sampling(temperature=1.0, top_k=1)))
    assert kept.tolist() == [True, True, True, False]


def noise(seed: int, position: int, size: int) -> np.ndarray:
    return gumbel(seed, position, range(size))


PINNED = {
    (0, 0): [-178457, 925201, -64863, 597201],
    (5, 9): [123001, -101409, 315708, 67684],
    (2**63 - 1, 2**31): [51954, 156481, -230920, 81169],
}
"""Noise of the first four tokens of (seed, position), in steps of its grid."""
SPLITMIX = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
"""What the generator gives first from the state 0, as its authors publish it."""


def test_the_generator_is_splitmix64() -> None:
    assert tuple(split(0, number) for number in range(3)) == SPLITMIX


def test_the_noise_of_a_seed_is_this() -> None:
    """Another noise means other texts: whoever changes it says so in the changelog."""
    assert (noise(0, 0, 4) * GRID).tolist() == PINNED[0, 0]
    assert (noise(5, 9, 4) * GRID).tolist() == PINNED[5, 9]
    assert (noise(2**63 - 1, 2**31, 4) * GRID).tolist() == PINNED[2**63 - 1, 2**31]


def test_the_noise_of_a_few_tokens_is_that_of_all() -> None:
    """Also where models of one family are padded to different sizes."""
    whole = noise(5, 9, 300_000)
    for tokens in ([], [0], [299_999, 3, 3], range(100), np.arange(7, 200_000, 13)):
        found = gumbel(5, 9, tokens)
        assert found.dtype == np.float32 and (found == whole[np.int64(tokens)]).all()


@pytest.mark.parametrize("seed, position", [(0, 0), (5, 9), (2**63 - 1, 2**31)])
def test_the_compiled_noise_is_the_same(seed: int, position: int) -> None:
    tokens = np.arange(100_000)
    in_python = noise_of(draws_of(seed, position, tokens))
    assert (gumbel(seed, position, tokens) == in_python).all()
    one = [int(split(noise_key(seed, position), token)) >> (64 - BITS) for token in range(50)]
    assert (noise_of(np.uint64(one)) == in_python[:50]).all()
    assert native.core is None or np.float32(native.core.LARGEST) == LARGEST


def test_no_logarithm_rounds_the_noise_to_another_value() -> None:
    """Of all values there are, none is as near to a middle as a double's logarithm may err."""
    nearest = 1.0
    for start in range(0, 2**BITS, 2**20):
        shares = (np.arange(start, start + 2**20) + 0.5) / 2**BITS
        exact = -np.log(-np.log(shares)) * GRID
        nearest = min(nearest, float(np.abs(exact - np.floor(exact) - 0.5).min()) / GRID)
    assert nearest > 5e-13 > 100 * np.spacing(float(LARGEST))


def test_noise_grows_with_its_draw_and_ends() -> None:
    draws = np.arange(2**BITS - 2**20, 2**BITS, dtype=np.uint64)
    found = noise_of(draws)
    assert (np.diff(found) >= 0).all() and found[-1] == LARGEST
    assert float(LARGEST) == pytest.approx(-np.log(-np.log1p(-(2.0**-25))), abs=1 / GRID)
    assert np.isfinite(noise_of(np.uint64([0]))).all()


def test_neighbouring_tokens_positions_and_seeds_are_independent() -> None:
    """Correlations of ranks, and of pairs in cells, which see more than correlations do."""
    size = 100_000
    pairs = {
        "tokens": (noise(3, 7, size + 1)[1:], noise(3, 7, size)),
        "every second token": (noise(3, 7, size + 2)[2:], noise(3, 7, size)),
        "positions": (noise(3, 8, size), noise(3, 7, size)),
        "seeds": (noise(4, 7, size), noise(3, 7, size)),
        "far seeds": (noise(3 + 2**62, 7, size), noise(3, 7, size)),
        "seed and position": (noise(4, 7, size), noise(3, 8, size)),
    }
    pairs["one token over positions"] = column(1_000, lambda at: (3, at))
    pairs["one token over seeds"] = column(1_000, lambda at: (at, 3))
    for what, (left, right) in pairs.items():
        u, v = np.exp(-np.exp(-np.float64(left))), np.exp(-np.exp(-np.float64(right)))
        assert abs(np.corrcoef(u, v)[0, 1]) < 5 / np.sqrt(u.size), what
        cells = np.bincount((u * 16).astype(int) * 16 + (v * 16).astype(int), minlength=256)
        assert p_of_counts(cells, np.full(256, u.size / 256)) > 1e-4, what


def column(count: int, place: Callable[[int], tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """The noise of 20 tokens at places that follow each other, and at those one before."""
    rows = np.array([noise(*place(at), 20) for at in range(count)])
    return rows[1:].ravel(), rows[:-1].ravel()


def test_noise_follows_the_gumbel_law() -> None:
    found = np.concatenate([noise(11, at, 5_000) for at in range(4)])
    assert p_of_gumbel(found) > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 1e-60, 1e-38, 1e-5])
def test_cold_sampling_is_greedy_without_overflow(temperature: float) -> None:
    logits = np.float32([-4.0, 1e4, 1e4 - 1, 3.0])
    for position in range(50):
        assert choose(logits, Sampling(temperature=temperature, seed=position), position) == 1
    law = distribution(np.float32([1.0, 3.0, 3.0, -2.0]), Sampling(min(temperature, 1e-5)))
    assert law.tolist() == [0.0, 1.0, 0.0, 0.0], "the first of equals"
    assert choose(np.float32([3.0]), Sampling(1.0, top_k=1, top_p=0.1, min_p=0.5), 0) == 0


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.float32([-np.inf, 0, -np.inf, 0])
    drawn = {choose(logits, Sampling(temperature=2.0, seed=s), 4) for s in range(200)}
    assert drawn == {1, 3}


@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_is_the_same_with_nothing_left_out(kind: str) -> None:
    """Quickly; tests/exhaustive/test_choices.py has more rows, and devices."""
    stream = np.random.default_rng(5)
    for sampling in samplers(0.7, stream):
        size, position = int(stream.choice(SIZES)), int(stream.integers(99))
        (row,) = rows_of(kind, stream, size, 1)
        wanted = by_law(row, sampling, position)
        assert reference(row, sampling, position) == select(row, sampling, position).token == wanted
        assert by_core(row, sampling, position) in (None, wanted)


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (50, 1.0), (0, 0.9), (0, 1.0)])
def test_noise_is_computed_for_those_alone_who_can_win(
    top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Python; what is counted are hashes and logarithms, of 152,000 tokens each."""
    hashes, logarithms = [0], [0]
    stream = np.random.default_rng(3)
    usual = (stream.permutation(-1.5 * np.log(np.arange(1, 152_001)))).astype(np.float32)
    flat = stream.normal(0, 0.01, 152_000).astype(np.float32)
    sampling = Sampling(0.7, top_k, top_p, seed=2)
    wanted = [by_law(usual, sampling, position) for position in range(5)]
    monkeypatch.setattr("engine.sampling.draws_of", counted(draws_of, hashes))
    monkeypatch.setattr("engine.sampling.noise_of", counted(noise_of, logarithms))
    assert [reference(usual, sampling, position) for position in range(5)] == wanted
    assert hashes[0] < 5 * 8_000 and logarithms[0] < 5 * 150
    before = logarithms[0]
    reference(flat, Sampling(1.0), 3)
    assert logarithms[0] - before < 4_000, "all may win, and few have the draw for it"


@pytest.mark.parametrize("seed", range(20))
def test_a_token_far_below_can_win_by_its_noise(seed: int) -> None:
    found = noise(seed, 4, 100_000)
    lucky = int(found.argmax())
    row = np.full(found.size, -60, dtype=np.float32)
    row[7], row[lucky] = 0, found[7] - found[lucky] + 0.1
    assert row[lucky] < -7
    sampling = Sampling(1.0, seed=seed)
    assert reference(row, sampling, 4) == select(row, sampling, 4).token == lucky
    row[lucky] -= 0.2
    assert reference(row, sampling, 4) == select(row, sampling, 4).token == 7


def counted(function: Callable[..., np.ndarray], numbers: list[int]) -> Callable[..., np.ndarray]:
    """The function; how many numbers it gave is added up."""

    def noted(*arguments: object) -> np.ndarray:
        found = function(*arguments)
        numbers[0] += found.size
        return found

    return noted


def test_a_nucleus_that_ends_on_the_brink_is_left_to_python() -> None:
    """Where the exponentials' last digits say which tokens are in, the core says nothing."""
    row = np.log(np.float32([6, 2, 1, 1]))
    left = 0
    for seed in range(300):
        sampling = Sampling(1.0, top_p=0.8, seed=seed)
        wanted = by_law(row, sampling, 3)
        assert select(row, sampling, 3).token == reference(row, sampling, 3) == wanted
        token = by_core(row, sampling, 3)
        assert token in (None, wanted)
        left += token is None
    assert native.core is None or 0 < left < 200
    clear = [by_core(row, Sampling(1.0, top_p=0.79, seed=seed), 3) for seed in range(300)]
    assert native.core is None or (None not in clear and set(clear) == {0, 1})


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_a_row_of_no_numbers_is_left_to_python(odd: float, temperature: float) -> None:
    for place in (0, 70, 199):
        row = np.zeros(200, dtype=np.float32)
        row[place] = odd
        assert by_core(row, Sampling(temperature), 0) is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_of_a_row_makes_its_logits_probabilities(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = np.random.default_rng(6)
    rows = [row for size in SIZES for row in rows_of(kind, stream, size, 3)]
    for core in (native.core, None):
        monkeypatch.setattr(native, "core", core)
        for row in rows:
            choice = select(row, Sampling(0.7, seed=3), 5)
            shares = [choice.probability(float(logit)) for logit in row]
            np.testing.assert_allclose(shares, softmax(row), rtol=2e-6, atol=1e-12)


def test_a_part_of_a_row_says_the_choice_or_that_it_cannot() -> None:
    """In Python as compiled; the exhaustive tests go through whole rows of devices."""
    stream = np.random.default_rng(8)
    told = 0
    for sampling in samplers(0.7, stream):
        (row,) = rows_of("usual", stream, 6144, 1)
        tokens = np.sort(np.argsort(-row)[:1024])
        warped = row / np.float32(0.7)
        mass = float(np.exp(warped - warped.max()).sum(dtype=np.float64))
        part = Part(row[tokens], tokens, mass, float(row[tokens].min()))
        wanted = by_law(row, sampling, 5)
        for found in (part.select(sampling, 5), part.reference(sampling, 5)):
            assert found is None or found[0] == wanted
            told += found is not None
        if 0 < sampling.top_k < 1000 or sampling.top_p < 0.9 or sampling.min_p > 0:
            assert found is not None
    assert told > 0
    few = Part(row[tokens[:2]], tokens[:2], 0.0, float(row.max()))
    assert few.select(Sampling(0.7), 5) is few.reference(Sampling(0.7), 5) is None


def test_probabilities_are_the_softmax() -> None:
    assert probabilities(LOGITS) == pytest.approx(softmax(LOGITS), rel=1e-5)
    assert probabilities(LOGITS).dtype == np.float32
    hopeless = probabilities(np.float32([200.0, -200.0, -np.inf]))
    assert hopeless.tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-30)
