"""A curator's hour: find, check, accept, reject, undo, export, import elsewhere, train again."""

import json
import re
import shutil

import pytest

import dualkg as kg
from dualkg.inference.api import calibrate
from dualkg.serve.app import application
from dualkg.serve.served import ServedRuns
from dualkg.training.run_folder import RunFolder
from tests.processes import LIMIT
from tests.serve.browser.conftest import PHONE, WIDE, overflow
from tests.serve.conftest import serving

pytestmark = pytest.mark.slow
RELATION = "borders"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A calibrated run on `world`."""
    folder = tmp_path_factory.mktemp("curator") / "world"
    graph = kg.load_graph("world")
    model = kg.ComplEx(graph.shape, dim=16)
    kg.train(model, graph, regularizer=kg.DURA(0.05), epochs=8, out=folder)
    calibrate(folder)
    return folder


def listed(page):
    page.wait_for_selector("[data-list][data-ready]", timeout=1000 * LIMIT)
    return page


def triple_of(row):
    return tuple(row.get_attribute(f"data-{part}") for part in ("head", "relation", "tail"))


def figure_of(row) -> str:
    """The probability that a row shows. Before it is drawn, a row has no inner text."""
    text = row.locator(".percent").first.text_content()
    return re.search(r"[<>]?[0-9.]+ %", text)[0]


def test_a_curators_hour(browser, world, tmp_path):
    wrong = []
    with serving(application(ServedRuns.load([world], device="cpu"))) as address:
        context = browser.new_context(viewport=WIDE, base_url=address, accept_downloads=True)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console",
            lambda message: wrong.append(message.text) if message.type == "error" else None,
        )

        # Find: new facts, in which no fact is listed in both directions.
        page.goto(f"/facts?relation={RELATION}&top=50")
        rows = listed(page).locator(".fact")
        triples = [triple_of(row) for row in rows.all()]
        assert len({frozenset((head, tail)) for head, _, tail in triples}) == len(triples) == 50
        fact, second, third = triples[:3]
        figure = figure_of(rows.nth(0))

        # Why, below the row, with the same number.
        rows.nth(0).get_by_role("button", name="Why?").click()
        why = rows.nth(0).locator(".opened [data-explanation]")
        why.wait_for()
        assert figure in why.inner_text()
        assert "Known facts of" in why.inner_text()
        rows.nth(0).locator("button.figure").click()
        likely = rows.nth(0).locator(".opened .likely")
        likely.wait_for()
        assert figure in likely.inner_text()
        assert "On test" in likely.inner_text()

        # The same number elsewhere.
        params = dict(zip(("head", "relation", "tail"), fact, strict=True))
        [score] = page.request.get("/api/score", params=params).json()["scores"]
        head, relation, tail = fact
        reverse = {"head": tail, "relation": relation, "tail": head}
        [of_reverse] = page.request.get("/api/score", params=reverse).json()["scores"]
        assert of_reverse["probability"] == pytest.approx(score["probability"], rel=1e-4)
        other = context.new_page()
        for query in (
            {"find": "tail", "head": head, "relation": relation, "k": "200"},
            {"find": "head", "relation": relation, "tail": tail, "k": "200"},
        ):
            other.goto("/?" + "&".join(f"{key}={value}" for key, value in query.items()))
            row = other.locator(f'.answer[data-head="{head}"][data-tail="{tail}"]')
            assert figure_of(row) == figure

        # Accept, reject and undo by keys; the row is in the address.
        page.keyboard.press("Escape")
        rows.nth(0).focus()
        for key in "arrr":
            page.keyboard.press(key)
        page.wait_for_selector("[data-count=rejected]:has-text('3')")
        page.keyboard.press("u")
        page.wait_for_selector("[data-count=rejected]:has-text('2')")
        assert "row=" in page.url
        place = page.url
        rows.nth(3).locator(".what a").first.click()
        page.wait_for_url("**/entity/**")
        page.go_back()
        listed(page)
        assert page.url == place
        focused = page.evaluate("document.activeElement.closest('[data-row]')?.dataset.row ?? ''")
        assert focused == rows.nth(3).get_attribute("data-row")

        # Filters have all decisions, and their numbers agree.
        for show, number in (("Accepted", 1), ("Rejected", 2), ("Undecided", 50)):
            page.get_by_role("link", name=show, exact=True).click()
            page.wait_for_url(f"**show={ {'Undecided': 'open'}.get(show, show.lower()) }**")
            assert listed(page).locator(".fact").count() == number
            if show == "Accepted":
                assert triple_of(page.locator(".fact").first) == fact
                assert figure_of(page.locator(".fact").first) == figure

        # They count on the query page and on that of an entity.
        page.goto(f"/?find=tail&head={second[0]}&relation={relation}&k=50")
        names = page.locator(".answers").first.locator(".answer .what a").all_inner_texts()
        assert second[2] not in names
        page.get_by_text("Rejected", exact=False).first.click()
        assert page.locator("details.rejected .answer").get_attribute("data-tail") == second[2]
        page.goto(f"/?find=tail&head={head}&relation={relation}")
        assert page.locator(".known-answers .chip.accepted").count() == 1
        page.goto(f"/entity/{head}")
        for section in ("known", "predicted"):
            assert page.locator(f".of-{section} .chip.accepted").count() == 1

        # A decision beside an answer, and another taken back after a reload.
        page.goto(f"/?find=tail&head={head}&relation={relation}")
        page.locator(".answer").nth(5).get_by_role("button", name="Reject").click()
        page.wait_for_selector("[data-saved=rejected]")
        page.goto("/decisions")
        assert page.locator("[data-decision]").count() == 4
        page.locator("[data-decision]").first.get_by_role("button", name="Undo").click()
        page.wait_for_selector("[data-count=rejected]:has-text('2')")
        note = page.locator(f'[data-decision][data-tail="{tail}"] [data-note]')
        note.fill("seen on a map")
        note.blur()
        page.wait_for_selector("text=The note is saved.")
        page.goto("/decisions?q=seen+on+a+map")
        assert page.locator("[data-decision]").count() == 1

        # Out, in every format.
        page.goto("/decisions")
        with page.expect_download() as download:
            page.get_by_role("link", name="JSON", exact=True).click()
        exported = tmp_path / "decisions.json"
        download.value.save_as(exported)
        decided = json.loads(exported.read_text("utf-8"))["decisions"]
        assert [item["verdict"] for item in decided].count("accepted") == 1
        [accepted] = [item for item in decided if item["verdict"] == "accepted"]
        assert accepted["probability"] == pytest.approx(score["probability"], rel=1e-4)
        assert len(page.request.get("/decisions.nt?verdict=rejected").text().splitlines()) == 2

    # In, on a server of another copy of the run.
    elsewhere = shutil.copytree(world, tmp_path / "elsewhere")
    RunFolder(elsewhere).decisions.unlink()
    with serving(application(ServedRuns.load([elsewhere], device="cpu"))) as address:
        for choices in ({"viewport": WIDE}, {"viewport": PHONE, "color_scheme": "dark"}):
            page = browser.new_context(base_url=address, **choices).new_page()
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.goto("/decisions")
            with page.expect_event("load"):
                page.set_input_files("[data-import]", exported)
            page.wait_for_selector(f'[data-decision][data-tail="{tail}"]')
            assert page.locator("[data-decision]").count() == 3
            assert overflow(page) == 0
        [again] = page.request.get("/api/score", params=params).json()["scores"]
        assert again["verdict"] == "accepted"
        assert again["probability"] == pytest.approx(score["probability"], rel=1e-6)

    # Train with them, and see the change.
    changes = {
        "data.decisions": str(elsewhere),
        "model.dim": 16,
        "regularizer.weight": 0.05,
        "training.epochs": 8,
    }
    trained = kg.fit("world", tune=False, changes=changes, out=tmp_path / "second")
    graph = trained.graph
    ids = [graph.entities.id(head), graph.relations.id(relation), graph.entities.id(tail)]
    rows = graph.train.tolist()
    assert ids in rows
    assert ids[::-1] in rows
    assert len(graph.rejected) == 4
    before = kg.Predictor.of(kg.load_run(world))
    after = kg.Predictor(trained.model, graph)

    def rank(predictor, triple):
        answers = predictor.tails(*triple[:2], k=len(graph.entities), known="mark")
        names = [answer.name for answer in sorted(answers, key=lambda answer: -answer.score)]
        return names.index(triple[2])

    assert rank(after, second) > rank(before, second)
    assert rank(after, third) > rank(before, third)
    assert after.triple(*fact).split == "train"
    assert not wrong
