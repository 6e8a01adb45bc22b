"""Shared fixtures: a database in memory, the toy backend, the embedded model (mark `model`), the
same as GGUF files (mark `gguf`)."""

import gc
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from random import Random
from typing import TYPE_CHECKING, NoReturn

import pytest
import sqlite_utils

import app
import bench
import engine
import storage
import training
from app.service.draft_models import LEVELS
from app.web.gradio_import import skip_stubs
from engine.settings import Runtime
from storage.database import Database

if TYPE_CHECKING:
    from tests.support.toy import ToyBackend

pytest.register_assert_rewrite("tests.support")
skip_stubs()
ROOT = Path(__file__).resolve().parent.parent
EMBEDDED = ROOT / "assets" / "models" / "tiny-chat" / "target"
os.environ["OMP_NUM_THREADS"] = "1"
"""Read by torch when it is imported. Two threads would wait for each other whenever something else
runs beside the tests."""
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(ROOT / "tests")
"""Read by HTTP clients. No certificates are there: no test asks another machine, and to read those
of this one takes each client 30 ms."""
QUICK = {"unit", "service"}
"""The layers that `make quick` runs."""
HEAVY = {"torch", "transformers", "llama_cpp", "gradio", "playwright"}
"""What takes long to import, and has no place in these layers."""
IMPORTED = set[str]()
"""What was imported of these by now."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run what `make test` leaves out")
    parser.addoption("--device", default="cpu", help="where the embedded models are loaded")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Names bytes after their parameter. Their content may hold the time of day (gzip, zip), and
    then two workers would collect different tests."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Either what `make test` runs, or what it leaves to `make soak`. The order is another one each
    time; folders stay together, since the tests of one share what takes long to start. Those of the
    browser come first: each takes seconds, and at the end two workers would start a program each,
    and one would wait for the other."""
    from tests.support import grids

    late = grids.left_out(items)
    other = [item for item in items if (item in late) != config.getoption("--soak")]
    config.hook.pytest_deselected(items=other)
    folders = list(dict.fromkeys(item.path.parent for item in items))
    folders.sort(key=lambda folder: folder.name != "browser")
    items[:] = sorted(
        (item for item in items if (item in late) == config.getoption("--soak")),
        key=lambda item: folders.index(item.path.parent),
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    seed = config.getoption("randomly_seed", None)
    if seed is not None:
        terminalreporter.write_line(f"The same order again: --randomly-seed={seed}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where other layers are run, every module is imported now: one that is first imported while a
    test patches another would keep the patch."""
    if any(item.path.parent.name not in QUICK for item in session.items):
        for package in (storage, engine, app, bench, training):
            for module in walk_packages(package.__path__, f"{package.__name__}."):
                if not module.name.endswith("__main__"):
                    import_module(module.name)
    IMPORTED.update(HEAVY & sys.modules.keys())


@pytest.fixture(scope="module", autouse=True)
def what_there_is_stays() -> None:
    """Whoever collects garbage, as the engine does for each model that it loads, need not look
    through all that earlier tests left: without this it takes most of the time of later ones."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def libraries(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test of a quick layer imports what takes long."""
    yield
    if fresh := HEAVY & sys.modules.keys() - IMPORTED:
        assert request.path.parent.name not in QUICK, "this test belongs into another layer"
        IMPORTED.update(fresh)


@pytest.fixture(autouse=True)
def same_seeds() -> Iterator[None]:
    """Seeds are drawn the same in each run: no model ends an answer early now and then. (A test's
    own changes end before its other fixtures do, so this is not one of them.)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secrets.randbelow", Random(0).randrange)
        yield


@pytest.fixture(autouse=True)
def no_draft_models_of_other_tests() -> Iterator[None]:
    """Which draft models were ever loaded is known to the whole program, and orders its tables."""
    LEVELS.clear()
    yield


@pytest.fixture(scope="session", autouse=True)
def nothing_remembered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was found out about this machine before, and by the tests, stays apart."""
    with pytest.MonkeyPatch.context() as patched:
        file = tmp_path_factory.mktemp("cache") / "fast_path.json"
        patched.setattr("engine.backends.fast_path.results", lambda: file)
        yield


@pytest.fixture(scope="session", autouse=True)
def migrations_are_split_once() -> Iterator[None]:
    """sqlite_utils cuts a script into statements in more time than SQLite takes to run them, again
    for each of some thousand databases. Where a release of it has no such function, it is slow."""
    name = "_iter_complete_sql_statements"
    split = getattr(sqlite_utils.db, name, iter)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sqlite_utils.db, name, cache(lambda sql: tuple(split(sql))), raising=False)
        yield


@pytest.fixture
def db() -> Iterator[Database]:
    with Database() as database:
        yield database


@pytest.fixture
def toy() -> "ToyBackend":
    from tests.support.toy import ToyBackend

    return ToyBackend()


@pytest.fixture(scope="session")
def load_embedded(pytestconfig: pytest.Config):
    """Loads one of the embedded models by name: in float32 on a processor, in bfloat16 on a GPU."""
    from engine.models.load_transformers import load_transformers

    device = pytestconfig.getoption("--device")
    dtype = "float32" if device == "cpu" else "bfloat16"
    runtime = Runtime(dtype=dtype, device=device)
    return lambda name: load_transformers(str(EMBEDDED.parent / name), runtime)


@pytest.fixture(scope="session")
def embedded(load_embedded):
    """The embedded target, loaded once. Tests that use it carry the mark `model`."""
    return load_embedded("target")


@pytest.fixture(scope="session")
def embedded_drafts(load_embedded):
    """The draft models that are embedded beside the target, by name, the smallest first."""
    return {name: load_embedded(name) for name in ("small", "mid")}


@pytest.fixture(scope="session")
def gguf_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The embedded family in files of three types: "target-F16", "small-F32", "mid-Q8_0", ...

    They are made from the folders, as the shipped ones were.
    Tests that use it, or what follows, carry the mark `gguf`.
    """
    import engine.models.gguf  # noqa: F401  from here on the library does not print
    from training.gguf import quantize, write_model

    folder, files = tmp_path_factory.mktemp("gguf"), dict[str, Path]()
    for name in ("target", "mid", "small"):
        exact = files[f"{name}-F16"] = folder / f"{name}.gguf"
        write_model(EMBEDDED.parent / name, exact)
        for kind in ("F32", "Q8_0"):
            files[f"{name}-{kind}"] = folder / f"{name}-{kind}.gguf"
            quantize(exact, files[f"{name}-{kind}"], kind, 1)
    return files


@pytest.fixture(scope="session")
def gguf_target(gguf_files):
    """The embedded target in float32 behind llama.cpp, on one thread, loaded once."""
    from engine.models.loaders import load

    return load(str(gguf_files["target-F32"]), Runtime(threads=1))


@pytest.fixture(scope="session")
def gguf_drafts(gguf_files):
    """The draft models beside it, by name, the smallest first."""
    from engine.models.loaders import load

    return {
        name: load(str(gguf_files[f"{name}-F32"]), Runtime(threads=1)) for name in ("small", "mid")
    }


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom the system does not know."""

    def unknown(_: object) -> NoReturn:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
