"""Queries: missing parts of a triple, scores, prediction sets, similar entities, explanations; and
the start page.
"""

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Depends, Query, Response
from pydantic import Field
from starlette.convertors import PathConvertor, register_url_convertor

from dualkg.errors import DualkgError, RequestError
from dualkg.inference.predictor import Prediction, QueryType
from dualkg.serve import schemas
from dualkg.serve.errors import error_reply
from dualkg.serve.limits import MAX_NAME_LENGTH, MAX_PREDICTIONS
from dualkg.serve.schemas import (
    PARTS,
    Item,
    Part,
    Predictions,
    QueryPage,
    Score,
    Scores,
    SetSize,
    Triples,
)
from dualkg.serve.service import Context, RequestContext
from dualkg.serve.templating import api_router, links, page, page_router, page_url


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
HEAD, RELATION, TAIL = (f"/scores/0/{part}/name" for part in PARTS)
SCORE_LINKS = links(
    tails={"head": HEAD, "relation": RELATION},
    heads={"relation": RELATION, "tail": TAIL},
    relations={"head": HEAD, "tail": TAIL},
    prediction_set={"entity": HEAD, "relation": RELATION},
    explain={"head": HEAD, "relation": RELATION, "tail": TAIL},
)
KINDS: dict[Part, QueryType] = {"head": "heads", "relation": "relations", "tail": "tails"}
OTHER_END: dict[Part, Part] = {"head": "tail", "tail": "head"}
DEFAULTS = {"k": 20, "coverage": 0.9}
MAX_KNOWN = 500  # known answers on a page
NUM_EXAMPLES = 9
MAX_OFFERED = 40  # relations


@routes.get("/api/tails")
async def tails(
    context: Context, head: Head, relation: Relation, k: K = 10, known: Known = "mark"
) -> Predictions:
    """Answer (head, relation, ?)."""
    return await _predictions(
        context, "tails", await context.ids(head=head, relation=relation), k, known
    )


@routes.get("/api/heads")
async def heads(
    context: Context, relation: Relation, tail: Tail, k: K = 10, known: Known = "mark"
) -> Predictions:
    """Answer (?, relation, tail)."""
    return await _predictions(
        context, "heads", await context.ids(relation=relation, tail=tail), k, known
    )


@routes.get("/api/relations")
async def relations(
    context: Context, head: Head, tail: Tail, k: K = 10, known: Known = "mark"
) -> Predictions:
    """Answer (head, ?, tail)."""
    return await _predictions(
        context, "relations", await context.ids(head=head, tail=tail), k, known
    )


async def _predictions(
    context: RequestContext, kind: QueryType, ids: dict[Part, int], k: int, known: Known
) -> Predictions:
    found = await context.predict(kind, *ids.values(), k=k, known=known)
    return Predictions(
        run=context.run.name, query=schemas.QueryParts.of(context.run.graph, ids), predictions=found
    )


@routes.get("/api/similar")
async def similar(context: Context, entity: EntityName, k: K = 10) -> schemas.SimilarEntities:
    """The entities whose embeddings have the highest cosine with an entity's."""
    id = await context.id(entity)
    run = context.run
    found = await context.predict("similar", id, k=k)
    return schemas.SimilarEntities(
        run=run.name, entity=Item.of(run.graph.entities, id), predictions=found
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
    """The smallest set of new answers that contains the missing one with a given probability
    (conformal).
    """
    ids = await context.ids(**{OTHER_END[side]: entity}, relation=relation)
    run = context.run
    found = await context.in_thread(
        lambda: run.predictor.prediction_set(
            ids.get("head"), ids["relation"], ids.get("tail"), coverage=coverage
        )
    )
    return schemas.PredictionSetResponse(
        run=run.name,
        query=schemas.QueryParts.of(run.graph, ids),
        predictions=found[:k],
        coverage=coverage,
        size=len(found),
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


async def _score(
    context: RequestContext, head: str | int, relation: str | int, tail: str | int
) -> Score:
    ids = await context.ids(head=head, relation=relation, tail=tail)
    [found] = await context.predict("triple", *ids.values(), k=1)
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
) -> schemas.ExplanationResponse:
    """The training triples that support a triple's score, and similar entities that have the same
    triple.
    """
    ids = await context.ids(head=head, relation=relation, tail=tail)
    found = await context.in_thread(lambda: context.run.predictor.explain(**ids, k=k))
    return schemas.ExplanationResponse(
        run=context.run.name, sentences=found.sentences(), **vars(found)
    )


@pages.get("/explain")
async def explanation_page(
    context: Context, head: Head, relation: Relation, tail: Tail
) -> Response:
    """Supporting triples as a page; with scripts, its section is opened below a prediction."""
    found = await explain(context, head, relation, tail)
    graph = context.run.graph

    def triple(named: Any) -> schemas.Triple:
        ids = (
            graph.entities.id(named.head),
            graph.relations.id(named.relation),
            graph.entities.id(named.tail),
        )
        return schemas.Triple.of(graph, *ids)

    json = page_url(context, "/explain.json", head=head, relation=relation, tail=tail)
    return page(context, "explanation.html", json=json, found=found, triple=triple)


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
        params: dict[str, Any] = {
            "find": self.find,
            **{part: self.names[part] for part in self.given},
        }
        params |= {"k": self.k, "coverage": self.coverage, **changes}
        return {key: value for key, value in params.items() if DEFAULTS.get(key) != value}


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
    return PageQuery(names, find or (missing[0] if len(missing) == 1 else "tail"), k, coverage)


GivenQuery = Annotated[PageQuery, Depends(page_query)]


@pages.get("/")
async def query_page(context: Context, query: GivenQuery) -> Response:
    """The form, and with two parts given the predictions."""
    values: dict[str, Any] = {"query": query, "found": None, "error": None}
    if len(query.missing) == 2:
        return page(context, "query.html", **values, examples=_examples(context))
    if query.missing:
        return page(
            context, "query.html", **values, offered=await _offered_relations(context, query)
        )
    try:
        values["found"] = await query_results(context, query)
    except DualkgError as error:
        return page(
            context, "query.html", **values | {"error": error}, status=error_reply(error).status
        )
    return page(
        context, "query.html", **values, json=page_url(context, "/query.json", **query.params())
    )


@pages.get("/query.json")
async def query_results(context: Context, query: GivenQuery) -> QueryPage:
    """New predictions, known answers, and how many of the former the prediction set has."""
    if query.missing:
        raise RequestError(query.instruction)
    ids = await context.ids(**{part: query.names[part] or "" for part in query.given})
    kind = KINDS[query.find]
    k = query.k
    new, marked = await asyncio.gather(
        context.predict(kind, *ids.values(), k=k, known="omit"),
        context.predict(kind, *ids.values(), k=k),
    )
    return QueryPage(
        run=context.run.name,
        find=query.find,
        query=schemas.QueryParts.of(context.run.graph, ids),
        known=_known_answers(context, query, ids, {found.id: found for found in marked}),
        predictions=new,
        prediction_set=await _set_size(context, query, ids),
    )


def _known_answers(
    context: RequestContext, query: PageQuery, ids: dict[Part, int], ranked: dict[int, Prediction]
) -> list[Prediction]:
    """All known answers; first those among the best predictions, with their scores, then the others
    by label.
    """
    predictor = context.run.predictor
    graph = context.run.graph
    if query.find == "relation":
        splits = predictor.known_relations(ids["head"], ids["tail"])
    else:
        inverse = graph.shape.num_relations if query.find == "head" else 0
        splits = predictor.known_answers(ids[OTHER_END[query.find]], ids["relation"] + inverse)
    first = [found for id, found in ranked.items() if id in splits]
    vocabulary = schemas.vocabulary_of(graph, query.find)
    unranked = {"score": None, "probability": None, "known": True}
    rest = [
        schemas.ScoredItem(**dict(Item.of(vocabulary, id)), **unranked, split=splits[id])
        for id in list(splits)[: MAX_KNOWN + len(first)]
        if id not in ranked
    ]
    return (first + sorted(rest, key=lambda found: found.label.casefold()))[:MAX_KNOWN]  # type: ignore[return-value]


async def _set_size(
    context: RequestContext, query: PageQuery, ids: dict[Part, int]
) -> SetSize | None:
    """The size alone: probabilities of all its members would take long for a large set."""
    predictor = context.run.predictor
    side = query.find
    coverage = query.coverage
    if side == "relation" or predictor.prediction_sets is None:
        return None
    entity = ids[OTHER_END[side]]
    relation = ids["relation"]
    members = await context.in_thread(
        lambda: predictor.members(entity, relation, side=side, coverage=coverage)
    )
    return SetSize(coverage=coverage, size=len(members.entities))


async def _offered_relations(context: RequestContext, query: PageQuery) -> list[Item]:
    """Relations to choose from when only the relation is missing: those of the entity in train
    first.
    """
    side = OTHER_END.get(query.find)
    graph = context.run.graph
    name = query.names[side] if side else None
    if query.missing != ["relation"] or name not in graph.entities:
        return []
    column = 0 if side == "head" else 2
    own = np.unique(graph.train[graph.train[:, column] == await context.id(name or ""), 1]).tolist()
    rest = [id for id in range(len(graph.relations)) if id not in set(own)]
    return [context.run.relations[id] for id in [*own, *rest][:MAX_OFFERED]]


def _examples(context: RequestContext) -> list[tuple[Item, Item]]:
    """Heads and relations of test queries, each of another relation: the model has not seen their
    answers.
    """
    graph = context.run.graph
    triples = graph.test if len(graph.test) else graph.train
    relations, numbers = np.unique(triples[:, 1], return_counts=True)
    examples = []
    for place, id in enumerate(
        relations[np.argsort(-numbers, kind="stable")][:NUM_EXAMPLES], start=1
    ):
        heads = triples[triples[:, 1] == id, 0]
        head = int(
            heads[len(heads) * place // (NUM_EXAMPLES + 1)]
        )  # names that begin with different letters
        examples.append((Item.of(graph.entities, head), context.run.relations[id]))
    return examples
