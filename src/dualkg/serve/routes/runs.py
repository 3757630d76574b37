"""Runs: their details, two compared, health and metrics."""

from dataclasses import replace
from typing import Annotated, Any

from fastapi import Depends, Query, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from dualkg.analysis.sparsity import storage_of
from dualkg.errors import RequestError
from dualkg.evaluation.comparison import check_comparable, compare_ranks, largest_differences, stack_mean_ranks
from dualkg.inference.calibration import load_calibration
from dualkg.serve import schemas
from dualkg.serve.limits import MAX_NAME_LENGTH
from dualkg.serve.schemas import Comparison, DifferingQuery, RunDetails, RunPage
from dualkg.serve.service import Context, ServedRun, Service, service_of
from dualkg.serve.templating import api_router
from dualkg.training.run import Run, RunFolder

routes = api_router("runs")
BOOTSTRAP_SAMPLES = 2000  # enough for a page, and fast
PAGE_QUERIES = 20  # differing queries on the page of two runs
CurrentService = Annotated[Service, Depends(service_of)]
RunName = Annotated[str | None, Query(max_length=MAX_NAME_LENGTH)]
OtherRun = Annotated[str | None, Query(alias="with", max_length=MAX_NAME_LENGTH, description="Another run.")]


@routes.get("/health")
async def health() -> dict[str, str]:
    """Answers while the server runs; needs no token."""
    return {"status": "ok"}


@routes.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: CurrentService) -> Response:
    """Counters and latencies in Prometheus' text format."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@routes.get("/api/runs")
async def run_names(service: CurrentService) -> dict[str, list[str]]:
    """The names of the served runs; the first is the default."""
    return {"runs": service.runs.names}


@routes.get("/api/run")
async def run_details(context: Context) -> RunDetails:
    """Recipe, history, reports, calibration and sparsity of a run."""
    return await context.in_thread(lambda: _details(context.run))


@routes.get("/api/compare")
async def compare(
    service: CurrentService,
    a: RunName = None,
    b: RunName = None,
    most: Annotated[int, Query(ge=0, le=1000, description="Number of queries.")] = 20,
) -> Comparison:
    """Two runs on test: whether one is better, and the queries on which they differ most.

    By default the first two runs are compared.
    """
    if len(service.runs) < 2 and (a is None or b is None):
        raise RequestError("A comparison needs two runs, and one is served. Serve both: dualkg serve RUN RUN")
    names = service.runs.names
    sides = service.runs.get(names[0] if a is None else a), service.runs.get(names[1] if b is None else b)
    return await service.in_thread(lambda: _comparison(*sides, most=most))


@routes.get("/run.json", include_in_schema=False)
async def run_page(context: Context, other: OtherRun = None) -> RunPage:
    """A run, and next to it another one if it is named; of two served runs both, unless `with=` is empty."""
    served = context.service.runs
    if other is None and len(served) == 2:
        other = next(name for name in served.names if name != context.run.name)
    if not other or other == context.run.name:
        return RunPage(runs=[await run_details(context)])
    runs = [await run_details(context), await run_details(replace(context, run=served.get(other)))]
    try:
        return RunPage(runs=runs, comparison=await compare(context.service, context.run.name, other, PAGE_QUERIES))
    except RequestError as error:  # such as two graphs
        return RunPage(runs=runs, problem=str(error))


def _details(served: ServedRun) -> RunDetails:
    run, graph = served.run, served.graph
    folder = RunFolder(run.folder) if run.folder else None
    has_checks = folder is not None and folder.calibration.exists()
    checks = load_calibration(folder.path, graph).checks if folder and has_checks else {}
    return RunDetails(
        run=served.name,
        model=served.model_name,
        engine=folder.saved_environment.get("engine") if folder else None,
        graph=schemas.GraphSummary(name=graph.name, counts=graph.counts, notes=graph.notes.sentences()),
        relations=served.relations,
        recipe=run.settings,
        recipe_toml=run.settings_text,
        history=run.history,
        reports=_reports(run, folder),
        costs=run.costs,
        calibrated=served.predictor.calibration is not None,
        reliability=checks.get("calibration"),
        coverage=checks.get("coverage"),
        sparsity=_sparsity(served),
    )


def _reports(run: Run, folder: RunFolder | None) -> dict[str, Any]:
    if folder and folder.report.exists():
        return folder.saved_reports()
    if folder and len(run.graph.test):  # of several seeds, which has no report of its own
        run.report_on("test")
    return {name: one.as_dict() for name, one in run.reports.items()}


def _sparsity(served: ServedRun) -> dict[str, Any] | None:
    try:
        storage = storage_of(served.run.model)
    except RequestError:  # a model whose vectors are not a table
        return None
    return {"share": storage.share, "storage": storage.as_dict(), "pruning": served.run.sparsity}


def _comparison(a: ServedRun, b: ServedRun, *, most: int) -> Comparison:
    report_a, report_b = (side.run.report_on("test").ranks for side in (a, b))
    graph = a.graph
    check_comparable((a.name, graph, report_a.triples), (b.name, b.graph, report_b.triples))
    ranks_a, ranks_b = stack_mean_ranks([report_a]), stack_mean_ranks([report_b])
    found = compare_ranks(ranks_a, ranks_b, samples=BOOTSTRAP_SAMPLES)
    differing = largest_differences(ranks_a, ranks_b, report_a.triples, most=most)
    return Comparison(
        a=a.name,
        b=b.name,
        graph=graph.name,
        split="test",
        sentence=found.sentence(a.name, b.name),
        metrics={name: difference.as_dict() for name, difference in found.differences.items()},
        **{name: getattr(found, name) for name in ("better", "worse", "equal", "num_triples")},
        queries=[DifferingQuery.of(graph, **vars(query)) for query in differing],
    )
