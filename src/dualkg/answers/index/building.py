"""The index of a model: built for the questions that it is asked, and measured against the exact one."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dualkg.answers.index.approximate import KINDS, faiss
from dualkg.answers.index.base import Index, Metric
from dualkg.answers.index.exact import ExactIndex
from dualkg.answers.index.questions import (
    check_agreement,
    fingerprint,
    metric_of,
    sample_questions,
    tables_of,
)
from dualkg.answers.index.recall import DEPTHS, queries_per_second, recalls, tuned
from dualkg.answers.index.tables import Form
from dualkg.data.graph import Graph
from dualkg.errors import RequestError
from dualkg.evaluation.ranking import evaluating
from dualkg.models.base import Model, Side

Kind = Literal["exact", "ivf", "hnsw", "sq8"]
ALL_KINDS: tuple[Kind, ...] = get_args(Kind)
NUM_QUESTIONS = 1000  # half to find the effort with, half to measure with


@dataclass(frozen=True)
class Facts:
    """What an index reaches on questions that it was not tuned with: recall at several k, against the exact one.

    A second's questions are asked one at a time, of one thread. `bytes` are those of its files, where it is saved.
    """

    recall: dict[int, float]
    queries_per_second: float
    exact_queries_per_second: float
    build_seconds: float
    num_questions: int
    bytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class ModelIndex:
    """An index for tails, one for heads where those are asked for of another table, and what was measured of each.

    `fingerprints` are of the tables that they were made of.
    """

    model: str
    metric: Metric
    indexes: dict[Side, Index]
    facts: dict[Side, Facts]
    fingerprints: dict[Side, str]

    @property
    def kind(self) -> str:
        return self.indexes["tail"].kind

    def for_side(self, side: Side) -> Index:
        return self.indexes.get(side, self.indexes["tail"])

    def check_model(self, model: Model) -> None:
        """Refuse a model that the index was not made of: it would find another model's answers."""
        found = {side: fingerprint(table) for side, table in tables_of(model).items()}
        if found != self.fingerprints or metric_of(model) != self.metric:
            raise RequestError(
                f"The index was made of another model, {self.model} by {self.metric}: its rows are not the entities of "
                f"this {type(model.embedding).__name__}. Make it anew: dualkg index RUN"
            )


def build_index(
    model: Model, graph: Graph, *, kind: Kind = "ivf", recall: float = 0.95, form: Form = "float32", seed: int = 0
) -> ModelIndex:
    """Index the entities of a model. `recall` is asked of FAISS's kinds; `form` is how the exact one keeps its table.

    Questions that training triples answer, half of them to find the effort and half to measure, are drawn by `seed`.
    """
    if kind not in ALL_KINDS:
        raise RequestError(f"An index is {', '.join(ALL_KINDS)}; '{kind}' was asked for.")
    if kind in KINDS and form != "float32":
        raise RequestError(f"Only the exact index keeps its table as {form}; the index {kind} was asked for.")
    if kind in KINDS:
        faiss()
    metric = metric_of(model)
    model.check_shape(graph.shape)
    indexes: dict[Side, Index] = {}
    facts: dict[Side, Facts] = {}
    tables = tables_of(model)
    for side, table in tables.items():
        exact = ExactIndex.build(table, metric)
        with evaluating(model):
            queries, held_out = _vectors(model, graph, side, exact, seed=seed)
        started = time.perf_counter()
        index = _built(exact, queries, kind=kind, recall=recall, form=form)
        seconds = time.perf_counter() - started
        indexes[side], facts[side] = index, measure(index, exact, held_out, build_seconds=seconds)
    return ModelIndex(
        type(model.embedding).__name__, metric, indexes, facts, {side: fingerprint(one) for side, one in tables.items()}
    )


def measure(index: Index, exact: ExactIndex, queries: Tensor, *, build_seconds: float) -> Facts:
    """Recall against the exact index of the table in float32, and the speed of both."""
    return Facts(
        recall=recalls(index, queries, exact.search(queries, max(DEPTHS)).ids),
        queries_per_second=queries_per_second(index, queries),
        exact_queries_per_second=queries_per_second(exact, queries),
        build_seconds=build_seconds,
        num_questions=len(queries),
    )


def _built(exact: ExactIndex, queries: Tensor, *, kind: Kind, recall: float, form: Form) -> Index:
    table, metric = exact.table.whole(), exact.metric
    if kind == "exact":
        return ExactIndex.build(table, metric, form=form)
    best = exact.search(queries, max(DEPTHS)).ids
    return tuned(table, metric, kind=kind, queries=queries, best=best, recall=recall)


@torch.no_grad()
def _vectors(model: Model, graph: Graph, side: Side, exact: ExactIndex, *, seed: int) -> tuple[Tensor, Tensor]:
    """The vectors of questions that one table answers, in two halves; first it is seen that they suit the model."""
    sides: list[Side] = [side] if len(tables_of(model)) > 1 else ["tail", "head"]
    halves: list[list[Tensor]] = [[], []]
    for asked in sides:
        few = sample_questions(model, graph, asked, num=4, seed=seed)
        check_agreement(few, exact.search(few.vectors, 1).ids[:, 0])
        vectors = sample_questions(model, graph, asked, num=NUM_QUESTIONS // len(sides), seed=seed).vectors.cpu()
        half = -(-len(vectors) // 2)
        halves[0].append(vectors[:half])
        halves[1].append(vectors[half:] if len(vectors) > 1 else vectors)
    first, second = (torch.cat(parts) for parts in halves)
    return first, second
