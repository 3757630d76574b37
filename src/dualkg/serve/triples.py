"""Triples: their scores, their explanations, and how likely they are; and the pages of these."""

from typing import Annotated, Any

from fastapi import Query, Response

from dualkg.inference.explanation import NamedTriple
from dualkg.inference.predictor import Prediction
from dualkg.serve import schemas
from dualkg.serve.downloads import Table, flat_bin, table, triple_row
from dualkg.serve.entity_facts import known_facts
from dualkg.serve.queries import Head, Relation, Tail
from dualkg.serve.runs import calibration_checks
from dualkg.serve.schemas import PARTS, Item, Score, Scores, Triples, as_json
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

routes = api_router("queries")
pages = page_router()
NUM_OTHERS = 8  # known answers beside an explanation
NUM_FACTS_OF_END = 6
Bins = list[dict[str, Any]]


@routes.get("/api/score", response_model=Scores)
async def score(context: Context, head: Head, relation: Relation, tail: Tail) -> Response:
    """The score and the probability of one triple."""
    return await scores(context, Triples(triples=[(head, relation, tail)]))


@routes.post("/api/score", response_model=Scores)
async def scores(context: Context, triples: Triples) -> Response:
    """The scores of several triples, in the order of the request."""
    ids = await context.ids_of(triples.triples)
    predictions = await context.score(ids)
    return await context.in_thread(lambda: as_json(_scores(context, ids, predictions)))


def _scores(
    context: RequestContext, ids: list[tuple[int, ...]], predictions: list[Prediction]
) -> Scores:
    graph = context.run.graph
    decided = context.decided
    items = [
        Item.of_ids(schemas.vocabulary_of(graph, part), ids_of_part)
        for part, ids_of_part in zip(PARTS, zip(*ids, strict=True), strict=True)
    ]
    rows = []
    for *parts, prediction in zip(*items, predictions, strict=True):
        verdict = decided.verdict(*(item.name for item in parts)) if decided else None
        rows.append(Score.of_triple(parts, prediction, verdict))
    return Scores.model_construct(run=context.run.name, scores=rows)


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
    """Supporting triples, triples of similar entities, and the edges of paths."""
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


@pages.get("/likely")
async def likely_page(context: Context, head: Head, relation: Relation, tail: Tail) -> Response:
    """The probability of a triple beside the reliability of its range."""
    ids = await context.ids_of([(head, relation, tail)])
    [fact] = _scores(context, ids, await context.score(ids)).scores
    of_triples, of_answers = await _reliability(context)
    params = {"head": head, "relation": relation, "tail": tail}
    copied = CopiedQuery(
        path="/api/score",
        parameters=params,
        command="predict",
        options=params,
        python=predictor_call("triple", head, relation, tail),
    )
    return page(
        context,
        "likely.html",
        json=page_url(context, "/api/score", **params),
        fact=fact,
        bins=of_triples or of_answers,
        is_of_triples=bool(of_triples),
        own=_own_bin(of_triples, fact.probability),
        own_answer=_own_bin(of_answers, fact.answer_probability),
        copies=snippets(context, copied),
    )


@table("likely")
async def likely_table(context: Context) -> Table:
    """How often new triples, and answers to test queries, of some probability were true."""
    of_triples, of_answers = await _reliability(context)
    rows = [{"of": "new triples", **flat_bin(bin)} for bin in of_triples]
    rows += [{"of": "answers", **flat_bin(bin)} for bin in of_answers]
    return Table(context.run.name, rows)


async def _reliability(context: RequestContext) -> tuple[Bins, Bins]:
    """The reliability of new triples, and of answers to test queries, by predicted range."""
    run = context.run.run
    checks = await context.in_thread(lambda: calibration_checks(run))
    of_answers: Bins = (checks.get("calibration") or {}).get("table") or []
    of_triples: Bins = checks.get("new_triples") or []
    return of_triples, of_answers


def _own_bin(bins: Bins, probability: float | None) -> dict[str, Any] | None:
    """The range of a reliability table that a probability is in."""
    if probability is None:
        return None
    of_range = [bin for bin in bins if bin["lower"] <= probability < bin["upper"]]
    return of_range[0] if of_range else None
