"""Titles of conversations: the beginning of what was said first, or what the model proposes."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from app.service.stores import Stores
from app.service.tasks import Task, Tasks
from engine.engine import Engine, Measured, Request, answered
from engine.errors import PromptError
from engine.methods import METHODS
from engine.queue import Waiting
from engine.settings import Generation, Sampling
from engine.types import Message, Step
from storage.conversations import Conversations

LONGEST = 60
"""Characters of a title: what the list shows in two lines."""
QUOTED = 1_000
"""Characters that the model reads of each message."""
TOKENS = 24
WISH = "Give this conversation a title of at most six words. Answer with the title alone."


def title_of(text: str) -> str:
    """A title from what was said: its first sentence without Markdown, cut behind a word; "" for
    text without any words."""
    outside = re.sub(r"(?m)^\s*(?:```|~~~).*$", "", text)
    for paragraph in re.split(r"\n\s*\n", outside):
        lines = paragraph.strip().splitlines()
        # A heading stands for itself, other lines are one text.
        said = " ".join(
            bare(line) for line in (lines[:1] if paragraph.lstrip()[:1] == "#" else lines)
        )
        if re.search(r"\w", said):
            sentence = re.match(r".{8,}?[.!?](?=\s|$)", said.strip())
            return cut(" ".join((sentence[0] if sentence else said).split()).rstrip("."))
    return ""


def bare(line: str) -> str:
    """A line without its Markdown."""
    line = re.sub(r"^[\s#>*+`~-]+|^\s*\d+[.)]\s+|[\s*`~]+$", "", line)
    return line.replace("**", "").replace("`", "")


def cut(text: str) -> str:
    """At most LONGEST characters, cut behind a word where there is one."""
    if len(text) <= LONGEST:
        return text
    beginning = text[:LONGEST]
    words = beginning.rpartition(" ")[0] if text[LONGEST] != " " else beginning
    return (words if len(words) > LONGEST // 2 else beginning[:-1]).rstrip(" ,;:") + "…"


@dataclass(frozen=True, slots=True)
class Titles:
    """See the module's docstring. `gate` lets a task wait while another model stands in for the
    loaded one."""

    engine: Engine
    tasks: Tasks
    conversations: Callable[[str], Conversations]
    stores: Stores
    gate: Callable[[Task], Iterator[Waiting]]

    def suggest(self, owner: str, conversation_id: str) -> str:
        """Have the model give a conversation a title, and keep that. It waits for its turn, and
        leaves no trace in what drafting knows.

        Raises PromptError where nothing was said yet, and where the model says nothing usable.
        """
        store = self.conversations(owner)
        said = [m for m in store.messages(conversation_id, pieces=False) if m.content.strip()][:2]
        if not said:
            raise PromptError("Nothing was said in this conversation yet. Write something first.")
        quoted = "\n\n".join(message.content.strip()[:QUOTED] for message in said)
        generation = Generation(Sampling(temperature=0.0), max_tokens=TOKENS)
        request = Request(
            (Message("user", f"{quoted}\n\n{WISH}"),),
            generation=generation,
            method=METHODS["plain"],
            owner=owner,
            measured=Measured(),
        )
        with self.tasks.begin(owner, f"title of {conversation_id}") as task:
            for _ in self.gate(task):
                pass
            stream = task.stop.start(lambda: self.engine.generate(request))
            events = answered(stream, lambda wanted: self.stores.recall(wanted, owner, ""))
            steps = [event for event in events if isinstance(event, Step)]
        text = "".join(token.text for step in steps for token in step.tokens)
        title = title_of(re.sub(r"(?s)<think>.*?(</think>|$)", "", text).replace('"', ""))
        if not title:
            raise PromptError("The model proposed no title. Write one with Rename.")
        store.rename(conversation_id, title)
        return title
