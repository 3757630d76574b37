"""Adding inductive entities to a trained model and its graph, by name or by id."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from dualkg.data.graph import Graph, GraphShape, Triples, distinct_triples
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import InvalidValue, RequestError
from dualkg.inference.inductive import FrozenContext, embed_entities, with_adjoint
from dualkg.models.base import Model
from dualkg.models.bilinear import BilinearModel
from dualkg.tables.base import local_tables

if TYPE_CHECKING:
    from dualkg.models.paths import PathNetwork
    from dualkg.training.recipe import Recipe

MAX_NAMES = 3  # in a message
Name = str | int
NamedTriple = tuple[Name, Name, Name]


# -- models that can be extended ---------------------------------------------


@dataclass(frozen=True, eq=False)
class PathContext:
    """A path network with its graph, whose new entities need no embeddings but only edges."""

    model: PathNetwork
    graph: Graph

    @property
    def num_known(self) -> int:
        return self.model.shape.num_entities


Context = FrozenContext | PathContext


def extension_context(model: Model, graph: Graph, *, recipe: Recipe | None = None) -> Context:
    """What the new entities of a model are added to."""
    network = model.path_network
    if network is not None:
        network.check_shape(graph.shape)
        return PathContext(network, graph)
    return FrozenContext.of(model, graph, recipe=recipe)


def check_extensible(model: Model) -> None:
    """Refuse a model that new entities cannot be added to."""
    if model.path_network is None:
        with_adjoint(model)


# -- triples that were given -------------------------------------------------


@dataclass(frozen=True, eq=False)
class Extension:
    """Copies of a model and its graph with new entities after the known ones.

    The triples of the new entities are in train; `new_entities` has their number by name.
    """

    model: Model
    graph: Graph
    new_entities: dict[str, int]


def extend(context: Context, triples: Sequence[NamedTriple]) -> Extension:
    """Add every entity of these triples that the graph of the context does not have."""
    graph = context.graph
    num_known = context.num_known
    new_ids: dict[str, int] = {}

    def entity_id(entity: Name) -> int:
        id = find_id(graph.entities, entity)
        if id < 0:
            id = new_ids.setdefault(str(entity), num_known + len(new_ids))
        return id

    ids = np.empty((len(triples), 3), dtype=np.int32)
    for row, (head, relation, tail) in zip(ids, triples, strict=True):
        row[:] = (entity_id(head), graph.relations.id(relation), entity_id(tail))
        if max(row[0], row[2]) < num_known:
            raise RequestError(
                f"({head}, {relation}, {tail}) has no new entity: both are in the graph already."
            )

    names = list(new_ids)
    is_known = np.arange(num_known + len(names)) < num_known
    is_connected = connected(ids, is_known)[num_known:]
    if not is_connected.all():
        isolated = list(compress(names, ~is_connected))
        verb = "has" if len(isolated) == 1 else "have"
        raise RequestError(
            f"{listed(isolated)} {verb} no triple that connects to an entity of the graph."
        )
    return extend_by_ids(context, names, ids)


def add_entity(context: Context, name: str, triples: Sequence[NamedTriple]) -> Extension:
    """Add one new entity by triples that all contain it, each with an entity of the graph."""
    if find_id(context.graph.entities, name) >= 0:
        raise RequestError(
            f"'{name}' is an entity of the graph already. Give the new one another name."
        )
    if not triples:
        expected = f"at least one triple of '{name}', which is known by its triples alone"
        raise InvalidValue("triples", expected=expected, found=[])
    for head, relation, tail in triples:
        others = [entity for entity in (head, tail) if entity != name]
        if len(others) == 2:
            raise RequestError(
                f"({head}, {relation}, {tail}) does not contain '{name}'. It should be the head or "
                "the tail of each triple."
            )
        for entity in others:
            context.graph.entities.id(entity)
    return extend(context, triples)


def extend_by_ids(
    context: Context,
    names: Sequence[str],
    triples: Triples,
    *,
    labels: Mapping[str, str] | None = None,
) -> Extension:
    """Add new entities, with ids after the ids of the graph, in the order of their names."""
    graph = context.graph
    shape = GraphShape(context.num_known + len(names), len(graph.relations))
    triples = distinct_triples(triples, shape)
    train = np.concatenate([graph.train, triples])

    content = graph.fingerprint.encode() + "\n".join(names).encode() + triples.tobytes()
    larger_graph = replace(
        graph,
        entities=_append_names(graph.entities, names, labels or {}),
        train=train,
        source="memory",
        fingerprint=hashlib.sha256(content).hexdigest(),
        catalogued=False,
    )

    heads = triples[:, 0]
    tails = triples[:, 2]
    ends = np.concatenate([heads, tails[heads != tails]])
    degrees = np.bincount(ends, minlength=shape.num_entities)
    counts = degrees[context.num_known :].tolist()
    larger: Model
    if isinstance(context, PathContext):
        larger = context.model.with_graph(larger_graph)
    else:
        rows = embed_entities(triples, context.with_new_entities(len(names), train))
        larger = with_rows(context.model, rows)
    return Extension(larger, larger_graph, dict(zip(names, counts, strict=True)))


@torch.no_grad()
def with_rows(model: BilinearModel, rows: Tensor) -> BilinearModel:
    """A copy of the model with rows `(num_new, num_rows, width)` appended to its entity tables."""
    shape = GraphShape(model.shape.num_entities + len(rows), model.shape.num_relations)
    zeros = local_tables(shape.num_entities, initialize=False)
    larger = type(model).with_tables(zeros, shape, **model.config)
    larger = larger.to(model.device, model.head_table.dtype)

    state = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        if parameter is model.head_table:
            state[name] = torch.cat([parameter, rows[:, 0]])
        elif parameter is model.tail_table:
            state[name] = torch.cat([parameter, rows[:, -1]])
    if any(value.shape != state[name].shape for name, value in larger.state_dict().items()):
        raise RequestError(
            f"{type(model).__name__} has parameters of entities in other tables than entities and "
            "tails, so no row can be appended. Train it again with the new triples."
        )
    larger.load_state_dict(state, assign=True)  # without another copy
    return larger.eval()


# -- names -------------------------------------------------------------------


def find_id(vocabulary: Vocabulary, name: Name) -> int:
    """The id of a name, label or number as in queries; −1 for a name that is new."""
    if isinstance(name, str) and not vocabulary.ids_ignoring_case(name):
        return -1
    return vocabulary.id(name)


def connected(triples: Triples, known: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Whether each entity is known or connected to a known one by triples, `(num_entities,)`."""
    ends = triples[:, [0, 2]]
    reached = known.copy()
    while True:
        crossing = ends[reached[ends[:, 0]] != reached[ends[:, 1]]]
        if not len(crossing):
            return reached
        reached[crossing] = True


def _append_names(
    vocabulary: Vocabulary, names: Sequence[str], labels: Mapping[str, str]
) -> Vocabulary:
    all_names = pa.concat_arrays([vocabulary.names, pa.array(names, vocabulary.names.type)])
    known_labels = vocabulary.labels
    if known_labels is None:
        if not any(name in labels for name in names):
            return Vocabulary(all_names, kind=vocabulary.kind)
        known_labels = pa.nulls(len(vocabulary), pa.string())
    new_labels = pa.array([labels.get(name) for name in names], known_labels.type)
    all_labels = pa.concat_arrays([known_labels, new_labels])
    return Vocabulary(all_names, all_labels, kind=vocabulary.kind)


def listed(names: Sequence[str]) -> str:
    """`'a', 'b'`; of many names the first ones and a count."""
    quoted = ", ".join(f"'{name}'" for name in names[:MAX_NAMES])
    if len(names) <= MAX_NAMES:
        return quoted
    return f"{quoted} and {len(names) - MAX_NAMES:,} more"
