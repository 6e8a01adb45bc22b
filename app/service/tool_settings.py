"""What a person gives to add servers of tools: a command or URL with the settings of that server,
or the JSON with which other programs describe servers. Settings are environment variables of a
command, and headers of a URL. `${NAME}` stands for a variable of Strata's own environment.
"""

import os
import re
import shlex
from collections.abc import Mapping
from typing import Annotated, NamedTuple

from pydantic import Field, ValidationError

from engine.errors import SettingError, ToolError
from storage.validation import Outside, problem_of

NAME = re.compile(r"[\w-]+", re.ASCII)
ROW = re.compile(rf"\s*({NAME.pattern})\s*[:=]\s*(.*?)\s*", re.ASCII)
PRINTABLE = re.compile(r"[\x20-\x7e]*")
PLACE = re.compile(r"\$\{([^{}]*)\}")
VARIABLE = re.compile(r"(?:env:)?([A-Za-z_]\w*)(?::-(.*))?", re.ASCII)
Texts = Annotated[dict[str, str], Field(description="an object of texts")]


class Given(NamedTuple):
    """A server to add."""

    name: str
    address: str
    settings: Mapping[str, str]


class Described(Outside):
    """A server as Claude, Cursor, VS Code and other programs describe it."""

    command: str = ""
    args: tuple[str, ...] = ()
    env: Texts = {}
    url: str = ""
    headers: Texts = {}

    def given(self, name: str) -> Given:
        if bool(self.command) == bool(self.url):
            raise SettingError(f"The server {name!r} needs either a command or a url.")
        if self.url:
            return Given(name, self.url, self.headers)
        return Given(name, shlex.join([self.command, *self.args]), self.env)


class Servers(Outside):
    """A file with servers: `mcpServers` is the name for them of most programs, `servers` that of
    VS Code."""

    mcp_servers: dict[str, Described] = Field({}, alias="mcpServers")
    servers: dict[str, Described] = {}


def given(name: str, address: str, settings: str) -> list[Given]:
    """The servers that were typed. Raises SettingError."""
    address = address.strip()
    if not address:
        raise SettingError("The address is empty. Give a command or a URL.")
    if not address.startswith("{"):
        return [Given(name, address, checked(rows(settings)))]
    if settings.strip():
        raise SettingError("Settings of servers in JSON are part of it. Leave their box empty.")
    try:
        known = Servers.model_validate_json(address)
    except ValidationError as error:
        raise SettingError(
            f"This JSON describes no servers: {problem_of(error, Servers).text}"
        ) from error
    found = [each.given(of) for of, each in {**known.servers, **known.mcp_servers}.items()]
    if not found:
        raise SettingError('This JSON names no server under "mcpServers" or "servers".')
    for each in found:
        checked(each.settings)
    return found if name.strip() == "" or len(found) > 1 else [found[0]._replace(name=name)]


def rows(settings: str) -> dict[str, str]:
    """A setting in each line."""
    found = dict[str, str]()
    for line in filter(str.strip, settings.splitlines()):
        row = ROW.fullmatch(line)
        if row is None:
            raise SettingError(
                f"A setting cannot be {line.strip()[:20]!r}. Write each in a line of its own, as "
                "NAME=value for a command, or as Name: value for a URL."
            )
        found[row[1]] = row[2]
    return found


def checked(settings: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in settings.items():
        if not NAME.fullmatch(name) or not PRINTABLE.fullmatch(value):
            raise SettingError(
                f"The setting {name[:40]!r} cannot be sent. A name has letters, digits, '-' and "
                "'_', and a value is a line of ASCII characters."
            )
    return settings


def filled(text: str) -> str:
    """A text with the values of the variables that it names. Raises ToolError if one of them is not
    set."""

    def value(place: re.Match[str]) -> str:
        named = VARIABLE.fullmatch(place[1])
        if named is None:
            raise ToolError(f"Nothing is known to stand in for {place[0]}. Write the value itself.")
        found = os.environ.get(named[1]) or named[2]
        if found is None:
            raise ToolError(
                f"{place[0]} stands for a variable that is not set. Set {named[1]} before you "
                "start Strata."
            )
        return found

    return PLACE.sub(value, text)
