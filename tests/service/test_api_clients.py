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
COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/responses"


def script(prompt: str) -> str:
    """A call as soon as there is something to run, and then what its last result says."""
    if "<tool_response>" in prompt:
        last = prompt.rpartition("<tool_response>")[2].partition("<")[0]
        return f"Found {last.partition(': ')[2]}."
    return f"I look.\n{CALL}" if '"run"' in prompt else "Nothing to run."


def text(content: str, kind: str = "text", **more: Any) -> dict[str, Any]:
    return {"type": kind, "text": content, **more}


def called(**more: Any) -> dict[str, Any]:
    """The assistant's message with a call, as it is sent back."""
    function = {"name": "run", "arguments": '{"command":"ls"}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return {"role": "assistant", "content": "I look.", "tool_calls": calls, **more}


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


CLIENTS = {
    "Codex": Client(
        [
            {
                "type": "message",
                "role": "developer",
                "content": [text("<permissions>", "input_text")],
            },
            {"type": "message", "role": "user", "content": [text("<environment>", "input_text")]},
            {"type": "message", "role": "user", "content": [text("List it.", "input_text")]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAA"},
            {"type": "web_search_call", "status": "completed", "action": {"type": "other"}},
            {
                "type": "message",
                "role": "assistant",
                "content": [text("I look.", "output_text")],
                "phase": "commentary",
            },
            {
                "type": "function_call",
                "name": "run",
                "arguments": '{"command":"ls"}',
                "call_id": "call_1",
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "one.txt"},
            {
                "type": "custom_tool_call",
                "status": "completed",
                "call_id": "call_2",
                "name": "apply_patch",
                "input": "*** Begin Patch\n*** End Patch",
            },
            {
                "type": "custom_tool_call_output",
                "call_id": "call_2",
                "output": [text("patched", "input_text")],
            },
            {
                "type": "local_shell_call",
                "call_id": "call_3",
                "status": "completed",
                "action": {"type": "exec", "command": ["ls"], "timeout_ms": None},
            },
            {
                "type": "function_call_output",
                "call_id": "call_3",
                "output": [text("2 files", "input_text")],
            },
        ],
        {
            "instructions": "You are a coding agent.",
            "tools": [
                FLAT,
                {"type": "local_shell"},
                {"type": "web_search", "external_web_access": False},
                {"type": "image_generation", "output_format": "png"},
                {"type": "namespace", "name": "mcp__x", "description": "", "tools": [FLAT]},
                {
                    "type": "custom",
                    "name": "apply_patch",
                    "description": "Edits files.",
                    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
                },
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
            {"role": "system", "content": "You help.", "copilot_cache_control": {"type": "x"}},
            {"role": "user", "content": [text("List it.", copilot_cache_control={"type": "x"})]},
            called(cot_id="c1", cot_summary="I think.", reasoning_opaque="x"),
            {"role": "tool", "tool_call_id": "call_1", "content": [text("2 files")]},
        ],
        {
            "temperature": 0.1,
            "top_p": 1,
            "n": 1,
            "tools": [TOOL],
            "tool_choice": "auto",
            "stream_options": {"include_usage": True},
            "intent": False,
            "snippy": {"enabled": False},
        },
        headers={"api-key": "any", "x-initiator": "agent"},
    ),
    "Cline": Client(
        [
            {"role": "system", "content": "You are a coding agent."},
            {"role": "user", "content": [text("<task>List it.</task>"), text("<details/>")]},
            called(content=None, reasoning_details=[{"type": "reasoning.text", "text": "x"}]),
            {"role": "tool", "tool_call_id": "call_1", "content": "2 files"},
            {"role": "user", "content": [text("<details/>")]},
        ],
        {
            "temperature": 0,
            "reasoning_effort": "none",
            "stream_options": {"include_usage": True},
            "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}],
            "tool_choice": "auto",
        },
        headers={"http-referer": "https://cline.bot", "x-title": "Cline"},
    ),
    "Roo": Client(
        [
            {"role": "system", "content": [text("You are a coding agent.", **CACHED)]},
            {"role": "user", "content": [text("<task>List it.</task>", **CACHED)]},
            called(),
            {"role": "tool", "tool_call_id": "call_1", "content": "2 files<details/>"},
        ],
        {
            "temperature": 0,
            "stream_options": {"include_usage": True},
            "reasoning_effort": "medium",
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "max_completion_tokens": 2048,
        },
    ),
    "Continue": Client(
        [
            {"role": "system", "content": "<important_rules>"},
            {"role": "user", "content": "List it."},
            called(content=" "),
            {"role": "tool", "tool_call_id": "call_1", "content": "2 files"},
        ],
        {
            "max_tokens": 2048,
            "temperature": 0.5,
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "stream_options": {"include_usage": True},
            "tools": [{"type": "function", "function": FUNCTION, "displayTitle": "Run"}],
            "parallel_tool_calls": False,
        },
        headers={"api-key": "any", "x-api-key": "any"},
    ),
    "Zed": Client(
        [
            {"role": "system", "content": "You are a coding agent."},
            {"role": "user", "content": [text("List "), text("it.")]},
            called(reasoning_content="I think."),
            {"role": "tool", "tool_call_id": "call_1", "content": [text("2 files")]},
        ],
        {
            "stream_options": {"include_usage": True},
            "temperature": 1.0,
            "max_completion_tokens": 2048,
            "parallel_tool_calls": True,
            "prompt_cache_key": "thread",
            "tools": [TOOL],
            "tool_choice": "auto",
        },
    ),
    "Zed, by responses": Client(
        [
            {"type": "message", "role": "system", "content": [text("You help.", "input_text")]},
            {"type": "message", "role": "user", "content": [text("List it.", "input_text")]},
            {
                "type": "message",
                "role": "assistant",
                "content": [text("I look.", "output_text", annotations=[])],
            },
            {"type": "function_call", "call_id": "c", "name": "run", "arguments": ""},
            {"type": "function_call_output", "call_id": "c", "output": "2 files"},
        ],
        {
            "temperature": 1.0,
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [{"type": "function", **FUNCTION}],
            "reasoning": {"effort": "medium", "summary": "auto"},
        },
        path=RESPONSES,
    ),
    "Open WebUI": Client(
        [
            {"role": "system", "content": "You help."},
            {"role": "user", "content": [text("List it.")]},
            called(),
            {"role": "tool", "tool_call_id": "call_1", "content": "2 files"},
        ],
        {
            "stream_options": {"include_usage": True},
            "tools": [{"type": "function", "function": {**FUNCTION, "type": "function"}}],
            "metadata": {"chat_id": "1"},
            "reasoning_effort": None,
            "stop": None,
        },
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
    expected = ["run", "apply_patch"] if name == "Codex" else ["run"]
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
    patch = json.dumps({"input": "*** Begin Patch\n*** End Patch"})
    assert f'{{"name": "apply_patch", "arguments": {patch}}}' in backend.prompts[-1]
    assert '{"name": "local_shell", "arguments": {"type": "exec", "' in backend.prompts[-1]
    assert "<tool_response>apply_patch: patched</tool_response>" in backend.prompts[-1]


def test_cline_without_tools_writes_its_calls_as_text(
    client: httpx.Client, backend: Scripted
) -> None:
    """Stop strings and XML of its own making stay text, whatever the model can call."""
    sent = Client(
        [
            {"role": "system", "content": "Write <read_file><path>P</path></read_file> to read P."},
            {"role": "user", "content": [text("<task>Read it.</task>"), text("<details/>")]},
            {"role": "assistant", "content": "<read_file>\n<path>a</path>\n</read_file>"},
            {"role": "user", "content": [text("[read_file for 'a'] Result:"), text("1 | x")]},
        ],
        {"temperature": 0, "max_tokens": 64, "stream_options": {"include_usage": True}},
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
