"""The sets of instructions for which the compiled core has products, as a program in C++ compares
them, and what is expected of each."""

import subprocess
from pathlib import Path

import pytest

from engine import native
from engine.native import core, multiplies_few_bits, verifies_cheaply
from tests.conftest import ROOT


def run(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_set_of_instructions_computes_the_bits_of_plain_cpp(tmp_path: Path) -> None:
    """And those of other kinds of processors. The optimiser would take longer than the test."""
    sources = ROOT / "native" / "tests"
    run("cmake", "-S", sources, "-B", tmp_path, "-DCMAKE_CXX_FLAGS_RELEASE=-O0")
    run("cmake", "--build", tmp_path, "--parallel", "2")
    program = tmp_path / "rows_test"
    assert "results are equal" in run(program, *core.levels())
    refused = subprocess.run([program, "plain", "other"], stdout=subprocess.PIPE, text=True)
    assert refused.returncode == 1 and "not plain other" in refused.stdout


class Levels:
    """A core for a processor with these sets of instructions."""

    Matrix = object

    def __init__(self, *names: str) -> None:
        self.names = names

    def levels(self) -> list[str]:
        return ["plain", *self.names]


@pytest.mark.parametrize(
    ("names", "fast", "cheap"),
    [
        ([], False, False),
        (["avx2"], True, False),
        (["avx2", "avxvnni"], True, True),
        (["avx2", "avx512"], True, True),
        (["dotprod"], True, False),
        (["dotprod", "i8mm"], True, False),
    ],
)
def test_what_is_expected_of_a_processor(
    names: list[str], fast: bool, cheap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was measured on ARM, so what llama.cpp computes there is left to it."""
    monkeypatch.setattr(native, "core", Levels(*names))
    assert (multiplies_few_bits(), verifies_cheaply()) == (fast, cheap)
