"""Decisions on new facts: the store over HTTP, its page, and files of it in and out."""

import base64
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import compress
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from fastapi import Query, Response

from dualkg.inference.decision_files import as_csv, as_ntriples, as_tsv, parse_decisions
from dualkg.inference.decisions import Decided, Decision, DecisionStore, Triple, Verdict
from dualkg.inference.predictor import Prediction
from dualkg.serve import schemas
from dualkg.serve.downloads import NO_FILTER, Filtered, ListFilter, attachment
from dualkg.serve.entity_facts import Remarks
from dualkg.serve.errors import Forbidden, responses
from dualkg.serve.schemas import MAX_NAME_LENGTH
from dualkg.serve.service import Context, RequestContext
from dualkg.serve.templating import api_router, page, page_router, page_url

routes = api_router("decisions")
pages = page_router()
MAX_LISTED = 500  # decisions on a page
ByTriple = Mapping[Triple, Decision]
Text = Annotated[str, Query(max_length=MAX_NAME_LENGTH)]
Chosen = Literal["all", "accepted", "rejected"]


@routes.get("/api/decisions")
async def decisions(context: Context) -> schemas.DecisionList:
    """The new facts that were accepted or rejected, in the order of the decisions."""
    decided = await _load_decisions(context)
    return schemas.DecisionList(
        **_counts(context, decided),
        can_decide=context.can_decide,
        decisions=list(decided.values()),
    )


@routes.post("/api/decisions", responses=responses(403, 415))
async def decide(context: Context, new: schemas.NewDecisions) -> schemas.DecisionCounts:
    """Accept or reject new facts, or take decisions back.

    Either all are stored or none; a later one counts. The body must be declared as JSON; a browser
    must send it from a page of this server.
    """
    _check_accepted(context)
    names = [(decision.head, decision.relation, decision.tail) for decision in new.decisions]
    is_made = [decision.verdict != "undecided" for decision in new.decisions]
    ids = await context.ids_of(names)
    predictions = await context.score(list(compress(ids, is_made)))
    probabilities = iter([prediction.probability for prediction in predictions])
    by_triple: dict[Triple, Decision | None] = {}  # none if a decision is taken back
    for decision, of_triple, made_now in zip(new.decisions, ids, is_made, strict=True):
        triple = _names(context, of_triple)
        by_triple[triple] = None
        if made_now:
            by_triple[triple] = Decision(
                *triple,
                verdict=decision.verdict,  # type: ignore[arg-type]
                probability=next(probabilities),
                decided_at=datetime.now(UTC).isoformat(timespec="seconds"),
                made_from=context.run.run.identity,
                decided_by=_one_line(decision.decided_by) or _user(context),
                note=_one_line(decision.note),
            )
    return await _store(context, by_triple)


def _check_accepted(context: RequestContext) -> None:
    if context.service.read_only:
        raise Forbidden("This server was started with --read-only and accepts no decisions.")


def _one_line(text: str | None) -> str | None:
    """A text without line ends, which files of lines cannot have; none if it is blank."""
    return " ".join((text or "").split()) or None


def _user(context: RequestContext) -> str | None:
    """The user name of a request that has a password, if a browser sent one."""
    kind, _, credentials = context.request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        user, _, _ = base64.b64decode(credentials, validate=True).decode().partition(":")
    except ValueError:
        return None
    return _one_line(user[:MAX_NAME_LENGTH])


async def _store(
    context: RequestContext, by_triple: Mapping[Triple, Decision | None]
) -> schemas.DecisionCounts:
    """Save decisions, and remove those on triples that have none now.

    A decision on a symmetric fact replaces one on its reverse.
    """
    service = context.service
    run = context.run
    made = [decision for decision in by_triple.values() if decision]
    removed = [triple for triple, decision in by_triple.items() if not decision]

    def update(store: DecisionStore) -> ByTriple:
        before = Decided.of(store.load(), run.graph)
        reverses = [
            reverse
            for triple in by_triple
            for reverse in before.without_reverse(triple)
            if reverse not in by_triple
        ]
        return store.update(made, removed=[*removed, *reverses])

    decided = await context.in_thread(lambda: service.decisions(run, update))
    return schemas.DecisionCounts(**_counts(context, decided))


@routes.post("/api/decisions/import", include_in_schema=False)
async def import_decisions(context: Context, file: schemas.DecisionFile) -> schemas.DecisionCounts:
    """Add the decisions of an exported file: CSV, TSV, JSON or JSON lines.

    Either all are stored or none, and a later one counts. Names that the graph does not have are
    refused.
    """
    _check_accepted(context)
    decisions = parse_decisions(file.text, file.name, verdict=file.verdict)
    await context.ids_of([decision.triple for decision in decisions])
    return await _store(context, {decision.triple: decision for decision in decisions})


def _names(context: RequestContext, ids: tuple[int, ...]) -> Triple:
    graph = context.run.graph
    head, relation, tail = ids
    return graph.entities[head], graph.relations[relation], graph.entities[tail]


async def _load_decisions(context: RequestContext) -> ByTriple:
    service = context.service
    run = context.run
    if run.run.folder is None:
        return {}
    return await context.in_thread(lambda: service.decisions(run, DecisionStore.load))


def _counts(context: RequestContext, decided: ByTriple) -> dict[str, Any]:
    numbers = Counter(decision.verdict for decision in decided.values())
    return {
        "run": context.run.name,
        "accepted": numbers["accepted"],
        "rejected": numbers["rejected"],
    }


@routes.get("/facts.{suffix}", include_in_schema=False)
async def accepted_facts(context: Context, suffix: Literal["csv", "tsv"]) -> Response:
    """The accepted facts alone."""
    return _file(context, await _chosen(context, "accepted"), "accepted", suffix)


@routes.get("/decisions.json", include_in_schema=False)
async def decisions_as_json(
    context: Context, filter: Filtered, q: Text = "", verdict: Chosen = "all"
) -> schemas.DecisionList:
    """The page of decisions as JSON."""
    every = await decisions(context)
    every.decisions = await _chosen(context, verdict, q=q, filter=filter)
    return every


@routes.get("/decisions.{suffix}", include_in_schema=False)
async def decisions_as_file(
    context: Context,
    suffix: Literal["csv", "tsv", "nt"],
    filter: Filtered,
    q: Text = "",
    verdict: Chosen | None = None,
) -> Response:
    """Decisions for spreadsheets and programs; as RDF, which has no verdicts, the accepted ones."""
    verdict = verdict or ("accepted" if suffix == "nt" else "all")
    return _file(context, await _chosen(context, verdict, q=q, filter=filter), verdict, suffix)


def _file(
    context: RequestContext, decisions: list[Decision], verdict: Chosen, suffix: str
) -> Response:
    if suffix == "nt":
        text = as_ntriples(decision.triple for decision in decisions)
    else:
        text = as_csv(decisions) if suffix == "csv" else as_tsv(decisions)
    what = "decisions" if verdict == "all" else verdict
    return attachment(text, f"{context.run.name}-{what}.{suffix}")


async def _chosen(
    context: RequestContext, verdict: Chosen, *, q: str = "", filter: ListFilter = NO_FILTER
) -> list[Decision]:
    """The decisions of a verdict that a filter admits, and whose names, labels, notes or authors
    contain a text.
    """
    decided = await _load_decisions(context)
    words = q.casefold().split()
    chosen = []
    for decision in decided.values():
        if verdict not in ("all", decision.verdict):
            continue
        text = _searched(context, decision) if words else ""
        if all(word in text for word in words) and _admits(filter, context, decision):
            chosen.append(decision)
    return chosen


def _admits(filter: ListFilter, context: RequestContext, decision: Decision) -> bool:
    if not filter.chosen:
        return True
    triple = named_triple(context, decision)
    fact = schemas.LabelledFact(**dict(triple), verdict=decision.verdict)
    return filter.admits(context, fact, decided_by=decision.decided_by)


def _searched(context: RequestContext, decision: Decision) -> str:
    item = named_triple(context, decision)
    names = (decision.head, decision.relation, decision.tail)
    labels = (item.head.label, item.relation.label, item.tail.label)
    texts = [*names, *labels, decision.note or "", decision.decided_by or "", decision.decided_at]
    return "\n".join(texts).casefold()


class DecidedFact(NamedTuple):
    """A decided fact by ids, what the model says about it now, and the remarks on it."""

    ids: tuple[int, int, int]
    verdict: Verdict
    prediction: Prediction
    remarks: Remarks


async def decided_facts(
    context: RequestContext, is_chosen: Callable[[Decision], bool]
) -> list[DecidedFact]:
    """The chosen decided facts whose names the graph has, the most probable first."""
    graph = context.run.graph
    ids = []
    verdicts = []
    for decision in context.decided.by_triple.values():
        head, relation, tail = decision.triple
        is_in_graph = head in graph.entities and tail in graph.entities
        if is_in_graph and relation in graph.relations and is_chosen(decision):
            ids.append(
                (graph.entities.id(head), graph.relations.id(relation), graph.entities.id(tail))
            )
            verdicts.append(decision.verdict)
    triples = np.array(ids).reshape(-1, 3)
    remarks = await context.in_thread(lambda: context.run.remarker.of_triples(triples))
    rows = zip(ids, verdicts, await context.score(ids), remarks, strict=True)
    facts = [DecidedFact(*row) for row in rows]
    return sorted(facts, key=lambda fact: -(fact.prediction.probability or 0.0))


def named_triple(context: RequestContext, decision: Decision) -> schemas.Triple:
    """The triple of a decision with labels; a name that the graph does not have has none."""
    graph = context.run.graph
    items = {}
    for part, name in zip(schemas.PARTS, decision.triple, strict=True):
        vocabulary = schemas.vocabulary_of(graph, part)
        if name in vocabulary:
            items[part] = schemas.Item.of(vocabulary, vocabulary.id(name))
        else:
            items[part] = schemas.Item(id=-1, name=name, label=name)
    return schemas.Triple(**items)


@pages.get("/decisions")
async def decisions_page(context: Context, q: Text = "", verdict: Chosen = "all") -> Response:
    """All decisions, the last first."""
    content = await decisions_as_json(context, NO_FILTER, q, verdict)
    listed = content.decisions[::-1][:MAX_LISTED]
    params = {"q": q or None, "verdict": None if verdict == "all" else verdict}
    return page(
        context,
        "decisions.html",
        json=page_url(context, "/decisions.json", **params),
        q=q,
        verdict=verdict,
        content=content,
        rows=[(decision, named_triple(context, decision)) for decision in listed],
    )
