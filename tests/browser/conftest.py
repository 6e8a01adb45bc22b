"""What the tests of a worker share: one program with the embedded model, and one Chromium. Each
test has an owner of its own, so that it finds no conversation, run or setting of another test."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the pages and the programs were doing when a test failed."""
    report = yield
    if report.failed and call.when == "call":
        from tests.support.pages import scene

        with suppress(Exception):
            report.sections.append(("the pages and programs", scene()))
    return report


@pytest.fixture(scope="package")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the program keeps what it stores: below a hidden folder, as is usual."""
    return tmp_path_factory.mktemp("data") / ".local" / "strata"


@pytest.fixture(scope="package")
def address(data: Path) -> Iterator[str]:
    from tests.support.pages import running

    with running(data) as url:
        yield url


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    from tests.support.pages import chromium

    with chromium() as opened:
        yield opened


@pytest.fixture
def owner() -> str:
    return f"test-{uuid4().hex}"


@pytest.fixture
def another(browser: Browser, address: str, owner: str) -> Iterator[Callable[..., BrowserContext]]:
    from tests.support.pages import guarded

    with ExitStack() as stack:

        def open_browser(**options: Any) -> BrowserContext:
            return stack.enter_context(guarded(browser, address, owner, **options))

        yield open_browser


@pytest.fixture
def context(another: Callable[..., BrowserContext]) -> BrowserContext:
    return another()


@pytest.fixture
def page(context: BrowserContext, address: str) -> Page:
    from tests.support.pages import visit

    opened = context.new_page()
    visit(opened, address)
    return opened
