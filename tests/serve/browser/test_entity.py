"""The entity page in a browser."""

from urllib.parse import unquote

import pytest

from dualkg.serve.templating import visible
from tests.serve.browser.conftest import PHONE, overflow, wait_for_heading
from tests.serve.conftest import HOSTILE

ADDRESS = """
async (name) => {
  const { entityAddress } = await import("/static/common.js");
  return new URL(entityAddress(name), location.href).href;
}
"""


def test_links_of_the_drawing(opened):
    page = opened("/entity/Twenty")
    drawing = page.locator(".drawing.broad")
    for kind in ("known", "predicted"):
        assert drawing.locator(f".edge.{kind}").count() > 0
    dashes = [
        drawing.locator(f".edge.{kind} >> nth=0").evaluate(
            "edge => getComputedStyle(edge).strokeDasharray"
        )
        for kind in ("known", "predicted")
    ]
    assert dashes[0] == "none" != dashes[1]
    link = drawing.locator(".node.predicted a >> nth=0")
    name = link.locator("bdi").inner_text()
    link.click()
    wait_for_heading(page, name)
    page.go_back()
    assert page.inner_text("h1") == "Twenty"
    node = page.locator(".drawing.broad .node.known a[href^='/entity'] >> nth=0")
    name = node.locator("bdi").inner_text()
    node.focus()
    page.keyboard.press("Enter")
    wait_for_heading(page, name)


def test_an_explanation_opens_below_a_predicted_fact(opened):
    page = opened("/entity/Twenty")
    page.click(".predictions button:has-text('Why?') >> nth=0")
    page.wait_for_selector(".predictions [data-explanation] li")


def test_untrusted_names_are_displayed(opened):
    page = opened(viewport=PHONE)
    for name in HOSTILE:
        page.goto(page.evaluate(ADDRESS, name))
        wait_for_heading(page, visible(name))
        assert overflow(page) == 0


def test_a_query_with_an_untrusted_name(opened):
    page = opened()
    page.keyboard.type("<script")
    page.wait_for_selector("#head[aria-expanded=true]")
    page.keyboard.press("Enter")
    page.keyboard.type("bold")
    page.wait_for_selector("#relation[aria-expanded=true]")
    page.keyboard.press("Enter")
    page.wait_for_url("**head=%3Cscript%3E**")
    assert page.input_value("#head") == HOSTILE[0]
    assert page.locator("script:not([src])").count() == 0


@pytest.mark.slow
def test_a_query_with_line_breaks_in_a_name(opened):
    """A text field would lose them: the name is in a data attribute."""
    page = opened("/?find=tail&head=two%0Alines%0D%0AHTTP%2F1.1+200+OK&relation=likes")
    page.click("button:text-is('Query')")
    page.wait_for_url("**head=two%0Alines%0D%0AHTTP**")
    assert page.locator(".answers .answer").count() > 0


def test_an_unknown_entity_offers_similar_names(opened):
    page = opened("/entity/thing%2013x", allow="404")
    name = page.inner_text(".similar-names a >> nth=0")
    page.click(".similar-names a >> nth=0")
    wait_for_heading(page, name)


@pytest.mark.slow
def test_search_of_another_entity(opened):
    page = opened("/entity/nobody", allow="404")
    page.fill("#search", "twenty-o")
    page.wait_for_selector("#search[aria-expanded=true]")
    page.keyboard.press("Enter")
    wait_for_heading(page, "Twenty-one")


@pytest.mark.slow
def test_on_a_phone(opened):
    page = opened("/entity/Twenty", viewport=PHONE)
    assert page.is_visible(".drawing.tall")
    assert not page.is_visible(".drawing.broad")
    assert overflow(page) == 0
    page.locator(".drawing.tall .node a[href^='/entity'] >> nth=0").click()
    page.wait_for_url("**/entity**")


def test_the_skip_link_has_the_first_focus(opened):
    page = opened("/entity/Twenty")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_a_walk_expands_neighbours_in_place(opened):
    page = opened("/entity/Twenty")
    node = page.locator(".drawing.broad .node:not(.predicted) a[data-neighbour] >> nth=0")
    first = unquote(node.get_attribute("href").removeprefix("/entity/"))
    node.locator("xpath=../button").click()
    trail = page.locator(".walked h3")
    trail.first.wait_for()
    assert trail.first.inner_text().startswith("Twenty › ")

    node = page.locator(".walked .drawing.broad .node a[data-neighbour] >> nth=-1")
    second = unquote(node.get_attribute("href").removeprefix("/entity/"))
    node.focus()
    page.keyboard.press("+")
    trail.nth(1).wait_for()
    walked = page.locator("[data-walked]")
    assert [step.get_attribute("data-walked") for step in walked.all()] == [first, second]

    page.reload()
    trail.nth(1).wait_for()
    assert overflow(page) == 0
    walked.first.get_by_role("button", name="Close").click()
    assert walked.count() == 0
    assert "walk=" not in page.url


def test_paths_on_a_phone(opened):
    page = opened("/paths", viewport=PHONE, color_scheme="dark")
    page.fill("#start", "thing 15")
    page.get_by_role("option", name="thing 15").click()
    page.keyboard.type("Twenty")
    page.get_by_role("option", name="Twenty", exact=False).first.click()
    page.wait_for_url("**start=thing+15&end=thing+20**")
    assert page.locator(".paths li").count() > 3
    assert overflow(page) == 0
    page.locator(".paths .answer").get_by_role("button", name="Why?").first.click()
    page.wait_for_selector(".opened [data-explanation]")
