"""The search in the header in a browser."""

import pytest

from tests.serve.browser.conftest import PHONE, overflow, wait_for_heading

OPEN = "#search[aria-expanded=true]"


def test_a_page_is_opened_by_keyboard(opened):
    page = opened("/entity/Twenty")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("thing 3")
    page.wait_for_selector(OPEN)
    first = page.inner_text(".search [aria-selected=true] .name")
    page.keyboard.press("ArrowDown")
    second = page.inner_text(".search [aria-selected=true] .name")
    assert first != second
    page.keyboard.press("Enter")
    wait_for_heading(page, second)


def test_a_slash_in_a_field_is_a_character(opened):
    page = opened("/?find=tail&head=thing+20&relation=likes")
    page.fill("#head", "")
    page.focus("#head")
    page.keyboard.type("/m")
    assert page.input_value("#head") == "/m"


def test_options_say_what_an_entity_is(opened):
    page = opened()
    page.fill("#search", "twenty")
    page.wait_for_selector(OPEN)
    assert "facts" in page.inner_text(".search [role=option] .about >> nth=0")
    page.fill("#head", "twenty")
    page.wait_for_selector("#head[aria-expanded=true]")
    assert "facts" in page.inner_text(".slot [role=option] .about >> nth=0")


def test_without_scripts_it_is_a_form(opened):
    page = opened(java_script_enabled=False)
    page.fill("#search", "twenty-o")
    page.press("#search", "Enter")
    page.wait_for_url("**/search?q=twenty-o")
    page.click(".found a >> nth=0")
    wait_for_heading(page, "Twenty-one")


@pytest.mark.slow
def test_on_a_phone(opened):
    page = opened("/entity/Twenty", viewport=PHONE)
    page.fill("#search", "thing")
    page.wait_for_selector(OPEN)
    assert overflow(page) == 0
    page.click(".search [role=option] >> nth=1")
    page.wait_for_url("**/entity/**")
