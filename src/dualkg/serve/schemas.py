"""The page Ask, for programs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictInt, StrictStr

from dualkg import inference
from dualkg.data.graph import Graph
from dualkg.data.vocabulary import Vocabulary
from dualkg.inference import decisions, explanation, predictor
from dualkg.inference.names import Match
from dualkg.serve.limits import LONGEST_NAME, MOST_TRIPLES


class Problem(BaseModel):
    """The sentence that the command line would give."""

    error: str
    near: list[str] = Field(default_factory=list, description="Names that may have been meant.")


class Health(BaseModel):
    status: str


class Thing(BaseModel):
    """An entity or a relation."""

    id: int
    name: str = Field(description="What it is asked by.")
    label: str = Field(description="What people call it; the name where it has no label.")

    @classmethod
    def of(cls, vocabulary: Vocabulary, id: int) -> Thing:
        return cls(id=id, name=vocabulary[id], label=vocabulary.label(id))


class Answer(Thing):
    """One answer; scores compare within one question alone."""

    score: float | None = Field(description="Of the triple; of similar entities the cosine.")
    probability: float | None = Field(
        description="Calibrated; none where the run was not calibrated, and of what train has."
    )
    known: bool = Field(description="Whether the graph already has it.")
    split: str | None = Field(description="Which split has it.")

    @classmethod
    def of(cls, found: inference.Prediction) -> Answer:  # type: ignore[override]
        return cls.model_construct(
            id=found.id,
            name=found.name,
            label=found.label,
            score=found.score,
            probability=found.probability,
            known=found.known,
            split=found.split,
        )


class Question(BaseModel):
    """What was given; what was asked for is none."""

    head: Thing | None = None
    relation: Thing | None = None
    tail: Thing | None = None

    @classmethod
    def of(
        cls, graph: Graph, *, head: int | None = None, relation: int | None = None, tail: int | None = None
    ) -> Question:
        return cls(
            head=None if head is None else Thing.of(graph.entities, head),
            relation=None if relation is None else Thing.of(graph.relations, relation),
            tail=None if tail is None else Thing.of(graph.entities, tail),
        )


class Answers(BaseModel):
    """A question and its answers, best first."""

    run: str
    question: Question
    answers: list[Answer]


class Alike(BaseModel):
    """An entity, and those that are most like it; the score is the cosine."""

    run: str
    entity: Thing
    answers: list[Answer]


class PredictionSet(Answers):
    """The few answers among which the missing one is with a promised probability."""

    coverage: float
    size: int = Field(description="How many there are; `answers` has the first of them.")


class Score(BaseModel):
    """A triple, and what the model says of it."""

    head: Thing
    relation: Thing
    tail: Thing
    score: float | None
    probability: float | None
    known: bool
    split: str | None


class Scores(BaseModel):
    """Triples in the order they were asked about."""

    run: str
    scores: list[Score]


class FoundName(Thing):
    """A name that fits what was typed, and in which way."""

    match_type: Literal["exact", "prefix", "word", "substring", "fuzzy"]

    @classmethod
    def matching(cls, vocabulary: Vocabulary, match: Match) -> FoundName:
        return cls(
            id=match.id, name=vocabulary[match.id], label=vocabulary.label(match.id), match_type=match.match_type
        )


class FoundNames(BaseModel):
    """Entities by a few letters of their names, best first."""

    run: str
    q: str
    entities: list[FoundName]


class SetSize(BaseModel):
    """The best so many new answers have the missing one with a promised probability."""

    coverage: float
    size: int


class AskedAnswers(BaseModel):
    """A question with its new answers, best first, and those that the graph has."""

    run: str
    find: Literal["head", "relation", "tail"]
    question: Question
    known: list[Answer]
    answers: list[Answer]
    prediction_set: SetSize | None = Field(description="None for relations, and of runs that are not calibrated.")


class Fact(BaseModel):
    """A triple; the split that has it, or how likely it is."""

    head: Thing
    relation: Thing
    tail: Thing
    split: str | None = None
    probability: float | None = None
    log_probability: float | None = Field(
        None, description="½ log p(tail | head, relation) + ½ log p(head | relation, tail)."
    )

    @classmethod
    def of(cls, graph: Graph, fact: predictor.Fact) -> Fact:
        return cls(
            head=Thing.of(graph.entities, fact.head),
            relation=Thing.of(graph.relations, fact.relation),
            tail=Thing.of(graph.entities, fact.tail),
            split=fact.split,
            probability=fact.probability,
            log_probability=fact.log_probability,
        )


class Entity(BaseModel):
    """What is known of an entity, what the model would add, and which entities are like it."""

    run: str
    entity: Thing
    num_known: int = Field(description="How many triples have it; `known` has the first of them.")
    known: list[Fact]
    predicted: list[Fact]
    similar: list[Answer]


class NamedTriple(BaseModel):
    """A triple by its names, and as people say it."""

    head: str
    relation: str
    tail: str
    text: str


class SupportingTriple(BaseModel):
    """A training triple, and by how much the score falls without it."""

    triple: NamedTriple
    score_drop: float
    by_head: float
    by_tail: float
    same_triple: bool
    sentence: str


class SimilarEntity(BaseModel):
    """An entity like the head, or like the tail, for which the same is known."""

    entity: str
    side: Literal["head", "tail"]
    cosine: float
    triple: NamedTriple
    sentence: str


class Explanation(BaseModel):
    """Why a triple has its score, the strongest reason first."""

    run: str
    triple: NamedTriple
    score: float | None
    split: str | None
    supporting_triples: list[SupportingTriple]
    similar_entities: list[SimilarEntity]
    sentences: list[str]

    @classmethod
    def of(cls, run: str, found: explanation.Explanation) -> Explanation:
        parts: dict[str, Any] = found.as_dict()
        for name, ones in (
            ("supporting_triples", found.supporting_triples),
            ("similar_entities", found.similar_entities),
        ):
            parts[name] = [part | {"sentence": one.sentence()} for part, one in zip(parts[name], ones, strict=True)]  # type: ignore[attr-defined]
        return cls.model_validate({"run": run, **parts, "sentences": found.sentences()})


class Line(BaseModel):
    """One line of a completion: how far it is, a new triple, its end, or why it ended early."""

    kind: Literal["progress", "triple", "end", "error"]
    done: int | None = Field(None, description="Queries that are done, of a line of progress.")
    of: int | None = Field(None, description="All queries, of a line of progress.")
    rank: int | None = None
    head: Thing | None = None
    relation: Thing | None = None
    tail: Thing | None = None
    probability: float | None = None
    score: float | None = None
    log_probability: float | None = None
    triples: int | None = Field(None, description="How many there were, of the last line.")
    error: str | None = None


Name = Annotated[StrictStr, Field(max_length=LONGEST_NAME)] | StrictInt


class MadeDecision(BaseModel):
    """What was decided on a triple, each part by its name, or by its id as a number; `undecided` takes it back."""

    head: Name
    relation: Name
    tail: Name
    verdict: Literal["accepted", "rejected", "undecided"]


class MadeDecisions(BaseModel):
    """Decisions on new facts; they are kept all together, or not at all."""

    decisions: list[MadeDecision] = Field(min_length=1, max_length=MOST_TRIPLES)


class Decision(BaseModel):
    """A new fact that was accepted or rejected, by its names."""

    head: str
    relation: str
    tail: str
    verdict: Literal["accepted", "rejected"]
    probability: float | None = Field(description="That it had when it was decided on.")
    decided_at: str = Field(description="When, as ISO 8601 in UTC.")

    @classmethod
    def of(cls, made: decisions.Decision) -> Decision:
        return cls.model_validate(made, from_attributes=True)


class DecisionCounts(BaseModel):
    """How many new facts were accepted and rejected so far."""

    run: str
    accepted: int
    rejected: int


class Decisions(DecisionCounts):
    """All decisions, in the order they were made."""

    can_decide: bool = Field(description="Whether more are taken.")
    decisions: list[Decision]


class DecidedFact(Fact):
    """A new fact, and what was decided on it."""

    verdict: Literal["accepted", "rejected"] | None = None


class NewFacts(BaseModel):
    """The most plausible triples that the graph does not have, best first."""

    run: str
    facts: list[DecidedFact]


class GraphFacts(BaseModel):
    """The graph of a run."""

    name: str
    counts: dict[str, int]
    notes: list[str] = Field(description="What was noticed while reading it.")


class Sparsity(BaseModel):
    """Zeros among the entries of the entity tables."""

    share: float
    storage: dict[str, Any] = Field(description="Numbers and bytes, dense and without zeros.")
    made: dict[str, Any] | None = Field(description="How the run was made sparse, where it was.")


class RunFacts(BaseModel):
    """All that is kept of a run."""

    run: str
    model: str
    graph: GraphFacts
    relations: list[Thing]
    recipe: dict[str, Any]
    recipe_toml: str
    history: list[dict[str, Any]] = Field(
        description="Of each epoch the loss, and where it was ranked the MRR on valid."
    )
    reports: dict[str, Any] = Field(description="By split: metrics as a whole, by direction, relation, cardinality.")
    costs: dict[str, float | None] | None
    calibrated: bool
    reliability: dict[str, Any] | None = Field(description="How probabilities held on test: bins of a diagram.")
    coverage: dict[str, Any] | None = Field(description="How often prediction sets had the answer.")
    sparsity: Sparsity | None


class RunNames(BaseModel):
    """The runs that are served; the first is asked where none is named."""

    runs: list[str]


class DifferingQuestion(BaseModel):
    """A question of test, and the rank of its answer in both runs."""

    head: Thing
    relation: Thing
    tail: Thing
    asked: Literal["head", "tail"]
    rank_a: float
    rank_b: float
    difference: float = Field(description="1/rank_a − 1/rank_b.")


class Comparison(BaseModel):
    """Two runs on the questions of test."""

    a: str
    b: str
    graph: str
    split: str
    sentence: str
    metrics: dict[str, Any] = Field(description="Each metric of both, the difference, its 95 % interval and p-value.")
    better: float = Field(description="The share of triples on which a has the higher MRR.")
    worse: float
    equal: float
    num_triples: int
    questions: list[DifferingQuestion]


class EntityMap(BaseModel):
    """All entities in the plane, by id; each axis from −1 to 1."""

    run: str
    x: list[float]
    y: list[float]
    names: list[str]
    labels: list[str] | None = Field(description="None where the graph has none: then people call them by their names.")


class MapInTheMaking(BaseModel):
    """The map is not there yet."""

    run: str
    sentence: str


class RunPage(BaseModel):
    """One run, or two with what is between them."""

    runs: list[RunFacts]
    comparison: Comparison | None = None
    problem: str | None = Field(None, description="Why the two cannot be compared.")
