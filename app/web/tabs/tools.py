"""The tools in the Settings tab: servers of tools, and the tools that the model may call."""

from collections.abc import Iterator

import gradio as gr
from gradio.blocks import Block

from app.service.session import Session
from app.web.kit import (
    ACT,
    REFRESH,
    Confirmation,
    Tab,
    Updates,
    explained,
    hide,
    html,
    show,
    small_button,
)
from app.web.markup import finding, fine_print
from engine.errors import SettingError
from storage.tool_servers import LONGEST_NAME, ToolServer

STARTS = (
    "The server starts, which may take a minute the first time. If it asks for a login, its page "
    "opens in the browser of this machine."
)
FAILED = "This did not work"
SETTINGS = "API_KEY=${MY_KEY} for a command, Authorization: Bearer ${MY_KEY} for a URL"
SUMMARY = 120
"""The most characters of a tool's description that are shown."""


def described(server: ToolServer, name: str, description: str) -> str:
    line = " ".join(description.split())
    short = line if len(line) <= SUMMARY else f"{line[:SUMMARY]}…"
    return f"{server.name}: {name}" + (f" ({short})" if short else "")


class Tools(Tab):
    def __init__(self, session: Session, memory: gr.BrowserState, tab: gr.Tab) -> None:
        super().__init__(session, memory)
        self.tab, self.servers = tab, session.tool_servers
        with gr.Row(elem_classes="cards", elem_id="tools"):
            with gr.Column(elem_classes="card"):
                gr.HTML(
                    "<h3>Tools</h3><p>The model can call the tools of programs of your choice, "
                    "over the Model Context Protocol (MCP). Such a program may do on this machine "
                    "whatever you may do. You are asked before each call.</p>"
                )
                self.problem = html(elem_id="tools-problem")
                self.name = gr.Textbox(
                    label="Name of a server", max_length=LONGEST_NAME, elem_id="tools-name"
                )
                self.address = gr.Textbox(
                    label="Its command, its URL, or JSON from its documentation",
                    placeholder="uvx mcp-server-time, or http://127.0.0.1:8000/mcp",
                    elem_id="tools-address",
                )
                self.settings = gr.Textbox(
                    label="Its environment variables or headers, one per line",
                    lines=2,
                    max_lines=6,
                    placeholder=SETTINGS,
                    elem_id="tools-settings",
                )
                with gr.Row(elem_classes="presets"):
                    self.add_button = small_button(
                        "Add the server", min_width=80, elem_id="tools-add"
                    )
                self.status = html(elem_id="tools-status")
            with gr.Column(elem_classes="card", visible=False) as self.known:
                gr.HTML(
                    "<h3>What the model may call</h3><p>A tool is off until you switch it on, and "
                    "goes off again when its server describes it in other words.</p>"
                )
                self.chosen = gr.CheckboxGroup(
                    [], label="Tools", show_label=False, elem_id="tools-chosen"
                )
                self.which = gr.Dropdown([], label="Server", value=None, elem_id="tools-which")
                with gr.Row(elem_classes="presets"):
                    self.again_button = small_button("List its tools again", min_width=80)
                    remove = small_button("Remove the server", min_width=80, elem_id="tools-remove")
                self.confirmation = Confirmation.build(remove, "Remove it", "Keep it")

    def wire(self) -> None:
        outputs: list[Block] = [self.problem, self.name, self.address, self.settings, self.status]
        outputs += [self.chosen, self.which, self.confirmation.shown, self.known]
        self.on(self.tab.select, self.refresh, (), outputs, guard=REFRESH)
        adding = [self.add_button.click, self.address.submit]
        typed = [self.name, self.address, self.settings]
        self.on(adding, self.add, typed, outputs, guard=ACT)
        chosen = self.chosen
        self.on(chosen.input, self.switch, chosen, outputs, mode="always_last", guard=ACT)
        self.on(self.again_button.click, self.list_again, self.which, outputs, guard=ACT)
        self.confirm(self.confirmation, self.remove, self.which, outputs, ask=self.ask, guard=ACT)

    def refresh(self) -> Updates:
        servers = self.servers.store.list()
        known = [(each, tool) for each in servers for tool in each.tools]
        problem = self.servers.problem
        return {
            self.problem: finding("", "Not possible", problem) if problem else "",
            self.chosen: gr.update(
                choices=[
                    (described(server, tool.name, tool.description), f"{server.id} {tool.name}")
                    for server, tool in known
                ],
                value=[f"{server.id} {tool.name}" for server, tool in known if tool.on],
            ),
            self.which: gr.update(
                choices=[(f"{each.name} · {each.address}", each.id) for each in servers],
                value=servers[0].id if servers else None,
            ),
            self.confirmation.shown: hide(),
            self.known: gr.update(visible=bool(servers)),
        }

    def add(self, name: str, address: str, settings: str) -> Iterator[Updates]:
        yield {self.status: fine_print(STARTS)}
        try:
            added = self.servers.add(name, address, settings)
        except Exception as error:
            yield {**self.refresh(), self.status: finding("differs", FAILED, explained(error))}
            return
        yield {**self.listed(*added), self.name: "", self.address: "", self.settings: ""}

    def list_again(self, which: str | None) -> Iterator[Updates]:
        yield {self.status: fine_print(STARTS)}
        try:
            yield self.listed(self.servers.list_tools(which or ""))
        except Exception as error:
            yield {self.status: finding("differs", FAILED, explained(error))}

    def listed(self, *servers: ToolServer) -> Updates:
        counts = [(server.name, len(server.tools)) for server in servers]
        texts = [f"{name} has {count} tool{'s' if count != 1 else ''}." for name, count in counts]
        return {**self.refresh(), self.status: fine_print(" ".join(texts))}

    def switch(self, chosen: list[str]) -> Updates:
        """Switch tools on or off. If that is refused, the page shows those that are on."""
        pairs = [each.partition(" ") for each in chosen]
        try:
            self.servers.switch([(id, name) for id, _, name in pairs])
        except SettingError as error:
            return {**self.refresh(), self.status: finding("differs", FAILED, str(error))}
        return {self.status: ""}

    def ask(self, which: str | None) -> Updates:
        return {self.confirmation.shown: show() if which else hide()}

    def remove(self, which: str | None) -> Updates:
        self.servers.remove(which or "")
        return {**self.refresh(), self.status: ""}
