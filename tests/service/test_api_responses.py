"""OpenAI's responses, with its client."""

import json
from typing import Any

import httpx
import openai
import pytest

from app.service.programs import Answers, Sessions
from engine.types import Message
from tests.support.scripted import Scripted
from tests.support.served import Served, ask

QUESTION = "How is the weather in Paris?"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Looks it up.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
INPUT = '*** Begin\n"a"'
PATCH = CALL.replace("get_weather", "apply_patch").replace(
    '{"city": "Paris"}', json.dumps({"input": INPUT})
)
CUSTOM: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
THOUGHT = "<think>\nI need the weather.\n</think>\n\n"


def script(prompt: str) -> str:
    if "<tool_response>" in prompt:
        return f"It is {prompt.rpartition('get_weather: ')[2].partition('<')[0]}."
    if "mcp__sky__get_weather" in prompt:
        return f"{THOUGHT}I look it up.\n{CALL}\n{CALL}".replace('"get_', '"mcp__sky__get_')
    if "get_weather" in prompt:
        return f"{THOUGHT}I look it up.\n{CALL}\n{CALL}"
    if "apply_patch" in prompt:
        return PATCH
    return f"Answer {prompt.count('<|user|>')}."


def answer(program: openai.OpenAI, **more: Any) -> Any:
    return program.responses.create(**({"model": "scripted", "input": QUESTION} | more))


def test_a_text_is_answered(program: openai.OpenAI, backend: Scripted) -> None:
    found = answer(program, instructions="Be kind.")
    assert found.output_text == "Answer 1." and found.status == "completed"
    assert backend.prompts[-1].startswith("<|system|>Be kind.<|end|><|user|>How")
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert found.model == "scripted" and found.id.startswith("resp_")
    assert found.model_extra["strata"]["forwards"] > 0


def test_functions_are_called_and_their_results_read(
    program: openai.OpenAI, backend: Scripted
) -> None:
    found = answer(program, tools=[WEATHER])
    assert [item.type for item in found.output] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    assert found.output[0].content[0].text == "I need the weather."
    assert found.output_text == "I look it up."
    alone = answer(program, tools=[WEATHER], parallel_tool_calls=False).output
    assert [item.type for item in alone] == ["reasoning", "message", "function_call"]
    calls = found.output[2:]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Paris"}] * 2
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"{number} degrees"}
        for number, call in enumerate(calls)
    ]
    history = [{"role": "user", "content": QUESTION}, *(item.to_dict() for item in found.output)]
    for given in (
        {"input": [*history, *results]},
        {"input": results, "previous_response_id": found.id},
    ):
        last = answer(program, tools=[WEATHER], **given)
        assert last.output_text == "It is 1 degrees."
        prompt = backend.prompts[-1]
        assert f"I look it up.\n{CALL}\n{CALL}<|end|>" in prompt
        assert "get_weather: 0 degrees</tool_response><|end|>" in prompt
        assert "I need the weather" not in prompt


def test_a_custom_tool_is_called_with_a_text(program: openai.OpenAI, backend: Scripted) -> None:
    whole = answer(program, tools=[CUSTOM])
    (call,) = whole.output
    assert (call.type, call.name) == ("custom_tool_call", "apply_patch") and call.input == INPUT
    assert whole.tools[0].format.definition == "start: /.+/"
    shown = json.loads(backend.prompts[-1].partition("<|system|>")[2].partition("<|end|>")[0])
    assert "Grammar of the input (lark):\nstart: /.+/" in shown[0]["function"]["description"]
    events = [*answer(program, tools=[CUSTOM], stream=True)]
    kinds = [event.type for event in events if "custom" in event.type]
    assert kinds == [f"response.custom_tool_call_input.{step}" for step in ("delta", "done")]
    (done,) = [event.item for event in events if event.type == "response.output_item.done"]
    assert (done.type, done.input) == (call.type, call.input)
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    history = [{"role": "user", "content": QUESTION}, call.to_dict(), result]
    for given in ({"input": history}, {"input": [result], "previous_response_id": whole.id}):
        assert answer(program, tools=[CUSTOM], **given).status == "completed"
        assert f"{PATCH}<|end|>" in backend.prompts[-1]
        assert "apply_patch: done</tool_response>" in backend.prompts[-1]
    choice = {"type": "custom", "name": "apply_patch"}
    (forced,) = answer(program, tools=[CUSTOM, WEATHER], tool_choice=choice).output
    assert (forced.type, forced.name) == ("custom_tool_call", "apply_patch")
    plain = {"type": "custom", "name": "get_weather"}
    found = answer(program, tools=[plain]).output[-1]
    assert found.input == '{"city": "Paris"}', "arguments of another shape stay as they are"


def test_tools_of_a_namespace_are_called_by_both_names(
    program: openai.OpenAI, backend: Scripted
) -> None:
    """Codex sends the tools of an MCP server like this, and routes a call by both names."""
    space: Any = {
        "type": "namespace",
        "name": "mcp__sky",
        "description": "All about the sky.",
        "tools": [WEATHER, CUSTOM, {"type": "web_search"}],
    }
    long = {**space, "name": "mcp__sea__", "description": "", "tools": [WEATHER]}
    whole = answer(program, tools=[space, long])
    (system, _) = backend.prompts[-1].split("<|end|>", 1)
    told = [each["function"] for each in json.loads(system.removeprefix("<|system|>"))]
    names = ["mcp__sky__get_weather", "mcp__sky__apply_patch", "mcp__sea__get_weather"]
    assert [each["name"] for each in told] == names
    assert told[0]["description"] == "All about the sky.\n\nLooks it up."
    assert told[2]["description"] == "Looks it up."
    calls = [item.to_dict() for item in whole.output[2:]]
    assert [(call["namespace"], call["name"]) for call in calls] == [
        ("mcp__sky", "get_weather")
    ] * 2
    shown = whole.to_dict()["tools"]
    assert [tool["name"] for tool in shown] == ["mcp__sky", "mcp__sea__"]
    assert [tool["type"] for tool in shown[0]["tools"]] == ["function", "custom"]
    events = [*answer(program, tools=[space], stream=True)]
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert [(item.get("namespace"), item.get("name")) for item in done[2:]] == [
        ("mcp__sky", "get_weather")
    ] * 2
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "mild"}
        for call in calls
    ]
    history = [{"role": "user", "content": QUESTION}, *calls, *results]
    for given in ({"input": history}, {"input": results, "previous_response_id": whole.id}):
        answer(program, tools=[space], **given)
        assert '"name": "mcp__sky__get_weather", "arguments"' in backend.prompts[-1]
        assert "mcp__sky__get_weather: mild</tool_response>" in backend.prompts[-1]
    choice: Any = {"type": "custom", "name": "apply_patch"}
    (forced,) = answer(program, tools=[space, long], tool_choice=choice).to_dict()["output"]
    names = [forced[field] for field in ("type", "namespace", "name")]
    assert names == ["custom_tool_call", "mcp__sky", "apply_patch"]
    with pytest.raises(openai.BadRequestError, match="'get_weather', which is none"):
        two: Any = {"type": "function", "name": "get_weather"}
        answer(program, tools=[space, long], tool_choice=two)


def test_a_stream_is_what_the_whole_answer_is(program: openai.OpenAI) -> None:
    whole = answer(program, tools=[WEATHER])
    kinds, text, numbers = [], "", []
    given: Any = {"model": "scripted", "input": QUESTION, "tools": [WEATHER]}
    with program.responses.stream(**given) as stream:
        for event in stream:
            kinds.append(event.type)
            numbers.append(event.sequence_number)
            text += event.delta if event.type == "response.output_text.delta" else ""
        found = stream.get_final_response()
    assert text == found.output_text == whole.output_text
    assert numbers == list(range(len(kinds)))
    assert [item.type for item in found.output] == [item.type for item in whole.output]
    for left, right in zip(found.output[2:], whole.output[2:], strict=True):
        assert (left.name, left.arguments) == (right.name, right.arguments)
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == 4
    assert kinds.count("response.output_item.done") == 4
    assert kinds.count("response.function_call_arguments.done") == 2
    assert "response.reasoning_text.delta" in kinds


def test_events_name_the_item_that_they_are_about(client: httpx.Client) -> None:
    lines = ask(client, "responses", input=QUESTION, tools=[WEATHER], stream=True).text
    assert "[DONE]" not in lines
    ids: dict[int, str] = {}
    last: dict[str, Any] = {}
    for part in lines.strip().split("\n\n"):
        name, _, data = part.partition("\n")
        last = json.loads(data.removeprefix("data: "))
        assert name == f"event: {last['type']}"
        if last["type"] == "response.output_item.added":
            assert last["item"]["status"] == "in_progress"
            ids[last["output_index"]] = last["item"]["id"]
        if "item_id" in last:
            assert last["item_id"] == ids[last["output_index"]]
    assert [item["id"] for item in last["response"]["output"]] == list(ids.values())
    assert last["response"]["output"][1]["content"][0]["text"] == "I look it up."


def test_an_answer_is_continued_by_its_id(program: openai.OpenAI, backend: Scripted) -> None:
    first = answer(program, instructions="Be kind.", stream=True)
    (found,) = [event.response for event in first if event.type == "response.completed"]
    second = answer(program, input="And then?", previous_response_id=found.id)
    assert second.output_text == "Answer 2." and second.previous_response_id == found.id
    assert backend.prompts[-1] == (
        f"<|user|>{QUESTION}<|end|><|assistant|>Answer 1.<|end|><|user|>And then?<|end|>"
        "<|assistant|>"
    ), "instructions hold for one answer"
    branch = answer(program, input="Or?", previous_response_id=found.id, instructions="Be brief.")
    assert branch.output_text == "Answer 2."
    assert answer(program, previous_response_id=second.id).output_text == "Answer 3."


def test_no_answer_of_another_key_is_continued(program: openai.OpenAI, server: Served) -> None:
    """Nor one that was not stored."""
    unstored = answer(program, store=False)
    stored = answer(program)
    _, secret = server.session.programs.keys.make("other")
    other = openai.OpenAI(base_url=f"{server.address}/v1", api_key=secret, max_retries=0)
    with other:
        for who, id in ((program, unstored.id), (other, stored.id), (program, "resp_x")):
            with pytest.raises(openai.BadRequestError) as raised:
                answer(who, previous_response_id=id)
            assert raised.value.param == "previous_response_id"
            assert raised.value.code == "previous_response_not_found"


def test_kept_answers_are_bounded_and_go_with_their_key() -> None:
    answers, half = Answers(), "x" * (Sessions.CHARACTERS // 2)
    for number in range(3):
        answers.keep("a", str(number), (Message("user", half[:-100]),))
    assert answers.find("a", "0") is None and answers.find("a", "2") is not None
    assert answers.find("b", "2") is None
    answers.keep("b", "9", (Message("user", "short"),))
    answers.forget("a")
    assert answers.find("a", "2") is None and answers.find("b", "9") is not None
    answers.keep("a", "long", (Message("user", 3 * half),))
    assert answers.find("a", "long") is not None, "the last one is kept whatever its length"


def test_an_answer_that_is_cut_is_incomplete(program: openai.OpenAI) -> None:
    found = answer(program, max_output_tokens=3)
    assert found.status == "incomplete" and found.output_text == "Ans"
    assert found.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in found.output] == ["incomplete"]
    *_, done, last = answer(program, max_output_tokens=3, stream=True)
    assert (done.type, done.item.status) == ("response.output_item.done", "incomplete")
    assert last.type == "response.incomplete" and last.response.output == [done.item]


def test_a_call_can_be_enforced(program: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "name": "get_weather"}
    found = answer(program, tools=[WEATHER], tool_choice=choice, input="Nothing.", temperature=0)
    assert [item.type for item in found.output] == ["function_call"]
    assert found.output[0].name == "get_weather" and found.tool_choice.name == "get_weather"
    assert isinstance(json.loads(found.output[0].arguments), dict)
