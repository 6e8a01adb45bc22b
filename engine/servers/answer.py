"""One answer from a server: the events of a run, from the pieces that it sends.

A thread of the engine's waits for the answer; everything below happens in one event loop on it. One
task reads what comes, another asks for the counters now and then, and the pieces become steps
between them. So Stop ends the connection at once, however long the server says nothing.

Times are those of arrival here. Nothing is told that is not known: without sources a token's is
UNKNOWN, and how fast plain decoding would have been is never told.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

import httpx

from engine.engine import Event, Notice, Request, ServerCounted, Started
from engine.errors import ServerError
from engine.methods import PLAIN
from engine.servers.asked import body_of, left_out, refused_name
from engine.servers.chunks import Chunk, Thinking, chunk_of, code_of, shared
from engine.servers.client import SILENCE_SECONDS, Counters, counters
from engine.servers.problems import broken, no_server, refused, unreachable
from engine.servers.served import ServedModel
from engine.types import TARGET, UNKNOWN, Finish, Learned, Prefill, Step, Token

LOOK_SECONDS = 0.05
"""How often a stop is looked for, while nothing comes."""
SOURCES_SECONDS, COUNT_SECONDS = 0.2, 0.5
"""How often a server is asked where the tokens came from, and for its counters."""
SIDE_SECONDS = 5.0
"""How long those questions may take: an answer does not wait for what stands beside it."""
REFUSED = (400, 422)


class Refusal(Exception):
    """A server says no, before or within its stream: `said` is its answer."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status, self.said = status, said


class Pieces:
    """Tokens that have come and are not told yet, with the moments at which they came."""

    def __init__(self, model: ServedModel) -> None:
        self.model, self.thinking = model, Thinking()
        self.waiting: list[tuple[int, str, float, float]] = []
        """Number, text, probability, moment."""
        self.chunks: list[int] = []
        """How many tokens each chunk had that is not told yet."""
        self.ids: list[int] = []
        """All tokens of the answer; they stay numbers of the server's while `known`."""
        self.known = True

    def add(self, chunk: Chunk, moment: float) -> None:
        """Take in what came."""
        text = self.thinking.joined(chunk)
        ids = chunk.ids
        if not ids:
            if not text:
                return
            ids, self.known = (self.model.number(text),), False
        texts = shared(chunk, text, len(ids))
        chances = [math.exp(min(0.0, each)) for each in chunk.logprobs]
        chances = chances if len(chances) == len(ids) else [0.0] * len(ids)
        for number, words, chance in zip(ids, texts, chances, strict=True):
            self.model.learn(number, words)
            self.waiting.append((number, words, chance, moment))
        self.ids += ids
        self.chunks.append(len(ids))

    @property
    def told(self) -> int:
        """How many tokens were told before those that wait."""
        return len(self.ids) - len(self.waiting)


def sizes(forwards: Sequence[int], told: int, total: int) -> list[int]:
    """How many of the tokens behind the first `told` ones each forward emitted, as far as the
    server tells; [] where it does not tell it of all of them."""
    found, at = [], 0
    for count in forwards:
        begin, at = max(at, told), at + count
        if at > begin:
            found.append(at - begin)
    return found if at == total else []


class Answer:
    """See the module's docstring. `put` takes the events, `stopped` says when to end."""

    def __init__(
        self,
        model: ServedModel,
        request: Request,
        put: Callable[[Event], None],
        stopped: Callable[[], bool],
    ) -> None:
        self.model, self.request, self.put, self.stopped = model, request, put, stopped
        self.pieces, self.steps = Pieces(model), 0
        self.prompt: tuple[int, ...] = ()
        self.finish: Finish | None = None
        self.done = False
        self.read = self.drafted = 0
        self.first: float | None = None
        self.before: Counters | None = None
        self.now: Counters | None = None
        self.begun = self.last = 0.0

    def run(self) -> None:
        """The whole answer. Raises ServerError; what came until then was told."""
        asyncio.run(self.answered())

    async def answered(self) -> None:
        """The answer within its event loop."""
        info, options = self.model.info, self.model.access.options
        async with httpx.AsyncClient(**options) as client:
            self.client = client
            self.before = await self.counted()
            self.put(Started(info, (), 0, ()))
            counting = asyncio.create_task(self.count()) if self.before else None
            try:
                await self.told(asyncio.create_task(self.stream()))
            finally:
                if counting is not None:
                    counting.cancel()

    # reading

    async def stream(self) -> None:
        """Ask, and read what is sent. Raises ServerError."""
        address, access = self.model.address, self.model.access
        while True:
            body = self.body()
            self.begun = perf_counter()
            try:
                async with self.client.stream(
                    "POST",
                    f"{address.base}/chat/completions",
                    json=body,
                    timeout=httpx.Timeout(
                        SILENCE_SECONDS, connect=access.options["timeout"].connect
                    ),
                ) as response:
                    if response.status_code == 200:
                        await self.receive(response)
                        return
                    said = (await response.aread()).decode("utf-8", "replace")
                    raise Refusal(response.status_code, said)
            except httpx.HTTPError as error:
                raise unreachable(error, address) from error
            except Refusal as refusal:
                name = refused_name(refusal.said, body) if refusal.status in REFUSED else ""
                if not name or name in self.model.without or self.pieces.ids:
                    raise refused(refusal.status, refusal.said, address, access.key) from None
            self.model.without.add(name)
            if words := left_out(name, address.host):
                self.put(Notice(words))

    def body(self) -> dict[str, Any]:
        """What is sent."""
        server = self.model.server
        name, without = self.model.info.name, sorted(self.model.without)
        return body_of(self.request, name, server.maker, server.sources, without)

    async def receive(self, response: httpx.Response) -> None:
        """Take in the parts of the answer. Raises ServerError without an end, and Refusal."""
        address = self.model.address
        async for line in response.aiter_lines():
            try:
                chunk = chunk_of(line)
            except ValueError as error:
                raise no_server(address, f"it streams something else ({error})") from error
            if chunk is None:
                continue
            if chunk.problem:
                raise Refusal(code_of(chunk.problem), chunk.problem)
            self.take(chunk)
            if chunk.done:
                return
        if self.finish is None:
            raise broken(address)

    def take(self, chunk: Chunk) -> None:
        """Take in a part of the answer."""
        self.prompt = self.prompt or chunk.prompt
        self.read = len(self.prompt) or chunk.read or self.read
        self.finish = chunk.finish or self.finish
        self.pieces.add(chunk, perf_counter())

    # telling

    async def told(self, reading: "asyncio.Task[None]") -> None:
        """Tell what comes until it is over, or stopped. Raises ServerError."""
        due = 0.0
        while not reading.done():
            await asyncio.wait({reading}, timeout=LOOK_SECONDS)
            if self.stopped():
                reading.cancel()
                with suppress(asyncio.CancelledError, ServerError):
                    await reading
                self.finish = "cancelled"
                break
            if self.pieces.waiting and perf_counter() >= due:
                await self.tell()
                due = perf_counter() + (SOURCES_SECONDS if self.asks_sources else 0.0)
        await self.tell()
        if self.finish != "cancelled":
            reading.result()
            await self.tell_counters()
        self.end()

    def end(self) -> None:
        """Say how it ended."""
        self.tell_prefill()
        self.put(Step(self.steps, (), finish=self.finish or "eos"))
        if self.finish != "cancelled":
            self.put(Learned())

    async def tell(self) -> None:
        """Tell the tokens that wait, in steps."""
        pieces = self.pieces
        waiting, chunks, told = pieces.waiting, pieces.chunks, pieces.told
        if not waiting:
            return
        total = len(pieces.ids)
        sources, forwards = await self.sources(total)
        # More may have come meanwhile; it is told the next time.
        waiting, pieces.waiting = waiting[: total - told], pieces.waiting[total - told :]
        pieces.chunks = [len(pieces.waiting)] if pieces.waiting else []
        self.tell_prefill(waiting[0][3])
        at = 0
        for size in sizes(forwards, told, total) or split(chunks, len(waiting)):
            self.tell_step(
                waiting[at : at + size], sources[told + at : told + at + size], told + at
            )
            at += size

    def tell_prefill(self, moment: float | None = None) -> None:
        """Tell that the prompt was read, once: the time to the first token is measured here."""
        if self.first is None:
            self.first = self.last = perf_counter() if moment is None else moment
            self.put(Prefill(self.read, 0, self.first - self.begun))

    def tell_step(
        self, group: Sequence[tuple[int, str, float, float]], sources: Sequence[str], at: int
    ) -> None:
        """Tell tokens that one forward emitted, as far as is known; the first is number `at`."""
        tokens = tuple(
            Token(number, at + n, source, 0, text, chance)
            for n, ((number, text, chance, _), source) in enumerate(
                zip(group, sources, strict=True)
            )
        )
        moment = group[-1][3]
        accepted: dict[str, int] = {}
        for source in sources:
            if source not in (TARGET, UNKNOWN):
                accepted[source] = accepted.get(source, 0) + 1
        seconds, self.last = max(0.0, moment - self.last), moment
        self.put(Step(self.steps, tokens, accepted=accepted, other_seconds=seconds))
        self.steps += 1

    # what stands beside the answer

    @property
    def plain(self) -> bool:
        """Whether the server answers without drafts, as it was asked to."""
        return self.request.method == PLAIN and self.model.server.switches

    @property
    def asks_sources(self) -> bool:
        """Whether the server can tell where the tokens came from."""
        known = self.model.server.sources and self.pieces.known and bool(self.prompt)
        return known and not self.plain

    async def sources(self, total: int) -> tuple[list[str], list[int]]:
        """Where the first `total` tokens came from, and how many each forward emitted; UNKNOWN and
        nothing where the server does not tell."""
        unknown: tuple[list[str], list[int]] = [UNKNOWN] * total, []
        if self.plain:
            return [TARGET] * total, []
        if not self.asks_sources:
            return unknown
        ids = self.pieces.ids[:total]
        asked = {"prompt_token_ids": list(self.prompt), "token_ids": ids}
        url = f"{self.model.address.root}/strata/sources"
        try:
            answer = await self.client.post(url, json=asked, timeout=SIDE_SECONDS)
            said = answer.json() if answer.status_code == 200 else {}
            found, forwards = said["sources"], said["steps"]
            drafted = int(said.get("drafted", 0))
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
            return unknown
        if not isinstance(found, list) or len(found) != total or not isinstance(forwards, list):
            return unknown
        self.drafted = drafted
        known = [each if each in self.names else UNKNOWN for each in found]
        return known, [each for each in forwards if isinstance(each, int) and each > 0]

    @property
    def names(self) -> tuple[str, ...]:
        """The sources that a server may name."""
        return (TARGET, *self.model.server.databases)

    async def counted(self) -> Counters | None:
        """The server's counters; None where it has none, or does not tell now."""
        if not self.model.server.counts:
            return None
        try:
            url = f"{self.model.address.root}/metrics"
            answer = await self.client.get(url, timeout=SIDE_SECONDS)
        except httpx.HTTPError:
            return None
        return counters(answer.text) if answer.status_code == 200 else None

    async def count(self) -> None:
        """Tell the counters now and then."""
        while True:
            await asyncio.sleep(COUNT_SECONDS)
            await self.tell_counters()

    async def tell_counters(self) -> None:
        """Tell by how much the counters grew since the answer began."""
        before, now = self.before, await self.counted()
        if before is not None and now is not None and now != self.now:
            self.now = now
            grown = now.drafted - before.drafted, now.accepted - before.accepted
            if min(grown) >= 0:  # It may have been restarted.
                self.put(ServerCounted(*grown, self.drafted if self.asks_sources else None))


def split(chunks: Sequence[int], count: int) -> list[int]:
    """The sizes of the chunks that hold the first `count` tokens."""
    found: list[int] = []
    for size in chunks:
        take = min(size, count - sum(found))
        if take:
            found.append(take)
    left = count - sum(found)
    return [*found, left] if left else found


def answer(
    model: ServedModel,
    request: Request,
    put: Callable[[Event], None],
    stopped: Callable[[], bool],
) -> None:
    """Have a server answer. Raises ServerError for what it cannot be asked."""
    if not request.messages:
        model.refuse()
    if request.begun and not model.server.goes_on:
        raise ServerError(
            f"{model.address.host} cannot go on with an answer that has begun. Answer the message "
            "again instead."
        )
    Answer(model, request, put, stopped).run()
