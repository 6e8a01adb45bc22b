"""Calls in answers: each form read back, whatever its pieces, and everything else left as text."""

import json
from typing import Any

import pytest

from engine.tools import FORMS, CallForm, CallSplitter, form_of
from engine.types import Tool, ToolCall

WEATHER = Tool(
    "get_weather",
    "The weather.",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        }
    ),
)
TIME = Tool("time")
FORM = {form.name: form for form in FORMS}
PARIS = ("get_weather", {"city": "Paris", "days": 2})
NOW = ("time", {})
JSON = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'
QWEN = (
    "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>"
)
GLM = (
    "get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
)
SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
GIVEN = '{"city": "Paris", "days": 2}'
COMMENTARY, JSON_FOLLOWS = "<|channel|>commentary", "<|constrain|>json<|message|>"
NEXT = "<|end|><|start|>assistant"
LFM, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
Call = tuple[str, dict[str, Any]]
ANSWERS: list[tuple[str, str, str, list[Call]]] = [
    ("tagged", f"<tool_call>\n{JSON}\n</tool_call>", "", [PARIS]),
    ("tagged", f"I look.\n\n<tool_call>{JSON}</tool_call>", "I look.", [PARIS]),
    (
        "tagged",
        f"<tool_call>{JSON}</tool_call>\n<tool_call>"
        '{"name": "time", "arguments": {}}</tool_call>',
        "",
        [PARIS, NOW],
    ),
    ("tagged", f"<tool_call>{JSON}", "", [PARIS]),
    ("tagged", f"<tool_call>{JSON}</tool_call>\nDone.", "\nDone.", [PARIS]),
    ("tagged", f"<tool_call>{JSON}</tool_call>\n \n", "", [PARIS]),
    ("tagged", f"<tool_call>\n{QWEN}\n</tool_call>", "", [PARIS]),
    ("tagged", f"<tool_call>{GLM}</tool_call>", "", [PARIS]),
    (
        "tagged",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a</tool_call>b"}}</tool_call>',
        "",
        [("get_weather", {"city": "a</tool_call>b"})],
    ),
    (
        "deepseek",
        f"Hm.{OPEN}{BEGIN}function{SEP}get_weather\n```json\n{GIVEN}\n```{END}{CLOSE}",
        "Hm.",
        [PARIS],
    ),
    (
        "deepseek",
        f"{OPEN}{BEGIN}get_weather{SEP}{GIVEN}{END}{BEGIN}time{SEP}{{}}{END}{CLOSE}",
        "",
        [PARIS, NOW],
    ),
    ("gemma", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>', "", [PARIS]),
    (
        "gemma",
        '<|tool_call>call:get_weather{city:<|"|>a {b: "c"}, d:<|"|>,days:[1,{e:true}]}<tool_call|>',
        "",
        [("get_weather", {"city": 'a {b: "c"}, d:', "days": [1, {"e": True}]})],
    ),
    ("mistral", f"Yes.[TOOL_CALLS][{JSON}]", "Yes.", [PARIS]),
    (
        "mistral",
        f"[TOOL_CALLS]get_weather[ARGS]{GIVEN}[TOOL_CALLS]time[ARGS]{{}}",
        "",
        [PARIS, NOW],
    ),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{GIVEN}", "", [PARIS]),
    ("tagged", f"<tool_call>[{JSON}, {JSON}]", "", [PARIS, PARIS]),
    ("granite", f"<|tool_call|>[{JSON}]", "", [PARIS]),
    ("phi", f"Yes.<|tool_call|>{JSON}<|/tool_call|>.", "Yes..", [PARIS]),
    ("pythonic", f"{LFM}[get_weather(city='Paris', days=2), time()]{LFM_END}", "", [PARIS, NOW]),
    ("pythonic", f"Hm.{LFM}[{JSON}]{LFM_END}I look.", "Hm.I look.", [PARIS]),
    (
        "pythonic",
        rf"""{LFM}[get_weather(city="It\'s \u00e9 {LFM_END}", days=-2, units=(1, 0))]{LFM_END}""",
        "",
        [("get_weather", {"city": f"It's é {LFM_END}", "days": -2, "units": [1, 0]})],
    ),
    (
        "pythonic",
        f'{LFM}[time(at={{"a": [true, false, null], "b": {{"c": "true"}}}}, on=True)]{LFM_END}',
        "",
        [("time", {"at": {"a": [True, False, None], "b": {"c": "true"}}, "on": True})],
    ),
    ("kimi", f"Hm.{KIMI[0]}get_weather:0{KIMI[1]}{GIVEN}{KIMI[2]}{KIMI[3]}", "Hm.", [PARIS]),
    (
        "kimi",
        f"{KIMI[0]}get_weather:3{KIMI[1]}{GIVEN}{KIMI[2]}"
        f"<|tool_call_begin|>time:4{KIMI[1]}{{}}{KIMI[2]}{KIMI[3]}",
        "",
        [PARIS, NOW],
    ),
    ("harmony", f"{COMMENTARY} to=functions.get_weather {JSON_FOLLOWS}{GIVEN}", "", [PARIS]),
    ("harmony", f" to=functions.get_weather{COMMENTARY} json<|message|>{GIVEN}", "", [PARIS]),
    ("harmony", f"Hm.{NEXT}{COMMENTARY} to=functions.time {JSON_FOLLOWS}{{}}", "Hm.", [NOW]),
    ("harmony", f"{NEXT}<|channel|>analysis to=functions.time code<|message|>{{}}", "", [NOW]),
    ("llama", f'{{"name": "get_weather", "parameters": {GIVEN}}}', "", [PARIS]),
    ("llama", f'<|python_tag|>{{"name": "get_weather", "parameters": {GIVEN}}}', "", [PARIS]),
    ("llama", '{"name": "time", "parameters": {}}; {"name": "time", "parameters": {}}', "", [NOW]),
]
"""A form, an answer in it, its text, and its calls."""
NO_CALLS = [
    ("tagged", "Just text < 3 and <tool"),
    ("tagged", "<tool_call>"),
    ("tagged", "<tool_call>{</tool_call> and more"),
    ("tagged", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("tagged", '<tool_call>{"name": "time", "arguments": [1]}</tool_call>'),
    ("tagged", '<tool_call>{"name": "time", "arguments": {"a": NaN}}</tool_call>'),
    ("tagged", '<tool_call>{"name": ["time"], "arguments": {}}</tool_call>'),
    ("tagged", '<tool_call>{"arguments": {}}</tool_call>'),
    ("tagged", "<tool_call>[" + "[" * 100_000 + "</tool_call>"),
    ("tagged", '<tool_call>{"name": "time", "arguments": ' + '{"a":' * 100_000 + "</tool_call>"),
    ("tagged", "<tool_call><function=time</tool_call>"),
    ("deepseek", f"{OPEN}{BEGIN}time{SEP}{{{END}{CLOSE}"),
    ("deepseek", f"{OPEN}nothing{CLOSE}"),
    ("gemma", "<|tool_call>call:time<tool_call|>"),
    ("gemma", "<|tool_call>call:time{a:b}<tool_call|>"),
    ("mistral", "[TOOL_CALLS]time"),
    ("mistral", f"[TOOL_CALLS]{JSON}"),
    ("tagged", '<tool_call>["time"]</tool_call>'),
    ("phi", "<|tool_call|>[time]<|/tool_call|>"),
    ("granite", f"<|tool_call|>[{JSON}, {{}}]"),
    *(
        ("pythonic", f"{LFM}{body}{LFM_END}")
        for body in (
            "[get_weather('Paris')]",
            "[time(**{'a': 1})]",
            "[time(a=open('x'))]",
            "[time(a=b)]",
            "[time(a=1e999)]",
            "[time(a=b'x')]",
            "[time(a={1, 2})]",
            "[time(a='x]",
            "[time]",
            "time",
            "[time()",
            "[(lambda: 1)()]",
            "[{]",
            "[time(a=" + "[" * 100_000 + ")]",
            "[time(a=" + "-" * 100_000 + "1)]",
            "[time(a=b" + ".c" * 50_000 + ")]",
            "[time(a=1" + "+1" * 50_000 + ")]",
        )
    ),
    ("kimi", f"{KIMI[0]}time{KIMI[1]}{{{KIMI[2]}{KIMI[3]}"),
    ("kimi", f"{KIMI[0]}unknown:0{KIMI[1]}{{}}{KIMI[2]}{KIMI[3]}"),
    ("harmony", f"{COMMENTARY} to=functions.time"),
    ("harmony", f"{COMMENTARY} to=functions.time {JSON_FOLLOWS}{{"),
    ("harmony", f"{COMMENTARY} to=functions.unknown {JSON_FOLLOWS}{{}}"),
    ("harmony", f"Send it to=functions. {JSON_FOLLOWS}{{}}"),
    ("llama", '{"city": "Paris"}'),
    ("llama", f"Here it is: {JSON}"),
    ("llama", f"{JSON} is what I would call."),
    ("llama", "<|python_tag|>time.call()"),
]


def split(
    form: CallForm, answer: str, size: int, single: bool = False
) -> tuple[str, list[ToolCall]]:
    """The text and the calls of an answer that comes in pieces of this size."""
    splitter, text, calls = CallSplitter(form, (WEATHER, TIME), single), "", list[ToolCall]()
    pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
    for piece in pieces:
        said = splitter.push(piece)
        text, calls = text + said.text, [*calls, *said.calls]
    said = splitter.push("", over=True)
    return text + said.text, [*calls, *said.calls]


def read(calls: list[ToolCall]) -> list[Call]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(("name", "answer", "text", "calls"), ANSWERS)
def test_calls_are_told_from_text(
    name: str, answer: str, text: str, calls: list[Call], size: int
) -> None:
    said, found = split(FORM[name], answer, size)
    assert (said, read(found)) == (text, calls)
    assert len({call.id for call in found}) == len(found)
    assert all(len(call.id) == 9 and call.id.isalnum() for call in found)


@pytest.mark.parametrize("size", [1, 5, 10**6])
@pytest.mark.parametrize(("name", "answer"), NO_CALLS, ids=lambda value: str(value)[:30])
def test_what_is_no_call_stays_text(name: str, answer: str, size: int) -> None:
    pieces = answer if size > 5 or len(answer) < 1000 else answer[:50] + answer[-50:]
    assert split(FORM[name], pieces, size) == (pieces, [])


def test_a_call_after_a_malformed_one_is_read() -> None:
    answer = f"a <tool_call>no</tool_call> b <tool_call>{JSON}</tool_call> c"
    for size in (1, 1000):
        text, calls = split(FORM["tagged"], answer, size)
        assert read(calls) == [PARIS] and text == "a <tool_call>no</tool_call> b c"


def test_an_end_mark_within_an_argument_is_passed_over_where_text_came_before() -> None:
    splitter = CallSplitter(FORM["tagged"], (WEATHER,))
    first = splitter.push('Some words: <tool_call>{"name": "get_weather", "arguments": {"city": "')
    assert first == ("Some words:", ())
    assert splitter.push("</tool_call>").calls == ()
    later = splitter.push('"}}</tool_call>Done.')
    assert read(list(later.calls)) == [("get_weather", {"city": "</tool_call>"})]
    whole = 'Some words: <tool_call>{"name": "get_weather", "arguments": {"city": "</tool_call>'
    again = CallSplitter(FORM["tagged"], (WEATHER,))
    assert again.push(whole) == ("Some words:", ())
    assert again.push('"}}</tool_call>Done.').calls[0].arguments == later.calls[0].arguments


def test_a_single_call_ends_the_answer() -> None:
    answer = f"a<tool_call>{JSON}</tool_call><tool_call>{JSON}</tool_call>b"
    for size in (1, 1000):
        text, calls = split(FORM["tagged"], answer, size, single=True)
        assert (text, read(calls)) == ("a", [PARIS])
        text, calls = split(FORM["mistral"], f"a[TOOL_CALLS][{JSON}, {JSON}]", size, single=True)
        assert (text, read(calls)) == ("a", [PARIS])


def test_text_is_not_held_back_for_longer_than_it_may_be_a_call() -> None:
    splitter = CallSplitter(FORM["tagged"], (TIME,))
    assert splitter.push("one <tool").text == "one"
    assert splitter.push("s> two ").text == " <tools> two"
    assert splitter.push("three").text == " three"
    assert splitter.push("\n<tool_call>{").text == "" and splitter.push("}").text == ""
    opening = CallSplitter(FORM["llama"], (TIME,))
    assert opening.push("Hi {").text + opening.push("name").text == "Hi {name"
    assert opening.push(" {").text == " {", "only the first words may be a call"


def test_arguments_are_what_their_schema_says() -> None:
    given = [("city", "5"), ("days", "5"), ("units", "null"), ("other", "7")]
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given)
    answer = f"<tool_call><function=get_weather>\n{body}</function></tool_call>"
    ((_, found),) = read(split(FORM["tagged"], answer, 9)[1])
    assert found == {"city": "5", "days": 5, "units": None, "other": "7"}


def test_a_template_names_its_form() -> None:
    llama = '<|python_tag|> {"name": function name, "parameters": dictionary of argument name and'
    templates = {
        "<tool_call>": "tagged",
        "[TOOL_CALLS]": "mistral",
        llama: "llama",
        OPEN: "deepseek",
        f"{COMMENTARY} ": "harmony",
        "<|tool_call|>": "granite",
        "<|tool_call|>{}<|/tool_call|>": "phi",
        "List of tools: [": "pythonic",
        KIMI[3]: "",
        KIMI[0]: "kimi",
    }
    for template, name in templates.items():
        assert form_of(f"{{{{ x }}}} {template} y") == FORM.get(name)
    assert form_of("{{ messages }}") is None


def test_an_answer_of_white_space_or_of_brackets_is_not_searched_again_and_again() -> None:
    """A search over all of it at each of its characters would take minutes."""
    for name, filler in (("tagged", "\n"), ("llama", "{"), ("llama", "{}"), ("mistral", "[")):
        answer = filler * (30_000 // len(filler))
        assert split(FORM[name], answer, 10) == (answer, [])
