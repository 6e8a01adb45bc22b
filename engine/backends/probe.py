"""Opens a GGUF file in a process of its own, and says on standard output what it is and needs.

llama.cpp ends the process over some damaged files. So every file is opened here first, without its
weights: whatever happens, the application goes on.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.settings import Runtime

SIZE = re.compile(r"(?::|compute buffer|output buffer) size = +([0-9.]+) MiB")
"""What the library logs of its caches, its buffer for computing and that for logits."""
SECONDS = 60.0
RAISED = 1
"""How a process of Python ends over an exception. Where the library ends it, the status differs."""
EVERY = "".join(map(chr, (*range(0x800), *range(0x800, 0x110000, 0x800))))
"""A text of all bytes that UTF-8 has."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Probe:
    """What a file is, in bytes and numbers; `problem` is not empty where it cannot be used."""

    problem: str = ""
    parameters: int = 0
    weights: int = 0
    cache: int = 0


def probe(path: Path, runtime: Runtime) -> Probe:
    """What the process found. One that the library ended is a problem as well."""
    module, settings = "engine.backends.probe", json.dumps(asdict(runtime))
    words = [sys.executable, "-P", "-m", module, str(path), settings]
    places = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": places, "GGML_NO_BACKTRACE": "1"}
    try:
        ended = subprocess.run(
            words, env=environment, capture_output=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Probe(f"llama.cpp was not done with its header after {SECONDS:.0f} s")
    lines, errors = (
        text.decode("utf-8", "replace").splitlines() for text in (ended.stdout, ended.stderr)
    )
    if ended.returncode == RAISED and errors:
        return Probe(f"llama.cpp cannot be run here ({errors[-1]})")
    if ended.returncode or not lines:
        return Probe("its header is damaged; llama.cpp gave up over it")
    return Probe(**json.loads(lines[-1]))


def found(path: Path, runtime: Runtime) -> Probe:
    """What the library makes of a file. It may end the process."""
    import llama_cpp

    from engine.backends.gguf import Unusable, opened, said
    from engine.backends.llamacpp import tokens_of

    try:
        model, _ = opened(path, runtime, weights=False)
    except Unusable as problem:
        return Probe(str(problem))
    # Some vocabularies lack what only a text calls for.
    tokens_of(llama_cpp.llama_model_get_vocab(model), EVERY)
    sizes = [float(size) for _, text in said for size in SIZE.findall(text)]
    return Probe(
        parameters=llama_cpp.llama_model_n_params(model),
        weights=llama_cpp.llama_model_size(model),
        cache=round(sum(sizes) * 2**20),
    )


if __name__ == "__main__":
    print(json.dumps(asdict(found(Path(sys.argv[1]), Runtime(**json.loads(sys.argv[2]))))))
