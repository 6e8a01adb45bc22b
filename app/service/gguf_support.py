"""GGUF support, set up while the app runs.

GGUF files need llama-cpp-python, which is compiled on this machine. pip does that in a process of
its own, with a folder of its own for what it leaves behind. The work goes on when the page that
began it closes. When it is done GGUF files can be loaded at once: the library is imported when the
first one is.
"""

import atexit
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from tempfile import TemporaryDirectory
from time import monotonic

import psutil

from app.service.models import Progress
from engine.errors import Cancelled, ModelError, SettingError, StrataError
from engine.models import llama_cpp_python

LOOK_SECONDS = 0.5
"""How often it is told how far it is."""
GRACE = 5.0
"""Seconds that pip gets to undo what it has half done, when it is stopped."""
POLITE = 10
"""How much the work gives way to others, as `nice` counts it: the chat goes on meanwhile."""
TAIL, LONGEST = 30, 300
"""How many lines of the output are kept, and how many characters of each."""
STEP = re.compile(r"\[(\d+)/(\d+)\]")
"""What the compilation says of each file."""
NO_COMPILER = re.compile(
    r"CMAKE_C(XX)?_COMPILER (not set|could be found)|Could not find the compiler|"
    r"Microsoft Visual C\+\+ .* is required"
)
NO_NETWORK = re.compile(r"(NameResolution|NewConnection|ConnectTimeout|MaxRetry)Error|dns error")
COMPILERS = {
    "darwin": "the command line tools (xcode-select --install)",
    "win32": "the Build Tools for Visual Studio, with the C++ workload",
}
"""What brings a C++ compiler, by platform."""
USUAL_COMPILER = "the package build-essential (Debian, Ubuntu), gcc-c++ (Fedora) or gcc (Arch)"


class GgufSupport:
    """See the module's docstring. `guests` means that others use this app: then nothing is begun.

    `command` installs the library; `installed` tells whether it is here.
    """

    def __init__(
        self,
        guests: bool,
        command: Callable[[], Sequence[str]] = llama_cpp_python.command,
        installed: Callable[[], bool] = llama_cpp_python.installed,
    ) -> None:
        self.guests, self.command, self.installed = guests, command, installed
        self.busy = threading.Lock()
        """Held while it is being set up."""
        self.over, self.stopped = threading.Event(), threading.Event()
        self.problem: StrataError | None = None
        """Why it was not set up the last time, if so."""
        self.lines: deque[str] = deque(maxlen=TAIL)
        """The end of the output."""
        self.share: float | None = None
        self.words, self.began = "", 0.0
        self.process: psutil.Process | None = None

    def start(self) -> None:
        """Begin. Raises SettingError where others use this app, and ModelError while it is being
        set up already."""
        if self.guests:
            raise SettingError(
                "GGUF support is not set up from here: others use this app too. Run this in a "
                f"terminal: {shlex.join(self.command())}"
            )
        if not self.busy.acquire(blocking=False):
            raise ModelError("GGUF support is being set up already. Wait until that is done.")
        self.lines.clear()
        self.over.clear()
        self.stopped.clear()
        self.share, self.words, self.began = None, "Starting", monotonic()
        threading.Thread(target=self.work, name="gguf-support", daemon=True).start()

    def watch(self) -> Iterator[Progress]:
        """How far it is, again and again until it is over. Closing the iterator ends nothing.

        Raises Cancelled when it was stopped, and ModelError that says why it failed.
        """
        while not self.over.wait(LOOK_SECONDS):
            yield self.progress()
        if self.problem:
            raise self.problem

    def progress(self) -> Progress:
        """What is being done, and for how long already."""
        minutes, seconds = divmod(int(monotonic() - self.began), 60)
        return Progress(self.share, f"{self.words} · {minutes}:{seconds:02}")

    def stop(self) -> None:
        """End it, with all that it started."""
        self.stopped.set()
        if (process := self.process) is not None:
            end(process)

    def work(self) -> None:
        """Install the library; what goes wrong is in `problem`."""
        command = self.command()
        try:
            status = self.run(command)
            failed = status or not self.installed()
            self.problem = ModelError(reason([*self.lines], command)) if failed else None
        except OSError as error:
            words = f"{command[0]} cannot be run ({error.strerror or error})"
            self.problem = ModelError(
                f"GGUF support was not set up: {words}. By hand: {shlex.join(command)}"
            )
        finally:
            if self.stopped.is_set():
                self.problem = Cancelled("GGUF support was not set up: it was stopped.")
            self.busy.release()
            self.over.set()

    def run(self, command: Sequence[str]) -> int:
        """The status that the command ends with, with what it says taken down. It runs in an empty
        folder, so it imports nothing but what is installed."""
        with (
            TemporaryDirectory(prefix="strata-gguf-", ignore_cleanup_errors=True) as folder,
            subprocess.Popen(
                [*command, "--verbose"],
                cwd=folder,
                env={**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
            ) as pip,
        ):
            self.process = psutil.Process(pip.pid)
            atexit.register(self.stop)
            try:
                return self.followed(pip, self.process)
            finally:
                atexit.unregister(self.stop)
                self.process = None

    def followed(self, pip: "subprocess.Popen[str]", process: psutil.Process) -> int:
        """The status that it ends with."""
        with suppress(psutil.Error, OSError):  # Windows counts otherwise.
            process.nice(POLITE)
        if self.stopped.is_set():
            end(process)
        assert pip.stdout is not None
        for line in pip.stdout:
            self.note(line.strip()[:LONGEST])
        return pip.wait()

    def note(self, line: str) -> None:
        """Take down a line. Between the files that are compiled there are many warnings; these are
        no news."""
        if not line:
            return
        self.lines.append(line)
        if step := STEP.match(line):
            done, files = int(step[1]), int(step[2])
            self.share, self.words = done / files, f"Compiling file {done} of {files}"
        elif self.share in (None, 1.0):
            self.share, self.words = None, line


def reason(lines: Sequence[str], command: Sequence[str]) -> str:
    """Why it failed, as far as the output tells, and what to do."""
    said = "\n".join(lines)
    again = "Then press Set up GGUF support again."
    if NO_COMPILER.search(said):
        wanted = COMPILERS.get(sys.platform, USUAL_COMPILER)
        why = f"this machine has no C++ compiler. Install {wanted}. {again}"
    elif NO_NETWORK.search(said):
        why = f"the package index cannot be reached. Connect to the network. {again}"
    else:
        why = f"pip failed. What it said last is below. By hand: {shlex.join(command)}"
    return f"GGUF support was not set up: {why}"


def end(process: psutil.Process) -> None:
    """End pip and all that it started. Interrupted, it undoes what it has half done."""
    with suppress(psutil.NoSuchProcess):
        below = process.children(recursive=True)
        process.send_signal(signal.SIGTERM if sys.platform == "win32" else signal.SIGINT)
        for each in below:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        for each in psutil.wait_procs([process], GRACE)[1]:
            each.kill()
