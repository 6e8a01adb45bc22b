"""`python -m training COMMAND`: one stage of the recipe per command (training/README.md)."""

import sys
from collections.abc import Sequence

from bench.commands import run_command

COMMANDS = (
    "prepare",
    "answers",
    "train",
    "head",
    "export",
    "bits",
    "acceptance",
    "depths",
    "samples",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one stage. Returns the exit status."""
    return run_command("training", __doc__, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
