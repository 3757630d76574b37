"""All entities in the plane."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Query, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from dualkg.analysis.sparsity import storage_of
from dualkg.errors import RequestError
from dualkg.evaluation.comparison import check_comparable, compare_ranks, largest_differences, stack_mean_ranks
from dualkg.serve.limits import LONGEST_NAME
from dualkg.serve.routes.queries import AskedRun, Served, router
from dualkg.serve.schemas import (
    Comparison,
    DifferingQuestion,
    EntityMap,
    GraphFacts,
    Health,
    MapInTheMaking,
    RunFacts,
    RunNames,
    Sparsity,
    Thing,
)
from dualkg.serve.state import ServedRun
from dualkg.training.run import RunFolder

map_routes = router("entities")
MARGIN = 0.8  # of the time that a request may take, for waiting


@map_routes.get("/api/map", response_model=EntityMap, responses={202: {"model": MapInTheMaking}})
async def entity_map(context: AskedRun) -> Response:
    """Where t-SNE puts each entity; made once, which may take minutes, and kept with the run. Until then 202."""
    service, run = context
    making = asyncio.wrap_future(service.maps.of(run))
    done, _ = await asyncio.wait([making], timeout=MARGIN * service.limits.seconds)
    if not done:
        sentence = f"The map of {len(run.entities):,} entities is being made. Ask again in a while."
        waiting = MapInTheMaking(run=run.name, sentence=sentence)
        return JSONResponse(waiting.model_dump(), status_code=202, headers={"Retry-After": "10"})
    places = making.result()
    found = await service.slowly(lambda: _shape(run, places.round(5).tolist()).model_dump_json())
    return Response(found, media_type="application/json")


def _shape(run: ServedRun, places: list[list[float]]) -> EntityMap:
    names = run.entities.names.to_pylist()
    labels = None if run.entities.labels is None else run.entities.labels.to_pylist()
    return EntityMap(
        run=run.name,
        x=[x for x, _ in places],
        y=[y for _, y in places],
        names=names,
        labels=None if labels is None else [label or name for label, name in zip(labels, names, strict=True)],
    )


operation_routes = router("operation")


@operation_routes.get("/health")
async def health() -> Health:
    """Answers where the server does; no token is asked for."""
    return Health(status="ok")


@operation_routes.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: Served) -> Response:
    """Counts and times as Prometheus reads them."""
    entities = {run.name: len(run.entities) for run in service.runs}
    return Response(service.counts.text(entities), media_type="text/plain; version=0.0.4; charset=utf-8")


routes = router("runs")
SAMPLES = 2000  # of the bootstrap: enough for a page, and quick
RunName = Annotated[str | None, Query(max_length=LONGEST_NAME)]


@routes.get("/api/runs")
async def run_names(service: Served) -> RunNames:
    """The runs that are served, by name."""
    return RunNames(runs=service.runs.names)


@routes.get("/api/run")
async def run_facts(context: AskedRun) -> RunFacts:
    """Recipe, history, report, how probabilities held, and sparsity."""
    service, run = context
    return await service.slowly(lambda: _facts(run))


@routes.get("/api/compare")
async def compare(
    service: Served,
    a: RunName = None,
    b: RunName = None,
    most: Annotated[int, Query(ge=0, le=1000, description="How many questions.")] = 20,
) -> Comparison:
    """Two runs on test: whether one is better, and the questions on which they differ most.

    Without names these are the first two.
    """
    if len(service.runs) < 2 and (a is None or b is None):
        raise RequestError("Two runs are compared, and one is served. Serve both: dualkg serve RUN RUN")
    names = service.runs.names
    sides = service.runs.get(names[0] if a is None else a), service.runs.get(names[1] if b is None else b)
    return await service.slowly(lambda: _compared(*sides, most=most))


def _facts(run: ServedRun) -> RunFacts:
    graph, kept = run.run.graph, run.run
    folder = RunFolder(kept.folder) if kept.folder else None
    reports = folder.saved_reports() if folder else {name: report.as_dict() for name, report in kept.reports.items()}
    return RunFacts(
        run=run.name,
        model=type(kept.model.embedding).__name__,
        graph=GraphFacts(name=graph.name, counts=graph.counts, notes=graph.notes.sentences()),
        relations=[Thing.of(graph.relations, id) for id in range(len(graph.relations))],
        recipe=kept.recipe.model_dump(mode="json"),
        recipe_toml=kept.recipe.as_toml(),
        history=kept.history,
        reports=reports,
        costs=kept.costs,
        calibrated=run.predictor.calibration is not None,
        reliability=run.checks.get("calibration"),
        coverage=run.checks.get("coverage"),
        sparsity=_sparsity(run),
    )


def _sparsity(run: ServedRun) -> Sparsity | None:
    try:
        storage = storage_of(run.run.model)
    except RequestError:  # a model whose vectors are no table
        return None
    facts: dict[str, Any] = storage.as_dict()
    return Sparsity(share=storage.share, storage=facts, made=run.run.sparsity)


def _compared(a: ServedRun, b: ServedRun, *, most: int) -> Comparison:
    of_a, of_b = (side.run.report_on("test").ranks for side in (a, b))
    graph = a.run.graph
    check_comparable((a.name, graph, of_a.triples), (b.name, b.run.graph, of_b.triples))
    ranks_a, ranks_b = stack_mean_ranks([of_a]), stack_mean_ranks([of_b])
    found = compare_ranks(ranks_a, ranks_b, samples=SAMPLES)
    questions = [
        DifferingQuestion.model_validate(
            {
                "head": Thing.of(graph.entities, one.head),
                "relation": Thing.of(graph.relations, one.relation),
                "tail": Thing.of(graph.entities, one.tail),
                "asked": one.direction,
                "rank_a": one.rank_a,
                "rank_b": one.rank_b,
                "difference": one.difference,
            }
        )
        for one in largest_differences(ranks_a, ranks_b, of_a.triples, most=most)
    ]
    return Comparison(
        a=a.name,
        b=b.name,
        graph=graph.name,
        split="test",
        sentence=found.sentence(a.name, b.name),
        metrics={name: difference.as_dict() for name, difference in found.differences.items()},
        better=found.better,
        worse=found.worse,
        equal=found.equal,
        num_triples=found.num_triples,
        questions=questions,
    )
