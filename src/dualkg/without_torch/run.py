"""A saved run that NumPy can query: its graph, and its model by memory-mapped weights."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dualkg.data.graph import SPLITS, Graph, load_saved_graph, relations_with_self_loops
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.files import REMEMBERED_BYTES, file_damage, open_regular, read_json, regular_file
from dualkg.without_torch.identity import identity_of
from dualkg.without_torch.prediction import Figures, Prediction, calibrated, query_type
from dualkg.without_torch.priors import Arrays
from dualkg.without_torch.probabilities import TripleCalibration, triple_log_probabilities
from dualkg.without_torch.scores import Floats, Ids, SavedModel, saved_model

# Files whose presence means that PyTorch is needed: an ensemble, weights of several processes or
# without their zeros, and entities that were added after training.
FOR_TORCH = (
    "ensemble.json",
    "weights.safetensors.index.json",
    "sparsity.json",
    "extension.json",
)
RECIPE = "recipe.toml"
WEIGHTS = "weights.safetensors"
GRAPH = "graph"
REPORT = "report.json"
CALIBRATION = "calibration.json"
PRIORS = "priors.safetensors"
MAX_HEADER = 1 << 20  # bytes
# Types of arrays by their names in safetensors; others are left to PyTorch.
DTYPES = {"F32": np.float32, "F64": np.float64, "I64": np.int64, "BOOL": np.bool_}
Given = tuple[str | int | None, str | int | None, str | int | None]


@dataclass(frozen=True)
class SavedRun:
    """The graph and the model of a finished run."""

    graph: Graph
    model: SavedModel
    calibration: TripleCalibration | None = None

    @classmethod
    def load(cls, folder: Path) -> SavedRun | None:
        """Load a run; None if it needs PyTorch, or is damaged, which loading it there explains."""
        try:
            if any(os.path.lexists(folder / name) for name in FOR_TORCH):
                return None
            records = _needed_records(folder)
            if not _is_intact(folder, records):
                return None
            with open_regular(folder / RECIPE) as file:
                settings = tomllib.load(file)["model"]
            model = saved_model(settings, read_tables(folder / WEIGHTS))
            if model is None:
                return None
            graph = load_saved_graph(folder / GRAPH)
            if (len(model.heads), model.num_relations) != tuple(graph.shape):
                return None
            calibration = None
            if os.path.lexists(folder / CALIBRATION):
                calibration = _load_calibration(folder, records, graph)
                if calibration is None:
                    return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RequestError):
            return None
        return cls(graph, model, calibration)

    def predict(self, given: Given, *, k: int, omit_known: bool = False) -> list[Prediction] | None:
        """The best answers to (head, relation, tail) with None for one, or the triple's score.

        With a calibration they have probabilities and are in their order. None if the model scores
        NaN or infinity: loading the run with PyTorch says why.
        """
        vocabularies = (self.graph.entities, self.graph.relations, self.graph.entities)
        head, relation, tail = (
            None if name is None else vocabulary.id(name)
            for vocabulary, name in zip(vocabularies, given, strict=True)
        )
        predictions = self._best(head, relation, tail, k=k, omit_known=omit_known)
        if predictions is None or self.calibration is None:
            return predictions
        ids = tuple(id for id in (head, relation, tail) if id is not None)
        try:
            return calibrated(query_type(given), [ids], [predictions], self._figures)[0]
        except FloatingPointError:
            return None

    def _best(
        self, head: int | None, relation: int | None, tail: int | None, *, k: int, omit_known: bool
    ) -> list[Prediction] | None:
        """The best answers by their scores."""
        entities = self.graph.entities
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

    def _figures(self, triples: Ids) -> Iterator[Figures]:
        """The probabilities of triples `(n, 3)`."""
        assert self.calibration is not None
        log_probabilities = triple_log_probabilities(
            self.model, triples, symmetric=self.calibration.symmetric
        )
        if not np.isfinite(log_probabilities).all():
            raise FloatingPointError("the model scores NaN or infinity")
        return self.calibration.of_triples(triples, log_probabilities).figures()

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


def _needed_records(folder: Path) -> dict[str, Any]:
    """Size and checksum of each file that predictions need, by the report of a run."""
    records = read_json(folder / REPORT, checksum=True)["files"]
    return {
        name: record
        for name, record in records.items()
        if name in (RECIPE, WEIGHTS) or name.partition("/")[0] == GRAPH
    }


def _is_intact(folder: Path, records: Mapping[str, Any]) -> bool:
    """Whether the files of a run are those that its report names."""
    if RECIPE not in records or WEIGHTS not in records:
        return False
    return all(_has_content(folder / name, record) for name, record in records.items())


def _has_content(path: Path, record: dict[str, Any]) -> bool:
    """Whether a file is the one of which a record has size and checksum."""
    memory = None
    if record["bytes"] >= REMEMBERED_BYTES:
        from dualkg.data.archives import cache_folder

        memory = cache_folder() / "verified"
    return file_damage(path, record, memory=memory) is None


def _load_calibration(
    folder: Path, records: Mapping[str, Any], graph: Graph
) -> TripleCalibration | None:
    """The calibration of a run; None if it may be of another run, which PyTorch explains."""
    content = read_json(folder / CALIBRATION, checksum=True)
    if content["made_from"] != identity_of(records, records[WEIGHTS]["sha256"]):
        return None
    # Earlier versions saved no priors.
    record = content.get("priors")
    has_priors = record is not None and _has_content(folder / PRIORS, record)
    priors = read_arrays(folder / PRIORS) if has_priors else None
    return TripleCalibration.of(content["calibration"], graph, priors=priors)


def read_tables(path: Path) -> dict[str, Floats]:
    """The tables of a model, by name; other types than float32 are left to PyTorch."""
    tables = {}
    for name, array in read_arrays(path).items():
        group, _, table = name.partition("/")
        if group != "model" or array.dtype != np.float32:
            raise ValueError("only PyTorch reads these weights")
        tables[table] = array
    return tables


def read_arrays(path: Path) -> Arrays:
    """The arrays of a safetensors file, memory-mapped.

    The file begins with the length of a header, which has type, shape and place of each array.
    """
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER:
            raise ValueError("the header is too long")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    content = np.memmap(regular_file(path), mode="r", dtype=np.uint8, offset=8 + length)
    arrays: Arrays = {}
    for name, about in header.items():
        first, last = about["data_offsets"]
        shape: Sequence[int] = about["shape"]
        arrays[name] = content[first:last].view(DTYPES[about["dtype"]]).reshape(shape)
    return arrays
