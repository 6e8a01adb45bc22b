"""Calibration: trust becomes what the target bears out, follows it, and outlives the program."""

import random
from collections.abc import Sequence
from math import inf, nan

import pytest

from engine.drafting.budget import Budget
from engine.drafting.calibration import LONGEST, MEMORY, PRIORS, Calibration
from engine.drafting.context import ContextTier
from engine.drafting.hierarchy import Hierarchy
from engine.drafting.model import ModelTier
from engine.settings import Drafting
from engine.tree import Tree
from engine.types import CONTEXT, MODEL, STATISTICS, STRENGTHS, CalibrationRow, Followers


class Said:
    """A tier that always says the same."""

    def __init__(self, name: str, *matches: Followers) -> None:
        self.name = self.source = name
        self.said = matches

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        return self.said

    def unigrams(self) -> Followers | None:
        return None

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Nothing to learn."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Nothing to learn."""


def sure(token: int, times: int = 50) -> Followers:
    return Followers(times, 1, {token: times})


def trust(calibration: Calibration, tier: str, length: int, followers: Followers) -> float:
    return calibration.weights[tier][length - 1].values[followers.strength]


def teach(hierarchy: Hierarchy, tokens: Sequence[int]) -> None:
    """The target said these tokens, one per step that something was drafted for."""
    budget = Budget(Drafting(nodes=1, budget="fixed"), 1, 1000)
    for token in tokens:
        hierarchy.grow(Tree(0), [0], budget)
        hierarchy.observe([0, token], 1)


def drawn(law: dict[int, float], count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(list(law), list(law.values()), k=count)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("tier", PRIORS)
def test_trust_becomes_the_share_that_was_right(tier: str, share: float) -> None:
    calibration, followers = Calibration(), sure(7)
    hierarchy = Hierarchy([Said(tier, followers)], calibration)
    teach(hierarchy, drawn({7: share, 8: 1 - share}, 1500))
    assert trust(calibration, tier, 1, followers) == pytest.approx(share, abs=0.04)


def test_a_longer_match_is_asked_first_and_the_shorter_one_about_the_rest() -> None:
    """The long one is right 60 times in a hundred, the short one 30 times of the other 40."""
    calibration, long, short = Calibration(), sure(7), sure(8, 60)
    hierarchy = Hierarchy([Said(CONTEXT, short, long)], calibration)
    teach(hierarchy, drawn({7: 0.6, 8: 0.3, 9: 0.1}, 1900))
    assert trust(calibration, CONTEXT, 2, long) == pytest.approx(0.6, abs=0.04)
    assert trust(calibration, CONTEXT, 1, short) == pytest.approx(0.75, abs=0.06)


def test_of_equal_matches_the_tier_of_the_highest_locality_is_asked_first() -> None:
    calibration, high, low = Calibration(), sure(7), sure(8)
    hierarchy = Hierarchy([Said(CONTEXT, high), Said(STATISTICS, low)], calibration)
    teach(hierarchy, drawn({7: 0.5, 8: 0.5}, 1900))
    assert trust(calibration, CONTEXT, 1, high) == pytest.approx(0.5, abs=0.04)
    assert trust(calibration, STATISTICS, 1, low) > 0.9


def test_each_strength_has_a_trust_of_its_own() -> None:
    calibration, weak, strong = Calibration(), sure(7, 1), sure(7, 300)
    assert trust(calibration, CONTEXT, 1, weak) < trust(calibration, CONTEXT, 1, strong)
    before = trust(calibration, CONTEXT, 1, strong)
    teach(Hierarchy([Said(CONTEXT, weak)], calibration), [8] * 500)
    assert trust(calibration, CONTEXT, 1, weak) < 0.1
    assert trust(calibration, CONTEXT, 1, strong) == before


def test_a_few_observations_do_not_overrule_what_was_known_before() -> None:
    calibration, followers = Calibration(), sure(7)
    before = trust(calibration, CONTEXT, 4, followers)
    chain = Hierarchy([Said(CONTEXT, *[followers] * 4)], calibration)
    teach(chain, [8, 8])
    assert 0.8 * before < trust(calibration, CONTEXT, 4, followers) < before


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


def test_before_anything_is_learned_more_occurrences_and_agreement_are_trusted_more() -> None:
    calibration = Calibration()
    for tier in PRIORS:
        for length in range(1, LONGEST + 1):
            values = calibration.weights[tier][length - 1].values
            assert len(values) == STRENGTHS and all(0.0 < value < 1.0 for value in values)
            few, many = (
                trust(calibration, tier, length, Followers(total, 1, {})) for total in (1, 300)
            )
            assert few < many
            agreeing, scattered = (
                trust(calibration, tier, length, Followers(300, n, {})) for n in (2, 290)
            )
            assert scattered <= agreeing


class Noting(Budget):
    """A budget that notes the probability of every node that is added."""

    def __init__(self, drafting: Drafting, depth: int) -> None:
        super().__init__(drafting, depth, 1000)
        self.noted: list[float] = []

    def added(self, size: int, probability: float) -> None:
        super().added(size, probability)
        self.noted.append(probability)


def predicted(hierarchy: Hierarchy, tokens: Sequence[int], depth: int = 1) -> Noting:
    budget = Noting(Drafting(nodes=128, threshold=0.0, budget="fixed"), depth)
    hierarchy.grow(Tree(tokens[-1]), tokens, budget)
    return budget


def test_no_prediction_exceeds_certainty_before_it_is_scaled() -> None:
    draw = random.Random(3)
    for _ in range(200):
        tiers = []
        for name in (CONTEXT, MODEL, STATISTICS):
            said = []
            for _ in range(draw.randrange(4)):
                counts = {draw.randrange(9): draw.randrange(1, 99) for _ in range(5)}
                said.append(Followers(sum(counts.values()) + draw.randrange(9), 5, dict(counts)))
            tiers.append(Said(name, *said))
        noted = predicted(Hierarchy(tiers, Calibration()), [1, 2]).noted
        assert sum(noted) <= 1.0 + 1e-9 and all(share >= 0 for share in noted)


def markov(tokens: int, symbols: int = 12, seed: int = 0) -> list[int]:
    """A text in which the next token depends on the last one, a few of them likely."""
    draw = random.Random(seed)
    laws = {
        token: (draw.sample(range(symbols), 4), [0.5, 0.25, 0.15, 0.1]) for token in range(symbols)
    }
    text = [0]
    while len(text) < tokens:
        text += draw.choices(*laws[text[-1]])
    return text


@pytest.mark.parametrize("past", [False, True], ids=["context", "context and model"])
def test_what_is_predicted_is_what_is_accepted(past: bool) -> None:
    """On a text of known laws, the nodes' probabilities add up to the tokens they yield."""
    text, tiers = markov(6000), [ContextTier(), ModelTier()]
    if past:
        for seed in range(1, 4):
            tiers[1].finish(markov(300, seed=seed), 299)
    hierarchy = Hierarchy(tiers[: 1 + past], Calibration())
    drafting = Drafting(nodes=12, budget="fixed", threshold=0.02)
    tokens, said, yielded = text[:20], 0.0, 0
    hierarchy.observe(tokens, len(tokens))
    while len(tokens) < len(text) - 20:
        budget, tree, at = Noting(drafting, 12), Tree(tokens[-1]), len(tokens)
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
        *(CalibrationRow(tier, size, 0, 9.0, 3.0) for tier in kinds for size in (-1, 9, 10**9)),
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


def test_rows_of_a_longer_memory_are_taken_as_they_are_worth() -> None:
    row = CalibrationRow(CONTEXT, 1, 0, 100 * MEMORY, 25 * MEMORY)
    value = Calibration([row]).weights[CONTEXT][0].values[0]
    assert value == pytest.approx(0.25, abs=0.01)
