"""One program of many commands: each a module with a docstring, `add_arguments` and `run`.

Only the command that is asked for is imported, with the libraries that it needs; help needs all.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from engine.errors import StrataError


def run_command(
    package: str, about: str | None, commands: Sequence[str], arguments: Sequence[str] | None
) -> int:
    """Run the command that the arguments name (default: the process's own), which is the module of
    that name in the package. Returns the exit status: 2 for an error of the user's, 130 when
    interrupted."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description=about)
    known = parser.add_subparsers(dest="command", required=True)
    for name in given[:1] if given and given[0] in commands else commands:
        module = import_module(f"{package}.{name.replace('-', '_')}")
        line = (module.__doc__ or "").split("\n", 1)[0]
        chosen = known.add_parser(name, help=line)
        module.add_arguments(chosen)
        chosen.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except StrataError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Cancelled.", file=sys.stderr)
        return 130
    return 0
