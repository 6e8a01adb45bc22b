"""The API tab: it is switched on, a key is made, copied, used and revoked."""

import re
import shlex
import subprocess

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.support.pages import (
    answer,
    be_exact,
    finished,
    open_tab,
    pick,
    send,
    set_number,
    settled,
    until,
)

pytestmark = pytest.mark.browser
QUESTION = "Tell me about the sea."


def test_a_program_is_let_in_answered_as_the_page_is_and_shut_out(page: Page, address: str) -> None:
    base = f"{address.rstrip('/')}/v1"
    models = f"{base}/models"
    assert httpx.get(models, timeout=60).json()["error"]["code"] == "api_off"
    open_tab(page, "API")
    expect(page.locator("#api-state")).to_contain_text("The API is off")
    page.get_by_label("Answer other programs").check()
    expect(page.locator("#api-state code")).to_have_text(base)
    assert httpx.get(models, timeout=60).status_code == 200

    page.locator("#api-name").locator("input, textarea").fill("<b>my editor</b>")
    page.get_by_role("button", name="Make a key").click()
    box = page.locator("#api-secret").locator("input, textarea")
    expect(box).to_have_value(re.compile("^sk-strata-"))
    secret = box.input_value()
    expect(page.locator("#api-keys td").first).to_have_text("<b>my editor</b>")
    command = page.locator("#api-curl textarea").input_value()
    assert secret in command and secret in page.locator("#api-python textarea").input_value()
    done = subprocess.run(
        shlex.split(command.replace("\\\n", " ")), capture_output=True, text=True, check=True
    )
    assert '"finish_reason"' in done.stdout

    open_tab(page, "Chat")
    set_number(page, "Max tokens", 60)
    be_exact(page)
    send(page, QUESTION)
    finished(page)
    messages = [{"role": "user", "content": QUESTION}]
    asked = {"messages": messages, "temperature": 0, "max_tokens": 60}
    headers = {"authorization": f"Bearer {secret}"}
    said = httpx.post(f"{base}/chat/completions", json=asked, headers=headers, timeout=60).json()
    assert said["choices"][0]["message"]["content"] == answer(page)

    page.reload()
    settled(page)
    open_tab(page, "API")
    expect(page.locator("#api-keys td").first).to_have_text("<b>my editor</b>")
    assert secret not in page.content()
    pick(page, "#api-which", re.compile("my editor"))
    page.locator("#api-revoke").click()
    page.get_by_role("button", name="Revoke it").click()
    expect(page.locator("#api-keys")).to_contain_text("no keys yet")
    until(page, lambda: httpx.get(models, headers=headers, timeout=60).status_code == 401)
    page.get_by_label("Answer other programs").uncheck()
    expect(page.locator("#api-state")).to_contain_text("The API is off")
    assert httpx.get(models, timeout=60).status_code == 404
