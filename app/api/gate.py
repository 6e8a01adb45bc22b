"""Who may ask: whoever shows a key, and programs of this machine where nobody else can come in.

Without a key a request must come under a loopback name, from no page of another origin, to a server
that only this machine reaches and that asks for no password. So neither a foreign page nor a name
that was made to lead here (app/http/access.py refuses both) can ask in the place of a program.

Keys are looked up for every request: one that is revoked opens nothing from then on. Wrong ones
wait, as guesses of passwords do.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from app.api.errors import ApiError
from app.http.access import LOOPBACK
from app.http.login import Throttle
from storage.api_keys import KEYLESS, PREFIX, ApiKeys

HOW = 'Send "Authorization: Bearer KEY". Keys are made in the API tab, or with: strata keys make'
OFF = (
    "The API is off. Switch it on in the API tab, or start Strata with --api, or start the API "
    "alone: strata serve"
)


@dataclass(frozen=True, slots=True)
class Gate:
    """See the module's docstring. `private` servers are reached from this machine alone and ask for
    no password; `on` says whether anybody may ask at all."""

    keys: ApiKeys
    private: bool
    on: Callable[[], bool]
    throttle: Throttle = field(default_factory=Throttle)

    async def enter(self, request: Request) -> str:
        """The owner who asks. Raises ApiError."""
        await self.check_on()
        secret = bearer(request)
        found = await run_in_threadpool(self.keys.find, secret) if secret else None
        if found is not None:
            await run_in_threadpool(self.keys.use, found)
            return found.owner
        # Clients that insist on a key send any word where none is asked for. A key of ours that is
        # not known any more is told.
        if not secret.startswith(PREFIX) and self.private and is_of_this_machine(request):
            return KEYLESS
        if not secret:
            raise unknown(f"A key is missing. {HOW}", "missing_api_key")
        await self.throttle.slow(request.scope)
        raise unknown(f"This key is not known, or was revoked. {HOW}", "invalid_api_key")

    async def check_on(self) -> None:
        """Raise ApiError while nobody may ask."""
        if not await run_in_threadpool(self.on):
            raise ApiError(404, OFF, code="api_off")


def bearer(request: Request) -> str:
    """The key that a request shows, "" for none."""
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""


def is_of_this_machine(request: Request) -> bool:
    """Whether a program of this machine asks under a loopback name, and no page of another."""
    host = request.headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    origin = request.headers.get("origin")
    return name in LOOPBACK and origin in (None, f"http://{host.lower()}")


def unknown(words: str, code: str) -> ApiError:
    """A request without a key that opens anything."""
    return ApiError(401, words, None, code, {"www-authenticate": "Bearer"})
