"""What goes wrong between here and a server, in words: what happened, with which value, what to do.

A key is never part of such words: neither requests nor their headers are told, and where a server
repeats the key in its answer it is blotted out.
"""

import json
import ssl
from collections.abc import Iterator
from socket import gaierror

import httpx

from engine.errors import ServerError
from engine.servers.address import Address

MOST_TOLD = 300
"""Characters of what a server says that are told."""
TRY_AGAIN = "Start the server, or check the address, then try again. Nothing of the chat is lost."


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it came from: the client's own say little."""
    seen: list[BaseException] = [error]
    for each in seen:
        yield each
        nested = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        found = [each.__cause__, each.__context__, *nested]
        seen += [one for one in found if one is not None and one not in seen]


def unreachable(error: httpx.HTTPError, address: Address) -> ServerError:
    """What to say where no answer came, or only the beginning of one."""
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
        said = f" ({reason})" if reason else ""
        return ServerError(f"There is no way to {where}{said}. {TRY_AGAIN}")
    if isinstance(error, httpx.TimeoutException):
        return ServerError(
            f"{where} said nothing for too long, so the connection was closed. What came until "
            "then is kept. Have the answer go on, or try again."
        )
    return broken(address)


def broken(address: Address) -> ServerError:
    """What to say of an answer without an end."""
    return ServerError(
        f"The connection to {address.host} broke off before the answer was over. What came until "
        "then is kept. Have the answer go on, or answer the message again."
    )


def refused(status: int, body: str, address: Address, key: str = "") -> ServerError:
    """What to say of an answer that is none."""
    words, where = told(body, key), address.host
    said = f" It says: {words}" if words else ""
    if status in (401, 403):
        which = "refused the key" if key else "wants a key"
        return ServerError(
            f"{where} {which} (status {status}). Give its key in the Models tab, or start with "
            f"STRATA_SERVER_KEY.{said}"
        )
    if status == 404:
        return ServerError(
            f"{where} has nothing at this place (status 404). Check the address "
            f"{address.source!r}, the model's name included.{said}"
        )
    if status == 429:
        return ServerError(
            f"{where} takes no more requests for now (status 429). Wait a moment, then try again."
            f"{said}"
        )
    if 300 <= status < 400:
        return ServerError(
            f"{where} sends the request elsewhere (status {status}), and Strata asks nobody whom "
            f"you did not name. Give the address where the server really is.{said}"
        )
    if status >= 500:
        return ServerError(
            f"{where} failed (status {status}). Look into its log, then try again.{said}"
        )
    return ServerError(
        f"{where} refused the request (status {status}). Change what it names, then try again."
        f"{said}"
    )


def no_server(address: Address, what: str) -> ServerError:
    """What to say of something that is no OpenAI-compatible server."""
    return ServerError(
        f"What answers at {address.base} is no OpenAI-compatible server: {what}. Check the "
        "address; most end in /v1."
    )


def told(body: str, key: str = "") -> str:
    """What a server says of an error, on one line and not too long."""
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
    return words if len(words) <= MOST_TOLD else f"{words[:MOST_TOLD]}…"
