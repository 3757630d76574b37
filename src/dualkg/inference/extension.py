"""Adding inductive entities to a trained model and its graph, by name, by id, or from a file to a
run.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from dualkg.data.archives import one_source
from dualkg.data.encoding import ReadTriples, read_triples
from dualkg.data.graph import Graph, GraphShape, Triples, distinct_triples
from dualkg.data.readers import Columns
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError, did_you_mean
from dualkg.files import check_new_folder, locks, read_json
from dualkg.inference.inductive import FrozenContext, embed_entities, with_adjoint
from dualkg.models.bilinear import BilinearModel
from dualkg.tables import LocalTables
from dualkg.training.api import choose_device, evaluate_held_out
from dualkg.training.ensemble import load_run
from dualkg.training.run import Run, RunFolder

MAX_NAMES = 3  # in a message
Name = str | int
NamedTriple = tuple[Name, Name, Name]


@dataclass(frozen=True, eq=False)
class Extension:
    """Copies of a model and its graph with new entities after the known ones, and their triples in
    train.
    """

    model: BilinearModel
    graph: Graph
    new_entities: dict[str, int]  # the number of triples by name


def extend(context: FrozenContext, triples: Sequence[NamedTriple]) -> Extension:
    """Embed every entity of these triples that the graph of the context does not have."""
    graph = context.graph
    num_known = context.num_known
    names: dict[str, int] = {}
    ids = np.empty((len(triples), 3), dtype=np.int32)
    for row, (head, relation, tail) in zip(ids, triples, strict=True):
        row[1] = graph.relations.id(relation)
        for column, entity in ((0, head), (2, tail)):
            id = _find(graph.entities, entity)
            row[column] = names.setdefault(str(entity), num_known + len(names)) if id < 0 else id
        if max(row[0], row[2]) < num_known:
            raise RequestError(
                f"({head}, {relation}, {tail}) has no new entity: both are in the graph already."
            )
    connected = _connected(ids, np.arange(num_known + len(names)) < num_known)[num_known:]
    if isolated := list(compress(names, ~connected)):
        verb = "has" if len(isolated) == 1 else "have"
        raise RequestError(
            f"{_listed(isolated)} {verb} no triple that connects to an entity of the graph."
        )
    return extend_by_ids(context, list(names), ids)


def add_entity(context: FrozenContext, name: str, triples: Sequence[NamedTriple]) -> Extension:
    """Embed one new entity by triples that all contain it, each with an entity of the graph."""
    if _find(context.graph.entities, name) >= 0:
        raise RequestError(
            f"'{name}' is an entity of the graph already. Give the new one another name."
        )
    if not triples:
        raise RequestError(
            f"A new entity is embedded by at least one triple; there is none for '{name}'."
        )
    for head, relation, tail in triples:
        others = [entity for entity in (head, tail) if entity != name]
        if len(others) == 2:
            raise RequestError(
                f"({head}, {relation}, {tail}) does not contain '{name}'. It should be the head "
                "or the tail of each."
            )
        for entity in others:
            context.graph.entities.id(entity)
    return extend(context, triples)


def extend_by_ids(
    context: FrozenContext,
    names: Sequence[str],
    triples: Triples,
    *,
    labels: Mapping[str, str] | None = None,
) -> Extension:
    """Embed new entities, whose ids follow those of the graph in the order of their names."""
    graph = context.graph
    shape = GraphShape(context.num_known + len(names), len(graph.relations))
    triples = distinct_triples(triples, shape)
    train = np.concatenate([graph.train, triples])
    rows = embed_entities(triples, context.with_new_entities(len(names), train))
    content = graph.fingerprint.encode() + "\n".join(names).encode() + triples.tobytes()
    larger = replace(
        graph,
        entities=_append_names(graph.entities, names, labels or {}),
        train=train,
        source="memory",
        fingerprint=hashlib.sha256(content).hexdigest(),
        catalogued=False,
    )
    ends = np.concatenate([triples[:, 0], triples[triples[:, 0] != triples[:, 2], 2]])
    counts = np.bincount(ends, minlength=shape.num_entities)[context.num_known :].tolist()
    return Extension(with_rows(context.model, rows), larger, dict(zip(names, counts, strict=True)))


@torch.no_grad()
def with_rows(model: BilinearModel, rows: Tensor) -> BilinearModel:
    """A copy of the model with rows `(num_new, num_rows, width)` appended to its entity tables."""
    shape = GraphShape(model.shape.num_entities + len(rows), model.shape.num_relations)
    zeros = LocalTables(shape.num_entities, initialize=False)
    larger = type(model).with_tables(zeros, shape, **model.config)
    larger = larger.to(model.device, model.head_table.dtype)
    tables = dict(model.state_dict())
    tables["entities"] = torch.cat([tables["entities"], rows[:, 0]])
    if model.two_entity_tables:
        tables["tails"] = torch.cat([tables["tails"], rows[:, -1]])
    if any(value.shape != tables[name].shape for name, value in larger.state_dict().items()):
        raise RequestError(
            f"{type(model).__name__} has parameters of entities in other tables than `entities` "
            "and `tails`, so no row can be appended. Train it again with the new triples."
        )
    larger.load_state_dict(tables, assign=True)  # without another copy
    return larger.eval()


@locks("out")
def extend_run(
    path: str | Path,
    file: str | Path,
    *,
    out: str | Path,
    columns: Columns | None = None,
    max_size: int | str | None = None,
    delimiter: str | None = None,
    device: str | None = None,
) -> tuple[Run, dict[str, Any]]:
    """Make a run with a row for each new entity of a file, and the contents of its
    extension.json.
    """
    out = Path(out)
    check_new_folder(out)
    run = load_run(path)
    with_adjoint(run.model)  # refuses other models before the file is read
    read = read_triples(
        {"triples": one_source(file, max_size=max_size)}, columns=columns, delimiter=delimiter
    )
    names, triples, remarks = _new_triples(read, run.graph, source=str(file))
    context = FrozenContext.of(run.model.to(choose_device(device)), run.graph, recipe=run.recipe)
    extension = extend_by_ids(context, names, triples, labels=read.labels)
    reports = evaluate_held_out(extension.model, extension.graph)
    note: dict[str, Any] = {
        "source": str(path),
        "file": str(file),
        "num_entities": len(extension.new_entities),
        "num_triples": len(extension.graph.train) - len(run.graph.train),
        "entities": extension.new_entities,
        "remarks": remarks,
    }
    if (previous := RunFolder(path).extension).exists():
        note["previous"] = read_json(previous)
    larger = Run(
        extension.model, extension.graph, run.recipe, run.history, reports, sparsity=run.sparsity
    )
    larger.extension = note
    larger.save(out)
    return larger, note


def _new_triples(
    read: ReadTriples, graph: Graph, *, source: str
) -> tuple[list[str], Triples, list[str]]:
    """Names of new entities, the triples by id that connect them to the graph, and remarks on
    triples left out.
    """
    remarks = list(read.remarks)
    num_known = len(graph.entities)
    names = read.entities.to_pylist()
    relations = read.relations.to_pylist()
    ids = np.array([_find(graph.entities, name) for name in names], dtype=np.int64)
    relation_ids = np.array([_find(graph.relations, name) for name in relations])
    triples = read.triples["triples"]
    unknown = relation_ids[triples[:, 1]] < 0
    if unknown.any():
        missing = list(compress(relations, relation_ids < 0))
        similar = (
            did_you_mean(missing[0], graph.relations.names.to_pylist()) if len(missing) == 1 else ""
        )
        remarks.append(
            f"{_left_out(unknown)}: the run has no relation {_listed(missing)}.{similar}"
        )
    old = ~unknown & (ids[triples[:, [0, 2]]] >= 0).all(1)
    if old.any():
        remarks.append(
            f"{_left_out(old)}: both entities are in the run, which is not trained again."
        )
    triples = triples[~unknown & ~old]
    connected = _connected(triples, ids >= 0)
    if isolated := list(compress(names, ~connected)):
        remarks.append(f"No triple connects {_listed(isolated)} to an entity of the run: left out.")
    triples = triples[connected[triples[:, 0]] & connected[triples[:, 2]]]
    if not len(triples):
        reasons = " ".join(["", *remarks])
        raise RequestError(
            f"{source} connects no new entity to the {num_known:,} of the run.{reasons}"
        )
    new = [position for position in np.unique(triples[:, [0, 2]]).tolist() if ids[position] < 0]
    ids[new] = num_known + np.arange(len(new))
    by_id = np.stack([ids[triples[:, 0]], relation_ids[triples[:, 1]], ids[triples[:, 2]]], axis=1)
    return [names[position] for position in new], by_id.astype(np.int32), remarks


def _find(vocabulary: Vocabulary, name: Name) -> int:
    """The id of a name, label or number as in queries; −1 for a name that is new."""
    return (
        -1
        if isinstance(name, str) and not vocabulary.ids_ignoring_case(name)
        else vocabulary.id(name)
    )


def _connected(triples: Triples, known: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Whether each entity is known, or connected to a known one through triples,
    `(num_entities,)`.
    """
    ends = triples[:, [0, 2]]
    reached = known.copy()
    while len(crossing := ends[reached[ends[:, 0]] != reached[ends[:, 1]]]):
        reached[crossing] = True
    return reached


def _append_names(
    vocabulary: Vocabulary, names: Sequence[str], labels: Mapping[str, str]
) -> Vocabulary:
    joined = pa.concat_arrays([vocabulary.names, pa.array(names, vocabulary.names.type)])
    if vocabulary.labels is None and not any(name in labels for name in names):
        return Vocabulary(joined, kind=vocabulary.kind)
    known = (
        vocabulary.labels
        if vocabulary.labels is not None
        else pa.nulls(len(vocabulary), pa.string())
    )
    new = pa.array([labels.get(name) for name in names], known.type)
    return Vocabulary(joined, pa.concat_arrays([known, new]), kind=vocabulary.kind)


def _listed(names: Sequence[str]) -> str:
    """`'a', 'b'`; of many names the first ones and a count."""
    quoted = ", ".join(f"'{name}'" for name in names[:MAX_NAMES])
    return quoted if len(names) <= MAX_NAMES else f"{quoted} and {len(names) - MAX_NAMES:,} more"


def _left_out(chosen: npt.NDArray[np.bool_]) -> str:
    number = int(chosen.sum())
    return "1 triple is left out" if number == 1 else f"{number:,} triples are left out"
