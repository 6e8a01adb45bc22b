"""A conversation as one Markdown document: what was said, and by whom, as it was written."""

import re
from collections.abc import Sequence

from storage.conversations import Conversation, StoredMessage

SPEAKERS = {"user": "You", "assistant": "Answer", "system": "Instructions"}


def markdown(conversation: Conversation, messages: Sequence[StoredMessage]) -> str:
    """The document. A message that opens a block of code and does not close it ends with one."""
    parts = [f"# {' '.join(conversation.title.split())}"]
    if conversation.system_prompt.strip():
        parts.append(section("system", conversation.system_prompt))
    parts += [section(message.role, message.content) for message in messages]
    return "\n\n".join(parts) + "\n"


def section(role: str, content: str) -> str:
    """A message under the name of who said it."""
    return f"## {SPEAKERS.get(role, role)}\n\n{closed(content.strip())}"


def closed(text: str) -> str:
    """The text, and the end of a block of code that was cut off: else all that follows was code."""
    opened = ""
    for line in text.splitlines():
        fence = re.match(r" {0,3}(`{3,}|~{3,})(.*)", line)
        if fence is None:
            continue
        marks, rest = fence[1], fence[2]
        if not opened:
            opened = "" if marks[0] == "`" and "`" in rest else marks
        elif marks.startswith(opened) and not rest.strip():
            opened = ""
    return f"{text}\n{opened}" if opened else text
