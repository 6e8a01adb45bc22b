"""The command line: options and commands.

`strata` opens the page, `strata serve` serves other programs alone, `strata keys` manages their
keys, and `strata ways` measures in which ways a model can run. Imports nothing heavy, so that
`--help` answers at once.
"""

import argparse
import io
import ipaddress
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from assets import ASSETS
from engine.errors import SettingError
from engine.settings import Runtime
from strata_chat import __version__

EMBEDDED = ASSETS / "models" / "tiny-chat" / "target"
EMBEDDED_DRAFTS = ("mid", "small")
"""The bundled models that can draft for the demonstration model, as folders and as GGUF files."""
FLAGS = {"context_length": "--context"}
"""Options whose names are not those of their settings."""
LOCAL, FIRST_PORT, PORTS_TRIED = "127.0.0.1", 7860, 20
DATA_HELP = "where conversations and databases are kept"


@dataclass(frozen=True, slots=True)
class Options:
    """A checked command line. `made_up` says that Strata made the password.

    A `model` of "" is the demonstration model. `page` says whether the page is served, and `api`
    whether other programs may use the API. `origins` are the origins of foreign pages that may.
    With `api_load`, requests load the models that they name.
    """

    model: str
    data_dir: Path | None = None
    host: str = LOCAL
    port: int | None = None
    share: bool = False
    user: str | None = None
    password: str | None = None
    made_up: bool = False
    browser: bool = False
    runtime: Runtime = Runtime()
    drafts: tuple[str, ...] = ()
    page: bool = True
    api: bool = False
    api_load: bool = False
    origins: tuple[str, ...] = ()

    @property
    def public(self) -> bool:
        """Whether others than the user of this machine can reach the app."""
        return self.share or not is_local(self.host)


SERVE, KEYS, WAYS, VLLM = "serve", "keys", "ways", "vllm"
"""Commands, the first word of a command line. Without one the page opens."""
COMMANDS = f"""commands:
  {SERVE:<8} answer other programs, as OpenAI's API does, without a page (strata {SERVE} --help)
  {KEYS:<8} make, list and revoke the keys of other programs (strata {KEYS} --help)
  {WAYS:<8} measure which way to run a model is the fastest here (strata {WAYS} --help)
  {VLLM:<8} serve a model with vLLM, drafting for it (strata {VLLM} --help)
"""


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line of a server; exits with status 2 and one line about an invalid
    option."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    page = argv[:1] != [SERVE]
    parser = parser_of(page)
    if page and argv and not argv[0].startswith("-"):
        parser.error(
            f"There is no command {argv[0]!r}. Give {SERVE}, {KEYS}, {WAYS} or {VLLM}, or options "
            "alone, which open the page."
        )
    given = vars(parser.parse_args(argv if page else argv[1:]))
    auth, given["origins"] = given.pop("auth"), tuple(given["origins"])
    user, colon, password = (auth or "").partition(":")
    if auth is not None and not (user and colon and password):
        parser.error(f"--auth {auth!r} is not of the form USER:PASSWORD. Give both parts.")
    runtime = take_runtime(given, parser)
    public = given["share"] or not is_local(given["host"])
    if made_up := page and public and auth is None:
        user, password = "guest", secrets.token_urlsafe(12)
    return Options(
        **given,
        user=user or None,
        password=password or None,
        made_up=made_up,
        runtime=runtime,
        page=page,
    )


def parser_of(page: bool) -> argparse.ArgumentParser:
    what = "a chat app that shows, token by token, why its model answers faster"
    parser = argparse.ArgumentParser(
        prog="strata" if page else f"strata {SERVE}",
        description=f"Strata: {what}." if page else "Answers other programs, as OpenAI's API does.",
        epilog=COMMANDS if page else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        default="",
        metavar="PATH|ID|URL",
        help="a folder, a GGUF file, a Hugging Face id, OWNER/NAME:FILE.gguf, or the address of "
        "an OpenAI-compatible server, such as http://localhost:8000/v1 (its key: "
        "STRATA_SERVER_KEY; default: the demonstration model that comes with Strata)",
    )
    add_runtime(parser, Runtime() if page else Runtime(parallel=0))
    add(
        "--drafts",
        default="",
        type=draft_names,
        metavar="PATH|ID[,PATH|ID...]",
        help="draft models to load with it (default, or auto: those chosen in the Stack tab; a "
        "built-in head is found automatically, see --head)",
    )
    add("--data-dir", type=folder_name, metavar="DIR", help=DATA_HELP)
    add("--host", default=LOCAL, type=host_name, help="address to listen on (default: %(default)s)")
    add("--port", type=port_number, help=f"default: the first free one from {FIRST_PORT}; 0: any")
    if page:
        add("--share", action="store_true", help="make a public link; always asks for a password")
        add("--auth", metavar="USER:PASSWORD", help="ask for this name and password")
        add(
            "--no-browser",
            dest="browser",
            action="store_false",
            help="do not open a browser window",
        )
        add("--api", action="store_true", help="answer other programs as well, at /v1")
    else:
        parser.set_defaults(share=False, auth=None, browser=False, api=True)
        add(
            "--api-load",
            action="store_true",
            help="load the model that a request names, if it is on this machine",
        )
    add(
        "--api-origin",
        dest="origins",
        action="append",
        default=[],
        type=origin,
        metavar="ORIGIN",
        help="let pages of another origin, such as http://localhost:3000, use the API with a key",
    )
    add("--version", action="version", version=f"strata {__version__}")
    return parser


def parse_keys(arguments: Sequence[str]) -> argparse.Namespace:
    """A command of `strata keys`: "list", or "make" or "revoke" with a `word`, a name or an id."""
    parser = argparse.ArgumentParser(
        prog=f"strata {KEYS}", description="The keys with which other programs use the API."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="their names, and when they were used last")
    making = commands.add_parser("make", help="make one; it is printed only once")
    making.add_argument("word", metavar="NAME", help="such as the program that will use it")
    revoking = commands.add_parser("revoke", help="revoke one")
    revoking.add_argument("word", metavar="ID", help="as the list shows it")
    for each in (listing, making, revoking):
        each.add_argument("--data-dir", type=folder_name, metavar="DIR", help=DATA_HELP)
    return parser.parse_args(arguments)


def parse_ways(arguments: Sequence[str]) -> Options:
    """The model that `strata ways` measures, and how it usually runs; neither page nor API."""
    parser = argparse.ArgumentParser(
        prog=f"strata {WAYS}",
        description="Runs a model in each way that this machine has, with few and with many bits, "
        "and says how many tokens per second it writes, plainly and with guessing.",
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="PATH|ID",
        help="as for strata (default: the demonstration model that comes with Strata)",
    )
    add_runtime(parser, Runtime())
    given = vars(parser.parse_args(arguments))
    return Options(given.pop("model"), runtime=take_runtime(given, parser), page=False)


def take_runtime(given: dict[str, Any], parser: argparse.ArgumentParser) -> Runtime:
    """Take the settings of a runtime out of parsed options; exits with one line about a wrong
    one."""
    try:
        return Runtime(**{item.name: given.pop(item.name) for item in fields(Runtime)})
    except SettingError as error:
        parser.error(str(error))


def add_runtime(parser: argparse.ArgumentParser, usual: Runtime) -> None:
    """Add an option for each setting of `Runtime`, with the help text of its declaration."""
    for item in fields(Runtime):
        default = getattr(usual, item.name)
        parser.add_argument(
            FLAGS.get(item.name, "--" + item.name.replace("_", "-")),
            dest=item.name,
            default=default,
            type=whole_number if isinstance(default, int) else str,
            metavar="N"
            if isinstance(default, int)
            else "|".join(item.metadata["choices"]) or item.name.upper(),
            help=f"{item.metadata['help'].rstrip('.')} (default: {default})",
        )


def draft_names(text: str) -> tuple[str, ...]:
    names = (source.strip() for source in text.split(","))
    return tuple(source for source in names if source not in ("", "auto"))


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        message = f"{text!r} is not a number. Give a whole one."
        raise argparse.ArgumentTypeError(message) from error


def port_number(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port. Give a number from 0 to 65535.")
    return int(text)


def folder_name(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("It is empty. Give a folder, or leave the option out.")
    return Path(text)


def host_name(text: str) -> str:
    """An address to listen on. An IPv6 address may be written in brackets, as in web addresses."""
    return text.removeprefix("[").removesuffix("]")


def origin(text: str) -> str:
    """The origin of pages: a scheme and a host, without a path."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or text != f"{parts.scheme}://{parts.netloc}":
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an origin. Give one such as http://localhost:3000."
        )
    return text.lower()


def folder_of(given: Path | None) -> Path:
    """The data directory. Raises SettingError if none is given and the user has no home folder."""
    from platformdirs import user_data_path

    try:
        return given or user_data_path("strata", appauthor=False)
    except RuntimeError as error:
        raise SettingError(
            f"There is no folder to keep data in ({error}). Name one with --data-dir."
        ) from error


def show_any_character() -> None:
    """Make the output escape characters that it cannot show, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address; a name other than localhost is not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
