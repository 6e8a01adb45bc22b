"""With draft models too the answer is the plain one, token by token, whatever they draft."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from engine.decode import never
from engine.drafting.databases import Databases
from engine.hsd.family import LevelDrafter, Stack
from engine.methods import METHODS, method_named
from engine.prompt import Chat
from engine.settings import Generation, Sampling
from engine.types import TARGET, Message, Prefill, Step
from engine.verify import Match
from tests.support.lossless import (
    CUTS,
    PROMPT,
    QUESTIONS,
    TEMPERATURES,
    Strict,
    as_plain,
    assert_lossless,
    curves,
    events_of,
    generation,
    plain_toy,
    tokens_of,
    toy_family,
    warm_toy,
)
from tests.support.replies import reply
from tests.support.toy import VOCABULARY, ToyBackend, toy_logits
from tests.unit.test_stack import (
    FIXED,
    STACKS,
    drafted_by_models,
    grown,
    ids,
    stack_of,
    stacked,
    toy_models,
)

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
DRAWS = [
    *[(0.0, 0), (0.7, 0), (0.7, 11), (1.0, 0), (1.0, 6)],
    *[(1.0, 27), (1.5, 0), (1.5, 3), (1.5, 30), (1.5, 47)],
]
"""Temperatures and seeds; with four of them the toy's answer has an end."""


@pytest.mark.grid
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("batches", [(1, 1, 1), (3, 2, 4), (8, 5, 2)])
@pytest.mark.parametrize("names", STACKS, ids="/".join)
def test_every_stack_says_what_plain_decoding_says(
    names: tuple[str, ...], batches: tuple[int, ...], seed: int, temperature: float
) -> None:
    wanted = generation(temperature, seed, 120)
    stack = stack_of(toy_models(names), batches, wanted.sampling)
    fast = as_plain(wanted, [stack], FIXED)
    assert len(fast) < len(plain_toy(wanted))


@pytest.mark.grid(1)
@pytest.mark.parametrize("costs", curves())
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_whatever_a_forward_costs(plan: str, costs: str) -> None:
    method, curve, databases = method_named(plan), curves()[costs], warm_toy()
    family, drafted = toy_family(), 0
    for temperature, seed in DRAWS:
        wanted = generation(temperature, seed)
        drafters = method.drafters(databases, family, wanted.sampling)
        fast = as_plain(wanted, drafters, method.drafting, costs=curve)
        drafted += drafted_by_models(fast)
    assert drafted > 7 or costs in ("never", "learning")


@pytest.mark.grid(1)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_with_every_cut(plan: str, cuts: dict[str, float]) -> None:
    method, databases, family = method_named(plan, FIXED), warm_toy(), toy_family()
    for seed, temperature in enumerate((0.7, 1.0, 1.5)):
        wanted = generation(temperature, seed, **cuts)
        drafters = method.drafters(databases, family, wanted.sampling)
        as_plain(wanted, drafters, method.drafting)


@pytest.mark.soak(stay=5)
@pytest.mark.parametrize("plan", [*PLANS, "hd", "hd-published"])
def test_an_answer_ends_where_the_plain_one_does(plan: str) -> None:
    """By the databases alone, too."""
    method = METHODS[plan] if plan in METHODS else method_named(plan, FIXED)
    family, ends = toy_family(), Counter[str | None]()
    for temperature, seed in DRAWS:
        sampling = Sampling(temperature, seed=seed)
        text = "".join(t.text for t in tokens_of(plain_toy(generation(temperature, seed))))
        for most, context, stop in [
            (1, 4096, ()),
            (2, 4096, ()),
            (17, 4096, ()),
            (80, len(PROMPT) + 1, ()),
            (80, len(PROMPT) + 13, ()),
            (250, 4096, ()),
            (80, 4096, (text[10:13] or "x",)),
            (80, 4096, (text[5:6] or "x", text[8:14] or "y")),
            (80, 4096, ("nowhere", "e")),
        ]:
            wanted = Generation(sampling, most, stop)
            drafters = method.drafters(warm_toy(), family, sampling)
            fast = as_plain(wanted, drafters, method.drafting, backend=Strict(context))
            ends[fast[-1].finish] += 1
    assert min(ends[end] for end in ("length", "context", "stop", "eos")) > 3


@pytest.mark.grid(1)
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
    fast = as_plain(wanted, [stack], FIXED)
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
                top = LevelDrafter("small", model, 3, wanted.sampling, Match(), known)
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
        drafters = method.drafters(databases, family, wanted.sampling)
        events = list(reply(chat, prompt, drafters, wanted, method.drafting))
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
    again = LevelDrafter("mid", model, 3, wanted.sampling, Match(), VOCABULARY)
    assert model.prefill([*text, *PROMPT], never).reused > len(text) - 8
    again.observe([*text, *PROMPT], len(text) + len(PROMPT))
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
        fast = as_plain(wanted, [Stack(top, 2.0, 0.0)], FIXED)
        assert all(step.accepted == step.proposed for step in fast)
        assert all(len(step.tokens) > batches[-1] for step in fast[:-1])
        for step in fast:
            assert all(kept == handed for _, handed, kept in step.levels.values())


@pytest.mark.model
def test_embedded_levels_say_what_their_models_say(embedded: Any, embedded_drafts: Any) -> None:
    """After any jump: a few tokens further, many, or back to where the prompt ended."""
    sampling, draw = Sampling(0.7, seed=2), random.Random(5)
    prompt = Chat(embedded).prompt([Message("user", QUESTIONS[0])], known=())
    mid, levels = embedded_drafts["mid"], stacked(embedded_drafts, (4, 6), sampling)
    tokens = list(prompt)
    levels[-1].observe(tokens, len(tokens))
    for number in range(8):
        tree, _ = grown(levels[-1], tokens)
        assert all(level.backend.cached == level.cached for level in levels)
        path = tree.path(len(tree))
        wanted = Generation(sampling, len(path))
        assert list(path) == ids(events_of(mid.open(), tokens, wanted))
        tokens += [*path[: number % 3], *draw.choices(range(300, 3000), k=draw.choice((1, 2, 15)))]
        if number == 5:
            tokens = [*prompt, *path]
