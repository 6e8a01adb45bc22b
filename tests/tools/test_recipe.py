"""The whole recipe on a hundredth of some text: it trains, distils and exports models that both
libraries load, that answer the same in both, and that can be measured."""

import subprocess
import sys
from math import log
from pathlib import Path

import pytest
import torch

from bench.prompts import read_prompts
from engine.models.loaders import load
from engine.settings import Runtime, Sampling
from tests.support.training_texts import write_texts
from tests.tools.conftest import Program
from training.answers import PROMPTS, answered, text_of
from training.measure import ALL, held_out_bits
from training.prepare import read, rendered
from training.train import loaded

pytestmark = [pytest.mark.model, pytest.mark.gguf, pytest.mark.soak]
QUESTION = "I am person 5. What is the river like?"
PLAN = ["--length", "64", "--sequences", "8", "--context", "256", "--rate", "0.02"]


def run(*command: str) -> None:
    """In a process of its own: torch's compiler minds what other libraries imported before."""
    done = subprocess.run(
        [sys.executable, "-m", "training", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `held.jsonl` and the exported family: target, small, and small untaught."""
    folder = tmp_path_factory.mktemp("recipe")
    texts, data = write_texts(folder / "texts.jsonl.xz", 60_000), folder / "data"
    sample = ["--sample", "0.01", "--vocabulary", "384", "--context", "256"]
    commands = [["prepare", str(texts), "--output", str(data), *sample]]
    for name, options in {
        "target": ["--shape", "64,128,1,1,2", "--steps", "80"],
        "small": ["--shape", "64,96,1,1,1", "--steps", "60", "--compile"]
        + ["--teacher", str(folder / "target" / "weights")],
        "untaught": ["--shape", "64,96,1,1,1", "--steps", "1"],
    }.items():
        own = str(folder / name)
        commands.append(["train", str(data), "--output", own, *PLAN, *options])
        commands.append(["export", f"{own}/weights", str(folder / "family" / name)])
        commands[-1] += ["--type", "F16"]
    for command in commands:
        run(*command)
    (data / "held.jsonl").rename(folder / "family" / "held.jsonl")
    return folder / "family"


@pytest.mark.soak
def test_both_libraries_load_what_was_exported_and_answer_the_same(made: Path) -> None:
    one = load(str(made / "target"), Runtime(dtype="float32"))
    other = load(str(made / "target.gguf"), Runtime(threads=1))
    assert one.info.tokenizer_fingerprint == other.info.tokenizer_fingerprint
    assert one.info.sampling == other.info.sampling
    assert (one.info.sampling.temperature, one.info.sampling.min_p) == (0.8, 0.05)
    assert one.info.context_length == other.info.context_length == 256
    said = [answered(backend, QUESTION, Sampling(temperature=0), 40) for backend in (one, other)]
    texts = [text_of(answer) for answer in said]
    assert texts[0] == texts[1] and "The" in texts[0]


def test_an_export_that_fails_leaves_what_was_there(
    made: Path, tmp_path: Path, training: Program
) -> None:
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    weights = str(made / "target")
    assert "There is no type 'Q9_9'" in training.refusal(
        "export", weights, str(made / "small"), "--type", "Q9_9"
    )
    assert "There is no model in" in training.refusal("export", str(tmp_path), str(made / "small"))
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| \n").split("|")]


def test_held_out_bits_are_told_by_source(made: Path, training: Program) -> None:
    names = ("target", "small", "untaught")
    header, _, *rows = training(
        "bits", str(made / "held.jsonl"), *(str(made / name) for name in names)
    )
    assert cells(header)[3:] == [f"family/{name}" for name in names]
    assert [cells(row)[0] for row in rows] == ["prose", "things", "all"]
    target, small, untaught = (float(cell) for cell in cells(rows[-1])[3:])
    assert target < 1.5 and small < 1.5 < untaught
    documents = [int(cells(row)[1]) for row in rows]
    assert documents[0] + documents[1] == documents[2] > 2


def test_bits_are_those_of_every_document_alone(made: Path) -> None:
    documents, cpu = list(read([made / "held.jsonl"])), torch.device("cpu")
    found = held_out_bits(made / "target", documents, cpu)[ALL]
    model = loaded(made / "target")
    backend = load(str(made / "target"), Runtime(dtype="float32"))
    nats = 0.0
    for document in documents:
        tokens = torch.tensor([backend.tokenize(rendered(backend.tokenizer, document))])  # type: ignore[attr-defined]
        with torch.no_grad():
            laws = model(tokens).logits[0].log_softmax(-1)
        nats -= sum(float(laws[at, token]) for at, token in enumerate(tokens[0, 1:]))
    assert found.bits == pytest.approx(nats / log(2), rel=1e-4)
    cut = held_out_bits(made / "target", documents, cpu, context=16)[ALL]
    assert cut.bytes == found.bytes and cut.bits > found.bits


def test_a_draft_that_was_taught_is_accepted_more_often(made: Path, training: Program) -> None:
    drafts = [str(made / name) for name in ("small", "untaught")]
    options = ["--tokens", "16", "--prompts", "3"]
    held, target = str(made / "held.jsonl"), str(made / "target")
    lines = training("acceptance", held, target, *drafts, *options)
    rows = [cells(line) for line in lines if "M |" in line]
    accepted = {row[0]: float(row[-1].split()[0]) for row in rows}
    assert accepted["family/small"] > 0.6 > accepted["family/untaught"]


def test_nothing_to_measure_is_told(made: Path, tmp_path: Path, training: Program) -> None:
    (tmp_path / "held.jsonl").touch()
    held, target = str(tmp_path / "held.jsonl"), str(made / "target")
    assert "There are no documents in" in training.refusal("bits", held, target)
    assert "No chat is left in" in training.refusal("acceptance", held, target, str(made / "small"))
    assert "There is no question" in training.refusal("samples", target, "--prompts", held)
    assert "at least one seed" in training.refusal("samples", target, "--seeds", "0")
    held = str(made / "held.jsonl")
    assert "at least one prompt" in training.refusal(
        "acceptance", held, target, str(made / "small"), "--prompts", "0"
    )
    assert "A context of 1 leaves nothing" in training.refusal(
        "bits", held, target, "--context", "1"
    )
    for command in (["bits", held, target], ["acceptance", held, target], ["samples"]):
        assert "are called the same" in training.refusal(*command, target, target)


def test_samples_are_answers_side_by_side(made: Path, tmp_path: Path, training: Program) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"turns": ["{QUESTION}"]}}\n' * 2, encoding="utf-8")
    models = [str(made / "target"), str(made / "target.gguf")]
    options = ["--prompts", str(file), "--seeds", "2", "--max-new-tokens", "30"]
    out = "\n".join(training("samples", *models, *options, "--temperature", "0"))
    assert out.count(f"**{QUESTION}**") == 2 and out.count("- *family/target*: The ") == 2
    assert "family/target.gguf: 4 answers, " in out
    assert len(read_prompts(PROMPTS, limit=0)) == 20
