"""Entity: walking from one to the next, whatever they are called."""

from __future__ import annotations

from dualkg.serve.pages.layout import shown
from tests.serve.browser.conftest import PHONE, overflow, wait_for_heading
from tests.serve.conftest import HOSTILE

ADDRESS = (
    "name => import('/static/common.js').then(({entityAddress}) => new URL(entityAddress(name), location.href).href)"
)


def test_the_drawing_is_walked(opened):
    page = opened("/entity/Twenty")
    drawing = page.locator(".drawing.broad")
    for kind in ("known", "predicted"):
        assert drawing.locator(f".edge.{kind}").count() > 0
    dashes = [
        drawing.locator(f".edge.{kind} >> nth=0").evaluate("edge => getComputedStyle(edge).strokeDasharray")
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


def test_why_opens_beside_a_predicted_fact(opened):
    page = opened("/entity/Twenty")
    page.click(".predictions button >> nth=0")
    page.wait_for_selector(".predictions [data-reasons] li")


def test_hostile_names_are_shown_and_found(opened):
    page = opened(viewport=PHONE)
    for name in HOSTILE:
        page.goto(page.evaluate(ADDRESS, name))
        wait_for_heading(page, shown(name))
        assert overflow(page) == 0


def test_a_hostile_name_is_asked_about(opened):
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


def test_a_name_with_line_ends_is_asked_about_again(opened):
    """A text field would lose them: the name is kept beside it."""
    page = opened("/?find=tail&head=two%0Alines%0D%0AHTTP%2F1.1+200+OK&relation=likes")
    page.click("button:text-is('Ask')")
    page.wait_for_url("**head=two%0Alines%0D%0AHTTP**")
    assert page.locator(".answers .answer").count() > 0


def test_an_unknown_entity_leads_to_the_nearest(opened):
    page = opened("/entity/thing%2013x", allow="404")
    name = page.inner_text(".near a >> nth=0")
    page.click(".near a >> nth=0")
    wait_for_heading(page, name)


def test_another_entity_is_looked_for(opened):
    page = opened("/entity/nobody", allow="404")
    page.fill("#name", "twenty-o")
    page.wait_for_selector("#name[aria-expanded=true]")
    page.keyboard.press("Enter")
    wait_for_heading(page, "Twenty-one")


def test_a_phone_shows_it_without_scrolling_sideways(opened):
    page = opened("/entity/Twenty", viewport=PHONE)
    assert page.is_visible(".drawing.tall")
    assert not page.is_visible(".drawing.broad")
    assert overflow(page) == 0
    page.locator(".drawing.tall .node a[href^='/entity'] >> nth=0").click()
    page.wait_for_url("**/entity**")


def test_the_skip_link_is_the_first_to_be_reached(opened):
    page = opened("/entity/Twenty")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
