"""The run page in a browser."""

import pytest

from tests.serve.browser.conftest import PHONE, overflow


def test_two_runs_and_one_alone(opened):
    page = opened("/run")
    assert page.locator("h1 bdi").all_inner_texts() == ["calibrated", "plain"]
    assert page.locator(".differing tbody tr").count() == 20
    page.get_by_role("link", name="none").click()
    page.wait_for_url("**/run?with=")
    assert page.locator("h1 bdi").all_inner_texts() == ["calibrated"]


def test_a_table_is_sorted_by_any_column(opened):
    page = opened("/run?with=")
    table = page.locator("table", has=page.get_by_role("button", name="Relation"))

    def numbers():
        texts = table.locator("tbody td:nth-child(3)").all_inner_texts()
        return [float(text) for text in texts]

    button = table.get_by_role("button", name="MRR")
    button.click()
    assert numbers() == sorted(numbers(), reverse=True)
    assert table.locator("th:nth-child(3)").get_attribute("aria-sort") == "descending"
    button.press("Enter")
    assert numbers() == sorted(numbers())
    table.get_by_role("button", name="Relation").click()
    assert table.locator("tbody a").all_inner_texts() == ["<b>bold</b>", "is a", "likes"]


def test_a_curve_shows_its_values_under_the_pointer(opened):
    page = opened("/run")
    curve = page.locator("svg.curve:has(path[data-values])").first
    curve.scroll_into_view_if_needed()
    curve.hover(position={"x": 60, "y": 60})
    tip = page.locator(".curve-tip")
    tip.wait_for()
    first, *values = tip.inner_text().split("\n")
    assert first.startswith("epoch ")
    assert [value.split()[0] for value in values] == ["calibrated", "plain"]
    page.locator("h1").hover()
    tip.wait_for(state="detached")


@pytest.mark.slow
def test_a_differing_query_links_to_its_page(opened):
    page = opened("/run")
    page.locator(".differing tbody a").first.click()
    page.wait_for_url("**/?find=*")
    page.wait_for_selector("main h1")


@pytest.mark.slow
def test_on_a_phone_in_dark_mode(opened):
    page = opened("/run", viewport=PHONE, color_scheme="dark")
    assert overflow(page) == 0
