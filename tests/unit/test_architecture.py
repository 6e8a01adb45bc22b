"""What may import what: read from the sources, not from memory."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

ENGINE, STORAGE = (sorted((ROOT / name).rglob("*.py")) for name in ("engine", "storage"))
APP, BENCH, TRAINING = (
    sorted((ROOT / name).rglob("*.py")) for name in ("app", "bench", "training")
)
HEAVY = {"torch", "transformers", "llama_cpp"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
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


SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in [*ENGINE, *STORAGE, *APP, *BENCH, *TRAINING, ROOT / "assets" / "__init__.py"]
}
INTERFACE = {"gradio", "plotly"}
SQL = {"sqlite3", "sqlite_utils"}
RULES = {
    "engine": {"storage", "app", "bench", "training", "tests"} | INTERFACE | SQL,
    "storage": {"app", "bench", "training", "tests"} | INTERFACE | HEAVY,
    "app": {"bench", "training", "tests"} | HEAVY | SQL,
    "app.service": {"app.web", "app.api", "app.http", "app.cli"} | INTERFACE,
    "app.http": {"app.web", "app.api", "app.service", "app.cli"} | INTERFACE,
    "app.api": {"app.web", "app.cli"} | INTERFACE,
    "app.web": {"app.cli"},
    "bench": {"training", "tests", "gradio"},
    "training": {"app", "storage", "tests", "gradio"},
}
"""What a package, and what lies in it, never imports. CONTRIBUTING.md draws the same."""

LOOSENED = {
    # In vLLM's workers torch is there anyway, and the sampler that is mended is made of it.
    "app": {"app.vllm.proposer": {"torch"}},
    # What a page costs, and whether it is true, is measured against the program's own answers.
    # So is what vLLM loads, as it loads it.
    "bench": dict.fromkeys(("bench.page", "bench.truth", "bench.vllm"), {"app"}),
}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@cache
def of_ours(name: str) -> set[str]:
    """The modules of this project that a module imports, at any depth, for types alone too."""
    found = set()
    for node in ast.walk(ast.parse(SOURCES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {one if one in SOURCES else str(node.module) for one in full}
    return found & SOURCES.keys()


def circles(imported: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules that import each other, directly or by way of others."""
    reached = {name: set(found) for name, found in imported.items()}
    for between in reached:
        for name, found in reached.items():
            if between in found:
                reached[name] = found | reached[between]
    within_one = {frozenset({a} | {b for b in reached[a] if a in reached[b]}) for a in reached}
    return [sorted(names) for names in within_one if len(names) > 1]


def test_there_is_something_to_read() -> None:
    assert len(ENGINE) > 40 and len(STORAGE) > 10 and len(APP) > 40 and len(TRAINING) > 5
    folders = {path.parent.name for path in ENGINE}
    assert folders == {"engine", "backends", "drafting", "heads", "hsd", "models", "servers"}


def test_no_package_imports_what_lies_above_it() -> None:
    wrong = []
    for name, path in SOURCES.items():
        found = imports(path.read_text(encoding="utf-8")) | of_ours(name)
        for package in RULES:
            if within(name, package):
                loose = LOOSENED.get(package, {}).get(name, set())
                never = RULES[package] - loose | ({"app"} - loose if package == "bench" else set())
                wrong += [(name, one) for one in found for top in never if within(one, top)]
    assert wrong == []


def test_gradio_is_imported_in_the_web_interface_alone() -> None:
    # app.cli measures what importing it takes; it goes through app.web for that.
    for name, path in SOURCES.items():
        if "gradio" in packages(path):
            assert within(name, "app.web"), name


def test_torch_and_llama_cpp_are_imported_where_models_are_run_or_read() -> None:
    for name, path in SOURCES.items():
        if within(name, "engine") and packages(path) & HEAVY:
            homes = ("engine.backends", "engine.heads", "engine.models")
            assert any(within(name, home) for home in homes), name


def test_storage_takes_values_and_errors_from_the_engine_and_nothing_else() -> None:
    modules = ("types", "errors", "text", "thinking", "native")
    allowed = {"engine", *(f"engine.{module}" for module in modules)}
    for name in SOURCES:
        if within(name, "storage"):
            found = {one for one in of_ours(name) if within(one, "engine")}
            assert found <= allowed, name


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert circles({name: of_ours(name) for name in SOURCES}) == []


def test_the_decode_loop_fits_on_a_screen() -> None:
    tree = ast.parse((ROOT / "engine" / "decode.py").read_text(encoding="utf-8"))
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    assert lengths.pop("decoding") <= 70
    assert max(lengths.values()) <= 50


REPORT = f"print([name for name in {sorted(HEAVY | INTERFACE | SQL)!r} if name in sys.modules])\n"


def heavy_imports(code: str) -> tuple[str, str]:
    """What a program that ends in REPORT prints, in a fresh interpreter, and its errors."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip(), done.stderr


def test_stacks_are_profiled_planned_and_run_without_torch_gradio_and_sql() -> None:
    modules = [name_of(path)[:-3].replace("/", ".") for path in ENGINE if path.parent.name == "hsd"]
    assert len(modules) > 4
    code = (
        "import sys\n"
        f"import {', '.join(modules)}\n"
        "from tests.support.toy import ToyBackend, deviating\n"
        "from engine.decode import decode\n"
        "from engine.hsd.family import Family\n"
        "from engine.hsd.measure import Profiler\n"
        "from engine.drafting.databases import Databases\n"
        "from engine.methods import method_named\n"
        "from engine.settings import Generation, Sampling\n"
        "target, drafts = ToyBackend(), {'mid': ToyBackend(name='mid', logits=deviating(1.0))}\n"
        "profiler = Profiler(target, drafts, [[97, 98]] * 9, Sampling(0.7))\n"
        "assert len([*profiler.run()]) == 20\n"
        "family = Family(target, drafts, profiler.profile)\n"
        "method = method_named('hd+hsd:mid@3')\n"
        "drafters = method.drafters(Databases(), family, Sampling(0.7))\n"
        "generation = Generation(Sampling(0.7), max_tokens=20)\n"
        "assert len([*decode(target, [97, 98], drafters, generation, method.drafting)]) > 2\n"
        f"{REPORT}"
    )
    assert heavy_imports(code) == ("[]", "")


@pytest.mark.parametrize(
    "code",
    [
        "import app.cli, app.api.routes, app.service.session, app.service.models",
        "import app.vllm.proposer",
        "from app.cli import main\ntry: main(['vllm', '--help'])\nexcept SystemExit: pass",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str) -> None:
    heavy = sorted(HEAVY | INTERFACE | {"huggingface_hub", "vllm"})
    report = f"import sys\nprint([name for name in {heavy!r} if name in sys.modules])"
    said, errors = heavy_imports(f"{code}\n{report}")
    assert said.splitlines()[-1] == "[]" and errors == ""
    assert ("--tensor-parallel" in said) == ("--help" in code)
