"""The page of the map; what a browser draws is tested in one."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import Future

import numpy as np
import pytest

from dualkg.analysis.projection import save_map
from dualkg.serve.app import application
from dualkg.serve.limits import Limits
from dualkg.serve.server import request_once
from dualkg.serve.state import Maps, ServedRuns
from tests.serve.conftest import HOSTILE


@pytest.fixture
def mapped(untouched_folders, tmp_path):
    """A run that has a map already."""
    folder = shutil.copytree(untouched_folders[0], tmp_path / "mapped")
    (folder / "map.parquet").unlink(missing_ok=True)
    save_map(np.random.default_rng(0).uniform(-1, 1, (40, 2)), folder / "map.parquet")
    return ServedRuns.load([folder], device="cpu")


def asked(served, address):
    reply = request_once(application(served), address)
    return reply, reply.body.decode()


def test_the_page_holds_the_question(client):
    page = client.get("/map", params={"entity": "Twenty", "relation": "is a", "find": "head"})
    assert page.status_code == 200
    assert 'value="Twenty"' in page.text
    assert 'data-name="thing 20"' in page.text
    assert re.search(r'value="head" checked', page.text)


def test_it_begins_without_one(client):
    page = client.get("/map").text
    assert "40 entities" in page
    assert "data-name" not in page


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_never_markup(client, name):
    page = client.get("/map", params={"entity": name, "relation": "<b>bold</b>"})
    assert page.status_code == 200
    assert "<b>bold" not in page.text
    assert "<script>alert" not in page.text
    assert " style=" not in page.text


def test_a_name_that_is_not_there_gets_a_page(client):
    page = client.get("/map", params={"entity": "Twnty"})
    assert page.status_code == 404
    assert page.headers["content-type"].startswith("text/html")
    assert "No entity is named &#x27;Twnty&#x27;" in page.text
    assert client.get("/map", params={"find": "relation"}).status_code == 422


def test_the_same_for_programs(mapped):
    reply, body = asked(mapped, "/map.json")
    assert reply.status == 200
    assert body == asked(mapped, "/api/map")[1]


def test_a_map_in_the_making_is_told(mapped, monkeypatch):
    monkeypatch.setattr(Maps, "of", lambda self, run: Future())
    reply = request_once(application(mapped, limits=Limits(seconds=2)), "/map.json")
    assert reply.status == 202
    assert b"is being made" in reply.body
