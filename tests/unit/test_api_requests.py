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
from engine.tools import FORMS
from engine.types import Message
from tests.support.odd import NESTED, ODD
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
INFO = replace(ToyBackend().info, can_think=True, calls=FORMS[0])


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


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"n": 17}, "n cannot be 17. Give a whole number from 1 to 16."),
        ({"temperature": "hot"}, "Temperature cannot be 'hot'. Give a number from 0 to 2."),
        ({"stream": "yes"}, "stream cannot be 'yes'. Give true or false."),
        ({"stream_options": 1}, "stream_options cannot be 1. Give an object."),
        (
            {"stream_options": {"include_usage": 1}},
            "include_usage cannot be 1. Give true or false.",
        ),
        ({"stop": 5}, "stop cannot be 5. Give a string, or at most 16 of them"),
        ({"reasoning_format": "xml"}, "cannot be 'xml'. Give 'auto', 'deepseek' or 'none'."),
        (
            {"reasoning_effort": "much"},
            "cannot be 'much'. Give 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'.",
        ),
        ({"speculative": 5}, "speculative cannot be 5. Give false, the name of a method"),
        ({"speculative": {"a": 1}}, "speculative.a is not known. Leave it out."),
        ({"speculative": {"nodes": 999}}, "Max drafted tokens cannot be 999. Give a whole number"),
        ({"messages": None}, "messages is missing. Give a list of 1 to 4,096 messages."),
        ({"messages": []}, "messages cannot be []. Give a list of 1 to 4,096 messages."),
        ({"chat_template_kwargs": {"x": True}}, "cannot have 'x'. Use: enable_thinking, thinking."),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs cannot be 3. Give an object"),
        ({"chat_template_kwargs": {"thinking": 1}}, "Give true or false"),
        ({"chat_template_kwargs": {"enable_thinking": True, "thinking": False}}, "says both"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs to be true."),
    ],
)
def test_an_error_says_the_value_and_what_to_give(more: dict[str, Any], expected: str) -> None:
    error = refused(**more)
    assert expected in error.message and error.param == next(iter(more))


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (None, "messages[1]"),
        ("x", "messages[1]"),
        ({}, "messages[1].role"),
        ({"role": "robot"}, "messages[1].role"),
        ({"role": "tool"}, "messages[1]"),
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
    for switches, code in (
        ({"x": None}, "unsupported_parameter"),
        ({"enable_thinking": 1}, None),
        ({"enable_thinking": True, "thinking": False}, None),
    ):
        error = refused(chat_template_kwargs=switches)
        assert (error.param, error.code) == ("chat_template_kwargs", code)


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
