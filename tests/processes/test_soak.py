"""What a program takes that runs for long: as much as in the beginning."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

MB = 1 << 20
pytestmark = pytest.mark.soak


def test_resident_memory_is_flat_over_200_conversations_and_50_owners() -> None:
    """After a tenth of them memory grows by less than 4 MB: without a limit it does by 10 MB."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.soak", "200", "50", str(4 * MB)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = [[int(word) for word in line.split()] for line in run.stdout.splitlines()]
    assert len(lines) == 10 and all(told <= 4 * MB for _, told in lines)
    resident = [size for size, _ in lines]
    assert resident[-1] - resident[0] < 4 * MB, resident


def test_prompts_that_were_given_up_while_they_waited_leave_no_memory() -> None:
    """Of 7.9 MB each. One that was kept would be seen at once, and 40 are more than may be."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.aborted", "200"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    before, after = map(int, run.stdout.split())
    assert after - before < 50 * MB
