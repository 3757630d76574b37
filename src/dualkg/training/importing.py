"""Embeddings that were trained elsewhere, as a run that can be evaluated, queried and saved."""

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
from dualkg.training.checkpoint import load_weights
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
    """Make a run from tables `(num_entities, width)` and `(num_relations or twice that, …)`.

    Rows are in the order of `entity_names` and `relation_names`, or of the ids of `graph`. Complex arrays become all
    real parts, then all imaginary parts. Twice as many relation rows as relations are those with reciprocals. CP needs
    `tails`, its second entity table.
    """
    kind = find_class(model, MODELS, EmbeddingModel)
    given = {"entities": entities, "relations": relations, "tails": tails}
    tables = {name: _real(table, name, kind) for name, table in given.items() if table is not None}
    if graph is None:
        if entity_names is None or relation_names is None:
            raise RequestError("from_arrays needs a graph, or entity_names and relation_names, to name the rows.")
        vocabularies = Vocabulary(list(entity_names)), Vocabulary(list(relation_names), kind="relation")
        graph = Graph("imported", *vocabularies, NO_TRIPLES, NO_TRIPLES, NO_TRIPLES)
    num_rows, num_relations = len(tables["relations"]), graph.shape.num_relations
    if num_rows not in (num_relations, 2 * num_relations):
        raise RequestError(
            f"The relation table should have {num_relations:,} rows, or {2 * num_relations:,} with reciprocals; it has "
            f"{num_rows:,}."
        )
    for name, table in tables.items():
        names, vocabulary = (relation_names, graph.relations) if name == "relations" else (entity_names, graph.entities)
        if names is not None:
            tables[name] = _in_graph_order(table, names, vocabulary)
    config = ModelConfig(
        name=model,
        dim=tables["entities"].shape[1] // kind.numbers_per_coordinate,
        reciprocal=num_rows == 2 * num_relations,
    )
    built = config.build(graph.shape, seed=0)
    load_weights(built, tables, source="The set of arrays")
    return Run(built.eval(), graph, Recipe(data=Data(graph=graph.name), model=config))


def _real(table: Array, name: str, kind: type[EmbeddingModel]) -> torch.Tensor:
    values = np.asarray(table)
    if values.ndim < 2:
        raise RequestError(f"{name} should be a table with a row for each name; its shape is {values.shape}.")
    values = values.reshape(len(values), -1)
    if np.iscomplexobj(values):
        if kind.numbers_per_coordinate != 2 or kind is SimplE:  # one of its two numbers is for heads, one for tails
            raise RequestError(f"{name} are complex numbers; {kind.__name__} has real ones.")
        values = np.concatenate([values.real, values.imag], axis=1)
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _in_graph_order(table: torch.Tensor, names: Sequence[str], vocabulary: Vocabulary) -> torch.Tensor:
    row_of = {name: row for row, name in enumerate(names)}
    if len(row_of) < len(names):
        raise RequestError(f"{len(names) - len(row_of):,} of the {len(names):,} names of rows are repeated.")
    if len(table) not in (len(names), 2 * len(names) if vocabulary.kind == "relation" else len(names)):
        raise RequestError(f"There are {len(names):,} names for {len(table):,} rows.")
    missing = [name for name in vocabulary.names.to_pylist() if name not in row_of]
    if missing:
        raise RequestError(f"The arrays have no row for {len(missing):,} names of the graph, such as '{missing[0]}'.")
    order = torch.tensor([row_of[name] for name in vocabulary.names.to_pylist()], dtype=torch.long)
    return torch.cat([rows[order] for rows in table.split(len(names))])  # type: ignore[no-untyped-call]
