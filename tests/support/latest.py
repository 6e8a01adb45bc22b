"""`make latest`: the suite with the newest releases, and the package behind each failure.

An environment of its own gets the newest release of every dependency, whatever upper bounds
pyproject.toml sets. Tests that fail there run again with one package at a time put back to its
locked version: a package that makes them pass is what broke them. torch stays, because its exact
version decides which build is installed.
"""

import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-latest"
PYTHON = str(FOLDER / "bin" / "python")
EXACT = "torch"


def direct() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    everything = tomllib.loads(text)
    lines = list(everything["project"]["dependencies"])
    for extra in everything["project"]["optional-dependencies"].values():
        lines += extra
    for group in ("dev", "build"):
        lines += everything["dependency-groups"][group]
    wanted = [Requirement(line) for line in lines]
    return sorted(
        {
            str(each) if each.name == EXACT else each.name
            for each in wanted
            if each.marker is None or each.marker.evaluate()
        }
    )


def locked() -> dict[str, str]:
    """The version of each package in requirements.lock that applies to this machine."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    return {
        canonicalize_name(pin.name): next(iter(pin.specifier)).version
        for pin in pins
        if pin.marker is None or pin.marker.evaluate()
    }


def pip(*arguments: str) -> None:
    subprocess.run([PYTHON, "-m", "pip", "--quiet", *arguments], cwd=ROOT, check=True)


def installed() -> dict[str, str]:
    listed = [PYTHON, "-m", "pip", "list", "--format=freeze"]
    lines = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    found = (line.split("==", 1) for line in lines if "==" in line)
    return {canonicalize_name(name): version for name, version in found}


def failures(tests: Iterable[str] = (), *options: str) -> list[str]:
    """The tests that fail, as pytest names them."""
    report = FOLDER / "report.xml"
    report.unlink(missing_ok=True)
    command = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([*command, *options, *tests], cwd=ROOT, check=False)
    if not report.exists():
        raise SystemExit("pytest ended before it ran any test; its output is above.")
    cases = ElementTree.parse(report).iter("testcase")
    return sorted(
        {
            node_of(case.get("classname", ""), case.get("name", ""))
            for case in cases
            if case.find("failure") is not None or case.find("error") is not None
        }
    )


def node_of(classname: str, name: str) -> str:
    """`tests.unit.test_tree` and `test_a[1]` as `tests/unit/test_tree.py::test_a[1]`."""
    if not classname:  # A file that could not be collected stands there by its module's name.
        return name.replace(".", "/") + ".py"
    return f"{classname.replace('.', '/')}.py::{name}"


def main(options: list[str]) -> int:
    if not Path(PYTHON).exists():
        venv.create(FOLDER, with_pip=True)
    pip("install", "--upgrade", "pip")
    pip("install", "--upgrade", "--upgrade-strategy", "eager", *direct())
    pip("install", "./native")
    now = installed()
    changed = {
        name: (version, now[name])
        for name, version in locked().items()
        if name in now and now[name].partition("+")[0] != version
    }
    if not changed:
        print("The newest release of every package is the locked one.")
        return 0
    print("Newer than requirements.lock:")
    for name, (old, new) in changed.items():
        print(f"  {name} {old} -> {new}")
    broken = failures((), *options)
    if not broken:
        print("Nothing breaks. `make lock` takes these versions.")
        return 0
    unexplained = set(broken)
    for name, (old, new) in changed.items():
        pip("install", "--no-deps", f"{name}=={old}")
        mended = set(broken) - set(failures(broken))
        pip("install", "--no-deps", f"{name}=={new}")
        unexplained -= mended
        if mended:
            print(f"{name} {new} breaks {len(mended)} tests:", *sorted(mended), sep="\n  ")
    if unexplained:
        print("No package alone explains:", *sorted(unexplained), sep="\n  ")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
