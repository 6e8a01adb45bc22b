"""What goes wrong with a request of another program, in the shape that OpenAI's clients read."""

import json
from typing import Any

INVALID, FORBIDDEN, MISSING = "invalid_request_error", "permission_error", "not_found_error"
UNKNOWN_KEY, TOO_MANY, UNAVAILABLE = "authentication_error", "rate_limit_error", "unavailable_error"
BROKEN = "server_error"
KINDS = {401: UNKNOWN_KEY, 403: FORBIDDEN, 404: MISSING, 429: TOO_MANY, 503: UNAVAILABLE}
"""The type of an error by its status, INVALID for others below 500."""


def problem(
    status: int, words: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of such an answer. `param` is the parameter that was wrong."""
    kind = KINDS.get(status, INVALID if status < 500 else BROKEN)
    return {"error": {"message": words, "type": kind, "param": param, "code": code}}


def encoded(found: dict[str, Any]) -> bytes:
    """The same as it is sent. Half of a surrogate pair, which a message may quote, is escaped."""
    return json.dumps(found).encode()
