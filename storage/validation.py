"""Values from outside the program, checked by pydantic models that declare fields and limits.

Types are strict: true is not 1, and "5" is not 5. An error quotes only a little of what was read,
however large or deeply nested that is.
"""

from collections.abc import Iterable
from reprlib import Repr
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

LONGEST_QUOTE = 80
QUOTES = Repr()
QUOTES.maxlevel, QUOTES.maxlist, QUOTES.maxdict = 2, 3, 3
QUOTES.maxstring = QUOTES.maxlong = QUOTES.maxother = LONGEST_QUOTE


EXPECTED = {
    "bool_type": "true or false",
    "string_type": "a text",
    "is_instance_of": "a text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
"""What can be given for a field without a description, by pydantic's name for the error."""


class Outside(BaseModel):
    """Base of the models. The description of a field says what can be given: "a whole number"."""

    model_config = ConfigDict(strict=True, frozen=True)


class Problem(NamedTuple):
    """What was wrong: the way to the value, pydantic's name for the error or that of a `refusal`,
    and complete sentences for the user."""

    path: tuple[int | str, ...]
    kind: str
    text: str


def problem_of(error: ValidationError, model: type[BaseModel]) -> Problem:
    """The first thing that a model found wrong: where, the value, and what can be given instead."""
    first = error.errors(include_url=False)[0]
    path, kind = first["loc"], first["type"]
    name = spelled(path) or "the value"
    ctx = first.get("ctx", {})
    if "text" in ctx:
        return Problem(path, kind, first["msg"])
    if kind == "extra_forbidden":
        return Problem(path, kind, f"{name} is not known. Leave it out.")
    expected = described(model, path) or EXPECTED.get(kind) or ctx.get("expected")
    give = f"Give {expected}" if expected else first["msg"].replace("Input", "It")
    what = "is missing" if kind == "missing" else f"cannot be {quoted(first['input'])}"
    return Problem(path, kind, f"{name} {what}. {give}.")


def refusal(text: str, kind: str = "refused") -> PydanticCustomError:
    """An error that a validator raises with its own message, in complete sentences."""
    return PydanticCustomError(kind, "{text}", {"text": text})


def quoted(value: object) -> str:
    """The beginning of a value, as quoted in error messages."""
    try:
        text = QUOTES.repr(value)
    except ValueError:
        return "a number of too many digits"
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"


def spelled(path: Iterable[int | str]) -> str:
    """A path as a program would write it: messages[3].role."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removesuffix(".[key]").removeprefix(".")


def described(model: type[BaseModel], path: Iterable[int | str]) -> str:
    """The description of the field that a path leads to, or of the nearest field around it."""
    found, within = "", {model}
    for step in path:
        fields = [each.model_fields[step] for each in within if step in each.model_fields]
        if fields:
            found = fields[0].description or choices_of(fields[0].annotation) or found
            within = models_in(fields[0].annotation)
    return found


def choices_of(annotation: Any) -> str:
    """The values of a Literal, also of one that may be None: 'a', 'b' or 'c'. "" for others."""
    for each in (annotation, *get_args(annotation)):
        if get_origin(each) is Literal:
            *others, last = map(repr, get_args(each))
            return f"{', '.join(others)} or {last}" if others else last
    return ""


def models_in(annotation: Any) -> set[type[BaseModel]]:
    """The models that a type is made of: M for list[M] | None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {model for each in get_args(annotation) for model in models_in(each)}
