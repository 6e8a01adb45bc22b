"""`python -m bench COMMAND`: one measurement per command."""

import sys
from collections.abc import Sequence

from bench.commands import run_command

COMMANDS = (
    *("ablation", "speed", "live", "inflate", "record", "replay", "drafting"),
    *("lookup", "stack", "heads", "door", "overhead", "page", "to-gguf", "truth", "curve", "store"),
    *("chains", "statistics", "head-to-gguf", "proposer", "vllm"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one measurement. Returns the exit status."""
    return run_command("bench", __doc__, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
