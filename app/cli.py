"""What `strata` and `python app.py` do: parse, open the storage, serve the page or the API, load
the model."""

import argparse
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import walk_tb
from typing import TYPE_CHECKING

from app.arguments import (
    EMBEDDED,
    KEYS,
    SERVE,
    VLLM,
    WAYS,
    Options,
    folder_of,
    parse,
    parse_keys,
    parse_ways,
    show_any_character,
)
from assets import ASSETS
from engine.errors import EngineDied, SettingError, StrataError, first_line
from engine.machine import THREADS, other_people, physical_cores

if TYPE_CHECKING:
    from app.service.jobs import Progress
    from app.service.session import Session
    from engine.local import Local
    from storage.database import Database


ENVIRONMENT = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GOMP_SPINCOUNT": "3000",
}
"""Set before importing the libraries, which read these once; the user's own values stay.

A thread that waits for another one gives up its core early. With the library's default, two threads
on two busy cores write one token in the time in which a single thread writes sixteen
(docs/log.md)."""


Failed = Callable[[StrataError], None]
DATABASE = "strata.db"
SERVER_KEY = "STRATA_SERVER_KEY"
"""The environment variable with the API key of the server that --model names."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until interrupted. Returns the exit status, 2 for an error that the user must fix."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    show_any_character()
    if argv[:1] != [VLLM]:
        prepare_environment(page=argv[:1] not in ([SERVE], [WAYS]))
    try:
        if argv[:1] == [VLLM]:
            from app.vllm.serve import run

            run(argv[1:])
        elif argv[:1] == [KEYS]:
            manage_keys(parse_keys(argv[1:]))
        elif argv[:1] == [WAYS]:
            measure_ways(parse_ways(argv[1:]))
        else:
            serve(parse(argv))
    except StrataError as error:
        print(f"strata: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("", file=sys.stderr)
    return 0


def prepare_environment(page: bool) -> None:
    """Set what libraries read when they are imported. Settings for other programs that use Gradio,
    such as GRADIO_SERVER_PORT, must not change this one.

    A model gets all physical cores. Where a browser shows a `page`, one core is left to it: a step
    waits for its slowest thread, and on two cores that was the one that the browser interrupted.
    """
    for name in [name for name in os.environ if name.startswith("GRADIO_")]:
        del os.environ[name]
    threads = str(max(1, physical_cores() - page))
    for name, value in {THREADS: threads, **ENVIRONMENT}.items():
        os.environ.setdefault(name, value)


def serve(options: Options) -> None:
    """Open the storage, start loading the model, and serve the page or the API. Slow imports come
    after the command line is checked. The model loads in the engine's process meanwhile."""
    folder = folder_of(options.data_dir)
    sys.stdout = sys.stdout or sys.stderr  # Libraries ask a closed output whether it is a terminal.
    import_hub(folder)
    from engine.models.loaders import check_there
    from engine.process import give_back_large_blocks
    from engine.servers.client import is_address
    from storage import cleanup
    from storage.database import Database

    give_back_large_blocks()
    check_there(options.model)
    # As Ctrl-C does: everything that was started here is ended. A system gets a clean status.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Database(folder / DATABASE) as database, ExitStack() as stack:
        cleanup.clean(database, folder)
        session = session_of(options, folder, database, stack)
        models = session.models
        if is_address(options.model):
            models.give_key(options.model, os.environ.get(SERVER_KEY, ""))
        loading = models.start(options.model, options.runtime, options.drafts)
        tell(database.notices)
        ended = threading.Event()
        stack.callback(ended.set)
        loaded = partial(load, session, loading, ended)
        if options.page:
            threading.Thread(target=loaded, args=(report,), daemon=True).start()
            serve_page(options, folder, database, session)
        else:
            serve_api(options, session, loaded)


def import_hub(folder: Path) -> None:
    if os.path.expanduser("~") == "~" and "XDG_CACHE_HOME" not in os.environ:
        os.environ.setdefault("HF_HOME", str(folder / "huggingface"))  # The user has no folder.
    with importing():
        import huggingface_hub.constants  # noqa: F401


def serve_page(options: Options, folder: Path, database: "Database", session: "Session") -> None:
    from app.api.routes import api_of
    from app.web.gradio_import import import_gradio
    from storage import cleanup

    os.environ["GRADIO_TEMP_DIR"] = str(folder / cleanup.UPLOADS)  # read when imported
    with without_collection():
        with importing():
            import_gradio()
        from app.web import layout, routes, server, shared, stream, token_view

        port = server.pick_port(options.host, options.port)
        blocks = layout.build(session, database.notices, options.password is not None)
        own = [
            *shared.routes(),
            *stream.routes(session.generations),
            *routes.routes(session),
            token_view.route(),
            *api_of(session, options).routes,
        ]
        address = server.launch(blocks, options, port, own)
    if options.made_up:
        show(f"Log in as {options.user!r} with the password {options.password}", secret=True)
    show(f"Strata is ready at {address}")
    if options.api:
        tell_of_keys(options, database)
        show(f"Its API is at {address.rstrip('/')}/v1")
    blocks.block_thread()


@contextmanager
def without_collection() -> Iterator[None]:
    """Exclude all objects that the block creates from garbage collection, as they stay. Collection
    would take a fifth of the time until the page is ready."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def serve_api(options: Options, session: "Session", loaded: Callable[[Failed], None]) -> None:
    """Serve programs until interrupted, while `loaded` loads the first model.

    Raises StrataError if it cannot be loaded: without a page nobody can choose another one. If its
    process ended, the server stays, because the model is tried again (app/service/revival.py).
    """
    from app.api.routes import api_of, server_of
    from app.http.access import address_of, pick_port

    port = pick_port(options.host, options.port)
    tell_of_keys(options, session.database)
    ready = partial(show, f"Strata's API is ready at {address_of(options.host, port)}v1")
    routes = api_of(session, options).routes
    server = server_of(options, port, routes, ready, session.tasks.stop_all)
    failures: list[StrataError] = []

    def failed(error: StrataError) -> None:
        if isinstance(error, EngineDied):
            report(error)
        else:
            failures.append(error)
            server.should_exit = True

    threading.Thread(target=loaded, args=(failed,), daemon=True).start()
    server.run()
    for failure in failures:
        raise failure


def tell_of_keys(options: Options, database: "Database") -> None:
    """Say that a key is missing where others can reach the API."""
    from storage.api_keys import ApiKeys

    if options.public and not ApiKeys(database).list():
        tell(["Nobody can use the API yet, as there is no key. Make one: strata keys make NAME"])


def measure_ways(options: Options) -> None:
    """Print how fast each way to run a model is. Nothing is kept: what it drafts from begins
    empty, and what is loaded is not the model of the next start. Raises StrataError."""
    with ExitStack() as stack:
        made = stack.enter_context(TemporaryDirectory(prefix="strata-"))
        import_hub(Path(made))
        from app.service.ways import TITLES
        from engine.models.loaders import check_there
        from engine.servers.client import is_address
        from storage.database import Database

        check_there(options.model)
        if is_address(options.model):
            raise SettingError(
                f"{options.model!r} is a model on a server, whose ways to run it cannot be "
                "measured. Give a model on this machine."
            )
        database = stack.enter_context(Database(Path(made) / DATABASE))
        session = session_of(options, Path(made), database, stack)
        follow(session.models.start(options.model, options.runtime))
        if not session.ways.offered:
            raise SettingError(
                f"{session.current.info.name} runs in one way only on this machine. Others "
                "have fewer bits, and need the compiled core (make native) or a GPU."
            )
        job = session.ways.start(WAYS)
        follow(job.watch())
        found = job.result()
    columns = [[head, *cells] for head, *cells in zip(TITLES, *found.rows(), strict=True)]
    widths = [max(map(len, column)) for column in columns]
    for line in zip(*columns, strict=True):
        cells = zip(line, widths, strict=True)
        show("  ".join(cell.ljust(width) for cell, width in cells).rstrip())
    for bits, problem in found.left_out:
        show(f"{bits}: {problem}")
    show(found.verdict)


def manage_keys(options: argparse.Namespace) -> None:
    """Run a command of `strata keys`. Raises StrataError."""
    from datetime import datetime

    from storage.api_keys import ApiKeys
    from storage.database import Database

    with Database(folder_of(options.data_dir) / DATABASE) as database:
        keys = ApiKeys(database)
        if options.command == "make":
            with database.write():  # A key that cannot be shown is not kept.
                key, secret = keys.make(options.word)
                show(f"The key {key.name!r} is shown only once. Keep it:\n{secret}", secret=True)
        elif options.command == "revoke":
            show(f"The key {keys.revoke(options.word).name!r} is revoked: it no longer works.")
        else:
            found = keys.list()
            if not found:
                tell(["There is no key yet. Make one: strata keys make NAME"])
            for key in found:
                used = f"{datetime.fromtimestamp(key.used):%Y-%m-%d %H:%M}" if key.used else "never"
                show(f"{key.id}  {key.name}  last used: {used}")


def show(text: str, secret: bool = False) -> None:
    """Print a line. Raises SettingError if it cannot be written, or if it is a `secret` and there
    is no output."""
    try:
        if secret and sys.stdout is None:
            raise OSError("it is closed")
        print(text, flush=True)
    except OSError as error:
        raise SettingError(
            f"The output cannot be written ({error.strerror or error}), so you would not see what "
            "you need. Run this in a terminal, or send its output to another file."
        ) from error


@contextmanager
def importing() -> Iterator[None]:
    """Import libraries that read environment variables. Raises SettingError if they cannot use
    their values."""
    try:
        yield
    except Exception as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        raise SettingError(
            f"{frame.f_globals.get('__name__')} cannot be loaded ({type(error).__name__}: "
            f"{first_line(error)}). If it read that value from an environment variable, correct or "
            "unset the variable; otherwise set Strata up again."
        ) from error


def session_of(options: Options, folder: Path, database: "Database", stack: ExitStack) -> "Session":
    """The session on a new engine process, which ends with `stack`."""
    from app.service.models import title_of
    from app.service.session import Session
    from engine.loaded import NO_MODEL_INFO
    from engine.models.loaders import resolve_source, sampler
    from engine.queue import MOST_WAITING
    from engine.remote import Remote
    from storage import cleanup

    statistics = (folder / cleanup.STATISTICS, ASSETS / "statistics")
    each = 1 if options.public and options.page else MOST_WAITING
    make = partial(engine_of, statistics, folder / DATABASE, each)
    engine = stack.enter_context(closing(Remote(make)))
    name = title_of(resolve_source(options.model))
    sampling = sampler(options.model or str(EMBEDDED))
    coming = replace(NO_MODEL_INFO, name=name, sampling=sampling)
    session = Session(
        engine, database, options.public, folders=statistics, coming=coming, page=options.page
    )
    session.notices.say = lambda notice: tell([notice])
    if options.user is None:
        session.tool_servers.others = other_people
    stack.callback(session.tool_servers.connections.close)
    stack.callback(session.tasks.end_all)
    return session


def engine_of(statistics: Sequence[Path], path: Path, each: int) -> "Local":
    from engine.local import Local
    from storage.database import Database
    from storage.drafting import DraftingStore
    from storage.statistics import open_table

    store = DraftingStore(Database(path, made=True))
    return Local(partial(open_table, statistics), each=each, store=store)


def load(
    session: "Session", loading: Iterator["Progress"], ended: threading.Event, failed: Failed
) -> None:
    """Load the first model, with a progress bar on the terminal. Calls `failed` with the reason if
    that fails, unless the app has `ended`, as nobody needs it then."""
    from app.service.ways import fewer_bits

    try:
        print(follow(loading), file=sys.stderr, flush=True)
        tell(session.models.notices)
        if fewer_bits(session.current.info):
            hint = f"It should answer sooner with --bits 8 or 4: strata {WAYS} measures that."
            tell([hint])
    except StrataError as error:
        if not ended.is_set():
            failed(error)


def report(error: StrataError) -> None:
    """Print why the first model is not loaded. The page shows the reason as well, and can load
    another one."""
    tell([str(error)])


def follow(work: Iterator["Progress"]) -> str:
    """Show the progress of work on the terminal until its end; returns its last text."""
    from tqdm import tqdm

    look = {"bar_format": "{desc} {bar} {percentage:.0f} %", "leave": False, "disable": None}
    text = ""
    with tqdm(total=1.0, delay=0.2, **look) as bar:
        for progress in work:
            text = progress.text
            bar.set_description_str(text, refresh=False)
            bar.update((progress.share or 0.0) - bar.n)
    return text


def tell(notices: Sequence[str]) -> None:
    for notice in notices:
        print(f"strata: {notice}", file=sys.stderr, flush=True)
