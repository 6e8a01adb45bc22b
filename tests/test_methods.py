"""Methods and databases: the same name means the same everywhere, and measuring leaves no trace."""

import pytest

from engine.backends.toy import ToyBackend
from engine.decode import decode
from engine.drafters.base import Frozen
from engine.drafters.context import ContextDrafter
from engine.drafters.model import ModelDrafter
from engine.drafters.published import PublishedContext, PublishedModel, PublishedStatistics
from engine.drafters.statistics import StatisticsDrafter
from engine.errors import SettingError
from engine.methods import METHODS, Databases, method_named, untraced
from engine.settings import Drafting, Generation, Sampling
from engine.types import CONTEXT, MODEL, STATISTICS, Continuation, Followers, Gram


class Table:
    def look_up(self, key):  # type: ignore[no-untyped-def]
        return Followers(100.0, (Continuation((key[-1],), 0.5),))


def test_names_are_their_own_keys_and_titles_differ() -> None:
    assert all(method.name == name for name, method in METHODS.items())
    assert len({method.title for method in METHODS.values()}) == len(METHODS)


def test_unknown_methods_are_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match="'fast'.*plain, hd"):
        method_named("fast")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_without_a_budget_is_the_declared_one(name: str) -> None:
    assert method_named(name) is METHODS[name]


def test_a_budget_overrides_what_a_method_may_change() -> None:
    budget = Drafting(tiers=(STATISTICS, MODEL), policy="hierarchical", nodes=3, threshold=0.2)
    assert method_named("hd", budget).drafting == budget
    alone = method_named("model", budget).drafting
    assert (alone.tiers, alone.nodes, alone.policy) == ((MODEL,), 3, "hierarchical")
    assert method_named("plain", budget) is METHODS["plain"]
    assert method_named("hd-published", budget) is METHODS["hd-published"]


def test_the_published_method_has_its_constants() -> None:
    drafting = METHODS["hd-published"].drafting
    assert (drafting.nodes, drafting.threshold, drafting.policy) == (28, 0.0, "hierarchical")


def test_drafters_come_in_the_methods_order() -> None:
    databases = Databases(statistics=Table())
    order = Drafting(tiers=(STATISTICS, CONTEXT, MODEL))
    drafters = databases.drafters(method_named("hd", order))
    assert [type(d) for d in drafters] == [StatisticsDrafter, ContextDrafter, ModelDrafter]
    assert [d.name for d in drafters] == [STATISTICS, CONTEXT, MODEL]
    assert databases.drafters(METHODS["plain"]) == []


def test_the_tiers_keep_what_they_learned_between_answers() -> None:
    databases = Databases()
    for _ in range(2):
        assert databases.drafters(METHODS["hd"]) == [databases.context, databases.model]


def test_without_a_table_the_statistics_tier_is_left_out() -> None:
    assert Databases().drafters(METHODS["statistics"]) == []
    names = [d.name for d in Databases().drafters(METHODS["hd-published"])]
    assert names == [CONTEXT, MODEL]


def test_the_published_tiers_start_from_the_model_tier() -> None:
    model = ModelDrafter([Gram((1, 2, 3, 4, 5, 6, 7, 8), 3, 1)])
    databases = Databases(model=model, statistics=Table())
    drafters = databases.drafters(METHODS["hd-published"])
    assert [type(d) for d in drafters] == [PublishedContext, PublishedModel, PublishedStatistics]
    assert drafters[1].propose([4], 7, 0.0)[-1].path == (5, 6, 7, 8)
    assert databases.drafters(METHODS["hd-published"]) == drafters


@pytest.mark.parametrize("method", ["hd", "hd-published"])
def test_measuring_leaves_no_trace(method: str) -> None:
    saved: list[object] = []
    databases = Databases(
        ContextDrafter((1, 2, 3), saved.append), ModelDrafter((), saved.append), Table()
    )
    for fresh in (databases, databases.for_measuring()):
        fresh.drafters(METHODS[method])
    toy, generation = ToyBackend(), Generation(Sampling(0.0), max_tokens=40)
    runs = []
    for _ in range(2):
        drafters = untraced(databases.for_measuring([5]).drafters(METHODS[method]))
        events = decode(toy, list(b"hello"), drafters, generation, METHODS[method].drafting)
        runs.append(list(events)[1:])
    assert runs[0] == runs[1], "the second run drafts as the first did"
    assert saved == [] and databases.context.log == [1, 2, 3] and databases.model.table == {}
    if method == "hd-published":
        assert databases.published[MODEL].table == {}  # type: ignore[attr-defined]
        assert databases.published[CONTEXT].table == {}  # type: ignore[attr-defined]


def test_without_frozen_drafters_the_second_run_would_cheat() -> None:
    databases, toy = Databases(), ToyBackend()
    generation = Generation(Sampling(0.9, seed=5), max_tokens=40)
    lengths = []
    for _ in range(2):
        drafters = databases.drafters(METHODS["model"])
        events = decode(toy, list(b"hello"), drafters, generation, METHODS["model"].drafting)
        lengths.append(len(list(events)))
    assert lengths[1] < lengths[0]


def test_frozen_drafters_propose_and_forget() -> None:
    inner = ContextDrafter((1, 2, 1, 2))
    frozen = Frozen(inner)
    frozen.observe([1, 2, 3], 3)
    frozen.finish([1, 2, 3], 3)
    assert inner.log == [1, 2, 1, 2] and frozen.name == CONTEXT
    assert frozen.propose([2], 4, 0.0) == inner.propose([2], 4, 0.0) != []


def test_the_context_tier_of_a_run_is_not_frozen() -> None:
    drafters = untraced(Databases(statistics=Table()).drafters(METHODS["hd"]))
    assert [isinstance(drafter, Frozen) for drafter in drafters] == [False, True, True]
