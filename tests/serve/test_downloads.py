"""Tables of pages as CSV and as JSON."""

import csv
import io
import re

import pytest

from dualkg.serve.downloads import as_csv
from tests.serve.conftest import HOSTILE

QUERY = "find=tail&head=thing+15&relation=likes"
# By table, its columns and the parameters of its page.
TABLES = {
    "answers": (QUERY, {"tail", "status", "probability", "score"}),
    "paths": ("start=thing+15&end=thing+20", {"kind", "path", "step", "head", "probability"}),
    "explanation": ("head=thing+15&relation=likes&tail=thing+20", {"kind", "head", "score_drop"}),
    "known-facts": ("name=Twenty", {"head", "relation", "tail", "split"}),
    "predicted-facts": ("name=Twenty", {"head", "tail", "probability", "head_type"}),
    "similar-entities": ("name=Twenty", {"entity", "cosine"}),
    "relation-facts": ("name=likes", {"head", "relation", "tail", "split"}),
    "relation-entities": ("name=likes", {"end", "entity", "num_triples"}),
    "relation-metrics": ("name=likes", {"missing", "mrr"}),
    "hardest-queries": ("name=likes", {"head", "missing", "rank"}),
    "search": ("q=thing", {"kind", "name", "about"}),
    "relations": ("", {"relation", "num_triples"}),
    "new-facts": ("top=5&types=false", {"rank", "head", "probability"}),
    "by-relation": ("", {"run", "relation", "mrr"}),
    "by-cardinality": ("", {"run", "cardinality", "mrr"}),
    "by-direction": ("", {"run", "direction", "mrr"}),
    "metrics": ("", {"run", "split", "mrr"}),
    "likely": ("", {"of", "lower", "observed", "interval_low"}),
    "reliability": ("", {"run", "lower", "observed", "interval_low"}),
    "history": ("", {"run", "epoch", "loss"}),
    "differences": ("", {"head", "missing", "rank_a", "rank_b"}),
    "recipe": ("", {"key", "calibrated", "plain"}),
    "sparsity": ("", {"run", "zeros", "dense_bytes"}),
}


def cells(text):
    return list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline="")))


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_the_same_rows_in_both_formats(client, name):
    query, columns = TABLES[name]
    reply = client.get(f"/table/{name}.csv?{query}")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/csv; charset=utf-8"
    assert reply.headers["content-disposition"] == f'attachment; filename="calibrated-{name}.csv"'
    listed = client.get(f"/table/{name}.json?{query}").json()
    rows = cells(reply.text)
    assert len(rows) == len(listed["rows"]) > 0
    assert columns <= set(rows[0])


def test_every_table_on_a_page_is_known_here(client):
    """A link to a table leads to it, and no table is left out above."""
    linked = set()
    pages = (
        f"/?{QUERY}",
        "/",
        "/entity/Twenty",
        "/relation/likes",
        "/search?q=thing",
        "/explain?head=thing+15&relation=likes&tail=thing+20",
        "/paths?start=thing+15&end=thing+20",
        "/facts",
        "/run",
        "/likely?head=thing+15&relation=likes&tail=thing+20",
    )
    for address in pages:
        links = re.findall(r'href="(/table/([a-z-]+)\.csv[^"]*)"', client.get(address).text)
        assert links, address
        for link, name in links:
            linked.add(name)
            assert name == "new-facts" or client.get(link.replace("&amp;", "&")).status_code == 200
    assert linked == set(TABLES)


def test_answers_are_those_of_the_page(client):
    content = client.get(f"/query.json?{QUERY}").json()
    rows = client.get(f"/table/answers.json?{QUERY}").json()["rows"]
    new = [row for row in rows if row["status"] == "new"]
    assert [row["tail"] for row in new] == [item["name"] for item in content["predictions"]]
    assert [row["probability"] for row in new] == [
        item["probability"] for item in content["predictions"]
    ]
    assert [row["tail"] for row in rows if row["status"] == "known"] == [
        item["name"] for item in content["known"]
    ]


def test_cells_are_exact_and_no_formulas():
    rows = [{"name": "=1+1", "number": -0.5, "flag": True}, {"name": "a\r\nb", "more": None}]
    assert cells(as_csv(rows)) == [
        {"name": "'=1+1", "number": "-0.5", "flag": "yes", "more": ""},
        {"name": "a\r\nb", "number": "", "flag": "", "more": ""},
    ]
    assert as_csv([]).strip() == ""


def test_names_are_exact_in_json(client):
    rows = client.get("/table/known-facts.json", params={"name": HOSTILE[8]}).json()["rows"]
    assert rows
    assert all(HOSTILE[8] in (row["head"], row["tail"]) for row in rows)


def test_an_unknown_name_is_an_error(client):
    reply = client.get("/table/known-facts.json?name=nobody")
    assert reply.status_code == 404
    assert reply.json()["error"]
