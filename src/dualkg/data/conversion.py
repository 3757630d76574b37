"""Graphs from data in memory: rows, arrays, tables, networkx, PyTorch Geometric and `datasets`.

None of these libraries is imported: their objects are recognized by their interfaces.
"""

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dualkg.data.archives import find_sources
from dualkg.data.columns import ROLES, WORDS, Columns, check_columns
from dualkg.data.encoding import ReadTriples, encode
from dualkg.data.formats.delimited import read_labels
from dualkg.data.readers import Reader, ReadOptions, RowReader, TableReader
from dualkg.data.splits import Splitting, graph_fields, parse_split
from dualkg.errors import DataError, InvalidValue, RequestError

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
# What messages call the data of a kind.
SUBJECTS = {
    "triples": "The list",
    "networkx": "The networkx graph",
    "pyg": "The PyG graph",
    "dataframe": "The dataframe",
    "dataset": "The dataset",
}


# -- the constructors --------------------------------------------------------


def graph_of_table(frame: Any, **options: Any) -> dict[str, Any]:
    """The fields of a graph of a table."""
    if not is_table(frame) and not is_datasets(frame):
        raise wrong_object(
            "from_dataframe",
            expected="a pandas, polars or Arrow table, or a dictionary of columns",
            found=frame,
            advice=advice_for(frame),
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
        present = ", ".join(map(str, dataset)) or "no splits"
        raise RequestError(
            "A dictionary of datasets should have train, and valid and test if they are given; it "
            f"has {present}. Pass its parts: from_datasets(train, valid=…, test=…)."
        )
    valid = splits.get("valid")
    test = splits.get("test")
    return make_fields(splits["train"], kind="dataset", valid=valid, test=test, **options)


def graph_of_networkx(graph: Any, relation: str | None = None, **options: Any) -> dict[str, Any]:
    """The fields of a graph of the edges of networkx graphs."""
    interface = ("edges", "nodes", "is_multigraph", "is_directed")
    if not all(hasattr(graph, name) for name in interface):
        raise wrong_object("from_networkx", expected="a graph of networkx", found=graph)

    if options.get("labels") is None:
        parts = (graph, options.get("valid"), options.get("test"))
        options["labels"] = _node_labels(part for part in parts if part is not None)
    convert = partial(_edges, relation=relation)
    fields = make_fields(graph, kind="networkx", convert=convert, **options)

    notes = list(fields["notes"])
    num_isolated = sum(1 for node in graph.nodes if not graph.degree(node))
    if num_isolated:
        nodes = "node without edges was" if num_isolated == 1 else "nodes without edges were"
        notes.append(f"{num_isolated:,} {nodes} left out.")
    if not graph.is_directed():
        note = "The graph is undirected: every edge became two triples, one in each direction."
        notes.append(note)
    return {**fields, "notes": tuple(notes)}


def _node_labels(graphs: Iterable[Any]) -> dict[str, str]:
    """The labels of nodes: their attribute `name`, or else `label`; of several, the last counts."""
    labels: dict[str, str] = {}
    for graph in graphs:
        for node, attributes in graph.nodes(data=True):
            for key in ("label", "name"):
                label = attributes.get(key)
                if isinstance(label, str):
                    labels[str(node)] = label
    return labels


def graph_of_pyg(data: Any, **options: Any) -> dict[str, Any]:
    """The fields of a graph of PyTorch Geometric's Data or HeteroData."""
    if hasattr(data, "edge_types") and (options.get("entities") or options.get("relations")):
        raise RequestError("A HeteroData has names of its own. Leave entities and relations out.")
    return make_fields(data, kind="pyg", convert=_pyg_rows, **options)


def wrong_object(function: str, *, expected: str, found: object, advice: str = "") -> RequestError:
    """The error that a function was given an object of another type than it takes."""
    kind = type(found)
    package = kind.__module__.partition(".")[0]
    prefix = "" if package == "builtins" else f"{package}."
    given = f"an object of type {prefix}{kind.__qualname__}"
    return RequestError(f"{function} takes {expected}; {given} was given. {advice}".rstrip())


def advice_for(data: Any) -> str:
    """A sentence on how to make a graph of data that are not a path."""
    if hasattr(data, "relations") and hasattr(data, "train"):
        return "It is a graph already: use it as it is."

    constructors = {
        "from_datasets": is_datasets(data),
        "from_networkx": hasattr(data, "is_multigraph"),
        "from_pyg": hasattr(data, "edge_index") or hasattr(data, "edge_types"),
        "from_dataframe": is_table(data),
        "from_triples": isinstance(data, Iterable) and not isinstance(data, str | bytes),
    }
    for constructor, fits in constructors.items():
        if fits:
            return f"Use kg.Graph.{constructor}(…) for it."
    names = "from_triples, from_dataframe, from_datasets, from_networkx and from_pyg"
    return f"For data in memory there are kg.Graph.{names}."


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
    splitting = Splitting(parse_split(split, seed), seed)
    subject = SUBJECTS[kind]

    options = ReadOptions(columns=columns)
    readers = {}
    for split_name, part in _parts(data, valid, test).items():
        part_name = subject if split_name == "triples" else split_name
        readers[split_name] = _reader(convert(part), part_name, options)
    read = encode(readers, optional=("valid", "test"))
    read = _renamed(read, {"entities": entities, "relations": relations})

    return graph_fields(
        read,
        name or kind,
        splitting,
        labels=_labels_by_name(labels),
        where=subject,
        alternative="valid= and test= as well",
    )


def _parts(data: Any, valid: Any, test: Any) -> dict[str, Any]:
    """The splits that were given, or all triples."""
    if valid is None and test is None:
        return {"triples": data}
    if test is None or valid is None:
        given, missing = ("valid", "test") if test is None else ("test", "valid")
        raise RequestError(
            f"{given} was given without {missing}. Give both, or {missing}=[] for none."
        )
    return {"train": data, "valid": valid, "test": test}


def _labels_by_name(labels: Labels) -> dict[str, str]:
    """Labels that were given as a mapping or as a file of them."""
    if labels is None:
        return {}
    if isinstance(labels, str | os.PathLike):
        from_files: dict[str, str] = {}
        for source in find_sources(labels):
            from_files |= read_labels(source)
        return from_files
    if not isinstance(labels, Mapping):
        raise InvalidValue("labels", expected="a file, or a mapping of names", found=type(labels))
    return {str(name).strip(): label for name, label in labels.items()}


def _renamed(read: ReadTriples, names: Mapping[str, Sequence[str] | None]) -> ReadTriples:
    """Triples of ids with the names of these ids, of entities or relations."""
    changes = {}
    for kind, names_of_ids in names.items():
        if names_of_ids is None:
            continue
        number = len(names_of_ids)
        ids = getattr(read, kind).to_pylist()
        unknown = [id for id in ids if not id.isdecimal() or int(id) >= number]
        if unknown:
            raise DataError(
                f"{number:,} {kind} have the ids 0 to {number - 1:,}; the triples have "
                f"{unknown[0]}."
            )

        chosen = [str(names_of_ids[int(id)]) for id in ids]
        if len(set(chosen)) < len(chosen):
            raise DataError(f"The names of {kind} should differ, and two ids have the same name.")
        changes[kind] = pa.array(chosen, pa.string())
    return replace(read, **changes)


# -- readers -----------------------------------------------------------------


class ArrowTableReader(TableReader):
    """An Arrow table."""

    def blocks(self) -> Generator[pa.RecordBatch]:
        names = self.column_names(self.data.schema)
        yield from self.table_blocks(names, self.data.to_batches(self.options.block_rows))


class PythonRowReader(RowReader):
    """Any iterable of rows."""

    def rows(self) -> Iterator[tuple[str, Any]]:
        for number, row in enumerate(self.data, start=1):
            yield f"row {number:,}", row


def _reader(data: Any, name: str, options: ReadOptions) -> Reader:
    """The reader of an object in memory."""
    if isinstance(data, str | bytes | os.PathLike):
        advice = "Load a file with kg.load_graph."
        raise wrong_object("A graph of data in memory", expected="rows", found=data, advice=advice)

    if is_datasets(data):
        if not hasattr(data, "num_rows"):  # an IterableDataset
            return PythonRowReader(data, options, name=name)
        data = data.with_format("arrow")[:]  # with the rows that `select` and `shuffle` chose

    if is_table(data):
        return ArrowTableReader(_as_arrow(data, name), options, name=name)

    if hasattr(data, "detach"):
        data = data.detach().cpu()
    if hasattr(data, "__array__"):
        return _array_reader(np.asarray(data), name, options)

    if not isinstance(data, Iterable):
        expected = "rows of head, relation and tail"
        raise wrong_object("A graph of data in memory", expected=expected, found=data)
    return PythonRowReader(data, options, name=name)


def _array_reader(array: Any, name: str, options: ReadOptions) -> Reader:
    """The reader of an array of names or ids."""
    if array.ndim != 2 or (array.shape[1] != len(ROLES) and options.columns is None):
        raise DataError(
            f"An array of triples has the shape (num_triples, 3); {array.shape} was given."
        )
    if array.dtype.kind not in "iuUO":
        raise DataError(
            f"An array of triples holds names or whole numbers; {array.dtype} was given. Convert "
            "it."
        )

    if array.dtype.kind not in "iu":
        return PythonRowReader(array.tolist(), options, name=name)
    num_columns = array.shape[1]
    names: Sequence[str] = ROLES
    if num_columns != len(ROLES):
        names = [str(number) for number in range(1, num_columns + 1)]
    table = pa.table(dict(zip(names, array.T, strict=True)))
    return ArrowTableReader(table, options, name=name)


def _as_arrow(data: Any, name: str) -> pa.Table:
    """A table of another library as an Arrow table."""
    try:
        if isinstance(data, pa.Table):
            return data
        if isinstance(data, Mapping) or hasattr(data, "__arrow_c_stream__"):
            table = pa.table(data)
        else:
            import pyarrow.interchange

            table = pyarrow.interchange.from_dataframe(data)
    except (pa.ArrowException, TypeError, ValueError) as error:
        reason = str(error.args[0]).rstrip(".")
        raise DataError(
            f"{name} cannot be read as a table ({reason}). Convert its columns to text."
        ) from None

    # pandas adds its index, which a filtered frame has.
    index_columns = [column for column in table.column_names if column.startswith("__index_level_")]
    return table.drop_columns(index_columns)


def is_table(data: Any) -> bool:
    """Whether an object is a table of pandas, polars or Arrow, or a dictionary of columns."""
    if isinstance(data, Mapping):
        return True
    return hasattr(data, "__arrow_c_stream__") or hasattr(data, "__dataframe__")


def is_datasets(data: Any) -> bool:
    """Whether an object is one of Hugging Face `datasets`."""
    return type(data).__module__.partition(".")[0] == "datasets"


# -- other libraries ---------------------------------------------------------


def _edges(graph: Any, relation: str | None) -> list[tuple[str, Any, str]]:
    """The edges of a networkx graph as rows; those of an undirected graph in both directions."""
    if len({str(node) for node in graph.nodes}) < len(graph.nodes):
        raise DataError(
            "Two nodes of the graph have the same name as text, such as 1 and '1'. Rename one of "
            "them."
        )

    edges = _keyed_edges(graph)
    if relation is None:
        relation = _relation_attribute(edges)

    rows = []
    for head, tail, key, attributes in edges:
        if relation is not None:
            if relation not in attributes:
                raise DataError(
                    f"The edge from {head!r} to {tail!r} has no attribute '{relation}', which "
                    "names its relation."
                )
            name = attributes[relation]
        else:
            name = key if isinstance(key, str) else EDGE_RELATION

        rows.append((str(head), name, str(tail)))
        if not graph.is_directed() and head != tail:
            rows.append((str(tail), name, str(head)))
    return rows


def _keyed_edges(graph: Any) -> list[tuple[Any, Any, Any, Mapping[Any, Any]]]:
    """Head, tail, key and attributes of each edge; the edges of a simple graph have no keys."""
    if graph.is_multigraph():
        return list(graph.edges(data=True, keys=True))
    return [(head, tail, None, attributes) for head, tail, attributes in graph.edges(data=True)]


def _relation_attribute(edges: Sequence[tuple[Any, Any, Any, Mapping[Any, Any]]]) -> str | None:
    """The attribute that names the relations; None if keys of edges do, or nothing."""
    names = {str(name) for *_, attributes in edges for name in attributes}
    for word in (*WORDS["relation"], "edge_type"):
        if word in names:
            return word

    has_text_keys = any(isinstance(key, str) for _, _, key, _ in edges)
    if names and not has_text_keys:
        listed = ", ".join(f"'{name}'" for name in sorted(names)[:10])
        raise DataError(
            f"No attribute of the edges is named relation; they have {listed}. Choose one with "
            "relation='…'."
        )
    return None


def _pyg_rows(data: Any) -> Any:
    """The edges of a Data as an array of ids, those of a HeteroData as rows of names."""
    if hasattr(data, "edge_types"):
        return _hetero_rows(data)
    if getattr(data, "edge_index", None) is None:
        expected = "a Data or HeteroData of PyTorch Geometric"
        raise wrong_object("from_pyg", expected=expected, found=data)

    heads, tails = data.edge_index.cpu().numpy()
    relations = getattr(data, "edge_type", None)
    if relations is None:
        raise DataError(
            "The Data has no edge_type, which names the relation of each edge. Set data.edge_type."
        )
    return np.stack([heads, relations.cpu().numpy().reshape(-1), tails], axis=1)


def _hetero_rows(data: Any) -> list[tuple[str, str, str]]:
    rows = []
    for head_type, relation, tail_type in data.edge_types:
        heads, tails = data[head_type, relation, tail_type].edge_index.tolist()
        for head, tail in zip(heads, tails, strict=True):
            rows.append((f"{head_type}/{head}", relation, f"{tail_type}/{tail}"))
    return rows
