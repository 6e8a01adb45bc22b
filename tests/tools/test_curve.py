"""Forwards by length: what is timed, what was expected of it, and answers that quote."""

import json
from random import Random
from typing import Any

import pytest

from bench.__main__ import main
from engine.backends.toy import ToyBackend
from engine.drafting.costs import CostCurve
from engine.errors import SettingError
from tests.conftest import EMBEDDED

RUN = ["curve", "--threads", "1", "--repeats", "1", "--sizes", "3,7"]


def fresh(embedded: Any) -> Any:
    from engine.backends.transformers import TransformersBackend

    return TransformersBackend(embedded.model, embedded.tokenizer, embedded.info)


@pytest.mark.model
def test_every_case_is_timed_with_its_attention(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.curve import timed, ways_of
    from engine.backends.folded_attention import FOLDED, LIBRARY
    from engine.backends.transformers import TransformersBackend

    backend = fresh(embedded)
    seen: list[tuple[str, int, int]] = []
    score = TransformersBackend.score

    def noting(self: Any, tree: Any, sampling: Any) -> Any:
        seen.append((self.model.config._attn_implementation, len(self.cached), len(tree)))
        return score(self, tree, sampling)

    monkeypatch.setattr(TransformersBackend, "score", noting)
    times = timed(backend, 100, [0, 5], ways_of(backend), 3)
    assert list(times) == [(way, nodes) for way in (LIBRARY, FOLDED) for nodes in (0, 5)]
    assert all(seconds > 0 for seconds in times.values())
    for way, nodes in times:
        assert seen.count((way, 99, nodes)) == 6, "untimed and timed, in every round"
    assert backend.model.config._attn_implementation == FOLDED and backend.bytes == 0


def test_a_backend_with_one_attention_reads_its_text() -> None:
    from bench.curve import timed, ways_of

    toy = ToyBackend()
    assert ways_of(toy) == ["toy"]
    times = timed(toy, 50, [0, 3], ["toy"], 2)
    assert list(times) == [("toy", 0), ("toy", 3)] and not toy.cache


def test_what_was_expected_is_told_at_the_pace_of_the_first_plain_step() -> None:
    from bench.curve import compared

    curve = CostCurve({0: 1.0, 7: 2.0}, 0.0, 0.0, 1e-3, 1e-4)
    found = {
        256: {("a", 0): 9.0, ("a", 7): 9.0, ("b", 0): 2.0, ("b", 7): 5.0},
        1256: {("a", 0): 9.0, ("a", 7): 18.0, ("b", 0): 4.0, ("b", 7): 8.0},
    }
    record = compared(found, curve)
    assert record[256]["b"][0] == {"ms": 2000.0, "ratio": 1.0, "expected_ms": 2000.0, "off": 0.0}
    assert record[256]["b"][7] == pytest.approx(
        {"ms": 5000.0, "ratio": 2.5, "expected_ms": 4000.0, "off": -0.2}
    )
    assert record[1256]["a"][7] == {"ms": 18000.0, "ratio": 2.0}
    far = record[1256]["b"][7]
    assert far["expected_ms"] == pytest.approx(2000 * (2 + 1 + 0.7))
    assert far["off"] == pytest.approx(7.4 / 8 - 1)


@pytest.mark.model
def test_a_run_ends_in_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    from engine.backends.folded_attention import FOLDED, LIBRARY

    assert main([*RUN, "--lengths", "60,300"]) == 0
    *table, line = capsys.readouterr().out.strip().splitlines()
    record = json.loads(line)
    assert record["bench"] == "curve" and list(record["lengths"]) == ["60", "300"]
    for found in record["lengths"].values():
        assert list(found) == [LIBRARY, FOLDED]
        for way, sizes in found.items():
            assert list(sizes) == ["0", "3", "7"] and sizes["0"]["ratio"] == 1.0
            for row in sizes.values():
                assert row["ratio"] == pytest.approx(row["ms"] / sizes["0"]["ms"])
                assert ("expected_ms" in row) is (way == FOLDED)
    assert sum("expected" in row for row in table) == 2


@pytest.mark.model
def test_a_made_up_model_is_timed_and_quotes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import curve, quotes
    from bench.shape import Shape

    monkeypatch.setitem(curve.SHAPES, "tiny", Shape(256, 1024, 8, 4, 8))
    monkeypatch.setattr(curve, "LONGEST", 400)
    for name, length in (("SHORTEST", 300), ("LONGEST", 400)):
        monkeypatch.setattr(quotes, name, length)
    run = [*RUN, "--size", "tiny", "--dtype", "bfloat16", "--lengths", "60", "--quotes", "70"]
    assert main(run) == 0
    *table, line = capsys.readouterr().out.strip().splitlines()
    record = json.loads(line)
    assert record["model"] == "made-up tiny" and record["dtype"] == "bfloat16"
    for found in record["quotes"].values():
        assert found["tokens"] == 70 and found["tokens_per_forward"] > 1.2 and found["nodes"] > 0
    before, now = (record["quotes"][name]["tokens_per_second"] for name in ("before", "now"))
    assert f"{now / before:.2f} times as fast" in table[-2]


def test_an_answer_quotes_its_prompt_and_the_rest_in_turn() -> None:
    from bench import quotes
    from bench.quotes import OWN, QUOTED, quoting

    text = list(range(9000))
    prompt, answer = quoting(text, 3 * (OWN + QUOTED) - 1, Random(3))
    first = prompt[0]
    assert quotes.SHORTEST <= len(prompt) <= quotes.LONGEST
    assert prompt == text[first : first + len(prompt)] and len(answer) == 3 * (OWN + QUOTED) - 1
    inside = [token in set(prompt) for token in answer]
    assert inside == ([False] * OWN + [True] * QUOTED) * 2 + [False] * OWN + [True] * (QUOTED - 1)


@pytest.mark.model
def test_a_model_says_what_it_is_given(embedded: Any) -> None:
    from bench import quotes
    from bench.quotes import Quoting

    model = Quoting(embedded.model, embedded.tokenizer, embedded.info)
    prompt, answer = list(range(20, 60)), [9, 8, 7, 9, 8, 7, 9, 8, 7, 9, 8, 7]
    model.text = [*prompt, *answer]
    steps = quotes.answered(model, prompt, len(answer), CostCurve({0: 1.0, 63: 1.01}))
    assert [token.id for step in steps for token in step.tokens] == answer
    assert max(len(step.tokens) for step in steps) > 1


# several models side by side


def test_models_take_turns_and_medians_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import curves

    slow, fast = ToyBackend(name="slow"), ToyBackend(name="fast")
    seen: list[tuple[str, int]] = []
    spent = {("slow", 0): 4.0, ("slow", 3): 6.0, ("fast", 0): 1.0, ("fast", 3): 5.0}

    def forward(backend: Any, prompt: list[int], nodes: int) -> float:
        assert len(prompt) == curves.CACHED
        seen.append((backend.info.name, nodes))
        # One round in three is disturbed.
        return spent[seen[-1]] * (9.0 if len(seen) <= 8 else 1.0)

    monkeypatch.setattr(curves, "forward_seconds", forward)
    found = curves.timed({"slow": slow, "fast": fast}, [0, 3], 3)
    assert found == {"slow": {0: 4.0, 3: 6.0}, "fast": {0: 1.0, 3: 5.0}}
    rounds = [seen[at : at + 8] for at in (0, 8, 16)]
    assert [each[0][0] for each in rounds] == ["slow", "fast", "slow"], "they begin in turn"
    for each in rounds:
        assert each[::2] == each[1::2], "untimed, then timed"
        assert sorted(each[::2]) == sorted(spent)


def test_a_model_that_decodes_plainly_is_timed_plainly() -> None:
    from dataclasses import replace

    from bench.curves import row_of, timed

    toy = ToyBackend()
    toy.info = replace(toy.info, can_tree=False)
    times = timed({"toy": toy}, [0, 3], 1)
    assert list(times["toy"]) == [0]
    row = row_of(toy, times["toy"])
    assert set(row["speedup"].values()) == {1.0} and set(row["nodes"].values()) == {0}


@pytest.mark.model
def test_files_and_types_of_a_folder_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(EMBEDDED)
    names = ["embedded-gguf", f"{folder}@float32", f"{folder}@bfloat16"]
    run = ["curve", *names, "--repeats", "1", "--threads", "1", "--sizes", "0,1,3"]
    assert main(run) == 0
    *table, line = capsys.readouterr().out.strip().splitlines()
    record = json.loads(line)
    assert record["bench"] == "curves" and list(record["models"]) == names
    kinds = [row["dtype"] for row in record["models"].values()]
    assert kinds == ["F16", "float32", "bfloat16"]
    for row in record["models"].values():
        assert list(row["ratio"]) == ["0", "1", "3"] and row["ratio"]["0"] == 1.0
        assert row["tokens_per_second"] == pytest.approx(1e3 / row["ms"]["0"])
        assert all(speedup >= 1.0 for speedup in row["speedup"].values())
    cells = [row for row in table if row.startswith("|")]
    assert len(cells) == 5 and all(row.count("|") == 10 for row in cells)


def test_models_that_do_not_fit_together_are_refused_before_any_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import curves

    def load(name: str, options: Any) -> Any:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr(curves, "load_model", load)
    monkeypatch.setattr(curves, "free_memory", lambda device: 10)
    assert main(["curve", "embedded", "embedded-gguf"]) == 2
    assert "0.0 GB are free on cpu" in capsys.readouterr().err


def test_numbers_are_read_or_refused() -> None:
    from bench.curve import numbers

    assert numbers("3,7", 0) == [3, 7]
    for wrong in ("", "a", "3,-1", "3;7"):
        with pytest.raises(SettingError, match="no list of numbers"):
            numbers(wrong, 0)


@pytest.mark.model
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--size", "9b"], "'9b'"),
        (["--repeats", "0"], "one repeat"),
        (["--lengths", "1"], "no list of numbers"),
        (["--lengths", "90000"], "too short"),
        (["--quotes", "5"], "too short"),
        (["embedded", "--quotes", "5"], "without --size and --quotes"),
        (["embedded", "--sizes", "3,2000"], "more than 2256 are needed"),
    ],
)
def test_options_that_cannot_be_are_refused(
    wrong: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["curve", *wrong]) == 2
    assert words in capsys.readouterr().err
