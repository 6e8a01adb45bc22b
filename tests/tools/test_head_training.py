"""Training a head: it learns its target's law within answers, goes on where it was stopped, and is
found, measured and written as a GGUF file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file

from engine.heads.dflash import read_dflash
from engine.heads.eagle3 import Target, read_head
from engine.models.loaders import load
from engine.settings import Runtime, Sampling
from tests.support.training_texts import write_texts
from tests.tools.conftest import Program
from training.__main__ import main
from training.block import ALONE, of_blocks
from training.block import FADE as BLOCK_FADE
from training.head import FADE, of_target, within
from training.prepare import Corpus, read
from training.train import loaded

pytestmark = pytest.mark.model
PLAN = ["--length", "48", "--sequences", "4", "--micro", "2", "--layers", "0", "1", "2"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with packed tokens in `data` and a target of two layers in `target`."""
    folder = tmp_path_factory.mktemp("made")
    texts, data = str(write_texts(folder / "texts.jsonl", 400)), str(folder / "data")
    assert main(["prepare", texts, "--output", data, "--vocabulary", "320"]) == 0
    shape = ["--shape", "64,96,1,1,2", "--length", "48", "--sequences", "8", "--micro", "8"]
    options = ["--output", str(folder / "run"), "--steps", "60", "--rate", "0.02"]
    assert main(["train", data, *shape, *options, "--context", "256"]) == 0
    assert main(["export", str(folder / "run" / "weights"), str(folder / "target")]) == 0
    return folder


def head(made: Path, output: Path, *options: str) -> int:
    where = ["--target", str(made / "target"), "--output", str(output)]
    return main(["head", str(made / "data"), *where, *PLAN, *options])


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "weights" / "model.safetensors")


@pytest.mark.soak
def test_a_head_learns_and_goes_on_where_it_was_stopped(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert head(made, tmp_path / "whole", "--steps", "20", "--decay", "0.5") == 0
    log = (tmp_path / "whole" / "log.jsonl").read_text()
    lines = [json.loads(each) for each in log.splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    for minutes in ("0", "9"):
        options = ["--steps", "3", "--minutes", minutes]
        assert head(made, tmp_path / "parts", *options) == 0
    assert "Going on after step 1 of 3." in capsys.readouterr().out
    assert head(made, tmp_path / "three", "--steps", "3") == 0
    one, other = weights(tmp_path / "three"), weights(tmp_path / "parts")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    start = ["--start", str(tmp_path / "whole" / "weights"), "--steps", "1", "--rate", "0"]
    assert head(made, tmp_path / "more", *start, "--adam-rate", "0") == 0
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "more")
    configs = [tmp_path / name / "weights" / "config.json" for name in ("whole", "more")]
    assert configs[0].read_text() == configs[1].read_text()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_it_learns_is_what_it_does_when_it_drafts(made: Path, tmp_path: Path) -> None:
    """The loss is that of the laws which the engine's head gives at the same places."""
    assert head(made, tmp_path, "--steps", "5") == 0
    target = loaded(made / "target").eval()
    network, _ = read_head(tmp_path / "weights", Target(64, 2, 320))
    corpus = Corpus.open(made / "data" / "train")
    text = corpus.tokens[corpus.ends[0] :][:49].tolist()
    rows, ahead = torch.tensor([text]), 3
    inputs, targets = rows[:, :-1], rows[:, 1:]
    with torch.no_grad():
        found = float(of_target(network.float(), target, ahead, 4, 5)(inputs, targets))
    answering = within(inputs, 4, 5)[0].tolist()
    roles = [token for token in text[:-1] if token < 5]
    assert 4 in roles and 0 < sum(answering) < len(answering)
    backend = load(
        str(made / "target"), Runtime(dtype="float32", head=str(tmp_path / "weights"))
    ).open()
    own, count = backend.head, len(text) - 1 - ahead
    assert own is not None
    own.listen(True)
    with torch.no_grad():
        laws = target(inputs).logits[0].softmax(-1)
    losses: list[list[float]] = [[] for _ in range(ahead)]
    for row in range(count):
        backend.prefill(text[: row + 2], lambda: False)
        guess: Any = own.start(text[: row + 2], Sampling(temperature=0), lambda: False)
        for step in range(ahead):
            place = row + 1 + step
            if answering[place]:
                logits = torch.from_numpy(guess.logits).log_softmax(-1)
                losses[step].append(-float((laws[place] * logits).sum()))
            if step < ahead - 1:
                guess = own.extend([0], [text[row + 2 + step]])[0]
    shares = [FADE**step for step in range(ahead)]
    wanted = sum(share * np.mean(each) for share, each in zip(shares, losses, strict=True)) / sum(
        shares
    )
    assert found == pytest.approx(wanted, rel=2e-3)


BLOCK = ["--length", "48", "--sequences", "4", "--micro", "2", "--layers", "1", "--depth", "1"]


def block(made: Path, output: Path, *options: str) -> int:
    where = ["--target", str(made / "target"), "--output", str(output)]
    shape = ["--places", "4", "--rank", "8", "--blocks", "6"]
    return main(["block", str(made / "data"), *where, *BLOCK, *shape, *options])


@pytest.mark.soak
def test_a_block_head_learns_and_goes_on(made: Path, tmp_path: Path) -> None:
    assert block(made, tmp_path / "one", "--steps", "30", "--decay", "0.5") == 0
    log = (tmp_path / "one" / "log.jsonl").read_text()
    lines = [json.loads(each) for each in log.splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    start = ["--start", str(tmp_path / "one" / "weights"), "--steps", "1", "--rate", "0"]
    assert block(made, tmp_path / "more", *start, "--adam-rate", "0") == 0
    one, other = weights(tmp_path / "one"), weights(tmp_path / "more")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_what_a_block_head_learns_is_what_it_guesses(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is that of the laws which the engine's head gives at the same places."""
    assert block(made, tmp_path, "--steps", "5", "--candidates", "320") == 0
    target = loaded(made / "target").eval()
    network = read_dflash(tmp_path / "weights", Target(64, 2, 320))
    corpus = Corpus.open(made / "data" / "train")
    text = corpus.tokens[corpus.ends[0] :][:49].tolist()
    inputs, targets = torch.tensor([text[:-1]]), torch.tensor([text[1:]])
    answers = within(inputs, 4, 5)[0].tolist()
    inside = [at for at in range(44) if answers[at]]
    # The last token of one answer is followed by a message that is none of its own.
    first = [inside[0], inside[len(inside) // 2], inside[-1]]
    assert not all(answers[at] for each in first for at in range(each, each + 3))
    monkeypatch.setattr(torch, "multinomial", lambda *_, **__: torch.tensor([first]))
    with torch.no_grad():
        found = float(of_blocks(network.float(), target, len(first), 4, 5)(inputs, targets))
        laws = target(inputs).logits[0].softmax(-1)
    folder = str(tmp_path / "weights")
    backend = load(str(made / "target"), Runtime(dtype="float32", head=folder)).open()
    own: Any = backend.head
    own.listen(True)
    vectors = own.weights.head.candidate_selector.predecessor_codebook
    kept, losses, shares = vectors.clone(), [], []
    for at in first:
        backend.prefill(text[: at + 1], lambda: False)
        started = text[: at + 1], Sampling(temperature=0), lambda: False
        vectors.zero_()
        without = own.start(*started)
        places = [without.at(depth, 0).logits for depth in range(3)]
        vectors.copy_(kept)
        guess = own.start(*started)
        for depth in range(3):
            if not all(answers[at : at + depth + 1]):
                break
            joint: Any = guess if depth == 0 else guess.after(depth, text[at + depth])
            for logits, share in ((joint.logits, 1.0), (places[depth], ALONE)):
                expected = torch.from_numpy(logits).log_softmax(-1)
                losses.append(-share * float((laws[at + depth] * expected).sum()) / (1 + ALONE))
                losses[-1] *= BLOCK_FADE**depth
            shares.append(BLOCK_FADE**depth)
    assert len(shares) < 9
    assert found == pytest.approx(sum(losses) / sum(shares), rel=2e-3)


def test_answers_are_learned_from_and_nothing_else() -> None:
    #                     bos user  . end asst  . end user . asst .
    inputs = torch.tensor([[9, 0, 3, 9, 1, 4, 9, 9, 1, 3, 9, 4, 9]])
    assert within(inputs, 4, 5)[0].int().tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]


@pytest.mark.soak
def test_a_head_is_measured_by_depth(made: Path, tmp_path: Path, training: Program) -> None:
    assert head(made, tmp_path, "--steps", "40", "--decay", "0.5", "--rate", "0.02") == 0
    held, target = str(made / "data" / "held.jsonl"), str(made / "target")
    options = ["--prompts", "2", "--tokens", "12", "--depth", "3", "--temperatures", "0", "0.7"]
    command = ["depths", held, target, "--head", str(tmp_path / "weights"), *options]
    rows = [line.split("|")[1:-1] for line in training(*command) if "|" in line]
    assert [cell.strip() for cell in rows[0]] == ["temperature", "positions", "1", "2", "3"]
    for row, temperature in zip(rows[2:], ("0", "0.7"), strict=True):
        assert row[0].strip() == temperature and int(row[1]) > 10
        reached = [float(cell.split()[0]) for cell in row[2:]]
        assert 1 >= reached[0] >= reached[1] >= reached[2] and reached[0] > 0.2
    assert "has no head that drafts. It has none." in training.refusal("depths", held, target)
    (tmp_path / "none.jsonl").touch()
    assert "No chat is left in" in training.refusal(
        *command[:1], str(tmp_path / "none.jsonl"), *command[2:]
    )
    assert "at least one prompt, one token and one level" in training.refusal(
        *command, "--depth", "0"
    )


def test_a_model_answers_the_questions_of_chats(
    made: Path, tmp_path: Path, training: Program
) -> None:
    output, texts = tmp_path / "answers.jsonl", str(made / "texts.jsonl")
    target = str(made / "target")
    options = ["--output", str(output), "--limit", "5", "--tokens", "8"]
    (said,) = training("answers", target, texts, *options, "--temperatures", "0", "1")
    assert "5 answers of " in said
    asked = {each.messages[0]["content"]: each for each in read([Path(texts)]) if each.messages}
    said = list(read([output]))
    assert len(said) == 5
    for each in said:
        known = asked[each.messages[0]["content"]]
        assert not each.held and each.source == "answers"
        assert [turn["role"] for turn in each.messages[-2:]] == ["user", "assistant"]
        assert each.messages[:-1] == known.messages[: len(each.messages) - 1]
    assert main(["prepare", str(output), "--output", str(tmp_path), "--vocabulary", "300"]) == 0
    assert "at least one question" in training.refusal(
        "answers", target, texts, *options, "--limit", "0"
    )


def test_a_head_is_written_as_a_gguf_file(made: Path, tmp_path: Path, training: Program) -> None:
    assert head(made, tmp_path, "--steps", "1") == 0
    file = tmp_path / "eagle3-target.gguf"
    folder, target = str(tmp_path / "weights"), str(made / "target")
    assert file.name in training("head-to-gguf", folder, target, file)[-1]
    reader, own = GGUFReader(file), weights(tmp_path)
    found = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    assert len(found) == len(own) == 12
    assert np.array_equal(found["fc.weight"], own["fc.weight"].numpy())
    assert np.array_equal(found["blk.0.attn_v.weight"], own["layers.0.self_attn.v_proj.weight"])
    query = own["layers.0.self_attn.q_proj.weight"].numpy()
    assert np.array_equal(found["blk.0.attn_q.weight"][:4], query[[0, 32, 1, 33]])
    assert reader.fields["eagle3.target_layers"].contents() == [0, 1, 2]
    assert reader.fields["eagle3.target_hidden_size"].contents() == 64
    config = json.loads((tmp_path / "weights" / "config.json").read_text())
    layer = config.pop("transformer_layer_config")
    flat = layer | config | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {}}
    del flat["speculators_model_type"]
    (tmp_path / "weights" / "config.json").write_text(json.dumps(flat | {"hidden_size": 32}))
    assert "cannot be used" in training.refusal("head-to-gguf", folder, target, str(file))
