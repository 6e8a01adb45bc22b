"""The speed benchmark: its JSON line, its refusals, its arithmetic."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

# The benchmark imports torch, so even its refusals belong to the marked tests.
pytestmark = pytest.mark.model

FIGURES = {
    "tokens_per_second",
    "speedup",
    "mean_acceptance_length",
    "acceptance_ratio",
    "draft_ms_per_step",
    "identical",
}


def bench(*arguments: str) -> int:
    from bench.__main__ import main

    return main(["speed", *arguments])


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_two_prompts_end_in_one_json_line(
    capsys: pytest.CaptureFixture[str], temperature: str
) -> None:
    status = bench(
        "--limit", "2", "--max-new-tokens", "24", "--repeats", "1", "--temperature", temperature,
        "--methods", "plain,generate,hd,hd-published",
    )  # fmt: skip
    assert status == 0
    report = last_line(capsys)
    assert report["prompts"] == 2 and report["max_new_tokens"] == 24
    methods = report["methods"]
    assert set(methods) == {"plain", "generate", "hd", "hd-published"}
    for name, figures in methods.items():
        wanted = FIGURES if name != "generate" else FIGURES & set(figures) | {"speedup"}
        assert wanted <= set(figures)
        assert figures["tokens_per_second"] > 0 and figures["speedup"] > 0
    for name in ("hd", "hd-published"):
        assert methods[name]["identical"] is True
        assert methods[name]["mean_acceptance_length"] >= 1
        assert 0 <= methods[name]["acceptance_ratio"] <= 1
    assert methods["plain"]["mean_acceptance_length"] == 1.0
    assert methods["plain"]["acceptance_ratio"] == 0.0
    assert methods["generate"]["identical"] is (True if temperature == "0" else None)
    fastest = max(methods[name]["tokens_per_second"] for name in ("plain", "generate"))
    assert math.isclose(methods["hd"]["speedup"], methods["hd"]["tokens_per_second"] / fastest)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "plain,warp"], "'warp'"),
        (["--methods", ","], "at least one method"),
        (["--repeats", "0"], "one repeat"),
        (["--limit", "-1"], "negative"),
        (["--prompts", "/nowhere/prompts.jsonl"], "'/nowhere/prompts.jsonl'"),
        (["--model", "/nowhere"], "'/nowhere'"),
        (["--temperature", "9"], "Temperature"),
        (["--nodes", "999"], "Tree nodes"),
        (["--policy", "best"], "'best'"),
        (["--max-new-tokens", "0"], "Max tokens"),
        (["--max-new-tokens", "32000"], "no room"),
        (["--statistics", "/nowhere.db"], "'/nowhere.db'"),
        (["--device", "abacus"], "'abacus'"),
        (["--dtype", "float3"], "'float3'"),
    ],
)
def test_mistakes_end_with_status_2_and_a_message(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert bench("--limit", "1", *arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err and "Traceback" not in captured.err and captured.out == ""


@pytest.mark.parametrize(
    "content",
    ["", "\n", "{", "[]", '{"turns": []}', '{"turns": null}', '{"category": "x"}', "7", b"\xff"],
)
def test_prompt_files_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | bytes
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert bench("--prompts", str(path)) == 2
    assert repr(str(path)) in capsys.readouterr().err


def test_a_limit_takes_from_all_categories_in_turn(tmp_path: Path) -> None:
    from bench.speed import PROMPTS, read_prompts

    path = tmp_path / "prompts.jsonl"
    rows = [("a", "1"), ("a", "2"), ("a", "3"), ("b", "4"), ("c", "5"), ("c", "6")]
    path.write_text(
        "\n".join(json.dumps({"category": name, "turns": [text]}) for name, text in rows)
    )
    assert [text for _, text in read_prompts(path, 0)] == ["1", "4", "5", "2", "6", "3"]
    assert [text for _, text in read_prompts(path, 4)] == ["1", "4", "5", "2"]
    shipped = read_prompts(PROMPTS, 0)
    assert len(shipped) == len(set(shipped)) > 9 and all(text.strip() for _, text in shipped)


def test_the_arithmetic_of_a_summary() -> None:
    from bench.speed import Result, speed, summary

    plain = [Result("a", [1] * 10, [2.0], [1.0]), Result("b", [2] * 30, [2.0], [1.0])]
    fast = [
        Result("a", [1] * 10, [1.0, 9.0, 1.0], [0.5, 0.5, 0.5]),
        Result("b", [2] * 30, [1.0], [0.5]),
    ]
    assert speed(plain) == 10.0 and speed(plain, decode_only=True) == 20.0
    figures = summary("fast", {"plain": plain, "fast": fast}, 0.0)
    assert figures["speedup"] == figures["decode_speedup"] == 2.0
    assert figures["identical"] is True and figures["speedup_quartiles"] == [2.0, 2.0, 2.0]
    fast[1].tokens = [2] * 29 + [3]
    assert summary("fast", {"plain": plain, "fast": fast}, 0.0)["identical"] is False
