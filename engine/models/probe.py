"""Opens a GGUF file in a separate process, and prints its properties and the memory that it needs.

llama.cpp crashes on some damaged files. Every file is therefore opened here first, without its
weights, so a crash does not affect the application.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from engine.errors import ModelError, first_line
from engine.models import llama_cpp_python
from engine.models.gguf_files import MAGIC
from engine.process import RAISED, run
from engine.settings import Runtime

QUANTIZED = ("q8_0", "q4_0")
"""Types of cache numbers that need flash attention."""

SIZE = re.compile(r"(?::|compute buffer|output buffer) size = +([0-9.]+) MiB")
"""The library's log lines on its caches and its buffers for computing and logits."""
STATE = re.compile(r"llama_memory_recurrent: size = +([0-9.]+) MiB")
"""Its log lines on the states of layers that keep one, including snapshots."""
TYPE = re.compile(r"llama_model_loader: - type +(?!i\d)(\w+): +\d+ tensors\s*")
"""Its log lines on the types of numbers in a file, except integers, which take no part in
computing."""
SNAPSHOTS, SHARE = 8, 1 / 4
"""The most snapshots of a model's state, and the share of its weights that they may take. Each one
adds operations to every forward, and few chains are longer."""
SECONDS = 60.0
EVERY = "".join(map(chr, (*range(0x800), *range(0x800, 0x110000, 0x800))))
"""A text that contains every byte of UTF-8."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The properties of a file; if it cannot be used, `problem` is the reason.

    `types` are the types of its numbers, as the library names them ("f32", "q4_K"), in order.
    `snapshots` is the number of snapshots that are worth their memory; see engine/models/gguf.py.
    `head` is the reason why its head cannot be used, "" if there is no such problem.
    """

    problem: str = ""
    parameters: int = 0
    weights: int = 0
    cache: int = 0
    types: tuple[str, ...] = ()
    snapshots: int = 0
    head: str = ""


def probed(source: str, runtime: Runtime) -> Probe:
    """The result of probing a file. Raises ModelError for one that cannot be used."""
    if runtime.flash_attention == "off" and runtime.cache_type in QUANTIZED:
        raise ModelError(
            f"A cache of {runtime.cache_type} numbers needs flash attention, which is off. Turn it "
            "on, or choose another cache type."
        )
    try:
        path = Path(os.path.expanduser(source))
        if not path.is_file():  # opening a pipe would block
            raise refusal(source, "there is no such file")
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise refusal(source, f"the file cannot be read ({first_line(error)})") from error
    if magic != MAGIC:
        problem = f"it begins with {magic!r}, not {MAGIC!r}" if magic else "the file is empty"
        raise refusal(source, problem)
    llama_cpp_python.check(source)
    state = path.stat()
    return probe_of(source, path, runtime, (state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=64)
def probe_of(source: str, path: Path, runtime: Runtime, state: tuple[int, int]) -> Probe:
    found = probe(path, runtime)
    if found.problem:
        raise refusal(source, found.problem)
    return found


def refusal(source: str, problem: str) -> ModelError:
    return ModelError(
        f"The model {source!r} cannot be used: {problem}. Give a complete GGUF file of a language "
        "model; download it again if it is damaged."
    )


def probe(path: Path, runtime: Runtime) -> Probe:
    """Probe a file in a separate process, without its head if that makes the file unusable."""
    found = tried(path, runtime)
    if found.problem and runtime.head != "off":
        without = tried(path, replace(runtime, head="off"))
        return found if without.problem else replace(without, head=found.problem)
    return found


def tried(path: Path, runtime: Runtime) -> Probe:
    """The result of one process. If the library ended the process, the result has a `problem`."""
    settings = json.dumps(asdict(runtime))
    try:
        ended = run("engine.models.probe", str(path), settings, seconds=SECONDS)
    except subprocess.TimeoutExpired:
        return Probe(f"llama.cpp was not done with its header after {SECONDS:.0f} s")
    lines, errors = (
        text.decode("utf-8", "replace").splitlines() for text in (ended.stdout, ended.stderr)
    )
    if ended.returncode == RAISED and errors:
        return Probe(f"llama.cpp cannot be run here ({errors[-1]})")
    if ended.returncode or not lines:
        return Probe("its header is damaged; llama.cpp gave up over it")
    values = json.loads(lines[-1])
    return Probe(**{**values, "types": tuple(values["types"])})


def found(path: Path, runtime: Runtime) -> Probe:
    """Probe a file in this process, which the library may end."""
    import llama_cpp

    from engine.backends.llamacpp import tokens_of
    from engine.backends.llamacpp_states import MOST
    from engine.heads.llamacpp import NoHead
    from engine.models.gguf import Unusable, log, new_context, opened
    from engine.models.gguf_heads import opened_head

    def types() -> set[str]:
        return {named[1] for _, text in log if (named := TYPE.fullmatch(text))}

    def mebibytes(size: re.Pattern[str]) -> float:
        return sum(float(each) for _, text in log for each in size.findall(text))

    try:
        model, context = opened(path, runtime, fast=True, weights=False, snapshots=1)
        weights = llama_cpp.llama_model_size(model)
        used = types()
        kept = 1 + llama_cpp.llama_n_rs_seq(context)
        state, snapshots = mebibytes(STATE) * 2**20 / kept, 0
        if kept > 1:
            snapshots = int(min(SNAPSHOTS, SHARE * weights / state if state else SNAPSHOTS))
            log.clear()
            context = new_context(model, runtime, snapshots)
    except Unusable as problem:
        return Probe(str(problem))
    head, lacking = None, ""
    try:
        head = opened_head(model, context, path, runtime, fast=True, weights=False)
    except NoHead as problem:
        lacking = str(problem)
    # Some damaged vocabularies fail only when a text is tokenized.
    for special in (True, False):
        tokens_of(llama_cpp.llama_model_get_vocab(model), EVERY, special)
    states = head.states(context) if head else 0
    return Probe(
        parameters=llama_cpp.llama_model_n_params(model),
        weights=weights + (head.weights if head else 0),
        cache=round(mebibytes(SIZE) * 2**20 + MOST * state) + states,
        types=tuple(sorted(used | types())),
        snapshots=snapshots,
        head=lacking,
    )


if __name__ == "__main__":
    print(json.dumps(asdict(found(Path(sys.argv[1]), Runtime(**json.loads(sys.argv[2]))))))
