"""The figures of answers in three dialects: each by its definition, bonus tokens in none."""

import re
from dataclasses import replace
from math import isfinite

import pytest

from app.api.figures import (
    SECONDS,
    AnswerFigures,
    Counters,
    figures,
    ours,
    speculative,
    timings,
    usage,
)
from app.http.problems import api_error
from engine.errors import (
    Busy,
    Cancelled,
    EngineDied,
    ModelError,
    PromptError,
    SettingError,
    StorageError,
    StrataError,
)
from engine.metrics import Tally
from engine.types import Learned, Prefill, Step, Token


def step(index: int, kept: int, drafted: int, depths: tuple[tuple[int, int], ...]) -> Step:
    tokens = tuple(
        Token(n, n, "context" if n < kept else "target", 0, "x") for n in range(kept + 1)
    )
    proposed = {"context": drafted - 1, "model": 1} if drafted else {}
    accepted = {"context": kept} if kept else {}
    seconds = {"draft_seconds": 0.001, "verify_seconds": 0.009, "plain_seconds": 0.02}
    return Step(index, tokens, proposed, accepted, depths, **seconds)


STEPS = (
    step(0, 0, 0, ()),
    step(1, 3, 5, ((2, 1), (2, 1), (1, 1))),
    step(2, 0, 2, ((2, 0),)),
    step(3, 1, 4, ((2, 1), (2, 0))),
)
"""Four forwards, three of which drafted: 11 tokens, of which 4 were kept, and 8 are said."""
PREFILL = Prefill(20, 15, 0.1, 0.1)


def answered(prefill: Prefill = PREFILL, steps: tuple[Step, ...] = STEPS) -> AnswerFigures:
    tally = Tally()
    for event in (prefill, *steps, Learned(0.01)):
        tally.add(event)
    return AnswerFigures("toy", "hd", 64, 7, prefill, tally.metrics())


def test_llama_server_s_figures() -> None:
    found = timings(answered())
    assert found == {
        "cache_n": 15,
        "prompt_n": 5,
        "prompt_ms": pytest.approx(100),
        "prompt_per_token_ms": pytest.approx(20),
        "prompt_per_second": pytest.approx(50),
        "predicted_n": 8,
        "predicted_ms": pytest.approx(40),
        "predicted_per_token_ms": pytest.approx(5),
        "predicted_per_second": pytest.approx(200),
        "draft_n": 11,
        "draft_n_accepted": 4,
    }


def test_vllm_s_figures_count_the_steps_that_drafted() -> None:
    assert speculative(answered()) == {
        "num_spec_tokens": 64,
        "num_spec_steps": 3,
        "num_draft_tokens": 11,
        "num_accepted_draft_tokens": 4,
        "mean_acceptance_length": pytest.approx(1 + 4 / 3),
        "draft_acceptance_rate": pytest.approx(4 / 11),
        "acceptance_histogram": {"0": 1, "1": 1, "3": 1},
        "acceptance_rate_per_position": [pytest.approx(n / 3) for n in (2, 1, 1)],
    }


def test_our_figures_by_source() -> None:
    found = ours(answered())
    assert found["by_source"] == {
        "context": {"drafted": 8, "accepted": 4},
        "model": {"drafted": 3, "accepted": 0},
    }
    assert (found["forwards"], found["plain_steps"], found["tokens_per_forward"]) == (4, 1, 2.0)
    assert found["speedup_estimate"] is None, "eight tokens say nothing of speed"
    longer = ours(answered(steps=STEPS * 3))
    plain, took = 0.1 + 12 * 0.02, 0.1 + 12 * 0.01 + 0.01
    assert longer["speedup_estimate"] == pytest.approx(plain / took)
    assert longer["decode_speedup_estimate"] == pytest.approx(2.0)


def test_where_nothing_was_drafted_nothing_is_said_of_drafts() -> None:
    plain = answered(steps=STEPS[:1])
    assert speculative(plain) is None and "draft_n" not in timings(plain)
    assert ours(plain)["by_source"] == {}


def test_an_answer_of_nothing_has_figures_too() -> None:
    empty = answered(Prefill(1, 1), ())
    numbers = [n for n in timings(empty).values() if isinstance(n, float)]
    assert all(map(isfinite, numbers)) and speculative(empty) is None
    assert ours(empty)["tokens_per_forward"] == 0.0


def test_a_prompt_is_counted_once_however_many_choices_it_has() -> None:
    two, three = answered(), answered(Prefill(30, 29))
    assert usage([two, answered(Prefill(20, 19))], 1) == {
        "prompt_tokens": 20,
        "completion_tokens": 16,
        "total_tokens": 36,
        "prompt_tokens_details": {"cached_tokens": 15},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    thought = replace(two, thought=5)
    shown = usage([thought, thought], 1)["completion_tokens_details"]
    assert shown["reasoning_tokens"] == 10
    assert usage([two, two, three, three], 2)["prompt_tokens"] == 50
    assert figures([two, two])["strata"]["choices"] == [ours(two)] * 2
    assert "timings" not in figures([two, two])


# Prometheus


LINE = re.compile(r"^([a-z0-9_:]+)\{((?:[a-z_]+=\"(?:[^\"\\\n]|\\.)*\",?)*)\} (\S+)$")


def read(text: str) -> dict[str, float]:
    """The values of a scrape by their names and labels; every line has to make sense."""
    assert text.endswith("\n")
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            _, word, name, rest = line.split(" ", 3)
            assert word in ("HELP", "TYPE") and (word == "HELP" or name not in kinds)
            if word == "TYPE":
                kinds[name] = rest
            continue
        match = LINE.match(line)
        assert match, line
        family = re.sub(r"_(?:bucket|sum|count)$", "", match[1])
        assert match[1] in kinds or kinds[family] == "histogram"
        assert kinds.get(match[1]) != "counter" or match[1].endswith("_total")
        assert f"{match[1]}{{{match[2]}}}" not in found
        found[f"{match[1]}{{{match[2]}}}"] = float(match[3])
    return found


def test_counters_add_up_under_the_names_of_vllm() -> None:
    counters = Counters()
    counters.answered(answered(), "stop", 0.2, 0.7)
    counters.answered(answered(), "length", None, 400.0)
    counters.failed(429)
    counters.change(waiting=3)
    counters.change(waiting=-1, running=1)
    found = read(counters.text("toy"))
    of = 'model_name="toy"'
    assert found[f"vllm:num_requests_running{{{of}}}"] == 1
    assert found[f"vllm:num_requests_waiting{{{of}}}"] == 2
    assert found[f"vllm:prompt_tokens_total{{{of}}}"] == 40
    assert found[f"vllm:generation_tokens_total{{{of}}}"] == 16
    assert found[f"vllm:prefix_cache_hits_total{{{of}}}"] == 30
    assert found[f"vllm:spec_decode_num_drafts_total{{{of}}}"] == 6
    assert found[f"vllm:spec_decode_num_draft_tokens_total{{{of}}}"] == 22
    assert found[f"vllm:spec_decode_num_accepted_tokens_total{{{of}}}"] == 8
    per_place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    places = [found[f'{per_place}{{{of},position="{n}"}}'] for n in range(3)]
    assert places == [4, 2, 2] and sum(places) == 8
    assert found[f'vllm:request_success_total{{{of},finished_reason="stop"}}'] == 1
    assert found[f'strata_drafted_tokens_total{{{of},source="context"}}'] == 16
    assert found[f"strata_forwards_total{{{of}}}"] == 8
    assert found['strata_requests_refused_total{status="429"}'] == 1
    assert found[f"vllm:time_to_first_token_seconds_count{{{of}}}"] == 1
    whole = "vllm:e2e_request_latency_seconds"
    buckets = [found[f'{whole}_bucket{{{of},le="{bound}"}}'] for bound in (*SECONDS, "+Inf")]
    assert buckets == sorted(buckets) and buckets[-1] == found[f"{whole}_count{{{of}}}"] == 2
    assert found[f'{whole}_bucket{{{of},le="1.0"}}'] == 1
    assert found[f"{whole}_sum{{{of}}}"] == pytest.approx(400.7)
    assert found[f"strata_plain_seconds_total{{{of}}}"] == pytest.approx(2 * (0.1 + 0.08))


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "{}", "ä\U0001f999", ""])
def test_no_name_of_a_model_breaks_a_line(name: str) -> None:
    counters = Counters()
    found = read(counters.text(name))
    assert len(found) == 3


# errors


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (PromptError("It has 9,000 tokens."), 400),
        (PromptError("The message is empty."), 400),
        (SettingError("No draft model."), 400),
        (Busy("Full."), 429),
        (ModelError("No model."), 503),
        (EngineDied("It ended."), 503),
        (Cancelled("Stopped."), 503),
        (StorageError("The disk is full."), 500),
    ],
)
def test_errors_of_ours_have_a_status(error: StrataError, status: int) -> None:
    found = api_error(error, "messages")
    assert found.status == status and found.message == str(error)
    assert ("retry-after" in found.headers) is (status in (429, 503))
    long = isinstance(error, PromptError) and "tokens" in str(error)
    assert (found.code == "context_length_exceeded") is long
