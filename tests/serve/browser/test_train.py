"""One's own data in a browser: a file is dropped, inspected and trained on, and its run is open."""

import pytest

from dualkg.serve.app import application
from dualkg.serve.served import ServedRuns
from tests.processes import LIMIT
from tests.serve.browser.conftest import PHONE, overflow
from tests.serve.conftest import serving

TEXT = "".join(
    f"a{i}\tlikes\ta{(i * 7 + 1) % 40}\na{i}\tknows\ta{(i * 3 + 5) % 40}\n" for i in range(40)
)
DROP = """([text, name]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([text], name));
  const event = new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
  document.querySelector("[data-drop]").dispatchEvent(event);
}"""


@pytest.fixture
def page(browser, served, tmp_path):
    """A page of a server that trains, which fails the test if a script fails."""
    wrong = []
    runs = ServedRuns(list(served))  # another run is added to them
    app = application(runs, training_folder=tmp_path, device="cpu")
    with serving(app) as address:
        context = browser.new_context(base_url=address, viewport=PHONE)
        page = context.new_page()
        page.set_default_timeout(1000 * LIMIT)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        yield page
        context.close()
    assert not wrong


def test_a_file_is_inspected(page):
    page.goto("/")
    page.get_by_role("link", name="Train").click()
    page.wait_for_selector("[data-drop]")
    page.evaluate(DROP, ["no triples", "a.tsv"])
    page.wait_for_selector("[role=alert]")
    page.evaluate(DROP, [TEXT, "my facts.tsv"])
    page.wait_for_selector("[data-inspection]:not([hidden])")
    assert page.input_value("#name") == "my-facts"
    assert page.locator("[data-counts] dd").first.inner_text() == "40"
    assert page.locator("[data-examples] tr").count() == 8
    assert overflow(page) == 0


@pytest.mark.slow
def test_a_file_is_trained_on_and_its_run_opened(page):
    page.goto("/train")
    page.evaluate(DROP, [TEXT, "mine.tsv"])
    page.fill("#epochs", "3")
    page.get_by_role("button", name="Train").click()
    page.wait_for_url("**/training?name=mine")
    page.wait_for_selector("[data-training][data-over]")
    assert page.inner_text("[data-training] .lead") == "Finished"
    assert page.locator(".curve .line").count() == 2
    assert overflow(page) == 0
    page.get_by_role("link", name="Open the result").click()
    page.wait_for_url("**/?run=mine")
    assert page.inner_text("h1") == "mine"
    page.wait_for_selector("[data-best] .best-fact >> nth=0")
    assert page.input_value("#run") == "mine"


@pytest.mark.slow
def test_a_training_is_stopped(page):
    page.goto("/train")
    page.evaluate(DROP, [TEXT, "mine.tsv"])
    page.fill("#epochs", "1000")
    page.get_by_role("button", name="Train").click()
    page.wait_for_url("**/training?name=mine")
    page.wait_for_selector("text=/epoch [0-9]/")
    page.get_by_role("button", name="Stop").click()
    page.wait_for_selector("[data-training][data-over]")
    assert page.inner_text("[data-training] .lead") == "Stopped"
