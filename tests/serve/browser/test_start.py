"""The first page and the page of a relation in a browser."""

import pytest

from tests.serve.browser.conftest import PHONE, overflow


@pytest.mark.parametrize("where", ["/", "/relation/likes"])
def test_the_best_new_facts_are_loaded(opened, where):
    page = opened(where)
    page.wait_for_selector("[data-best] .best-fact >> nth=5")
    page.click("[data-best] .best-fact a >> nth=0")
    page.wait_for_url("**/entity/**")


def test_hardest_queries_can_be_sorted(opened):
    page = opened("/relation/likes")
    ranks = page.locator("[data-sortable] tbody tr td:last-child")
    before = [float(rank) for rank in ranks.all_inner_texts()]
    page.click("button.sort:has-text('Rank')")
    page.click("button.sort:has-text('Rank')")
    assert [float(rank) for rank in ranks.all_inner_texts()] == sorted(before)
    assert page.get_attribute("th:has-text('Rank')", "aria-sort") == "ascending"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["/", "/relation/likes", "/facts/best"])
def test_on_a_phone(opened, where):
    page = opened(where, viewport=PHONE, color_scheme="dark")
    page.wait_for_selector(".best-fact >> nth=0")
    assert overflow(page) == 0
