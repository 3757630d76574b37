"""The start page: a query, its known answers and its new predictions, also as JSON."""

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, Query, Response

from dualkg.errors import DualkgError, RequestError
from dualkg.inference.predictor import Prediction, QueryType
from dualkg.inference.predictor import Query as ModelQuery
from dualkg.serve import schemas
from dualkg.serve.errors import error_reply
from dualkg.serve.limits import MAX_NAME_LENGTH
from dualkg.serve.routes.queries import Head, Relation, Tail, explain
from dualkg.serve.schemas import PARTS, Item, Part, QueryPage, SetSize
from dualkg.serve.service import Context, RequestContext
from dualkg.serve.templating import page, page_router, page_url

routes = page_router()
KINDS: dict[Part, QueryType] = {"head": "heads", "relation": "relations", "tail": "tails"}
OTHER_END: dict[Part, Part] = {"head": "tail", "tail": "head"}
DEFAULTS = {"k": 20, "coverage": 0.9}
MAX_KNOWN = 500  # known answers on a page
NUM_EXAMPLES = 9
MAX_OFFERED = 40  # relations
Name = Annotated[str | None, Query(max_length=MAX_NAME_LENGTH)]


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
        params: dict[str, Any] = {part: self.names[part] for part in self.given}
        params = {"find": self.find} | params | {"k": self.k, "coverage": self.coverage} | changes
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


@routes.get("/")
async def query_page(context: Context, query: GivenQuery) -> Response:
    """The form, and with two parts given the predictions."""
    values: dict[str, Any] = {"query": query, "found": None, "error": None}
    if len(query.missing) == 2:
        return page(context, "query.html", **values, examples=_examples(context))
    if query.missing:
        return page(context, "query.html", **values, offered=await _offered_relations(context, query))
    try:
        values["found"] = await query_results(context, query)
    except DualkgError as error:
        return page(context, "query.html", **values | {"error": error}, status=error_reply(error).status)
    return page(context, "query.html", **values, json=page_url(context, "/query.json", **query.params()))


@routes.get("/explain")
async def explanation_page(context: Context, head: Head, relation: Relation, tail: Tail) -> Response:
    """Supporting triples as a page; with scripts, its section is opened below a prediction."""
    found, graph = await explain(context, head, relation, tail), context.run.graph

    def triple(named: Any) -> schemas.Triple:
        ids = graph.entities.id(named.head), graph.relations.id(named.relation), graph.entities.id(named.tail)
        return schemas.Triple.of(graph, *ids)

    json = page_url(context, "/explain.json", head=head, relation=relation, tail=tail)
    return page(context, "explanation.html", json=json, found=found, triple=triple)


@routes.get("/query.json")
async def query_results(context: Context, query: GivenQuery) -> QueryPage:
    """New predictions, known answers, and how many of the former the prediction set has."""
    if query.missing:
        raise RequestError(query.instruction)
    ids = await context.ids(**{part: query.names[part] or "" for part in query.given})
    # The given entity is no new answer, unless the relation often relates an entity to itself.
    excluded = None
    if query.find != "relation" and ids["relation"] not in context.run.loops:
        excluded = ids[OTHER_END[query.find]]
    given, k = tuple(ids.values()), query.k
    queries = ModelQuery(given, k + (excluded is not None), "omit"), ModelQuery(given, k, "mark")
    new, marked = await asyncio.gather(*(context.predict(KINDS[query.find], one) for one in queries))
    return QueryPage(
        run=context.run.name,
        find=query.find,
        query=schemas.Query.of(context.run.graph, ids),
        known=_known_answers(context, query, ids, {found.id: found for found in marked}),
        predictions=[found for found in new if found.id != excluded][:k],
        prediction_set=await _set_size(context, query, ids, excluded),
    )


def _known_answers(
    context: RequestContext, query: PageQuery, ids: dict[Part, int], ranked: dict[int, Prediction]
) -> list[Prediction]:
    """All known answers; first those among the best predictions, with their scores, then the others by label."""
    predictor, graph, vocabulary = context.run.predictor, context.run.graph, context.run.graph.entities
    if query.find == "relation":
        splits, vocabulary = predictor.known_relations(ids["head"], ids["tail"]), graph.relations
    elif query.find == "head":
        splits = predictor.known_answers(ids["tail"], ids["relation"] + graph.shape.num_relations)
    else:
        splits = predictor.known_answers(ids["head"], ids["relation"])
    first = [found for id, found in ranked.items() if id in splits]
    unranked = {"score": None, "probability": None, "known": True}
    rest = [
        schemas.Prediction(**dict(Item.of(vocabulary, id)), **unranked, split=splits[id])
        for id in list(splits)[: MAX_KNOWN + len(first)]
        if id not in ranked
    ]
    return (first + sorted(rest, key=lambda found: found.label.casefold()))[:MAX_KNOWN]  # type: ignore[return-value]


async def _set_size(
    context: RequestContext, query: PageQuery, ids: dict[Part, int], excluded: int | None
) -> SetSize | None:
    """The size alone: probabilities of all its members would take long for a large set."""
    predictor, side, coverage = context.run.predictor, query.find, query.coverage
    sets = predictor.prediction_sets
    if side == "relation" or sets is None:
        return None
    given, model, known = ids[OTHER_END[side]], predictor.model, predictor.all_known
    found = await context.in_thread(
        lambda: sets.of(model, known, given, ids["relation"], side=side, coverage=coverage).entities.tolist()
    )
    return SetSize(coverage=coverage, size=sum(id != excluded for id in found))


async def _offered_relations(context: RequestContext, query: PageQuery) -> list[Item]:
    """Relations to choose from when only the relation is missing: those of the entity in train first."""
    side = OTHER_END.get(query.find)
    name, graph = query.names[side] if side else None, context.run.graph
    if query.missing != ["relation"] or name not in graph.entities:
        return []
    triples, column = graph.split("train"), 0 if side == "head" else 2
    own = np.unique(triples[triples[:, column] == await context.id(name or ""), 1]).tolist()
    rest = [id for id in range(len(graph.relations)) if id not in set(own)]
    return [context.run.relations[id] for id in [*own, *rest][:MAX_OFFERED]]


def _examples(context: RequestContext) -> list[tuple[Item, Item]]:
    """Heads and relations of test queries, each of another relation: the model has not seen their answers."""
    graph = context.run.graph
    triples = graph.split("test") if len(graph.split("test")) else graph.split("train")
    relations, numbers = np.unique(triples[:, 1], return_counts=True)
    examples = []
    for place, id in enumerate(relations[np.argsort(-numbers, kind="stable")][:NUM_EXAMPLES], start=1):
        heads = triples[triples[:, 1] == id, 0]
        head = int(heads[len(heads) * place // (NUM_EXAMPLES + 1)])  # names that begin with different letters
        examples.append((Item.of(graph.entities, head), context.run.relations[id]))
    return examples
