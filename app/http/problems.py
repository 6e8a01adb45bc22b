"""Errors in OpenAI's format: a status, a message, and the wrong parameter."""

import json
from collections.abc import Mapping
from typing import Any

from engine.errors import (
    Busy,
    Cancelled,
    EngineDied,
    FormatError,
    ModelError,
    PromptError,
    SettingError,
    StrataError,
)

EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}
"""The headers of server-sent events."""


KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
"""The type of an error by its status. Other statuses below 500 are the caller's fault."""
AGAIN_SECONDS = 2
"""After how many seconds a program should retry if the queue was full."""
LOADED_SECONDS = 5
"""After how many seconds a program should retry if no model was loaded."""


def problem(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error response, in a form that clients of OpenAI and of Anthropic read.
    `param` is the wrong parameter."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return {"type": "error", "error": error}


def encoded(found: dict[str, Any]) -> bytes:
    """JSON as bytes. A lone surrogate, which a message may quote, is escaped."""
    return json.dumps(found).encode()


class ApiError(Exception):
    """An error response to a request. `code` is a machine-readable reason."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})


def refused(message: str, param: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def later(status: int, message: str, seconds: int, code: str) -> ApiError:
    """An error that says when to retry."""
    return ApiError(status, message, None, code, {"retry-after": str(seconds)})


def api_error(error: StrataError, prompt: str) -> ApiError:
    """The response for an error of this program. `prompt` is the request's parameter with its
    text."""
    message = str(error)
    if isinstance(error, PromptError):
        code = "context_length_exceeded" if "token" in message else None
        return refused(message, prompt, code)
    if isinstance(error, SettingError):
        return refused(
            message, "response_format" if isinstance(error, FormatError) else "speculative"
        )
    if isinstance(error, Busy):
        return later(429, message, AGAIN_SECONDS, "queue_full")
    if isinstance(error, ModelError | EngineDied):
        return later(503, message, LOADED_SECONDS, "model_not_loaded")
    if isinstance(error, Cancelled):
        return later(503, message, AGAIN_SECONDS, "cancelled")
    return ApiError(500, message)
