"""`python -m bench COMMAND`: one measurement per command."""

import sys

from bench.harness import run_command

COMMANDS = {
    "speed": "speed.Speed",
    "stack": "stack.Stack",
    "truth": "truth.Truth",
    "page": "page.PageCost",
    "curve": "curve.Curve",
    "gpu": "gpu.Gpu",
    "crowd": "crowd.Crowd",
    "replay": "replay.Replay",
    "edits": "commits.Edits",
    "extract": "commits.Extract",
    "store": "store.Store",
    "vllm": "vllm.Servers",
    "inflate": "inflate.Inflate",
}
"""The class of each command, by its name."""


def main(arguments: list[str] | None = None) -> int:
    return run_command("bench", __doc__, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
