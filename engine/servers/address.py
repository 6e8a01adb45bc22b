"""What names a model on a server: `http://host:8000/v1`, or `http://host:8000/v1#model`.

Nothing is asked here. An address holds no password: it is shown and stored as it stands.
"""

import ipaddress
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from engine.errors import ModelError

KIND = "server"
"""What runs such a model, as `BackendInfo.kind` has it."""
SCHEMES = ("http://", "https://")
VERSION = "/v1"
LIKE = "Give one such as http://localhost:8000/v1, or http://localhost:8000/v1#model."


def is_address(source: str) -> bool:
    """Whether a source names a server rather than files."""
    return source.strip().lower().startswith(SCHEMES)


@dataclass(frozen=True, slots=True)
class Address:
    """A server and a model of it: `base` is where its API begins, without a slash at the end;
    `model` is "" for the first one that it has."""

    base: str
    model: str = ""

    @property
    def root(self) -> str:
        """Where the server itself begins: what is not part of the API is there."""
        return self.base.removesuffix(VERSION)

    @property
    def origin(self) -> str:
        """The scheme, host and port: what a key belongs to."""
        parts = urlsplit(self.base)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def host(self) -> str:
        """The host and the port, as people say them."""
        return urlsplit(self.base).netloc

    @property
    def is_local(self) -> bool:
        """Whether it is this very machine."""
        name = urlsplit(self.base).hostname or ""
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return name == "localhost"

    @property
    def source(self) -> str:
        """The address as it is stored: one server with one model has one name."""
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
    return Address(base_of(parts), unquote(parts.fragment).strip())


def base_of(parts: SplitResult) -> str:
    """Where the API begins: below /v1 unless another path is given."""
    path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/models")
    return f"{parts.scheme.lower()}://{parts.netloc.lower()}{path or VERSION}"


def settled(source: str) -> str:
    """The address in the one way in which it is written; what is none stays as it is."""
    try:
        return parsed(source).source
    except ModelError:
        return source
