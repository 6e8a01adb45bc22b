"""The wheel: what is in it, and that it works where there is no checkout."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

import strata_chat
from tests.conftest import ROOT
from tests.support.pages import (
    answer,
    end,
    finished,
    guarded,
    open_tab,
    send,
    set_number,
    told,
    visit,
)

pytestmark = pytest.mark.soak

PACKAGES = ("app", "engine", "storage", "assets", "strata_chat")
VERSION = strata_chat.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--no-index", "--wheel-dir", str(folder), str(ROOT)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it was installed, without what it depends on: that is here."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
         "--target", str(folder), str(wheel)],
        check=True,
    )  # fmt: skip
    return folder


def alone(installed: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}


def said(installed: Path, folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(installed / "bin" / "strata"), *words],
        cwd=folder, env=alone(installed), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout


def test_it_holds_the_packages_whole_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"strata_chat-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found == set(tracked.stdout.splitlines())
    for name in ("target/model.safetensors", "target.gguf", "small/tokenizer.json"):
        assert f"assets/models/tiny-chat/{name}" in found
    assert {"assets/catalogue.json", "assets/styles/base.css", "strata_chat/__init__.py"} <= found
    assert any(re.fullmatch(r"assets/statistics/\w+\.statistics\.db", name) for name in found)


def test_the_command_works_in_any_folder(installed: Path, tmp_path: Path) -> None:
    assert said(installed, tmp_path, "--version") == f"strata {VERSION}\n"
    assert said(installed, tmp_path, "--help").startswith("usage: strata [-h] [--model")


@pytest.mark.model
@pytest.mark.browser
def test_it_answers_without_a_checkout(browser: Browser, installed: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(installed / "bin" / "strata"), "--no-browser", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--data-dir", str(tmp_path / "data")],
        cwd=tmp_path, env=alone(installed), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        ready = told(process, "ready at")
        with guarded(browser, ready.split()[-1]) as context:
            page = context.new_page()
            visit(page, ready.split()[-1])
            set_number(page, "Max tokens", 40)
            send(page, "Tell me a short story about a boat.")
            finished(page)
            assert len(answer(page).split()) > 10
            open_tab(page, "Models")
            expect(page.locator("#models-loaded")).to_contain_text("assets/models/tiny-chat/target")
    finally:
        end(process)
