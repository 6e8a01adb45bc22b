"""The overhead around llama.cpp: its trees, its clock, and that its report is one of a real run."""

import json
from random import Random

import numpy as np
import pytest

from bench.__main__ import main
from bench.choices import SAMPLERS, VOCABULARIES, in_python, made_rows, timed
from bench.overhead import clocked_decode, figures, random_path, random_tree
from engine import native
from engine.settings import Sampling
from engine.tree import Tree

RUN = ["overhead", "--limit", "1", "--max-new-tokens", "8", "--repeats", "1", "--threads", "1"]


@pytest.mark.parametrize("nodes", [0, 1, 16, 64])
def test_trees_have_their_size_and_paths_lead_down_from_the_root(nodes: int) -> None:
    draw, shapes = Random(1), set()
    for _ in range(20):
        tree = random_tree(5, nodes, 30, draw)
        assert len(tree) == nodes and tree.tokens[0] == 5
        rows = random_path(tree, draw)
        assert [tree.parents[row] for row in rows] == [0, *rows][: len(rows)]
        shapes.add((tuple(tree.parents), tuple(rows)))
    assert len(shapes) > (10 if nodes > 1 else 0)


def test_the_overhead_is_what_is_left_of_each_step() -> None:
    steps = [(0.010, 0.009), (0.020, 0.016), (0.030, 0.028)]
    assert figures(steps) == {
        "step_ms": 20.0,
        "decode_ms": 16.0,
        "overhead_ms": 2.0,
        "overhead_ms_upper_quartile": 4.0,
    }


def test_choices_are_timed_without_a_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.choices.ROWS", 2)
    assert main(["overhead", "--choices"]) == 0
    *table, line = capsys.readouterr().out.strip().splitlines()
    record = json.loads(line)
    assert list(record["choices"]) == [str(size) for size in VOCABULARIES]
    cores = {"native", "python"} if native.core is not None else {"python"}
    for samplers in record["choices"].values():
        assert list(samplers) == list(SAMPLERS)
        assert all(set(times) == cores and min(times.values()) > 0 for times in samplers.values())
    wanted = [row for row in table if row.startswith("wanted")]
    assert len(wanted) == 2 * (len(cores) - 1)


def test_rows_of_choices_are_as_peaked_as_those_of_models() -> None:
    for row in made_rows(32_000, 3):
        law = np.exp(np.float64(row) - row.max())
        law /= law.sum()
        assert 1 < -(law * np.log(law)).sum() < 6, "nats"
    first, second = made_rows(100, 2)
    assert (first != second).any() and (made_rows(100, 2)[0] == first).all()


def test_python_alone_is_timed_without_the_compiled_core() -> None:
    core = native.core
    with in_python():
        assert native.core is None
        assert set(timed(made_rows(50, 2), Sampling(0.7))) == {"python"}
    assert native.core is core


@pytest.mark.gguf
def test_the_clock_is_around_the_forwards_of_our_backend_and_goes_again() -> None:
    import llama_cpp

    from bench.options import source_of
    from engine.decode import never
    from engine.models.loaders import load
    from engine.settings import Runtime

    backend = load(source_of("embedded-gguf"), Runtime(threads=1, context_length=512))
    before = llama_cpp.llama_decode
    with clocked_decode() as spent:
        backend.prefill([0, 3, 4], never)
        backend.score(Tree(4), Sampling(0.0))
        assert len(spent) == 2 and min(spent) > 0
    assert llama_cpp.llama_decode is before
    with pytest.raises(KeyError), clocked_decode():
        raise KeyError
    assert llama_cpp.llama_decode is before


@pytest.mark.gguf
def test_a_run_ends_in_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--steps", "4"]) == 0
    *table, line = capsys.readouterr().out.strip().splitlines()
    record = json.loads(line)
    assert record["bench"] == "overhead" and list(record["trees"]) == ["0", "16", "64"]
    for found in record["trees"].values():
        assert 0 < found["overhead_ms"] <= found["overhead_ms_upper_quartile"]
        assert 0 < found["decode_ms"] < found["step_ms"]
    ours, theirs = (record["tokens_per_second"][name] for name in ("plain", "llama-cpp-python"))
    assert record["plain_ratio"] == ours / theirs and record["same_text"] == 1
    wanted = [row for row in table if row.startswith("wanted")]
    assert len(wanted) >= 2 and all(row.endswith(("yes", "NO")) for row in wanted)
    assert set(record["choices"]) == {str(size) for size in VOCABULARIES}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--model", "embedded"], "no GGUF file"),
        (["--steps", "1"], "at least two steps"),
        (["--repeats", "0"], "one repeat"),
        (["--model", "/nowhere/x.gguf"], "'/nowhere/x.gguf'"),
    ],
)
def test_mistakes_are_told(
    wrong: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, *wrong]) == 2
    assert words in capsys.readouterr().err
