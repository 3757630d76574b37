"""Embeddings that were trained elsewhere, as a run that can be ranked, asked and saved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from dualkg.data.graph import Graph
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.models import MODELS
from dualkg.models.base import EmbeddingModel
from dualkg.models.diagonal import SimplE
from dualkg.training.recipe import Data, ModelConfig, Recipe, find_class
from dualkg.training.run import Run

Array = npt.ArrayLike
NO_TRIPLES = np.zeros((0, 3), dtype=np.int32)


def from_arrays(
    model: str,
    *,
    entities: Array,
    relations: Array,
    tails: Array | None = None,
    graph: Graph | None = None,
    entity_names: Sequence[str] | None = None,
    relation_names: Sequence[str] | None = None,
) -> Run:
    """Make a run of tables `(num_entities, width)` and `(num_relations or twice that, …)`.

    Rows follow `entity_names` and `relation_names`, or the ids of `graph` where no names are given. Complex
    tables hold all real parts, then all imaginary parts; complex arrays are taken apart. Twice as many relation
    rows as relations are taken for reciprocals. CP needs `tails`, its second entity table.
    """
    kind = find_class(model, MODELS, EmbeddingModel)
    given = {"entities": entities, "relations": relations, "tails": tails}
    tables = {name: _real(table, name, kind) for name, table in given.items() if table is not None}
    graph = graph or _without_triples(entity_names, relation_names)
    reciprocal = _is_reciprocal(len(tables["relations"]), graph)
    names = {"entities": entity_names, "tails": entity_names, "relations": relation_names}
    vocabularies = {"entities": graph.entities, "tails": graph.entities, "relations": graph.relations}
    for name, table in tables.items():
        order = names[name]
        if order is not None:
            tables[name] = _in_graph_order(table, order, vocabularies[name])
    built = _fill(kind, graph, tables, reciprocal=reciprocal)
    choice = ModelConfig(name=model, dim=built.dim, reciprocal=reciprocal)
    return Run(built.eval(), graph, Recipe(data=Data(graph=graph.name), model=choice))


def _without_triples(entity_names: Sequence[str] | None, relation_names: Sequence[str] | None) -> Graph:
    if entity_names is None or relation_names is None:
        raise RequestError("from_arrays needs a graph, or entity_names and relation_names, to name the rows.")
    entities, relations = Vocabulary(list(entity_names)), Vocabulary(list(relation_names), kind="relation")
    return Graph("imported", entities, relations, NO_TRIPLES, NO_TRIPLES, NO_TRIPLES)


def _real(table: Array, name: str, kind: type[EmbeddingModel]) -> torch.Tensor:
    values = np.asarray(table)
    if values.ndim < 2:
        raise RequestError(f"{name} should be a table with a row for each name; its shape is {values.shape}.")
    values = values.reshape(len(values), -1)
    if np.iscomplexobj(values):
        if kind.numbers_per_coordinate != 2 or kind is SimplE:  # whose two numbers are one as head and one as tail
            raise RequestError(f"{name} are complex numbers; {kind.__name__} has real ones.")
        values = np.concatenate([values.real, values.imag], axis=1)
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _is_reciprocal(num_rows: int, graph: Graph) -> bool:
    num_relations = graph.shape.num_relations
    if num_rows not in (num_relations, 2 * num_relations):
        raise RequestError(
            f"The relation table should have {num_relations:,} rows, or {2 * num_relations:,} with reciprocals; it has "
            f"{num_rows:,}."
        )
    return num_rows == 2 * num_relations


def _in_graph_order(table: torch.Tensor, names: Sequence[str], vocabulary: Vocabulary) -> torch.Tensor:
    row_of = {name: row for row, name in enumerate(names)}
    if len(row_of) < len(names):
        raise RequestError(
            f"Of the {len(names):,} names of the rows {len(names) - len(row_of):,} stand more than once."
        )
    if len(table) not in (len(names), 2 * len(names) if vocabulary.kind == "relation" else len(names)):
        raise RequestError(f"There are {len(names):,} names for {len(table):,} rows.")
    missing = [name for name in vocabulary.names.to_pylist() if name not in row_of]
    if missing:
        raise RequestError(f"The arrays have no row for {len(missing):,} names of the graph, such as '{missing[0]}'.")
    order = torch.tensor([row_of[name] for name in vocabulary.names.to_pylist()], dtype=torch.long)
    halves = torch.split(table, len(names)) if len(table) == 2 * len(names) else (table,)
    return torch.cat([half[order] for half in halves])


def _fill(
    kind: type[EmbeddingModel], graph: Graph, tables: dict[str, torch.Tensor], *, reciprocal: bool
) -> EmbeddingModel:
    dim = tables["entities"].shape[1] // kind.numbers_per_coordinate
    model = kind(graph.shape, dim=dim, reciprocal=reciprocal)
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    came = {key: tuple(value.shape) for key, value in tables.items()}
    if expected != came:
        raise RequestError(f"{kind.__name__} for this graph has tables {expected}; {came} came.")
    model.load_state_dict(tables)
    return model
