"""The library that GGUF files need: its version, whether it is installed, and how to install it.

It is compiled when it is installed, which takes minutes. Strata therefore starts without it, and it
may be installed while Strata runs (app/service/gguf_support.py). Nothing here imports it.
"""

import importlib
import shlex
import sys
from importlib.util import find_spec

from engine.errors import ModelError

REQUIREMENT = "llama-cpp-python>=0.3.36,<0.3.37"
"""As in the extra `gguf` of pyproject.toml. Its module is called llama_cpp."""


def installed() -> bool:
    """Whether the library is installed. It may have been installed a moment ago, so the caches of
    the import system are cleared first."""
    importlib.invalidate_caches()
    return find_spec("llama_cpp") is not None


def command() -> list[str]:
    """The command that installs it for Strata's Python. Environments that uv created have no
    pip."""
    if find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", REQUIREMENT]
    return ["uv", "pip", "install", "--python", sys.executable, REQUIREMENT]


def check(source: str) -> None:
    """Raise ModelError for a GGUF file while the library is not installed."""
    if not installed():
        raise ModelError(
            f"The model {source!r} is a GGUF file, and GGUF support is not set up. Press Set up "
            "GGUF support in the Models tab, or choose a folder with *.safetensors weights. By "
            f"hand: {shlex.join(command())}"
        )
