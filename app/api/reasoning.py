"""What a model thinks before it answers, told apart from the answer while both come.

A model writes its thinking between marks at the beginning, or behind one that its chat template has
written. Clients know it as `reasoning_content`. Invariant: what was pushed comes out once and in
its order, but for the marks and the white space beside them.
"""

from typing import Literal, NamedTuple

BEGINS = ("<think>", "<thinking>")
ENDS = ("</think>", "</thinking>")


class Said(NamedTuple):
    """A part of what was thought, and of the answer."""

    reasoning: str = ""
    content: str = ""


class Splitter:
    """Parts one answer. `begun` says that its template has begun the thinking."""

    def __init__(self, begun: bool = False) -> None:
        self.state: Literal["begins", "thinks", "thought", "answers"] = "begins"
        self.held = ""
        self.empty = True
        if begun:
            self.state = "thinks"

    @property
    def thinks(self) -> bool:
        """Whether what comes next belongs to the thinking."""
        return self.state == "thinks"

    def push(self, text: str) -> Said:
        """What is certain with this text; what may be part of a mark is held back."""
        self.held += text
        reasoning = ""
        if self.state == "begins":
            self.begin()
        if self.state == "thinks":
            reasoning = self.think()
        if self.state == "thought":
            self.held = self.held.lstrip()
            self.state = "answers" if self.held else "thought"
        return Said(reasoning, self.taken(len(self.held)) if self.state == "answers" else "")

    def end(self) -> Said:
        """What is held back, once nothing more comes."""
        held = self.taken(len(self.held))
        return Said(held.rstrip(), "") if self.thinks else Said("", held)

    def begin(self) -> None:
        """Find out whether it begins with a mark."""
        start = self.held.lstrip()
        mark = next((mark for mark in BEGINS if start.startswith(mark)), None)
        if mark is not None:
            self.state, self.held = "thinks", start[len(mark) :]
        elif not any(mark.startswith(start) for mark in BEGINS):
            self.state = "answers"

    def think(self) -> str:
        """What was thought, up to a mark or to what may become one."""
        if self.empty:
            self.held = self.held.lstrip()
        found = [(self.held.find(mark), mark) for mark in ENDS if mark in self.held]
        if found:
            at, mark = min(found)
            thought = self.taken(at).rstrip()
            self.state, self.held = "thought", self.held[len(mark) :]
        else:
            thought = self.taken(len(self.held) - unsure(self.held))
        self.empty = self.empty and not thought
        return thought

    def taken(self, length: int) -> str:
        """So many characters of what is held; they are held no longer."""
        text, self.held = self.held[:length], self.held[length:]
        return text


def unsure(text: str) -> int:
    """How many characters at the end may belong to a mark, or to the white space before one."""
    longest = min(max(map(len, ENDS)), len(text))
    begun = (n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in ENDS))
    certain = text[: len(text) - next(begun, 0)].rstrip()
    return len(text) - len(certain)
