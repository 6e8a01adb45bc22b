"""What the machine is called, and what it computes with."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import machine
from tests.support.processors import LINES


@pytest.mark.parametrize(
    ("text", "native"),
    [
        (LINES.format(" avx512_bf16"), True),
        (LINES.format(" amx_tile amx_bf16"), True),
        (LINES.format(""), False),
        ("Features\t: fp asimd bf16\n", False),
        ("", False),
        (None, False),  # no such file
    ],
)
def test_whether_bfloat16_is_computed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, native: bool
) -> None:
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(machine, "CPUINFO", file)
    assert machine.computes_bfloat16() is native


@pytest.mark.parametrize(
    ("logical", "physical", "mine", "cores"),
    [
        (8, 4, range(8), 4),  # two threads on a core
        (8, 8, range(8), 8),
        (8, 4, range(2), 2),  # the process is bound to some of them
        (8, None, range(8), 8),  # a system that does not tell
        (None, None, range(1), 1),
    ],
)
def test_physical_cores_are_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    logical: int | None,
    physical: int | None,
    mine: range,
    cores: int,
) -> None:
    monkeypatch.setattr(machine, "SYSTEM", tmp_path)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: logical)
    monkeypatch.setattr(machine.psutil, "cpu_count", lambda logical: physical)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(mine), raising=False)
    assert machine.physical_cores() == cores


@pytest.mark.parametrize("name", machine.CORE)
@pytest.mark.parametrize(
    ("mine", "limit", "cores"),
    [
        ({0, 4}, None, 1),  # the process is bound to the two of one core
        ({0, 1}, None, 2),
        ({0, 1, 4, 6}, None, 3),
        (set(range(8)), None, 4),
        (set(range(8)), "max 100000", 4),
        (set(range(8)), "200000 100000", 2),
        (set(range(8)), "150000 100000", 2),
        (set(range(8)), "10000 100000", 1),
        (set(range(8)), "900000 100000", 4),
        (set(range(8)), "", 4),
        (set(range(8)), "100000 0", 4),
        ({7, 8}, None, 2),  # the system does not list all
    ],
)
def test_the_system_lists_cores_and_limits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    mine: set[int],
    limit: str | None,
    cores: int,
) -> None:
    for number in range(8):
        folder = tmp_path / f"devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / name).write_text(f"{number % 4},{number % 4 + 4}\n")
    if limit is not None:
        (tmp_path / machine.QUOTA).parent.mkdir(parents=True)
        (tmp_path / machine.QUOTA).write_text(limit + "\n")
    monkeypatch.setattr(machine, "SYSTEM", tmp_path)
    monkeypatch.setattr(machine.psutil, "cpu_count", lambda logical: 4)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: mine, raising=False)
    assert machine.physical_cores() == cores


@pytest.mark.parametrize(
    ("named", "threads"), [(None, 6), ("", 6), ("3", 3), ("2,4", 2), ("0", 6), ("all", 6)]
)
def test_the_environment_may_name_the_threads(
    monkeypatch: pytest.MonkeyPatch, named: str | None, threads: int
) -> None:
    monkeypatch.setattr(machine, "physical_cores", lambda: 6)
    if named is None:
        monkeypatch.delenv(machine.THREADS, raising=False)
    else:
        monkeypatch.setenv(machine.THREADS, named)
    assert machine.usual_threads() == threads


def test_other_people_are_those_who_can_log_in(monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = [
        ("root", 0, "/bin/bash"), ("me", 1000, "/bin/bash"), ("ann", 1001, "/bin/zsh"),
        ("backup", 1002, "/usr/sbin/nologin"), ("ftp", 1003, "/bin/false"),
        ("nobody", 65_534, "/bin/sh"), ("bea", 2000, ""),
    ]  # fmt: skip
    listed = [SimpleNamespace(pw_name=n, pw_uid=u, pw_shell=s) for n, u, s in accounts]
    monkeypatch.setattr("pwd.getpwall", lambda: listed)
    monkeypatch.setattr("os.getuid", lambda: 1000)
    machine.other_people.cache_clear()
    assert machine.other_people() == ["ann", "bea"]
    machine.other_people.cache_clear()
