"""GGUF support: a file that cannot be read yet, a button, and then it can."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.pages import answer, finished, open_tab, running, send, set_number, visit

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.gguf, pytest.mark.soak]

HIDDEN = """
import importlib.machinery, os
finder = importlib.machinery.PathFinder
own = finder.find_spec

def find_spec(name, path=None, target=None):
    hidden = name == "llama_cpp" and not os.path.exists({mark!r})
    return None if hidden else own(name, path, target)

finder.find_spec = find_spec
"""
"""Hides the library from all programs until the file `mark` is there."""
PIP = """
import os, sys, time
assert sys.argv[1] == "install" and sys.argv[2].startswith("llama-cpp-python>=")
for number in range(1, 5):
    print(f"[{{number}}/4] g++ file.cpp", flush=True)
    while not os.path.exists({folder!r} + f"/go-{{number}}"):
        time.sleep(0.05)
if not os.path.exists({compiler!r}):
    sys.exit("CMake Error: CMAKE_CXX_COMPILER not set, after EnableLanguage <img src=x>")
open({mark!r}, "w").close()
"""
"""Stands in for pip: it compiles a file whenever the test lets it."""


class Machine:
    """Where the library is missing: what its pip waits for, and what it brings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = {name: str(folder / name) for name in ("mark", "compiler")}
        (folder / "sitecustomize.py").write_text(HIDDEN.format(**names))
        (folder / "pip.py").write_text(PIP.format(folder=str(folder), **names))

    def go(self, *numbers: int) -> None:
        for number in numbers:
            (self.folder / f"go-{number}").touch()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    (folder := tmp_path / "packages").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return Machine(folder)


@pytest.fixture
def address(machine: Machine, tmp_path: Path) -> Iterator[str]:
    with running(tmp_path / "data") as url:
        yield url


def test_gguf_files_can_be_loaded_once_it_is_set_up(page: Page, machine: Machine) -> None:
    set_number(page, "Max tokens", 30)
    open_tab(page, "Models")
    status = page.locator("#gguf-status")
    page.locator("#models-choice label", has_text="GGUF").click()
    expect(page.locator("#models-need")).to_contain_text("Press Set up GGUF support")
    page.click("#gguf-load")
    expect(status).to_contain_text("Compiling file 1 of 4")
    page.click("#gguf-stop")
    expect(status).to_contain_text("it was stopped")
    expect(page.locator("#gguf-stop")).to_be_hidden()
    assert not (machine.folder / "mark").exists()
    page.click("#gguf-load")
    expect(status).to_contain_text(re.compile(r"Compiling file 1 of 4 · 0:\d\d · 25 %"))
    open_tab(page, "Chat")
    send(page, "Tell me a short story about a boat.")
    finished(page)
    visit(page, page.url)
    open_tab(page, "Models")
    expect(status).to_contain_text("Compiling file 1 of 4")
    machine.go(1, 2)
    expect(status).to_contain_text("Compiling file 3 of 4")
    machine.go(3, 4)
    expect(status).to_contain_text("no C++ compiler")
    expect(status.locator("pre")).to_contain_text("after EnableLanguage <img src=x>")
    (machine.folder / "compiler").touch()
    page.locator("#models-choice label", has_text="GGUF").click()
    page.click("#gguf-load")
    expect(status).to_contain_text("GGUF support is set up")
    expect(page.locator("#gguf-load")).to_be_hidden()
    expect(page.locator("#models-need")).to_contain_text("free on")
    page.click("#models-load")
    expect(page.locator("#models-loaded")).to_contain_text("the compiled core")
    open_tab(page, "Chat")
    send(page, "And then?")
    finished(page)
    assert answer(page)
    open_tab(page, "Models")
    expect(page.locator("#gguf")).to_be_hidden()
