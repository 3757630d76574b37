"""Decisions beside facts on the first page and on the map, and ways past the header by keyboard."""

import pytest

from dualkg.training.run_folder import RunFolder


@pytest.fixture(autouse=True)
def undecided(run_folders):
    """Each test starts without decisions and leaves none."""
    RunFolder(run_folders[0]).decisions.unlink(missing_ok=True)
    yield
    RunFolder(run_folders[0]).decisions.unlink(missing_ok=True)


def verdicts(page) -> list[tuple[str, str]]:
    decisions = page.request.get("/api/decisions").json()["decisions"]
    return [(decision["tail"], decision["verdict"]) for decision in decisions]


def test_a_best_new_fact_is_accepted_and_explained(opened):
    page = opened("/")
    row = page.locator("[data-best] .best-fact").first
    row.get_by_role("button", name="Accept").click()
    page.wait_for_selector("[data-saved=accepted]")
    assert verdicts(page) == [(row.get_attribute("data-tail"), "accepted")]
    row.get_by_role("button", name="Why?").click()
    page.wait_for_selector(".best-fact .opened [data-explanation]")


def test_an_answer_on_the_map_is_rejected(opened):
    page = opened("/map?entity=Twenty&relation=likes&find=tail")
    row = page.locator("[data-found] li").nth(1)
    assert not row.get_by_role("button", name="Reject").is_visible()
    row.locator("a.name").focus()
    row.get_by_role("button", name="Reject").click()
    page.wait_for_selector("[data-saved=rejected]")
    assert verdicts(page) == [(row.get_attribute("data-tail"), "rejected")]
    page.reload()
    page.wait_for_selector("[data-found] li")
    assert "1 rejected" in page.inner_text("[data-message]")


@pytest.mark.parametrize(
    ("where", "text", "loaded"),
    [
        ("/facts?top=50", "Skip to the list", "[data-list][data-ready]"),
        ("/?find=tail&head=thing+15&relation=likes", "Skip to the predictions", "main"),
        ("/entity/Twenty", "Skip to the predicted facts", "main"),
    ],
)
def test_a_few_keys_lead_to_the_facts(opened, where, text, loaded):
    page = opened(where)
    page.wait_for_selector(loaded)
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == text
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    fact = "document.activeElement.closest('[data-list], li, .table-files, section') !== null"
    assert page.evaluate(fact)
