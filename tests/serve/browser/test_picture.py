"""The screenshots of the README and of the site: `make picture` stores them."""

import os
from pathlib import Path

import pytest

import dualkg as kg
from dualkg.inference.probability import calibration_for
from dualkg.serve.app import application
from dualkg.serve.served import ServedRuns
from tests.serve.conftest import serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A run that has learned something, with its probabilities."""
    folder = tmp_path_factory.mktemp("picture") / "world"
    graph = kg.load_graph("world")
    model = kg.ComplEx(graph.shape, dim=100)
    regularizer = kg.DURA(0.05, plain=0.5, mapped=1.5)
    kg.train(model, graph, regularizer=regularizer, batch_size=100, epochs=30).save(folder)
    calibration_for(kg.load_run(folder))
    with serving(application(ServedRuns.load([folder], device="cpu"))) as found:
        yield found


@pytest.mark.parametrize(("scheme", "name"), [("light", "explorer"), ("dark", "explorer-dark")])
def test_the_picture_of_the_readme(opened, tmp_path, scheme, name):
    """Known facts are there, and some that are predicted."""
    size = {"width": 1200, "height": 1400}
    page = opened(
        "/entity/Switzerland", viewport=size, device_scale_factor=1.5, color_scheme=scheme
    )
    page.get_by_role("heading", name="Predicted facts").wait_for()
    assert page.get_by_role("link", name="France", exact=True).count() > 0
    path = Path(os.environ.get("DUALKG_PICTURES") or tmp_path) / f"{name}.png"
    page.screenshot(path=path, clip={"x": 0, "y": 0, **size})
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 500_000
