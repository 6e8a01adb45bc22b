"""Calibration: trust becomes what the target bears out, follows it, and outlives the program."""

import random
from collections.abc import Sequence
from math import inf, nan
from typing import Any

import pytest

from engine.drafting.budget import Budget
from engine.drafting.calibration import MEMORY, PRIORS, Calibration
from engine.drafting.hierarchy import Hierarchy
from engine.drafting.tiers import ContextTier, ModelTier
from engine.settings import Drafting
from engine.tree import Tree
from engine.types import CONTEXT, MODEL, STATISTICS, CalibrationRow, Followers
from tests.support.tiers import Noting, Said, markov, sure


def trust(calibration: Calibration, tier: str, length: int, followers: Followers) -> float:
    return calibration.weights[tier][length - 1].values[followers.strength]


def teach(hierarchy: Hierarchy, tokens: Sequence[int]) -> None:
    """The target said these tokens, one per step that something was drafted for."""
    budget = Budget(Drafting(nodes=1, budget="fixed"), 1, 1000)
    for token in tokens:
        hierarchy.grow(Tree(0), [0], budget)
        hierarchy.observe([0, token], 1)


def test_an_answer_begins_without_a_row_for_what_was_never_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are thousands of such values, and each answer asks for the rows before it begins."""
    calibration = Calibration()
    teach(Hierarchy([Said(MODEL, sure(7))], calibration), [7, 7, 8])
    calibration.with_head().weights[MODEL][0].learn(3, 1.0, 0.5)
    made: list[CalibrationRow] = []

    def counted(*values: Any) -> CalibrationRow:
        made.append(CalibrationRow(*values))
        return made[-1]

    expected = calibration.rows()
    monkeypatch.setattr("engine.drafting.calibration.CalibrationRow", counted)
    assert calibration.rows() == expected
    assert len(made) == len(expected) > 3


def drawn(law: dict[int, float], count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(list(law), list(law.values()), k=count)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("tier", PRIORS)
def test_trust_becomes_the_share_that_was_right(tier: str, share: float) -> None:
    calibration, followers = Calibration(), sure(7)
    hierarchy = Hierarchy([Said(tier, followers)], calibration)
    teach(hierarchy, drawn({7: share, 8: 1 - share}, 1500))
    assert trust(calibration, tier, 1, followers) == pytest.approx(share, abs=0.04)


def test_trust_follows_a_change_of_subject() -> None:
    """However long it was right before, what it was worth then fades."""
    calibration, followers = Calibration(), sure(7)
    hierarchy = Hierarchy([Said(MODEL, followers)], calibration)
    teach(hierarchy, [7] * int(5 * MEMORY))
    assert trust(calibration, MODEL, 1, followers) > 0.95
    teach(hierarchy, [8] * int(MEMORY))
    assert trust(calibration, MODEL, 1, followers) < 0.6
    teach(hierarchy, [8] * int(2 * MEMORY))
    assert trust(calibration, MODEL, 1, followers) < 0.2


def predicted(hierarchy: Hierarchy, tokens: Sequence[int], depth: int = 1) -> Noting:
    budget = Noting(128, depth)
    hierarchy.grow(Tree(tokens[-1]), tokens, budget)
    return budget


@pytest.mark.parametrize("past", [False, True], ids=["context", "context and model"])
def test_what_is_predicted_is_what_is_accepted(past: bool) -> None:
    """On a text of known laws, the nodes' probabilities add up to the tokens they yield."""
    text, tiers = markov(6000), [ContextTier(), ModelTier()]
    if past:
        for seed in range(1, 4):
            tiers[1].finish(markov(300, seed=seed), 299)
    hierarchy = Hierarchy(tiers[: 1 + past], Calibration())
    tokens, said, yielded = text[:20], 0.0, 0
    hierarchy.observe(tokens, len(tokens))
    while len(tokens) < len(text) - 20:
        budget, tree, at = Noting(12, 12, 0.02), Tree(tokens[-1]), len(tokens)
        hierarchy.grow(tree, tokens, budget)
        _, emitted = tree.walk(lambda row: text[at + tree.depths[row]])  # noqa: B023
        tokens += emitted
        if at > 1500:
            said += 1 + sum(budget.noted)
            yielded += len(emitted)
        hierarchy.observe(tokens, len(emitted))
    assert yielded > 1000
    assert said / yielded == pytest.approx(1.0, abs=0.1)


def learned() -> Calibration:
    calibration = Calibration()
    tiers = [Said(CONTEXT, sure(7), sure(8, 2)), Said(MODEL, sure(8)), Said(STATISTICS, sure(9))]
    hierarchy = Hierarchy(tiers, calibration)
    for token in drawn({7: 0.5, 8: 0.3, 9: 0.2}, 300):
        predicted(hierarchy, [0])
        hierarchy.observe([0, token], 1)
    return calibration


def test_rows_bring_back_what_was_learned() -> None:
    calibration = learned()
    rows = calibration.rows()
    again = Calibration(rows)
    assert again.rows() == rows and {CONTEXT, MODEL, STATISTICS} <= {row.tier for row in rows}
    tiers = [Said(CONTEXT, sure(7), sure(8, 2)), Said(MODEL, sure(8))]
    left, right = (predicted(Hierarchy(tiers, c), [0], 3).noted for c in (calibration, again))
    assert left == right != predicted(Hierarchy(tiers, Calibration()), [0], 3).noted
    assert Calibration().rows() == [] == Calibration([]).rows()


def test_damaged_rows_say_nothing() -> None:
    good = learned().rows()
    kinds = sorted({row.tier for row in good})
    bad = [
        CalibrationRow("nowhere", 1, 0, 9.0, 3.0),
        CalibrationRow("harvest", 1, 0, 9.0, 3.0),
        CalibrationRow("harvest:rank", 1, 0, 9.0, 3.0),
        CalibrationRow("", 1, 0, 9.0, 3.0),
        *(CalibrationRow(tier, size, 0, 9.0, 3.0) for tier in kinds for size in (-1, 12, 10**9)),
        *(CalibrationRow(tier, 1, kind, 9.0, 3.0) for tier in kinds for kind in (-1, 10**6)),
        *(
            CalibrationRow(tier, 1, 0, reached, trusted)
            for tier in kinds
            for reached, trusted in [
                (-9.0, -10.0), (9.0, -1.0), (nan, 1.0), (9.0, nan), (nan, nan), (inf, 1.0),
                (inf, inf), (9.0, inf), (-inf, 0.0),
            ]
        ),
        *(CalibrationRow(tier, 1, 0, 3.0, 9.0) for tier in PRIORS),
    ]  # fmt: skip
    for row in bad:
        assert Calibration([*good, row]).rows() == good, row
