"""Open models that fit together: targets with draft models of the same vocabulary, and their
memory.

The facts are in assets/catalogue.json, each with the addresses it comes from. Reading is strict: an
unknown name, a missing one or a figure that cannot be is an error.
"""

import json
from dataclasses import replace
from functools import cache
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from assets import ASSETS
from engine.errors import ModelError
from engine.models.formats import format_of
from engine.models.gguf_files import hub_file
from engine.models.memory import Need
from storage.validation import Outside, problem_of, quoted, refusal

FILE = ASSETS / "catalogue.json"
STARTER, STARTER_FOLDER = "Qwen3 0.6B", "SmolLM2 360M"
"""Small models of at most 1 GB to download, under a licence that allows every use."""
TABLE_CONTEXT = 8192
"""The context length for which the table gives the memory."""
HALF, FULL = 2, 4
"""Bytes of a float16 and of a float32."""
STATES = 1 + 8 + 4
"""How many states of a text a hybrid model keeps: its end, its last tokens, so that a rejected
draft can be undone, and places where a later prompt may continue."""


def on_the_hub(source: str) -> str:
    if hub_file(source) is None and source.count("/") != 1:
        raise refusal(f"The source {source!r} is not a name on the hub.")
    return source


def given(value: object) -> object:
    if value is None:
        raise refusal("A value that may be left out is null. Leave it out.")
    return value


Text = Annotated[str, Field(pattern=r"\S", description="a text that is not empty")]
Address = Annotated[str, Field(pattern="^https://", description="an https address")]
Whole = Annotated[int, Field(ge=1, description="a whole number from 1")]
Several = Field(strict=False)
"""For tuples, as JSON has only lists."""


class Listed(Outside):
    model_config = ConfigDict(extra="forbid")


class Layers(Listed):
    """`count` layers of one shape, each with its own cache."""

    count: Whole
    key_heads: Whole
    head_size: Whole


class Sized(Listed):
    bytes: Whole
    bytes_are: Literal["published", "estimated"]

    @property
    def estimated(self) -> bool:
        return self.bytes_are == "estimated"


class File(Sized):
    """The weights of a model: a repository on the hub, or one GGUF file of a repository."""

    source: Annotated[Text, AfterValidator(on_the_hub)]


class Model(File):
    """One model of a family. `bytes` is the size of its weight files, `context` its longest
    context.

    `layers` are its attention layers. The other layers of a hybrid keep a text as a state, of
    `state_bytes` in total; drafts for it are chains. `processor` is a file of the same model with
    weights that verify faster on a processor, if there is one.
    """

    name: Text
    parameters: Whole
    context: Whole
    layers: Annotated[tuple[Layers, ...], Several, Field(min_length=1)]
    state_bytes: Whole = 0
    processor: Annotated[File | None, BeforeValidator(given)] = None

    def on(self, device: str) -> Self:
        """The model with the file that is best for a device."""
        if self.processor is None or device != "cpu":
            return self
        return self.model_copy(update={**dict(self.processor), "processor": None})

    def need(self, context_length: int, device: str = "cuda", half: bool = False) -> Need:
        """The memory with a cache for `context_length` tokens, by a formula, before any download.

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


class Head(Sized):
    """The drafting head of a target. `bytes` is the size of its own file, which is downloaded with
    the target, or 0 if it is part of the target's file."""

    name: Text
    bytes: Whole = 0
    bytes_are: Literal["published", "estimated"] = "published"

    @model_validator(mode="after")
    def whole(self) -> Self:
        if len({"bytes", "bytes_are"} & self.model_fields_set) == 1:
            raise refusal("The head has one of 'bytes' and 'bytes_are'. Give both, or none.")
        return self


class Entry(Listed):
    """A family: the target, its drafts from the smallest on, and those suggested to begin with.

    `tools` says whether its chat template shows tools, so that it can call them. `alone` says why
    it has no draft models, "" if it has some. The databases draft for every model.
    """

    name: Text
    maker: Text
    licence: Text
    licence_address: Address
    description: Text
    tools: bool
    target: Model
    drafts: Annotated[tuple[Model, ...], Several]
    suggested: Annotated[tuple[str, ...], Several] = Field(alias="stack")
    alone: str
    sources: Annotated[tuple[Address, ...], Several] = Field(
        min_length=1, description="a list of https addresses"
    )
    head: Annotated[Head | None, BeforeValidator(given)] = None

    @model_validator(mode="after")
    def in_order(self) -> Self:
        sizes = [each.parameters for each in (*self.drafts, self.target)]
        if sizes != sorted(set(sizes)):
            raise refusal("The drafts must be smaller than the target, in the order of their size.")
        if tuple(draft.name for draft in self.stack) != self.suggested:
            stack = ", ".join(self.suggested)
            raise refusal(f"The stack ({stack}) must be some of its drafts, in their order.")
        if bool(self.alone) == bool(self.drafts):
            raise refusal("Give drafts, or in 'alone' the reason for having none.")
        return self

    @property
    def stack(self) -> tuple[Model, ...]:
        return tuple(draft for draft in self.drafts if draft.name in self.suggested)

    def on(self, device: str) -> Self:
        """The family with the file of its target that is best for a device."""
        return self.model_copy(update={"target": self.target.on(device)})

    def alone_need(self, context_length: int, device: str = "cuda", half: bool = False) -> Need:
        need = self.target.need(context_length, device, half)
        return replace(need, weights=need.weights + (self.head.bytes if self.head else 0))

    def need(self, context_length: int, device: str = "cuda", half: bool = False) -> Need:
        """The memory that the target with its head and the suggested stack take together."""
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
    """The small model with general knowledge that is offered with the demonstration model; a folder
    where GGUF files cannot be read. Raises ModelError."""
    name = STARTER if gguf else STARTER_FOLDER
    found = next((each for each in entries() if each.name == name), None)
    if found is None:
        raise unusable(f"it has no {name!r}")
    return found


def parse(found: object) -> tuple[Entry, ...]:
    """The entries of a parsed file. Raises ModelError, which names the entry and what is wrong."""
    if not isinstance(found, list):
        raise unusable(f"it is {quoted(found)}, not a list")
    read = tuple(map(entry, found))
    sizes = [each.target.parameters for each in read]
    if len({each.name for each in read}) < len(read):
        raise unusable("two entries have the same name")
    if sizes != sorted(sizes):
        raise unusable("the entries are not in the order of the size of their targets")
    return read


def entry(value: object) -> Entry:
    """One family. Raises ModelError."""
    try:
        return Entry.model_validate(value)
    except ValidationError as error:
        name = value.get("name") if isinstance(value, dict) else value
        text = problem_of(error, Entry).text.removesuffix(".")
        raise unusable(f"in the entry {quoted(name)}, {text}") from error


def unusable(problem: str) -> ModelError:
    return ModelError(
        f"The catalogue {str(FILE)!r} cannot be used: {problem}. Restore the file; models can be "
        "loaded by path or by their name on the hub without it."
    )
