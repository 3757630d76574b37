"""Schemas of requests and responses, and limits on what one request may ask for.

Schemas are filled from the attributes of objects of `inference` and `evaluation`. What a schema
makes of ids and predictions by `of` is not validated again: it was computed here.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from dualkg.data.graph import Graph
from dualkg.data.roles import End
from dualkg.data.vocabulary import Vocabulary
from dualkg.inference import decisions, explanation
from dualkg.inference.predictor import Prediction
from dualkg.serve.entity_facts import Remarks, TypeFit

MAX_PREDICTIONS = 1000  # of one query
MAX_TRIPLES = 1000  # scored or decided on by one request
MAX_NEW_TRIPLES = 10_000  # of one completion
MAX_MATCHES = 100  # of one name search
MAX_NAME_LENGTH = 2000  # characters
MAX_FILE = 2**24  # bytes of a file to train on
MatchType = Literal["exact", "prefix", "word", "substring", "fuzzy"]
Part = Literal["head", "relation", "tail"]
PARTS: tuple[Part, ...] = ("head", "relation", "tail")
MAX_NOTE = 2000  # characters
# Texts of a request have a limit, and then must be Unicode: JSON can write half a character.
FileText = Annotated[str, Field(max_length=MAX_FILE)]
NameOrId = Annotated[StrictStr, Field(max_length=MAX_NAME_LENGTH)] | StrictInt


def vocabulary_of(graph: Graph, part: Part) -> Vocabulary:
    return graph.relations if part == "relation" else graph.entities


class Schema(BaseModel):
    model_config = ConfigDict(from_attributes=True)


def as_json(content: Schema) -> Response:
    """A response that is not validated again, which would take longer than all else."""
    return Response(content.model_dump_json(), media_type="application/json")


class OfRun(Schema):
    run: str


class Error(Schema):
    """What was wrong, and what to do."""

    error: str
    kind: str = Field(description="The class of the error.")
    status: int
    suggestions: list[str] = Field(default_factory=list, description="Similar names.")


class Item(Schema):
    """An entity or a relation."""

    id: int
    name: str = Field(description="Unique, and accepted in every query.")
    label: str = Field(description="For display; the name where there is no label.")

    @classmethod
    def of(cls, vocabulary: Vocabulary, id: int) -> "Item":
        return cls.model_construct(id=id, name=vocabulary[id], label=vocabulary.label(id))

    @classmethod
    def of_ids(cls, vocabulary: Vocabulary, ids: Sequence[int]) -> "list[Item]":
        """Many at once, which takes a tenth of the time of one after the other."""
        named = vocabulary.with_labels(ids)
        return [
            cls.model_construct(id=id, name=name, label=label)
            for id, (name, label) in zip(ids, named, strict=True)
        ]


class Scored(Schema):
    score: float | None = Field(description="Score of the triple; for similar entities the cosine.")
    probability: float | None = Field(
        description=(
            "Calibrated probability of the triple; null for a run without calibration, and for "
            "training triples."
        )
    )
    answer_probability: float | None = Field(
        None, description="Its probability if an answer to its queries is known to be missing."
    )
    known: bool = Field(description="Whether the graph has the triple.")
    split: str | None = Field(description="The split that has the triple.")
    verdict: decisions.Verdict | None = Field(None, description="The decision on the triple.")


class Remarked(Schema):
    """Remarks on a new triple; null for a known one."""

    head_type: TypeFit | None = Field(
        None,
        description=(
            "Whether train has the head with this relation, its other triples make that likely, or "
            "neither."
        ),
    )
    tail_type: TypeFit | None = Field(None, description="Likewise, of the tail.")
    known_tail: Item | None = Field(
        None, description="A known tail of the head, if the relation has one as a rule."
    )
    known_head: Item | None = Field(None, description="Likewise, of the tail.")

    def remark(self, graph: Graph, remarks: Remarks) -> None:
        self.head_type = remarks.head_type
        self.tail_type = remarks.tail_type
        if remarks.known_tail is not None:
            self.known_tail = Item.of(graph.entities, remarks.known_tail)
        if remarks.known_head is not None:
            self.known_head = Item.of(graph.entities, remarks.known_head)


class ScoredItem(Scored, Item):
    """One prediction; scores compare within one query only."""

    @classmethod
    def of_prediction(
        cls, prediction: Prediction, *, verdict: decisions.Verdict | None = None
    ) -> Self:
        item = cls.model_validate(prediction)
        item.verdict = verdict
        return item


class Triple(Schema):
    head: Item
    relation: Item
    tail: Item

    @classmethod
    def of(cls, graph: Graph, head: int, relation: int, tail: int, **values: Any) -> Self:
        """A triple of this class by its ids; `values` are the other fields."""
        return cls(
            head=Item.of(graph.entities, head),
            relation=Item.of(graph.relations, relation),
            tail=Item.of(graph.entities, tail),
            **values,
        )


class QueryParts(Schema):
    """The given parts; the missing one is null."""

    head: Item | None = None
    relation: Item | None = None
    tail: Item | None = None

    @classmethod
    def of(cls, graph: Graph, ids: dict[Part, int]) -> Self:
        return cls(**{part: Item.of(vocabulary_of(graph, part), id) for part, id in ids.items()})


class Predictions(OfRun):
    """A query and its predictions, best first."""

    query: QueryParts
    predictions: list[ScoredItem]


class SimilarEntities(OfRun):
    """The entities most similar to another; the score is the cosine."""

    entity: Item
    predictions: list[ScoredItem]


class PredictionSetResponse(Predictions):
    """The smallest set of predictions that contains the missing answer with a given probability."""

    coverage: float
    size: int = Field(description="Size of the set; `predictions` has its first entries.")


class Score(Scored, Triple):
    """A triple and what the model says about it."""

    @classmethod
    def of_triple(
        cls, parts: Sequence[Item], prediction: Prediction, verdict: decisions.Verdict | None
    ) -> "Score":
        """A score that is not validated: models of a thousand triples would take 30 ms."""
        head, relation, tail = parts
        return cls.model_construct(
            head=head,
            relation=relation,
            tail=tail,
            score=prediction.score,
            probability=prediction.probability,
            answer_probability=prediction.answer_probability,
            known=prediction.known,
            split=prediction.split,
            verdict=verdict,
        )


class Scores(OfRun):
    """Triples in the order of the request."""

    scores: list[Score]


class Triples(Schema):
    """Triples to score: head, relation and tail, each by name, or by id as a number."""

    triples: list[tuple[NameOrId, NameOrId, NameOrId]] = Field(
        min_length=1, max_length=MAX_TRIPLES, examples=[[[0, 0, 1]]]
    )


class MatchedEntity(Item):
    """An entity whose name matches, and how."""

    match_type: MatchType
    degree: int = Field(description="Number of known triples.")
    relation: Item | None = Field(description="The relation that it has most often.")
    end: End | None = Field(description="Whether it is head or tail of that relation.")
    text: str = Field(description="The label as pages display it.")
    note: str | None = Field(description="The name as pages display it, where it is not the label.")
    about: str = Field(description="Relation and degree as pages display them.")


class MatchedEntities(OfRun):
    """Entities found by a part of their name, best first."""

    q: str
    entities: list[MatchedEntity]


class MatchedRelation(Item):
    """A relation whose name matches, and how."""

    match_type: MatchType
    num_triples: int = Field(description="Number of known triples.")
    text: str = Field(description="The label as pages display it.")
    note: str | None = Field(description="The name as pages display it, where it is not the label.")
    about: str = Field(description="The number of triples as pages display it.")


class SearchPage(MatchedEntities):
    """Entities and relations found by a part of their name, best first."""

    relations: list[MatchedRelation]


class SetSize(Schema):
    """So many entities contain the missing answer with probability `coverage`."""

    coverage: float
    size: int
    num_listed: int = Field(description="How many of them `predictions` has.")
    num_decided: int = Field(description="How many of them were accepted or rejected.")
    is_first: bool = Field(
        description="Whether they come before all other `predictions`, whose order is another one."
    )


class Answer(Remarked, ScoredItem):
    """A prediction of the page."""

    in_prediction_set: bool | None = Field(None, description="Null where there is no set.")


class QueryPage(OfRun):
    """A query with its new predictions, best first, and its known answers."""

    find: Part
    query: QueryParts
    num_known: int = Field(description="Number of known answers; `known` has the first of them.")
    known: list[ScoredItem]
    accepted: list[ScoredItem] = Field(description="Accepted facts, which are no predictions.")
    rejected: list[ScoredItem] = Field(description="Rejected facts, likewise.")
    known_answer: Item | None = Field(
        None,
        description="A known answer, if the relation has one as a rule: others are improbable.",
    )
    predictions: list[Answer]
    prediction_set: SetSize | None = Field(
        description="Null for relations and for a run without calibration."
    )


class ExampleQuery(Schema):
    """A head and a relation of a test triple, whose tails can be asked for."""

    head: Item
    relation: Item


class StartPage(OfRun):
    """What the graph is, how good the model is on test, and example queries.

    Figures about test are null without test triples, and without a calibration that was evaluated.
    """

    graph: str
    model: str
    num_entities: int
    num_relations: int
    num_facts: int
    example: Triple | None = Field(description="A training triple.")
    num_test: int
    right_first: float | None = Field(description="Hits@1: the answer has rank 1.")
    right_among_ten: float | None = Field(description="Hits@10.")
    mrr: float | None
    calibration_error: float | None = Field(
        description="Mean difference of probability and observed frequency, of likely candidates."
    )
    examples: list[ExampleQuery]


class RoleShare(Schema):
    """A relation, an end of it, and the share of some entities that are there."""

    relation: Item
    end: End
    share: float


class CountedEntity(Item):
    num_triples: int


class RelationEndDetails(Schema):
    """The entities at one end of a relation: its domain or its range."""

    num_entities: int
    roles: list[RoleShare] = Field(description="Other roles that most of them have.")
    common: list[CountedEntity] = Field(description="Those with most triples of the relation.")


class SimilarRelation(Schema):
    """A relation with almost the same entity pairs, or with the same pairs reversed."""

    kind: Literal["duplicate", "inverse", "symmetric"]
    relation: Item
    num_common: int = Field(description="Entity pairs of both.")
    share: float = Field(description="The share of this relation's pairs that the other has.")


class HardQuery(Triple):
    """A test query, and the rank of its answer."""

    direction: Literal["head", "tail"] = Field(description="The missing part.")
    rank: float


class RelationPage(OfRun):
    """A relation: its triples in the graph, and how well the model predicts it on test."""

    relation: Item
    counts: dict[str, int] = Field(description="Triples of each split.")
    cardinality: str
    tails_per_head: float = Field(description="Mean over train.")
    heads_per_tail: float
    symmetry: float = Field(description="Share of its triples whose reverse it also has.")
    self_loops: int
    domain: RelationEndDetails
    range: RelationEndDetails
    similar: list[SimilarRelation]
    metrics: dict[str, dict[str, float | None]] = Field(description="On test, by missing part.")
    metrics_of_all: dict[str, float | None] | None = Field(
        description="The same of all relations, in both directions."
    )
    examples: list[Triple]
    hardest: list[HardQuery]


class LabelledFact(Remarked, Triple):
    """A triple; the split that has it, or its probability."""

    split: str | None = None
    probability: float | None = None
    answer_probability: float | None = None
    verdict: decisions.Verdict | None = None
    both_directions: bool | None = Field(
        None, description="Whether the reverse is the same fact, and is left out."
    )
    log_probability: float | None = Field(
        None, description="½ log p(tail | head, relation) + ½ log p(head | relation, tail)."
    )


class Entity(OfRun):
    """The known facts, predicted facts and similar entities of an entity."""

    entity: Item
    num_known: int = Field(description="Number of known triples; `known` has the first of them.")
    known: list[LabelledFact]
    accepted: list[LabelledFact] = Field(description="Accepted facts, which are no predictions.")
    rejected: list[LabelledFact] = Field(description="Rejected facts, likewise.")
    predicted: list[LabelledFact]
    similar: list[ScoredItem]


class ExplanationResponse(OfRun):
    """The training triples and the paths that support a triple, strongest first."""

    triple: explanation.NamedTriple
    score: float | None
    probability: float | None = Field(description="As in `/api/score`.")
    answer_probability: float | None
    split: str | None
    verdict: decisions.Verdict | None = None
    supporting_triples: list[explanation.SupportingTriple] | None = Field(
        description="Null for a model whose embeddings have none, such as a path network."
    )
    similar_entities: list[explanation.SimilarEntity] | None = Field(description="Likewise.")
    network: str | None = Field(description="The run whose paths these are.")
    network_score: float | None = Field(
        description="Score of the path network, without the triple among its edges."
    )
    supporting_paths: list[explanation.SupportingPath] | None = Field(
        description="Null if no path network of the graph is served."
    )
    sentences: list[str]
    other_tails: list[Item] = Field(description="The first known tails of its head and relation.")
    num_other_tails: int
    other_heads: list[Item] = Field(description="The first known heads of its relation and tail.")
    num_other_heads: int
    facts_of_head: list[LabelledFact] = Field(
        description="The first other known facts of its head."
    )
    facts_of_tail: list[LabelledFact]


class CompletionLine(Remarked):
    """One line of a completion: progress, a new triple, the end, or an error that ended it."""

    kind: Literal["progress", "list", "triple", "end", "error"]
    is_final: bool | None = Field(
        None, description="Of a list that begins: whether it is the last one, or the best so far."
    )
    done: int | None = Field(None, description="Of progress: queries that are done.")
    total: int | None = Field(None, description="Of progress: all queries.")
    seconds_left: float | None = Field(None, description="Of progress, once it can be told.")
    rank: int | None = None
    head: Item | None = None
    relation: Item | None = None
    tail: Item | None = None
    probability: float | None = None
    answer_probability: float | None = None
    score: float | None = None
    log_probability: float | None = None
    verdict: decisions.Verdict | None = Field(None, description="The decision on the triple.")
    both_directions: bool | None = None
    num_triples: int | None = Field(None, description="Of the end: number of triples.")
    error: str | None = None


class NewDecision(Schema):
    """A decision on a triple; `undecided` takes a decision back.

    The parts of the triple are names, or ids as numbers.
    """

    head: NameOrId
    relation: NameOrId
    tail: NameOrId
    verdict: Literal["accepted", "rejected", "undecided"]
    note: str | None = Field(None, max_length=MAX_NOTE)
    decided_by: str | None = Field(None, max_length=MAX_NAME_LENGTH, description="Who decides.")


EXAMPLE = {"head": 0, "relation": 0, "tail": 1, "verdict": "undecided"}


class DecisionFile(Schema):
    """An exported file of decisions; either all are stored, or none."""

    name: str = Field(max_length=MAX_NAME_LENGTH, examples=["decisions.json"])
    text: FileText = Field(examples=["[]"])
    verdict: decisions.Verdict | None = Field(None, description="For files without a verdict.")


class NewDecisions(Schema):
    """Decisions on new facts; either all are stored, or none."""

    decisions: list[NewDecision] = Field(min_length=1, max_length=MAX_TRIPLES, examples=[[EXAMPLE]])


class DecisionCounts(OfRun):
    accepted: int
    rejected: int


class DecisionList(DecisionCounts):
    """All decisions, in the order they were made."""

    can_decide: bool = Field(description="Whether the server accepts decisions.")
    decisions: list[decisions.Decision]


class NewFact(LabelledFact):
    """A new fact and the decision on it."""


class NewFacts(OfRun):
    """The most plausible triples that the graph does not have, best first."""

    facts: list[NewFact]


class GraphSummary(Schema):
    name: str
    counts: dict[str, int]
    notes: list[str] = Field(description="Remarks of the reader that loaded the graph.")


class RunDetails(OfRun):
    """Everything stored with a run."""

    model: str
    engine: str | None = Field(description="Engine, precision and device of the training.")
    graph: GraphSummary
    relations: list[Item]
    recipe: dict[str, Any]
    recipe_toml: str
    history: list[dict[str, Any]] = Field(
        description="Per epoch: loss, and validation MRR where it was evaluated."
    )
    reports: dict[str, Any] = Field(
        description="By split: metrics overall, by direction, relation and cardinality."
    )
    costs: dict[str, float | None] | None
    calibrated: bool
    reliability: dict[str, Any] | None = Field(
        description="Calibration on test: bins of a reliability diagram."
    )
    coverage: dict[str, Any] | None = Field(description="Coverage of the prediction sets on test.")
    sparsity: dict[str, Any] | None = Field(
        description=(
            "Share of zeros in the entity tables, storage dense and sparse, and pruning if there "
            "was one."
        )
    )


class DifferingQuery(Triple):
    """A test query and the rank of its answer in both runs."""

    direction: Literal["head", "tail"] = Field(description="The missing part.")
    rank_a: float
    rank_b: float
    difference: float = Field(description="1/rank_a − 1/rank_b.")


class ComparisonResponse(Schema):
    """Two runs on the test queries."""

    a: str
    b: str
    graph: str
    split: str
    sentence: str
    metrics: dict[str, Any] = Field(
        description="Per metric: both values, the difference, 95 % interval and p-value."
    )
    better: float = Field(description="Share of triples on which a has the higher MRR.")
    worse: float
    equal: float
    num_triples: int
    queries: list[DifferingQuery]


class RunPage(Schema):
    """One run, or two with their comparison."""

    runs: list[RunDetails]
    comparison: ComparisonResponse | None = None
    problem: str | None = Field(None, description="Why the two cannot be compared.")


class EntityMap(OfRun):
    """All entities in the plane, by id; both axes range from −1 to 1."""

    x: list[float]
    y: list[float]
    names: list[str]
    labels: list[str] | None = Field(description="For display; null where they are the names.")
    degrees: list[int] = Field(description="Number of known triples.")
    roles: list[int] = Field(
        description="Place in `role_names` of the relation that it has most often; or −1."
    )
    role_names: list[str] = Field(description="Commonest roles first, for display.")
    types: list[int] | None = Field(
        description="Place in `type_names` of a type of each entity, or −1; null without types."
    )
    type_names: list[str] | None = Field(description="Commonest types first, for display.")
