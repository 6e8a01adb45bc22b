"""What a page costs: its figures and bars, and a report of a real page."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import bench.page
from bench.__main__ import main
from bench.page import (
    BARS,
    Bar,
    Shares,
    Streamed,
    Visit,
    Wire,
    figures,
    lengthen,
    visited,
    write,
)
from storage.conversations import Conversations, Piece
from storage.database import Database


def answer(tokens: int, speed: float, renderer: float, *tasks: float) -> Streamed:
    shares, work = Shares(renderer, 0.2, 0.9), Shares(3 * renderer, 0.5, 2.0)
    return Streamed(tokens, speed, 2.0, shares, work, 60 * tokens, 40 * tokens, list(tasks))


def test_figures_are_medians_of_pairs_and_long_tasks_are_counted() -> None:
    answers = [answer(100, 90.0, 0.1), answer(50, 40.0, 0.3), answer(10, 30.0, 0.2)]
    long = [answer(5, 9.0, 0.5, 60.0), answer(20, 7.0, 0.6, 51.0, 80.0)]
    alone = [(100.0, 1.0), (50.0, 1.8), (25.0, 1.2)]
    found = figures(answers, alone, long, Shares(0.03, 0.001, 0.002))
    assert found["speed_ratio"] == 0.9 and found["tokens"] == [100, 50, 10]
    assert found["wall_ratio"] == 0.6 and found["alone_tokens_per_second"] == 50.0
    assert (found["renderer_share"], found["bytes_per_token"]) == (0.2, 100.0)
    assert (found["stream_bytes_per_token"], found["bytes_around"]) == (60.0, 2000)
    assert found["renderer_seconds"] == pytest.approx(0.6) and found["server_seconds"] == 0.5
    assert (found["long_tasks"], found["longest_task_ms"], found["long_tokens"]) == (3, 80.0, 20)
    assert found["idle_share"] == pytest.approx(0.003) and found["idle_renderer_share"] == 0.03


def test_shares_are_of_the_time_between() -> None:
    assert Shares(3.0, 2.0, 10.0).since(Shares(1.0, 2.0, 5.0), 10.0) == Shares(0.2, 0.0, 0.5)


def test_a_bar_is_met_on_its_side_of_it() -> None:
    least, most = Bar("speed", 0.92, least=True), Bar("bytes", 60)
    assert least.met(0.92) and least.met(1.1) and not least.met(0.91)
    assert most.met(60) and not most.met(60.1)
    assert "met" in least.line(1.0) and "MISSED" in most.line(61)


def test_bytes_are_counted_once_and_with_their_headers() -> None:
    wire = Wire()
    for name, url in (("1", "http://127.0.0.1/stream/abc?from=0"), ("2", "http://127.0.0.1/join")):
        wire.asked({"requestId": name, "request": {"url": url}})
        wire.begun({"requestId": name, "response": {"encodedDataLength": 200}})
    for count in (0, 300):  # The browser tells late how much a piece was on the wire.
        wire.more({"requestId": "1", "dataLength": 150, "encodedDataLength": count})
    wire.more({"requestId": "2", "dataLength": 900, "encodedDataLength": 0})
    wire.ended({"requestId": "2", "encodedDataLength": 650})
    wire.asked({"requestId": "3", "request": {"url": "http://127.0.0.1/assets/kept.js"}})
    wire.ended({"requestId": "3", "encodedDataLength": 0})
    assert wire.received(stream=True) == 500 and wire.received(stream=False) == 650


def test_visits_are_told_by_their_medians() -> None:
    found = visited([Visit(0.2, 0.9, 80), Visit(0.4, 0.7, 90), Visit(0.3, 0.8, 70)])
    assert found == {"paint_seconds": 0.3, "usable_seconds": 0.8, "visit_bytes": 80}


def test_the_long_conversation_has_so_many_tokens_of_answers(db: Database) -> None:
    class Options:
        tokens, length, repeats = 32, 50, 1

    write(db, Options, [("a question", 7)])  # type: ignore[arg-type]
    store = Conversations(db, "local")
    asked = store.list()[0]
    assert asked.settings["generation"]["sampling"]["seed"] == 7
    assert asked.settings["fresh_seed"] is False
    pieces = [Piece(f" {at}", "target", 0, at, at, 0.5) for at in range(20)]
    store.append(asked.id, "assistant", "".join(piece.text for piece in pieces), pieces=pieces)
    lengthen(db, Options)  # type: ignore[arg-type]
    long = next(found for found in store.list() if found.title == "A long conversation")
    said = [message for message in store.messages(long.id) if message.role == "assistant"]
    assert [len(message.pieces or ()) for message in said] == [20, 20, 20]


def test_what_is_missing_is_said_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.page.shutil.which", lambda name: None)
    assert main(["page"]) == 2
    assert "Install the package chromium" in capsys.readouterr().err
    assert main(["page", "--repeats", "0"]) == 2

    @contextmanager
    def never() -> Iterator[None]:
        raise AssertionError
        yield

    monkeypatch.setattr("bench.page.chromium", never)
    assert main(["page", "--save", "/no/such/folder/file"]) == 2


@pytest.mark.browser
def test_a_run_ends_in_one_json_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.page, "SETTLE_SECONDS", 1.0)
    monkeypatch.setattr(bench.page, "IDLE_SECONDS", 2.0)
    file = tmp_path / "page.json"
    run = ["page", "--repeats", "1", "--starts", "1", "--tokens", "24", "--length", "60"]
    assert main([*run, "--save", str(file)]) == 0
    said = capsys.readouterr().out
    record = json.loads(said.splitlines()[-1])
    assert record == json.loads(file.read_text()) and record["bench"] == "page"
    assert record["tokens"] == [24] and record["bytes_per_token"] > 1
    assert BARS.keys() <= record.keys()
    assert all(bar.words in said for bar in BARS.values())
    shares = [record[name] for name in ("renderer_share", "server_share", "start_seconds")]
    visit = [record[name] for name in ("paint_seconds", "usable_seconds", "visit_bytes")]
    assert min(*shares, *visit) > 0 and record["model_seconds"] > record["start_seconds"]
