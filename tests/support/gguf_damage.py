"""Damages a GGUF file at random and tries what comes out, in processes that may end.

Run by test_probe.py.

    python -m tests.support.gguf_damage FILE SEED TIMES

Prints one JSON list per try: what was done, what the probe said, and what loading and decoding did
where the probe had no objection. A number is the status of a process that the library ended.
"""

import json
import os
import random
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

from engine.decode import decode
from engine.errors import StrataError
from engine.models.loaders import load
from engine.models.probe import Probe, found
from engine.settings import Drafting, Generation, Runtime, Sampling
from engine.types import Message
from tests.support.gguf_files import header_size

NUMBERS = [
    *(struct.pack("<I", number) for number in (0, 1, 2, 3, 7, 255, 1 << 31, (1 << 32) - 1)),
    *(struct.pack("<f", number) for number in (-1.0, 1e38, 1e-38, float("nan"), float("inf"))),
]
RUNTIME = Runtime(threads=1, context_length=64)


def damaged(data: bytes, header: int, draw: random.Random) -> tuple[str, bytes]:
    head, at = bytearray(data[:header]), draw.randrange(4, header)
    kind = draw.choice(("bit", "byte", "number", "number", "number", "cut", "drop", "repeat"))
    if kind == "bit":
        head[at] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        head[at] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
    elif kind == "number":
        # Where a value of a key is: behind its type.
        known = [i for i in range(4, header - 8) if head[i : i + 4] in (b"\4\0\0\0", b"\6\0\0\0")]
        at = draw.choice(known) + 4
        head[at : at + 4] = draw.choice(NUMBERS)
    elif kind == "cut":
        return f"cut at {at}", data[: draw.choice((at, draw.randrange(header, len(data))))]
    elif kind == "drop":
        del head[at : at + draw.randrange(1, 9)]
    else:
        head[at:at] = head[at : at + draw.randrange(1, 40)]
    return f"{kind} at {at}", bytes(head) + data[header:]


def opened(path: Path) -> str:
    return found(path, RUNTIME).problem or "fine"


def used(path: Path) -> str:
    """Load it, whatever the probe said, and have it answer."""
    try:
        with patch("engine.models.formats.probed", return_value=Probe(types=("f32",))):
            backend = load(str(path), RUNTIME)
        backend.detokenize(range(backend.info.vocabulary_size))
        prompt = backend.tokenize(backend.render([Message("user", "Hé, 日本 😀\0\n")])[-60:]) or [3]
        wanted = Generation(Sampling(0.7), max_tokens=3)
        return f"{len(list(decode(backend, prompt[-40:], (), wanted, Drafting())))} events"
    except StrataError as error:
        return str(error)


def told(work: Callable[[Path], str], path: Path) -> str:
    """What `work` says; an exception is a fault of ours."""
    try:
        return work(path)
    except Exception as error:
        return f"raised {error!r}"


def apart(work: Callable[[Path], str], paths: Sequence[Path]) -> list[str | int]:
    """What `work` says of each in another process, or the status that the library ended it with.

    Where one ends, the next goes on.
    """
    results: list[str | int] = []
    while len(results) < len(paths):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            for path in paths[len(results) :]:
                os.write(writer, json.dumps(told(work, path)).encode() + b"\n")
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            results += map(json.loads, pipe.read().splitlines())
        if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            results.append(status)
    return results


def main(source: Path, seed: int, times: int) -> None:
    data, header, draw = source.read_bytes(), header_size(source), random.Random(seed)
    done, paths = list[str](), list[Path]()
    for number in range(times):
        what, broken = damaged(data, header, draw)
        done.append(what)
        paths.append(source.with_name(f"damaged{number}.gguf"))
        paths[-1].write_bytes(broken)
    said = apart(opened, paths)
    sound = [path for path, text in zip(paths, said, strict=True) if text == "fine"]
    answers = iter(apart(used, sound))
    for what, text in zip(done, said, strict=True):
        print(json.dumps([what, text, next(answers) if text == "fine" else ""]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
