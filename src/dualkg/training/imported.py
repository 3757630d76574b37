"""Embeddings that were trained elsewhere, as a run that can be ranked, asked and saved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from dualkg.data.graph import Graph
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.models import MODELS, BilinearModel
from dualkg.training.choices import find_class
from dualkg.training.recipe import Data, ModelChoice, Recipe
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
    tables = {"entities": _real(entities), "relations": _real(relations)}
    if tails is not None:
        tables["tails"] = _real(tails)
    if graph is None:
        if entity_names is None or relation_names is None:
            raise RequestError("from_arrays needs a graph, or entity_names and relation_names, to name the rows.")
        graph = Graph(
            "imported",
            Vocabulary(list(entity_names)),
            Vocabulary(list(relation_names), kind="relation"),
            NO_TRIPLES,
            NO_TRIPLES,
            NO_TRIPLES,
        )
    reciprocal = _is_reciprocal(len(tables["relations"]), graph)
    for name, names, vocabulary in (
        ("entities", entity_names, graph.entities),
        ("tails", entity_names, graph.entities),
        ("relations", relation_names, graph.relations),
    ):
        if names is not None and name in tables:
            tables[name] = _in_graph_order(tables[name], names, vocabulary)
    built = _fill(model, graph, tables, reciprocal=reciprocal)
    choice = ModelChoice(name=model, dim=built.dim, reciprocal=reciprocal)
    return Run(built.eval(), graph, Recipe(data=Data(graph=graph.name), model=choice))


def _real(table: Array) -> torch.Tensor:
    values = np.asarray(table)
    values = values.reshape(len(values), -1)
    if np.iscomplexobj(values):
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
    missing = [name for name in vocabulary.names.to_pylist() if name not in row_of]
    if missing:
        raise RequestError(f"The arrays have no row for {len(missing):,} names of the graph, such as '{missing[0]}'.")
    order = torch.tensor([row_of[name] for name in vocabulary.names.to_pylist()], dtype=torch.long)
    halves = torch.split(table, len(names)) if len(table) == 2 * len(names) else (table,)
    return torch.cat([half[order] for half in halves])


def _fill(name: str, graph: Graph, tables: dict[str, torch.Tensor], *, reciprocal: bool) -> BilinearModel:
    kind = find_class(name, MODELS, BilinearModel)
    width = tables["entities"].shape[1]
    dim = width // kind.numbers_per_coordinate
    model: BilinearModel = kind(graph.shape, dim=dim, reciprocal=reciprocal)
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    came = {key: tuple(value.shape) for key, value in tables.items()}
    if expected != came:
        raise RequestError(f"{name} for this graph has tables {expected}; {came} came.")
    model.load_state_dict(tables)
    return model
