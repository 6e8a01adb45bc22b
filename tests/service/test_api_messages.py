"""Anthropic's messages, with its own client."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import pydantic
import pytest

from app.api.messages import Messages
from tests.support.scripted import Scripted
from tests.support.served import Served, served

QUESTION: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Looks it up.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = "<think>\nI need the weather.\n</think>\n\n"


def script(prompt: str) -> str:
    if "<tool_response>" in prompt:
        return f"{THOUGHT}It is {prompt.rpartition('get_weather: ')[2].partition('<')[0]}."
    return f"{THOUGHT}I look it up.\n{CALL}" if "get_weather" in prompt else "Ask a STOP b END c"


class City(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]
    capital: bool


@pytest.fixture
def program(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.address, api_key="any", max_retries=0) as made:
        yield made


def given(**more: Any) -> dict[str, Any]:
    return {"model": "scripted", "max_tokens": 500, "messages": QUESTION} | more


def test_a_tool_is_called_and_its_result_read(
    program: anthropic.Anthropic, backend: Scripted
) -> None:
    found = program.messages.create(**given(tools=[WEATHER], system="Be kind."))
    assert found.stop_reason == "tool_use" and found.role == "assistant"
    thinking, text, call = found.content
    assert (thinking.type, text.type, call.type) == ("thinking", "text", "tool_use")
    assert thinking.thinking == "I need the weather." and text.text == "I look it up."
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    assert "<|system|>Be kind.<|end|>" in backend.prompts[-1]
    answered = [block.to_dict() for block in found.content]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "5"}]},
        {"type": "text", "text": "And then?"},
    ]
    messages = [
        *QUESTION,
        {"role": "assistant", "content": answered},
        {"role": "user", "content": results},
    ]
    last = program.messages.create(**given(tools=[WEATHER], messages=messages))
    assert [block.type for block in last.content] == ["thinking", "text"]
    assert last.content[1].text == "It is 5." and last.stop_reason == "end_turn"
    asked = backend.prompts[-1]
    assert f"I look it up.\n{CALL}<|end|>" in asked and "I need the weather." not in asked
    assert "get_weather: 5</tool_response><|end|><|user|>And then?" in asked
    usage = last.usage
    assert usage.cache_read_input_tokens and usage.input_tokens and usage.output_tokens
    assert last.model_extra is not None and last.model_extra["strata"]["forwards"] > 0


def test_a_stream_is_what_the_whole_answer_is(program: anthropic.Anthropic) -> None:
    whole = program.messages.create(**given(tools=[WEATHER]))
    kinds = []
    with program.messages.stream(**given(tools=[WEATHER])) as stream:
        for event in stream:
            kinds.append(event.type)
        found = stream.get_final_message()
    for left, right in zip(found.content, whole.content, strict=True):
        skipped = {"id", "parsed_output"}
        assert left.model_dump(exclude=skipped) == right.model_dump(exclude=skipped)
    assert found.stop_reason == "tool_use" and found.usage.output_tokens > 50
    assert found.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert "thinking" in kinds and "text" in kinds and "input_json" in kinds


def test_events_have_their_names_and_their_order(client: httpx.Client) -> None:
    lines = client.post("/v1/messages", json=given(tools=[WEATHER], stream=True)).text
    assert "[DONE]" not in lines
    opened: list[int] = []
    last: dict[str, Any] = {}
    for event in lines.strip().split("\n\n"):
        name, _, data = event.partition("\n")
        last = json.loads(data.removeprefix("data: "))
        assert name == f"event: {last['type']}"
        if last["type"] == "content_block_start":
            opened.append(last["index"])
        if last["type"] == "content_block_delta":
            assert last["index"] == opened[-1]
    assert opened == [0, 1, 2] and last == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("more", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, "Ask a STOP b END c"),
        ({"max_tokens": 3}, "max_tokens", None, "Ask"),
        ({"stop_sequences": ["STOP"]}, "stop_sequence", "STOP", "Ask a "),
        ({"stop_sequences": ["STOP", "x"]}, "stop_sequence", None, "Ask a "),
        ({"tools": [WEATHER], "tool_choice": {"type": "none"}}, "end_turn", None, "Ask a"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "Ask"}]}, "end_turn", None, ""),
    ],
)
def test_the_reason_of_an_end_is_named(
    program: anthropic.Anthropic, more: Any, reason: str, sequence: str | None, text: str
) -> None:
    found = program.messages.create(**given(**more))
    assert (found.stop_reason, found.stop_sequence) == (reason, sequence)
    assert "".join(block.text for block in found.content if block.type == "text").startswith(text)


def test_tokens_are_counted_without_an_answer(program: anthropic.Anthropic) -> None:
    for more in ({}, {"tools": [WEATHER], "system": [{"type": "text", "text": "Be kind."}]}):
        counted = program.messages.count_tokens(model="scripted", messages=QUESTION, **more)
        usage = program.messages.create(**given(**more)).usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_one_call_is_enough_where_no_more_are_wanted() -> None:
    with (
        served(Scripted(lambda prompt: f"{CALL}\n{CALL}")) as made,
        anthropic.Anthropic(base_url=made.address, api_key="any") as program,
    ):
        for choice, count in (({}, 2), ({"disable_parallel_tool_use": True}, 1)):
            choice = {"type": "auto", **choice}
            found = program.messages.create(**given(tools=[WEATHER], tool_choice=choice))
            assert [block.type for block in found.content] == ["tool_use"] * count


def test_the_key_may_come_in_a_header_of_its_own() -> None:
    """Newer clients send it as OpenAI's do."""
    with served(Scripted(script), "--host", "0.0.0.0") as made:
        _, secret = made.session.programs.keys.make("claude")
        with anthropic.Anthropic(base_url=made.address, api_key=secret, max_retries=0) as program:
            assert program.messages.create(**given()).content
        with made.client(**{"x-api-key": secret}) as older:
            assert older.post("/v1/messages", json=given()).status_code == 200
        with made.client(**{"x-api-key": "sk-strata-x"}) as older:
            assert older.post("/v1/messages", json=given()).status_code == 401
        wrong = anthropic.Anthropic(base_url=made.address, api_key="sk-strata-x", max_retries=0)
        with wrong, pytest.raises(anthropic.AuthenticationError) as raised:
            wrong.messages.create(**given())
        body: Any = raised.value.body
        assert body["type"] == "error" and body["error"]["type"] == "authentication_error"
        assert "x-api-key" in body["error"]["message"]


def test_requests_of_claude_code_are_answered(client: httpx.Client, backend: Scripted) -> None:
    """With its parameters for caching, thinking and its maker's servers, which change nothing."""
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "scripted",
        "max_tokens": 32000,
        "stream": True,
        "temperature": 1,
        "system": [
            {"type": "text", "text": "You are a tool for code.", **cached},
            {"type": "text", "text": "The folder is /tmp.", **cached},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>Today.</system-reminder>"},
                    {"type": "text", "text": "And Paris?", **cached},
                ],
            },
        ],
        "tools": [{**WEATHER, **cached}, {"type": "web_search_20250305", "name": "web_search"}],
        "thinking": {"type": "enabled", "budget_tokens": 10000},
        "metadata": {"user_id": "u"},
        "context_management": {"edits": []},
        "output_config": {"effort": "high"},
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    found = client.post("/v1/messages?beta=true", json=body, headers=headers)
    assert found.status_code == 200 and '"stop_reason": "tool_use"' in found.text
    assert "You are a tool for code.\nThe folder is /tmp." in backend.prompts[-1]
    assert "web_search" not in backend.prompts[-1]


def test_an_answer_has_the_schema_that_it_was_to_have(program: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "Nothing."}]
    found = program.messages.parse(**given(messages=messages), output_format=City)
    assert found.parsed_output is not None and found.parsed_output.name in ("Paris", "Rome")
    assert found.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, None),
        ({"output_config": {"effort": "low"}}, "low"),
        ({"output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}}, "high"),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "adaptive"}}, True),
    ],
)
def test_how_much_is_thought(more: dict[str, Any], wanted: object) -> None:
    assert Messages.model_validate(given(**more)).options.thinking == wanted


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_can_be_enforced(program: anthropic.Anthropic, choice: Any) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}}
    tools = [WEATHER | {"input_schema": city | {"required": ["city"]}}]
    messages = [{"role": "user", "content": "Nothing."}]
    found = program.messages.create(
        **given(tools=tools, tool_choice=choice, messages=messages),
        extra_body={"temperature": 0},
    )
    assert found.stop_reason == "tool_use" and [each.type for each in found.content] == ["tool_use"]
    call: Any = found.content[0]
    assert call.name == "get_weather" and call.input["city"] in ("Paris", "Rome")
