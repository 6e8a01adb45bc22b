"""The Models tab as people meet it: models change while the program runs, and the chat goes on."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.conftest import EMBEDDED
from tests.support.hub import Hub, serving
from tests.support.pages import (
    PATIENCE,
    answer,
    end,
    finished,
    load,
    open_tab,
    send,
    set_number,
    start,
    visit,
)

pytestmark = pytest.mark.browser
MID = EMBEDDED.parent / "mid"
EVIL = "<img src=x onerror=alert(1)>{{constructor.constructor('alert(2)')()}}"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A hub on this machine, with the files of a small model, also in the place of a real one."""
    files = {path.name: path.read_bytes() for path in MID.iterdir()}
    real = {"Qwen3-0.6B-Q8_0.gguf": EMBEDDED.with_suffix(".gguf").read_bytes()}
    with serving(Hub({"someone/tiny": files, "Qwen/Qwen3-0.6B-GGUF": real})) as served:
        yield served


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, hub: Hub) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        process, url, _ = start(tmp_path_factory.mktemp("data"))
    yield url
    end(process)


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """A page that shows the embedded target, whatever a test before it has loaded."""
    opened = browser.new_page(viewport={"width": 1400, "height": 900})
    opened.set_default_timeout(PATIENCE)
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    visit_models(opened, address)
    if "target" not in opened.locator("#models-loaded").inner_text():
        load(opened, "tiny-chat · transformers", "tiny-chat is loaded")
        # A page that was just opened says nothing of that load.
        visit_models(opened, address)
    yield opened
    opened.close()
    assert problems == [], "the page raised errors or dialogs"


def visit_models(page: Page, address: str) -> None:
    visit(page, address)
    open_tab(page, "Models")
    expect(page.locator("#models-need")).to_contain_text("free on")


def add(page: Page, source: Path | str) -> None:
    page.locator("#models-source input, #models-source textarea").first.fill(str(source))
    page.click("#models-add")


def chat(page: Page, text: str) -> str:
    open_tab(page, "Chat")
    send(page, text)
    finished(page)
    said = answer(page)
    open_tab(page, "Models")
    return said


def test_models_change_and_the_conversation_goes_on(page: Page, address: str) -> None:
    set_number(page, "Max tokens", 40)
    assert chat(page, "Tell me a short story about a boat.")
    add(page, MID)
    expect(page.locator("#models-choice")).to_contain_text("mid · transformers")
    expect(page.locator("#models-need")).to_contain_text("2.1 M")
    load(page, "mid · transformers", "mid is loaded")
    expect(page.locator("#models-loaded")).to_contain_text("assets/models/tiny-chat/mid")
    expect(page.locator("#header .model")).to_have_text("mid")
    expect(page.locator("#header .facts")).to_contain_text("2.1 M parameters")
    open_tab(page, "Chat")
    expect(page.locator("#box textarea")).to_have_attribute("placeholder", "Message mid")
    expect(page.locator("#tokens .turn.answered")).to_have_count(1)
    assert chat(page, "And then?")
    open_tab(page, "Stack")
    expect(page.locator("#stack-models label")).to_have_count(1)
    expect(page.locator("#stack-loaded")).to_contain_text("mid, 2.1 M")
    visit(page, address)
    expect(page.locator("#header .model")).to_have_text("mid")
    expect(page.locator("#tokens .turn.answered")).to_have_count(2)
    open_tab(page, "Models")
    expect(page.locator("#models-choice label", has_text="mid")).to_contain_text("loaded")
    load(page, "tiny-chat · transformers", "tiny-chat is loaded")
    expect(page.locator("#header .model")).to_have_text("tiny-chat")
    assert chat(page, "Once more.")
    open_tab(page, "Stack")
    expect(page.locator("#stack-models label")).to_have_count(2)


def test_what_drafts_is_told_and_float32_is_one_click_away(page: Page) -> None:
    loaded, header = page.locator("#models-loaded"), page.locator("#header")
    expect(header).to_contain_text("Drafted by: databases (trees)")
    expect(loaded).to_contain_text("What drafts for it")
    expect(page.locator("#models-need")).to_contain_text("What will draft for it, by its files")
    expect(page.locator("#models-exact")).to_be_hidden()
    page.get_by_role("radio", name="bfloat16").click()
    page.click("#models-load")
    expect(loaded).to_contain_text("tied to within its rounding")
    expect(header.locator(".facts")).to_contain_text("bfloat16")
    page.click("#models-exact")
    expect(header.locator(".facts")).to_contain_text("float32")
    expect(page.locator("#models-exact")).to_be_hidden()
    expect(loaded).not_to_contain_text("bfloat16")
    expect(page.get_by_role("radio", name="float32")).to_be_checked()


def test_what_is_no_model_is_told_and_the_chat_goes_on(page: Page, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    add(page, tmp_path / "empty")
    expect(page.get_by_text("There is no model in")).to_be_visible()
    broken = tmp_path / "broken"
    shutil.copytree(MID, broken)
    (broken / "model.safetensors").chmod(0o644)
    (broken / "model.safetensors").write_bytes(b"no weights")
    add(page, broken)
    expect(page.get_by_text("is no sound safetensors file")).to_be_visible()
    expect(page.locator("#models-choice")).not_to_contain_text("broken")
    expect(page.locator("#header .model")).to_have_text("tiny-chat")
    assert chat(page, "Are you still there?")


def test_what_is_needed_follows_the_settings(page: Page) -> None:
    expect(page.locator("#family-0")).to_contain_text("memory")
    before = page.locator("#family-0").inner_text()
    page.get_by_label("Context length").fill("1000")
    expect(page.locator("#family-0")).not_to_have_text(before)
    page.get_by_label("Context length").fill("3")
    expect(page.locator("#models-need")).to_contain_text("from 64 to")


def test_a_model_of_the_hub_is_downloaded_runs_and_is_removed(page: Page, hub: Hub) -> None:
    add(page, "someone/gone")
    expect(page.get_by_text("the hub has no such repository")).to_be_visible()
    expect(page.locator("#models-choice")).not_to_contain_text("gone")
    add(page, "someone/tiny")
    expect(page.locator("#models-choice label.selected")).to_contain_text("MiB to download")
    expect(page.locator("#models-need")).to_contain_text("Loading it downloads it")
    hub.status = 503
    page.click("#models-load")
    expect(page.get_by_text("could not be downloaded")).to_be_visible()
    expect(page.locator("#models-status")).to_contain_text("tiny-chat is loaded, as before")
    expect(page.locator("#models-stop")).to_be_hidden()
    hub.status = 0
    page.click("#models-load")
    expect(page.locator("#models-status")).to_contain_text("tiny is loaded")
    expect(page.locator("#models-loaded")).to_contain_text("someone/tiny")
    expect(page.locator("#header .model")).to_have_text("someone/tiny")
    assert chat(page, "Tell me a short story about a boat.")
    page.click("#models-remove")
    expect(page.get_by_text("tiny is loaded. Load another model")).to_be_visible()
    load(page, "tiny-chat · transformers", "tiny-chat is loaded")
    page.locator("#models-choice label", has_text="tiny · transformers").click()
    expect(page.locator("#models-need")).to_contain_text("someone/tiny")
    page.click("#models-remove")
    expect(page.locator("#models-question")).to_contain_text("Delete tiny from the disk?")
    page.click("#models-remove-no")
    expect(page.locator("#models-question")).to_be_hidden()
    page.click("#models-remove")
    page.click("#models-remove-yes")
    expect(page.locator("#models-status")).to_contain_text("are free again")
    expect(page.locator("#models-choice label", has_text="tiny · transformers")).to_have_count(0)


@pytest.mark.gguf
def test_a_real_model_is_one_click_away(page: Page, hub: Hub) -> None:
    """On the first screen; its download goes on where it broke off."""
    open_tab(page, "Chat")
    page.click("#new")
    expect(page.locator("#starter")).to_contain_text("Qwen3 0.6B")
    expect(page.locator("#starter")).to_contain_text("Apache-2.0")
    hub.sends.clear()
    hub.breaks_after = 100  # whatever comes before the stop is noticed is not all of it
    page.click("#starter-load")
    expect(page.locator("#starter-status")).to_contain_text("Downloading Qwen3-0.6B-Q8_0")
    page.click("#starter-stop")
    hub.sends.set()
    # The connection breaks, or it is stopped before that: either leaves what has come.
    expect(page.locator("#starter-status")).to_contain_text(re.compile("stopped|as before"))
    hub.breaks_after = 15_000_000
    page.click("#starter-load")
    expect(page.locator("#header .model")).to_have_text("Qwen3-0.6B-Q8_0")
    expect(page.locator("#starter")).to_be_hidden()
    assert "bytes=" in hub.fetched("Qwen3-0.6B-Q8_0.gguf")[-1], "what was there stayed"
    hub.breaks_after = None
    assert chat(page, "Tell me a short story about a boat.")
    expect(page.locator("#starter-models")).to_be_hidden()


@pytest.mark.gguf
def test_a_file_with_a_hostile_name_runs_and_stays_text(page: Page, tmp_path: Path) -> None:
    folder = tmp_path / EVIL
    folder.mkdir()
    shutil.copy(EMBEDDED.with_suffix(".gguf"), folder / f"{EVIL}.gguf")
    add(page, folder)
    label = page.locator("#models-choice label", has_text="<img src=x")
    expect(label).to_contain_text(f"{EVIL} · llama.cpp")
    expect(page.get_by_text("GPU layers", exact=True)).to_be_visible()
    expect(page.get_by_text("Cache type", exact=True)).to_be_hidden()
    page.click("#models-advanced button")
    expect(page.get_by_text("Cache type", exact=True)).to_be_visible()
    expect(page.get_by_text("Precision", exact=True)).to_be_hidden()
    load(page, "<img src=x", f"{EVIL} is loaded")
    expect(page.locator("#header .model")).to_have_text(EVIL)
    assert chat(page, "Tell me a short story about a boat.")
    assert page.locator("img[src='x']").count() == 0


def test_the_button_that_loads_is_as_wide_as_what_it_is_about(page: Page) -> None:
    for width in (1400, 390):
        page.set_viewport_size({"width": width, "height": 850})
        button, about = (
            page.locator(each).bounding_box() for each in ("#models-load", "#models-need")
        )
        assert button and about
        assert button["width"] > 0.9 * about["width"] and 28 < button["height"] < 48
        # Nothing is left open for words that are not there yet.
        below = page.locator("#models-reset").bounding_box()
        assert below and below["y"] - button["y"] - button["height"] < 16
