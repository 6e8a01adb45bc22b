"""JSON schemas of the kinds that programs send, with made-up fields, and answers under them."""

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from engine.backends.base import Backend
from engine.constraint import Constraint
from engine.decode import decode
from engine.drafting.costs import CostCurve
from engine.drafting.databases import Databases
from engine.hsd.family import Family
from engine.methods import PLAIN, Method
from engine.settings import AnswerFormat, Generation, Sampling
from engine.thinking import Marks
from engine.types import Step
from tests.support.lossless import PROMPT
from tests.support.toy import ToyBackend

Schema = dict[str, Any]
NAMES = ("name", "age", "city", "tags", "open", "price", "id", "unit", "note", "size")


def flat(draw: random.Random) -> Schema:
    return record({name: leaf(draw) for name in draw.sample(NAMES, draw.randint(1, 4))})


def nested(draw: random.Random) -> Schema:
    return record({"item": flat(draw), "other": leaf(draw)})


def listed(draw: random.Random) -> Schema:
    items = draw.choice((flat, leaf))(draw)
    return {"type": "array", "items": items, "minItems": draw.randint(0, 2), "maxItems": 3}


def optional(draw: random.Random) -> Schema:
    made = flat(draw)
    return made | {"required": made["required"][:1]}


def chosen(draw: random.Random) -> Schema:
    return {"anyOf": [flat(draw), listed(draw), {"type": "null"}]}


def referring(draw: random.Random) -> Schema:
    return record({"left": {"$ref": "#/$defs/part"}, "right": {"$ref": "#/$defs/part"}}) | {
        "$defs": {"part": flat(draw)}
    }


KINDS: Sequence[Callable[[random.Random], Schema]] = (
    flat,
    nested,
    listed,
    optional,
    chosen,
    referring,
)


def leaf(draw: random.Random) -> Schema:
    return draw.choice(
        (
            {"type": "string", "maxLength": 8},
            {"type": "string", "pattern": "^[a-c]{2,5}$"},
            {"type": "string", "format": "date"},
            {"type": "integer", "minimum": 0, "maximum": 120},
            {"type": "number", "minimum": -1, "maximum": 1},
            {"type": "boolean"},
            {"enum": ["red", "green", "greenish", 3, None]},
            {"const": {"unit": "kg", "exact": True}},
        )
    )


def record(properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def drawn(number: int) -> Schema:
    """The schema of a number: the kinds in turn."""
    return KINDS[number % len(KINDS)](random.Random(number))


def form_of(schema: Schema) -> AnswerFormat:
    return AnswerFormat("json_schema", json.dumps(schema))


def under(
    form: AnswerFormat, temperature: float, seed: int, most: int = 160, **cuts: float
) -> Generation:
    return Generation(Sampling(temperature, seed=seed, **cuts), most, format=form)


def steps_of(
    wanted: Generation,
    method: Method,
    databases: Databases | None = None,
    backend: Backend | None = None,
    family: Family | None = None,
    costs: CostCurve | None = None,
    begun: Sequence[int] = (),
    prompt: Sequence[int] = PROMPT,
    marks: Sequence[Marks] = (),
) -> list[Step]:
    """The steps of an answer in a format, after the tokens that it has `begun` with. With `marks`
    the model may begin to think."""
    backend, form = backend or ToyBackend(), wanted.format
    constraint = None if form is None else Constraint(backend, form, begun, marks, bool(marks))
    given = databases or Databases(), family, wanted.sampling
    drafters = method.drafters(*given, target=backend, constraint=constraint)
    how = wanted, method.drafting
    known = [*prompt, *begun]
    events = decode(backend, known, drafters, *how, costs=costs, constraint=constraint)
    return [event for event in events if isinstance(event, Step)]


@cache
def counted(form: AnswerFormat) -> Databases:
    """Databases that hold two answers in this format."""
    databases = Databases()
    for seed in (5, 6):
        tokens = [t.id for step in steps_of(under(form, 1.0, seed), PLAIN) for t in step.tokens]
        databases.learned.finish([*PROMPT, *tokens], len(tokens))
    return databases
