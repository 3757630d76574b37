"""A real browser: Chromium, driven by Playwright. Without either, these tests are skipped."""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.processes import LIMIT

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


def chromium_path() -> str | None:
    """Where the browser is; `DUALKG_CHROMIUM` names another."""
    return os.environ.get("DUALKG_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """One browser for all tests of this folder.

    It ends with them: while it runs, no other test could run an event loop.
    """
    driver = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright: pip install playwright"
    )
    path = chromium_path()
    if path is None:
        pytest.skip("needs chromium: apt-get install chromium, or its path in DUALKG_CHROMIUM")
    with driver.sync_playwright() as started:
        # Tests open their own server's pages alone, so that a container's root may do without the
        # sandbox.
        # Without a GPU, Chromium would emulate one.
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-software-rasterizer"]
        browser = started.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def reused() -> dict[str, Any]:
    """By address, a page of the usual choices. A page per test would start a process each."""
    return {}


@pytest.fixture
def opened(browser, address, reused) -> Iterator[Callable[..., Any]]:
    """Opens a page: `opened("/entity/Twenty", viewport=PHONE, color_scheme="dark")`.

    The test fails if a script fails, the policy stops something, a name opens a dialog, or a
    request leaves this host.
    """
    pages = []
    wrong = []
    allowed = []

    def heard(message: Any) -> None:
        if message.type == "error" and not any(part in message.text for part in allowed):
            wrong.append(f"console: {message.text}")

    def dismissed(dialog: Any) -> None:
        wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    listeners: dict[str, Callable[[Any], None]] = {
        "pageerror": lambda error: wrong.append(f"script: {error}"),
        "dialog": dismissed,
        "request": lambda request: (
            request.url.startswith(address) or wrong.append(f"requested: {request.url}")
        ),
        "console": heard,
    }

    def new_page(**choices: Any) -> Any:
        usual = {"viewport": WIDE, "color_scheme": "light", "base_url": address}
        page = browser.new_context(**{**usual, **choices}).new_page()
        page.set_default_timeout(1000 * LIMIT)
        return page

    def open_page(where: str = "/", *, allow: str | None = None, **choices: Any) -> Any:
        """`allow` is part of a message of the console that is expected."""
        page = None
        if not choices and not pages:
            page = reused.pop(address, None)
        if page is None:
            page = new_page(**choices)
        pages.append((page, choices))
        if allow:
            allowed.append(allow)
        for event, listener in listeners.items():
            page.on(event, listener)
        page.goto(where)
        return page

    yield open_page
    for page, choices in pages:
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        if choices or address in reused:
            page.context.close()
        else:
            page.unroute_all()
            page.evaluate("localStorage.clear()")
            reused[address] = page
    assert not wrong


def overflow(page: Any) -> int:
    """By how many pixels a page is wider than the window."""
    return int(
        page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    )


def wait_for_heading(page: Any, text: str) -> None:
    """Wait until the page has this heading.

    The policy of the pages would stop a condition in JavaScript.
    """
    from playwright.sync_api import expect

    expect(page.locator("h1")).to_have_text(text, timeout=1000 * LIMIT)
