"""`bench gpu` without a GPU: what it compares and reports."""

import json
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, measure
from bench.gpu import inflated
from engine.drafting.costs import CostCurve
from engine.models.load_transformers import with_captured
from engine.models.shape import SHAPES, Shape
from engine.settings import Runtime
from tests.support.backends import load_kind
from tests.tools.conftest import Program

pytestmark = pytest.mark.model


@pytest.fixture
def captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model in captured forwards, in place of the one that is asked for."""
    from engine.backends import captured

    monkeypatch.setattr(captured, "TREES", (1, 4))
    monkeypatch.setattr(captured, "PROMPTS", (32,))
    backend = load_kind("llama-gqa", tmp_path)
    with_captured(backend)
    monkeypatch.setattr(gpu, "TREES", (1, 4))
    monkeypatch.setattr(gpu, "PROMPT_LENGTHS", (20, 100))
    monkeypatch.setattr(measure, "measure_costs", lambda _: CostCurve({0: 1.0, 3: 1.1}))
    monkeypatch.setattr(gpu, "load_model", lambda *_: backend)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return backend


RUN = ("gpu", "--prompts", "random", "--limit", "2", "--max-new-tokens", "6", "--lengths", "30")


@pytest.mark.soak
def test_both_ways_are_measured_and_compared(captured: Any, bench: Program) -> None:
    known = captured.captured
    head, *tables, line = bench(*RUN, "--no-peers")
    record = json.loads(line)
    ways = ["captured", "one by one"]
    assert [(each["way"], each["length"]) for each in record["forwards"]] == [
        (way, 30) for way in ways
    ]
    assert all([*each["ms"]] == ["1", "4"] for each in record["forwards"])
    assert all([*each["ms"]] == ["20", "100"] for each in record["reading"])
    answers = {(row["way"], row["temperature"], row["name"]): row for row in record["answers"]}
    assert len(answers) == 2 * 2 * 4
    for (_, temperature, _), row in answers.items():
        plain = answers["captured", temperature, "plain"]
        assert row["tokens"] == plain["tokens"] and row["verdict"] == "yes"
    assert record["memory"]["pool"] > 0
    assert captured.captured is known and captured.info.nodes == 3, "as it was before"
    assert sum(row.startswith("| captured ") for row in tables) == 2 + 8
    assert "## GB of memory" in tables and "float32" in head and record["driver"] in head


@pytest.mark.soak
def test_a_size_is_written_and_loaded_with_the_context_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SHAPES, "demo", Shape(1024, 1040, 8, 8, 9))
    runtime = Runtime(context_length=4096, dtype="bfloat16")
    info = inflated(Namespace(size="demo", **asdict(runtime))).info
    assert (info.name, info.context_length) == ("tiny-chat as demo", 4096)
    assert info.dtype == "bfloat16" and info.parameters > 5e7


def test_a_model_without_captured_forwards_is_refused_with_the_reason(
    captured: Any, bench: Program
) -> None:
    captured.captured = None
    captured.info = replace(captured.info, note="Its layers lie on several devices.")
    assert "has no captured forwards. Its layers lie on" in bench.refusal(*RUN)


def test_without_a_gpu_it_says_so(bench: Program) -> None:
    said = "There is no GPU here that torch can use. Run this where one is.\n"
    assert bench.refusal(*RUN) == said
