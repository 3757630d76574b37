"""Names that may have been meant, and sentences about wrong arguments."""

import pytest

import dualkg as kg
from dualkg.errors import (
    MAX_SENTENCE,
    DamagedFile,
    DualkgError,
    InvalidValue,
    LockedError,
    MissingExtra,
    PathExists,
    RequestError,
    UnknownName,
    close_matches,
)
from tests.raising import refused


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("Frence", ["France", "French"]),
        ("PARIS", ["Paris"]),
        ("capitol", ["capital"]),
        ("x", []),
        ("", []),
        ("x" * 1000, []),
    ],
)
def test_similar_names_best_first(name, similar):
    names = ["France", "French", "Paris", "capital", "borders", "x" * 999]
    assert close_matches(name, names) == similar


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
    ("call", "kind", "parameters"),
    [
        (
            lambda run: kg.evaluate(run.model, run.graph, candidates=[1, 2]),
            InvalidValue,
            {
                "setting": "candidates",
                "expected": "a file of lists, or a mapping of its columns",
                "found": "list",
            },
        ),
        (
            lambda run: kg.evaluate(run.model, run.graph, hits=0),
            InvalidValue,
            {"setting": "hits", "expected": "whole numbers of at least 1", "found": 0},
        ),
        (
            lambda run: kg.complete(run, top="x"),
            InvalidValue,
            {"setting": "top", "expected": "a whole number of at least 1", "found": "x"},
        ),
        (
            lambda run: kg.complete(run, relations="q"),
            UnknownName,
            {"kind": "relation", "name": "q"},
        ),
        (lambda run: kg.Ensemble(3), RequestError, {}),
        (
            lambda run: kg.Graph.from_triples([("a", "r", "b")], labels=["x"]),
            InvalidValue,
            {"setting": "labels"},
        ),
    ],
)
def test_wrong_arguments_are_named(call, kind, parameters, small_graph):
    model = kg.DistMult(small_graph, dim=2)
    run = kg.train(model, small_graph, epochs=1, device="cpu")
    with refused(kind, **parameters):
        call(run)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            InvalidValue("k", expected="at least 1", found="x", advice="Use 1."),
            "`k` should be at least 1; 'x' was given. Use 1.",
        ),
        (UnknownName("loss", "x", known=["a", "b"]), "No loss is named 'x'. There are: a, b."),
        (
            PathExists("runs/a", what="a finished run"),
            "runs/a is a finished run. Use `overwrite=True`, or name another with `out`.",
        ),
        (
            PathExists("runs/a", overwritable=False),
            "runs/a exists already. Name another with `out`.",
        ),
        (
            DamagedFile("a.json", "it is not JSON", advice="Remove it."),
            "a.json is damaged: it is not JSON. Remove it.",
        ),
        (
            MissingExtra("openTSNE", "analysis", purpose="t-SNE"),
            "t-SNE needs openTSNE. Install it: pip install 'dualkg[analysis]'",
        ),
        (
            LockedError("runs/a", holder="process 7 on host"),
            "runs/a is being written by process 7 on host. Try again when that has ended.",
        ),
        (
            LockedError("runs/a"),
            "runs/a is being written by another process. Try again when that has ended.",
        ),
    ],
)
def test_words_of_messages(error, sentence):
    assert str(error) == sentence


def test_a_sentence_is_short_whatever_it_quotes():
    assert str(DualkgError("ordinary words")) == "ordinary words"
    text = str(DualkgError(f"before {'x' * 10**6} after"))
    assert text.startswith("before xxx")
    assert text.endswith("xxx after")
    assert "…" in text
    assert len(str(DualkgError("many words " * 10**5))) <= MAX_SENTENCE
