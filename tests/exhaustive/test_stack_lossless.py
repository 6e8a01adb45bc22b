"""With draft models too the answer is the plain one, token by token, whatever they draft."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from engine.backends.toy import (
    VOCABULARY,
    ToyBackend,
    toy_logits,
)
from engine.decode import never
from engine.drafting.databases import Databases
from engine.hsd.family import Family, LevelDrafter, Stack
from engine.methods import method_named
from engine.prompt import Chat
from engine.settings import Drafting, Generation, Sampling
from engine.types import TARGET, Message, Prefill, Step
from engine.verify import Match
from tests.support.lossless import (
    CUTS,
    PROMPT,
    QUESTIONS,
    TEMPERATURES,
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
from tests.support.replies import reply
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
    fast = events_of(ToyBackend(), PROMPT, wanted, [stack], FIXED)
    assert_lossless(plain_toy(wanted), fast)
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
        fast = events_of(ToyBackend(), PROMPT, wanted, drafters, method.drafting, costs=curve)
        assert_lossless(plain_toy(wanted), fast)
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
            drafters = method.drafters(warm_toy(), each, wanted.sampling)
            runs.append(events_of(ToyBackend(), PROMPT, wanted, drafters, method.drafting))
            assert_lossless(plain_toy(wanted), runs[-1])
        differs |= runs[0] != runs[1]
    assert differs, "their samplers are heeded"


@pytest.mark.soak(stay=2)
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
            drafters = method.drafters(warm_toy(), family, sampling)
            fast = events_of(Strict(context), PROMPT, wanted, drafters, method.drafting)
            assert_lossless(plain_toy(wanted, PROMPT, context), fast)
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
        fast = events_of(ToyBackend(), PROMPT, wanted, [Stack(top, 2.0, 0.0)], FIXED)
        assert_lossless(plain_toy(wanted), fast)
        assert all(step.accepted == step.proposed for step in fast)
        assert all(len(step.tokens) > batches[-1] for step in fast[:-1])
        for step in fast:
            assert all(kept == handed for _, handed, kept in step.levels.values())


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


@pytest.mark.soak(stay=2)
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
    wanted, drafted = generation(temperature, 4, 48), 0
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
        drafters = method.drafters(databases, family, wanted.sampling)
        steps = [e for e in reply(chat, prompt, drafters, wanted, FIXED) if isinstance(e, Step)]
        assert_lossless(cold(embedded, prompt, wanted), steps)
        assert drafted_by_models(steps) > 0
        messages.append(Message("assistant", "".join(t.text for t in tokens_of(steps))))


@pytest.mark.soak(stay=1)
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
    assert len(fast) == -(-len(tokens_of(fast)) // 6) > 1


@pytest.mark.model
def test_embedded_levels_say_what_their_models_say(
    embedded_drafts: Any, embedded_prompts: Any
) -> None:
    """After any jump: a few tokens further, many, or back to where the prompt ended."""
    sampling, draw = Sampling(0.7, seed=2), random.Random(5)
    levels = stacked(embedded_drafts, (4, 6), sampling)
    tokens = list(embedded_prompts[0])
    levels[-1].observe(tokens, len(tokens))
    for number in range(8):
        tree, _ = grown(levels[-1], tokens)
        assert all(level.backend.cached == level.cached for level in levels)
        path = tree.path(len(tree))
        wanted = Generation(sampling, len(path))
        assert list(path) == ids(cold(embedded_drafts["mid"], tokens, wanted))
        tokens += [*path[: number % 3], *draw.choices(range(300, 3000), k=draw.choice((1, 2, 15)))]
        if number == 5:
            tokens = [*embedded_prompts[0], *path]


@pytest.mark.soak
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
