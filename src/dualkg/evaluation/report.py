"""The evaluation report, relation prediction, and saved ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph, GraphShape, Split, Triples
from dualkg.data.inspection import CARDINALITIES, cardinalities
from dualkg.data.parquet_files import read_parquet
from dualkg.errors import DamagedFile, InvalidValue, RequestError
from dualkg.evaluation.candidates import CandidateLists, GivenCandidates
from dualkg.evaluation.metrics import HITS, Metrics, Numbers, check_hits
from dualkg.evaluation.ranking import (
    Progress,
    Ranks,
    count_candidates,
    rank,
    rank_relations,
    sample_triples,
)
from dualkg.files import atomic_write
from dualkg.models.base import SIDES, Model

VIEWS = ("direction", "relation", "cardinality")
PARTS = ("head", "relation", "tail")
PROTOCOL = "filtered by train, valid and test; both directions; ties at their mean"
ALL_ENTITIES = "all entities"
DOMAIN_OR_RANGE = "domain or range of the relation in train"
GIVEN_LISTS = "given lists"


def evaluate_relations(
    model: Model, graph: Graph, *, split: Split = "test", hits: Iterable[int] = HITS
) -> Metrics:
    """Rank the relation of every triple of a split, filtered, among all relations.

    Reciprocal relations are no candidates.

    Args:
        model: A model.
        graph: The graph, whose three splits are the filter.
        split: "train", "valid" or "test".
        hits: The k of Hits@k.

    Returns:
        The metrics of queries (head, ?, tail).

    Examples:
        >>> 0 < kg.evaluate_relations(run.model, graph).mrr <= 1
        True
    """
    ranks, num_candidates = rank_relations(model, graph, graph.split(split))
    return Metrics.of(ranks, num_candidates, hits=hits)


@dataclass(frozen=True)
class Report:
    """Filtered link prediction on one split in both directions.

    Ranks are realistic ranks; `optimistic` and `pessimistic` are their bounds. If only a sample of
    the split was ranked, `sampled_from` is the number of triples of the split.

    Attributes:
        graph: Name of the graph.
        split: Name of the split.
        metrics: Metrics of the realistic ranks.
        optimistic: Metrics of the optimistic ranks.
        pessimistic: Metrics of the pessimistic ranks.
        without_unseen: Metrics of triples whose entities and relation are in train.
        num_unseen_triples: Number of the other triples.
        by_direction: Metrics of "head" and of "tail" queries.
        by_relation: Metrics by name of the relation.
        by_cardinality: Metrics of 1-1, 1-N, N-1 and N-N relations.
        ranks: Ranks of all queries.
        candidates: What the candidates were.
        sampled_from: Number of triples of the split, if a sample was ranked.

    Examples:
        >>> run.report.mrr == run.report.metrics.mrr
        True
        >>> sorted(run.report.by_direction)
        ['head', 'tail']
    """

    graph: str
    split: str
    metrics: Metrics
    optimistic: Metrics = field(repr=False)
    pessimistic: Metrics = field(repr=False)
    without_unseen: Metrics = field(repr=False)
    num_unseen_triples: int = field(repr=False)
    by_direction: dict[str, Metrics] = field(repr=False)
    by_relation: dict[str, Metrics] = field(repr=False)
    by_cardinality: dict[str, Metrics] = field(repr=False)
    ranks: Ranks = field(repr=False, compare=False)
    candidates: str = ALL_ENTITIES
    sampled_from: int | None = None

    @property
    def sample(self) -> str:
        """What was ranked of the split, in words; empty if all of it."""
        if self.sampled_from is None:
            return ""
        return f"a sample of {len(self.ranks.triples):,} of {self.sampled_from:,} triples"

    @property
    def mrr(self) -> float:
        """The MRR by realistic ranks."""
        return self.metrics.mrr

    def hits(self, k: int) -> float:
        """Hits@k for any k: the fraction of realistic ranks that are at most k."""
        return Metrics.of(self.ranks.mean, hits=(k,)).hits(k)

    def by(self, view: str) -> dict[str, Metrics]:
        """The metrics by direction, relation or cardinality."""
        return dict(getattr(self, f"by_{view}"))

    def as_dict(self) -> dict[str, Any]:
        """Everything but the ranks, for JSON."""
        values: dict[str, Any] = {
            "graph": self.graph,
            "split": self.split,
            "protocol": PROTOCOL,
            "candidates": self.candidates,
            "metrics": self.metrics.as_dict(),
            "optimistic": self.optimistic.as_dict(),
            "pessimistic": self.pessimistic.as_dict(),
            "without_unseen": self.without_unseen.as_dict(),
            "num_unseen_triples": self.num_unseen_triples,
        }
        if self.sampled_from is not None:
            values["sample"] = {"triples": len(self.ranks.triples), "of": self.sampled_from}
        for view in VIEWS:
            groups = self.by(view)
            values[f"by_{view}"] = {key: metrics.as_dict() for key, metrics in groups.items()}
        return values

    def as_json(self) -> str:
        """`as_dict` as JSON text."""
        return json.dumps(self.as_dict(), indent=1, ensure_ascii=False)


def evaluate(
    model: Model,
    graph: Graph,
    *,
    split: Split = "test",
    known: KnownAnswers | None = None,
    hits: Iterable[int] = HITS,
    type_constrained: bool = False,
    candidates: GivenCandidates | None = None,
    queries: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Rank a split and report on it; the answer is always a candidate.

    Args:
        model: A model.
        graph: The graph, whose three splits are the filter.
        split: "train", "valid" or "test".
        known: The filter, if it is there already.
        hits: Each k of Hits@k besides 1, 3 and 10.
        type_constrained: Whether candidates are only the entities that train has on the same side
            of the relation.
        candidates: Candidates of each triple: lists, the file of them, or a mapping of their
            columns; see `read_candidates`.
        queries: Number of queries to rank, a sample that depends on `seed` alone.
        seed: Seed of the sample.
        progress: Called with progress.

    Returns:
        The report: metrics, by direction, relation and cardinality.

    Examples:
        >>> report = kg.evaluate(run.model, graph, split="valid", hits=(1, 50))
        >>> report.hits(50) >= report.hits(1)
        True
    """
    if not (hasattr(model, "check_shape") and isinstance(graph, Graph)):
        given = f"{type(model).__name__} and {type(graph).__name__}"
        raise RequestError(
            "evaluate takes a model and its graph, as in kg.evaluate(run.model, run.graph); "
            f"{given} were given."
        )
    hits = check_hits(hits)
    if queries is not None and queries < 1:
        raise InvalidValue("queries", expected="at least 1", found=queries)
    triples = sample_triples(graph.split(split), queries, seed=seed)
    known = known or KnownAnswers.of(graph, queries=triples)
    lists = None
    restriction = DOMAIN_OR_RANGE if type_constrained else ALL_ENTITIES
    if candidates is not None:
        if queries is not None:
            raise RequestError(
                "Candidates are lists for all triples of the split. Leave out `queries`."
            )
        lists = CandidateLists.of(candidates, graph, split)
        restriction = GIVEN_LISTS
    ranks = rank(
        model,
        graph,
        split=split,
        triples=triples,
        known=known,
        type_constrained=type_constrained,
        candidates=lists,
        progress=progress,
    )
    return build_report(ranks, graph, split=split, known=known, hits=hits, candidates=restriction)


def build_report(
    ranks: Ranks,
    graph: Graph,
    *,
    split: Split,
    known: KnownAnswers | None = None,
    hits: Iterable[int] = HITS,
    candidates: str = ALL_ENTITIES,
) -> Report:
    """Metrics of all ranks, of their bounds, and by direction, relation and cardinality."""
    num_candidates = ranks.num_candidates
    if num_candidates is None:
        known = known or KnownAnswers.of(graph, queries=ranks.triples)
        num_candidates = count_candidates(ranks.triples, known)
    realistic = ranks.mean
    relations = ranks.triples[:, 1]
    whole = np.s_[:]

    def metrics_of(part: Any, values: Numbers = realistic) -> Metrics:
        return Metrics.of(values[part], num_candidates[part], hits=hits)

    by_relation = {}
    for relation in np.unique(relations).tolist():
        by_relation[graph.relations[relation]] = metrics_of(np.s_[:, relations == relation])

    kinds = np.array(cardinalities(graph.train, graph.shape), dtype=object)[relations]
    by_cardinality = {}
    for kind in CARDINALITIES:
        if (kinds == kind).any():
            by_cardinality[kind] = metrics_of(np.s_[:, kinds == kind])

    num_triples = len(graph.split(split))
    entities = ranks.triples[:, [0, 2]]
    both_seen = np.isin(entities, graph.train[:, [0, 2]]).all(axis=1)
    return Report(
        graph=graph.name,
        split=split,
        metrics=metrics_of(whole),
        optimistic=metrics_of(whole, ranks.optimistic),
        pessimistic=metrics_of(whole, ranks.pessimistic),
        without_unseen=metrics_of(np.s_[:, both_seen]),
        num_unseen_triples=int((~both_seen).sum()),
        by_direction={side: metrics_of(row) for row, side in enumerate(SIDES)},
        by_relation=by_relation,
        by_cardinality=by_cardinality,
        ranks=ranks,
        candidates=candidates,
        sampled_from=num_triples if len(ranks.triples) < num_triples else None,
    )


def save_ranks(ranks: Ranks, path: Path) -> None:
    """Write one row per query: the triple, the direction, and both ranks.

    Where candidates were restricted, their number is written too.
    """
    columns: dict[str, Any] = {}
    for position, part in enumerate(PARTS):
        columns[part] = np.tile(ranks.triples[:, position], 2)
    directions = pa.array(np.repeat([0, 1], len(ranks.triples)), pa.int8())
    columns["direction"] = pa.DictionaryArray.from_arrays(directions, pa.array(SIDES))
    columns["optimistic"] = ranks.optimistic.reshape(-1).astype(np.int32)
    columns["pessimistic"] = ranks.pessimistic.reshape(-1).astype(np.int32)
    if ranks.num_candidates is not None:
        columns["num_candidates"] = ranks.num_candidates.reshape(-1).astype(np.int32)
    with atomic_write(path) as file:
        pq.write_table(pa.table(columns), file, compression="zstd")


def load_ranks(path: Path, shape: GraphShape | None = None) -> Ranks:
    """Read what `save_ranks` wrote; a damaged file is refused.

    With the `shape` of its graph, ids beyond it are also refused.
    """
    try:
        ranks = _ranks_of_table(read_parquet(path))
        if shape is not None:
            _check_ids(ranks.triples, shape)
        return ranks
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        reason = f"it has no column {error}" if isinstance(error, KeyError) else str(error)
        advice = "Evaluate the run again, or remove the file."
        raise DamagedFile(path, reason, advice=advice) from None


def _check_ids(triples: Triples, shape: GraphShape) -> None:
    """Refuse ids that no entity or relation of a graph has."""
    limits = (shape.num_entities, shape.num_relations, shape.num_entities)
    if (triples < 0).any() or (triples >= limits).any():
        raise ValueError("it has ids that are not in the graph")


def _ranks_of_table(table: pa.Table) -> Ranks:
    for name in table.column_names:
        if name != "direction" and not pa.types.is_integer(table[name].type):
            raise ValueError(f"the column {name} has {table[name].type} in place of integers")
    num_triples = table.num_rows // 2
    parts = [table[part].to_numpy()[:num_triples] for part in PARTS]
    counts = {}
    for name in ("optimistic", "pessimistic", "num_candidates"):
        if name != "num_candidates" or name in table.column_names:
            counts[name] = table[name].to_numpy().astype(np.int64).reshape(2, -1)
    ranks = Ranks(np.stack(parts, axis=1).astype(np.int32), **counts)

    ordered = (ranks.optimistic >= 1) & (ranks.optimistic <= ranks.pessimistic)
    if table.num_rows % 2 or not ordered.all():
        raise ValueError("two queries of each triple, with ranks from 1, were expected")
    return ranks
