"""Server-sent events as a program sees them that reads them: nothing is lost, nothing comes twice,
little is sent, and nobody who may not look sees anything."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import httpx
import pytest

from app.service.answering import UPDATE_SECONDS, Answer, Generations, Update
from app.service.preferences import Preferences
from app.service.session import Session
from app.web import render, stream
from app.web.render import remarks
from app.web.stream import AnswerEvents, StreamEvent
from engine.local import Local
from engine.settings import Generation, Sampling
from engine.types import MODEL, TARGET, Finish, Message, Step, Token, Tool
from storage.conversations import Piece
from storage.database import Database
from tests.service.test_answering import recorder, store
from tests.service.test_session import OWNER, preferences, soon
from tests.support.blocks import serving
from tests.support.clocked import simulated
from tests.support.toy import ToyBackend

__all__ = ["recorder", "store"]
BYTES_PER_TOKEN = 60
Columns = list[tuple[str, str, int, int, int]]


def columns(pieces: Any) -> Columns:
    return [
        (p.text, p.source, p.match_length, p.step, max(1, round(100 * p.probability)))
        for p in pieces
    ]


class Page:
    """What a page makes of a stream: its tokens as columns, and all else that it was told."""

    def __init__(self) -> None:
        self.tokens: Columns = []
        self.sources: list[str] = []
        self.kinds: list[str] = []

    def hear(self, kind: str, data: Any, at: int) -> None:
        self.kinds.append(kind)
        if kind == "sources":
            self.sources = data["sources"]
        if kind:
            return
        assert at - sum(len(group[3]) for group in data) == len(self.tokens), "a gap, or twice"
        step = self.tokens[-1][3] if self.tokens else 0
        for number, match, steps, texts, percents in data:
            step += steps
            for text, percent in zip(texts, percents, strict=True):
                self.tokens.append((text, self.sources[number], match, step, percent))

    def read(self, body: bytes) -> int:
        """Take in the events of a body, as a browser does; the last id."""
        at = len(self.tokens)
        for event in body.decode().split("\n\n"):
            lines = [line.split(":", 1) for line in event.split("\n") if line]
            fields = {name: value.removeprefix(" ") for name, value in lines}
            at = int(fields.get("id", at))
            if "data" in fields:
                self.hear(fields.get("event", ""), json.loads(fields["data"]), at)
        return at


def grown(index: int, texts: str, finish: Finish | None = None) -> Step:
    tokens = tuple(
        Token(n, n, TARGET if n == len(texts) - 1 else MODEL, 3, text, 0.5)
        for n, text in enumerate(texts)
    )
    return Step(index, tokens, verify_seconds=0.01, finish=finish)


def test_each_moment_tells_what_is_new(recorder: Any) -> None:
    answer, page = Answer(OWNER, "c"), Page()
    answer_events = AnswerEvents(answer, 0)
    assert answer_events.pending(0.0) == []
    answer.ahead = 2
    (waiting,) = answer_events.pending(0.0)
    assert waiting.kind == "waiting" and "2 requests" in waiting.data
    for index in range(40):
        recorder.add(grown(index, "abc"))
        answer.ahead, answer.update = 0, recorder.update(0)
        for kind, data, at in answer_events.pending(index / 10):
            page.hear(kind, data, at)
        assert page.tokens == columns(recorder.pieces)
    assert page.kinds[:4] == ["waiting", "sources", "", "figures"]
    assert page.kinds.count("sources") == 1
    figures = [at for at, kind in enumerate(page.kinds) if kind == "figures"]
    apart = [after - before for before, after in pairwise(figures)]
    assert apart[0] == 2 and apart[-1] == 6 and apart == sorted(apart), (
        "with every token at first, then twice a second"
    )
    assert answer_events.pending(99.0)[0].kind == "figures" and answer_events.pending(99.1) == []
    answer.over = True
    assert [new_events.kind for new_events in answer_events.pending(99.2)] == ["figures", "end"]


def test_figures_keep_up_with_the_text(recorder: Any) -> None:
    """However fast the model is: what the figures say is of nearly all that the page shows."""
    answer = Answer(OWNER, "c")
    answer_events, covered = AnswerEvents(answer, 0), 0
    for moment in range(12):
        for index in range(30 * moment, 30 * (moment + 1)):
            recorder.add(grown(index, "abc"))
        answer.update = recorder.update(0)
        for new_events in answer_events.pending(0.12 * moment):
            if new_events.kind == "figures":
                covered = answer.update.tokens
        assert covered > 0.87 * answer_events.sent


@pytest.mark.parametrize("start", [0, 1, 2, 3, 119, 120, 121, 5000])
def test_a_page_that_returns_gets_the_rest(recorder: Any, start: int) -> None:
    for index in range(40):
        recorder.add(grown(index, "abc"))
    answer, page = Answer(OWNER, "c"), Page()
    answer.update, answer.over = recorder.update(0), True
    page.tokens = columns(recorder.pieces)[:start]
    for kind, data, at in AnswerEvents(answer, start).pending(0.0):
        page.hear(kind, data, at)
    assert page.tokens == columns(recorder.pieces) and page.kinds[-1] == "end"


@pytest.mark.parametrize(
    "text", ["a\nb", "\r\n\r\n", "data: x\n\n", "\u2028", "\x00", "\ud800", '"']
)
def test_no_text_ends_an_event(text: str) -> None:
    data = [[0, 0, 0, [text], [5]]]
    sent = stream.encoded([StreamEvent("", data, 1), StreamEvent("end", 1, 1)])
    page, expected = Page(), text.encode("utf-8", "replace").decode()
    page.sources = [TARGET]
    assert page.read(sent) == 1 and page.tokens == [(expected, TARGET, 0, 0, 5)]
    assert page.kinds == ["", "end"] and sent.count(b"\n\n") == 2


@pytest.mark.parametrize(
    ("headers", "query", "start"),
    [
        ({}, "", 0),
        ({}, "from=7", 7),
        ({"last-event-id": "9"}, "from=7", 9),
        ({"last-event-id": "x"}, "from=7", 7),
        ({"last-event-id": ""}, "from=-1", 0),
        ({"last-event-id": "²"}, "from=%C2%B2", 0),
        ({"last-event-id": "9" * 5000}, "from=" + "9" * 5000, 0),
    ],
)
def test_where_a_stream_begins(headers: dict[str, str], query: str, start: int) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "headers": raw, "query_string": query.encode()}
    assert stream.first_token(stream.Request(scope)) == start


def heard(
    answer: Answer, start: int = 0, most: int = 10_000
) -> list[tuple[float, list[StreamEvent]]]:
    """What a page is told, with the simulated moments, up to so many times."""
    return simulated(listened(answer, start, most))


async def listened(
    answer: Answer, start: int = 0, most: int = 10_000
) -> list[tuple[float, list[StreamEvent]]]:
    found, events = [], stream.events(answer, start)
    async for new_events in events:
        found.append((asyncio.get_running_loop().time(), new_events))
        if len(found) == most:
            break
    await events.aclose()
    return found


def test_the_first_tokens_come_as_soon_as_they_are_there(
    recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that began to listen before them does not wait for its next turn: only what follows
    them is held back."""
    monkeypatch.setattr(stream, "UPDATE_SECONDS", 3600.0)
    answer = Answer(OWNER, "c")

    async def listen() -> list[str]:
        events = stream.events(answer, 0)
        await anext(events)
        coming = asyncio.ensure_future(anext(events))
        while not answer.bell.listening:
            await asyncio.sleep(0)
        answer.ahead = 1
        answer.bell.ring()
        (waiting,) = await asyncio.wait_for(coming, 60)
        coming = asyncio.ensure_future(anext(events))
        recorder.add(grown(0, "ab"))
        answer.ahead, answer.update = 0, recorder.update(0)
        answer.bell.ring()
        new_events = await asyncio.wait_for(coming, 60)
        await events.aclose()
        return [waiting.kind, *(event.kind for event in new_events)]

    assert asyncio.run(listen()) == ["waiting", "waiting", "sources", "", "figures"]


def test_who_waits_is_woken_and_updated_twenty_times_a_second_at_most(recorder: Any) -> None:
    answer = Answer(OWNER, "c")

    async def grow() -> None:
        for index in range(150):
            recorder.add(grown(index, "ab", "eos" if index == 149 else None))
            answer.update = recorder.update(0)
            answer.bell.ring()
            await asyncio.sleep(0.002)
        answer.over = True
        answer.bell.ring()

    async def both() -> list[tuple[float, list[StreamEvent]]]:
        _, found = await asyncio.gather(grow(), listened(answer))
        return found

    moments = simulated(both())
    page = Page()
    for _, new_events in moments:
        for event in new_events:
            page.hear(*event)
    assert page.tokens == columns(recorder.pieces) and page.kinds[-1] == "end"
    assert answer.bell.listening == {}, "nobody listens any more"
    times = [
        moment for moment, new_events in moments if any(not event.kind for event in new_events)
    ]
    assert len(times) == 4, "at 0, 0.12 and 0.24 s, and at the end"
    assert all(after - before >= UPDATE_SECONDS for before, after in pairwise(times[:3]))


def test_the_first_event_comes_at_once_and_a_quiet_stream_says_that_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the first one the page knows that nothing on the way holds the stream back."""
    monkeypatch.setattr(stream, "QUIET_SECONDS", 0.01)
    lists = [new_events for _, new_events in heard(Answer(OWNER, "c"), most=3)]
    assert [event.kind for event in lists[0]] == ["sources"], "no token"
    assert lists[1:] == [[], []] and stream.encoded([]) == b":\n\n"


# over a real server


class Held:
    """Answers that are told what to do: each `release` lets one more update through."""

    def __init__(self, session: Session) -> None:
        self.session, self.gate = session, threading.Semaphore(0)

    def answer(self, owner: str, conversation: str, requested: Preferences) -> Iterator[Any]:
        for item in self.session.answering.answer(owner, conversation, requested):
            if isinstance(item, Update) and item.finish is None:
                self.gate.acquire(timeout=60)
            yield item


@pytest.fixture
def served(session: Session) -> Iterator[Callable[..., int]]:
    """Serves the session's streams; gives the port."""
    with ExitStack() as stack:

        def serve(generations: Generations, *more: str) -> int:
            page = stack.enter_context(serving(*more, routes=stream.routes(generations)))
            return int(page.blocks.server_port)

        yield serve


def requested(port: int, path: str, method: str = "GET", **more: Any) -> httpx.Response:
    return httpx.request(method, f"http://127.0.0.1:{port}{path}", timeout=60, **more)


def wire(port: int, path: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        found = b""
        while not found.endswith(b"\r\n0\r\n\r\n"):
            found += connection.recv(1 << 16)
    return found


def test_a_connection_that_is_cut_again_and_again_loses_nothing(
    session: Session, served: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.service.answering.UPDATE_SECONDS", 0.0)
    held = Held(session)
    generations = Generations(held.answer)
    port = served(generations)
    conversation = session.chat.say(OWNER, None, "hello there")
    answer = generations.start(OWNER, conversation, preferences())
    page, at = Page(), 0
    for number in count():
        address = f"http://127.0.0.1:{port}/stream/{answer.token}?from=0"
        held.gate.release(2)
        body, again = b"", {"Last-Event-ID": str(at)}
        with httpx.stream("GET", address, headers=again, timeout=60) as response:
            for part in response.iter_raw():
                body += part
                if b"\nid:" in body or body.startswith(b"id:"):
                    break
        at = page.read(body)
        if "end" in page.kinds or number > 100:
            break
    assert number > 3, "it was cut often enough"
    assert answer.update is not None and page.tokens == columns(answer.update.pieces)
    assert soon(lambda: not answer.bell.listening), "whose connection is cut listens no more"


def test_whose_answer_it_is_the_token_says(session: Session, served: Callable[..., int]) -> None:
    port = served(session.generations)
    conversation = session.chat.say(OWNER, None, "hello there")
    answer = session.generations.start(OWNER, conversation, preferences())
    assert soon(lambda: answer.over)
    assert requested(port, f"/stream/{answer.token}").status_code == 200
    wrong = (answer.token[:-1], answer.token + "x", answer.token.swapcase(), "x", conversation)
    assert {requested(port, f"/stream/{token}").status_code for token in wrong} == {404}
    own = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Dest": "empty"}
    assert requested(port, f"/stream/{answer.token}", headers=own).status_code == 200
    for foreign in (
        {"Origin": "http://evil.example"},
        {**own, "Sec-Fetch-Site": "cross-site"},
        {**own, "Sec-Fetch-Dest": "image"},
        {**own, "Sec-Fetch-Dest": "document"},
    ):
        assert requested(port, f"/stream/{answer.token}", headers=foreign).status_code == 403
    away = requested(port, f"/stream/{answer.token}", headers={"Host": "evil.example"})
    assert away.status_code == 421


def test_who_has_not_logged_in_watches_nothing(
    session: Session, served: Callable[..., int]
) -> None:
    port = served(session.generations, "--auth", "ann:secret")
    conversation = session.chat.say(OWNER, None, "hello there")
    answer = session.generations.start(OWNER, conversation, preferences())
    assert soon(lambda: answer.over)
    path = f"/stream/{answer.token}"
    assert requested(port, path).status_code == 401
    assert requested(port, path, headers={"Cookie": "access-token-x=y"}).status_code == 401
    own = {"Origin": f"http://127.0.0.1:{port}"}
    credentials = {"username": "ann", "password": "secret"}
    entered = requested(port, "/login", "POST", data=credentials, headers=own)
    assert entered.status_code == 200
    cookies = {"Cookie": "; ".join(f"{n}={v}" for n, v in entered.cookies.items())}
    assert requested(port, path, headers=cookies).status_code == 200
    assert requested(port, "/stream/nobody", headers=cookies).status_code == 404


@pytest.mark.soak
@pytest.mark.model
def test_an_answer_of_512_tokens_takes_few_bytes(
    db: Database, embedded: Any, served: Callable[..., int]
) -> None:
    """With headers and framing; how often figures come depends on the clock, see below."""
    session = Session(Local(backend=embedded), db)
    port = served(session.generations)
    generation = Generation(Sampling(temperature=0.8, seed=6), max_tokens=512)
    requested = Preferences(generation, fresh_seed=False)
    conversation = session.chat.say(OWNER, None, "Tell a very long story about the sea.")
    answer = session.generations.start(OWNER, conversation, requested)
    sent = wire(port, f"/stream/{answer.token}")
    assert answer.tokens == 512 and answer.update is not None
    figures = sum(map(len, re.findall(rb"event:figures\ndata:[^\n]*\n\n", sent)))
    assert 0 < figures < len(sent) and len(sent) - figures <= BYTES_PER_TOKEN * 512
    whole = bytes_sent_at(answer.update, tokens_per_second=150)
    print(f"{len(sent) / 512:.1f} bytes per token; {whole / 512:.1f} at 150 tokens per second")
    assert whole <= BYTES_PER_TOKEN * 512


def bytes_sent_at(update: Update, tokens_per_second: float) -> int:
    """The bytes that tell an answer, figures included, at a speed by a clock of our own."""
    answer, bytes_sent, at = Answer(OWNER, "c"), 0, 0
    answer_events, each = AnswerEvents(answer, 0), int(tokens_per_second * UPDATE_SECONDS)
    while not answer.over:
        at = min(update.tokens, at + each)
        answer.update, answer.over = replace(update, tokens=at), at == update.tokens
        new_events = answer_events.pending(at / tokens_per_second)
        bytes_sent += len(stream.encoded(new_events)) + len(b"fff\r\n\r\n")
    return bytes_sent


def test_pieces_are_sent_as_they_are_stored() -> None:
    """What a reload draws is what was drawn while the answer grew."""
    pieces = [Piece(str(n), MODEL if n % 3 else TARGET, n % 3, n // 3, n, 0.5) for n in range(30)]
    whole: dict[str, int] = {}
    page, later = Page(), Page()
    page.sources = later.sources = [TARGET, MODEL]
    page.hear("", render.groups(pieces, whole), 30)
    sources = dict(whole)
    for at, end in pairwise((0, 9, 21, 30)):
        step = pieces[at - 1].step if at else 0
        later.hear("", render.groups(pieces[at:end], sources, step), end)
    assert page.tokens == later.tokens == columns(pieces)


def test_waiting_is_shown_and_removed() -> None:
    answer = Answer(OWNER, "c")
    answer_events = AnswerEvents(answer, 0)
    for ahead, sent in ((1, 1), (1, 0), (3, 1), (0, 1), (0, 0)):
        answer.ahead = ahead
        new_events = answer_events.pending(0.0)
        assert len(new_events) == sent and all(event.kind == "waiting" for event in new_events)
        if sent:
            assert ("Waiting for the model" in new_events[0].data) == bool(ahead)


class ThinkingToy(ToyBackend):
    """A model whose chat template begins the thinking."""

    def render(
        self, messages: Sequence[Message], thinking: bool | None = None, tools: Sequence[Tool] = ()
    ) -> str:
        return super().render(messages, thinking) + "<think>\n"


@pytest.mark.parametrize(("backend", "thinks"), [(ThinkingToy, True), (ToyBackend, False)])
def test_a_page_learns_that_the_template_has_opened_the_thinking(
    db: Database, backend: type[ToyBackend], thinks: bool
) -> None:
    session = Session(Local(backend=backend()), db)
    conversation = session.chat.say(OWNER, None, "hello")
    answer = session.generations.start(OWNER, conversation, preferences(tokens=10))
    assert soon(lambda: answer.over) and not answer.error
    legends = [data for kind, data, _ in AnswerEvents(answer, 0).pending(0.0) if kind == "sources"]
    assert ["thought" in data for data in legends] == [thinks] * len(legends) and legends
    # A page that is loaded later hears of it with the stored answer.
    (remark,) = remarks(db, OWNER, conversation).values()
    assert remark.get("thinks", False) is thinks
