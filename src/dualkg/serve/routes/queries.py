"""Queries: missing parts of a triple, scores, prediction sets, similar entities, explanations."""

import asyncio
from typing import Annotated, Literal

from fastapi import Query
from pydantic import Field
from starlette.convertors import PathConvertor, register_url_convertor

from dualkg.inference.predictor import Query as ModelQuery
from dualkg.inference.predictor import QueryType
from dualkg.serve import schemas
from dualkg.serve.limits import MAX_NAME_LENGTH, MAX_PREDICTIONS
from dualkg.serve.schemas import Item, Part, Predictions, Score, Scores, Triples
from dualkg.serve.service import Context, RequestContext
from dualkg.serve.templating import api_router, links


class NameConvertor(PathConvertor):
    """A name as the rest of an address, with slashes and even line breaks in it."""

    regex = "(?s:.*)"


register_url_convertor("name", NameConvertor())
routes = api_router("queries")
Head = Annotated[str, Query(max_length=MAX_NAME_LENGTH, description="The head, by name or label.")]
Relation = Annotated[str, Query(max_length=MAX_NAME_LENGTH, description="The relation, by name or label.")]
Tail = Annotated[str, Query(max_length=MAX_NAME_LENGTH, description="The tail, by name or label.")]
EntityName = Annotated[str, Field(max_length=MAX_NAME_LENGTH, description="An entity, by name or label.")]
K = Annotated[int, Query(ge=1, le=MAX_PREDICTIONS, description="Number of predictions.")]
HEAD, RELATION, TAIL = (f"/scores/0/{part}/name" for part in ("head", "relation", "tail"))
SCORE_LINKS = links(
    tails={"head": HEAD, "relation": RELATION},
    heads={"relation": RELATION, "tail": TAIL},
    relations={"head": HEAD, "tail": TAIL},
    prediction_set={"entity": HEAD, "relation": RELATION},
    explain={"head": HEAD, "relation": RELATION, "tail": TAIL},
)
Known = Annotated[Literal["mark", "omit"], Query(description="Whether known answers are marked or left out.")]


@routes.get("/api/tails")
async def tails(context: Context, head: Head, relation: Relation, k: K = 10, known: Known = "mark") -> Predictions:
    """Answer (head, relation, ?)."""
    return await _predictions(context, "tails", await context.ids(head=head, relation=relation), k, known)


@routes.get("/api/heads")
async def heads(context: Context, relation: Relation, tail: Tail, k: K = 10, known: Known = "mark") -> Predictions:
    """Answer (?, relation, tail)."""
    return await _predictions(context, "heads", await context.ids(relation=relation, tail=tail), k, known)


@routes.get("/api/relations")
async def relations(context: Context, head: Head, tail: Tail, k: K = 10, known: Known = "mark") -> Predictions:
    """Answer (head, ?, tail)."""
    return await _predictions(context, "relations", await context.ids(head=head, tail=tail), k, known)


async def _predictions(
    context: RequestContext, kind: QueryType, ids: dict[Part, int], k: int, known: Known
) -> Predictions:
    found = await context.predict(kind, ModelQuery(tuple(ids.values()), k, known))
    return Predictions(run=context.run.name, query=schemas.Query.of(context.run.graph, ids), predictions=found)


@routes.get("/api/similar")
async def similar(context: Context, entity: EntityName, k: K = 10) -> schemas.SimilarEntities:
    """The entities whose embeddings have the highest cosine with an entity's."""
    id, run = await context.id(entity), context.run
    found = await context.predict("similar", ModelQuery((id,), k))
    return schemas.SimilarEntities(run=run.name, entity=Item.of(run.graph.entities, id), predictions=found)


@routes.get("/api/prediction-set")
async def prediction_set(
    context: Context,
    entity: EntityName,
    relation: Relation,
    side: Annotated[Literal["tail", "head"], Query(description="The missing part; the entity is the other.")] = "tail",
    coverage: Annotated[float, Query(gt=0, lt=1, description="Probability that the set has the answer.")] = 0.9,
    k: K = 100,
) -> schemas.PredictionSet:
    """The smallest set of new answers that contains the missing one with a given probability (conformal)."""
    ids = await context.ids(**{"head" if side == "tail" else "tail": entity}, relation=relation)
    run, head, tail = context.run, ids.get("head"), ids.get("tail")
    found = await context.in_thread(
        lambda: run.predictor.prediction_set(head, ids["relation"], tail, coverage=coverage)
    )
    return schemas.PredictionSet(
        run=run.name, query=schemas.Query.of(run.graph, ids), predictions=found[:k], coverage=coverage, size=len(found)
    )


@routes.get("/api/score", responses=SCORE_LINKS)
async def score(context: Context, head: Head, relation: Relation, tail: Tail) -> Scores:
    """The score and the probability of one triple."""
    return await scores(context, Triples(triples=[(head, relation, tail)]))


@routes.post("/api/score", responses=SCORE_LINKS)
async def scores(context: Context, triples: Triples) -> Scores:
    """The scores of several triples, in the order of the request."""
    found = await asyncio.gather(*(_score(context, *triple) for triple in triples.triples))
    return Scores(run=context.run.name, scores=found)


async def _score(context: RequestContext, head: str | int, relation: str | int, tail: str | int) -> Score:
    ids = await context.ids(head=head, relation=relation, tail=tail)
    [found] = await context.predict("triple", ModelQuery(tuple(ids.values()), k=1))
    values = {name: getattr(found, name) for name in schemas.Scored.model_fields}
    return Score.of(context.run.graph, **ids, **values)


@routes.get("/api/explain")
@routes.get("/explain.json", include_in_schema=False)
async def explain(
    context: Context,
    head: Head,
    relation: Relation,
    tail: Tail,
    k: Annotated[int, Query(ge=1, le=50, description="Number of supporting triples.")] = 5,
) -> schemas.Explanation:
    """The training triples that support a triple's score, and similar entities that have the same triple."""
    ids = await context.ids(head=head, relation=relation, tail=tail)
    found = await context.in_thread(lambda: context.run.predictor.explain(**ids, k=k))
    return schemas.Explanation(run=context.run.name, sentences=found.sentences(), **vars(found))
