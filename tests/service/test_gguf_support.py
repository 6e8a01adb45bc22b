"""GGUF support set up while the app runs: how far it is, what goes wrong, Stop, and a real pip."""

import shlex
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from app.service import gguf_support
from app.service.gguf_support import GgufSupport
from app.service.jobs import Job, Progress
from engine.errors import Cancelled, ModelError, SettingError
from engine.models import llama_cpp_python
from tests.support.inside import soon

COMPILED = """
Collecting llama-cpp-python<0.3.37,>=0.3.36
  Building wheel for llama-cpp-python (pyproject.toml): started
  [1/3] /usr/bin/g++ -DGGML_BUILD -o ggml.o -c ggml.c
  ggml.c:1210: warning: is used uninitialized
  [3/3] /usr/bin/g++ -shared -o libllama.so
  Building wheel for llama-cpp-python (pyproject.toml): finished with status 'done'
Successfully installed llama-cpp-python-0.3.36
"""
NO_C = """
  CMake Error at CMakeDetermineCCompiler.cmake:48 (message):
    Could not find the compiler specified in the environment variable CC:
  CMake Error: CMAKE_CXX_COMPILER not set, after EnableLanguage
  error: subprocess-exited-with-error
"""
NO_CXX = """
  CMake Error at CMakeLists.txt:3 (project):
    No CMAKE_CXX_COMPILER could be found.
  *** CMake configuration failed
"""
NO_NETWORK = """
WARNING: Retrying (Retry(total=0)) after connection broken by 'NameResolutionError("HTTPSConnection(
ERROR: Could not find a version that satisfies the requirement llama-cpp-python<0.3.37,>=0.3.36
ERROR: No matching distribution found for llama-cpp-python<0.3.37,>=0.3.36
"""
NO_MEMORY = """
  [7/193] /usr/bin/g++ -c llama.cpp
  g++: fatal error: Killed signal terminated program cc1plus
  ninja: build stopped: subcommand failed.
"""


class Pip:
    """A stand-in for pip: a program that is given as text; the library is there once it made the
    file that `MARK` names."""

    def __init__(self, folder: Path) -> None:
        self.script, self.mark = folder / "pip.py", folder / "installed"

    def command(self) -> list[str]:
        return [sys.executable, str(self.script)]

    def support(self, code: str, guests: bool = False) -> GgufSupport:
        """What runs this program in the place of pip."""
        self.script.write_text(f"MARK = {str(self.mark)!r}\n{code}")
        return GgufSupport(guests, self.command, self.mark.exists)

    def saying(self, text: str, status: int) -> GgufSupport:
        """The same for one that says this and ends; it has installed the library with status 0."""
        done = "" if status else "open(MARK, 'w').close()\n"
        return self.support(f"import sys\nprint({text!r})\n{done}sys.exit({status})\n")


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    """A program that a shell starts in the background ignores interrupts, and so do those that it
    starts: what is stopped would be waited for."""
    monkeypatch.setattr(gguf_support, "GRACE", 0.1)
    return Pip(tmp_path)


def failed(support: GgufSupport) -> str:
    """What is said of a set-up that fails."""
    with pytest.raises(ModelError) as caught:
        support.start().result()
    assert support.slot.running is None, "it can be tried again"
    return str(caught.value)


def test_it_is_there_when_pip_is_done(pip: Pip) -> None:
    support = pip.saying(COMPILED, 0)
    assert not support.installed()
    support.start().result()
    assert support.installed() and support.slot.running is None
    assert support.lines[-1] == "Successfully installed llama-cpp-python-0.3.36"


def test_the_compilation_tells_how_far_it_is() -> None:
    progress, seen = Progress(None, "Starting"), list[Progress]()
    for line in COMPILED.split("\n")[1:-1]:
        progress = gguf_support.after(progress, line.strip())
        seen.append(progress)
    assert [progress.share for progress in seen] == [None, None, 1 / 3, 1 / 3, 1.0, None, None]
    texts = [progress.text for progress in seen]
    assert texts[0] == "Collecting llama-cpp-python<0.3.37,>=0.3.36"
    assert texts[2] == texts[3] == "Compiling file 1 of 3", "a warning is no news"
    assert texts[6] == "Successfully installed llama-cpp-python-0.3.36"


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("linux", "build-essential"),
        ("darwin", "xcode-select --install"),
        ("win32", "Visual Studio"),
    ],
)
@pytest.mark.parametrize("output", [NO_C, NO_CXX])
def test_without_a_compiler_it_is_said_which_package_brings_one(
    output: str, platform: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_support.sys, "platform", platform)
    text = gguf_support.reason(output.splitlines(), ["pip"])
    assert "no C++ compiler" in text and expected in text and "again" in text


def test_a_failure_is_reported_with_its_reason(pip: Pip) -> None:
    assert "no C++ compiler" in failed(pip.saying(NO_C, 1))
    assert "index cannot be reached" in failed(pip.saying(NO_NETWORK, 1))
    support = pip.saying(NO_MEMORY, 1)
    text = failed(support)
    assert "pip failed" in text and shlex.join(pip.command()) in text
    assert list(support.lines) == [line.strip() for line in NO_MEMORY.split("\n") if line]
    assert "pip failed" in failed(pip.support("pass")), "it ended well, and nothing is there"


def test_of_a_long_output_the_end_is_kept(pip: Pip) -> None:
    code = "print('x' * 10_000)\nfor n in range(99):\n    print(n)\nprint('\\n\\ny' * 2)\nexit(1)"
    support = pip.support(code)
    failed(support)
    numbers = [str(n) for n in range(99 - gguf_support.TAIL + 2, 99)]
    assert list(support.lines) == [*numbers, "y", "y"]
    code = "print('x' * 10_000)\nexit(1)"
    support = pip.support(code)
    failed(support)
    assert list(support.lines) == ["x" * gguf_support.LONGEST]


def test_pip_runs_in_an_empty_folder_that_goes_with_it(pip: Pip, tmp_path: Path) -> None:
    code = (
        "import os, tempfile\n"
        "print(os.getcwd(), os.listdir(), sep='\\n')\n"
        "tempfile.mkdtemp()\n"
        "print(tempfile.gettempdir(), len(os.listdir()), sep='\\n')\n"
        "open(MARK, 'w').close()\n"
    )
    support = pip.support(code)
    support.start().result()
    place, before, temporary, after = support.lines
    assert (before, after) == ("[]", "1")
    assert place == temporary and not Path(place).exists()


def test_what_cannot_be_run_is_reported_with_the_command() -> None:
    support = GgufSupport(False, lambda: ["no-such-program", "install", "a b"], lambda: False)
    text = failed(support)
    assert "no-such-program cannot be run" in text and "no-such-program install 'a b'" in text


# Stop.

WAITS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
{ignore}
print('child', child.pid, flush=True)
time.sleep(600)
"""
DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"


def running(
    support: GgufSupport,
) -> tuple[Job[Progress, None], psutil.Process, psutil.Process]:
    """The job, its pip, and what that started."""
    job = support.start()
    assert soon(lambda: bool(support.lines))
    child = psutil.Process(int(support.lines[-1].split()[1]))
    pip = child.parent()
    assert pip is not None
    return job, pip, child


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("ignore", ["", DEAF])
def test_a_stop_ends_all_that_was_started(ignore: str, pip: Pip) -> None:
    support = pip.support(WAITS.format(ignore=ignore))
    job, *started = running(support)
    assert soon(lambda: started[0].nice() >= gguf_support.POLITE), "it gives way to the chat"
    assert not job.over.wait(0.05)
    support.stop()
    with pytest.raises(Cancelled, match="stopped"):
        job.result()
    assert soon(lambda: not any(process.is_running() for process in started))
    assert support.slot.running is None and not support.installed()


def test_a_stop_before_pip_runs_counts(pip: Pip) -> None:
    pip.script.write_text("import time; time.sleep(600)")
    support = GgufSupport(False, lambda: (support.stop(), pip.command())[1], pip.mark.exists)
    with pytest.raises(Cancelled):
        support.start().result()


def test_guests_set_up_nothing(pip: Pip) -> None:
    support = pip.support("open(MARK, 'w').close()", guests=True)
    with pytest.raises(SettingError) as caught:
        support.start()
    assert shlex.join(pip.command()) in str(caught.value)
    assert support.slot.running is None and not pip.mark.exists()


# A real pip.

NAME = "strata_stand_in"


def wheel(folder: Path) -> None:
    """A package of one module, as pip takes it."""
    info = f"{NAME}-1.0.dist-info"
    files = {
        f"{NAME}/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{NAME}-1.0-py3-none-any.whl", "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)


def test_pip_installs_and_what_it_installed_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (index := tmp_path / "index").mkdir()
    (target := tmp_path / "target").mkdir()
    monkeypatch.syspath_prepend(target)
    local = ["--no-index", "--find-links", str(index), "--target", str(target)]

    def command() -> list[str]:
        return [*llama_cpp_python.command()[:-1], *local, NAME]

    support = GgufSupport(False, command, lambda: find_spec(NAME) is not None)
    text = failed(support)
    assert "pip failed" in text and any("No matching" in line for line in support.lines)
    wheel(index)
    support.start().result()
    assert support.lines[-1] == f"Successfully installed {NAME}-1.0"
    __import__(NAME)
