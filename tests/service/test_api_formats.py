"""Answers in a format, as programs demand them: as OpenAI, llama.cpp's server and vLLM spell it."""

import json
from dataclasses import replace
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from engine.engine import Measured, Request
from engine.methods import METHODS, PLAIN
from engine.settings import Generation
from engine.thinking import named
from engine.types import Message, Step
from tests.service.test_api_thinking import BEFORE, Thinker
from tests.support import toy
from tests.support.schemas import drawn, form_of, under
from tests.support.scripted import Scripted
from tests.support.served import Served, ask, served

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "open": {"type": "boolean"},
    },
    "required": ["name", "age", "open"],
    "additionalProperties": False,
}
OBJECT = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
SPELLINGS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}},
    {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"json_schema": SCHEMA},
    {"structured_outputs": {"json": SCHEMA}},
]


def content(client: httpx.Client, **body: Any) -> str:
    reply = ask(client, text="hello there", **({"seed": 3, "temperature": 0.9} | body))
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: [*spelling][0])
def test_a_schema_is_kept_whatever_it_is_called(
    client: httpx.Client, spelling: dict[str, Any]
) -> None:
    text = content(client, **spelling)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert text == content(client, **spelling, speculative=False)
    assert text == content(client, **SPELLINGS[0])


@pytest.mark.parametrize(
    ("spelling", "possible"),
    [
        ({"guided_choice": ["yes", "no"]}, ["yes", "no"]),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ["yes", "no"]),
        ({"guided_regex": "a|bb"}, ["a", "bb"]),
        ({"structured_outputs": {"regex": "a|bb"}}, ["a", "bb"]),
        ({"grammar": 'root ::= "up" | "down"'}, ["up", "down"]),
        ({"guided_grammar": 'root ::= "up" | "down"'}, ["up", "down"]),
        ({"structured_outputs": {"grammar": 'root ::= "up" | "down"'}}, ["up", "down"]),
    ],
    ids=str,
)
def test_other_formats(client: httpx.Client, spelling: dict[str, Any], possible: list[str]) -> None:
    found = {content(client, **spelling, seed=seed, temperature=2) for seed in range(8)}
    assert found and found <= {*possible}


@pytest.mark.parametrize("spelling", [{"response_format": {"type": "json_object"}}, {
    "structured_outputs": {"json_object": True}}], ids=str)  # fmt: skip
def test_any_object(client: httpx.Client, spelling: dict[str, Any]) -> None:
    text = content(client, **spelling, max_tokens=60)
    assert text.startswith("{") and " " not in text.split('"')[0]


@pytest.mark.parametrize(
    "nothing",
    [
        {"response_format": {"type": "text"}},
        {"guided_json": {}},
        {"guided_choice": []},
        {"grammar": "", "json_schema": {}, "guided_regex": None, "structured_outputs": {}},
    ],
    ids=str,
)
def test_what_demands_nothing_changes_nothing(
    client: httpx.Client, nothing: dict[str, Any]
) -> None:
    assert content(client, **nothing, max_tokens=30) == content(client, max_tokens=30)


def test_a_stream_and_the_probabilities_of_its_tokens(client: httpx.Client) -> None:
    body = SPELLINGS[0] | {"logprobs": True, "top_logprobs": 5, "seed": 3, "temperature": 0.9}
    reply = ask(client, text="hello there", **body).json()["choices"][0]
    tokens = reply["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == reply["message"]["content"]
    assert tokens[0]["logprob"] == 0 and len(tokens[0]["top_logprobs"]) == 1
    assert any(len(token["top_logprobs"]) == 5 for token in tokens)
    with client.stream(
        "POST", "/v1/chat/completions",
        json=body | {"stream": True, "messages": [{"role": "user", "content": "hello there"}]},
    ) as lines:  # fmt: skip
        events = [json.loads(line[6:]) for line in lines.iter_lines() if line.startswith("data: {")]
    pieces = [c["delta"].get("content", "") for e in events for c in e["choices"]]
    assert "".join(pieces) == reply["message"]["content"]


class Person(BaseModel):
    name: Literal["Ada", "Bo"]
    age: Literal[30, 31]
    mood: Literal["glad", "sad"]


def test_the_client_of_openai_parses_what_it_asked_for(program: openai.OpenAI) -> None:
    found = program.chat.completions.parse(
        model="toy",
        messages=[{"role": "user", "content": "who?"}],
        response_format=Person,
        seed=2,
        temperature=0.7,
        max_tokens=400,
    )
    parsed = found.choices[0].message.parsed
    assert parsed is not None and parsed.mood in ("glad", "sad")


def test_responses_have_formats_too(program: openai.OpenAI) -> None:
    found = program.responses.parse(
        model="toy", input="who?", text_format=Person, temperature=0.7, max_output_tokens=400
    )
    assert found.output_parsed is not None and found.output_parsed.age in (30, 31)


def test_the_given_beginning_of_an_answer_counts(client: httpx.Client) -> None:
    begun = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": '{"name":"b'}]
    reply = ask(client, messages=begun, guided_json=SCHEMA, seed=1, temperature=1.0)
    rest = reply.json()["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads('{"name":"b' + rest), SCHEMA)
    begun[1]["content"] = "name"
    wrong = ask(client, messages=begun, guided_json=SCHEMA)
    error = wrong.json()["error"]
    assert wrong.status_code == 400 and error["param"] == "response_format"
    assert "has begun with" in error["message"]


@pytest.mark.parametrize("speculative", [None, False])
def test_a_model_thinks_freely_before_its_answer(
    monkeypatch: pytest.MonkeyPatch, speculative: Any
) -> None:
    monkeypatch.setattr(toy, "MEMORY", BEFORE)
    with served(Thinker()) as made, made.client() as client:
        on = {"chat_template_kwargs": {"enable_thinking": True}, "speculative": speculative}
        body = {"guided_json": OBJECT, "temperature": 0, "max_tokens": 100}
        found = ask(client, text="hello there", **body, **on).json()["choices"][0]["message"]
        assert found["reasoning_content"] == "first this" and json.loads(found["content"])["a"]
        off = ask(client, text="hello there", **body, speculative=speculative).json()
        message = off["choices"][0]["message"]
        assert not message.get("reasoning_content") and json.loads(message["content"])["a"]


HARMONY = named(["<|channel|>analysis<|message|>"])
DIRECT = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("info", "given", "said", "thought"),
    [
        # Qwen 3 opens the thinking by itself, and its template can only close it.
        ({"can_think": True}, {"enable_thinking": True}, "<think>\nso {\n</think>", "so {"),
        ({"can_think": True}, {"enable_thinking": False}, "<think>\nso {\n</think>", None),
        ({"can_think": True}, None, "<think>\nso {\n</think>", None),
        # gpt-oss always says where it writes.
        (
            {"has_efforts": True, "marks": HARMONY},
            None,
            f"<|channel|>analysis<|message|>so {{{NEXT}{DIRECT}",
            "so {",
        ),
        ({"has_efforts": True, "marks": HARMONY}, None, DIRECT, None),
    ],
)
def test_a_model_that_begins_to_think_by_itself_may_do_so(
    info: dict[str, Any], given: dict[str, Any] | None, said: str, thought: str | None
) -> None:
    backend = Scripted(lambda prompt: said + '{"a":1}')
    backend.info = replace(backend.info, **info)
    with served(backend) as made, made.client() as client:
        for speculative in (None, False):
            found = ask(
                client,
                text="hello there",
                guided_json=OBJECT,
                temperature=0,
                max_tokens=160,
                chat_template_kwargs=given or {},
                speculative=speculative,
            ).json()
            message = found["choices"][0]["message"]
            assert message.get("reasoning_content") == thought
            jsonschema.validate(json.loads(message["content"]), OBJECT)


def test_measured_runs_keep_the_format(server: Served) -> None:
    """So what *Prove it* and Compare show of such an answer is that of its own format."""
    engine, form = server.session.engine, form_of(drawn(1))
    wanted = Request(
        messages=(Message("user", "hello there"),), generation=under(form, 0.8, 4)
    )  # fmt: skip

    def text(request: Request) -> str:
        steps = [event for event in engine.generate(request) if isinstance(event, Step)]
        return "".join(token.text for step in steps for token in step.tokens)

    found = {
        text(replace(wanted, method=method, measured=measured))
        for method in (PLAIN, METHODS["hd"], METHODS["auto"])
        for measured in (None, Measured(), Measured(warm=True))
    }
    assert len(found) == 1 and found != {text(replace(wanted, generation=Generation()))}
    jsonschema.validate(json.loads(found.pop()), drawn(1))
