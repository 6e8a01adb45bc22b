"""Strata's entry: parse, open the storage, load the model, build the interface, serve it."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.arguments import EMBEDDED, EMBEDDED_DRAFTS, Options, parse
from engine.errors import StrataError

if TYPE_CHECKING:
    from app.session import Session

ENVIRONMENT = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2)),
}
"""Set before the libraries are imported, which read these once; what the user has set stays.
Threads: one per physical core. Helpers that wait for a core the browser uses stall every step."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until interrupted; 2 when something has to be put right first."""
    options = parse(arguments)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        serve(options)
    except StrataError as error:
        print(f"strata: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("", file=sys.stderr)
    return 0


def serve(options: Options) -> None:
    """Everything in its order; the slow imports wait until the command line made sense."""
    from platformdirs import user_data_path

    from storage.database import Database

    folder = options.data_dir or user_data_path("strata", appauthor=False)
    with Database(folder / "strata.db") as database:
        from app import server, ui
        from app.model_thread import ModelThread
        from app.session import Session
        from app.stacks import loading_beside
        from storage.statistics import find_table

        port = server.pick_port(options.host, options.port)
        print(f"Loading {options.model} …", file=sys.stderr, flush=True)
        from engine.backends.load import load_transformers

        model = ModelThread()
        backend = model.run(lambda: load_transformers(options.model, options.device, options.dtype))
        embedded = Path(options.model).resolve() == EMBEDDED
        if embedded:
            backend.info = replace(backend.info, name=EMBEDDED.parent.name)
        statistics_folders = (folder / "statistics", ui.ASSETS / "statistics")
        table = find_table(
            backend.info.tokenizer_fingerprint,
            *statistics_folders,
            report=database.notices.append,
        )
        loading = loading_beside(backend, options.device, options.dtype)
        session = Session(backend, database, table, options.public, model, loading)
        measure(session)
        if embedded:
            session.stacks.offered += [str(EMBEDDED.parent / name) for name in EMBEDDED_DRAFTS]
        database.notices += session.stacks.restore(options.drafts)
        for notice in database.notices:
            print(f"strata: {notice}", file=sys.stderr)
        blocks = ui.build(session, database.notices, embedded)
        address = server.launch(blocks, options, port)
        if options.made_up:
            print(f"Log in as {options.user!r} with the password {options.password}", flush=True)
        print(f"Strata is ready at {address}", flush=True)
        blocks.block_thread()


def measure(session: "Session") -> None:
    """What forwards cost, with a bar unless that is known already, and the plain speed of today."""
    from tqdm import tqdm

    look = {"bar_format": "{desc}: {bar} {percentage:.0f} %", "leave": False, "disable": None}
    with tqdm(total=1.0, desc="Measuring the model", delay=0.2, **look) as bar:
        session.prepare(lambda share: bar.update(share - bar.n))
    session.measure()


if __name__ == "__main__":
    sys.exit(main())
