"""What each parameter of a request may be, what it becomes, and how it is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest

from app.api.messages import Messages
from app.api.requests import NEUTRAL, Body, Chat, Completion, Continuation, completion, parsed
from app.api.responses import Responses
from app.http.problems import ApiError
from engine.backends.base import BackendInfo
from engine.methods import PLAIN, USUAL
from engine.settings import ThinkingChoice
from engine.types import Message
from tests.support.odd import NESTED, ODD
from tests.support.scripted import CALLS
from tests.support.toy import ToyBackend

HELLO = [{"role": "user", "content": "hello"}]
BASE: dict[str, dict[str, Any]] = {
    "chat": {"messages": HELLO},
    "text": {"prompt": "hello"},
    "messages": {"messages": HELLO},
    "responses": {"input": HELLO},
}
MODELS: dict[str, type[Body]] = {
    "chat": Chat,
    "text": Continuation,
    "messages": Messages,
    "responses": Responses,
}
INFO = replace(ToyBackend().info, can_think=True, calls=CALLS)


def read(kind: str = "chat", **more: Any) -> Completion:
    return completion(MODELS[kind], {**BASE[kind], **more}, INFO)


def refused(kind: str = "chat", **more: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        read(kind, **more)
    return raised.value


NUMBERS: list[tuple[str, list[Any], list[Any]]] = [
    ("n", [None, 1, 16, 2.0], [0, 17, 1.5, True, "2", [], {}, float("inf"), 10**400]),
    ("max_tokens", [None, 1, 10**9, 2**53, 7.0, -1, -1.0], [0, -2, 2**53 + 1, "9", True, 10**400]),
    ("temperature", [None, 0, 1, 0.5, 2], [2.1, -1, True, "1", [], float("inf"), 10**400]),
    ("top_p", [None, 0, 1, 0.5], [1.1, False, "1"]),
    ("top_k", [None, -1, 0, 5, 5.0, 1000], [-2, 1001, 1.5, True, "5"]),
    ("seed", [None, -1, -1.0, 0, 2**63 - 1, 3.0], [-2, 2**63, 1.5, "1", True]),
    ("stream", [None, True, False], [0, 1, "true", "yes", []]),
    ("logprobs", [None, True, False], [0, 1, "true"]),
    ("top_logprobs", [None, 0, 0.0], [3, -1, 21, "1", True]),
    ("model", [None, "", "toy"], ["Toy", "toy\x00", "\ud800", 1, [], True]),
    ("stop", [None, "", "x", [], ["x"] * 16, "x" * 1000], [["x"] * 17, "x" * 1001, [None], 1, {}]),
    ("reasoning_format", [None, "auto", "deepseek", "none"], ["xml", "", 1, [], True]),
    ("reasoning_effort", [None, "none", "low", "medium", "high", "max"], ["", "x", 1, [], True]),
]


@pytest.mark.parametrize(("name", "good", "bad"), NUMBERS, ids=lambda value: str(value)[:20])
def test_values_are_taken_as_they_are_and_never_coerced(
    name: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        assert read(**{name: value}).requests
    for value in [*bad, NESTED, {"a": NESTED}]:
        error = refused(**{name: value})
        assert error.param == name and len(error.message) < 400
        assert error.status == (404 if name == "model" and isinstance(value, str) else 400)


@pytest.mark.parametrize("kind", MODELS)
def test_any_value_of_any_parameter_is_taken_or_refused_by_its_name(kind: str) -> None:
    for name in MODELS[kind].model_fields:
        for value in ODD:
            try:
                assert read(kind, **{name: value}).requests
            except ApiError as error:
                assert (error.param or "").startswith(name), (name, str(value)[:40])
                assert error.status in (400, 404) and len(error.message) < 400


WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
TOOL: Any = {"type": "function", "function": {"name": "get_weather"}}
SPOILED: Any = {"function": {"name": "a", "parameters": {"properties": {"a": {"type": "txt"}}}}}
IMAGE, BROKEN, XML = {"type": "input_image", "image_url": "x"}, {"type": 1}, {"type": "xml"}
RESULT = {"role": "tool", "content": "x"}
SCHEMA = {"type": "json_schema"}
FORMAT = {"format": {"type": "json_schema", "schema": {"type": "object"}}}


def function(**more: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": more}]}


def said_calls(arguments: str) -> list[Any]:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    return [*HELLO, {"role": "assistant", "tool_calls": [call]}]


def said(*content: dict[str, Any], role: str = "user") -> list[Any]:
    return [{"role": role, "content": [*content]}]


REFUSED: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "chat": [
        ({"n": 17}, "n", "n cannot be 17. Give a whole number from 1 to 16."),
        ({"temperature": "hot"}, "temperature", "cannot be 'hot'. Give a number from 0 to 2."),
        ({"stream": "yes"}, "stream", "stream cannot be 'yes'. Give true or false."),
        ({"stream_options": 1}, "stream_options", "cannot be 1. Give an object."),
        (
            {"stream_options": {"include_usage": 1}},
            "stream_options",
            "include_usage cannot be 1. Give true or false.",
        ),
        ({"stop": 5}, "stop", "stop cannot be 5. Give a string, or at most 16 of them"),
        ({"reasoning_format": "xml"}, "reasoning_format", "Give 'auto', 'deepseek' or 'none'."),
        (
            {"reasoning_effort": "much"},
            "reasoning_effort",
            "cannot be 'much'. Give 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'.",
        ),
        ({"speculative": 5}, "speculative", "cannot be 5. Give false, the name of a method"),
        ({"speculative": {"a": 1}}, "speculative", "speculative.a is not known. Leave it out."),
        ({"speculative": {"nodes": 999}}, "speculative", "Max drafted tokens cannot be 999."),
        ({"messages": None}, "messages", "is missing. Give a list of 1 to 4,096 messages."),
        ({"messages": []}, "messages", "cannot be []. Give a list of 1 to 4,096 messages."),
        (
            {"messages": [{"role": "foo"}]},
            "messages[0].role",
            "Give 'system', 'developer', 'user', 'assistant' or 'tool'.",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": 5}]},
            "messages[0].tool_calls",
            "Give a list of calls.",
        ),
        ({"messages": [*HELLO, RESULT]}, "messages[1]", "tool_call_id"),
        ({"messages": [*HELLO, RESULT | {"tool_call_id": "y"}]}, "messages", "has the id 'y'"),
        (
            {"messages": said_calls("[]")},
            "messages[1].tool_calls",
            "Give a JSON object as text",
        ),
        ({"messages": said_calls("")}, "messages", "has to be the user's or a tool's"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs", "cannot be 3. Give an object"),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs needs logprobs to be true."),
        ({"tools": [TOOL], "logprobs": True}, "logprobs", "cannot be combined with tools"),
        ({"tools": {}}, "tools", "Give a list"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        (function(name="a b"), "tools[0].function", "a name of letters"),
        (function(name="a", parameters=[1]), "tools[0].function", "Give a JSON object."),
        ({"tool_choice": "must"}, "tool_choice", "Use 'auto', 'none', 'required'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "or a tool's name"),
        ({"tool_choice": "required"}, "tool_choice", "so it needs tools"),
        ({"functions": [{"name": "f"}]}, "functions", "Use tools."),
        ({"seed": -2}, "seed", "from 0 to 9,223,372,036,854,775,807, or -1."),
        ({"top_k": 1001}, "top_k", "from 0 to 1,000, or -1."),
        (
            {"tools": [TOOL], "tool_choice": TOOL | {"function": {"name": "other"}}},
            "tool_choice",
            "demands 'other', which is none of the tools",
        ),
        (
            {"tool_choice": "required", "tools": [TOOL | SPOILED]},
            "tools",
            "The schema of a tool cannot be used",
        ),
        ({"tools": [TOOL], "guided_regex": "a"}, "tools", "cannot be combined"),
        ({"prediction": "text"}, "prediction", "prediction cannot be"),
        ({"prediction": {"content": "text"}}, "prediction", "prediction.type is missing"),
        ({"prediction": {"type": "content"}}, "prediction", "prediction.content is missing"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction", "content cannot be 5"),
        ({"guided_json": {"type": "objct"}}, "guided_json", "objct"),
        ({"json_schema": {"properties": {"a": {"not": {}}}}}, "json_schema", "not"),
        ({"guided_regex": "[a-"}, "guided_regex", "unclosed character class"),
        ({"grammar": "root :="}, "grammar", "Expected ::="),
        ({"guided_json": "{"}, "guided_json", "column 1"),
        ({"guided_json": 5}, "guided_json", "Give a JSON schema"),
        ({"guided_choice": [1]}, "guided_choice", "Give a list of texts"),
        ({"response_format": XML}, "response_format", "'json_schema'"),
        ({"response_format": "json"}, "response_format", "Give an object"),
        ({"response_format": SCHEMA}, "response_format", "json_schema.schema is missing."),
        (
            {"response_format": SCHEMA | {"json_schema": {"name": "a"}}},
            "response_format",
            "json_schema.schema is missing.",
        ),
        (
            {"guided_regex": "a", "guided_choice": ["a"]},
            "guided_choice",
            "guided_regex and guided",
        ),
        ({"guided_json": {"$ref": "http://example.com/a"}}, "guided_json", "example.com"),
        ({"guided_json": {"enum": [f"v{n}" for n in range(20_000)]}}, "guided_json", "too big"),
    ],
    "text": [
        ({"prompt": None}, "prompt", "prompt is missing. Give a text that is not empty"),
        ({"prompt": []}, "prompt", "prompt cannot be []."),
        ({"prompt": [None]}, "prompt", "prompt cannot be None."),
        ({"echo": True}, "echo", "Leave echo out."),
    ],
    "messages": [
        ({"messages": [{"role": "foo"}]}, "messages[0].role", "Give 'user', 'assistant' or"),
        ({"output_config": {"format": SCHEMA}}, "output_config", "format.schema is missing."),
        (
            {"tools": [{"name": "get_weather"}], "tool_choice": {"type": "must"}},
            "tool_choice",
            "'any'",
        ),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice", "demands 'f', which is"),
        (
            {"tools": [{"name": "get_weather"}], "tool_choice": {"type": "tool"}},
            "tool_choice",
            "needs the name",
        ),
        ({"tool_choice": {"type": "tool", "name": ""}}, "tool_choice", "needs the name"),
        ({"messages": said({"type": "image"})}, "messages[0].content", "no images"),
        ({"messages": said({"type": "tool_result"})}, "messages[0].content", "tool_use_id"),
        ({"messages": said({"type": "tool_use"})}, "messages[0].content", "an id and a name"),
        (
            {"messages": said({"type": "tool_result", "tool_use_id": "x"})},
            "messages",
            "has the id 'x'",
        ),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "mcp_servers is not supported"),
        ({"thinking": {"type": "often"}}, "thinking", "'enabled', 'adaptive' or 'disabled'"),
        ({"output_config": {"format": XML}}, "output_config", "'json_schema'"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": BROKEN}}},
            "output_config",
            "cannot be",
        ),
        (
            {"output_config": FORMAT, "tools": [{"name": "get_weather"}]},
            "tools",
            "cannot be combined",
        ),
        ({"output_config": {"effort": "huge"}}, "output_config", "'low'"),
    ],
    "responses": [
        ({"input": []}, "input", "cannot be []. Give a text, or a list of 1 to 4,096 items."),
        ({"input": None}, "input", "is missing. Give a text, or a list of 1 to 4,096 items."),
        ({"input": [{"role": "foo"}]}, "input[0].role", "Give 'user', 'assistant', 'system'"),
        ({"text": {"format": SCHEMA}}, "text", "text.format.schema is missing."),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "Give 'message'"),
        ({"input": [{"type": "compaction"}]}, "input[0].type", "Give 'message'"),
        ({"input": [{"content": "x"}]}, "input[0]", "needs a role"),
        ({"input": said(IMAGE)}, "input[0].content", "no images"),
        ({"input": [{"type": "function_call_output"}]}, "input[0]", "needs the call_id"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0]", "needs a name"),
        ({"input": [{"type": "custom_tool_call", "name": "a"}]}, "input[0]", "the call_id"),
        ({"input": [{"type": "custom_tool_call", "call_id": "a"}]}, "input[0]", "needs a name"),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]},
            "input",
            "has the id 'x'",
        ),
        ({"text": {"format": XML}}, "text", "'json_schema'"),
        ({"text": {"format": {"type": "json_schema", "schema": BROKEN}}}, "text", "cannot be"),
        ({"text": {"format": {"type": "json_object"}}, "tools": [WEATHER]}, "tools", "combined"),
        ({"background": True}, "background", "is not supported"),
        ({"conversation": "c"}, "conversation", "is not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "Stored prompts are not supported."),
        ({"prompt": {"id": "p"}, "input": None}, "prompt", "Stored prompts are not"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "demands 'f'"),
        ({"tool_choice": {"type": "custom", "name": "f"}}, "tool_choice", "none of the"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "cannot be"),
        (
            {"tools": [{"type": "custom", "name": "a", "format": {"type": "x"}}]},
            "tools[0].format",
            "'text' or 'grammar'",
        ),
        ({"previous_response_id": "x"}, "previous_response_id", "There is no answer 'x'"),
    ],
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_error_names_the_parameter_and_says_what_to_give(kind: str) -> None:
    for more, param, words in REFUSED[kind]:
        error = refused(kind, **more)
        assert words in error.message and (error.status, error.param) == (400, param), more


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (None, "messages[1]"),
        ("x", "messages[1]"),
        ({}, "messages[1].role"),
        ({"role": "robot"}, "messages[1].role"),
        ({"role": []}, "messages[1].role"),
        ({"role": "user", "content": 1}, "messages[1].content"),
        ({"role": "user", "content": NESTED}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content"),
        ({"role": "user", "content": "x", "tool_calls": [1]}, "messages[1].tool_calls"),
        ({"role": "user", "content": "x", "audio": {"id": 1}}, "messages[1].audio"),
    ],
)
def test_a_message_is_refused_with_its_number(message: Any, param: str) -> None:
    assert refused(messages=[*HELLO, message]).param == param


def test_what_the_model_cannot_do_is_refused() -> None:
    def error(info: BackendInfo, **more: Any) -> tuple[str | None, str]:
        with pytest.raises(ApiError) as raised:
            completion(Chat, BASE["chat"] | more, info)
        return raised.value.param, raised.value.message

    bare = ToyBackend().info
    call = {"id": "1", "function": {"name": "f"}}
    called = [*HELLO, {"role": "assistant", "tool_calls": [call]}, RESULT | {"tool_call_id": "1"}]
    for name, value in (("tools", [TOOL]), ("messages", called)):
        param, message = error(bare, **{name: value})
        assert param == name and "toy cannot call tools" in message
    unframed = replace(INFO, calls=CALLS._replace(frame=None))
    assert "cannot be enforced" in error(unframed, tools=[TOOL], tool_choice="required")[1]
    on, off = ({"chat_template_kwargs": {"enable_thinking": thinks}} for thinks in (True, False))
    assert "toy has no thinking" in error(bare, **on)[1]
    for harmless in (off, {"tools": []}):
        assert completion(Chat, BASE["chat"] | harmless, bare).requests


def test_an_empty_call_in_a_message_changes_nothing() -> None:
    odd = {"role": "user", "content": None, "tool_calls": [], "audio": None, "function_call": ""}
    assert read(messages=[odd, *HELLO]).requests[0].messages == (Message("user", "hello"),)


def test_halves_of_characters_become_a_mark() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "a\ud800"}], "stop": "\udfff!"})
    found = read(**parsed(body.encode()))
    assert found.requests[0].messages[0].content == "a\ufffd"
    assert found.requests[0].generation.stop == ("\ufffd!",)


def test_the_newer_name_of_the_limit_counts() -> None:
    def limit(kind: str = "chat", **more: Any) -> int:
        return read(kind, **more).requests[0].generation.max_tokens

    assert limit(max_completion_tokens=2, max_tokens="x") == 2
    assert limit(max_completion_tokens=None, max_tokens=3) == 3
    for name in ("max_tokens", "max_completion_tokens"):
        assert limit(**{name: -1}) == limit("text", **{name: -1}) == 32768, "-1 is no limit"
    assert refused(max_tokens=-2).message.endswith("2, or -1 for no limit.")
    assert limit(max_tokens=10**9) == limit() == 32768 and limit("text") == 16
    assert refused(max_completion_tokens="x", max_tokens=3).param == "max_completion_tokens"


def test_probabilities_are_asked_for_in_two_ways() -> None:
    assert read().options.likeliest is read("text", logprobs=False).options.likeliest is None
    zero = read(logprobs=True), read("text", logprobs=0)
    assert [each.options.likeliest for each in zero] == [0, 0]
    assert read(logprobs=True, top_logprobs=20).options.likeliest == 20
    assert read("text", logprobs=5.0, top_logprobs="x", messages=3).options.likeliest == 5
    for value in (True, 6, -1, "1", 1.5):
        assert refused("text", logprobs=value).param == "logprobs"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (None, USUAL.name), (True, USUAL.name), ({}, USUAL.name), (False, PLAIN.name),
        ("lookup", "lookup"), ({"method": "hd", "tiers": [], "nodes": 3.0}, "hd"),
    ],
)  # fmt: skip
def test_drafting_is_chosen_by_name_or_object(given: Any, name: str) -> None:
    assert read(speculative=given).requests[0].method.name == name


@pytest.mark.parametrize(
    "given",
    [
        1, "", "x", [], {"method": None}, {"method": 1}, {"tiers": None}, {"nodes": None},
        {"nodes": True}, {"nodes": "3"}, {"method": "plain", "nodes": 3}, {"\ud800": 1}, NESTED,
        {"method": "auto", "tiers": "context"}, {"method": "lookup", "tiers": ["context"]},
    ],
)  # fmt: skip
def test_drafting_that_makes_no_sense_is_refused(given: Any) -> None:
    assert refused(speculative=given).param == "speculative"


def test_thinking_is_said_in_either_word() -> None:
    def thinking(**switches: Any) -> bool | None:
        return read(chat_template_kwargs=switches).requests[0].generation.thinking

    assert thinking() is thinking(thinking=None) is None
    assert thinking(enable_thinking=True, thinking=None) is thinking(thinking=True) is True
    assert thinking(enable_thinking=False, thinking=False) is False
    for switches, code, words in (
        ({"x": None}, "unsupported_parameter", "have 'x'. Use: enable_thinking, thinking."),
        ({"enable_thinking": 1}, None, "Give true or false"),
        ({"enable_thinking": True, "thinking": False}, None, "says both"),
    ):
        error = refused(chat_template_kwargs=switches)
        assert (error.param, error.code) == ("chat_template_kwargs", code)
        assert words in error.message


@pytest.mark.parametrize(
    ("effort", "expected"),
    [("none", False), ("minimal", "low"), ("medium", "medium"), ("xhigh", "high")],
)
def test_an_effort_is_the_closest_that_the_template_knows(
    effort: str, expected: ThinkingChoice
) -> None:
    for kind, given in (
        ("chat", {"reasoning_effort": effort}),
        ("responses", {"reasoning": {"effort": effort}}),
    ):
        info = replace(INFO, has_efforts=True)

        def thinking(info: BackendInfo, kind: str = kind, **more: Any) -> ThinkingChoice:
            values = {**BASE[kind], **more}
            return completion(MODELS[kind], values, info).requests[0].generation.thinking

        assert thinking(info, **given) == expected
        assert thinking(replace(INFO, can_think=False), **given) is None
        switches = {"chat_template_kwargs": {"thinking": True}}
        assert thinking(info, **given, **switches) is True, "the switch is more specific"


def test_prompts_are_texts_or_tokens() -> None:
    for given, count in (("a", 1), ([1, 2], 1), (["a", [1]], 2), ([[1], [2], "c"], 3)):
        assert read("text", prompt=given).prompts == count
    for given in (None, "", [], [[]], ["a", ""], [1, "a"], [1.0], [True], [-1], [260], {}, NESTED):
        error = refused("text", prompt=given)
        assert error.param == "prompt" and "from 0 to 259" in error.message


@pytest.mark.parametrize("name", sorted(NEUTRAL.keys() - Chat.model_fields))
def test_what_changes_nothing_is_accepted_and_the_rest_is_unsupported(name: str) -> None:
    for value in (None, *NEUTRAL[name]):
        assert read(**{name: value}).requests
    for value in (True, 7, "x", [1], {"a": 1}, NESTED):
        error = refused(**{name: value})
        assert (error.param, error.code) == (name, "unsupported_parameter")
