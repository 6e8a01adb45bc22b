"""What may import what, and how long a file may be: read from the sources, not from memory."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENGINE, STORAGE = (sorted((ROOT / name).rglob("*.py")) for name in ("engine", "storage"))
APP, BENCH, TRAINING = (
    sorted((ROOT / name).rglob("*.py")) for name in ("app", "bench", "training")
)
HEAVY = {"torch", "transformers", "llama_cpp"}
ENGINE_NEVER = {
    "storage",
    "app",
    "bench",
    "training",
    "tests",
    "gradio",
    "sqlite3",
    "sqlite_utils",
    "plotly",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(source: str) -> set[str]:
    """Every module a source imports, at any depth, in full."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


def packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path.read_text(encoding="utf-8"))}


def test_the_reader_of_imports_sees_them_all() -> None:
    source = "import a.b\nfrom c.d import e\nfrom . import f\ndef g():\n    import h\n"
    assert imports(source) == {"a.b", "c.d", ".", "h"}


def test_there_is_something_to_read() -> None:
    assert len(ENGINE) > 15 and len(STORAGE) > 5 and len(APP) > 5 and len(TRAINING) > 5
    folders = {path.parent.name for path in ENGINE}
    assert folders == {"engine", "backends", "drafters", "hsd"}, "subfolders obey the same rules"


@pytest.mark.parametrize("path", ENGINE, ids=name_of)
def test_the_engine_knows_no_storage_and_no_interface(path: Path) -> None:
    assert not packages(path) & ENGINE_NEVER
    if path.parent.name != "backends":
        assert not packages(path) & HEAVY


@pytest.mark.parametrize("path", STORAGE, ids=name_of)
def test_storage_takes_values_and_errors_from_the_engine_and_nothing_else(path: Path) -> None:
    names = imports(path.read_text(encoding="utf-8"))
    assert {name for name in names if name.split(".")[0] == "engine"} <= {
        "engine.types",
        "engine.errors",
    }
    assert not packages(path) & (HEAVY | {"app", "bench", "training", "gradio", "plotly"})


@pytest.mark.parametrize("path", APP, ids=name_of)
def test_the_app_leaves_torch_and_sql_to_others(path: Path) -> None:
    assert not packages(path) & (HEAVY | {"sqlite3", "sqlite_utils", "bench", "training", "tests"})


@pytest.mark.parametrize("path", BENCH, ids=name_of)
def test_measurements_know_neither_the_interface_nor_the_training(path: Path) -> None:
    found = packages(path) & {"app", "training", "tests", "gradio"}
    # What a page costs, and whether it is true, is measured against the program's own answers.
    assert found == ({"app"} if path.stem in ("page", "truth") else set())


@pytest.mark.parametrize("path", TRAINING, ids=name_of)
def test_the_training_knows_no_interface(path: Path) -> None:
    assert not packages(path) & {"app", "storage", "tests", "gradio"}


@pytest.mark.parametrize("path", [*ENGINE, *STORAGE, *APP, *TRAINING], ids=name_of)
def test_imports_are_absolute(path: Path) -> None:
    assert not [name for name in imports(path.read_text(encoding="utf-8")) if name[0] == "."]


@pytest.mark.parametrize("path", [*ENGINE, *STORAGE, *APP, *TRAINING], ids=name_of)
def test_files_say_what_they_are(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source))
    assert path.stem not in {"utils", "helpers", "manager", "common", "misc"}


def test_the_decode_loop_fits_on_a_screen() -> None:
    tree = ast.parse((ROOT / "engine" / "decode.py").read_text(encoding="utf-8"))
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    assert lengths.pop("decode") <= 70
    assert max(lengths.values()) <= 50


def test_public_functions_and_classes_say_what_they_do() -> None:
    silent = []
    for path in [*ENGINE, *STORAGE]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            named = isinstance(node, ast.FunctionDef | ast.ClassDef)
            if named and not node.name.startswith("_") and not ast.get_docstring(node):
                silent.append(f"{name_of(path)}:{node.name}")
    assert silent == []


REPORT = f"print([name for name in {sorted(HEAVY | ENGINE_NEVER)!r} if name in sys.modules])\n"


def heavy_imports(code: str) -> tuple[str, str]:
    """What a program that ends in REPORT prints, in a fresh interpreter, and its errors."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip(), done.stderr


def test_stacks_are_profiled_planned_and_run_without_torch_gradio_and_sql() -> None:
    modules = [name_of(path)[:-3].replace("/", ".") for path in ENGINE if path.parent.name == "hsd"]
    assert len(modules) > 6
    code = (
        "import sys\n"
        f"import {', '.join(modules)}\n"
        "from engine.backends.toy import ToyBackend, deviating\n"
        "from engine.decode import decode\n"
        "from engine.hsd.family import Family\n"
        "from engine.hsd.measure import Profiler\n"
        "from engine.methods import Databases, drafters_of, method_named\n"
        "from engine.settings import Generation, Sampling\n"
        "target, drafts = ToyBackend(), {'mid': ToyBackend(name='mid', logits=deviating(1.0))}\n"
        "profiler = Profiler(target, drafts, [[97, 98]] * 9, Sampling(0.7))\n"
        "assert len([*profiler.run()]) == 11\n"
        "family = Family(target, drafts, profiler.profile)\n"
        "method = method_named('hd+hsd:mid@3')\n"
        "drafters = drafters_of(method, Databases(), family, Sampling(0.7))\n"
        "generation = Generation(Sampling(0.7), max_tokens=20)\n"
        "assert len([*decode(target, [97, 98], drafters, generation, method.drafting)]) > 2\n"
        f"{REPORT}"
    )
    assert heavy_imports(code) == ("[]", "")


def test_the_engine_runs_without_torch_gradio_and_sql() -> None:
    """Not only by reading: a decode on the toy backend imports none of them."""
    code = (
        "import sys\n"
        "from engine.backends.toy import ToyBackend\n"
        "from engine.decode import decode\n"
        "from engine.methods import METHODS, Databases\n"
        "from engine.settings import Generation, Sampling\n"
        "method = METHODS['hd']\n"
        "drafters = Databases().drafters(method)\n"
        "generation = Generation(Sampling(0.7), max_tokens=20)\n"
        "events = decode(ToyBackend(), [97, 98], drafters, generation, method.drafting)\n"
        "assert len(list(events)) > 2\n"
        f"{REPORT}"
    )
    assert heavy_imports(code) == ("[]", "")
