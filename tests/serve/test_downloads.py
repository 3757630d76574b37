"""Tables of pages as CSV and as JSON."""

import csv
import io
import json
import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from dualkg.errors import RequestError
from dualkg.inference.decision_files import as_ntriples
from dualkg.serve.downloads import as_csv, as_tsv
from dualkg.serve.entity_facts import Remarks
from dualkg.serve.served import ServedRuns
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
    "best-facts": ("relation=likes", {"head", "tail", "probability", "verdict"}),
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
        "/facts/best?relation=likes",
        "/likely?head=thing+15&relation=likes&tail=thing+20",
    )
    for address in pages:
        links = re.findall(r'href="(/table/([a-z-]+)\.csv[^"]*)"', client.get(address).text)
        assert links, address
        for link, name in links:
            linked.add(name)
            assert (
                name in ("new-facts", "best-facts")
                or client.get(link.replace("&amp;", "&")).status_code == 200
            )
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


def facets_of_page(client, params) -> list[tuple[str, dict, bool]]:
    """By row of the page of new facts: its ids, its facets, and whether its type is unusual."""
    rows = []
    for line in client.get("/facts/rows", params=params).text.splitlines():
        html = json.loads(line).get("html")
        if html:
            row, facets = (
                unescape(re.search(f'{name}="([^"]*)"', html)[1])
                for name in ("data-row", "data-facets")
            )
            verdict = re.search('data-verdict="([^"]*)"', html)
            values = json.loads(facets) | {"Verdict": [verdict[1] if verdict else "undecided"]}
            rows.append((row, values, "data-unusual" in html))
    return rows


def final_rows(client, params):
    rows = facets_of_page(client, params)
    return rows[-params["top"] :]


@pytest.mark.parametrize(
    "chosen",
    [
        ["Relation:likes"],
        ["Relation:likes", "Relation:is a"],
        ["Relation:is a", "Verdict:undecided"],
        ["Types:seen in train"],
        ["Verdict:accepted"],
        ["Relation:nothing"],
    ],
)
@pytest.mark.parametrize("hide_unusual", [False, True])
def test_files_of_new_facts_have_the_rows_that_facets_admit(client, chosen, hide_unusual):
    params = {"top": 200, "types": False}
    facets = {}
    for text in chosen:
        facet, value = text.split(":")
        facets.setdefault(facet, set()).add(value)
    wanted = [
        row
        for row, values, is_unusual in final_rows(client, params)
        if all(admitted & set(values[facet]) for facet, admitted in facets.items())
        and not (hide_unusual and is_unusual)
    ]
    filtered = params | {"facet": chosen, "hide_unusual": hide_unusual}
    facts = client.get("/facts.json", params=filtered).json()["facts"]
    assert [
        ".".join(str(fact[part]["id"]) for part in ("head", "relation", "tail")) for fact in facts
    ] == wanted
    names = [tuple(fact[part]["name"] for part in ("head", "relation", "tail")) for fact in facts]

    listed = client.get("/table/new-facts.json", params=filtered).json()["rows"]
    assert [(row["head"], row["relation"], row["tail"]) for row in listed] == names
    triples = client.get("/table/new-facts.nt", params=filtered)
    assert triples.headers["content-type"] == "application/n-triples; charset=utf-8"
    assert triples.text == as_ntriples(names)
    csv_rows = cells(client.get("/table/new-facts.csv", params=filtered).text)
    assert [row["rank"] for row in csv_rows] == [str(row["rank"]) for row in listed]


def test_files_of_predicted_facts_have_the_rows_that_facets_admit(client):
    every = client.get("/table/predicted-facts.json?name=Twenty").json()["rows"]
    params = {"name": "Twenty", "facet": "Relation:likes"}
    likes = client.get("/table/predicted-facts.json", params=params).json()["rows"]
    assert likes == [row for row in every if row["relation"] == "likes"]
    assert 0 < len(likes) < len(every)
    params = {"name": "Twenty", "hide_unusual": True}
    usual = client.get("/table/predicted-facts.json", params=params).json()["rows"]
    assert usual == [row for row in every if "unusual" not in (row["head_type"], row["tail_type"])]


class OddHeads:
    """Remarks by which every head with an odd id is of an unusual type."""

    def of_triples(self, triples):
        fits = ["unusual" if head % 2 else "known" for head, _, _ in np.asarray(triples).tolist()]
        return [Remarks(fit, "known", None, None) for fit in fits]


@pytest.mark.parametrize("table", ["new-facts", "predicted-facts", "answers", "paths"])
def test_files_honour_the_switch_for_unusual_types(client_of, served, table):
    run = replace(served.get("calibrated"))
    run.__dict__["remarker"] = OddHeads()
    client = client_of(runs=ServedRuns([run]))
    query = TABLES[table][0].replace("find=tail&head=thing+15", "find=head&tail=thing+15")
    address = f"/table/{table}.json?{query}"
    every = client.get(address).json()["rows"]
    usual = client.get(f"{address}&hide_unusual=true").json()["rows"]
    entities = run.graph.entities

    def is_hidden(row):
        return row.get("probability") is not None and entities.id(row["head"]) % 2

    if table == "paths":
        hidden = {(row["kind"], row["path"]) for row in every if is_hidden(row)}
        assert usual == [row for row in every if (row["kind"], row["path"]) not in hidden]
    elif table == "answers":
        assert usual == [row for row in every if row["status"] != "new" or not is_hidden(row)]
    else:
        assert usual == [row for row in every if not is_hidden(row)]
    assert 0 < len(usual) < len(every)


def test_tab_separated_names_are_exact_or_refused(client):
    reply = client.get("/table/known-facts.tsv?name=Twenty")
    lines = [line.split("\t") for line in reply.text.splitlines()]
    rows = client.get("/table/known-facts.json?name=Twenty").json()["rows"]
    places = [lines[0].index(part) for part in ("head", "relation", "tail")]
    assert [[line[place] for place in places] for line in lines[1:]] == [
        [row["head"], row["relation"], row["tail"]] for row in rows
    ]
    assert as_tsv([{"name": "=1", "flag": True}]) == "name\tflag\n=1\tyes\n"
    with pytest.raises(RequestError, match="has a tab or a line end"):
        as_tsv([{"name": "two\nlines"}])
