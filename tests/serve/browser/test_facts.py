"""The page of new facts in a browser."""

import csv
import io
import json
import threading
from dataclasses import replace

import pytest

from dualkg.inference.completion import complete
from dualkg.serve.app import application
from dualkg.serve.served import ServedRuns
from dualkg.training.run_folder import RunFolder
from tests.processes import LIMIT
from tests.serve.browser.conftest import PHONE, overflow
from tests.serve.conftest import serving


@pytest.fixture(autouse=True)
def undecided(run_folders):
    """Each test starts without decisions and leaves none."""
    RunFolder(run_folders[0]).decisions.unlink(missing_ok=True)
    yield
    RunFolder(run_folders[0]).decisions.unlink(missing_ok=True)


def listed(page):
    page.wait_for_selector("[data-list][data-ready]")
    return page


def parts(row) -> list[str]:
    return [
        row.locator(part).inner_text()
        for part in (".what a >> nth=0", ".what .relation", ".what a >> nth=1")
    ]


def rows_of(page) -> list[list[str]]:
    return [line.split("\t")[:3] for line in page.request.get("/facts.tsv").text().splitlines()[1:]]


def test_an_accepted_fact_is_in_the_file(opened):
    page = listed(opened("/facts?relation=likes&top=50"))
    # A name with a line end is refused in a file of tab-separated values.
    row = page.locator(".fact[data-head^=thing][data-tail^=thing]").first
    row.get_by_role("button", name="Accept").click()
    page.wait_for_selector("[data-count=accepted]:has-text('1')")
    [[head, relation, tail]] = rows_of(page)
    assert relation == "likes"
    assert page.request.get("/api/decisions").json()["decisions"][0]["head"] == head
    assert tail

    page.reload()
    listed(page)
    assert page.locator(".fact[data-verdict=accepted]").count() == 1
    page.get_by_role("link", name="Accepted", exact=True).click()
    page.wait_for_url("**show=accepted**")
    listed(page)
    assert page.locator(".fact:visible").count() == 1
    page.locator(".fact:visible").get_by_role("button", name="Accept").click()  # taken back
    page.wait_for_selector("[data-count=accepted]:has-text('0')")
    assert rows_of(page) == []


def test_decisions_by_keyboard(opened):
    page = listed(opened("/facts?top=50"))
    page.keyboard.press("j")
    page.keyboard.press("a")
    page.keyboard.press("r")
    page.keyboard.press("a")
    page.wait_for_selector("[data-count=accepted]:has-text('2')")
    verdicts = page.eval_on_selector_all(
        ".fact", "rows => rows.slice(0, 4).map((row) => row.dataset.verdict ?? '')"
    )
    assert verdicts == ["accepted", "rejected", "accepted", ""]
    assert page.evaluate("document.activeElement.querySelector('.rank').textContent") == "4"
    page.keyboard.press("u")
    page.keyboard.press("u")
    page.wait_for_selector("[data-count=rejected]:has-text('0')")
    page.wait_for_selector("[data-count=accepted]:has-text('1')")
    assert page.evaluate("document.activeElement.querySelector('.rank').textContent") == "2"
    page.keyboard.press("k")
    assert page.evaluate("document.activeElement.querySelector('.rank').textContent") == "1"


def facet(page, name: str, value: str):
    return page.locator(f'[data-facet-value="{name}:{value}"]')


def number_of(page, name: str, value: str) -> int:
    return int(facet(page, name, value).locator(".number").inner_text())


def test_facets_filter_the_list_and_count(opened):
    page = listed(opened("/facts?top=100&types=false"))
    by_relation = page.eval_on_selector_all(
        ".fact", "rows => rows.map((row) => row.dataset.relation)"
    )
    number = by_relation.count("likes")
    assert 0 < number < 100
    assert number_of(page, "Relation", "likes") == number
    facet(page, "Relation", "likes").click()
    assert page.locator(".fact:visible").count() == number
    assert page.inner_text("[data-facets-status]") == f"{number} of 100"
    # The choice within a facet does not change its own counts, but those of the others.
    assert number_of(page, "Relation", "is a") == by_relation.count("is a")
    row = page.locator(".fact:visible").first
    row.get_by_role("button", name="Accept").click()
    page.wait_for_selector("[data-count=accepted]:has-text('1')")
    assert number_of(page, "Verdict", "accepted") == 1
    assert number_of(page, "Verdict", "undecided") == number - 1

    # The choice is in the address; what is decided on stays until it changes.
    facet(page, "Verdict", "undecided").click()
    assert page.locator(".fact:visible").count() == number - 1
    next_row = page.locator(".fact:visible").first
    name = next_row.get_attribute("data-row")
    next_row.get_by_role("button", name="Reject").click()
    page.wait_for_selector("[data-count=rejected]:has-text('1')")
    assert page.locator(f".fact[data-row='{name}']").is_visible()
    page.reload()
    listed(page)
    page.wait_for_selector(f"[data-facets-status]:text-is('{number - 2} of 100')")
    page.get_by_role("button", name="All again").click()
    assert page.locator(".fact:visible").count() == 100
    assert "facet=" not in page.url


def shown(page) -> list[tuple[str, ...]]:
    return [
        tuple(row)
        for row in page.eval_on_selector_all(
            ".fact",
            """rows => rows.filter((row) => row.checkVisibility()).map(
              (row) => [row.dataset.head, row.dataset.relation, row.dataset.tail])""",
        )
    ]


def in_file(page, suffix: str) -> list[tuple[str, ...]]:
    address = page.get_attribute(f"[data-list] .table-files a[href*='.{suffix}']", "href")
    text = page.request.get(address).text().removeprefix("\ufeff")
    if suffix == "json":
        rows = json.loads(text)["rows"]
    else:
        rows = csv.DictReader(io.StringIO(text, newline=""))
    return [(row["head"], row["relation"], row["tail"]) for row in rows]


def test_files_have_the_rows_of_the_page(opened):
    """With facets, the switch for unusual types, a verdict, and after a reload."""
    page = listed(opened("/facts?top=200&types=false"))
    page.locator(".fact[data-relation=likes]").first.get_by_role("button", name="Accept").click()
    page.wait_for_selector("[data-count=accepted]:has-text('1')")
    assert in_file(page, "json") == shown(page)

    facet(page, "Relation", "likes").click()
    likes = shown(page)
    assert 0 < len(likes) < 200
    assert in_file(page, "json") == likes
    facet(page, "Verdict", "undecided").click()
    assert in_file(page, "json") == shown(page)
    page.reload()
    listed(page)
    assert in_file(page, "json") == shown(page)
    page.evaluate("localStorage.setItem('hide-unusual', 'yes')")
    page.reload()
    listed(page)
    links = page.locator("[data-list-file]").evaluate_all("all => all.map((link) => link.href)")
    assert len(links) == 5
    assert all("hide_unusual=true" in link and "facet=Relation%3Alikes" in link for link in links)
    as_json = page.get_attribute("footer a[data-list-file]", "href")
    assert len(page.request.get(as_json).json()["facts"]) == len(shown(page))


@pytest.mark.slow
def test_a_list_waits_for_another_completion(opened):
    page = opened("/docs", allow="status of 503")
    busy = iter([True])

    def answer(route):
        if next(busy, False):
            route.fulfill(
                status=503, json={"error": "Another completion is running.", "suggestions": []}
            )
        else:
            route.continue_()

    page.route("**/facts/rows*", answer)
    page.goto("/facts?top=50")
    page.wait_for_selector("text=Waiting for another completion")
    assert listed(page).locator(".fact").count() == 50


def test_a_refused_decision_is_undone(opened):
    page = listed(opened("/facts?top=50", allow="status of 503"))
    page.route(
        "**/api/decisions",
        lambda route: route.fulfill(
            status=503, json={"error": "There is no room.", "suggestions": []}
        ),
    )
    page.locator(".fact").first.get_by_role("button", name="Reject").click()
    page.wait_for_selector("text=There is no room.")
    assert page.locator(".fact[data-verdict]").count() == 0


@pytest.mark.slow
def test_filters_by_relation_and_probability(opened):
    page = listed(opened("/facts"))
    page.select_option("#relation", "is a")
    page.locator("#min-probability").press("ArrowRight")
    assert page.inner_text("[data-threshold]") == "5 %"
    page.get_by_role("button", name="Find").click()
    page.wait_for_url("**/facts?relation=is+a&min_probability=0.05&top=100&types=false")
    listed(page)
    assert set(page.locator(".fact .relation").all_inner_texts()) <= {"is a"}


@pytest.mark.slow
def test_on_a_phone(opened):
    page = listed(opened("/facts?top=500", viewport=PHONE, color_scheme="dark"))
    assert page.locator(".fact").count() == 500
    assert overflow(page) == 0


@pytest.fixture
def slow_searches(browser, served):
    """A page of a server whose searches report the best so far, and go on when they are told to."""
    gate = threading.Event()

    def waiting(*args, on_progress, on_best, **options):
        found = complete(*args, **options)
        on_progress(1, 4)
        on_best(found.first(10))
        while not gate.wait(0.01):
            on_progress(1, 4)
        return found

    runs = ServedRuns([replace(served.get("calibrated"), complete=waiting)])
    with serving(application(runs)) as address:
        page = browser.new_page(base_url=address)
        page.set_default_timeout(1000 * LIMIT)
        yield page, gate
        gate.set()
        page.context.close()


def test_provisional_rows_are_replaced_by_the_final_list(slow_searches):
    page, gate = slow_searches
    page.goto("/facts?top=20&types=false")
    page.wait_for_selector(".fact >> nth=9")
    assert page.locator("[data-provisional]").is_visible()
    assert page.locator("[data-list] .table-files").is_hidden()
    assert page.locator("[data-progress]").evaluate("bar => bar.value / bar.max") == 0.25
    gate.set()
    listed(page)
    assert page.locator(".fact").count() == 20
    assert page.locator("[data-provisional]").is_hidden()
    assert page.locator("[data-list] .table-files").is_visible()


def test_stop_keeps_the_rows_and_says_what_they_are(slow_searches):
    page, _ = slow_searches
    page.goto("/facts?top=20&types=false")
    page.wait_for_selector(".fact >> nth=9")
    page.wait_for_selector("[data-stop]:visible")
    page.click("[data-stop]")
    listed(page)
    assert page.inner_text("[data-status]") == "Stopped after 25 % of the search. Search again"
    number = page.locator(".fact").count()
    assert f"{number} provisional rows" in page.inner_text("[data-provisional]")
    assert page.locator("[data-list] .table-files").is_hidden()
    # Rows that were kept can be decided on.
    page.keyboard.press("j")
    page.keyboard.press("a")
    page.wait_for_selector("[data-count=accepted]:has-text('1')")
