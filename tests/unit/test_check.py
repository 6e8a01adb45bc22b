"""The check of a loaded model: trees, else chains, else plain decoding, else a refusal."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.backends.base import Filled, LogitScores, common_prefix
from engine.backends.check import check, difference, resumes
from engine.errors import ModelError
from engine.sampling import Floats
from engine.settings import Sampling
from engine.tree import Tree
from tests.support.toy import ToyBackend

SIZE = 50


def true_logits(tokens: Sequence[int]) -> Floats:
    """What a made-up model says after a text: it depends on every token and its place."""
    draw = np.random.default_rng([*tokens, len(tokens)])
    return draw.standard_normal(SIZE).astype(np.float32)


class Made:
    """A model with a cache and with faults: `seen(cache, tree, row)` is the text a row sees."""

    def __init__(self, seen: Callable[[list[int], Tree, int], list[int]], error: float = 0.0):
        self.info = replace(ToyBackend(name="made").info, vocabulary_size=SIZE)
        self.seen, self.error = seen, error
        self.cache: list[int] = []
        self.tree = Tree(0)
        self.resets = 0

    def reset(self) -> None:
        self.cache, self.resets = [], self.resets + 1

    def prefill(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> Filled:
        reused = common_prefix(self.cache, tokens[:-1])
        self.cache = list(tokens[:-1])
        return Filled(reused, True)

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        self.tree = tree
        rows = [true_logits(self.seen(self.cache, tree, row)) for row in range(len(tree) + 1)]
        noisy = [row + np.float32(self.error) for row in rows]
        return LogitScores(noisy.__getitem__, [0] * len(rows), sampling)

    def depth_limit(self, length: int) -> int | None:
        return None

    def accept(self, rows: Sequence[int]) -> None:
        self.cache += [self.tree.tokens[row] for row in (0, *rows)]


def sound(cache: list[int], tree: Tree, row: int) -> list[int]:
    return [*cache, tree.tokens[0], *tree.path(row)]


def siblings(cache: list[int], tree: Tree, row: int) -> list[int]:
    """Every row sees all rows before it."""
    return [*cache, *tree.tokens[: row + 1]]


def root_only(cache: list[int], tree: Tree, row: int) -> list[int]:
    """A row sees nothing of the tree but itself."""
    return [*cache, tree.tokens[row]]


def forgetful(cache: list[int], tree: Tree, row: int) -> list[int]:
    """What was read some time ago is gone."""
    return [*cache[-3:], tree.tokens[row]]


def refusing(cache: list[int], tree: Tree, row: int) -> list[int]:
    if len(tree) > 0:
        raise ValueError("only 2-D masks here.\nand a long explanation")
    return sound(cache, tree, row)


def branching_refused(cache: list[int], tree: Tree, row: int) -> list[int]:
    if any(len(children) > 1 for children in tree.children):
        raise RuntimeError("coupled sequences")
    return sound(cache, tree, row)


def checked(made: Made, allowed: float = 1e-3) -> Any:
    return check(made, true_logits, allowed)


def test_a_sound_model_is_as_it_says() -> None:
    made = Made(sound)
    assert checked(made) is made.info and made.info.leaves is None and made.info.note == ""
    assert made.cache == [] and made.resets > 0, "the check leaves nothing behind"


@pytest.mark.parametrize(
    ("seen", "why"), [(siblings, "is off by "), (branching_refused, "fails (coupled sequences)")]
)
def test_one_that_branches_wrongly_verifies_chains(
    seen: Callable[..., list[int]], why: str
) -> None:
    made = Made(seen)
    info = checked(made)
    assert info.can_tree and info.leaves == 1 and made.cache == []
    assert info.note.startswith(f"made verifies chains, not trees: its tree forward {why}")
    assert info.note.endswith(".") and not info.note.endswith("..")


@pytest.mark.parametrize(
    ("seen", "why"), [(root_only, "is off by "), (refusing, "fails (only 2-D masks here).")]
)
def test_one_that_gets_chains_wrong_as_well_decodes_plainly(
    seen: Callable[..., list[int]], why: str
) -> None:
    made = Made(seen)
    info = checked(made)
    assert not info.can_tree and made.cache == [] and "\n" not in info.note
    assert info.note.startswith(f"made decodes plainly: its tree forward {why}")
    assert not made.info.can_tree, "while it is checked, it knows that already"


class Losing(Made):
    """The last accepted row is not kept."""

    def accept(self, rows: Sequence[int]) -> None:
        super().accept(rows[:-1])


def test_one_that_does_not_keep_what_was_accepted_decodes_plainly() -> None:
    info = checked(Losing(sound))
    assert not info.can_tree and "its tree forward is off by " in info.note


def test_one_that_says_so_itself_is_only_checked_for_plain_decoding() -> None:
    made = Made(refusing)
    made.info = replace(made.info, can_tree=False, note="made decodes plainly: it keeps a state.")
    assert checked(made) is made.info


@pytest.mark.parametrize("can_tree", [True, False])
def test_one_that_even_decodes_plainly_wrong_is_refused(can_tree: bool) -> None:
    made = Made(forgetful)
    made.info = replace(made.info, can_tree=can_tree)
    with pytest.raises(ModelError) as caught:
        checked(made)
    text = str(caught.value)
    assert text.startswith("made cannot be used: decoding with its cache is off by ")
    assert text.endswith("architecture; download this one again if it is damaged.")


@pytest.mark.parametrize("error", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_noticed(error: float) -> None:
    """Any comparison with nan is false, and the largest of it and 0 may be 0."""
    made = Made(sound, error)
    with pytest.raises(
        ModelError, match="decoding with its cache (gives no numbers|is off by inf)"
    ):
        checked(made)


LEVELS = 3


class Undoing(Made):
    """Verifies chains of LEVELS, as a state holds one text at once. What it holds is spoilt once
    `fault` has happened."""

    def __init__(self, fault: str) -> None:
        super().__init__(sound)
        self.info = replace(self.info, leaves=1)
        self.fault, self.spoilt, self.open, self.undone = fault, False, False, 0

    def depth_limit(self, length: int) -> int | None:
        return LEVELS

    def reset(self) -> None:
        super().reset()
        self.spoilt = self.open = False
        self.undone = 0

    def prefill(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> Filled:
        stopped = any(cancelled() for _ in range(9))
        shorter = common_prefix(self.cache, tokens[:-1]) < len(self.cache)
        happened = {"open": self.open, "stopped": stopped, "shorter": shorter}
        self.spoilt |= happened.get(self.fault, False)
        self.open = False
        return super().prefill(tokens, cancelled)

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        self.open, right = True, self.cache
        self.cache = [0, *right] if self.spoilt else right
        scores = super().score(tree, sampling)
        self.cache = right
        return scores

    def accept(self, rows: Sequence[int]) -> None:
        back = len(self.tree) > len(rows)
        self.undone = self.undone + 1 if back else 0
        long = len(self.tree) > LEVELS
        happened = {"rejected": back, "long": back and long, "again": self.undone > 1}
        self.spoilt |= happened.get(self.fault, False)
        self.open = False
        super().accept(rows)


@pytest.mark.parametrize("fault", ["", "rejected", "long", "again", "open", "stopped", "shorter"])
def test_the_way_back_from_a_chain_is_tried(fault: str) -> None:
    """A state cannot be shortened as keys and values can: every way to undo one is tried."""
    made = Undoing(fault)
    info = checked(made)
    assert info.can_tree is (not fault) and made.cache == []
    assert not fault or info.note.startswith("made decodes plainly: its ")
    # One that is told to be wrong as a chain is, as a forward of several rows is the first.
    way = "chain forward" if fault == "rejected" else "way back from a chain"
    assert not fault or f"its {way} is off by" in info.note


def test_one_row_that_is_no_number_is_enough() -> None:
    """In the middle of a tree, with sound rows before and behind it."""
    made = Made(sound)
    score = made.score

    def broken(tree: Tree, sampling: Sampling) -> LogitScores:
        scores = score(tree, sampling)
        rows = [scores.row(row).copy() for row in range(len(tree) + 1)]
        if tree.children.count({}) > 1:
            rows[2][7] = math.nan
        return LogitScores(rows.__getitem__, [0] * len(rows), sampling)

    made.score = broken  # type: ignore[method-assign]
    info = checked(made)
    assert info.leaves == 1 and "its tree forward gives no numbers." in info.note


@pytest.mark.parametrize(("error", "sound_enough"), [(0.4, True), (0.6, False)])
def test_rounding_is_allowed_for(error: float, sound_enough: bool) -> None:
    made = Made(sound, error)
    if sound_enough:
        assert checked(made, 0.5).note == ""
    else:
        with pytest.raises(ModelError, match=r"is off by 0\.6"):
            checked(made, 0.5)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, 2.0], [1.5, 1.0], 1.0),
        ([0.0, -math.inf], [0.0, -math.inf], 0.0),
        ([0.0, -math.inf], [0.25, -math.inf], 0.25),
        ([0.0, -math.inf], [0.0, 1.0], math.inf),
        ([math.inf], [-math.inf], math.inf),
        ([math.nan, 0.0], [math.nan, 0.0], math.nan),
        ([0.0, math.nan], [0.0, 1.0], math.nan),
        ([0.0, 1.0], [5.0, math.nan], math.nan),
    ],
)
def test_the_difference_of_two_rows(one: list[float], other: list[float], expected: float) -> None:
    found = difference(np.float32(one), np.float32(other))
    assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_a_tiny_vocabulary_has_all_the_tokens_it_needs() -> None:
    """The tokens of the check are taken modulo its size."""
    made = Made(sound)
    made.info = replace(made.info, vocabulary_size=7)
    assert checked(made).note == ""


# Texts that are longer than what layers see, and states.


def windowed(window: int) -> Callable[[list[int], Tree, int], list[int]]:
    """A tree whose rows see all of the text, where only so many tokens should be seen."""

    def seen(cache: list[int], tree: Tree, row: int) -> list[int]:
        text = sound(cache, tree, row)
        return text if len(tree) else text[-window:]

    return seen


@pytest.mark.parametrize(("reach", "noticed"), [(0, False), (30, True), (8, False)])
def test_trees_are_tried_across_what_layers_see(reach: int, noticed: bool) -> None:
    made = Made(windowed(30))

    def true(tokens: Sequence[int]) -> Floats:
        return true_logits(tokens[-30:])

    info = check(made, true, 1e-3, reach)
    assert info.can_tree is not noticed and made.cache == []


@pytest.mark.parametrize(
    ("parameters", "device", "context", "longer"),
    [
        (10**6, "cpu", 4096, True),
        (10**9, "cpu", 4096, False),
        (10**9, "cuda:0", 4096, True),
        (10**12, "cuda:0", 4096, False),
        (10**6, "cpu", 40, False),
    ],
)
def test_a_longer_check_is_made_where_it_takes_little(
    parameters: int, device: str, context: int, longer: bool
) -> None:
    made, sizes = Made(sound), set[int]()
    made.info = replace(made.info, parameters=parameters, device=device, context_length=context)

    def true(tokens: Sequence[int]) -> Floats:
        sizes.add(len(tokens))
        return true_logits(tokens)

    check(made, true, 1e-3, 50)
    assert max(sizes) == (52 if longer else 10)


class Stateful(Made):
    """A model that keeps a state. With several tokens at a time it goes on from `share` of it."""

    resumes = False

    def __init__(self, share: float, error: float = 0.0) -> None:
        super().__init__(sound, error)
        self.share, self.lost = share, 0.0
        self.info = replace(self.info, can_tree=False, note="made decodes plainly.")

    def prefill(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> Filled:
        filled = super().prefill(tokens, cancelled)
        several = len(tokens) - 1 - filled.reused > 1
        self.lost = (1 - self.share) if filled.reused and several and self.resumes else 0.0
        return filled

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        if self.share < 0 and self.resumes:
            raise ValueError("several tokens need an empty cache")
        scores = super().score(tree, sampling)
        lost = np.float32(self.lost)
        return LogitScores(lambda row: scores.row(row) + lost, [0] * 9, sampling)


@pytest.mark.parametrize(
    ("share", "error", "wanted"),
    [
        (1.0, 0.0, True),
        (0.0, 0.0, False),
        (-1.0, 0.0, False),
        # A difference that rounding would be allowed elsewhere, and that is not rounding.
        (1 - 5e-4, 1e-6, False),
        (1.0, 5e-4, True),
    ],
)
def test_whether_a_state_is_gone_on_from_with_several_tokens(
    share: float, error: float, wanted: bool
) -> None:
    made = Stateful(share, error)
    assert resumes(made, true_logits, 1e-3) is wanted and made.cache == []
