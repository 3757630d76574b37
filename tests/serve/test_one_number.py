"""A fact has one probability, wherever it is read."""

import json
import re
from html import unescape

import pytest

import dualkg as kg
from dualkg.inference.predictor import Predictor
from dualkg.serve.facts import NUM_BEST
from dualkg.serve.templating import percent
from tests.serve.conftest import HOSTILE

PLAIN = [f"thing {number}" for number in range(len(HOSTILE), 40)]
NUM_FACTS = 15


@pytest.fixture(scope="module")
def found(client) -> dict[tuple[str, str, str], dict]:
    """The best new facts of the completion, by triple."""
    reply = client.get("/api/complete", params={"top": 500, "types": False})
    lines = [json.loads(line) for line in reply.text.splitlines()]
    return {
        tuple(line[part]["name"] for part in ("head", "relation", "tail")): line
        for line in lines
        if line["kind"] == "triple"
    }


@pytest.fixture(scope="module")
def facts(found) -> dict[tuple[str, str, str], dict]:
    """Some of them whose names are plain."""
    plain = [triple for triple in found if {triple[0], triple[2]} <= set(PLAIN)]
    chosen = plain[:: max(1, len(plain) // NUM_FACTS)]
    assert len(chosen) >= NUM_FACTS
    return {triple: found[triple] for triple in chosen}


def figures(fact) -> tuple[float, float]:
    if not isinstance(fact, dict):
        fact = vars(fact)
    return fact["probability"], fact["answer_probability"]


def answer_named(answers, name):
    """The answer of a name, which is one by its name."""
    [answer] = [answer for answer in answers if answer["name"] == name]
    return answer


def test_every_place_has_the_number_of_the_completion(client, run_folders, facts):
    predictor = Predictor.of(kg.load_run(run_folders[0]))
    for (head, relation, tail), fact in facts.items():
        triple = {"head": head, "relation": relation, "tail": tail}
        expected = pytest.approx(figures(fact), rel=1e-4)

        assert figures(client.get("/api/score", params=triple).json()["scores"][0]) == expected
        answers = client.get(
            "/api/tails", params={"head": head, "relation": relation, "k": 40}
        ).json()["predictions"]
        assert figures(answer_named(answers, tail)) == expected
        answers = client.get(
            "/api/heads", params={"relation": relation, "tail": tail, "k": 40}
        ).json()["predictions"]
        assert figures(answer_named(answers, head)) == expected
        answers = client.get("/api/relations", params={"head": head, "tail": tail}).json()
        assert figures(answer_named(answers["predictions"], relation)) == expected
        page = client.get(
            "/query.json", params={"find": "tail", "head": head, "relation": relation, "k": 40}
        ).json()
        assert figures(answer_named(page["predictions"], tail)) == expected
        assert figures(client.get("/api/explain", params=triple).json()) == expected
        assert figures(predictor.triple(head, relation, tail)) == expected
        assert figures(predictor.explain(head, relation, tail)) == expected


def test_predicted_facts_of_entities_have_it_too(client, facts):
    num_compared = 0
    for name in {head for head, _, _ in facts}:
        for fact in client.get(f"/api/entity/{name}").json()["predicted"]:
            triple = tuple(fact[part]["name"] for part in ("head", "relation", "tail"))
            if triple in facts:
                assert figures(fact) == pytest.approx(figures(facts[triple]), rel=1e-4)
                num_compared += 1
    assert num_compared > 10


def test_lists_are_sorted_by_the_figure_they_show(client):
    """What pages show, read from the pages."""
    for address in ("/?find=tail&head=thing+20&relation=likes&k=50", "/entity/thing 20"):
        text = re.split('id="(?:new|predicted)"', client.get(address).text)[1]
        shown = re.findall(r'class="percent"[^>]*>(?:&[lg]t;)?([0-9.]+) %', text)
        numbers = [float(number) for number in shown]
        assert len(numbers) > 5
        assert numbers == sorted(numbers, reverse=True)


ROW = re.compile(
    r'<li[^>]*? data-head="([^"]*)" data-relation="([^"]*)" data-tail="([^"]*)".*?</li>', re.DOTALL
)
SHOWN = re.compile(r'class="percent"[^>]*>([^<]+)<')


def shown_in(html: str) -> dict[tuple[str, str, str], str]:
    """The probabilities that a page shows, by triple."""
    rows = {tuple(map(unescape, row.groups())): SHOWN.search(row[0]) for row in ROW.finditer(html)}
    return {triple: unescape(shown[1]) for triple, shown in rows.items() if shown}


def assert_shown(html: str, found, *, at_least: int) -> None:
    shown = {triple: text for triple, text in shown_in(html).items() if triple in found}
    assert len(shown) >= at_least
    assert shown == {triple: percent(found[triple]["probability"]) for triple in shown}


def test_the_map_shows_it(client, facts):
    for head, relation, tail in facts:
        for entity, find in ((head, "tail"), (tail, "head")):
            query = {"entity": entity, "relation": relation, "find": find}
            html = client.get("/map/predictions", params=query).text
            assert (head, relation, tail) in shown_in(html)
            assert_shown(html, facts, at_least=1)


@pytest.mark.parametrize("relation", [None, "likes", "is a"])
def test_the_first_page_and_the_pages_of_relations_show_it(client, found, relation):
    """Their lists of best facts, which a script fetches, and the list of new facts."""
    params = {"relation": relation} if relation else {}
    html = client.get("/facts/best", params=params).text
    assert len(shown_in(html)) == NUM_BEST
    assert_shown(html, found, at_least=NUM_BEST)
    lines = client.get("/facts/rows", params=params | {"top": 50, "types": False}).text.splitlines()
    rows = [json.loads(line).get("html", "") for line in lines]
    assert_shown("".join(rows), found, at_least=50)
    if relation:
        page = client.get(f"/relation/{relation}").text
        assert f"/facts/best?relation={relation.replace(' ', '+')}" in page


def test_pages_of_queries_and_entities_show_it(client, facts):
    for head, relation, tail in facts:
        query = {"find": "tail", "head": head, "relation": relation, "k": 40}
        assert_shown(client.get("/", params=query).text, facts, at_least=1)
        triple = {"head": head, "relation": relation, "tail": tail}
        explanation = client.get("/explain", params=triple).text
        assert percent(facts[head, relation, tail]["probability"]) in explanation
    shown = [client.get(f"/entity/{name}").text for name in {head for head, _, _ in facts}]
    assert_shown("".join(shown), facts, at_least=5)
