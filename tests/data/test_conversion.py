"""Graphs from lists, arrays, tables, networkx, PyTorch Geometric and datasets are those of the same
file.
"""

import tempfile
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualkg.data.graph import Graph
from dualkg.data.loading import load_graph
from dualkg.errors import RequestError

PAIRS = [(head, tail) for head in range(12) for tail in range(12) if head != tail]
ROWS = [(f"e{head}", f"r{(head + tail) % 3}", f"e{tail}") for head, tail in PAIRS]
NAMES = ("von", "kante", "nach")
ENTITIES = [f"e{i}" for i in range(12)]
RELATIONS = [f"r{i}" for i in range(3)]
IDS = np.array([(head, (head + tail) % 3, tail) for head, tail in PAIRS])
COLUMNS = dict(zip(NAMES, map(list, zip(*ROWS, strict=True)), strict=True))


class OnlyInterchange:
    """A table with `__dataframe__` and nothing else."""

    def __dataframe__(self, **options: Any) -> Any:
        return pa.table(COLUMNS).__dataframe__(**options)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALKG_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def from_file() -> Graph:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.tsv"
        path.write_text("".join("\t".join(row) + "\n" for row in ROWS))
        return load_graph(path)


def refused(make: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(RequestError) as caught:
        make(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        tuple(map(list, ROWS)),
        np.array(ROWS),
        np.array(ROWS, dtype=object),
        [dict(zip(NAMES, row, strict=True)) for row in ROWS],
        pd.DataFrame(ROWS, columns=list(NAMES)),
    ],
    ids=["tuples", "lists", "array", "objects", "dictionaries", "frame"],
)
def test_rows_are_the_triples_of_the_same_file(data: Any, from_file: Graph) -> None:
    graph = Graph.from_triples(data)
    assert graph.fingerprint == from_file.fingerprint
    assert (graph.name, graph.source, graph.entities[0]) == ("triples", "memory", "e0")


def test_an_iterator_a_name_a_split_and_a_seed(tmp_path: Path) -> None:
    (tmp_path / "mine.tsv").write_text("".join("\t".join(row) + "\n" for row in ROWS))
    graph = Graph.from_triples(iter(ROWS), split="60/20/20", seed=3, name="mine")
    assert graph.name == "mine"
    assert (
        graph.fingerprint == load_graph(tmp_path / "mine.tsv", split="60/20/20", seed=3).fingerprint
    )


@pytest.mark.parametrize("ids", [IDS, IDS.tolist(), torch.from_numpy(IDS), IDS.astype(np.uint8)])
def test_ids_may_have_names(ids: Any, from_file: Graph) -> None:
    assert (
        Graph.from_triples(ids, entities=ENTITIES, relations=RELATIONS).fingerprint
        == from_file.fingerprint
    )
    assert Graph.from_triples(ids).entities.names.to_pylist()[:2] == ["0", "1"]


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame(COLUMNS),
        pd.DataFrame(COLUMNS).astype("category"),
        pl.DataFrame(COLUMNS),
        pl.DataFrame(COLUMNS).with_columns(pl.all().cast(pl.Categorical)),
        pa.table(COLUMNS),
        pa.table(COLUMNS).to_batches()[0],
        COLUMNS,
        OnlyInterchange(),
    ],
    ids=[
        "pandas",
        "categories",
        "polars",
        "polars categories",
        "Arrow",
        "Arrow batch",
        "dictionary",
        "interchange",
    ],
)
def test_tables_are_the_triples_of_the_same_file(frame: Any, from_file: Graph) -> None:
    graph = Graph.from_dataframe(frame)
    assert graph.fingerprint == from_file.fingerprint
    assert list(graph.notes) == [
        "The dataframe: head, relation and tail are its columns von, kante, nach."
    ]
    assert Graph.from_dataframe(frame, columns=(3, 2, 1)).entities[0] == "e1"


def test_a_filtered_frame_has_no_column_of_its_index(from_file: Graph) -> None:
    frame = pd.DataFrame([("x", "y", "z"), *ROWS], columns=["head", "relation", "tail"])
    graph = Graph.from_dataframe(frame[frame["head"] != "x"])
    assert graph.fingerprint == from_file.fingerprint
    assert list(graph.notes) == []


def test_given_splits_and_labels(tmp_path: Path) -> None:
    parts = {split: ROWS[i::3] for i, split in enumerate(("train", "valid", "test"))}
    (tmp_path / "mine").mkdir()
    for split, rows in parts.items():
        (tmp_path / "mine" / f"{split}.tsv").write_text(
            "".join("\t".join(row) + "\n" for row in rows)
        )
    (tmp_path / "names.tsv").write_text("e1\tOne\n")
    expected = load_graph(tmp_path / "mine").fingerprint
    train, valid, test = parts.values()
    for labels in ({"e1": "One"}, tmp_path / "names.tsv", str(tmp_path / "names.tsv")):
        graph = Graph.from_triples(
            train, valid=valid, test=pl.DataFrame(test, list(NAMES), orient="row"), labels=labels
        )
        assert graph.fingerprint == expected
        assert graph.entities.label(graph.entities.id("e1")) == "One"
    assert len(Graph.from_triples(train, valid=valid, test=[]).test) == 0
    assert Graph.from_triples(IDS, labels={0: "zero"}).entities.label(0) == "zero"


@given(
    st.lists(
        st.tuples(*[st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip)] * 3),
        min_size=1,
    )
)
def test_any_names_give_the_same_graph_by_rows_and_by_columns(
    rows: list[tuple[str, str, str]],
) -> None:
    by_rows = Graph.from_triples(rows, split="100/0/0")
    by_columns = Graph.from_dataframe(
        pa.table(list(map(pa.array, zip(*rows, strict=True))), list("hrt")), split="100/0/0"
    )
    assert by_rows.fingerprint == by_columns.fingerprint
    names = [name.strip() for head, _, tail in rows for name in (head, tail)]
    assert by_rows.entities.names.to_pylist() == list(dict.fromkeys(names))
    in_rows = [sentence.replace("The list", "The dataframe") for sentence in list(by_rows.notes)]
    assert in_rows == list(by_columns.notes)


def test_networkx_edges_by_attribute_by_key_and_by_choice() -> None:
    for attribute, options in (("relation", {}), ("type", {}), ("kind", {"relation": "kind"})):
        graph = nx.MultiDiGraph()
        graph.add_nodes_from([("e0", {"label": "Zero"}), ("alone", {})])
        graph.add_edges_from((head, tail, {attribute: relation}) for head, relation, tail in ROWS)
        found = Graph.from_networkx(graph, **options)
        assert found.counts["relations"] == 3
        assert found.entities.label(found.entities.id("e0")) == "Zero"
        assert list(found.notes) == ["1 node without edges was left out."]
    keyed = nx.MultiDiGraph()
    keyed.add_edges_from((head, tail, relation) for head, relation, tail in ROWS)
    assert (
        Graph.from_networkx(keyed).fingerprint
        == Graph.from_networkx(graph, relation="kind").fingerprint
    )
    plain = Graph.from_networkx(nx.complete_graph(12))
    assert sum(map(len, (plain.train, plain.valid, plain.test))) == 132
    assert plain.relations.names.to_pylist() == ["edge"]
    assert list(plain.notes) == [
        "The graph is undirected: every edge became two triples, one in each direction."
    ]
    given = Graph.from_networkx(
        keyed, valid=keyed, test=nx.DiGraph([("e0", "e1", {"relation": "r1"})])
    )
    assert (len(given.train), len(given.valid), len(given.test)) == (len(ROWS), len(ROWS), 1)


class Data:
    """What `from_pyg` reads of PyTorch Geometric's Data."""

    def __init__(self, ids: np.ndarray, *, types: bool = True) -> None:
        self.edge_index = torch.from_numpy(ids[:, [0, 2]].T.copy())
        self.edge_type = torch.from_numpy(ids[:, 1].copy()) if types else None


def test_pyg_data_and_its_errors(from_file: Graph) -> None:
    graph = Graph.from_pyg(Data(IDS), entities=ENTITIES, relations=RELATIONS)
    assert graph.fingerprint == from_file.fingerprint
    given = Graph.from_pyg(Data(IDS[::2]), valid=Data(IDS[1::4]), test=Data(IDS[3::4]))
    assert given.counts["test"] == len(IDS[3::4])
    assert refused(Graph.from_pyg, Data(IDS, types=False)).startswith("The Data has no edge_type")
    assert refused(Graph.from_pyg, ROWS).startswith("from_pyg takes a Data or HeteroData")
    assert refused(Graph.from_pyg, Data(IDS), entities=ENTITIES[:5]) == (
        "5 entities have the ids 0 to 4; the triples have 5."
    )


@pytest.mark.slow
def test_the_real_pyg_and_datasets(from_file: Graph) -> None:
    datasets = pytest.importorskip("datasets")
    pyg = pytest.importorskip("torch_geometric.data")
    edges = torch.from_numpy(IDS[:, [0, 2]].T.copy())
    kinds = torch.from_numpy(IDS[:, 1].copy())
    data = pyg.Data(edge_index=edges, edge_type=kinds)
    assert (
        Graph.from_pyg(data, entities=ENTITIES, relations=RELATIONS).fingerprint
        == from_file.fingerprint
    )
    hetero = pyg.HeteroData()
    hetero["drug", "treats", "disease"].edge_index = edges
    hetero["disease", "near", "disease"].edge_index = edges
    graph = Graph.from_pyg(hetero)
    assert (graph.entities[0], graph.relations.names.to_pylist()) == ("drug/0", ["treats", "near"])
    assert "Leave entities and relations out" in refused(Graph.from_pyg, hetero, entities=ENTITIES)
    rows = datasets.Dataset.from_dict(COLUMNS)
    reordered = datasets.Dataset.from_dict({name: column[::-1] for name, column in COLUMNS.items()})
    for found in (rows, reordered.select(range(len(ROWS) - 1, -1, -1)), rows.to_iterable_dataset()):
        assert Graph.from_datasets(found).fingerprint == from_file.fingerprint
    assert Graph.from_dataframe(rows).fingerprint == from_file.fingerprint
    splits = datasets.DatasetDict(
        {"train": rows, "validation": rows.select([0]), "test": rows.select([1])}
    )
    assert Graph.from_datasets(splits).counts["valid"] == 1
    for one, name in (
        (data, "from_pyg"),
        (hetero, "from_pyg"),
        (rows, "from_datasets"),
        (splits, "from_datasets"),
    ):
        assert f"Use kg.Graph.{name}(…)" in refused(load_graph, one)
    assert refused(Graph.from_datasets, datasets.DatasetDict({"test": rows})).startswith(
        "A dictionary of datasets should"
    )


@pytest.mark.parametrize(
    ("data", "options", "sentence"),
    [
        ([("a", "b")], {}, "The list, row 1: expected head, relation and tail, found ('a', 'b')."),
        (
            [("a", "r", "b"), ("a", "r", None)],
            {},
            "The list, row 2: the tail should be text or a whole number",
        ),
        ([("a", "r", "b"), ("a", " ", "b")], {}, "The list, row 2: the relation is empty."),
        (
            [("a", "r", "b"), {"h": "a"}],
            {},
            "The list, row 2: expected 3 values, found {'h': 'a'}.",
        ),
        (
            [{"h": "a", "r": "r", "t": "b"}, {"h": "a"}],
            {},
            "The list, row 2: expected the keys 'h', 'r', 't', found",
        ),
        ([{"x": 1, "y": 2}], {}, "The list should have three keys, or some named head"),
        (
            [("a", "r", "b")],
            {"columns": ("h", "r", "t")},
            "The list has rows without keys. Choose columns by number",
        ),
        (
            [{"h": "a", "r": "r", "t": "b"}],
            {"columns": (1, 2, 3)},
            "The list has rows with keys. Choose columns",
        ),
        ([], {}, "The list holds no triples; at least one is expected."),
        (ROWS[:1], {}, "The list cannot be split: of its 1 triples none can go to valid"),
        (ROWS, {"valid": ROWS}, "valid was given without test. Give both, or test=[] for none."),
        (ROWS, {"split": "80/20"}, "`split` should be three percentages"),
        (ROWS, {"seed": -1}, "`seed` should be a whole number, 0 or more; -1 was given."),
        (
            np.ones((3, 2), int),
            {},
            "An array of triples has the shape (num_triples, 3); (3, 2) was given.",
        ),
        (
            np.ones((3, 3)),
            {},
            "An array of triples holds names or whole numbers; float64 was given.",
        ),
        (
            "mine.tsv",
            {},
            "A graph of data in memory takes rows; an object of type str was given. Load a file "
            "with kg.load_graph.",
        ),
        (
            3,
            {},
            "A graph of data in memory takes rows of head, relation and tail; an object",
        ),
        (IDS, {"entities": ["same"] * 12}, "The names of entities should differ"),
    ],
)
def test_bad_rows_are_errors(data: Any, options: dict[str, Any], sentence: str) -> None:
    assert refused(Graph.from_triples, data, **options).startswith(sentence)


@pytest.mark.parametrize(
    ("frame", "sentence"),
    [
        (
            {"h": [1.5], "r": ["a"], "t": ["b"]},
            "The dataframe should have text or whole numbers as heads",
        ),
        (
            {"h": ["x", None], "r": ["a", "a"], "t": ["b", "c"]},
            "The dataframe, row 2: the head is missing.",
        ),
        (
            {"h": [1, "x"], "r": ["a", "a"], "t": ["b", "c"]},
            "The dataframe cannot be read as a table (",
        ),
        (
            {"h": ["a"], "r": ["a"], "x": ["b"], "y": ["c"]},
            "The dataframe should have three columns, or",
        ),
        (ROWS, "from_dataframe takes a pandas, polars or Arrow table, or a dictionary"),
    ],
)
def test_bad_tables_are_errors(frame: Any, sentence: str) -> None:
    assert refused(Graph.from_dataframe, frame).startswith(sentence)
    if isinstance(frame, dict):
        assert refused(Graph.from_dataframe, pd.DataFrame(frame)).startswith(sentence)


def test_bad_networkx_graphs_are_errors() -> None:
    assert refused(Graph.from_networkx, nx.Graph([(1, 2, {"w": 1})])) == (
        "No attribute of the edges is named relation; they have 'w'. Choose one with relation='…'."
    )
    some = nx.DiGraph([("a", "b", {"type": "x"}), ("b", "c", {})])
    assert refused(Graph.from_networkx, some).startswith(
        "The edge from 'b' to 'c' has no attribute 'type'"
    )
    assert refused(Graph.from_networkx, nx.DiGraph([(1, "1")])).startswith(
        "Two nodes of the graph have the same name"
    )
    assert refused(Graph.from_networkx, ROWS).startswith("from_networkx takes a graph of networkx")


@pytest.mark.parametrize(
    ("data", "constructor"),
    [
        (ROWS, "from_triples"),
        (iter(ROWS), "from_triples"),
        (IDS, "from_triples"),
        (COLUMNS, "from_dataframe"),
        (nx.DiGraph(), "from_networkx"),
        (Data(IDS), "from_pyg"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_load_graph_names_the_constructor(data: Any, constructor: str) -> None:
    sentence = refused(load_graph, data)
    assert sentence.startswith("load_graph takes a name or a path; an object of type ")
    assert sentence.endswith(f" was given. Use kg.Graph.{constructor}(…) for it.")
    assert len(sentence) < 200


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame, pa.table])
def test_load_graph_takes_tables(make: Any) -> None:
    table = make(COLUMNS)
    expected = Graph.from_dataframe(table, split="100/0/0")
    graph = load_graph(table, split="100/0/0")
    assert graph.fingerprint == expected.fingerprint
    assert (graph.name, graph.source) == (expected.name, "memory")
    reverse = load_graph(table, columns=(3, 2, 1), split="100/0/0", labels={graph.entities[0]: "x"})
    assert reverse.entities[0] == named_tail(expected)
    assert reverse.entities.id("x") == reverse.entities.id(graph.entities[0])


def named_tail(graph: Graph) -> str:
    """The tail of the first triple."""
    return graph.entities[int(graph.train[0, 2])]


def test_a_table_has_no_options_of_files() -> None:
    for options in ({"delimiter": "tab"}, {"max_size": "1G"}):
        with pytest.raises(RequestError) as caught:
            load_graph(pd.DataFrame(COLUMNS), **options)  # type: ignore[arg-type]
        (name,) = options
        assert str(caught.value) == f"A table has no {name}, as files have. Leave it out."


def test_load_graph_refuses_other_things(from_file: Graph) -> None:
    assert refused(load_graph, from_file).endswith("It is a graph already: use it as it is.")
    assert "kg.Graph.from_triples" in refused(load_graph, None)
