"""The promise on real models, of either library: whatever drafts, the answer is the plain one,
token by token. The models are the embedded family in float32; those of transformers also in
bfloat16 on a GPU: `pytest tests/exhaustive/test_real_models.py -k transformers --device cuda`."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bench.measure import divergences
from engine.decode import never
from engine.drafting.base import Drafter
from engine.drafting.costs import measure_costs
from engine.drafting.databases import Databases
from engine.hsd.family import Family, Stack
from engine.methods import METHODS, method_named
from engine.prompt import Chat
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import SCHEMA, Message, Prefill, Step
from tests.conftest import ROOT
from tests.support.gguf_files import opened_gguf
from tests.support.lossless import (
    ORDERS,
    QUESTIONS,
    Adversary,
    Paths,
    accepted,
    assert_lossless,
    curves,
    deep,
    duplicates,
    events_of,
    everything,
    garbage,
    generation,
    knowing,
    made_up,
    tokens_of,
)
from tests.support.replies import reply
from tests.support.schemas import KINDS, drawn, form_of, steps_of, under
from tests.unit.test_stack import FIXED, drafted_by_models, ids, stack_of, stacked

pytestmark = [pytest.mark.model, pytest.mark.gguf]
STEPS = 40
DRAWS = [(0.0, 0), (0.7, 1), (0.7, 2), (1.0, 3), (1.0, 4)]
"""Temperatures and seeds."""


class Subject:
    """A model, its prompts, its plain answers (each computed once in an empty cache), and databases
    that hold past answers; draft models, and the model once more, with a cache of its own."""

    def __init__(self, backend: Any, table: Any, drafts: Any = None, twin: Any = None) -> None:
        self.backend, self.table, self.drafts, self.twin = backend, table, drafts, twin
        chat = Chat(backend)
        self.prompts = [tuple(chat.prompt([Message("user", q)], known=())) for q in QUESTIONS]
        self.plain = cache(self.decoded)

    def decoded(self, wanted: Generation, number: int) -> list[Step]:
        self.backend.reset()
        return events_of(self.backend, self.prompts[number], wanted)

    def databases(self) -> Databases:
        filled = Databases(statistics=self.table)
        for number, prompt in enumerate(self.prompts):
            for temperature in (0.0, 0.7):
                answer = ids(self.plain(generation(temperature, 0, STEPS), number))
                filled.learned.finish([*prompt, *answer], len(answer))
        return filled

    def truth(self, wanted: Generation, number: int) -> list[int]:
        return [*self.prompts[number], *ids(self.plain(wanted, number))]


@pytest.fixture(scope="module")
def table(embedded: Any) -> Iterator[Any]:
    from storage.statistics import find_table

    found = find_table(embedded.info.tokenizer_fingerprint, ROOT / "assets" / "statistics")
    assert found is not None, "the shipped statistics are for both tokenizers"
    yield found
    found.close()


@pytest.fixture(scope="module", params=["llama.cpp", "transformers"])
def subject(
    request: pytest.FixtureRequest,
    table: Any,
    embedded: Any,
    embedded_drafts: dict[str, Any],
    load_embedded: Callable[[str], Any],
) -> Iterator[Subject]:
    """`soak(stay=2)` keeps a case of each, `soak(stay=1)` one of llama.cpp."""
    if request.param == "llama.cpp":
        target, files, drafts = map(
            request.getfixturevalue, ("gguf_target", "gguf_files", "gguf_drafts")
        )
        found = Subject(target, table, drafts, opened_gguf(files["target-F32"]))
    else:
        found = Subject(embedded, table, embedded_drafts, load_embedded("target"))
    yield found
    found.backend.reset()


@pytest.mark.grid
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=[kind.__name__ for kind in KINDS])
def test_answers_in_a_format(subject: Subject, kind: int, temperature: float) -> None:
    schema, demanded = drawn(kind), 0
    for seed in range(2):
        wanted = under(form_of(schema), temperature, seed, most=120)
        answers = []
        for name in ("plain", "hd"):
            subject.backend.reset()
            databases = Databases(statistics=subject.table)
            given = wanted, METHODS[name], databases, subject.backend
            answers.append(steps_of(*given, prompt=subject.prompts[seed]))
        assert_lossless(*answers)
        demanded += sum(step.accepted.get(SCHEMA, 0) for step in answers[1])
        if answers[1][-1].finish == "eos":
            text = "".join(token.text for token in tokens_of(answers[1]))
            jsonschema.validate(json.loads(text), schema)
    assert demanded


of_llamacpp = pytest.mark.parametrize("subject", ["llama.cpp"], indirect=True)
"""For what only a GGUF model has."""


# The databases.


@pytest.mark.soak(stay=4)
@pytest.mark.parametrize("own", [0, 1], ids=["some draws", "other draws"])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_subset_and_order(subject: Subject, order: tuple[str, ...], own: int) -> None:
    filled, kept, number = subject.databases(), 0, ORDERS.index(order)
    drafting = Drafting(tiers=order)
    method = method_named("hd", drafting)
    for at, (temperature, seed) in enumerate((DRAWS[0], DRAWS[1 + own], DRAWS[3 + own])):
        wanted, which = generation(temperature, seed, STEPS), (at + number) % 2
        drafters = method.drafters(filled)
        fast = events_of(subject.backend, subject.prompts[which], wanted, drafters, drafting)
        assert_lossless(subject.plain(wanted, which), fast)
        kept += accepted(fast)
    assert kept > 0, "a run that accepts nothing proves nothing"


@pytest.mark.soak(stay=2)
@pytest.mark.parametrize("cuts", [{"top_k": 20}, {"top_p": 0.8, "min_p": 0.05}, {}], ids=str)
@pytest.mark.parametrize("name", ["hd", "hd-published", "lookup", "rest"])
def test_every_method_with_cuts(subject: Subject, name: str, cuts: dict[str, float]) -> None:
    filled, kept = subject.databases(), 0
    for number, (temperature, seed) in enumerate(DRAWS[::2]):
        wanted, which = generation(temperature, seed, STEPS, **cuts), number % 2
        prompt, drafters = subject.prompts[which], METHODS[name].drafters(filled)
        fast = events_of(subject.backend, prompt, wanted, drafters, METHODS[name].drafting)
        assert_lossless(subject.plain(wanted, which), fast)
        kept += accepted(fast)
    assert kept > 0


@pytest.mark.soak(stay=2)
@pytest.mark.parametrize("costs", ["free", "usual", "jumps", "never", "measured"])
def test_whatever_a_forward_costs(subject: Subject, costs: str) -> None:
    """Also by the model's own curve, which what is observed goes on correcting."""
    filled, drafting = subject.databases(), Drafting()
    curve = curves()[costs] if costs != "measured" else measure_costs(subject.twin, seconds=0.3)
    for number, (temperature, seed) in enumerate(DRAWS[::2]):
        wanted, which = generation(temperature, seed, STEPS), number % 2
        prompt, drafters = subject.prompts[which], METHODS["hd"].drafters(filled)
        fast = events_of(subject.backend, prompt, wanted, drafters, drafting, costs=curve)
        assert_lossless(subject.plain(wanted, which), fast)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_knowing_the_answer_accepts_everything(subject: Subject, temperature: float) -> None:
    wanted = generation(temperature, 5, STEPS)
    fast = events_of(
        subject.backend, subject.prompts[0], wanted, [knowing(subject.truth(wanted, 0))]
    )
    assert_lossless(subject.plain(wanted, 0), fast)
    assert all(step.accepted == step.proposed for step in fast)
    assert len(fast) == -(-len(tokens_of(fast)) // 8) > 1


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("adversary", [garbage, duplicates, deep, everything])
def test_adversarial_drafters_change_nothing(
    subject: Subject, adversary: Callable[[Sequence[int]], Paths]
) -> None:
    """The largest trees, of branches that are all wrong; what is right comes as the last branch."""
    for number, (temperature, seed) in enumerate(DRAWS[1::3]):
        wanted, which = generation(temperature, seed, STEPS), number % 2
        truth = subject.truth(wanted, which)

        def say(tokens: Sequence[int], truth: list[int] = truth) -> Paths:
            right = tuple(truth[len(tokens) : len(tokens) + 3])
            return [*adversary(tokens)[:40], *(right[:end] for end in (1, 2, 3))]

        for drafters in ([Adversary(adversary)], [Adversary(say)]):
            prompt, drafting = subject.prompts[which], Drafting(nodes=128)
            fast = events_of(subject.backend, prompt, wanted, drafters, drafting)
            assert_lossless(subject.plain(wanted, which), fast)
        assert accepted(fast) > STEPS // 2


# What a run may be cut by.


@pytest.mark.soak(stay=1)
def test_stop_strings_and_length_end_it_at_the_same_token(subject: Subject) -> None:
    filled, ends = subject.databases(), Counter[str | None]()
    for temperature, seed in DRAWS[::2]:
        text = "".join(t.text for t in tokens_of(subject.plain(generation(temperature, seed), 0)))
        for most, stop in [
            (1, ()),
            (2, ()),
            (17, ()),
            (50, (text[30:33],)),
            (50, (text[20:22], text[40:47])),
            (50, ("nowhere", text[60:64])),
        ]:
            wanted = Generation(Sampling(temperature, seed=seed), most, stop)
            known = knowing([*subject.prompts[0], *ids(subject.plain(replace(wanted, stop=()), 0))])
            for drafters in ([known], METHODS["hd"].drafters(filled)):
                fast = events_of(subject.backend, subject.prompts[0], wanted, drafters)
                assert_lossless(subject.plain(wanted, 0), fast)
                ends[fast[-1].finish] += 1
    assert min(ends["length"], ends["stop"]) > 5, ends


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("length", [64, 128])
def test_the_context_can_be_filled_to_its_end(
    gguf_files: dict[str, Path], subject: Subject, length: int
) -> None:
    """By drafts that reach far beyond it, and by a prompt that leaves room for one token."""
    if subject.backend.info.kind == "transformers":
        backend = subject.twin.open()
        backend.info = replace(backend.info, context_length=length)
    else:
        backend = opened_gguf(gguf_files["target-F32"], context_length=length)
    assert backend.info.context_length == length
    wanted = generation(0.7, 1, 500)
    whole = subject.truth(generation(0.7, 1, length), 0)
    for start in (len(subject.prompts[0]), length - 2, length - 1):
        prompt = whole[:start]
        plain = events_of(backend, prompt, wanted)
        far = Adversary(lambda tokens: [(5,) * 60, tuple(whole[len(tokens) : len(tokens) + 99])])
        for drafters in ([far], [knowing(whole, 200)]):
            fast = events_of(backend, prompt, wanted, drafters, Drafting(nodes=128))
            assert_lossless(plain, fast)
            assert fast[-1].finish == "context" and len(ids(fast)) == length - start
            assert accepted(fast) > 0 or start > length - 3


# Conversations.


def talk(subject: Subject, drafters_for: Callable[[Sampling], Sequence[Drafter]], seed: int) -> int:
    """Turns in a warm cache, one with a stop string and one after an edit of what was said; each
    must be what the same model says in an empty cache. How much of the drafts was kept."""
    backend, other = subject.backend, subject.twin
    backend.reset()
    chat, messages, kept = Chat(backend), list[Message](), 0
    for turn, temperature in enumerate((0.0, 0.7, 1.0, 0.7)):
        if turn == 3:
            messages = [*messages[:3], Message("assistant", "No. It was another fox.")]
        messages.append(Message("user", QUESTIONS[turn % 2]))
        stop = ("the", ".") if turn == 2 else ()
        wanted = Generation(Sampling(temperature, seed=seed), 30, stop)
        prompt, drafters = chat.prompt(messages), drafters_for(wanted.sampling)
        prefill, *steps = reply(chat, prompt, drafters, wanted, FIXED if seed % 2 else Drafting())
        assert isinstance(prefill, Prefill) and (prefill.reused > 0) == (turn > 0)
        fast = [step for step in steps if isinstance(step, Step)]
        other.prefill([0], never)
        assert_lossless(events_of(other, prompt, wanted), fast)
        kept += accepted(fast)
        messages.append(Message("assistant", "".join(t.text for t in tokens_of(fast)) or "-"))
    return kept


@pytest.mark.soak(stay=2)
@pytest.mark.parametrize("name", ["hd", "hd-published", "lookup"])
def test_a_conversation_says_what_cold_runs_say(subject: Subject, name: str) -> None:
    filled = subject.databases()
    for seed in (2, 5):
        assert talk(subject, lambda _: METHODS[name].drafters(filled), seed) > 0


# Draft models: of either kind, below targets of either kind.


def plain_of(backend: Any, prompt: Sequence[int], wanted: Generation) -> list[Step]:
    backend.reset()
    return events_of(backend, prompt, wanted)


@pytest.mark.soak(stay=2)
@pytest.mark.parametrize("plan", [{"small": 4}, {"mid": 3}, {"small": 4, "mid": 6}], ids="/".join)
def test_stacks(subject: Subject, plan: dict[str, int]) -> None:
    models, drafted = {name: subject.drafts[name] for name in plan}, 0
    for number, (temperature, seed) in enumerate(DRAWS):
        wanted, which = generation(temperature, seed, STEPS), number % 2
        stack = stack_of(models, [*plan.values()], wanted.sampling)
        fast = events_of(subject.backend, subject.prompts[which], wanted, [stack], FIXED)
        assert_lossless(subject.plain(wanted, which), fast)
        drafted += drafted_by_models(fast)
    assert drafted > 20


@of_llamacpp
@pytest.mark.soak
def test_stacks_of_both_kinds_of_models(
    subject: Subject, embedded: Any, embedded_drafts: dict[str, Any], gguf_drafts: dict[str, Any]
) -> None:
    """GGUF over transformers for a GGUF target, transformers over GGUF, and each for the other."""
    theirs, ours = embedded_drafts, gguf_drafts
    for target, models in [
        (subject.backend, {"small": theirs["small"], "mid": ours["mid"]}),
        (subject.backend, {"small": ours["small"], "mid": theirs["mid"]}),
        (subject.backend, {"mid": theirs["mid"]}),
        (embedded, {"small": ours["small"], "mid": ours["mid"]}),
        (embedded, {"small": theirs["small"], "mid": ours["mid"]}),
    ]:
        assert [*Family(target, models).drafts] == [*models], "their vocabularies match"
        drafted = 0
        for number, (temperature, seed) in enumerate(DRAWS[::2]):
            wanted, prompt = generation(temperature, seed, STEPS), subject.prompts[number % 2]
            stack = stack_of(models, (4, 6), wanted.sampling)
            fast = events_of(target, prompt, wanted, [stack], FIXED)
            assert_lossless(plain_of(target, prompt, wanted), fast)
            drafted += drafted_by_models(fast)
        assert drafted > 20


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize(
    "plan",
    ["hd+hsd:small@4/mid@6", "hsd:databases/small@5", "hd+hsd:databases/small@4", "single:mid"],
)
def test_conversations_with_databases_and_stacks(subject: Subject, plan: str) -> None:
    """Databases beside the stack and below it; all caches go on from turn to turn."""
    profile = made_up(["small", "mid", subject.backend.info.name])
    family = Family(subject.backend, subject.drafts, profile)
    method, filled = method_named(plan, FIXED), subject.databases()

    def drafters(sampling: Sampling) -> Sequence[Drafter]:
        return method.drafters(filled, family, sampling)

    assert talk(subject, drafters, 5) > 0


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_target_as_its_own_draft_model_is_always_right(
    subject: Subject, temperature: float
) -> None:
    wanted = generation(temperature, 5, 48)
    stack = stack_of({"twin": subject.twin}, [5], wanted.sampling)
    fast = events_of(subject.backend, subject.prompts[0], wanted, [stack], FIXED)
    assert_lossless(subject.plain(wanted, 0), fast)
    assert all(step.accepted == step.proposed for step in fast)
    assert len(fast) == -(-len(tokens_of(fast)) // 6) > 1


@pytest.mark.soak(stay=1)
def test_rejection_says_the_same_at_temperature_0_and_repeats_itself_above(
    subject: Subject,
) -> None:
    drafting, texts = Drafting(rule="rejection", budget="fixed"), []
    for temperature in (0.0, 0.7, 0.7):
        wanted = generation(temperature, 5, STEPS)
        top = stacked(subject.drafts, (4, 6), wanted.sampling, "rejection")[-1]
        prompt = subject.prompts[0]
        texts.append(events_of(subject.backend, prompt, wanted, [Stack(top, 2.0, 0.0)], drafting))
    assert_lossless(subject.plain(generation(0.0, 5, STEPS), 0), texts[0])
    assert ids(texts[1]) == ids(texts[2]) and drafted_by_models(texts[1]) > 10


# Fewer branches than the tree would have.


class Scored:
    """Notes the leaves of every tree that a backend scores."""

    def __init__(self, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.leaves: list[int] = []
        score = backend.score

        def counted(tree: Tree, sampling: Sampling) -> Any:
            self.leaves.append(tree.children.count({}))
            return score(tree, sampling)

        monkeypatch.setattr(backend, "score", counted)


@pytest.mark.soak
@pytest.mark.parametrize("leaves", [1, 2, 5])
def test_a_limit_of_branches_is_kept_to(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, leaves: int
) -> None:
    """By the target and by a draft model that databases draft for."""
    wanted = [generation(temperature, seed, STEPS) for temperature, seed in DRAWS[::2]]
    plain = [subject.plain(each, number % 2) for number, each in enumerate(wanted)]
    backend, small = subject.backend, subject.drafts["small"]
    for model in (backend, small):
        monkeypatch.setattr(model, "info", replace(model.info, leaves=leaves))
    watched, below = Scored(backend, monkeypatch), Scored(small, monkeypatch)
    family = Family(backend, {"small": small}, made_up(["small", backend.info.name]))
    for name in ("hd", "hd-published", "hsd:databases/small@5", "hd+hsd:small@4"):
        filled, kept = subject.databases(), 0
        method = METHODS[name] if name in METHODS else method_named(name, FIXED)
        for number, each in enumerate(wanted):
            drafters = method.drafters(filled, family, each.sampling)
            prompt = subject.prompts[number % 2]
            fast = events_of(backend, prompt, each, drafters, method.drafting)
            assert_lossless(plain[number], fast)
            kept += accepted(fast)
        assert kept > 0, name
    assert max(watched.leaves) == leaves, "the limit was reached, and never broken"
    assert max(below.leaves) <= leaves


# Weights of fewer bits: the texts are the same up to near-ties.

NEAR = {"F16": 0.01, "Q8_0": 0.15}
"""The largest difference between two scores that counts as a tie; over some hundred answers 0.002
and 0.06 were seen."""


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("F16", {}),
        ("F16", {"cache_type": "f16"}),
        ("F16", {"flash_attention": "on"}),
        ("Q8_0", {}),
        ("Q8_0", {"cache_type": "f16"}),
        ("Q8_0", {"cache_type": "q8_0"}),
        ("Q8_0", {"flash_attention": "on"}),
    ],
    ids=str,
)
def test_texts_part_at_near_ties_only(
    gguf_files: dict[str, Path], table: Any, kind: str, settings: dict[str, str]
) -> None:
    subject = Subject(opened_gguf(gguf_files[f"target-{kind}"], **settings), table)
    filled, kept, parted = subject.databases(), 0, list[str]()
    for number, (temperature, seed) in enumerate(DRAWS):
        wanted, which = generation(temperature, seed, STEPS), number % 2
        prompt, plain = subject.prompts[which], ids(subject.plain(wanted, which))
        wide = Adversary(lambda tokens: [*garbage(tokens), (1,)])
        known = knowing(subject.truth(wanted, which))
        for drafters in (METHODS["hd"].drafters(filled), [known, wide]):
            fast = events_of(subject.backend, prompt, wanted, drafters, Drafting(nodes=64))
            kept += accepted(fast)
            answers = [plain], [ids(fast)]
            for found in divergences(subject.backend, [prompt], *answers, wanted.sampling):
                assert found.gap is not None and abs(found.gap) < NEAR[kind], found
                parted.append(f"T={temperature}, token {found.position}, gap {found.gap:.3g}")
    assert kept > 100
    assert len(parted) < 2 * len(DRAWS), f"{kind} {settings}: {'; '.join(parted)}"


def test_the_comparison_above_can_fail(gguf_files: dict[str, Path], table: Any) -> None:
    """A token that plain decoding did not say is no near-tie."""
    subject = Subject(opened_gguf(gguf_files["target-Q8_0"]), table)
    wanted = generation(0.7, 1, STEPS)
    plain = ids(subject.plain(wanted, 0))
    wrong = [*plain[:20], (plain[20] + 7) % 6144, *plain[21:]]
    given = [subject.prompts[0]], [plain], [wrong]
    (found,) = divergences(subject.backend, *given, wanted.sampling)
    assert found.position == 20 and found.gap is not None and found.gap > 10 * NEAR["Q8_0"]
