"""When a head counts as broken, and when it is merely unlucky."""

import numpy as np
import pytest

from engine.drafting.head_record import ENOUGH, HeadRecord, broken_head, unlikely


def recorded(claims: np.ndarray, held: np.ndarray) -> HeadRecord:
    """The record of these guesses, which stops where the head is found to be broken."""
    record = HeadRecord()
    for chance, right in zip(claims.tolist(), held.tolist(), strict=True):
        record.add(chance, right)
        if record.broken:
            break
    return record


@pytest.mark.parametrize("chance", [0.0, 1e-4, 0.01])
@pytest.mark.parametrize("claim", [0.15, 0.33, 0.6, 0.95])
def test_a_head_whose_guesses_hold_by_chance_is_broken(claim: float, chance: float) -> None:
    random = np.random.default_rng(3)
    record = recorded(
        random.uniform(0, 2 * claim, 1_000).clip(max=1.0), random.random(1_000) < chance
    )
    assert record.broken and not record.suspect
    assert 27 < record.claimed < 60 and record.guesses < 400
    assert broken_head(record).startswith(f"not used: {record.held} of its {record.guesses} ")


@pytest.mark.parametrize("claim", [0.02, 0.05, 0.1, 0.3, 0.8])
@pytest.mark.parametrize("surer", [1.0, 1.5])
def test_a_good_head_on_a_hard_text_is_never_broken(claim: float, surer: float) -> None:
    """Few of its guesses hold, but it claims little; it may be surer than it should be."""
    random = np.random.default_rng(5)
    for _ in range(50):
        chances = random.uniform(0, 2 * claim, 2_000).clip(max=1.0)
        record = recorded((surer * chances).clip(max=1.0), random.random(2_000) < chances)
        assert record.guesses == 2_000 and broken_head(record) == ""


def test_a_head_that_claims_little_cannot_be_judged() -> None:
    record = recorded(np.full(1_000, 0.02), np.zeros(1_000, dtype=bool))
    assert record.guesses == 1_000 and not record.broken


def test_a_head_is_suspect_only_while_it_may_still_be_found_broken() -> None:
    assert not HeadRecord().suspect and not HeadRecord(3, 0, 1.9).suspect
    assert HeadRecord(4, 0, 2.1).suspect and not HeadRecord(4, 1, 2.1).suspect
    assert HeadRecord(ENOUGH - 1, 0, 20.0).suspect and not HeadRecord(ENOUGH, 0, 20.0).suspect
    assert not HeadRecord(100, 0, 60.0).suspect, "it is broken"


def test_the_bound_is_one() -> None:
    """Against the exact law of a sum of independent events."""
    random = np.random.default_rng(7)
    chances = random.uniform(0, 0.3, 60)
    law = np.ones(1)
    for chance in chances:
        law = np.convolve(law, (1 - chance, chance))
    for seen in range(round(float(chances.sum()))):
        assert law[: seen + 1].sum() <= unlikely(seen, float(chances.sum()))
    assert unlikely(0, 2.0) == pytest.approx(np.exp(-2.0))
