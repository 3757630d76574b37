"""A model and a graph with more entities than were trained: each inductive_entity gets its row from a few triples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from dualkg.data.archives import one_source
from dualkg.data.columns import Columns
from dualkg.data.encoding import ReadTriples, read_triples
from dualkg.data.graph import Graph, GraphShape, Triples, distinct_triples
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError, did_you_mean
from dualkg.files import read_json, write_text
from dualkg.inference.inductive import FrozenContext, with_adjoint
from dualkg.inference.inductive_solver import embed_entities
from dualkg.models.base import Model, skip_initialization
from dualkg.models.bilinear import BilinearModel
from dualkg.training.api import choose_device, evaluate_held_out
from dualkg.training.recipe import Recipe
from dualkg.training.run import Run, load_run

Name = str | int
NamedTriple = tuple[Name, Name, Name]
NAMES_SHOWN = 3


@dataclass(frozen=True, eq=False)
class Extension:
    """A model and its graph with inductive_entities as last entities, their triples in train; what was given is unchanged."""

    model: BilinearModel
    graph: Graph
    inductive_entities: dict[str, int]  # by name, how many triples each has


def extended(
    model: Model,
    graph: Graph,
    triples: Sequence[NamedTriple],
    *,
    recipe: Recipe | None = None,
    context: FrozenContext | None = None,
) -> Extension:
    """Give every name of these triples that the graph does not know a row in the model.

    `recipe` is what the model was trained by; `context` what was made of both before, to be used again.
    """
    context = context or FrozenContext.of(model, graph, recipe=recipe)
    known = Finder(graph.entities)
    names: dict[str, int] = {}
    found = np.empty((len(triples), 3), dtype=np.int32)
    for row, (head, relation, tail) in zip(found, triples, strict=True):
        row[1] = graph.relations.id(relation)
        for column, entity in ((0, head), (2, tail)):
            id = known(entity)
            row[column] = names.setdefault(str(entity), len(graph.entities) + len(names)) if id is None else id
        if max(row[0], row[2]) < len(graph.entities):
            raise RequestError(f"({head}, {relation}, {tail}) has no new entity: the graph knows both of its own.")
    joined = joined_to_known(found, len(graph.entities), len(names))
    lost = [name for name, there in zip(names, joined, strict=True) if not there]
    if lost:
        raise RequestError(f"{listed(lost)} {_has(lost)} no triple that leads to an entity that the graph knows.")
    return extended_by_ids(context, graph, list(names), found)


def with_inductive_entity(
    model: Model,
    graph: Graph,
    name: str,
    *,
    triples: Sequence[NamedTriple],
    recipe: Recipe | None = None,
    context: FrozenContext | None = None,
) -> Extension:
    """Give one new name a row by triples that all have it, each with an entity that the graph knows."""
    if Finder(graph.entities)(name) is not None:
        raise RequestError(f"'{name}' is an entity that the graph knows already. Give the new one another name.")
    if not triples:
        raise RequestError(f"A new entity is placed by at least one triple; none came for '{name}'.")
    for head, relation, tail in triples:
        others = [entity for entity in (head, tail) if entity != name]
        if len(others) == 2:
            raise RequestError(
                f"({head}, {relation}, {tail}) is no triple of '{name}'. Each should have it at one end."
            )
        for entity in others:
            graph.entities.id(entity)
    return extended(model, graph, triples, recipe=recipe, context=context)


def extended_by_ids(
    context: FrozenContext,
    graph: Graph,
    names: Sequence[str],
    triples: Triples,
    *,
    labels: Mapping[str, str] | None = None,
) -> Extension:
    """The same by ids: inductive_entities are counted on from the graph's entities, in the order of their names."""
    shape = GraphShape(len(graph.entities) + len(names), len(graph.relations))
    triples = distinct_triples(triples, shape)
    train = np.concatenate([graph.train, triples])
    context = context.with_new_entities(len(names), train)
    rows = embed_entities(triples, context)
    larger = replace(
        graph,
        entities=_longer(graph.entities, names, labels or {}),
        train=train,
        source="memory",
        fingerprint=_fingerprint(graph, names, triples),
        catalogued=False,
    )
    ends = np.concatenate([triples[:, 0], triples[triples[:, 0] != triples[:, 2], 2]])
    counts = np.bincount(ends, minlength=shape.num_entities)[context.num_known :].tolist()
    return Extension(with_rows(context.model, rows), larger, dict(zip(names, counts, strict=True)))


@torch.no_grad()
def with_rows(model: BilinearModel, rows: Tensor) -> BilinearModel:
    """The same model with more entities: rows `(num_new, num_rows, width)` below those it has."""
    shape = GraphShape(model.shape.num_entities + len(rows), model.shape.num_relations)
    with skip_initialization():
        larger = type(model)(shape, **model.config)  # type: ignore[arg-type]
    larger = larger.to(model.device, model.head_table.dtype)
    tables = dict(model.state_dict())
    tables["entities"] = torch.cat([tables["entities"], rows[:, 0]])
    if model.two_entity_tables:
        tables["tails"] = torch.cat([tables["tails"], rows[:, -1]])
    expected = {name: tuple(value.shape) for name, value in larger.state_dict().items()}
    if {name: tuple(value.shape) for name, value in tables.items()} != expected:
        raise RequestError(
            f"{type(model).__name__} has numbers of its entities in other tables than `entities` and `tails`, so that "
            f"no row can be added to it. Train it again with the new triples."
        )
    larger.load_state_dict(tables, assign=True)  # what was joined is not copied once more
    return larger.eval()


class Finder:
    """Finds ids as questions do, by name, by label or by number; None for a name that is new."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def __call__(self, name: Name) -> int | None:
        if isinstance(name, str) and not self.vocabulary.ids_ignoring_case(name):
            return None
        return self.vocabulary.id(name)


def joined_to_known(triples: Triples, num_known: int, num_new: int) -> npt.NDArray[np.bool_]:
    """For each inductive_entity whether triples lead from it, through others or not, to an entity that is known."""
    ends = triples[:, [0, 2]]
    reached = np.arange(num_known + num_new) < num_known
    while True:
        fresh = ends[reached[ends[:, 0]] != reached[ends[:, 1]]]
        if not len(fresh):
            return reached[num_known:]
        reached[fresh] = True


def listed(names: Sequence[str]) -> str:
    """`'a', 'b'`; of many the first, and how many more."""
    shown = ", ".join(f"'{name}'" for name in names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN:,} more"


def _has(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _longer(vocabulary: Vocabulary, names: Sequence[str], labels: Mapping[str, str]) -> Vocabulary:
    joined = pa.concat_arrays([vocabulary.names, pa.array(names, vocabulary.names.type)])
    if vocabulary.labels is None and not any(name in labels for name in names):
        return Vocabulary(joined, kind=vocabulary.kind)
    before = vocabulary.labels if vocabulary.labels is not None else pa.nulls(len(vocabulary), pa.string())
    more = pa.array([labels.get(name) for name in names], before.type)
    return Vocabulary(joined, pa.concat_arrays([before, more]), kind=vocabulary.kind)


def _fingerprint(graph: Graph, names: Sequence[str], triples: Triples) -> str:
    """One sum for the graph as it was and what came."""
    told = hashlib.sha256(graph.fingerprint.encode())
    told.update("\n".join(names).encode())
    told.update(np.ascontiguousarray(triples).tobytes())
    return told.hexdigest()


NOTE = "extension.json"


@dataclass(frozen=True, eq=False)
class Sifted:
    """Of a file the triples that place inductive_entities, by ids; and in sentences what was left out."""

    names: list[str]
    triples: Triples
    remarks: tuple[str, ...]


def extend_run(
    path: str | Path,
    file: str | Path,
    *,
    out: str | Path,
    columns: Columns | None = None,
    device: str | None = None,
) -> tuple[Run, dict[str, Any]]:
    """Make a new run of a finished one, with a row for each new entity of a file; and the note that it keeps of it."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(f"{out} exists already. Name a new folder with --out.")
    run = load_run(path)
    model = with_adjoint(run.model)
    read = read_triples({"triples": one_source(file)}, columns=columns)
    sifted = sift(read, run.graph, source=str(file))
    context = FrozenContext.of(model.to(choose_device(device)), run.graph, recipe=run.recipe)
    found = extended_by_ids(context, run.graph, sifted.names, sifted.triples, labels=read.labels)
    reports = evaluate_held_out(found.model, found.graph)
    larger = Run(found.model, found.graph, run.recipe, run.history, reports, sparsity=run.sparsity)
    larger.save(out)
    note = _note(path, file, found, sifted, num_triples=len(found.graph.train) - len(run.graph.train))
    earlier = Path(path) / NOTE
    if earlier.exists():
        note["before"] = read_json(earlier)
    write_text(out / NOTE, json.dumps(note, indent=1, ensure_ascii=False))
    return larger, note


def sift(read: ReadTriples, graph: Graph, *, source: str) -> Sifted:
    """Keep the triples that join a inductive_entity to what the graph knows, directly or through other inductive_entities."""
    remarks = list(read.remarks)
    entities, relations = Finder(graph.entities), Finder(graph.relations)
    names = read.entities.to_pylist()
    known = np.array([-1 if (id := entities(name)) is None else id for name in names], dtype=np.int64)
    of_relation = [relations(name) for name in read.relations.to_pylist()]
    triples = read.triples["triples"]
    strange = np.array([id is None for id in of_relation])[triples[:, 1]]
    if strange.any():
        unknown = [name for name, id in zip(read.relations.to_pylist(), of_relation, strict=True) if id is None]
        near = did_you_mean(unknown[0], graph.relations.names.to_pylist()) if len(unknown) == 1 else ""
        remarks.append(f"{_left_out(strange)}: the run knows no relation {listed(unknown)}.{near}")
    settled = ~strange & (known[triples[:, [0, 2]]] >= 0).all(1)
    if settled.any():
        remarks.append(f"{_left_out(settled)}: the run knows both entities, and is not trained again.")
    kept = triples[~strange & ~settled]
    joined = _joined(kept, known, len(graph.entities))
    lost = [name for name, id, there in zip(names, known, joined, strict=True) if id < 0 and not there]
    if lost:
        remarks.append(f"No triple leads from {listed(lost)} to an entity that the run knows: left out.")
    kept = kept[joined[kept[:, 0]] & joined[kept[:, 2]]]
    if not len(kept):
        told = " ".join(["", *remarks])
        raise RequestError(f"{source} joins no new entity to the {len(graph.entities):,} that the run knows.{told}")
    new = [place for place in np.unique(kept[:, [0, 2]]).tolist() if known[place] < 0]
    known[new] = len(graph.entities) + np.arange(len(new))
    found = np.stack([known[kept[:, 0]], np.array([id or 0 for id in of_relation])[kept[:, 1]], known[kept[:, 2]]], 1)
    return Sifted([names[place] for place in new], found.astype(np.int32), tuple(remarks))


def _joined(triples: Triples, known: npt.NDArray[np.int64], num_known: int) -> npt.NDArray[np.bool_]:
    """Which entities of the file are known, or joined to one that is."""
    ids = known.copy()
    ids[known < 0] = num_known + np.arange(int((known < 0).sum()))
    by_id = triples.copy()
    by_id[:, 0], by_id[:, 2] = ids[triples[:, 0]], ids[triples[:, 2]]
    found = known >= 0
    found[known < 0] = joined_to_known(by_id, num_known, int((known < 0).sum()))
    return found


def _left_out(chosen: npt.NDArray[np.bool_]) -> str:
    number = int(chosen.sum())
    return "1 triple is left out" if number == 1 else f"{number:,} triples are left out"


def _note(path: str | Path, file: str | Path, found: Extension, sifted: Sifted, *, num_triples: int) -> dict[str, Any]:
    return {
        "source": str(path),
        "file": str(file),
        "num_entities": len(found.inductive_entities),
        "num_triples": num_triples,
        "entities": found.inductive_entities,
        "remarks": list(sifted.remarks),
    }
