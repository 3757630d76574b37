"""axe-core finds no violation on any page: light and dark, on a desktop and a phone, closed and
opened.
"""

from importlib.resources import files

import pytest

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
    "/facts": "[data-list][data-ready]",
    "/map?entity=Twenty&relation=likes&find=tail": "[data-found] li",
    "/run": "h1",
    "/run?with=": "h1",
    "/docs": "h1",
    "/nowhere": "h1",
}
SCHEMES = [(scheme, size) for scheme in ("light", "dark") for size in ("desktop", "phone")]
SIZES = {"desktop": WIDE, "phone": PHONE}


@pytest.fixture(scope="package")
def axe_script() -> str:
    return (files(axe_package) / "axe.min.js").read_text(encoding="utf-8")


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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("scheme", "size"), SCHEMES)
def test_no_page_has_a_violation(opened, axe_script, scheme, size):
    """The policy of the pages would stop axe-core, and is lifted."""
    page = opened(
        "/health",
        allow="Failed to load resource",
        color_scheme=scheme,
        viewport=SIZES[size],
        bypass_csp=True,
    )
    found = []
    for address, ready in PAGES.items():
        page.goto(address)
        page.wait_for_selector(ready)
        found += violations(page, axe_script)
        open_all(page)
        found += violations(page, axe_script)
    assert found == []
