"""The largest speedup that a cost curve allows."""

import pytest

from engine.drafting.ceiling import Ceiling, ceiling, emitted

FREE = {0: 1.0, 1: 1.0, 3: 1.0, 7: 1.0}
LINEAR = {0: 1.0, 1: 2.0, 3: 4.0, 7: 8.0}


def test_a_chain_emits_what_is_accepted_and_one_token_more() -> None:
    assert emitted(0.5, 0) == 1 and emitted(0.5, 2) == 1.75
    assert emitted(0.0, 9) == 1 and emitted(1.0, 9) == 10


def test_free_nodes_allow_all_that_is_accepted() -> None:
    assert ceiling(FREE, 0.5) == Ceiling(emitted(0.5, 7), 7)
    assert ceiling(FREE, 1.0) == Ceiling(8.0, 7)


def test_nodes_that_cost_a_forward_each_allow_nothing() -> None:
    for acceptance in (0.0, 0.6, 0.99, 1.0):
        assert ceiling(LINEAR, acceptance) == Ceiling(1.0, 0)


def test_the_best_size_lies_where_the_ratio_is_largest() -> None:
    curve = {0: 10.0, 1: 15.0, 3: 20.0, 7: 60.0}
    found = ceiling(curve, 0.8)
    assert found.nodes == 3 and found.speedup == pytest.approx((1 + 0.8 + 0.64 + 0.512) / 2)
    assert ceiling(curve, 0.3) == Ceiling(1.0, 0), "three quarters are lost at 7, a tenth at 1"
