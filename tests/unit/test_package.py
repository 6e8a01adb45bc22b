"""What installing Strata brings: pyproject.toml, requirements.txt and the Makefile say the same."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import strata_chat
from app.arguments import parse
from app.service import tool_servers
from engine.models import llama_cpp_python
from tests.conftest import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
GGUF = PROJECT["optional-dependencies"]["gguf"]
TOOLS = PROJECT["optional-dependencies"]["tools"]


LOCKED = "-c requirements.lock --build-constraint requirements.lock"
"""How everything is installed: in the versions that were tested."""


def requirements() -> list[str]:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [found for line in lines if (found := line.partition("#")[0].strip())]


def locked() -> list[str]:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def made(target: str, folder: Path) -> list[str]:
    """What make would do in a checkout where nothing is set up."""
    for name in ("Makefile", "requirements.txt", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "native", folder / "native")
    return run_make(folder, "--dry-run", target).stdout.splitlines()


def run_make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Nothing of a make around the tests: it passes on its own flags, and variables like ARGS.
    environment = {"PATH": os.environ["PATH"]}
    return subprocess.run(
        ["make", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip


def installs(steps: list[str]) -> list[str]:
    """What each step that installs something names, in their order."""
    ends = {
        "llama-cpp-python": "gguf",
        "torch==": "torch",
        "group dev": "dev",
        "./native": "native",
        "/dev/stdin": "rest",
    }
    found = [
        (line, [what for words, what in ends.items() if words in line])
        for line in steps
        if "pip install" in line and not line.endswith(" pip")
    ]
    assert all(LOCKED in line for line, _ in found)
    return [what[-1] for line, what in found]


def test_requirements_are_the_dependencies_and_the_gguf_extra() -> None:
    assert sorted(requirements()) == sorted([*PROJECT["dependencies"], *GGUF])
    assert requirements()[0] == PROJECT["dependencies"][0] and "torch==" in requirements()[0]


def test_every_dependency_is_locked_to_a_version_in_its_range() -> None:
    pins = {pin.name: pin.specifier for pin in map(Requirement, locked())}
    groups = PYPROJECT["dependency-groups"]
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    for line in [*PROJECT["dependencies"], *extras, *groups["dev"], *groups["build"]]:
        wanted = Requirement(line)
        (pin,) = pins[canonicalize_name(wanted.name)]
        assert pin.operator == "==" and pin.version in wanted.specifier, line


def test_builds_of_torch_for_other_cards_fit_the_locked_versions() -> None:
    """Each names CUDA libraries of its own."""
    assert not [line for line in locked() if line.startswith(("nvidia", "cuda"))]


def test_the_page_sets_up_what_the_gguf_extra_names() -> None:
    assert [llama_cpp_python.REQUIREMENT] == GGUF


def test_the_page_names_what_the_tools_extra_names() -> None:
    assert [tool_servers.REQUIREMENT] == TOOLS


def test_the_version_is_said_in_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["hatch"]["version"] == {"path": "strata_chat/__init__.py"}
    with pytest.raises(SystemExit) as ended:
        parse(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"strata {strata_chat.__version__}\n"


def test_the_commands_are_there() -> None:
    assert list(PROJECT["scripts"]) == ["strata", "strata-statistics"]
    for place in PROJECT["scripts"].values():
        module, _, name = place.partition(":")
        assert callable(getattr(import_module(module), name))


def test_the_package_for_others_brings_nothing_along() -> None:
    code = "import sys; had = set(sys.modules); import strata_chat; print(set(sys.modules) - had)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "{'strata_chat'}"


def test_the_chat_is_set_up_with_the_compiled_core_and_nothing_else_to_compile(
    tmp_path: Path,
) -> None:
    steps = made("run", tmp_path)
    assert installs(steps) == ["torch", "rest", "native"], steps
    assert any(line.startswith("grep -v '^llama-cpp-python' requirements.txt") for line in steps)
    assert steps[-1].strip() == ".venv/bin/python app.py"


FAKE = """\
#!/bin/sh
echo "$@" >> calls
case "$*" in *./native*) exit {status};; esac
"""


@pytest.mark.parametrize("compiles", [True, False])
def test_the_chat_opens_whether_or_not_something_can_be_compiled(
    compiles: bool, tmp_path: Path
) -> None:
    """With all else set up, and a Python that says whether it could install the core."""
    made("run", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(FAKE.format(status=0 if compiles else 1), encoding="utf-8")
    python.chmod(0o755)
    for name in (".pip", ".run"):
        (tmp_path / ".venv" / name).touch()
    said = [run_make(tmp_path, "run", "ARGS=--port 1").stdout for _ in "12"]
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    built, opened = f"-m pip install --quiet {LOCKED} ./native", "app.py --port 1"
    assert calls == [built, opened, *([] if compiles else [built]), opened]
    for each in said:
        assert ("Strata runs without it" in each) is not compiles


def test_gguf_support_is_a_step_of_its_own(tmp_path: Path) -> None:
    assert installs(made("gguf", tmp_path)) == ["torch", "rest", "gguf"]


@pytest.mark.parametrize("target", ["test", "quick", "check"])
def test_the_tests_are_set_up_with_everything(target: str, tmp_path: Path) -> None:
    assert installs(made(target, tmp_path)) == ["torch", "rest", "gguf", "native", "dev"]


def test_no_test_is_skipped_for_want_of_a_library() -> None:
    """Without the library tests of GGUF files fail, and say so."""
    texts = [path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py")]
    skips = re.compile(r"^[^'\"]*\bpytest\.(?:mark\.)?(?:skip|skipif|importorskip|xfail)\b", re.M)
    assert any("pytest.mark.gguf" in text for text in texts)
    assert [found for text in texts for found in skips.findall(text)] == []


def test_the_hooks_before_a_commit_are_what_make_check_runs(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    checks = [
        line
        for line in made("check", tmp_path)
        if line.startswith((".venv/bin/ruff", ".venv/bin/mypy"))
    ]
    assert len(checks) == 4 and [hook["entry"] for hook in hooks] == checks
    assert not any(hook["pass_filenames"] for hook in hooks)
