"""The page of the map; tests of the drawing are in browser/."""

import errno
import json
import re
import shutil
from dataclasses import replace
from html import unescape
from threading import Event

import numpy as np
import pytest

import dualkg as kg
from dualkg.analysis import projection
from dualkg.analysis.projection import save_map
from dualkg.serve.app import application
from dualkg.serve.served import ServedRuns
from dualkg.serve.server import request_once
from dualkg.serve.service import Limits
from tests.processes import LIMIT
from tests.serve.conftest import HOSTILE


@pytest.fixture
def mapped(untouched_folders, tmp_path):
    """A run that has a map already."""
    folder = shutil.copytree(untouched_folders[0], tmp_path / "mapped")
    (folder / "map.parquet").unlink(missing_ok=True)
    save_map(np.random.default_rng(0).uniform(-1, 1, (40, 2)), folder / "map.parquet")
    return ServedRuns.load([folder], device="cpu")


def get(served, address):
    reply = request_once(application(served), address)
    return reply, reply.body.decode()


def test_the_form_has_the_query(client):
    page = client.get("/map", params={"entity": "Twenty", "relation": "is a", "find": "head"})
    assert page.status_code == 200
    assert 'value="Twenty"' in page.text
    assert 'data-name="thing 20"' in page.text
    assert re.search(r'value="head" checked', page.text)


def test_the_form_is_empty_without_a_query(client):
    page = client.get("/map").text
    assert "40 entities" in page
    assert "data-name" not in page


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_not_markup(client, name):
    page = client.get("/map", params={"entity": name, "relation": "<b>bold</b>"})
    assert page.status_code == 200
    assert "<b>bold" not in page.text
    assert "<script>alert" not in page.text
    assert " style=" not in page.text


def test_an_unknown_name_gets_a_page(client):
    page = client.get("/map", params={"entity": "Twnty"})
    assert page.status_code == 404
    assert page.headers["content-type"].startswith("text/html")
    assert "No entity is named &#39;Twnty&#39;" in page.text
    assert client.get("/map", params={"find": "relation"}).status_code == 422


def test_the_map_as_json(mapped):
    reply, body = get(mapped, "/map.json")
    assert reply.status == 200
    assert body == get(mapped, "/api/map")[1]


def test_the_types_of_a_calibration_are_colours(mapped, tmp_path):
    """Of several types an entity has the rarest that has a colour; there are eight types."""
    assert json.loads(get(mapped, "/map.json")[1])["types"] is None
    assert 'value="type"' not in get(mapped, "/map")[1]
    graph = mapped.default.graph
    names = [graph.entities[id] for id in range(12, 40)]
    lines = [f"{name}\tthing 20" for name in names]
    lines += [f"{names[id]}\ttype {id}" for id in range(8)]
    lines += [f"{names[0]}\t<b>rare</b>", f"{names[27]}\t<b>rare</b>"]
    path = tmp_path / "types.tsv"
    path.write_text("\n".join(lines), encoding="utf-8")
    folder = mapped.default.run.folder
    kg.calibrate(folder, types_file=path)

    typed = ServedRuns.load([folder], device="cpu")
    found = json.loads(get(typed, "/map.json")[1])
    assert found["type_names"][:3] == ["Twenty", "<b>rare</b>", "type 0"]
    assert len(found["type_names"]) == 10
    types = [found["type_names"][number] if number >= 0 else None for number in found["types"]]
    # Five of the types with one entity have a colour.
    assert types[12:22] == [f"type {id}" for id in range(5)] + 5 * ["Twenty"]
    assert types[39] == "<b>rare</b>"
    assert types[0] is None
    assert '<option value="type">by type' in get(typed, "/map")[1]
    row = re.search(r'data-facets="([^"]*)"', get(typed, "/entity/thing%2012")[1])
    facets = json.loads(unescape(row[1]))
    assert ["Twenty", "type 0", "<b>rare</b>"] in (facets["Type of head"], facets["Type of tail"])


def test_a_pending_map(mapped):
    finish = Event()
    run = replace(mapped.default, compute_map=lambda run, **reports: finish.wait(LIMIT))
    app = application(ServedRuns([run]), limits=Limits(map_share=0.0))
    reply = request_once(app, "/map.json")
    finish.set()
    assert reply.status == 202
    assert b"is being computed" in reply.body


def test_the_predictions_of_a_query(client):
    params = {"entity": "Twenty", "relation": "likes"}
    page = client.get("/map/predictions", params=params)
    query = {"head": "Twenty", "relation": "likes", "k": 200}
    results = client.get("/query.json", params=query).json()
    predictions = results["predictions"]
    known = results["known"]
    assert page.status_code == 200
    assert f"{len(predictions)} new, {len(known)} known" in page.text
    ids = [int(id) for id in re.findall(r'<li[^>]* data-id="(\d+)"', page.text)]
    predictions.sort(key=lambda prediction: -prediction["probability"])
    assert ids == [item["id"] for item in predictions + known]
    strengths = [float(value) for value in re.findall(r'data-strength="([\d.e-]+)"', page.text)]
    assert max(strengths) == strengths[0] == 1
    assert client.get("/map/predictions", params=params | {"entity": "nobody"}).status_code == 404


def test_a_map_that_cannot_be_saved_is_shown(untouched_folders, tmp_path, monkeypatch):
    folder = shutil.copytree(untouched_folders[0], tmp_path / "fixed")
    (folder / "map.parquet").unlink(missing_ok=True)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(folder / "map.parquet"))

    monkeypatch.setattr(projection, "save_map", refuse)
    reply, _ = get(ServedRuns.load([folder], device="cpu"), "/api/map")
    assert reply.status == 200
    assert not (folder / "map.parquet").exists()


def test_the_first_picture_does_not_wait_for_the_map_of_another_run(client_of, served):
    finish = Event()

    def slow(run, **reports):
        assert finish.wait(LIMIT)
        return np.zeros((40, 2))

    client = client_of(runs=ServedRuns([replace(run, compute_map=slow) for run in served]))
    assert client.get("/api/map?wait=0").status_code == 202
    second = client.get("/api/map?run=plain&wait=60&so_far=all")
    assert second.status_code == 202
    assert len(second.json()["so_far"]["x"]) == 40
    finish.set()


def test_the_map_so_far(client_of, mapped):
    """Principal components, and later positions, come with the names once."""
    finish = Event()
    positions = np.random.default_rng(0).uniform(-1, 1, (40, 2)).round(4)

    def slow(run, *, on_progress, on_positions):
        on_positions(positions)
        assert finish.wait(LIMIT)
        return positions

    client = client_of(runs=ServedRuns([replace(mapped.default, compute_map=slow)]))
    everything = client.get("/api/map?wait=60&so_far=all")
    assert everything.status_code == 202
    so_far = everything.json()["so_far"]
    assert so_far["x"] == positions[:, 0].tolist()
    assert len(so_far["names"]) == len(so_far["degrees"]) == 40
    later = client.get("/api/map?wait=0&so_far=positions").json()["so_far"]
    assert later == {"x": so_far["x"], "y": so_far["y"]}
    assert "so_far" not in client.get("/api/map?wait=0").json()
    finish.set()
    final = client.get("/api/map?wait=60").json()
    assert (final["x"], final["names"]) == (so_far["x"], so_far["names"])
