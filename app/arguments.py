"""The command line: what may be said.

Imports nothing heavy, so that `--help` answers at once.
"""

import argparse
import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from assets import ASSETS
from engine.errors import SettingError
from engine.settings import Runtime
from strata_chat import __version__

EMBEDDED = ASSETS / "models" / "tiny-chat" / "target"
EMBEDDED_DRAFTS = ("mid", "small")
"""Models beside it, as folders and as GGUF files, that can draft for it."""
FLAGS = {"context_length": "--context"}
"""Options whose names are not those of their settings."""
FIRST_PORT, PORTS_TRIED = 7860, 20


@dataclass(frozen=True, slots=True)
class Options:
    """A checked command line. `made_up` says that the password was not chosen by the user."""

    model: str
    data_dir: Path | None
    host: str
    port: int | None
    share: bool
    user: str | None
    password: str | None
    made_up: bool
    browser: bool
    runtime: Runtime = Runtime()
    drafts: tuple[str, ...] = ()

    @property
    def public(self) -> bool:
        """Whether others than the user of this machine can reach the app."""
        return self.share or not is_local(self.host)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; exits with status 2 and one clear line when it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="strata",
        description="Strata: a chat app that shows, token by token, why its model answers faster.",
    )
    add = parser.add_argument
    add(
        "--model",
        default=str(EMBEDDED),
        metavar="PATH|ID",
        help="a folder, a GGUF file, a Hugging Face id, or OWNER/NAME:FILE.gguf (default: the "
        "demonstration model that comes along)",
    )
    add_runtime(parser)
    add(
        "--drafts",
        default="",
        metavar="PATH|ID[,PATH|ID...]",
        help="draft models to load with it (default: those that were chosen in the Stack tab)",
    )
    add("--data-dir", type=Path, metavar="DIR", help="where conversations and databases are kept")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=port_number, help=f"default: the first free one from {FIRST_PORT}; 0: any")
    add("--share", action="store_true", help="make a public link; always asks for a password")
    add("--auth", metavar="USER:PASSWORD", help="ask for this name and password")
    add("--no-browser", action="store_true", help="do not open a browser window")
    add("--version", action="version", version=f"strata {__version__}")
    given = parser.parse_args(arguments)
    user, colon, password = (given.auth or "").partition(":")
    if given.auth is not None and not (user and colon and password):
        parser.error(f"--auth {given.auth!r} is not of the form USER:PASSWORD. Give both parts.")
    try:
        runtime = runtime_of(given)
    except SettingError as error:
        parser.error(str(error))
    public = given.share or not is_local(given.host)
    made_up = public and given.auth is None
    return Options(
        model=given.model,
        data_dir=given.data_dir,
        host=given.host,
        port=given.port,
        share=given.share,
        user="guest" if made_up else user or None,
        password=secrets.token_urlsafe(12) if made_up else password or None,
        made_up=made_up,
        browser=not given.no_browser,
        runtime=runtime,
        drafts=tuple(source.strip() for source in given.drafts.split(",") if source.strip()),
    )


def add_runtime(parser: argparse.ArgumentParser) -> None:
    """An option for each setting of `Runtime`, in its words."""
    for item in fields(Runtime):
        parser.add_argument(
            FLAGS.get(item.name, "--" + item.name.replace("_", "-")),
            dest=item.name,
            type=type(item.default),
            metavar="N"
            if isinstance(item.default, int)
            else "|".join(item.metadata["choices"]) or item.name.upper(),
            help=f"{item.metadata['help'].rstrip('.')} (default: {item.default})",
        )


def runtime_of(given: argparse.Namespace) -> Runtime:
    """The settings that were given. Raises SettingError for one out of its range."""
    values = {item.name: getattr(given, item.name) for item in fields(Runtime)}
    return Runtime(**{name: value for name, value in values.items() if value is not None})


def port_number(text: str) -> int:
    """A port from 0 to 65535."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port. Give a number from 0 to 65535.")
    return int(text)


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address; a name other than localhost is not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
