"""Strata's entry: parse, open the storage, load the model, build the interface, serve it."""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

from app.arguments import Options, parse
from engine.errors import StrataError

if TYPE_CHECKING:
    from app.models import Models

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

    from storage import leftovers
    from storage.database import Database

    folder = options.data_dir or user_data_path("strata", appauthor=False)
    with ExitStack() as stack, Database(folder / "strata.db") as database:
        leftovers.clean(database, folder)
        os.environ["GRADIO_TEMP_DIR"] = str(folder / leftovers.UPLOADS)  # read when imported
        from app import server, ui
        from app.session import Session
        from app.web import stream
        from engine.local import Local
        from engine.queue import MOST_WAITING
        from engine.remote import Remote
        from storage.statistics import open_table

        port = server.pick_port(options.host, options.port)
        statistics = (folder / leftovers.STATISTICS, ui.ASSETS / "statistics")
        opener = partial(open_table, statistics)
        each = 1 if options.public else MOST_WAITING
        engine = stack.enter_context(closing(Remote(partial(Local, opener, each=each))))
        session = Session(engine, database, options.public, folders=statistics)
        start(session.models, options)
        database.notices += session.models.notices
        for notice in database.notices:
            print(f"strata: {notice}", file=sys.stderr)
        blocks = ui.build(session, database.notices, options.password is not None)
        address = server.launch(blocks, options, port, stream.routes(session.generations))
        if options.made_up:
            print(f"Log in as {options.user!r} with the password {options.password}", flush=True)
        print(f"Strata is ready at {address}", flush=True)
        blocks.block_thread()


def start(models: "Models", options: Options) -> None:
    """Load the first model; a bar on the terminal says how far its download and measuring are."""
    from tqdm import tqdm

    print(f"Loading {options.model} …", file=sys.stderr, flush=True)
    look = {"bar_format": "{desc} {bar} {percentage:.0f} %", "leave": False, "disable": None}
    with tqdm(total=1.0, delay=0.2, **look) as bar:
        for progress in models.start(options.model, options.runtime, options.drafts):
            bar.set_description_str(progress.words, refresh=False)
            bar.update((progress.share or 0.0) - bar.n)


if __name__ == "__main__":
    sys.exit(main())
