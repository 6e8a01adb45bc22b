"""The program with the embedded model, a browser, and a page of the one in the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a busy machine a page can be late for a test, which then runs once more. The summary names
    it: what fails now and then may be a fault of the program all the same."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the program keeps what it stores."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def address(data: Path) -> Iterator[str]:
    """The running program, with the embedded model."""
    from tests.support.pages import end, start

    process, url, _ = start(data)
    yield url
    end(process)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from tests.support.pages import chromium

    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """A page of a new browser. It must raise no error, open no dialog and ask nobody else."""
    from tests.support.pages import PATIENCE, visit

    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(PATIENCE)
    problems: list[str] = []
    elsewhere: list[str] = []
    opened = context.new_page()
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))

    def asked(request: Any) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            elsewhere.append(request.url)

    opened.on("requestfinished", asked)
    visit(opened, address)
    yield opened
    context.close()
    assert problems == [], "the page raised errors or dialogs"
    assert elsewhere == [], "the page reached beyond its own server"
