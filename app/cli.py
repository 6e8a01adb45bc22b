"""What `strata` and `python app.py` do: parse, open the storage, serve the page, load the model."""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from app.arguments import Options, parse
from assets import ASSETS
from engine.errors import StrataError

if TYPE_CHECKING:
    from app.service.models import Models, Progress
    from app.service.session import Session
    from storage.database import Database


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
    """Everything in its order: the slow imports wait until the command line made sense. The model
    is read in the engine's process meanwhile, and the page says how far that is."""
    from platformdirs import user_data_path

    from app.web.gradio_import import skip_stubs
    from engine.models.loaders import check_there
    from storage import leftovers
    from storage.database import Database

    check_there(options.model)
    folder = options.data_dir or user_data_path("strata", appauthor=False)
    with ExitStack() as stack, Database(folder / "strata.db") as database:
        leftovers.clean(database, folder)
        session = session_of(options, folder, database, stack)
        models = session.models
        loading = models.start(options.model, options.runtime, options.drafts)
        tell(database.notices)
        threading.Thread(target=load, args=(models, loading), daemon=True).start()
        os.environ["GRADIO_TEMP_DIR"] = str(folder / leftovers.UPLOADS)  # read when imported
        skip_stubs()
        from app.web import downloads, layout, revisions, server, stream, vendor

        port = server.pick_port(options.host, options.port)
        blocks = layout.build(session, database.notices, options.password is not None)
        routes = [
            *stream.routes(session.generations),
            *revisions.routes(session),
            *downloads.routes(session.downloads),
            *vendor.routes(),
        ]
        address = server.launch(blocks, options, port, routes)
        if options.made_up:
            print(f"Log in as {options.user!r} with the password {options.password}", flush=True)
        print(f"Strata is ready at {address}", flush=True)
        blocks.block_thread()


def session_of(options: Options, folder: Path, database: "Database", stack: ExitStack) -> "Session":
    """The session on a new engine process, which ends with `stack`."""
    from app.service.models import title_of
    from app.service.session import Session
    from engine.loaded import NO_MODEL_INFO
    from engine.local import Local
    from engine.models.loaders import sampler, settled
    from engine.queue import MOST_WAITING
    from engine.remote import Remote
    from storage import leftovers
    from storage.statistics import open_table

    statistics = (folder / leftovers.STATISTICS, ASSETS / "statistics")
    each = 1 if options.public else MOST_WAITING
    make = partial(Local, partial(open_table, statistics), each=each)
    engine = stack.enter_context(closing(Remote(make)))
    name, law = title_of(settled(options.model)), sampler(options.model)
    coming = replace(NO_MODEL_INFO, name=name, sampling=law)
    return Session(engine, database, options.public, folders=statistics, coming=coming)


def load(models: "Models", loading: Iterator["Progress"]) -> None:
    """Load the first model; a bar on the terminal says how far its download and measuring are.

    Without it the page is still there: it says what is wrong, and can load another one.
    """
    from tqdm import tqdm

    look = {"bar_format": "{desc} {bar} {percentage:.0f} %", "leave": False, "disable": None}
    words = ""
    try:
        with tqdm(total=1.0, delay=0.2, **look) as bar:
            for progress in loading:
                words = progress.words
                bar.set_description_str(words, refresh=False)
                bar.update((progress.share or 0.0) - bar.n)
        print(words, file=sys.stderr, flush=True)
        tell(models.notices)
    except StrataError as error:
        tell([str(error)])


def tell(notices: Sequence[str]) -> None:
    """Say on the terminal what the user should know."""
    for notice in notices:
        print(f"strata: {notice}", file=sys.stderr, flush=True)
