"""A model that thinks, as programs meet it: its thinking stands beside its answer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from engine.backends import toy
from engine.backends.toy import ASSISTANT, END, VOCABULARY, ToyBackend
from engine.sampling import Floats
from engine.types import Message
from tests.support.served import Served, ask, served

HELLO: list[Any] = [{"role": "user", "content": "hello there"}]
SAYS = b"<think>\nfirst this\n</think>\n\nThen that."
OPENED = b"<think>\n"
BEFORE = 8
"""Tokens that tell which of the two marks was said last."""


def says(before: tuple[int, ...]) -> Floats:
    """What follows of what it always says, by the last tokens."""
    begun = before[before.index(ASSISTANT) + 1 :] if ASSISTANT in before else before
    ends = bytes(token for token in begun if token < 256)
    at = 0 if ASSISTANT in before and not begun else SAYS.find(ends) + len(ends)
    logits = np.full(VOCABULARY, -30.0, np.float32)
    logits[SAYS[at] if at < len(SAYS) else END] = 30.0
    return logits


class Thinker(ToyBackend):
    """A toy that thinks, unless it is told not to; told to, it is begun for it."""

    def __init__(self) -> None:
        super().__init__(name="thinker", logits=says)
        self.info = replace(self.info, can_think=True)

    def render(self, messages: Sequence[Message], thinking: bool | None = None) -> str:
        begun = {None: b"", True: OPENED, False: SAYS[: SAYS.index(b"Then")]}[thinking]
        return super().render(messages) + begun.decode()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "MEMORY", BEFORE)
        with served(Thinker()) as made:
            yield made


@pytest.fixture
def client(server: Served) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


@pytest.mark.parametrize("speculative", [False, "hd", "lookup"])
@pytest.mark.parametrize("kwargs", [None, {}, {"enable_thinking": True}, {"thinking": True}])
def test_thinking_is_told_apart(client: httpx.Client, kwargs: Any, speculative: Any) -> None:
    found = ask(client, messages=HELLO, chat_template_kwargs=kwargs, speculative=speculative).json()
    (choice,) = found["choices"]
    assert choice["message"]["content"] == "Then that." and choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning_content"] == "first this"
    thought = SAYS[len(OPENED) if kwargs else len(b"<think>") : SAYS.index(b"\n\nThen")]
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(thought)}


def test_without_thinking_there_is_none(client: httpx.Client) -> None:
    found = ask(client, messages=HELLO, chat_template_kwargs={"enable_thinking": False}).json()
    assert found["choices"][0]["message"]["content"] == "Then that."
    assert "reasoning_content" not in found["choices"][0]["message"]
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_what_may_be_a_mark_is_said_once_nothing_follows(client: httpx.Client) -> None:
    cut = SAYS.index(b"nk>\n\nThen")
    found = ask(client, messages=HELLO, max_tokens=cut).json()
    assert found["choices"][0]["message"]["reasoning_content"] == "first this\n</thi"


def test_the_text_comes_as_it_was_said_where_that_is_wanted(client: httpx.Client) -> None:
    found = ask(client, messages=HELLO, reasoning_format="none").json()
    assert found["choices"][0]["message"]["content"] == SAYS.decode()
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
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


def test_a_model_that_cannot_think_is_not_told_to() -> None:
    with served() as plain, plain.client() as client:
        refused = ask(client, messages=HELLO, chat_template_kwargs={"enable_thinking": True})
        assert refused.status_code == 400 and "toy" in refused.json()["error"]["message"]
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        assert ask(client, messages=HELLO, max_tokens=5, **off).status_code == 200
