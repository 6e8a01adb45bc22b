"""Stacks of draft models: a level's tokens, cache, room and credit; whether the top leads."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import pytest

from engine.backends.base import Backend, LogitScores
from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.drafting.costs import LARGEST, CostCurve
from engine.hsd.family import LAG, Family, LevelDrafter, Stack
from engine.sampling import Floats
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import CONTEXT, DRAFT, RULES, STACK, Rule, Step, Work
from engine.verify import Match, verifier
from tests.support.lossless import (
    DEVIATIONS,
    PROMPT,
    Adversary,
    Stated,
    Strict,
    as_plain,
    events_of,
    generation,
    ids,
    made_up,
    tokens_of,
)
from tests.support.toy import CHUNK, END, VOCABULARY, ToyBackend, deviating, toy_logits

STACKS = [names for depth in (1, 2, 3) for names in combinations(DEVIATIONS, depth)]
FIXED = Drafting(budget="fixed")


def toy_models(names: Sequence[str] = tuple(DEVIATIONS), context: int = 4096) -> dict[str, Strict]:
    return {name: Strict(context, name, deviating(DEVIATIONS[name])) for name in names}


def stacked(
    models: Mapping[str, Backend],
    batches: Sequence[int],
    sampling: Sampling,
    rule: Rule = "match",
    below: Drafter | None = None,
    vocabulary: int | None = None,
) -> list[LevelDrafter]:
    """The levels of a stack, the smallest first."""
    vocabulary = vocabulary or min(model.info.vocabulary_size for model in models.values())
    levels: list[LevelDrafter] = []
    for number, (name, backend) in enumerate(models.items(), start=1):
        at_work = verifier(rule, sampling.seed, number, vocabulary)
        batch = batches[number - 1]
        below = LevelDrafter(name, backend, batch, sampling, at_work, vocabulary, below)
        levels.append(below)
    return levels


def stack_of(models: Mapping[str, Backend], batches: Sequence[int], sampling: Sampling) -> Stack:
    return Stack(stacked(models, batches, sampling)[-1], 2.0, 0.0)


def drafted_by_models(steps: Sequence[Step]) -> int:
    return sum(token.source.startswith(DRAFT) for token in tokens_of(steps))


# One level: its tokens, its cache, its room, its credit.


def plenty(depth: int = 40, nodes: int = LARGEST) -> Budget:
    return Budget(Drafting(nodes=nodes, budget="fixed"), depth, VOCABULARY)


def grown(
    level: LevelDrafter, tokens: Sequence[int], budget: Budget | None = None
) -> tuple[Tree, Mapping[str, Work]]:
    tree = Tree(tokens[-1])
    return tree, level.grow(tree, tokens, budget or plenty())


def said_by(logits: Callable[[tuple[int, ...]], Floats], wanted: Generation, text: Sequence[int]):
    """What a model says after a text by itself."""
    return tuple(ids(events_of(ToyBackend(logits=logits), text, wanted)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("names", STACKS, ids="/".join)
def test_caches_hold_what_was_decided_and_own_drafts(names: tuple[str, ...], rule: Rule) -> None:
    """Whatever is kept of a draft, and however much others add to it before the next one."""
    draw, sampling = random.Random(7), Sampling(1.0, seed=4)
    levels = stacked(toy_models(names), (3, 2, 4), sampling, rule)
    top, tokens = levels[-1], list(PROMPT)
    top.observe(tokens, len(tokens))
    for _ in range(60):
        tree, _ = grown(top, tokens, plenty(draw.randrange(1, 9)))
        path = tree.path(len(tree))
        for level in levels:
            backend = level.backend
            assert isinstance(backend, ToyBackend) and backend.cache == level.cached
            assert level.cached[: len(tokens) - 1] == tokens[:-1]
        known = min(len(top.cached), len(tokens) + len(path))
        assert top.cached[:known] == [*tokens, *path][:known]
        if rule == "match":
            wanted = Generation(sampling, max(1, len(path)))
            assert path == said_by(deviating(DEVIATIONS[names[-1]]), wanted, tokens)[: len(path)]
        new = [*path[: draw.randrange(len(path) + 1)]]
        new += [draw.randrange(97, 123) for _ in range(draw.choice((1, 1, 2, LAG + 4)))]
        tokens += new
        top.observe(tokens, len(new))


@pytest.mark.parametrize("rule", RULES)
def test_a_level_never_takes_more_room_than_there_is(rule: Rule) -> None:
    lengths = set()
    for depth in (0, 1, 2, 3, 7, 20):
        for nodes in (0, 1, 2, 5, 9):
            for there in (0, 1, 4):
                level = stacked(toy_models(), (4, 3, 6), Sampling(0.7), rule)[-1]
                tree = Tree(PROMPT[-1])
                for token in range(there):
                    tree.add(0, token, CONTEXT)
                level.grow(tree, PROMPT, plenty(depth, nodes))
                longest = max(0, min(depth, nodes - there))
                assert len(tree) - there <= longest and max(tree.depths) <= max(there > 0, longest)
                assert len(tree) - there >= min(longest, 6)
                lengths.add(len(tree) - there)
    assert lengths >= {0, 1, 2, 3, 5, 7}


def ending(at: int) -> Callable[[tuple[int, ...]], Floats]:
    """A model that counts up, and ends its answer after token `at`."""

    def logits(suffix: tuple[int, ...]) -> Floats:
        found = toy_logits(()) * 0
        found[END if suffix[-1] == at else suffix[-1] + 1] = 30.0
        return found

    return logits


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_end_token_ends_the_chain(depth: int, rule: Rule) -> None:
    models = {str(n): ToyBackend(name=str(n), logits=ending(104)) for n in range(depth)}
    top = stacked(models, (4, 6, 9), Sampling(0.7), rule)[-1]
    for start in (101, 103, 104):
        tree, _ = grown(top, [1, start])
        assert tree.path(len(tree)) == (*range(start + 1, 105), END)


@pytest.mark.parametrize("rule", RULES)
def test_tokens_beyond_the_common_vocabulary_are_not_handed_up(rule: Rule) -> None:
    """By the rule "match" the chain ends before them, by "rejection" they are not drawn."""
    for seed in range(20):
        top = stacked(toy_models(("small", "mid")), (4, 8), Sampling(1.5, seed=seed), rule,
                      vocabulary=115)[-1]  # fmt: skip
        tree, _ = grown(top, PROMPT)
        assert max(tree.tokens[1:], default=0) < 115
        assert (len(tree) >= 8) or rule == "match"
        assert all(law.size == 115 for law in tree.distributions.values())
        assert set(tree.distributions) == (set() if rule == "match" else {*range(1, len(tree) + 1)})


def test_a_token_is_credited_to_the_lowest_that_said_it() -> None:
    same = deviating(1.0)
    models = {"small": ToyBackend(logits=same), "mid": ToyBackend(logits=same)}
    top = stacked(models, (3, 3), Sampling(0.7, seed=2))[-1]
    tree, work = grown(top, PROMPT)
    assert tree.sources[1:] == ["draft:small"] * 3 + ["draft:mid"]
    assert set(work) == {"draft:small", "draft:mid"}
    wanted = generation(0.7, 2, 4)
    truth = [*PROMPT, *said_by(same, wanted, PROMPT)]
    database = Adversary(lambda tokens: [tuple(truth[len(tokens) : len(tokens) + 1])], CONTEXT)
    models = {"small": ToyBackend(logits=same)}
    top = stacked(models, [4], Sampling(0.7, seed=2), below=database)[-1]
    tree, work = grown(top, PROMPT)
    assert tree.sources[1:] == [CONTEXT, "draft:small"] * 2
    assert tree.match_lengths[1:] == [1, 0, 1, 0] and tree.path(4) == tuple(truth[-4:])
    assert set(work) == {"draft:small"} and work["draft:small"][1:] == (2, 2, 2)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("names", STACKS, ids="/".join)
def test_work_counts_every_forward_and_what_was_handed_up(names: tuple[str, ...], rule: Rule):
    models = toy_models(names)
    for seed in range(8):
        top = stacked(models, (3, 2, 5), Sampling(0.7, seed=seed), rule)[-1]
        for model in models.values():
            model.forwards = 0
        tree, work = grown(top, PROMPT, plenty(9))
        assert set(work) == {DRAFT + name for name in names}
        lowest, *others = (work[DRAFT + name] for name in names)
        for model, done in zip(models.values(), (lowest, *others), strict=True):
            assert done.forwards == model.forwards > 0 and done.seconds > 0
        assert (lowest.drafted, lowest.accepted) == (0, 0)
        handed = lowest.forwards
        for done in others:
            assert 0 <= done.accepted <= done.drafted <= handed
            handed = done.accepted + done.forwards
        assert len(tree) <= handed, "each round adds one to what is accepted"


def test_a_level_reads_the_prompt_at_once_and_what_follows_later() -> None:
    model = Strict()
    level = stacked({"small": model}, [3], Sampling(0.0))[-1]
    level.observe(PROMPT, len(PROMPT))
    assert model.cache == level.cached == list(PROMPT[:-1]) and model.forwards == 0
    level.observe([*PROMPT, 5, 6], 2)
    level.finish([*PROMPT, 5, 6], 2)
    assert model.cache == list(PROMPT[:-1]) and model.forwards == 0


@pytest.mark.parametrize("read", [0, 1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_a_stop_ends_the_reading_of_draft_models(rule: Rule, read: int) -> None:
    """Each stops within one of its forwards, drafts nothing, and reads on when asked again."""
    prompt = [97 + at % 26 for at in range(6 * CHUNK)]
    for names in STACKS:
        models, left = toy_models(names), iter([False] * read)
        profile = made_up([*DEVIATIONS, "toy"])
        family = Family(ToyBackend(), models, profile)
        plan = "/".join(f"{name}@3" for name in names)
        chosen = family.plan(plan, rule)
        stack = family.stack(chosen, Sampling(), rule, None, partial(next, left, True))
        stack.observe(prompt, len(prompt))
        held = [len(model.cache) for model in models.values()]
        assert sum(held) == read * CHUNK < len(prompt)
        tree, _ = grown(stack.top, prompt)
        assert not len(tree) and not any(model.forwards for model in models.values())
        again = family.stack(chosen, Sampling(), rule, None)
        again.observe(prompt, len(prompt))
        fresh = Family(ToyBackend(), toy_models(names), profile).stack(
            chosen, Sampling(), rule, None
        )
        fresh.observe(prompt, len(prompt))
        paths = [grown(each.top, prompt)[0] for each in (again, fresh)]
        assert paths[0].tokens == paths[1].tokens and len(paths[0]) >= 3


def test_a_level_whose_reading_was_stopped_reads_again_before_it_drafts() -> None:
    """Whatever its flag says by then: what its cache holds is not what it was told of."""
    model, asked = Strict(), iter([False, False, True])
    level = LevelDrafter(
        "small", model, 3, Sampling(0.0), Match(), VOCABULARY, cancelled=lambda: next(asked, False)
    )
    first = [*PROMPT[:20], *PROMPT]
    level.observe(first, len(first))
    other = [97 + at % 26 for at in range(3 * CHUNK)]
    level.observe(other, len(other))
    assert model.cache == other[:CHUNK]
    for prompt in (first, other):
        tree, _ = grown(level, prompt)
        alone = stacked({"small": Strict()}, [3], Sampling(0.0))[-1]
        assert tree.tokens == grown(alone, prompt)[0].tokens and model.cache == level.cached


def test_a_level_stays_within_the_room_of_its_model() -> None:
    class Narrow(Strict):
        def depth_limit(self, length: int) -> int | None:
            return 30 - length

    for length in (20, 28, 29, 30):
        level = stacked({"small": Narrow()}, [3], Sampling(0.0))[-1]
        tree, _ = grown(level, [*PROMPT, *PROMPT][:length])
        assert len(tree) == min(3, 30 - length)


def test_the_drafter_below_reads_the_prompt_and_hears_what_was_said_after_it() -> None:
    heard: list[tuple[tuple[int, ...], int]] = []

    class Listener(Adversary):
        def observe(self, tokens: Sequence[int], new: int) -> None:
            heard.append((tuple(tokens), new))

    top = stacked({"small": Strict()}, [4], Sampling(0.0), below=Listener(lambda tokens: []))[-1]
    top.observe(PROMPT, len(PROMPT))
    tree, _ = grown(top, PROMPT)
    path = tree.path(4)
    assert heard[0] == (PROMPT, len(PROMPT))
    assert heard[1:] == [((*PROMPT, *path[:n]), 1) for n in (1, 2, 3, 4)]


def test_a_levels_time_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("engine.hsd.family.perf_counter", lambda: now[0])

    class Slow(ToyBackend):
        def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
            now[0] += 1.0 if self.info.name == "small" else 10.0
            return super().score(tree, sampling)

    models = {name: Slow(name=name) for name in ("small", "mid")}
    _, work = grown(stacked(models, (3, 8), Sampling(0.7))[-1], PROMPT)
    for name, seconds in (("small", 1.0), ("mid", 10.0)):
        done = work[DRAFT + name]
        assert done.seconds == seconds * done.forwards > 0


# Whether the top leads, or the databases.


class Top:
    """The top of a stack as the choice sees it: a chain of `batch`, after `seconds`."""

    batch = 4

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.now, self.asked = seconds, 0.0, 0
        self.heard: list[tuple[str, int]] = []

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        self.asked += 1
        self.now += self.seconds
        row = 0
        for token in range(self.batch):
            row = tree.add(row, token, "draft:top")
        return {"draft:top": Work(self.seconds, self.batch)}

    def observe(self, tokens: Sequence[int], new: int) -> None:
        self.heard.append(("observe", new))

    def finish(self, tokens: Sequence[int], new: int) -> None:
        self.heard.append(("finish", new))


def stack_on(
    top: Top, tokens: float, seconds: float, monkeypatch: pytest.MonkeyPatch | None = None
) -> Stack:
    if monkeypatch is not None:
        monkeypatch.setattr("engine.hsd.family.perf_counter", lambda: top.now)
    level: Any = top
    return Stack(level, tokens, seconds)


def flat(extra: float = 0.0) -> CostCurve:
    """Every forward takes a second, one over a draft `extra` more."""
    return Stated({0: 1.0, 1: 1.0 + extra, LARGEST: 1.0 + extra})


def leads(
    stack: Stack, nodes: int = 0, likely: float = 1.0, costs: CostCurve | None = None, due: str = ""
) -> bool:
    """Whether the stack drafts behind so many nodes of databases."""
    budget, tree = Budget(Drafting(threshold=0.0), 20, VOCABULARY, costs, due), Tree(0)
    for token in range(nodes):
        tree.add(0, token, CONTEXT)
        budget.added(len(tree), likely)
    return bool(stack.grow(tree, [0], budget))


@pytest.mark.parametrize(
    ("nodes", "likely", "seconds", "pays"),
    [
        (1, 0.5, 0.9, True),
        (1, 0.5, 1.1, False),
        (2, 0.5, 0.4, True),
        (2, 0.5, 0.6, False),
        (4, 0.9, 0.0, False),
    ],
)
def test_a_stack_drafts_where_it_beats_what_the_databases_found(
    nodes: int, likely: float, seconds: float, pays: bool
) -> None:
    assert leads(stack_on(Top(), 3.0, seconds), nodes, likely, flat()) == pays


def test_a_stack_that_has_nothing_to_say_costs_nobody_a_draft() -> None:
    """As when the context of its top is full: the others' drafts stay, and nothing is learned."""
    short = toy_models(["mid"], len(PROMPT))
    stack = Stack(stacked(short, [3], Sampling(0.0))[-1], 9.0, 0.0)
    tree = Tree(PROMPT[-1])
    tree.add(0, 97, CONTEXT)
    for _ in range(3):
        stack.grow(tree, PROMPT, Budget(Drafting(), 20, VOCABULARY, flat()))
        stack.observe(PROMPT, 2)
    assert tree.path(1) == (97,) and (stack.tokens, stack.seconds) == (9.0, 0.0)


def test_draft_models_that_back_off_leave_a_prompt_unread_until_they_draft() -> None:
    model = toy_models(["mid"])
    wanted, costs = Generation(Sampling(0.0), 400), Stated({0: 1.0, 63: 1.0})
    costs.gate.gains[STACK].backoff = costs.gate.gains[STACK].wait = 100
    stack = stack_of(model, [3], wanted.sampling)
    fast = as_plain(wanted, [stack], Drafting(), costs=costs)
    first = next(at for at, step in enumerate(fast) if step.levels)
    assert first == 100 and stack.top.valid
