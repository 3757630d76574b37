"""The map in a browser."""

import threading
from dataclasses import replace

import numpy as np
import pytest

import dualkg as kg
from dualkg.analysis.projection import save_map
from dualkg.data.entity_types import EntityTypes
from dualkg.inference.probability import Calibration
from dualkg.serve.app import application
from dualkg.serve.served import ServedRuns
from dualkg.training.recipe import ModelConfig
from tests.conftest import graph_of
from tests.processes import LIMIT
from tests.serve.browser.conftest import PHONE, overflow
from tests.serve.conftest import serving

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
    assert page.url.partition("#")[0].endswith("/map")


def test_a_query_colours_the_map_and_is_in_the_address(opened):
    page = ready(opened("/map"))
    page.fill("#entity", "twent")
    page.wait_for_selector("#entity[aria-expanded=true]")
    page.keyboard.press("Enter")
    page.keyboard.type("lik")
    page.wait_for_selector("#relation[aria-expanded=true]")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-found] li")
    # The view of the map, behind #, is written a moment after it has moved.
    assert page.url.partition("#")[0].endswith(QUERY + "&find=tail")
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


def test_an_entity_is_found_and_the_view_is_in_the_address(opened):
    page = ready(opened("/map", reduced_motion="reduce"))
    page.fill("#entity", "twenty-one")
    page.wait_for_selector("#entity[aria-expanded=true]")
    page.keyboard.press("Enter")
    page.wait_for_url("**/map#*")
    found = page.evaluate("fetch('/api/map').then((reply) => reply.json())")
    x, y, zoom, _ = page.url.partition("#")[2].split(",")
    assert float(x) == pytest.approx(found["x"][21], abs=1e-3)
    assert float(y) == pytest.approx(found["y"][21], abs=1e-3)
    assert float(zoom) > 1
    page.reload()
    ready(page)
    page.click("[data-map-does=in]")
    page.wait_for_url(lambda url: float(url.partition("#")[2].split(",")[2]) > float(zoom))
    assert page.url.partition("#")[2].split(",")[:2] == [x, y]


@pytest.mark.parametrize("by", ["role", "degree", "community"])
def test_entities_are_coloured(opened, by):
    page = ready(opened("/map"))
    picture = "document.querySelector('[data-canvas]').toDataURL()"
    before = page.evaluate(picture)
    page.select_option("[data-colouring]", by)
    page.wait_for_url(f"**#0,0,1,{by}")
    assert page.evaluate(picture) != before
    names = page.locator("[data-groups] li").all_inner_texts()
    assert 1 < len(names) <= 8
    page.select_option("[data-colouring]", "")
    assert page.locator("[data-groups]").is_hidden()


@pytest.fixture(scope="module")
def many_entities(tmp_path_factory):
    """A run of 200,000 entities of three types, with a map in 50 clusters."""
    number = 200_000
    random = np.random.default_rng(0)
    heads = random.permutation(number)
    triples = np.stack([heads, heads % 5, random.integers(0, number, number)], axis=1)
    graph = graph_of(triples[20:], triples[:20], num_entities=number)
    folder = tmp_path_factory.mktemp("many") / "many"
    config = ModelConfig(name="DistMult", dim=2)
    model = config.build(graph.shape, seed=0)
    kg.TrainedRun(model, graph, kg.Recipe(model=config)).save(folder)
    entities = np.arange(number)
    types = EntityTypes.of_pairs("a file", ["one", "two", "three"], entities, entities % 3)
    run = kg.load_run(folder)
    replace(Calibration.fit(run.model, run.graph), types=types).save(folder)
    centres = random.uniform(-0.9, 0.9, (50, 2))
    places = centres[entities % 50] + random.normal(0, 0.03, (number, 2))
    save_map(np.clip(places, -1, 1).astype(np.float32), folder / "map.parquet")
    return folder


COLOURED_PIXELS = """() => {
  const canvas = document.querySelector("[data-canvas]");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let number = 0;
  for (let place = 3; place < data.length; place += 4) number += data[place] > 0;
  return number;
}"""
# The commonest colours, by what is left of their bits.
COLOURS = """() => {
  const canvas = document.querySelector("[data-canvas]");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const counts = new Map();
  for (let place = 0; place < data.length; place += 4) {
    if (data[place + 3] < 250) continue;
    const key = [0, 1, 2].map((part) => data[place + part] >> 5).join();
    counts.set(key, (counts.get(key) ?? 0) + 1);
  }
  return [...counts].filter(([, count]) => count > 1000).map(([key]) => key);
}"""
FRAME = """() => new Promise((done) => {
  const started = performance.now();
  document.querySelector("[data-map-does=in]").click();
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - started)));
})"""


@pytest.mark.slow
def test_200_000_points_are_drawn_and_coloured_by_type(browser, many_entities):
    """The times are printed: `pytest -m slow -k 200_000 -s tests/serve/browser`."""
    served = ServedRuns.load([many_entities], device="cpu")
    with serving(application(served)) as address:
        page = browser.new_page(base_url=address)
        page.set_default_timeout(1000 * LIMIT)
        page.goto("/map")
        page.wait_for_selector("[data-canvas][data-ready='200000']")
        assert page.evaluate(COLOURED_PIXELS) > 10_000
        seconds = page.evaluate("performance.getEntriesByName('map drawn')[0].startTime") / 1000
        frames = [page.evaluate(FRAME) for _ in range(5)]
        print(f"{seconds:.2f} s to the first picture, {sorted(frames)[2]:.0f} ms for two frames")

        page.click("[data-map-does=all]")
        page.select_option("[data-colouring]", "type")
        names = page.locator("[data-groups] li").all_inner_texts()
        assert [name.strip() for name in names] == ["one", "two", "three"]
        hues = page.evaluate(COLOURS)
        assert len(set(hues) - {"7,7,7"}) == 3  # names of entities have white edges
        page.context.close()


def test_a_lasso_lists_what_is_inside(opened):
    page = ready(opened("/map"))
    x, y = pixel(page, 21)
    page.click("[data-lasso]")
    page.mouse.move(x - 6, y - 6)
    page.mouse.down()
    for corner in ((6, -6), (6, 6), (-6, 6)):
        page.mouse.move(x + corner[0], y + corner[1])
    page.mouse.up()
    page.wait_for_selector("[data-found] li")
    assert "Twenty-one" in page.locator("[data-found] .name").all_inner_texts()
    assert page.get_attribute("[data-lasso]", "aria-pressed") == "false"


def test_names_are_drawn_at_rest(opened):
    """The entities of the highest degree have names while there is no query."""
    page = ready(opened("/map"))
    drawn = page.evaluate(
        """new Promise((done) => {
          const context = document.querySelector("[data-canvas]").getContext("2d");
          const names = [];
          const usual = context.fillText.bind(context);
          context.fillText = (text, ...place) => { names.push(text); usual(text, ...place); };
          document.querySelector("[data-map-does=all]").click();
          setTimeout(() => done(names), 600);
        })"""
    )
    assert drawn


def test_the_map_without_scripts_says_so(opened):
    page = opened("/map", java_script_enabled=False)
    assert page.locator("[data-veil]").is_hidden()
    assert page.locator("noscript a").get_attribute("href") == "/map.json"


def test_the_map_is_stopped(opened):
    page = opened("/docs")
    page.route(
        "**/api/map?*",
        lambda route: route.fulfill(
            status=202, json={"run": "calibrated", "message": "The map is being made.", "done": 0.4}
        ),
    )
    page.goto("/map")
    page.wait_for_selector("[data-stop]:not([hidden])")
    assert float(page.locator("[data-progress]").evaluate("bar => bar.value")) == 0.4
    page.click("[data-stop]")
    page.wait_for_selector("text=Continue")


def test_the_map_so_far_is_drawn_until_it_is_computed(browser, served, tmp_path):
    """It can be moved meanwhile, and keeps the view."""
    gate = threading.Event()
    random = np.random.default_rng(0)

    def slow(run, *, on_progress, on_positions):
        on_progress(0.0)
        on_positions(random.uniform(-1, 1, (40, 2)))
        on_progress(0.3)
        assert gate.wait(LIMIT)
        return random.uniform(-1, 1, (40, 2))

    runs = ServedRuns([replace(served.get("calibrated"), compute_map=slow)])
    with serving(application(runs)) as address:
        page = browser.new_page(base_url=address)
        page.set_default_timeout(1000 * LIMIT)
        page.goto("/map")
        page.wait_for_selector("[data-canvas][data-so-far='40']")
        assert page.locator("[data-progress]").is_visible()
        assert page.evaluate(COLOURED_PIXELS) > 40
        page.click("[data-map-does=in]")
        page.wait_for_url("**/map#*")
        view = page.url
        gate.set()
        ready(page)
        assert page.locator("[data-veil]").is_hidden()
        assert page.url == view
        page.context.close()
