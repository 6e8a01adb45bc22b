"""A model that thinks, as programs meet it: its thinking stands beside its answer."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import log
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from app.api.answers import text_logprobs
from app.api.requests import warn
from app.service.preferences import Preferences
from app.service.session import Session
from app.web import render
from engine.local import Local
from engine.sampling import Floats
from engine.settings import Generation, Sampling
from engine.thinking import MARKS, Marks
from engine.types import Message, Token, Tool
from storage.database import Database
from tests.support import toy
from tests.support.inside import OWNER
from tests.support.inside import ask as answered
from tests.support.scripted import Scripted
from tests.support.served import Served, ask, served
from tests.support.toy import ASSISTANT, END, VOCABULARY, ToyBackend

HELLO: list[Any] = [{"role": "user", "content": "hello there"}]
SAYS = b"<think>\nfirst this\n</think>\n\nThen that."
OPENED = b"<think>\n"
BEFORE = 8
"""Tokens that tell which of the two marks was said last."""


def says(before: tuple[int, ...], text: bytes = SAYS) -> Floats:
    """What follows of the text that it always says, by the last tokens."""
    begun = before[before.index(ASSISTANT) + 1 :] if ASSISTANT in before else before
    ends = bytes(token for token in begun if token < 256)
    at = 0 if ASSISTANT in before and not begun else text.find(ends) + len(ends)
    logits = np.full(VOCABULARY, -30.0, np.float32)
    logits[text[at] if at < len(text) else END] = 30.0
    return logits


class Thinker(ToyBackend):
    """A toy that thinks, unless it is told not to; told to, it is begun for it."""

    def __init__(self) -> None:
        super().__init__(name="thinker", logits=says)
        self.info = replace(self.info, can_think=True)

    def render(
        self, messages: Sequence[Message], thinking: bool | None = None, tools: Sequence[Tool] = ()
    ) -> str:
        begun = {None: b"", True: OPENED, False: SAYS[: SAYS.index(b"Then")]}[thinking]
        return super().render(messages) + begun.decode()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "MEMORY", BEFORE)
        with served(Thinker()) as made:
            yield made


@pytest.mark.parametrize("speculative", [False, "hd", "lookup"])
@pytest.mark.parametrize("kwargs", [None, {}, {"enable_thinking": True}, {"thinking": True}])
def test_thinking_is_separated(client: httpx.Client, kwargs: Any, speculative: Any) -> None:
    found = ask(client, messages=HELLO, chat_template_kwargs=kwargs, speculative=speculative).json()
    (choice,) = found["choices"]
    assert choice["message"]["content"] == "Then that." and choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning_content"] == "first this"
    thought = SAYS[len(OPENED) if kwargs else len(b"<think>") : SAYS.index(b"\n\nThen")]
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(thought)


def test_without_thinking_there_is_none(client: httpx.Client) -> None:
    found = ask(client, messages=HELLO, chat_template_kwargs={"enable_thinking": False}).json()
    message = found["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Then that.", "refusal": None}
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_what_may_be_a_mark_is_said_once_nothing_follows(client: httpx.Client) -> None:
    cut = SAYS.index(b"nk>\n\nThen")
    found = ask(client, messages=HELLO, max_tokens=cut).json()
    assert found["choices"][0]["message"]["reasoning_content"] == "first this\n</thi"


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("chat/completions", {"messages": HELLO, "reasoning_effort": "high"}),
        ("responses", {"input": "hello", "reasoning": {"effort": "high"}}),
    ],
)
def test_the_template_is_told_how_much_to_think(
    path: str, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    warn.cache_clear()
    backend = Scripted(lambda prompt: "Yes.")
    with served(backend) as made, made.client() as client:
        for knows in (False, True):
            backend.info = replace(backend.info, has_efforts=knows)
            for _ in range(2):
                assert ask(client, path, **given).status_code == 200
                assert backend.prompts[-1].startswith("<|system|>Reasoning: high") is knows
    assert [record.getMessage() for record in caplog.records] == [
        "The effort of reasoning is ignored: the chat template of scripted knows none."
    ]


@pytest.mark.parametrize("can_think", [False, True])
def test_an_effort_does_not_make_a_model_think_within_a_format(can_think: bool) -> None:
    backend = Scripted(lambda prompt: "{}")
    backend.info = replace(backend.info, has_efforts=True, can_think=can_think)
    with served(backend) as made, made.client() as client:
        form = {"response_format": {"type": "json_object"}, "reasoning_effort": "low"}
        assert ask(client, messages=HELLO, **form).status_code == 200
    assert ("Reasoning: low" in backend.prompts[-1]) is not can_think


def test_the_text_comes_as_it_was_said_where_that_is_wanted(client: httpx.Client) -> None:
    found = ask(client, messages=HELLO, reasoning_format="none").json()
    assert found["choices"][0]["message"]["content"] == SAYS.decode()
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    text = ask(client, "completions", prompt="<|user|>a<|end|><|assistant|>", max_tokens=60).json()
    assert text["choices"][0]["text"] == SAYS.decode()


def test_a_stream_parts_them_as_they_come(server: Served) -> None:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="any", max_retries=0) as program:
        chunks = list(program.chat.completions.create(model="thinker", messages=HELLO, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    reasoning = [(delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas]
    assert "".join(reasoning) == "first this"
    assert "".join(delta.content or "" for delta in deltas) == "Then that."
    last = max(n for n, part in enumerate(reasoning) if part)
    assert all(not delta.content for delta in deltas[:last]), "the answer comes behind it"


@pytest.mark.parametrize("speculative", [False, "hd"])
@pytest.mark.parametrize("kwargs", [None, {"enable_thinking": True}])
def test_a_stop_string_ends_the_answer_and_not_the_thinking(
    client: httpx.Client, speculative: Any, kwargs: Any
) -> None:
    """lm-eval sends such strings with each question."""
    body = {"messages": HELLO, "speculative": speculative, "chat_template_kwargs": kwargs}
    for stop, content in ((["\n", "irs"], "Then that."), (["\n", " th"], "Then")):
        (choice,) = ask(client, **body, stop=stop).json()["choices"]
        assert choice["message"] == {
            "role": "assistant",
            "content": content,
            "refusal": None,
            "reasoning_content": "first this",
        }
        assert choice["finish_reason"] == "stop"
    whole = ask(client, **body, stop=["\n"], reasoning_format="none").json()["choices"][0]
    assert whole["message"]["content"] == ("first this" if kwargs else "<think>")


@pytest.mark.parametrize("marks", [MARKS[n] for n in (4, 5, 6, 7)], ids=lambda marks: marks.begin)
def test_thinking_is_separated_whatever_its_marks_are(
    db: Database, monkeypatch: pytest.MonkeyPatch, marks: Marks
) -> None:
    """By programs, pages and titles, also once the answer is stored."""
    monkeypatch.setattr(toy, "MEMORY", 5 * BEFORE)  # Marks may be long, and begin as they end.
    text = f"{marks.begin}\nfirst you think about <it> a while\n{marks.ends[0]}\nThen that 😀."
    backend = ToyBackend(name="t", logits=partial(says, text=text.encode()))
    backend.info = replace(backend.info, marks=(marks,))
    with served(backend) as server, server.client() as client:
        (choice,) = ask(client, messages=HELLO, max_tokens=200).json()["choices"]
    assert choice["message"]["content"] == "Then that 😀."
    assert choice["message"]["reasoning_content"] == "first you think about <it> a while"
    session = Session(Local(backend=backend), db)
    generation = Generation(Sampling(temperature=0), max_tokens=200)
    conversation, _ = answered(session, "hello", chosen=Preferences(generation))
    message = session.chat.conversations(OWNER).messages(conversation)[-1]
    data = render.about(message, (), notes=render.remarks(db, OWNER, conversation))
    begin, end, answer = data["thought"]
    assert text[begin:end].strip() == "first you think about <it> a while"
    assert text[answer:] == "Then that 😀." and message.content == text
    assert session.chat.suggest_title(OWNER, conversation) == "Then that 😀"


SPOKEN = "<think>\nHm 日.\n</think>\n\n👩‍🚀 日本語 — hi 😊, yes. END and more"
HEARD = "👩‍🚀 日本語 — hi 😊, yes. "


@pytest.fixture
def speaker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Its tokens are bytes, so most of them are a part of a character."""
    monkeypatch.setattr(toy, "MEMORY", 5 * BEFORE)
    with served(ToyBackend(name="t", logits=partial(says, text=SPOKEN.encode()))) as made:
        yield made


@pytest.mark.parametrize("speculative", [False, "hd"])
def test_probabilities_are_those_of_the_bytes_of_the_text(
    speaker: Served, speculative: Any
) -> None:
    body = {"messages": HELLO, "stop": ["END"], "max_tokens": 200, "logprobs": True}
    body |= {"top_logprobs": 3, "speculative": speculative}
    with speaker.client() as client:
        (choice,) = ask(client, **body).json()["choices"]
        lines = ask(client, **body, stream=True).text.split("\n\n")
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == HEARD
    assert bytes(chain(*(entry["bytes"] for entry in content))) == HEARD.encode()
    for entry in content:
        assert len({tuple(each["bytes"]) for each in entry["top_logprobs"]}) == 3
        (byte,) = entry["bytes"]
        assert entry["token"] == (chr(byte) if byte < 128 else f"\\x{byte:02x}")
    text, heard = "", b""
    for line in lines[:-2]:
        for part in json.loads(line.removeprefix("data: "))["choices"]:
            text += part["delta"].get("content", "")
            entries = (part["logprobs"] or {"content": []})["content"]
            heard += bytes(chain(*(entry["bytes"] for entry in entries)))
            assert heard.decode(errors="ignore") == text, "each token comes with its text"
    assert text == HEARD


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_those_in_the_text_that_is_sent(speaker: Served, stream: bool) -> None:
    prompt = "<|user|>a<|end|><|assistant|>"
    body = {"prompt": prompt, "stop": ["END"], "max_tokens": 200, "logprobs": 3, "stream": stream}
    with speaker.client() as client:
        found = ask(client, "completions", **body)
    lines = [line.removeprefix("data: ") for line in found.text.split("\n\n") if line.strip()]
    parts = [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]
    text = "".join(part["text"] for part in parts)
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    assert text == SPOKEN[: SPOKEN.index("END")]
    data = text.encode()
    offsets = list(chain(*(each["text_offset"] for each in logprobs)))
    assert offsets == [len(data[:at].decode(errors="ignore")) for at in range(len(data))]
    tokens = list(chain(*(each["tokens"] for each in logprobs)))
    assert tokens == [chr(b) if b < 128 else f"bytes:\\x{b:02x}" for b in data]
    assert {len(entry) for each in logprobs for entry in each["top_logprobs"]} == {3}


def test_tokens_with_the_same_text_are_all_returned() -> None:
    token = Token(1, 0, "target", likeliest=((1, 0.5), (2, 0.25), (3, 0.125)))
    names = {1: b"a", 2: b"a", 3: b"\xf0"}
    (logprobs,) = text_logprobs([token], [0], names)["top_logprobs"]
    shares = {"a": 0.5, "bytes:\\x61 (2)": 0.25, "bytes:\\xf0": 0.125}
    assert logprobs == pytest.approx({name: log(share) for name, share in shares.items()})
