"""Entities: search by name, everything about one, and the map of all; and their pages."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal
from urllib.parse import quote

import numpy as np
from fastapi import Query, Response
from fastapi.responses import JSONResponse

from dualkg.analysis.projection import Vectors
from dualkg.data.roles import End
from dualkg.inference.entity_facts import known_facts, predicted_facts
from dualkg.logs import describe_time_left
from dualkg.serve.downloads import Table, fact_row, item_row, table, triple_row
from dualkg.serve.errors import UnknownNameError
from dualkg.serve.limits import MAX_MATCHES, MAX_NAME_LENGTH
from dualkg.serve.list_filter import Filtered
from dualkg.serve.queries import EntityName, page_query, query_results
from dualkg.serve.schemas import (
    Entity,
    EntityMap,
    Item,
    LabelledFact,
    MatchedEntities,
    MatchedEntity,
    ScoredItem,
)
from dualkg.serve.service import Context, RequestContext, ServedRun
from dualkg.serve.snippets import CopiedQuery, snippets
from dualkg.serve.templating import (
    api_router,
    links,
    page,
    page_router,
    page_url,
    relation_text,
    short,
    visible,
)

routes = api_router("entities")
pages = page_router()
MAX_KNOWN = 500
MAX_EXPORTED = 1_000_000  # known facts of one entity in a file
NUM_PREDICTED = 20
NUM_SIMILAR = 10
MAP_PREDICTIONS = 200
POSITIONS_INTERVAL = 0.05  # seconds between two looks for the first positions of a map
SoFar = Literal["nothing", "positions", "all"]
MAP_COLOURS = 7  # of the script that draws the map
# The probability that is coloured fully on the map if no prediction has a higher one.
MIN_SCALE = 0.002
FIRST = "/entities/0/name"  # the JSON pointer to the first name of `MatchedEntities`
MAX_RELATION = 40  # characters of the relation of a found entity
MAX_ROWS = 22  # on one side of the wide drawing
# Known and predicted neighbours of each relation, from the most detailed drawing to the least.
DETAILS = ((8, 3), (5, 3), (4, 2), (3, 2), (2, 2), (2, 1), (1, 1))
Name = Annotated[str, Query(max_length=MAX_NAME_LENGTH)]


@routes.get("/api/entities", responses=links(entity={"name": FIRST}, similar={"entity": FIRST}))
async def entities(
    context: Context,
    q: Annotated[
        EntityName,
        Query(
            description="The beginning of a name, a part of it, or a misspelling.", examples=["a"]
        ),
    ],
    k: Annotated[int, Query(ge=1, le=MAX_MATCHES, description="Number of names.")] = 10,
) -> MatchedEntities:
    """Search entities by name while typing; case and accents are ignored."""
    run = context.run
    matched = await context.in_thread(lambda: matched_entities(run, q, limit=k))
    return MatchedEntities(run=run.name, q=q, entities=matched)


def matched_entities(run: ServedRun, q: str, *, limit: int) -> list[MatchedEntity]:
    """Entities by a part of their name, with what they are."""
    matched = []
    for match in run.name_search.search(q, limit=limit):
        item = Item.of(run.graph.entities, match.id)
        degree = int(run.roles.degrees[match.id])
        role = run.roles.of_entity(match.id)
        relation = None if role is None else run.relations[role.relation]
        end = None if role is None else role.end
        matched.append(
            MatchedEntity(
                **item.model_dump(),
                match_type=match.match_type,
                degree=degree,
                relation=relation,
                end=end,
                text=short(item.label),
                note=short(item.name) if item.name != item.label else None,
                about=about_entity(degree, relation, end),
            )
        )
    return matched


def about_entity(degree: int, relation: Item | None, end: End | None) -> str:
    """`borders → · 34 facts` for the head of a relation, `→ currency · 9 facts` for a tail."""
    facts = f"{degree:,} {'fact' if degree == 1 else 'facts'}"
    if relation is None:
        return facts
    text = relation_text(relation.label, MAX_RELATION)
    return f"{text} → · {facts}" if end == "head" else f"→ {text} · {facts}"


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
    triples = []
    verdicts = []
    for (head, relation, tail), decision in context.decided.by_triple.items():
        is_in_graph = head in graph.entities and tail in graph.entities
        is_in_graph = is_in_graph and relation in graph.relations
        if name in (head, tail) and is_in_graph:
            ids = (graph.entities.id(head), graph.relations.id(relation), graph.entities.id(tail))
            triples.append(ids)
            verdicts.append(decision.verdict)
    by_verdict: dict[str, list[LabelledFact]] = {"accepted": [], "rejected": []}
    listed = np.array(triples).reshape(-1, 3)
    remarks = await context.in_thread(lambda: context.run.remarker.of_triples(listed))
    scored = zip(triples, verdicts, await context.score(triples), remarks, strict=True)
    ordered = sorted(scored, key=lambda row: -(row[2].probability or 0.0))
    for ids, verdict, prediction, of_triple in ordered:
        if prediction.split is None:
            fact = LabelledFact.of(
                graph,
                *ids,
                verdict=verdict,
                probability=prediction.probability,
                answer_probability=prediction.answer_probability,
            )
            fact.remark(graph, of_triple)
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
    except UnknownNameError as error:
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
        "from dualkg.inference.entity_facts import known_facts, predicted_facts\n\n"
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


@routes.get(
    "/api/map", response_model=EntityMap, responses={202: {"description": "Still being computed."}}
)
@routes.get("/map.json", include_in_schema=False)
async def entity_map(
    context: Context,
    wait: Annotated[
        float | None, Query(ge=0, le=60, description="Seconds to wait for a map in the making.")
    ] = None,
    so_far: Annotated[
        SoFar, Query(description="Send the map so far, or its positions, with the status 202.")
    ] = "nothing",
) -> Response:
    """The t-SNE position of each entity; until it has been computed, the status is 202.

    It is computed once, which may take minutes, and stored. The response 202 has the share that is
    `done`, and `seconds_left`, and `so_far` the positions so far: principal components at first.
    What nobody asks for during a minute is not computed to its end.
    """
    run = context.run
    limits = context.service.limits
    work = context.service.entity_map(run)
    future = asyncio.wrap_future(work.future)
    longest = limits.map_share * limits.seconds
    seconds = longest if wait is None else min(wait, longest)
    if so_far == "all":  # the first picture
        until = asyncio.get_running_loop().time() + seconds
        while work.positions is None and asyncio.get_running_loop().time() < until:
            if (await asyncio.wait([future], timeout=POSITIONS_INTERVAL))[0]:
                break
        seconds = 0.0
    done, _ = await asyncio.wait([future], timeout=seconds)
    if not done:
        left = describe_time_left(work.seconds_left)
        progress = f" {work.done:.0%} is done{f', {left}' if left else ''}." if work.done else ""
        message = f"The map of {len(run.graph.entities):,} entities is being computed.{progress}"
        content: dict[str, Any] = {
            "run": run.name,
            "message": message,
            "done": round(work.done, 3),
            "seconds_left": work.seconds_left,
        }
        positions = None if so_far == "nothing" else work.positions
        # A response of many positions takes long to write.
        return await context.in_thread(
            lambda: _unfinished_map(run, content, positions, is_whole=so_far == "all")
        )

    x, y = future.result().round(5).T.tolist()
    body = await context.in_thread(lambda: _map(run, x, y).model_dump_json())
    return Response(body, media_type="application/json")


def _unfinished_map(
    run: ServedRun, content: dict[str, Any], positions: Vectors | None, *, is_whole: bool
) -> Response:
    """The response 202, with the positions so far or with all of the map so far."""
    if positions is not None:
        x, y = positions.round(4).T.tolist()
        so_far = _map(run, x, y).model_dump(mode="json") if is_whole else {"x": x, "y": y}
        content["so_far"] = so_far
    return JSONResponse(content, status_code=202, headers={"Retry-After": "2"})


def _map(run: ServedRun, x: list[float], y: list[float]) -> EntityMap:
    vocabulary = run.graph.entities
    names = vocabulary.names.to_pylist()
    given_labels = names if vocabulary.labels is None else vocabulary.labels.to_pylist()
    labels = []
    for label, name in zip(given_labels, names, strict=True):
        labels.append(visible(label or name))
    has_labels = labels != names
    roles, role_names = _roles(run)
    types, type_names = _types(run)
    return EntityMap(
        run=run.name,
        x=x,
        y=y,
        names=names,
        labels=labels if has_labels else None,
        degrees=run.roles.degrees.tolist(),
        roles=roles,
        role_names=role_names,
        types=types,
        type_names=type_names,
    )


def _types(run: ServedRun) -> tuple[list[int] | None, list[str] | None]:
    """A type of each entity by its number, and the types, commonest first.

    Of several types an entity has the rarest of those that the map has colours for, since the
    commonest may be that of nearly all entities.
    """
    types = run.types
    if types is None:
        return None, None
    counts = np.bincount(types.types, minlength=len(types.names))
    ordered = np.argsort(-counts, kind="stable")
    places = np.empty(len(ordered), dtype=np.int64)
    places[ordered] = np.arange(len(ordered))
    of_pairs = places[types.types]
    # The last of the pairs of an entity is kept: a rare type with a colour.
    order = np.lexsort((of_pairs, of_pairs < MAP_COLOURS))
    of_entities = np.full(run.graph.shape.num_entities, -1)
    of_entities[types.entities[order]] = of_pairs[order]
    return of_entities.tolist(), [visible(run.type_labels[number]) for number in ordered.tolist()]


def _roles(run: ServedRun) -> tuple[list[int], list[str]]:
    """The commonest role of each entity by its number, and the roles, commonest first."""
    commonest = run.roles.commonest
    numbers, counts = np.unique(commonest[commonest >= 0], return_counts=True)
    ordered = numbers[np.argsort(-counts, kind="stable")]
    places = np.full(2 * run.roles.num_relations + 1, -1)
    places[ordered] = np.arange(len(ordered))
    names = []
    for number in ordered.tolist():
        relation = relation_text(run.graph.relations.label(number % run.roles.num_relations))
        names.append(f"{relation} of" if number >= run.roles.num_relations else relation)
    return places[commonest].tolist(), names


@pages.get("/map")
async def map_page(
    context: Context, entity: Name = "", relation: Name = "", find: End = "tail"
) -> Response:
    """The frame; a script draws the map, since it moves."""
    return page(
        context,
        "map.html",
        json=page_url(context, "/map.json"),
        entity=await _chosen_entity(context, entity),
        relation=await context.relation(relation),
        find=find,
    )


async def _chosen_entity(context: RequestContext, name: str) -> Item | None:
    if not name:
        return None
    return Item.of(context.run.graph.entities, await context.id(name))


@pages.get("/map/predictions")
async def map_predictions(
    context: Context, entity: Name, relation: Name, find: End = "tail"
) -> Response:
    """The list next to the map; each row has the strength of its colour, from 0 to 1."""
    if find == "tail":
        query = await page_query(head=entity, relation=relation, find=find, k=MAP_PREDICTIONS)
    else:
        query = await page_query(relation=relation, tail=entity, find=find, k=MAP_PREDICTIONS)
    results = await query_results(context, query)
    coloured = _coloured(results.predictions)
    known = [(item, 1) for item in results.accepted + results.known]
    return page(context, "map_predictions.html", results=results, new=coloured, known=known)


def _coloured(predictions: Sequence[ScoredItem]) -> list[tuple[ScoredItem, float]]:
    """Predictions with the strength of their colour, most probable first.

    Without probabilities, the strength falls with the rank.
    """
    probabilities = [prediction.probability or 0.0 for prediction in predictions]
    highest = max([MIN_SCALE, *probabilities])
    rows = []
    for index, prediction in enumerate(predictions):
        if prediction.probability is None:
            strength = 1 / (1 + index / 5)
        else:
            strength = prediction.probability / highest
        rows.append((prediction, strength))
    rows.sort(key=lambda row: -(row[0].probability or 0.0))
    return rows
