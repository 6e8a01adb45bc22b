"""The catalogue: strictly read, its figures agree with each other, and the docs say the same."""

import copy
import json
import re
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest

from app.service import catalogue
from app.service.catalogue import (
    STATES,
    TABLE_CONTEXT,
    Head,
    Model,
    entries,
    parse,
)
from engine.errors import ModelError
from engine.models.gguf_files import hub_file
from engine.models.memory import Need
from tests.conftest import ROOT
from tests.support.catalogue_table import table

DRAFT = {
    "name": "Small",
    "source": "some/small-GGUF:small.gguf",
    "parameters": 100,
    "bytes": 60,
    "bytes_are": "estimated",
    "context": 50,
    "layers": [{"count": 2, "key_heads": 1, "head_size": 4}],
}
TARGET = {
    **DRAFT,
    "name": "Large",
    "source": "some/large",
    "parameters": 1000,
    "bytes": 2000,
    "bytes_are": "published",
    "layers": [
        {"count": 3, "key_heads": 2, "head_size": 8},
        {"count": 1, "key_heads": 1, "head_size": 16},
    ],
}
ENTRY: dict[str, Any] = {
    "name": "Family",
    "maker": "Somebody",
    "licence": "MIT",
    "licence_address": "https://example.org/mit",
    "description": "It is small.",
    "tools": True,
    "target": TARGET,
    "drafts": [DRAFT],
    "stack": ["Small"],
    "alone": "",
    "sources": ["https://example.org/family"],
}


def models() -> list[Model]:
    own = [*chain.from_iterable((each.target, *each.drafts) for each in entries())]
    return [*own, *(model.on("cpu") for model in own if model.processor)]


# What is in it.


def test_every_model_is_reported_the_same_wherever_it_appears() -> None:
    known: dict[str, Model] = {}
    for model in models():
        assert known.setdefault(model.source, model) == model


def test_a_family_is_one_kind_of_file_and_reads_its_drafts_fast() -> None:
    for each in entries():
        kinds = {hub_file(model.source) is None for model in (each.target, *each.drafts)}
        assert len(kinds) == 1, each.name
        assert all(model in each.drafts for model in each.stack)
        assert all(2 * model.bytes < each.target.bytes for model in each.stack), each.name
        assert bool(each.stack) == bool(each.drafts)


@pytest.mark.parametrize("model", models(), ids=lambda model: model.source)
def test_the_bytes_of_a_file_agree_with_its_parameters(model: Model) -> None:
    """K-quants of 4 bits take 4.5 to 6.6 bits a number, 8 bits take 8.5, bfloat16 takes 16."""
    bits = 8 * model.bytes / model.parameters
    named = hub_file(model.source)
    if named is None:
        # A checkpoint may hold the embedding a second time, as the output.
        assert 16 <= bits < 21
    elif "Q4_K_M" in named.file:
        assert 4.5 < bits < 5.6
    elif "Q4_0" in named.file or "IQ4_NL" in named.file:
        assert 4.5 <= bits < 5.2
    else:
        assert "Q8_0" in named.file and 8.5 <= bits < 8.7


def shape(hidden: int, heads: int, ffn: int, vocabulary: int, model: Model, tied: bool) -> int:
    """The parameters of a llama-like model, without what norms of queries and keys add."""
    (part,) = model.layers
    attention = 2 * hidden * part.head_size * (heads + part.key_heads)
    per_layer = attention + 3 * hidden * ffn + 2 * hidden
    return part.count * per_layer + (1 if tied else 2) * vocabulary * hidden + hidden


def hybrid(hidden: int, heads: int, ffn: int, values: int, model: Model, tied: bool) -> int:
    """The parameters of a Qwen3.5-like model with its prediction layer: three of four layers keep a
    state, of `values` heads of 128 x 128 and 16 heads of keys; ffn is that of a dense one."""
    (part,) = model.layers
    full, size, vocabulary = part.count - 1, part.head_size, 248320
    attention = hidden * size * (3 * heads + 2 * part.key_heads) + 2 * size
    mixed = (2 * 16 + values) * 128
    state = hidden * (mixed + 2 * 128 * values + 2 * values) + 4 * mixed + 2 * values + 128
    rest = 3 * hidden * ffn + 2 * hidden
    whole = full * attention + 3 * full * state + 4 * full * rest + hidden
    ahead = attention + rest + 2 * hidden * hidden + 3 * hidden
    return whole + ahead + (1 if tied else 2) * vocabulary * hidden


HYBRIDS = [
    ("unsloth/Qwen3.5-4B", 2560, 16, 9216, 32, True),
    ("unsloth/Qwen3.5-9B", 4096, 16, 12288, 32, False),
    ("unsloth/Qwen3.6-27B", 5120, 24, 17408, 48, False),
    ("unsloth/Qwen3.8-27B", 5120, 24, 17408, 48, False),
]
"""Hidden size, heads, inner size, heads of values in a state, whether in and out are one."""


@pytest.mark.parametrize(("source", "hidden", "heads", "ffn", "values", "tied"), HYBRIDS)
def test_layers_states_and_parameters_of_hybrids_agree(
    source: str, hidden: int, heads: int, ffn: int, values: int, tied: bool
) -> None:
    found = [model for model in models() if model.source.startswith(source)]
    assert found
    for model in found:
        assert model.parameters == hybrid(hidden, heads, ffn, values, model, tied)
        # The states in float32, and the last three rows of the convolution before them.
        state = 4 * (values * 128 * 128 + 3 * (2 * 16 + values) * 128)
        assert model.state_bytes == 3 * (model.layers[0].count - 1) * state


def test_hybrids_bring_a_head_and_processors_get_files_that_verify_fast() -> None:
    hybrids = [each for each in entries() if each.target.state_bytes]
    assert len(hybrids) >= 4 and all(each.head == Head(name="MTP") for each in hybrids)
    beside = [each for each in entries() if each.head and each.head.bytes]
    assert any(each.name.startswith("Gemma 4") for each in beside)
    swapped = [each for each in entries() if each.on("cpu").target != each.target]
    assert swapped
    for each in swapped:
        own, other = each.target, each.on("cpu").target
        assert other.source.endswith(("IQ4_NL.gguf", "Q4_0.gguf")) and each.on("cuda") == each
        assert (other.name, other.parameters, other.layers) == (
            own.name,
            own.parameters,
            own.layers,
        )


SHAPES = [
    ("HuggingFaceTB/SmolLM2-135M-Instruct", 576, 9, 1536, 49152, True, 0),
    ("HuggingFaceTB/SmolLM2-360M-Instruct", 960, 15, 2560, 49152, True, 0),
    ("HuggingFaceTB/SmolLM2-1.7B-Instruct", 2048, 32, 8192, 49152, True, 0),
    ("Qwen/Qwen3-0.6B", 1024, 16, 3072, 151936, True, 256),
    ("Qwen/Qwen3-1.7B", 2048, 16, 6144, 151936, True, 256),
    ("Qwen/Qwen3-4B-Instruct", 2560, 32, 9728, 151936, True, 256),
    ("Qwen/Qwen3-8B", 4096, 32, 12288, 151936, False, 256),
    ("Qwen/Qwen3-32B", 5120, 64, 25600, 151936, False, 256),
    ("bartowski/Llama-3.2-1B", 2048, 32, 8192, 128256, True, 0),
    ("bartowski/Llama-3.2-3B", 3072, 24, 8192, 128256, True, 0),
    ("bartowski/Meta-Llama-3.1-8B", 4096, 32, 14336, 128256, False, 0),
    ("mistralai/Ministral-3-3B", 3072, 32, 9216, 131072, True, 0),
    ("mistralai/Ministral-3-14B", 5120, 32, 16384, 131072, False, 0),
    ("ibm-granite/granite-4.2-3b", 2560, 40, 8192, 100352, False, 0),
    ("ibm-granite/granite-4.2-8b", 4096, 32, 12800, 100352, False, 0),
    ("ibm-granite/granite-4.2-30b", 4096, 32, 32768, 100352, False, 0),
]
"""Hidden size, heads, inner size, tokens, whether in and out are one, norms of a layer's heads."""


@pytest.mark.parametrize(
    ("source", "hidden", "heads", "ffn", "vocabulary", "tied", "norms"), SHAPES
)
def test_layers_heads_and_parameters_agree(
    source: str, hidden: int, heads: int, ffn: int, vocabulary: int, tied: bool, norms: int
) -> None:
    found = [model for model in models() if model.source.startswith(source)]
    assert found
    for model in found:
        expected = shape(hidden, heads, ffn, vocabulary, model, tied)
        assert model.parameters == expected + norms * model.layers[0].count


def test_all_models_of_a_family_have_as_many_tokens() -> None:
    """By their parameters, which the vocabulary is part of; Gemma 4 is of another build."""
    for each in entries():
        if each.drafts and len(each.target.layers) == 1:
            sizes = {
                row[4]
                for row in SHAPES
                for model in (each.target, *each.drafts)
                if model.source.startswith(str(row[0]))
            }
            assert len(sizes) == 1, each.name


# What it needs.


def test_need_is_weights_and_cache_by_formula() -> None:
    (each,) = parse([ENTRY])
    numbers = (3 * 2 * 2 * 8 + 1 * 2 * 1 * 16) * 40
    assert each.target.need(40) == Need(1000, 2000, 2 * numbers)
    assert each.target.need(40, "cpu") == Need(1000, 4 * 1000, 4 * numbers), "in float32"
    small = each.drafts[0]
    assert small.need(40, "cpu") == Need(100, 60, 4 * 2 * 2 * 4 * 40), "its file as it is"
    assert small.need(51) == small.need(50) != small.need(49), "no more than it can read"
    both = each.need(40)
    assert both == Need(1100, 2060, 2 * numbers + small.need(40).cache)


def test_states_are_counted_with_those_that_undo_drafts() -> None:
    state = {**ENTRY, "target": {**TARGET, "state_bytes": 1000}}
    (plain,), (each,) = parse([ENTRY]), parse([state])
    for device in ("cpu", "cuda"):
        more = each.need(40, device).cache - plain.need(40, device).cache
        assert more == STATES * 1000


def test_a_head_in_a_file_of_its_own_is_counted() -> None:
    own = {**ENTRY, "head": {"name": "MTP", "bytes": 700, "bytes_are": "estimated"}}
    (plain,), (each,) = parse([ENTRY]), parse([own])
    assert each.head == Head(name="MTP", bytes=700, bytes_are="estimated")
    assert each.alone_need(40).weights == plain.target.need(40).weights + 700
    assert each.need(40).total == plain.need(40).total + 700
    (inside,) = parse([{**ENTRY, "head": {"name": "MTP"}}])
    assert inside.head == Head(name="MTP") and inside.need(40) == plain.need(40)


def test_half_of_float32_is_counted_on_a_processor_alone_and_for_folders_alone() -> None:
    (each,) = parse([ENTRY])
    whole, half = (each.target.need(40, "cpu", half) for half in (False, True))
    assert (2 * half.weights, 2 * half.cache) == (whole.weights, whole.cache)
    assert each.target.need(40, "cuda", True) == each.target.need(40, "cuda")
    assert each.drafts[0].need(40, "cpu", True) == each.drafts[0].need(40, "cpu"), "a GGUF file"


def test_another_file_for_processors_is_the_same_model() -> None:
    other = {"source": "some/large:l.gguf", "bytes": 900, "bytes_are": "estimated"}
    (each,) = parse([{**ENTRY, "target": {**TARGET, "processor": other}}])
    there = each.on("cpu").target
    assert (there.source, there.bytes, there.estimated) == ("some/large:l.gguf", 900, True)
    assert there.name == "Large" and each.on("mps") == each
    assert "on a processor `l.gguf` about 0.0 GB" in table([each])


def test_the_formula_agrees_with_what_is_known_of_a_cache() -> None:
    """A token of Qwen3 8B takes 36 x 2 x 8 x 128 numbers of 2 bytes, which is 144 KiB."""
    qwen = next(each.target for each in entries() if each.name == "Qwen3 8B")
    assert qwen.need(1000).cache == 1000 * 144 * 1024


# How it is read.


def put(value: Any, *path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(entry: dict[str, Any]) -> None:
        place: Any = entry
        for step in path[:-1]:
            place = place[step]
        if value is MISSING:
            del place[path[-1]]
        else:
            place[path[-1]] = value

    return change


MISSING = object()


def drop(*path: str | int) -> Callable[[dict[str, Any]], None]:
    return put(MISSING, *path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (drop("maker"), "in the entry 'Family', maker is missing"),
        (drop("name"), "in the entry None, name is missing"),
        (put(1, "extra"), "in the entry 'Family', extra is not known"),
        (put(7, "description"), "description cannot be 7. Give a text"),
        (put("yes", "tools"), "tools cannot be 'yes'. Give true or false"),
        (put("http://a", "licence_address"), "cannot be 'http://a'. Give an https address"),
        (put([], "sources"), "sources cannot be []. Give a list of https addresses"),
        (put(0, "target", "bytes"), "target.bytes cannot be 0. Give a whole number from 1"),
        (put("guessed", "target", "bytes_are"), "'guessed'. Give 'published' or 'estimated'"),
        (put("large", "target", "source"), "'large' is not a name on the hub"),
        (
            put("8", "target", "layers", 0, "count"),
            "layers[0].count cannot be '8'. Give a whole number",
        ),
        (put(1000, "drafts", 0, "parameters"), "must be smaller than the target, in the order"),
        (put(["Tiny"], "stack"), "The stack (Tiny) must be some of its drafts"),
        (put("it is small", "alone"), "Give drafts, or in 'alone' the reason"),
        (put({"name": "MTP", "bytes": 7}, "head"), "one of 'bytes' and 'bytes_are'"),
        (put(None, "head"), "Leave it out"),
    ],
)
def test_what_cannot_be_is_reported(
    change: Callable[[dict[str, Any]], None], expected: str
) -> None:
    damaged = copy.deepcopy(ENTRY)
    change(damaged)
    with pytest.raises(ModelError) as caught:
        parse([damaged])
    assert expected in str(caught.value) and "catalogue.json" in str(caught.value)


def test_a_family_without_drafts_has_to_say_why() -> None:
    alone = {**ENTRY, "drafts": [], "stack": []}
    with pytest.raises(ModelError, match="the reason for having none"):
        parse([alone])
    (each,) = parse([{**alone, "alone": "it is small"}])
    assert each.alone and each.need(9) == each.target.need(9)


def test_entries_have_names_of_their_own_and_an_order() -> None:
    with pytest.raises(ModelError, match="same name"):
        parse([ENTRY, ENTRY])
    small = {**ENTRY, "name": "Other", "target": {**TARGET, "parameters": 999}}
    with pytest.raises(ModelError, match="order of the size"):
        parse([ENTRY, small])
    assert [each.name for each in parse([small, ENTRY])] == ["Other", "Family"]
    with pytest.raises(ModelError, match="not a list"):
        parse({})


def test_a_file_that_is_gone_or_no_json_is_reported(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "catalogue.json"
    monkeypatch.setattr(catalogue, "FILE", file)
    for content in (None, "", "["):
        if content is not None:
            file.write_text(content)
        with pytest.raises(ModelError, match="Restore the file"):
            entries.__wrapped__()


# How it is told.


def test_the_documentation_has_the_table() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    begin, end = "<!-- catalogue -->\n", "<!-- end of catalogue -->\n"
    assert text.partition(begin)[2].partition(end)[0] == table(entries()), (
        "print it with: python -m tests.support.catalogue_table"
    )


def test_what_the_documentation_says_fits_does() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) GB \| (.+) \|$", text, re.MULTILINE)
    named = [(int(gb), each, row) for gb, row in rows for each in entries() if each.name in row]
    assert len(named) >= 6
    for gb, each, row in named:
        extra = sum(
            draft.need(TABLE_CONTEXT).total
            for draft in each.drafts
            if draft not in each.stack and "both drafts" in row
        )
        assert each.need(TABLE_CONTEXT).total + extra < gb * 1e9, row


def test_the_file_is_written_as_it_is_read() -> None:
    """No duplicate names: the reader of JSON would take the last one without a word."""
    pairs: list[list[tuple[str, Any]]] = []
    json.loads(catalogue.FILE.read_text(encoding="utf-8"), object_pairs_hook=pairs.append)
    assert pairs and all(len({name for name, _ in each}) == len(each) for each in pairs)
