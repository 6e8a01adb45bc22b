"""`python -m bench COMMAND`: one measurement per command."""

import sys
from collections.abc import Sequence

from bench import (
    ablation,
    door,
    inflate,
    live,
    lookup,
    overhead,
    page,
    replay,
    speed,
    stack,
    to_gguf,
    truth,
)
from bench.commands import run_command

COMMANDS = {
    "ablation": ablation,
    "speed": speed,
    "live": live,
    "inflate": inflate,
    "replay": replay,
    "lookup": lookup,
    "stack": stack,
    "door": door,
    "overhead": overhead,
    "page": page,
    "to-gguf": to_gguf,
    "truth": truth,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one measurement. Returns the exit status."""
    return run_command("python -m bench", __doc__, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
