"""What a request fails with: a status, words, and the parameter that was wrong."""

from collections.abc import Mapping

from engine.errors import (
    Busy,
    Cancelled,
    EngineDied,
    ModelError,
    PromptError,
    SettingError,
    StrataError,
)

AGAIN_SECONDS = 2
"""After so long a program may ask again where there was no room in the queue."""
LOADED_SECONDS = 5
"""The same where no model was loaded."""


class ApiError(Exception):
    """A request that is not answered. `code` is a word for programs."""

    def __init__(
        self,
        status: int,
        words: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(words)
        self.status, self.words, self.param, self.code = status, words, param, code
        self.headers = dict(headers or {})


def refused(words: str, param: str, code: str | None = None) -> ApiError:
    """A parameter that cannot be used."""
    return ApiError(400, words, param, code)


def later(status: int, words: str, seconds: int, code: str) -> ApiError:
    """What may work a little later."""
    return ApiError(status, words, None, code, {"retry-after": str(seconds)})


def told(error: StrataError, prompt: str) -> ApiError:
    """An error of the program's as another one is told; `prompt` is the parameter that held it."""
    words = str(error)
    if isinstance(error, PromptError):
        code = "context_length_exceeded" if "token" in words else None
        return refused(words, prompt, code)
    if isinstance(error, SettingError):
        return refused(words, "speculative")
    if isinstance(error, Busy):
        return later(429, words, AGAIN_SECONDS, "queue_full")
    if isinstance(error, ModelError | EngineDied):
        return later(503, words, LOADED_SECONDS, "model_not_loaded")
    if isinstance(error, Cancelled):
        return later(503, words, AGAIN_SECONDS, "cancelled")
    return ApiError(500, words)
