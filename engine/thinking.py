"""The thinking of a model, told apart from its answer.

Models write their thinking before their answer, between marks. `MARKS` is the only list of them,
and `Splitter` the only code that looks for them: an answer that shows such marks later, in code or
prose, is an answer. If the chat template has already opened the thinking, the model writes only the
mark that ends it.

The splitter returns all text once and in order, except for the marks and the white space next to
them. It also tells where the thinking is, in characters of the whole text.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple

from engine.text import unsure


class Marks(NamedTuple):
    """What a family of models writes around its thinking.

    One of the `ends` ends the thinking. So does one of the `calls`, which begin a call of a tool
    and are part of the answer. If the text begins with one of `direct`, the answer follows it, and
    there is no thinking. A chat template that shows earlier answers refuses them with such marks if
    they are `private`.
    """

    begin: str
    ends: tuple[str, ...]
    calls: tuple[str, ...] = ()
    direct: tuple[str, ...] = ()
    private: bool = False


NEXT = "<|end|><|start|>assistant"
"""What gpt-oss writes between its messages."""
SAYS = ("<|channel|>final<|message|>", "<|channel|>commentary<|message|>")
"""What it writes before its answer, and before what it says about its next call."""
CALLS = tuple(
    f"{where} to=functions." for where in ("", "<|channel|>commentary", "<|channel|>analysis")
)
"""How its calls of tools begin."""
MARKS = (
    Marks("<think>", ("</think>",)),
    Marks("<thinking>", ("</thinking>",)),
    Marks("<thought>", ("</thought>",)),
    Marks("<reasoning>", ("</reasoning>",)),
    Marks("[THINK]", ("[/THINK]",)),  # Mistral
    Marks("<|channel>thought", ("<channel|>",)),  # Gemma 4
    Marks("<seed:think>", ("</seed:think>",)),
    Marks(  # gpt-oss
        "<|channel|>analysis<|message|>",
        (*(NEXT + mark for mark in SAYS), SAYS[0]),
        tuple(NEXT + mark for mark in CALLS),
        SAYS,
        private=True,
    ),
    Marks("◁think▷", ("◁/think▷",)),  # Kimi
    Marks("<|START_THINKING|>", ("<|END_THINKING|>",)),  # Command A
    Marks("<|inner_prefix|>", ("<|inner_suffix|>",)),  # Apertus
    Marks("<|think:start|>", ("<|think:end|>",)),  # Solar
)
USUAL = MARKS[0]
"""The marks that are put around thinking that comes without any."""


def marks_of(template: str, vocabulary: Collection[str]) -> tuple[Marks, ...]:
    """The marks that a model's chat template or vocabulary has; all known ones if it has none."""
    tokens = set(vocabulary)
    found = (
        each
        for each in MARKS
        if any(mark in template or mark in tokens for mark in (each.begin, *each.ends))
        or each.private
        and "<|channel|>" in tokens
    )
    return tuple(found) or MARKS


def named(begins: Collection[str]) -> tuple[Marks, ...]:
    """The marks that begin so; all known ones if there are none."""
    return tuple(each for each in MARKS if each.begin in begins) or MARKS


def opened(prompt: str, marks: Iterable[Marks]) -> bool:
    """Whether an answer to this prompt begins inside thinking that the template has opened."""
    return prompt.rstrip().endswith(tuple(each.begin for each in marks))


class Parted(NamedTuple):
    """A part of the thinking and a part of the answer."""

    reasoning: str = ""
    content: str = ""


class Thought(NamedTuple):
    """Where the thinking of a text begins and ends, and where the answer begins; None for what is
    not known yet."""

    begin: int
    end: int | None = None
    answer: int | None = None


class Splitter:
    """Splits one answer. With `begun` the chat template has opened the thinking. The first `known`
    characters are read and not returned."""

    def __init__(self, marks: Sequence[Marks] = MARKS, begun: bool = False, known: int = 0) -> None:
        self.marks, self.begun, self.known = marks, begun, known
        self.ends = [end for each in marks for end in (*each.ends, *each.calls)]
        self.state: Literal["begins", "thinks", "thought", "answers"] = "begins"
        self.held = ""
        self.empty = True
        self.at = 0
        """The number of characters before the held ones."""
        self.thought = Thought(0) if begun else None

    @property
    def thinks(self) -> bool:
        return self.state == "thinks" or self.begun and self.state == "begins"

    def push(self, text: str) -> Parted:
        """Add text; returns what is certain now, and holds back what may be part of a mark."""
        self.held += text
        reasoning = ""
        if self.state == "begins":
            self.begin()
        if self.state == "thinks":
            reasoning = self.think()
        if self.state == "thought":
            self.skip(len(self.held) - len(self.held.lstrip()))
            if self.held:
                assert self.thought is not None
                self.state, self.thought = "answers", self.thought._replace(answer=self.at)
        return Parted(reasoning, self.taken(len(self.held)) if self.state == "answers" else "")

    def end(self) -> Parted:
        """The text that was held back, at the end of the answer."""
        thinks, held = self.thinks, self.taken(len(self.held))
        return Parted(held.rstrip(), "") if thinks else Parted("", held)

    def begin(self) -> None:
        start = self.held.lstrip()
        for each in self.marks:
            for mark in (each.begin, *each.direct):
                if start.startswith(mark):
                    self.skip(len(self.held) - len(start) + len(mark))
                    self.state = "thinks" if mark == each.begin else "thought"
                    self.ends = [*each.ends, *each.calls]
                    self.thought = Thought(self.at, *(() if self.state == "thinks" else (self.at,)))
                    return
                if mark.startswith(start):
                    return
        self.state = "thinks" if self.begun else "answers"

    def think(self) -> str:
        """The thinking up to a mark, or up to what may become one."""
        if self.empty:
            self.skip(len(self.held) - len(self.held.lstrip()))
        begin = self.at
        found = [(self.held.find(mark), mark) for mark in self.ends if mark in self.held]
        if found:
            at, mark = min(found)
            assert self.thought is not None
            self.thought = Thought(self.thought.begin, self.at + at)
            thought = self.taken(at).rstrip()
            self.skip(0 if any(mark in each.calls for each in self.marks) else len(mark))
            self.state = "thought"
        else:
            thought = self.taken(len(self.held) - unsure(self.held, self.ends))
        self.empty = self.empty and self.at == begin
        return thought

    def taken(self, length: int) -> str:
        text = self.held[max(0, self.known - self.at) : length]
        self.skip(length)
        return text

    def skip(self, length: int) -> None:
        self.held = self.held[length:]
        self.at += length


def thought_in(text: str, marks: Sequence[Marks] = MARKS, begun: bool = False) -> Thought | None:
    """Where the thinking of an answer is, None without any."""
    splitter = Splitter(marks, begun)
    splitter.push(text)
    return splitter.thought


def answer_of(text: str, marks: Sequence[Marks] = MARKS, begun: bool = False) -> str:
    """An answer without its thinking, "" if it never ended."""
    splitter = Splitter(marks, begun)
    return splitter.push(text).content + splitter.end().content


def with_thinking(thought: str, answer: str) -> str:
    """An answer with its thinking, in the form in which models write it."""
    ended = USUAL.ends[0]
    safe = thought.replace(ended, ended.replace("/", "/ "))
    return f"{USUAL.begin}\n{safe}\n{ended}" + (f"\n\n{answer}" if answer else "")
