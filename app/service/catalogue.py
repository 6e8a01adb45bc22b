"""Open models that fit together: a target with drafts of its vocabulary, and what they will need.

The facts are in assets/catalogue.json, each with the addresses it comes from. Reading is strict: an
unknown name, a missing one or a figure that cannot be is an error. `python -m
app.service.catalogue` prints the table of docs/models.md.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from assets import ASSETS
from engine.errors import ModelError
from engine.models.formats import format_of
from engine.models.gguf_files import hub_file
from engine.models.memory import Need

FILE = ASSETS / "catalogue.json"
STARTER, STARTER_FOLDER = "Qwen3 0.6B", "SmolLM2 360M"
"""At most 1 GB to download, under a licence that allows every use."""
TABLE_CONTEXT = 8192
"""Tokens for which the table tells the memory."""
HALF, FULL = 2, 4
"""Bytes of a float16 and of a float32."""
BYTES_ARE = ("published", "estimated")
STATES = 1 + 8 + 4
"""States that a model of such layers keeps of a text: its end, that of its last tokens, so that a
rejected draft is undone, and where a later prompt may want to go on."""


@dataclass(frozen=True, slots=True)
class Layers:
    """So many layers of one shape, each with a cache of its own."""

    count: int
    key_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class Model:
    """One model of a family. `bytes` are those of its weight files, `context` what it can read.

    `layers` are those that attend. The others of a hybrid remember a text as a state, of
    `state_bytes` together; drafts for it are chains. `processor` is the same model in a type of
    weights that verifies faster on a processor, where there is such a file.
    """

    name: str
    source: str
    parameters: int
    bytes: int
    estimated: bool
    context: int
    layers: tuple[Layers, ...]
    state_bytes: int = 0
    processor: "Model | None" = None

    def on(self, device: str) -> "Model":
        """The file of it that is best for a device."""
        return self.processor if self.processor and device == "cpu" else self

    def need(self, context_length: int, device: str = "cuda", half: bool = False) -> Need:
        """What it takes with a cache for so many tokens, by formula, before any download.

        On a GPU that is the weights as they are in the file, and layers x 2 x key heads x head size
        numbers of 2 bytes for each token. On the processor ("cpu") the cache is in float32, as are
        the weights of transformers models, unless these are loaded in `half` of that.
        """
        unpacked = device == "cpu" and format_of(self.source).float32_on_cpu
        number = FULL if device == "cpu" and not (unpacked and half) else HALF
        rows = min(context_length, self.context)
        numbers = sum(part.count * 2 * part.key_heads * part.head_size for part in self.layers)
        weights = self.parameters * number if unpacked else self.bytes
        cache = numbers * rows * number + STATES * self.state_bytes
        return Need(self.parameters, weights, cache)


@dataclass(frozen=True, slots=True)
class Head:
    """What a target brings to guess ahead with. `bytes` are those of a file of its own, which is
    downloaded together with the target; 0 where it is in the target's file."""

    name: str
    bytes: int = 0
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """A family: the target, its drafts from the smallest on, and those suggested to begin with.

    `alone` says why it has no draft models, "" where it has some. The databases draft for any.
    """

    name: str
    maker: str
    licence: str
    licence_address: str
    description: str
    target: Model
    drafts: tuple[Model, ...]
    stack: tuple[Model, ...]
    alone: str
    sources: tuple[str, ...]
    head: Head | None = None

    def on(self, device: str) -> "Entry":
        """The family with the file of its target that is best for a device."""
        return replace(self, target=self.target.on(device))

    def alone_need(self, context_length: int, device: str = "cuda", half: bool = False) -> Need:
        """What the target takes, its head included."""
        need = self.target.need(context_length, device, half)
        return replace(need, weights=need.weights + (self.head.bytes if self.head else 0))

    def need(self, context_length: int, device: str = "cuda", half: bool = False) -> Need:
        """What the target with its head and the suggested stack take together."""
        needs = [model.need(context_length, device, half) for model in self.stack]
        needs.append(self.alone_need(context_length, device, half))
        return Need(
            sum(need.parameters for need in needs),
            sum(need.weights for need in needs),
            sum(need.cache for need in needs),
        )


@cache
def entries() -> tuple[Entry, ...]:
    """The catalogue, in the order of the target's size. Raises ModelError for a damaged one."""
    try:
        found = json.loads(FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unusable(str(error)) from error
    return parse(found)


def starter(gguf: bool) -> Entry:
    """The small model that is offered beside the demonstration model, which knows things; a folder
    where GGUF files cannot be read. Raises ModelError."""
    name = STARTER if gguf else STARTER_FOLDER
    found = next((each for each in entries() if each.name == name), None)
    if found is None:
        raise unusable(f"it has no {name!r}")
    return found


def parse(found: object) -> tuple[Entry, ...]:
    """The entries of a parsed file. Raises ModelError, which names the entry and what is wrong."""
    read = tuple(entry(Fields(value, "an entry")) for value in items(found, "the file"))
    names = [each.name for each in read]
    sizes = [each.target.parameters for each in read]
    if len(set(names)) < len(names):
        raise unusable("two entries have the same name")
    if sizes != sorted(sizes):
        raise unusable("the entries are not in the order of the size of their targets")
    return read


class Fields:
    """The named values of one object in the file; each is read once, none may be left over."""

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, Mapping):
            raise unusable(f"{where} is {values!r}, not an object")
        self.values = dict(values)
        self.where = f"{where} ({self.values['name']!r})" if "name" in self.values else where

    def take(self, name: str) -> object:
        """The value of that name, of whatever kind."""
        if name not in self.values:
            raise unusable(f"{self.where} has no {name!r}")
        return self.values.pop(name)

    def text(self, name: str, empty: bool = False) -> str:
        """A text, which has to say something unless it may be `empty`."""
        value = self.take(name)
        if not isinstance(value, str) or not (value.strip() or empty):
            raise unusable(f"{name!r} of {self.where} is {value!r}, not a text")
        return value

    def address(self, name: str) -> str:
        """A text that begins with https://."""
        value = self.text(name)
        if not value.startswith("https://"):
            raise unusable(f"{name!r} of {self.where} is {value!r}, not an https address")
        return value

    def given(self, name: str) -> bool:
        """Whether there is such a value, of those that may be left out."""
        return name in self.values

    def whole(self, name: str) -> int:
        """A whole number from 1."""
        value = self.take(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise unusable(f"{name!r} of {self.where} is {value!r}, not a whole number from 1")
        return value

    def items(self, name: str) -> Sequence[object]:
        """A list."""
        return items(self.take(name), f"{name!r} of {self.where}")

    def done(self) -> None:
        """Raise ModelError if a name was not read."""
        for name in self.values:
            raise unusable(f"{self.where} has the unknown name {name!r}")


def items(value: object, where: str) -> Sequence[object]:
    """A list of the file."""
    if not isinstance(value, list):
        raise unusable(f"{where} is {value!r}, not a list")
    return value


def entry(fields: Fields) -> Entry:
    """One family; its drafts have to be smaller than the target, and ordered."""
    name = fields.text("name")
    target = model(Fields(fields.take("target"), f"the target of {name!r}"))
    drafts = [model(Fields(value, f"a draft of {name!r}")) for value in fields.items("drafts")]
    known = {draft.name: draft for draft in drafts}
    sizes = [each.parameters for each in (*drafts, target)]
    if sizes != sorted(set(sizes)):
        raise unusable(f"the drafts of {name!r} are not smaller ones in the order of their size")
    stack = [str(value) for value in fields.items("stack")]
    if [draft for draft in known if draft in stack] != stack:
        raise unusable(f"the stack of {name!r} is {stack!r}, not some of its drafts in their order")
    alone = fields.text("alone", empty=True)
    if bool(alone) == bool(drafts):
        raise unusable(f"{name!r} has to have drafts, or in 'alone' the reason why it has none")
    addresses = fields.items("sources")
    read = Entry(
        name,
        fields.text("maker"),
        fields.text("licence"),
        fields.address("licence_address"),
        fields.text("description"),
        target,
        tuple(drafts),
        tuple(known[draft] for draft in stack),
        alone,
        tuple(Fields({"source": value}, name).address("source") for value in addresses),
        head(Fields(fields.take("head"), f"the head of {name!r}"))
        if fields.given("head")
        else None,
    )
    if not read.sources:
        raise unusable(f"{name!r} names no sources")
    fields.done()
    return read


def head(fields: Fields) -> Head:
    """What a target brings to guess ahead with; one in a file of its own has a size."""
    read = Head(fields.text("name"))
    if fields.given("bytes"):
        read = Head(read.name, fields.whole("bytes"), estimated(fields))
    fields.done()
    return read


def model(fields: Fields) -> Model:
    """One model; its source is a repository on the hub or one GGUF file of a repository."""
    read = Model(
        fields.text("name"),
        hub_source(fields),
        fields.whole("parameters"),
        fields.whole("bytes"),
        estimated(fields),
        fields.whole("context"),
        tuple(layers(Fields(value, fields.where)) for value in fields.items("layers")),
        fields.whole("state_bytes") if fields.given("state_bytes") else 0,
    )
    if not read.layers:
        raise unusable(f"{fields.where} has no layers")
    if fields.given("processor"):
        read = replace(read, processor=other_file(read, Fields(fields.take("processor"), "a file")))
    fields.done()
    return read


def other_file(read: Model, fields: Fields) -> Model:
    """The same model from another file."""
    values = hub_source(fields), fields.whole("bytes"), estimated(fields)
    fields.done()
    return replace(read, source=values[0], bytes=values[1], estimated=values[2])


def hub_source(fields: Fields) -> str:
    """Where a model is on the hub."""
    source = fields.text("source")
    if hub_file(source) is None and source.count("/") != 1:
        raise unusable(f"'source' of {fields.where} is {source!r}, not a name on the hub")
    return source


def estimated(fields: Fields) -> bool:
    """Whether the bytes of a file are an estimate."""
    kind = fields.text("bytes_are")
    if kind not in BYTES_ARE:
        raise unusable(f"'bytes_are' of {fields.where} is {kind!r}, not {' or '.join(BYTES_ARE)}")
    return kind == "estimated"


def layers(fields: Fields) -> Layers:
    """Some layers of a model."""
    read = Layers(fields.whole("count"), fields.whole("key_heads"), fields.whole("head_size"))
    fields.done()
    return read


def unusable(problem: str) -> ModelError:
    """The error for a file that does not hold together."""
    return ModelError(
        f"The catalogue {str(FILE)!r} cannot be used: {problem}. Restore the file; models can be "
        "loaded by path or by their name on the hub without it."
    )


def table(found: Iterable[Entry]) -> str:
    """The catalogue for docs/models.md, in Markdown, ended by a newline."""
    lines = [
        "| family | target, its file | head | draft models (**suggested**) | memory, GPU: target, "
        "with drafts | memory, processor | licence |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in found:
        drafts = ", ".join(
            f"**{draft.name}** {size(draft)}"
            if draft in each.stack
            else f"{draft.name} {size(draft)}"
            for draft in each.drafts
        )
        files = f"`{each.target.source}` {size(each.target)}"
        if each.target.processor:
            other = each.target.processor
            files += f"; on a processor `{other.source.rpartition(':')[2]}` {size(other)}"
        memory = [
            f"{gigabytes(own.alone_need(TABLE_CONTEXT, device).total)}, "
            f"{gigabytes(own.need(TABLE_CONTEXT, device).total)}"
            for device in ("cuda", "cpu")
            for own in (each.on(device),)
        ]
        head = each.head.name if each.head else "none"
        if each.head and each.head.bytes:
            head += f" {gigabytes(each.head.bytes)}"
        lines.append(
            f"| {each.name} ({each.maker}) | {files} | {head} "
            f"| {drafts or f'none: {each.alone}'} | {memory[0]} | {memory[1]} "
            f"| [{each.licence}]({each.licence_address}) |"
        )
    return "\n".join(lines) + "\n"


def size(each: Model) -> str:
    """The size of a model's files, with a mark where it is an estimate."""
    return f"{'about ' if each.estimated else ''}{gigabytes(each.bytes)}"


def gigabytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.1f} GB"


if __name__ == "__main__":
    print(table(entries()), end="")
