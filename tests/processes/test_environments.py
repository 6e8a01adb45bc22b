"""The start in odd environments: a page, or one sentence that says what is wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest

from tests.conftest import ROOT

START = "import sys; from app.cli import main; sys.exit(main(sys.argv[1:]))"
NO_USER = """
import pwd
def getpwuid(uid):
    raise KeyError(uid)
pwd.getpwuid = getpwuid
"""
DEAD = "http://127.0.0.1:9"
Environment = dict[str, str | None]


def started(
    folder: Path | None, environment: Environment, *options: str, before: str = ""
) -> tuple[str, str, int | None]:
    """What the program printed, first on its output, then as errors; and its status once it has
    ended, None if it served its page."""
    given = {**os.environ, **environment}
    data = ["--data-dir", str(folder)] if folder is not None else []
    process = subprocess.Popen(
        [sys.executable, "-c", before + START, "--no-browser", "--port", "0", *data, *options],
        cwd=ROOT,
        env={name: value for name, value in given.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stdout is not None and process.stderr is not None
    with process:
        said = next((line for line in process.stdout if "ready at" in line), "")
        if not said:
            return "", process.stderr.read(), process.wait(60)
        try:
            address = said.split()[-1]
            with build_opener(ProxyHandler({})).open(address) as answer:
                assert answer.status == 200
        finally:
            process.terminate()
        errors = process.stderr.read()
        assert process.wait(60) == 0
        return said, errors, None


@pytest.mark.soak
@pytest.mark.parametrize(
    ("environment", "options", "before"),
    [
        ({"HTTP_PROXY": DEAD, "HTTPS_PROXY": DEAD}, (), ""),
        ({"ALL_PROXY": "socks5://127.0.0.1:9"}, (), ""),
        ({"all_proxy": "socks://127.0.0.1:9", "no_proxy": "[::1]"}, (), ""),
        ({"SSL_CERT_FILE": "/there/is/none"}, (), ""),
        ({"GRADIO_SERVER_PORT": "x", "GRADIO_WATCH_DIRS": "/tmp", "GRADIO_SHARE": "true"}, (), ""),
        ({"HOME": None}, (), NO_USER),
        ({"HOME": "/proc/1"}, (), ""),
        ({"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}, (), ""),
        ({"HTTP_PROXY": DEAD}, ("--host", "::1"), ""),
        ({}, ("--host", "[::1]"), ""),
        ({}, ("--host", "::"), ""),
    ],
    ids=str,
)
def test_the_page_opens(
    tmp_path: Path, environment: Environment, options: tuple[str, ...], before: str
) -> None:
    folder = tmp_path / "odd %41#?é日\n" / "data"
    said, errors, status = started(folder, environment, *options, before=before)
    assert status is None, errors
    assert "Traceback" not in errors and said.startswith("Strata is ready at http://")


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize(
    ("environment", "options", "before", "words"),
    [
        ({"HOME": None, "XDG_DATA_HOME": None}, (), NO_USER, "Name one with --data-dir"),
        ({"HOME": "/proc/1", "XDG_DATA_HOME": None}, (), "", "Choose one you can write to"),
        ({"HF_HUB_DOWNLOAD_TIMEOUT": "soon"}, (), "", "invalid literal for int.*'soon'"),
        ({}, ("--data-dir", ""), "", "--data-dir: It is empty"),
        ({}, ("--data-dir", sys.executable), "", "cannot be used"),
    ],
    ids=str,
)
def test_what_prevents_the_start_is_said_in_a_sentence(
    environment: Environment, options: tuple[str, ...], before: str, words: str
) -> None:
    _, errors, status = started(None, environment, *options, before=before)
    assert status == 2 and "Traceback" not in errors
    assert re.search(words, errors.splitlines()[-1])
