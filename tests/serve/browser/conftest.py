"""A real browser: Chromium, driven by Playwright. Without either, these tests are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def chromium_path() -> str | None:
    """Where the browser is; `DUALKG_CHROMIUM` names another."""
    return os.environ.get("DUALKG_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """One for all tests of this folder. It ends with them: while it runs, no other test could run an event loop."""
    driver = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    path = chromium_path()
    if path is None:
        pytest.skip("needs chromium: apt-get install chromium, or its path in DUALKG_CHROMIUM")
    with driver.sync_playwright() as started:
        # Tests open their own server's pages alone, so that a container's root may do without the sandbox.
        found = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser, address) -> Iterator[Callable[..., Any]]:
    """Opens a page: `opened("/entity/Twenty", viewport=PHONE, color_scheme="dark")`.

    The test fails if a script fails, the policy stops something, a name opens a dialog, or a request leaves this host.
    """
    contexts, wrong = [], []

    def open_page(where: str = "/", *, allow: str | None = None, **choices: Any) -> Any:
        """`allow` is part of a message of the console that is expected."""
        context = browser.new_context(**{"viewport": WIDE, "color_scheme": "light", "base_url": address, **choices})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: wrong.append(f"script: {error}"))
        page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: request.url.startswith(address) or wrong.append(f"requested: {request.url}"))

        def heard(message: Any) -> None:
            if message.type == "error" and not (allow and allow in message.text):
                wrong.append(f"console: {message.text}")

        page.on("console", heard)
        page.goto(where)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong


def overflow(page: Any) -> int:
    """By how many pixels a page is wider than the window."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def wait_for_heading(page: Any, text: str) -> None:
    """Until the page is the one that is headed so. Conditions in JavaScript would be stopped by the pages' policy."""
    from playwright.sync_api import expect

    expect(page.locator("h1")).to_have_text(text)
