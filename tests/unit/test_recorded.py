"""What a step records of its draft tree: the tree that was verified, and what became of it."""

import pickle
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest

from engine.backends.base import LogitScores
from engine.decode import decode
from engine.methods import METHODS
from engine.recorded import LENGTHS, NODE, Node, nodes, percent, recorded
from engine.settings import Generation, Sampling
from engine.tree import Tree
from engine.types import Step, Token
from tests.support.lossless import PROMPT, warm_toy
from tests.support.tiers import using
from tests.support.toy import ToyBackend

CORES = {"compiled": nullcontext, "python": lambda: using(None)}


class Watched(ToyBackend):
    """A toy that remembers the trees that it verified, and the rows that were accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.trees: list[Tree] = []
        self.scores: list[LogitScores] = []
        self.kept: list[list[int]] = []

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        self.trees.append(tree)
        self.scores.append(super().score(tree, sampling))
        return self.scores[-1]

    def accept(self, rows: Sequence[int]) -> None:
        self.kept.append(list(rows))
        super().accept(rows)


def answer(core: AbstractContextManager[None], temperature: float) -> tuple[Watched, list[Step]]:
    """An answer drafted by all three databases, and the toy that gave it."""
    drawn = Sampling(temperature, seed=3)
    method = replace(METHODS["hd"].drafting, budget="fixed", nodes=24)
    with core:
        drafters = warm_toy().hierarchy(method.tiers, drawn)
    toy = Watched()
    events = decode(toy, PROMPT, drafters, Generation(drawn, max_tokens=60), method)
    return toy, [event for event in events if isinstance(event, Step)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("core", CORES)
def test_the_tree_that_is_recorded_is_the_one_that_was_verified(
    core: str, temperature: float
) -> None:
    toy, steps = answer(CORES[core](), temperature)
    assert len(toy.trees) == len(steps) and sum(len(tree) for tree in toy.trees) > 100
    for tree, scores, kept, step in zip(toy.trees, toy.scores, toy.kept, steps, strict=True):
        found = nodes(step)
        assert found is not None and len(found) == len(tree)
        assert [n.token for n in found] == tree.tokens[1:]
        assert [n.parent for n in found] == tree.parents[1:]
        assert [n.source for n in found] == tree.sources[1:]
        assert [n.match_length for n in found] == tree.match_lengths[1:]
        accepted = [row for row, node in enumerate(found, 1) if node.accepted]
        # The last one may end the answer: then nothing follows it in the cache.
        assert accepted[: len(kept)] == kept and len(accepted) == sum(step.accepted.values())
        assert Counter(n.source for n in found if n.accepted) == Counter(step.accepted)
        visited = [0, *accepted]
        for row, node in enumerate(found, 1):
            assert node.reached == (node.parent in visited)
            chance = scores.probability(node.parent, node.token) if node.reached else 0.0
            assert node.percent == percent(chance), row


def test_a_plain_step_records_that_nothing_was_guessed() -> None:
    events = decode(ToyBackend(), PROMPT, (), Generation(max_tokens=5), METHODS["plain"].drafting)
    steps = [event for event in events if isinstance(event, Step)]
    assert [step.tree for step in steps] == [b""] * 5
    assert nodes(steps[0]) == () and nodes(Step(0, ())) is None


def test_a_node_takes_six_bytes_wherever_it_goes() -> None:
    """Through the pipe a step grows by its nodes and by next to nothing else."""
    _, steps = answer(nullcontext(), 1.0)
    for step in steps:
        assert step.tree is not None and len(step.tree) == 6 * sum(step.proposed.values())
        bare = len(pickle.dumps(replace(step, tree=None), 5))
        assert len(pickle.dumps(step, 5)) - bare <= len(step.tree) + 8


def test_nothing_is_read_that_was_not_read_anyway() -> None:
    """What a rejected guess was given is told where its row was looked at, and nowhere else."""
    toy, steps = answer(nullcontext(), 1.0)
    rejected = [node for step in steps for node in nodes(step) or () if not node.accepted]
    assert any(node.percent for node in rejected)
    assert all(node.percent == 0 for node in rejected if not node.reached)
    for scores, step in zip(toy.scores, steps, strict=True):
        kept = [row for row, node in enumerate(nodes(step) or (), 1) if node.accepted]
        assert set(scores.rows) == {0, *kept}


@pytest.mark.parametrize(
    "damage",
    [b"short", NODE.pack(1, 0, 1, 0, 0), NODE.pack(1, 0, 0, 0x90, 0), NODE.pack(1, 0, 7, 0, 0)],
)
def test_what_no_step_records_is_refused(damage: bytes) -> None:
    step = Step(0, (Token(1, 0, "target"),), {"context": 1}, tree=damage)
    with pytest.raises((ValueError, IndexError)):
        nodes(step)


def test_percents_are_whole_and_never_claim_to_be_nothing() -> None:
    assert [percent(p) for p in (0.0, 1e-9, 0.004, 0.126, 0.999, 1.0, 1.1)] == [
        0, 1, 1, 13, 100, 100, 100,
    ]  # fmt: skip
    step = Step(0, (Token(65541, 0, "context"),), {"context": 1}, tree=NODE.pack(5, 1, 0, 3, 40))
    assert nodes(step) == (Node(65541, 0, "context", 3, 40, True, True),)


class Silent:
    """Scores that know nothing."""

    def known(self, row: int, token: int) -> float:
        return 0.0


def test_what_does_not_fit_is_not_recorded() -> None:
    """Nobody drafts such trees; one that did would lose this and nothing else."""
    wide, scores = Tree(1), Silent()
    for token in range(255):
        wide.add(0, token, "context", 99)
    told = recorded(wide, scores, [])  # type: ignore[arg-type]
    found = nodes(Step(0, (), {"context": 255}, tree=told))
    assert found is not None and len(found) == 255 and found[0].match_length == LENGTHS[-1]
    wide.add(0, 999, "context")
    assert recorded(wide, scores, []) is None  # type: ignore[arg-type]
    for token, sources in ((1 << 24, 1), (5, 17)):
        tree = Tree(1)
        for number in range(sources):
            tree.add(number, token, str(number))
        assert recorded(tree, scores, []) is None  # type: ignore[arg-type]
