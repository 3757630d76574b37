"""A saved run that NumPy can query: its graph, and its model by memory-mapped weights."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dualkg.data.graph import SPLITS, Graph, load_saved_graph, relations_with_self_loops
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.files import REMEMBERED_BYTES, file_damage, open_regular, read_json, regular_file
from dualkg.without_torch.prediction import Prediction
from dualkg.without_torch.scores import Floats, SavedModel, saved_model

# Files whose presence means that PyTorch is needed: an ensemble, weights of several processes or
# without their zeros, entities that were added after training, and probabilities.
FOR_TORCH = (
    "ensemble.json",
    "weights.safetensors.index.json",
    "sparsity.json",
    "extension.json",
    "calibration.json",
)
RECIPE = "recipe.toml"
WEIGHTS = "weights.safetensors"
GRAPH = "graph"
REPORT = "report.json"
MAX_HEADER = 1 << 20  # bytes
Given = tuple[str | int | None, str | int | None, str | int | None]


@dataclass(frozen=True)
class SavedRun:
    """The graph and the model of a finished run."""

    graph: Graph
    model: SavedModel

    @classmethod
    def load(cls, folder: Path) -> SavedRun | None:
        """Load a run; None if it needs PyTorch, or is damaged, which loading it there explains."""
        try:
            if any(os.path.lexists(folder / name) for name in FOR_TORCH):
                return None
            if not _is_intact(folder):
                return None
            with open_regular(folder / RECIPE) as file:
                settings = tomllib.load(file)["model"]
            model = saved_model(settings, read_tables(folder / WEIGHTS))
            if model is None:
                return None
            graph = load_saved_graph(folder / GRAPH)
        except (OSError, ValueError, KeyError, TypeError, RequestError):
            return None
        shape = (len(model.heads), model.num_relations)
        return cls(graph, model) if shape == tuple(graph.shape) else None

    def predict(self, given: Given, *, k: int, omit_known: bool = False) -> list[Prediction] | None:
        """The best answers to (head, relation, tail) with None for one, or the triple's score.

        None if the model scores NaN or infinity: loading the run with PyTorch says why.
        """
        entities = self.graph.entities
        head, relation, tail = (
            None if name is None else names.id(name)
            for names, name in zip((entities, self.graph.relations, entities), given, strict=True)
        )
        if relation is None:
            assert head is not None
            assert tail is not None
            scores = self.model.score_relations(head, tail)
            known = self._known({0: head, 2: tail}, answer=1)
            return _best(
                scores, self.graph.relations, k=k, known=known, omitted=known if omit_known else ()
            )
        if head is None:
            assert tail is not None
            scores = self._score_query(tail, relation + self.graph.shape.num_relations)
            known = self._known({1: relation, 2: tail}, answer=0)
            return self._best_entities(scores, tail, relation, k, known, omit_known)
        scores = self._score_query(head, relation)
        known = self._known({0: head, 1: relation}, answer=2)
        if tail is None:
            return self._best_entities(scores, head, relation, k, known, omit_known)
        answer = _prediction(entities, tail, scores, known)
        return [answer] if math.isfinite(answer.score) else None

    def _score_query(self, entity: int, relation: int) -> Floats:
        [scores] = self.model.score_queries(np.array([entity]), np.array([relation]))
        return np.asarray(scores)

    def _best_entities(
        self,
        scores: Floats,
        entity: int,
        relation: int,
        k: int,
        known: Mapping[int, str],
        omit_known: bool,
    ) -> list[Prediction] | None:
        """The best answers to a query; its entity is none, unless self-loops are usual."""
        omitted = set(known) if omit_known else set()
        if entity not in known and relation not in self._relations_with_self_loops:
            omitted.add(entity)
        return _best(scores, self.graph.entities, k=k, known=known, omitted=omitted)

    def _known(self, given: Mapping[int, int], *, answer: int) -> dict[int, str]:
        """The known ids in one column of the triples that have the given ids in the others."""
        splits: dict[int, str] = {}
        for split in SPLITS:
            triples = self.graph.split(split)
            is_known = np.ones(len(triples), dtype=bool)
            for column, id in given.items():
                is_known &= triples[:, column] == id
            for id in triples[is_known, answer].tolist():
                splits.setdefault(id, split)
        return splits

    @cached_property
    def _relations_with_self_loops(self) -> frozenset[int]:
        return relations_with_self_loops(self.graph)


def _best(
    scores: Floats,
    names: Vocabulary,
    *,
    k: int,
    known: Mapping[int, str],
    omitted: Collection[int],
) -> list[Prediction] | None:
    """The k best candidates, best first."""
    if not np.isfinite(scores).all():
        return None
    candidates = np.delete(np.arange(len(scores)), list(omitted))
    if k < len(candidates):
        candidates = candidates[np.argpartition(-scores[candidates], k)[:k]]
    order = np.lexsort((candidates, -scores[candidates]))
    return [_prediction(names, id, scores, known) for id in candidates[order].tolist()]


def _prediction(names: Vocabulary, id: int, scores: Floats, known: Mapping[int, str]) -> Prediction:
    return Prediction(names[id], names.label(id), id, float(scores[id]), known.get(id))


# -- files -------------------------------------------------------------------


def _is_intact(folder: Path) -> bool:
    """Whether the files of a run are those that its report names."""
    report = read_json(folder / REPORT, checksum=True)
    records = report["files"]
    if RECIPE not in records or WEIGHTS not in records:
        return False
    for name, record in records.items():
        if name in (RECIPE, WEIGHTS) or name.startswith(f"{GRAPH}/"):
            memory = None
            if record["bytes"] >= REMEMBERED_BYTES:
                from dualkg.data.archives import cache_folder

                memory = cache_folder() / "verified"
            if file_damage(folder / name, record, memory=memory):
                return False
    return True


def read_tables(path: Path) -> dict[str, Floats]:
    """The tables of a safetensors file as memory-mapped arrays of float32.

    The file begins with the length of a header, which has type, shape and place of each table.
    """
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER:
            raise ValueError("the header is too long")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    content = np.memmap(regular_file(path), mode="r", dtype=np.uint8, offset=8 + length)
    tables = {}
    for name, about in header.items():
        group, _, table = name.partition("/")
        if group != "model" or about["dtype"] != "F32":
            raise ValueError("only PyTorch reads these weights")
        first, last = about["data_offsets"]
        shape: Sequence[int] = about["shape"]
        tables[table] = content[first:last].view(np.float32).reshape(shape)
    return tables
