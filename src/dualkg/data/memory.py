"""Graphs from data in memory: rows, arrays, tables, networkx, PyTorch Geometric and Hugging Face
`datasets`.

None of these libraries is imported: their objects are recognized by their interfaces.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dualkg.data.archives import find_sources
from dualkg.data.encoding import ReadTriples, encode
from dualkg.data.readers import (
    ROLES,
    WORDS,
    Columns,
    Reader,
    RowsReader,
    TableReader,
    check_columns,
)
from dualkg.data.splits import graph_fields, parse_split
from dualkg.data.text import read_labels
from dualkg.errors import DataError, RequestError

Labels = Mapping[Any, str] | str | Path | None
SPLIT_KEYS = {
    "train": "train",
    "valid": "valid",
    "validation": "valid",
    "dev": "valid",
    "val": "valid",
    "test": "test",
}
EDGE_RELATION = "edge"  # the relation of edges that have no attributes


# -- the constructors --------------------------------------------------------


def graph_of_table(frame: Any, **options: Any) -> dict[str, Any]:
    """The fields of a graph of a table."""
    if not _is_table(frame) and not _is_datasets(frame):
        raise RequestError(
            "from_dataframe takes a pandas, polars or Arrow table, or a dictionary of columns; "
            f"{_described(frame)} was given. {advice_for(frame).partition('. ')[2]}"
        )
    return make_fields(frame, kind="dataframe", **options)


def graph_of_datasets(
    dataset: Any, *, valid: Any = None, test: Any = None, **options: Any
) -> dict[str, Any]:
    """The fields of a graph of Hugging Face datasets, or of a dictionary of its splits."""
    if not isinstance(dataset, Mapping):
        return make_fields(dataset, kind="dataset", valid=valid, test=test, **options)
    splits = {SPLIT_KEYS.get(str(key).lower(), str(key)): part for key, part in dataset.items()}
    if "train" not in splits or valid is not None or test is not None:
        raise RequestError(
            "A dictionary of datasets should have train, and valid and test if they are given; "
            f"it has {', '.join(map(str, dataset)) or 'no splits'}. Pass its parts: "
            "from_datasets(train, valid=…, test=…)."
        )
    return make_fields(
        splits["train"],
        kind="dataset",
        valid=splits.get("valid"),
        test=splits.get("test"),
        **options,
    )


def graph_of_networkx(graph: Any, relation: str | None = None, **options: Any) -> dict[str, Any]:
    """The fields of a graph of the edges of networkx graphs."""
    if not all(hasattr(graph, name) for name in ("edges", "nodes", "is_multigraph", "is_directed")):
        raise RequestError(
            f"from_networkx takes a graph of networkx; {_described(graph)} was given."
        )
    if options.get("labels") is None:
        parts = (
            part for part in (graph, options.get("valid"), options.get("test")) if part is not None
        )
        facts_of = [(str(node), facts) for part in parts for node, facts in part.nodes(data=True)]
        found = ((node, facts.get(key)) for node, facts in facts_of for key in ("label", "name"))
        options["labels"] = {node: label for node, label in found if isinstance(label, str)}
    fields = make_fields(
        graph, kind="networkx", convert=partial(_edges, relation=relation), **options
    )
    remarks = []
    if num_isolated := sum(1 for node in graph.nodes if not graph.degree(node)):
        nodes = "node without edges was" if num_isolated == 1 else "nodes without edges were"
        remarks.append(f"{num_isolated:,} {nodes} left out.")
    if not graph.is_directed():
        remarks.append(
            "The graph is undirected: every edge became two triples, one in each direction."
        )
    fields["notes"] = replace(fields["notes"], remarks=(*fields["notes"].remarks, *remarks))
    return fields


def graph_of_pyg(data: Any, **options: Any) -> dict[str, Any]:
    """The fields of a graph of PyTorch Geometric's Data or HeteroData."""
    if hasattr(data, "edge_types") and (options.get("entities") or options.get("relations")):
        raise RequestError("A HeteroData has names of its own. Leave entities and relations out.")
    return make_fields(data, kind="pyg", convert=_pyg_rows, **options)


def advice_for(data: Any) -> str:
    """A sentence on how to make a graph of data that are not a path."""
    kinds = {
        "from_datasets": _is_datasets(data),
        "from_networkx": hasattr(data, "is_multigraph"),
        "from_pyg": hasattr(data, "edge_index") or hasattr(data, "edge_types"),
        "from_dataframe": _is_table(data),
        "from_triples": isinstance(data, Iterable) and not isinstance(data, str | bytes),
    }
    constructor = next((name for name, fits in kinds.items() if fits), "")
    given = f"load_graph takes a name or a path; {_described(data)} was given."
    if hasattr(data, "relations") and hasattr(data, "train"):
        return f"{given} It is a graph already: use it as it is."
    if constructor:
        return f"{given} Use kg.Graph.{constructor}(…) for it."
    names = "from_triples, from_dataframe, from_datasets, from_networkx and from_pyg"
    return f"{given} For data in memory there are kg.Graph.{names}."


# -- from data to fields -----------------------------------------------------


def make_fields(
    data: Any,
    *,
    kind: str,
    valid: Any = None,
    test: Any = None,
    split: str = "80/10/10",
    seed: int = 0,
    columns: Columns | None = None,
    labels: Labels = None,
    name: str | None = None,
    entities: Sequence[str] | None = None,
    relations: Sequence[str] | None = None,
    convert: Callable[[Any], Any] = lambda part: part,
) -> dict[str, Any]:
    """The fields of a graph of data and perhaps its other splits, which `convert` makes rows of."""
    check_columns(columns)
    splitting = parse_split(split, seed), seed
    if (valid is None) != (test is None):
        one, other = ("valid", "test") if test is None else ("test", "valid")
        raise RequestError(f"{one} was given without {other}. Give both, or {other}=[] for none.")
    given = {"triples": data} if valid is None else {"train": data, "valid": valid, "test": test}
    place = {"triples": "the list", "networkx": "the networkx graph", "pyg": "the PyG graph"}.get(
        kind, f"the {kind}"
    )
    parts = {key: convert(part) for key, part in given.items()}
    try:
        readers = {
            key: _reader(part, place if key == "triples" else key, columns)
            for key, part in parts.items()
        }
        read = _renamed(encode(readers, optional=("valid", "test")), entities, relations)
    except RequestError as error:
        raise type(error)(re.sub(r"^the ", "The ", str(error))) from None
    if isinstance(labels, str | os.PathLike):
        labels = {
            name: label
            for source in find_sources(labels)
            for name, label in read_labels(source).items()
        }
    if not isinstance(labels, Mapping | None):
        raise RequestError(
            f"labels are a file, or a mapping of names to labels; {_described(labels)} was given."
        )
    by_name = {str(name).strip(): label for name, label in (labels or {}).items()}
    where = f"The {place[4:]}"
    advice = "valid= and test= as well"
    return graph_fields(read, name or kind, splitting, labels=by_name, where=where, advice=advice)


def _reader(data: Any, name: str, columns: Columns | None) -> Reader:
    if isinstance(data, str | bytes | os.PathLike):
        raise RequestError(
            f"Data in memory were expected, and {data!r} was given. Load a file with kg.load_graph."
        )
    if _is_datasets(data):
        if not hasattr(data, "num_rows"):  # an IterableDataset
            return RowsReader(data, columns, name)
        data = data.with_format("arrow")[:]  # with the rows that `select` and `shuffle` chose
    if _is_table(data):
        return TableReader(_as_arrow(data, name), columns, name)
    if hasattr(data, "detach"):
        data = data.detach().cpu()
    if hasattr(data, "__array__"):
        array = np.asarray(data)
        if array.ndim != 2 or (array.shape[1] != len(ROLES) and columns is None):
            raise DataError(
                f"An array of triples has the shape (num_triples, 3); {array.shape} was given."
            )
        if array.dtype.kind not in "iuUO":
            raise DataError(
                f"An array of triples holds names or whole numbers; {array.dtype} was given. "
                "Convert it."
            )
        if array.dtype.kind in "iu":
            names = (
                ROLES if array.shape[1] == len(ROLES) else map(str, range(1, array.shape[1] + 1))
            )
            return TableReader(pa.table(dict(zip(names, array.T, strict=True))), columns, name)
        data = array.tolist()
    if not isinstance(data, Iterable):
        raise RequestError(
            f"Rows of head, relation and tail were expected; {_described(data)} was given."
        )
    return RowsReader(data, columns, name)


def _as_arrow(data: Any, name: str) -> pa.Table:
    try:
        if isinstance(data, pa.Table):
            return data
        if isinstance(data, Mapping) or hasattr(data, "__arrow_c_stream__"):
            table = pa.table(data)
        else:
            import pyarrow.interchange

            table = pyarrow.interchange.from_dataframe(data)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            f"{name} cannot be read as a table ({str(error.args[0]).rstrip('.')}). Convert its "
            "columns to text."
        ) from None
    # pandas adds its index, which a filtered frame has.
    return table.drop_columns(
        [column for column in table.column_names if column.startswith("__index_level_")]
    )


def _is_table(data: Any) -> bool:
    return isinstance(data, Mapping) or any(
        hasattr(data, name) for name in ("__arrow_c_stream__", "__dataframe__")
    )


def _is_datasets(data: Any) -> bool:
    return type(data).__module__.partition(".")[0] == "datasets"


def _renamed(
    read: ReadTriples, entities: Sequence[str] | None, relations: Sequence[str] | None
) -> ReadTriples:
    """Triples of ids with the names of these ids."""
    changes = {}
    for kind, given in (("entities", entities), ("relations", relations)):
        if given is None:
            continue
        ids = getattr(read, kind).to_pylist()
        if wrong := [id for id in ids if not id.isdecimal() or int(id) >= len(given)]:
            raise DataError(
                f"{len(given):,} {kind} have the ids 0 to {len(given) - 1:,}; the triples have "
                f"{wrong[0]}."
            )
        chosen = [str(given[int(id)]) for id in ids]
        if len(set(chosen)) < len(chosen):
            raise DataError(f"The names of {kind} should differ, and two ids have the same name.")
        changes[kind] = pa.array(chosen, pa.string())
    return replace(read, **changes)


def _described(data: Any) -> str:
    kind = type(data)
    return f"an object of type {kind.__module__.partition('.')[0]}.{kind.__qualname__}".replace(
        "builtins.", ""
    )


# -- other libraries ---------------------------------------------------------


def _edges(graph: Any, relation: str | None) -> list[tuple[Any, Any, Any]]:
    """The edges of a networkx graph as rows; those of an undirected graph in both directions."""
    if len({str(node) for node in graph.nodes}) < len(graph.nodes):
        raise DataError(
            "Two nodes of the graph have the same name as text, such as 1 and '1'. Rename one of "
            "them."
        )
    edges = graph.edges(data=True, keys=True) if graph.is_multigraph() else graph.edges(data=True)
    edges = [(head, tail, *(key or [None]), facts) for head, tail, *key, facts in edges]
    attributes = {str(name) for *_, facts in edges for name in facts}
    if relation is None:
        relation = next(
            (word for word in (*WORDS["relation"], "edge_type") if word in attributes), None
        )
    if relation is None and attributes and not any(isinstance(key, str) for _, _, key, _ in edges):
        listed = ", ".join(f"'{name}'" for name in sorted(attributes)[:10])
        raise DataError(
            f"No attribute of the edges is named relation; they have {listed}. Choose one with "
            "relation='…'."
        )
    rows = []
    for head, tail, key, facts in edges:
        if relation is not None and relation not in facts:
            raise DataError(
                f"The edge from {head!r} to {tail!r} has no attribute '{relation}', which names "
                "its relation."
            )
        name = (
            facts[relation]
            if relation is not None
            else key
            if isinstance(key, str)
            else EDGE_RELATION
        )
        rows.append((str(head), name, str(tail)))
        if not graph.is_directed() and head != tail:
            rows.append((str(tail), name, str(head)))
    return rows


def _pyg_rows(data: Any) -> Any:
    """The edges of PyTorch Geometric's Data as an array of ids, those of a HeteroData as rows of
    names.
    """
    if hasattr(data, "edge_types"):
        rows = []
        for head_type, relation, tail_type in data.edge_types:
            heads, tails = data[head_type, relation, tail_type].edge_index.tolist()
            rows += [
                (f"{head_type}/{h}", relation, f"{tail_type}/{t}")
                for h, t in zip(heads, tails, strict=True)
            ]
        return rows
    if getattr(data, "edge_index", None) is None:
        raise RequestError(
            f"from_pyg takes a Data or HeteroData of PyTorch Geometric; {_described(data)} was "
            "given."
        )
    heads, tails = data.edge_index.cpu().numpy()
    kinds = getattr(data, "edge_type", None)
    if kinds is None:
        raise DataError(
            "The Data has no edge_type, which names the relation of each edge. Set data.edge_type."
        )
    return np.stack([heads, kinds.cpu().numpy().reshape(-1), tails], axis=1)
