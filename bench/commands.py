"""One program of many commands: each a module with a docstring, `add_arguments` and `run`."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from engine.errors import StrataError


def run_command(
    program: str,
    about: str | None,
    commands: Mapping[str, ModuleType],
    arguments: Sequence[str] | None,
) -> int:
    """Run the command that the arguments name (default: the process's own). Returns the exit
    status: 2 for an error of the user's, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog=program, description=about)
    known = parser.add_subparsers(dest="command", required=True)
    for name, module in commands.items():
        line = (module.__doc__ or "").split("\n", 1)[0]
        module.add_arguments(known.add_parser(name, help=line))
    options = parser.parse_args(arguments)
    try:
        commands[options.command].run(options)
    except StrataError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Cancelled.", file=sys.stderr)
        return 130
    return 0
