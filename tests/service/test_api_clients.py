"""Requests in the shapes in which well-known clients send them: parameters that only their makers'
servers know, calls and results that are sent back, and what is read of a stream."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.support.scripted import Scripted
from tests.support.served import served

CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
PARAMETERS: Any = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "What to run."},
        "timeout": {"type": "integer", "format": "uint32", "minimum": 0},
    },
    "required": ["command"],
    "additionalProperties": False,
}
FUNCTION = {"name": "run", "description": "Runs a command.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
FLAT = {"type": "function", **FUNCTION, "strict": False}
CACHED = {"cache_control": {"type": "ephemeral"}}
PATCH = "*** Begin Patch\n*** End Patch"
COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/responses"


def script(prompt: str) -> str:
    """A call as soon as there is something to run, and then what its last result says."""
    if "<tool_response>" in prompt:
        last = prompt.rpartition("<tool_response>")[2].partition("<")[0]
        return f"Found {last.partition(': ')[2]}."
    return f"I look.\n{CALL}" if '"run"' in prompt else "Nothing to run."


def text(content: str, kind: str = "text", **more: Any) -> dict[str, Any]:
    return {"type": kind, "text": content, **more}


def say(role: str, *content: Any, **more: Any) -> dict[str, Any]:
    """A message: its content is a text, or a list of parts."""
    whole = content[0] if len(content) == 1 and not isinstance(content[0], dict) else [*content]
    return {"role": role, "content": whole, **more}


def called(content: str | None = "I look.", **more: Any) -> dict[str, Any]:
    """The assistant's message with a call, as it is sent back."""
    function = {"name": "run", "arguments": '{"command":"ls"}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return say("assistant", content, tool_calls=calls, **more)


def returned(*content: Any) -> dict[str, Any]:
    return say("tool", *content, tool_call_id="call_1")


def item(type: str, **more: Any) -> dict[str, Any]:
    """An item of a request to /v1/responses; it belongs to a call if it has a `call` number."""
    call = {"call_id": f"call_{more.pop('call')}"} if "call" in more else {}
    return {"type": type, **call, **more}


def spoken(role: str, content: str, **more: Any) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return item("message", role=role, content=[text(content, kind)], **more)


@dataclass(frozen=True)
class Client:
    """A client with the messages of its second request. Its first one has the first `begin` of
    them."""

    history: list[dict[str, Any]]
    more: dict[str, Any]
    begin: int = 2
    path: str = COMPLETIONS
    headers: dict[str, str] = field(default_factory=dict)

    def send(self, client: httpx.Client, count: int | None = None) -> httpx.Response:
        name = "input" if self.path == RESPONSES else "messages"
        body = {"model": "scripted", "stream": True, name: self.history[:count], **self.more}
        return client.post(self.path, json=body, headers=self.headers)


LISTED = {"command": ["ls"], "timeout_ms": None}
USAGE = {"stream_options": {"include_usage": True}}
STRICT = {"type": "function", "function": {**FUNCTION, "strict": True}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
CLIENTS = {
    "Codex": Client(
        [
            spoken("developer", "<permissions>"),
            spoken("user", "<environment>"),
            spoken("user", "List it."),
            item("reasoning", summary=[], content=None, encrypted_content="gAAA"),
            item("web_search_call", status="completed", action={"type": "other"}),
            spoken("assistant", "I look.", phase="commentary"),
            item("function_call", call=1, name="run", arguments='{"command":"ls"}'),
            item("function_call_output", call=1, output="one.txt"),
            item("custom_tool_call", call=2, name="apply_patch", input=PATCH, status="completed"),
            item("custom_tool_call_output", call=2, output=[text("patched", "input_text")]),
            item("local_shell_call", call=3, status="completed", action={"type": "exec", **LISTED}),
            item("function_call_output", call=3, output=[text("2 files", "input_text")]),
        ],
        {
            "instructions": "You are a coding agent.",
            "tools": [
                FLAT,
                {"type": "local_shell"},
                {"type": "web_search", "external_web_access": False},
                {"type": "image_generation", "output_format": "png"},
                {"type": "namespace", "name": "mcp__x", "description": "", "tools": [FLAT]},
                {"type": "custom", "name": "apply_patch", "description": "", "format": GRAMMAR},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "xhigh", "summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0199",
            "text": {"verbosity": "low"},
            "service_tier": "priority",
            "client_metadata": {"x-codex-installation-id": "1"},
        },
        begin=3,
        path=RESPONSES,
        headers={"originator": "codex_cli_rs", "session_id": "0199", "version": "0.147.0"},
    ),
    "VS Code": Client(
        [
            say("system", "You help.", copilot_cache_control={"type": "x"}),
            say("user", text("List it.", copilot_cache_control={"type": "x"})),
            called(cot_id="c1", cot_summary="I think.", reasoning_opaque="x"),
            returned(text("2 files")),
        ],
        {"temperature": 0.1, "top_p": 1, "n": 1, "tools": [TOOL], "tool_choice": "auto"}
        | {"intent": False, "snippy": {"enabled": False}, **USAGE},
        headers={"api-key": "any", "x-initiator": "agent"},
    ),
    "Cline": Client(
        [
            say("system", "You are a coding agent."),
            say("user", text("<task>List it.</task>"), text("<details/>")),
            called(None, reasoning_details=[{"type": "reasoning.text", "text": "x"}]),
            returned("2 files"),
            say("user", text("<details/>")),
        ],
        {"temperature": 0, "reasoning_effort": "none", "tools": [STRICT], "tool_choice": "auto"}
        | USAGE,
        headers={"http-referer": "https://cline.bot", "x-title": "Cline"},
    ),
    "Roo": Client(
        [
            say("system", text("You are a coding agent.", **CACHED)),
            say("user", text("<task>List it.</task>", **CACHED)),
            called(),
            returned("2 files<details/>"),
        ],
        {"temperature": 0, "reasoning_effort": "medium", "tools": [TOOL], "tool_choice": "auto"}
        | {"parallel_tool_calls": False, "max_completion_tokens": 2048, **USAGE},
    ),
    "Continue": Client(
        [
            say("system", "<important_rules>"),
            say("user", "List it."),
            called(" "),
            returned("2 files"),
        ],
        {"max_tokens": 2048, "temperature": 0.5, "presence_penalty": 0, "frequency_penalty": 0.0}
        | {"tools": [{**TOOL, "displayTitle": "Run"}], "parallel_tool_calls": False, **USAGE},
        headers={"api-key": "any", "x-api-key": "any"},
    ),
    "Zed": Client(
        [
            say("system", "You are a coding agent."),
            say("user", text("List "), text("it.")),
            called(reasoning_content="I think."),
            returned(text("2 files")),
        ],
        {"temperature": 1.0, "max_completion_tokens": 2048, "parallel_tool_calls": True}
        | {"prompt_cache_key": "thread", "tools": [TOOL], "tool_choice": "auto", **USAGE},
    ),
    "Zed, by responses": Client(
        [
            spoken("system", "You help."),
            spoken("user", "List it."),
            spoken("assistant", "I look."),
            item("function_call", call=1, name="run", arguments=""),
            item("function_call_output", call=1, output="2 files"),
        ],
        {"temperature": 1.0, "parallel_tool_calls": False, "tool_choice": "auto"}
        | {"tools": [FLAT], "reasoning": {"effort": "medium", "summary": "auto"}},
        path=RESPONSES,
    ),
    "Open WebUI": Client(
        [say("system", "You help."), say("user", text("List it.")), called(), returned("2 files")],
        {"tools": [{"type": "function", "function": {**FUNCTION, "type": "function"}}]}
        | {"metadata": {"chat_id": "1"}, "reasoning_effort": None, "stop": None, **USAGE},
        headers={"x-openwebui-user-name": "ann"},
    ),
}


def events(found: httpx.Response) -> list[dict[str, Any]]:
    assert found.status_code == 200, found.text
    lines = [line for line in found.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def of_completions(parts: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """What a client of chat completions reads; all but one insist on the usage at the end."""
    assert all(isinstance(part["created"], int) and part["model"] == "scripted" for part in parts)
    *chunks, last = parts
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    yield "text", "".join(delta.get("content") or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    finish = chunks[-1]["choices"][0]["finish_reason"]
    assert finish == ("tool_calls" if calls else "stop")
    if calls:
        assert calls[0]["id"] and {call["index"] for call in calls} == {0}
        arguments = "".join(call["function"].get("arguments", "") for call in calls)
        yield calls[0]["function"]["name"], json.loads(arguments)


def of_responses(parts: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """What a client of responses reads: the items that are done, and the end with its usage."""
    assert parts[0]["type"] == "response.created" and parts[-1]["type"] == "response.completed"
    assert parts[-1]["response"]["usage"]["output_tokens"] > 0
    for item in (part["item"] for part in parts if part["type"] == "response.output_item.done"):
        if item["type"] == "function_call":
            assert item["call_id"]
            yield item["name"], json.loads(item["arguments"])
        else:
            yield "text", item["content"][0]["text"]


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_calls_a_tool_and_reads_on(
    client: httpx.Client, backend: Scripted, name: str
) -> None:
    sent = CLIENTS[name]
    read = of_responses if sent.path == RESPONSES else of_completions
    first = dict(read(events(sent.send(client, sent.begin))))
    assert first == {"text": "I look.", "run": {"command": "ls"}}
    shown = json.loads(backend.prompts[-1].partition("<|system|>")[2].partition("<|end|>")[0])
    names = [tool["function"]["name"] for tool in shown]
    expected = ["run", "mcp__x__run", "apply_patch"] if name == "Codex" else ["run"]
    assert names == expected, "other kinds are left out"
    assert shown[0]["function"]["parameters"] == PARAMETERS
    assert dict(read(events(sent.send(client)))) == {"text": "Found 2 files."}
    assert '<tool_call>\n{"name": "run", "arguments": {' in backend.prompts[-1]
    assert "I think." not in backend.prompts[-1], "thinking is not read again"


def test_what_codex_called_without_a_schema_is_read_again(
    client: httpx.Client, backend: Scripted
) -> None:
    events(CLIENTS["Codex"].send(client))
    assert "<|system|>You are a coding agent.\n\n<permissions>" in backend.prompts[-1]
    patch = json.dumps({"input": PATCH})
    assert f'{{"name": "apply_patch", "arguments": {patch}}}' in backend.prompts[-1]
    assert '{"name": "local_shell", "arguments": {"type": "exec", "' in backend.prompts[-1]
    assert "<tool_response>apply_patch: patched</tool_response>" in backend.prompts[-1]


def test_cline_without_tools_writes_its_calls_as_text(
    client: httpx.Client, backend: Scripted
) -> None:
    """Stop strings and XML of its own making stay text, whatever the model can call."""
    sent = Client(
        [
            say("system", "Write <read_file><path>P</path></read_file> to read P."),
            say("user", text("<task>Read it.</task>"), text("<details/>")),
            say("assistant", "<read_file>\n<path>a</path>\n</read_file>"),
            say("user", text("[read_file for 'a'] Result:"), text("1 | x")),
        ],
        {"temperature": 0, "max_tokens": 64, **USAGE},
    )
    assert dict(of_completions(events(sent.send(client)))) == {"text": "Nothing to run."}
    prompt = backend.prompts[-1]
    assert "<|assistant|><read_file>\n<path>a</path>\n</read_file><|end|><|user|>[read" in prompt


def test_continue_completes_code_by_text() -> None:
    """In the editor: the prompt has the marks of a model, and there are a dozen stop strings."""
    marks = "endoftext fim_prefix fim_middle fim_suffix fim_pad repo_name file_sep im_start im_end"
    stops = [*(f"<|{mark}|>" for mark in marks.split()), "/src/", "#- coding: utf-8", "```"]
    body = {
        "model": "toy",
        "prompt": "<|fim_prefix|>def f():\n    <|fim_suffix|>\n<|fim_middle|>",
        "max_tokens": 16,
        "temperature": 0.01,
        "presence_penalty": 0,
        "stream": True,
        "stop": stops,
    }
    with served() as made, made.client() as client:
        choices = [part["choices"][0] for part in events(client.post("/v1/completions", json=body))]
    assert "".join(choice["text"] for choice in choices)
    assert choices[-1]["finish_reason"] in ("stop", "length")
