"""A head that guesses a block: called once in a step, it drafts at all levels, along any path."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.decode import never
from engine.drafting.budget import Budget
from engine.drafting.databases import Databases
from engine.drafting.head import HeadStep, HeadTier
from engine.heads.base import LogitGuess
from engine.sampling import Floats
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import HEAD, TIERS, Step
from tests.support.lossless import PROMPT, assert_lossless, curves, tokens_of, warm_toy
from tests.support.toy import ToyBackend, ToyHead, deviating, toy_logits
from tests.unit.test_drafting_heads import Says, answered, count, generation

PLACES = 5
Law = Callable[[tuple[int, ...]], Floats]


def after_one(law: Law) -> Law:
    """A law that depends on the last token only, as a selector's does."""
    return lambda suffix: law((7, suffix[-1]))


class Block(LogitGuess):
    def __init__(self, law: Law, token: int) -> None:
        self.law = law
        super().__init__(law((token,)))

    def after(self, depth: int, token: int) -> LogitGuess | None:
        return LogitGuess(self.law((token,))) if depth < PLACES else None


class BlockHead(ToyHead):
    def start(
        self, tokens: Sequence[int], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> LogitGuess | None:
        guess = super().start(tokens, sampling, cancelled)
        return None if guess is None else Block(self.logits, tokens[-1])

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[LogitGuess]:
        raise AssertionError("a block is guessed in one call")


class BlockToy(ToyBackend):
    def __init__(self, law: Law, leaves: int | None = None) -> None:
        super().__init__(logits=after_one(toy_logits), guesses=after_one(law), depth=PLACES)
        assert self.info.head is not None
        head = replace(self.info.head, at_once=PLACES)
        self.info = replace(self.info, head=head, leaves=leaves)
        self.head = self.own_head()

    def own_head(self) -> ToyHead | None:
        if self.guesses is None or self.info.head is None:
            return None
        return BlockHead(self, self.info.head, self.guesses)


def plainly(wanted: Generation) -> list[Step]:
    return answered(BlockToy(toy_logits), "plain", wanted)


@pytest.mark.grid(1)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("law", ["own", "good", "bad"])
@pytest.mark.parametrize("leaves", [None, 1])
def test_the_text_is_that_of_plain_decoding(
    temperature: float, law: str, leaves: int | None
) -> None:
    laws = {"own": toy_logits, "good": deviating(0.5), "bad": deviating(4.0)}
    names = ("head", "hd+head", "auto")
    for seed, (name, cost) in enumerate((n, c) for n in names for c in ("none", "usual")):
        wanted, toy = generation(temperature, seed), BlockToy(laws[law], leaves)
        steps = answered(toy, name, wanted, curves()[cost], warm_toy())
        assert_lossless(plainly(wanted), steps)
        assert toy.head is not None and toy.head.calls, f"{name} asks it"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_one_call_drafts_as_deep_as_the_block(temperature: float) -> None:
    toy, wanted = BlockToy(toy_logits), generation(temperature, tokens=80)
    steps = answered(toy, "head", wanted)
    drafted, accepted = count(steps, HEAD)
    asked = [step for step in steps if HEAD in step.levels]
    assert toy.head is not None and toy.head.calls == len(asked)
    assert {step.levels[HEAD][0] for step in asked} == {1}
    assert max(len(step.by_depth) for step in steps) == PLACES
    tokens = len(list(tokens_of(steps)))
    assert tokens / len(steps) > 3, f"{accepted} of {drafted}"


def tier_with(tokens: Sequence[int], guess: Any, noisy: bool = False) -> HeadTier:
    tier = HeadTier(Sampling(temperature=0.0), noisy, PLACES)
    tier.add(tuple(tokens[-64:]), guess, 0, len(tokens))
    return tier


class Placed(Says):
    """A block whose places say their depth and the token before them."""

    def after(self, depth: int, token: int) -> Says | None:
        return Says({1000 * depth + token: 0.9}) if depth < PLACES - 1 else None


@pytest.mark.parametrize("length", [3, 63, 64, 200])
def test_a_node_is_given_the_place_of_its_depth_and_the_token_before_it(length: int) -> None:
    tokens = [10 + at % 7 for at in range(length)]
    tier = tier_with(tokens, Placed({5: 0.9}))
    for path in ([], [9], [9, 8], [9, 8, 9], [9, 8, 9, 8]):
        *_, found = tier.matches(tuple([*tokens, *path][-64:])) or [None]
        wanted = {5} if not path else {1000 * len(path) + path[-1]}
        assert (found is None) == (len(path) == PLACES - 1)
        assert found is None or set(found.counts) == wanted
    assert not tier.matches((1, 2, 3)), "another text"
    one, other = (
        tier.matches(tuple([*tokens, *path][-64:]))[-1].strength for path in ([9], [9, 8])
    )
    assert one < other, "deeper evidence has weights of its own"
    tier.clear()
    assert not tier.matches(tuple(tokens[-64:]))


def test_a_block_pays_where_the_tree_is_open_at_any_of_its_levels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = [40, 41, 42, 7, 50, 51, *[40, 41, 42, 7, 60] * 3, 40, 41, 42]
    seen: list[float] = []

    def pays(_: HeadStep, level: int, missing: float, look: Any) -> bool:
        seen.append(missing)
        return False

    monkeypatch.setattr(HeadStep, "pays", pays)
    for places in (1, 2, PLACES):
        databases = Databases()
        tier = HeadTier(Sampling(temperature=0.0), False, places)
        merged = databases.with_head(TIERS, tier, None)
        merged.observe(known, len(known))
        budget = Budget(Drafting(nodes=8, threshold=0.05, budget="fixed"), 6, 260)
        toy = BlockToy(toy_logits)
        head = toy.head
        assert head is not None
        head.info = replace(head.info, at_once=places)
        tree = Tree(known[-1])
        merged.grow(tree, known, budget)
        HeadStep(merged, tree, known, budget).run(head, tier, never)
        tree = Tree(known[-1])
        merged.grow_tree(tree, known, Budget(Drafting(nodes=8, budget="fixed"), 6, 260))
        assert max(tree.depths) > 1
    assert seen[0] < seen[1] < seen[2] <= 1.0 + 1e-9


def test_the_prompt_of_a_block_head_is_read_like_that_of_others() -> None:
    toy = BlockToy(toy_logits)
    answered(toy, "head", generation(0.0, tokens=20))
    assert toy.head is not None and toy.head.rows < len(PROMPT) + 2 * 20
