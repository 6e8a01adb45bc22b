"""The process that fills chat templates: it ends when a template does not, and only it does."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import llama_cpp
import psutil
import pytest
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from engine.backends import chat_template
from engine.backends.chat_template import (
    Filler,
    Library,
    TemplateError,
    TemplateStopped,
    call_form,
    conversation,
)
from engine.backends.special_tokens import LITERAL, SpecialTokens
from engine.errors import PromptError
from engine.models.loaders import load
from engine.tools import CallSplitter
from engine.types import Message, Tool, ToolCall
from tests.conftest import EMBEDDED, ROOT
from tests.support.gguf_files import opened_gguf, tiny_gguf
from tests.support.scripted import CALLS
from tests.support.toy import ToyBackend

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS = [{"role": "user", "content": "hi"}]
MESSAGES = [Message("system", "be kind"), Message("user", "hi")]
LIBRARIES: tuple[Library, ...] = ("llama_cpp", "transformers")
LOOPS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
READ = "{{ 9 ** (9 ** 9) }}"
"""Jinja computes it when it reads the template."""
POWER = "{% set a = messages|length + 8 %}{{ a ** (a ** a) }}"
"""A single operation, which no exception of Python interrupts."""


@pytest.fixture
def filler() -> Iterator[Filler]:
    made = Filler()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def shared() -> Iterator[Filler]:
    """For templates that end and do no harm: a process takes long to start."""
    made = Filler()
    yield made
    made.stop()


@contextmanager
def hasty() -> Iterator[None]:
    """A template that is to be stopped is stopped soon. Others have the usual time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chat_template, "SECONDS", 1.0)
        yield


@pytest.fixture
def background(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes seconds to begin, or to fill so much memory."""
    monkeypatch.setattr(chat_template, "SECONDS", 120.0)


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("template", [LOOPS, READ, POWER], ids=["loops", "read", "power"])
def test_a_template_that_never_ends_is_stopped(
    filler: Filler, background: None, library: Library, template: str
) -> None:
    filler.prepare(library)
    first = filler.process
    with hasty(), pytest.raises(TemplateStopped, match="it did not end within 1 s"):
        filler.fill(library, template, TOKENS, TURNS)
    assert first is not None and first.poll() is not None and filler.process is None
    assert filler.fill(library, "{{ messages[0].content }}", TOKENS, TURNS) == "hi"


@pytest.mark.soak(stay=3)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ 'x' * (10 ** 10) }}", "it needs more than 1,024 MiB of memory"),
        ("{{ '%99999999999d' % 7 }}", "it needs more than 1,024 MiB of memory"),
        (
            "{% set n = namespace(a='x' * 999) %}{% for i in range(99) %}{% set n.a = n.a + n.a %}"
            "{% endfor %}",
            "it needs more than 1,024 MiB of memory",
        ),
        (
            "{% for i in range(90) %}{{ 'x' * 1000000 }}{% endfor %}",
            "it makes a text of 90,000,000 characters",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ raise_exception('') }}", "Error"),
        ("{{ raise_exception('no\nway') }}", "no\nway"),
        ("{% for %}", "xpected"),
    ],
)
def test_what_a_template_raises_is_told_and_the_process_goes_on(
    filler: Filler, background: None, library: Library, template: str, problem: str
) -> None:
    filler.prepare(library)
    first = filler.process
    with pytest.raises(TemplateError, match=problem):
        filler.fill(library, template, TOKENS, TURNS)
    assert filler.fill(library, "{{ bos_token }}", TOKENS, TURNS) == "<s>"
    assert filler.process is first


def test_a_process_that_was_ended_is_started_again(filler: Filler) -> None:
    assert filler.fill("llama_cpp", "one", TOKENS, TURNS) == "one"
    process = filler.process
    assert process is not None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert filler.fill("llama_cpp", "two", TOKENS, TURNS) == "two"
    assert filler.process is not process


def once_waited_for(filler: Filler, act: Callable[[], object]) -> None:
    """Do something when the process was sent its next request, and its reply is waited for."""
    assert filler.process is not None and filler.process.stdout is not None
    answers: Any = filler.process.stdout
    read = answers.readline

    def readline() -> Any:
        answers.readline = read
        act()
        return read()

    answers.readline = readline


def test_a_process_that_ends_in_the_middle_is_told(filler: Filler) -> None:
    assert filler.fill("llama_cpp", "first", TOKENS, TURNS) == "first"
    assert filler.process is not None
    once_waited_for(filler, filler.process.kill)
    with pytest.raises(TemplateStopped, match=r"the process that fills it in ended \(SIGKILL\)"):
        filler.fill("llama_cpp", LOOPS, TOKENS, TURNS)


def test_an_answer_that_was_not_waited_for_is_not_taken_for_the_next(filler: Filler) -> None:
    """Control-C in the middle of a template."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    filler.prepare("llama_cpp")
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        once_waited_for(filler, lambda: signal.setitimer(signal.ITIMER_REAL, 0.1))
        with pytest.raises(KeyboardInterrupt):
            filler.fill("llama_cpp", LOOPS, TOKENS, TURNS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert filler.fill("llama_cpp", "next", TOKENS, TURNS) == "next"


def test_threads_get_their_own_answers(shared: Filler) -> None:
    wrong: list[str] = []

    def ask(number: int) -> None:
        for at in range(50):
            content = f"{number} {at}"
            text = shared.fill(
                LIBRARIES[number % 2],
                "{{ messages[0].content }}",
                TOKENS,
                [{"role": "user", "content": content}],
            )
            if text != content:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


SCRIPT = """
import os, sys, threading, time
from engine.backends import chat_template
chat_template.SECONDS = 2.0
tokens = {"bos_token": "", "eos_token": ""}
chat_template.FILLER.fill("llama_cpp", "x", tokens, [])
work = threading.Thread(target=chat_template.FILLER.fill, daemon=True,
                        args=("llama_cpp", sys.argv[2], tokens, []))
work.start()
work.join(0.5)
print(chat_template.FILLER.process.pid, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.soak(stay=2)
@pytest.mark.parametrize("end", ["ends", "killed"])
@pytest.mark.parametrize("template", ["x", LOOPS], ids=["idle", "busy"])
def test_it_ends_with_the_application(end: str, template: str) -> None:
    """Also in the middle of a template that never ends, when nobody is left to stop it."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, end, template],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == (-9 if end == "killed" else 0), done.stderr
    gone, left = psutil.wait_procs(known(int(done.stdout)), timeout=60)
    assert not left


def known(number: int) -> list[psutil.Process]:
    """The process of that number, if there is one."""
    try:
        return [psutil.Process(number)]
    except psutil.NoSuchProcess:
        return []


# The models.


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The templates that are asked for, for all models."""
    asked: list[str] = []
    before = chat_template.FILLER.send

    def send(library: Library, request: dict[str, Any]) -> dict[str, str]:
        asked.append(request["template"])
        return before(library, request)

    monkeypatch.setattr(chat_template.FILLER, "send", send)
    return asked


@pytest.fixture
def hasty_once_read(monkeypatch: pytest.MonkeyPatch, counted: list[str]) -> None:
    """Templates that are filled are stopped soon; those that are only read are not."""
    before = chat_template.FILLER.send

    def send(library: Library, request: dict[str, Any]) -> dict[str, str]:
        seconds = request["seconds"] if request["turns"] is None else 1.0
        return before(library, {**request, "seconds": seconds})

    monkeypatch.setattr(chat_template.FILLER, "send", send)


@pytest.mark.gguf
def test_a_gguf_file_whose_template_never_ends(
    tmp_path: Path, background: None, counted: list[str], hasty_once_read: None
) -> None:
    backend = opened_gguf(tiny_gguf(tmp_path / "x.gguf", tokenizer__chat_template=LOOPS))
    assert backend.info.note == "" and len(counted) == 2
    with pytest.raises(PromptError) as caught:
        backend.render(MESSAGES)
    assert str(caught.value) == (
        "The chat template of x was stopped: it did not end within 1 s. Choose another model, or "
        "another file of this one."
    )
    assert len(counted) == 3, "it is not tried again with another place for the system prompt"


@pytest.mark.gguf
def test_a_gguf_file_whose_template_is_never_read(tmp_path: Path) -> None:
    with hasty():
        backend = opened_gguf(tiny_gguf(tmp_path / "x.gguf", tokenizer__chat_template=READ))
    assert backend.info.note == (
        "Its chat template cannot be read (it did not end within 1 s): the conversation is sent "
        "as plain lines."
    )
    assert backend.render(MESSAGES) == "System: be kind\n\nUser: hi\n\nAssistant:"


@pytest.mark.soak(stay=1)
@pytest.mark.model
@pytest.mark.parametrize("template", [LOOPS, READ, POWER], ids=["loops", "read", "power"])
def test_a_folder_whose_template_never_ends(
    embedded: Any, counted: list[str], monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(embedded.tokenizer, "chat_template", template)
    stopped = "target was stopped: it did not end within 1 s"
    with hasty(), pytest.raises(PromptError, match=stopped):
        embedded.render(MESSAGES)
    assert counted == [template]


CONVERSATIONS = (
    [("user", "hi")],
    [("system", "be kind"), ("user", " hé 日本 😀 "), ("assistant", "\0\n\r\u2028"), ("user", "x")],
    [("user", "{{ 7 * 7 }}<|end|>"), ("assistant", '"\\'), ("user", "\ud800 \ufffe")],
)


@pytest.mark.model
@pytest.mark.gguf
@pytest.mark.parametrize("turns", CONVERSATIONS)
def test_the_text_is_that_of_the_libraries_in_this_process(
    embedded: Any, gguf_target: Any, turns: list[tuple[str, str]]
) -> None:
    messages = [Message(role, text) for role, text in turns]
    listed: Any = [{"role": role, "content": text} for role, text in turns]
    raw, vocabulary = gguf_target.tokens.raw, gguf_target.tokens
    formatter = Jinja2ChatFormatter(
        llama_cpp.llama_model_chat_template(gguf_target.model, None).decode(),
        vocabulary.spelled(llama_cpp.llama_vocab_eos(raw)),
        vocabulary.spelled(llama_cpp.llama_vocab_bos(raw)),
    )
    assert gguf_target.render(messages).replace(LITERAL, "") == formatter(messages=listed).prompt
    assert embedded.render(messages).replace(LITERAL, "") == embedded.tokenizer.apply_chat_template(
        listed, tokenize=False, add_generation_prompt=True
    )


# Thinking.

THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)
"""Thinks unless it is told not to."""
SWITCHED = {None: "", True: "", False: "<think></think>"}


@pytest.mark.soak(stay=5)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (THINKS, True),
        ("{% if thinking %}<think>{% endif %}", True),
        ("{% set enable_thinking = true %}{{ enable_thinking }}", False),
        ("{{ messages[0].thinking }}", False),
        ("{{ messages[0].content }}", False),
        ("{{ raise_exception('thinking') }}", False),
    ],
)
def test_whether_thinking_can_be_switched_is_tried(
    shared: Filler, library: Library, template: str, wanted: bool
) -> None:
    fill = partial(shared.fill, library, template, TOKENS)
    assert chat_template.can_choose(template, fill, True, False) is wanted
    assert not chat_template.can_choose(template, fill, "low", "high")


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("Reasoning: {{ reasoning_effort | default('medium') }}", True),
        ("{% if reasoning_effort == 'none' %}/no_think{% endif %}", False),
        ("{% if reasoning_effort %}{{ raise_exception('no') }}{% endif %}", False),
    ],
)
def test_whether_a_template_knows_efforts_is_tried(
    shared: Filler, template: str, wanted: bool
) -> None:
    fill = partial(shared.fill, "transformers", template, TOKENS)
    assert chat_template.can_choose(template, fill, "low", "high") is wanted
    assert not chat_template.can_choose(template, fill, True, False)


def test_no_argument_of_the_process_holds_a_conversation(filler: Filler) -> None:
    """Everybody on a machine may read those."""
    filler.fill("llama_cpp", "{{ messages[0].content }}", TOKENS, TURNS)
    assert filler.process is not None
    words = psutil.Process(filler.process.pid).cmdline()
    assert words[-2:] == ["engine.backends.chat_template", "llama_cpp"]


HERMES = (
    "{%- if tools %}<|im_start|>system\n<tools>\n{%- for tool in tools %}\n{{ tool | tojson }}"
    "{%- endfor %}\n</tools>\nReturn <tool_call> objects.<|im_end|>\n{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ m.content }}\n</tool_response><|im_end|>\n{%- else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{%- for call in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{%- endfor %}<|im_end|>\n'
    "{%- endif %}{%- endfor %}<|im_start|>assistant\n"
)
MISTRAL = (
    "{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{%- elif m.role == 'tool' %}[TOOL_RESULTS] {\"content\": {{ m.content | tojson }}, "
    '"call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{%- elif m.tool_calls %}[TOOL_CALLS] ['
    "{%- for call in m.tool_calls %}{%- if call.id | length != 9 %}"
    "{{ raise_exception('ids have 9 letters') }}{%- endif %}{{ call.function | tojson }}"
    "{%- endfor %}]</s>{%- else %}{{ m.content }}</s>{%- endif %}{%- endfor %}"
)
DEEPSEEK = (
    "{%- for tool in tools or [] %}{{ tool | tojson }}{%- endfor %}"
    "{%- for m in messages %}{%- for call in m.tool_calls or [] %}"
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name "
    "+ '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>' }}"
    "{%- endfor %}{{ m.content }}{%- endfor %}"
)
JOINS = DEEPSEEK.replace("+ call.function.arguments +", "~ call.function.arguments ~")
"""It writes an object as Python does, which is no JSON."""
HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{%- if tools %}<|start|>developer<|message|># Tools\n\nnamespace functions {\n"
    "{%- for tool in tools %}\n// {{ tool.function.description }}\n"
    "type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;"
    "{%- endfor %}\n}<|end|>{%- endif %}"
    "{%- for m in messages %}{%- if m.tool_calls %}"
    "{%- if m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>"
    "{%- endif %}{%- set call = m.tool_calls[0].function %}"
    "{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{- call.arguments | tojson }}<|call|>"
    "{%- elif m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary"
    "<|message|>{{ m.content | tojson }}<|end|>"
    "{%- else %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{%- endif %}{%- endfor %}<|start|>assistant"
)
"""It writes the call alone, and the text before it as thinking."""
PHI = (
    "<|system|>{%- for tool in tools or [] %}<|tool|>{{ tool.function | tojson }}<|/tool|>"
    "{%- endfor %}<|end|>{%- for m in messages %}"
    "{%- if m.role == 'tool' %}<|tool_response|>{{ m.content | tojson }}<|end|>{%- else %}"
    "<|{{ m.role }}|>{{ m.content }}{%- for call in m.tool_calls or [] %}"
    "<|tool_call|>{{ call.function | tojson }}<|/tool_call|>{%- endfor %}<|end|>{%- endif %}"
    "{%- endfor %}<|assistant|>"
)
GRANITE = (
    "{%- if tools %}<|start_of_role|>available_tools<|end_of_role|>"
    "{{ tools | tojson(indent=4) }}</s>{%- endif %}"
    "{%- for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
    "{%- if m.tool_calls %}<|tool_call|>"
    "{{ m.tool_calls | map(attribute='function') | list | tojson(indent=4) }}{%- endif %}</s>"
    "{%- endfor %}<|start_of_role|>assistant<|end_of_role|>"
)
LFM = (
    "{%- if tools %}<|im_start|>system\nList of tools: {{ tools | tojson }}<|im_end|>\n{%- endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{%- if m.tool_calls %}"
    "<|tool_call_start|>[{%- for call in m.tool_calls %}{{ call.function.name }}("
    "{%- for name, value in call.function.arguments.items() %}{{ name }}="
    "{%- if value is string %}'{{ value }}'{%- else %}{{ value }}{%- endif %}"
    "{%- if not loop.last %}, {% endif %}{%- endfor %}){%- endfor %}]<|tool_call_end|>{%- endif %}"
    "<|im_end|>\n{%- endfor %}<|im_start|>assistant\n"
)
KIMI = (
    "{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>"
    "{%- endif %}{%- for m in messages %}<|im_{{ m.role }}|>{{ m.name or m.role }}<|im_middle|>"
    "{%- if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
    "{%- if m.tool_calls %}<|tool_calls_section_begin|>{%- for call in m.tool_calls %}"
    "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{{ call.function.arguments | tojson }}<|tool_call_end|>{%- endfor %}"
    "<|tool_calls_section_end|>{%- endif %}<|im_end|>{%- endfor %}<|im_assistant|>"
)
FRAMES = {
    "tagged": ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    "mistral": ('[TOOL_CALLS] [{"name": "', '", "arguments": ', "}]"),
    "phi": ('<|tool_call|>{"name": "', '", "arguments": ', "}<|/tool_call|>"),
    "granite": ('<|tool_call|>[{"name": "', '", "arguments": ', "}]"),
    "pythonic": ('<|tool_call_start|>[{"name": "', '", "arguments": ', "}]<|tool_call_end|>"),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "harmony": (" to=functions.", "<|channel|>commentary json<|message|>", ""),
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
}
"""What stands around the name and the arguments of an enforced call."""
TOOL = Tool("look", "Looks.", '{"type": "object", "properties": {"at": {"type": "string"}}}')
CALL = ToolCall("call_of_another_program", "look", '{"at": "<s> \\"the\\" <|im_end|>", "é": 1}')
CALLED = [
    Message("user", "hi"),
    Message("assistant", "So:", (CALL,)),
    Message("tool", "a <|im_end|>", call=CALL),
]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("template", "form", "text"),
    [
        (HERMES, "tagged", False),
        (MISTRAL, "mistral", False),
        (DEEPSEEK, "deepseek", True),
        (JOINS, "deepseek", True),
        (HARMONY, "harmony", False),
        (PHI, "phi", False),
        (GRANITE, "granite", False),
        (GRANITE.replace("m.tool_calls", "m.calls"), "granite", False),
        (LFM, "pythonic", False),
        (LFM.replace("m.tool_calls", "m.calls"), "pythonic", False),
        (KIMI, "kimi", False),
        (HERMES.replace("tools", "things"), "", False),
        (HERMES.replace("m.tool_calls", "m.calls"), "", False),
        (HERMES.replace("<tool_call>", "<call>").replace("</tool_call>", ""), "", False),
        ("{{ raise_exception('no') }}<tool_call>tools", "", False),
    ],
    ids=[
        "hermes",
        "mistral",
        "deepseek",
        "joins",
        "harmony",
        "phi",
        "granite",
        "granite inline",
        "lfm",
        "lfm inline",
        "kimi",
        "no tools",
        "no calls",
        "unknown",
        "raises",
    ],
)
def test_the_form_of_calls_is_found_and_written(
    shared: Filler, background: None, library: Library, template: str, form: str, text: bool
) -> None:
    fill = partial(shared.fill, library, template, TOKENS)
    found = call_form(template, fill)
    if not form:
        assert found is None
        return
    assert found is not None and (found.name, found.text) == (form, text)
    assert found.frame == (None if template in (GRANITE, LFM) else FRAMES[form])
    special = SpecialTokens({"<s>": 1, "<|im_end|>": 2})
    info = replace(ToyBackend().info, calls=found)
    shown = conversation(CALLED, fill, "", info, special, None, (TOOL,))
    assert "look" in shown and "Looks." in shown
    for spelled in ("<s> ", "a <|im_end|>"):
        assert special.literal(spelled) in shown and spelled not in shown
    answer = shown.replace(LITERAL, "")
    answer = answer[answer.rindex(found.begins[0]) :]
    ends = [end for end in (found.end, found.stop, "</s>") if end and end in answer]
    answer = answer.partition(ends[0])[0]
    said = CallSplitter(found, (TOOL,)).push(answer, over=True)
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == [
        ("look", json.loads(CALL.arguments))
    ]


def test_a_template_of_single_calls_shows_each_of_several_with_its_result(
    shared: Filler, background: None
) -> None:
    fill = partial(shared.fill, "transformers", HARMONY, TOKENS)
    info = replace(ToyBackend().info, calls=call_form(HARMONY, fill))
    calls = tuple(ToolCall(str(n), f"tool{n}", f'{{"n": {n}}}') for n in range(3))
    results = [Message("tool", f"found {call.id}", call=call) for call in calls]
    again = Message("assistant", "", calls[1:2]), results[1]
    messages = [Message("user", "hi"), Message("assistant", "So:", calls), *results, *again]
    shown = conversation(messages, fill, "", info, SpecialTokens({}))
    parts = [f'to=functions.tool{n}<|channel|>commentary json<|message|>{{"n": {n}}}<|call|>'
             f'<|start|>functions.tool{n} to=assistant<|channel|>commentary<|message|>"found {n}"'
             for n in range(3)]  # fmt: skip
    assert [shown.count(part) for part in parts] == [1, 2, 1] and shown.count("So:") == 1
    assert shown.count("<|call|>") == 4


def test_kimi_s_calls_are_numbered_through_the_conversation(
    shared: Filler, background: None
) -> None:
    fill = partial(shared.fill, "transformers", KIMI, TOKENS)
    info = replace(ToyBackend().info, calls=call_form(KIMI, fill))
    calls = [ToolCall(f"call_{n}", "look", "{}") for n in range(3)]
    results = [Message("tool", f"found {n}", call=call) for n, call in enumerate(calls)]
    messages = [
        Message("user", "hi"),
        *(Message("assistant", "", (calls[0], calls[1])), results[1], results[0]),
        *(Message("assistant", "", (calls[2],)), results[2]),
    ]
    shown = conversation(messages, fill, "", info, SpecialTokens({}))
    for number in range(3):
        assert f"<|tool_call_begin|>functions.look:{number}<|tool_call_argument_begin|>" in shown
        assert f"## Return of functions.look:{number}\nfound {number}<" in shown


def with_template(kind: str, template: str, folder: Path) -> Any:
    """A loaded model whose files bring this template."""
    if kind == "gguf":
        return opened_gguf(tiny_gguf(folder / "x.gguf", tokenizer__chat_template=template))
    shutil.copytree(EMBEDDED.with_name("small"), folder / "x")
    (folder / "x" / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "x" / "chat_template.jinja").write_text(template)
    return load(str(folder / "x"))


of_both = pytest.mark.parametrize(
    "kind",
    [pytest.param("gguf", marks=pytest.mark.gguf), pytest.param("folder", marks=pytest.mark.model)],
)


@of_both
def test_a_model_thinks_or_not_as_it_is_told(kind: str, tmp_path: Path) -> None:
    backend = with_template(kind, THINKS, tmp_path)
    assert backend.info.can_think and not backend.info.has_efforts and backend.info.calls is None
    for thinking, end in SWITCHED.items():
        assert backend.render(MESSAGES, thinking).endswith(f"hi<|assistant|>{end}")


@of_both
def test_a_model_is_told_how_much_to_think(kind: str, tmp_path: Path) -> None:
    backend = with_template(kind, HARMONY, tmp_path)
    assert backend.info.has_efforts and not backend.info.can_think
    for effort in ("low", "high", None):
        assert f"Reasoning: {effort or 'medium'}<|end|>" in backend.render(MESSAGES, effort)


@of_both
def test_a_model_calls_tools_as_its_template_says(kind: str, tmp_path: Path) -> None:
    backend = with_template(kind, HERMES, tmp_path)
    assert backend.info.calls == CALLS and not backend.info.can_think
    assert '"name": "look"' in backend.render(CALLED, None, (TOOL,))
    assert '<tool_call>\n{"name": "look"' in backend.render(CALLED)
