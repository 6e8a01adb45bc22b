"""A head drafts into the tree of the databases: the same text, one scale, one budget."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest

from engine import native
from engine.decode import decode, never
from engine.drafting.base import FailSafeDrafter
from engine.drafting.budget import Budget
from engine.drafting.calibration import WITH_HEAD, Calibration
from engine.drafting.costs import CostCurve
from engine.drafting.databases import Databases
from engine.drafting.head import PLACE, Call, HeadTier, Look
from engine.drafting.head_record import HeadRecord
from engine.drafting.hierarchy import Hierarchy
from engine.errors import SettingError
from engine.heads.base import LogitGuess
from engine.methods import METHODS, method_named
from engine.sampling import Floats
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import CONTEXT, DATABASES, HEAD, STACK, STATISTICS, TIERS, Step
from tests.support.clocked import Clock, ClockedToy, clock_of, endless
from tests.support.lossless import (
    PROMPT,
    assert_lossless,
    curves,
    events_of,
    plain_toy,
    tokens_of,
    toy_family,
    warm_toy,
)
from tests.support.tiers import using
from tests.support.toy import ToyBackend, ToyHead, deviating, shuffled, toy_logits

Law = Callable[[tuple[int, ...]], Floats]
GOOD, BAD = deviating(0.5), deviating(4.0)
LAWS: dict[str, Law] = {"own": toy_logits, "good": GOOD, "bad": BAD, "shuffled": shuffled}
ASKING = ("head", "hd+head", "auto", "head@3")


def toy_with(law: Law, leaves: int | None = None, branches: bool = True) -> ToyBackend:
    toy = ToyBackend(guesses=law, branches=branches)
    toy.info = replace(toy.info, leaves=leaves)
    return toy


def head_of(toy: ToyBackend) -> ToyHead:
    assert isinstance(toy.head, ToyHead)
    return toy.head


def generation(temperature: float, seed: int = 1, tokens: int = 120) -> Generation:
    return Generation(Sampling(temperature=temperature, seed=seed), max_tokens=tokens)


def answered(
    toy: ToyBackend,
    name: str,
    wanted: Generation,
    costs: CostCurve | None = None,
    databases: Databases | None = None,
    prompt: Sequence[int] = PROMPT,
) -> list[Step]:
    method = method_named(name)
    known = databases if databases is not None else Databases()
    drafters = method.drafters(known, None, wanted.sampling, target=toy)
    costs = costs if method.adaptive else None
    return events_of(toy, prompt, wanted, drafters, method.drafting, costs=costs)


def count(steps: Sequence[Step], source: str) -> tuple[int, int]:
    """How many tokens a source drafted, and how many were accepted."""
    return (
        sum(step.proposed.get(source, 0) for step in steps),
        sum(step.accepted.get(source, 0) for step in steps),
    )


# the text


@pytest.mark.grid(1)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("leaves", [None, 1])
def test_the_text_is_that_of_plain_decoding(
    temperature: float, law: str, leaves: int | None
) -> None:
    for seed, (name, cost) in enumerate((n, c) for n in ASKING for c in ("none", "usual")):
        wanted = generation(temperature, seed)
        toy = toy_with(LAWS[law], leaves, branches=seed % 3 > 0)
        steps = answered(toy, name, wanted, curves()[cost], warm_toy())
        assert_lossless(plain_toy(wanted), steps)
        assert head_of(toy).calls, f"{name} asks it"
        if leaves == 1:
            assert all(len(step.by_depth) == sum(step.proposed.values()) for step in steps)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_with_the_noise_known_a_head_of_the_targets_own_law_is_always_right(
    temperature: float,
) -> None:
    wanted = generation(temperature, tokens=80)
    steps = answered(toy_with(toy_logits), "head@3", wanted)
    assert_lossless(plain_toy(wanted), steps)
    drafted, accepted = count(steps[:-1], HEAD)
    assert drafted == accepted > 20, "it drew what the target was about to draw"
    assert {len(step.tokens) for step in steps[:-1]} == {4}
    fixed = method_named("head@2", Drafting(nodes=50))
    assert fixed.name == "head@2" and not fixed.adaptive and fixed.drafting.nodes == 2


def test_plain_decoding_and_the_databases_alone_have_the_backend_spend_nothing_on_it() -> None:
    toy, wanted = toy_with(GOOD), generation(0.0, tokens=20)
    for name in ("plain", "hd"):
        head_of(toy).listening = True
        answered(toy, name, wanted)
        assert not head_of(toy).listening and not head_of(toy).calls
    answered(toy, "auto", wanted)
    assert head_of(toy).listening and head_of(toy).calls


# one tree


class Says:
    """A guess with a given law."""

    def __init__(self, chances: dict[int, float]) -> None:
        self.chances = chances

    def likeliest(self, count: int) -> list[tuple[int, float]]:
        return sorted(self.chances.items(), key=lambda pair: -pair[1])[:count]

    def probability(self, token: int) -> float:
        return self.chances.get(token, 0.0)

    def draw(self, position: int, sampling: Sampling) -> int:
        return next(iter(self.chances))


ROOT = (40, 41, 42)


def weighed(hierarchy: Hierarchy, known: Sequence[int], depth: int = 6) -> tuple[Tree, list[float]]:
    """A tree of up to 24 nodes, and the probability of the path to each row."""
    tree = Tree(known[-1])
    drafting = Drafting(nodes=24, threshold=0.001, budget="fixed")
    hierarchy.grow_tree(tree, known, Budget(drafting, depth, 100))
    return tree, hierarchy.chances()


def tree_with(guesses: dict[tuple[int, ...], dict[int, float]], temperature: float):
    """A hierarchy over a context that said 7 8 9 behind the root once, and a head with guesses."""
    sampling = Sampling(temperature=temperature, seed=2)
    tier, databases = HeadTier(sampling, noisy=temperature > 0), Databases()
    known = [*ROOT, 7, 8, 9, 10, 11, *ROOT]
    merged = databases.with_head(TIERS, tier, sampling if temperature > 0 else None)
    merged.observe(known, len(known))
    for path, chances in guesses.items():
        suffix = (*known, *path)[-64:]
        tier.add(suffix, Says(chances), len(path), len(known) + len(path))
    return merged, known


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_candidates_of_head_and_databases_are_in_one_tree_by_path_probability(
    temperature: float,
) -> None:
    guesses = {(): {50: 0.6, 7: 0.2}, (50,): {51: 0.9}, (50, 51): {52: 0.5, 53: 0.4}}
    merged, known = tree_with(guesses, temperature)
    tree, chances = weighed(merged, known)
    assert chances == sorted(chances, reverse=True) and chances[0] == 1.0
    paths = {tree.path(row): tree.sources[row] for row in range(1, len(tree.tokens))}
    assert paths[50,] == paths[50, 51] == HEAD and paths[7, 8] == CONTEXT
    for row in range(1, len(tree.tokens)):
        assert chances[row] <= chances[tree.parents[row]]
    grown = Tree(known[-1])
    merged.grow(grown, known, Budget(Drafting(nodes=6, threshold=0.001), 6, 100))
    lengths = dict(zip(grown.sources[1:], grown.match_lengths[1:], strict=True))
    assert lengths[HEAD] == 0, "a guess is no match of tokens"
    assert lengths.get(CONTEXT, 1) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_after_a_guess_only_its_node_is_looked_up_again(temperature: float) -> None:
    """The tree is that of a hierarchy that knew the guess from the beginning, in both versions."""
    grown = []
    for core in (None, native.core):
        with using(core):
            merged, known = tree_with({}, temperature)
            before, _ = weighed(merged, known)
            tier = merged.tiers[0]
            tier.add(tuple(known[-64:]), Says({50: 0.6, 7: 0.2}), 0, len(known))
            merged.forget([tuple(known[-64:])])
            after = weighed(merged, known)
            merged, _ = tree_with({(): {50: 0.6, 7: 0.2}}, temperature)
            whole = weighed(merged, known)
        assert after[0].tokens == whole[0].tokens != before.tokens and after[1] == whole[1]
        grown.append(after[0].tokens)
    assert grown[0] == grown[1]


def test_what_is_learned_beside_a_head_is_kept_apart_and_stored() -> None:
    calibration = Calibration()
    databases = Databases(calibration=calibration)
    toy = toy_with(GOOD)
    answered(toy, "hd+head", generation(0.7), databases=databases)
    rows = calibration.rows()
    assert rows and all(row.tier.startswith(WITH_HEAD) for row in rows), "hd learned nothing"
    assert any(row.tier == WITH_HEAD + HEAD for row in rows)
    again = Calibration(rows)
    assert sorted(again.rows()) == sorted(rows)
    one, other = (each.with_head().of(HEAD, PLACE) for each in (again, calibration))
    assert one.values == other.values


# the budget


@pytest.mark.parametrize("leaves", [None, 1])
@pytest.mark.parametrize("nodes", [1, 4, 9])
def test_the_budget_holds_for_both_together(nodes: int, leaves: int | None) -> None:
    toy, wanted = toy_with(GOOD, leaves), generation(0.7)
    method = method_named("hd+head", Drafting(nodes=nodes, budget="fixed"))
    drafters = method.drafters(warm_toy(), None, wanted.sampling, target=toy)
    steps = events_of(toy, PROMPT, wanted, drafters, method.drafting)
    assert 0 < max(sum(step.proposed.values()) for step in steps) <= nodes
    assert_lossless(plain_toy(wanted), steps)


# when it is asked


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    modules = "engine.decode", "engine.drafting.head", "engine.drafting.hierarchy"
    return clock_of(monkeypatch, *modules)


FORWARD, ROW = 1.0, 0.01


class WatchedHead(ToyHead):
    """Reports each call by its name before it is made."""

    def __init__(self, toy: ToyBackend, law: Law, report: Callable[[str], None]) -> None:
        assert toy.info.head is not None
        super().__init__(toy, toy.info.head, law)
        self.report = report

    def start(self, *asked):  # type: ignore[no-untyped-def]
        self.report("start")
        return super().start(*asked)

    def extend(self, *asked):  # type: ignore[no-untyped-def]
        self.report("extend")
        return super().extend(*asked)

    def forget(self) -> None:
        super().forget()
        self.report("forget")


class Timed(ClockedToy):
    """A forward takes a second, and a little more for each node; each call of its head takes as
    long as is stated."""

    def __init__(self, clock: Clock, law: Law, call: float) -> None:
        self.call, self.clock = call, clock
        super().__init__(clock, lambda nodes: FORWARD + ROW * nodes, guesses=law)

    def own_head(self) -> ToyHead:
        assert self.guesses is not None
        return WatchedHead(self, self.guesses, self.pass_time)

    def pass_time(self, name: str) -> None:
        self.clock.now += self.call if name != "forget" else 0.0


def timed(
    clock: Clock,
    law: Law,
    call: float,
    name: str,
    tokens: int = 700,
    temperature: float = 0.7,
    databases: Databases | None = None,
    prompt: Sequence[int] = PROMPT,
) -> tuple[float, list[Step], ToyHead]:
    """Plain decoding's time over that of an answer, its steps, and its head."""
    toy = Timed(clock, law, call)
    start = clock.now
    costs = CostCurve({n: FORWARD + ROW * n for n in (0, 1, 3, 7, 15, 31, 63)})
    wanted = generation(temperature, tokens=tokens)
    steps = answered(toy, name, wanted, costs, databases, prompt)
    return tokens * FORWARD / (clock.now - start), steps, head_of(toy)


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", ["head", "hd+head", "auto"])
@pytest.mark.parametrize("call", [0.02, 0.15, 0.6, 3.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shuffled_head_is_left_alone(
    clock: Clock, name: str, call: float, temperature: float
) -> None:
    """So is one that takes longer than it saves, however right it is."""
    gain, steps, head = timed(clock, shuffled, call, name, temperature=temperature)
    assert gain >= 0.97
    spent = head.calls * call
    assert 0 < spent < 0.03 * 700 + 4 * call, "it is tried again and again, but seldom"
    gain, steps, head = timed(clock, endless, 2.5, "head")
    assert gain >= 0.97 and head.calls < len(steps) / 10


def recorded(clock: Clock, law: Law, temperature: float, target: Law = toy_logits) -> HeadRecord:
    """What is known of a head after some answers by the default method."""
    toy = Timed(clock, law, 0.02)
    toy.logits = target
    costs = CostCurve({n: FORWARD + ROW * n for n in (0, 1, 3, 7, 15, 31, 63)})
    for seed in range(8):
        answered(toy, "auto", generation(temperature, seed, tokens=300), costs)
    return costs.gate.head.record


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_shuffled_head_is_found_broken(clock: Clock, temperature: float) -> None:
    record = recorded(clock, shuffled, temperature)
    assert record.broken and record.guesses < 200, record


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_good_head_on_a_hard_text_is_not(clock: Clock, temperature: float) -> None:
    """The text is nearly random, so its guesses do not hold, and it knows that."""

    @cache
    def hard(suffix: tuple[int, ...]) -> Floats:
        return 0.2 * toy_logits(suffix)

    @cache
    def nearly(suffix: tuple[int, ...]) -> Floats:
        return 0.2 * GOOD(suffix)

    record = recorded(clock, nearly, temperature, hard)
    assert record.guesses > 20 and not record.broken, record
    if temperature == 1.0:
        assert record.held < 0.1 * record.guesses


def test_above_temperature_1_a_head_is_not_judged(clock: Clock) -> None:
    assert recorded(clock, shuffled, 1.2) == HeadRecord()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_good_head_is_asked_as_deep_as_it_pays(clock: Clock, temperature: float) -> None:
    depths = []
    for call in (0.02, 0.4):
        gain, steps, head = timed(clock, GOOD, call, "head", temperature=temperature)
        depths.append(head.calls / sum(HEAD in step.levels for step in steps))
        assert gain > 1.15
    assert depths[0] > 3 and depths[0] > depths[1]


def test_both_together_beat_each_alone(clock: Clock) -> None:
    said = [token.id for token in tokens_of(answered(Timed(clock, GOOD, 0), "plain", LONG))]
    law, gains = deviating(2.0), {}
    for name in ("hd", "head", "hd+head"):
        databases = Databases()
        databases.context.observe(said[:350], 350)
        gains[name], *_ = timed(clock, law, 0.1, name, temperature=1.0, databases=databases)
    assert gains["hd+head"] > max(gains["hd"], gains["head"]) > 1.0
    databases = Databases()
    databases.context.observe(said, len(said))
    gain, steps, _ = timed(clock, shuffled, 0.5, "hd+head", temperature=1.0, databases=databases)
    assert gain > 1.5 and count(steps, CONTEXT)[1] > 300, "a head that backs off stops nobody else"


LONG = generation(1.0, tokens=700)


def test_where_databases_hold_a_chain_of_high_trust_the_head_is_not_asked(clock: Clock) -> None:
    known = [97 + (at * at) % 23 for at in range(20)] * 30
    copied = {tuple(known[at : at + 2]): known[at + 2] for at in range(20)}

    @cache
    def repeats(suffix: tuple[int, ...]) -> Floats:
        logits = endless(suffix).copy()
        logits[copied.get(suffix, 97)] += 30.0
        return logits

    toy = Timed(clock, repeats, 0.1)
    toy.logits = repeats
    costs = CostCurve({n: FORWARD + ROW * n for n in (0, 1, 3, 7, 15, 31, 63)})
    costs.gate.plain_after = 1000
    steps = answered(toy, "hd+head", generation(0.7, tokens=600), costs, prompt=known)
    late = steps[len(steps) // 2 :]
    assert count(late, CONTEXT)[1] > 100
    assert sum(HEAD in step.levels for step in late) <= len(late) / 8
    alone = answered(toy.open(), "head", generation(0.7, tokens=600), costs.fresh(), prompt=known)
    assert sum(HEAD in step.levels for step in alone) > len(alone) / 2, "alone it is"


def look(paths: Sequence[tuple[int, ...]], sources: Sequence[str], seconds: float) -> Look:
    tree = Tree(1)
    for path, source in zip(paths, sources, strict=True):
        row = 0
        for token in path[:-1]:
            row = tree.children[row][token]
        tree.add(row, path[-1], source)
    return Look(tree, [1.0] * (1 + len(tree)), seconds)


def test_a_token_that_the_head_alone_guessed_saves_a_step() -> None:
    """What databases draft after it would have been drafted in that step."""
    paths = [(5,), (5, 6), (5, 6, 7), (5, 6, 7, 8)]
    sources = [CONTEXT, HEAD, CONTEXT, HEAD]
    before, after = look(paths[:1], sources[:1], 1.0), look(paths, sources, 1.2)
    call = Call(0, 0.5, 0.1, before, after)
    for emitted, saved in (([9], 0), ([5, 9], 0), ([5, 6, 9], 1), ([5, 6, 7, 9], 1)):
        assert call.saved(emitted) == saved
    assert call.saved([5, 6, 7, 8, 9]) == 2 and call.rows == pytest.approx(0.2)
    lost = Call(0, 0.5, 0.1, after, before)
    assert lost.saved([5, 6, 9]) == -1 and lost.saved([9]) == 0


def test_nodes_that_others_add_later_are_no_gain_of_the_head() -> None:
    before, after = look([], [], 1.0), look([(5,)], [HEAD], 1.1)
    after.tree.add(1, 6, HEAD)
    assert Call(0, 0.5, 0.1, before, after).saved([5, 6, 7]) == 1


def test_a_head_that_rests_does_not_listen_until_shortly_before_it_is_tried(clock: Clock) -> None:
    toy = Timed(clock, shuffled, 0.6)
    heard: list[bool] = []
    head = head_of(toy)
    listen = head.listen
    head.listen = lambda on: (heard.append(on), listen(on))[1]  # type: ignore[method-assign]
    costs = CostCurve({n: FORWARD + ROW * n for n in (0, 1, 3, 7, 15, 31, 63)})
    steps = answered(toy, "auto", generation(0.7, tokens=600), costs)
    asked = [at for at, step in enumerate(steps) if HEAD in step.levels]
    assert 0.0 < sum(heard) / len(heard) < 0.7
    # The first call of `listen` comes before the prompt.
    assert all(heard[at] for at in asked) and all(heard[at + 1] for at in asked)


def test_a_fixed_budget_that_databases_fill_leaves_room_for_better_guesses() -> None:
    toy, method = toy_with(GOOD), method_named("hd+head", Drafting(nodes=2, budget="fixed"))
    drafters = method.drafters(warm_toy(), None, Sampling(seed=1), target=toy)
    steps = events_of(toy, PROMPT, generation(0.7, 1), drafters, method.drafting)
    assert any(HEAD in step.levels for step in steps if step.proposed)


# what may go wrong


class Mad(LogitGuess):
    """Says what no law says."""

    def likeliest(self, count: int) -> list[tuple[int, float]]:
        return [(10**6, 0.9), (-5, float("nan"))]

    def draw(self, position: int, sampling: Sampling) -> int:
        return 10**6


@pytest.mark.parametrize("where", ["start", "extend", "forget", "law"])
@pytest.mark.parametrize("name", ["head", "hd+head", "head@3"])
def test_a_head_that_fails_or_says_nonsense_costs_no_text(
    where: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails is left out with a notice, and databases draft on."""
    toy, wanted, notices, calls = toy_with(GOOD), generation(0.7), list[str](), list[str]()

    def fail(called: str) -> None:
        calls.append(called)
        if called == where and calls.count(called) > 3:
            raise RuntimeError("the head fell off")

    toy.head = WatchedHead(toy, GOOD, fail)
    if where == "law":
        monkeypatch.setattr("tests.support.toy.LogitGuess", Mad)
    method = method_named(name)
    found = method.drafters(warm_toy(), None, wanted.sampling, target=toy)
    guarded = [FailSafeDrafter(each, notices.append) for each in found]
    steps = events_of(toy, PROMPT, wanted, guarded, method.drafting)
    assert_lossless(plain_toy(wanted), steps)
    if where != "law":
        [notice] = notices
        assert "head" in notice and "the head fell off" in notice
        late = steps[len(steps) // 2 :]
        assert not any(HEAD in step.proposed for step in late)
        assert (name == "hd+head") == any(step.proposed for step in late)


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_stop_ends_the_answer_at_once(name: str, at: int) -> None:
    toy, wanted = toy_with(GOOD), generation(0.7)
    method, seen = method_named(name), list[Step]()

    def cancelled() -> bool:
        return len(seen) >= at

    drafters = method.drafters(warm_toy(), None, wanted.sampling, cancelled, toy)
    events = decode(toy, PROMPT, drafters, wanted, method.drafting, cancelled)
    seen += (event for event in events if isinstance(event, Step) and (seen.append(event) or False))
    plain = [token.id for token in tokens_of(plain_toy(wanted))]
    said = [token.id for token in tokens_of(seen)]
    assert said == plain[: len(said)] and seen[-1].finish in ("cancelled", "length", "eos")


# methods


@pytest.mark.parametrize("name", ["hd+head+hsd", "hd+head+hsd:small@4"])
def test_a_stack_drafts_where_databases_and_head_end(name: str) -> None:
    wanted, toy, family = generation(0.7), toy_with(BAD), toy_family()
    method = method_named(name)
    drafters = method.drafters(warm_toy(), family, wanted.sampling, target=toy)
    assert [each.name for each in drafters] == [DATABASES, HEAD, STACK]
    for costs in (None, curves()["usual"]):
        steps = events_of(toy, PROMPT, wanted, drafters, method.drafting, costs=costs)
        assert_lossless(plain_toy(wanted), steps)
    assert head_of(toy).calls


def test_methods_that_need_a_head_say_why_there_is_none() -> None:
    for name in ("head", "hd+head", "head@2"):
        method = method_named(name)
        with pytest.raises(SettingError, match="toy brings no head"):
            method.drafters(Databases(), target=ToyBackend())
        assert "MTP" in method.missing(ToyBackend().info)
        silent = ToyBackend(guesses=GOOD)
        assert silent.info.head is not None
        silent.info = replace(silent.info, head=replace(silent.info.head, note="No memory."))
        with pytest.raises(SettingError, match="toy head head of toy does not draft: No memory"):
            method.drafters(Databases(), target=silent)
        flat = ToyBackend(guesses=GOOD)
        flat.info = replace(flat.info, can_tree=False, note="It is flat.")
        assert "toy decodes plainly. It is flat." in method.missing(flat.info)
        assert not method.missing(ToyBackend(guesses=GOOD).info)


def test_the_usual_method_asks_a_head_where_there_is_one() -> None:
    usual = METHODS["auto"]
    names = [each.name for each in usual.drafters(Databases(), target=ToyBackend())]
    assert names == [DATABASES] and usual.adaptive
    toy = ToyBackend(guesses=GOOD)
    assert [each.name for each in usual.drafters(Databases(), target=toy)] == [DATABASES, HEAD]
    assert not usual.missing(ToyBackend().info)
    some = usual.using(Drafting(tiers=(STATISTICS,)))
    assert some.drafting.tiers == (STATISTICS,)


@pytest.mark.parametrize("depth", ["0", "x", "", "1000", "-1", "²"])
def test_a_fixed_depth_is_a_number(depth: str) -> None:
    with pytest.raises(SettingError, match="whole number|no method"):
        method_named(f"head@{depth}")


@pytest.mark.parametrize("name", ["head", "hd+head", "head@2"])
def test_a_prompt_is_read_once_the_head_is_asked_and_not_before(name: str) -> None:
    toy = ToyBackend(guesses=GOOD)
    drafters = method_named(name).drafters(Databases(), sampling=Sampling(), target=toy)
    head = head_of(toy)
    head.listen(True)
    toy.prefill(PROMPT, never)
    drafters[-1].observe(PROMPT, len(PROMPT))
    assert head.rows == 0
    drafters[-1].grow(Tree(PROMPT[-1]), PROMPT, Budget(Drafting(nodes=8), 8, 260))
    assert head.rows >= len(PROMPT)
