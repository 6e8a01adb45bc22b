"""Answers in a format: drafted or not, the same text, and a text of the format."""

import gc
import json
import random
from functools import cache
from weakref import ref

import jsonschema
import numpy as np
import pytest

from engine.backends.base import LogitScores
from engine.constraint import Constraint
from engine.drafting.databases import Databases
from engine.methods import METHODS, PLAIN, method_named
from engine.recorded import nodes
from engine.sampling import Floats
from engine.settings import AnswerFormat, Drafting, Generation, Sampling
from engine.thinking import Marks
from engine.tree import Tree
from engine.types import SCHEMA, Step
from tests.support.lossless import (
    CUTS,
    ORDERS,
    PROMPT,
    TEMPERATURES,
    assert_lossless,
    curves,
    tokens_of,
    toy_family,
)
from tests.support.schemas import KINDS, counted, drawn, form_of, steps_of, under
from tests.support.toy import ToyBackend, deviating

HD = METHODS["hd"]
SHOWN = form_of(drawn(1))


@cache
def plain(wanted: Generation, begun: tuple[int, ...] = ()) -> list[Step]:
    return steps_of(wanted, PLAIN, begun=begun)


def text_of(steps: list[Step]) -> str:
    return "".join(token.text for token in tokens_of(steps))


def schema_of(steps: list[Step]) -> int:
    return sum(step.accepted.get(SCHEMA, 0) for step in steps)


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=[kind.__name__ for kind in KINDS])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_schemas_of_every_kind(kind: int, temperature: float) -> None:
    finished = demanded = 0
    for number in range(kind, 8 * len(KINDS) + kind, len(KINDS)):
        schema = drawn(number)
        wanted = under(form_of(schema), temperature, number)
        fast = steps_of(wanted, HD)
        assert_lossless(plain(wanted), fast)
        demanded += schema_of(fast)
        if fast[-1].finish == "eos":
            finished += 1
            jsonschema.validate(json.loads(text_of(fast)), schema)
    assert finished > 3 and demanded > 20


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_subset_and_order_of_the_databases(order: tuple[str, ...]) -> None:
    databases, accepted = counted(SHOWN), set[str]()
    method = method_named("hd", Drafting(tiers=order, nodes=12))
    for number, temperature in enumerate(TEMPERATURES):
        wanted = under(SHOWN, temperature, number)
        fast = steps_of(wanted, method, databases.next_conversation())
        assert_lossless(plain(wanted), fast)
        accepted |= {source for step in fast for source, n in step.accepted.items() if n}
    assert SCHEMA in accepted and len(accepted) > 1 or order == ("statistics",)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cuts", [{}, *CUTS], ids=str)
def test_every_method(name: str, cuts: dict[str, float]) -> None:
    family = toy_family()
    for temperature in (0.0, 1.0):
        wanted = under(SHOWN, temperature, 3, **cuts)
        toy = ToyBackend(guesses=deviating(1.0))
        fast = steps_of(wanted, METHODS[name], counted(SHOWN).next_conversation(), toy, family)
        assert_lossless(plain(wanted), fast)


def test_the_rejection_rule_gives_way_to_equality() -> None:
    wanted = under(SHOWN, 1.0, 3)
    method = method_named("hd+hsd", Drafting(rule="rejection"))
    assert_lossless(plain(wanted), steps_of(wanted, method, family=toy_family()))


@pytest.mark.parametrize("costs", curves())
def test_every_cost_of_a_forward(costs: str) -> None:
    for number, temperature in enumerate(TEMPERATURES):
        wanted = under(SHOWN, temperature, number)
        curve = curves()[costs]
        assert_lossless(plain(wanted), steps_of(wanted, HD, counted(SHOWN), costs=curve))


def test_what_is_demanded_is_drafted_while_drafting_pauses() -> None:
    curve = curves()["usual"]
    assert curve is not None
    for gain in curve.gate.gains.values():
        gain.backoff = gain.length = gain.wait = 512
    wanted = under(SHOWN, 0.7, 1)
    fast = steps_of(wanted, HD, costs=curve)
    assert_lossless(plain(wanted), fast)
    assert {source for step in fast for source in step.proposed} == {SCHEMA}
    assert len(fast) < len(tokens_of(fast)) / 2


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_an_answer_goes_on_where_it_was_stopped(temperature: float) -> None:
    wanted = under(SHOWN, temperature, 11)
    tokens = tuple(token.id for token in tokens_of(plain(wanted)))
    for begun in range(1, len(tokens) - 1, 7):
        for method in (PLAIN, HD):
            rest = steps_of(wanted, method, begun=tokens[:begun])
            assert tuple(token.id for token in tokens_of(rest)) == tokens[begun:]


FORMATS = {
    AnswerFormat("regex", "[ab]{3,9}(x|yy)?"): lambda text: text.strip("abxy") == "",
    AnswerFormat("choice", '["yes", "no", "not sure"]'): ["yes", "no", "not sure"].__contains__,
    AnswerFormat("gbnf", 'root ::= ("up" | "down") " " [0-9]+'): lambda text: text[-1].isdigit(),
    AnswerFormat("lark", 'start: "é" /[😀-😎]{2}/'): lambda text: text[0] == "é" and len(text) == 3,
}


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.kind)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_other_formats(form: AnswerFormat, temperature: float) -> None:
    for seed in range(4):
        wanted = under(form, temperature, seed, most=40)
        fast = steps_of(wanted, HD)
        assert_lossless(plain(wanted), fast)
        if fast[-1].finish == "eos":
            assert FORMATS[form](text_of(fast))


def test_drafts_do_not_corrupt_a_tool_call() -> None:
    """What vLLM's issue 56077 describes: the text of an earlier call, drafted as it stands, ends up
    in a later one with other arguments."""
    call = {
        "type": "object",
        "properties": {"name": {"const": "weather"}, "arguments": drawn(0)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    databases = Databases()
    for seed in range(12):
        wanted = under(form_of(call), 1.5, seed)
        fast = steps_of(wanted, HD, databases.next_conversation())
        assert_lossless(plain(wanted), fast)
        answer = [token.id for token in tokens_of(fast)]
        databases.learned.finish(answer, len(answer))
        jsonschema.validate(json.loads(text_of(fast)), call)


@pytest.mark.soak(stay=20)
@pytest.mark.parametrize("number", range(300))
def test_three_hundred_schemas(number: int) -> None:
    draw, schema = random.Random(number), drawn(number)
    form, order = form_of(schema), draw.choice(ORDERS)
    method = method_named("hd", Drafting(tiers=order, nodes=draw.choice((4, 16, 63))))
    for temperature in TEMPERATURES:
        wanted = under(form, temperature, number, most=240)
        fast = steps_of(wanted, method, counted(form).next_conversation())
        assert_lossless(plain(wanted), fast)
        if fast[-1].finish == "eos":
            jsonschema.validate(json.loads(text_of(fast)), schema)


def test_drafts_that_the_format_excludes_cost_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = under(AnswerFormat("regex", "(ab|cd){20}"), 0.0, 0)
    prompt = [*PROMPT, *b"abz" * 6, *b"cdz" * 6]

    def drafted() -> set[int]:
        fast = steps_of(wanted, HD, prompt=prompt)
        assert_lossless(steps_of(wanted, PLAIN, prompt=prompt), fast)
        return {node.token for step in fast for node in nodes(step) or ()}

    assert ord("z") not in drafted() and drafted() & {*b"abcd"}
    monkeypatch.setattr(Constraint, "pruned", lambda self, tree: tree)
    monkeypatch.setattr(Constraint, "scores", scores_of_all)
    assert ord("z") in drafted(), "the databases know it"


def scores_of_all(
    self: Constraint, tree: Tree, scores: LogitScores, given: Sampling
) -> LogitScores:
    """The scores of a tree in which excluded nodes are left."""
    places = self.positions(tree)

    def read(row: int) -> Floats:
        place = places[row]
        return scores.row(row) if place is None else place.masked(scores.row(row))

    return LogitScores(read, scores.positions, given)


MARKS = Marks("<th>", ("</",)), Marks("<ch>", ("<!",), direct=("<no>",))
PARTS = {"<th>": "</", "<ch>": "<!", "<no>": "<no>", "": ""}
"""What an answer may begin with, and what then comes before its text."""
ANSWER = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_model_that_may_think_first_says_what_plain_decoding_says(temperature: float) -> None:
    """What it begins with is a mark that leads to thoughts or to the answer, or the answer."""
    begins = set()
    for seed in range(24):
        wanted = under(form_of(ANSWER), temperature, seed, most=240)
        first, *others = (
            steps_of(wanted, way, marks=MARKS) for way in (PLAIN, HD, METHODS["auto"])
        )
        for other in others:
            assert_lossless(first, other)
        text = text_of(first)
        begin, end = next(pair for pair in PARTS.items() if text.startswith(pair[0]))
        begins.add(begin)
        answer = text.partition(end)[2] if end else text
        if answer and first[-1].finish == "end":
            jsonschema.validate(json.loads(answer), ANSWER)
    assert len(begins) > 1 or temperature == 0


def test_what_thoughts_may_begin_with_is_allowed_at_the_beginning_alone() -> None:
    model = ToyBackend()
    start = Constraint(model, form_of(ANSWER), (), MARKS, True).here
    allowed = {chr(token) for token in np.flatnonzero(start.allowed) if token < 256}
    assert allowed == {"<", "{"} and start.demanded == ()
    inside = start.then(ord("{"))
    assert inside is not None and not inside.allowed[ord("<")]
    part = start.then(ord("<"))
    assert part is not None and part.matcher is None
    assert {chr(token) for token in np.flatnonzero(part.allowed)} == {"t", "c", "n"}
    assert part.then(ord("{")) is None
    direct = part
    for letter in b"no>":
        direct = direct and direct.then(letter)
    assert direct is not None and direct.allowed[ord("{")] and not direct.allowed[ord("<")]


def test_a_format_that_begins_like_a_mark_stays_possible() -> None:
    model, form = ToyBackend(), AnswerFormat("regex", "<th(ree|>en)")
    place = Constraint(model, form, b"<th", MARKS, True).here
    allowed = {chr(token) for token in np.flatnonzero(place.allowed) if token < 256}
    assert allowed == {"r", ">"}
    three = place.then(ord("r"))
    assert three is not None and three.matcher is not None and not three.is_free
    thinking = place.then(ord(">"))
    assert thinking is not None and thinking.is_free


def test_a_model_that_was_unloaded_is_not_kept() -> None:
    model = ToyBackend()
    constraint, kept = Constraint(model, SHOWN), ref(model)
    del model
    gc.collect()
    assert kept() is None and constraint.here.then(ord("{")) is not None
