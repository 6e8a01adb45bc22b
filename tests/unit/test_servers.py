"""Models on servers, without a server: addresses, what is streamed, counters, what is sent."""

from dataclasses import replace

import pytest

from engine.engine import Load, Request
from engine.errors import ModelError, SettingError
from engine.methods import METHODS, PLAIN, SERVER, method_named, offered, served
from engine.models import loaders
from engine.models.formats import format_of
from engine.servers.answer import (
    BEGIN,
    END,
    Chunk,
    Refusal,
    Thinking,
    body_of,
    chunk_of,
    refused_name,
    shared,
    sizes,
)
from engine.servers.client import (
    Access,
    Counters,
    Drafting,
    ServerModel,
    counters,
    parsed,
    quoted,
    refused,
    resolve_address,
)
from engine.servers.served import info_of
from engine.settings import AnswerFormat, Generation, Sampling
from engine.types import Message

HERE = parsed("http://localhost:8000/v1")


# addresses


@pytest.mark.parametrize(
    ("given", "base", "model"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1", ""),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1", ""),
        (" HTTPS://Example.org/openai/v1#My/Model ", "https://example.org/openai/v1", "My/Model"),
        ("http://[::1]:8000/v1/chat/completions", "http://[::1]:8000/v1", ""),
        ("http://h/v1#a%20b", "http://h/v1", "a b"),
    ],
)
def test_an_address_is_written_in_one_way(given: str, base: str, model: str) -> None:
    found = parsed(given)
    assert (found.base, found.model) == (base, model)
    assert parsed(found.source).base == base and format_of(given).kind == "server"
    assert resolve_address(given) == loaders.resolve_source(given) == found.source


@pytest.mark.parametrize(
    "wrong",
    ["http://", "http://:80/v1", "http://h:99999/v1", "http://h/v1?key=1", "http://[::1/v1"],
)
def test_what_is_no_address_is_refused_and_left_as_it_is(wrong: str) -> None:
    with pytest.raises(ModelError, match="Give one such as"):
        parsed(wrong)
    assert resolve_address(wrong) == wrong
    with pytest.raises(ModelError):
        loaders.check_there(wrong)


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ModelError, match="Leave it out") as found:
        parsed("http://me:hush@example.org/v1")
    assert "hush" not in str(found.value)


def test_a_server_is_told_apart_from_files_and_the_hub() -> None:
    kinds = [format_of(s).kind for s in ("http://h/v1", "owner/name", "a.gguf", "httpfolder")]
    assert kinds == ["server", "transformers", "llama.cpp", "transformers"]
    assert format_of("http://h/v1#file.gguf").kind == "server"
    assert loaders.name_of("http://h:1/v1#some/model") == "some/model"
    assert loaders.present("http://h/v1") and loaders.check("http://h/v1") == 0
    assert loaders.need("http://h/v1").total == 0


def test_a_key_shows_in_no_text_of_a_value() -> None:
    assert "hush" not in repr(Access(HERE, "hush")) + repr(Load("http://h/v1", key="hush"))
    assert "hush" not in str(refused(401, '{"error": {"message": "no hush here"}}', HERE, "hush"))


# what is streamed


def test_a_chunk_is_read_as_far_as_it_is_told() -> None:
    found = chunk_of(
        'data: {"choices": [{"delta": {"content": "a b"}, "token_ids": [1, 2], "finish_reason": '
        '"stop", "stop_reason": "END", "logprobs": {"content": [{"token": "a", "logprob": -1}, '
        '{"token": " b", "logprob": -2}]}}], "prompt_token_ids": [7], "usage": null}'
    )
    assert found == Chunk("a b", "", (1, 2), ("a", " b"), (-1.0, -2.0), (7,), "stop", None)
    assert shared(found, "a b", 2) == ("a", " b") and shared(found, "a  b", 2) == ["", "a  b"]
    assert chunk_of(": ping") is None and chunk_of("") is None
    assert chunk_of("data: [DONE]") == Chunk(done=True)
    assert chunk_of('data: {"choices": [], "usage": {"prompt_tokens": 7}}') == Chunk(read=7)
    with pytest.raises(Refusal) as refusal:
        chunk_of('data: {"error": {"message": "no", "code": 422}}')
    assert refusal.value.status == 422 and "no" in refusal.value.text


@pytest.mark.parametrize(
    "said",
    [
        '{"choices": 3, "usage": 4}',
        '{"choices": [3]}',
        '{"choices": [{"delta": 5, "token_ids": [true], "logprobs": {"content": [1]}}]}',
        '{"choices": [{"delta": {"content": 5}, "token_ids": [-1], "finish_reason": {}}]}',
        '{"choices": [{"logprobs": {"content": [{"token": "a", "logprob": "b"}]}}]}',
    ],
)
def test_what_has_another_form_tells_nothing(said: str) -> None:
    assert chunk_of(f"data: {said}") == Chunk()


@pytest.mark.parametrize("said", ["{", "[]", '"text"', "[" * 100_000])
def test_what_is_no_chunk_is_no_value(said: str) -> None:
    with pytest.raises(ValueError):
        chunk_of(f"data:{said}")


def test_thinking_that_is_told_apart_comes_back_into_the_text() -> None:
    thinking = Thinking()
    parts = [Chunk(reasoning="one "), Chunk(reasoning="two"), Chunk("three"), Chunk(" four")]
    assert "".join(map(thinking.joined, parts)) == f"{BEGIN}one two{END}three four"


def test_forwards_are_told_of_tokens_that_were_not_told_before() -> None:
    assert sizes([4, 4, 2], 0, 10) == [4, 4, 2] and sizes([4, 4, 2], 4, 10) == [4, 2]
    assert sizes([4, 4], 6, 8) == [2], "a part of a forward was told before"
    assert sizes([4], 0, 5) == [] and sizes([], 0, 5) == [], "it does not tell of all of them"


# counters


def test_counters_are_summed_over_engines() -> None:
    text = (
        "# HELP vllm:spec_decode_num_draft_tokens_total Tokens.\n"
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a b"} 40.0\n'
        'vllm:spec_decode_num_draft_tokens_total{engine="1"} 2\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 12.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 99.0\n'
        "vllm:spec_decode_num_draft_tokens_created 1.7e9\n"
        "vllm:spec_decode_num_accepted_tokens_total no-number\n"
    )
    assert counters(text) == Counters(42, 12)
    assert counters("") is None and counters("<html>") is None


# what is asked


def asked(maker: str, sources: bool = False, **more: object) -> dict[str, object]:
    generation = Generation(Sampling(0.5, top_k=9, min_p=0.1, seed=3), 20, ("END",))
    request = Request((Message("user", "Hi"),), generation=generation, **more)  # type: ignore[arg-type]
    return body_of(request, "m", maker, sources, ())


def test_settings_go_into_the_request() -> None:
    body = asked("somebody")
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 20,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 9,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["END"],
    }
    assert asked("vllm")["return_token_ids"] and asked("vllm", True)["logprobs"]


def test_servers_with_defaults_of_their_own_are_told_every_setting() -> None:
    plain = Request((Message("user", "Hi"),), generation=Generation(Sampling(0.0)))
    assert "min_p" not in body_of(plain, "m", "somebody", False, ())
    body = body_of(plain, "m", "vllm", False, ())
    assert body["min_p"] == 0 and body["top_k"] == 0
    warm = replace(plain, generation=Generation(Sampling(0.5, min_p=0.1)))
    assert body_of(warm, "m", "vllm", False, ["min_p"])["min_p"] == 0
    assert "min_p" not in body_of(warm, "m", "somebody", False, ["min_p"])


@pytest.mark.parametrize(
    ("kind", "text", "maker", "name", "value"),
    [
        ("json_schema", '{"type": "object"}', "somebody", "response_format", {"type": "object"}),
        ("regex", "a+", "vllm", "structured_outputs", {"regex": "a+"}),
        ("choice", '["a", "b"]', "strata", "structured_outputs", {"choice": ["a", "b"]}),
        ("gbnf", "root ::= [a-z]", "vllm", "structured_outputs", {"grammar": "root ::= [a-z]"}),
        ("gbnf", "root ::= [a-z]", "llamacpp", "grammar", "root ::= [a-z]"),
    ],
)
def test_a_format_goes_to_a_server_in_its_own_terms(
    kind: str, text: str, maker: str, name: str, value: object
) -> None:
    wanted = Request(generation=Generation(format=AnswerFormat(kind, text)))
    found = body_of(wanted, "m", maker, False, ())[name]
    if kind == "json_schema":
        assert found["type"] == kind
        found = found["json_schema"]["schema"]
    assert found == value


@pytest.mark.parametrize(
    ("kind", "maker"), [("regex", "llamacpp"), ("lark", "vllm"), ("choice", "")]
)
def test_a_format_that_a_server_does_not_know_is_refused(kind: str, maker: str) -> None:
    wanted = Request(generation=Generation(format=AnswerFormat(kind, '["a"]')))
    with pytest.raises(SettingError, match="Give a JSON schema, or load the model here"):
        body_of(wanted, "m", maker, False, ())


def test_only_who_can_is_asked_to_draft_nothing() -> None:
    off = asked("vllm", True, method=PLAIN)
    assert off["vllm_xargs"] == {"strata": "off"}
    assert "vllm_xargs" not in asked("vllm", False, method=PLAIN), "our drafter is not there"
    assert asked("strata", method=PLAIN)["speculative"] == {"method": "plain"}
    assert "speculative" not in asked("somebody", method=PLAIN)


def test_an_answer_that_has_begun_goes_to_servers_that_go_on() -> None:
    body = asked("vllm", prefix="Once")
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    assert body["messages"][-1] == {"role": "assistant", "content": "Once"}  # type: ignore[index]


def test_a_refusal_names_the_parameter_it_is_about() -> None:
    body = asked("somebody")
    assert refused_name("Unrecognized request argument supplied: top_k", body) == "top_k"
    assert refused_name("max_tokens is not supported, use max_completion_tokens", body) == (
        "max_tokens"
    )
    assert refused_name("The prompt is too long", body) == ""


def test_a_servers_words_are_told_on_one_short_line() -> None:
    assert quoted('{"error": {"message": "too\\n long"}}') == "too long"
    assert quoted('{"detail": [{"msg": "no"}]}') == '[{"msg": "no"}]'
    assert quoted("<html>nothing for people</html>") == ""
    assert len(quoted("x" * 5_000)) < 400


# what is known of it


def test_what_a_server_tells_decides_what_can_be_asked() -> None:
    plain = info_of(HERE, ServerModel("m", 0, "somebody", None, False))
    assert plain.server is not None and not plain.server.switches and not plain.server.drafting
    assert [method.name for method in offered(plain)] == ["auto"]
    assert served(PLAIN, plain.server) == SERVER == method_named("server")
    strata = Drafting(databases=["context", "nonsense"], draft_tokens=8, drafting=True)
    ours = info_of(HERE, ServerModel("m", 4096, "vllm", strata, True))
    assert ours.server is not None and ours.server.databases == ("context",)
    assert [method.name for method in offered(ours)] == ["plain", "auto"]
    assert served(PLAIN, ours.server) == PLAIN and served(METHODS["hd"], ours.server) == SERVER
    assert ours.fingerprint == plain.fingerprint, "one model at one address"
