"""The library that GGUF files need: which one, whether it is here, and how it is installed.

It is compiled when it is installed, which takes minutes. So Strata starts without it, and it may
come while Strata runs (app/service/gguf_support.py). Nothing here imports it.
"""

import importlib
import shlex
import sys
from importlib.util import find_spec

from engine.errors import ModelError

REQUIREMENT = "llama-cpp-python>=0.3.36,<0.4"
"""As in the extra `gguf` of pyproject.toml. Its module is called llama_cpp."""


def installed() -> bool:
    """Whether the library is here. Imports remember what is in a folder, so that is read anew."""
    importlib.invalidate_caches()
    return find_spec("llama_cpp") is not None


def command() -> list[str]:
    """The command that installs it beside Strata. An environment that uv made has no pip."""
    if find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", REQUIREMENT]
    return ["uv", "pip", "install", "--python", sys.executable, REQUIREMENT]


def check(source: str) -> None:
    """Raise ModelError for a GGUF file while the library is not here."""
    if not installed():
        raise ModelError(
            f"The model {source!r} is a GGUF file, and GGUF support is not set up. Press Set up "
            "GGUF support in the Models tab, or choose a folder with *.safetensors weights. By "
            f"hand: {shlex.join(command())}"
        )
