"""Lists as tables and files."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

import dualkg as kg
from dualkg.inference.completion import check_file, complete
from tests.inference.completion.brute_force import MODELS, random_calibration, random_graph


@pytest.fixture
def graph() -> kg.Graph:
    """Names with quotes, commas, spaces and letters of several scripts."""
    names = ['"q"', "a,b", "c c", "d'e", "é", "名", "{x}", "[bold]", "#z"]
    return dataclasses.replace(random_graph(0), entities=kg.Vocabulary(names))


@pytest.fixture
def made(graph):
    return complete(
        MODELS["ComplEx"](graph.shape), graph, top=40, calibration=random_calibration(0)
    )


def test_the_table_has_names_and_ranks(made, graph):
    table = made.table()
    assert table.column_names == [
        "rank",
        "head",
        "relation",
        "tail",
        "probability",
        "answer_probability",
        "score",
        "log_probability",
    ]
    assert table["rank"].to_pylist() == list(range(1, 41))
    first = table.slice(0, 1).to_pylist()[0]
    names = (
        graph.entities[made.heads[0]],
        graph.relations[made.relations[0]],
        graph.entities[made.tails[0]],
    )
    assert (first["head"], first["relation"], first["tail"]) == names
    assert first["probability"] == made.probability[0]


def test_labels_have_their_own_columns(graph):
    entities = kg.Vocabulary(graph.entities.names, {"é": "an\taccent", "名": "name"})
    labelled = dataclasses.replace(graph, entities=entities)
    found = complete(MODELS["CP"](graph.shape), labelled, top=1000)
    table = found.table()
    assert table.column_names[:6] == [
        "rank",
        "head",
        "relation",
        "tail",
        "head_label",
        "tail_label",
    ]
    pairs = set(zip(table["head"].to_pylist(), table["head_label"].to_pylist(), strict=True))
    assert {("é", "an accent"), ("名", "name"), ("a,b", "a,b")} <= pairs


@pytest.mark.parametrize("ending", ["tsv", "parquet"])
def test_a_file_is_read_back_as_triples(made, graph, tmp_path, ending):
    path = made.save(tmp_path / f"new.{ending}")
    again = kg.load_graph(path, split="100/0/0")
    triples = [
        (again.entities[head], again.relations[relation], again.entities[tail])
        for head, relation, tail in again.train.tolist()
    ]
    expected = made.table().select(["head", "relation", "tail"]).to_pylist()
    assert sorted(triples) == sorted(tuple(row.values()) for row in expected)


def test_numbers_come_back_as_they_were(made, tmp_path):
    of_parquet = pa.parquet.read_table(made.save(tmp_path / "new.parquet"))
    assert of_parquet.equals(made.table())
    unquoted = pa.csv.ParseOptions(delimiter="\t", quote_char=False)
    of_text = pa.csv.read_csv(made.save(tmp_path / "new.tsv"), parse_options=unquoted)
    for name in ("probability", "answer_probability", "score", "log_probability"):
        np.testing.assert_array_equal(
            of_text[name].to_numpy().astype(np.float32), made.table()[name].to_numpy()
        )


def test_an_empty_list_is_a_file_too(graph, tmp_path):
    found = complete(
        MODELS["CP"](graph.shape), graph, calibration=random_calibration(0), min_probability=1.0
    )
    assert len(found) == 0
    text = found.save(tmp_path / "new.tsv").read_text()
    assert (
        text
        == "rank\thead\trelation\ttail\tprobability\tanswer_probability\tscore\tlog_probability\n"
    )


def test_files_that_cannot_be_written_are_refused_before_the_search(graph, tmp_path):
    with pytest.raises(
        kg.RequestError, match="that ends with .tsv or .parquet; 'new.xlsx' does not"
    ):
        check_file(tmp_path / "new.xlsx", graph)
    (tmp_path / "old.tsv").write_text("mine")
    with pytest.raises(kg.RequestError, match="old.tsv exists already. Name another file"):
        check_file(tmp_path / "old.tsv", graph)
    with pytest.raises(
        kg.RequestError, match="new.tsv cannot be written: (Not a directory|File exists)"
    ):
        check_file(tmp_path / "old.tsv" / "new.tsv", graph)
    assert check_file(tmp_path / "new.tsv", graph) == tmp_path / "new.tsv"
    assert [path.name for path in tmp_path.iterdir()] == ["old.tsv"]


def test_a_name_that_tsv_cannot_hold_is_for_parquet(graph, tmp_path):
    broken = dataclasses.replace(
        graph, relations=kg.Vocabulary(["a", "b\tc", "d"], kind="relation")
    )
    with pytest.raises(
        kg.RequestError,
        match=r"The relation 'b\\tc' has a tab or a line end in its name.*new.parquet",
    ):
        check_file(tmp_path / "new.tsv", broken)
    found = complete(MODELS["CP"](graph.shape), broken, relations=["b\tc"])
    assert (
        pa.parquet.read_table(found.save(tmp_path / "new.parquet"))["relation"][0].as_py() == "b\tc"
    )
