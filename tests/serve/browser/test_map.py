"""The map in a browser."""

import numpy as np
import pytest

from dualkg.analysis.projection import save_map
from tests.serve.browser.conftest import PHONE, overflow

QUERY = "/map?entity=thing+20&relation=likes"


@pytest.fixture(scope="module", autouse=True)
def places(run_folders):
    """A stored map, so that none is computed."""
    for folder in run_folders:
        if not (folder / "map.parquet").exists():
            save_map(np.random.default_rng(0).uniform(-1, 1, (40, 2)), folder / "map.parquet")


def pixel(page, number: int) -> tuple[float, float]:
    """Where a point is on the screen, when all of the map is seen."""
    found = page.evaluate("fetch('/api/map').then((reply) => reply.json())")
    box = page.locator("[data-canvas]").bounding_box()
    scale = min(box["width"], box["height"]) / 2.12
    return (
        box["x"] + box["width"] / 2 + found["x"][number] * scale,
        box["y"] + box["height"] / 2 + found["y"][number] * scale,
    )


def ready(page):
    page.wait_for_selector("[data-canvas][data-ready='40']")
    return page


def test_a_point_shows_its_name_and_opens_its_page(opened):
    page = ready(opened("/map"))
    page.mouse.move(*pixel(page, 21))
    page.wait_for_selector("[data-tip]:not([hidden])")
    assert page.inner_text("[data-tip]") == "Twenty-one"
    page.mouse.down()
    page.mouse.up()
    page.wait_for_url("**/entity/thing%2021")


@pytest.mark.slow
def test_dragging_does_not_open_a_page(opened):
    page = ready(opened("/map"))
    x, y = pixel(page, 21)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 40, y + 30, steps=4)
    page.mouse.up()
    page.mouse.move(x + 40, y + 30)
    page.wait_for_selector("[data-tip]:not([hidden])")
    assert page.inner_text("[data-tip]") == "Twenty-one"
    assert page.url.endswith("/map")


def test_a_query_colours_the_map_and_is_in_the_address(opened):
    page = ready(opened("/map"))
    page.fill("#entity", "twent")
    page.wait_for_selector("#entity[aria-expanded=true]")
    page.keyboard.press("Enter")
    page.keyboard.type("lik")
    page.wait_for_selector("#relation[aria-expanded=true]")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-found] li")
    assert page.url.endswith(QUERY + "&find=tail")
    assert "Twenty" in page.inner_text("[data-message]")
    page.reload()
    page.wait_for_selector("[data-found] li")
    page.locator("[data-found] a").first.focus()
    page.wait_for_selector("[data-tip]:not([hidden])")


@pytest.mark.slow
def test_keys_move_the_map(opened):
    page = ready(opened(QUERY, reduced_motion="reduce"))
    page.wait_for_selector("[data-found] li")
    picture = "document.querySelector('[data-canvas]').toDataURL()"
    page.locator("[data-canvas]").focus()
    seen = [page.evaluate(picture)]
    for key in ("+", "ArrowLeft", "ArrowUp", "-", "0"):
        page.keyboard.press(key)
        page.evaluate(
            "new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
        )
        seen.append(page.evaluate(picture))
    assert seen[-1] == seen[0]
    assert len(set(seen)) == len(seen) - 1


def test_the_page_polls_while_the_map_is_computed(opened, browser, address):
    page = opened("/docs")
    waits = iter([True, False])

    def answer(route):
        if next(waits, False):
            route.fulfill(
                status=202, json={"run": "calibrated", "message": "The map is being made."}
            )
        else:
            route.continue_()

    page.route("**/api/map?*", answer)
    page.goto("/map")
    page.wait_for_selector("text=The map is being made.")
    ready(page)
    assert page.locator("[data-veil]").is_hidden()


@pytest.mark.slow
def test_on_a_phone(opened):
    page = ready(opened(QUERY, viewport=PHONE, has_touch=True, color_scheme="dark"))
    page.wait_for_selector("[data-found] li")
    assert overflow(page) == 0
    page.locator("[data-canvas]").scroll_into_view_if_needed()
    page.touchscreen.tap(*pixel(page, 21))
    page.wait_for_selector("[data-tip] a")
    assert page.url.endswith(QUERY)
