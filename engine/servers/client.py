"""A server and its address: its model, its program, its counters, and its errors.

An address is `http://host:8000/v1`, or `http://host:8000/v1#model`. It contains no password,
because it is shown and stored.

An address is contacted when its model is loaded or answers, and at no other time. Redirects are not
followed, so a key is sent only to the server that was named. Errors say what happened, with which
value, and what to do; if a server repeats the key in its answer, it is removed.
"""

import ipaddress
import json
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from socket import gaierror
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from engine.errors import ModelError, ServerError

KIND = "server"
"""The value of `BackendInfo.kind` for the models of servers."""
SCHEMES = ("http://", "https://")
VERSION = "/v1"
LIKE = "Give one such as http://localhost:8000/v1, or http://localhost:8000/v1#model."


def is_address(source: str) -> bool:
    """Whether a source names a server rather than files."""
    return source.strip().lower().startswith(SCHEMES)


@dataclass(frozen=True, slots=True)
class Address:
    """A server and one of its models: `base` is the URL of its API, without a slash at the end;
    `model` is "" for its first model."""

    base: str
    model: str = ""

    @property
    def root(self) -> str:
        """The URL to which paths outside of the API are relative."""
        return self.base.removesuffix(VERSION)

    @property
    def origin(self) -> str:
        """The scheme, host and port, to which a key belongs."""
        parts = urlsplit(self.base)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def host(self) -> str:
        return urlsplit(self.base).netloc

    @property
    def is_local(self) -> bool:
        name = urlsplit(self.base).hostname or ""
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return name == "localhost"

    @property
    def source(self) -> str:
        """The address as it is stored, the same for all spellings."""
        return f"{self.base}#{self.model}" if self.model else self.base


def parsed(source: str) -> Address:
    """The address that a source names. Raises ModelError."""
    try:
        parts = urlsplit(source.strip())
        known = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError as error:
        raise ModelError(f"{source!r} is no address ({error}). {LIKE}") from error
    if not known or not is_address(source):
        raise ModelError(f"{source!r} names no server. {LIKE}")
    if parts.username is not None or parts.password is not None:
        raise ModelError(
            f"The address of {parts.hostname} holds a name or a password, which would be shown and "
            "stored. Leave it out, and give the server's key as the key."
        )
    if parts.query:
        raise ModelError(f"{source!r} has a part after '?', which no server needs. {LIKE}")
    path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/models")
    base = f"{parts.scheme.lower()}://{parts.netloc.lower()}{path or VERSION}"
    return Address(base, unquote(parts.fragment).strip())


def resolve_address(source: str) -> str:
    """The address in its normalised form; anything else is returned unchanged."""
    try:
        return parsed(source).source
    except ModelError:
        return source


CONNECT_SECONDS, ASK_SECONDS = 10.0, 20.0
SILENCE_SECONDS = 600.0
"""Between two pieces of an answer: a long prompt, or a long queue, takes its time."""
DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
MOST_BYTES = 8 << 20
"""Of an answer that is not streamed."""
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*?)(?:_total)?(?:\{[^}]*\})?\s+(\S+)")
"""A line of Prometheus' text: a name, labels, a value."""
VLLM, STRATA, LLAMA = "vllm", "strata", "llamacpp"
"""The recognised programs, by the `owned_by` of the models that they list."""
OFF: dict[str, dict[str, Any]] = {
    VLLM: {"vllm_xargs": {"strata": "off"}},
    STRATA: {"speculative": {"method": "plain"}},
}
"""Parameters that make a server answer without drafts. vLLM supports them with our drafter only."""
COMPLETE = (VLLM, STRATA, LLAMA)
"""Servers that can continue an answer, and that support all of our sampler settings but have other
defaults for them."""
GUARANTEE = (
    "With drafts a server promises its own greedy text at temperature 0, up to rounding, and above "
    "0 the distribution, not the text of a seed."
)
"""The promise of a server that drafts."""
MOST_QUOTED = 300
"""Characters of a server's own error message that are shown."""
TRY_AGAIN = "Start the server, or check the address, then try again. Nothing of the chat is lost."


class Lenient(BaseModel):
    """JSON from a server: a field of another type counts as missing."""

    model_config = ConfigDict(strict=True)

    @field_validator("*", mode="wrap")
    @classmethod
    def or_default(
        cls, value: object, check: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> object:
        try:
            return check(value)
        except ValidationError:
            return cls.model_fields[info.field_name or ""].get_default()


class Meta(Lenient):
    """The part of a model's entry in which llama.cpp's server reports the context."""

    n_ctx_train: int = 0


class Listed(Lenient):
    """A model in a server's list."""

    id: str = ""
    owned_by: str = ""
    max_model_len: int = 0
    meta: Meta = Meta()


class Models(BaseModel):
    """A server's list of models."""

    data: list[Listed]


class Drafting(Lenient):
    """The response to `GET /strata`."""

    name: str = ""
    databases: list[str] = []
    draft_tokens: int = 0
    drafting: bool = False


@dataclass(frozen=True, slots=True)
class Access:
    """A server with its key, which is not part of the `repr`."""

    address: Address
    key: str = field(default="", repr=False)

    @property
    def options(self) -> dict[str, Any]:
        """The options of a client. It uses the proxies of the environment, except on this
        machine."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return {
            "headers": headers,
            "timeout": httpx.Timeout(ASK_SECONDS, connect=CONNECT_SECONDS),
            "follow_redirects": False,
            "trust_env": not self.address.is_local,
        }


@dataclass(frozen=True, slots=True)
class Counters:
    """Tokens that a server drafted and accepted since it started, for all its clients."""

    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class ServerModel:
    """What a server reports: the model, its context (0: unknown), the server's program, and its
    drafting, None without `GET /strata`. With `counts` it has counters of drafts."""

    model: str
    context: int
    maker: str
    strata: Drafting | None
    counts: bool


def find(access: Access) -> ServerModel:
    """Query a server for its model and abilities. Raises ServerError."""
    address = access.address
    with httpx.Client(**access.options) as client:
        try:
            answer = client.get(f"{address.base}/models")
        except httpx.HTTPError as error:
            raise unreachable(error, address) from error
        if answer.status_code != 200:
            raise refused(answer.status_code, answer.text, address, access.key)
        model = model_of(answer, address)
        try:
            strata = Drafting.model_validate_json(optional(client, f"{address.root}/strata"))
        except ValidationError:
            strata = Drafting()
        counts = counters(optional(client, f"{address.root}/metrics")) is not None
    context = max(0, model.max_model_len or model.meta.n_ctx_train)
    ours = strata if strata.name == "strata" else None
    return ServerModel(model.id, context, model.owned_by, ours, counts)


def model_of(answer: httpx.Response, address: Address) -> Listed:
    try:
        models = [each for each in Models.model_validate_json(answer.content).data if each.id]
    except ValidationError as error:
        raise no_server(address, "it lists no models at /models") from error
    if not models:
        raise no_server(address, "it has no model")
    for each in models:
        if each.id == (address.model or models[0].id):
            return each
    names = ", ".join(repr(each.id) for each in models[:5])
    raise no_server(address, f"it has no model {address.model!r}, but {names}")


def optional(client: httpx.Client, url: str) -> str:
    try:
        answer = client.get(url)
    except httpx.HTTPError:
        return ""
    return answer.text if answer.status_code == 200 else ""


def counters(text: str) -> Counters | None:
    """The drafts in a server's metrics, summed over its engines; None if they count no drafts."""
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


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and all of its causes, because the client's own errors are vague."""
    seen: list[BaseException] = [error]
    for each in seen:
        yield each
        nested = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        found = [each.__cause__, each.__context__, *nested]
        seen += [one for one in found if one is not None and one not in seen]


def unreachable(error: httpx.HTTPError, address: Address) -> ServerError:
    """The error for a missing or incomplete response."""
    where, why = address.host, list(causes(error))
    certificate = next((e for e in why if isinstance(e, ssl.SSLCertVerificationError)), None)
    if certificate is not None:
        return ServerError(
            f"The certificate of {where} is not valid here ({certificate.verify_message}). Give "
            "the server one that this machine trusts, or name its file in SSL_CERT_FILE."
        )
    if any(isinstance(each, ssl.SSLError) for each in why):
        return ServerError(
            f"{where} does not speak TLS as https needs it. Check the address: the server may "
            "want http."
        )
    if any(isinstance(each, gaierror) for each in why):
        return ServerError(
            f"There is no machine with the name in {where}. Check the spelling of {address.base}."
        )
    if any(isinstance(each, ConnectionRefusedError) for each in why):
        return ServerError(f"Nothing answers at {where}: the connection was refused. {TRY_AGAIN}")
    if isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
        return ServerError(f"{where} did not answer in time. {TRY_AGAIN}")
    if isinstance(error, httpx.ConnectError):
        reason = next((str(each) for each in why if isinstance(each, OSError) and each.errno), "")
        detail = f" ({reason})" if reason else ""
        return ServerError(f"There is no way to {where}{detail}. {TRY_AGAIN}")
    if isinstance(error, httpx.TimeoutException):
        return ServerError(
            f"{where} sent nothing for too long, so the connection was closed. What arrived is "
            "kept. Continue the answer, or try again."
        )
    return broken(address)


def broken(address: Address) -> ServerError:
    return ServerError(
        f"The connection to {address.host} broke off before the answer was over. What arrived is "
        "kept. Continue the answer, or answer the message again."
    )


def refused(status: int, body: str, address: Address, key: str = "") -> ServerError:
    """The error for a response with an error status."""
    if status in (401, 403):
        problem = (
            f"{'refused the key' if key else 'wants a key'} (status {status}). Give its key in "
        )
        problem += "the Models tab, or start with STRATA_SERVER_KEY."
    elif status == 404:
        problem = (
            "has nothing at this place (status 404). Check the address "
            f"{address.source!r}, the model's name included."
        )
    elif status == 429:
        problem = "accepts no more requests for now (status 429). Wait a moment, then try again."
    elif 300 <= status < 400:
        problem = (
            f"sends the request elsewhere (status {status}), and Strata asks nobody whom you did "
            "not name. Give the address where the server really is."
        )
    elif status >= 500:
        problem = f"failed (status {status}). Look into its log, then try again."
    else:
        problem = f"refused the request (status {status}). Change what it names, then try again."
    words = quoted(body, key)
    return ServerError(f"{address.host} {problem}{f' It says: {words}' if words else ''}")


def no_server(address: Address, problem: str) -> ServerError:
    return ServerError(
        f"What answers at {address.base} is no OpenAI-compatible server: {problem}. Check the "
        "address; most end in /v1."
    )


def quoted(body: str, key: str = "") -> str:
    """A server's own error message, on one line and not too long."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = body if not body.lstrip().startswith("<") else ""
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    words = found if isinstance(found, str) else json.dumps(found)
    words = " ".join(words.split())
    if key:
        words = words.replace(key, "…")
    return words if len(words) <= MOST_QUOTED else f"{words[:MOST_QUOTED]}…"
