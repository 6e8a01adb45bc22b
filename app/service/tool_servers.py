"""Servers of tools (Model Context Protocol): programs of the owner's choosing, or addresses, whose
tools the model may call. Guests have none.
"""

import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from app.service.current import Current
from app.service.jobs import Stop
from app.service.tool_connections import Connections
from app.service.tool_settings import Given, given
from engine.errors import SettingError
from engine.types import Tool, ToolCall
from storage.database import Database
from storage.tool_servers import ToolServer, ToolServerStore

MOST_BYTES = 100_000
"""The longest result. A result may also have no more bytes than the context has tokens: that is
about a quarter of the context, for text of four bytes per token."""
SHOWN = 3
"""How many people are named."""
REQUIREMENT = "mcp>=2.3,<3"
INSTALL = shlex.join([sys.executable, "-m", "pip", "install", REQUIREMENT])


def installed() -> bool:
    return find_spec("mcp") is not None


class ToolServers:
    """The tool servers of this machine. With `guests` there are none, and they are out of use while
    `others`, people with accounts on this machine, can open the page. It is asked when there are
    tools, because some systems take long to list accounts."""

    def __init__(self, database: Database, current: Current, guests: bool) -> None:
        self.store, self.current, self.guests = ToolServerStore(database), current, guests
        self.connections = Connections(self.store)
        self.others: Callable[[], Sequence[str]] = tuple

    @property
    def problem(self) -> str:
        """Why the model cannot call tools now; "" if it can."""
        if not installed():
            return f"Tools need the Python package mcp. To install it: {INSTALL}"
        if others := ", ".join(self.others()[:SHOWN]):
            return (
                f"Other people can log in to this machine ({others}). They "
                "could open this page, and use your tools with your rights. To use tools, start "
                "Strata with a password: --auth NAME:PASSWORD"
            )
        if self.current.state.is_loaded and self.current.info.calls is None:
            return (
                f"{self.current.info.name} cannot call tools: its chat template has no place for "
                "them, or Strata does not know the form of its calls. Load another model."
            )
        return ""

    def offered(self) -> tuple[Tool, ...]:
        """The tools that the loaded model may call."""
        if self.guests or self.current.info.calls is None:
            return ()
        found = tuple(tool.tool for each in self.store.list() for tool in each.tools if tool.on)
        return found if found and installed() and not self.others() else ()

    def server_of(self, name: str) -> ToolServer | None:
        """The server of the tool that is offered under this name."""
        found = (s for s in self.store.list() if any(t.on and t.name == name for t in s.tools))
        return next(found, None)

    def add(self, name: str, address: str, settings: str = "") -> list[ToolServer]:
        """Start a server, or several ones that are described in JSON, and store each of them with
        the tools that it lists, all of them off. Raises SettingError and ToolError; the servers
        before the one that fails are stored then."""
        if self.guests or self.others() or not installed():
            raise SettingError(self.problem or "Guests add no tool servers.")
        return [self.add_one(each) for each in given(name, address, settings)]

    def add_one(self, server: Given) -> ToolServer:
        added = self.store.add(server.name, server.address, (), server.settings)
        try:
            return self.list_tools(added.id)
        except BaseException:
            self.remove(added.id)
            raise

    def list_tools(self, id: str) -> ToolServer:
        """Ask a server for its tools again. Those that it describes as before stay on. Raises
        SettingError and ToolError."""
        server = self.store.get(id)
        on = {tool.tool for tool in server.tools if tool.on}
        listed = self.connections.list_tools(server)
        tools = [each.model_copy(update={"on": each.tool in on}) for each in listed]
        self.store.set_tools(id, tools)
        return server._replace(tools=tuple(tools))

    def remove(self, id: str) -> None:
        self.store.remove(id)
        self.connections.close(id)

    def switch(self, chosen: Sequence[tuple[str, str]]) -> None:
        """Switch on these tools, each named by its server's id and its own name, and all others
        off. Raises SettingError if two of them have the same name."""
        names = [name for _, name in chosen]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise SettingError(
                f"Two servers have a tool {twice!r}, and the model names a tool only. Switch on "
                "one of them."
            )
        for server in self.store.list():
            tools = [
                each.model_copy(update={"on": (server.id, each.name) in chosen})
                for each in server.tools
            ]
            if tools != [*server.tools]:
                self.store.set_tools(server.id, tools)

    def call(self, server: ToolServer, call: ToolCall, stop: Stop) -> str:
        """Run a call. Returns its result as text, cut to the limit. Raises ToolError if the server
        fails, and Cancelled."""
        most = min(MOST_BYTES, self.current.info.context_length)
        return cut(self.connections.call(server, call, stop), most)


def cut(text: str, most: int) -> str:
    content = text.encode("utf-8", "replace")
    if len(content) <= most:
        return text
    kept = content[:most].decode("utf-8", "ignore")
    return f"{kept}\n[The result has {len(content):,} bytes. The rest was cut after {most:,}.]"
