"""Predictions of a trained model by name: tails, heads, relations, triples and similar entities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import SPLITS, Graph, relations_with_self_loops
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.inference.calibration import Calibration, PriorCorrection, calibration_for
from dualkg.inference.explanation import Explanation, explain
from dualkg.inference.extension import NamedTriple, add_entity
from dualkg.inference.index import best_of, query_vectors
from dualkg.inference.index_build import ModelIndex
from dualkg.inference.inductive import FrozenContext
from dualkg.inference.prediction_sets import PredictionSets
from dualkg.inference.scoring import (
    CachedLogProbabilities,
    Ids,
    query_block_size,
    score_blocks,
    score_queries,
    triple_log_probabilities,
)
from dualkg.models.base import Model, Side
from dualkg.training.recipe import Recipe
from dualkg.training.run import Run, RunFolder

Name = str | int
Given = (
    Name | list[str] | list[int] | list[Name] | tuple[Name, ...] | npt.NDArray[Any]
)  # of one query, or of a batch
Known = Literal["mark", "omit"]
QueryType = Literal["tails", "heads", "relations", "triple", "similar"]
QUERY_TYPES: tuple[QueryType, ...] = ("tails", "heads", "relations", "triple", "similar")
CANDIDATES_PER_FACT = 5  # triples that are scored from both ends for each fact that is returned


@dataclass(frozen=True)
class Prediction:
    """A candidate with its score, the split that contains it (None if it is new), and its
    calibrated probability.
    """

    name: str
    label: str
    id: int
    score: float
    split: str | None = None
    probability: float | None = (
        None  # None without a calibration, and for triples of train, which are no candidates
    )

    @property
    def known(self) -> bool:
        return self.split is not None

    @property
    def entity(self) -> str:
        return self.name

    @property
    def relation(self) -> str:
        return self.name

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "known": self.known}


@dataclass(frozen=True)
class Query:
    """The given ids in the order of the arguments of the `Predictor` method, and the predictions to
    return.
    """

    given: tuple[int, ...]
    k: int = 10
    known: Known = "mark"


@dataclass(frozen=True)
class Fact:
    """A triple by ids, with the split that contains it or the probability that a model gives it."""

    head: int
    relation: int
    tail: int
    split: str | None = None
    probability: float | None = None
    log_probability: float | None = None


@dataclass(eq=False, repr=False)
class Predictor:
    """Predicts the missing part of triples with a trained model, one query at a time or in batches.

    Entities and relations are given by name, label or id; lists are batches of queries. Scores
    compare within a query, not between queries. With an `index`, tails and heads are searched in it
    and rescored by the model. With `cache`, normalizers of queries are kept for later
    probabilities, which then agree up to rounding.
    """

    model: Model
    graph: Graph
    _: KW_ONLY
    recipe: Recipe | None = (
        None  # defines the training loss that inductive entities and explanations need
    )
    calibration: Calibration | None = None
    prediction_sets: PredictionSets | None = None
    index: ModelIndex | None = None
    cache: bool = False

    def __post_init__(self) -> None:
        self.model.check_shape(self.graph.shape)
        if self.index is not None:
            self.index.check_model(self.model)
        model = self.model.eval()
        self._log_probabilities = (
            CachedLogProbabilities(model)
            if self.cache
            else partial(triple_log_probabilities, model)
        )

    @classmethod
    def of(
        cls,
        run: Run,
        *,
        calibrated: bool = False,
        index: ModelIndex | None = None,
        cache: bool = False,
    ) -> Predictor:
        """The predictor of a run, with its calibration if the folder has one; `calibrated` fits a
        missing one.
        """
        predictor = cls(run.model, run.graph, recipe=run.recipe, index=index, cache=cache)
        if calibrated or (run.folder is not None and RunFolder(run.folder).calibration.exists()):
            saved = calibration_for(run)
            predictor.calibration = saved.calibration
            predictor.prediction_sets = saved.prediction_sets
        return predictor

    @overload
    def tails(
        self, head: Name, relation: Name, *, k: int = 10, known: Known = "mark"
    ) -> list[Prediction]: ...  # type: ignore[overload-overlap]
    @overload
    def tails(
        self, head: Given, relation: Given, *, k: int = 10, known: Known = "mark"
    ) -> list[list[Prediction]]: ...
    def tails(self, head: Given, relation: Given, *, k: int = 10, known: Known = "mark") -> Any:
        """Predict the tail of (head, relation, ?), best first.

        Lists of the same length are a batch of queries, with a list of predictions for each; a
        single name is repeated.
        """
        return self._one_or_batch("tails", {"heads": head, "relations": relation}, k, known)

    @overload
    def heads(
        self, relation: Name, tail: Name, *, k: int = 10, known: Known = "mark"
    ) -> list[Prediction]: ...  # type: ignore[overload-overlap]
    @overload
    def heads(
        self, relation: Given, tail: Given, *, k: int = 10, known: Known = "mark"
    ) -> list[list[Prediction]]: ...
    def heads(self, relation: Given, tail: Given, *, k: int = 10, known: Known = "mark") -> Any:
        """Predict the head of (?, relation, tail), best first; of lists as `tails`."""
        return self._one_or_batch("heads", {"relations": relation, "tails": tail}, k, known)

    @overload
    def relations(
        self, head: Name, tail: Name, *, k: int = 10, known: Known = "mark"
    ) -> list[Prediction]: ...  # type: ignore[overload-overlap]
    @overload
    def relations(
        self, head: Given, tail: Given, *, k: int = 10, known: Known = "mark"
    ) -> list[list[Prediction]]: ...
    def relations(self, head: Given, tail: Given, *, k: int = 10, known: Known = "mark") -> Any:
        """Predict the relation of (head, ?, tail) among the relations of the graph, best first; of
        lists as `tails`.
        """
        return self._one_or_batch("relations", {"heads": head, "tails": tail}, k, known)

    def triple(self, head: Name, relation: Name, tail: Name) -> Prediction:
        """Return one triple as a prediction of its tail."""
        entities = self.graph.entities
        relations = self.graph.relations
        return self.predict(
            "triple", [Query((entities.id(head), relations.id(relation), entities.id(tail)))]
        )[0][0]

    def score(self, head: Name, relation: Name, tail: Name) -> float:
        """Return the score of one triple."""
        return self.triple(head, relation, tail).score

    def similar(self, entity: Name, *, k: int = 10) -> list[Prediction]:
        """Return the entities with the most similar embeddings; the score is the cosine."""
        return self.predict("similar", [Query((self.graph.entities.id(entity),), k)])[0]

    @torch.no_grad()
    def predict(self, kind: QueryType, queries: Sequence[Query]) -> list[list[Prediction]]:
        """Predict for a batch of queries of one type, in their order; memory is bounded by a block
        of queries.
        """
        for query in queries:
            if not isinstance(query.k, int | np.integer):
                raise RequestError(f"k must be a whole number; got {query.k!r}.")
            if query.k < 1:
                raise RequestError(f"k must be at least 1; got {query.k}.")
            if query.known not in ("mark", "omit"):
                raise RequestError(f"known must be 'mark' or 'omit'; got '{query.known}'.")
        size = query_block_size(self.model)
        blocks = (queries[start : start + size] for start in range(0, len(queries), size))
        return [predictions for block in blocks for predictions in self._predict_block(kind, block)]

    def prediction_set(
        self, head: Name | None, relation: Name, tail: Name | None = None, *, coverage: float = 0.9
    ) -> list[Prediction]:
        """Return the prediction set of (head, relation, ?), or of (?, relation, tail) if `head` is
        None, best first.

        It contains the missing answer with probability `coverage` (docs/calibration.md), and no
        known answers.
        """
        if (head is None) == (tail is None):
            raise RequestError(
                "A prediction set needs a relation and exactly one of head and tail; set the "
                "other to None."
            )
        r = self.graph.relations.id(relation)
        given = self.graph.entities.id(tail if head is None else head)  # type: ignore[arg-type]
        side: Side = "head" if head is None else "tail"
        self.prediction_sets = self.prediction_sets or PredictionSets.fit(self.model, self.graph)
        found = self.prediction_sets.of(
            self.model, self.all_known, given, r, side=side, coverage=coverage
        )
        predictions = _predictions(
            self.graph.entities, found.entities.tolist(), found.scores.tolist(), {}
        )
        if side == "head":
            return self._with_probabilities("heads", [(r, given)], [predictions])[0]
        return self._with_probabilities("tails", [(given, r)], [predictions])[0]

    def add(self, name: str, *, triples: Sequence[NamedTriple]) -> Predictor:
        """Return a predictor with one more entity, embedded from triples with known entities, and
        without an index.
        """
        found = add_entity(self._context, name, triples)
        return replace(self, model=found.model, graph=found.graph, index=None)

    def explain(self, head: Name, relation: Name, tail: Name, *, k: int = 5) -> Explanation:
        """Return the training triples that most support the score of a triple, and similar entities
        with the same.
        """
        return explain(self._context, (head, relation, tail), k=k)

    # -- known triples --------------------------------------------------------

    @cached_property
    def all_known(self) -> KnownAnswers:
        return KnownAnswers.of(self.graph)

    @cached_property
    def prior_correction(self) -> PriorCorrection | None:
        """The probability of arbitrary triples; None without a calibration."""
        return (
            None if self.calibration is None else PriorCorrection.of(self.calibration, self.graph)
        )

    def known_answers(self, entity: int, relation: int) -> dict[int, str]:
        """The known answers of a query and the first split that contains each; `r + num_relations`
        asks for heads.
        """
        return self._known_answers(np.array([entity]), np.array([relation]))[0]

    def known_relations(self, head: int, tail: int) -> dict[int, str]:
        """The known relations between two entities and the first split that contains each."""
        found: dict[int, str] = {}
        for split, (pairs, relations) in self._relations_by_pair.items():
            first, last = np.searchsorted(
                pairs, head * self.graph.shape.num_entities + tail + np.arange(2)
            )
            found |= {
                relation: split
                for relation in relations[first:last].tolist()
                if relation not in found
            }
        return found

    @cached_property
    def relations_with_self_loops(self) -> frozenset[int]:
        return relations_with_self_loops(self.graph)

    def entity_to_omit(self, kind: QueryType, given: Sequence[int]) -> int | None:
        """The entity of a query, which is no new answer unless its relation often has
        self-loops.
        """
        if kind not in ("tails", "heads"):
            return None
        entity, relation = given if kind == "tails" else reversed(given)
        return None if relation in self.relations_with_self_loops else entity

    def warm_up(self) -> None:
        """Build the tables that the first queries would otherwise wait for."""
        _ = self._known_by_split, self.all_known, self._unit_vectors, self.relations_with_self_loops

    # -- batches --------------------------------------------------------------

    def _one_or_batch(self, kind: QueryType, given: dict[str, Given], k: int, known: Known) -> Any:
        """The predictions for one query, or a list of them for each query of a batch."""
        lists = {
            part: list(value)
            for part, value in given.items()
            if isinstance(value, Iterable) and not isinstance(value, (str, bytes))
        }
        if len({len(values) for values in lists.values()}) > 1:
            counts = " and ".join(f"{len(values):,} {part}" for part, values in lists.items())
            raise RequestError(f"The lists of a batch should have the same length; got {counts}.")
        size = len(next(iter(lists.values()), [None]))
        columns = [lists.get(part, [value] * size) for part, value in given.items()]
        vocabularies = [
            self.graph.relations if part == "relations" else self.graph.entities for part in given
        ]
        queries = []
        for number, names in enumerate(zip(*columns, strict=True)):
            try:
                ids = [
                    vocabulary.id(name)
                    for vocabulary, name in zip(vocabularies, names, strict=True)
                ]
            except RequestError as error:
                raise RequestError(
                    f"Query {number} of the batch: {error}" if lists else str(error)
                ) from None
            queries.append(Query(tuple(ids), k, known))
        found = self.predict(kind, queries)
        return found if lists else found[0]

    def _predict_block(self, kind: QueryType, queries: Sequence[Query]) -> list[list[Prediction]]:
        given = [query.given for query in queries]
        columns = np.array(given).T
        tensors = [torch.from_numpy(column).to(self.model.device) for column in columns.copy()]
        match kind:
            case "similar":
                itself: list[dict[int, str]] = [{entity: "itself"} for (entity,) in given]
                cosines = self._unit_vectors[tensors[0]] @ self._unit_vectors.T
                return _top(
                    cosines,
                    self.graph.entities,
                    itself,
                    [replace(query, known="omit") for query in queries],
                )
            case "triple":
                known = self._known_answers(columns[0], columns[1])
                rows = zip(
                    columns[2].tolist(), self.model.score(*tensors).tolist(), known, strict=True
                )
                found = [
                    _predictions(self.graph.entities, [id], [score], splits)
                    for id, score, splits in rows
                ]
            case "relations":
                scores = self.model.score_relations(*tensors)[:, : self.graph.shape.num_relations]
                found = _top(
                    scores,
                    self.graph.relations,
                    [self.known_relations(*one) for one in given],
                    queries,
                )
            case "tails":
                found = self._entities(columns[0], columns[1], queries)
            case "heads":
                found = self._entities(
                    columns[1], columns[0] + self.graph.shape.num_relations, queries
                )
        return self._with_probabilities(kind, given, found)

    def _entities(
        self, entities: Ids, relations: Ids, queries: Sequence[Query]
    ) -> list[list[Prediction]]:
        """The best entities for queries, each searched in the index if there is one."""
        splits = self._known_answers(entities, relations)
        if self.index is None:
            return _top(
                score_queries(self.model, entities, relations), self.graph.entities, splits, queries
            )
        asked = zip(entities.tolist(), relations.tolist(), splits, queries, strict=True)
        return [self._search_index(self.index, *one) for one in asked]

    def _search_index(
        self, indexes: ModelIndex, entity: int, relation: int, known: dict[int, str], query: Query
    ) -> list[Prediction]:
        """The best entities by the index, rescored by the model; all are scored if the index
        returns too few.
        """
        num_relations = self.graph.shape.num_relations
        device = self.model.device
        given = torch.tensor([entity], device=device)
        r = torch.tensor([relation % num_relations], device=device)
        side: Side = "tail" if relation < num_relations else "head"
        index = indexes.for_side(side)
        omitted = known if query.known == "omit" else {}
        wanted = min(query.k, index.shape[0] - len(omitted))
        vectors = query_vectors(self.model, given, r, side)
        found = index.search(vectors, query.k + len(omitted)).ids[0].tolist()
        candidates = torch.tensor(
            sorted(id for id in found if id >= 0 and id not in omitted), dtype=torch.int64
        )
        if not 0 < wanted <= len(candidates):
            scores = score_queries(self.model, np.array([entity]), np.array([relation]))
            return _top(scores, self.graph.entities, [known], [query])[0]
        best = best_of(
            self.model.predict_candidates(given, r, candidates[None].to(device), side).cpu(), wanted
        )
        return _predictions(
            self.graph.entities, candidates[best.ids[0]].tolist(), best.scores[0].tolist(), known
        )

    def _with_probabilities(
        self, kind: QueryType, given: Sequence[tuple[int, ...]], found: list[list[Prediction]]
    ) -> list[list[Prediction]]:
        """The predictions for queries with calibrated probabilities, if there is a calibration."""
        if (correction := self.prior_correction) is None:
            return found
        both = list(zip(given, found, strict=True))
        new = (
            _triple(kind, ids, one.id)
            for ids, several in both
            for one in several
            if one.split != "train"
        )
        triples = dict.fromkeys(new)
        if not triples:
            return found
        rows = np.array(list(triples))
        relations = torch.from_numpy(rows[:, 1])
        patterns = torch.from_numpy(correction.domain_range(rows))
        probabilities = correction.calibration.probability(
            self._log_probabilities(rows).cpu(), relations, patterns
        )
        of_triple = dict(zip(triples, probabilities.tolist(), strict=True))
        return [
            [replace(one, probability=of_triple.get(_triple(kind, ids, one.id))) for one in several]
            for ids, several in both
        ]

    def _known_answers(self, entities: Ids, relations: Ids) -> list[dict[int, str]]:
        found: list[dict[int, str]] = [{} for _ in entities]
        for split, known in self._known_by_split.items():
            for row, answer in zip(
                *(ids.tolist() for ids in known(entities, relations)), strict=True
            ):
                found[row].setdefault(answer, split)
        return found

    @cached_property
    def _known_by_split(self) -> dict[str, KnownAnswers]:
        return {
            split: KnownAnswers.of(self.graph, [split])
            for split in SPLITS
            if len(self.graph.split(split))
        }

    @cached_property
    def _relations_by_pair(self) -> dict[str, tuple[Ids, Ids]]:
        """For each split, a sorted number for the head and tail of every triple, and the relations
        in that order.
        """
        found: dict[str, tuple[Ids, Ids]] = {}
        for split in SPLITS:
            heads, relations, tails = self.graph.split(split).astype(np.int64).T
            pairs = heads * self.graph.shape.num_entities + tails
            order = np.argsort(pairs, kind="stable")
            found[split] = pairs[order], relations[order]
        return found

    @cached_property
    def _context(self) -> FrozenContext:
        return FrozenContext.of(self.model, self.graph, recipe=self.recipe)

    @cached_property
    def _unit_vectors(self) -> Tensor:
        """The vectors of all entities at length 1, `(num_entities, width)`."""
        return torch.nn.functional.normalize(self.model.entity_vectors().detach(), dim=-1)


def _triple(kind: QueryType, given: tuple[int, ...], id: int) -> tuple[int, ...]:
    """The triple that a prediction completes."""
    place = {"heads": 0, "relations": 1}.get(kind, 2)
    return (*given[:place], id, *given[place:2])


def _predictions(
    names: Vocabulary, ids: Iterable[int], scores: Iterable[float], known: Mapping[int, str]
) -> list[Prediction]:
    found = zip(ids, scores, strict=True)
    return [Prediction(names[id], names.label(id), id, score, known.get(id)) for id, score in found]


def _top(
    scores: Tensor, names: Vocabulary, splits: Sequence[dict[int, str]], queries: Sequence[Query]
) -> list[list[Prediction]]:
    """The best candidates of each row of scores `(num_queries, num_names)`; `splits` are the known
    ones of each row.
    """
    omitted = [
        known if query.known == "omit" else {} for known, query in zip(splits, queries, strict=True)
    ]
    places = [(row, id) for row, known in enumerate(omitted) for id in known]
    if places:
        scores = scores.clone()  # a model may return a tensor that it keeps
        scores[tuple(torch.tensor(places, device=scores.device).unbind(1))] = -torch.inf
    num_names = scores.shape[1]
    sizes = [
        min(query.k, num_names - len(left_out))
        for query, left_out in zip(queries, omitted, strict=True)
    ]
    best = scores.topk(min(max(query.k for query in queries), num_names))
    rows = zip(best.values.tolist(), best.indices.tolist(), splits, sizes, strict=True)
    return [
        _predictions(names, ids[:size], values[:size], known) for values, ids, known, size in rows
    ]


# -- facts about one entity --------------------------------------------------


def known_facts(predictor: Predictor, entity: int, *, limit: int) -> tuple[list[Fact], int]:
    """The first `limit` known triples of an entity, and the number of all: by split, as head before
    as tail.
    """
    facts: list[Fact] = []
    for split in SPLITS:
        triples = predictor.graph.split(split)
        is_head = triples[:, 0] == entity
        found = np.concatenate([triples[is_head], triples[~is_head & (triples[:, 2] == entity)]])
        facts += [Fact(head, relation, tail, split) for head, relation, tail in found.tolist()]
    return facts[:limit], len(facts)


@torch.no_grad()
def predicted_facts(predictor: Predictor, entity: int, *, k: int) -> list[Fact]:
    """The `k` best new triples with an entity as head or tail: by probability, or without one by
    log-probability.

    All relations are queried in both directions. The `CANDIDATES_PER_FACT` · k most likely answers
    are then scored from both ends. Triples of the entity with itself are excluded.
    """
    triples = _likely_new_triples(predictor, entity, number=CANDIDATES_PER_FACT * k)
    if not len(triples):
        return []
    log_probability = rank_score = triple_log_probabilities(predictor.model, triples).cpu()
    probabilities: list[float | None] = [None] * len(triples)
    if (correction := predictor.prior_correction) is not None:
        relations, patterns = (
            torch.from_numpy(ids) for ids in (triples[:, 1], correction.domain_range(triples))
        )
        rank_score = correction.log_odds(log_probability, relations, patterns)
        probabilities = rank_score.sigmoid().tolist()
    best = np.lexsort((-log_probability.numpy(), -rank_score.numpy()))[:k]
    return [
        Fact(head, relation, tail, None, probabilities[row], float(log_probability[row]))
        for row, (head, relation, tail) in zip(best.tolist(), triples[best].tolist(), strict=True)
    ]


def _likely_new_triples(predictor: Predictor, entity: int, *, number: int) -> Ids:
    """New triples `(n, 3)` of an entity: the most likely answers to all queries that it can be
    given in.
    """
    model = predictor.model
    num_relations = predictor.graph.shape.num_relations
    found: list[tuple[float, int, int, int]] = []
    for backward in (False, True):
        relations = np.arange(num_relations) + num_relations * backward
        for block, scores in score_blocks(model, np.full(num_relations, entity), relations):
            likely = scores.log_softmax(-1)
            asked = relations[block]
            if predictor.prior_correction is not None:
                side: Side = "tail" if backward else "head"
                priors = predictor.prior_correction.query_priors(
                    entity, torch.from_numpy(asked % num_relations), side
                )
                likely += priors.log().to(likely)[:, None]
            rows, known = predictor.all_known(np.full(len(asked), entity), asked)
            likely[
                torch.from_numpy(rows).to(likely.device), torch.from_numpy(known).to(likely.device)
            ] = -torch.inf
            likely[:, entity] = -torch.inf
            best = likely.flatten().topk(min(number, likely.numel()))
            for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                row, other = divmod(place, likely.shape[1])
                head, tail = (other, entity) if backward else (entity, other)
                found.append((value, head, int(asked[row]) % num_relations, tail))
    found.sort(key=lambda one: -one[0])
    return np.array(
        [triple for value, *triple in found[:number] if value > -np.inf], dtype=np.int64
    ).reshape(-1, 3)
