"""Sets up GGUF support while the app runs.

GGUF files need llama-cpp-python, which is compiled on this machine. pip does that in a separate
process with its own temporary folder. Afterwards GGUF files can be loaded at once, because the
library is imported with the first file.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from tempfile import TemporaryDirectory

import psutil

from app.service.jobs import Job, Progress, Slot
from engine.errors import Cancelled, ModelError, SettingError
from engine.models import llama_cpp_python

GRACE = 5.0
"""Seconds that pip gets to clean up when it is stopped."""
POLITE = 10
"""The `nice` value of the work, so that it does not slow down the chat."""
TAIL, LONGEST = 30, 300
"""How many lines of the output are kept, and how many characters of each line."""
STEP = re.compile(r"\[(\d+)/(\d+)\]")
"""The compilation's progress line for each file."""
NO_COMPILER = re.compile(
    r"CMAKE_C(XX)?_COMPILER (not set|could be found)|Could not find the compiler|"
    r"Microsoft Visual C\+\+ .* is required"
)
NO_NETWORK = re.compile(r"(NameResolution|NewConnection|ConnectTimeout|MaxRetry)Error|dns error")
NOT_SET_UP = "GGUF support was not set up"
COMPILERS = {
    "darwin": "the command line tools (xcode-select --install)",
    "win32": "the Build Tools for Visual Studio, with the C++ workload",
}
"""What installs a C++ compiler, by platform."""
USUAL_COMPILER = "the package build-essential (Debian, Ubuntu), gcc-c++ (Fedora) or gcc (Arch)"


class GgufSupport:
    """`guests` means that others use this app too; then it cannot be set up here.

    `command` installs the library; `installed` says whether it is installed.
    """

    def __init__(
        self,
        guests: bool,
        command: Callable[[], Sequence[str]] = llama_cpp_python.command,
        installed: Callable[[], bool] = llama_cpp_python.installed,
    ) -> None:
        self.guests, self.command, self.installed = guests, command, installed
        self.slot = Slot[Progress, None]()
        self.lines: deque[str] = deque(maxlen=TAIL)
        """The end of the output."""

    def start(self) -> Job[Progress, None]:
        """Start the set-up. Raises SettingError with guests, and ModelError if it runs already. The
        job raises Cancelled if it was stopped, and ModelError with the reason if it failed."""
        if self.guests:
            raise SettingError(
                "GGUF support is not set up from here: others use this app too. Run this in a "
                f"terminal: {shlex.join(self.command())}"
            )
        busy = ModelError("GGUF support is being set up already. Wait until that is done.")
        job = self.slot.take(lambda: Job(self.install, Progress(None, "Starting")), busy)
        self.lines.clear()
        return job.start("gguf-support")

    def stop(self) -> None:
        self.slot.cancel()

    def install(self, job: Job[Progress, None]) -> None:
        command = self.command()
        try:
            status = self.run(command, job)
        except OSError as error:
            problem = f"{command[0]} cannot be run ({error.strerror or error})"
            raise ModelError(f"{NOT_SET_UP}: {problem}. By hand: {shlex.join(command)}") from error
        if job.stop.is_set():
            raise Cancelled(f"{NOT_SET_UP}: it was stopped.")
        if status or not self.installed():
            raise ModelError(reason([*self.lines], command))

    def run(self, command: Sequence[str], job: Job[Progress, None]) -> int:
        """Run the command and keep the end of its output; returns its exit status. It runs in an
        empty folder, so that it imports only installed packages."""
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
            process = psutil.Process(pip.pid)
            with suppress(psutil.Error, OSError):  # Windows has other priorities.
                process.nice(POLITE)
            assert pip.stdout is not None
            with job.ending(lambda: end(process)):
                for line in pip.stdout:
                    if line := line.strip()[:LONGEST]:
                        self.lines.append(line)
                        job.report(after(job.progress, line))
                return pip.wait()


def after(progress: Progress, line: str) -> Progress:
    """The progress after a line of output. The many warnings between compiled files do not change
    it."""
    if step := STEP.match(line):
        done, files = int(step[1]), int(step[2])
        return Progress(done / files, f"Compiling file {done} of {files}")
    return Progress(None, line) if progress.share in (None, 1.0) else progress


def reason(lines: Sequence[str], command: Sequence[str]) -> str:
    output = "\n".join(lines)
    again = "Then press Set up GGUF support again."
    if NO_COMPILER.search(output):
        compiler = COMPILERS.get(sys.platform, USUAL_COMPILER)
        why = f"this machine has no C++ compiler. Install {compiler}. {again}"
    elif NO_NETWORK.search(output):
        why = f"the package index cannot be reached. Connect to the network. {again}"
    else:
        why = f"pip failed. The end of its output is below. By hand: {shlex.join(command)}"
    return f"{NOT_SET_UP}: {why}"


def end(process: psutil.Process) -> None:
    """End pip and all its child processes. pip is interrupted, so that it can clean up."""
    with suppress(psutil.NoSuchProcess):
        below = process.children(recursive=True)
        process.send_signal(signal.SIGTERM if sys.platform == "win32" else signal.SIGINT)
        for each in below:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        for each in psutil.wait_procs([process], GRACE)[1]:
            each.kill()
