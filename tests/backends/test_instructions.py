"""The sets of instructions for which the compiled core has products, as a program in C++ compares
them, and what is expected of each."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from engine import native
from engine.native import core, has_tiles, multiplies_few_bits, verifies_cheaply
from tests.conftest import ROOT


def run(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def compiled(folder: Path) -> Path:
    """The program, compiled in this folder if these sources were not compiled here before. More of
    the optimiser would take longer than the test."""
    native, compiler = ROOT / "native", os.environ.get("CXX", "c++")
    options = "-DCMAKE_CXX_FLAGS_RELEASE=-O1"
    key = hashlib.sha256((run(compiler, "--version") + options).encode())
    for file in sorted(path for path in native.rglob("*") if path.is_file()):
        key.update(f"{file.relative_to(native)}\n".encode() + file.read_bytes())
    kept = ROOT / ".pytest_cache" / "rows_test" / key.hexdigest()
    if not kept.exists():
        run("cmake", "-S", native / "tests", "-B", folder, options)
        run("cmake", "--build", folder, "--parallel", "2")
        kept.parent.mkdir(parents=True, exist_ok=True)
        copy = kept.with_name(f"{kept.name}.{os.getpid()}")
        shutil.copy2(folder / "rows_test", copy)
        copy.replace(kept)
    return kept


def test_every_set_of_instructions_computes_the_bits_of_plain_cpp(tmp_path: Path) -> None:
    """And those of other kinds of processors."""
    program = compiled(tmp_path)
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
        (["avx2", "avx512", "amx"], True, True),
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
    assert has_tiles() == ("amx" in names)
