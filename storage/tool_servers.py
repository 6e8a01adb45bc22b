"""The servers whose tools the model may call, and the tools that each of them listed.

They belong to the machine and are part of no conversation. A tool is off until someone switches it
on. If a server lists it again in other words, it is off again, because nobody has read those words.
"""

import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from engine.errors import SettingError
from engine.text import folded, well_formed
from engine.types import Tool
from storage.database import Database, as_text, from_json, to_json
from storage.validation import Outside

LONGEST_NAME = 60


class ServerTool(Outside):
    """A tool as its server describes it. `parameters` is the JSON Schema of its arguments."""

    name: str
    description: str = ""
    parameters: str = "{}"
    on: bool = False

    @property
    def tool(self) -> Tool:
        return Tool(self.name, self.description, self.parameters)


class ToolServer(NamedTuple):
    """A server of tools. Its `address` is a command that starts it, or a URL; its `settings` are
    environment variables of the command, or headers of requests to the URL."""

    id: str
    name: str
    address: str
    tools: tuple[ServerTool, ...] = ()
    settings: Mapping[str, str] = MappingProxyType({})


TOOLS = TypeAdapter(tuple[ServerTool, ...])
SETTINGS = TypeAdapter(dict[str, str])


class ToolServerStore:
    def __init__(self, db: Database) -> None:
        self._db = db

    def list(self) -> list[ToolServer]:
        query = "SELECT id, name, address, tools, settings FROM tool_servers ORDER BY rowid"
        return [_server(*row) for row in self._db.execute_read(query)]

    def get(self, id: str) -> ToolServer:
        """Raises SettingError."""
        for server in self.list():
            if server.id == id:
                return server
        raise SettingError("There is no such tool server. It may be removed already.")

    def add(
        self,
        name: str,
        address: str,
        tools: Sequence[ServerTool],
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> ToolServer:
        """Raises SettingError for a name that is empty, too long or taken."""
        name = " ".join(well_formed(name).split())
        if not name or len(name) > LONGEST_NAME:
            raise SettingError(
                f"A tool server cannot be called {name[:LONGEST_NAME]!r}. Give it a name of 1 to "
                f"{LONGEST_NAME} characters."
            )
        if folded(name) in {folded(server.name) for server in self.list()}:
            raise SettingError(f"There is a tool server {name!r} already. Choose another name.")
        id, address = secrets.token_hex(8), well_formed(address)
        self._db.execute_write(
            "INSERT INTO tool_servers (id, name, address, tools, settings) VALUES (?, ?, ?, ?, ?)",
            [id, name, address, _tools_json(tools), to_json(dict(settings))],
        )
        return ToolServer(id, name, address, tuple(tools), settings)

    def set_tools(self, id: str, tools: Sequence[ServerTool]) -> None:
        query = "UPDATE tool_servers SET tools = ? WHERE id = ?"
        self._db.execute_write(query, [_tools_json(tools), id])

    def login(self, id: str) -> dict[str, Any]:
        """What a server granted at a login, by name; {} if nothing, or no such server."""
        rows = self._db.execute_read("SELECT login FROM tool_servers WHERE id = ?", [id])
        found = from_json(rows[0][0]) if rows else None
        return found if isinstance(found, dict) else {}

    def set_login(self, id: str, name: str, granted: dict[str, Any]) -> None:
        query = "UPDATE tool_servers SET login = ? WHERE id = ?"
        self._db.execute_write(query, [to_json({**self.login(id), name: granted}), id])

    def remove(self, id: str) -> None:
        self._db.execute_write("DELETE FROM tool_servers WHERE id = ?", [id])


def _server(
    id: object, name: object, address: object, tools: object, settings: object
) -> ToolServer:
    try:
        known = TOOLS.validate_python(tuple(from_json(tools) or ()))
    except (ValidationError, TypeError):
        known = ()
    try:
        given = SETTINGS.validate_python(from_json(settings))
    except ValidationError:
        given = {}
    return ToolServer(str(id), as_text(name), as_text(address), known, given)


def _tools_json(tools: Sequence[ServerTool]) -> str:
    return to_json([tool.model_dump() for tool in tools])
