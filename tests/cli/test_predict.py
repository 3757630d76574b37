"""`dualkg predict --queries`: a file of queries, its predictions as TSV and JSON lines, and its
mistakes.
"""

import csv
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest

import dualkg as kg
from dualkg.workflows.predict import predict_queries
from tests.conftest import graph_of


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> kg.Run:
    random = np.random.default_rng(0)
    triples = np.unique(np.stack([random.integers(0, n, 300) for n in (30, 4, 30)], axis=1), axis=0)
    graph = graph_of(triples[40:], triples[:20], triples[20:40], num_entities=30, num_relations=4)
    model = kg.ComplEx(graph.shape, dim=4, init_scale=0.5)
    return kg.train(model, graph, epochs=1, out=tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def queries(tmp_path):
    path = tmp_path / "queries.tsv"
    path.write_text("head\trelation\ttail\ne1\tr0\t?\n\n?\tr2\te5\ne1\t\te2\ne1\tr0\te2\ne3\tr1\n")
    return path


GIVEN = {
    2: ("e1", "r0", None),
    4: (None, "r2", "e5"),
    5: ("e1", None, "e2"),
    6: ("e1", "r0", "e2"),
    7: ("e3", "r1", None),
}


def test_predictions_are_lines_of_tsv(run_cli, run, queries):
    result = run_cli("predict", run.folder, "--queries", queries, "--top", 3)
    assert result.code == 0, result.err
    rows = list(csv.DictReader(io.StringIO(result.out), delimiter="\t"))
    assert list(rows[0]) == [
        "line",
        "rank",
        "head",
        "relation",
        "tail",
        "score",
        "probability",
        "split",
        "answer_probability",
    ]
    assert [int(row["line"]) for row in rows] == [2] * 3 + [4] * 3 + [5] * 3 + [6] + [7] * 3
    predictor = run.predictor()
    for line, query in GIVEN.items():
        found = [row for row in rows if int(row["line"]) == line]
        wanted = predict_queries(predictor, [query], top=3)[0]
        part = ("head", "relation", "tail")[query.index(None) if None in query else 2]
        assert [(row[part], row["split"]) for row in found] == [
            (one.name, one.split or "") for one in wanted
        ]
        assert [float(row["score"]) for row in found] == pytest.approx(
            [one.score for one in wanted], rel=1e-4
        )
        assert [int(row["rank"]) for row in found] == list(range(1, len(found) + 1))


def test_predictions_are_lines_of_json(run_cli, run, queries, tmp_path):
    lines = [
        json.loads(line)
        for line in run_cli("predict", run.folder, "--queries", queries, "--json").out.splitlines()
    ]
    assert {one["line"]: (one["head"], one["relation"], one["tail"]) for one in lines} == GIVEN
    single = run_cli("predict", run.folder, "--head", "e1", "--relation", "r0", "--json").json
    assert [one["id"] for one in lines[0]["predictions"]] == [
        one["id"] for one in single["predictions"]
    ]
    new = run_cli("predict", run.folder, "--queries", queries, "--json", "--new").out.splitlines()
    assert not any(one["known"] for one in json.loads(new[0])["predictions"])


@pytest.mark.parametrize("suffix", ["tsv", "jsonl"])
def test_out_writes_what_is_printed_otherwise(run_cli, run, queries, tmp_path, suffix):
    out = tmp_path / "new" / f"found.{suffix}"
    words = ("predict", run.folder, "--queries", queries)
    result = run_cli(*words, "--out", out)
    assert (result.code, result.out) == (0, "")
    assert "The predictions for 5 queries are saved in" in result.err
    assert out.read_text() == run_cli(*words, *(["--json"] if suffix == "jsonl" else [])).out
    (
        out.parent / f".{out.name}.lock"
    ).touch()  # of a command that was killed after it had written the file
    assert "exists already" in run_cli(*words, "--out", out).err
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    triples = tmp_path / "named.tsv"
    if suffix == "tsv":
        triples.write_text(out.read_text())
        assert len(kg.load_graph(triples).train)  # predictions are triples


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        (
            "e1\tr0\t?\ne99\tr0\t?\ne1\n",
            [
                "Line 2: No entity is named 'e99'",
                "Line 3: 3 cells should be separated by tabs; found 1.",
            ],
        ),
        ("?\tr0\t?", ["Line 1: Only one of head, relation and tail may be ? or empty; 2 are."]),
        ("e1\tr0\te2\te3", ["Line 1: 3 cells should be separated by tabs; found 4."]),
        ("e1 r0 ?\n" * 9, ["Line 5: 3 cells", "Later lines were not read."]),
        (
            "head\trelation\ttail\n\n",
            ["has no queries; lines of head, relation and tail were expected"],
        ),
        (b"e1\tr0\t\xff", ["Line 1: It is not valid UTF-8."]),
    ],
)
def test_bad_lines_are_named(run_cli, run, tmp_path, text, sentences):
    path = tmp_path / "queries.tsv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = run_cli("predict", run.folder, "--queries", path)
    assert (result.code, result.out) == (2, "")
    assert all(sentence in result.err for sentence in sentences), result.err


def test_queries_from_the_standard_input(run_cli, run, monkeypatch):
    monkeypatch.setattr(
        "sys.stdin",
        SimpleNamespace(buffer=io.BytesIO("\ufefftail\thead\trelation\r\n?\te1\tr0\r\n".encode())),
    )
    result = run_cli("predict", run.folder, "--queries", "-", "--top", 1, "--json")
    assert json.loads(result.out)["line"] == 2
    assert (json.loads(result.out)["head"], json.loads(result.out)["tail"]) == ("e1", None)


def test_names_with_tabs_need_json(run_cli, run, tmp_path):
    graph = run.graph
    names = ["a\tb", *(f"e{i}" for i in range(1, 30))]
    odd = kg.Graph(
        "odd", kg.Vocabulary(names), graph.relations, graph.train, graph.valid, graph.test
    )
    kg.train(kg.ComplEx(odd.shape, dim=2), odd, epochs=1, out=tmp_path / "odd")
    path = tmp_path / "queries.tsv"
    path.write_text("e1\tr0\t?\n")
    result = run_cli("predict", tmp_path / "odd", "--queries", path, "--top", 30)
    assert result.code == 2
    assert "has a tab or a line end, which a TSV file cannot hold. Write JSON lines" in result.err
    assert run_cli("predict", tmp_path / "odd", "--queries", path, "--top", 30, "--json").code == 0
