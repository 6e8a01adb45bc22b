"""Recorded answers said by a model that knows nothing: real forwards, given choices."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from tests.support.gguf_files import tiny_gguf
from tests.support.tiny_gguf import tiny

pytestmark = pytest.mark.gguf
ANSWER = "The sky is blue because the air scatters blue light more than red light."


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Two answers to learn from, and one like them."""
    path = tmp_path / "traces.jsonl"
    records = [
        {"prompt": f"{number}: why?", "output": f"{ANSWER} {number}", "split": split}
        for number, split in enumerate(("train", "train", "test"))
    ]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@pytest.mark.parametrize("architecture", ["qwen35", "granitehybrid"])
def test_the_answer_is_said_in_fewer_forwards(
    tmp_path: Path, traces: Path, architecture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, saved = tiny(tmp_path, architecture), tmp_path / "chains.json"
    run = ["chains", "--model", str(model), "--traces", str(traces), "--threads", "1"]
    assert main([*run, "--save", str(saved)]) == 0
    record: Any = json.loads(saved.read_text())
    assert record["leaves"] == 1 and record["bench"] == "chains"
    ways = record["ways"]
    assert ways["plain"]["tokens_per_forward"] == 1 and ways["plain"]["drafted"] == 0
    assert ways["all"]["tokens_per_forward"] > 2, "it has read the answer twice"
    assert len({way["tokens"] for way in ways.values()}) == 1, "all say the same text"
    assert "against plain" in capsys.readouterr().out


def test_what_cannot_be_said(
    tmp_path: Path, traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["chains", "--model", str(tiny_gguf(tmp_path / "tiny.gguf")), "--traces", str(traces)]
    assert main([*run, "--split", "other"]) == 2
    assert "No answer of the split 'other' fits" in capsys.readouterr().err
    assert main([*run, "--limit", "-1"]) == 2
    assert "no negative limit" in capsys.readouterr().err
