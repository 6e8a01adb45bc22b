"""A model that calls tools, in the process of the model (see tests/support/held.py), and the server
of these tools."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.conftest import ROOT
from tests.support.scripted import Scripted

if TYPE_CHECKING:
    from engine.backends.base import Backend
    from engine.local import Local
    from engine.settings import Runtime

PATHS = os.pathsep.join(filter(None, sys.path))
COMMAND = shlex.join(
    ["env", f"PYTHONPATH={PATHS}", sys.executable, str(ROOT / "tests/support/tool_server.py")]
)
"""What starts tests/support/tool_server.py: a server inherits little of the environment."""


def hangs(file: Path) -> int:
    """The process whose tool `hang` wrote this file, 0 while or where there is none."""
    written = file.read_text() if file.exists() else ""
    return int(written) if written and psutil.pid_exists(int(written)) else 0


def file_of(folder: Path) -> Path:
    """The calls of the model: it is this one as long as the file is there when it is loaded."""
    return folder / "calls"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def calling(file: Path, source: str, runtime: "Runtime") -> "Backend":
    """Calls what the file says, and then says how many results it read."""

    def script(prompt: str) -> str:
        results = prompt.rpartition("<|user|>Please")[2].count("<tool_response>")
        return f"I read **{results}** results." if results else f"I look.\n{file.read_text()}"

    toy = Scripted(script)
    toy.info = replace(toy.info, context_length=1 << 16, name="caller")
    return toy


def engine_of(folder: Path, statistics: Sequence[Path], path: Path, each: int) -> "Local":
    from engine.local import Local
    from engine.models.loaders import MODEL_LOADERS
    from storage.database import Database
    from storage.drafting import DraftingStore
    from storage.statistics import open_table

    loaders = replace(MODEL_LOADERS, load=partial(calling, file_of(folder)))
    store = DraftingStore(Database(path, made=True))
    return Local(partial(open_table, statistics), loaders, each=each, store=store)
