"""What the machine is called, and what it computes with."""

from pathlib import Path

import pytest

from engine import machine
from tests.support.processors import LINES, processor


@pytest.mark.parametrize("native", [False, True])
def test_whether_bfloat16_is_computed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr(machine, "CPUINFO", processor(tmp_path, native))
    assert machine.computes_bfloat16() is native


def test_tiles_compute_with_it_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(LINES.format(" amx_tile amx_bf16"))
    monkeypatch.setattr(machine, "CPUINFO", file)
    assert machine.computes_bfloat16()


@pytest.mark.parametrize("text", [None, "", "Features\t: fp asimd bf16\n"])
def test_what_is_not_known_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(machine, "CPUINFO", file)
    assert not machine.computes_bfloat16()
