"""Names that may have been meant, and sentences about wrong arguments."""

import difflib
import random

import pytest

import dualkg as kg
from dualkg.errors import MAX_COMPARED, close_matches, edit_distance


def test_of_many_names_the_same_are_near_as_one_by_one():
    chance = random.Random(0)
    names = sorted(
        {"".join(chance.choices("aeiklmnrst", k=chance.randint(3, 12))) for _ in range(3000)}
    )
    assert len(names) > MAX_COMPARED
    for name in ("kitten", "aaaaaaa", names[7] + "x", "x", ""):
        wanted = difflib.get_close_matches(name, names, n=12, cutoff=0.6)
        wanted.sort(key=lambda match: edit_distance(name, match))
        assert close_matches(name, names) == wanted[:3]


def test_names_of_other_scripts_and_empty_ones():
    names = [f"город {number}" for number in range(400)] + ["", "東京", "Москва"]
    assert close_matches("Масква", names)[0] == "Москва"
    assert close_matches("東", names) == ["東京"]


def test_what_a_vocabulary_has_is_told_at_once():
    names = kg.Vocabulary(["Q90", "Q142"], {"Q90": "Paris"})
    assert "Q90" in names
    assert "Paris" in names
    assert "paris" not in names
    assert 0 not in names


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda run: kg.evaluate(run.model, run.graph, candidates=[1, 2]),
            "candidates should be a file of lists, or a mapping of its columns; .list. was given",
        ),
        (
            lambda run: kg.evaluate(run.model, run.graph, hits=0),
            "hits should be whole numbers of at least 1; 0 was given",
        ),
        (
            lambda run: kg.complete(run, top="x"),
            "top should be a whole number of at least 1; 'x' was given",
        ),
        (lambda run: kg.complete(run, relations="q"), "No relation is named 'q'"),
        (lambda run: kg.Ensemble(3), "takes a list of runs"),
        (
            lambda run: kg.fit(run.graph, changes="x"),
            "changes should be a mapping .* 'x' was given",
        ),
        (
            lambda run: kg.Graph.from_triples([("a", "r", "b")], labels=["x"]),
            "labels should be a file, or a mapping",
        ),
    ],
)
def test_wrong_arguments_get_a_sentence(call, sentence, small_graph):
    model = kg.DistMult(small_graph, dim=2)
    run = kg.train(model, small_graph, epochs=1, device="cpu")
    with pytest.raises(kg.RequestError, match=sentence):
        call(run)
