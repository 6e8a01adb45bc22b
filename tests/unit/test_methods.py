"""Methods and databases: the same name means the same everywhere, and measuring leaves no trace."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.decode import decode
from engine.drafting.base import Drafter, Frozen, Learner
from engine.drafting.baselines import (
    LookupDrafter,
    PublishedContext,
    PublishedModel,
    PublishedStatistics,
)
from engine.drafting.calibration import Calibration
from engine.drafting.databases import Databases
from engine.drafting.hierarchy import Hierarchy
from engine.drafting.tiers import ContextTier, ModelTier, StatisticsTier
from engine.errors import SettingError
from engine.hsd.family import Family, LevelDrafter, Stack
from engine.methods import METHODS, method_named
from engine.settings import Drafting, Generation, Sampling
from engine.types import CONTEXT, MODEL, STATISTICS, TIERS, Followers, Gram, Step
from engine.verify import Match, Rejection
from tests.support.lossless import toy_family
from tests.support.toy import ToyBackend


class Table:
    """Every token is followed by itself."""

    def look_up(self, key: Sequence[int]) -> Followers:
        return Followers(100.0, 2.0, {key[-1]: 50.0})

    def unigrams(self) -> None:
        return None


def hierarchy(drafters: list[Drafter]) -> Hierarchy:
    (drafter,) = drafters
    assert isinstance(drafter, Hierarchy)
    return drafter


def run(databases: Databases, name: str, wanted: Generation, drafting: Drafting) -> list[Step]:
    drafters = method_named(name, drafting).drafters(databases)
    events = decode(ToyBackend(), list(b"hello"), drafters, wanted, drafting)
    return [event for event in events if isinstance(event, Step)]


def test_names_are_their_own_keys_and_titles_differ() -> None:
    assert all(method.name == name for name, method in METHODS.items())
    assert len({method.title for method in METHODS.values()}) == len(METHODS)


@pytest.mark.parametrize(
    ("name", "title", "stack", "tiers"),
    [
        ("hsd", "Draft models (HSD)", "", ()),
        ("hsd:small@8/mid@4", "Draft models small@8/mid@4", "small@8/mid@4", ()),
        ("hsd:databases/a:b@2", "Draft models databases/a:b@2", "databases/a:b@2", ()),
        ("hd+hsd", "Databases, then draft models (HD + HSD)", "", TIERS),
        ("hd+hsd:small", "Databases, then draft models small", "small", TIERS),
        ("single:small@3", "Draft model small@3", "small@3", ()),
    ],
)
def test_a_stack_is_named_with_its_plan(
    name: str, title: str, stack: str, tiers: tuple[str, ...]
) -> None:
    method = method_named(name)
    assert (method.name, method.title, method.stack) == (name, title, stack)
    assert method.drafting.tiers == tiers
    drafting = Drafting(tiers=(MODEL,), nodes=3, rule="rejection")
    changed = method_named(name, drafting)
    assert changed.drafting == (drafting if tiers else replace(drafting, tiers=()))
    assert (changed.name, changed.stack) == (name, stack)


def test_a_single_model_is_one() -> None:
    with pytest.raises(SettingError, match="'single:small/mid'.*more than one.*hsd:small/mid"):
        method_named("single:small/mid")


@pytest.mark.parametrize(
    "name", ["fast", "hsd:", "single", "hd:small", "plain:small", "HSD:small", ":small", ""]
)
def test_what_is_no_method_is_refused_with_how_to_name_a_stack(name: str) -> None:
    with pytest.raises(SettingError, match="plain, auto, hd.*hsd:PLAN, hd\\+hsd:PLAN or single:"):
        method_named(name)


def test_a_drafting_overrides_what_a_method_may_change() -> None:
    wanted = Drafting(tiers=(STATISTICS, MODEL), nodes=3, threshold=0.2, budget="fixed")
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
    assert [type(d) for d in METHODS["rest"].drafters(databases)] == [PublishedStatistics]
    (first,), (second,) = (METHODS["lookup"].drafters(databases) for _ in range(2))
    assert isinstance(first, LookupDrafter) and first is not second


def test_without_a_table_the_statistics_tier_is_left_out() -> None:
    assert METHODS["statistics"].drafters(Databases()) == []
    assert METHODS["rest"].drafters(Databases()) == []
    names = [d.name for d in METHODS["hd-published"].drafters(Databases())]
    assert names == [CONTEXT, MODEL]


def test_the_published_tiers_start_from_the_model_tier() -> None:
    model = ModelTier([Gram((1, 2, 3, 4, 5), 3, 1)])
    databases = Databases(model=model, statistics=Table())
    drafters = METHODS["hd-published"].drafters(databases)
    assert [type(d) for d in drafters] == [PublishedContext, PublishedModel, PublishedStatistics]
    assert list(drafters[1].drafts([1])) == [((2, 3, 4, 5), 1)]  # type: ignore[attr-defined]
    assert METHODS["hd-published"].drafters(databases) == drafters


LONG = Generation(Sampling(0.0), max_tokens=40)


@pytest.mark.parametrize("made", [False, True], ids=["at first", "used before"])
@pytest.mark.parametrize("method", ["hd", "hd-published", "rest", "lookup"])
def test_measuring_leaves_no_trace(method: str, made: bool) -> None:
    saved: list[object] = []
    model = ModelTier([Gram((1, 2, 3, 4, 5), 1, 1)], saved.append)
    databases = Databases(ContextTier((1, 2, 3), saved.append), model, Table())
    if made:
        METHODS[method].drafters(databases)
    drafting = METHODS[method].drafting
    runs = [run(databases.for_measuring([5]), method, LONG, drafting) for _ in range(2)]
    assert runs[0] == runs[1], "the second run drafts as the first did"
    assert any(step.proposed for step in runs[0])
    assert saved == [] and databases.context.log == [1, 2, 3] and databases.calibration.rows() == []
    assert dict(model.grams()) == {(1, 2, 3, 4, 5): 1}
    if method == "hd-published" and made:
        assert databases.published[MODEL].grams == {(1, 2, 3, 4, 5): 1}  # type: ignore[attr-defined]
        assert databases.published[CONTEXT].table == {}  # type: ignore[attr-defined]


def test_measuring_starts_from_what_is_known() -> None:
    model = ModelTier([Gram((1, 2, 3, 4, 5), 1, 1)])
    databases = Databases(ContextTier((8, 9)), model, Table())
    run(databases, "hd", LONG, Drafting())
    copy = databases.for_measuring([5, 6])
    drafter = hierarchy(METHODS["hd"].drafters(copy))
    context, past, table = drafter.tiers
    assert copy.context is context and copy.context.log == [5, 6]
    assert isinstance(past, Frozen) and past.tier is model
    assert isinstance(table, StatisticsTier) and copy.statistics is databases.statistics
    assert copy.calibration is not databases.calibration
    assert copy.calibration.rows() == databases.calibration.rows() != []


def test_the_next_conversation_shares_all_but_the_context() -> None:
    calibration = Calibration()
    databases = Databases(ContextTier((1, 2)), ModelTier(), Table(), calibration)
    published = METHODS["hd-published"].drafters(databases)
    other = databases.next_conversation()
    assert other.context.log == [] and other.learned is databases.learned is other.model
    assert other.calibration is calibration and other.statistics is databases.statistics
    again = METHODS["hd-published"].drafters(other)
    assert again[0] is not published[0] and again[1:] == published[1:]


# Draft models: what a method becomes when it is asked to draft for one answer.


def parts(drafters: Sequence[Drafter]) -> list[str]:
    """The drafters in words: databases that learn, databases that only learn, and levels."""
    found = []
    for drafter in drafters:
        if isinstance(drafter, Stack):
            level: Drafter | None = drafter.top
            names: list[str] = []
            while isinstance(level, LevelDrafter):
                names.insert(0, f"{level.name}@{level.batch}")
                level = level.below
            if level is not None:
                assert all(isinstance(tier, Frozen) for tier in hierarchy([level]).tiers)
                names.insert(0, "databases")
            found.append("/".join(names))
        elif isinstance(drafter, Learner):
            found.append(" ".join(["learns", *(tier.name for tier in drafter.tiers)]))
        else:
            found.append(" ".join(tier.name for tier in hierarchy([drafter]).tiers))
    return found


ALL = "context model statistics"


@pytest.mark.parametrize(
    ("name", "tiers", "wanted"),
    [
        ("plain", TIERS, []),
        ("hd", TIERS, [ALL]),
        ("hsd:plain", TIERS, []),
        ("hsd:databases", TIERS, [ALL]),
        ("hsd:small@3", TIERS, ["small@3"]),
        ("single:mid@2", TIERS, ["mid@2"]),
        ("hsd:small@3/mid@2", TIERS, ["small@3/mid@2"]),
        ("hsd:databases/small@3", TIERS, [f"learns {ALL}", "databases/small@3"]),
        ("hd+hsd:plain", TIERS, [ALL]),
        ("hd+hsd:databases", (MODEL,), ["model"]),
        ("hd+hsd:small@3", TIERS, [ALL, "small@3"]),
        ("hd+hsd:small@3", (STATISTICS, MODEL), ["statistics model", "small@3"]),
        ("hd+hsd:small@3", (), ["small@3"]),
        ("hd+hsd:databases/small@3", TIERS, [ALL, "databases/small@3"]),
        ("hd+hsd:databases/small@3", (CONTEXT,), ["context", "databases/small@3"]),
    ],
)
def test_a_method_is_made_of_databases_and_draft_models(
    name: str, tiers: tuple[str, ...], wanted: list[str]
) -> None:
    method = method_named(name, Drafting(tiers=tiers))
    databases = Databases(statistics=Table())
    assert parts(method.drafters(databases, toy_family(), Sampling(0.7))) == wanted


def test_without_a_plan_the_best_one_is_taken() -> None:
    family, databases = toy_family(), Databases(statistics=Table())
    plan = str(family.plan("", "match"))
    assert plan.startswith("databases/")
    for name, first in (("hsd", f"learns {ALL}"), ("hd+hsd", ALL)):
        found = parts(METHODS[name].drafters(databases, family, Sampling(0.7)))
        assert found == [first, plan]


def test_what_the_databases_draft_for_a_small_model_they_learn_only_once() -> None:
    databases, saved = Databases(), list[Sequence[int]]()
    databases.context.save = saved.append
    for name in ("hsd:databases/small@3", "hd+hsd:databases/small@3"):
        databases.context.log.clear()
        method, prompt = method_named(name), list(b"hello")
        drafters = method.drafters(databases, toy_family(), LONG.sampling)
        events = decode(ToyBackend(), prompt, drafters, LONG, method.drafting)
        answer = [t.id for event in events if isinstance(event, Step) for t in event.tokens]
        assert databases.context.log == [*prompt, *answer]
        databases.context.seen.clear()


@pytest.mark.parametrize("family", [None, Family(ToyBackend(), {})], ids=["none", "empty"])
@pytest.mark.parametrize("name", ["hsd", "hd+hsd:small", "single:small"])
def test_a_stack_without_draft_models_is_an_error(name: str, family: Family | None) -> None:
    with pytest.raises(SettingError, match=f"{re.escape(name)}.*none is loaded.*--drafts.*another"):
        method_named(name).drafters(Databases(), family, Sampling())


def test_the_rule_of_the_drafting_is_the_rule_of_every_level() -> None:
    for rule, kind in (("match", Match), ("rejection", Rejection)):
        method = method_named("hsd:small@3/mid@2", Drafting(rule=rule))
        (stack,) = method.drafters(Databases(), toy_family(), Sampling(seed=5))
        assert isinstance(stack, Stack) and isinstance(stack.top.below, LevelDrafter)
        assert type(stack.top.rule) is type(stack.top.below.rule) is kind


def test_the_databases_know_the_noise_where_it_decides() -> None:
    hot, cold = Sampling(temperature=0.7, seed=5), Sampling(temperature=0.0)
    for rule, sampling, known in (
        ("match", hot, hot),
        ("match", cold, None),
        ("rejection", hot, None),
    ):
        method = method_named("hd", Drafting(rule=rule))
        (drafter,) = method.drafters(Databases(), sampling=sampling)
        assert isinstance(drafter, Hierarchy) and drafter.sampling == known
