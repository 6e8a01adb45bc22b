"""Fills chat templates in a process of its own, which ends when a template does not.

A template comes with a model, from anybody, and is a program: it may loop for hours, or ask for a
number of billions of digits, and a thread that does so cannot be stopped. So all templates, of all
models, are filled by one helper process (engine/backends/template_process.py). It ends itself when
one takes too long, and the next text starts a new one. It is started with the first model, and ends
with the application: when nobody is there to ask it any more, there is nothing left to read.
"""

import atexit
import json
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Literal

from engine.process import command, ending, environment

SECONDS = 5.0
"""A template takes a few ms when it is read first, and well below one from then on."""

Library = Literal["llama_cpp", "transformers"]
"""Whose way of filling templates is meant."""
Fill = Callable[[Sequence[Mapping[str, str]], Mapping[str, bool]], str]
"""Fills one template: what it makes of turns, with values for the variables that it may know."""
SWITCHES = ("enable_thinking", "thinking")
"""What templates call the variable that has a model think before it answers, or not."""


class TemplateError(Exception):
    """A template raised an exception; the text is that of the exception."""


class TemplateStopped(Exception):
    """A template did not come to its end; the text says why."""


class Filler:
    """The helper process: started when it is needed, one request at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def prepare(self, library: Library) -> None:
        """Start the process, if there is none, without waiting until it is ready."""
        with self.lock:
            self.running(library)

    def running(self, library: Library) -> subprocess.Popen[bytes]:
        """The process, a new one if there is none; that one begins by importing `library`."""
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self.process = subprocess.Popen(
                command("engine.backends.template_process", library),
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self.process

    def fill(
        self,
        library: Library,
        template: str,
        tokens: Mapping[str, str],
        turns: Sequence[Mapping[str, str]] | None,
        variables: Mapping[str, bool] | None = None,
    ) -> str:
        """What a template makes of turns; with None it is only read, and "" is returned.

        `tokens` are the special tokens that it may name ("bos_token"), `variables` what else it
        may ask for. Raises TemplateError and TemplateStopped.
        """
        request = {"library": library, "template": template, "tokens": tokens, "turns": turns}
        answer = self.ask(library, {**request, "variables": variables or {}, "seconds": SECONDS})
        if "error" in answer:
            raise TemplateError(answer["error"])
        return str(answer["text"])

    def ask(self, library: Library, request: dict[str, Any]) -> dict[str, str]:
        """The answer of the process. Raises TemplateStopped when it ends instead."""
        line = json.dumps(request).encode() + b"\n"
        with self.lock:
            process = self.running(library)
            assert process.stdin is not None and process.stdout is not None
            begun = monotonic()
            try:
                process.stdin.write(line)
                process.stdin.flush()
                found = process.stdout.readline()
            except OSError:
                found = b""
            except BaseException:
                # An answer that nobody waits for would be taken for that to the next request.
                self.stop()
                raise
            if found.endswith(b"\n"):
                answer: dict[str, str] = json.loads(found)
                return answer
            status = self.stop()
        if monotonic() - begun >= request["seconds"]:
            raise TemplateStopped(f"it did not end within {request['seconds']:.0f} s")
        raise TemplateStopped(f"the process that fills it in ended ({ending(status)})")

    def stop(self) -> int:
        """End the process, if there is one; its status, 0 where there is none."""
        process, self.process = self.process, None
        if process is None:
            return 0
        process.kill()
        with process:
            return process.wait()


def switched(thinking: bool | None) -> dict[str, bool]:
    """The variables that switch thinking on or off; none where the template is to decide."""
    return {} if thinking is None else dict.fromkeys(SWITCHES, thinking)


def can_think(template: str, fill: Fill) -> bool:
    """Whether thinking can be switched: a template then makes two different texts of a question.

    That is tried, as one may name the variable and not heed it.
    """
    if not any(name in template for name in SWITCHES):
        return False
    question = [{"role": "user", "content": "Hi."}]
    try:
        return fill(question, switched(True)) != fill(question, switched(False))
    except (TemplateError, TemplateStopped):
        return False


FILLER = Filler()
"""One for all models."""
atexit.register(FILLER.stop)
