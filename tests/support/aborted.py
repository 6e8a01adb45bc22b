"""Programs that ask with long prompts and leave before their turn, against a server with an engine
in a process of its own: prints the memory that both take before and after it, in bytes.

    python -m tests.support.aborted PROMPTS
"""

import gc
import json
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import psutil

from app.service.programs import MOST_EACH
from engine.local import Local
from engine.process import give_back_large_blocks
from engine.remote import Remote
from tests.support.inside import soon
from tests.support.served import Served, served
from tests.support.toy import ToyBackend

LONG = 7_900_000
"""Characters of a prompt: nearly as much as a request may hold."""


class Slow(ToyBackend):
    """Takes its time over each forward and never says that it ends, so that one answer holds up all
    others."""

    def __init__(self) -> None:
        super().__init__()
        self.info = replace(self.info, eos_ids=frozenset())

    def score(self, *arguments: Any, **named: Any) -> Any:
        time.sleep(0.25)
        return super().score(*arguments, **named)


def engine() -> Local:
    return Local(backend=Slow())


def request(server: Served, text: str, **more: Any) -> bytes:
    asked = {"messages": [{"role": "user", "content": text}], **more}
    body = json.dumps(asked, ensure_ascii=False).encode()
    host = httpx.URL(server.address).netloc.decode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def resident(process: psutil.Process) -> int:
    """Bytes of this process and of the engine's."""
    gc.collect()
    both = [process, *process.children(recursive=True)]
    return sum(each.memory_info().rss for each in both)


def abort(server: Served, prompts: int) -> None:
    """So many programs ask and leave, as many at a time as may wait."""
    url, service = httpx.URL(server.address), server.api.service
    long, asking = request(server, "\u00e9" * (LONG // 2)), server.session.programs.asking
    left = prompts
    while left:
        with ExitStack() as connections:
            now = min(left, MOST_EACH - 1)
            for _ in range(now):
                raw = connections.enter_context(socket.create_connection((url.host, url.port)))
                raw.sendall(long)
            assert soon(lambda now=now: service.counters.waiting == now)
            left -= now
        assert soon(lambda: asking["api"] == 1)


def main(prompts: int) -> None:
    """One answer holds the model meanwhile."""
    give_back_large_blocks()  # as app/cli.py does
    process = psutil.Process()
    with served(engine=Remote(engine)) as server:
        url = httpx.URL(server.address)
        assert soon(lambda: server.session.engine.state.is_loaded)
        with socket.create_connection((url.host, url.port)) as first:
            first.sendall(request(server, "hello", max_tokens=4000, speculative=False))
            assert soon(lambda: server.api.service.counters.running == 1)
            abort(server, MOST_EACH)
            print(resident(process), flush=True)
            abort(server, prompts)
            print(resident(process), flush=True)
        assert soon(lambda: not server.session.programs.asking)
        assert not server.session.tasks.known


if __name__ == "__main__":
    main(int(sys.argv[1]))
