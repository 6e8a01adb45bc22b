"""What `make test` promises whatever happens: a native fault is told with its file and test."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

CRASHES = """
import ctypes

import pytest


def test_before() -> None:
    pass


@pytest.mark.parametrize("number", range(6))
def test_that_crashes(number: int) -> None:
    ctypes.string_at(0)


def test_after() -> None:
    pass
"""


def command(*arguments: str) -> list[str]:
    """What `make test` runs with these arguments, as make says, with this Python."""
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    done = subprocess.run(
        ["make", "--dry-run", "test", f"ARGS={shlex.join(arguments)}"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    python, *words = shlex.split(done.stdout.splitlines()[-1])
    assert python == ".venv/bin/python" and words[:2] == ["-m", "pytest"]
    return [sys.executable, *words]


def outcome(folder: Path) -> list[str]:
    """What the suite says of the tests in a folder."""
    words = command("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), str(folder))
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    return done.stdout.splitlines()


@pytest.mark.soak
def test_a_test_that_crashes_is_named_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_faulty.py").write_text(CRASHES)
    (tmp_path / "test_other.py").write_text("def test_more() -> None:\n    pass\n")
    lines = outcome(tmp_path)
    for number in range(6):
        name = f"test_faulty.py::test_that_crashes[{number}]"
        assert any(line.startswith(f"FAILED {name}") for line in lines), lines
        assert any(line.endswith(f"crashed while running '{name}'") for line in lines), lines
    assert lines[-1].startswith("6 failed, 3 passed in ")


@pytest.mark.soak
def test_a_test_that_is_skipped_is_counted(tmp_path: Path) -> None:
    """.ci/run lets none skip, and reads that from the last line."""
    text = "import pytest\n\n\ndef test_it() -> None:\n    pytest.skip('not today')\n"
    (tmp_path / "test_skipped.py").write_text(text)
    assert outcome(tmp_path)[-1].startswith("1 skipped in ")
