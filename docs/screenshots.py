"""`python docs/screenshots.py`: the pictures of the README, taken from the running program.

Starts the program with an empty data directory, talks to it, and saves docs/images. Then the moving
picture is made (docs/moving_picture.py). Needs Chromium on the PATH. Nothing is arranged: the
figures in the pictures are the ones of that run.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Page, expect

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.harness import EMBEDDED  # noqa: E402
from bench.page import chromium, running  # noqa: E402

IMAGES = ROOT / "docs" / "images"
MESSAGES = (
    "Tell me a short story about a boat and a storm.",
    "Tell me another story about the same boat.",
)
LAST = "Write a list of ten things one finds in a garden, and say what each is for."
PROMPT = "Write a short story about a fox who learns to read, then tell it again in other words."
PATIENCE = 120_000


def main() -> int:
    IMAGES.mkdir(exist_ok=True)
    with (
        TemporaryDirectory() as folder,
        chromium() as browser,
        running(str(EMBEDDED), 0, Path(folder)) as program,
    ):
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(PATIENCE)
        tour(page, program.url)
        phone(browser.new_page(viewport={"width": 390, "height": 844}), program.url)
    # In a process of its own: it brings the engine along.
    return subprocess.run([sys.executable, "docs/moving_picture.py"], cwd=ROOT).returncode


def tour(page: Page, address: str) -> None:
    """A conversation, its proof, a comparison; each tab once, and the chat in dark mode too."""
    page.goto(address)
    expect(page.locator("#header .facts")).to_contain_text("context", timeout=PATIENCE)
    page.wait_for_timeout(3000)
    for message in MESSAGES:
        send(page, message)
    page.locator("#tokens [data-act=prove]").last.click()
    page.wait_for_selector("#proof .same")
    page.wait_for_timeout(1500)
    page.screenshot(path=IMAGES / "chat-light.png")
    why(page)
    page.emulate_media(color_scheme="dark")
    page.reload()
    page.wait_for_timeout(4000)
    page.screenshot(path=IMAGES / "chat-dark.png")
    page.emulate_media(color_scheme="light")
    page.reload()
    page.wait_for_timeout(3000)
    page.get_by_role("tab", name="Compare").click()
    page.fill("#compare-prompt textarea", PROMPT)
    page.click("#compare")
    page.wait_for_selector("#verdict .same")
    page.wait_for_timeout(4000)
    page.screenshot(path=IMAGES / "compare-light.png", full_page=True)
    page.get_by_role("tab", name="Benchmark").click()
    page.wait_for_timeout(1500)
    page.click("#benchmark-run")
    expect(page.locator("#benchmark-result")).to_contain_text("of all 13", timeout=5 * PATIENCE)
    page.wait_for_timeout(2000)
    page.screenshot(path=IMAGES / "benchmark-light.png", full_page=True)
    for name in ("Diagnostics", "Databases"):
        page.get_by_role("tab", name=name).click()
        page.wait_for_timeout(3000)
        page.screenshot(path=IMAGES / f"{name.lower()}-light.png", full_page=True)
    api(page)
    stack(page)
    models(page)


def phone(page: Page, address: str) -> None:
    page.set_default_timeout(PATIENCE)
    page.goto(address)
    expect(page.locator("#header .facts")).to_contain_text("context", timeout=PATIENCE)
    send(page, MESSAGES[0])
    page.wait_for_timeout(1000)
    page.screenshot(path=IMAGES / "chat-phone.png")


def api(page: Page) -> None:
    """The API switched on, with a new key; the database is deleted afterwards."""
    page.get_by_role("tab", name="API").click()
    page.get_by_label("Answer other programs").check()
    expect(page.locator("#api-state code")).to_be_visible()
    page.locator("#api-name").locator("input, textarea").fill("Open WebUI")
    page.click("#api-make")
    expect(page.locator("#api-secret")).to_be_visible()
    page.wait_for_timeout(1000)
    page.screenshot(path=IMAGES / "api-light.png", full_page=True)


def why(page: Page) -> None:
    """The explanation of a token, and the draft tree of a step; then the chat again."""
    answer = page.locator("#tokens .turn.answered").last
    answer.locator(".tok.k-context").last.hover()
    page.wait_for_selector("#tokens .why")
    page.wait_for_timeout(500)
    page.screenshot(path=IMAGES / "why-light.png")
    page.locator("[data-act=replay]:visible").last.click()
    page.wait_for_selector(".replay-view[open] .sofar")
    for _ in range(12):
        page.click("#replay .on")
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)
    page.locator("#replay .replay-view").screenshot(path=IMAGES / "replay-light.png")
    page.keyboard.press("Escape")
    page.wait_for_timeout(500)


def stack(page: Page) -> None:
    """Load, profile and measure draft models; then an answer by a stack of two."""
    page.get_by_role("tab", name="Stack").click()
    page.wait_for_timeout(2000)
    page.click("#stack-load")
    expect(page.locator("#stack-loaded")).to_contain_text("small, mid", timeout=PATIENCE)
    page.click("#stack-profile")
    expect(page.locator("#stack-profiled")).to_contain_text("measured on", timeout=PATIENCE)
    page.click("#stack-measure")
    expect(page.locator("#stack-outcome")).to_contain_text("gave the text", timeout=PATIENCE)
    page.mouse.move(0, 0)
    page.wait_for_timeout(2000)
    page.screenshot(path=IMAGES / "stack-light.png", full_page=True)
    page.get_by_label("Another plan").fill("small@2/mid@2")
    page.get_by_label("Another plan").press("Enter")
    expect(page.locator("#stack-planned")).to_contain_text("2 tokens at a time")
    page.click("#stack-use")
    expect(page.locator("#stack-status")).to_contain_text("small@2/mid@2")
    page.get_by_role("tab", name="Settings").click()
    page.locator("#advanced button").first.click()
    # On a model this small a stack does not pay: without the measured budget it drafts anyway.
    page.get_by_label("Fixed").check()
    page.get_by_role("tab", name="Chat").click()
    send(page, LAST)
    page.wait_for_timeout(1500)
    page.screenshot(path=IMAGES / "stack-chat-light.png")


def models(page: Page) -> None:
    """The demonstration model as a GGUF file, in light and dark mode."""
    open_models(page)
    page.locator("#models-choice label", has_text="llama.cpp").click()
    expect(page.get_by_text("GPU layers", exact=True)).to_be_visible()
    page.click("#models-load")
    expect(page.locator("#models-status")).to_contain_text("is loaded", timeout=PATIENCE)
    page.mouse.move(0, 0)
    page.wait_for_timeout(1500)
    page.screenshot(path=IMAGES / "models-light.png", full_page=True)
    page.emulate_media(color_scheme="dark")
    page.reload()
    page.wait_for_timeout(3000)
    open_models(page)
    page.screenshot(path=IMAGES / "models-dark.png", full_page=True)


def open_models(page: Page) -> None:
    """Show the Models tab with all that it reads from disk."""
    page.get_by_role("tab", name="Models").click()
    expect(page.locator("#models-need")).to_contain_text("free on", timeout=PATIENCE)
    page.wait_for_timeout(1500)


def send(page: Page, message: str) -> None:
    """Send a message and wait for the end of the answer."""
    page.fill("#box textarea", message)
    page.click("#send")
    page.wait_for_selector("#stop", state="visible")
    page.wait_for_selector("#send", state="visible")


if __name__ == "__main__":
    sys.exit(main())
