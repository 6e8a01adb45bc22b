"""The program as people meet it: a real server, the embedded model, a real browser."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.conftest import ROOT
from tests.support.pages import (
    LONG,
    PATIENCE,
    act,
    answer,
    choose,
    end,
    entry,
    finished,
    long_answer,
    open_advanced,
    open_tab,
    pictures,
    send,
    set_number,
    settings,
    settled,
    start,
    stored,
    until,
    visit,
)

pytestmark = pytest.mark.browser
HOSTILE = (
    "<img src=x onerror=alert(1)> ${alert(2)} {{constructor.constructor('alert(3)')()}} "
    "</span></div><script>alert(4)</script> ![](http://198.51.100.7/remote.png)"
)


def test_a_message_is_answered_token_by_token_and_found_again(page: Page, address: str) -> None:
    # One seed, whose answer is long enough, and drafts whether they pay beside a browser or not.
    open_advanced(page)
    page.get_by_label("Fixed", exact=True).check()
    page.get_by_label("A new seed for each answer").uncheck()
    open_tab(page, "Chat")
    send(page, "Tell me a short story about a boat.")
    finished(page)
    text = answer(page)
    kinds = page.locator("#tokens .turn.answered .tok:not(.k-target)")
    assert kinds.count() > 5, "drafted tokens are marked"
    colours = kinds.evaluate_all("all => all.map(n => getComputedStyle(n).textDecorationColor)")
    assert len(set(colours)) >= 2 and "rgba(0, 0, 0, 0)" not in colours
    kinds.first.hover()
    expect(page.locator("#tokens .inspector")).to_contain_text("position")
    expect(page.locator("#figures")).to_contain_text("Tokens per step")
    expect(page.locator("#figures .ribbon b").first).to_be_attached()
    expect(page.locator("#conversations .current .title")).to_contain_text("Tell me a short story")
    act(page, "Prove it")
    expect(page.locator("#proof .same")).to_contain_text("Identical")
    finished(page)
    visit(page, address)
    expect(page.locator("#tokens .turn.said")).to_have_text("Tell me a short story about a boat.")
    assert answer(page) == text, "a reload shows the conversation as it was"


def test_stop_regenerate_and_edit(page: Page) -> None:
    long_answer(page)
    expect(page.locator("#tokens .turn.answered .tok").nth(60)).to_be_attached()
    page.click("#stop")
    finished(page)
    stopped = answer(page)
    expect(page.locator("#figures")).to_contain_text("stopped")
    set_number(page, "Max tokens", 40)
    act(page, "Regenerate")
    expect(page.locator("#figures")).not_to_contain_text("stopped")
    finished(page)
    assert answer(page) != stopped
    assert page.locator("#tokens .turn.answered").count() == 1
    act(page, "Edit", "said")
    expect(page.locator("#box textarea")).to_have_value(LONG)
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
    pictures(page)
    assert page.locator("#tokens .turns :is(script, [onerror])").count() == 0
    choose(page, "<img src=x", "Rename")
    page.locator("#conversations .line").fill(f"Renamed: {HOSTILE[:140]}")
    page.keyboard.press("Enter")
    expect(page.locator("#conversations .current .title")).to_contain_text("Renamed: <img src=x")
    page.fill("#search textarea, #search input", "onerror")
    expect(page.locator("#conversations .title")).to_have_count(1)
    open_tab(page, "Databases")
    expect(page.locator("#tier-model")).to_contain_text("n-grams")
    pictures(page)


def test_conversations_are_made_renamed_and_deleted_and_brought_back(page: Page) -> None:
    set_number(page, "Max tokens", 20)
    send(page, "A conversation to delete")
    finished(page)
    expect(page.locator("#conversations .current .title")).to_have_text("A conversation to delete")
    before = page.locator("#conversations .title").count()
    page.click("#new")
    expect(page.locator("#empty")).to_be_visible()
    page.locator("#conversations .title", has_text="A conversation to delete").click()
    expect(page.locator("#tokens .turn.said")).to_have_text("A conversation to delete")
    entry(page, "A conversation to delete").locator(".open").focus()
    page.keyboard.press("F2")
    page.locator("#conversations .line").fill("Short-lived")
    page.keyboard.press("Enter")
    expect(page.locator("#conversations .current .title")).to_have_text("Short-lived")
    choose(page, "Short-lived", "Delete")
    expect(page.locator("#conversations .title")).to_have_count(before - 1)
    expect(page.locator("#empty")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#conversations .title")).to_have_count(before)
    expect(page.locator("#tokens .turn.said")).to_have_text("A conversation to delete")


def test_compare_is_identical_and_draws_its_charts(page: Page) -> None:
    set_number(page, "Max tokens", 60)
    open_advanced(page)
    # The measured budget rests where drafts do not pay, as beside a browser on two cores.
    page.get_by_label("Fixed", exact=True).check()
    # Some seeds end the answer after a few words, with hardly anything drafted.
    page.get_by_label("A new seed for each answer").uncheck()
    open_tab(page, "Compare")
    page.click("#compare")
    expect(page.locator("#verdict .same")).to_contain_text("Identical")
    expect(page.locator("#verdict .same")).to_contain_text("3 of 3 repeats")
    plots = page.locator(".js-plotly-plot:visible")
    expect(plots).to_have_count(6)
    # A title says what was found, an axis what is drawn.
    axes = plots.locator(".xtitle, .ytitle").all_text_contents()
    assert {"seconds of decoding", "tokens", "tokens from one step", "% of tokens"} <= set(axes)
    titles = plots.locator(".gtitle").all_text_contents()
    assert len(titles) == 6 and all(titles), titles
    assert page.locator("#compare-fast .tok:not(.k-target)").count() > 3
    open_tab(page, "Diagnostics")
    expect(page.locator("#runs")).to_contain_text("Compare")
    expect(page.locator(".js-plotly-plot:visible")).to_have_count(9)


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
    expect(line).to_contain_text("Cost of a step: measured")
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


def test_the_budget_is_kept_with_the_conversation(page: Page, address: str, data: Path) -> None:
    set_number(page, "Max tokens", 10)
    send(page, "A conversation with a fixed budget")
    finished(page)
    open_advanced(page)
    expect(page.get_by_label("Adaptive", exact=True)).to_be_checked()
    before = settings(data / "strata.db")
    page.get_by_label("Fixed", exact=True).check()
    until(page, lambda: settings(data / "strata.db") != before)
    visit(page, address)
    open_advanced(page)
    expect(page.get_by_label("Fixed", exact=True)).to_be_checked()


def test_dark_and_narrow(page: Page) -> None:
    page.click("#theme")
    assert page.evaluate("document.body.classList.contains('dark')")
    page.set_viewport_size({"width": 420, "height": 800})
    page.wait_for_function("document.documentElement.scrollWidth <= window.innerWidth + 1")
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
    long_answer(page)
    expect(page.locator("#tokens .turn.answered .tok").nth(40)).to_be_attached()
    until(page, lambda: sum(len(each.pieces) for each in stored(tmp_path / "strata.db")) > 40)
    process.kill()
    process.wait(20)
    assert process.stdout is not None
    process.stdout.close()
    page.close()
    process, url, _ = start(tmp_path)
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    visit(page, url)
    page.locator("#conversations .title").first.click()
    expect(page.locator("#tokens .turn.said")).to_have_text(LONG)
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
        settled(page)
        expect(page.get_by_role("tab", name="Databases")).to_have_count(0)
        open_tab(page, "Diagnostics")
        expect(page.locator("#costs")).to_contain_text("Cost of a step")
        expect(page.locator("#measure")).to_have_count(0)
        set_number(page, "Max tokens", 10)
        send(page, text)
        finished(page)
        expect(page.locator("#conversations .title")).to_have_count(1)
        titles.append(page.locator("#conversations .title").all_inner_texts())
        page.click("#log-out")
        expect(page.get_by_label("password")).to_be_visible()
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
    expect(page.locator("#header .notice")).to_contain_text("was damaged")
    page.close()
    end(process)
