"""axe-core finds no violation on any page: light and dark, on a desktop and a phone, closed and
opened.
"""

from importlib.resources import files

import pytest

from tests.processes import LIMIT
from tests.serve.browser.conftest import PHONE, WIDE

axe_package = pytest.importorskip(
    "axe_playwright_python", reason="needs axe-core: pip install axe-playwright-python"
)

QUERY = "?find=tail&head=thing+15&relation=likes"
# By address, what is waited for before the page is checked.
PAGES = {
    "/": "h1",
    f"/{QUERY}": ".answers li",
    "/?head=Twenty": "h1",
    "/?head=nobody&relation=likes": "[role=alert]",
    "/entity/Twenty": "h1",
    "/entity/nobody": "h1",
    "/relation/likes": "h1",
    "/search?q=thing": "h1",
    "/explain?head=thing+15&relation=likes&tail=thing+20": "[data-explanation]",
    "/facts?top=12": "[data-list][data-ready]",
    "/facts/best": "h1",
    "/likely?head=thing+15&relation=likes&tail=thing+20": "h1",
    "/paths": "h1",
    "/paths?start=thing+15&end=thing+20": ".paths li",
    "/entity/Twenty?walk=thing+15": "h1",
    "/decisions": "h1",
    "/map?entity=Twenty&relation=likes&find=tail": "[data-found] li",
    "/run": "h1",
    "/run?with=": "h1",
    "/run?with=plain": "h1",
    "/train": "h1",
    "/docs": "h1",
    "/nowhere": "h1",
}
SIZES = {"desktop": WIDE, "phone": PHONE}
LIGHT_DESKTOP = ("light", "desktop")
WINDOWS = [LIGHT_DESKTOP, ("light", "phone"), ("dark", "desktop"), ("dark", "phone")]
# Every third page in one window is for the ordinary suite, all in all windows for the slow one.
CASES = [
    pytest.param(
        window,
        where,
        id="-".join([*window, where]),
        marks=() if window == LIGHT_DESKTOP and number % 3 == 0 else pytest.mark.slow,
    )
    for window in WINDOWS
    for number, where in enumerate(PAGES)
]


@pytest.fixture(scope="module")
def axe_script() -> str:
    return (files(axe_package) / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def windows(browser, address):
    """Pages by window. The policy of the pages would stop axe-core, and is lifted."""
    pages = {}

    def page_of(scheme, size):
        if (scheme, size) not in pages:
            context = browser.new_context(
                base_url=address, color_scheme=scheme, viewport=SIZES[size], bypass_csp=True
            )
            page = context.new_page()
            page.set_default_timeout(1000 * LIMIT)
            pages[scheme, size] = page
        return pages[scheme, size]

    yield page_of
    for page in pages.values():
        page.context.close()


def violations(page, script: str) -> list[str]:
    """What axe-core finds: its rule, and the element."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(script)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{page.url} {violation['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        for violation in found
        for node in violation["nodes"]
    ]


def open_all(page) -> None:
    """Open what can be opened on a page: folded parts and the first explanations."""
    for folded in page.locator("details:not([open]) > summary").all():
        if folded.is_visible():
            folded.click()
    for name, part in (("Why?", ".explanation:not(.likely)"), ("How likely?", ".likely")):
        buttons = page.locator(f"main button:has-text('{name}'):visible")
        if buttons.count():
            buttons.first.click()
            page.wait_for_selector(f".opened {part}")


@pytest.mark.parametrize(("window", "where"), CASES)
def test_a_page_has_no_violation(windows, axe_script, window, where):
    page = windows(*window)
    page.goto(where)
    page.wait_for_selector(PAGES[where])
    # Closed, most of a page is as it is opened.
    closed = [] if window == LIGHT_DESKTOP else violations(page, axe_script)
    open_all(page)
    assert closed + violations(page, axe_script) == []
