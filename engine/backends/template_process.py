"""Fills chat templates for engine/backends/chat_template.py, with the libraries' own code.

    python -m engine.backends.template_process [LIBRARY]

A request is a line of JSON on standard input, the answer one on standard output: a text, or the
error that the template raised. A template that takes too long ends the process: the timer is a
native thread that needs no lock of Python's, so it also stops what never leaves a single operation.
Where the system can, the memory of the process is limited too. Templates run in the sandbox that
the libraries bring.
"""

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import IO, Any

MEMORY = 1 << 30
"""Bytes that templates may take."""
LONGEST = 1 << 24
"""Characters of a text; far more than fit into the context of any model."""

Fill = Callable[[list[dict[str, str]], dict[str, Any]], str]
"""What a template makes of turns, with values for the variables that it may know."""


@lru_cache(maxsize=16)
def llama_cpp(template: str, *tokens: tuple[str, str]) -> Fill:
    """The template of a GGUF file, as llama-cpp-python fills it."""
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    names: dict[str, Any] = dict(tokens)
    formatter = Jinja2ChatFormatter(template, **names)

    def fill(turns: list[dict[str, str]], variables: dict[str, Any]) -> str:
        messages: Any = turns
        return str(formatter(messages=messages, **variables).prompt)

    return fill


def transformers(template: str, *tokens: tuple[str, str]) -> Fill:
    """The template of a folder, as the transformers library fills it, which keeps what it read."""
    from transformers.utils.chat_template_utils import render_jinja_template

    names: dict[str, Any] = dict(tokens)

    def fill(turns: list[dict[str, str]], variables: dict[str, Any]) -> str:
        texts: Any = render_jinja_template(
            [turns], chat_template=template, add_generation_prompt=True, **names, **variables
        )
        return str(texts[0][0])

    return fill


LIBRARIES: dict[str, tuple[str, Callable[..., Fill]]] = {
    "llama_cpp": ("llama_cpp.llama_chat_format", llama_cpp),
    "transformers": ("transformers.utils.chat_template_utils", transformers),
}
"""The module that each imports, which takes a part of a second, and what makes a filler."""


def answer(request: dict[str, Any]) -> dict[str, str]:
    """What a template makes of the turns, or what it raised."""
    try:
        tokens = request["tokens"].items()
        fill = LIBRARIES[request["library"]][1](request["template"], *tokens)
        turns = request["turns"]
        text = "" if turns is None else fill(turns, request["variables"])
    except MemoryError:
        return {"error": f"it needs more than {MEMORY >> 20:,} MiB of memory"}
    except Exception as error:
        # Jinja raises several types, and a template may raise any.
        return {"error": str(error).strip() or type(error).__name__}
    if len(text) > LONGEST:
        return {"error": f"it makes a text of {len(text):,} characters"}
    return {"text": text}


def limit_memory() -> None:
    """Templates may take MEMORY beside what is taken already, where the system can say so."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        import psutil

        most = psutil.Process().memory_info().vms + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def serve(requests: IO[bytes], answers: IO[bytes], nowhere: IO[str]) -> None:
    """Answer requests until there are no more."""
    for line in requests:
        request = json.loads(line)
        __import__(LIBRARIES[request["library"]][0])
        faulthandler.dump_traceback_later(request["seconds"], exit=True, file=nowhere)
        found = json.dumps(answer(request)).encode() + b"\n"
        faulthandler.cancel_dump_traceback_later()
        answers.write(found)
        answers.flush()


def main(library: str) -> None:
    """Import what will be needed first, then serve."""
    __import__(LIBRARIES[library][0])
    limit_memory()
    # Nothing that a library prints may get among the answers.
    with os.fdopen(os.dup(1), "wb") as answers, open(os.devnull, "w") as nowhere:
        os.dup2(2, 1)
        serve(sys.stdin.buffer, answers, nowhere)


if __name__ == "__main__":
    main(sys.argv[1])
