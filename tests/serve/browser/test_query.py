"""The query page in a browser."""

import pytest

from tests.serve.browser.conftest import PHONE, overflow

QUERY = "/?find=tail&head=thing+20&relation=likes"


def focused(page) -> str:
    return page.evaluate("document.activeElement.textContent.trim() || document.activeElement.id")


def tab_to(page, text: str) -> None:
    for _ in range(60):
        page.keyboard.press("Tab")
        if focused(page).startswith(text):
            return
    raise AssertionError(f"{text} cannot be reached with the Tab key")


def test_a_query_and_its_explanation_by_keyboard(opened):
    page = opened()
    assert focused(page) == "head"
    page.keyboard.type("twent")
    page.wait_for_selector("#head[aria-expanded=true]")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    active = page.get_attribute("#head", "aria-activedescendant")
    assert page.inner_text(f"#{active} .name") == "Twenty"
    page.keyboard.press("Enter")
    assert focused(page) == "relation"
    page.keyboard.type("lik")
    page.wait_for_selector("#relation[aria-expanded=true]")
    page.keyboard.press("Enter")
    page.wait_for_url("**" + QUERY)
    assert page.locator(".answers .answer").count() == 20

    tab_to(page, "Why?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".opened [data-explanation] li")
    assert page.locator("[aria-expanded=true]", has_text="Why?").count() == 1
    page.keyboard.press("Enter")
    assert not page.is_visible(".opened")


@pytest.mark.slow
def test_the_back_button_restores_the_last_query(opened):
    page = opened(QUERY)
    first = page.inner_text(".answers")
    page.fill("#head", "thing 30")
    page.wait_for_selector("#head[aria-expanded=true]")
    page.keyboard.press("Enter")
    page.wait_for_url("**head=thing+30**")
    page.go_back()
    page.wait_for_url("**" + QUERY)
    assert page.input_value("#head") == "Twenty"
    assert page.inner_text(".answers") == first
    page.click("button:text-is('Query')")
    page.wait_for_url("**" + QUERY)


@pytest.mark.slow
def test_queries_for_the_head_and_the_relation(opened):
    page = opened(QUERY)
    page.click("label:has-text('head') >> nth=0")
    assert page.input_value("#tail") == "Twenty"
    assert not page.is_visible("#head")
    page.click("button:text-is('Query')")
    page.wait_for_url("**/?find=head&relation=likes&tail=thing+20")
    page.click("label:text-is('relation')")
    page.fill("#head", "thing 30")
    page.wait_for_selector("#head[aria-expanded=true]")
    page.keyboard.press("Enter")
    page.wait_for_url("**/?find=relation&head=thing+30&tail=thing+20")
    assert page.locator(".answers .answer, .known-answers li").count() == 3


def test_the_prediction_set_is_marked(opened):
    page = opened(QUERY + "&coverage=0.5&k=50")
    inside = page.locator(".answer.inside").count()
    assert 0 < inside < page.locator(".answer").count()
    page.click("text=80 %")
    page.wait_for_url("**coverage=0.8**")
    assert page.locator(".answer.inside").count() >= inside


@pytest.mark.slow
def test_known_answers_can_be_collapsed(opened):
    page = opened(QUERY)
    names = page.locator(".known-answers li")
    assert names.first.is_visible()
    page.click("summary")
    assert not names.first.is_visible()


@pytest.mark.slow
def test_escape_closes_the_list_and_keeps_the_text(opened):
    page = opened()
    page.keyboard.type("thing")
    page.wait_for_selector("#head[aria-expanded=true]")
    page.keyboard.press("Escape")
    assert page.get_attribute("#head", "aria-expanded") == "false"
    assert page.input_value("#head") == "thing"


def test_an_error_message_is_shown(opened):
    page = opened(QUERY, allow="503")
    page.route(
        "**/explain?**",
        lambda route: route.fulfill(
            status=503, json={"error": "It took <b>too</b> long.", "suggestions": []}
        ),
    )
    page.click("button:has-text('Why?') >> nth=0")
    assert page.inner_text(".opened [role=alert]") == "It took <b>too</b> long."


def test_it_works_without_scripts(opened):
    page = opened(QUERY, java_script_enabled=False)
    assert page.locator(".answers .answer").count() == 20
    page.fill("#head", "thing 30")
    page.click("button:text-is('Query')")
    page.wait_for_url("**head=thing+30**")
    page.click("text=Why? >> nth=0")
    assert page.locator(".explanation li").count() > 0


def test_dark_mode_follows_the_system_and_a_choice_is_stored(opened):
    page = opened(color_scheme="dark")
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    dark = page.evaluate(paper)
    page.click("[data-theme-toggle]")
    light = page.evaluate(paper)
    assert dark != light
    page.reload()
    assert page.evaluate(paper) == light
    assert page.inner_text("[data-theme-toggle]") == "Dark"
    page.click("[data-theme-toggle]")
    page.goto("/entity/Twenty")
    assert page.evaluate(paper) == dark


def test_on_a_phone(opened):
    page = opened(QUERY, viewport=PHONE)
    page.click("button:has-text('Why?') >> nth=0")
    page.wait_for_selector(".opened [data-explanation] li")
    assert overflow(page) == 0
    page.goto("/")
    page.keyboard.type("o")
    page.wait_for_selector("#head[aria-expanded=true]")
    assert overflow(page) == 0


@pytest.mark.slow
def test_the_same_query_for_another_run(opened):
    page = opened(QUERY)
    page.select_option("#run", "plain")
    page.wait_for_url("**run=plain**")
    assert page.input_value("#head") == "Twenty"
    assert "score" in page.inner_text(".answers")
    page.click(".answers a.name >> nth=0")
    page.wait_for_url("**/entity**run=plain")
