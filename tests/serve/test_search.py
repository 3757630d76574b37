"""The search in the header: one list of names, while typing, as a page and in error messages."""

import re

import numpy as np
import pytest

from dualkg.data.graph import SPLITS
from tests.serve.conftest import HOSTILE
from tests.serve.test_pages import Audit, audited


def test_entities_are_found_with_what_they_are(client, served):
    graph = served.get(None).graph
    found = client.get("/search.json", params={"q": "thing 20"}).json()
    [twenty] = found["entities"]
    id = twenty["id"]
    every = np.concatenate([graph.split(split) for split in SPLITS])
    of_twenty = every[(every[:, [0, 2]] == id).any(1)]
    assert twenty["degree"] == len(of_twenty)
    # The commonest of six roles.
    counts = {
        (relation, end): int(((every[:, 1] == relation) & (every[:, column] == id)).sum())
        for relation in range(3)
        for end, column in (("head", 0), ("tail", 2))
    }
    role = (twenty["relation"]["id"], twenty["end"])
    assert counts[role] == max(counts.values())
    arrow = "{} →" if twenty["end"] == "head" else "→ {}"
    name = twenty["relation"]["label"]
    assert twenty["about"] == f"{arrow.format(name)} · {len(of_twenty)} facts"
    assert (twenty["text"], twenty["note"]) == ("Twenty", "thing 20")


def test_relations_are_found_too(client, served):
    graph = served.get(None).graph
    found = client.get("/search.json", params={"q": "lik"}).json()
    assert found["entities"] == []
    [likes] = found["relations"]
    number = sum(int((graph.split(split)[:, 1] == likes["id"]).sum()) for split in SPLITS)
    assert (likes["name"], likes["num_triples"]) == ("likes", number)


def test_similar_names_are_listed_only_where_no_name_has_the_text(client):
    found = client.get("/search.json", params={"q": "likse"}).json()
    assert [match["match_type"] for match in found["relations"]] == ["fuzzy"]
    assert client.get("/search.json", params={"q": "bold"}).json()["entities"] == []


@pytest.mark.parametrize("typed", ["", " ", "thing", "likes", *HOSTILE, "x" * 2000])
def test_the_page_has_the_content_of_its_json(client, typed):
    page = audited(client.get("/search", params={"q": typed}))
    found = client.get("/search.json", params={"q": typed}).json()
    for match in [*found["entities"], *found["relations"]]:
        assert match["text"] in page.text
        assert match["about"] in page.text
    addresses = {value for value in page.values("a", "href") if value.startswith("/entity")}
    assert len(addresses) == len(found["entities"])
    for address in addresses:
        assert client.get(address).status_code == 200
    assert ("input", "value", typed) in page.attributes


def test_every_page_has_the_search(client):
    for address in ("/", "/entity/Twenty", "/entity/nobody", "/facts", "/map", "/run", "/nothing"):
        page = Audit(client.get(address, headers={"Accept": "text/html"}).text)
        assert page.values("form", "action").count("/search") == 1
    assert ("input", "value", "plain") in audited(client.get("/?run=plain")).attributes


def test_a_message_has_the_names_of_the_suggestions(client, served):
    entities = served.get(None).graph.entities
    for address in ("/api/tails?head=thnig+2&relation=likes", "/api/entity/thnig 2"):
        reply = client.get(address).json()
        quoted = re.findall("'([^']*)'", reply["error"].partition("Did you mean")[2])
        assert [entities.id(text) for text in quoted] == list(
            map(entities.id, reply["suggestions"])
        )
    reply = client.get("/api/tails", params={"head": "Twenty", "relation": "like"}).json()
    assert reply["suggestions"] == ["likes"]
