"""What is asked of a server beside answers: which model it has, what drafts there, its counters.

An address is asked when its model is loaded or answers, and at no other time. Nothing follows a
redirect: a key goes to the server that was named, and to no other one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from engine.servers.address import Address
from engine.servers.problems import no_server, refused, unreachable

CONNECT_SECONDS, ASK_SECONDS = 10.0, 20.0
SILENCE_SECONDS = 600.0
"""Between two pieces of an answer: a long prompt, or a long queue, takes its time."""
DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
MOST_BYTES = 8 << 20
"""Of an answer that is not streamed."""
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*?)(?:_total)?(?:\{[^}]*\})?\s+(\S+)")
"""A line of Prometheus' text: a name, labels, a value."""


@dataclass(frozen=True, slots=True)
class Access:
    """A server with its key, which no text of this shows."""

    address: Address
    key: str = field(default="", repr=False)

    @property
    def options(self) -> dict[str, Any]:
        """How a client reaches it. Proxies are those of the environment, but for this machine."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return {
            "headers": headers,
            "timeout": httpx.Timeout(ASK_SECONDS, connect=CONNECT_SECONDS),
            "follow_redirects": False,
            "trust_env": not self.address.is_local,
        }


@dataclass(frozen=True, slots=True)
class Counters:
    """Tokens that a server drafted and accepted since it started, for all who asked it."""

    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Found:
    """What a server tells of itself: the model, its context (0: not told), who made the server, and
    what `GET /strata` says, None where nobody knows that. `counts` says that it has counters."""

    model: str
    context: int
    maker: str
    strata: Mapping[str, Any] | None
    counts: bool


def ask(client: httpx.Client, address: Address, path: str) -> httpx.Response:
    """One question. Raises ServerError where no answer comes."""
    try:
        return client.get(path)
    except httpx.HTTPError as error:
        raise unreachable(error, address) from error


def find(access: Access) -> Found:
    """Ask a server what it is. Raises ServerError."""
    address = access.address
    with httpx.Client(**access.options) as client:
        answer = ask(client, address, f"{address.base}/models")
        if answer.status_code != 200:
            raise refused(answer.status_code, answer.text, address, access.key)
        model = model_of(answer, address)
        strata = extra(client, f"{address.root}/strata")
        counts = counters(text_at(client, f"{address.root}/metrics")) is not None
    name, maker = str(model["id"]), str(model.get("owned_by", ""))
    length = model.get("max_model_len") or of_meta(model)
    context = length if isinstance(length, int) and not isinstance(length, bool) else 0
    return Found(name, max(0, context), maker, strata, counts)


def of_meta(model: Mapping[str, Any]) -> object:
    """The context as llama.cpp's server tells it."""
    meta = model.get("meta")
    return meta.get("n_ctx_train") if isinstance(meta, dict) else None


def model_of(answer: httpx.Response, address: Address) -> dict[str, Any]:
    """The wanted model of a server's list, or its first one. Raises ServerError."""
    try:
        listed = answer.json()["data"]
        models = [each for each in listed if isinstance(each["id"], str) and each["id"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise no_server(address, "it lists no models at /models") from error
    if not models:
        raise no_server(address, "it has no model")
    if not address.model:
        return dict(models[0])
    for each in models:
        if each["id"] == address.model:
            return dict(each)
    names = ", ".join(repr(each["id"]) for each in models[:5])
    raise no_server(address, f"it has no model {address.model!r}, but {names}")


def extra(client: httpx.Client, url: str) -> Mapping[str, Any] | None:
    """What a Strata server says of its drafting; None at any other."""
    try:
        answer = client.get(url)
        found = answer.json() if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("name") == "strata" else None


def text_at(client: httpx.Client, url: str) -> str:
    """A text that a server may have; "" where it has none."""
    try:
        answer = client.get(url)
    except httpx.HTTPError:
        return ""
    return answer.text if answer.status_code == 200 else ""


def counters(text: str) -> Counters | None:
    """What a server's metrics count of drafts, over all its engines; None where they do not."""
    sums: dict[str, float] = {}
    for line in text[:MOST_BYTES].splitlines():
        found = SAMPLE.match(line)
        if found and found[1] in (DRAFTED, ACCEPTED):
            try:
                sums[found[1]] = sums.get(found[1], 0.0) + float(found[2])
            except ValueError:
                continue
    if DRAFTED not in sums:
        return None
    return Counters(int(sums[DRAFTED]), int(sums.get(ACCEPTED, 0.0)))
