"""Every error that a user can cause. The text is shown as it is: what happened, the value, and what
to do."""

from traceback import clear_frames


class StrataError(Exception):
    """Base class; `str(error)` is a complete message for the user."""


class SettingError(StrataError):
    """A setting has an unknown name or a value out of its range."""


class FormatError(SettingError):
    """A format for an answer cannot be used, or the answer cannot have it."""


class PromptError(StrataError):
    """A message cannot be answered as it stands."""


class ModelError(StrataError):
    """A model cannot be found, read or used."""


class ServerError(ModelError):
    """A server that runs a model cannot be reached, or does not answer as it should."""


class ToolError(StrataError):
    """A server of tools cannot be started or reached, or does not answer as it should."""


class Cancelled(StrataError):
    """The user stopped a long piece of work; everything stays as it was before."""


class EngineDied(StrataError):
    """The process that runs the models ended; its current work is lost."""


class Busy(StrataError):
    """Too much is waiting for the model already."""


class StorageError(StrataError):
    """A data directory, a database or a statistics file cannot be used."""


def forget_frames(error: BaseException | None) -> None:
    """Drop the variables of all calls that an error, and those before it, went through."""
    left, seen = error, set[int]()
    while left is not None and id(left) not in seen:
        clear_frames(left.__traceback__)
        seen.add(id(left))
        left = left.__cause__ or left.__context__


def first_line(error: Exception) -> str:
    """The first line of an error of a library, or its type if it has no text."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
