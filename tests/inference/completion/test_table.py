"""Lists as tables and files."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

import dualkg as kg
from dualkg.errors import InvalidValue, PathExists, RequestError
from dualkg.inference.completion import Completion, check_file, complete
from tests.inference.completion.brute_force import MODELS, random_calibration, random_graph


@pytest.fixture
def graph() -> kg.Graph:
    """Names with quotes, commas, spaces and letters of several scripts."""
    names = ['"q"', "a,b", "c c", "d'e", "é", "名", "{x}", "[bold]", "#z"]
    return dataclasses.replace(random_graph(0), entities=kg.Vocabulary(names))


@pytest.fixture
def completion(graph) -> Completion:
    model = MODELS["ComplEx"](graph.shape)
    return complete(model, graph, top=40, calibration=random_calibration(0))


def test_the_table_has_names_and_ranks(completion, graph):
    table = completion.table()
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
    assert first["head"] == graph.entities[completion.heads[0]]
    assert first["relation"] == graph.relations[completion.relations[0]]
    assert first["tail"] == graph.entities[completion.tails[0]]
    assert first["probability"] == completion.probability[0]


def test_labels_have_their_own_columns(graph):
    entities = kg.Vocabulary(graph.entities.names, {"é": "an\taccent", "名": "name"})
    labelled = dataclasses.replace(graph, entities=entities)
    table = complete(MODELS["CP"](graph.shape), labelled, top=1000).table()
    names = ["rank", "head", "relation", "tail", "head_label", "tail_label"]
    assert table.column_names[:6] == names

    heads = table["head"].to_pylist()
    labels = table["head_label"].to_pylist()
    label_of = dict(zip(heads, labels, strict=True))
    assert label_of["é"] == "an accent"
    assert label_of["名"] == "name"
    assert label_of["a,b"] == "a,b"


@pytest.mark.parametrize("ending", ["tsv", "parquet"])
def test_a_file_is_read_back_as_triples(completion, graph, tmp_path, ending):
    path = completion.save(tmp_path / f"new.{ending}")
    loaded = kg.load_graph(path, split="100/0/0")
    triples = [
        (loaded.entities[head], loaded.relations[relation], loaded.entities[tail])
        for head, relation, tail in loaded.train.tolist()
    ]
    rows = completion.table().select(["head", "relation", "tail"]).to_pylist()
    assert sorted(triples) == sorted(tuple(row.values()) for row in rows)


def test_numbers_come_back_as_they_were(completion, tmp_path):
    table = completion.table()
    from_parquet = pa.parquet.read_table(completion.save(tmp_path / "new.parquet"))
    assert from_parquet.equals(table)

    unquoted = pa.csv.ParseOptions(delimiter="\t", quote_char=False)
    from_text = pa.csv.read_csv(completion.save(tmp_path / "new.tsv"), parse_options=unquoted)
    for name in ("probability", "answer_probability", "score", "log_probability"):
        numbers = from_text[name].to_numpy().astype(np.float32)
        np.testing.assert_array_equal(numbers, table[name].to_numpy())


def test_an_empty_list_is_a_file_too(graph, tmp_path):
    completion = complete(
        MODELS["CP"](graph.shape), graph, calibration=random_calibration(0), min_probability=1.0
    )
    assert len(completion) == 0
    text = completion.save(tmp_path / "new.tsv").read_text()
    columns = completion.table().column_names
    assert text == "\t".join(columns) + "\n"


# -- refusals before the search ----------------------------------------------


def test_other_formats_are_refused(graph, tmp_path):
    with pytest.raises(InvalidValue) as error:
        check_file(tmp_path / "new.xlsx", graph)
    assert (error.value.setting, error.value.found) == ("out", "new.xlsx")
    assert str(error.value) == (
        "`out` should be a file that ends with .tsv or .parquet; 'new.xlsx' was given."
    )


def test_existing_files_are_refused(graph, tmp_path):
    path = tmp_path / "old.tsv"
    path.write_text("mine")
    with pytest.raises(PathExists) as error:
        check_file(path, graph)
    assert error.value.path == path
    assert not error.value.overwritable


def test_files_in_no_folder_are_refused(graph, tmp_path):
    (tmp_path / "old.tsv").write_text("mine")
    path = tmp_path / "old.tsv" / "new.tsv"
    with pytest.raises(RequestError, match="new.tsv cannot be written: (Not a dir|File exists)"):
        check_file(path, graph)


def test_a_check_writes_no_file(graph, tmp_path):
    assert check_file(tmp_path / "new.tsv", graph) == tmp_path / "new.tsv"
    assert not list(tmp_path.iterdir())


def test_a_name_that_tsv_cannot_hold_is_for_parquet(graph, tmp_path):
    relations = kg.Vocabulary(["a", "b\tc", "d"], kind="relation")
    broken = dataclasses.replace(graph, relations=relations)
    with pytest.raises(RequestError, match=r"'b\\tc' has a tab .* Write Parquet, to .*new.parquet"):
        check_file(tmp_path / "new.tsv", broken)

    completion = complete(MODELS["CP"](graph.shape), broken, relations=["b\tc"])
    saved = pa.parquet.read_table(completion.save(tmp_path / "new.parquet"))
    assert saved["relation"][0].as_py() == "b\tc"
