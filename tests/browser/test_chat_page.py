"""The program as people meet it: a real server, the embedded model, a real browser."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.conftest import ROOT

pytestmark = pytest.mark.browser
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--mute-audio"]
HOSTILE = (
    "<img src=x onerror=alert(1)> ${alert(2)} {{constructor.constructor('alert(3)')()}} "
    "</span></div><script>alert(4)</script> ![](http://198.51.100.7/remote.png)"
)
PATIENCE = 60_000


def start(folder: Path, *more: str) -> tuple[subprocess.Popen[str], str, str]:
    """The running program, its address, and what it printed until it was ready."""
    command = [sys.executable, "app.py", "--no-browser", "--port", "0", "--data-dir", str(folder)]
    process = subprocess.Popen(
        [*command, *more], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if found := re.search(r"ready at (http\S+)", line):
            return process, found[1], said
    raise AssertionError(f"The program ended with {process.wait()}:\n{said}")


def told(process: subprocess.Popen[str], words: str) -> str:
    """The next line with these words that the program prints."""
    assert process.stdout is not None
    return next(line for line in process.stdout if words in line)


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait(20)
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process, url, _ = start(tmp_path_factory.mktemp("data"))
    yield url
    end(process)


def chromium() -> str:
    """The browser that is installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    assert found, "These tests need Chromium: apt-get install chromium."
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE)
    opened.problems = []  # type: ignore[attr-defined]
    opened.elsewhere = []  # type: ignore[attr-defined]
    problems: list[str] = opened.problems  # type: ignore[attr-defined]
    elsewhere: list[str] = opened.elsewhere  # type: ignore[attr-defined]
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


def visit(page: Page, address: str) -> None:
    page.goto(address)
    expect(page.locator("#box textarea")).to_be_editable(timeout=PATIENCE)
    loaded(page)
    page.wait_for_timeout(1500)


def loaded(page: Page) -> None:
    """The model is there, and the page shows it."""
    expect(page.locator("#header .facts")).to_contain_text("context", timeout=PATIENCE)


def send(page: Page, text: str) -> None:
    page.fill("#box textarea", text)
    page.click("#send")
    expect(page.locator("#tokens .turn.said").last).to_have_text(text, timeout=PATIENCE)


def finished(page: Page) -> None:
    last = page.locator("#tokens .turn").last
    expect(last).to_have_class(re.compile("answered"), timeout=PATIENCE)
    expect(page.locator("#send")).to_be_visible(timeout=PATIENCE)
    expect(page.locator("#again")).to_be_enabled(timeout=PATIENCE)


def answer(page: Page) -> str:
    return page.locator("#tokens .turn.answered").last.inner_text()


def open_tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def open_advanced(page: Page) -> None:
    """Show the settings that a chat rarely needs."""
    open_tab(page, "Settings")
    expect(page.get_by_label("Fixed", exact=True)).to_be_hidden()
    page.locator("#advanced button").first.click()


def set_number(page: Page, label: str, value: int) -> None:
    open_tab(page, "Settings")
    page.get_by_label(label, exact=True).first.fill(str(value))
    page.get_by_label(label, exact=True).first.press("Tab")
    open_tab(page, "Chat")


def test_a_message_is_answered_token_by_token_and_found_again(page: Page, address: str) -> None:
    send(page, "Tell me a short story about a boat.")
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator("#tokens .turn.answered .tok").nth(5)).to_be_attached()
    early = len(answer(page))
    finished(page)
    text = answer(page)
    assert len(text) > early > 0, "the answer grew while it was shown"
    kinds = page.locator("#tokens .turn.answered .tok:not(.k-target)")
    assert kinds.count() > 5, "drafted tokens are marked"
    colours = kinds.evaluate_all("all => all.map(n => getComputedStyle(n).textDecorationColor)")
    assert len(set(colours)) >= 2 and "rgba(0, 0, 0, 0)" not in colours
    kinds.first.hover()
    assert "position" in (kinds.first.get_attribute("title") or "")
    expect(page.locator("#figures")).to_contain_text("Tokens per step")
    expect(page.locator("#figures .ribbon b").first).to_be_attached()
    expect(page.locator("#conversations label.selected")).to_contain_text("Tell me a short story")
    page.click("#prove")
    expect(page.locator("#proof .same")).to_contain_text("Identical", timeout=PATIENCE)
    finished(page)
    visit(page, address)
    expect(page.locator("#tokens .turn.said")).to_have_text("Tell me a short story about a boat.")
    assert answer(page) == text, "a reload shows the conversation as it was"


def test_the_markdown_view_shows_the_same_conversation(page: Page) -> None:
    send(page, "Say something **bold** about `code`.")
    finished(page)
    page.locator("#view label", has_text="Markdown").click()
    expect(page.locator("#markdown strong")).to_have_text("bold")
    expect(page.locator("#tokens")).to_be_hidden()
    page.locator("#view label", has_text="Tokens").click()
    expect(page.locator("#tokens .turn.said")).to_contain_text("**bold**")


def test_stop_regenerate_and_edit(page: Page) -> None:
    set_number(page, "Max tokens", 1500)
    send(page, "Tell me a very long story about the sea.")
    expect(page.locator("#tokens .turn.answered .tok").nth(30)).to_be_attached()
    page.click("#stop")
    finished(page)
    stopped = answer(page)
    expect(page.locator("#figures")).to_contain_text("stopped")
    set_number(page, "Max tokens", 40)
    page.click("#again")
    expect(page.locator("#figures")).not_to_contain_text("stopped")
    finished(page)
    assert answer(page) != stopped
    assert page.locator("#tokens .turn.answered").count() == 1
    page.click("#edit")
    expect(page.locator("#box textarea")).to_have_value("Tell me a very long story about the sea.")
    send(page, "Tell me about hills instead.")
    finished(page)
    expect(page.locator("#tokens .turn.said")).to_have_text("Tell me about hills instead.")


def test_an_empty_message_gets_a_notice_and_a_long_one_is_not_lost(page: Page) -> None:
    page.click("#send")
    expect(page.locator(".toast-body")).to_contain_text("message is empty")
    words = "word " * 3000
    page.fill("#box textarea", words)
    page.click("#send")
    expect(page.locator(".toast-body").last).to_contain_text("tokens, and")
    expect(page.locator("#box textarea")).to_have_value(words)


def test_hostile_text_is_inert_wherever_it_is_shown(page: Page) -> None:
    set_number(page, "Max tokens", 20)
    send(page, HOSTILE)
    finished(page)
    expect(page.locator("#tokens .turn.said")).to_have_text(HOSTILE)
    page.locator("#view label", has_text="Markdown").click()
    page.wait_for_timeout(800)
    assert page.locator("#markdown script").count() == 0
    assert page.locator("#markdown [onerror]").count() == 0
    page.click("#rename")
    page.fill("#title textarea, #title input", HOSTILE[:150])
    page.click("#title-save")
    expect(page.locator("#conversations label.selected")).to_contain_text("<img src=x")
    page.fill("#search textarea, #search input", "onerror")
    expect(page.locator("#conversations label")).to_have_count(1)
    open_tab(page, "Databases")
    expect(page.locator("#tier-model")).to_contain_text("n-grams")
    page.wait_for_timeout(500)


def test_conversations_are_made_renamed_and_deleted_after_asking(page: Page) -> None:
    set_number(page, "Max tokens", 20)
    send(page, "A conversation to delete")
    finished(page)
    expect(page.locator("#conversations label.selected")).to_have_text("A conversation to delete")
    before = page.locator("#conversations label").count()
    page.click("#new")
    expect(page.locator("#empty")).to_be_visible()
    page.locator("#conversations label", has_text="A conversation to delete").click()
    expect(page.locator("#tokens .turn.said")).to_have_text("A conversation to delete")
    page.click("#rename")
    page.fill("#title textarea, #title input", "Short-lived")
    page.click("#title-save")
    expect(page.locator("#conversations label.selected")).to_have_text("Short-lived")
    page.click("#delete")
    page.click("#no")
    expect(page.locator("#conversations label")).to_have_count(before)
    page.click("#delete")
    page.click("#yes")
    expect(page.locator("#conversations label")).to_have_count(before - 1)
    expect(page.locator("#empty")).to_be_visible()


def test_compare_is_identical_and_draws_its_charts(page: Page) -> None:
    set_number(page, "Max tokens", 60)
    open_advanced(page)
    # The measured budget rests where drafts do not pay, as beside a browser on two cores.
    page.get_by_label("Fixed", exact=True).check()
    # Some seeds end the answer after a few words, with hardly anything drafted.
    page.get_by_label("A new seed for each answer").uncheck()
    open_tab(page, "Compare")
    page.click("#compare")
    expect(page.locator("#verdict .same")).to_contain_text("Identical", timeout=PATIENCE)
    expect(page.locator("#verdict .same")).to_contain_text("3 of 3 repeats")
    plots = page.locator(".js-plotly-plot:visible")
    expect(plots).to_have_count(6)
    titles = " ".join(plots.locator(".gtitle").all_text_contents())
    for title in ("Speedup", "Tokens over time", "Tokens per step", "Where the tokens came from"):
        assert title in titles
    assert page.locator("#compare-fast .tok:not(.k-target)").count() > 3
    open_tab(page, "Diagnostics")
    expect(page.locator("#runs")).to_contain_text("compare")
    expect(page.locator(".js-plotly-plot:visible")).to_have_count(7)


def test_what_forwards_cost_is_drawn_and_can_be_measured_again(page: Page) -> None:
    set_number(page, "Max tokens", 40)
    send(page, "Tell me about a garden.")
    finished(page)
    open_tab(page, "Diagnostics")
    plot = page.locator(".js-plotly-plot:visible").last
    expect(plot.locator(".gtitle")).to_have_text("What a step costs, and how much was drafted")
    expect(plot.locator(".bars .point").first).to_be_attached()
    expect(plot.locator(".scatterlayer .js-line").first).to_be_attached()
    line = page.locator("#costs")
    expect(line).to_contain_text("Cost of a step: measured")
    page.click("#measure")
    expect(line).to_contain_text("Measuring")
    expect(line).to_contain_text("Cost of a step: measured", timeout=PATIENCE)
    expect(plot.locator(".bars .point").first).to_be_attached()


def test_the_databases_tab_shows_what_evidence_was_worth(page: Page) -> None:
    set_number(page, "Max tokens", 60)
    send(page, "Say the same thing twice, then twice again.")
    finished(page)
    open_tab(page, "Databases")
    plot = page.locator(".js-plotly-plot:visible")
    expect(plot).to_have_count(1)
    expect(plot.locator(".gtitle")).to_have_text("How much a match is trusted")
    expect(plot.locator(".scatterlayer .point").first).to_be_attached()
    before = plot.locator(".scatterlayer .point").count()
    assert before > 0
    page.get_by_role("button", name="Empty Past answers").click()
    page.locator(".asking:visible").get_by_role("button", name="Empty it").click()
    expect(plot.locator(".scatterlayer .point")).to_have_count(0)


def test_the_budget_is_kept_with_the_conversation(page: Page, address: str) -> None:
    set_number(page, "Max tokens", 10)
    send(page, "A conversation with a fixed budget")
    finished(page)
    open_advanced(page)
    expect(page.get_by_label("Adaptive", exact=True)).to_be_checked()
    page.get_by_label("Fixed", exact=True).check()
    page.wait_for_timeout(800)
    visit(page, address)
    open_advanced(page)
    expect(page.get_by_label("Fixed", exact=True)).to_be_checked()


def test_dark_and_narrow(page: Page) -> None:
    page.click("#theme")
    assert page.evaluate("document.body.classList.contains('dark')")
    page.set_viewport_size({"width": 420, "height": 800})
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")
    expect(page.locator("#send")).to_be_in_viewport()


def test_no_event_is_an_api_for_others(page: Page, address: str) -> None:
    reply = page.request.get(f"{address}gradio_api/info")
    assert not reply.ok or json.loads(reply.text())["named_endpoints"] == {}
    policy = page.request.get(address).headers["content-security-policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy


def test_an_answer_outlives_a_kill(browser: Browser, tmp_path: Path) -> None:
    process, url, _ = start(tmp_path)
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    visit(page, url)
    set_number(page, "Max tokens", 1500)
    send(page, "Tell me a long story about a lighthouse.")
    expect(page.locator("#tokens .turn.answered .tok").nth(40)).to_be_attached()
    page.wait_for_timeout(1300)
    process.kill()
    process.wait(20)
    assert process.stdout is not None
    process.stdout.close()
    page.close()
    process, url, _ = start(tmp_path)
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    visit(page, url)
    page.locator("#conversations label").first.click()
    expect(page.locator("#tokens .turn.said")).to_have_text(
        "Tell me a long story about a lighthouse."
    )
    expect(page.locator("#tokens .turn.answered .tok").nth(20)).to_be_attached()
    page.close()
    end(process)


def test_an_import_is_opened_and_its_upload_deleted(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / ".local" / "strata"
    process, url, _ = start(folder)
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    visit(page, url)
    message = {"role": "user", "content": "A question from elsewhere"}
    contents = {"chat.json": json.dumps([message]), "deep.json": "[" * 100_000}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
        page.locator(".tools input[type=file]").set_input_files(tmp_path / name)
        if name == "chat.json":
            expect(page.locator("#tokens .turn.said")).to_have_text(message["content"])
        else:
            expect(page.locator(".toast-body")).to_contain_text("too deeply")
    page.close()
    end(process)
    assert (folder / "uploads").is_dir()
    left = [path for path in (folder / "uploads").rglob("*") if path.is_file()]
    assert [path for path in left if path.stat().st_size] == []


def test_guests_log_in_and_are_kept_apart(browser: Browser, tmp_path: Path) -> None:
    process, url, said = start(tmp_path, "--host", "0.0.0.0")
    found = re.search(r"'guest' with the password (\S+)", said)
    assert found, said
    url = url.replace("0.0.0.0", "127.0.0.1")
    titles = []
    for text in ("The first guest's words", "The second guest's words"):
        context = browser.new_context()
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(url)
        page.get_by_label("username").fill("guest")
        page.get_by_label("password").fill(found[1])
        page.get_by_role("button", name="Login").click()
        loaded(page)
        page.wait_for_timeout(1500)
        expect(page.get_by_role("tab", name="Databases")).to_have_count(0)
        open_tab(page, "Diagnostics")
        expect(page.locator("#costs")).to_contain_text("Cost of a step")
        expect(page.locator("#measure")).to_have_count(0)
        set_number(page, "Max tokens", 10)
        send(page, text)
        finished(page)
        page.wait_for_timeout(500)
        titles.append(page.locator("#conversations label").all_inner_texts())
        page.click("#log-out")
        expect(page.get_by_label("password")).to_be_visible(timeout=PATIENCE)
        context.close()
    assert titles == [["The first guest's words"], ["The second guest's words"]]
    end(process)


def run_to_its_end(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "app.py", "--no-browser", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_busy_port_a_missing_model_and_a_bad_folder_are_explained(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, words = run_to_its_end("--port", port, "--data-dir", str(tmp_path))
        assert code == 2 and port in words and "--port" in words and "Traceback" not in words
    code, words = run_to_its_end("--model", "./no/such/model", "--data-dir", str(tmp_path))
    assert code == 2 and "./no/such/model" in words and "Traceback" not in words
    (tmp_path / "file").write_text("not a folder")
    code, words = run_to_its_end("--data-dir", str(tmp_path / "file"))
    assert code == 2 and "file" in words and "Traceback" not in words


def test_a_damaged_database_is_put_aside_and_said_in_the_page(
    browser: Browser, tmp_path: Path
) -> None:
    (tmp_path / "strata.db").write_bytes(b"this is no database " * 500)
    process, url, said = start(tmp_path)
    assert "was damaged" in said
    page = browser.new_page()
    page.goto(url)
    expect(page.locator("#header .notice")).to_contain_text("was damaged", timeout=PATIENCE)
    page.close()
    end(process)


def test_help_is_instant() -> None:
    began = time.perf_counter()
    subprocess.run([sys.executable, "app.py", "--help"], cwd=ROOT, check=True, capture_output=True)
    assert time.perf_counter() - began < 2
