"""Opens a GGUF file in a process of its own, and says on standard output what it is and needs.

llama.cpp ends the process over some damaged files. So every file is opened here first, without its
weights: whatever happens, the application goes on.
"""

import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from engine.process import RAISED, run
from engine.settings import Runtime

SIZE = re.compile(r"(?::|compute buffer|output buffer) size = +([0-9.]+) MiB")
"""What the library logs of its caches, its buffer for computing and that for logits."""
STATE = re.compile(r"llama_memory_recurrent: size = +([0-9.]+) MiB")
"""What it logs of the states of layers that keep one, and of their snapshots."""
TYPE = re.compile(r"llama_model_loader: - type +(?!i\d)(\w+): +\d+ tensors\s*")
"""What it logs of the types of numbers in a file. Whole numbers are never computed with."""
SNAPSHOTS, SHARE = 8, 1 / 4
"""Snapshots of a model's state at most, and the share of its weights that they may take. Each adds
operations to every forward, and few chains are longer."""
SECONDS = 60.0
EVERY = "".join(map(chr, (*range(0x800), *range(0x800, 0x110000, 0x800))))
"""A text of all bytes that UTF-8 has."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a file is, in bytes and numbers; `problem` is not empty where it cannot be used.

    `types` are those of its numbers, as the library names them ("f32", "q4_K"), in order.
    `snapshots` are how many states of the last rows are worth their memory, see engine/models/gguf.
    `head` says why the head that it brings cannot be used, where it brings such a one.
    """

    problem: str = ""
    parameters: int = 0
    weights: int = 0
    cache: int = 0
    types: tuple[str, ...] = ()
    snapshots: int = 0
    head: str = ""


def probe(path: Path, runtime: Runtime) -> Probe:
    """What the process found. A head that makes the file a problem is left out, and told."""
    found = tried(path, runtime)
    if found.problem and runtime.head != "off":
        without = tried(path, replace(runtime, head="off"))
        return found if without.problem else replace(without, head=found.problem)
    return found


def tried(path: Path, runtime: Runtime) -> Probe:
    """What one process found. One that the library ended is a problem as well."""
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
    """What the library makes of a file. It may end the process."""
    import llama_cpp

    from engine.backends.llamacpp import tokens_of
    from engine.backends.marks import MOST
    from engine.heads.llamacpp import NoHead
    from engine.models.gguf import Unusable, new_context, opened, said
    from engine.models.gguf_heads import opened_head

    try:
        model, context = opened(path, runtime, fast=True, weights=False, snapshots=1)
        weights = llama_cpp.llama_model_size(model)
        types = typed()
        kept = 1 + llama_cpp.llama_n_rs_seq(context)
        state, snapshots = sum(logged(STATE)) / kept, 0
        if kept > 1:
            snapshots = int(min(SNAPSHOTS, SHARE * weights / state if state else SNAPSHOTS))
            said.clear()
            context = new_context(model, runtime, snapshots)
    except Unusable as problem:
        return Probe(str(problem))
    head, lacking = None, ""
    try:
        head = opened_head(model, context, path, runtime, fast=True, weights=False)
    except NoHead as problem:
        lacking = str(problem)
    # Some vocabularies lack what only a text calls for.
    tokens_of(llama_cpp.llama_model_get_vocab(model), EVERY)
    states = head.states(context) if head else 0
    return Probe(
        parameters=llama_cpp.llama_model_n_params(model),
        weights=weights + (head.weights if head else 0),
        cache=round(sum(logged(SIZE)) + MOST * state) + states,
        types=tuple(sorted(types | typed())),
        snapshots=snapshots,
        head=lacking,
    )


def typed() -> set[str]:
    """The types of numbers that the library logged."""
    from engine.models.gguf import said

    return {named[1] for _, text in said if (named := TYPE.fullmatch(text))}


def logged(size: re.Pattern[str]) -> list[float]:
    """The bytes that the library logged in lines of such a form."""
    from engine.models.gguf import said

    return [float(found) * 2**20 for _, text in said for found in size.findall(text)]


if __name__ == "__main__":
    print(json.dumps(asdict(found(Path(sys.argv[1]), Runtime(**json.loads(sys.argv[2]))))))
