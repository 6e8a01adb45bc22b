"""Chat templates: conversations as prompts, filled in a separate process.

    python -m engine.backends.chat_template LIBRARY

A template comes with a model, from anybody, and is a program: it may loop for hours, or compute a
number with billions of digits, and a thread that does so cannot be stopped. The templates of all
models are therefore filled by one helper process, with the libraries' own code and in their
sandbox. It is started with the first model, and ends with the application, when its input is
closed.

A request is a line of JSON on its standard input, and the reply a line on its standard output: a
text, or the error that the template raised. A template that takes too long ends the process, and
the next text starts a new one: the timer is a native thread that does not need Python's lock, so it
can also stop a single operation that never ends. If the system supports it, the memory of the
process is limited too.
"""

import atexit
import faulthandler
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from itertools import count
from time import monotonic
from typing import IO, TYPE_CHECKING, Any, Literal

from engine.backends.special_tokens import SpecialTokens
from engine.errors import PromptError
from engine.process import command, ending, environment
from engine.settings import ThinkingChoice
from engine.tools import CallForm, as_json, form_of, frame_of
from engine.types import Message, Tool, ToolCall

if TYPE_CHECKING:
    from engine.backends.base import TokenizerInfo

SECONDS = 5.0
"""The most seconds for a template. Usually it takes a few ms at first, and less than one later."""
MEMORY = 1 << 30
"""The most bytes of memory for templates."""
LONGEST = 1 << 24
"""The most characters of a text; far more than fit into the context of any model."""

Library = Literal["llama_cpp", "transformers"]
"""The library whose way of filling templates is used."""
Turn = dict[str, Any]
"""A message as templates read it, in OpenAI's form."""
Fill = Callable[[Sequence[Turn], Mapping[str, Any]], str]
"""Fills one template with turns and with values for variables that it may use."""
SWITCHES = ("enable_thinking", "thinking")
"""The names of the template variable that switches thinking on or off."""
EFFORT = "reasoning_effort"
"""The name of the template variable that says how much to think."""


class TemplateError(Exception):
    """A template raised an exception; the text is that of the exception."""


class TemplateStopped(Exception):
    """A template did not finish; the text is the reason."""


class Filler:
    """The helper process: started when it is needed, one request at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def prepare(self, library: Library) -> None:
        """Start the process, if there is none, without waiting until it is ready."""
        with self.lock:
            self.running(library)

    def running(self, library: Library) -> subprocess.Popen[bytes]:
        """The process; a new one, which begins by importing `library`, if none is running."""
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self.process = subprocess.Popen(
                command("engine.backends.chat_template", library),
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self.process

    def fill(
        self,
        library: Library,
        template: str,
        tokens: Mapping[str, str],
        turns: Sequence[Turn] | None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Fill a template with turns; with None it is only parsed, and "" is returned.

        `tokens` are the special tokens that it may use ("bos_token"), `variables` its other
        variables. Raises TemplateError and TemplateStopped.
        """
        request = {"library": library, "template": template, "tokens": tokens, "turns": turns}
        answer = self.send(library, {**request, "variables": variables or {}, "seconds": SECONDS})
        if "error" in answer:
            raise TemplateError(answer["error"])
        return str(answer["text"])

    def send(self, library: Library, request: dict[str, Any]) -> dict[str, str]:
        """Send a request and return the reply. Raises TemplateStopped if the process ends
        instead."""
        line = json.dumps(request).encode() + b"\n"
        with self.lock:
            process = self.running(library)
            assert process.stdin is not None and process.stdout is not None
            begun = monotonic()
            try:
                process.stdin.write(line)
                process.stdin.flush()
                found = process.stdout.readline()
            except OSError:
                found = b""
            except BaseException:
                # A late reply would be mistaken for the reply to the next request.
                self.stop()
                raise
            if found.endswith(b"\n"):
                answer: dict[str, str] = json.loads(found)
                return answer
            status = self.stop()
        if monotonic() - begun >= request["seconds"]:
            raise TemplateStopped(f"it did not end within {request['seconds']:.0f} s")
        raise TemplateStopped(f"the process that fills it in ended ({ending(status)})")

    def stop(self) -> int:
        """End the process, if there is one. Returns its exit status, 0 without a process."""
        process, self.process = self.process, None
        if process is None:
            return 0
        process.kill()
        with process:
            return process.wait()


FILLER = Filler()
"""The helper process of all models."""
atexit.register(FILLER.stop)


def switched(thinking: ThinkingChoice) -> dict[str, bool | str]:
    """The variables that say whether to think, or how much; none if the template decides."""
    if isinstance(thinking, str):
        return {EFFORT: thinking}
    return {} if thinking is None else dict.fromkeys(SWITCHES, thinking)


def can_choose(template: str, fill: Fill, one: ThinkingChoice, other: ThinkingChoice) -> bool:
    """Whether it matters to a template which of two values is chosen. It may name the variable and
    ignore it, so it is filled with both values."""
    if not any(name in template for name in switched(one)):
        return False
    question = [{"role": "user", "content": "Hi."}]
    try:
        return fill(question, switched(one)) != fill(question, switched(other))
    except (TemplateError, TemplateStopped):
        return False


PROBE = Tool("probe_tool", "It probes.", '{"type": "object", "properties": {"at": {}}}')
PROBED = ToolCall("000000000", PROBE.name, '{"at": "probe_value"}')


def call_form(template: str, fill: Fill) -> CallForm | None:
    """The form in which a template writes calls of tools, None if it writes none or the form is not
    known. This is tested by filling it: some templates want the arguments as a text, or all of the
    call."""
    form = form_of(template)
    if form is None or "tools" not in template:
        return None
    messages = (
        Message("user", "Hi."),
        Message("assistant", "", calls=(PROBED,)),
        Message("tool", "probe_result", call=PROBED),
    )
    tried = [form._replace(inline=False, text=text) for text in (False, True)]
    for one in (*tried, form) if form.inline else tried:
        turns = [inlined(turn, one) for turn in turns_of(messages, one)]
        try:
            shown = fill(turns, {"tools": [described(PROBE)]})
        except (TemplateError, TemplateStopped):
            continue
        wanted = (PROBE.name, PROBE.description, "probe_value", "probe_result")
        if all(word in shown for word in wanted) and "{'at'" not in shown:
            return one._replace(frame=frame_of(one, shown, PROBE, PROBED.arguments))
    return None


def described(tool: Tool) -> Turn:
    function = {"name": tool.name, "description": tool.description}
    return {"type": "function", "function": function | {"parameters": json.loads(tool.parameters)}}


def turns_of(messages: Iterable[Message], form: CallForm | None) -> Iterator[Turn]:
    """Messages as templates read them, with the calls as templates of this form want them."""
    ids, numbers = dict[str, str](), count()
    for message in one_by_one(messages) if form and form.single else messages:
        turn: Turn = {"role": message.role, "content": message.content}
        for call in message.calls:
            named = form.id.format(name=call.name, number=next(numbers)) if form else ""
            ids[call.id] = named or short(call.id)
            arguments = call.arguments if form and form.text else json.loads(call.arguments)
            function = {"name": call.name, "arguments": arguments}
            shown = {"id": ids[call.id], "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(shown)
        if message.call:
            id = ids.get(message.call.id, short(message.call.id))
            turn |= {"tool_call_id": id, "name": message.call.name}
        yield turn


def inlined(turn: Turn, form: CallForm | None) -> Turn:
    """A turn with its calls in its text, if the template of this form shows none."""
    if form is None or not form.inline or "tool_calls" not in turn:
        return turn
    calls = as_json([call["function"] for call in turn.pop("tool_calls")])
    return turn | {"content": f"{turn['content']}{form.begins[0]}{calls}{form.end}"}


def one_by_one(messages: Iterable[Message]) -> Iterator[Message]:
    """Messages with one call each: of several calls, the later ones stand before their results."""
    later = set[ToolCall]()
    for each in messages:
        if each.call in later:
            later.remove(each.call)
            yield Message("assistant", "", (each.call,))
        later |= set(each.calls[1:])
        yield replace(each, calls=each.calls[:1])


def short(id: str) -> str:
    """An id of nine letters and digits: Mistral's templates refuse any other."""
    return id if re.fullmatch("[0-9A-Za-z]{9}", id) else sha256(id.encode()).hexdigest()[:9]


def conversation(
    messages: Sequence[Message],
    fill: Fill | None,
    begin: str,
    info: "TokenizerInfo",
    special: SpecialTokens,
    thinking: ThinkingChoice = None,
    tools: Sequence[Tool] = (),
) -> str:
    """The prompt text of a conversation by `fill`, the chat template of the model of `info`, with
    LITERAL in the `special` tokens that messages, calls and tools spell. Without a template, the
    text consists of plain lines after `begin`. Raises PromptError.
    """
    if fill is None:
        messages = special.messages(messages)
        lines = "".join(f"{m.role.capitalize()}: {m.content}\n\n" for m in messages)
        return f"{begin}{lines}Assistant:"
    try:
        form: CallForm | None = getattr(info, "calls", None)  # A bare tokenizer has none.
        marked = special.turns([*turns_of(messages, form)])
        turns = [inlined(turn, form) for turn in marked]
        variables: dict[str, Any] = {**switched(thinking)}
        if tools:
            variables["tools"] = special.within([described(tool) for tool in tools])
        return fill(turns, variables)
    except TemplateStopped as stopped:
        raise PromptError(
            f"The chat template of {info.name} was stopped: {stopped}. Choose another model, or "
            "another file of this one."
        ) from stopped
    except Exception as error:
        # A template may raise anything, most often because it has no place for a system prompt.
        if messages and messages[0].role == "system" and len(messages) > 1:
            head = f"{messages[0].content}\n\n{messages[1].content}"
            joined = [replace(messages[1], content=head), *messages[2:]]
            return conversation(joined, fill, begin, info, special, thinking, tools)
        raise PromptError(
            f"The chat template of {info.name} refuses this conversation: {error}. "
            "Check the order of the messages and the system prompt."
        ) from error


# the helper process

Filling = Callable[[list[Turn], dict[str, Any]], str]


@lru_cache(maxsize=16)
def llama_cpp(template: str, *tokens: tuple[str, str]) -> Filling:
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    names: dict[str, Any] = dict(tokens)
    formatter = Jinja2ChatFormatter(template, **names)

    def fill(turns: list[Turn], variables: dict[str, Any]) -> str:
        messages: Any = turns
        return str(formatter(messages=messages, **variables).prompt)

    return fill


def transformers(template: str, *tokens: tuple[str, str]) -> Filling:
    from transformers.utils.chat_template_utils import render_jinja_template

    names: dict[str, Any] = dict(tokens)

    def fill(turns: list[Turn], variables: dict[str, Any]) -> str:
        texts: Any = render_jinja_template(
            [turns], chat_template=template, add_generation_prompt=True, **names, **variables
        )
        return str(texts[0][0])

    return fill


LIBRARIES: dict[str, tuple[str, Callable[..., Filling]]] = {
    "llama_cpp": ("llama_cpp.llama_chat_format", llama_cpp),
    "transformers": ("transformers.utils.chat_template_utils", transformers),
}
"""The module that each library imports, which takes a fraction of a second, and its constructor of
fillers."""


def answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        tokens = request["tokens"].items()
        fill = LIBRARIES[request["library"]][1](request["template"], *tokens)
        turns = request["turns"]
        text = "" if turns is None else fill(turns, request["variables"])
    except MemoryError:
        return {"error": f"it needs more than {MEMORY >> 20:,} MiB of memory"}
    except Exception as error:
        # Jinja raises several types, and a template may raise any.
        return {"error": str(error).strip() or type(error).__name__}
    if len(text) > LONGEST:
        return {"error": f"it makes a text of {len(text):,} characters"}
    return {"text": text}


def limit_memory() -> None:
    with suppress(ImportError, ValueError, OSError):
        import resource

        import psutil

        most = psutil.Process().memory_info().vms + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def serve(requests: IO[bytes], answers: IO[bytes], nowhere: IO[str]) -> None:
    for line in requests:
        request = json.loads(line)
        __import__(LIBRARIES[request["library"]][0])
        faulthandler.dump_traceback_later(request["seconds"], exit=True, file=nowhere)
        found = json.dumps(answer(request)).encode() + b"\n"
        faulthandler.cancel_dump_traceback_later()
        answers.write(found)
        answers.flush()


def main(library: str) -> None:
    __import__(LIBRARIES[library][0])
    limit_memory()
    # The output of libraries must not mix with the replies.
    with os.fdopen(os.dup(1), "wb") as answers, open(os.devnull, "w") as nowhere:
        os.dup2(2, 1)
        serve(sys.stdin.buffer, answers, nowhere)


if __name__ == "__main__":
    main(sys.argv[1])
