"""The harvest: what else the target thought of, kept until it thinks again."""

from collections.abc import Sequence

import pytest

from engine.backends.toy import ToyBackend
from engine.decode import decode
from engine.drafting.base import Likely
from engine.drafting.budget import Budget
from engine.drafting.harvest import HarvestTier
from engine.methods import Databases, method_named
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import CONTEXT, HARVEST, Step

Law = list[tuple[int, float]]


def likely(*laws: Law) -> Likely:
    return lambda index: laws[index]


def test_what_the_target_thought_of_is_kept_per_one_and_two_tokens() -> None:
    tier = HarvestTier()
    tier.observe([1, 2, 7], 1, likely([(7, 0.6), (8, 0.3)]))
    one, two = tier.matches((1, 2))
    for followers in (one, two):
        shares = {token: count / followers.total for token, count in followers.counts.items()}
        assert shares == pytest.approx({7: 0.6, 8: 0.3})
    assert len(tier.matches((5, 2))) == 1 and tier.matches((2, 1)) == []
    assert (tier.name, tier.source) == (HARVEST, CONTEXT), "of its own trust, told as context"


def test_of_a_step_the_place_is_kept_where_it_left_the_tree() -> None:
    """There the target thought of something else than what was drafted."""
    tier = HarvestTier()
    tier.observe([1, 2, 3, 4], 2, likely([(3, 0.9)], [(4, 0.8), (9, 0.1)]))
    assert [followers.ranked()[0][0] for followers in tier.matches((2, 3))] == [4, 4]
    assert tier.matches((4,)) == []


def test_newer_thoughts_replace_older_ones() -> None:
    tier = HarvestTier()
    tier.observe([1, 2, 7], 1, likely([(7, 0.9)]))
    tier.observe([1, 2, 7, 5, 2, 8], 1, likely([(8, 0.7)]))
    assert [f.ranked()[0][0] for f in tier.matches((5, 2))] == [8, 8]
    assert [f.ranked()[0][0] for f in tier.matches((1, 2))] == [8, 7], "the pair is as it was"


def test_a_sure_thought_is_stronger_evidence_than_a_vague_one() -> None:
    tier = HarvestTier()
    tier.observe([1, 2], 1, likely([(2, 0.99)]))
    tier.observe([3, 4], 1, likely([(4, 0.1), (5, 0.1)]))
    sure, vague = tier.matches((1,))[0], tier.matches((3,))[0]
    assert sure.strength != vague.strength and sure.distinct < vague.distinct


def test_nothing_comes_of_a_prompt() -> None:
    tier = HarvestTier()
    tier.observe([1, 2, 1, 2, 1], 5, None)
    tier.finish([1, 2, 1, 2, 1], 0)
    assert tier.table == {} and tier.matches((1,)) == []


def drafts(harvest: bool) -> tuple[list[Step], set[tuple[int, int]]]:
    """A run at temperature 0, and the (last token, next token) pairs at the root of its trees."""
    databases, pairs = Databases(), set[tuple[int, int]]()
    method = method_named("hd", Drafting(harvest=harvest, tiers=(CONTEXT,), budget="fixed"))
    (drafter,) = databases.drafters(method)
    grow = drafter.grow

    def noting(tree: Tree, tokens: Sequence[int], budget: Budget) -> object:
        found = grow(tree, tokens, budget)
        pairs.update((tokens[-1], token) for token in tree.children[0])
        return found

    drafter.grow = noting  # type: ignore[method-assign, assignment]
    wanted = Generation(Sampling(0.0), max_tokens=120)
    events = decode(ToyBackend(), list(b"once upon"), [drafter], wanted, method.drafting)
    return [event for event in events if isinstance(event, Step)], pairs


def test_alternatives_are_drafted_that_the_text_never_held() -> None:
    with_it, without = drafts(True), drafts(False)
    for steps, pairs in (with_it, without):
        text = [*b"once upon", *(token.id for step in steps for token in step.tokens)]
        held = set(zip(text, text[1:], strict=False))
        assert bool(pairs - held) == (pairs is with_it[1])
    assert {source for step in with_it[0] for source in step.proposed} == {CONTEXT}


@pytest.mark.parametrize("tiers", [("model",), ("statistics",), ()])
def test_it_belongs_to_the_context_tier(tiers: tuple[str, ...]) -> None:
    databases = Databases()
    method = method_named("hd", Drafting(tiers=tiers, harvest=True))
    wanted = Generation(Sampling(0.0), max_tokens=20)
    drafters = databases.drafters(method)
    list(decode(ToyBackend(), list(b"once upon"), drafters, wanted, method.drafting))
    assert databases.harvest.table == {}


def test_it_is_kept_for_the_next_answer_of_the_conversation_only() -> None:
    databases, wanted = Databases(), Generation(Sampling(0.0), max_tokens=20)
    method = method_named("hd", Drafting(harvest=True))
    list(decode(ToyBackend(), list(b"once"), databases.drafters(method), wanted, method.drafting))
    assert databases.harvest.table
    assert databases.next_conversation().harvest.table == {}
    assert databases.for_measuring().harvest.table == {}


def test_what_was_harvested_begins_anew_before_it_grows_without_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.drafting.harvest.LARGEST", 20)
    tier = HarvestTier()
    for token in range(100):
        tier.observe([token, token + 1, 7], 1, lambda _: [(7, 0.9)])
        assert len(tier.table) <= 21 and tier.bytes > 0
    assert tier.matches((99, 100))
