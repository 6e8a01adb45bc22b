"""One answer from a server: its chunks become the events of a run.

A thread of the engine waits for the answer; everything below happens in one event loop on it. One
task reads the response, another queries the counters from time to time, and the chunks become steps
between these queries. Stop therefore ends the connection at once, however long the server is
silent.

All servers support messages, temperature, top-p, seed, stop and a limit. Other parameters are sent
if they are set, and left out if the server refuses them; if that changes the answer, the user gets
a notice. A server may send one token at a time or several, with or without their ids, and with the
text of each or only of all together.

Times are those of arrival here. Unknown values are not reported: without sources a token's source
is UNKNOWN, and the speed of plain decoding is never given.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import httpx
from pydantic import BaseModel, Field

from engine.engine import Event, Notice, Request, ServerCounted, Started
from engine.errors import FormatError, ServerError
from engine.methods import PLAIN
from engine.servers.client import (
    COMPLETE,
    LLAMA,
    OFF,
    SILENCE_SECONDS,
    STRATA,
    VLLM,
    Counters,
    Lenient,
    broken,
    counters,
    no_server,
    refused,
    unreachable,
)
from engine.servers.served import ServedModel
from engine.settings import AnswerFormat
from engine.text import read_json
from engine.thinking import USUAL
from engine.types import TARGET, UNKNOWN, Finish, Learned, Prefill, Step, Token

SILENT = ("stream_options", "return_token_ids", "logprobs")
"""Parameters that do not change the answer."""
RENAMED = {"max_tokens": "max_completion_tokens"}
"""The newer names of parameters that some servers refuse."""
OPTIONAL = ("top_k", "min_p", "seed", "top_p", "temperature", *SILENT)
"""Parameters that are left out if a server refuses them."""
SAMPLERS = ("top_k", "min_p")
NAMES = {"top_k": "Top-k", "min_p": "Min-p", "top_p": "Top-p"}
DATA, DONE = "data:", "[DONE]"
BEGIN, END = f"{USUAL.begin}\n", f"\n{USUAL.ends[0]}\n\n"
"""The marks that are put around thinking if a server sends it separately from the answer."""


# the request


def body_of(
    request: Request, model: str, maker: str, sources: bool, without: Iterable[str]
) -> dict[str, Any]:
    """The JSON of a request. With `sources` the server reports the sources of tokens, so the text
    of each token is requested; `without` are the parameters that it refuses."""
    generation, sampling = request.generation, request.generation.sampling
    messages = [{"role": each.role, "content": each.content} for each in request.messages]
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": generation.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
    }
    # Some servers take settings that are left out from a file of the model.
    for name in SAMPLERS:
        if getattr(sampling, name) or maker in COMPLETE:
            body[name] = getattr(sampling, name)
    if generation.stop:
        body["stop"] = list(generation.stop)
    if isinstance(generation.thinking, bool):
        body["chat_template_kwargs"] = {"enable_thinking": generation.thinking}
    if generation.format is not None:
        body |= demanded(generation.format, maker)
    if request.prefix:
        messages.append({"role": "assistant", "content": request.prefix})
        if maker == VLLM:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
    if maker == VLLM:
        body["return_token_ids"] = True
    if sources:
        body["logprobs"] = True
    if request.method == PLAIN and (sources or maker == STRATA):
        body |= OFF.get(maker, {})
    for name in without:
        value = body.pop(name, None)
        if name in SAMPLERS and maker in COMPLETE:
            body[name] = 0
        if value is not None and name in RENAMED:
            body[RENAMED[name]] = value
    return body


def demanded(form: AnswerFormat, maker: str) -> dict[str, Any]:
    """The format of an answer as a parameter. Raises SettingError if the server has none for it."""
    if form.kind == "json_schema":
        schema = {"name": "answer", "schema": json.loads(form.text)}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if maker in (VLLM, STRATA) and form.kind != "lark":
        name = {"gbnf": "grammar"}.get(form.kind, form.kind)
        value = json.loads(form.text) if form.kind == "choice" else form.text
        return {"structured_outputs": {name: value}}
    if maker == LLAMA and form.kind == "gbnf":
        return {"grammar": form.text}
    raise FormatError(
        f"The server of this model takes no {form.title} for an answer. Give a JSON schema, or "
        "load the model here."
    )


def refused_name(error: str, body: dict[str, Any]) -> str:
    """The parameter that a server's refusal is about; "" if it is about something else."""
    names = [name for name in (*OPTIONAL, *RENAMED) if name in body and name in error]
    return max(names, key=len, default="")


def left_out(name: str, host: str) -> str:
    if name in SILENT or name in RENAMED:
        return ""
    return (
        f"{host} does not take {NAMES.get(name, name.capitalize())}, so it was left out of the "
        "request."
    )


# the streamed answer


class Refusal(Exception):
    """A server refuses a request, before or within its stream, with this status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


Ids = list[Annotated[int, Field(ge=0)]]


class Logprob(BaseModel):
    token: str = ""
    logprob: float


class Logprobs(Lenient):
    content: list[Logprob] = []


class Delta(Lenient):
    content: str = ""
    reasoning_content: str = ""
    reasoning: str = ""


class Choice(Lenient):
    delta: Delta = Delta()
    logprobs: Logprobs = Logprobs()
    token_ids: Ids = []
    prompt_token_ids: Ids = []
    finish_reason: str = ""
    stop_reason: str | None = None

    @property
    def finish(self) -> Finish | None:
        """Why the answer ended. Only vLLM distinguishes a stop string from the end token."""
        if self.finish_reason == "stop" and self.stop_reason is not None:
            return "stop"
        return "length" if self.finish_reason == "length" else "eos" if self.finish_reason else None


class Usage(Lenient):
    prompt_tokens: Annotated[int, Field(ge=0)] | None = None


class Received(Lenient):
    choices: list[Choice] = []
    prompt_token_ids: Ids = []
    usage: Usage = Usage()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of an answer: its text, the ids of its tokens, each token's own text and the logarithm
    of its probability, as far as they are reported. `prompt` are the ids of the prompt's tokens,
    and `read` is their number."""

    text: str = ""
    reasoning: str = ""
    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    prompt: tuple[int, ...] = ()
    finish: Finish | None = None
    read: int | None = None
    done: bool = False


def chunk_of(line: str) -> Chunk | None:
    """The chunk in a line of the stream, None if there is none. Raises ValueError for a malformed
    one, and Refusal for an error."""
    if not line.startswith(DATA):
        return None
    data = line[len(DATA) :].strip()
    if data == DONE:
        return Chunk(done=True)
    try:
        found = read_json(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    problem = found.get("error")
    if problem is not None or found.get("object") == "error":
        code = problem.get("code") if isinstance(problem, dict) else None
        raise Refusal(code if isinstance(code, int) and 400 <= code < 600 else 500, data)
    received = Received.model_validate(found)
    choice = received.choices[0] if received.choices else Choice()
    return Chunk(
        choice.delta.content,
        choice.delta.reasoning_content or choice.delta.reasoning,
        tuple(choice.token_ids),
        tuple(each.token for each in choice.logprobs.content),
        tuple(each.logprob for each in choice.logprobs.content),
        tuple(received.prompt_token_ids or choice.prompt_token_ids),
        choice.finish,
        received.usage.prompt_tokens,
    )


class Thinking:
    """Puts separately sent thinking back into the text, in the form in which models write it."""

    def __init__(self) -> None:
        self.begun = False

    def joined(self, chunk: Chunk) -> str:
        text = ""
        if chunk.reasoning:
            text = chunk.reasoning if self.begun else BEGIN + chunk.reasoning
            self.begun = True
        if chunk.text and self.begun:
            text += END
            self.begun = False
        return text + chunk.text


def shared(chunk: Chunk, text: str, count: int) -> Sequence[str]:
    """The text of a chunk, divided among its `count` tokens: each token's own text if together they
    are the whole text; otherwise the last token gets all of it."""
    if len(chunk.texts) == count and "".join(chunk.texts) == text:
        return chunk.texts
    return [*[""] * (count - 1), text]


STOP_SECONDS = 0.05
"""Seconds between checks whether to stop, while nothing arrives."""
SOURCES_SECONDS, COUNT_SECONDS = 0.2, 0.5
"""Seconds between queries for the sources of tokens, and for the counters of a server."""
SIDE_SECONDS = 5.0
"""The most seconds that these queries may take."""
REFUSED = (400, 422)


class Arrival(NamedTuple):
    """A token, with the time at which its chunk arrived."""

    id: int
    text: str
    probability: float
    moment: float
    start: int


class Sources(BaseModel):
    """The sources of an answer's tokens, and how many tokens each forward emitted."""

    sources: list[object]
    steps: list[object]
    drafted: int = 0


def sizes(forwards: Sequence[int], start: int, total: int) -> list[int]:
    """How many tokens each forward emitted, of those from number `start` on; [] if the server does
    not report it for all of them."""
    found, at = [], 0
    for count in forwards:
        begin, at = max(at, start), at + count
        if at > begin:
            found.append(at - begin)
    return found if at == total else []


class Answer:
    """See the module's docstring. `put` receives the events; the answer ends once `stopped()`."""

    def __init__(
        self,
        model: ServedModel,
        request: Request,
        put: Callable[[Event], None],
        stopped: Callable[[], bool],
    ) -> None:
        self.model, self.request, self.put, self.stopped = model, request, put, stopped
        self.thinking = Thinking()
        self.ids: list[int] = []
        """All tokens of the answer. While `known`, they are the server's own ids."""
        self.known, self.length = True, 0
        self.waiting: list[Arrival] = []
        """The latest tokens, which are not reported yet."""
        self.steps = 0
        self.prompt: tuple[int, ...] = ()
        self.finish: Finish | None = None
        self.read = self.drafted = 0
        self.begun = 0.0
        self.last: float | None = None
        self.before: Counters | None = None
        self.now: Counters | None = None

    async def run(self) -> None:
        """Run the whole answer. Raises ServerError, after what had arrived was reported."""
        async with httpx.AsyncClient(**self.model.access.options) as client:
            self.client = client
            self.before = await self.counters()
            self.put(Started(self.model.info, (), 0, ()))
            counting = asyncio.create_task(self.count()) if self.before else None
            try:
                await self.report_all(asyncio.create_task(self.stream()))
            finally:
                if counting is not None:
                    counting.cancel()

    # reading

    async def stream(self) -> None:
        """Send the request and read the response. Raises ServerError."""
        model, server = self.model, self.model.server
        address, access = model.address, model.access
        silence = httpx.Timeout(SILENCE_SECONDS, connect=access.options["timeout"].connect)
        url = f"{address.base}/chat/completions"
        while True:
            body = body_of(
                self.request, model.info.name, server.maker, server.sources, sorted(model.without)
            )
            self.begun = perf_counter()
            try:
                async with self.client.stream("POST", url, json=body, timeout=silence) as response:
                    if response.status_code == 200:
                        await self.receive(response)
                        return
                    text = (await response.aread()).decode("utf-8", "replace")
                    raise Refusal(response.status_code, text)
            except httpx.HTTPError as error:
                raise unreachable(error, address) from error
            except Refusal as refusal:
                name = refused_name(refusal.text, body) if refusal.status in REFUSED else ""
                if not name or name in model.without or self.ids:
                    raise refused(refusal.status, refusal.text, address, access.key) from None
            model.without.add(name)
            if words := left_out(name, address.host):
                self.put(Notice(words))

    async def receive(self, response: httpx.Response) -> None:
        """Read the chunks of the answer. Raises Refusal, and ServerError if the end is missing."""
        address = self.model.address
        async for line in response.aiter_lines():
            try:
                chunk = chunk_of(line)
            except ValueError as error:
                raise no_server(address, f"it streams something else ({error})") from error
            if chunk is not None:
                self.take(chunk)
                if chunk.done:
                    return
        if self.finish is None:
            raise broken(address)

    def take(self, chunk: Chunk) -> None:
        moment = perf_counter()
        self.prompt = self.prompt or chunk.prompt
        self.read = len(self.prompt) or chunk.read or self.read
        self.finish = chunk.finish or self.finish
        text, ids = self.thinking.joined(chunk), chunk.ids
        if not ids and text:
            ids, self.known = (self.model.number(text),), False
        if not ids:
            return
        chances = [math.exp(min(0.0, each)) for each in chunk.logprobs]
        chances = chances if len(chances) == len(ids) else [0.0] * len(ids)
        for id, part, chance in zip(ids, shared(chunk, text, len(ids)), chances, strict=True):
            self.model.learn(id, part)
            self.waiting.append(Arrival(id, part, chance, moment, self.length))
            self.length += len(part)
        self.ids += ids

    # reporting

    async def report_all(self, reading: "asyncio.Task[None]") -> None:
        """Report what arrives, until the answer is complete or stopped. Raises ServerError."""
        due = 0.0
        while not reading.done():
            await asyncio.wait({reading}, timeout=STOP_SECONDS)
            if self.stopped():
                reading.cancel()
                with suppress(asyncio.CancelledError, ServerError):
                    await reading
                self.finish = "cancelled"
                break
            if self.waiting and perf_counter() >= due:
                await self.report()
                due = perf_counter() + (SOURCES_SECONDS if self.queries_sources else 0.0)
        await self.report()
        if self.finish != "cancelled":
            reading.result()
            await self.report_counters()
        self.report_prefill(perf_counter())
        self.put(Step(self.steps, (), finish=self.finish or "eos"))
        if self.finish != "cancelled":
            self.put(Learned())

    async def report(self) -> None:
        if not self.waiting:
            return
        total = len(self.ids)
        at = total - len(self.waiting)
        sources, forwards = await self.sources(total)
        # Tokens that arrived meanwhile are reported the next time.
        waiting, self.waiting = self.waiting[: total - at], self.waiting[total - at :]
        self.report_prefill(waiting[0].moment)
        chunks = [len([*group]) for _, group in groupby(waiting, lambda each: each.moment)]
        for size in sizes(forwards, at, total) or chunks:
            self.report_step(waiting[:size], sources[at : at + size], at)
            waiting, at = waiting[size:], at + size

    def report_prefill(self, moment: float) -> None:
        """Report once that the prompt was read: this measures the time to the first token."""
        if self.last is None:
            self.last = moment
            self.put(Prefill(self.read, 0, moment - self.begun))

    def report_step(self, group: Sequence[Arrival], sources: Sequence[str], at: int) -> None:
        """Report the tokens of one forward, as far as this is known; the first is number `at`."""
        tokens = tuple(
            Token(each.id, place, source, 0, each.text, each.probability, start=each.start)
            for place, (each, source) in enumerate(zip(group, sources, strict=True), at)
        )
        accepted = Counter(each for each in sources if each not in (TARGET, UNKNOWN))
        moment = group[-1].moment
        seconds, self.last = max(0.0, moment - (self.last or moment)), moment
        self.put(Step(self.steps, tokens, accepted=dict(accepted), other_seconds=seconds))
        self.steps += 1

    # other queries, while the answer arrives

    @property
    def plain(self) -> bool:
        return self.request.method == PLAIN and self.model.server.switches

    @property
    def queries_sources(self) -> bool:
        return self.model.server.sources and self.known and bool(self.prompt) and not self.plain

    async def sources(self, total: int) -> tuple[list[str], list[int]]:
        """The sources of the first `total` tokens, and how many tokens each forward emitted;
        UNKNOWN and nothing if the server does not report them."""
        unknown: tuple[list[str], list[int]] = [UNKNOWN] * total, []
        if self.plain:
            return [TARGET] * total, []
        if not self.queries_sources:
            return unknown
        body = {"prompt_token_ids": list(self.prompt), "token_ids": self.ids[:total]}
        url = f"{self.model.address.root}/strata/sources"
        try:
            answer = await self.client.post(url, json=body, timeout=SIDE_SECONDS)
            found = Sources.model_validate_json(answer.content)
        except (httpx.HTTPError, ValueError):
            return unknown
        if answer.status_code != 200 or len(found.sources) != total:
            return unknown
        self.drafted = found.drafted
        known = {TARGET, *self.model.server.databases}
        sources = [s if isinstance(s, str) and s in known else UNKNOWN for s in found.sources]
        return sources, [each for each in found.steps if isinstance(each, int) and each > 0]

    async def counters(self) -> Counters | None:
        if not self.model.server.counts:
            return None
        try:
            url = f"{self.model.address.root}/metrics"
            answer = await self.client.get(url, timeout=SIDE_SECONDS)
        except httpx.HTTPError:
            return None
        return counters(answer.text) if answer.status_code == 200 else None

    async def count(self) -> None:
        while True:
            await asyncio.sleep(COUNT_SECONDS)
            await self.report_counters()

    async def report_counters(self) -> None:
        before, now = self.before, await self.counters()
        if before is not None and now is not None and now != self.now:
            self.now = now
            grown = now.drafted - before.drafted, now.accepted - before.accepted
            if min(grown) >= 0:  # The server may have been restarted.
                self.put(ServerCounted(*grown, self.drafted if self.queries_sources else None))


def answer(
    model: ServedModel,
    request: Request,
    put: Callable[[Event], None],
    stopped: Callable[[], bool],
) -> None:
    """Let a server answer a request. Raises ServerError for what it cannot do."""
    if not request.messages:
        model.refuse()
    if request.prefix and not model.server.continues:
        raise ServerError(
            f"{model.address.host} cannot continue an answer that has begun. Answer the message "
            "again instead."
        )
    asyncio.run(Answer(model, request, put, stopped).run())
