"""Queries: predictions, scores, prediction sets, similar entities, explanations; the query page."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Depends, Query, Response
from pydantic import Field, TypeAdapter
from starlette.convertors import PathConvertor, register_url_convertor

from dualkg.errors import DualkgError
from dualkg.inference.decisions import Verdict
from dualkg.inference.entity_facts import known_facts
from dualkg.inference.explanation import NamedTriple
from dualkg.inference.prediction_sets import PredictionSet
from dualkg.inference.predictor import Prediction, QueryType
from dualkg.serve import schemas
from dualkg.serve.downloads import Table, item_row, table, triple_row
from dualkg.serve.errors import IncompleteQuery
from dualkg.serve.limits import MAX_NAME_LENGTH, MAX_PREDICTIONS
from dualkg.serve.list_filter import Filtered, is_unusual
from dualkg.serve.replies import error_reply
from dualkg.serve.schemas import (
    PARTS,
    Answer,
    Item,
    Part,
    Predictions,
    QueryPage,
    Scores,
    SetSize,
    Triples,
)
from dualkg.serve.service import LARGE_REQUEST, Context, RequestContext
from dualkg.serve.snippets import CopiedQuery, predictor_call, snippets
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
# JSON pointers to the names of the first triple of `Scores`.
HEAD = "/scores/0/head/name"
RELATION = "/scores/0/relation/name"
TAIL = "/scores/0/tail/name"
SCORE_LINKS = links(
    tails={"head": HEAD, "relation": RELATION},
    heads={"relation": RELATION, "tail": TAIL},
    relations={"head": HEAD, "tail": TAIL},
    prediction_set={"entity": HEAD, "relation": RELATION},
    explain={"head": HEAD, "relation": RELATION, "tail": TAIL},
)
QUERY_TYPES: dict[Part, QueryType] = {"head": "heads", "relation": "relations", "tail": "tails"}
OTHER_END: dict[Part, Part] = {"head": "tail", "tail": "head"}
# Of the page.
DEFAULTS = {"k": 20, "coverage": 0.9}
NUM_OTHERS = 8  # known answers beside an explanation
NUM_FACTS_OF_END = 6
MAX_KNOWN = 500  # known answers
NUM_EXAMPLES = 9
MAX_OFFERED = 40  # relations to choose from
ROWS_AT_ONCE = 100  # of a long list, encoded without a break
ANY = TypeAdapter[Any](Any)


@routes.get("/api/tails", response_model=Predictions)
async def tails(
    context: Context, head: Head, relation: Relation, k: K = 10, known: Known = "mark"
) -> Predictions | Response:
    """Answer (head, relation, ?)."""
    ids = await context.ids(head=head, relation=relation)
    return await _predictions(context, "tails", ids, k=k, known=known)


@routes.get("/api/heads", response_model=Predictions)
async def heads(
    context: Context, relation: Relation, tail: Tail, k: K = 10, known: Known = "mark"
) -> Predictions | Response:
    """Answer (?, relation, tail)."""
    ids = await context.ids(relation=relation, tail=tail)
    return await _predictions(context, "heads", ids, k=k, known=known)


@routes.get("/api/relations", response_model=Predictions)
async def relations(
    context: Context, head: Head, tail: Tail, k: K = 10, known: Known = "mark"
) -> Predictions | Response:
    """Answer (head, ?, tail)."""
    ids = await context.ids(head=head, tail=tail)
    return await _predictions(context, "relations", ids, k=k, known=known)


async def _predictions(
    context: RequestContext, kind: QueryType, ids: dict[Part, int], *, k: int, known: Known
) -> Predictions | Response:
    async with context.large_request(k):
        predictions = await context.predict(kind, *ids.values(), k=k, known=known)
        parts = schemas.QueryParts.of(context.run.graph, ids)
        verdicts = context.service.verdicts(context.run, ids, predictions)
        if k <= LARGE_REQUEST:
            items = [schemas.ScoredItem.model_validate(prediction) for prediction in predictions]
            for item, verdict in zip(items, verdicts, strict=True):
                item.verdict = verdict
            return Predictions(run=context.run.name, query=parts, predictions=items)

        fields = {"run": context.run.name, "query": parts.model_dump()}
        names = [name for name in schemas.ScoredItem.model_fields if name != "verdict"]
        rows = (
            {**{name: getattr(answer, name) for name in names}, "verdict": verdict}
            for answer, verdict in zip(predictions, verdicts, strict=True)
        )
        body = await context.in_thread(lambda: json_in_parts(fields, predictions=rows))
        return Response(body, media_type="application/json")


def json_in_parts(fields: dict[str, Any], **rows: Iterable[dict[str, Any]]) -> bytes:
    """JSON of some fields and of one long list.

    It is encoded in parts, since no other request goes on while a part is encoded. Pydantic encodes
    plain dictionaries several times as fast as `json` does.
    """
    [(name, objects)] = rows.items()
    remaining = iter(objects)
    parts = []
    while part := list(islice(remaining, ROWS_AT_ONCE)):
        parts.append(ANY.dump_json(part)[1:-1])
    begin = ANY.dump_json(fields)[:-1]
    return b"".join([begin, b',"', name.encode(), b'":[', b",".join(parts), b"]}"])


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


@routes.get("/api/score", response_model=Scores, responses=SCORE_LINKS)
async def score(context: Context, head: Head, relation: Relation, tail: Tail) -> Response:
    """The score and the probability of one triple."""
    return await scores(context, Triples(triples=[(head, relation, tail)]))


@routes.post("/api/score", response_model=Scores, responses=SCORE_LINKS)
async def scores(context: Context, triples: Triples) -> Response:
    """The scores of several triples, in the order of the request."""
    ids = await context.ids_of(triples.triples)
    predictions = await context.score(ids)
    body = await context.in_thread(lambda: _scores(context, ids, predictions))
    return Response(body, media_type="application/json")


def _scores(
    context: RequestContext, ids: list[tuple[int, ...]], predictions: list[Prediction]
) -> bytes:
    """`Scores` as JSON, by hand: models of a thousand triples take 30 ms, which others wait for."""
    graph = context.run.graph
    names = [name for name in schemas.Scored.model_fields if name != "verdict"]
    decided = context.decided
    items = []
    for part, ids_of_part in zip(schemas.PARTS, zip(*ids, strict=True), strict=True):
        named = schemas.vocabulary_of(graph, part).with_labels(ids_of_part)
        items.append(
            [
                {"id": id, "name": name, "label": label}
                for id, (name, label) in zip(ids_of_part, named, strict=True)
            ]
        )
    rows = (
        dict(zip(schemas.PARTS, triple, strict=True))
        | {name: getattr(prediction, name) for name in names}
        | {"verdict": decided.verdict(*(item["name"] for item in triple)) if decided else None}
        for *triple, prediction in zip(*items, predictions, strict=True)
    )
    return json_in_parts({"run": context.run.name}, scores=rows)


@routes.get("/api/explain")
@routes.get("/explain.json", include_in_schema=False)
async def explain(
    context: Context,
    head: Head,
    relation: Relation,
    tail: Tail,
    k: Annotated[
        int, Query(ge=1, le=50, description="Number of supporting triples, and of paths.")
    ] = 5,
) -> schemas.ExplanationResponse:
    """The training triples that support a triple's score, similar entities, and paths.

    Similar entities are those that have the same triple. Paths are those of a path network: the run
    itself, or another run of the same graph that is served.
    """
    ids = await context.ids(head=head, relation=relation, tail=tail)
    predictor = context.run.predictor
    network = context.network
    explanation = await context.in_thread(
        lambda: predictor.explain(**ids, k=k, network=network.run if network else None)
    )
    named = explanation.triple
    return schemas.ExplanationResponse(
        run=context.run.name,
        verdict=context.decided.verdict(named.head, named.relation, named.tail),
        network=network.name if network else None,
        sentences=explanation.sentences(),
        **await context.in_thread(lambda: _surroundings(context, **ids)),
        **vars(explanation),
    )


def _surroundings(context: RequestContext, head: int, relation: int, tail: int) -> dict[str, Any]:
    """Other known answers to the queries of a triple, and known facts of both ends."""
    graph = context.run.graph
    predictor = context.run.predictor
    inverse = relation + graph.shape.num_relations
    tails = [id for id in predictor.known_answers(head, relation) if id != tail]
    heads = [id for id in predictor.known_answers(tail, inverse) if id != head]

    def facts_of(entity: int) -> list[schemas.LabelledFact]:
        facts, _ = known_facts(predictor, entity, limit=NUM_FACTS_OF_END + 1)
        others = [fact for fact in facts if (fact.head, fact.relation, fact.tail) != triple]
        return [schemas.LabelledFact.of(graph, **vars(fact)) for fact in others[:NUM_FACTS_OF_END]]

    triple = (head, relation, tail)
    return {
        "other_tails": [Item.of(graph.entities, id) for id in tails[:NUM_OTHERS]],
        "num_other_tails": len(tails),
        "other_heads": [Item.of(graph.entities, id) for id in heads[:NUM_OTHERS]],
        "num_other_heads": len(heads),
        "facts_of_head": facts_of(head),
        "facts_of_tail": [] if tail == head else facts_of(tail),
    }


@pages.get("/explain")
async def explanation_page(
    context: Context, head: Head, relation: Relation, tail: Tail
) -> Response:
    """Supporting triples and paths as a page; scripts open its section below a prediction."""
    explanation = await explain(context, head, relation, tail)
    graph = context.run.graph

    def with_labels(triple: NamedTriple) -> schemas.Triple:
        return schemas.Triple.of(
            graph,
            graph.entities.id(triple.head),
            graph.relations.id(triple.relation),
            graph.entities.id(triple.tail),
        )

    json = page_url(context, "/explain.json", head=head, relation=relation, tail=tail)
    named = explanation.triple
    given = {"head": named.head, "relation": named.relation, "tail": named.tail}
    copied = CopiedQuery(
        path="/api/explain",
        parameters=given,
        command="explain",
        options=given,
        python=predictor_call("explain", *given.values()),
    )
    return page(
        context,
        "explanation.html",
        json=json,
        explanation=explanation,
        triple=with_labels,
        copies=snippets(context, copied),
        params=given,
    )


@table("explanation")
async def explanation_table(context: Context, head: Head, relation: Relation, tail: Tail) -> Table:
    """Supporting triples and those of similar entities, and the edges of paths."""
    explanation = await explain(context, head, relation, tail)
    rows = []
    for support in explanation.supporting_triples or []:
        row = _named_row("supporting triple", support.triple)
        rows.append({**row, "score_drop": support.score_drop})
    for similar in explanation.similar_entities or []:
        row = _named_row("similar entity", similar.triple)
        rows.append({**row, "cosine": similar.cosine})
    for number, path in enumerate(explanation.supporting_paths or [], start=1):
        for edge in path.edges:
            row = _named_row("path", edge.triple)
            rows.append({**row, "path": number, "share_of_score": path.share})
    for end, facts in (("head", explanation.facts_of_head), ("tail", explanation.facts_of_tail)):
        rows += [{"kind": f"fact of the {end}", **triple_row(fact)} for fact in facts]
    return Table(context.run.name, rows)


def _named_row(kind: str, triple: NamedTriple) -> dict[str, Any]:
    names = {"head": triple.head, "relation": triple.relation, "tail": triple.tail}
    return {"kind": kind, **names}


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
        return str(IncompleteQuery(find=self.find, missing=self.missing))

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
        raise IncompleteQuery(find=query.find, missing=query.missing)
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
    by_verdict: dict[str, list[schemas.ScoredItem]] = {"accepted": [], "rejected": []}
    for prediction in of_decided:
        item = schemas.ScoredItem.model_validate(prediction)
        item.verdict = decided[item.id]
        by_verdict[decided[item.id]].append(item)
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
    """The known answers, the most probable first; those of train have no probability."""
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
