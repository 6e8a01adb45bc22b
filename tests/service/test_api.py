"""The API as programs meet it: over HTTP, with OpenAI's client, and with whatever else comes."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain
from math import exp
from typing import Any

import httpx
import openai
import pytest
from starlette.requests import ClientDisconnect

from app.api import routes
from app.api.answers import OpenAIReply
from app.api.requests import Chat, completion
from app.api.running import Running
from app.http.login import BY_ALL, BY_SOURCE
from app.service.programs import MOST_EACH
from engine.backends.base import LogitScores, Wanted
from engine.loaded import no_model
from engine.local import Local
from engine.settings import Generation, Sampling
from engine.tree import Tree
from storage.database import Database
from storage.ngrams import ModelNgrams
from tests.support.inside import Held, on_toy, preferences, soon
from tests.support.inside import ask as answered
from tests.support.served import Served, ask, served
from tests.support.toy import ToyBackend

HELLO: list[Any] = [{"role": "user", "content": "hello there"}]


# OpenAI's client


def test_the_client_is_answered_with_the_page_s_text(program: openai.OpenAI) -> None:
    found = program.chat.completions.create(
        model="toy", messages=HELLO, seed=7, temperature=0.8, max_tokens=50
    )
    assert found.choices[0].message.content == answer_of_the_page(7)
    assert found.choices[0].message.role == "assistant" and found.object == "chat.completion"
    assert found.choices[0].finish_reason in ("stop", "length") and found.model == "toy"
    usage = found.usage
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None and found.id.startswith("chatcmpl-")


def answer_of_the_page(seed: int) -> str:
    """To `HELLO`, at temperature 0.8 within 50 tokens, in a conversation of the page's."""
    with Database() as db:
        session = on_toy(db)
        chosen = replace(
            preferences(), generation=Generation(Sampling(0.8, seed=seed), 50), fresh_seed=False
        )
        _, last = answered(session, chosen=chosen)
        session.engine.close()
    return str(last.text)


def streamed(program: openai.OpenAI, **more: Any) -> tuple[str, list[Any]]:
    """The text of a stream, and its chunks."""
    given = {"model": "toy", "messages": HELLO, "seed": 7, "temperature": 0.8, "max_tokens": 50}
    chunks = list(program.chat.completions.create(**(given | more), stream=True))
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks


@pytest.mark.parametrize("speculative", [None, False, "lookup", {"method": "hd", "nodes": 3}])
def test_a_stream_says_the_same_by_every_method(program: openai.OpenAI, speculative: Any) -> None:
    body = {} if speculative is None else {"speculative": speculative}
    text, chunks = streamed(program, extra_body=body)
    assert text == answer_of_the_page(7)
    first, *between, last = chunks
    assert first.choices[0].delta.role == "assistant" and last.choices[0].finish_reason
    assert all(c.choices[0].finish_reason is None for c in between)
    assert {c.id for c in chunks} == {first.id} and all(c.usage is None for c in chunks)
    assert last.model_extra["timings"]["predicted_n"] >= len(between)
    method = last.model_extra["strata"]["method"]
    named = {None: "auto", False: "plain", "lookup": "lookup"}
    requested = speculative["method"] if isinstance(speculative, dict) else named[speculative]
    assert method == requested


def test_usage_comes_in_a_chunk_of_its_own(program: openai.OpenAI) -> None:
    _, chunks = streamed(program, stream_options={"include_usage": True})
    assert [bool(c.choices) for c in chunks] == [True] * (len(chunks) - 1) + [False]
    last = chunks[-1]
    assert last.usage.completion_tokens == last.model_extra["timings"]["predicted_n"] > 10
    assert not any("timings" in (c.model_extra or {}) for c in chunks[:-1])


def test_every_chunk_but_the_last_says_that_it_has_no_usage(client: httpx.Client) -> None:
    found = ask(
        client, text="hi", max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    assert found.headers["content-type"].startswith("text/event-stream")
    *lines, done = found.text.split("\n\n")[:-1]
    assert done == "data: [DONE]"
    usage = [json.loads(line.removeprefix("data: "))["usage"] for line in lines]
    assert usage[:-1] == [None] * (len(usage) - 1) and usage[-1]["completion_tokens"] > 0


@pytest.mark.grid(1)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prediction_saves_forwards_and_changes_nothing(temperature: float, stream: bool) -> None:
    """Compared with a fresh program, because past answers would draft the second answer as well."""
    text, forwards, _ = predicted(temperature, None)
    assert len(text) > 60
    changed = text[:30] + "and then " + text[30:]
    parts = [{"type": "text", "text": part} for part in (changed[:17], changed[17:])]
    for prediction, most in ((text, 0.6), (changed, 0.8), (parts, 0.8)):
        answer, fewer, details = predicted(temperature, prediction, stream)
        assert answer == text and fewer < most * forwards
        assert details.accepted_prediction_tokens > 20 and details.rejected_prediction_tokens >= 0
    for prediction in ("Nothing of this is ever said. " * 20, ""):
        answer, other, details = predicted(temperature, prediction, stream)
        assert answer == text and other <= forwards + 2
        assert details.accepted_prediction_tokens < (15 if prediction else 1)


def predicted(temperature: float, content: Any, stream: bool = False) -> tuple[str, int, Any]:
    """The first answer of a fresh program, the number of its forwards, and how its tokens came."""
    given: dict[str, Any] = {"messages": HELLO, "seed": 7, "temperature": temperature}
    given |= {"max_tokens": 80, "extra_body": {"speculative": {"method": "hd"}}}
    if content is not None:
        given["prediction"] = {"type": "content", "content": content}
    with (
        served() as fresh,
        openai.OpenAI(base_url=f"{fresh.address}/v1", api_key="any", max_retries=0) as program,
    ):
        if stream:
            text, chunks = streamed(program, stream_options={"include_usage": True}, **given)
            found = chunks[-1]
        else:
            found = program.chat.completions.create(model="toy", **given)
            text = found.choices[0].message.content
    forwards = round(
        found.usage.completion_tokens / found.model_extra["strata"]["tokens_per_forward"]
    )
    return text, forwards, found.usage.completion_tokens_details


def test_stop_strings_end_an_answer_and_are_not_said(program: openai.OpenAI) -> None:
    whole = answer_of_the_page(7)
    stop = whole[8:10]
    for given in (stop, [stop], ["never said", stop]):
        text, chunks = streamed(program, stop=given)
        assert text == whole[: whole.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_seeds_repeat_and_no_seed_does_not(program: openai.OpenAI) -> None:
    def text(**more: Any) -> Any:
        found = program.chat.completions.create(
            model="toy", messages=HELLO, temperature=1.0, max_tokens=30, **more
        )
        return found.choices[0].message.content, found.model_extra["strata"]["seed"]

    assert text(seed=11) == text(seed=11) != text(seed=12)
    (first, seed), (second, _) = text(), text()
    assert first != second and text(seed=seed) == (first, seed), "the seed is told"
    assert text(seed=-1)[1] != text(seed=-1)[1]


def test_probabilities_are_the_model_s_own(program: openai.OpenAI) -> None:
    found = program.chat.completions.create(
        model="toy", messages=HELLO, seed=7, temperature=0.8, max_tokens=12,
        logprobs=True, top_logprobs=4,
    )  # fmt: skip
    choice = found.choices[0]
    content = choice.logprobs.content
    assert "".join(entry.token for entry in content) == choice.message.content
    plain = program.chat.completions.create(
        model="toy", messages=HELLO, seed=7, temperature=0.8, max_tokens=12, logprobs=True,
        extra_body={"speculative": False},
    )  # fmt: skip
    for entry, other in zip(content, plain.choices[0].logprobs.content, strict=True):
        assert entry.logprob == pytest.approx(other.logprob) and other.top_logprobs == []
        assert bytes(entry.bytes).decode() == entry.token
        shares = [exp(each.logprob) for each in entry.top_logprobs]
        assert len(shares) == 4 and shares == sorted(shares, reverse=True) and sum(shares) <= 1.001
        assert entry.logprob <= entry.top_logprobs[0].logprob
        beside = {each.token: each.logprob for each in entry.top_logprobs}
        assert beside.get(entry.token, entry.logprob) == pytest.approx(entry.logprob)
    text, chunks = streamed(program, logprobs=True, max_tokens=12)
    logprobs = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert "".join(entry.token for entry in logprobs) == text


def test_texts_are_continued(program: openai.OpenAI) -> None:
    def go_on(prompt: Any, **more: Any) -> Any:
        return program.completions.create(
            model="toy", prompt=prompt, temperature=0, max_tokens=20, logprobs=2, **more
        )

    found = go_on("once upon")
    (choice,) = found.choices
    assert found.object == "text_completion" and len(choice.text) > 5
    assert "".join(choice.logprobs.tokens) == choice.text
    starts = choice.logprobs.text_offset
    assert starts == sorted(starts) and starts[0] == 0
    assert {len(each) for each in choice.logprobs.top_logprobs} == {2}
    assert go_on(list(b"once upon")).choices[0].text == choice.text
    several = go_on(["once upon", list(b"once upon"), "twice"])
    assert [c.index for c in several.choices] == [0, 1, 2]
    assert several.choices[0].text == several.choices[1].text == choice.text
    assert several.usage.prompt_tokens == 2 * len("once upon") + len("twice")
    chunks = list(go_on("once upon", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == choice.text
    offsets = [c.choices[0].logprobs.text_offset for c in chunks if c.choices[0].logprobs]
    assert list(chain(*offsets)) == starts
    assert found.usage.completion_tokens <= 20
    assert program.completions.create(model="toy", prompt="a").usage.completion_tokens <= 16


def test_several_choices_have_seeds_that_follow(program: openai.OpenAI) -> None:
    def texts(n: int, seed: int) -> list[str | None]:
        found = program.chat.completions.create(
            model="toy", messages=HELLO, n=n, seed=seed, temperature=0.8, max_tokens=20
        )
        assert [choice.index for choice in found.choices] == list(range(n))
        return [choice.message.content for choice in found.choices]

    assert texts(3, 5) == texts(1, 5) + texts(1, 6) + texts(1, 7)
    _, chunks = streamed(program, n=2, max_tokens=9)
    assert [c.choices[0].index for c in chunks] == sorted(c.choices[0].index for c in chunks)
    ends = [c.choices[0].index for c in chunks if c.choices[0].finish_reason]
    assert ends == [0, 1] and "timings" not in chunks[-1].model_extra
    assert len(chunks[-1].model_extra["strata"]["choices"]) == 2


def test_choices_are_answered_at_once_if_answers_are() -> None:
    """After its first step, the first one waits here for the others."""
    asked, steps, shared, failing = list[object](), list[int](), list[int](), False

    class Meeting(ToyBackend):
        def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
            assert len(asked) != 1 or not steps or soon(lambda: len(asked) > 1)
            steps.append(len(tree))
            return super().score(tree, sampling)

        def score_all(self, wanted: Sequence[Wanted[Any]]) -> list[LogitScores]:
            shared.append(len(wanted))
            if failing:
                raise RuntimeError("out of memory")
            return super().score_all(wanted)

    def four(**more: Any) -> Any:
        asked.clear()
        steps.clear()
        return program.chat.completions.create(n=4, **given | more)

    def generate(request: Any) -> Any:
        asked.append(request)
        return own(request)

    given: Any = {"model": "toy", "messages": HELLO, "seed": 5, "max_tokens": 40}
    with closing(Local(backend=Meeting())) as engine, served(engine=engine) as server:
        engine.use(replace(engine.loaded, runtime=replace(engine.loaded.runtime, parallel=3)))
        own, engine.generate = engine.generate, generate  # type: ignore[method-assign]
        with openai.OpenAI(base_url=f"{server.address}/v1", api_key="-", max_retries=0) as program:
            whole, chunks = four().choices, list(four(stream=True))
            assert max(shared) == 3
            for number in range(4):
                asked += [None, None]
                (alone,) = program.chat.completions.create(**given | {"seed": 5 + number}).choices
                own_chunks = [c.choices[0] for c in chunks if c.choices[0].index == number]
                streamed_text = "".join(each.delta.content or "" for each in own_chunks)
                assert whole[number].message.content == alone.message.content == streamed_text
            failing = True
            with pytest.raises(openai.InternalServerError):
                four(seed=50)
            failing = False
            assert len(four(seed=50).choices) == 4


def test_the_errors_are_those_of_openai(program: openai.OpenAI, server: Served) -> None:
    def refused(kind: type, **more: Any) -> Any:
        given: Any = {"model": "toy", "messages": HELLO, "max_tokens": 3} | more
        with pytest.raises(kind) as raised:
            program.chat.completions.create(**given)
        return raised.value

    error = refused(openai.NotFoundError, model="gpt-4o")
    assert error.code == "model_not_found" and "'toy'" in error.message
    error = refused(openai.BadRequestError, temperature=3)
    assert error.param == "temperature" and "from 0 to 2" in error.message
    error = refused(openai.BadRequestError, messages=[{"role": "user", "content": "x" * 9000}])
    assert (error.code, error.param) == ("context_length_exceeded", "messages")
    error = refused(openai.BadRequestError, tools=[{"type": "function", "function": {"name": "f"}}])
    assert error.param == "tools" and "toy cannot call tools" in error.message
    wrong = openai.OpenAI(base_url=f"{server.address}/v1", api_key="sk-strata-x", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError) as raised:
        wrong.models.list()
    assert raised.value.code == "invalid_api_key"


def test_the_model_is_listed_and_found(program: openai.OpenAI) -> None:
    (model,) = program.models.list().data
    assert model.id == "toy" and model.object == "model" and model.owned_by == "strata"
    assert model.model_extra is not None and model.model_extra["max_model_len"] == 4096
    assert program.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError):
        program.models.retrieve("org/other")


def test_the_figures_are_true(program: openai.OpenAI) -> None:
    found = program.chat.completions.create(
        model="toy", messages=HELLO, seed=7, temperature=0.8, max_tokens=50,
        extra_body={"speculative": {"tiers": ["context", "model"]}},
    )  # fmt: skip
    extra, usage = found.model_extra, found.usage
    timings, ours = extra["timings"], extra["strata"]
    spec = extra["metrics"]["speculative_decoding"]
    drafted = sum(each["drafted"] for each in ours["by_source"].values())
    accepted = sum(each["accepted"] for each in ours["by_source"].values())
    assert set(ours["by_source"]) <= {"context", "model"} and accepted > 0
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (drafted, accepted)
    assert (spec["num_draft_tokens"], spec["num_accepted_draft_tokens"]) == (drafted, accepted)
    tokens = usage.completion_tokens
    assert timings["predicted_n"] == tokens
    assert ours["tokens_per_forward"] == pytest.approx(tokens / ours["forwards"])
    assert ours["forwards"] in (tokens - accepted, tokens - accepted + 1), "bonus tokens in neither"
    assert spec["num_spec_steps"] == ours["forwards"] - ours["plain_steps"]
    assert timings["prompt_n"] + timings["cache_n"] == usage.prompt_tokens
    assert timings["cache_n"] == usage.prompt_tokens_details.cached_tokens


def test_an_answer_continues_where_it_stopped(program: openai.OpenAI) -> None:
    """Word for word what it would have said."""
    whole = answer_of_the_page(7)
    begun: list[Any] = [*HELLO, {"role": "assistant", "content": whole[:21]}]
    found = program.chat.completions.create(
        model="toy", messages=begun, seed=7, temperature=0.8, max_tokens=50 - 21
    )
    assert found.choices[0].message.content == whole[21:]
    stopped = program.chat.completions.create(
        model="toy", messages=begun, seed=7, temperature=0.8, max_tokens=50, stop=whole[30:32]
    )
    assert stopped.choices[0].message.content == whole[21 : whole.index(whole[30:32], 21)]


# who may ask


KEYLESS = ("/v1/models", "/metrics")


def test_a_program_of_this_machine_needs_no_key(client: httpx.Client) -> None:
    for path in KEYLESS:
        assert client.get(path).status_code == 200
    assert ask(client, text="hi", max_tokens=2).status_code == 200
    assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "sec-fetch-dest": "image"},
    ],
)
def test_a_page_of_another_origin_asks_nothing(
    client: httpx.Client, headers: dict[str, str]
) -> None:
    """Whatever its form sends: a text that reads as JSON, too."""
    sent = json.dumps({"messages": HELLO})
    kinds = ("application/json", "text/plain", "application/x-www-form-urlencoded")
    for kind in kinds:
        found = client.post(
            "/v1/chat/completions", content=sent, headers={**headers, "content-type": kind}
        )
        assert found.status_code == 403 and found.json()["error"]["type"] == "permission_error"
    assert client.get("/v1/models", headers=headers).status_code == 403
    preflight = {
        **headers,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    answered = client.options("/v1/chat/completions", headers=preflight)
    assert answered.status_code in (403, 404)
    assert not [name for name in answered.headers if name.startswith("access-control")]


def test_an_origin_that_was_named_may_ask_with_a_key() -> None:
    with served(None, "--api-origin", "http://localhost:3000") as server:
        _, secret = server.session.programs.keys.make("page")
        own = {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}
        with server.client(**own) as client:
            names = "authorization,content-type,anthropic-beta,x-stainless-lang"
            asks = {
                "access-control-request-method": "POST",
                "access-control-request-headers": names,
            }
            first = client.options("/v1/chat/completions", headers=asks)
            assert first.status_code == 200
            assert first.headers["access-control-allow-origin"] == own["origin"]
            assert first.headers["access-control-allow-headers"] == names
            assert ask(client, text="hi").status_code == 401, "a name is no key"
        with server.client(secret, **own) as client:
            found = ask(client, text="hi", max_tokens=2)
            assert found.status_code == 200 and found.headers["vary"] == "origin"
            assert found.headers["access-control-allow-origin"] == own["origin"]
        with server.client(secret, origin="http://localhost:3001") as client:
            assert ask(client, text="hi").status_code == 403


def test_a_server_for_others_always_wants_a_key() -> None:
    with served(None, "--host", "0.0.0.0") as server:
        _, secret = server.session.programs.keys.make("mine")
        with server.client() as client:
            for path in KEYLESS:
                found = client.get(path)
                assert found.status_code == 401, path
                assert found.json()["error"]["code"] == "missing_api_key"
                assert found.headers["www-authenticate"] == "Bearer"
            assert ask(client, text="hi").status_code == 401
            assert client.get("/health").json() == {"status": "ok"}
            only_head = client.head("/health")
            assert (only_head.status_code, only_head.content) == (200, b"")
            assert client.head("/metrics").status_code == 401
        with server.client(secret) as client:
            assert client.get("/v1/models").status_code == 200
            assert ask(client, text="hi", max_tokens=2).status_code == 200


def test_a_password_on_this_machine_is_not_gone_around(db: Database) -> None:
    from app.api.routes import api_of
    from app.arguments import parse

    session = on_toy(db)
    for arguments, private in (
        ([], True),
        (["--auth", "ann:secret"], False),
        (["--share"], False),
        (["serve"], True),
        (["serve", "--host", "192.168.1.5"], False),
    ):
        assert api_of(session, parse(arguments)).gate.private is private
    session.engine.close()


def test_a_key_is_an_owner_of_its_own_and_revoked_at_once(server: Served) -> None:
    programs = server.session.programs
    (one, first), (two, second) = programs.keys.make("one"), programs.keys.make("two")
    with server.client(first) as client:
        assert ask(client, text="who is it?", max_tokens=20).status_code == 200
        fingerprint = server.session.current.info.fingerprint
        database = server.session.database
        assert ModelNgrams(database, one.owner, fingerprint).rows() > 0
        assert ModelNgrams(database, two.owner, fingerprint).rows() == 0
        assert programs.keys.list()[0].used is not None
        programs.revoke(one.id)
        assert client.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
    with server.client(second) as client:
        assert client.get("/v1/models").status_code == 200
    programs.revoke(two.id)


def test_wrong_keys_wait_longer_and_longer_and_right_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = list[float]()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    # A server of its own: it remembers who guessed.
    with served() as server:
        monkeypatch.setattr(server.api.gate.throttle, "sleep", sleep)
        _, secret = server.session.programs.keys.make("right")
        with server.client("sk-strata-guess") as wrong, server.client(secret) as right:
            for _ in range(20):
                assert wrong.get("/v1/models").status_code == 401
            assert waits[0] == 0 and max(waits) == BY_SOURCE.longest > BY_ALL.longest
            many = len(waits)
            assert right.get("/v1/models").status_code == 200 and len(waits) == many


def test_the_switch_counts_where_nobody_else_can_come_in(db: Database) -> None:
    from app.service.programs import Programs

    for guests, switched, always, on in (
        (False, False, False, False),
        (False, True, False, True),
        (False, False, True, True),
        (True, True, False, False),
        (True, False, True, True),
    ):
        session = on_toy(db, guests=guests)
        programs: Programs = session.programs
        programs.keys.switch(switched)
        programs.always = always
        assert programs.on is on
        session.engine.close()


def test_while_it_is_off_programs_learn_how_to_switch_it_on(server: Served) -> None:
    programs = server.session.programs
    programs.always = False
    try:
        with server.client() as client:
            for path in ("/v1/models", "/health", "/metrics"):
                found = client.get(path)
                assert found.status_code == 404 and found.json()["error"]["code"] == "api_off"
            assert "Switch it on" in ask(client, text="hi").json()["error"]["message"]
            programs.keys.switch(True)
            assert client.get("/v1/models").status_code == 200, "while the program runs"
            programs.keys.switch(False)
            assert client.get("/v1/models").status_code == 404
    finally:
        programs.always = True


# what cannot be answered


def nested(depth: int) -> str:
    return '{"messages": ' + "[" * depth + "]" * depth + "}"


def chat(**more: Any) -> str:
    return json.dumps({"messages": HELLO, "max_tokens": 2} | more)


HOSTILE: list[str | bytes] = [
    *("", "{", "null", "1", '"x"', "[]", "true", "{}", "NaN", '{"messages": NaN}', "\x00", "{}{}"),
    *(b"\xff\xfe", b"\x80abc", '{"messages": [}'.encode("utf-16"), "9" * 10_000),
    *(nested(100), nested(900), nested(100_000), '{"a":' * 5000),
    chat(messages=[{"role": "assistant", "content": "And so"}]),
    chat(messages=[{"role": "system", "content": "only this"}]),
    chat(messages=[{"role": "user", "content": " "}]),
    chat(messages=HELLO * 5000),
    chat(messages=[{"role": "user", "content": "x" * 100_000}]),
    *(chat(model=m) for m in ("gpt-4o", "x" * 10_000, "\ud800", "toy\x00")),
    *(chat(temperature=1e308), chat(seed=10**300), chat(stop=[None]), chat(n=10**9)),
    *(chat(speculative=s) for s in ("x", {"method": "hsd:x@y"}, {"method": "hsd"})),
    *(chat(tools=[{"type": "function"}], tool_choice=c) for c in ("auto", "required")),
]
"""What no program sends that means it. Values of parameters: tests/unit/test_api_requests.py."""
TEXTS: list[str] = [
    json.dumps({"max_tokens": 2} | more)
    for more in (
        {}, {"prompt": [[]]}, {"prompt": [260]}, {"prompt": ["x"] * 17},
        {"prompt": ["a", "b"], "n": 9}, {"prompt": "x" * 9000}, {"prompt": [1] * 9000},
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "bodies"), [("chat/completions", HOSTILE), ("completions", TEXTS)]
)
def test_no_request_breaks_the_server(
    client: httpx.Client, path: str, bodies: list[str | bytes]
) -> None:
    for body in bodies:
        found = client.post(f"/v1/{path}", content=body)
        assert 400 <= found.status_code < 500, (body[:200], found.status_code)
        error = found.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        assert len(found.content) < 3000, "an error quotes little"
    assert ask(client, text="hello", max_tokens=2).status_code == 200


def test_a_number_of_many_digits_is_refused_without_advice_for_python(
    client: httpx.Client,
) -> None:
    found = client.post("/v1/chat/completions", content='{"seed": 1' + "0" * 5000 + "}")
    assert found.status_code == 400
    message = found.json()["error"]["message"]
    assert "5001 digits" in message and "sys." not in message


def test_a_long_path_is_quoted_in_part(client: httpx.Client) -> None:
    found = client.get("/v1/" + "a" * 5000)
    assert found.status_code == 404 and "/v1/aaa" in found.text and len(found.content) < 500


def test_odd_requests_that_make_sense_are_answered(client: httpx.Client) -> None:
    for more in (
        {"temperature": 0, "top_k": 5.0, "seed": 2**63 - 1, "stop": None, "tool_choice": "none"},
        {"never heard of": [{}], "metadata": {"a": "b"}, "max_tokens": 10**9,
         "max_completion_tokens": 2},
        {"messages": [{"role": "developer", "content": "be brief"}, *HELLO]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "a"}]},
        {"messages": [*HELLO, {"role": "assistant", "content": None}, *HELLO]},
        {"messages": [{"role": "user", "content": "\ud800 \x00 \U0001f999 <|end|>"}]},
    ):  # fmt: skip
        body = {"messages": HELLO, "max_tokens": 2} | more
        found = client.post("/v1/chat/completions", content=json.dumps(body))
        assert found.status_code == 200, (more, found.text)


def test_roles_and_parts_read_as_the_page_would_put_them(client: httpx.Client) -> None:
    def text(*messages: dict[str, Any]) -> str:
        body = {"messages": messages, "seed": 1, "max_tokens": 20}
        return str(client.post("/v1/chat/completions", json=body).json()["choices"])

    first = text({"role": "system", "content": "be brief"}, {"role": "user", "content": "a\n\nb"})
    assert first == text(
        {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "b"},
    )


def test_too_much_is_refused_before_it_is_read(client: httpx.Client) -> None:
    large = b"x" * (8 * 2**20 + 1)
    for content in (large, iter([large[: 2**20]] * 9)):
        try:
            found = client.post("/v1/chat/completions", content=content)  # type: ignore[arg-type]
        except httpx.TransportError:
            continue  # The server closed the connection while more was being sent.
        assert found.status_code == 413 and "error" in found.json()
    assert ask(client, text="hello", max_tokens=2).status_code == 200


@pytest.mark.parametrize("path", ["/v1", "/v1/embeddings", "/v1/models/..%2fx", "/", "/docs"])
def test_nothing_else_is_there(client: httpx.Client, path: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, path, json={}).status_code == 404
    assert client.get("/v1/chat/completions").status_code == 404


# a model that takes its time


WAITS: dict[str, Any] = {"max_tokens": 5, "seed": 1, "speculative": False}
"""A request whose answer does not end before the third step, where it is held."""


@pytest.fixture
def held() -> Iterator[tuple[Served, Held]]:
    model = Held()
    model.allow(2)
    with served(model) as server:
        yield server, model
        model.allow()


def reached(model: Held) -> bool:
    """Whether it is held in the third step."""
    return soon(lambda: model.allowed[0] == 0)


FEW = 200
"""More forwards than a stopped answer makes."""


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_a_program_that_leaves_ends_its_answer(
    held: tuple[Served, Held], stream: bool, waits: bool
) -> None:
    """Under way or in the queue: nothing is computed for nobody."""
    server, model = held
    queue = server.session.engine.queue  # type: ignore[attr-defined]
    blocker = httpx.Client(base_url=server.address, timeout=60)
    first = threading.Thread(target=lambda: ask(blocker, text="first", **WAITS))
    if waits:
        first.start()
        assert reached(model)
    body = json.dumps({"messages": HELLO, **WAITS, "max_tokens": 3000, "stream": stream}).encode()
    with connected(server) as raw:
        raw.sendall(post_head(server, len(body)) + body)
        assert soon(lambda: len(queue.waiting) == 1) if waits else reached(model)
    if waits:
        assert soon(lambda: not queue.waiting)
        assert queue.running, "the other goes on"
    else:
        known = server.session.tasks.known
        assert soon(
            lambda: all(each.stop.is_set() for tasks in [*known.values()] for each in tasks)
        )
        model.allow(FEW)
        assert soon(lambda: not queue.running) and model.allowed[0] > 0
        # Both are counted a moment after the model is free.
        assert soon(lambda: server.session.programs.asking == {})
        aborted = 'finished_reason="abort"} 1'
        assert soon(lambda: aborted in httpx.get(f"{server.address}/metrics", timeout=60).text)
    model.allow()
    if waits:
        first.join(30)
    blocker.close()


def test_a_stream_that_never_begins_ends_its_answer_too(held: tuple[Served, Held]) -> None:
    """The program has left before the first byte was sent."""
    server, model = held

    async def send(message: Any) -> None:
        raise OSError("The program has left.")

    async def asked() -> None:
        body = {"messages": HELLO, **WAITS, "stream": True, "max_tokens": 3000}
        info = server.session.engine.state.info
        found = completion(Chat, body, info)
        place = ExitStack()
        place.enter_context(server.session.programs.place("api"))
        running = Running(server.api.service, "api", found, place)
        reply = OpenAIReply(found, info)
        first = asyncio.ensure_future(running.next())
        await asyncio.wait((first,))
        stream = routes.Stream(server.api.chunks(running, reply, first), running)
        with pytest.raises(ClientDisconnect):
            await stream({"type": "http", "asgi": {"spec_version": "2.4"}}, send, send)

    asyncio.run(asked())
    model.allow(FEW)
    assert soon(lambda: not server.session.programs.asking) and model.allowed[0] > 0


def post_head(server: Served, length: int) -> bytes:
    """The head of a request whose body is so long."""
    host = server.address.removeprefix("http://")
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def connected(server: Served) -> socket.socket:
    """A connection on which nothing was sent yet."""
    url = httpx.URL(server.address)
    raw = socket.create_connection((url.host, url.port))  # type: ignore[arg-type]
    raw.settimeout(30)
    return raw


def test_a_place_comes_before_the_body(server: Served) -> None:
    """Requests whose bodies never arrive take places, so that the next one is refused unread."""
    programs = server.session.programs
    with ExitStack() as open_ones:
        for _ in range(MOST_EACH):
            raw = open_ones.enter_context(connected(server))
            raw.sendall(post_head(server, 1000) + b"{")
        assert soon(lambda: programs.asking["api"] == MOST_EACH)
        with connected(server) as raw:
            raw.sendall(post_head(server, 8_000_000))  # and not a byte of the body
            assert raw.recv(64).startswith(b"HTTP/1.1 429 ")
    assert soon(lambda: not programs.asking)
    assert not server.session.tasks.known


def test_a_body_that_does_not_arrive_has_a_deadline(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "BODY_SECONDS", 0.05)
    with connected(server) as raw:
        raw.sendall(post_head(server, 1000) + b"{")
        found = b""
        while part := raw.recv(4096):  # until the server closes the connection
            found += part
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    error = json.loads(body)["error"]
    assert error["code"] == "request_timeout" and "1 bytes did" in error["message"]
    assert not server.session.programs.asking


def test_a_request_without_a_thread_gives_its_place_back(
    server: Served, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "program":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    found = ask(client, text="hello")
    assert found.status_code == 503 and "no further thread" in found.json()["error"]["message"]
    assert not server.session.programs.asking


def test_who_asks_too_often_must_retry_later_and_openai_s_client_does(
    held: tuple[Served, Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, model = held
    with server.client() as client, ThreadPoolExecutor(MOST_EACH + 1) as pool:
        futures = [pool.submit(ask, client, text="hi", **WAITS) for _ in range(MOST_EACH)]
        assert soon(lambda: server.session.programs.asking["api"] == MOST_EACH)
        for stream in (False, True):
            found = ask(client, text="one more", stream=stream)
            assert found.status_code == 429 and int(found.headers["retry-after"]) > 0
            error = found.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        monkeypatch.setattr("app.http.problems.AGAIN_SECONDS", 0.05)
        with openai.OpenAI(base_url=f"{server.address}/v1", api_key="x", max_retries=99) as program:
            later = pool.submit(
                program.chat.completions.create, model="toy", messages=HELLO, max_tokens=3
            )
            refused = re.compile(r'status="429"} ([3-9]|\d\d)')
            assert soon(lambda: bool(refused.search(client.get("/metrics").text)))
            model.allow()
            assert later.result().choices[0].message.content is not None
        assert {each.result().status_code for each in futures} == {200}


def test_many_programs_at_once_are_answered_in_order_and_right(server: Served) -> None:
    """Six programs, four questions each: every answer is the one that it would get alone."""
    keys = [server.session.programs.keys.make(f"load {n}") for n in range(6)]

    def one(number: int, question: int, stream: bool = False) -> str:
        with server.client(keys[number][1]) as client:
            found = ask(
                client, text=f"question {question} of {number}", seed=question, max_tokens=40,
                temperature=0.9, stream=stream,
            )  # fmt: skip
            assert found.status_code == 200
            if not stream:
                return str(found.json()["choices"][0]["message"]["content"])
            lines = [line[6:] for line in found.text.splitlines() if line.startswith("data: {")]
            parts = [json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines]
            return "".join(parts)

    expected = {(n, q): one(n, q) for n in range(6) for q in range(4)}
    with ThreadPoolExecutor(24) as pool:
        futures = {key: pool.submit(one, *key, stream=sum(key) % 2 == 0) for key in expected}
        assert {key: each.result() for key, each in futures.items()} == expected
    assert not server.session.programs.asking and not server.session.tasks.known
    for key, _ in keys:
        server.session.programs.revoke(key.id)


def test_a_stream_that_waits_begins_and_says_that_it_lives(
    held: tuple[Served, Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, model = held
    monkeypatch.setattr(routes, "PATIENCE", 0.05)
    monkeypatch.setattr(routes, "QUIET_SECONDS", 0.05)
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, client, text="hi", **WAITS)
        assert reached(model)
        body = {"messages": HELLO, "stream": True, "max_tokens": 2}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines) == ": waiting"
            model.allow()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert first.result().status_code == 200


class Breaking(ToyBackend):
    """Fails behind a few tokens."""

    def score(self, *arguments: Any) -> Any:
        if len(self.cache) > 10:
            raise RuntimeError("out of memory")
        return super().score(*arguments)


@pytest.mark.parametrize("stream", [True, False])
def test_what_breaks_half_way_is_reported(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    with served(Breaking()) as server, server.client() as client:
        found = ask(client, text="hi", max_tokens=400, temperature=0, stream=stream)
        if stream:
            assert found.status_code == 200
            last = json.loads(found.text.strip().split("data: ")[-1])
            assert last["error"]["type"] == "server_error" and "[DONE]" not in found.text
        else:
            assert found.status_code == 500 and found.json()["error"]["type"] == "server_error"
        assert "out of memory" not in found.text and "out of memory" in caplog.text
        assert ask(client, text="hi", max_tokens=2).status_code == 200


def test_without_a_model_programs_come_back_later() -> None:
    with served() as server, server.client() as client:
        server.session.engine.use(no_model())  # type: ignore[attr-defined]
        found = ask(client, text="hi")
        assert found.status_code == 503 and int(found.headers["retry-after"]) > 0
        assert found.json()["error"]["code"] == "model_not_loaded"
        assert client.get("/health").status_code == 503
        assert client.get("/v1/models").json() == {"object": "list", "data": []}
        assert "strata_model_loaded" in client.get("/metrics").text
