"""Methods and databases: the same name means the same everywhere, and measuring leaves no trace."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.backends.toy import ToyBackend
from engine.calibration import Calibration
from engine.decode import decode
from engine.drafters.base import Drafter, Frozen
from engine.drafters.context import ContextTier
from engine.drafters.harvest import HarvestTier
from engine.drafters.hierarchy import Hierarchy
from engine.drafters.lookup import LookupDrafter
from engine.drafters.model import ModelTier
from engine.drafters.published import PublishedContext, PublishedModel, PublishedStatistics
from engine.drafters.statistics import StatisticsTier
from engine.errors import SettingError
from engine.methods import METHODS, Databases, method_named
from engine.settings import Drafting, Generation, Sampling
from engine.types import CONTEXT, MODEL, STATISTICS, Followers, Gram, Step


class Table:
    """Every token is followed by itself."""

    def look_up(self, key: Sequence[int]) -> Followers:
        return Followers(100.0, 2.0, {key[-1]: 50.0})


def hierarchy(drafters: list[Drafter]) -> Hierarchy:
    (drafter,) = drafters
    assert isinstance(drafter, Hierarchy)
    return drafter


def run(databases: Databases, name: str, wanted: Generation, drafting: Drafting) -> list[Step]:
    drafters = databases.drafters(method_named(name, drafting))
    events = decode(ToyBackend(), list(b"hello"), drafters, wanted, drafting)
    return [event for event in events if isinstance(event, Step)]


def test_names_are_their_own_keys_and_titles_differ() -> None:
    assert all(method.name == name for name, method in METHODS.items())
    assert len({method.title for method in METHODS.values()}) == len(METHODS)


def test_unknown_methods_are_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match="'fast'.*plain, hd"):
        method_named("fast")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_without_a_budget_is_the_declared_one(name: str) -> None:
    assert method_named(name) is METHODS[name]


def test_a_drafting_overrides_what_a_method_may_change() -> None:
    wanted = Drafting(
        tiers=(STATISTICS, MODEL), policy="hierarchical", nodes=3, threshold=0.2,
        budget="fixed", harvest=True,
    )  # fmt: skip
    assert method_named("hd", wanted).drafting == wanted
    alone = method_named("model", wanted).drafting
    assert alone == replace(wanted, tiers=(MODEL,))
    for name in ("plain", "hd-published", "rest", "lookup"):
        assert method_named(name, wanted) is METHODS[name]


def test_the_published_method_and_the_peers_have_their_own_constants() -> None:
    for name, nodes in (("hd-published", 28), ("rest", 28), ("lookup", 10)):
        drafting = METHODS[name].drafting
        assert (drafting.nodes, drafting.budget) == (nodes, "fixed")
    databases = Databases(statistics=Table())
    assert [type(d) for d in databases.drafters(METHODS["rest"])] == [PublishedStatistics]
    (first,), (second,) = (databases.drafters(METHODS["lookup"]) for _ in range(2))
    assert isinstance(first, LookupDrafter) and first is not second


@pytest.mark.parametrize("harvest", [True, False])
def test_tiers_come_in_the_methods_order(harvest: bool) -> None:
    databases = Databases(statistics=Table())
    wanted = Drafting(tiers=(STATISTICS, CONTEXT, MODEL), harvest=harvest, policy="hierarchical")
    drafter = hierarchy(databases.drafters(method_named("hd", wanted)))
    kinds = [StatisticsTier, ContextTier, *([HarvestTier] if harvest else []), ModelTier]
    assert [type(tier) for tier in drafter.tiers] == kinds
    assert [tier.source for tier in drafter.tiers] == [
        STATISTICS, CONTEXT, *([CONTEXT] if harvest else []), MODEL,
    ]  # fmt: skip
    assert [len(group) for group in drafter.groups] == [1, 1 + harvest, 1]
    assert databases.drafters(METHODS["plain"]) == []


def test_the_tiers_keep_what_they_learned_between_answers() -> None:
    databases = Databases()
    for _ in range(2):
        drafter = hierarchy(databases.drafters(METHODS["hd"]))
        assert {databases.context, databases.model} <= set(drafter.tiers)
        assert drafter.calibration is databases.calibration
    assert databases.model is databases.past


def test_without_a_table_the_statistics_tier_is_left_out() -> None:
    assert Databases().drafters(METHODS["statistics"]) == []
    assert Databases().drafters(METHODS["rest"]) == []
    names = [d.name for d in Databases().drafters(METHODS["hd-published"])]
    assert names == [CONTEXT, MODEL]


def test_the_published_tiers_start_from_the_model_tier() -> None:
    model = ModelTier([Gram((1, 2, 3, 4, 5), 3, 1)])
    databases = Databases(model=model, statistics=Table())
    drafters = databases.drafters(METHODS["hd-published"])
    assert [type(d) for d in drafters] == [PublishedContext, PublishedModel, PublishedStatistics]
    assert list(drafters[1].drafts([1])) == [((2, 3, 4, 5), 1)]  # type: ignore[attr-defined]
    assert databases.drafters(METHODS["hd-published"]) == drafters


LONG = Generation(Sampling(0.0), max_tokens=40)


@pytest.mark.parametrize("made", [False, True], ids=["at first", "used before"])
@pytest.mark.parametrize("method", ["hd", "hd-published", "rest", "lookup"])
def test_measuring_leaves_no_trace(method: str, made: bool) -> None:
    saved: list[object] = []
    model = ModelTier([Gram((1, 2, 3, 4, 5), 1, 1)], saved.append)
    databases = Databases(ContextTier((1, 2, 3), saved.append), model, Table())
    if made:
        databases.drafters(METHODS[method])
    drafting = METHODS[method].drafting
    runs = [run(databases.for_measuring([5]), method, LONG, drafting) for _ in range(2)]
    assert runs[0] == runs[1], "the second run drafts as the first did"
    assert any(step.proposed for step in runs[0])
    assert saved == [] and databases.context.log == [1, 2, 3] and databases.calibration.rows() == []
    assert dict(model.grams()) == {(1, 2, 3, 4, 5): 1} and databases.harvest.table == {}
    if method == "hd-published" and made:
        assert databases.published[MODEL].grams == {(1, 2, 3, 4, 5): 1}  # type: ignore[attr-defined]
        assert databases.published[CONTEXT].table == {}  # type: ignore[attr-defined]


def test_measuring_starts_from_what_is_known() -> None:
    model = ModelTier([Gram((1, 2, 3, 4, 5), 1, 1)])
    databases = Databases(ContextTier((8, 9)), model, Table())
    run(databases, "hd", LONG, Drafting())
    copy = databases.for_measuring([5, 6])
    drafter = hierarchy(copy.drafters(METHODS["hd"]))
    context, past, table = (tier for tier in drafter.tiers if tier.name != "harvest")
    assert copy.context is context and copy.context.log == [5, 6]
    assert isinstance(past, Frozen) and past.matches((4,)) == model.matches((4,)) != []
    assert isinstance(table, StatisticsTier) and copy.statistics is databases.statistics
    assert copy.calibration is not databases.calibration
    assert copy.calibration.rows() == databases.calibration.rows() != []


def test_the_next_conversation_shares_all_but_the_context() -> None:
    calibration = Calibration()
    databases = Databases(ContextTier((1, 2)), ModelTier(), Table(), calibration)
    published = databases.drafters(METHODS["hd-published"])
    other = databases.next_conversation()
    assert other.context.log == [] and other.past is databases.past is other.model
    assert other.calibration is calibration and other.statistics is databases.statistics
    again = other.drafters(METHODS["hd-published"])
    assert again[0] is not published[0] and again[1:] == published[1:]


@pytest.mark.parametrize("method", ["model", "hd-published"])
def test_without_frozen_tiers_the_second_run_would_cheat(method: str) -> None:
    databases, drafting = Databases(), METHODS[method].drafting
    wanted = Generation(Sampling(0.9, seed=5), max_tokens=40)
    first, second = (run(databases, method, wanted, drafting) for _ in range(2))
    assert len(second) < len(first)


def test_the_model_tier_learns_from_an_answer_that_the_chat_gives() -> None:
    """Databases of their own make, and given ones; the copies for measuring know it too."""
    for databases in (Databases(), Databases(model=ModelTier())):
        run(databases, "hd", LONG, Drafting())
        assert list(databases.past.grams())
        assert databases.for_measuring().past is databases.past


def test_frozen_tiers_answer_and_forget() -> None:
    inner = ContextTier((1, 2, 1, 2))
    frozen = Frozen(inner)
    frozen.observe([1, 2, 3], 3, None)
    frozen.finish([1, 2, 3], 3)
    assert inner.log == [1, 2, 1, 2] and (frozen.name, frozen.source) == (CONTEXT, CONTEXT)
    assert frozen.matches((1, 2)) == inner.matches((1, 2)) != []
