"""`python -m training COMMAND`: one stage of the recipe per command (training/README.md)."""

import argparse
import sys
from collections.abc import Sequence

from engine.errors import StrataError
from training import acceptance, bits, export, prepare, samples, train

COMMANDS = {
    "prepare": prepare,
    "train": train,
    "export": export,
    "bits": bits,
    "acceptance": acceptance,
    "samples": samples,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one stage. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
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
