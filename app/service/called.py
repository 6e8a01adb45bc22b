"""Calls of tools in a conversation: how their results are stored, and how the model reads both.

A call is part of the text of the answer that made it. Its result is a message of the role "tool",
whose first line is the call (the name of the tool, a space, the arguments as JSON); the result
follows. So a result keeps its call in every copy, export and import.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engine.text import read_json
from engine.thinking import MARKS, named, thought_in
from engine.tools import FORMS, CallForm, Said, said_in
from engine.types import Message, Tool, ToolCall
from storage.conversations import StoredMessage
from storage.traces import Worth


class Result(NamedTuple):
    call: ToolCall
    text: str


def content_of(call: ToolCall, result: str) -> str:
    """The content of the message with the result of a call."""
    return f"{call.name} {call.arguments}\n{result}"


def result_of(message: StoredMessage) -> Result | None:
    """The result in a message; None if it has another role, or another form (an import may)."""
    if message.role != "tool":
        return None
    line, _, text = message.content.partition("\n")
    name, _, arguments = line.partition(" ")
    try:
        readable = isinstance(read_json(arguments), dict)
    except (ValueError, RecursionError):
        return None
    return Result(ToolCall(message.id, name, arguments), text) if readable else None


def results_after(messages: Sequence[StoredMessage], at: int) -> list[Result]:
    """The results of the calls in the answer `messages[at]`; [] if it is no answer."""
    found: list[Result] = []
    while messages[at].role == "assistant" and at + 1 + len(found) < len(messages):
        if (result := result_of(messages[at + 1 + len(found)])) is None:
            break
        found.append(result)
    return found


def said(
    answer: StoredMessage,
    tools: Sequence[Tool],
    worths: Mapping[str, Worth],
    single: bool = False,
    forms: Sequence[CallForm] = FORMS,
) -> Said:
    """What an answer says, with its thinking, and its calls of these tools in one of these forms;
    with `single` the text before the first call, and that call. `worths` are the figures of its
    conversation's runs."""
    worth = worths.get(answer.run_id or "")
    marks, thinks = (named(worth.marks), worth.thinks) if worth else (MARKS, False)
    text, thought = answer.content, thought_in(answer.content, marks, thinks)
    start = 0
    if thought is not None:
        start = len(text) if thought.answer is None else thought.answer
    found = said_in(text[start:], tools, single, forms)
    return Said(text[:start] + found.text, found.calls)


def calls_begin(
    messages: Sequence[StoredMessage], at: int, waiting: str, worths: Mapping[str, Worth]
) -> int | None:
    """Where the calls begin in the text of the answer `messages[at]`; None if it has no result yet,
    and no call of the tool `waiting` waits for one."""
    names = [result.call.name for result in results_after(messages, at)]
    if waiting and at + 1 + len(names) == len(messages):
        names.append(waiting)
    if messages[at].role != "assistant" or not names:
        return None
    found = said(messages[at], [Tool(name) for name in names], worths, single=True)
    return len(found.text) if found.calls else None


def as_read(messages: Sequence[StoredMessage], worths: Mapping[str, Worth]) -> list[Message]:
    """The messages as the model reads them. A result without an answer that made its call is read
    as text of the user, and a call without a result as text of the answer."""
    found: list[Message] = []
    for at, each in enumerate(messages):
        results, result = results_after(messages, at), result_of(each)
        if results:
            calls = tuple(after.call for after in results)
            text = said(each, [Tool(call.name) for call in calls], worths).text
            found.append(Message("assistant", text, calls))
        elif result is not None and found and (found[-1].calls or found[-1].call):
            found.append(Message("tool", result.text, call=result.call))
        else:
            found.append(Message("user" if each.role == "tool" else each.role, each.content))
    return found
