"""Counting by a Ray cluster of this machine: the same file, and what goes wrong is told.

The cluster has two cores, and is begun and ended by a process of its own, as Ray leaves threads
behind.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from storage.statistics_build import build
from tests.conftest import ROOT
from tests.support.shards import Made

SECONDS = 5 * 60
WITH_RAY = """
import sys
from dataclasses import replace
from pathlib import Path

import ray
from engine.errors import StorageError
from storage.statistics_shards import count_on_hosts
from storage.statistics_shards import reduce
from tests.support.shards import Made, job, plan

folder = Path(sys.argv[1])
made = Made(folder / "notes")
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
wanted, told = job(folder, replace(made, bad=70)), {}
try:
    count_on_hosts(wanted, "")
except StorageError as error:
    print(error)
wanted = replace(wanted, texts=made)
count_on_hosts(wanted, "", told.__setitem__)
count_on_hosts(wanted, "")
reduce(wanted.folder, plan(50), folder / "out.db", "a title", 20_000, 1 << 24)
print(told)
"""


@pytest.mark.soak
def test_a_cluster_makes_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WITH_RAY, str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    problem, told = done.stdout.splitlines()
    assert "token 70" in problem and "Use the model's own tokenizer" in problem
    assert told == "{0: 1.0, 1: 1.0, 2: 1.0}"
    made, whole = Made(tmp_path / "notes"), tmp_path / "whole.db"
    build([*made.all()], whole, "tok", 50, "a title", 20_000)
    assert (tmp_path / "out.db").read_bytes() == whole.read_bytes()
