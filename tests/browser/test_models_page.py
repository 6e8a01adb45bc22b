"""The Models tab: models change while the program runs, and the chat goes on."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.conftest import EMBEDDED
from tests.support.hub import Hub, serving
from tests.support.pages import (
    answer,
    finished,
    load,
    open_tab,
    running,
    send,
    set_number,
    visit,
)

pytestmark = pytest.mark.browser
MID = EMBEDDED.parent / "mid"
EVIL = "<img src=x onerror=fired()>{{constructor.constructor('fired()')()}}"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A hub on this machine, with a small model in the place of a real one."""
    real = {"Qwen3-0.6B-Q8_0.gguf": EMBEDDED.with_suffix(".gguf").read_bytes()}
    with serving(Hub({"Qwen/Qwen3-0.6B-GGUF": real})) as served:
        yield served


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, hub: Hub) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        with running(tmp_path_factory.mktemp("data")) as url:
            yield url


@pytest.fixture
def models(page: Page, address: str) -> Page:
    """The Models tab with the embedded target, whatever a test before has loaded."""
    open_models(page)
    if "target" not in page.locator("#models-loaded").inner_text():
        load(page, "tiny-chat · transformers", "tiny-chat is loaded")
        # A page that was just opened says nothing of that load.
        visit(page, address)
        open_models(page)
    return page


def open_models(page: Page) -> None:
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


@pytest.mark.soak
def test_the_button_that_loads_is_as_wide_as_what_it_is_about(models: Page) -> None:
    page = models
    for width in (1400, 390):
        page.set_viewport_size({"width": width, "height": 850})
        button, about, below = (
            page.locator(each).bounding_box()
            for each in ("#models-load", "#models-need", "#models-reset")
        )
        assert button and about and below
        assert button["width"] > 0.9 * about["width"] and 28 < button["height"] < 48
        # Nothing is left open for words that are not there yet.
        assert below["y"] - button["y"] - button["height"] < 16


@pytest.mark.soak
def test_models_change_and_the_conversation_continues(models: Page, address: str) -> None:
    page = models
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
    open_tab(page, "Chat")
    picker = page.get_by_role("combobox", name="Choose another model")
    expect(picker.locator("option[selected]")).to_contain_text("mid · transformers")
    offered = picker.locator("option").all_inner_texts()
    picker.select_option(next(each for each in offered if "tiny-chat · transformers" in each))
    expect(page.locator("#header .model")).to_have_text("tiny-chat")
    expect(page.locator("#header .facts")).to_contain_text("context")
    expect(picker.locator("option[selected]")).to_contain_text("tiny-chat · transformers")
    expect(page.locator("#box textarea")).to_have_attribute("placeholder", "Message tiny-chat")
    open_tab(page, "Models")
    expect(page.locator("#models-choice label", has_text="tiny-chat · tr")).to_contain_text(
        "loaded"
    )
    assert chat(page, "Once more.")
    open_tab(page, "Stack")
    expect(page.locator("#stack-models label")).to_have_count(2)


@pytest.mark.soak
@pytest.mark.gguf
def test_a_real_model_is_one_click_away(models: Page, hub: Hub) -> None:
    """On the first screen; its download goes on where it broke off."""
    page = models
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
    hub.breaks_after = 10_600_000  # more than the pieces in which it is stored, less than all
    page.click("#starter-load")
    expect(page.locator("#header .model")).to_have_text("Qwen3-0.6B-Q8_0")
    expect(page.locator("#starter")).to_be_hidden()
    assert "bytes=" in hub.fetched("Qwen3-0.6B-Q8_0.gguf")[-1], "what was there stayed"
    hub.breaks_after = None
    assert chat(page, "Tell me a short story about a boat.")
    expect(page.locator("#starter-models")).to_be_hidden()


@pytest.mark.soak
@pytest.mark.gguf
def test_a_file_with_a_hostile_name_runs_and_stays_text(models: Page, tmp_path: Path) -> None:
    page = models
    folder = tmp_path / EVIL
    folder.mkdir()
    shutil.copy(EMBEDDED.with_suffix(".gguf"), folder / f"{EVIL}.gguf")
    add(page, folder)
    label = page.locator("#models-choice label", has_text="<img src=x")
    expect(label).to_contain_text(f"{EVIL} · GGUF")
    expect(page.get_by_text("GPU layers", exact=True)).to_be_visible()
    expect(page.get_by_text("Cache type", exact=True)).to_be_hidden()
    page.click("#models-advanced button")
    expect(page.get_by_text("Cache type", exact=True)).to_be_visible()
    expect(page.get_by_text("Precision", exact=True)).to_be_hidden()
    load(page, "<img src=x", f"{EVIL} is loaded")
    expect(page.locator("#header .model")).to_have_text(EVIL)
    assert chat(page, "Tell me a short story about a boat.")
    assert page.locator("img[src='x']").count() == 0
