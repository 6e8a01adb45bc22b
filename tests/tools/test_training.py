"""Learning: it goes on where it was stopped, follows its schedule, and imitates its teacher."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.training_texts import write_texts
from tests.tools.conftest import Program
from training.__main__ import main

pytestmark = pytest.mark.model
SMALL = ["--shape", "64,96,1,1,1", "--length", "32", "--sequences", "4", "--micro", "2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed tokens of a few hundred documents."""
    folder = tmp_path_factory.mktemp("data")
    texts = str(write_texts(folder / "a.jsonl", 300))
    assert main(["prepare", texts, "--output", str(folder), "--vocabulary", "320"]) == 0
    return folder


def command(data: Path, output: Path, *options: str) -> list[object]:
    return ["train", data, "--output", output, "--context", "64", *options]


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "weights" / "model.safetensors")


def test_training_that_was_stopped_goes_on_where_it_was(
    data: Path, tmp_path: Path, training: Program
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    training(*command(data, whole, *SMALL, "--steps", "3"))
    for _ in range(2):
        assert (
            "The same command continues from here."
            in training(*command(data, parts, *SMALL, "--steps", "3", "--minutes", "0"))[-1]
        )
    going_on, _ = training(*command(data, parts, *SMALL, "--steps", "3"))
    assert "Going on after step 2 of 3." in going_on
    one, other = weights(whole), weights(parts)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    start = tmp_path / "start"
    training(*command(data, start, *SMALL, "--steps", "3", "--minutes", "0", "--seed", "1"))
    assert not all(torch.equal(one[name], values) for name, values in weights(start).items())


def test_a_checkpoint_of_another_plan_is_left_alone(
    data: Path, tmp_path: Path, training: Program
) -> None:
    training(*command(data, tmp_path, *SMALL, "--steps", "2", "--minutes", "0"))
    before = (tmp_path / "checkpoint.pt").read_bytes()
    assert "is of another training plan" in training.refusal(
        *command(data, tmp_path, *SMALL, "--steps", "5")
    )
    assert "is of another training plan" in training.refusal(
        *command(data, tmp_path, *SMALL, "--steps", "2", "--passes", "prose=2")
    )
    shape = ["--shape", "64,96,1,1,2", *SMALL[2:]]
    assert "is of a model of another shape" in training.refusal(
        *command(data, tmp_path, *shape, "--steps", "2")
    )
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    (tmp_path / "checkpoint.pt").write_bytes(before[: len(before) // 2])
    assert "cannot be read" in training.refusal(*command(data, tmp_path, *SMALL, "--steps", "2"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "0"], "The training plan has steps = 0"),
        (["--steps", "1", "--decay", "20"], "decay = 20.0. It is a part of 1"),
        (["--steps", "1", "--sequences", "3"], "no multiple of 2"),
        (["--steps", "1", "--start", "x"], "either the --shape of a new model or a folder"),
        (["--steps", "1", "--teacher", "/nowhere"], "There is no model in '/nowhere'"),
        (["--steps", "1", "--passes", "prose=-1"], "There is no pass 'prose=-1'"),
        (["--steps", "1", "--passes", "prose"], "There is no pass 'prose'"),
        (["--steps", "1", "--passes", "poems=1"], "There is no source 'poems'"),
        (["--steps", "1", "--device", "abacus"], "The device 'abacus' is not available here"),
        (["--steps", "1", "--length", "128"], "Windows of 128 tokens are longer"),
    ],
)
def test_what_cannot_be_trained_is_told(
    options: list[str], words: str, data: Path, tmp_path: Path, training: Program
) -> None:
    assert words in training.refusal(*command(data, tmp_path / "out", *SMALL, *options))


def test_a_tokenizer_with_more_tokens_than_the_model_is_told(
    data: Path, tmp_path: Path, training: Program
) -> None:
    training(*command(data, tmp_path / "a", *SMALL, "--steps", "1"))
    more, texts = tmp_path / "more", str(write_texts(tmp_path / "b.jsonl", 300))
    training("prepare", texts, "--output", more, "--vocabulary", "340")
    options = ["--start", str(tmp_path / "a" / "weights"), "--steps", "1", "--length", "32"]
    assert "knows 320 tokens, the tokenizer of the data 340" in training.refusal(
        *command(more, tmp_path / "c", *options)
    )
