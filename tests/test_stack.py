"""Stacks of draft models: the same text as plain decoding, whatever they draft."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import pytest

from engine.backends.base import Backend
from engine.backends.toy import END, VOCABULARY, ToyBackend, deviating, toy_logits
from engine.budget import Budget
from engine.chat import Chat
from engine.costs import LARGEST, CostCurve
from engine.decode import never
from engine.drafters.base import Drafter, Likely
from engine.hsd.family import Family
from engine.hsd.stack import LAG, RETRY, Level, Stack
from engine.methods import Databases, drafters_of, method_named
from engine.sampling import Floats
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import CONTEXT, DRAFT, RULES, TARGET, Message, Prefill, Rule, Step, Work
from engine.verify import Match, verifier
from tests.test_lossless import (
    CUTS,
    DEVIATIONS,
    PROMPT,
    QUESTIONS,
    TEMPERATURES,
    Adversary,
    Stated,
    Strict,
    assert_lossless,
    cold,
    curves,
    events_of,
    generation,
    made_up,
    plain_toy,
    tokens_of,
    toy_family,
    warm_toy,
)

STACKS = [names for depth in (1, 2, 3) for names in combinations(DEVIATIONS, depth)]
PLANS = (
    "single:mid",
    "hsd:tiny@3",
    "hsd:small@4/mid@2",
    "hsd:tiny@2/small@2/mid@3",
    "hsd:databases/small@4",
    "hsd:databases/tiny@3/mid@5",
    "hd+hsd:small@4",
    "hd+hsd:tiny@4/mid@2",
    "hd+hsd:databases/small@4",
)
"""Draft models alone, with the databases below the smallest, beside the stack, and both."""
DRAWS = [(0.0, 0), (0.7, 0), (0.7, 2), (1.0, 0), (1.0, 3), (1.5, 0), (1.5, 3), (1.5, 13)]
"""Temperatures and seeds; with half of them the toy's answer has an end."""
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
) -> list[Level]:
    """The levels of a stack, the smallest first."""
    vocabulary = vocabulary or min(model.info.vocabulary_size for model in models.values())
    levels: list[Level] = []
    for number, (name, backend) in enumerate(models.items(), start=1):
        at_work = verifier(rule, sampling.seed, number, vocabulary)
        batch = batches[number - 1]
        below = Level(name, backend, batch, sampling, at_work, vocabulary, below)
        levels.append(below)
    return levels


def stack_of(models: Mapping[str, Backend], batches: Sequence[int], sampling: Sampling) -> Stack:
    return Stack(stacked(models, batches, sampling)[-1], 2.0, 0.0)


def ids(steps: Sequence[Step]) -> list[int]:
    return [token.id for token in tokens_of(steps)]


def drafted_by_models(steps: Sequence[Step]) -> int:
    return sum(token.source.startswith(DRAFT) for token in tokens_of(steps))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("batches", [(1, 1, 1), (3, 2, 4), (8, 5, 2)])
@pytest.mark.parametrize("names", STACKS, ids="/".join)
def test_every_stack_says_what_plain_decoding_says(
    names: tuple[str, ...], batches: tuple[int, ...], seed: int, temperature: float
) -> None:
    wanted = generation(temperature, seed, 120)
    stack = stack_of(toy_models(names), batches, wanted.sampling)
    fast = events_of(ToyBackend(), PROMPT, wanted, [stack], FIXED)
    assert_lossless(plain_toy(wanted), fast)
    assert len(fast) < len(plain_toy(wanted))


@pytest.mark.parametrize("costs", curves())
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_whatever_a_forward_costs(plan: str, costs: str) -> None:
    method, curve, databases = method_named(plan), curves()[costs], warm_toy()
    family, drafted = toy_family(), 0
    for temperature, seed in DRAWS:
        wanted = generation(temperature, seed)
        drafters = drafters_of(method, databases, family, wanted.sampling)
        fast = events_of(ToyBackend(), PROMPT, wanted, drafters, method.drafting, costs=curve)
        assert_lossless(plain_toy(wanted), fast)
        drafted += drafted_by_models(fast)
    assert drafted > 7 or costs in ("never", "learning")


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_with_every_cut(plan: str, cuts: dict[str, float]) -> None:
    method, databases, family = method_named(plan, FIXED), warm_toy(), toy_family()
    for seed, temperature in enumerate((0.7, 1.0, 1.5)):
        wanted = generation(temperature, seed, **cuts)
        drafters = drafters_of(method, databases, family, wanted.sampling)
        fast = events_of(ToyBackend(), PROMPT, wanted, drafters, method.drafting)
        assert_lossless(plain_toy(wanted), fast)


@pytest.mark.parametrize("plan", PLANS)
def test_draft_models_may_have_samplers_of_their_own(plan: str) -> None:
    own = {"tiny": Sampling(0.0), "small": Sampling(1.3, top_k=9), "mid": Sampling(0.4, top_p=0.7)}
    method, family, usual = method_named(plan, FIXED), toy_family(own), toy_family()
    differs = False
    for seed, temperature in enumerate(TEMPERATURES):
        wanted, runs = generation(temperature, seed), []
        for each in (family, usual):
            drafters = drafters_of(method, warm_toy(), each, wanted.sampling)
            runs.append(events_of(ToyBackend(), PROMPT, wanted, drafters, method.drafting))
            assert_lossless(plain_toy(wanted), runs[-1])
        differs |= runs[0] != runs[1]
    assert differs, "their samplers are heeded"


@pytest.mark.parametrize("plan", PLANS)
def test_an_answer_ends_where_the_plain_one_does(plan: str) -> None:
    method, family, ends = method_named(plan, FIXED), toy_family(), Counter[str | None]()
    for temperature, seed in DRAWS:
        sampling = Sampling(temperature, seed=seed)
        text = "".join(t.text for t in tokens_of(plain_toy(generation(temperature, seed))))
        for most, context, stop in [
            (1, 4096, ()),
            (2, 4096, ()),
            (17, 4096, ()),
            (80, len(PROMPT) + 1, ()),
            (80, len(PROMPT) + 13, ()),
            (80, 4096, (text[10:13] or "x",)),
            (80, 4096, ("nowhere", "e")),
        ]:
            wanted = Generation(sampling, most, stop)
            drafters = drafters_of(method, warm_toy(), family, sampling)
            fast = events_of(Strict(context), PROMPT, wanted, drafters, method.drafting)
            assert_lossless(plain_toy(wanted, PROMPT, context), fast)
            ends[fast[-1].finish] += 1
    assert min(ends[end] for end in ("length", "context", "stop", "eos")) > 3


@pytest.mark.parametrize("left", [-40, -1, 0, 1, 2, 3, 10, 40])
@pytest.mark.parametrize("shorter", ["tiny", "mid", "both"])
def test_draft_models_may_have_a_shorter_context_than_the_target(shorter: str, left: int) -> None:
    """Where theirs is full they are silent, the others go on."""
    models = toy_models(("tiny", "mid"))
    for name in models:
        if shorter in (name, "both"):
            short = max(1, len(PROMPT) + left)
            models[name].info = replace(models[name].info, context_length=short)
    wanted = generation(0.7, 3)
    stack = stack_of(models, (3, 2), wanted.sampling)
    fast = events_of(ToyBackend(), PROMPT, wanted, [stack], FIXED)
    assert_lossless(plain_toy(wanted), fast)
    end = len(PROMPT) + (left if shorter != "tiny" else 999)
    late = [token for token in tokens_of(fast) if token.position >= end]
    assert {token.source for token in late} <= {TARGET}
    assert drafted_by_models(fast) > 0 or left < 3


def test_tokens_that_a_draft_model_does_not_know_silence_it() -> None:
    """Ids beyond the smaller vocabulary: in the prompt, in the answer, in an earlier answer."""
    for known in (100, 110, 118):
        model = Strict(name="small", logits=lambda suffix: toy_logits(suffix)[:known])  # noqa: B023
        model.info = replace(model.info, vocabulary_size=known)
        prompt = [token for token in PROMPT if token < known]
        for text in (prompt, [*prompt, 119, *prompt]):
            for seed, temperature in enumerate(TEMPERATURES):
                wanted = generation(temperature, seed)
                top = Level("small", model, 3, wanted.sampling, Match(), known)
                fast = events_of(ToyBackend(), text, wanted, [Stack(top, 2.0, 0.0)], FIXED)
                assert_lossless(events_of(ToyBackend(), text, wanted), fast)
                assert all(t.id < known for t in tokens_of(fast) if t.source == "draft:small")


@pytest.mark.parametrize("plan", PLANS)
def test_a_conversation_goes_on_in_the_caches_of_all_models(plan: str) -> None:
    """Also where an earlier turn is changed, so that all of them have to roll back."""
    method, family, backend = method_named(plan, FIXED), toy_family(), ToyBackend()
    chat, databases, messages = Chat(backend), Databases(), list[Message]()
    for turn, seed in enumerate((4, 5, 6, 7)):
        if turn == 3:
            messages = [*messages[:3], Message("assistant", "No, it was not like that.")]
        messages.append(Message("user", f"and the tale of {turn} then"))
        prompt, wanted = chat.prompt(messages), generation(0.7, seed)
        drafters = drafters_of(method, databases, family, wanted.sampling)
        events = list(chat.reply(prompt, drafters, wanted, method.drafting))
        prefill, *steps = events
        assert isinstance(prefill, Prefill) and (prefill.reused > 0) == (turn > 0)
        steps = [event for event in steps if isinstance(event, Step)]
        assert_lossless(events_of(ToyBackend(), prompt, wanted), steps)
        messages.append(Message("assistant", "".join(t.text for t in tokens_of(steps)) or "-"))


def test_draft_models_read_of_a_second_turn_only_what_is_new() -> None:
    model, wanted = toy_models(["mid"])["mid"], generation(0.7, 0)
    first = events_of(
        ToyBackend(), PROMPT, wanted, [stack_of({"mid": model}, [3], wanted.sampling)]
    )
    text = [*PROMPT, *ids(first)]
    again = Level("mid", model, 3, wanted.sampling, Match(), VOCABULARY)
    assert model.prefill([*text, *PROMPT], never) > len(text) - 8
    again.observe([*text, *PROMPT], len(text) + len(PROMPT), None)
    assert again.cached == model.cache == [*text, *PROMPT][:-1]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("batches", [(4,), (3, 7), (2, 4, 6)])
def test_the_target_itself_as_draft_model_is_always_right(
    batches: tuple[int, ...], temperature: float
) -> None:
    twins = {f"twin{number}": Strict() for number in range(len(batches))}
    for seed in range(3):
        wanted = generation(temperature, seed)
        top = stacked(twins, batches, wanted.sampling)[-1]
        fast = events_of(ToyBackend(), PROMPT, wanted, [Stack(top, 2.0, 0.0)], FIXED)
        assert_lossless(plain_toy(wanted), fast)
        assert all(step.accepted == step.proposed for step in fast)
        assert all(len(step.tokens) > batches[-1] for step in fast[:-1])
        for step in fast:
            assert all(kept == handed for _, handed, kept in step.levels.values())


# One level: its tokens, its cache, its room, its credit.


def plenty(depth: int = 40, nodes: int = LARGEST) -> Budget:
    return Budget(Drafting(nodes=nodes, budget="fixed"), depth, VOCABULARY)


def grown(
    level: Level, tokens: Sequence[int], budget: Budget | None = None
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
    top.observe(tokens, len(tokens), None)
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
        top.observe(tokens, len(new), None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_cache_lacks_may_be_read_before_or_with_the_drafts(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, prefills = [], []
    for lag in (0, 1, LAG, 1000):
        monkeypatch.setattr("engine.hsd.stack.LAG", lag)
        draw, sampling, paths = random.Random(3), Sampling(temperature, seed=1), []
        levels, tokens = stacked(toy_models(), (3, 2, 4), sampling), list(PROMPT)
        levels[-1].observe(tokens, len(tokens), None)
        calls: list[int] = []
        for level in levels:
            monkeypatch.setattr(level.backend, "prefill", counted(level.backend, calls))
        for _ in range(40):
            tree, _ = grown(levels[-1], tokens)
            paths.append(tree.path(len(tree)))
            tokens += paths[-1][: draw.randrange(3)]
            tokens += draw.choices(range(97, 123), k=draw.randrange(1, 30))
        found.append(paths)
        prefills.append(len(calls))
    assert found[0] == found[1] == found[2] == found[3]
    assert prefills[0] > prefills[2] > prefills[3] > 0


def counted(backend: Backend, calls: list[int]) -> Callable[..., int]:
    """The prefill of a backend, each call of which is written down."""
    prefill = backend.prefill

    def noted(tokens: Sequence[int], cancelled: Callable[[], bool]) -> int:
        calls.append(len(tokens))
        return prefill(tokens, cancelled)

    return noted


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


def test_a_level_gathers_its_batch_and_hands_up_what_the_last_round_said() -> None:
    for batch in (1, 2, 5, 9):
        alone = stacked(toy_models(["mid"]), [batch], Sampling(0.0))[-1]
        assert len(grown(alone, PROMPT)[0]) == batch
    lengths = set()
    for seed in range(20):
        top = stacked(toy_models(("small", "mid")), (4, 6), Sampling(0.7, seed=seed))[-1]
        lengths.add(len(grown(top, PROMPT)[0]))
    assert min(lengths) >= 6 and 6 < max(lengths) <= 10


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
        assert all(law.size == 115 for law in tree.laws.values())
        assert set(tree.laws) == (set() if rule == "match" else {*range(1, len(tree) + 1)})


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
    assert work[CONTEXT].forwards == 0 and work["draft:small"][1:] == (2, 2, 2)


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
    level.observe(PROMPT, len(PROMPT), None)
    assert model.cache == level.cached == list(PROMPT[:-1]) and model.forwards == 0
    level.observe([*PROMPT, 5, 6], 2, None)
    level.finish([*PROMPT, 5, 6], 2)
    assert model.cache == list(PROMPT[:-1]) and model.forwards == 0


def test_the_drafter_below_reads_the_prompt_and_hears_what_was_said_after_it() -> None:
    heard: list[tuple[tuple[int, ...], int]] = []

    class Listener(Adversary):
        def observe(self, tokens: Sequence[int], new: int, likely: Likely | None) -> None:
            heard.append((tuple(tokens), new))

    top = stacked({"small": Strict()}, [4], Sampling(0.0), below=Listener(lambda tokens: []))[-1]
    top.observe(PROMPT, len(PROMPT), None)
    tree, _ = grown(top, PROMPT)
    path = tree.path(4)
    assert heard[0] == (PROMPT, len(PROMPT))
    assert heard[1:] == [((*PROMPT, *path[:n]), 1) for n in (1, 2, 3, 4)]


# The gate.


class Top:
    """The top of a stack as the gate sees it: a chain of `batch`, after `seconds`."""

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

    def observe(self, tokens: Sequence[int], new: int, likely: Likely | None) -> None:
        self.heard.append(("observe", new))

    def finish(self, tokens: Sequence[int], new: int) -> None:
        self.heard.append(("finish", new))


def gate(
    top: Top, tokens: float, seconds: float, monkeypatch: pytest.MonkeyPatch | None = None
) -> Stack:
    if monkeypatch is not None:
        monkeypatch.setattr("engine.hsd.stack.perf_counter", lambda: top.now)
    level: Any = top
    return Stack(level, tokens, seconds)


def flat(extra: float = 0.0) -> CostCurve:
    """Every forward takes a second, one over a draft `extra` more."""
    return Stated({0: 1.0, 1: 1.0 + extra, LARGEST: 1.0 + extra})


def opens(
    stack: Stack, nodes: int = 0, likely: float = 1.0, costs: CostCurve | None = None
) -> bool:
    """Whether the stack drafts behind so many nodes of databases."""
    budget, tree = Budget(Drafting(threshold=0.0), 20, VOCABULARY, costs), Tree(0)
    for token in range(nodes):
        tree.add(0, token, CONTEXT)
        budget.added(len(tree), likely)
    return bool(stack.grow(tree, [0], budget))


def test_without_costs_the_stack_drafts_where_the_databases_did_not() -> None:
    for nodes in (0, 1, 0, 5, 0):
        assert opens(gate(Top(), 9.0, 0.0), nodes) == (nodes == 0)
        assert opens(gate(Top(), 0.1, 99.0), nodes) == (nodes == 0)


@pytest.mark.parametrize(
    ("tokens", "seconds", "extra", "pays"),
    [
        (3.0, 1.9, 0.0, True),
        (3.0, 2.1, 0.0, False),
        (3.0, 1.4, 0.5, True),
        (3.0, 1.6, 0.5, False),
        (1.0, 0.1, 0.0, False),
        (5.0, 0.0, 3.9, True),
        (5.0, 0.0, 4.1, False),
    ],
)
def test_a_stack_drafts_where_tokens_come_faster_than_plainly(
    tokens: float, seconds: float, extra: float, pays: bool
) -> None:
    assert opens(gate(Top(), tokens, seconds), costs=flat(extra)) == pays


@pytest.mark.parametrize(
    ("nodes", "likely", "seconds", "pays"),
    [
        (0, 0.0, 1.9, True),
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
    assert opens(gate(Top(), 3.0, seconds), nodes, likely, flat()) == pays


def test_a_stack_that_does_not_pay_is_tried_again_and_again() -> None:
    top, kinds = Top(), []
    stack = gate(top, 1.0, 0.5)
    for _ in range(5 * RETRY):
        kinds.append(opens(stack, costs=flat()))
        stack.observe([0], 1, None)
    tried = [at for at, drafted in enumerate(kinds) if drafted]
    assert tried[0] == RETRY and {after - before for before, after in pairwise(tried)} == {
        RETRY + 1
    }
    assert top.asked == len(tried) == 4


def test_the_gate_learns_what_a_draft_takes_and_what_it_is_worth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prediction counts for a while, then what was seen; and it follows the text."""
    top = Top(seconds=0.25)
    stack = gate(top, 5.0, 8.0, monkeypatch)
    for new in [3] * 100:
        opens(stack)
        stack.observe([0], new, None)
    assert stack.seconds == pytest.approx(0.25, abs=0.5) and stack.tokens == pytest.approx(
        3, abs=0.2
    )
    before = stack.tokens
    opens(stack)
    stack.observe([0], 1, None)
    assert before - 0.2 < stack.tokens < before, "one step does not turn it"
    for _ in range(300):
        opens(stack)
        stack.observe([0], 1, None)
    assert stack.tokens == pytest.approx(1.0, abs=0.01)
    assert stack.seconds == pytest.approx(0.25, abs=0.01)


def test_the_gate_closes_when_drafts_stop_paying_and_opens_when_they_pay_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stack, costs, shares = gate(Top(0.5), 4.0, 0.5, monkeypatch), flat(), []
    for new in (4, 1, 4):
        drafted = 0
        for _ in range(1500):
            kind = opens(stack, costs=costs)
            stack.observe([0], new if kind else 1, None)
            drafted += kind
        shares.append(drafted / 1500)
    assert shares[0] == 1.0 and shares[1] < 0.1 and shares[2] > 0.5


def test_steps_without_a_draft_teach_the_gate_nothing_and_reach_the_levels() -> None:
    top = Top()
    stack = gate(top, 3.0, 0.5)
    stack.observe([0], 40, None)
    assert not opens(stack, nodes=2)
    stack.observe([0], 9, None)
    stack.finish([0], 9)
    assert (stack.tokens, stack.seconds) == (3.0, 0.5)
    assert top.heard == [("observe", 40), ("observe", 9), ("finish", 9)]


def test_where_nothing_pays_the_draft_models_are_left_alone() -> None:
    """But for the retries: a plan that was wrong costs next to nothing."""
    models, wanted = toy_models(), Generation(Sampling(0.0), 200)
    slow = Stack(stacked(models, (3, 2, 4), wanted.sampling)[-1], 1.5, 9.0)
    cost = Stated({0: 1.0, 63: 1000.0})
    fast = events_of(ToyBackend(), PROMPT, wanted, [slow], Drafting(), costs=cost)
    assert_lossless(plain_toy(wanted), fast)
    drafted = [step for step in fast if step.proposed]
    assert 0 < len(drafted) <= len(fast) / RETRY + 1


# The same with real models: the embedded family in float32.


@pytest.fixture(scope="module")
def embedded_prompts(embedded: Any) -> list[tuple[int, ...]]:
    chat = Chat(embedded)
    return [tuple(chat.prompt([Message("user", text)], known=())) for text in QUESTIONS]


@pytest.fixture(scope="module")
def embedded_plain(embedded: Any, embedded_prompts: Any) -> Callable[..., list[Step]]:
    @cache
    def plain(wanted: Generation, number: int) -> list[Step]:
        return cold(embedded, embedded_prompts[number], wanted)

    return plain


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("plan", [{"small": 4}, {"mid": 3}, {"small": 4, "mid": 6}], ids="/".join)
def test_embedded_stacks_say_what_plain_decoding_says(
    embedded: Any,
    embedded_drafts: Any,
    embedded_prompts: Any,
    embedded_plain: Any,
    plan: dict[str, int],
    temperature: float,
) -> None:
    wanted, drafted = generation(temperature, 5, 48), 0
    models = {name: embedded_drafts[name] for name in plan}
    for number, prompt in enumerate(embedded_prompts):
        stack = stack_of(models, [*plan.values()], wanted.sampling)
        fast = events_of(embedded, prompt, wanted, [stack], FIXED)
        assert_lossless(embedded_plain(wanted, number), fast)
        drafted += drafted_by_models(fast)
    assert drafted > 20


@pytest.mark.model
@pytest.mark.parametrize("plan", ["hd+hsd:small@4/mid@6", "hsd:databases/small@5"])
def test_embedded_conversations_go_on_in_the_caches_of_all_models(
    embedded: Any, embedded_drafts: Any, plan: str
) -> None:
    family = Family(embedded, embedded_drafts, made_up(["small", "mid", "target"]))
    method, databases, chat = method_named(plan, FIXED), Databases(), Chat(embedded)
    embedded.reset()
    messages: list[Message] = []
    for turn, question in enumerate(QUESTIONS):
        messages.append(Message("user", question))
        prompt, wanted = chat.prompt(messages), generation(0.7, turn, 40)
        drafters = drafters_of(method, databases, family, wanted.sampling)
        steps = [e for e in chat.reply(prompt, drafters, wanted, FIXED) if isinstance(e, Step)]
        assert_lossless(cold(embedded, prompt, wanted), steps)
        assert drafted_by_models(steps) > 0
        messages.append(Message("assistant", "".join(t.text for t in tokens_of(steps))))


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_embedded_target_as_its_own_draft_model_is_always_right(
    embedded: Any, embedded_prompts: Any, embedded_plain: Any, temperature: float
) -> None:
    wanted = generation(temperature, 5, 48)
    twin = type(embedded)(embedded.model, embedded.tokenizer, embedded.info)
    stack = stack_of({"twin": twin}, [5], wanted.sampling)
    fast = events_of(embedded, embedded_prompts[0], wanted, [stack], FIXED)
    assert_lossless(embedded_plain(wanted, 0), fast)
    assert all(step.accepted == step.proposed for step in fast)
    assert len(fast) == len(tokens_of(fast)) / 6


@pytest.mark.model
def test_embedded_levels_say_what_their_models_say(
    embedded_drafts: Any, embedded_prompts: Any
) -> None:
    """After any jump: a few tokens further, many, or back to where the prompt ended."""
    sampling, draw = Sampling(0.7, seed=2), random.Random(5)
    levels = stacked(embedded_drafts, (4, 6), sampling)
    tokens = list(embedded_prompts[0])
    levels[-1].observe(tokens, len(tokens), None)
    for number in range(8):
        tree, _ = grown(levels[-1], tokens)
        assert all(level.backend.cached == level.cached for level in levels)
        path = tree.path(len(tree))
        wanted = Generation(sampling, len(path))
        assert list(path) == ids(cold(embedded_drafts["mid"], tokens, wanted))
        tokens += [*path[: number % 3], *draw.choices(range(300, 3000), k=draw.choice((1, 2, 15)))]
        if number == 5:
            tokens = [*embedded_prompts[0], *path]


@pytest.mark.model
def test_embedded_rejection_says_the_same_at_temperature_0_and_repeats_itself_above(
    embedded: Any, embedded_drafts: Any, embedded_prompts: Any, embedded_plain: Any
) -> None:
    drafting, texts = Drafting(rule="rejection", budget="fixed"), []
    for temperature in (0.0, 0.7, 0.7):
        wanted = generation(temperature, 5, 48)
        top = stacked(embedded_drafts, (4, 6), wanted.sampling, "rejection")[-1]
        fast = events_of(embedded, embedded_prompts[0], wanted, [Stack(top, 2.0, 0.0)], drafting)
        texts.append(fast)
    assert_lossless(embedded_plain(generation(0.0, 5, 48), 0), texts[0])
    assert ids(texts[1]) == ids(texts[2]) and drafted_by_models(texts[1]) > 10
