"""Queries: predictions, prediction sets and similar entities; the query page and the first page."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

import numpy as np
from fastapi import Depends, Query, Response
from fastapi.responses import RedirectResponse
from pydantic import Field
from starlette.convertors import PathConvertor, register_url_convertor

from dualkg.errors import DualkgError, RequestError
from dualkg.evaluation.metrics import Metrics
from dualkg.inference.decisions import Verdict
from dualkg.inference.prediction_sets import PredictionSet
from dualkg.inference.predictor import Prediction, QueryType
from dualkg.serve import schemas
from dualkg.serve.downloads import Filtered, Table, is_unusual, item_row, table
from dualkg.serve.errors import error_reply
from dualkg.serve.runs import calibration_checks
from dualkg.serve.schemas import (
    MAX_NAME_LENGTH,
    MAX_PREDICTIONS,
    PARTS,
    Answer,
    ExampleQuery,
    Item,
    Part,
    Predictions,
    QueryPage,
    ScoredItem,
    SetSize,
    StartPage,
    Triple,
    as_json,
)
from dualkg.serve.served import ServedRun
from dualkg.serve.service import Context, RequestContext
from dualkg.serve.templating import (
    CopiedQuery,
    api_router,
    page,
    page_router,
    page_url,
    predictor_call,
    snippets,
)


class NameConvertor(PathConvertor):
    """A name as the rest of an address, with slashes and even line breaks in it."""

    regex = "(?s:.*)"


register_url_convertor("name", NameConvertor())
routes = api_router("queries")
pages = page_router()
Head = Annotated[str, Query(max_length=MAX_NAME_LENGTH, description="The head, by name or label.")]
Relation = Annotated[
    str, Query(max_length=MAX_NAME_LENGTH, description="The relation, by name or label.")
]
Tail = Annotated[str, Query(max_length=MAX_NAME_LENGTH, description="The tail, by name or label.")]
EntityName = Annotated[
    str, Field(max_length=MAX_NAME_LENGTH, description="An entity, by name or label.")
]
Name = Annotated[str | None, Query(max_length=MAX_NAME_LENGTH)]
K = Annotated[int, Query(ge=1, le=MAX_PREDICTIONS, description="Number of predictions.")]
Known = Annotated[
    Literal["mark", "omit"], Query(description="Whether known answers are marked or left out.")
]
QUERY_TYPES: dict[Part, QueryType] = {"head": "heads", "relation": "relations", "tail": "tails"}
OTHER_END: dict[Part, Part] = {"head": "tail", "tail": "head"}
# Of the page.
DEFAULTS = {"k": 20, "coverage": 0.9}
MAX_KNOWN = 500  # known answers
NUM_EXAMPLES = 9
MAX_OFFERED = 40  # relations to choose from


@routes.get("/api/tails", response_model=Predictions)
async def tails(
    context: Context, head: Head, relation: Relation, k: K = 10, known: Known = "mark"
) -> Response:
    """Answer (head, relation, ?)."""
    ids = await context.ids(head=head, relation=relation)
    return await _predictions(context, "tails", ids, k=k, known=known)


@routes.get("/api/heads", response_model=Predictions)
async def heads(
    context: Context, relation: Relation, tail: Tail, k: K = 10, known: Known = "mark"
) -> Response:
    """Answer (?, relation, tail)."""
    ids = await context.ids(relation=relation, tail=tail)
    return await _predictions(context, "heads", ids, k=k, known=known)


@routes.get("/api/relations", response_model=Predictions)
async def relations(
    context: Context, head: Head, tail: Tail, k: K = 10, known: Known = "mark"
) -> Response:
    """Answer (head, ?, tail)."""
    ids = await context.ids(head=head, tail=tail)
    return await _predictions(context, "relations", ids, k=k, known=known)


async def _predictions(
    context: RequestContext, kind: QueryType, ids: dict[Part, int], *, k: int, known: Known
) -> Response:
    predictions = await context.predict(kind, *ids.values(), k=k, known=known)
    verdicts = context.service.verdicts(context.run, ids, predictions)
    items = [
        ScoredItem.of_prediction(prediction, verdict=verdict)
        for prediction, verdict in zip(predictions, verdicts, strict=True)
    ]
    parts = schemas.QueryParts.of(context.run.graph, ids)
    return as_json(
        Predictions.model_construct(run=context.run.name, query=parts, predictions=items)
    )


@routes.get("/api/similar")
async def similar(context: Context, entity: EntityName, k: K = 10) -> schemas.SimilarEntities:
    """The entities whose embeddings have the highest cosine with an entity's."""
    id = await context.id(entity)
    return schemas.SimilarEntities(
        run=context.run.name,
        entity=Item.of(context.run.graph.entities, id),
        predictions=await context.predict("similar", id, k=k),
    )


@routes.get("/api/prediction-set")
async def prediction_set(
    context: Context,
    entity: EntityName,
    relation: Relation,
    side: Annotated[
        Literal["tail", "head"], Query(description="The missing part; the entity is the other.")
    ] = "tail",
    coverage: Annotated[
        float, Query(gt=0, lt=1, description="Probability that the set has the answer.")
    ] = 0.9,
    k: K = 100,
) -> schemas.PredictionSetResponse:
    """The smallest set of new answers with a given coverage (conformal).

    The set contains the missing answer with that probability.
    """
    ids = await context.ids(**{OTHER_END[side]: entity}, relation=relation)
    run = context.run
    members = await context.in_thread(
        lambda: run.predictor.prediction_set(
            ids.get("head"), ids["relation"], ids.get("tail"), coverage=coverage
        )
    )
    return schemas.PredictionSetResponse(
        run=run.name,
        query=schemas.QueryParts.of(run.graph, ids),
        predictions=members[:k],
        coverage=coverage,
        size=len(members),
    )


@dataclass(frozen=True)
class PageQuery:
    """The query of a page as it was given: two of the three names, and the part to find."""

    names: dict[Part, str | None]
    find: Part
    k: int
    coverage: float

    @property
    def given(self) -> list[Part]:
        return [part for part in PARTS if part != self.find]

    @property
    def missing(self) -> list[Part]:
        return [part for part in self.given if not self.names[part]]

    @property
    def instruction(self) -> str:
        return f"Name the {' and the '.join(self.missing)} to find the {self.find}."

    def params(self, **changes: Any) -> dict[str, Any]:
        """Parameters of the page's address, without those that have their default."""
        params: dict[str, Any] = {"find": self.find}
        for part in self.given:
            params[part] = self.names[part]
        params["k"] = self.k
        params["coverage"] = self.coverage
        params.update(changes)
        return {name: value for name, value in params.items() if DEFAULTS.get(name) != value}


async def page_query(
    head: Name = None,
    relation: Name = None,
    tail: Name = None,
    find: Part | None = None,
    k: Annotated[int, Query(ge=1, le=200)] = 20,
    coverage: Annotated[float, Query(gt=0, lt=1)] = 0.9,
) -> PageQuery:
    """By default the part to find is the one that was not given."""
    names: dict[Part, str | None] = {"head": head, "relation": relation, "tail": tail}
    missing: list[Part] = [part for part in PARTS if not names[part]]
    if find is None:
        find = missing[0] if len(missing) == 1 else "tail"
    return PageQuery(names, find, k, coverage)


GivenQuery = Annotated[PageQuery, Depends(page_query)]


async def query_page(context: RequestContext, query: PageQuery) -> Response:
    """The form, and the predictions; or the relations to choose from if one part is missing."""
    values: dict[str, Any] = {"query": query, "results": None, "error": None}
    if query.missing:
        offered = await _offered_relations(context, query)
        return page(context, "query.html", offered=offered, **values)

    try:
        values["results"] = await query_results(context, query)
    except DualkgError as error:
        values["error"] = error
        return page(context, "query.html", status=error_reply(error).status, **values)
    json = page_url(context, "/query.json", **query.params())
    copies = snippets(context, _copied(context, query, values["results"].query))
    return page(context, "query.html", json=json, copies=copies, **values)


def _copied(context: RequestContext, query: PageQuery, parts: schemas.QueryParts) -> CopiedQuery:
    """The query of a page as it is sent to the API, and in Python and as a command."""
    given: dict[str, str] = {part: getattr(parts, part).name for part in query.given}
    kind = QUERY_TYPES[query.find]
    return CopiedQuery(
        path=f"/api/{kind}",
        parameters={**given, "k": query.k, "known": "omit"},
        command="predict",
        options={**given, "top": query.k, "new": True},
        python=predictor_call(kind, *given.values(), k=query.k, known="omit"),
    )


@table("answers")
async def answers_table(context: Context, query: GivenQuery, filter: Filtered) -> Table:
    """New predictions, then accepted, known and rejected answers."""
    results = await query_results(context, query)
    rows = []
    for status, answers in (
        ("new", results.predictions),
        ("accepted", results.accepted),
        ("known", results.known),
        ("rejected", results.rejected),
    ):
        for answer in answers:
            if filter.hide_unusual and is_unusual(answer):
                continue
            row = item_row(answer, query.find)
            row |= {"status": status, "split": answer.split, "probability": answer.probability}
            row |= {"answer_probability": answer.answer_probability, "score": answer.score}
            if isinstance(answer, Answer):
                row |= {"in_prediction_set": answer.in_prediction_set}
                row |= {"head_type": answer.head_type, "tail_type": answer.tail_type}
            rows.append(row)
    return Table(context.run.name, rows)


@pages.get("/query.json")
async def query_results(context: Context, query: GivenQuery) -> QueryPage:
    """New predictions, known answers, and how many of the former the prediction set has."""
    if query.missing:
        raise RequestError(query.instruction)
    ids = await context.ids(**{part: query.names[part] or "" for part in query.given})
    kind = QUERY_TYPES[query.find]
    decided = _decided_answers(context, query, ids)
    num_wanted = min(MAX_PREDICTIONS, query.k + len(decided))
    found, known, of_decided, members = await asyncio.gather(
        context.predict(kind, *ids.values(), k=num_wanted, known="omit"),
        _known_answers(context, query, ids),
        _score_answers(context, query, ids, list(decided)),
        _set_members(context, query, ids),
    )
    by_verdict: dict[str, list[ScoredItem]] = {"accepted": [], "rejected": []}
    for prediction in of_decided:
        verdict = decided[prediction.id]
        by_verdict[verdict].append(ScoredItem.of_prediction(prediction, verdict=verdict))
    inside = set() if members is None else set(members.entities.tolist())
    open_predictions = [prediction for prediction in found if prediction.id not in decided]
    # Those with the highest scores, as without decisions, most probable first.
    best = sorted(open_predictions, key=lambda prediction: -prediction.score)[: query.k]
    best_ids = {prediction.id for prediction in best}
    answers = []
    for prediction in open_predictions:
        if prediction.id not in best_ids:
            continue
        answer = Answer.model_validate(prediction)
        answer.in_prediction_set = None if members is None else answer.id in inside
        answers.append(answer)
    known_answer = _remark(context, query, ids, answers)
    are_inside = [answer.id in inside for answer in answers]
    prediction_set = None
    if members is not None:
        prediction_set = SetSize(
            coverage=query.coverage,
            size=len(inside),
            num_listed=sum(are_inside),
            num_decided=len(inside & set(decided)),
            is_first=are_inside == sorted(are_inside, reverse=True),
        )
    return QueryPage(
        run=context.run.name,
        find=query.find,
        query=schemas.QueryParts.of(context.run.graph, ids),
        num_known=len(_splits_of_known(context, query, ids)),
        known=known,
        **by_verdict,
        known_answer=known_answer,
        predictions=answers,
        prediction_set=prediction_set,
    )


def _remark(
    context: RequestContext, query: PageQuery, ids: dict[Part, int], answers: list[Answer]
) -> Item | None:
    """Add remarks to new answers; the known answer, if the relation has one as a rule."""
    if query.find == "relation" or not answers:
        return None
    graph = context.run.graph
    triples = [[{**ids, query.find: answer.id}[part] for part in PARTS] for answer in answers]
    known_answer = None
    for answer, remarks in zip(
        answers, context.run.remarker.of_triples(np.array(triples)), strict=True
    ):
        answer.remark(graph, remarks)
        # That of the query is the same for all answers.
        if query.find == "tail":
            known_answer = answer.known_tail
            answer.known_tail = None
        else:
            known_answer = answer.known_head
            answer.known_head = None
    return known_answer


async def _known_answers(
    context: RequestContext, query: PageQuery, ids: dict[Part, int]
) -> list[Prediction]:
    """The known answers, the most probable first; training triples have no probability."""
    splits = _splits_of_known(context, query, ids)
    known = await _score_answers(context, query, ids, list(splits)[:MAX_KNOWN])
    return [replace(answer, split=splits[answer.id]) for answer in known]


async def _score_answers(
    context: RequestContext, query: PageQuery, ids: dict[Part, int], answers: Sequence[int]
) -> list[Prediction]:
    """Some answers to a query by id, the most probable first, then by score."""
    vocabulary = schemas.vocabulary_of(context.run.graph, query.find)
    triples = [tuple({**ids, query.find: answer}[part] for part in PARTS) for answer in answers]
    scored = []
    for answer, prediction in zip(answers, await context.score(triples), strict=True):
        name = vocabulary[answer]
        label = vocabulary.label(answer)
        scored.append(replace(prediction, id=answer, name=name, label=label))
    return sorted(scored, key=lambda answer: (-(answer.probability or 0.0), -answer.score))


def _decided_answers(
    context: RequestContext, query: PageQuery, ids: dict[Part, int]
) -> dict[int, Verdict]:
    """The answers that were decided on and are not known, by id."""
    graph = context.run.graph
    given = {part: schemas.vocabulary_of(graph, part)[ids[part]] for part in query.given}
    vocabulary = schemas.vocabulary_of(graph, query.find)
    found: dict[int, Verdict] = {}
    for triple, decision in context.decided.directions():
        parts = dict(zip(PARTS, triple, strict=True))
        name = parts[query.find]
        if all(parts[part] == given[part] for part in given) and name in vocabulary:
            found[vocabulary.id(name)] = decision.verdict
    known = _splits_of_known(context, query, ids) if found else {}
    return {id: verdict for id, verdict in found.items() if id not in known}


def _splits_of_known(
    context: RequestContext, query: PageQuery, ids: dict[Part, int]
) -> dict[int, str]:
    """The known answers by id, each with the split that has its triple."""
    predictor = context.run.predictor
    if query.find == "relation":
        return predictor.known_relations(ids["head"], ids["tail"])

    relation = ids["relation"]
    if query.find == "head":
        # Heads are the answers of the inverse relation, whose id follows those of all relations.
        relation += context.run.graph.shape.num_relations
    return predictor.known_answers(ids[OTHER_END[query.find]], relation)


async def _set_members(
    context: RequestContext, query: PageQuery, ids: dict[Part, int]
) -> PredictionSet | None:
    """The prediction set without probabilities, which would take long for a large set."""
    predictor = context.run.predictor
    side = query.find
    coverage = query.coverage
    if side == "relation" or predictor.prediction_sets is None:
        return None
    entity = ids[OTHER_END[side]]
    relation = ids["relation"]
    return await context.in_thread(
        lambda: predictor.members(entity, relation, side=side, coverage=coverage)
    )


async def _offered_relations(context: RequestContext, query: PageQuery) -> list[Item]:
    """Relations to choose from when only the relation is missing.

    Those that the entity has in train come first.
    """
    side = OTHER_END.get(query.find)
    name = query.names[side] if side else None
    graph = context.run.graph
    if query.missing != ["relation"] or not name or name not in graph.entities:
        return []

    entity = await context.id(name)
    entities_of_triples = graph.train[:, 0 if side == "head" else 2]
    own = np.unique(graph.train[entities_of_triples == entity, 1]).tolist()
    others = sorted(set(range(len(graph.relations))) - set(own))
    return [context.run.relations[id] for id in [*own, *others][:MAX_OFFERED]]


def examples_of(context: RequestContext) -> list[tuple[Item, Item]]:
    """Heads and relations of test queries, each of another relation.

    The model has not seen the answers of test queries.
    """
    graph = context.run.graph
    triples = graph.test if len(graph.test) else graph.train
    relations, numbers = np.unique(triples[:, 1], return_counts=True)
    most_frequent = relations[np.argsort(-numbers, kind="stable")][:NUM_EXAMPLES]

    examples = []
    used = set()
    for relation in most_frequent:
        heads = np.unique(triples[triples[:, 1] == relation, 0])
        # Readers may know the entities with most facts.
        by_degree = heads[np.argsort(-context.run.roles.degrees[heads], kind="stable")].tolist()
        head = next((head for head in by_degree if head not in used), by_degree[0])
        used.add(head)
        examples.append((Item.of(graph.entities, head), context.run.relations[relation]))
    return examples


@pages.get("/")
async def first_page(context: Context, query: GivenQuery) -> Response:
    """The query page; without a query, where to begin."""
    if not context.has_run:
        return RedirectResponse(_training_address(context), status_code=303)
    if len(query.missing) == 2:
        return await _start_page(context, query)
    return await query_page(context, query)


def _training_address(context: RequestContext) -> str:
    """The address of the only training, or of the list of trainings."""
    names = list(context.service.trainings.by_name)
    return f"/training?{urlencode({'name': names[0]})}" if len(names) == 1 else "/train"


@pages.get("/start.json")
async def start(context: Context) -> StartPage:
    """The graph, the model and example queries."""
    run = context.run
    graph = run.graph
    metrics = await context.in_thread(lambda: test_metrics(run))
    return StartPage(
        run=run.name,
        graph=graph.name,
        model=run.run.model_name,
        num_entities=len(graph.entities),
        num_relations=len(graph.relations),
        num_facts=sum(run.num_triples),
        example=_best_known_triple(run),
        num_test=len(graph.test),
        right_first=metrics.hits_at_1 if metrics else None,
        right_among_ten=metrics.hits_at_10 if metrics else None,
        mrr=metrics.mrr if metrics else None,
        calibration_error=await context.in_thread(lambda: calibration_error(run)),
        examples=[
            ExampleQuery(head=head, relation=relation) for head, relation in examples_of(context)
        ],
    )


def _best_known_triple(run: ServedRun) -> Triple | None:
    """The training triple between the entities with most facts, which readers may know."""
    triples = run.graph.train
    if not len(triples):
        return None
    degrees = run.roles.degrees[triples[:, [0, 2]]].min(axis=1)
    return Triple.of(run.graph, *triples[degrees.argmax()].tolist())


def test_metrics(run: ServedRun) -> Metrics | None:
    """The metrics on test; None without test triples."""
    return run.run.report_on("test").metrics if len(run.graph.test) else None


def calibration_error(run: ServedRun) -> float | None:
    """The mean difference of probability and observed frequency on test, if it was measured."""
    checks = calibration_checks(run.run)
    error: float | None = checks.get("calibration", {}).get("likely", {}).get("ece")
    return error


@table("relations")
async def relations_table(context: Context) -> Table:
    """All relations with the numbers of their known triples, the commonest first."""
    run = context.run
    ordered = sorted(run.relations, key=lambda item: -run.num_triples[item.id])
    rows = [
        {**item_row(item, "relation"), "num_triples": run.num_triples[item.id]} for item in ordered
    ]
    return Table(run.name, rows)


async def _start_page(context: RequestContext, query: PageQuery) -> Response:
    content = await start(context)
    relations = sorted(context.run.relations, key=lambda item: -context.run.num_triples[item.id])
    return page(
        context,
        "start.html",
        json=page_url(context, "/start.json"),
        query=query,
        start=content,
        relations=relations,
        search_at_once=not context.run.search_takes_long(),
    )
