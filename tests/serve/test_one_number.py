"""A fact has one probability, wherever it is read."""

import json
import re

import pytest

import dualkg as kg
from dualkg.inference.predictor import Predictor
from tests.serve.conftest import HOSTILE

PLAIN = [f"thing {number}" for number in range(len(HOSTILE), 40)]
NUM_FACTS = 15


@pytest.fixture(scope="module")
def facts(client) -> dict[tuple[str, str, str], dict]:
    """The best new facts of the completion, by triple."""
    reply = client.get("/api/complete", params={"top": 500, "types": False})
    lines = [json.loads(line) for line in reply.text.splitlines()]
    found = {
        tuple(line[part]["name"] for part in ("head", "relation", "tail")): line
        for line in lines
        if line["kind"] == "triple"
    }
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
