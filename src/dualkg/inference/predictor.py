"""Predictions of a trained model by name: tails, heads, relations, triples and similar entities."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import SPLITS, Graph, relations_with_self_loops
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import InvalidValue, RequestError
from dualkg.inference.prediction_sets import PredictionSet, PredictionSets
from dualkg.inference.probability import (
    CachedLogProbabilities,
    Calibration,
    calibration_for,
    has_calibration,
    triple_log_probabilities,
)
from dualkg.inference.scoring import Ids, query_block_size, score_queries
from dualkg.models.base import Model
from dualkg.tables.base import Side

if TYPE_CHECKING:
    from dualkg.inference.explanation import Explanation
    from dualkg.inference.extension import Context, NamedTriple
    from dualkg.inference.index import ModelIndex
    from dualkg.inference.inductive import FrozenContext
    from dualkg.training.recipe import Recipe
    from dualkg.training.run import Run

Name = str | int
# The name of one query, or the names of a batch of queries.
Given = Name | list[str] | list[int] | list[Name] | tuple[Name, ...] | npt.NDArray[Any]
Known = Literal["mark", "omit"]
QueryType = Literal["tails", "heads", "relations", "triple", "similar"]
QUERY_TYPES: tuple[QueryType, ...] = ("tails", "heads", "relations", "triple", "similar")
# Candidates of a query that are no predictions: up to so many are taken among its best and left
# out, which saves a copy of all scores. More would make the search for the best ones slower.
MAX_SKIPPED = 32
BLOCK_COLUMNS = 64  # of a table of scores
MIN_BLOCKS_PER_COLUMN = 4  # for each of the best columns, so that few blocks have them


@dataclass(frozen=True)
class Prediction:
    """A candidate with its score.

    Attributes:
        name: Name of the candidate.
        label: Its label, or its name.
        id: Its id.
        score: Comparable within one query.
        split: The first split that contains the triple; None if it is new.
        probability: Of the triple, as in a completion; None without a calibration, and for triples
            of train.
        answer_probability: Of the triple if its queries are known to lack an answer; None likewise.

    Examples:
        >>> best = run.predictor().tails("France", "borders", k=1)[0]
        >>> best.entity in graph.entities.names.to_pylist(), best.known == (best.split is not None)
        (True, True)
    """

    name: str
    label: str
    id: int
    score: float
    split: str | None = None
    probability: float | None = None
    answer_probability: float | None = None

    @property
    def known(self) -> bool:
        """Whether the triple is in a split of the graph."""
        return self.split is not None

    @property
    def entity(self) -> str:
        """The name of the predicted entity."""
        return self.name

    @property
    def relation(self) -> str:
        """The name of the predicted relation."""
        return self.name

    def as_dict(self) -> dict[str, Any]:
        """All fields and `known`, for JSON."""
        return {**asdict(self), "known": self.known}


@dataclass(frozen=True)
class Query:
    """One query by ids, and the number of predictions to return.

    The ids are in the order of the arguments of the method of `Predictor`.
    """

    given: tuple[int, ...]
    k: int = 10
    known: Known = "mark"

    def check(self) -> None:
        """Refuse a `k` or a `known` that cannot be used."""
        if not isinstance(self.k, int | np.integer):
            raise InvalidValue("k", expected="a whole number", found=self.k)
        if self.k < 1:
            raise InvalidValue("k", expected="at least 1", found=self.k)
        if self.known not in ("mark", "omit"):
            raise InvalidValue("known", expected="'mark' or 'omit'", found=self.known)

    def omitted(self, known_answers: Iterable[int]) -> set[int]:
        """The known answers, if they are no predictions."""
        return set(known_answers) if self.known == "omit" else set()

    def completed(self, kind: QueryType, answer: int) -> tuple[int, ...]:
        """The triple that an answer completes."""
        position = {"heads": 0, "relations": 1}.get(kind, 2)
        return (*self.given[:position], answer, *self.given[position:2])


@dataclass(eq=False, repr=False)
class Predictor:
    """Predicts the missing part of triples with a trained model, for one query or for a batch.

    Entities and relations are given by name, label or id; lists are batches of queries. Scores
    compare within a query, not between queries.

    Predictions have the highest scores among all candidates. With a calibration they are sorted by
    their probability, triples of train first, and else by their score.

    The entity of a query is no answer to it, unless the graph contains that triple or train often
    has self-loops of the relation; with `loops`, it is a candidate for every relation. `recipe`
    defines the training loss that inductive entities and explanations need. With an `index`, tails
    and heads are searched in it and rescored by the model. With `cache`, normalizers of queries are
    kept for later probabilities, which then agree up to rounding.

    Args:
        model: A trained model.
        graph: Its graph.
        recipe: Defines the training loss that inductive entities and explanations need.
        calibration: Adds probabilities and prediction sets.
        index: Vectors of entities, which are searched in place of scoring all.
        loops: Whether the entity of a query is a candidate for every relation.
        cache: Keep normalizers of queries, for later probabilities.
        identity: Identity of a saved run; an index of another run is refused.

    Examples:
        >>> predictor = kg.Predictor(run.model, graph)
        >>> len(predictor.tails("France", "borders", k=3))
        3
        >>> len(predictor.heads("currency", "Euro", k=2))
        2
        >>> batch = predictor.tails(["France", "Peru"], ["borders", "capital"], k=3)
        >>> len(batch)
        2
    """

    model: Model
    graph: Graph
    _: KW_ONLY
    recipe: Recipe | None = None
    calibration: Calibration | None = None
    index: ModelIndex | None = None
    loops: bool = False
    cache: bool = False
    identity: str | None = None

    def __post_init__(self) -> None:
        self.model.check_shape(self.graph.shape)
        if self.index is not None:
            self.index.check_model(self.model, identity=self.identity)
        if self.calibration is not None:
            self.calibration = self.calibration.on(self.graph)
        self.model.eval()

    @classmethod
    def of(
        cls,
        run: Run,
        *,
        calibrated: bool = False,
        index: ModelIndex | None = None,
        loops: bool = False,
        cache: bool = False,
    ) -> Predictor:
        """The predictor of a run, with its calibration if the folder has one.

        `calibrated` fits a missing calibration.
        """
        return cls(
            run.model,
            run.graph,
            recipe=run.recipe,
            calibration=calibration_for(run) if calibrated or has_calibration(run) else None,
            index=index,
            loops=loops,
            cache=cache,
            identity=run.identity,
        )

    # -- queries by name ------------------------------------------------------

    @overload
    def tails(  # type: ignore[overload-overlap]
        self, head: Name, relation: Name, *, k: int = 10, known: Known = "mark"
    ) -> list[Prediction]: ...
    @overload
    def tails(
        self, head: Given, relation: Given, *, k: int = 10, known: Known = "mark"
    ) -> list[list[Prediction]]: ...
    def tails(self, head: Given, relation: Given, *, k: int = 10, known: Known = "mark") -> Any:
        """Predict the tail of (head, relation, ?), best first.

        Lists of the same length are a batch of queries, with a list of predictions for each; a
        single name is repeated.
        """
        given = {"heads": head, "relations": relation}
        return self._predict_names("tails", given, k=k, known=known)

    @overload
    def heads(  # type: ignore[overload-overlap]
        self, relation: Name, tail: Name, *, k: int = 10, known: Known = "mark"
    ) -> list[Prediction]: ...
    @overload
    def heads(
        self, relation: Given, tail: Given, *, k: int = 10, known: Known = "mark"
    ) -> list[list[Prediction]]: ...
    def heads(self, relation: Given, tail: Given, *, k: int = 10, known: Known = "mark") -> Any:
        """Predict the head of (?, relation, tail), best first; lists as in `tails`."""
        given = {"relations": relation, "tails": tail}
        return self._predict_names("heads", given, k=k, known=known)

    @overload
    def relations(  # type: ignore[overload-overlap]
        self, head: Name, tail: Name, *, k: int = 10, known: Known = "mark"
    ) -> list[Prediction]: ...
    @overload
    def relations(
        self, head: Given, tail: Given, *, k: int = 10, known: Known = "mark"
    ) -> list[list[Prediction]]: ...
    def relations(self, head: Given, tail: Given, *, k: int = 10, known: Known = "mark") -> Any:
        """Predict the relation of (head, ?, tail), best first; lists as in `tails`.

        The candidates are the relations of the graph, without inverse relations.
        """
        given = {"heads": head, "tails": tail}
        return self._predict_names("relations", given, k=k, known=known)

    def triple(self, head: Name, relation: Name, tail: Name) -> Prediction:
        """Return one triple as a prediction of its tail."""
        entities = self.graph.entities
        relations = self.graph.relations
        ids = (entities.id(head), relations.id(relation), entities.id(tail))
        return self.predict("triple", [Query(ids)])[0][0]

    def score(self, head: Name, relation: Name, tail: Name) -> float:
        """Return the score of one triple."""
        return self.triple(head, relation, tail).score

    def similar(self, entity: Name, *, k: int = 10) -> list[Prediction]:
        """Return the entities with the most similar embeddings; the score is the cosine."""
        query = Query((self.graph.entities.id(entity),), k)
        return self.predict("similar", [query])[0]

    def prediction_set(
        self, head: Name | None, relation: Name, tail: Name | None = None, *, coverage: float = 0.9
    ) -> list[Prediction]:
        """Return the prediction set of (head, relation, ?), or of (?, relation, tail), best first.

        One of `head` and `tail` is None. The set contains the missing answer with probability
        `coverage` (docs/calibration.md). It has no known answers, and the entity of the query only
        where `tails` and `heads` have it.
        """
        if (head is None) == (tail is None):
            raise RequestError(
                "A prediction set needs a relation and exactly one of head and tail. Set the other "
                "to None."
            )
        relation_id = self.graph.relations.id(relation)
        entity = self.graph.entities.id(tail if head is None else head)  # type: ignore[arg-type]
        side: Side = "head" if head is None else "tail"
        members = self.members(entity, relation_id, side=side, coverage=coverage)

        ids = members.entities.tolist()
        predictions = _predictions(self.graph.entities, [ids], [members.scores.tolist()], [{}])
        if side == "head":
            return self._with_probabilities("heads", [Query((relation_id, entity))], predictions)[0]
        return self._with_probabilities("tails", [Query((entity, relation_id))], predictions)[0]

    def members(
        self, entity: int, relation: int, *, side: Side = "tail", coverage: float = 0.9
    ) -> PredictionSet:
        """The entities of a prediction set by id, with their scores but without probabilities.

        `side` is the missing part of the query. Probabilities of a large set take long.
        """
        members = self._prediction_sets.of(
            self.model, self.all_known, entity, relation, side=side, coverage=coverage
        )
        if not self._omits_entity(relation):
            return members
        kept = members.entities != entity
        return PredictionSet(members.entities[kept], members.scores[kept])

    def add(self, name: str, *, triples: Sequence[NamedTriple]) -> Predictor:
        """Return a predictor with one more entity, which is known by triples with known entities.

        It is embedded; a path network reads the triples as edges instead. The new predictor has no
        index. It has the calibration of this one, which was fitted without the entity.
        """
        from dualkg.inference.extension import PathContext, add_entity

        network = self.model.path_network
        context: Context = PathContext(network, self.graph) if network else self._context
        extension = add_entity(context, name, triples)
        return replace(self, model=extension.model, graph=extension.graph, index=None)

    def explain(
        self, head: Name, relation: Name, tail: Name, *, k: int = 5, network: Run | None = None
    ) -> Explanation:
        """Return the training triples that most support the score of a triple.

        The explanation also has similar entities that have the same triple. With the run of a
        PathNetwork that was trained on the same graph as `network`, it has the paths by which this
        finds the triple. The prediction of a PathNetwork is explained by its own paths.
        """
        from dualkg.inference import explanation as explanations

        triple = (head, relation, tail)
        path_model = self.model.path_network
        if network is not None:
            path_model = explanations.check_network(network.model, network.graph, graph=self.graph)
        if path_model is None or explanations.has_supporting_triples(self.model):
            explanation = explanations.explain(self._context, triple, k=k, network=path_model)
        else:
            explanation = explanations.explain_by_paths(
                self.model, self.graph, triple, k=k, network=path_model
            )
        if self.calibration is None:
            return explanation
        prediction = self.triple(head, relation, tail)
        return replace(
            explanation,
            probability=prediction.probability,
            answer_probability=prediction.answer_probability,
        )

    # -- known triples --------------------------------------------------------

    @cached_property
    def all_known(self) -> KnownAnswers:
        """The known answers of all queries, in any split."""
        return KnownAnswers.of(self.graph)

    @property
    def prediction_sets(self) -> PredictionSets | None:
        """The prediction sets of the calibration; None without a calibration."""
        return None if self.calibration is None else self.calibration.prediction_sets

    @cached_property
    def _prediction_sets(self) -> PredictionSets:
        """Those of the calibration, or fitted now."""
        return self.prediction_sets or PredictionSets.fit(self.model, self.graph)

    @cached_property
    def _log_probabilities(self) -> Callable[[Ids], Tensor]:
        symmetric = self.graph.symmetric_relations
        if self.cache:
            return CachedLogProbabilities(self.model, symmetric=symmetric)
        return partial(triple_log_probabilities, self.model, symmetric=symmetric)

    def known_answers(self, entity: int, relation: int) -> dict[int, str]:
        """The known answers of a query, and the first split that contains each.

        The relation `r + num_relations` asks for heads.
        """
        return self._known_answers(np.array([entity]), np.array([relation]))[0]

    def known_relations(self, head: int, tail: int) -> dict[int, str]:
        """The known relations between two entities, and the first split that contains each."""
        pair = head * self.graph.shape.num_entities + tail
        splits: dict[int, str] = {}
        for split, (pairs, relations) in self._relations_by_pair.items():
            first, last = np.searchsorted(pairs, [pair, pair + 1])
            for relation in relations[first:last].tolist():
                splits.setdefault(relation, split)
        return splits

    @cached_property
    def relations_with_self_loops(self) -> frozenset[int]:
        """The ids of the relations whose new triples may be self-loops."""
        return relations_with_self_loops(self.graph)

    def warm_up(self) -> None:
        """Build the tables that the first queries would otherwise wait for."""
        _ = self._known_by_split
        _ = self.all_known
        if self.model.has_entity_vectors:
            _ = self._unit_vectors
        _ = self.relations_with_self_loops
        if self.calibration is not None:
            self.calibration.warm_up()
        _ = self._log_probabilities

    # -- batches --------------------------------------------------------------

    @torch.no_grad()
    def predict(self, kind: QueryType, queries: Sequence[Query]) -> list[list[Prediction]]:
        """Predict for a batch of queries of one type, in their order.

        Memory is bounded by the scores of a block of queries.
        """
        for query in queries:
            query.check()
        size = query_block_size(self.model)
        predictions: list[list[Prediction]] = []
        for start in range(0, len(queries), size):
            predictions += self._predict_block(kind, queries[start : start + size])
        return predictions

    def _predict_names(
        self, kind: QueryType, given: dict[str, Given], *, k: int, known: Known
    ) -> Any:
        """The predictions for one query, or a list of them for each query of a batch."""
        lists: dict[str, list[Any]] = {}
        for part, names in given.items():
            if isinstance(names, Iterable) and not isinstance(names, (str, bytes)):
                lists[part] = list(names)
        lengths = {part: len(names) for part, names in lists.items()}
        if len(set(lengths.values())) > 1:
            counts = " and ".join(f"{length:,} {part}" for part, length in lengths.items())
            raise RequestError(f"The lists of a batch should have the same length; got {counts}.")

        size = next(iter(lengths.values()), 1)
        columns = [lists.get(part, [names] * size) for part, names in given.items()]
        queries = []
        for number, names in enumerate(zip(*columns, strict=True)):
            try:
                ids = self._ids(dict(zip(given, names, strict=True)))
            except RequestError as error:
                if not lists:
                    raise
                raise RequestError(f"Query {number} of the batch: {error}") from None
            queries.append(Query(ids, k, known))

        predictions = self.predict(kind, queries)
        return predictions if lists else predictions[0]

    def _ids(self, names: Mapping[str, Name]) -> tuple[int, ...]:
        """The ids of the names of one query, given by part: heads, relations or tails."""
        ids = []
        for part, name in names.items():
            vocabulary = self.graph.relations if part == "relations" else self.graph.entities
            ids.append(vocabulary.id(name))
        return tuple(ids)

    def _predict_block(self, kind: QueryType, queries: Sequence[Query]) -> list[list[Prediction]]:
        columns = np.array([query.given for query in queries]).T
        match kind:
            case "similar":
                return self._similar(columns[0], queries)
            case "triple":
                heads, relations, tails = columns
                predictions = self._triples(heads, relations, tails)
            case "relations":
                heads, tails = columns
                predictions = self._relations(heads, tails, queries)
            case "tails":
                heads, relations = columns
                predictions = self._entities(heads, relations, queries)
            case "heads":
                relations, tails = columns
                inverse = relations + self.graph.shape.num_relations
                predictions = self._entities(tails, inverse, queries)
        return self._with_probabilities(kind, queries, predictions)

    def _tensor(self, ids: Ids) -> Tensor:
        """Ids on the device of the model; the columns of an array are copied."""
        return torch.from_numpy(np.ascontiguousarray(ids)).to(self.model.device)

    def _similar(self, entities: Ids, queries: Sequence[Query]) -> list[list[Prediction]]:
        cosines = self._unit_vectors[self._tensor(entities)] @ self._unit_vectors.T
        no_splits: list[dict[int, str]] = [{} for _ in queries]
        omitted = [{entity} for entity in entities.tolist()]
        return _top(cosines, self.graph.entities, queries, splits=no_splits, omitted=omitted)

    def _triples(self, heads: Ids, relations: Ids, tails: Ids) -> list[list[Prediction]]:
        splits = self._known_answers(heads, relations)
        scores = self.model.score(
            self._tensor(heads), self._tensor(relations), self._tensor(tails)
        ).tolist()
        ids = tails.tolist()
        names = self.graph.entities.with_labels(ids)
        return [
            [Prediction(*names_of_tail, tail, score, known.get(tail))]
            for names_of_tail, tail, score, known in zip(names, ids, scores, splits, strict=True)
        ]

    def _relations(
        self, heads: Ids, tails: Ids, queries: Sequence[Query]
    ) -> list[list[Prediction]]:
        scores = self.model.score_relations(self._tensor(heads), self._tensor(tails))
        scores = scores[:, : self.graph.shape.num_relations]
        pairs = zip(heads.tolist(), tails.tolist(), strict=True)
        splits = [self.known_relations(head, tail) for head, tail in pairs]
        omitted = [query.omitted(known) for known, query in zip(splits, queries, strict=True)]
        return _top(scores, self.graph.relations, queries, splits=splits, omitted=omitted)

    def _entities(
        self, entities: Ids, relations: Ids, queries: Sequence[Query]
    ) -> list[list[Prediction]]:
        """The best entities for queries, searched in the index if there is one."""
        # Scores come first: while they are computed, the other thread of a server can work.
        scores = None if self.index else score_queries(self.model, entities, relations)
        splits = self._known_answers(entities, relations)
        pairs = list(zip(entities.tolist(), relations.tolist(), strict=True))
        omitted = [
            self._omitted(*pair, known, query)
            for pair, known, query in zip(pairs, splits, queries, strict=True)
        ]
        if scores is not None:
            return _top(scores, self.graph.entities, queries, splits=splits, omitted=omitted)

        assert self.index is not None
        predictions = []
        for row, (entity, relation) in enumerate(pairs):
            best = self._search_index(
                self.index,
                entity=entity,
                relation=relation,
                query=queries[row],
                known=splits[row],
                omitted=omitted[row],
            )
            predictions.append(best)
        return predictions

    def _omitted(
        self, entity: int, relation: int, known: Mapping[int, str], query: Query
    ) -> set[int]:
        """The entities that are no predictions for a query."""
        omitted = query.omitted(known)
        if entity not in known and self._omits_entity(relation):
            omitted.add(entity)
        return omitted

    def _omits_entity(self, relation: int) -> bool:
        """Whether the entity of a query is no new answer; inverse relations have ids of their own.

        Models score the entity itself high: for a symmetric relation nothing scores higher.
        """
        if self.loops:
            return False
        return relation % self.graph.shape.num_relations not in self.relations_with_self_loops

    def _search_index(
        self,
        index: ModelIndex,
        *,
        entity: int,
        relation: int,
        query: Query,
        known: dict[int, str],
        omitted: set[int],
    ) -> list[Prediction]:
        """The best entities by the index, rescored by the model.

        All entities are scored if the index returns too few.
        """

        num_relations = self.graph.shape.num_relations
        device = self.model.device
        given = torch.tensor([entity], device=device)
        relations = torch.tensor([relation % num_relations], device=device)
        side: Side = "tail" if relation < num_relations else "head"

        k = query.k + len(omitted)
        ids = index.search(self.model, given, relations, side, k=k)[0].tolist()
        candidates = sorted(id for id in ids if id >= 0 and id not in omitted)
        wanted = min(query.k, index.shape[0] - len(omitted))
        if not 0 < wanted <= len(candidates):
            scores = score_queries(self.model, np.array([entity]), np.array([relation]))
            return _top(scores, self.graph.entities, [query], splits=[known], omitted=[omitted])[0]

        candidate_ids = torch.tensor(candidates, dtype=torch.int64)
        scores = self.model.predict_candidates(
            given, relations, candidate_ids[None].to(device), side
        )
        best = scores[0].cpu().sort(descending=True, stable=True)
        best_ids = candidate_ids[best.indices[:wanted]].tolist()
        best_scores = best.values[:wanted].tolist()
        return _predictions(self.graph.entities, [best_ids], [best_scores], [known])[0]

    def _with_probabilities(
        self, kind: QueryType, queries: Sequence[Query], predictions: list[list[Prediction]]
    ) -> list[list[Prediction]]:
        """The predictions for queries of one type with probabilities, and by probability.

        Triples of train have no probability, and come first. Without a calibration there are no
        probabilities.
        """
        triples: dict[tuple[int, ...], None] = {}  # a set that keeps the order
        for query, answers in zip(queries, predictions, strict=True):
            for answer in answers:
                if answer.split != "train":
                    triples[query.completed(kind, answer.id)] = None
        if self.calibration is None or not triples:
            return predictions

        ids = np.array(list(triples), dtype=np.int64)
        figures = self.calibration.of_triples(ids, self._log_probabilities(ids))
        pairs = zip(figures.probability.tolist(), figures.answer_probability.tolist(), strict=True)
        by_triple = dict(zip(triples, pairs, strict=True))
        with_probabilities = []
        for query, answers in zip(queries, predictions, strict=True):
            new_answers = []
            for answer in answers:
                pair = by_triple.get(query.completed(kind, answer.id), (None, None))
                # `dataclasses.replace` takes three times as long.
                new_answers.append(
                    Prediction(
                        answer.name, answer.label, answer.id, answer.score, answer.split, *pair
                    )
                )
            with_probabilities.append(sorted(new_answers, key=_by_probability))
        return with_probabilities

    def _known_answers(self, entities: Ids, relations: Ids) -> list[dict[int, str]]:
        """The known answers of each query, and the first split that contains each."""
        splits: list[dict[int, str]] = [{} for _ in entities]
        for split, known in self._known_by_split.items():
            rows, answers = known(entities, relations)
            for row, answer in zip(rows.tolist(), answers.tolist(), strict=True):
                splits[row].setdefault(answer, split)
        return splits

    @cached_property
    def _known_by_split(self) -> dict[str, KnownAnswers]:
        return {
            split: KnownAnswers.of(self.graph, [split])
            for split in SPLITS
            if len(self.graph.split(split))
        }

    @cached_property
    def _relations_by_pair(self) -> dict[str, tuple[Ids, Ids]]:
        """For each split, its sorted pairs of head and tail as numbers, and their relations."""
        by_split: dict[str, tuple[Ids, Ids]] = {}
        for split in SPLITS:
            heads, relations, tails = self.graph.split(split).astype(np.int64).T
            pairs = heads * self.graph.shape.num_entities + tails
            order = np.argsort(pairs, kind="stable")
            by_split[split] = (pairs[order], relations[order])
        return by_split

    @cached_property
    def _context(self) -> FrozenContext:
        """What explanations and new entities need of the model and its training."""
        from dualkg.inference.inductive import FrozenContext

        return FrozenContext.of(self.model, self.graph, recipe=self.recipe)

    @cached_property
    def _unit_vectors(self) -> Tensor:
        """The vectors of all entities at length 1, `(num_entities, width)`."""
        return torch.nn.functional.normalize(self.model.entity_vectors().detach(), dim=-1)


def _by_probability(prediction: Prediction) -> tuple[bool, float]:
    """The sort key of predictions with probabilities, which keeps the order of equal ones."""
    if prediction.probability is None:
        return False, 0.0
    return True, -prediction.probability


def _predictions(
    names: Vocabulary,
    ids_by_query: Sequence[Sequence[int]],
    scores_by_query: Sequence[Sequence[float]],
    known_by_query: Sequence[Mapping[int, str]],
) -> list[list[Prediction]]:
    """The predictions of several queries, whose names are looked up together."""
    all_names = iter(names.with_labels([id for ids in ids_by_query for id in ids]))
    predictions = []
    for ids, scores, known in zip(ids_by_query, scores_by_query, known_by_query, strict=True):
        names_of_ids = islice(all_names, len(ids))
        predictions.append(
            [
                Prediction(name, label, id, score, known.get(id))
                for (name, label), id, score in zip(names_of_ids, ids, scores, strict=True)
            ]
        )
    return predictions


def _top(
    scores: Tensor,
    names: Vocabulary,
    queries: Sequence[Query],
    *,
    splits: Sequence[dict[int, str]],
    omitted: Sequence[Collection[int]],
) -> list[list[Prediction]]:
    """The best candidates of each row of scores `(num_queries, num_names)`.

    `splits` are the known answers of each row, and `omitted` the ids that are no candidates.
    """
    num_names = scores.shape[1]
    most_omitted = max(len(ids) for ids in omitted)
    most = min(max(query.k for query in queries), num_names)
    if most_omitted > MAX_SKIPPED:
        scores = _without(scores, omitted)
    else:
        # The omitted ones are among the best that are taken, which saves a copy of all scores.
        most = min(most + most_omitted, num_names)

    best = best_columns(scores, most)
    ids_by_query = []
    scores_by_query = []
    for row, (ids, scores_of_ids) in enumerate(
        zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ):
        left_out = omitted[row]
        if left_out:
            kept = [place for place, id in enumerate(ids) if id not in left_out]
            ids = [ids[place] for place in kept]
            scores_of_ids = [scores_of_ids[place] for place in kept]
        k = queries[row].k
        ids_by_query.append(ids[:k])
        scores_by_query.append(scores_of_ids[:k])
    return _predictions(names, ids_by_query, scores_by_query, splits)


def _without(scores: Tensor, omitted: Sequence[Collection[int]]) -> Tensor:
    """Scores with −∞ for the omitted columns of each row."""
    rows = [row for row, ids in enumerate(omitted) for _ in ids]
    columns = [id for ids in omitted for id in ids]
    scores = scores.clone()  # a model may return a tensor that it keeps
    scores[
        torch.tensor(rows, device=scores.device), torch.tensor(columns, device=scores.device)
    ] = -torch.inf
    return scores


def best_columns(scores: Tensor, k: int) -> torch.return_types.topk:
    """The k best columns of each row; of a wide table on a CPU, in the blocks with the best ones.

    The k best are in the k blocks whose maxima are the largest. Maxima are found much faster.
    """
    num_columns = scores.shape[1]
    num_blocks = num_columns // BLOCK_COLUMNS
    if scores.is_cuda or num_blocks < MIN_BLOCKS_PER_COLUMN * k:
        return scores.topk(k)

    width = num_blocks * BLOCK_COLUMNS
    blocks = scores[:, :width].view(-1, num_blocks, BLOCK_COLUMNS)
    best_blocks = blocks.amax(2).topk(k).indices
    starts = best_blocks * BLOCK_COLUMNS
    columns = (starts[:, :, None] + torch.arange(BLOCK_COLUMNS)).flatten(1)
    rest = torch.arange(width, num_columns).expand(len(scores), -1)
    columns = torch.cat([columns, rest], dim=1)
    best = scores.gather(1, columns).topk(k)
    return torch.return_types.topk((best.values, columns.gather(1, best.indices)))
