"""Scores over logits: a row is read once, and what comes of it is computed once."""

import numpy as np
import pytest

from engine.backends.base import LogitScores
from engine.sampling import Floats, choose, distribution, probabilities, select
from engine.settings import Sampling

ROWS = np.random.default_rng(1).normal(0, 2, (3, 500)).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_is_read_and_chosen_from_once(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, selected = list[int](), list[int]()

    def whole(row: int) -> Floats:
        read.append(row)
        return ROWS[row]

    sampling = Sampling(temperature, seed=5)
    scores = LogitScores(whole, [4, 5, 6], sampling)
    assert read == []
    monkeypatch.setattr(
        "engine.backends.base.select",
        lambda row, own, at: (selected.append(at), select(row, own, at))[1],
    )
    for _ in range(3):
        for row in (2, 0):
            token = scores.choose(row)
            assert token == choose(ROWS[row], sampling, 4 + row)
            shares = probabilities(ROWS[row])
            assert scores.probability(row, token) == pytest.approx(shares[token], rel=1e-5)
            assert scores.probability(row, 7) == pytest.approx(shares[7], rel=1e-5)
            assert (scores.distribution(row) == distribution(ROWS[row], sampling)).all()
    assert scores.known(0, 7) == scores.probability(0, 7) and scores.known(1, 7) == 0.0
    assert read == [2, 0] and selected == [6, 4]


@pytest.mark.parametrize("count", [0, 1, 5, 500, 900])
def test_the_likeliest_tokens_come_in_falling_order(count: int) -> None:
    scores = LogitScores(lambda row: ROWS[row], [4, 5, 6], Sampling(0.7, top_k=3))
    shares = probabilities(ROWS[1])
    found = scores.likeliest(1, count)
    assert [token for token, _ in found] == np.argsort(-shares, kind="stable")[:count].tolist()
    assert [share for _, share in found] == pytest.approx(
        [float(shares[token]) for token, _ in found], rel=1e-5
    )
