"""A file of queries: how it is read, and its predictions in Python."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.errors import InvalidValue, PathExists
from dualkg.workflows.predict import read_queries
from tests.conftest import graph_of


@pytest.fixture(scope="module")
def run() -> kg.Run:
    random = np.random.default_rng(0)
    triples = np.unique(np.stack([random.integers(0, n, 300) for n in (30, 4, 30)], axis=1), axis=0)
    graph = graph_of(triples[40:], triples[:20], triples[20:40], num_entities=30, num_relations=4)
    return kg.train(kg.ComplEx(graph.shape, dim=4, init_scale=0.5), graph, epochs=1)


def test_predictions_of_a_file(run, tmp_path):
    path = tmp_path / "queries.tsv"
    path.write_text("e1\tr0\t?\n\n?\tr2\te5\n")
    file = kg.predict_file(run, path, k=3)
    assert len(file) == 2
    answers = list(file)
    assert [answer.line for answer in answers] == [1, 3]
    assert (answers[0].head, answers[0].relation, answers[0].tail) == ("e1", "r0", None)
    assert [len(answer.predictions) for answer in answers] == [3, 3]

    file.save(tmp_path / "answers.jsonl")
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [answer.as_dict() for answer in answers]
    with pytest.raises(PathExists) as exists:
        file.save(tmp_path / "answers.jsonl")
    assert exists.value.path == tmp_path / "answers.jsonl"
    with pytest.raises(InvalidValue) as invalid:
        file.save(tmp_path / "answers.csv")
    assert invalid.value.setting == "out"


def test_new_predictions_of_a_file(run, tmp_path):
    path = tmp_path / "queries.tsv"
    path.write_text("e1\tr0\t?\n")
    (answer,) = kg.predict_file(run, path, known="omit")
    assert not any(prediction.known for prediction in answer.predictions)


MISTAKES = {
    "head\trelation\ttail\n\n": "has no queries; lines of head, relation and tail were expected",
    "e1\tr0\t?\ne99\tr0\t?\ne1\n": "Line 2: No entity is named 'e99'",
    "?\tr0\t?": "Line 1: Only one of head, relation and tail may be [?] or empty; 2 are.",
    "e1\tr0\te2\te3": "Line 1: 3 cells should be separated by tabs; found 4.",
    "e1 r0 ?\n" * 9: "Line 5: 3 cells .* Later lines were not read.$",
    b"e1\tr0\t\xff": "Line 1: It is not valid UTF-8.",
}


@pytest.mark.parametrize(("text", "sentence"), MISTAKES.items())
def test_files_that_have_no_queries_are_refused(run, tmp_path, text, sentence):
    path = tmp_path / "queries.tsv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(kg.RequestError, match=sentence):
        kg.predict_file(run, path)


def test_a_missing_file_is_refused(run, tmp_path):
    with pytest.raises(kg.RequestError, match=r"none\.tsv is not a file"):
        kg.predict_file(run, tmp_path / "none.tsv")


CELL = st.sampled_from([None, 0, 1, 2])


@given(
    st.lists(
        st.tuples(CELL, CELL, CELL).filter(lambda one: one.count(None) < 2), min_size=1, max_size=8
    ),
    st.permutations(["head", "relation", "tail"]),
    st.sampled_from(["", "?", " ? "]),
    st.sampled_from(["\n", "\r\n"]),
)
def test_queries_are_read_as_written(tmp_path_factory, triples, header, unknown, end):
    graph = graph_of([(0, 0, 1), (1, 1, 2), (2, 2, 0)])
    lines = ["\t".join(header)]
    for triple in triples:
        cells = dict(zip(("head", "relation", "tail"), triple, strict=True))
        texts = [
            unknown if cells[part] is None else f"{'r' if part == 'relation' else 'e'}{cells[part]}"
            for part in header
        ]
        lines.append("\t".join(texts))
    path = tmp_path_factory.mktemp("queries") / "queries.tsv"
    path.write_bytes(end.join(lines).encode())
    assert read_queries(path, graph) == [
        (number, triple) for number, triple in enumerate(triples, start=2)
    ]
