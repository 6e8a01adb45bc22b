"""Profiling: acceptance and survival are what real rounds have, and it may be stopped anywhere."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.base import Backend
from engine.decode import decode
from engine.drafting.base import Drafter, Learner
from engine.drafting.costs import CostCurve
from engine.errors import Cancelled
from engine.hsd.family import Family
from engine.hsd.measure import (
    DEEPEST,
    RAREST,
    Lowest,
    Profiler,
    survival_of,
    timed,
)
from engine.hsd.planner import Recursion, Source, emitted
from engine.hsd.profile import Profile
from engine.prompt import Chat
from engine.sampling import choose, distribution
from engine.settings import Drafting, Generation, Sampling
from engine.types import RULES, Message, Rule, Step
from tests.support.lossless import Adversary, Stated, Strict
from tests.support.toy import END, ToyBackend, toy_logits
from tests.unit.test_verify import DRAFTS, SYMBOLS, TARGET, Logits, Small

NAMES = ("tiny", "small", "mid")
LOGITS = dict(zip(NAMES, DRAFTS, strict=True))
PROMPTS = [[0, 1], [3, 2, 1, 4], [2, 2, 2]] * 8
SAMPLINGS = [Sampling(1.0, seed=5), Sampling(0.7, top_k=4, seed=1)]
CURVE = {0: 1e-4, 4: 1.2e-4, 63: 2e-4}


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are not measured but stated, which saves a second per model."""
    if "model" not in request.keywords:
        monkeypatch.setattr(
            "engine.hsd.measure.measure_costs", lambda backend, seconds: CostCurve(CURVE)
        )


def profiler(
    names: Sequence[str] = NAMES,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    sampling: Sampling | None = None,
    **options: Any,
) -> Profiler:
    sampling = sampling or SAMPLINGS[0]
    drafts = {name: Small(LOGITS[name]) for name in names}
    return Profiler(Small(TARGET), drafts, prompts, sampling, **options)


@cache
def measured(sampling: Sampling) -> tuple[Profiler, Profile]:
    work = profiler(sampling=sampling)
    assert [*work.run()][-1] == 1.0
    assert work.profile is not None
    return work, work.profile


def ids(events: Iterator[Any]) -> list[int]:
    return [t.id for event in events if isinstance(event, Step) for t in event.tokens]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_acceptance_is_the_overlap_of_the_laws_along_the_targets_answers(
    sampling: Sampling,
) -> None:
    work, profile = measured(sampling)
    for below, name in enumerate(NAMES):
        overlaps, equal, ratios = [], [], []
        for number, prompt in enumerate(PROMPTS):
            own = replace(sampling, seed=sampling.seed + number)
            wanted = Generation(own, 64)
            answer = ids(decode(Small(TARGET), prompt, (), wanted, Drafting(nodes=0)))
            text = [*prompt, *answer]
            for at in range(len(prompt), len(text)):
                before, token = tuple(text[at - 2 : at]), text[at]
                q = np.float64(distribution(LOGITS[name](before), own))
                p = np.float64(distribution(TARGET(before), own))
                overlaps.append(np.minimum(p, q).sum())
                equal.append(float(choose(LOGITS[name](before), own, at) == token))
                ratios.append(q[token] / p[token])
        assert profile.pairs[below, 3].acceptance == pytest.approx(np.mean(overlaps), abs=1e-6)
        judged = work.judged[below, 3]
        assert np.concatenate(judged.equal).tolist() == equal
        assert np.concatenate(judged.ratios) == pytest.approx(np.array(ratios), rel=1e-4)
        assert np.minimum(ratios, 1.0).mean() == pytest.approx(np.mean(overlaps), abs=0.05)
        assert np.mean(equal) > (1 - 0.05) * np.mean(overlaps) / (2 - np.mean(overlaps))
    assert profile.positions == len(overlaps) == 64 * len(PROMPTS)


def rounds(
    names: Sequence[str], batches: Sequence[int], rule: Rule, upper: Logits, runs: int = 25
) -> list[Step]:
    """Steps of real runs in which draft models draft for another model; the last ones left out."""
    family = Family(Small(upper), {name: Small(LOGITS[name]) for name in names})
    family.profile = measured(SAMPLINGS[0])[1]
    plan = family.plan("/".join(map("{}@{}".format, names, batches)), rule)
    drafting, found = Drafting(rule=rule, budget="fixed"), []
    for seed in range(runs):
        wanted = Generation(Sampling(1.0, seed=1000 + seed), 150)
        stack = family.stack(plan, wanted.sampling, rule, None)
        events = decode(family.target, [seed % SYMBOLS, 1], [stack], wanted, drafting)
        found += [event for event in events if isinstance(event, Step)][:-8]
    return found


@pytest.mark.soak(stay=3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("below", "above"), [(0, 3), (2, 3), (0, 2), (1, 2)])
def test_survival_is_what_each_draft_adds_to_real_rounds(
    below: int, above: int, rule: Rule
) -> None:
    _, profile = measured(SAMPLINGS[0])
    for drafts in (1, 4):
        steps = rounds(NAMES[below : below + 1], [drafts], rule, [*DRAFTS, TARGET][above])
        real = float(np.mean([len(step.tokens) for step in steps]))
        assert emitted(profile.pairs[below, above], rule, drafts) == pytest.approx(real, rel=0.06)


@pytest.mark.soak(stay=3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("names", "batches"),
    [
        (("mid",), (6,)),
        (("tiny",), (2,)),
        (("tiny", "mid"), (3, 5)),
        (("small", "mid"), (5, 4)),
        (NAMES, (3, 4, 5)),
    ],
    ids=str,
)
def test_the_planner_predicts_the_tokens_of_a_real_step(
    names: Sequence[str], batches: Sequence[int], rule: Rule
) -> None:
    _, profile = measured(SAMPLINGS[0])
    family = Family(Small(TARGET), {name: Small(LOGITS[name]) for name in names}, profile)
    plan = family.plan("/".join(map("{}@{}".format, names, batches)), rule)
    emits, _ = Recursion(profile, rule).round(plan, 3)
    predicted = float(emits @ np.arange(len(emits)))
    real = float(np.mean([len(step.tokens) for step in rounds(names, batches, rule, TARGET)]))
    assert real > 1.3 and predicted == pytest.approx(real, rel=0.08)


# Survival, from acceptances that are known.


BITS = st.lists(st.lists(st.sampled_from([0.0, 1.0]), max_size=40), max_size=12)
RATIOS = st.lists(st.lists(st.floats(0.0, 9.0), max_size=40), max_size=12)


@settings(deadline=None, derandomize=True)
@given(st.one_of(BITS, RATIOS))
def test_survival_is_a_probability_that_never_rises(texts: list[list[float]]) -> None:
    survival = survival_of(texts)
    assert 1 <= len(survival) <= DEEPEST
    assert all(0.0 <= share <= 1.0 for share in survival)
    assert list(survival) == sorted(survival, reverse=True)
    assert survival_of(texts) == survival


@settings(deadline=None, derandomize=True)
@given(BITS)
def test_survival_counts_the_rounds_of_known_bits(texts: list[list[float]]) -> None:
    """Written down the slow way: every round of every length is walked and looked at as a whole."""
    emitted, wanted = [1.0], list[float]()
    for drafts in range(1, DEEPEST + 1):
        walked = []
        for text in texts:
            for first in range(drafts + 1 if len(text) >= drafts else 0):
                at = first
                while at < len(text):
                    walked.append(text[at:])
                    kept = next((i for i, bit in enumerate(text[at:][:drafts]) if not bit), None)
                    at += (min(drafts, len(text) - at) if kept is None else kept) + 1
        lasts, mean = 1.0, 1.0
        for depth in range(1, drafts + 1):
            tried = [rest for rest in walked if len(rest) >= depth and all(rest[: depth - 1])]
            lasts *= sum(all(rest[:depth]) for rest in tried) / len(tried) if tried else 0.0
            mean += lasts
        if len(tried) < RAREST * (drafts + 1):
            break
        emitted.append(mean)
    for n in range(1, len(emitted)):
        # The slope of the least concave curve above the points, between n - 1 and n drafts.
        slope = min(
            max((emitted[b] - emitted[a]) / (b - a) for b in range(n, len(emitted)))
            for a in range(n)
        )
        wanted.append(min(1.0, max(0.0, slope)))
    assert survival_of(texts) == pytest.approx(tuple(wanted) or (0.0,), abs=1e-9)


def test_a_length_that_begins_badly_says_nothing_of_longer_ones() -> None:
    """Rounds of four pass a stretch of four and the hard place after it, again and again; those of
    three end before it in every other round, and add nothing to those of two."""
    texts = [[1.0, 1.0, 1.0, 1.0, 0.0] * 12] * 4
    survival = survival_of(texts)
    assert 1 + sum(survival[:4]) == pytest.approx(5.0, abs=0.2)
    assert 1 + sum(survival[:8]) == pytest.approx(5.0, abs=0.2)


def test_longer_rounds_begin_more_often_where_drafting_is_hard() -> None:
    """Stretches are easy or hard. Rounds of one length do not predict the tokens of another."""
    random, texts = Random(2), list[list[float]]()
    for _ in range(60):
        easy, text = True, list[float]()
        for _ in range(150):
            easy ^= random.random() < 0.05
            text.append(float(random.random() < (0.98 if easy else 0.2)))
        texts.append(text)
    survival = survival_of(texts)
    for drafts in (1, 2, 4, 8, 12):
        steps = tokens = 0
        for text in texts:
            at = 0
            while at < len(text) - drafts:
                kept = next((i for i, bit in enumerate(text[at:][:drafts]) if not bit), drafts)
                steps, tokens, at = steps + 1, tokens + kept + 1, at + kept + 1
        assert 1 + sum(survival[:drafts]) == pytest.approx(tokens / steps, rel=0.05), drafts


# Costs, databases, and the way to the end.


def test_a_models_costs_are_those_of_its_real_rounds() -> None:
    work = profiler(("mid",))
    work.curves = dict.fromkeys(work.names, CostCurve({0: 1.0, 4: 3.0}))
    work.rounds["mid"] = [(0, 2.0)] * 6
    work.choices["mid"] = [0.01, 0.02, 0.03]
    found = work.model("mid")
    assert found.costs == {0: 2.0, 4: 4.0} and found.choice == pytest.approx(0.02)
    bare = work.model("toy")
    assert bare.costs == {0: 1.0, 4: 3.0} and bare.choice == 0.0
    assert bare.databases is bare.head is bare.merged is None
    assert (found.fingerprint, found.parameters) == (work.models["mid"].info.fingerprint, 0)


@pytest.mark.parametrize(
    ("points", "rounds", "wanted"),
    [
        ({0: 1.0, 4: 2.0, 8: 4.0}, {}, {0: 1.0, 4: 2.0, 8: 4.0}),
        ({0: 1.0, 4: 2.0, 8: 4.0}, {0: 1.5}, {0: 1.5, 4: 2.5, 8: 4.5}),
        ({0: 1.0, 4: 9.0, 8: 4.0}, {0: 1.0, 3: 2.0, 8: 4.0}, {0: 1.0, 4: 2.0, 8: 4.0}),
        ({0: 3.0, 4: 3.0, 8: 3.0}, {0: 2.0, 2: 1.0, 7: 6.0}, {0: 1.5, 4: 1.5, 8: 6.0}),
        ({4: 2.0, 0: 1.0, 8: 1.5}, {}, {0: 1.0, 4: 1.75, 8: 1.75}),
        # What was not timed follows the rest: the machine was busy before, or a forward is not all.
        ({0: 2.0, 4: 4.0, 8: 6.0}, {0: 1.0, 3: 2.0}, {0: 1.0, 4: 2.0, 8: 3.0}),
        ({0: 1.0, 4: 1.5, 8: 2.0}, {0: 2.0}, {0: 2.0, 4: 2.5, 8: 3.0}),
    ],
)
def test_a_curve_is_as_real_rounds_have_it_and_never_falls(
    points: dict[int, float], rounds: dict[int, float], wanted: dict[int, float]
) -> None:
    """What a curve made of hiccups says of a size is forgotten once that was timed in use."""
    found = timed(points, [(n, seconds) for n, seconds in rounds.items() for _ in range(2000)])
    assert found == pytest.approx(wanted, rel=0.01) and list(found) == sorted(points)


def knowing(ahead: int) -> dict[Source, Lowest]:
    """Databases that draft what the target would say most likely."""

    def say(tokens: Sequence[int]) -> list[tuple[int, ...]]:
        text = list(tokens[-2:])
        for _ in range(ahead):
            text.append(int(TARGET(tuple(text[-2:])).argmax()))
        return [tuple(text[2:])]

    return lowest_of(say)


def lowest_of(say: Callable[[Sequence[int]], list[tuple[int, ...]]]) -> dict[Source, Lowest]:
    def drafter() -> Drafter:
        return Adversary(say, "context")

    below = Learner(()), drafter()
    return {"databases": Lowest(lambda model, drawn: [drafter()], lambda model, drawn: below)}


def test_the_databases_are_measured_with_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards are stated to take a second: beside those of the toys, the work of a busy machine is
    so long that the target's databases rest now and then."""
    long = Stated({size: 1e4 * seconds for size, seconds in CURVE.items()})
    monkeypatch.setattr("engine.hsd.measure.measure_costs", lambda backend, seconds: long)
    work = profiler(("tiny", "mid"), PROMPTS[:6], Sampling(0.0), lowest=knowing(3))
    shares = [*work.run()]
    assert work.profile is not None and len(shares) == 3 + 6 * 2
    tiny, mid, target = (model.databases for model in work.profile.models)
    assert tiny is not None and mid is not None and target is not None

    def mean(law: Sequence[float]) -> float:
        return sum(tokens * share for tokens, share in enumerate(law, start=1))

    assert sum(target.law) == pytest.approx(1.0) and len(target.law) == 4
    assert mean(target.law) > mean(mid.law) > mean(tiny.law) > 1.0
    assert min(target.seconds, mid.seconds, tiny.seconds) > 0


@pytest.mark.parametrize("databases", [None, knowing(2)], ids=["models", "databases"])
@pytest.mark.parametrize("names", [(), ("mid",), NAMES])
def test_progress_goes_on_to_its_end(names: Sequence[str], databases: Any) -> None:
    work = profiler(names, PROMPTS[:2], tokens=9, lowest=databases)
    shares = []
    for share in work.run():
        assert share == 1.0 or work.profile is None
        shares.append(share)
    assert shares == sorted({*shares}) and shares[0] > 0 and shares[-1] == pytest.approx(1.0)
    assert work.profile is not None
    profile = work.profile
    assert [model.name for model in profile.models] == [*names, "toy"]
    assert profile.positions == (18 if names else 0)
    assert profile.sampling == {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert profile.measured > 1e9
    assert Profile.from_mapping(profile.mapping()) == profile


def test_it_may_be_stopped_anywhere() -> None:
    asked = 0
    for at in range(400):
        calls = iter([False] * at + [True] * 10**6)
        work = profiler(("tiny", "mid"), PROMPTS[:2], tokens=10, lowest=knowing(2),
                        cancelled=lambda calls=calls: next(calls))  # fmt: skip
        try:
            for _ in work.run():
                pass
        except Cancelled as error:
            assert work.profile is None and "stopped" in str(error)
            continue
        assert work.profile is not None
        asked = at
        break
    assert asked > 20, "it is asked often, and only what was never stopped comes to its end"


def test_answers_of_one_token_are_enough() -> None:
    def ending(suffix: tuple[int, ...]) -> Any:
        found = toy_logits(suffix).copy()
        found[END] = 99.0
        return found

    work = Profiler(ToyBackend(logits=ending), {"mid": ToyBackend()}, [[97, 98]], Sampling(0.7))
    assert [*work.run()][-1] == 1.0 and work.profile is not None
    assert work.profile.positions == 1 and work.profile.pairs[0, 1].acceptance < 0.1
    work = Profiler(ToyBackend(), {"mid": ToyBackend(logits=ending)}, [[97, 98]], Sampling(0.7))
    assert [*work.run()][-1] == 1.0 and work.profile is not None


def test_without_prompts_nothing_is_accepted() -> None:
    work = profiler(("tiny", "mid"), [])
    assert len([*work.run()]) == 3 and work.profile is not None
    assert {pair.acceptance for pair in work.profile.pairs.values()} == {0.0}
    assert work.profile.positions == 0


@pytest.mark.parametrize("context", [10, 20, 40, 90])
def test_draft_models_with_a_shorter_context_see_what_they_can(context: int) -> None:
    drafts = {"small": Strict(context, "small"), "mid": Strict(4096, "mid")}
    prompts = [[97] * 5, [98] * 30]
    for databases in (None, lowest_of(lambda tokens: [(97, 97)])):
        work = Profiler(Strict(), drafts, prompts, Sampling(0.0), databases, tokens=20)
        assert [*work.run()][-1] == pytest.approx(1.0) and work.profile is not None
        assert work.profile.pairs[0, 2].acceptance == pytest.approx(float(context > 17))


def test_tokens_that_a_draft_model_does_not_know_end_what_is_judged() -> None:
    known = 110
    small = Strict(name="small", logits=lambda suffix: toy_logits(suffix)[:known])
    small.info = replace(small.info, vocabulary_size=known)
    prompts = [[97 + at, 98] for at in range(8)]
    work = Profiler(Strict(), {"small": small, "mid": Strict(name="mid")}, prompts, Sampling(0.0))
    assert [*work.run()][-1] == 1.0 and work.profile is not None
    assert 0 < work.profile.positions < 8 * 64
    assert work.profile.pairs[0, 2].acceptance > 0.9


@pytest.mark.soak(stay=1)
@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_embedded_family_has_a_profile(
    embedded: Backend,
    embedded_drafts: dict[str, Backend],
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock on which a forward of each model takes a time of its own."""
    seconds, clock = {"small": 0.001, "mid": 0.002, "target": 0.008}, [0.0]

    def timed_by(model: Any) -> None:
        score = model.score

        def scored(*arguments: Any, **named: Any) -> Any:
            clock[0] += seconds[model.info.name]
            return score(*arguments, **named)

        monkeypatch.setattr(model, "score", scored)

    for model in (embedded, *embedded_drafts.values()):
        timed_by(model)
    for name, module in [*sys.modules.items()]:
        for each in {"perf_counter", "thread_time"} & vars(module).keys():
            if name.startswith("engine."):
                monkeypatch.setattr(module, each, lambda: clock[0])
    chat = Chat(embedded)
    prompts = [chat.prompt([Message("user", "Tell me a story about a fox.")], known=())]
    work = Profiler(embedded, embedded_drafts, prompts, Sampling(temperature), tokens=32)
    assert [*work.run()][-1] == 1.0 and work.profile is not None
    profile = work.profile
    assert [model.name for model in profile.models] == ["small", "mid", "target"]
    assert 0.2 < profile.pairs[0, 2].acceptance < profile.pairs[1, 2].acceptance < 1.0
    assert {model.name: model.seconds(0) for model in profile.models} == pytest.approx(seconds)
    assert profile.positions > 30
    for pair in profile.pairs.values():
        if temperature == 0:
            assert pair.survival["match"] == pytest.approx(pair.survival["rejection"])
