"""`python -m bench COMMAND`: one measurement per command."""

import argparse
import sys
from collections.abc import Sequence

from bench import ablation, inflate, lookup, overhead, replay, speed, stack, to_gguf
from engine.errors import StrataError

COMMANDS = {
    "ablation": ablation,
    "speed": speed,
    "inflate": inflate,
    "replay": replay,
    "lookup": lookup,
    "stack": stack,
    "overhead": overhead,
    "to-gguf": to_gguf,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one measurement. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        about = (module.__doc__ or "").split("\n", 1)[0]
        module.add_arguments(commands.add_parser(name, help=about))
    options = parser.parse_args(arguments)
    try:
        COMMANDS[options.command].run(options)
    except StrataError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Cancelled.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
