"""Entities: known facts, predicted facts and similar entities of one, and its page."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote

import numpy as np
from fastapi import Response

from dualkg.serve.decisions import decided_facts
from dualkg.serve.downloads import Filtered, Table, fact_row, item_row, table, triple_row
from dualkg.serve.entity_facts import known_facts, predicted_facts
from dualkg.serve.errors import NotFound
from dualkg.serve.queries import EntityName
from dualkg.serve.schemas import Entity, Item, LabelledFact
from dualkg.serve.served import ServedRun
from dualkg.serve.service import Context, RequestContext
from dualkg.serve.templating import (
    CopiedQuery,
    api_router,
    page,
    page_router,
    page_url,
    snippets,
)

routes = api_router("entities")
pages = page_router()
MAX_KNOWN = 500
MAX_EXPORTED = 1_000_000  # known facts of one entity in a file
NUM_PREDICTED = 20
NUM_SIMILAR = 10
MAX_ROWS = 22  # on one side of the wide drawing
# Known and predicted neighbours of each relation, from the most detailed drawing to the least.
DETAILS = ((8, 3), (5, 3), (4, 2), (3, 2), (2, 2), (2, 1), (1, 1))


# The last address is for names that a browser would change in a path, such as `..`.
@routes.get("/api/entity/{name:name}")
@routes.get("/entity/{name:name}.json", include_in_schema=False)
@routes.get("/entity.json", include_in_schema=False)
async def entity(context: Context, name: EntityName) -> Entity:
    """Known facts, predicted facts and similar entities of an entity.

    A run without embeddings has no similar ones.
    """
    run = context.run
    graph = run.graph
    id = await context.id(name)
    similar = []
    if run.run.model.has_entity_vectors:
        similar = await context.predict("similar", id, k=NUM_SIMILAR)
    known, num_known = await context.in_thread(
        lambda: known_facts(run.predictor, id, limit=MAX_KNOWN)
    )
    by_verdict = await _decided_facts(context, id)
    num_decided = sum(map(len, by_verdict.values()))
    # The reverse of a symmetric fact is no fact of its own.
    num_wanted = 2 * NUM_PREDICTED + num_decided
    found = await context.in_thread(lambda: _predicted_facts(run, id, k=num_wanted))
    predicted = _folded(context, found)
    return Entity(
        run=run.name,
        entity=Item.of(graph.entities, id),
        num_known=num_known,
        known=[LabelledFact.of(graph, **vars(fact)) for fact in known],
        **by_verdict,
        predicted=predicted[:NUM_PREDICTED],
        similar=similar,
    )


def _predicted_facts(run: ServedRun, id: int, *, k: int) -> list[LabelledFact]:
    """The predicted facts of an entity with the remarks on them."""
    predicted = predicted_facts(run.predictor, id, k=k)
    triples = np.array([(fact.head, fact.relation, fact.tail) for fact in predicted])
    facts = []
    for fact, remarks in zip(predicted, run.remarker.of_triples(triples), strict=True):
        labelled = LabelledFact.of(run.graph, **vars(fact))
        labelled.remark(run.graph, remarks)
        facts.append(labelled)
    return facts


async def _decided_facts(context: RequestContext, entity: int) -> dict[str, list[LabelledFact]]:
    """The accepted and the rejected facts of an entity that the graph does not have."""
    graph = context.run.graph
    name = graph.entities[entity]
    by_verdict: dict[str, list[LabelledFact]] = {"accepted": [], "rejected": []}
    found = await decided_facts(context, lambda decision: name in (decision.head, decision.tail))
    for ids, verdict, prediction, remarks in found:
        if prediction.split is None:
            fact = LabelledFact.of(
                graph,
                *ids,
                verdict=verdict,
                probability=prediction.probability,
                answer_probability=prediction.answer_probability,
            )
            fact.remark(graph, remarks)
            by_verdict[verdict].append(fact)
    return by_verdict


def _folded(context: RequestContext, facts: Sequence[LabelledFact]) -> list[LabelledFact]:
    """The facts without decided ones, and without the reverse of symmetric ones."""
    decided = context.decided
    folded: dict[tuple[str, str, str], LabelledFact] = {}
    for fact in facts:
        triple = (fact.head.name, fact.relation.name, fact.tail.name)
        if decided.on(*triple):
            continue
        if fact.relation.name in decided.symmetric and triple[::-1] in folded:
            folded[triple[::-1]].both_directions = True
        else:
            folded[triple] = fact
    return list(folded.values())


@pages.get("/entity")
@pages.get("/entity/{name:name}")
async def entity_page(context: Context, name: EntityName) -> Response:
    try:
        details = await entity(context, name)
    except NotFound as error:
        names = context.run.graph.entities
        similar = [Item.of(names, names.id(suggestion)) for suggestion in error.suggestions]
        return page(context, "unknown_entity.html", status=404, error=error, similar=similar)

    groups = groups_of(details)
    inward = [group for group in groups if not group.outwards]
    outward = [group for group in groups if group.outwards]
    return page(
        context,
        "entity.html",
        json=page_url(context, "/entity.json", name=details.entity.name),
        details=details,
        groups=groups,
        sides=[fitting(inward, MAX_ROWS), fitting(outward, MAX_ROWS)],
        tree=fitting(groups, 2 * MAX_ROWS),
        copies=snippets(context, _copied(details.entity.name)),
    )


def _copied(name: str) -> CopiedQuery:
    """The facts of an entity as a query of the API, in Python and as a command."""
    path = f"/api/entity/{quote(name, safe='')}"
    python = (
        "import dualkg as kg\n"
        "from dualkg.serve.entity_facts import known_facts, predicted_facts\n\n"
        "predictor = kg.load_run(RUN).predictor()\n"
        f"entity = predictor.graph.entities.id({name!r})\n"
        "known, number = known_facts(predictor, entity, limit=500)\n"
        f"predicted = predicted_facts(predictor, entity, k={NUM_PREDICTED})"
    )
    return CopiedQuery(path, {}, command="serve", options={"get": path}, python=python)


@table("known-facts", of_facts=True)
async def known_facts_table(context: Context, name: EntityName) -> Table:
    """All known facts of an entity."""
    run = context.run
    id = await context.id(name)
    known, _ = await context.in_thread(lambda: known_facts(run.predictor, id, limit=MAX_EXPORTED))
    facts = (LabelledFact.of(run.graph, **vars(fact)) for fact in known)
    return Table(run.name, [{**triple_row(fact), "split": fact.split} for fact in facts])


@table("predicted-facts", of_facts=True)
async def predicted_facts_table(context: Context, name: EntityName, filter: Filtered) -> Table:
    """The predicted facts of an entity, and those that were decided on."""
    details = await entity(context, name)
    facts = [*details.predicted, *details.accepted, *details.rejected]
    return Table(details.run, [fact_row(fact) for fact in facts if filter.admits(context, fact)])


@table("similar-entities")
async def similar_table(context: Context, name: EntityName) -> Table:
    details = await entity(context, name)
    rows = [{**item_row(item, "entity"), "cosine": item.score} for item in details.similar]
    return Table(details.run, rows)


@dataclass(frozen=True)
class Group:
    """Facts of an entity with one relation.

    The neighbours of the entity are their tails if `outwards`, else their heads.
    """

    relation: Item
    outwards: bool
    known: list[LabelledFact] = field(default_factory=list)
    predicted: list[LabelledFact] = field(default_factory=list)
    num_omitted: int = 0

    @property
    def anchor(self) -> str:
        """The id of the list of all these facts on the page."""
        direction = "to" if self.outwards else "from"
        return f"{direction}-{self.relation.id}"

    @property
    def rows(self) -> list[LabelledFact | None]:
        """The rows of a drawing; None is the row with the number of omitted neighbours."""
        rows: list[LabelledFact | None] = [*self.known, *self.predicted]
        if self.num_omitted:
            rows.append(None)
        return rows

    def neighbour(self, fact: LabelledFact) -> Item:
        return fact.tail if self.outwards else fact.head

    def shortened(self, *, num_known: int, num_predicted: int) -> "Group":
        """The group with fewer neighbours."""
        num_omitted = max(0, len(self.known) - num_known)
        if num_omitted == 1:  # "1 more" takes as much space as the neighbour itself
            num_known += 1
            num_omitted = 0
        return replace(
            self,
            known=self.known[:num_known],
            predicted=self.predicted[:num_predicted],
            num_omitted=num_omitted,
        )


def groups_of(details: Entity) -> list[Group]:
    """Facts by relation and direction: outward ones first, then by size.

    A triple of two splits counts once.
    """
    facts: dict[tuple[int, int, int], LabelledFact] = {}
    for fact in [*details.known, *details.accepted, *details.predicted]:
        facts.setdefault((fact.head.id, fact.relation.id, fact.tail.id), fact)

    groups: dict[tuple[bool, int], Group] = {}
    for fact in facts.values():
        outwards = fact.head.id == details.entity.id
        group = groups.setdefault((outwards, fact.relation.id), Group(fact.relation, outwards))
        is_predicted = fact.split is None and fact.verdict is None
        members = group.predicted if is_predicted else group.known
        members.append(fact)

    def order(group: Group) -> tuple[bool, int, int]:
        return (not group.outwards, -len(group.known), group.relation.id)

    return sorted(groups.values(), key=order)


def fitting(groups: list[Group], max_rows: int) -> list[Group]:
    """The groups with as many neighbours as fit into a drawing."""
    drawn = groups
    for num_known, num_predicted in DETAILS:
        drawn = [
            group.shortened(num_known=num_known, num_predicted=num_predicted) for group in groups
        ]
        if _num_rows(drawn) <= max_rows:
            break
    while _num_rows(drawn) > max_rows:
        drawn.pop()
    return drawn


def _num_rows(groups: list[Group]) -> int:
    return sum(len(group.rows) for group in groups)
