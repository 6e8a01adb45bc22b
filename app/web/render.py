"""Messages and tokens as data for the browser.

Nothing here builds markup from the text of a user or a model. The scripts in assets/chat create
text nodes from it, even when they format an answer as Markdown. Remarks stand below an answer: a
sentence, and the badge of its proof.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from app.service import attachments, called, quotes
from app.service.rewriting import rewritten
from app.service.tool_calls import ROUNDS, Pending
from app.service.why import sentence
from app.web.colors import INKS, css_class, ink, others
from app.web.markup import times
from engine.errors import StorageError
from engine.thinking import Thought, answer_of, named, thought_in
from engine.types import Step
from storage.conversations import Piece, StoredMessage
from storage.database import Database
from storage.traces import Traces, Worth

Data = dict[str, object]
"""Data for the browser, which must be valid JSON."""
LONGEST = 20_000
"""The most characters of a file that the page shows. The model has read the whole file."""
EXHAUSTED = (
    f"The model has called tools in {ROUNDS} answers, the most without a message of yours. Write "
    "one to let it call more."
)
Group = list[object]
Remarks = Mapping[str, dict[str, object]]
"""Remarks on answers, by run id; see `remarks`."""
NO_REMARKS: Remarks = {}


class Read:
    """The files and results of tools in messages, each read once for all answers after it."""

    def __init__(self) -> None:
        self.known: dict[str, Sequence[quotes.Words]] = {}

    def before(self, above: Sequence[StoredMessage]) -> list[quotes.Words]:
        """Those of the messages above an answer, the latest first."""
        return [words for message in reversed(above) for words in self.of(message)]

    def of(self, message: StoredMessage) -> Sequence[quotes.Words]:
        if message.id not in self.known:
            self.known[message.id] = [quotes.Words(source) for source in read_in(message)]
        return self.known[message.id]


def read_in(message: StoredMessage) -> list[quotes.Source]:
    """The files of a message of the user, or the result of a tool."""
    if (result := called.result_of(message)) is not None:
        return [quotes.Source(message.id, 0, f"the result of {result.call.name}", result.text)]
    files = attachments.split(message.content)[0] if message.role == "user" else []
    return [quotes.Source(message.id, at, file.name, file.text) for at, file in enumerate(files)]


def groups(pieces: Iterable[Piece], sources: dict[str, int], step: int = 0) -> list[Group]:
    """Tokens for the browser, in groups with the same step, source and match length:

    [number of the source, match length, steps since the previous group, texts, probabilities in %]

    `sources` maps sources to their numbers; new sources are added to it. `step` is the step of the
    previous token. Positions are not sent: they follow from the order of the tokens.
    """
    found: list[Group] = []
    texts, chances = list[str](), list[int]()
    last: tuple[str, int, int] | None = None
    for piece in pieces:
        key = piece.source, piece.match_length, piece.step
        if key != last:
            number = sources.setdefault(piece.source, len(sources))
            texts, chances = [], []
            found.append([number, piece.match_length, piece.step - step, texts, chances])
            last, step = key, piece.step
        texts.append(piece.text)
        chances.append(percent(piece.probability))
    return found


def percent(probability: float) -> int:
    """A probability in whole percent, at least 1; 0 where it is not known."""
    return max(1, round(100 * probability)) if 0 < probability <= 1 else 0


def about(
    message: StoredMessage,
    above: Sequence[StoredMessage],
    continuable: bool = False,
    notes: Remarks = NO_REMARKS,
    read: Read | None = None,
) -> Data:
    """The data below a message: its versions, its run, and whether it can be continued. `above` are
    the messages before it. `notes` holds further data for some runs: a `note` (a sentence), a
    `badge` with `text`, `kind` and `title`, where the `calls` of tools begin, whether the answer is
    `json`; and for `thought_in` whether the answer begins inside thinking (`thinks`), and the
    `marks` of its model; see `remarks`."""
    data: Data = {"key": message.id, "role": message.role}
    more: dict[str, Any] = dict(notes.get(message.run_id or "", {}))
    marks, thinks = named(more.pop("marks", ())), bool(more.pop("thinks", False))
    if message.role not in ("user", "tool"):
        data |= thought_data(message.content, thought_in(message.content, marks, thinks))
        changed = rewrite_data(message, above, notes)
        data |= changed or quote_data(message, above, notes, read or Read())
    if len(message.versions) > 1:
        data["versions"] = [*message.versions]
    if message.run_id:
        data["run"] = message.run_id
        data |= more
    return {**data, "on": True} if continuable else data


def thought_data(text: str, thought: Thought | None) -> Data:
    """Where thinking begins and ends and the answer begins, as JavaScript counts in the text that a
    page keeps; {} without thinking."""
    if thought is None:
        return {}
    return {"thought": [None if at is None else position(text, at) for at in thought]}


def position(text: str, at: int) -> int:
    """A position as JavaScript counts, in the text that a page keeps."""
    return units(text[:at].replace("\r", ""))


def units(text: str) -> int:
    """The length of a text as JavaScript counts."""
    return len(text.encode("utf-16-le")) // 2


def spoken(answer: StoredMessage, notes: Remarks) -> str:
    note: dict[str, Any] = notes.get(answer.run_id or "", {})
    return answer_of(answer.content, named(note.get("marks", ())), bool(note.get("thinks"))).strip()


def rewrite_data(answer: StoredMessage, above: Sequence[StoredMessage], notes: Remarks) -> Data:
    """What an answer changed in the text that it rewrites: the `changes`, null if the texts are too
    long to compare, and the `original` answer; or the `name` and the `text` of a new file. {} if it
    rewrites nothing."""
    *earlier, asked = above or (answer,)
    found = rewritten(asked.content, spoken(answer, notes)) if asked.role == "user" else None
    if found is None:
        return {}
    old, data = found.old, {"changes": found.changes}
    for each in reversed(earlier):
        if each.role == "assistant" and spoken(each, notes) == old.text:
            return {"rewrite": {**data, "original": each.id}}
    name = f"{old.name}.txt" if old.name.lower().endswith(".pdf") else old.name
    return {"rewrite": {**data, "name": name, "text": found.new}}


def quote_data(
    answer: StoredMessage, above: Sequence[StoredMessage], notes: Remarks, read: Read
) -> Data:
    """Which quotes of an answer stand in the files and results that its model has read: a `title`,
    and for each quote its `text` and, if it was found, the `message` and the `number` of the text
    there that holds it, `where` for people, and the characters `from` and `to` if the page shows
    them. {} without quotes, and for calls of tools and answers in JSON."""
    note = notes.get(answer.run_id or "", {})
    if answer.role != "assistant" or "calls" in note or "json" in note:
        return {}
    found = quotes.checked(spoken(answer, notes), lambda: read.before(above))
    if not found:
        return {}
    right = sum(quote.source is not None for quote in found)
    title = f"Quotes: {right} of {len(found)} found word for word in what the model has read"
    return {"quotes": {"title": title, "rows": [quote_row(quote) for quote in found]}}


def quote_row(quote: quotes.Quote) -> Data:
    source, row = quote.source, Data(text=quote.text)
    if source is None:
        return row
    row |= {"message": source.message, "number": source.number}
    row["where"] = f"{source.name}, line {quote.line:,}"
    if quote.end <= LONGEST:
        row |= {"from": units(source.text[: quote.start]), "to": units(source.text[: quote.end])}
    return row


def turn(
    message: StoredMessage,
    above: Sequence[StoredMessage],
    sources: dict[str, int],
    continuable: bool = False,
    notes: Remarks = NO_REMARKS,
    read: Read | None = None,
) -> Data:
    """One message. Without pieces (the user's messages, imported answers) it is plain text."""
    data = about(message, above, continuable, notes, read)
    if message.pieces:
        return {**data, "groups": groups(message.pieces, sources)}
    if (result := called.result_of(message)) is not None:
        name, arguments = result.call.name, visible(result.call.arguments)
        call = {"name": name, "arguments": arguments, "size": len(result.text)}
        return {**data, "text": result.text[:LONGEST], "call": call}
    if message.role != "user":
        return {**data, "text": message.content}
    files, text = attachments.split(message.content)
    if not files:
        return {**data, "text": text}
    shown = [
        {"name": f.name, "size": len(f.text), "text": f.text[:LONGEST], "rewrite": f.rewrite}
        for f in files
    ]
    return {**data, "text": text, "files": shown}


def visible(arguments: str) -> str:
    """The arguments of a call, indented, with characters that do not show spelled out: they could
    hide from a person what they tell a program."""
    text = json.dumps(json.loads(arguments), indent=1, ensure_ascii=False)
    return "".join(c if c.isprintable() or c == "\n" else f"\\u{ord(c):04x}" for c in text)


def question(pending: Pending, runs: bool) -> Data:
    """The question about a call, or what runs."""
    problem = EXHAUSTED if pending.exhausted else pending.problem
    return {
        "message": pending.message,
        "call": pending.number,
        "name": pending.call.name,
        "server": pending.server.name,
        "arguments": visible(pending.call.arguments),
        "runs": runs,
        "problem": problem,
        "exhausted": pending.exhausted,
    }


def transcript(
    messages: Sequence[StoredMessage],
    kept: int = 0,
    continuable: bool = False,
    notes: Remarks = NO_REMARKS,
) -> Data:
    """A stored conversation for a token view that has already drawn the first `kept` messages.
    `continuable` says whether the last answer can be continued."""
    sources: dict[str, int] = {}
    last, read = len(messages) - 1, Read()
    turns = [
        turn(message, messages[:at], sources, continuable and at == last, notes, read)
        for at, message in enumerate(messages)
        if at >= kept
    ]
    after = messages[kept - 1].id if kept else ""
    return {"kept": kept, "after": after, "turns": turns, **legend(sources)}


def legend(sources: Iterable[str]) -> Data:
    """The sources in the order of their numbers, and the look of those outside the palette."""
    return {"sources": [*sources], "names": drafts(sources)}


def side_by_side(name: str, steps: Iterable[Step], most: int | None = None) -> Data:
    """A run for a token view of its own, with `most` tokens if that is given."""
    sources: dict[str, int] = {}
    pieces = [Piece.of(token, step.index) for step in steps for token in step.tokens][:most]
    turns = [{"key": name, "role": "assistant", "groups": groups(pieces, sources)}]
    return {"kept": 0, "after": "", "turns": turns, **legend(sources)}


def look(source: str) -> dict[str, str]:
    """The title and meaning of a source, and the CSS class with its underline."""
    title, meaning = ink(source).title, ink(source).meaning
    return {"title": title, "meaning": meaning, "kind": css_class(source)}


def names() -> dict[str, dict[str, str]]:
    """The looks of the palette, whose classes have their colours."""
    return {source: look(source) for source in INKS}


def drafts(sources: Iterable[str]) -> dict[str, dict[str, str]]:
    """The looks of the sources outside the palette, each with its own colour."""
    return {source: {**look(source), "colour": ink(source).colour} for source in others(sources)}


PROVED = (
    "Decoded again in the background, plainly and with drafts, each from scratch. Plain decoding "
    "gives this text, token for token."
)
LONGEST_TOKEN = 40
"""The most characters of a token's text in the tooltip of a badge."""


def remarks(
    database: Database,
    owner: str,
    conversation: str | None,
    messages: Sequence[StoredMessage] = (),
    waiting: str = "",
) -> Remarks:
    """The remarks on the answers of a conversation. `waiting` is the tool whose call waits at the
    end of its messages, "" for none."""
    if not conversation:
        return {}
    try:
        worths = Traces(database, owner).worths(conversation)
    except StorageError:
        return {}  # The conversation itself reports what is wrong with the file.
    found = {run_id: remark(worth) for run_id, worth in worths.items()}
    for at, message in enumerate(messages):
        begin = called.calls_begin(messages, at, waiting, worths)
        if begin is not None and message.run_id in found:
            found[message.run_id]["calls"] = position(message.content, begin)
    return found


def remark(worth: Worth) -> dict[str, object]:
    shown: Data = {"note": sentence(worth), "badge": badge(worth.proof)}
    shown |= {"thinks": worth.thinks, "marks": worth.marks, "json": worth.json}
    return {name: value for name, value in shown.items() if value}


def badge(proof: Mapping[str, Any]) -> dict[str, str]:
    """The badge of a proof that was made in the background; {} if there is none. The stored proof
    may come from a damaged file, so its values can have any type."""
    kind, speed = proof.get("kind"), proof.get("speedup")
    if kind == "same":
        known = isinstance(speed, int | float) and not isinstance(speed, bool)
        gain = f", {times(float(speed))}" if known else ""  # type: ignore[arg-type]
        found = f"proved: same text{gain}", "good", PROVED
    elif kind == "differs":
        found = f"differs at token {proof.get('at')}", "bad", difference_title(proof)
    elif kind == "skipped":
        found = "not proved", "", str(proof.get("why", ""))
    else:
        return {}
    return dict(zip(("text", "kind", "title"), found, strict=True))


def difference_title(proof: Mapping[str, Any]) -> str:
    plain, answer = (str(proof.get(name, ""))[:LONGEST_TOKEN] for name in ("plain", "said"))
    if proof.get("early"):
        return f"The answer ended there. Plain decoding continues with {plain!r}."
    text = f"Plain decoding has {plain!r} there, and this answer has {answer!r}."
    gap = proof.get("gap")
    if isinstance(gap, int | float):
        text += f" Their logits are {gap:.4f} apart."
    return text + " In reduced precision, rounding can decide between two tokens so close."
