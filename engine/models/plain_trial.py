"""How fast a model decodes plainly here, measured in a process of its own.

    python -m engine.models.plain_trial SOURCE RUNTIME

The speed is the last line on standard output. A library that ends the process costs this process
only, and what the loaded model computes meanwhile keeps its memory to itself.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from time import monotonic

from engine.process import command, environment
from engine.settings import Runtime

SECONDS = 120.0
TIMES = 4
"""How often a speed is measured."""
LOOK_SECONDS = 0.2
"""How often it is seen whether the trial is still wanted."""


def trial(source: str, runtime: Runtime, wanted: Callable[[], bool]) -> float | None:
    """Tokens per second of plain decoding, 0 for a model that does not run here; None when it was
    not `wanted` any more, and ended early."""
    words = command("engine.models.plain_trial", source, json.dumps(asdict(runtime)))
    latest = monotonic() + SECONDS
    with subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            while wanted():
                with suppress(subprocess.TimeoutExpired):
                    said, _ = process.communicate(timeout=LOOK_SECONDS)
                    return float(said.split()[-1]) if process.returncode == 0 else 0.0
                if monotonic() > latest:
                    return 0.0
            return None
        finally:
            process.kill()


def measured(source: str, runtime: Runtime) -> float:
    """The speed of a model that is loaded now, the best of a few: other work on the machine makes
    it slower, and nothing makes it faster. Raises ModelError."""
    from engine.models.loaders import load
    from engine.runs import plain_speed
    from engine.types import Message

    backend = load(source, runtime)
    prompt = backend.tokenize(backend.render([Message("user", "Tell a story.")]))
    return max(plain_speed(backend, prompt) for _ in range(TIMES))


if __name__ == "__main__":
    print(measured(sys.argv[1], Runtime(**json.loads(sys.argv[2]))))
