"""Five hundred malformed requests: each is answered, or refused with its reason."""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import httpx
import pytest

from tests.support.odd import ODD, spoiled
from tests.support.scripted import CALLS
from tests.support.toy import ToyBackend

USER = {"role": "user", "content": "How is the weather in Paris?"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "get_weather", "description": "Looks it up."}
FUNCTION = {"type": "function", "function": WEATHER | {"parameters": CITY}}
CALL = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
MESSAGES: dict[str, Any] = {
    "messages": [
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "5"}]},
    ],
    "system": "Be kind.",
    "tools": [WEATHER | {"input_schema": CITY}],
    "tool_choice": {"type": "tool", "name": "get_weather"},
    "thinking": {"type": "disabled"},
    "stop_sequences": ["x"],
    "max_tokens": 2,
}
SOUND: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "function", "function": CALL}],
            },
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "5"}]},
        ],
        "tools": [FUNCTION],
        "tool_choice": "auto",
        "reasoning_effort": "low",
        "temperature": 0,
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "completions": {
        "prompt": ["Once", [1, 2]],
        "logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}},
        "stop": ["x"],
        "seed": 3,
        "speculative": {"method": "hd", "tiers": ["context"], "nodes": 4},
        "max_tokens": 2,
    },
    "responses": {
        "input": [
            USER,
            {"type": "function_call", "call_id": "c", **CALL},
            {"type": "function_call_output", "call_id": "c", "output": "5"},
        ],
        "instructions": "Be kind.",
        "tools": [{"type": "function", **WEATHER, "parameters": CITY}],
        "reasoning": {"effort": "low"},
        "max_output_tokens": 2,
    },
    "messages": MESSAGES,
    "messages/count_tokens": MESSAGES,
}
VALUES = (*ODD, None, 0, -(10**30), 1e308, "\udfff\ud800", {"type": "function"}, ["\x00"])
TYPES = ("application/json", "text/plain", "multipart/form-data", "application/json; charset=x", "")


def repeated(text: bytes, dice: Random) -> bytes:
    """An object in which each key stands twice, once with another value."""
    other = {key: dice.choice(VALUES) for key in json.loads(text)}
    return text[:-1] + b", " + json.dumps(other).encode()[1:]


def nested(text: bytes, dice: Random) -> bytes:
    """Something within many objects or lists."""
    begin, end = dice.choice(((b"[", b"]"), (b'{"a":', b"}")))
    place, depth = text.index(b": ") + 2, dice.choice((50, 900, 20_000))
    return text[:place] + begin * depth + b"1" + end * depth + b", " + text[1:]


def changed(text: bytes, dice: Random) -> bytes:
    """A text with other bytes somewhere, which may be no UTF-8."""
    at = dice.randrange(len(text))
    return (
        text[:at] + dice.choice((b"\xed\xa0\x80", b"\xff", b'"', b"}", b"\\u", b"\x00")) + text[at:]
    )


WRITTEN: tuple[Callable[[bytes, Random], bytes], ...] = (
    lambda text, dice: text,
    lambda text, dice: text,
    lambda text, dice: text[: dice.randrange(len(text))],
    lambda text, dice: text.decode().encode(dice.choice(("utf-16", "utf-32", "utf-8-sig"))),
    repeated,
    nested,
    changed,
)
"""How the text of a request is spoiled, or not, after its values were."""


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each list and object in a value, with each of its indices or keys."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def malformed(sound: dict[str, Any], dice: Random) -> bytes:
    body = deepcopy(sound)
    for holder, key in dice.sample([*places(body)], dice.randrange(4)):
        holder[key] = dice.choice(VALUES)
    return dice.choice(WRITTEN)(json.dumps(body).encode(), dice)


@pytest.fixture(scope="module")
def backend() -> ToyBackend:
    made = ToyBackend(context_length=512)
    made.info = replace(made.info, calls=CALLS, can_think=True, has_efforts=True)
    return made


@pytest.mark.parametrize("path", SOUND)
def test_a_malformed_request_is_refused_with_its_reason(client: httpx.Client, path: str) -> None:
    assert client.post(f"/v1/{path}", json=SOUND[path]).status_code == 200
    dice, statuses = Random(path), list[int]()
    for _ in range(100):
        body = malformed(SOUND[path], dice)
        headers = {"content-type": dice.choice(TYPES)}
        found = client.post(f"/v1/{path}", content=body, headers=headers)
        what = f"{found.status_code} {found.text[:300]} for {body[:600]!r}"
        statuses.append(found.status_code)
        if found.status_code == 200:
            assert "server_error" not in found.text, what
        else:
            assert found.status_code in (400, 404) and found.json()["type"] == "error", what
            error = found.json()["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["message"], what
            assert error["type"] in ("invalid_request_error", "not_found_error"), what
    assert statuses.count(200) > 5 and statuses.count(400) > 50, "both are met"


@pytest.mark.soak(stay=2)
@pytest.mark.parametrize("path", [*SOUND][:4])
def test_each_value_may_be_of_another_type(client: httpx.Client, path: str) -> None:
    found = [
        client.post(f"/v1/{path}", content=json.dumps(body).encode()).status_code
        for body in spoiled(SOUND[path])
    ]
    assert {*found} <= {200, 400, 404} and len(found) > 200
