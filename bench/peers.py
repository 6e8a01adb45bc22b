"""What users would pick instead: the decoders of other programs, run beside ours in the same run.

A peer answers the same prompts with the same weights, the same settings of the sampler and the same
end tokens. Each kind of model has its own peers: the library's `generate()` for transformers models
(bench/transformers_peers.py); for GGUF files llama-cpp-python (bench/llama_peers.py) and the
programs of llama.cpp itself, where they are installed (bench/llama_programs.py).

A library is given our sampler, so it must say what plain decoding says at every temperature, and
pays for a choice what we pay. The programs draw their own numbers above temperature 0 and then say
another text, of another length: there nothing is compared with them.
"""

import argparse
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack

from bench.options import EMBEDDED, LLAMA_CPP, RANDOM, TRANSFORMERS, kind_of, runtime_of, source_of
from bench.peer import (
    ASSISTED,
    GENERATE,
    LLAMA,
    LLAMA_LOOKUP,
    LOOKUP,
    PROGRAMS,
    PROMPT_LOOKUP,
    SERVER,
    Peer,
)
from engine.backends.base import Backend
from engine.errors import SettingError
from engine.methods import FIXED, METHODS, PREFIXES

SPECULATION = ("ngram-mod", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-cache")
"""What llama-server can draft from without a draft model (--spec-type), its default first."""
PEERS = {
    TRANSFORMERS: (GENERATE, PROMPT_LOOKUP, ASSISTED),
    LLAMA_CPP: (LLAMA, LLAMA_LOOKUP, *PROGRAMS, *(f"{SERVER}:{kind}" for kind in SPECULATION)),
}
"""The peers of each kind of model."""
PLAIN = ("plain", GENERATE, LLAMA, SERVER)
"""Decoding without drafts, by whatever program. Speedups are against the faster of these."""
OURS = ("rest", "hd-published", "lookup", "hd")
DEFAULTS = {
    TRANSFORMERS: ("plain", *PEERS[TRANSFORMERS], *OURS),
    LLAMA_CPP: ("plain", LLAMA, LLAMA_LOOKUP, LOOKUP, SERVER, f"{SERVER}:{SPECULATION[0]}", *OURS),
}
"""The methods of a run that names none."""
BEST = (PROMPT_LOOKUP, "hd-published", *(n for n in PEERS[LLAMA_CPP] if n not in PLAIN))
"""The ones to beat: what drafts without a draft model, and is not ours."""
SMALL = EMBEDDED.with_name("small")


def checked_methods(options: argparse.Namespace) -> list[str]:
    """The methods of a run, by name, before any model is loaded.

    Where none are named, those of the default that cannot run here are left out, which is printed.
    Raises SettingError for names that are none, and peers that cannot run.
    """
    kind = kind_of(options.model)
    if options.methods is None:
        problems = {
            name: problem for name in DEFAULTS[kind] if (problem := obstacle(name, options))
        }
        for problem in dict.fromkeys(problems.values()):
            absent = ", ".join(name for name in problems if problems[name] == problem)
            print(f"Left out: {absent}, as {problem}.")
        return [name for name in DEFAULTS[kind] if name not in problems]
    names = [name.strip() for name in options.methods.split(",") if name.strip()]
    if not names:
        raise SettingError("Give at least one method.")
    known = ("plain", *PEERS[kind], *(name for name in METHODS if name != "plain"))
    for name in names:
        other = next((other for other in PEERS if name in PEERS[other]), kind)
        if other != kind:
            raise SettingError(
                f"The peer {name!r} is of {other} models, and {options.model!r} is none. Choose "
                f"from: {', '.join(PEERS[kind])}."
            )
        ours = name.partition(":")[0] in PREFIXES or name.startswith(FIXED)
        if name not in known and not ours:
            raise SettingError(f"There is no method {name!r}. Choose from: {', '.join(known)}.")
        if problem := obstacle(name, options):
            raise SettingError(
                f"The method {name!r} cannot run, as {problem}. Change that, or leave it out of "
                "--methods."
            )
    return names


def is_peer(name: str) -> bool:
    """Whether a method is not ours."""
    return any(name in peers for peers in PEERS.values())


def keeps_text(name: str, temperature: float) -> bool:
    """Whether a method says what plain decoding says with the same seed."""
    return temperature == 0 or name.partition(":")[0] not in PROGRAMS


def obstacle(name: str, options: argparse.Namespace) -> str:
    """Why a method cannot run with these options, "" where it can."""
    program = name.partition(":")[0]
    if name in PEERS[TRANSFORMERS] and options.tensor_parallel > 1:
        return "transformers' own decoding is tried in one process alone"
    if name == ASSISTED and options.model != "embedded" and not options.assistant:
        return f"it needs a draft model for {options.model!r} (--assistant)"
    if program in PROGRAMS and shutil.which(program) is None:
        return f"there is no {program} of llama.cpp on the PATH"
    if program == LOOKUP and options.prompts == RANDOM:
        return f"{program} reads text, and random tokens are none"
    return ""


def program_versions(names: Sequence[str]) -> dict[str, str]:
    """What the programs among some methods say of their version, in their first line."""
    versions = {}
    for program in sorted({name.partition(":")[0] for name in names} & set(PROGRAMS)):
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        lines = (done.stderr + done.stdout).splitlines()
        versions[program] = lines[0].removeprefix("version: ") if lines else "unknown"
    return versions


def made_peers(
    names: Sequence[str], backend: Backend, options: argparse.Namespace, stack: ExitStack
) -> dict[str, Peer]:
    """Those of the methods that are peers, ready to answer; `stack` ends what they started."""
    wanted = [name for name in names if is_peer(name)]
    if not wanted:
        return {}
    made: dict[str, Peer] = {}
    # Imported here, as a run needs one of the two libraries, and may have just that one.
    if kind_of(options.model) == TRANSFORMERS:
        from bench.transformers_peers import transformers_peer

        for name in wanted:
            made[name] = transformers_peer(name, backend, options.assistant or str(SMALL))
        return made
    from bench.llama_peers import LlamaPeer, gguf_of
    from bench.llama_programs import LookupPeer, ServerPeer

    file = gguf_of(backend, source_of(options.model), runtime_of(options))
    for name in wanted:
        program, _, speculation = name.partition(":")
        if program == LOOKUP:
            made[name] = LookupPeer(file)
        elif program == SERVER:
            made[name] = stack.enter_context(ServerPeer(name, file, speculation))
        else:
            made[name] = stack.enter_context(LlamaPeer(name, file))
    return made
