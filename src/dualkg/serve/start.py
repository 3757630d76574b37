"""The first page: what the graph is, how good the model is, and where to begin."""

from urllib.parse import urlencode

from fastapi import Response
from fastapi.responses import RedirectResponse

from dualkg.evaluation.metrics import Metrics
from dualkg.inference.calibration import load_calibration
from dualkg.serve.downloads import Table, item_row, table
from dualkg.serve.queries import GivenQuery, PageQuery, examples_of, query_page
from dualkg.serve.schemas import ExampleQuery, StartPage, Triple
from dualkg.serve.service import Context, RequestContext, ServedRun
from dualkg.serve.templating import page, page_router, page_url
from dualkg.training.run import RunFolder

pages = page_router()


@pages.get("/")
async def first_page(context: Context, query: GivenQuery) -> Response:
    """The query page; without a query, where to begin."""
    if not context.has_run:
        return RedirectResponse(_training_address(context), status_code=303)
    if len(query.missing) == 2:
        return await _start_page(context, query)
    return await query_page(context, query)


def _training_address(context: RequestContext) -> str:
    """The page of the only training, or that of all."""
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
    folder = RunFolder(run.run.folder) if run.run.folder else None
    if folder is None or not folder.has_calibration:
        return None
    checks = load_calibration(folder.path, run.graph, identity=run.run.identity).checks
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
