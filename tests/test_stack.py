"""Stacks of draft models: the same text as plain decoding, whatever they draft."""

from itertools import combinations

import pytest

from engine.backends.toy import ToyBackend, deviating
from engine.budget import Budget
from engine.decode import decode
from engine.drafters.base import Drafter
from engine.hsd.stack import Level, Stack
from engine.methods import Databases
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import DRAFT, TARGET, Step
from engine.verify import Match

PROMPT = list(b"the quick brown fox")
DEVIATIONS = {"tiny": 3.0, "small": 2.0, "mid": 1.0}
STACKS = [stack for depth in (1, 2, 3) for stack in combinations(("tiny", "small", "mid"), depth)]


def stacked(
    names: tuple[str, ...],
    batches: tuple[int, ...],
    sampling: Sampling,
    below: Drafter | None = None,
    models: dict[str, ToyBackend] | None = None,
) -> Level:
    """Toy draft models on top of each other, the smallest first."""
    drafter = below
    for name, batch in zip(names, batches, strict=False):
        backend = (models or {}).get(name) or ToyBackend(
            name=name, logits=deviating(DEVIATIONS[name])
        )
        drafter = Level(name, backend, batch, sampling, Match(), 260, drafter)
    assert isinstance(drafter, Level)
    return drafter


def answer(
    sampling: Sampling, drafters: list[Drafter], tokens: int = 120, nodes: int = 64
) -> list[Step]:
    drafting = Drafting(nodes=nodes, budget="fixed")
    events = decode(ToyBackend(), PROMPT, drafters, Generation(sampling, tokens), drafting)
    return [event for event in events if isinstance(event, Step)]


def ids(steps: list[Step]) -> list[int]:
    return [token.id for step in steps for token in step.tokens]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("batches", [(1, 1, 1), (3, 2, 4), (8, 5, 2)])
@pytest.mark.parametrize("names", STACKS, ids="/".join)
def test_every_stack_says_what_plain_decoding_says(
    names: tuple[str, ...], batches: tuple[int, ...], seed: int, temperature: float
) -> None:
    sampling = Sampling(temperature, seed=seed)
    plain = answer(sampling, [], nodes=0)
    fast = answer(sampling, [Stack(stacked(names, batches, sampling), 2.0, 0.0)])
    assert ids(fast) == ids(plain)
    assert len(fast) < len(plain)
